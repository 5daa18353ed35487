"""Options, broker addresses, close reasons and sockets of MQTT clients."""

from __future__ import annotations

import _socket
import _ssl
import errno
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import gevent.socket
import gevent.ssl

from smqrt.errors import ArgumentError, StreamError
from smqrt.settings.option_types import (
    InvalidValueError,
    Rule,
    choice,
    instance,
    number,
    option,
    optional,
    path,
    switch,
    text,
    whole,
)
from smqrt.transport import tls_contexts
from smqrt.transport.outgoing_proxy import Proxy
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Buffer, TlsTransport
from smqrt.transport.tls_contexts import CertStore, ClientTls, Trust
from smqrt.wire.mqtt.fields import PacketType, Props, Reason, check_topic, encode_properties, reason_words
from smqrt.wire.mqtt.packets import MAX_PACKET_BYTES, WillMessage

# ---- Options (spec: smq §8)

_MAX_TEXT_BYTES = 0xFFFF
_MAX_S = 86_400.0
_MAX_IDENTIFIER_3 = 23  # characters of a client identifier of MQTT 3.1


@dataclass(frozen=True)
class Will:
    """Message that the broker publishes when the connection is lost without DISCONNECT.

    Attributes:
        topic: without wildcards.
        payload: str is sent as UTF-8.
        properties: with MQTT 5, such as `{"willdelayinterval": 30}` (seconds).
    """

    topic: str
    payload: bytes | str = b""
    qos: int = 0
    retain: bool = False
    properties: Props | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_qos(self.qos)
        encode_properties(self.properties, PacketType.WILL)
        if len(to_bytes(self.payload)) > _MAX_TEXT_BYTES:
            raise ArgumentError(f"the payload of a will must have at most {_MAX_TEXT_BYTES} bytes")

    def message(self) -> WillMessage:
        """Return the will for CONNECT."""
        return WillMessage(self.topic, to_bytes(self.payload), self.qos, self.retain, self.properties or {})

    @classmethod
    def make(cls, value: object) -> Will:
        """Return a will from a mapping with the names of the attributes; a `Will` unchanged.

        Raises:
            InvalidValueError: another type, or an unknown name.
            ArgumentError: an invalid value.
        """
        if isinstance(value, Will):
            return value
        if not isinstance(value, Mapping):
            raise InvalidValueError
        try:
            return cls(**value)
        except TypeError:
            raise InvalidValueError from None


def _secure(value: object) -> bool | ClientTls:
    return value if isinstance(value, ClientTls) else switch().read(value)


