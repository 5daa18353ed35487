"""The socket of an SMQ client: the broker reads and writes it, Lua may look at it, set options and close it."""

from __future__ import annotations

from typing import Any

from smqrt.broker.session import Session
from smqrt.errors import CloseReason, StreamError
from smqrt.lua.sockets.ends import End
from smqrt.net.tls import TlsTransport


class PeerEnd(End):
    """A client of a broker, or the server's own client, which has no socket."""

    __slots__ = ("_session",)

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._session = session

    @property
    def tls_layer(self) -> TlsTransport | None:
        """See `End`."""
        sock = self._sock()
        return sock if isinstance(sock, TlsTransport) else None

    def peername(self) -> tuple[str, int]:
        """Address and port of the other side. Raises StreamError."""
        return self._name("getpeername")

    def sockname(self) -> tuple[str, int]:
        """Address and port of this side. Raises StreamError."""
        return self._name("getsockname")

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set an option of the socket. Raises StreamError, OSError."""
        self._sock().setsockopt(level, option, value)

    def close(self) -> None:
        """Disconnect the client."""
        if isinstance(self._session, Session):
            self._session.hub.disconnect(self._session, CloseReason.PEER_CLOSED)

    def _name(self, method: str) -> tuple[str, int]:
        try:
            host, port = getattr(self._sock(), method)()[:2]
        except OSError:
            raise StreamError("socketclosed") from None
        return host, port

    def _sock(self) -> Any:
        sock = getattr(self._session.outbox, "sock", None) if isinstance(self._session, Session) else None
        if sock is None:
            raise StreamError("invalidsocketcon")
        return sock
