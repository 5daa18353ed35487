"""Reads at intervals: connections on which many small packets arrive, each alone (help: data-path).

A message that is read alone costs a turn of the loop, a receive and a send. When the connection is read every 100 µs
instead, the messages that arrived meanwhile share these. A connection that gains nothing by it, for example one whose
client waits for each answer, is read as before after a few intervals.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container
from time import monotonic
from typing import Any, Protocol

from gevent import get_hub

from smqrt.settings.limits import current_limits
from smqrt.wire.connection_state import Life

SMALL_READS = 32
"""A connection is considered after so many reads of one packet."""
READS_PER_S = 10_000
"""The rate of these reads from which a connection is read at intervals."""
WINDOW = 16
"""A connection is judged after so many intervals."""
GAIN = 1.5
"""A connection stays when it receives this many packets per interval on average."""
RETRY_S = 1.0
"""A connection that gained nothing is not considered for this time."""
MAX_CONNECTIONS = 256
"""The maximum number of connections, because each costs a system call per interval."""

_READ = 1  # of libev, as in `smq/connection.py`
_CLOCK_MONOTONIC, _TFD_FLAGS = 1, os.O_NONBLOCK | os.O_CLOEXEC  # timerfd_create(2)


class CoalescedConnection(Protocol):
    """A connection that can be read at intervals.

    Attributes:
        watcher: its READ watcher, which is stopped meanwhile.
        small_reads_since_s: the time of the last call of `consider`, or a later one before which it returns at once.
        paused, life: see `RawConnection`.
    """

    watcher: Any
    small_reads_since_s: float
    paused: bool
    life: Life

    def on_readable(self) -> int:
        """Receive once; return the number of received bytes."""


class CoalescedReads:
    """The connections of this thread's loop that are read at intervals.

    The interval is that of a timerfd: libev's own timers are rounded up to milliseconds.

    Args:
        frozen: connections that nobody may read at present.
    """

    def __init__(self, frozen: Container[object]) -> None:
        self._frozen = frozen
        self._connections: dict[CoalescedConnection, _Window] = {}
        self._timer = -1
        self._watcher: Any = None

    def consider(self, connection: CoalescedConnection, packet_bytes: int) -> None:
        """Read the connection at intervals from now on if its last `SMALL_READS` reads took little time.

        Args:
            connection: a connection that is not paused.
            packet_bytes: the size of the packet that was received last.
        """
        now, since_s = monotonic(), connection.small_reads_since_s
        if now < since_s or connection in self._connections:
            return
        connection.small_reads_since_s = now
        is_fast = now - since_s < SMALL_READS / READS_PER_S
        interval_us = current_limits().coalesce_us
        if is_fast and interval_us and len(self._connections) < MAX_CONNECTIONS and self._has_timer():
            connection.watcher.stop()
            if not self._connections:
                self._set_timer(interval_us)
            self._connections[connection] = _Window(packet_bytes)

    def __len__(self) -> int:
        return len(self._connections)

    def _has_timer(self) -> bool:
        if self._timer < 0:
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS) if _libc else -1
            if self._timer < 0:  # not Linux, or no descriptor is left
                return False
            self._watcher = get_hub().loop.io(self._timer, _READ)
            self._watcher.ref = False  # it does not keep the process alive
            self._watcher.start(self._read_all)
        return True

    def _set_timer(self, interval_us: int) -> None:
        interval_ns = interval_us * 1000
        # struct itimerspec: seconds and nanoseconds of the interval, and of the first expiration.
        _libc.timerfd_settime(self._timer, 0, (ctypes.c_long * 4)(0, interval_ns, 0, interval_ns), None)

    def _read_all(self) -> None:
        os.read(self._timer, 8)
        is_off = not current_limits().coalesce_us
        for connection, window in list(self._connections.items()):
            if connection.life.over or connection.paused or connection in self._frozen or connection.watcher.active:
                del self._connections[connection]  # whoever paused or froze it starts its watcher
                continue
            if is_off or not window.add(connection.on_readable()):
                del self._connections[connection]
                connection.small_reads_since_s = monotonic() + RETRY_S
                if not connection.life.over and not connection.paused:
                    connection.watcher.start(connection.on_readable)
        if not self._connections:
            self._set_timer(0)


class _Window:
    """What a connection received in the last intervals."""

    __slots__ = ("_bytes", "_intervals", "_packet_bytes")

    def __init__(self, packet_bytes: int) -> None:
        self._packet_bytes = packet_bytes
        self._bytes = self._intervals = 0

    def add(self, received_bytes: int) -> bool:
        """Count an interval; return whether the connection gains by the intervals, as far as is known."""
        self._bytes += received_bytes
        self._intervals += 1
        if self._intervals < WINDOW:
            return True
        has_gain = self._bytes >= GAIN * WINDOW * self._packet_bytes
        self._bytes = self._intervals = 0
        return has_gain


try:
    _libc: Any = ctypes.CDLL(None, use_errno=True)
    _libc.timerfd_create, _libc.timerfd_settime  # noqa: B018
except AttributeError:  # not Linux
    _libc = None
