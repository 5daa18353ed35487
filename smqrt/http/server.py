"""The HTTP server: its limits, its connections, its end."""

from __future__ import annotations

from time import monotonic

import gevent

from smqrt.http.access import Access
from smqrt.http.connection import Dispatcher, HttpConnection
from smqrt.http.limits import BodyMemory, HttpLimits
from smqrt.net.scheduling import Deadlines, share
from smqrt.net.tls import Address, Transport


class HttpServer:
    """Speaks HTTP on the connections it is given.

    Args:
        root: answers the requests.
        limits: what a client may take.
        access: what is asked of every request.
    """

    def __init__(self, root: Dispatcher, limits: HttpLimits | None = None, access: Access | None = None) -> None:
        self.root = root
        self.access = access or Access()
        self.limits = limits or HttpLimits()
        self.bodies = BodyMemory(self.limits.bodies_bytes)
        self.draining = False
        self.share = share()
        self._connections: set[HttpConnection] = set()
        shortest = min(
            self.limits.first_byte_s, self.limits.header_s, self.limits.body_idle_s, self.limits.keep_alive_s
        )
        self._deadlines = Deadlines(min(0.25, shortest / 4))

    def __len__(self) -> int:
        """How many connections there are, detached ones not counted."""
        return len(self._connections)

    def accepted(self, transport: Transport, peer: Address, secure: bool = False, data: bytes = b"") -> None:
        """Take a new connection; fits `Listener`'s `on_accept`.

        Args:
            transport: a non-blocking socket, or a `TlsTransport` after its handshake (then `secure`).
            peer: the client's address as `accept` gave it.
            secure: whether the transport is TLS.
            data: bytes that were received already.
        """
        connection = HttpConnection(self, transport, (peer[0], peer[1]), secure, data)
        self._connections.add(connection)
        self._deadlines.watch(connection)

    def accepted_secure(self, transport: Transport, peer: Address) -> None:
        """Take a new TLS connection."""
        self.accepted(transport, peer, secure=True)

    def forget(self, connection: HttpConnection) -> None:
        """Called by a connection that ended or was detached."""
        self._connections.discard(connection)
        self._deadlines.forget(connection)

    def drain(self, timeout_s: float = 5.0) -> bool:
        """Let busy connections finish, close the others; blocks the greenlet.

        Returns:
            whether all were finished in time.
        """
        self.draining = True
        end = monotonic() + timeout_s
        while True:
            for connection in [c for c in self._connections if not c.busy]:
                connection.close()
            if not self._connections or monotonic() > end:
                return not self._connections
            gevent.sleep(0.02)

    def close(self) -> None:
        """Close all connections at once."""
        self.draining = True
        for connection in list(self._connections):
            connection.close()
        self._deadlines.close()
