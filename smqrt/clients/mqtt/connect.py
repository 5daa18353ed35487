"""The address of a broker, and connections to it that may be trusted with credentials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from smqrt.clients.mqtt.options import MqttOptions
from smqrt.clients.mqtt.sockets import judge, stream_of
from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, Trust
from smqrt.wire.url import split_url

log = logging.getLogger("smqrt.mqtt")

PORT, TLS_PORT = 1883, 8883
_SCHEMES = {"mqtt": False, "tcp": False, "mqtts": True, "ssl": True}


@dataclass(frozen=True)
class MqttAddress:
    """Where a broker is. What the address does not tell is None.

    Attributes:
        host: name or IP address.
    """

    host: str
    port: int | None = None
    secure: bool | None = None
    username: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str) -> MqttAddress:
    """The address in `mqtt://user:password@host:port`, `mqtts://host`, `host:port` or `host`.

    Raises:
        ArgumentError: it is none.
    """
    if text.count(":") > 1 and "://" not in text and not text.startswith("["):
        return MqttAddress(text)  # an IPv6 address
    scheme, _, _ = text.rpartition("://")
    try:
        parts = split_url(text if scheme else f"//{text}")
    except ValueError as error:
        raise ArgumentError(f"address {text!r} is none: {error}") from None
    if not parts.host or parts.path.strip("/") or parts.query or (scheme and parts.scheme not in _SCHEMES):
        raise ArgumentError(f"address {text!r} must be a host name, host:port, or mqtt(s)://host:port")
    return MqttAddress(parts.host, parts.port, _SCHEMES.get(parts.scheme), parts.user, parts.password)


def connector(address: object, options: MqttOptions) -> Callable[[], Stream]:
    """The function that makes the connections of one client.

    Args:
        address: what `MqttClient` takes. A user name and a password in it are put into the options, if those have none.

    Raises:
        ArgumentError: it is none of that.
    """
    if isinstance(address, Stream):
        return _OneStream(address)
    if callable(address):
        return address
    if not isinstance(address, str):
        raise ArgumentError(f"address must be a str, a Stream or a function, not {type(address).__name__}")
    where = parse_address(address)
    if options.username is None:
        options.username, options.password = where.username, where.password or options.password
    return MqttConnector(where, options)


class _OneStream:
    """The connection that the application made, once."""

    def __init__(self, stream: Stream) -> None:
        self._stream: Stream | None = stream

    def __call__(self) -> Stream:
        stream, self._stream = self._stream, None
        if stream is None:
            raise StreamError("socketclosed", "the connection that this client was given is used up")
        return stream


class MqttConnector:
    """Makes the connections of one client.

    Args:
        address: of the broker.
        options: ports, times and TLS.

    Raises:
        ArgumentError: a file can't be read or is wrong.

    Attributes:
        host: name or IP address of the broker.
        tls: None without TLS.
    """

    def __init__(self, address: MqttAddress, options: MqttOptions) -> None:
        self._options, self.host = options, address.host
        secure = options.secure or address.secure or bool(options.cafile or options.certfile)
        self.tls = options.secure if isinstance(options.secure, ClientTls) else _client_tls(options) if secure else None
        self.port = options.port or address.port or (TLS_PORT if self.tls else PORT)

    def __call__(self) -> Stream:
        """A new connection.

        Raises:
            StreamError: it could not be made; with the trust status of the certificate as word when that is why.
        """
        stream = self.open()
        if self.tls is not None and not self._options.nocheck:
            check_trust(stream, self.tls.store, self.host)
        return stream

    def open(self) -> Stream:
        """A new connection, whose certificate nobody has checked. Raises as `__call__`."""
        options, host = self._options, self.host
        end_s = monotonic() + options.timeout
        stream = Stream.connect(host, self.port, options.timeout, options.source, options.ipv6)
        if self.tls is not None:
            stream.starttls(self.tls.context(options.alpn), host, timeout_s=max(end_s - monotonic(), 0.1))
        return stream


def open_unless_untrusted(address: object, options: MqttOptions) -> Stream:
    """Make the connection of `mqtt3c.connect`, or take a ready one.

    A certificate that is not trusted is refused when there are credentials to send; without them it is a warning in
    the log (spec: smq §9).

    Args:
        address: a name, see `parse_address`, or a connected socket, see `stream_of`. Credentials in the name are put
            into the options, if those have none.

    Raises:
        ArgumentError: the address is neither, or a file of the options can't be read.
        StreamError: no connection; with the trust status of the certificate as word when that is why.
    """
    host = ""
    if isinstance(address, str):
        made = connector(address, options)
        assert isinstance(made, MqttConnector)
        host, tls, stream = made.host, made.tls, made.open()
    else:
        stream = stream_of(address)
        tls = options.secure if isinstance(options.secure, ClientTls) else _client_tls(options)
    if not options.nocheck:
        store = tls.store if tls is not None else CertStore.system()
        check_trust(stream, store, host, has_secrets=options.username is not None or options.password is not None)
    return stream


def check_trust(stream: Stream, store: CertStore, host: str = "", has_secrets: bool = True) -> None:
    """Check the certificate of a connection, if it has one.

    Args:
        store: the authorities to trust.
        host: the name to look for; by default that which the TLS handshake asked for.
        has_secrets: whether credentials will be sent; without them a warning is logged.

    Raises:
        StreamError: it is not trusted; the stream is closed. The word is the trust status.
    """
    trust = judge(stream, store, host)
    if trust is Trust.TRUSTED:
        return
    sentence = f"the certificate of {host or 'the MQTT broker'} is not to be trusted"
    if has_secrets:
        stream.close()
        raise StreamError(trust.value, sentence)
    log.warning("%s (%s); connected all the same, because no credentials are sent", sentence, trust.value)


def _client_tls(options: MqttOptions) -> ClientTls:
    tls = ClientTls()
    if options.cafile:
        tls.store = CertStore()
        tls.store.add(_file(options.cafile))
    if options.certfile:
        tls.add_identity(Identity(_file(options.certfile), _file(options.keyfile or options.certfile)))
    return tls


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"can't read {path}: {error.strerror}") from None
