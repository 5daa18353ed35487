"""Shared parts of all connections of a process: kernels, receive buffer, flush and deadlines.

Queues are flushed once per turn of the loop. Few connections have a deadline at any time: dictionaries hold these, and
one timer checks them.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from gevent import get_hub

from smqrt.broker.outbox import backlog, dirty, flush_dirty
from smqrt.broker.sessions import Session, SessionState
from smqrt.errors import ArgumentError, CloseReason
from smqrt.loop.scheduling import share
from smqrt.loop.threads import Inlet
from smqrt.settings.limits import LimitSettings
from smqrt.wire import kernels as luajit_kernels
from smqrt.wire.kernels import encode_batch

CHECK_INTERVAL_S = 0.25
"""Interval of the checks of deadlines."""
SHARE_S = 0.006
"""Time of one connection with much data in one turn."""
TURN_S, MIN_TURN_S = 0.012, 0.004
"""Time of all connections with much data in one turn; the minimum is for those deferred by the last turn."""


class DataPathLimits:
    """Limits of all connections, from the settings (help: settings, `limits`).

    Attributes:
        stalled_s: a client whose socket accepts no byte for this time is disconnected.
        backpressure_s: maximum time that publishers wait for one client without a break, even if it reads slowly.
        authenticate_s: time for `authenticate`, in addition to the time for Connect.
        handshakes_per_address: the maximum number of unfinished handshakes of one address; None without a limit.
    """

    def __init__(self) -> None:
        self.apply(LimitSettings())

    def apply(self, settings: LimitSettings) -> None:
        """Apply the settings of the server."""
        self.stalled_s = settings.stalled_s
        self.backpressure_s = settings.slow_wait_s
        self.authenticate_s = settings.authenticate_s
        self.handshakes_per_address = settings.handshakes_per_address


limits = DataPathLimits()
"""The limits of this process."""


class TimedClient(Protocol):
    """A connection with a deadline."""

    session: Session


class BackpressureSource(TimedClient, Protocol):
    """A connection that publishers wait for."""

    def expire_backpressure(self) -> None:
        """End the backpressure: the publishers have waited for `limits.backpressure_s`."""


class WaitingPublisher(Protocol):
    """A connection whose data is routed in a later turn."""

    def resume_now(self) -> None:
        """Route the data."""


kernels = luajit_kernels.load()
encode = partial(encode_batch, kernels)

_handshakes: dict[TimedClient, float] = {}
"""Deadlines of unfinished handshakes, by connection."""
_authenticating: set[TimedClient] = set()
"""Connections whose Connect was received in time, but whose `authenticate` is still running."""
_addresses: dict[TimedClient, str] = {}
"""Client addresses of unfinished handshakes, by connection."""
unfinished: defaultdict[str, int] = defaultdict(int)
"""The number of unfinished handshakes, by address."""
_blocked: dict[TimedClient, float] = {}
"""The time when a blocked socket last accepted data, by connection."""
_backpressure_since_s: dict[BackpressureSource, float] = {}
"""Start of the backpressure, by the client that publishers wait for."""
deferred_reads: deque[WaitingPublisher] = deque()
"""Connections with unrouted data whose share of the turn was used up; they continue in the next turn."""
frozen_connections: set[WaitingPublisher] = set()
"""Connections that are not read during the migration of their sessions (`smq/session_migration.py`)."""
turn_ends: list[Callable[[], None]] = []
"""Functions that are called once per turn, before the flush: a journal stamps the records of this turn."""
_watchers: list[Any] = []
_loop: Any = None
_thread: int | None = None
_turn_ends_s = 0.0
inlet: Inlet
"""Calls from other threads."""
_AT_ONCE = 2  # the index in _watchers of the timer with timeout 0


def install() -> None:
    """Start the flush and the deadlines on this thread's loop; later calls do nothing.

    Raises:
        ArgumentError: another running thread has hubs on its own loop.
    """
    global _loop, _thread, inlet
    hub = get_hub()
    if _watchers and _loop is hub.loop:
        return
    if _watchers and _thread != hub.thread_ident and _thread in sys._current_frames():
        raise ArgumentError(
            "another thread of this process has hubs: their loop can't be shared; create all hubs in one thread (others"
            " use publish_threadsafe), or each hub in its own process"
        )
    _watchers.clear()
    _thread, inlet = hub.thread_ident, Inlet()
    loop = _loop = hub.loop
    # A lower priority than that of the loop's own callbacks, so that the flush runs after them: otherwise the output of
    # greenlets would wait for the next event.
    flush = loop.prepare(priority=-2)
    flush.start(_flush)
    timer = loop.timer(CHECK_INTERVAL_S, CHECK_INTERVAL_S)
    timer.start(check_deadlines)
    _watchers.extend((flush, timer, loop.timer(0)))
    for watcher in _watchers:
        watcher.ref = False  # they do not keep the process alive


class DeferredCall:
    """A call in a later turn, in `deferred_reads`.

    The end of a connection may be received when the turn's time is used up. Deferring the receive instead would repeat
    it in each turn, for many connections that close at the same time.

    Args:
        function: the function to call.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def resume_now(self) -> None:
        """Call the function."""
        self._function()


