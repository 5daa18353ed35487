"""Addresses of MQTT brokers, and the connections to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from smqrt.clients.mqtt.connect import MqttOptions, judge, stream_of
from smqrt.errors import ArgumentError, StreamError
from smqrt.smq.hub_registry import hub_registry
from smqrt.transport.outgoing_proxy import open_through
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import CertStore, ClientTls, Identity, Trust
from smqrt.transport.websocket import upgrade
from smqrt.wire.url import Url, parse_url, split_url, without_password

log = logging.getLogger("smqrt.mqtt")

PORT, TLS_PORT = 1883, 8883
WEBSOCKET_PATH = "/mqtt"
"""Path of a WebSocket address without one."""
MAX_ADDRESSES = 16
"""Maximum number of addresses of one client, and of a Server Reference."""
_SCHEMES = {"mqtt": False, "tcp": False, "ws": False, "mqtts": True, "ssl": True, "wss": True}
_OLD_PROCESS_S = 60.0  # how long a client waits for the end of the old process before it takes over the session
_WEBSOCKET_PORTS = {False: 80, True: 443}
_FORMS = "a host name, host:port, mqtt(s)://host:port or ws(s)://host:port/path"


@dataclass(frozen=True)
class MqttAddress:
    """Address of a broker. Missing parts are None.

    Attributes:
        host: name or IP address.
        target: path and query of a WebSocket; None for MQTT over TCP or TLS.
    """

    host: str
    port: int | None = None
    secure: bool | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    target: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str) -> MqttAddress:
    """Parse `mqtt://user:password@host:port`, `mqtts://host`, `ws(s)://host/path`, `host:port` or `host`.

    Raises:
        ArgumentError: an invalid address. The message does not contain the password.
    """
    if text.count(":") > 1 and "://" not in text and "@" not in text and not text.startswith("["):
        return MqttAddress(text)  # an IPv6 address without brackets
    scheme, _, _ = text.rpartition("://")
    try:
        parts = split_url(text if scheme else f"//{text}")
        is_websocket = parts.scheme in ("ws", "wss")
        target = None
        if is_websocket:
            target = parse_url(text).target if parts.path or parts.query else WEBSOCKET_PATH
        is_valid = is_websocket or not (parts.path.strip("/") or parts.query)
    except ValueError:  # its text may contain a part of the password
        is_valid = False
    if not is_valid or not parts.host or (scheme and parts.scheme not in _SCHEMES):
        raise ArgumentError(
            f"address {without_password(text)!r} is not valid: it must be {_FORMS}; user and password before the host "
            "need percent-encoding"
        )
    return MqttAddress(parts.host, parts.port, _SCHEMES.get(parts.scheme), parts.user, parts.password, target)


def parse_addresses(value: object) -> list[MqttAddress]:
    """Parse an address, or a list of addresses.

    Raises:
        ArgumentError: an invalid address, more than `MAX_ADDRESSES`, or several users.
    """
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not 1 <= len(texts) <= MAX_ADDRESSES or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"address must be a str, or a list of 1 to {MAX_ADDRESSES} of them")
    found = [parse_address(text) for text in texts]
    if len({(one.username, one.password) for one in found if one.username is not None}) > 1:
        raise ArgumentError("the addresses of one client must have the same user and password")
    return found


def connector(address: object, options: MqttOptions) -> Callable[[], Stream]:
    """Return the function that opens the connections of one client.

    Args:
        address: see `MqttClient`. Its user name and password are copied to the options, if those have none.

    Raises:
        ArgumentError: an invalid address.
    """
    if isinstance(address, Stream):
        return _OneStream(address)
    if callable(address):
        return address
    if not isinstance(address, str | list | tuple):
        raise ArgumentError(
            f"address must be a str, a list of them, a Stream or a function, not {type(address).__name__}"
        )
    parsed = parse_addresses(address)
    named = next((one for one in parsed if one.username is not None), None)
    if options.username is None and named is not None:
        options.username, options.password = named.username, named.password or options.password
    return MqttConnector(parsed, options)


class _OneStream:
    """Connect function that returns a connection of the application once; it then fails."""

    def __init__(self, stream: Stream) -> None:
        self._stream: Stream | None = stream

    def __call__(self) -> Stream:
        stream, self._stream = self._stream, None
        if stream is None:
            raise StreamError("socketclosed", "the connection of the application was already used")
        return stream


class MqttConnector:
    """Opens the connections of one client: to the last used address, or else to the next one that accepts.

    Args:
        addresses: addresses of brokers, at least one.
        options: port, time limit, TLS and proxy.

    Raises:
        ArgumentError: a file can't be read or is invalid.
    """

    def __init__(self, addresses: Sequence[MqttAddress], options: MqttOptions) -> None:
        self._options = options
        self._addresses = [replace(one, port=options.port or one.port) for one in addresses]
        self._next = 0
        self._referred: list[MqttAddress] = []  # by the broker; tried before the own addresses
        self._current = self._addresses[0]
        self._tls: ClientTls | None = None
        if any(map(self._is_secure, addresses)):
            self._tls = options.secure if isinstance(options.secure, ClientTls) else client_tls(options)

    def _is_secure(self, address: MqttAddress) -> bool:
        options = self._options
        return bool(options.secure or address.secure or options.cafile or options.certfile)

    def __call__(self, has_secrets: bool = True) -> Stream:
        """Return a new connection to the first address that accepts one.

        Args:
            has_secrets: whether the client will send credentials; without, an untrusted certificate is only logged.

        Raises:
            StreamError: no address accepts, with the error of the last one. The word is the trust status when a
                certificate is not trusted.
        """
        if self._options.cleanstart is False:  # after a hot restart, the old process has this session until it ends
            hub_registry.old_process_ended.wait(_OLD_PROCESS_S)
        own = [*self._addresses[self._next :], *self._addresses[: self._next]]
        failure = StreamError("cannotconnect")
        for address in [*self._referred, *own]:
            try:
                stream = self._open(address, has_secrets)
            except StreamError as error:
                failure = error
                log.debug("no connection to the MQTT broker %s: %s", address, error)
                continue
            self._current = address
            if address in self._addresses:
                self._next = self._addresses.index(address)
            return stream
        raise failure

    def _open(self, address: MqttAddress, has_secrets: bool) -> Stream:
        """Open a connection: proxy, TLS, its certificate, and the WebSocket."""
        options, host, is_secure = self._options, address.host, self._is_secure(address)
        usual = (TLS_PORT if is_secure else PORT) if address.target is None else _WEBSOCKET_PORTS[is_secure]
        port = address.port or usual
        end_s = monotonic() + options.timeout
        if options.proxy is None:
            stream = Stream.connect(host, port, options.timeout, options.source, options.ipv6)
        else:
            stream = open_through(options.proxy, host, port, options.timeout, options.source, options.ipv6)
        if is_secure and self._tls is not None:
            stream.starttls(self._tls.context(options.alpn), host, timeout_s=max(end_s - monotonic(), 0.1))
            if not options.nocheck:
                check_trust(stream, self._tls.store, host, has_secrets)
        if address.target is None:
            return stream
        url = Url("wss" if is_secure else "ws", host, port, address.target)
        return upgrade(stream, url, "mqttv3.1" if options.level == 3 else "mqtt", max(end_s - monotonic(), 0.1))

    def advance(self) -> None:
        """Begin with the next address, after a connection that the broker did not accept."""
        self._referred.clear()
        self._next = (self._next + 1) % len(self._addresses)

    def refer(self, reference: str, is_permanent: bool) -> bool:
        """Use the servers of a Server Reference (MQTT 5 §4.13) for the next connection.

        They are used with the scheme, the path, the TLS settings and the credentials of the current server, so a
        reference cannot turn TLS off.

        Args:
            reference: `host` or `host:port`, several with spaces between them.
            is_permanent: use them instead of the address of the current server, also later.

        Returns:
            Whether the reference is valid.
        """
        found: list[MqttAddress] = []
        for text in reference.split()[:MAX_ADDRESSES]:
            try:
                parsed = parse_address(text)
            except ArgumentError:
                return False
            if parsed.secure is not None or parsed.username is not None:  # a URL
                return False
            found.append(replace(self._current, host=parsed.host, port=parsed.port or self._current.port))
        if not found:
            return False
        if is_permanent and self._current in self._addresses:
            at = self._addresses.index(self._current)
            self._addresses[at : at + 1] = found
            del self._addresses[MAX_ADDRESSES:]
            self._next = min(at, len(self._addresses) - 1)
            self._referred.clear()
        else:
            self._referred = found
        return True


def open_unless_untrusted(address: object, options: MqttOptions) -> Stream:
    """Open the connection of `mqtt3c.connect`, or use a connection of the application.

    With credentials, the certificate must be trusted; without them, an untrusted certificate is only logged (spec: smq
    §9).

    Args:
        address: a name or a list, see `parse_addresses`, or a connected socket, see `stream_of`. Credentials in the
            name are copied to the options, if those have none.

    Raises:
        ArgumentError: an invalid address, or a file of the options can't be read.
        StreamError: no connection; the word is the trust status when the certificate is not trusted.
    """
    if isinstance(address, str | list | tuple):
        made = connector(address, options)
        assert isinstance(made, MqttConnector)
        return made(options.username is not None or options.password is not None)
    stream = stream_of(address)
    tls = options.secure if isinstance(options.secure, ClientTls) else client_tls(options)
    if not options.nocheck:
        check_trust(stream, tls.store, has_secrets=options.username is not None or options.password is not None)
    return stream


def check_trust(stream: Stream, store: CertStore, host: str = "", has_secrets: bool = True) -> None:
    """Verify the certificate of a TLS connection.

    Args:
        store: the authorities to trust.
        host: the required name in the certificate; by default the server name of the TLS handshake.
        has_secrets: whether credentials will be sent; otherwise an untrusted certificate is only logged.

    Raises:
        StreamError: the certificate is not trusted; the stream is closed. The word is the trust status.
    """
    trust = judge(stream, store, host)
    if trust is Trust.TRUSTED:
        return
    sentence = f"the certificate of {host or 'the MQTT broker'} is not trusted"
    if has_secrets:
        stream.close()
        hint = "; name the file with the authority's certificate in cafile (--cafile)"
        raise StreamError(trust.value, sentence + (hint if trust in (Trust.CN, Trust.NONE) else ""))
    log.warning("%s (%s); connected anyway, because no credentials are sent", sentence, trust.value)


def client_tls(options: MqttOptions) -> ClientTls:
    """Return the TLS client of the files in the options. Raises ArgumentError."""
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
