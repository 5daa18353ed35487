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
from importlib import resources
from typing import Any, Protocol

from gevent import get_hub

from smqrt.broker.outbox import ahead, backlog, dirty
from smqrt.broker.routes import RecordedRoute
from smqrt.broker.sessions import Session
from smqrt.broker.state import Recorder
from smqrt.broker.topics import Route, Topic
from smqrt.loop.scheduling import share
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
    """Counter of the messages to one topic that were forwarded."""

    __slots__ = ("_counts", "_free", "number")

    def __init__(self, counts: memoryview[float], free: list[int]) -> None:
        self._counts, self._free, self.number = counts, free, free.pop()

    def take(self) -> tuple[int, int]:
        """Return the number of messages and of bytes since the last call."""
        at = self.number * 2
        messages, size = int(self._counts[at]), int(self._counts[at + 1])
        self._counts[at] = self._counts[at + 1] = 0.0
        return messages, size

    def release(self) -> None:
        """Free the counter for another topic; call `take` first."""
        self._free.append(self.number)


class Forwarder:
    """The forwarder of this thread's loop.

    Raises:
        ImportError: lupa has no LuaJIT.
        OSError: the loop does not use epoll.
    """

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._loop: Any = get_hub().loop
        if self._loop.backend != "epoll":
            raise OSError(f"the event loop uses {self._loop.backend} instead of epoll")
        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.smq").joinpath("forwarder.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        functions = chunk(SOCKETS, BUCKETS, _SEGMENTS, self._loop.fileno())
        self._run, expired, self._add, self._remove, self._join, self._leave, epoll, timer, *rest = functions
        chars, generations, counts, handed, unsent, recorded, recorders, record_ends, self._keep = rest
        self._chars: Any = (ctypes.c_char * (6 * _ROOM_BYTES)).from_address(chars)
        self._generations = _view(ctypes.c_uint32, SOCKETS, generations)
        self._counts = _view(ctypes.c_double, 2 * ROUTES, counts)
        self._handed = _view(ctypes.c_uint32, 3 * _EVENTS, handed)
        self._unsent = _view(ctypes.c_uint32, 4 * _SEGMENTS, unsent)
        self._recorded: Any = (ctypes.c_char * (2 * _ROOM_BYTES)).from_address(recorded)
        self._recorder_ids = _view(ctypes.c_uint32, 2 * _SEGMENTS, recorders)
        self._record_ends = _view(ctypes.c_uint32, 2 * _SEGMENTS, record_ends)
        self._recorders: dict[int, Recorder] = {}
        self._share = share()
        self._free_counts = list(range(ROUTES))
        self._publishers: dict[int, tuple[Publisher, list[int]]] = {}
        if epoll < 0 or timer < 0:
            raise OSError("no descriptor is left for epoll or a timer")
        self._watchers: Any = [self._loop.io(descriptor, _READ) for descriptor in (epoll, timer)]
        self._watchers[0].start(self._on_readable)
        self._watchers[1].start(expired)

    # ---- joining and leaving

    def join(self, connection: Publisher) -> bool:
        """Begin to read a client, whose own watcher must be stopped then; return False if it can't be forwarded."""
        fd, routes = connection.fd, connection.session.routes
        if not connection.is_plain or not 0 < fd < SOCKETS or not 0 < len(routes) <= MAX_ROUTES_OF_CLIENT:
            return False
        tids: list[int] = []
        self._publishers[fd] = connection, tids
        for key, route in routes.items():
            tid = int.from_bytes(key[1:5], sys.byteorder)  # LuaJIT reads it from a frame as a number of this machine
            if not self._add_route(fd, tid, route):
                self._forget(fd)
                return False
            tids.append(tid)
        etid = connection.session.etid.to_bytes(4, "big")
        if not self._join(fd, int.from_bytes(etid, sys.byteorder), int(connection.websocket)):
            self._forget(fd)
            return False
        return True

    def _add_route(self, fd: int, tid: int, route: Route) -> bool:
        recorder, topic = 0, route
        if type(route) is RecordedRoute and route.buffered is not None:
            recorder, topic = self._number(route.recorder), route.buffered
        if type(topic) is not Topic:
            return False
        if len(topic.raw) + len(topic.ws) != 1:
            return False
        subscriber: Any = (topic.raw or topic.ws)[0]
        if not subscriber.is_plain or not 0 < subscriber.fd < SOCKETS:
            return False
        if topic.forwarded is None:
            if not self._free_counts:
                return False
            topic.forwarded = ForwardedCount(self._counts, self._free_counts)
        subscribers[subscriber.fd] = subscriber
        counter = topic.forwarded.number
        return bool(self._add(fd, tid, subscriber.fd, int(subscriber.websocket), counter, recorder))

    def _number(self, recorder: Recorder) -> int:
        for number, known in self._recorders.items():
            if known is recorder:
                return number
        number = len(self._recorders) + 1
        self._recorders[number] = recorder
        return number

    def leave(self, fd: int) -> None:
        """End reading a client."""
        self._leave(fd)
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        _, tids = self._publishers.pop(fd)
        for tid in tids:
            self._remove(fd, tid)
        if not self._publishers:
            self._recorders.clear()

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
        if recorded:
            self._record(recorded)
        if unsent:
            self._queue_unsent(unsent)
        if handed:
            self._hand_over(handed)

    @property
    def _has_other_work(self) -> bool:
        """Whether something waits for the next turn of the event loop that is not a readable descriptor."""
        loop = self._loop
        return bool(dirty or data_path.deferred_reads or loop._callbacks or loop.pendingcnt or self._share.has_waiting)

    def _record(self, count: int) -> None:
        start = 0
        numbers, ends = self._recorder_ids[:count].tolist(), self._record_ends[:count].tolist()
        for number, end in zip(numbers, ends, strict=True):
            self._recorders[number].record(self._recorded[start:end])
            start = end

    def _queue_unsent(self, count: int) -> None:
        entries = self._unsent[: 4 * count].tolist()
        # Complete before the first is queued: its connection may be closed then, which may close others.
        unsent = [
            (subscribers[fd], self._chars[start : start + size], sent)
            for fd, start, size, sent in zip(*[iter(entries)] * 4, strict=True)
        ]
        for subscriber, data, sent in unsent:
            if sent >= _ERROR:
                subscriber.send_failed()
            else:
                subscriber.forwarded(data, sent)

    def _hand_over(self, count: int) -> None:
        entries = self._handed[: 3 * count].tolist()
        # Complete before the first is routed: connections may leave then, and others use their descriptors.
        handed = [
            (self._publishers[fd][0], self._chars[start : start + size] if size else b"", start)
            for fd, start, size in zip(*[iter(entries)] * 3, strict=True)
        ]
        for connection, data, error in handed:
            if data:
                connection.handed_over(data)
            elif error:
                connection.receive_failed()
            else:
                connection.leave_forwarder()  # its own watcher reports the end of the stream


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
        except Exception as error:
            _is_available = False
            log.info("single messages are not forwarded in LuaJIT: %s", error)
    return _forwarder is not None and _is_available and _forwarder.join(connection)


def leave(connection: Publisher) -> None:
    """End reading a client that has joined."""
    if _forwarder is not None:
        _forwarder.leave(connection.fd)


def withdraw(subscriber: Subscriber) -> None:
    """End forwarding to a subscriber, because its socket is blocked or closed."""
    if _forwarder is not None:
        _forwarder.withdraw(subscriber)
