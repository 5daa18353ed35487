"""Connections of hubs with slow-consumer policies.

Their queue is a `Backlog` while the client does not read. The policies themselves are in `broker/slow.py`. Connections
of other hubs use the classes of `connection.py` and `connection_kinds.py`.
"""

from __future__ import annotations

from smqrt.broker.outbox import BLOCKED, QueuedMemory
from smqrt.broker.slow import Backlog
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.smq.connection_kinds import TlsRawConnection, TlsWsConnection, WsConnection


class _Policed(RawConnection):
    """Mixin for a connection. It has no attributes, so that `police` can change the class of an open connection."""

    __slots__ = ()

    def held(self, run: bytes) -> None:
        """See `Outbox.held`."""
        size = len(run)
        self.queued_bytes += size
        QueuedMemory.total_bytes += size
        if self.backlog is not None and self.backlog.take(self, run):
            self.overloaded()

    def _shed(self) -> None:
        """Apply the policies to what is queued already."""
        slow = self.session.broker.slow
        if slow is None:  # the policies were just removed
            super()._shed()
            return
        self.backlog = backlog = Backlog(slow)
        first = 1 if self.torn else 0
        runs = self.queue[first:]
        del self.queue[first:]
        self.released(sum(map(len, runs)))
        is_over = False
        for run in runs:
            self.queue.append(run)
            self.released(-len(run))
            is_over = backlog.take(self, run) or is_over
        if is_over:
            self.overloaded()

    def presses(self) -> None:
        """See `Outbox.presses`."""
        data_path.start_backpressure(self)

    def gives_up(self) -> None:
        """End the backpressure of this client: from now on, messages that exceed its budget are dropped."""
        if self.backlog is not None:
            self.backlog.gave_up = True
            self._release(self.backlog)

    def _release(self, backlog: Backlog) -> None:
        data_path.end_backpressure(self)
        backlog.policies.pressure.release(self)

    def on_writable(self) -> None:
        """See `RawConnection.on_writable`."""
        self._close_holes()
        super().on_writable()

    def _advance(self, sent: int) -> None:
        backlog, entries = self.backlog, len(self.queue)
        super()._advance(sent)
        if backlog is not None and backlog is self.backlog:
            backlog.left(entries - len(self.queue))
            if self.queued_bytes <= self.budget_bytes >> 1:
                self._release(backlog)

    def _unblock(self) -> None:
        super()._unblock()
        backlog, self.backlog = self.backlog, None
        if backlog is not None:
            self._release(backlog)

    def _drop_messages(self) -> None:
        self._close_holes()
        super()._drop_messages()

    def _count_undelivered(self) -> None:
        self._close_holes()
        super()._count_undelivered()

    def _close_holes(self) -> None:
        """Remove the empty entries of dropped messages from the queue."""
        if self.backlog is not None:
            self.backlog.close_holes(self)


class PolicedRawConnection(_Policed, RawConnection):
    """See `RawConnection`."""

    __slots__ = ()


class PolicedWsConnection(_Policed, WsConnection):
    """See `WsConnection`."""

    __slots__ = ()


class PolicedTlsRawConnection(_Policed, TlsRawConnection):
    """See `TlsRawConnection`."""

    __slots__ = ()


class PolicedTlsWsConnection(_Policed, TlsWsConnection):
    """See `TlsWsConnection`."""

    __slots__ = ()


_POLICED: dict[type[RawConnection], type[RawConnection]] = {
    RawConnection: PolicedRawConnection,
    WsConnection: PolicedWsConnection,
    TlsRawConnection: PolicedTlsRawConnection,
    TlsWsConnection: PolicedTlsWsConnection,
}
_PLAIN = {policed: plain for plain, policed in _POLICED.items()}


def connection_class(secure: bool, on_websocket: bool, policed: bool) -> type[RawConnection]:
    """Return the class of a connection.

    Args:
        secure: over TLS.
        on_websocket: over a WebSocket.
        policed: of a hub with slow-consumer policies.
    """
    plain: type[RawConnection]
    if secure:
        plain = TlsWsConnection if on_websocket else TlsRawConnection
    else:
        plain = WsConnection if on_websocket else RawConnection
    return _POLICED[plain] if policed else plain


def police(connection: RawConnection, policed: bool) -> None:
    """Apply the policies of its hub to an open connection, or remove them."""
    known = _POLICED if policed else _PLAIN
    other = known.get(type(connection))
    if isinstance(connection, _Policed):
        connection._close_holes()
        if connection.backlog is not None:
            connection._release(connection.backlog)
            connection.backlog = None
    if other is not None:
        connection.__class__ = other
        if connection.writer is not None and connection.writer.active:  # its callback is a method of the former class
            connection.writer.stop()
            connection.writer.start(connection.on_writable)
    if policed and connection.life is BLOCKED:
        connection._shed()
