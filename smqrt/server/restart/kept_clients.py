"""Clients that the old process of a hot restart keeps until it closes them, such as those over TLS: what is published
at the new process reaches them over a pair of sockets of its own, for which neither process ever waits.

    old                                                                     new
    relay, with one of the sockets                                     ──▶
    hub {staying}, before anything is published at the new one         ──▶  a subscriber that stands for them
    changes {key, clients, gone, topics}, over that socket             ──▶
                                                                       ◀──  runs {key, data}

The new one says in `ready` that it can do this. It is no link of a cluster: the old process would need a number there,
and its other clients, its server and its last values would be announced once more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import gevent
from gevent.event import Event

from smqrt.auth.identity import ANONYMOUS, Identity, Method
from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.session import Session, SessionState
from smqrt.broker.snapshot import Record
from smqrt.broker.topics import Topic
from smqrt.server.restart.control_socket import STEP_S
from smqrt.settings.limit_register import LineLimit
from smqrt.smq.hub_registry import SucceedingBroker, succession
from smqrt.smq.session_migration import OTHERS_TURN_S, FrozenHub
from smqrt.wire import smq
from smqrt.wire.cluster_packets import rewritten
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")

MOST_WAITING_BYTES = 16 << 20
"""What may wait in the new process for the old one; further messages are counted as dropped."""
_MESSAGE_BYTES = 1 << 19
_CHANGES_AT_ONCE = 1000
_CHANGES_S = 0.005
"""Changes of so long are told together."""


# ---- the old process


class KeptClients:
    """What the old process keeps, and what comes for it.

    Args:
        channel: the way to the new process, over which it is told of the other socket.
    """

    def __init__(self, channel: FdChannel) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self._channel = FdChannel(ours)
        self._hubs: dict[str, SucceedingBroker] = {}
        self._may_deliver: dict[str, Event] = {}
        self._changed: dict[str, dict[int, Topic]] = {}
        self._has_changed = Event()
        self._greenlets: list[gevent.Greenlet[..., None]] = []
        try:
            channel.send({"do": "relay"}, [theirs.fileno()])
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._greenlets = [gevent.spawn(self._tell), gevent.spawn(self._deliver)]

    def keep(self, hub: FrozenHub) -> Record:
        """What stays of a hub whose clients stand still. From now on its changes are noted."""
        broker = hub.broker
        staying = [one for one in hub.others if not one.closed]
        topics = Counter(topic for one in staying for topic in (one.topics or {}).values())
        self._hubs[broker.key], self._may_deliver[broker.key] = broker, Event()
        self._changed[broker.key] = {}
        broker.on_changed = partial(self._note, self._changed[broker.key])
        return {
            "clients": [_client_record(one) for one in staying],
            "topics": [[topic.id, topic.name, count] for topic, count in topics.items()],
        }

    def begin(self, broker: SucceedingBroker) -> None:
        """The other clients of the hub are gone from its tables, so that messages and counts are those of who stays."""
        self._may_deliver[broker.key].set()
        self._has_changed.set()

    def _note(self, changed: dict[int, Topic], topic: Topic) -> None:
        changed[topic.id] = topic
        self._has_changed.set()

    def _tell(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                self._has_changed.wait()
                gevent.sleep(_CHANGES_S)
                self._has_changed.clear()
                for key in [key for key, begun in self._may_deliver.items() if begun.is_set()]:
                    changed = self._changed[key]
                    while changed:
                        topics = [changed.popitem()[1] for _ in range(min(len(changed), _CHANGES_AT_ONCE))]
                        self._channel.send({"do": "changes", "key": key, **_changes(self._hubs[key], topics)})

    def _deliver(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                broker = self._hubs.get(message.get("key", ""))
                if message["do"] == "runs" and broker is not None:
                    self._may_deliver[broker.key].wait(STEP_S)  # to let go of 10,000 clients takes a while
                    _deliver(broker, message["data"])
                    gevent.sleep(OTHERS_TURN_S)

    def end(self) -> None:
        """Pass nothing on any more."""
        gevent.killall(self._greenlets)
        self._channel.close()
        for broker in self._hubs.values():
            broker.on_changed = None
        self._hubs.clear()


def _client_record(session: Session) -> list[object]:
    shown = "" if session.identity is None else session.identity.shown
    return [session.etid, session.uid, session.info, shown.encode("utf-8", "surrogateescape")]


def _changes(broker: Broker, topics: Sequence[Topic]) -> Record:
    named = [topic for topic in topics if topic.name is not None]
    clients = [(topic.id, broker.sessions.get(topic.id)) for topic in topics if topic.name is None]
    return {
        "clients": [_client_record(one) for _, one in clients if isinstance(one, Session)],
        "gone": [etid for etid, one in clients if one is None],
        "topics": [[one.id, one.name, one.subscribers - (one.id in broker.server.topics)] for one in named],
    }


def _deliver(broker: Broker, data: bytes) -> None:
    """Give messages to the clients that are here; the server of the new process has handled them already."""
    for key, run in _runs(data):
        topic = broker.topic_table.by_key.get(key)
        if topic is None:
            broker.stats.drop(Drop.CLOSED, smq.count_frames(run))
            continue
        topic.settle()
        for outbox in topic.raw:
            if outbox is not broker.server:
                outbox.put(run)
        if topic.ws:
            encoded = topic.encode(run)
            for outbox in topic.ws:
                outbox.put(encoded)


def _runs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Runs of one publisher to one destination each, with its key."""
    for head, frames in groupby(smq.frames(data), lambda frame: frame[3:11]):
        yield head[:4], b"".join(frames)


