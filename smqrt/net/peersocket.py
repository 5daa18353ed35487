"""The socket of an SMQ client as applications see it, the same over every transport."""

from __future__ import annotations

from typing import Any

from smqrt.broker.session import Session
from smqrt.errors import CloseReason
from smqrt.net import certificates
from smqrt.net.tls import TlsTransport


class PeerSocket:
    """What an application may know of a client's socket, and do with it. The broker reads and writes it.

    That of the server's own client answers None everywhere.
    """

    __slots__ = ("_session",)

    def __init__(self, session: Any) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<PeerSocket {self.peername()}>"

    @property
    def etid(self) -> int:
        """The client's ETID, 0 before it is connected."""
        return int(self._session.etid)

    def peername(self) -> tuple[str, int] | None:
        """Returns address and port of the other side; None when there is no connection any more."""
        return self._name("getpeername")

    def sockname(self) -> tuple[str, int] | None:
        """Returns address and port of this side; None when there is no connection any more."""
        return self._name("getsockname")

    def _name(self, method: str) -> tuple[str, int] | None:
        try:
            host, port = getattr(self.transport, method)()[:2]
        except (OSError, AttributeError):  # AttributeError: there is no socket
            return None
        return host, port

    @property
    def tls(self) -> TlsTransport | None:
        """The TLS connection; None when there is none."""
        transport = self.transport
        return transport if isinstance(transport, TlsTransport) else None

    def certificate(self) -> dict[str, Any] | None:
        """Returns what the client's certificate says; None when it showed none.

        Keys: subject and issuer (dicts of commonname, country, ...), commonname, subjectaltnames, tzfrom and tzto (ISO
        8601), serial.
        """
        return certificates.describe(self._certificate())

    def trusted(self) -> bool:
        """Returns whether the client showed a certificate of one of the authorities of the listener. One of somebody
        else never gets here: OpenSSL ends the TLS handshake.
        """
        return self._certificate() is not None

    def _certificate(self) -> bytes | None:
        shown = getattr(self.transport, "peer_certificate", None)
        return shown() if shown else None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket; nothing happens when there is no connection any more.

        Raises:
            OSError: the system refuses it.
        """
        if self.transport is not None:
            self.transport.setsockopt(level, option, value)

    def close(self) -> None:
        """Close the client's connection without a word; well-behaved clients come back."""
        if isinstance(self._session, Session):
            self._session.disconnect(CloseReason.PEER_CLOSED)

    @property
    def transport(self) -> Any:
        """The socket or `TlsTransport` below, for what has no method here; None when there is none."""
        return getattr(self._session.outbox, "transport", None)
