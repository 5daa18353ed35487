"""The part of the data path that all connections of a process share: the kernels with the receive buffer, the flush
once per loop turn, and the deadlines.

Deadlines are kept in dictionaries that hold only the few connections that have one, and are looked at by one timer.
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
from smqrt.broker.session import Session, SessionState
from smqrt.errors import ArgumentError, CloseReason
from smqrt.loop.threads import Inlet
from smqrt.loop.scheduling import share
from smqrt.wire import luajit_kernels
from smqrt.wire.kernels import encode_run

CHECK_INTERVAL_S = 0.25
PRESSES_FOR_S = 10.0
"""So long publishers wait for one client at a stretch, however much it takes meanwhile."""
STALLED_AFTER_S = 10.0
"""A client that takes not one byte for so long is disconnected."""
SHARE_S = 0.006
TURN_S, LEAST_TURN_S = 0.012, 0.004
"""What connections that receive a lot take of a turn together; the least is for those who gave way in the last one."""
AUTHENTICATE_S = 30.0
"""What `authenticate` has to answer after the time for Connect is over."""


class TimedClient(Protocol):
    """A connection with a deadline."""

    session: Session


class BackpressureSource(TimedClient, Protocol):
    """A connection that publishers wait for."""

    def gives_up(self) -> None:
        """They have waited for long enough."""
        ...


class WaitingPublisher(Protocol):
    """A connection that gave way."""

    def go_on(self) -> None:
        """Work off what is left."""


kernels = luajit_kernels.load()
encode = partial(encode_run, kernels)

_handshakes: dict[TimedClient, float] = {}
_asking: set[TimedClient] = set()
"""Those whose Connect came in time, but not the answer of `authenticate`."""
_shaking: dict[TimedClient, str] = {}
unfinished: Counter[str] = Counter()
"""Handshakes under way, by address."""
_blocked: dict[TimedClient, float] = {}
_pressing: dict[BackpressureSource, float] = {}
"""Clients whose publishers wait for them, and since when."""
deferred_reads: deque[WaitingPublisher] = deque()
"""Connections whose last receive was more work than their share of a turn; they go on in the next one."""
still: set[WaitingPublisher] = set()
"""Connections that are not read again before they have gone on at another hub (`smq/session_migration.py`)."""
turn_ends: list[Callable[[], None]] = []
"""Called once per turn of the loop, before it flushes: a journal gives what was recorded in this turn its time."""
_watchers: list[Any] = []
_loop: Any = None
_thread: int | None = None
_turn_ends_s = 0.0
inlet: Inlet
"""The way in for other threads."""
_AT_ONCE = 2


def install() -> None:
    """Start the flush and the deadlines on this thread's loop; later calls do nothing.

    Raises:
        ArgumentError: the loop of another thread, which still runs, has them: they can't be shared.
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
    # Before the default priority: otherwise what greenlets write waits for the next event.
    flush = loop.prepare(priority=-2)
    flush.start(_flush)
    timer = loop.timer(CHECK_INTERVAL_S, CHECK_INTERVAL_S)
    timer.start(check_deadlines)
    _watchers.extend((flush, timer, loop.timer(0)))
    for watcher in _watchers:
        watcher.ref = False  # they alone do not keep a process alive


def _flush() -> None:
    """Flush, and let the loop go on at once when handlers began something: its own callbacks were run before this
    watcher, and it would not look at new ones before the next event.
    """
    for turn_end in turn_ends:
        turn_end()
    if (dirty and flush_dirty(time.monotonic)) or deferred_reads or _loop._callbacks:
        _watchers[_AT_ONCE].start(_next_turn)


def _next_turn() -> None:
    """Let those go on who gave way, one after the other, once all subscribers have what was sent so far."""
    if backlog:
        return
    global _turn_ends_s
    _turn_ends_s = time.time() + LEAST_TURN_S
    ends_s = max(_turn_ends_s, _loop.now() + TURN_S)
    for _ in range(len(deferred_reads)):
        deferred_reads.popleft().go_on()
        if time.time() >= ends_s:
            return


def share_ends_s() -> float:
    """When (on the clock of `time.time`) a connection that receives a lot gives way: after `SHARE_S`, or sooner, even
    at once, when others have taken much of this turn before it.
    """
    ends_s: float = min(time.time() + SHARE_S, max(_turn_ends_s, _loop.now() + TURN_S))
    return ends_s


def check_deadlines() -> None:
    """Refuse late handshakes, end stalled clients; when they are many, in several
    turns.
    """
    turn = share()
    for end, connection in _due(time.monotonic()):
        if turn.spent():
            turn.later(check_deadlines)
            return
        end(connection)


def _due(now: float) -> Iterator[tuple[Callable[[TimedClient], None], TimedClient]]:
    for connection in [one for one, deadline in _handshakes.items() if deadline <= now]:
        yield _end_late, connection
    for connection in [one for one, since in _blocked.items() if now - since >= STALLED_AFTER_S]:
        yield _end_stalled, connection
    for pressing in [one for one, since in _pressing.items() if now - since >= PRESSES_FOR_S]:
        yield _give_up, pressing


def _end_late(connection: TimedClient) -> None:
    if connection.session.state is SessionState.ASKING and connection not in _asking:
        _asking.add(connection)
        _handshakes[connection] = time.monotonic() + AUTHENTICATE_S
        return
    handshake_over(connection)
    connection.session.connect_timed_out()


def _end_stalled(connection: TimedClient) -> None:
    reason = CloseReason.SLOW_CONSUMER
    connection.session.disconnect(reason, reason.value.encode())


def _give_up(connection: Any) -> None:
    connection.gives_up()


def pressing_now(connection: BackpressureSource) -> None:
    """Publishers wait for the client from now on."""
    _pressing.setdefault(connection, time.monotonic())


def presses_no_more(connection: BackpressureSource) -> None:
    """Nobody waits for the client."""
    _pressing.pop(connection, None)


def handshake_begins(connection: TimedClient, timeout_s: float, address: str) -> None:
    """Expect the handshake with `address` to be over within `timeout_s`."""
    _handshakes[connection] = time.monotonic() + timeout_s
    _shaking[connection] = address
    unfinished[address] += 1


def unfinished_connections() -> list[TimedClient]:
    """Those whose handshake is under way."""
    return list(_shaking)


def handshake_over(connection: TimedClient) -> None:
    """The handshake ended in time."""
    _handshakes.pop(connection, None)
    _asking.discard(connection)
    address = _shaking.pop(connection, None)
    if address is not None:
        unfinished[address] -= 1
        if not unfinished[address]:
            del unfinished[address]


def blocked_now(connection: TimedClient) -> None:
    """The client's socket takes nothing for now."""
    _blocked.setdefault(connection, time.monotonic())


def progress(connection: TimedClient) -> None:
    """The client's socket took something."""
    if connection in _blocked:
        _blocked[connection] = time.monotonic()


def unblocked(connection: TimedClient) -> None:
    """The client's queue is empty again."""
    _blocked.pop(connection, None)
