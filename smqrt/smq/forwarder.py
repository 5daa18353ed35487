"""Forwards single messages between clients, without Python (help: data-path).

One message at a time costs more in Python than in the kernel. A client that sends such messages joins the forwarder
when each of its destinations has one subscriber, no TLS is used and no route has a hook. The forwarder has an epoll
set of its own for these clients. One call of LuaJIT receives, looks up and sends the messages of all of them. A client
leaves when it sends anything else or a route changes; then `RawConnection` reads it again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from gevent import Timeout, get_hub

from smqrt.broker.outbox import ahead, backlog, dirty
from smqrt.broker.routes import RecordedRoute
from smqrt.broker.sessions import Session
from smqrt.broker.state import Recorder
from smqrt.broker.topics import Route, Topic
from smqrt.loop.scheduling import share
from smqrt.loop.threads import Awaited
from smqrt.smq import data_path

log = logging.getLogger("smqrt")

SOCKETS = 1 << 18
"""Only descriptors below this number are used."""
BUCKETS = 1 << 14
ROUTES = BUCKETS * 4
"""The maximum number of routes, four in each bucket of the table. A client whose bucket is full can't join."""
MAX_ROUTES_OF_CLIENT = 64
JOIN_AFTER = 16
"""A client joins after this number of single messages: joining and leaving cost as much as a few of them."""
RETRY_AFTER = 4096
"""The same for a client that could not join."""
_ROOM_BYTES = 256 << 10
_EVENTS = 256
STAY_NS = 4_000_000
"""While messages are frequent, the forwarder waits for this time instead of the event loop, and timers can be late."""
RECORDING_STAY_NS = 1_000_000
"""The same with a journal, whose rows have the time at the end."""
_SEGMENTS = _ROOM_BYTES // 15 + 1  # the smallest message has 15 bytes
_ERROR = 1 << 31  # added to the number of an error, where otherwise the number of sent bytes is
_READ = 1


class Subscriber(Protocol):
    """A connection that the forwarder sends to."""

    @property
    def fd(self) -> int: ...

    def forwarded(self, data: bytes, sent: int) -> None: ...

    def send_failed(self) -> None: ...


class Publisher(Protocol):
    """A connection that the forwarder receives from."""

    session: Session
    websocket: bool

    @property
    def fd(self) -> int: ...

    @property
    def is_plain(self) -> bool: ...

    def leave_forwarder(self) -> None: ...

    def handed_over(self, data: bytes) -> None: ...

    def receive_failed(self) -> None: ...


class ForwardedCount:
    """Counter of the messages to one topic that were forwarded.

    Args:
        forwarder: the forwarder, whose memory it uses.
        number: the number of a free counter.

    Attributes:
        number: see above.
        routes: the number of routes that use it.
    """

    __slots__ = ("_forwarder", "number", "routes")

    def __init__(self, forwarder: Forwarder, number: int) -> None:
        self._forwarder, self.number, self.routes = forwarder, number, 0

    def take(self) -> tuple[int, int]:
        """Return the number of messages and of bytes since the last call."""
        counts, at = self._forwarder.counts, self.number * 2
        messages, size = int(counts[at]), int(counts[at + 1])
        counts[at] = counts[at + 1] = 0.0
        return messages, size

    def release(self) -> None:
        """Free the counter for another topic; call `take` first."""
        self._forwarder.free_counts.append(self.number)


@dataclass(slots=True)
class _Joined:
    """A client that has joined, and its routes: TID, topic, and the number of the recorder or 0."""

    connection: Publisher
    routes: list[tuple[int, Topic, int]]


