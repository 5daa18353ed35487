"""Relay of messages to clients that stay at the old process of a hot restart.

The old process keeps some clients, such as those over TLS, until it closes them. Messages that are published at the new
process reach these clients over a separate socket pair. Neither process waits for the other.

    old                                                                     new
    relay, with one of the sockets                                     ──▶
    hub {staying}, before the first message of the new process         ──▶  a subscriber in place of these clients
    changes {key, clients, gone, topics}, over that socket             ──▶
                                                                       ◀──  runs {key, data}: batches of messages

The new process announces this ability in `ready`. A link of a cluster is unsuitable: the old process would need a node
number, and would announce its other clients, its server and its last values again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import gevent
from gevent.event import Event

from smqrt.auth.identity import ANONYMOUS, Identity, Method
from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.sessions import Record, Session, SessionState
from smqrt.broker.topics import Topic
from smqrt.server.restart.control_socket import STEP_S
from smqrt.settings.limits import LineLimit
from smqrt.smq.hub_registry import RegisteredBroker, hub_registry
from smqrt.smq.session_migration import YIELD_S, FrozenHub
from smqrt.wire import smq
from smqrt.wire.cluster_packets import rewritten
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message

log = logging.getLogger("smqrt")

MAX_QUEUED_BYTES = 16 << 20
"""The limit of the queue from the new process to the old one; further messages are counted as dropped."""
_MESSAGE_BYTES = 1 << 19
"""A message over the socket pair ends at the first batch that reaches this size."""
_CHANGES_AT_ONCE = 1000
_CHANGES_S = 0.005
"""Changes within this time are sent together."""

_ID_BYTES = 4  # of a topic
_IDS = slice(smq.TID.start, smq.PTID.stop)


# ---- the old process


class KeptClients:
    """The clients that stay at the old process.

    Args:
        channel: to the new process; one end of the new socket pair is sent over it.
    """

    def __init__(self, channel: FdChannel) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self._channel = FdChannel(ours)
        self._hubs: dict[str, RegisteredBroker] = {}
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
        self._greenlets = [gevent.spawn(self._send_changes), gevent.spawn(self._receive)]

    def keep(self, hub: FrozenHub) -> Record:
        """Return the clients of a frozen hub that stay, and their topics. From now on changes are recorded."""
        broker = hub.broker
        staying = [one for one in hub.others if not one.closed]
        topics = Counter(topic for one in staying for topic in one.topics)
        self._hubs[broker.key], self._may_deliver[broker.key] = broker, Event()
        changed: dict[int, Topic] = {}
        self._changed[broker.key] = changed

        def note(topic: Topic) -> None:
            changed[topic.id] = topic
            self._has_changed.set()

        broker.on_changed = note
        return {
            "clients": [_client_record(one) for one in staying],
            "topics": [[topic.id, topic.name, count] for topic, count in topics.items()],
        }

    def begin(self, broker: RegisteredBroker) -> None:
        """Start delivering messages and sending changes of a hub, whose tables now have only the clients that stay."""
        self._may_deliver[broker.key].set()
        self._has_changed.set()

    def _send_changes(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                self._has_changed.wait()
                gevent.sleep(_CHANGES_S)
                self._has_changed.clear()
                for key in [key for key, begun in self._may_deliver.items() if begun.is_set()]:
                    changed = self._changed[key]
                    while changed:
                        topics = [changed.popitem()[1] for _ in range(min(len(changed), _CHANGES_AT_ONCE))]
                        broker = self._hubs[key]
                        named = [topic for topic in topics if topic.name is not None]
                        # The topic of a client has no name; its id is the ETID of the client.
                        clients = [(topic.id, broker.sessions.get(topic.id)) for topic in topics if topic.name is None]
                        message: Message = {
                            "do": "changes",
                            "key": key,
                            "clients": [_client_record(one) for _, one in clients if isinstance(one, Session)],
                            "gone": [etid for etid, one in clients if one is None],
                            "topics": [
                                [one.id, one.name, one.subscribers - (one.id in broker.server.topics)] for one in named
                            ],
                        }
                        self._channel.send(message)

    def _receive(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                broker = self._hubs.get(message.get("key", ""))
                if message["do"] == "runs" and broker is not None:
                    self._may_deliver[broker.key].wait(STEP_S)  # removing 10,000 migrated clients takes a while
                    _deliver(broker, message["data"])
                    gevent.sleep(YIELD_S)

    def close(self) -> None:
        """Stop the relay."""
        gevent.killall(self._greenlets)
        self._channel.close()
        for broker in self._hubs.values():
            broker.on_changed = None
        self._hubs.clear()


def _client_record(session: Session) -> list[object]:
    shown = "" if session.identity is None else session.identity.shown
    return [session.etid, session.uid, session.info, shown.encode("utf-8", "surrogateescape")]


def _deliver(broker: Broker, data: bytes) -> None:
    """Send messages to the clients of this process, but not to its server: the new process has handled them already."""
    # A batch has one destination and one publisher.
    for ids, frames in groupby(smq.frames(data), lambda frame: frame[_IDS]):
        batch = b"".join(frames)
        topic = broker.topic_table.here(ids[:_ID_BYTES])
        if topic is None:
            broker.stats.drop(Drop.CLOSED, smq.count_frames(batch))
            continue
        topic.settle()
        for outbox in topic.raw:
            if outbox is not broker.server:
                outbox.put(batch)
        if topic.ws:
            encoded = topic.encode(batch)
            for outbox in topic.ws:
                outbox.put(encoded)


def late_message(broker: RegisteredBroker, batches: Sequence[tuple[int, int, bytes]]) -> Message:
    """Return a `late` message for the new process.

    It includes the names of the topics: a topic that was made here meanwhile may have another id in the new process.

    Args:
        broker: the hub.
        batches: destination, publisher and frames of each batch.
    """
    topics = [broker.topic_table.by_key.get(tid.to_bytes(4, "big")) for tid in {tid for tid, _, _ in batches}]
    names = [[one.id, one.name] for one in topics if one is not None and one.name is not None]
    return {"do": "late", "key": broker.key, "frames": [list(one) for one in batches], "names": names}


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- the new process


def with_local_ids(broker: RegisteredBroker, message: Message) -> Iterator[tuple[int, int, bytes]]:
    """Yield the batches of a `late` message with the topic ids of this process. Missing topics are created."""
    local_ids: dict[int, int] = {}
    for old_id, name in message.get("names", ()):  # older versions send none
        topic = broker.topic_table.by_name.get(name)
        if topic is None and not broker.limits.of_all(broker.topic_table, name):
            topic = broker.topic_table.named(name, old_id)
        if topic is not None and topic.id != old_id:
            local_ids[old_id] = topic.id
    for tid, ptid, batch in message["frames"]:
        local_id = local_ids.get(tid, tid)
        yield local_id, ptid, batch if local_id == tid else rewritten(batch, local_id, ptid)


class Relay(Outbox):
    """The subscriber of a hub at the new process that represents all clients of the old process.

    Args:
        broker: the hub.
        send: called with this relay and the batches for these clients.
    """

    __slots__ = ("_broker", "_clients", "_counts_exactly", "_is_live", "_old_ids", "_send", "_topics")

    def __init__(self, broker: RegisteredBroker, send: Callable[[Relay, list[bytes]], None]) -> None:
        super().__init__()
        self._broker, self._send = broker, send
        self._clients: dict[int, Session] = {}
        self._topics: dict[Topic, int] = {}
        self._old_ids: dict[bytes, int] = {}
        self._counts_exactly = broker.cluster is None  # a cluster counts `elsewhere` itself
        self._is_live = False

    def flush(self) -> None:
        """See `Outbox`."""
        batches, self.queue = self.queue, []
        self._send(self, batches)

    def with_old_id(self, batch: bytes) -> bytes:
        """Return a batch with the id that its topic has in the old process."""
        old_id = self._old_ids.get(batch[smq.TID]) if self._old_ids else None
        return batch if old_id is None else rewritten(batch, old_id, int.from_bytes(batch[smq.PTID], "big"))

    def lose(self, reason: Drop, messages: int) -> None:
        """Count messages that are not delivered to the clients."""
        self._broker.stats.drop(reason, messages)

    def update(self, record: Record) -> None:
        """Apply the clients and topics of the old process, or their changes."""
        for etid in record.get("gone", ()):
            self._forget(etid)
        table = self._broker.topic_table
        for etid, uid, info, encoded_user in record["clients"]:
            user = encoded_user.decode("utf-8", "surrogateescape")
            # A change may name a client that was sent before.
            if table.here(etid.to_bytes(_ID_BYTES, "big")) is not None:
                continue
            session = Session(self._broker, self, 0)
            session.uid, session.info, session.etid, session.state = uid, info, etid, SessionState.CONNECTED
            if user:
                session.identity = Identity("" if user == ANONYMOUS else user, method=Method.NONE)
            session.topic = table.ephemeral(etid)
            session.topic.add(self)
            self._clients[etid] = session
            if self._is_live:
                self._announce(session)
        for old_id, name, count in record["topics"]:
            self._subscribe(old_id, name, count)

    def _announce(self, session: Session) -> None:
        """Announce a client to the cluster, unless it has reconnected: only the newest session of a uid counts."""
        cluster = self._broker.cluster
        if cluster is not None and session.uid not in self._broker.uids and cluster.holder(session.uid) is None:
            self._broker.staying[session.etid] = session
            cluster.entered(session)

    def _forget(self, etid: int) -> None:
        session = self._clients.pop(etid, None)
        if session is not None and session.topic is not None:
            session.state = SessionState.CLOSED
            if self._broker.staying.pop(etid, None) is not None and self._broker.cluster is not None:
                self._broker.cluster.left(session)
            self._broker.gone(session.topic)

    def _subscribe(self, old_id: int, name: bytes, count: int) -> None:
        """Set the number of subscribers that a topic has at the old process."""
        broker, table = self._broker, self._broker.topic_table
        topic = table.by_name.get(name)
        if topic is None:
            if not count or broker.limits.of_all(table, name):
                return
            topic = table.named(name, old_id)
        if topic.id != old_id:
            self._old_ids[topic.key] = old_id
        before = self._topics.get(topic, 0)
        if count and not before:
            topic.add(self)
        elif before and not count:
            topic.discard(self)
        if self._counts_exactly:
            # The relay itself counts as one subscriber.
            topic.for_nodes().elsewhere += max(count - 1, 0) - max(before - 1, 0)
        if count:
            self._topics[topic] = count
        else:
            self._topics.pop(topic, None)
        if self._is_live and count != before:
            broker.notify_observers_later(topic)
            if broker.cluster is not None and bool(count) != bool(before):
                (broker.cluster.subscribed if count else broker.cluster.unsubscribed)(topic)

    def begin(self) -> None:
        """Start announcing changes to observers and other nodes: the hub belongs to this process now."""

        def announce_all() -> Iterator[None]:
            for session in list(self._clients.values()):
                if not session.closed:
                    self._announce(session)
                yield

        self._is_live = True
        if self._broker.cluster is not None:
            run_in_background(announce_all())

    def remove_all(self) -> Iterator[None]:
        """Remove the clients and their subscriptions, one by one."""
        for etid in list(self._clients):
            self._forget(etid)
            yield
        for topic in list(self._topics):
            self._subscribe(topic.id, topic.name or b"", 0)
            yield


class Relays:
    """The relays of all hubs of the new process, over one socket.

    Args:
        fd: the socket to the old process, owned by this object.
    """

    def __init__(self, fd: int) -> None:
        self._channel = FdChannel(socket.socket(fileno=fd))
        self._relays: dict[str, Relay] = {}
        self._queue: deque[tuple[str, Relay, bytes]] = deque()
        self._queued_bytes = 0
        self._has_queued = Event()
        self._is_closed = False
        self._drop_lines = LineLimit()
        self._greenlets = [gevent.spawn(self._send), gevent.spawn(self._receive)]

    def place(self, broker: RegisteredBroker, record: Record | None) -> None:
        """Add the relay of a hub, before its first message is published here."""
        if record is not None and not self._is_closed:
            relay = self._relays[broker.key] = Relay(broker, partial(self._put, broker.key))
            relay.update(record)

    def begin(self, broker: RegisteredBroker) -> None:
        """Start announcing changes of a hub, which belongs to this process now."""
        if (relay := self._relays.get(broker.key)) is not None:
            relay.begin()

    def _put(self, key: str, relay: Relay, batches: list[bytes]) -> None:
        for batch in batches:
            if self._is_closed:
                relay.lose(Drop.CLOSED, smq.count_frames(batch))
            elif self._queued_bytes + len(batch) > MAX_QUEUED_BYTES:
                relay.lose(Drop.OVER_BUDGET, smq.count_frames(batch))
                self._drop_lines.warn("restart: the old process reads too slowly: messages to its clients are dropped")
            else:
                self._queue.append((key, relay, relay.with_old_id(batch)))
                self._queued_bytes += len(batch)
        self._has_queued.set()

    def _send(self) -> None:
        with contextlib.suppress(ChannelError):
            while True:
                self._has_queued.wait()
                self._has_queued.clear()
                while self._queue:
                    # All batches of a message belong to one hub.
                    key, size, batches = self._queue[0][0], 0, []
                    while self._queue and self._queue[0][0] == key and size < _MESSAGE_BYTES:
                        batches.append(self._queue.popleft()[2])
                        size += len(batches[-1])
                    self._queued_bytes -= size
                    self._channel.send({"do": "runs", "key": key, "data": b"".join(batches)})
        self._discard()

    def _receive(self) -> None:
        try:
            while True:
                message, fds = self._channel.receive(None)
                _close_all(fds)
                relay = self._relays.get(message.get("key", ""))
                if message["do"] == "changes" and relay is not None and hub_registry.find(message["key"]) is not None:
                    relay.update(message)
                    gevent.sleep(YIELD_S)
        except ChannelError:
            self._discard()

    def _discard(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for _, relay, batch in self._queue:
            relay.lose(Drop.CLOSED, smq.count_frames(batch))
        self._queue.clear()
        for relay in self._relays.values():
            run_in_background(relay.remove_all())
        self._channel.close()

    def close(self) -> None:
        """Remove the relays, because the old process has exited or continues to serve."""
        gevent.killall(self._greenlets)
        self._discard()
