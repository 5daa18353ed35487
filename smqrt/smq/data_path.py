"""Shared parts of all connections of a process: kernels, receive buffer, flush and deadlines.

Queues are flushed once per turn of the loop. Deadlines are kept in dictionaries of only those few connections that have
one, and are checked by one timer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
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
from smqrt.wire.kernels import encode_run

CHECK_INTERVAL_S = 0.25
SHARE_S = 0.006
TURN_S, MIN_TURN_S = 0.012, 0.004
"""The part of a turn for all connections that receive much; the minimum is for those deferred by the last turn."""


class DataPathLimits:
    """Limits of all connections, from the settings (help: settings, `limits`).

    Attributes:
        stalled_s: a client whose socket accepts no byte for this time is disconnected.
        backpressure_s: how long publishers wait for one client without a break, even if it reads slowly.
        authenticate_s: the time for `authenticate`, from the end of the time for Connect.
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

    def gives_up(self) -> None:
        """End the waiting: the publishers have waited for `limits.backpressure_s`."""
        ...


class WaitingPublisher(Protocol):
    """A connection whose data is routed in a later turn."""

    def go_on(self) -> None:
        """Route the data."""


kernels = luajit_kernels.load()
encode = partial(encode_run, kernels)

_handshakes: dict[TimedClient, float] = {}
"""Connections whose handshake is not finished, with its deadline."""
_authenticating: set[TimedClient] = set()
"""Those of them whose Connect came in time, but whose `authenticate` is still running."""
_addresses: dict[TimedClient, str] = {}
"""The addresses of connections whose handshake is not finished."""
unfinished: Counter[str] = Counter()
"""The number of unfinished handshakes, by address."""
_blocked: dict[TimedClient, float] = {}
"""Connections whose socket accepts nothing, and when it last did."""
_pressing: dict[BackpressureSource, float] = {}
"""Clients whose publishers wait for them, and since when."""
deferred_reads: deque[WaitingPublisher] = deque()
"""Connections whose last receive was more work than their share of a turn; they continue in the next one."""
frozen_connections: set[WaitingPublisher] = set()
"""Connections that are not read during the migration of their sessions (`smq/session_migration.py`)."""
turn_ends: list[Callable[[], None]] = []
"""Functions that are called once per turn, before the flush: a journal stamps what was recorded in this turn."""
_watchers: list[Any] = []
_loop: Any = None
_thread: int | None = None
_turn_ends_s = 0.0
inlet: Inlet
"""Calls from other threads."""
_AT_ONCE = 2  # the index in _watchers of the timer that runs out at once


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
            " use publish_threadsafe), or in a process each"
        )
    _watchers.clear()
    _thread, inlet = hub.thread_ident, Inlet()
    loop = _loop = hub.loop
    # Lower than the priority of the loop's own callbacks, so after them: otherwise the output of greenlets would wait
    # for the next event.
    flush = loop.prepare(priority=-2)
    flush.start(_flush)
    timer = loop.timer(CHECK_INTERVAL_S, CHECK_INTERVAL_S)
    timer.start(check_deadlines)
    _watchers.extend((flush, timer, loop.timer(0)))
    for watcher in _watchers:
        watcher.ref = False  # they do not keep the process alive


def _flush() -> None:
    """Flush all queues, and start another turn at once if there is more to do.

    In a turn, the loop runs its callbacks before this watcher. New callbacks would otherwise wait for the next event.
    """
    for turn_end in turn_ends:
        turn_end()
    if (dirty and flush_dirty(time.monotonic)) or deferred_reads or _loop._callbacks:
        _watchers[_AT_ONCE].start(_next_turn)


def _next_turn() -> None:
    """Continue deferred reads, one after the other, once the queues of all subscribers have been flushed."""
    if backlog:
        return
    global _turn_ends_s
    _turn_ends_s = time.time() + MIN_TURN_S
    ends_s = max(_turn_ends_s, _loop.now() + TURN_S)
    for _ in range(len(deferred_reads)):
        deferred_reads.popleft().go_on()
        if time.time() >= ends_s:
            return


def defer_at_s() -> float:
    """Return when a connection that receives much defers its work, on the clock of `time.time`.

    That is after `SHARE_S`, or sooner, even at once, when other connections have used much of this turn.
    """
    ends_s: float = min(time.time() + SHARE_S, max(_turn_ends_s, _loop.now() + TURN_S))
    return ends_s


def check_deadlines() -> None:
    """Reject late handshakes, disconnect stalled clients, end long backpressure; many of them in several turns."""
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
    for source in [one for one, since in _pressing.items() if now - since >= limits.backpressure_s]:
        yield source.gives_up


def _end_late_handshake(connection: TimedClient) -> None:
    if connection.session.state is SessionState.AUTHENTICATING and connection not in _authenticating:
        _authenticating.add(connection)
        _handshakes[connection] = time.monotonic() + limits.authenticate_s
        return
    end_handshake(connection)
    connection.session.connect_timed_out()


def start_backpressure(connection: BackpressureSource) -> None:
    """Note that publishers wait for the client from now on."""
    _pressing.setdefault(connection, time.monotonic())


def end_backpressure(connection: BackpressureSource) -> None:
    """Note that no publisher waits for the client."""
    _pressing.pop(connection, None)


def start_handshake(connection: TimedClient, timeout_s: float, address: str) -> None:
    """Expect the handshake with `address` to end within `timeout_s`."""
    _handshakes[connection] = time.monotonic() + timeout_s
    _addresses[connection] = address
    unfinished[address] += 1


def unfinished_connections() -> list[TimedClient]:
    """Return the connections whose handshake is not finished."""
    return list(_addresses)


def end_handshake(connection: TimedClient) -> None:
    """Note that the handshake has ended, or the connection has."""
    _handshakes.pop(connection, None)
    _authenticating.discard(connection)
    address = _addresses.pop(connection, None)
    if address is not None:
        unfinished[address] -= 1
        if not unfinished[address]:
            del unfinished[address]


def mark_blocked(connection: TimedClient) -> None:
    """Note that the client's socket accepts nothing now."""
    _blocked.setdefault(connection, time.monotonic())


def mark_progress(connection: TimedClient) -> None:
    """Note that the client's socket has accepted something."""
    if connection in _blocked:
        _blocked[connection] = time.monotonic()


def unblocked(connection: TimedClient) -> None:
    """Note that the client's queue is empty again."""
    _blocked.pop(connection, None)