def late(broker: SucceedingBroker, runs: Sequence[tuple[int, int, bytes]]) -> Message:
    """A message with runs, each with its destination and publisher, that the old process passes on; and with the names
    of their topics, since one that was made there meanwhile may have another number at the new process, or be none.
    """
    topics = [broker.topic_table.by_key.get(tid.to_bytes(4, "big")) for tid in {tid for tid, _, _ in runs}]
    names = [[one.id, one.name] for one in topics if one is not None and one.name is not None]
    return {"do": "late", "key": broker.key, "frames": [list(one) for one in runs], "names": names}


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- the new process


def numbered_here(broker: SucceedingBroker, message: Message) -> Iterator[tuple[int, int, bytes]]:
    """The runs of a `late`, with the numbers that their topics have here; topics that are new are made."""
    numbers: dict[int, int] = {}
    for number, name in message.get("names", ()):  # older ones say none
        topic = broker.topic_table.by_name.get(name)
        if topic is None and not broker.limits.of_all(broker.topic_table, name):
            topic = broker.topic_table.named(name, number)
        if topic is not None and topic.id != number:
            numbers[number] = topic.id
    for tid, ptid, run in message["frames"]:
        here = numbers.get(tid, tid)
        yield here, ptid, run if here == tid else rewritten(run, here, ptid)


class Relay(Outbox):
    """A subscriber of a hub of the new process that stands for the clients which the old one keeps.

    Args:
        broker: the hub.
        send: takes what they are to get.
    """

    __slots__ = ("_broker", "_clients", "_counts_exactly", "_is_live", "_numbers", "_send", "_topics")

    def __init__(self, broker: SucceedingBroker, send: Any) -> None:
        super().__init__()
        self._broker, self._send = broker, send
        self._clients: dict[int, Session] = {}
        self._topics: dict[Topic, int] = {}
        self._numbers: dict[bytes, int] = {}
        self._counts_exactly = broker.cluster is None  # a cluster counts `elsewhere` itself
        self._is_live = False

    def flush(self) -> None:
        """See `Outbox`."""
        runs, self.queue = self.queue, []
        self._send(self, runs)

    def numbered(self, run: bytes) -> bytes:
        """A run with the number that its topic has in the old process."""
        number = self._numbers.get(run[3:7]) if self._numbers else None
        return run if number is None else rewritten(run, number, int.from_bytes(run[7:11], "big"))

    def lose(self, reason: Drop, messages: int) -> None:
        """Count messages that the clients do not get."""
        self._broker.stats.drop(reason, messages)

    def take(self, record: Record) -> None:
        """What the old process says of its clients, at first and whenever it changes."""
        for etid in record.get("gone", ()):
            self._forget(etid)
        for etid, uid, info, user in record["clients"]:
            self._keep(etid, uid, info, user.decode("utf-8", "surrogateescape"))
        for number, name, count in record["topics"]:
            self._subscribe(number, name, count)

    def _keep(self, etid: int, uid: bytes, info: bytes, user: str) -> None:
        table = self._broker.topic_table
        if etid.to_bytes(4, "big") in table.by_key:
            return
        session = Session(self._broker, self, 0)
        session.uid, session.info, session.etid, session.state = uid, info, etid, SessionState.CONNECTED
        if user:
            session.identity = Identity("" if user == ANONYMOUS else user, method=Method.NONE)
        session.topic = table.ephemeral(etid)
        session.topic.add(self)
        self._clients[etid] = session
        if self._is_live:
            self._announce(session)

    def _announce(self, session: Session) -> None:
        cluster = self._broker.cluster
        if cluster is not None and session.uid not in self._broker.uids and cluster.holder(session.uid) is None:
            self._broker.staying[session.etid] = session
            cluster.entered(session)  # not when it is back already: the newest of a uid is the only one

    def _forget(self, etid: int) -> None:
        session = self._clients.pop(etid, None)
        if session is not None and session.topic is not None:
            session.state = SessionState.CLOSED
            if self._broker.staying.pop(etid, None) is not None and self._broker.cluster is not None:
                self._broker.cluster.left(session)
            self._broker.gone(session.topic)

    def _subscribe(self, number: int, name: bytes, count: int) -> None:
        broker, table = self._broker, self._broker.topic_table
        topic = table.by_name.get(name)
        if topic is None:
            if not count or broker.limits.of_all(table, name):
                return
            topic = table.named(name, number)
        if topic.id != number:
            self._numbers[topic.key] = number
        before = self._topics.get(topic, 0)
        if count and not before:
            topic.add(self)
        elif before and not count:
            topic.discard(self)
        if self._counts_exactly:
            topic.elsewhere += max(count - 1, 0) - max(before - 1, 0)
        if count:
            self._topics[topic] = count
        else:
            self._topics.pop(topic, None)
        if self._is_live and count != before:
            broker.changed_count(topic)
            if broker.cluster is not None and bool(count) != bool(before):
                (broker.cluster.subscribed if count else broker.cluster.unsubscribed)(topic)

    def begin(self) -> None:
        """The hub is this process's: its changes are told to observers, and to other nodes."""
        self._is_live = True
        if self._broker.cluster is not None:
            run_in_background(self._announce_all())

    def _announce_all(self) -> Iterator[None]:
        for session in list(self._clients.values()):
            if not session.closed:
                self._announce(session)
            yield

    def end(self) -> Iterator[None]:
        """The old process has none of them any more; in portions."""
        for etid in list(self._clients):
            self._forget(etid)
            yield
        for topic in list(self._topics):
            self._subscribe(topic.id, topic.name or b"", 0)
            yield