class Forwarder:
    """The forwarder of this thread's loop.

    Attributes:
        counts: messages and bytes of each counter.
        free_counts: the numbers of unused counters.

    Raises:
        ImportError: lupa has no LuaJIT.
        RuntimeError: the loop does not use epoll.
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._loop: Any = get_hub().loop
        if self._loop.backend != "epoll":
            raise RuntimeError(f"the event loop uses {self._loop.backend} instead of epoll")
        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.smq").joinpath("forwarder.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        functions = chunk(SOCKETS, BUCKETS, _SEGMENTS, self._loop.fileno())
        self._run, expired, self._add, self._remove, self._join, self._leave, epoll, timer, *rest = functions
        chars, generations, counts, handed, unsent, recorded, recorders, record_ends, self._keep = rest
        self._chars: Any = (ctypes.c_char * (6 * _ROOM_BYTES)).from_address(chars)
        self._generations = _view(ctypes.c_uint32, SOCKETS, generations)
        self.counts: memoryview[float] = _view(ctypes.c_double, 2 * ROUTES, counts)
        self._handed = _view(ctypes.c_uint32, 3 * _EVENTS, handed)
        self._unsent = _view(ctypes.c_uint32, 4 * _SEGMENTS, unsent)
        self._recorded: Any = (ctypes.c_char * (2 * _ROOM_BYTES)).from_address(recorded)
        self._recorder_ids = _view(ctypes.c_uint32, 2 * _SEGMENTS, recorders)
        self._record_ends = _view(ctypes.c_uint32, 2 * _SEGMENTS, record_ends)
        self._recorders: dict[int, Recorder] = {}
        self._share = share()
        self._recorder_routes: Counter[int] = Counter()
        self.free_counts = list(range(ROUTES))
        self._joined: dict[int, _Joined] = {}
        self._watched = -1
        if epoll < 0 or timer < 0:
            for descriptor in (epoll, timer):
                if descriptor >= 0:
                    os.close(descriptor)
            raise OSError("no descriptor is left")
        # The timer is first in a turn: a pending event would prevent the next stay.
        self._watchers: Any = [self._loop.io(epoll, _READ), self._loop.io(timer, _READ, priority=1)]
        for watcher, callback in zip(self._watchers, (self._on_readable, expired), strict=True):
            watcher.start(callback)
            watcher.ref = False  # does not keep the process alive

    # ---- joining and leaving

    def join(self, connection: Publisher) -> bool:
        """Begin to read a client, whose own watcher must be stopped then; return False if it can't be forwarded."""
        fd, routes = connection.fd, connection.session.routes
        if not connection.is_plain or not 0 < fd < SOCKETS or not 0 < len(routes) <= MAX_ROUTES_OF_CLIENT:
            return False
        self._joined[fd] = joined = _Joined(connection, [])
        for key, route in routes.items():
            tid = int.from_bytes(key[1:5], sys.byteorder)  # LuaJIT reads it from a frame as a number of this machine
            if not self._add_route(joined, fd, tid, route):
                self._forget(fd)
                return False
        etid = connection.session.etid.to_bytes(4, "big")
        if not self._join(fd, int.from_bytes(etid, sys.byteorder), int(connection.websocket)):
            self._forget(fd)
            return False
        return True

    def _add_route(self, joined: _Joined, fd: int, tid: int, route: Route) -> bool:
        recorder, topic = None, route
        if type(route) is RecordedRoute and route.buffered is not None:
            recorder, topic = route.recorder, route.buffered
        if type(topic) is not Topic or len(topic.raw) + len(topic.ws) != 1:
            return False
        subscriber: Any = (topic.raw or topic.ws)[0]
        if not subscriber.is_plain or not 0 < subscriber.fd < SOCKETS:
            return False
        if topic.forwarded is None:
            if not self.free_counts:
                return False
            topic.forwarded = ForwardedCount(self, self.free_counts.pop())
        number = 0 if recorder is None else self._number(recorder)
        counter = topic.forwarded
        counter.routes += 1
        self._recorder_routes[number] += 1
        joined.routes.append((tid, topic, number))
        subscribers[subscriber.fd] = subscriber
        return bool(self._add(fd, tid, subscriber.fd, int(subscriber.websocket), counter.number, number))

    def _number(self, recorder: Recorder) -> int:
        for number, known in self._recorders.items():
            if known is recorder:
                return number
        number = max(self._recorders, default=0) + 1
        self._recorders[number] = recorder
        return number

    def leave(self, connection: Publisher) -> None:
        """End reading a client."""
        joined = self._joined.get(connection.fd)
        if joined is not None and joined.connection is connection:
            self._leave(connection.fd)
            self._forget(connection.fd)

    def _forget(self, fd: int) -> None:
        for tid, topic, number in self._joined.pop(fd).routes:
            self._remove(fd, tid)
            self._recorder_routes[number] -= 1
            if number and not self._recorder_routes[number]:
                del self._recorders[number], self._recorder_routes[number]
            if topic.forwarded is not None:  # its counter ends with its last route, or when its subscribers change
                topic.forwarded.routes -= 1
                if not topic.forwarded.routes:
                    topic.end_forwarding()

    @property
    def is_current(self) -> bool:
        """Whether it belongs to the loop of this thread."""
        return self._loop is get_hub().loop

    def withdraw(self, subscriber: Subscriber) -> None:
        """End forwarding to a subscriber; publishers leave with their next message to it."""
        fd = subscriber.fd
        if subscribers.get(fd) is subscriber:
            del subscribers[fd]
            self._generations[fd] = self._generations[fd] + 1 & 0xFFFFFFFF

    # ---- turns

    def _on_readable(self) -> None:
        try:
            self._take_turn()
        except (Exception, Timeout):
            # gevent would stop the watcher, and its clients would not be read any more. If the error is permanent, the
            # descriptor stays readable and would use all of the time. So all clients leave.
            log.exception("error while messages were forwarded")
            for joined in list(self._joined.values()):
                _call(joined.connection.leave_forwarder)

    def _take_turn(self) -> None:
        """Forward what was received; what is not a message to a known destination goes to its connection.

        Queues are flushed first: forwarded messages must not overtake messages that were queued before.
        """
        if dirty or ahead:
            data_path.flush()
        forwards = not (
            ahead
            or backlog
            or any(outbox.queue for outbox in dirty)
            or any(recorder.full for recorder in self._recorders.values())
        )
        stay_ns = 0 if not forwards or self._has_other_work else RECORDING_STAY_NS if self._recorders else STAY_NS
        recorded, unsent, handed = self._run(forwards, stay_ns)
        self._watched = self._loop.activecnt
        if recorded:
            _call(self._record, recorded)
        if unsent or handed:
            self._finish(self._take_unsent(unsent), self._take_handed(handed))

    @property
    def _has_other_work(self) -> bool:
        """Whether something else waits for a turn of the event loop, which would not end a stay.

        That is also the case for new watchers, which epoll does not know yet, and for results of threads.
        """
        loop = self._loop
        return bool(
            dirty
            or data_path.deferred_reads
            or loop._callbacks
            or loop.pendingcnt
            or loop.activecnt != self._watched
            or Awaited.results
            or self._share.has_waiting
        )

    def _record(self, count: int) -> None:
        start = 0
        numbers, ends = self._recorder_ids[:count].tolist(), self._record_ends[:count].tolist()
        for number, end in zip(numbers, ends, strict=True):
            self._recorders[number].record(self._recorded[start:end])
            start = end

    def _take_unsent(self, count: int) -> list[tuple[Subscriber, bytes, int]]:
        """Return what could not be sent: the subscriber, the messages, and how many bytes were sent, or an error."""
        entries = self._unsent[: 4 * count].tolist()
        return [
            (subscribers[fd], self._chars[start : start + size], sent)
            for fd, start, size, sent in zip(*[iter(entries)] * 4, strict=True)
        ]

    def _take_handed(self, count: int) -> list[tuple[Publisher, bytes, int]]:
        """Return what was received but not forwarded: the publisher, and the data or the number of an error."""
        entries = self._handed[: 3 * count].tolist()
        return [
            (self._joined[fd].connection, self._chars[start : start + size] if size else b"", start)
            for fd, start, size in zip(*[iter(entries)] * 3, strict=True)
        ]

    def _finish(self, unsent: list[tuple[Subscriber, bytes, int]], handed: list[tuple[Publisher, bytes, int]]) -> None:
        """Pass both to the connections. Errors are last: a client that does not receive may still have published.

        Both are complete before the first call, because it may close other connections.
        """
        for subscriber, data, sent in unsent:
            if sent < _ERROR:
                _call(subscriber.forwarded, data, sent)
        for connection, data, error in handed:
            if data:
                _call(connection.handed_over, data)
            elif error:
                _call(connection.receive_failed)
            else:
                _call(connection.leave_forwarder)  # its own watcher reports the end of the stream
        for subscriber, _, sent in unsent:
            if sent >= _ERROR:
                _call(subscriber.send_failed)


