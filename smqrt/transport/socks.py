"""SOCKS5 over a connection that is there already, on python-socks."""

from __future__ import annotations

import socket
from typing import cast

from python_socks import ProxyError, ProxyType
from python_socks.sync import Proxy as SocksProxy

from smqrt.errors import StreamError
from smqrt.transport.outgoing_proxy import Proxy, received
from smqrt.transport.stream import Stream

_WORDS = {
    2: "prxnotallowed",
    3: "prxnetunreachable",
    4: "prxhostunreachable",
    5: "prxrefused",
    6: "prxttlexpired",
    7: "prxcommand",
    8: "prxaddress",
}


def connect(stream: Stream, proxy: Proxy, host: str, port: int) -> None:
    """Asks a proxy to connect to `host`; blocks the greenlet.

    Args:
        stream: connected to the proxy.

    Raises:
        StreamError: see `smqrt.transport.outgoing_proxy.open_through`.
    """
    through = SocksProxy(
        ProxyType.SOCKS5, proxy.host, proxy.port, proxy.user, proxy.password, rdns=True, forward=_Connected(stream)
    )
    try:
        through.connect(host, port)
    except ProxyError as error:
        raise _failure(error) from None
    except (UnicodeError, ValueError) as error:
        raise StreamError("prxaddress", f"{host}: {error}") from None


def _failure(error: ProxyError) -> StreamError:
    if error.error_code is not None:
        return StreamError(_WORDS.get(error.error_code, "prxgeneral"), str(error))
    word = "proxyauth" if "authentication" in str(error) else "prxnotcompatible"
    return StreamError(word, str(error))


class _Connected(SocksProxy):
    """The proxy to "go through first", which is our connection: python-socks would open one that blocks the loop."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(ProxyType.SOCKS5, "", 0)
        self._stream = stream

    def connect(self, dest_host: str, dest_port: int, timeout: float | None = None, **kwargs: object) -> socket.socket:
        return cast(socket.socket, _Socket(self._stream))


class _Socket:
    """What python-socks calls of a socket."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def sendall(self, data: bytes) -> None:
        self._stream.write(data)

    def recv(self, size_bytes: int) -> bytes:
        return received(self._stream, size_bytes)

    def close(self) -> None:
        """Left to `open_through`."""