class Relays:
    """What the new process passes on to the old one.

    Args:
        fd: of the socket to it, which this owns from now on.
    """

    def __init__(self, fd: int) -> None:
        self._channel = FdChannel(socket.socket(fileno=fd))
        self._relays: dict[str, Relay] = {}
        self._waiting: deque[tuple[str, Relay, bytes]] = deque()
        self._waiting_bytes = 0
        self._has_some = Event()
        self._over = False
        self._complaints = LineLimit()
        self._greenlets = [gevent.spawn(self._send), gevent.spawn(self._hear)]

    def place(self, broker: SucceedingBroker, record: Record | None) -> None:
        """Stand for the clients of a hub that stay, before anything is published here."""
        if record is not None and not self._over:
            relay = self._relays[broker.key] = Relay(broker, partial(self._put, broker.key))
            relay.take(record)

    def begin(self, broker: SucceedingBroker) -> None:
        """The hub is this process's."""
        if (relay := self._relays.get(broker.key)) is not None:
            relay.begin()

    def _put(self, key: str, relay: Relay, runs: list[bytes]) -> None:
        for run in runs:
            if self._over or self._waiting_bytes + len(run) > MOST_WAITING_BYTES:
                relay.lose(Drop.CLOSED if self._over else Drop.OVER_BUDGET, smq.count_frames(run))
                if not self._over:
                    self._complaints.warn("restart: the process before takes too little: its clients miss messages")
                continue
            self._waiting.append((key, relay, relay.numbered(run)))
            self._waiting_bytes += len(run)
        self._has_some.set()

    def _send(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                self._has_some.wait()
                self._has_some.clear()
                while self._waiting:
                    key, data = self._next()
                    self._channel.send({"do": "runs", "key": key, "data": data})
        self._end()

    def _next(self) -> tuple[str, bytes]:
        """The next messages, all of one hub."""
        key, size, runs = self._waiting[0][0], 0, []
        while self._waiting and self._waiting[0][0] == key and size < _MESSAGE_BYTES:
            runs.append(self._waiting.popleft()[2])
            size += len(runs[-1])
        self._waiting_bytes -= size
        return key, b"".join(runs)

    def _hear(self) -> None:
        try:
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                relay = self._relays.get(message.get("key", ""))
                if message["do"] == "changes" and relay is not None and succession.find(message["key"]) is not None:
                    relay.take(message)
                    gevent.sleep(OTHERS_TURN_S)
        except ChannelError:
            self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        for _, relay, run in self._waiting:
            relay.lose(Drop.CLOSED, smq.count_frames(run))
        self._waiting.clear()
        for relay in self._relays.values():
            run_in_background(relay.end())
        self._channel.close()

    def end(self) -> None:
        """The old process is gone, or goes on itself."""
        gevent.killall(self._greenlets)
        self._end()