def _call(function: Callable[..., object], *args: object) -> None:
    try:
        function(*args)
    except (Exception, Timeout):  # other connections must still get their data
        log.exception("error while messages were forwarded")


def _view(kind: Any, count: int, address: int) -> Any:
    array = (kind * count).from_address(address)
    return memoryview(array).cast("B").cast(kind._type_)


subscribers: dict[int, Subscriber] = {}
"""The connections to which messages are forwarded, by descriptor."""
_forwarder: Forwarder | None = None
_is_available = os.environ.get("SMQRT_KERNELS") != "pure"


def join(connection: Publisher) -> bool:
    """Let a client join the forwarder of this thread's loop; return False if it can't be forwarded."""
    global _forwarder, _is_available
    if _is_available and (_forwarder is None or not _forwarder.is_current):
        try:
            _forwarder = Forwarder()
        except OSError as error:  # perhaps there will be descriptors
            log.info("single messages are not forwarded in LuaJIT: %s", error)
            return False
        except Exception as error:
            _is_available = False
            log.info("single messages are not forwarded in LuaJIT: %s", error)
    return _forwarder is not None and _is_available and _forwarder.join(connection)


def leave(connection: Publisher) -> None:
    """End reading a client that has joined."""
    if _forwarder is not None:
        _forwarder.leave(connection)


def withdraw(subscriber: Subscriber) -> None:
    """End forwarding to a subscriber, because its socket is blocked or closed."""
    if _forwarder is not None:
        _forwarder.withdraw(subscriber)