def _flush() -> None:
    """Flush all queues, and start another turn at once if there is more to do.

    In a turn, the loop runs its callbacks before this watcher. New callbacks would otherwise wait for the next event.
    """
    for turn_end in turn_ends:
        turn_end()
    if (dirty and flush_dirty(time.monotonic)) or deferred_reads or _loop._callbacks:
        _watchers[_AT_ONCE].start(_next_turn)


def flush() -> None:
    """Flush the queues before the end of the turn."""
    for turn_end in turn_ends:
        turn_end()
    flush_dirty(time.monotonic)


def _next_turn() -> None:
    """Continue deferred reads, one after the other, once the queues of all subscribers have been flushed."""
    if backlog:
        return
    global _turn_ends_s
    _turn_ends_s = time.time() + MIN_TURN_S
    ends_s = max(_turn_ends_s, _loop.now() + TURN_S)
    for _ in range(len(deferred_reads)):
        deferred_reads.popleft().resume_now()
        if time.time() >= ends_s:
            return


def defer_at_s() -> float:
    """Return the time at which a connection with much data defers its work, on the clock of `time.time`.

    It is `SHARE_S` from now, or earlier when other connections have used much of this turn; it may be in the past.
    """
    ends_s: float = min(time.time() + SHARE_S, max(_turn_ends_s, _loop.now() + TURN_S))
    return ends_s


def is_turn_used() -> bool:
    """Return whether other connections have used the time of this turn."""
    return time.time() >= defer_at_s()


def check_deadlines() -> None:
    """Reject late handshakes, disconnect stalled clients and end long backpressure, in several turns if many expire."""
    turn = share()
    for expire in _due(time.monotonic()):
        if turn.spent():
            turn.later(check_deadlines)
            return
        expire()


def _due(now: float) -> Iterator[Callable[[], None]]:
    for connection in [one for one, deadline in _handshakes.items() if deadline <= now]:
        yield partial(_end_late_handshake, connection)
    slow = CloseReason.SLOW_CONSUMER
    for connection in [one for one, since in _blocked.items() if now - since >= limits.stalled_s]:
        yield partial(connection.session.disconnect, slow, slow.value.encode())
    for source in [one for one, since in _backpressure_since_s.items() if now - since >= limits.backpressure_s]:
        yield source.expire_backpressure


def _end_late_handshake(connection: TimedClient) -> None:
    # The client was in time if only `authenticate` is late, which gets a deadline of its own.
    if connection.session.state is SessionState.AUTHENTICATING and connection not in _authenticating:
        _authenticating.add(connection)
        _handshakes[connection] = time.monotonic() + limits.authenticate_s
        return
    end_handshake(connection)
    connection.session.connect_timed_out()


def start_backpressure(connection: BackpressureSource) -> None:
    """Record that publishers begin to wait for the client."""
    _backpressure_since_s.setdefault(connection, time.monotonic())


def end_backpressure(connection: BackpressureSource) -> None:
    """Record that no publisher waits for the client."""
    _backpressure_since_s.pop(connection, None)


def start_handshake(connection: TimedClient, timeout_s: float, address: str) -> None:
    """Start the deadline `timeout_s` of a handshake, and count the handshake for `address`."""
    _handshakes[connection] = time.monotonic() + timeout_s
    _addresses[connection] = address
    unfinished[address] += 1


def unfinished_connections() -> list[TimedClient]:
    """Return the connections whose handshake is not finished."""
    return list(_addresses)


def end_handshake(connection: TimedClient) -> None:
    """Record that the handshake or the connection has ended."""
    _handshakes.pop(connection, None)
    _authenticating.discard(connection)
    address = _addresses.pop(connection, None)
    if address is not None:
        unfinished[address] -= 1
        if not unfinished[address]:
            del unfinished[address]


def mark_blocked(connection: TimedClient) -> None:
    """Record that the client's socket does not accept data."""
    _blocked.setdefault(connection, time.monotonic())


def mark_progress(connection: TimedClient) -> None:
    """Record that the client's socket has accepted data."""
    if connection in _blocked:
        _blocked[connection] = time.monotonic()


def unblocked(connection: TimedClient) -> None:
    """Record that the client's queue is empty again."""
    _blocked.pop(connection, None)
