"""A broker under gevent: the hub's state behind sockets, with the API that Lua and Python share (specification: smq.md
§2).

Names are bytes and numbers are ids here; callbacks are plain functions that never raise and may answer `Pending`. What
applications call is `smqrt.hub` (Python) and `require"smq.hub"` (Lua); both are thin over this class.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from smqrt.broker.hooks import Hooks
from smqrt.broker.hub import Hub
from smqrt.broker.limits import Limits
from smqrt.broker.server_client import CATCH_ALL, Handler, ServerClient
from smqrt.broker.session import Session
from smqrt.broker.topics import NameStore, SubTopics, Topic, Topics
from smqrt.errors import ArgumentError, ClosedError
from smqrt.net import datapath, handover
from smqrt.net.listener import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S
from smqrt.net.namestore import SqliteNames
from smqrt.net.origins import Origins
from smqrt.net.randomness import random_u32
from smqrt.wire import smq

Name = bytes | int
SELF = b"self"

MIN_KEEPALIVE_INTERVAL_S = 3
MAX_KEEPALIVE_S = 32767
"""More is refused by Linux."""


@dataclass(slots=True)
class Options:
    """The options of `create` that are no callbacks (specification: smq.md §2.2)."""

    keepidle_s: int = KEEPALIVE_IDLE_S
    keepintv_s: int = 0
    readtmo_ms: int = 4000
    queuesize: int = 200
    rndtid: bool = False
    persist: str | None = None
    budget_bytes: int | None = None
    maxnames: int = 250_000
    clientnames: int = 10_000
    origins: Origins | None = None


class _Callback:
    """Observer that calls a function with the count and the topic; that of an ETID is called once."""

    def __init__(self, function: Callable[[int, Name], Any], observers: dict[int, _Callback]) -> None:
        self.function = function
        self._observers = observers

    def changed(self, topic: Topic, subscribers: int) -> None:
        """See `Observer`."""
        if topic.name is None:
            self._observers.pop(topic.id, None)
        self.function(subscribers, topic.id if topic.name is None else topic.name)


_brokers: WeakSet[Broker] = WeakSet()


def close_all() -> None:
    """Close every broker of this process, as the server does when it stops."""
    for broker in list(_brokers):
        broker.close()


class Broker:
    """One SMQ broker.

    Args:
        hooks: the application's callbacks.
        options: the other options of `create`.

    Raises:
        ArgumentError: the `persist` file can't be used.
    """

    def __init__(self, hooks: Hooks, options: Options) -> None:
        datapath.install()
        store: NameStore | None = SqliteNames(options.persist) if options.persist else None
        self.hub = Hub(
            hooks,
            random_u32=random_u32,
            clock=time.monotonic,
            encode=datapath.encode,
            store=store,
            random_server_etid=options.rndtid,
            queue_size=options.queuesize,
            limits=Limits(options.maxnames, options.clientnames),
        )
        self.hub.limit_chunks = handover.limit_chunks
        self.options = options
        self._observers: dict[int, _Callback] = {}
        _checked_keepalive("keepidle", options.keepidle_s)
        _checked_keepalive("keepintv", options.keepintv_s or 1)
        self.setkeepalive(options.keepidle_s, options.keepintv_s)
        _brokers.add(self)

    # ---- connections

    def connect(self, request: Any, arg: Any = None) -> bool:
        """Turn an HTTP request into an SMQ connection; blocks until the handshake ended (specification: smq.md §2.3).

        A request that is not SMQ gets 404, one of a page of another host 403, any when this broker is closed 503.
        Returns false when nothing was answered, because the WSGI server hands no connections over.
        """
        return handover.connect(self, request, arg)

    def setkeepalive(self, idle_s: int, interval_s: int = 0) -> None:
        """Set TCP keep-alive for new connections; the interval is a tenth of the idle time by default, at least 3 s."""
        _checked_keepalive("idle", idle_s)
        if interval_s:
            _checked_keepalive("intv", interval_s)
        self.keepidle_s = int(idle_s)
        self.keepintv_s = max(int(interval_s or idle_s // 10), MIN_KEEPALIVE_INTERVAL_S)

    def keep_alive(self, sock: Any) -> None:
        """Set TCP keep-alive on a client's socket, unless it is what the listener gave it."""
        if (self.keepidle_s, self.keepintv_s) == (KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.keepidle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.keepintv_s)

    def shutdown(self, text: bytes | None = None, etid: int | None = None) -> None:
        """Disconnect one client (`etid`) or all; without `text` the sockets just close.

        Raises:
            ArgumentError: `text` is longer than a packet can be.
        """
        if text is not None:
            _fitting("msg", text)
        self.hub.shutdown(text, etid)

    def close(self) -> None:
        """End all clients without a word, so that they come back when there is a broker again; what would begin
        something raises ClosedError from now on. A second call does nothing.
        """
        if self.hub.closed:
            return
        datapath.inlet.drain()
        self.hub.close()
        self._observers.clear()
        if self.hub.store:
            self.hub.store.close()

    def _open(self) -> Hub:
        if self.hub.closed:
            raise ClosedError("this hub has been closed; its application has ended, or called close()")
        return self.hub

    def peers(self) -> Iterator[Session | ServerClient]:
        """All connected clients and the server's own."""
        return self.hub.peers()

    def drops(self) -> dict[str, int]:
        """How many copies of messages were not delivered so far, by reason: the names of `Drop` in lower case."""
        return {reason.name.lower(): count for reason, count in self.hub.stats.drops.items()}

    def refused(self) -> dict[str, int]:
        """How often each limit was reached so far: the names of `Refusal` in lower case."""
        return {refusal.name.lower(): count for refusal, count in self.hub.stats.refused.items()}

    def etid2peer(self, etid: int) -> Session | ServerClient | None:
        """The client with that ETID."""
        return self.hub.server if etid == self.hub.server.etid else self.hub.sessions.get(etid)

    # ---- names

    def create(self, name: bytes, tid: int = 0) -> int:
        """Get or create a topic; gives its id."""
        return self._named(name, _checked_id("tid", tid)).id

    def _named(self, name: bytes, tid: int = 0) -> Topic:
        topics = self._open().topics
        self._check_room("topic", topics, _fitting("topic", name))
        return topics.named(name, tid)

    def _check_room(self, what: str, table: Topics | SubTopics, name: bytes) -> None:
        refusal = None if name in table.by_name else self.hub.limits.of_all(table, name)
        if refusal:
            self.hub.refuse(None, refusal)
            raise ArgumentError(f"{what}: {refusal.value}; {len(table.by_name)} are there")

    def createsub(self, name: bytes | None, stid: int = 0) -> int:
        """Get or create a sub-topic; gives its id, 0 for no name."""
        number = _checked_id("stid", stid)
        if name is None:
            return 0
        table = self._open().subtopics
        self._check_room("subtopic", table, _fitting("subtopic", name))
        return table.named(name, number)

    def gettid(self) -> int:
        """The server's ETID."""
        return self.hub.server.etid

    def tid2topic(self, tid: int) -> bytes | None:
        """The name of a topic id, None for an ETID or an unknown id."""
        topic = self._known(tid)
        return topic.name if topic else None

    def topic2tid(self, name: bytes) -> int | None:
        """The id of a topic name, if it exists."""
        topic = self.hub.topics.by_name.get(name)
        return topic.id if topic else None

    def tid2subtopic(self, stid: int) -> bytes | None:
        """The name of a sub-topic id, if it exists."""
        return self.hub.subtopics.by_id.get(stid)

    def subtopic2tid(self, name: bytes) -> int | None:
        """The id of a sub-topic name, if it exists."""
        return self.hub.subtopics.by_name.get(name)

    def topics(self) -> Iterator[tuple[int, bytes]]:
        """`(tid, name)` of every named topic."""
        return self.hub.topics.names()

    def subtopics(self) -> Iterator[tuple[int, bytes]]:
        """`(stid, name)` of every sub-topic."""
        return iter(list(self.hub.subtopics.by_id.items()))

    def _known(self, tid: int) -> Topic | None:
        return self.hub.topics.get(tid) if 0 <= tid <= 0xFFFFFFFF else None

    def _topic(self, topic: Name) -> Topic | None:
        if topic == SELF:
            return self.hub.server.topic
        return self._known(topic) if isinstance(topic, int) else self._named(topic)

    def _sub(self, subtopic: Name | None) -> int:
        return _checked_id("subtopic", subtopic) if isinstance(subtopic, int) else self.createsub(subtopic)

    # ---- the server's client

    def publish(self, data: bytes, topic: Name, subtopic: Name | None = None, ptid: int | None = None) -> int:
        """Publish; gives the number of messages that wait in the server's queue."""
        tid = topic if isinstance(topic, int) else self._topic(topic).id  # type: ignore[union-attr]
        sender = None if ptid is None else _checked_id("ptid", ptid)
        return self._open().publish(data, _checked_id("topic", tid), self._sub(subtopic), sender)

    def publish_threadsafe(
        self, data: bytes, topic: Name, subtopic: Name | None = None, ptid: int | None = None
    ) -> bool:
        """As `publish`, from any thread; false when so much waits for the loop that this was not taken."""
        self._open()
        if len(data) > smq.MAX_PAYLOAD_BYTES:
            raise ArgumentError(f"data: {len(data)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}, split it")
        return datapath.inlet.put(len(data), self.publish, data, topic, subtopic, ptid)

    def pubon(self, data: bytes, to_etid: int, from_etid: int, stid: int = 0) -> bool:
        """Send to one client on behalf of another."""
        return self._open().pubon(data, to_etid, from_etid, _checked_id("subtid", stid))

    def subscribe(self, topic: Name, handler: Handler | None = None, subtopic: Name | None = None) -> int:
        """Receive a topic; gives its id.

        Raises:
            ArgumentError: a number that is no topic's.
        """
        found = self._topic(topic)
        if found is None or (found.name is None and found is not self.hub.server.topic):
            raise ArgumentError(f"topic: {topic!r} is no topic's id; subscribe by name, or create the topic first")
        self._open().server.subscribe(found, handler, CATCH_ALL if subtopic is None else self._sub(subtopic))
        return found.id

    def unsubscribe(self, topic: Name) -> None:
        """Stop receiving a topic; nothing happens when it is unknown."""
        found = self._existing(topic)
        if found:
            self.hub.server.unsubscribe(found)

    def _existing(self, topic: Name) -> Topic | None:
        return self.hub.topics.by_name.get(topic) if isinstance(topic, bytes) and topic != SELF else self._topic(topic)

    def onmsg(self, handler: Handler | None) -> None:
        """Set the handler of messages without one of their own."""
        self._open().server.on_message(handler)

    def queuesize(self) -> tuple[int, int]:
        """`(free, used)` places of the publish queue."""
        return self.hub.server.queue_room()

    def observe(self, topic: Name, function: Callable[[int, Name], Any]) -> bool | None:
        """Call `function(subscribers, topic)` on every change; None for one's own ETID or an unknown number."""
        found = self._topic(topic)
        if found is None or found is self.hub.server.topic:
            return None
        self.unobserve(found.id)
        observer = self._observers[found.id] = _Callback(function, self._observers)
        self._open().observe(found, observer)
        return True

    def unobserve(self, topic: Name) -> None:
        """Stop calling the observer of a topic."""
        found = self._existing(topic)
        observer = self._observers.pop(found.id, None) if found else None
        if found and observer:
            self.hub.unobserve(found, observer)


def _fitting(what: str, text: bytes) -> bytes:
    if len(text) > smq.MAX_NAME_BYTES:
        raise ArgumentError(f"{what}: {len(text)} bytes; at most {smq.MAX_NAME_BYTES} fit a packet")
    return text


def _checked_keepalive(what: str, seconds: int) -> None:
    if not 1 <= seconds <= MAX_KEEPALIVE_S:
        raise ArgumentError(f"{what}: {seconds} is no time for TCP keep-alive; give 1 to {MAX_KEEPALIVE_S} seconds")


def _checked_id(what: str, number: int) -> int:
    if not 0 <= number <= 0xFFFFFFFF:
        raise ArgumentError(f"{what}: {number} is not a 32-bit id (0 to 4294967295)")
    return number
