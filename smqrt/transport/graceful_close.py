"""The graceful close of a connection: what is queued is sent, our side is closed, and the other side gets a while to
read it all and to close its own. Closing at once would lose the queue, and reset the connection when unread input is
there.
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

SEND_S = 10.0  # and a second more for each MIN_BYTES_PER_S: whoever reads drop by drop can't keep us
MIN_BYTES_PER_S = 1024
LINGER_S = 2.0  # in all, however much it still sends
_UNDER_WAY = "smqrt_graceful_closes"  # the attribute of the hub that holds them: threads have hubs of their own
_waste = bytearray(65536)
_NONE = bytes(4)  # how many bytes are not confirmed, as TIOCOUTQ says it


class DrainingConnection(Protocol):
    """A connection whose life is DRAINING."""

    life: Life


def send_and_close(connection: DrainingConnection, transport: Transport, unsent: Iterable[Buffer]) -> None:
    """Send `unsent` and what the TLS layer holds, then close gracefully; `connection` is CLOSED in the end.

    Args:
        transport: without watchers.
    """
    close = _GracefulClose(connection, transport, get_hub().loop.io(transport.fileno(), WRITE))
    close.send(b"".join(unsent))


def half_close(connection: DrainingConnection, transport: Transport, watcher: Watcher) -> None:
    """Close gracefully what has nothing left to send but what the TLS layer holds; `connection` is CLOSED in the end.

    Args:
        watcher: of the transport, stopped; it is closed in the end, too.
    """
    close = _GracefulClose(connection, transport, watcher)
    if type(transport) is TlsTransport and transport.wants_write:
        close.send(b"")
    else:
        close.half_close()


def under_way() -> Deadlines:
    """All graceful closes of this thread's loop."""
    hub = get_hub()
    found: Deadlines | None = getattr(hub, _UNDER_WAY, None)
    if found is None:
        found = Deadlines()
        setattr(hub, _UNDER_WAY, found)
    return found


def is_sending() -> bool:
    """Whether there are bytes on their way that the other side's machine has not confirmed."""
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
        """Whether not all has reached the other side's machine."""
        return bool(self._unsent) or ioctl(self._transport.fileno(), TIOCOUTQ, _NONE) != _NONE

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
            pass  # more when it is writable
        except OSError:
            self.expired()
            return
        if self._unsent or (type(transport) is TlsTransport and transport.wants_write):
            self._await(WRITE, self._send)
        else:
            self.half_close()

    def half_close(self) -> None:
        """Close our side, and wait a little for the other one."""
        try:
            self._transport.shutdown(SHUT_WR)
        except OSError:
            self.expired()
            return
        self.deadline_s = monotonic() + LINGER_S
        self._await(READ, self._discard)

    def _discard(self) -> None:
        try:
            if self._transport.recv_into(_waste):
                return  # one piece an event: who floods us takes no more than its turn
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
        """Close, whatever was waited for."""
        under_way().forget(self)
        self._watcher.stop()
        self._watcher.close()
        self._transport.close()
        self._connection.life = moved(self._connection.life, Life.CLOSED)
