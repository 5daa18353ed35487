"""The socket of an SMQ client: the broker reads and writes it, Lua may look at it, set options and close it."""

from __future__ import annotations

from typing import Any

from smqrt.errors import StreamError
from smqrt.hub.peer import PeerSocket
from smqrt.lua.sockets.ends import End
from smqrt.net.tls import TlsTransport


class PeerEnd(End):
    """A client of a broker, or the server's own client, which has no socket."""

    __slots__ = ("_socket",)

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._socket = PeerSocket(session)

    @property
    def tls_layer(self) -> TlsTransport | None:
        """See `End`."""
        return self._known().tls

    def peername(self) -> tuple[str, int]:
        """Address and port of the other side. Raises StreamError."""
        return _found(self._known().peername())

    def sockname(self) -> tuple[str, int]:
        """Address and port of this side. Raises StreamError."""
        return _found(self._known().sockname())

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket. Raises StreamError, OSError."""
        self._known().setsockopt(level, option, value)

    def close(self) -> None:
        """Disconnect the client."""
        self._socket.close()

    def _known(self) -> PeerSocket:
        if self._socket.transport is None:
            raise StreamError("invalidsocketcon")
        return self._socket


def _found(name: tuple[str, int] | None) -> tuple[str, int]:
    if name is None:
        raise StreamError("socketclosed")
    return name
