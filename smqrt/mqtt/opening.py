"""From the address of a broker to a connection that may be trusted with credentials."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from smqrt.errors import ArgumentError, StreamError
from smqrt.mqtt.options import MqttOptions
from smqrt.mqtt.url import Address
from smqrt.net.contexts import ClientTls, Identity
from smqrt.net.stream import Stream
from smqrt.net.trust import CertStore, Trust

PORT, TLS_PORT = 1883, 8883


class Opener:
    """Makes the connections of one client.

    Args:
        address: of the broker.
        options: ports, times and TLS.

    Raises:
        ArgumentError: a file can't be read or is wrong.
    """

    def __init__(self, address: Address, options: MqttOptions) -> None:
        self._address, self._options = address, options
        secure = options.secure or address.secure or bool(options.cafile or options.certfile)
        self.tls = options.secure if isinstance(options.secure, ClientTls) else _client_tls(options) if secure else None
        self.port = options.port or address.port or (TLS_PORT if self.tls else PORT)

    def __call__(self) -> Stream:
        """A new connection.

        Raises:
            StreamError: it could not be made; with the trust status of the certificate as word when that is why.
        """
        options, host = self._options, self._address.host
        end_s = monotonic() + options.timeout
        stream = Stream.connect(host, self.port, options.timeout, options.source, options.ipv6)
        if self.tls is not None:
            stream.starttls(self.tls.context(options.alpn), host, timeout_s=max(end_s - monotonic(), 0.1))
            if not options.nocheck:
                _check_trust(stream, self.tls, host)
        return stream


def _check_trust(stream: Stream, tls: ClientTls, host: str) -> None:
    assert stream.tls is not None
    trust = tls.store.judge(stream.tls.peer_chain(), host)
    if trust is not Trust.TRUSTED:
        stream.close()
        raise StreamError(trust.value, f"the certificate of {host} is not to be trusted")


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