def _alpn(value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise InvalidValueError
    return list(value)


_TEXT = optional(text())
_FILE = optional(path())
WILL = optional(Rule("a mapping with topic, and optionally payload, qos, retain, properties", Will.make))
_VERSION: Rule[int | str] = choice(5, 4, "3.1")
_SECURE = Rule("true, false or a ClientTls", _secure)
_PASSWORD = optional(instance("a string or bytes", str, bytes))
_MAX_WHOLE = 1 << 53  # the largest whole number that JSON and a Lua number represent exactly


@dataclass(kw_only=True, repr=False)  # with a password
class MqttOptions:
    """Options of a client. Times are seconds."""

    version: int | str = option(5, _VERSION, '4 is MQTT 3.1.1, `"3.1"` is MQTT 3.1')
    port: int | None = option(None, optional(whole(1, 0xFFFF)), "", shown="1883, with TLS 8883")
    secure: bool | ClientTls = option(
        False,
        _SECURE,
        "true: TLS with the system's certificate authorities; or a `smqrt.transport.tls_contexts.ClientTls`",
    )
    nocheck: bool = option(False, switch(), "with TLS, accept any certificate")
    cafile: str | None = option(None, _FILE, "PEM file with certificates to trust instead of the system's")
    certfile: str | None = option(None, _FILE, "PEM file with the certificate of the client")
    keyfile: str | None = option(None, _FILE, "PEM file with the private key of the client")
    alpn: list[str] = option(
        list, Rule("a list of strings", _alpn), "protocols to offer in TLS, the preferred one first"
    )
    timeout: float = option(
        5.0,
        number(0, _MAX_S, "seconds", above=True),
        "time limit for connecting, in seconds, and for `publish` to wait for room in the queue",
        shown="`5`",
    )
    source: str | None = option(None, _TEXT, "local address of the connection")
    proxy: Proxy | None = option(
        None,
        optional(instance("a Proxy", Proxy)),
        "a `smqrt.transport.outgoing_proxy.Proxy(host, port, socks, user, password)` to connect through",
    )
    reconnectdelay: float = option(
        1.0,
        number(0, _MAX_S, "seconds", above=True),
        "longest delay before the first reconnect, in seconds; it doubles with every failure",
    )
    reconnectmax: float = option(
        60.0, number(0, _MAX_S, "seconds", above=True), "longest delay before a reconnect, in seconds"
    )
    ipv6: bool = option(False, switch(), "use IPv6 only")
    clientidentifier: str = option(
        lambda: f"smqrt-{secrets.token_hex(8)}", text(), "the same for all connections of the client", shown="random"
    )
    keepalive: int = option(
        60,
        whole(0, 0xFFFF, "seconds"),
        "seconds; 0 disables it; see below",
    )
    username: str | None = option(None, _TEXT, "sent only to a broker with a trusted certificate")
    password: str | bytes | None = option(None, _PASSWORD, "sent only to a broker with a trusted certificate")
    will: Will | None = option(
        None,
        WILL,
        'message that the broker publishes when the connection is lost: `{"topic", "payload", "qos", '
        '"retain", "properties"}`',
    )
    cleanstart: bool | None = option(
        None, optional(switch()), "drop the session of earlier connections", shown="as below"
    )
    queuesize: int = option(
        10_000,
        whole(1, _MAX_WHOLE, "messages"),
        "maximum number of queued messages and subscriptions, with and without a connection",
    )
    queuebytes: int = option(
        16 << 20,
        whole(1, _MAX_WHOLE, "bytes"),
        "maximum size of all unsent and unacknowledged messages, in bytes",
        shown="16 MiB",
    )
    queuefull: str = option(
        "wait",
        choice("wait", "raise", "drop"),
        'behaviour of `publish` with a full queue: `"wait"` for room, and raise `QueueFullError` after `timeout`; '
        '`"raise"` it at once; `"drop"` the oldest queued message',
    )
    inflight: int | None = option(
        None,
        optional(whole(1, 0x7FFF)),
        "maximum number of unacknowledged QoS 1 and 2 messages; the broker may allow fewer",
        shown="MQTT 5: the broker's limit; 3.1.1: 20",  # brokers of 3.1.1 drop messages over their limit silently
    )
    maxpacketsize: int = option(
        1 << 20,
        whole(64, MAX_PACKET_BYTES, "bytes"),
        "maximum packet size in both directions, in bytes; sent to the broker (MQTT 5). A larger packet closes "
        "the connection",
        shown="1 MiB",
    )
    topicalias: bool = option(False, switch(), "send topic aliases to brokers that accept them (MQTT 5)")
    authenticationmethod: str | None = option(
        None, _TEXT, "method of the extended authentication of MQTT 5; needs `onauth`"
    )
    manualack: bool = option(False, switch(), "the application acknowledges messages of QoS 1 and 2 with `Message.ack`")
    store: str | None = option(
        None, _FILE, "path of a file that keeps unacknowledged messages of QoS 1 and 2 over restarts"
    )
    resubscribe: bool = option(True, switch(), "subscribe again when the broker has lost the session")

    def __post_init__(self) -> None:
        if self.password is not None and self.username is None and self.level < 5:
            raise ArgumentError("password needs a username with MQTT 3.1.1")
        if self.store is not None and self.cleanstart:
            raise ArgumentError("store and cleanstart=True exclude each other: the broker must keep the session")
        if self.authenticationmethod is not None and self.level < 5:
            raise ArgumentError("authenticationmethod needs MQTT 5")
        if self.level == 3 and not 1 <= len(self.clientidentifier) <= _MAX_IDENTIFIER_3:
            raise ArgumentError(
                f"clientidentifier must have 1 to {_MAX_IDENTIFIER_3} characters with MQTT 3.1, not "
                f"{len(self.clientidentifier)}"
            )
        if self.cleanstart is False and not self.clientidentifier:
            raise ArgumentError("cleanstart=False needs a clientidentifier")

    @property
    def level(self) -> int:
        """The protocol level of CONNECT: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1)."""
        return 3 if isinstance(self.version, str) else self.version


def check_qos(qos: object) -> int:
    """Return a quality of service.

    Raises:
        ArgumentError: not 0, 1 or 2.
    """
    if qos not in (0, 1, 2) or isinstance(qos, bool):
        raise ArgumentError(f"qos must be 0, 1 or 2, not {qos!r}")
    return int(qos)


def to_bytes(data: object) -> bytes:
    """Return a payload as bytes: str as UTF-8.

    Raises:
        ArgumentError: neither bytes nor str.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise ArgumentError(f"a payload must be bytes or str, not {type(data).__name__}")


log = logging.getLogger("smqrt.mqtt")

# ---- Close reasons and `onstatus` decisions (spec: smq §8)

MAX_DELAY_S = 86_400.0
_EMPTY: Mapping[str, object] = MappingProxyType({})
# Results of `run` for protocol errors (spec: smq §9).
_RUN_WORDS: dict[object, str] = {
    Reason.PACKET_TOO_LARGE: "overflow",
    Reason.PROTOCOL_ERROR: "unknowncp",
    Reason.MALFORMED_PACKET: "invalidresp",
}
RETRY_REASONS = {
    3,  # MQTT 3.1.1: server unavailable
    Reason.SERVER_UNAVAILABLE,
    Reason.SERVER_BUSY,
    Reason.SERVER_SHUTTING_DOWN,
    Reason.KEEP_ALIVE_TIMEOUT,
    Reason.MESSAGE_RATE_TOO_HIGH,
    Reason.QUOTA_EXCEEDED,
    Reason.CONNECTION_RATE_EXCEEDED,
    Reason.UNSPECIFIED_ERROR,
    Reason.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.SESSION_TAKEN_OVER,
    Reason.ADMINISTRATIVE_ACTION,
    Reason.MAXIMUM_CONNECT_TIME,
}
"""Reason codes of CONNACK and DISCONNECT after which another attempt may succeed."""

OnStatus = Callable[[str, str, Mapping[str, object]], object]
"""`f(type, code, status)`, called when a connection was accepted, was refused, or ended; see `MqttCloseReason`.

For `("mqtt", "connect", {"sessionpresent", "reasoncode": 0, "properties"})` a true value keeps the connection.
Otherwise None or False stops the client, True reconnects after the delay of the client (`reconnectdelay`), and a number
after that many seconds. After an exception or another value, which is logged, the client continues as without
`onstatus`. NotImplemented has the same effect without a log line."""


@dataclass(frozen=True)
class MqttCloseReason:
    """Close reason of a connection or of a connection attempt.

    Attributes:
        type: "mqtt" or "sock".
        code: with "mqtt": "connect" (refused), "disconnect", "protocolerror", "pingtimeout"; with "sock": an error word
            (spec: bas-api §15) or the trust status of a certificate: "cn", "cert", "certcn", "none".
        status: with "connect" `{"sessionpresent", "reasoncode", "properties"}`, with "disconnect" the latter two.
        detail: one sentence for the log.
    """

    type: str
    code: str
    status: Mapping[str, object] = field(default_factory=lambda: _EMPTY)
    detail: str = ""

    @property
    def can_reconnect(self) -> bool:
        """Whether another attempt may succeed; clients without `onstatus` reconnect accordingly."""
        if self.type == "sock":
            return self.code not in ("cn", "cert", "certcn", "none", "sysshutdown")
        if self.code in ("connect", "disconnect"):
            return self.status["reasoncode"] in RETRY_REASONS
        return True

    def __str__(self) -> str:
        return self.detail or f"{self.type}: {self.code}"


def refused(code: int, version: int, status: Mapping[str, object]) -> MqttCloseReason:
    """Return the close reason for a CONNACK with a failure."""
    return MqttCloseReason(
        "mqtt", "connect", status, f"the broker refused the connection: {reason_words(code, version)}"
    )


def disconnected(code: int, properties: Mapping[str, object]) -> MqttCloseReason:
    """Return the close reason for a DISCONNECT of the broker."""
    status = {"reasoncode": code, "properties": dict(properties)}
    words = "normal disconnection" if code == 0 else reason_words(code, 5)
    return MqttCloseReason("mqtt", "disconnect", status, f"the broker closed the connection: {words}")


def protocol_error(code: int, error: Exception) -> MqttCloseReason:
    """Return the close reason for a protocol error of the broker, or an unanswered ping."""
    if code == Reason.KEEP_ALIVE_TIMEOUT:
        return MqttCloseReason("mqtt", "pingtimeout", detail=str(error))
    return MqttCloseReason("mqtt", "protocolerror", {"reasoncode": int(code)}, f"protocol error of the broker: {error}")


def connect_error(end: MqttCloseReason | None) -> tuple[str | int, str | bool]:
    """Return the error of `mqtt3c.connect`, and its kind (spec: smq §9).

    Returns:
        A CONNACK number and True, "invalidresp" and "mqtt", or a socket or trust word and "sock".
    """
    if end is None:
        return "socketclosed", "sock"
    if end.code == "connect":
        return cast(int, end.status["reasoncode"]), True
    return ("invalidresp", "mqtt") if end.type == "mqtt" else (end.code, "sock")


def run_word(end: MqttCloseReason | None) -> str:
    """Return the result of `run` (spec: smq §9): "disconnect" when this side closed the connection."""
    if end is None:
        return "disconnect"
    if end.code == "pingtimeout":
        return "pingresp"
    if end.code == "protocolerror":
        return _RUN_WORDS.get(end.status.get("reasoncode"), "invalidresp")
    return end.code


def delay_of(returned: object, default_s: float | None, next_s: float) -> float | None:
    """Return the seconds until the next attempt for a return value of `onstatus`, None for no attempt.

    Args:
        returned: the return value.
        default_s: the seconds without `onstatus`, None for no attempt.
        next_s: the seconds for True.
    """
    if returned is None or returned is False:
        return None
    if returned is True:
        return next_s
    if returned is NotImplemented:
        return default_s
    if isinstance(returned, int | float) and 0 <= returned <= MAX_DELAY_S:
        return float(returned)
    log.error(
        "onstatus returned %r; it must return None or False, True, or seconds from 0 to %.0f", returned, MAX_DELAY_S
    )
    return default_s


# ---- Sockets of applications
#
# An application may pass a connection: a socket of the standard library or of gevent, with or without TLS, or a
# `Stream`. A plain socket is detached, so that `close()` or garbage collection in the application does not close the
# connection. A TLS socket has the state of OpenSSL, so the client uses it itself, in non-blocking mode.

_SOCKET_KINDS = "a connected socket.socket, ssl.SSLSocket, gevent socket or Stream"
ADDRESS_KINDS = f"a host name or URL, a list of them, or {_SOCKET_KINDS}"


def is_socket(value: object) -> bool:
    """Return whether a value is a socket that `stream_of` accepts, open or closed."""
    return isinstance(value, Stream | _socket.socket | gevent.socket.socket)


def stream_of(sock: object) -> Stream:
    """Return a stream that takes over a connected socket.

    Raises:
        ArgumentError: not a socket.
        StreamError: "socketclosed" when it is closed or not connected, "invalidsocketcon" for a datagram socket.
    """
    if isinstance(sock, Stream):
        sock.peername()  # raises StreamError when it is closed
        return sock
    if not isinstance(sock, _socket.socket | gevent.socket.socket):
        raise ArgumentError(f"a connection must be {_SOCKET_KINDS}, not {type(sock).__name__}")
    try:
        sock.getpeername()
        kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError as error:
        raise StreamError("socketclosed", f"the socket is not connected: {error.strerror}") from None
    if kind != socket.SOCK_STREAM:
        raise StreamError("invalidsocketcon", "MQTT needs a stream socket")
    if isinstance(sock, ssl.SSLSocket | gevent.ssl.SSLSocket):
        return Stream(SslSocketTransport(sock))  # type: ignore[arg-type]  # it has the methods that a stream calls
    transport = _socket.socket(fileno=sock.detach())
    transport.setblocking(False)
    return Stream(transport)


class SslSocketTransport:
    """Transport of a stream over a TLS socket of the application.

    Args:
        sock: connected, after its handshake.
    """

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        sock.setblocking(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def recv_into(self, buffer: memoryview, size_bytes: int) -> int:
        """Receive; return the size, 0 at the end of the stream. Raises BlockingIOError without data."""
        return self._without_waiting(self.sock.recv_into, buffer, size_bytes)

    def send(self, data: Buffer) -> int:
        """Send what fits and return its size. Raises BlockingIOError when nothing fits."""
        return self._without_waiting(self.sock.send, data)

    def _without_waiting(self, call: Callable[..., int], *arguments: object) -> int:
        try:
            return call(*arguments)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ValueError as error:  # the application has closed or unwrapped the socket
            raise OSError(errno.EBADF, str(error)) from None

    def peer_chain(self) -> list[bytes]:
        """Return the certificates of the peer in DER form, its own first."""
        chain = self.sock._sslobj.get_unverified_chain()  # public from Python 3.13 on
        return [certificate.public_bytes(_ssl.ENCODING_DER) for certificate in chain or ()]


def judge(stream: Stream, store: CertStore, host: str = "") -> Trust:
    """Return the trust status of the certificate of a stream's peer; TRUSTED for a stream without TLS.

    Args:
        store: the authorities to trust. They are not used when the TLS context of the application has verified the
            chain (`ssl.CERT_REQUIRED`).
        host: the required name in the certificate; by default the server name of the TLS handshake.
    """
    transport: Any = stream.transport
    if isinstance(transport, TlsTransport):
        tls: Any = transport.ssl_object
    elif isinstance(transport, SslSocketTransport):
        tls = transport.sock
    else:
        return Trust.TRUSTED
    chain, context = transport.peer_chain(), tls.context
    host = host or tls.server_hostname or ""
    if context.verify_mode != ssl.CERT_REQUIRED:
        return store.judge(chain, host)
    is_named = context.check_hostname or bool(host and chain and tls_contexts.matches(chain[0], host))
    return Trust.TRUSTED if is_named else Trust.CERT
