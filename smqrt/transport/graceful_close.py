"""Graceful close of connections, in the background.

Queued data is sent, this side is shut down, and the peer gets some time to read everything and to close its side. An
immediate close would lose the queue, and would reset the connection when there is unread input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fcntl import ioctl
from socket import SHUT_WR
from termios import TIOCOUTQ
from time import monotonic
from typing import Any, Protocol

from gevent import get_hub

from smqrt.loop.readiness import READ, WRITE, Watcher
from smqrt.loop.scheduling import NEVER, Deadlines
from smqrt.transport.tls import Buffer, TlsTransport, Transport
from smqrt.wire.connection_state import Life, moved

SEND_S = 10.0  # plus a second for each MIN_BYTES_PER_S, so that a slow reader cannot delay the close forever
MIN_BYTES_PER_S = 1024
LINGER_S = 2.0  # in all, also when the peer keeps sending
_UNDER_WAY = "smqrt_graceful_closes"  # the attribute of the gevent loop's hub; each thread has its own
_discarded = bytearray(65536)
_ALL_CONFIRMED = bytes(4)  # TIOCOUTQ: no unconfirmed bytes


class DrainingConnection(Protocol):
    """A connection in the state DRAINING."""

    life: Life


def send_and_close(connection: DrainingConnection, transport: Transport, unsent: Iterable[Buffer]) -> None:
    """Send `unsent` and queued ciphertext, then close gracefully. At the end `connection` is CLOSED.

    Args:
        connection: its state is set.
        transport: has no watchers.
        unsent: data to send first.
    """
    close = _GracefulClose(connection, transport, get_hub().loop.io(transport.fileno(), WRITE))
    close.send(b"".join(unsent))


def half_close(connection: DrainingConnection, transport: Transport, watcher: Watcher) -> None:
    """Send queued ciphertext, then close gracefully. At the end `connection` is CLOSED.

    Args:
        connection: its state is set.
        transport: has nothing else to send.
        watcher: the stopped watcher of the transport; closed at the end.
    """
    close = _GracefulClose(connection, transport, watcher)
    if type(transport) is TlsTransport and transport.wants_write:
        close.send(b"")
    else:
        close.half_close()


def under_way() -> Deadlines:
    """Return the graceful closes of this thread's loop."""
    hub = get_hub()
    found: Deadlines | None = getattr(hub, _UNDER_WAY, None)
    if found is None:
        found = Deadlines()
        setattr(hub, _UNDER_WAY, found)
    return found


def is_sending() -> bool:
    """Return whether any graceful close has bytes that the peer's system has not confirmed."""
    return any(isinstance(close, _GracefulClose) and close.is_sending for close in under_way())


class _GracefulClose:
    """Owns a transport and its watcher until both are closed."""

    __slots__ = ("_connection", "_transport", "_unsent", "_watcher", "deadline_s")

    def __init__(self, connection: DrainingConnection, transport: Transport, watcher: Any) -> None:
        self._connection, self._transport, self._watcher = connection, transport, watcher
        self._unsent = memoryview(b"")
        self.deadline_s = NEVER
        under_way().watch(self)

    @property
    def is_sending(self) -> bool:
        """Whether there are bytes that the peer's system has not confirmed."""
        return bool(self._unsent) or ioctl(self._transport.fileno(), TIOCOUTQ, _ALL_CONFIRMED) != _ALL_CONFIRMED

    def send(self, unsent: bytes) -> None:
        """Send `unsent`, then `half_close`."""
        self._unsent = memoryview(unsent)
        self.deadline_s = monotonic() + SEND_S + len(unsent) / MIN_BYTES_PER_S
        self._send()

    def _send(self) -> None:
        transport = self._transport
        try:
            if self._unsent:
                self._unsent = self._unsent[transport.send(self._unsent) :]
            elif type(transport) is TlsTransport:
                transport.flush()
        except BlockingIOError:
            pass  # continued when the socket is writable
        except OSError:
            self.expired()
            return
        if self._unsent or (type(transport) is TlsTransport and transport.wants_write):
            self._await(WRITE, self._send)
        else:
            self.half_close()

    def half_close(self) -> None:
        """Shut down this side, and wait up to `LINGER_S` for the peer."""
        try:
            self._transport.shutdown(SHUT_WR)
        except OSError:
            self.expired()
            return
        self.deadline_s = monotonic() + LINGER_S
        self._await(READ, self._discard)

    def _discard(self) -> None:
        try:
            if self._transport.recv_into(_discarded):
                return  # one read per event, so that a flooding peer gets only its share of the loop
        except BlockingIOError:
            return
        except OSError:
            pass
        self.expired()

    def _await(self, events: int, step: Callable[[], None]) -> None:
        self._watcher.stop()
        self._watcher.events = events
        self._watcher.start(step)

    def expired(self) -> None:
        """Close now, at the end or after the timeout."""
        under_way().forget(self)
        self._watcher.stop()
        self._watcher.close()
        self._transport.close()
        self._connection.life = moved(self._connection.life, Life.CLOSED)
