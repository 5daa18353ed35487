"""From the address of a broker to a connection to it: directly or through a proxy, with TLS to somebody trusted."""

from __future__ import annotations

from time import monotonic

from smqrt.client.options import Options
from smqrt.client.url import Endpoint
from smqrt.errors import StreamError
from smqrt.net.contexts import ClientTls
from smqrt.net.proxy import open_through
from smqrt.net.stream import Stream
from smqrt.net.trust import Trust

_REASONS = {
    Trust.CERTCN: "the certificate is out of date",
    Trust.CERT: "the certificate is for another name",
    Trust.CN: "nobody trusted vouches for the certificate",
    Trust.NONE: "the certificate is for another name, and nobody trusted vouches for it",
}


class Opener:
    """Makes the connections of one client.

    Args:
        endpoint: the broker.
        options: TLS, the proxy and the time it may take.

    Raises:
        ArgumentError: a file with certificates can't be read or is wrong.
    """

    def __init__(self, endpoint: Endpoint, options: Options) -> None:
        self._endpoint, self._options = endpoint, options
        files = (options.cafile, options.certfile, options.keyfile)
        self._tls = (options.tls or ClientTls.from_files(*files)) if endpoint.secure else None

    def __call__(self) -> Stream:
        """A new connection.

        Raises:
            StreamError: it could not be made.
        """
        end_s = monotonic() + self._options.timeout
        stream = self._connected()
        if self._tls is not None:
            stream.starttls(self._tls.context(), self._endpoint.host, timeout_s=end_s - monotonic())
            if self._options.verify:
                self._check_trust(stream, self._tls)
        return stream

    def _connected(self) -> Stream:
        host, port, timeout_s = self._endpoint.host, self._endpoint.port, self._options.timeout
        if self._options.proxy is None:
            return Stream.connect(host, port, timeout_s)
        return open_through(self._options.proxy, host, port, timeout_s)

    def _check_trust(self, stream: Stream, tls: ClientTls) -> None:
        assert stream.tls is not None
        trust = tls.store.judge(stream.tls.peer_chain(), self._endpoint.host)
        if trust is not Trust.TRUSTED:
            stream.close()
            raise StreamError("sslnottrusted", _REASONS[trust])
