"""One connection of an SMQ client, and the client's options.

The greenlet of the client reads, a second one writes. The client pings a broker that has sent nothing for `ping`
seconds, and closes the connection when no response arrives within `pong` seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event as Signal

from smqrt.clients.smq.protocol import ClientProtocol, ConnectionEnd, Ended, Event, check_header, from_stream_error
from smqrt.clients.smq.session import Handler
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.scheduling import Turn
from smqrt.settings.option_types import (
    InvalidValueError,
    Rule,
    choice,
    function,
    instance,
    number,
    option,
    optional,
    path,
    switch,
    whole,
)
from smqrt.transport.outgoing_proxy import Proxy, open_through
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import smq
from smqrt.wire.smq import MIN_UID_BYTES
from smqrt.wire.url import Url, parse_url, without_password

# ---- Options of clients and subscriptions

log = logging.getLogger("smqrt.client")

Callback = Callable[..., object] | None
_MAX_UID_BYTES = 255
_FILE = optional(path())
_FUNCTION = optional(function())
_SECONDS = number(0, unit="seconds", above=True)
_DECODERS: dict[str, Callable[[bytes], object]] = {"json": json.loads, "text": bytes.decode}


def _uid(value: object) -> str | bytes:
    if not isinstance(value, str | bytes) or not MIN_UID_BYTES <= len(to_bytes(value)) <= _MAX_UID_BYTES:
        raise InvalidValueError
    return value


def _headers(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidValueError
    for name, text in value.items():
        check_header(name, text)
    return dict(value)


@dataclass(kw_only=True)
class SmqClientOptions:
    """Options of a client (spec: smq §7). Times are seconds."""

    uid: str | bytes = option(
        lambda: secrets.token_hex(8),
        Rule(f"{MIN_UID_BYTES} to {_MAX_UID_BYTES} bytes", _uid),
        "id of this client, at least 6 bytes; the same uid takes over the older connection and, in the same "
        "[worker](workers.md) or node, its ETID",
        shown="random, the same for all connections",
    )
    info: str | bytes | None = option(
        None,
        optional(instance("a string or bytes", str, bytes)),
        "text for the broker's application",
        shown="the local address",
    )
    onauth: Callback = option(None, _FUNCTION, "`f(rnd, ip)` → credentials, str or bytes", shown="none")
    onconnect: Callback = option(None, _FUNCTION, "`f(etid, rnd, ip)` after the first connection", shown="none")
    onreconnect: Callback = option(
        None, _FUNCTION, "`f(etid, rnd, ip)` after later connections", shown="none; with `cleanstart`, `onconnect`"
    )
    onclose: Callback = option(
        None, _FUNCTION, "`f(err, canreconnect)` → None (as `reconnect` says), False, True or seconds", shown="none"
    )
    onmsg: Callback = option(
        None, _FUNCTION, "`f(data, ptid, tid, subtid)` for messages without a handler", shown="none"
    )
    timeout: float = option(5.0, _SECONDS, "time limit for connecting, including the handshake", shown="5 s")
    ping: float = option(120.0, _SECONDS, "time without a packet after which the broker is pinged", shown="120 s")
    pong: float = option(10.0, _SECONDS, "time limit of the response; otherwise the connection is closed", shown="10 s")
    reconnect: bool = option(True, switch(), "whether to connect again after a lost connection or a failed attempt")
    reconnect_delay: float = option(
        5.0,
        _SECONDS,
        "delay before a reconnect; it doubles with every failure, less a random part of up to a half",
        shown="5 s",
    )
    reconnect_delay_max: float = option(60.0, _SECONDS, "longest delay before a reconnect", shown="60 s")
    cleanstart: bool = option(
        False, switch(), "drop subscriptions, names and queued messages when the connection is lost"
    )
    headers: Mapping[str, str] = option(
        dict, Rule("a mapping of strings", _headers), "additional fields of the HTTP request", shown="none"
    )
    queue_bytes: int = option(
        1 << 20, whole(1), "size of the send queue; messages that do not fit are dropped and counted", shown="1 MiB"
    )
    cafile: str | None = option(
        None,
        _FILE,
        "with https and wss, PEM file with certificates to trust",
        shown="the system's certificate authorities",
    )
    certfile: str | None = option(None, _FILE, "PEM file with the certificate of the client")
    keyfile: str | None = option(None, _FILE, "PEM file with the private key of the client")
    verify: bool = option(True, switch(), "False accepts any certificate")
    tls: ClientTls | None = option(
        None,
        optional(instance("a ClientTls", ClientTls)),
        "a `smqrt.transport.tls_contexts.ClientTls` instead of the files",
        shown="none",
    )
    proxy: Proxy | None = option(
        None,
        optional(instance("a Proxy", Proxy)),
        "a `smqrt.transport.outgoing_proxy.Proxy(host, port, socks, user, password)` to connect through",
        shown="none",
    )


def to_bytes(text: str | bytes) -> bytes:
    """Return bytes unchanged, and str as UTF-8."""
    return text.encode() if isinstance(text, str) else bytes(text)


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """Options of one subscription; see `SmqClient.subscribe`."""

    onmsg: Callback = option(None, _FUNCTION, "`f(data, ptid, tid, subtid)` for messages")
    onack: Callback = option(None, _FUNCTION, "called with the broker's response")
    datatype: str | None = option(None, optional(choice(*_DECODERS)), "how messages are decoded; None for bytes")


def message_handler(settings: SubscriptionOptions, general: Handler) -> Handler | None:
    """Return the handler of a subscription, None for `general`, which also receives undecodable messages."""
    onmsg = settings.onmsg
    if onmsg is None or settings.datatype is None:
        return onmsg
    decode = _DECODERS[settings.datatype]

    def handle(data: bytes, ptid: int, tid: int, subtid: int) -> None:
        try:
            value = decode(data)
        except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deep
            log.warning("a message for topic %d is not %s: %s", tid, settings.datatype, error)
            general(data, ptid, tid, subtid)
        else:
            onmsg(value, ptid, tid, subtid)

    return handle


_TRUST_FAULTS = {
    Trust.CERTCN: "the certificate is not valid at this time",
    Trust.CERT: "the certificate is for another name",
    Trust.CN: "no trusted authority has signed the certificate",
    Trust.NONE: "the certificate is for another name, and no trusted authority has signed it",
}
_READ_BYTES = 16384  # up to 5,000 packets, which are processed without a pause
_DISCONNECT_S = 2.0  # the broker closes the connection within this time after Disconnect


def broker_url(text: str) -> Url:
    """Parse the URL of a broker: `http(s)://` for raw SMQ after an HTTP request, `ws(s)://` for WebSocket.

    Raises:
        ArgumentError: an invalid URL.
    """
    try:
        return parse_url(text)
    except ValueError as error:
        raise ArgumentError(f"url {without_password(text)!r} is not valid: {error}") from None


class SmqConnector:
    """Opens the TCP and TLS connections of one client.

    Args:
        url: the broker.
        options: TLS, the proxy and the time limit.

    Raises:
        ArgumentError: a file with certificates can't be read or is not valid.
    """

    def __init__(self, url: Url, options: SmqClientOptions) -> None:
        self._url, self._options = url, options
        files = (options.cafile, options.certfile, options.keyfile)
        self._tls = (options.tls or ClientTls.from_files(*files)) if url.secure else None

    def __call__(self) -> Stream:
        """Return a new connection.

        Raises:
            StreamError: the connection failed, or the certificate is not trusted.
        """
        host, port, timeout_s = self._url.host, self._url.port, self._options.timeout
        end_s = monotonic() + timeout_s
        if self._options.proxy is None:
            stream = Stream.connect(host, port, timeout_s)
        else:
            stream = open_through(self._options.proxy, host, port, timeout_s)
        if self._tls is None:
            return stream
        stream.starttls(self._tls.context(), host, timeout_s=end_s - monotonic())
        if self._options.verify:  # here and not in the TLS context, for a close reason that names the fault
            assert stream.tls is not None
            trust = self._tls.store.judge(stream.tls.peer_chain(), host)
            if trust is not Trust.TRUSTED:
                stream.close()
                raise StreamError("sslnottrusted", _TRUST_FAULTS[trust])
        return stream


class ClientConnection:
    """A connection to a broker.

    Args:
        url: the broker; None when `connect` returns a connection that needs no HTTP request.
        options: the time limits.
        connect: opens the connection; may raise StreamError.

    Attributes:
        accepted: whether the broker has accepted the connection; set by the client.
        protocol: the protocol state.
    """

    def __init__(self, url: Url | None, options: SmqClientOptions, connect: Callable[[], Stream]) -> None:
        self._name = str(url or "the connection of the application")
        self._options = options
        self._connect = connect
        self._stream: Stream | None = None
        self._wake = Signal()
        self._wake.set()
        self._closed = False
        self._write_failed: StreamError | None = None
        self._abort_timer: gevent.Greenlet[..., Any] | None = None
        self._accepted_by_s = monotonic() + options.timeout
        self.accepted = False
        self.protocol = ClientProtocol(url, options.headers.items(), self._wake.set)

    # ---- open

    def connect(self) -> None:
        """Open the TCP (and TLS) connection.

        Raises:
            ConnectionEnd: the connection failed.
        """
        with self._as_connection_end():
            stream = self._connect()
        if not isinstance(stream, Stream):
            raise ConnectionEnd("failed", f"the connect function returned {type(stream).__name__}, not a Stream")
        self._stream = stream
        if self._closed:  # `abort` was called meanwhile
            stream.close()

    @property
    def local_address(self) -> str:
        """The local IP address."""
        with self._as_connection_end():
            return self._open_stream().sockname()[0]

    # ---- run

    def run(self, handle: Callable[[Event], None], wait_for_room: Callable[[], None]) -> ConnectionEnd:
        """Read until the connection ends and pass each event to `handle`, while a second greenlet writes.

        Args:
            wait_for_room: blocks while too many callbacks are queued.

        Returns:
            The close reason.
        """
        writer, turn = gevent.spawn(self._write), Turn()
        try:
            while True:
                data = self._receive()
                turn.yield_if_due()  # a fast broker may keep `_receive` from ever waiting; other greenlets must run
                for event in self.protocol.receive(data):
                    if isinstance(event, Ended):
                        return event.end
                    handle(event)
                wait_for_room()
        except ConnectionEnd as end:
            return end
        finally:
            writer.kill()
            with contextlib.suppress(StreamError):  # the last event may have queued the response to a WebSocket close
                if not self._closed and (data := self.protocol.take()):
                    self._open_stream().try_write(data)
            self.abort()
            if self._abort_timer is not None:
                self._abort_timer.kill()

    def _receive(self) -> bytes:
        """Return the next data; ping a silent broker. Raises ConnectionEnd."""
        is_pinged = False
        while True:
            if self.accepted:
                timeout_s = self._options.pong if is_pinged else self._options.ping
            else:
                timeout_s = max(0.001, self._accepted_by_s - monotonic())
            try:
                with self._as_connection_end():
                    data = self._open_stream().read(_READ_BYTES, timeout_s)
            except ConnectionEnd as end:
                if end.word != "timeout" or not self.accepted:
                    raise
                if is_pinged:
                    text = f"{self._name}: no answer to a ping within {self._options.pong:g} s"
                    raise ConnectionEnd("pong", text) from None
                self.protocol.ping()
                is_pinged = True
                continue
            if not data or self._closed:
                raise self._closed_end()
            return data

    # ---- write

    def _write(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                while data := self.protocol.take():
                    self._open_stream().write(data)
        except StreamError as error:
            self._write_failed = error
            self.abort()

    # ---- close

    def abort_after(self, seconds: float) -> None:
        """Close the connection after `seconds` at the latest."""
        if self._abort_timer is not None:
            self._abort_timer.kill(block=False)
        self._abort_timer = gevent.spawn_later(seconds, self.abort)

    def disconnect(self, text: bytes) -> None:
        """Send Disconnect after everything queued, and let the broker close the connection."""
        self.protocol.send_packet(smq.disconnect(text))
        self.abort_after(_DISCONNECT_S)

    def abort(self) -> None:
        """Close the connection, or cancel the connection attempt, at once."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise StreamError("socketclosed")
        return self._stream

    def _closed_end(self) -> ConnectionEnd:
        if self._write_failed is not None:
            return ConnectionEnd("socketwritefailed", f"{self._name}: sending failed: {self._write_failed}")
        return ConnectionEnd("socketclosed", f"{self._name}: the connection was closed")

    @contextlib.contextmanager
    def _as_connection_end(self) -> Iterator[None]:
        """Raise a StreamError as a ConnectionEnd."""
        try:
            yield
        except StreamError as error:
            raise self._closed_end() if self._closed else from_stream_error(error, self._name) from None
