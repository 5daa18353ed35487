"""A hub as part of a cluster.

An engine (see `smqrt.cluster.engines`) finds the other nodes and makes a link to each. The link calls `joined`, passes
received messages and packets to the returned `RemoteNode`, and calls `left_node` when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from smqrt.broker.broker import Broker
from smqrt.broker.last_values import MAX_STAMP as MAX_VALUE_STAMP
from smqrt.broker.last_values import clock
from smqrt.broker.mqtt.client_ids import UID_PREFIX
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.broker.topics import Topic
from smqrt.cluster.leaving_nodes import AbsentNode, AbsentNodes, HubMigration, NodeEvents
from smqrt.cluster.mqtt_nodes import MqttNodes
from smqrt.cluster.mqtt_retained import RetainedSync
from smqrt.cluster.mqtt_sessions import SessionMoves
from smqrt.cluster.mqtt_streams import MqttStreams
from smqrt.cluster.remote_node import TOPIC_BYTES, NodeSendQueue, Phantom, RemoteNode
from smqrt.cluster.routing import Backpressure, ClusterRouting, RemoteClients, paced
from smqrt.cluster.state import ClusterState, SubscriberCounts, ValueSync
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType
from smqrt.wire.smq import LOCAL_BITS, node_of, server_of

T = TypeVar("T")

BATCH_ITEMS, BATCH_BYTES = 64, 1 << 14
"""The maximum number of topics or clients, and their bytes, that one background step of a snapshot sends."""
MAX_STAMP = 1 << 63
"""The limit of connect times from other nodes, so that a later time always fits a u64."""
MAX_SUBSCRIBERS = 1 << LOCAL_BITS
"""The maximum number of subscribers of a topic at one node, which is the number of ETIDs of a node."""


class ClusteredBroker:
    """A hub in a cluster.

    Args:
        broker: the hub.
        name: the cluster's name.
        key: at most 64 bytes, a secret that all nodes share.
        number: this node's number, 1 to 1023.
        clock_ms: the time, in ms since 1970.

    Attributes:
        state: the state that the parts share.
        remotes: the other nodes.
        interest: the topics with subscribers at other nodes.
        clients: the clients of other nodes.
        phantoms: the same clients by ETID.
        foreign: by ETID, the topic and the node of each remote client to which messages were sent.
        lost: the lost nodes, which may return.
        events: the node events for the application.
        migration: migrations of hubs to other processes, this hub included.
        values: last values that nodes share.
        waits: the publishers that wait.
        counts: the numbers of subscribers of all nodes, for observers.
        mqtt: filters and MQTT clients.
        streams: numbered messages of MQTT clients.
        retained: retained messages of MQTT clients.
        sessions: moves of the sessions of MQTT clients.
        routing: finds routes to other nodes.
        former_numbers: numbers of nodes whose clients have migrated here with their ETIDs. No other node may have them.
        changed: called with a node and "joined", "synced", or the reason for its removal.
        leave: takes the hub out of the cluster; the engine sets it, `suspend` and `resume`.
    """

    def __init__(self, broker: Broker, name: str, key: bytes, number: int, clock_ms: Callable[[], int]) -> None:
        self.broker, self.name = broker, name
        self.wire_name, self.count_lost = name.encode(), broker.stats.drop
        state = self.state = ClusterState(broker, key, clock_ms)
        self.remotes, self.interest = state.remotes, state.interest
        self.events, self.lost = NodeEvents(broker), AbsentNodes(state)
        self.migration = HubMigration(state)
        self.migration.on_moved, self.migration.on_lost = self._moved, self._not_taken_over
        self.values = ValueSync(state)
        self.waits = Backpressure(state)
        self.waits.send_again = self._send_values
        self.clients = RemoteClients(state, self.migration, self.waits)
        self.phantoms: Mapping[int, Phantom] = self.clients.phantoms
        self.foreign = self.clients.foreign
        self.counts = SubscriberCounts(state)
        self.streams = MqttStreams(state)
        self.mqtt = MqttNodes(state, self.migration, self.lost, self.streams)
        self.lost.on_forgotten = self._not_returned
        self.retained = RetainedSync(state, self.mqtt)
        self.mqtt.retained_changed = self.retained.changed
        self.sessions = SessionMoves(state, self.mqtt, self.lost, self.streams)
        self.streams.on_caught_up = self.sessions.caught_up
        self.mqtt.session_connected = self.sessions.connected
        self.mqtt.take_session = self.sessions.take
        self.mqtt.is_doubtful = self.sessions.is_doubtful
        self.mqtt.on_session_message = self.sessions.on_message
        self.routing = ClusterRouting(
            state, self.clients, self.lost, self.migration, self.values, self.waits, self.mqtt
        )
        self.changed: Callable[[RemoteNode, str], object] = lambda node, event: None
        self.leave: Callable[[], object] = lambda: None
        self.suspend: Callable[[], object] = lambda: None
        self.resume: Callable[[], object] = lambda: None
        self.former_numbers: set[int] = set()
        # The broker calls these for each message, client and observer. Bound here, they save a call of a method.
        self.forwarded, self.missed, self.with_link_backpressure = (
            self.routing.forwarded,
            self.routing.missed,
            self.routing.with_link_backpressure,
        )
        self.entered, self.left, self.holder = self.clients.entered, self.clients.left, self.clients.holder
        self.phantom, self.peers_elsewhere = self.clients.phantom, self.clients.peers_elsewhere
        self.end_client = self.clients.end_client
        self.pressed, self.observed = self.waits.pressed, self.counts.observed
        self.pause = self.migration.pause
        topics, subtopics = broker.topic_table, broker.subtopic_table
        topics.numbers = subtopics.numbers = state.numbers
        topics.named_otherwise, topics.absent = self._renumbered, self.clients.topic_at
        subtopics.on_new = self._new_subtopic
        for topic in topics.by_name.values():
            if topic.id != state.numbers.topic_number(topic.name or b""):
                self._renumbered(topic)
        self.renumber(number)
        broker.cluster = self
        if broker.devices is not None and len(broker.devices.filters.by_text):
            run_in_background(broker.devices.name_topics())

    # ---- numbers

    @property
    def number(self) -> int:
        """This node's number."""
        return self.broker.topic_table.node

    @property
    def others(self) -> frozenset[int]:
        """See `ClusterHooks`."""
        return frozenset(one.number for one in self.remotes if one.synced)

    def renumber(self, number: int) -> None:
        """Set another node number; only while no other node is reachable.

        Clients with an ETID of the old number keep it here. Other nodes use another ETID for them.
        """
        assert not self.remotes
        self.broker.topic_table.node = number
        state, server = self.state, self.broker.server
        state.public.clear()
        state.local.clear()
        state.public[server.etid], state.local[server_of(number)] = server_of(number), server.etid
        for etid in self.broker.sessions:
            if node_of(etid) != number:
                state.assign_public_etid(etid)

    def _renumbered(self, topic: Topic) -> None:
        """Announce a topic whose number differs from the one that its name gives."""
        key = self.state.key_of(topic)
        self.state.renumbered[key] = topic
        self.state.send_all(wire.keys_and_numbers(LinkType.NUMBERED, [(*key, topic.id)]))

    def _new_subtopic(self, number: int, name: bytes) -> None:
        self.state.send_all(wire.names(LinkType.SUBTOPICS, [(number, name)]))

    # ---- migration of this hub

    @property
    def is_paused(self) -> bool:
        """See `ClusterHooks`."""
        return self.migration.is_paused

    def stay(self) -> None:
        """See `ClusterHooks`."""
        self.migration.stay()
        self.resume()

    @property
    def awaits_clients(self) -> bool:
        """See `ClusterHooks`."""
        return self.migration.awaits

    def succeed(self, number: int) -> None:
        """See `ClusterHooks`."""
        self.migration.begin(number)
        if number not in (0, self.number):
            self.state.local[server_of(number)] = self.broker.server.etid

    def resync(self) -> None:
        """See `ClusterHooks`. The clients keep their ETIDs, which have the number of their former node."""
        if self.migration.awaits:  # `succeed` was not called: this hub has no predecessor
            self.migration.begin(0)
        for etid in self.broker.sessions:
            if not node_of(etid) and etid not in self.state.public:
                self.state.assign_public_etid(etid)
        self.former_numbers.update(map(node_of, self.broker.sessions))
        for topic in self.broker.topic_table.by_name.values():
            topic.forget_routes()
            if topic.observers:
                self.counts.observed(topic)
        for node in self.remotes:
            run_in_background(paced(node, self.migration.framed(node, self._snapshot(node))))
            self.counts.send(node.watched, [node])

    # ---- messages that one server of the cluster handles

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        """See `ClusterHooks`.

        Only the publisher's node decides, so that no message is handled twice. Of the nodes that handle the topic and
        are reachable from there, it selects the one that started first. When the publisher's node does not handle the
        topic, each receiving node decides by the same rule.
        """
        key = self.state.key_of(topic)
        if isinstance(origin, RemoteNode) and key in origin.once:
            return False
        # Before other nodes have created the topic, their filters show that they will handle it.
        bits = self.mqtt.once(topic) if origin is not None else 0
        nodes = [node for node in self.remotes if key in node.once or node.bit & bits]
        nodes = [node for node in nodes if node is self.migration.present(node)]
        nodes = [node for node in nodes if not node.send_queue.keeps]
        oldest = min(nodes, key=_seniority, default=None)
        if oldest is None or (self.state.epoch, self.number) <= _seniority(oldest):
            return True
        if origin is None:
            ptid = int.from_bytes(frame[smq.PTID], "big")
            oldest.send_queue.put(wire.rewritten(frame, oldest.once[key], self.state.public_etid(ptid)))
        return False

    def handles_once(self, topic: Topic, number: int) -> None:
        """See `ClusterHooks`."""
        if not self.migration.awaits:
            _send_once([(*self.state.key_of(topic), number)], self.remotes)

    # ---- subscriptions and clients of this hub

    def subscribed(self, topic: Topic) -> None:
        """See `ClusterHooks`."""
        if not self.remotes or topic.name is None:
            return
        # Routes of other nodes depend on the first subscriber only; observers count all.
        if topic.subscribers <= 2 and not self.migration.awaits and (nodes := self._nodes_for(topic, 1)):
            self.state.send_all(wire.keys(LinkType.INTEREST, [self.state.key_of(topic)]), nodes)
        self.counts.changed(topic)

    def unsubscribed(self, topic: Topic) -> None:
        """See `ClusterHooks`."""
        if not self.remotes or topic.name is None:
            return
        if topic.subscribers < 2 and (nodes := self._nodes_for(topic, 0)):
            self.state.send_all(wire.keys(LinkType.NO_INTEREST, [self.state.key_of(topic)]), nodes)
        self.counts.changed(topic)

    def _nodes_for(self, topic: Topic, interests: int) -> list[RemoteNode]:
        """Return the nodes that have to send messages of a topic for so many subscribers."""
        if self.broker.devices is None:
            return self.remotes if topic.subscribers == interests else []
        return [node for node in self.remotes if self._interests(topic, node) == interests]

    def _interests(self, topic: Topic, node: RemoteNode) -> int:
        """Return the number of subscribers for which a node has to send messages.

        To shared subscriptions of MQTT clients, nodes with links of version 2 send messages of their own.
        """
        devices = self.broker.devices
        is_shared = devices is not None and node.send_queue.version >= 2 and devices.is_shared_only(topic)
        return topic.subscribers - is_shared

    def end_all(self, text: bytes | None) -> None:
        """Close the clients of all nodes."""
        self.state.send_all([wire.end(0, text or b"")])
        self.broker.end_clients(text, None)

    # ---- nodes join and leave

    def joined(self, number: int, send_queue: NodeSendQueue) -> RemoteNode:
        """Add a reachable node and send it a snapshot.

        Args:
            number: the node's number.
            send_queue: the send queue to the node.

        Returns:
            The receiver of the messages and packets of the node.
        """
        state = self.state
        bit = ~state.bits & state.bits + 1  # the lowest free bit
        state.bits |= bit
        node = RemoteNode(self.broker, self.foreign, number, bit, send_queue, self._process)
        self.remotes.append(node)
        send_queue.on_full = lambda: self.waits.filled(node)
        self.migration.hold_for_predecessor(node)
        self.streams.greet(node)
        run_in_background(paced(node, self.migration.framed(node, self._snapshot(node))))
        state.forget_value_routes()
        self.changed(node, "joined")
        return node

    def _process(self, node: RemoteNode, packet: bytes) -> None:
        handler = HANDLERS.get(packet[0]) if packet else None
        if handler is None:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[:1].hex()} of another node")
        handler(self, node, packet)

    def _snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Send a node the state of this hub, in portions.

        Changes are sent at once, also between two portions. Each item is read when it is sent, so that no old state
        follows a newer one.
        """
        broker, state, queue = self.broker, self.state, node.send_queue
        once = ((broker.topic_table.get(tid), inbox) for tid, inbox in list(broker.server.once.items()))
        if not self.migration.awaits:
            _send_once([(*state.key_of(topic), inbox.id) for topic, inbox in once if topic is not None], [node])
        for pressing in _portions(broker.slow.pressure.here() if broker.slow is not None else []):
            self.waits.announce(pressing, node)
            yield
        for names in _portions(list(broker.subtopic_table.by_id.items()), lambda one: len(one[1])):
            queue.send(wire.names(LinkType.SUBTOPICS, names))
            yield
        for numbered in _portions(list(state.renumbered.items())):
            queue.send(wire.keys_and_numbers(LinkType.NUMBERED, ((*key, topic.id) for key, topic in numbered)))
            yield
        for keys in _portions(list(self.counts.watching)):
            queue.send(wire.keys(LinkType.WATCH, keys))
            yield
        for clients in _portions([*broker.staying.values(), *broker.sessions.values()], lambda one: len(one.info)):
            queue.send(wire.peers(self.clients.announced(one) for one in clients if not one.closed))
            yield
        for topics in _portions([] if self.migration.awaits else list(broker.topic_table.by_name.values())):
            wanted = [state.key_of(topic) for topic in topics if topic.subscribers and self._interests(topic, node)]
            queue.send(wire.keys(LinkType.INTEREST, wanted))
            yield
        yield from self.mqtt.snapshot(node)
        yield from self.retained.snapshot(node)
        yield from self.values.snapshot(node)
        # Last, since a node that has received it has received the whole snapshot.
        queue.send([bytes((LinkType.SYNCED,))])

    def _send_values(self, node: RemoteNode) -> Iterator[None]:
        """Send a node what the newest message of a topic changes, since it may have missed messages."""
        yield from self.values.snapshot(node)
        yield from self.retained.snapshot(node)

    def left_node(self, node: RemoteNode, why: str, reason: Drop = Drop.LINK_LOST) -> None:
        """Remove a node that is lost, or has left, with its clients and its topics.

        Messages queued for it count as lost. For a lost node, later messages to its topics do, too.
        """
        if node.gone:
            return
        if node in self.remotes:
            self.remotes.remove(node)
        if self.migration.awaits_successor_of(node):
            return
        node.gone = True  # queries skip its clients from now on; they are removed in portions
        node.send_queue.end(reason, self.broker.stats.drop)
        if self.broker.slow is not None:
            self.broker.slow.pressure.forget(node.send_queue)
        self.waits.caught_up(node)
        absent = None if node.send_queue.has_left else self.lost.add(node)
        self.sessions.left(node, absent)
        self.streams.left(node, is_lost=absent is not None)
        run_in_background(self._forget_node(node, absent))
        self.events.gone(node, why)
        self.changed(node, why)

    def _not_returned(self, absent: AbsentNode) -> None:
        self.sessions.forgotten(absent)
        self.mqtt.send_postponed()
        stream = absent.stream
        if stream is not None and all(one.stream is not stream for one in self.remotes):
            self.streams.end(stream)

    def _not_taken_over(self, node: RemoteNode) -> None:
        self.left_node(node, "no process has taken over its hub")

    def _moved(self, before: RemoteNode, node: RemoteNode) -> None:
        """Remove the predecessor of `node`, which has its clients."""
        self.sessions.moved(before, node)
        self.streams.moved(before, node)
        before.gone = True
        if self.broker.slow is not None:
            self.broker.slow.pressure.forget(before.send_queue)
        self.waits.caught_up(before)
        run_in_background(self._forget_node(before, None))
        self.changed(before, "another process has taken over its hub")

    def _forget_node(self, node: RemoteNode, absent: AbsentNode | None) -> Iterator[None]:
        """Forget the clients and topics of a node, in portions; `absent` records the topics, for missed messages."""
        state = self.state
        self.clients.vanished(node.server)
        for phantom in node.phantoms.values():
            self.clients.vanished(phantom)
            yield
        for keys in state.interest.keys(node.bit) if node.interest else ():
            if absent is not None:
                self.lost.add_topics(absent, keys)
            for key in keys:
                state.interest.discard(key, node.bit)
                state.forget_routes(key)
            yield
        node.forget_routes()
        yield from self.mqtt.forget(node, absent)
        if absent is not None:
            absent.leaving &= ~node.bit
        yield from self.counts.forget(node)
        state.bits &= ~node.bit  # only now, since another node may get the bit: no topic has it any more

    def detach(self) -> None:
        """Leave the cluster: the hub continues alone, with its clients."""
        assert not self.remotes
        self.migration.clear()
        self.lost.clear()
        self.broker.cluster = None
        self.broker.topic_table.absent = lambda number: None
        for client in self.broker.sessions.values():
            client.forget_routes()


def _seniority(node: RemoteNode) -> tuple[int, int]:
    return node.send_queue.epoch, node.number


def _send_once(topics: list[tuple[int, int, int]], nodes: Iterable[RemoteNode]) -> None:
    for node in nodes:
        if node.send_queue.knows_backpressure:
            node.send_queue.send(wire.keys_and_numbers(LinkType.ONCE, topics))


def _portions(items: list[T], size_bytes: Callable[[T], int] = lambda one: 0) -> Iterator[list[T]]:
    portion: list[T] = []
    size = 0
    for one in items:
        portion.append(one)
        size += size_bytes(one)
        if len(portion) >= BATCH_ITEMS or size >= BATCH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


# ---- Control packets of another node. Each function processes one type of packet.


def _interest(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    was_lost = cluster.lost.at(node)
    for key in wire.parse_keys(packet):
        for absent in was_lost:
            cluster.lost.discard_topic(absent, key)
        if cluster.interest.add(key, node.bit):
            node.interest += 1
            node.grow(TOPIC_BYTES)
            cluster.state.forget_routes(key)


def _no_interest(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for key in wire.parse_keys(packet):
        if cluster.interest.discard(key, node.bit):
            node.interest -= 1
            node.grow(-TOPIC_BYTES)
            cluster.state.forget_routes(key)


def _numbered(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for number, check, own in wire.parse_keys_and_numbers(packet):
        node.grow(TOPIC_BYTES if (number, check) not in node.numbers else 0)
        node.numbers[number, check] = own
        cluster.state.forget_routes((number, check))


def _subtopics(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    broker = cluster.broker
    table = broker.subtopic_table
    for number, name in wire.parse_names(packet):
        here = table.by_name.get(name)
        if here is None:
            if refusal := broker.limits.of_all(table, name):
                broker.refuse(None, refusal)
                continue  # messages from there keep the number of the other node
            here = table.named(name, number)
        if here != number:
            node.grow(TOPIC_BYTES if number.to_bytes(4, "big") not in node.subtopics else 0)
            node.subtopics[number.to_bytes(4, "big")] = here.to_bytes(4, "big")
            node.forget_routes()


def _peers(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for announced in wire.parse_peers(packet):
        if announced.stamp >= MAX_STAMP:
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, f"a client's connect time is out of range: {announced.stamp}"
            )
        before = node.phantoms.get(announced.etid)
        # A snapshot may repeat a client that was announced when it connected.
        if before is None or before.stamp != announced.stamp:
            if before is not None:
                node.grow(-before.size_bytes)
                cluster.clients.release(before)
            phantom = node.phantoms[announced.etid] = Phantom(node, announced)
            node.grow(phantom.size_bytes)
            cluster.clients.appeared(phantom)
            if phantom.uid.startswith(UID_PREFIX):
                cluster.sessions.appeared(phantom)


def _peers_gone(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for etid in wire.parse_etids(packet):
        phantom = node.phantoms.pop(etid, None)
        if phantom is not None:
            node.grow(-phantom.size_bytes)
            cluster.clients.vanished(phantom)


def _synced(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    node.synced = True
    cluster.streams.synced(node)
    if cluster.lost.nodes:
        cluster.sessions.returned(node)
        cluster.lost.returned(node)
    cluster.events.synced(node)
    cluster.changed(node, "synced")


def _end(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    etid, text = wire.parse_end(packet)
    cluster.clients.end_here(etid, text or None)


def _watch(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    keys = list(wire.parse_keys(packet))
    before = len(node.watched)
    node.watched.update(keys)
    node.grow(TOPIC_BYTES * (len(node.watched) - before))
    cluster.counts.send(keys, [node])


def _unwatch(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    before = len(node.watched)
    node.watched.difference_update(wire.parse_keys(packet))
    node.grow(TOPIC_BYTES * (len(node.watched) - before))


def _count(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for number, check, subscribers in wire.parse_keys_and_numbers(packet):
        if subscribers > MAX_SUBSCRIBERS:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"{subscribers} subscribers at another node")
        cluster.counts.counted(node, (number, check), subscribers)


def _topics(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for number, name in wire.parse_names(packet):
        cluster.values.add_topic(name)
        topic = cluster.broker.topic_table.by_name.get(name)
        if topic is None:
            continue
        if topic.id != number:
            there = number.to_bytes(4, "big")
            node.grow(TOPIC_BYTES if there not in node.renumbered else 0)
            node.renumbered[there] = topic
        if node.send_queue.knows_stamps:
            node.stamped.add(topic.key)
            topic.forget_routes()


def _value(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    if len(packet) < smq.PUBLISH_HEADER_BYTES - 2:  # without the u16 length
        raise ProtocolError(CloseReason.SHORT_PACKET, "a last value of another node is too short")
    _restore_value(cluster, node, smq.frame(bytes((smq.Type.PUBLISH,)) + packet[1:]), None)


def _value_at(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    if len(packet) < smq.PUBLISH_HEADER_BYTES - 2 + 8:  # the u64 stamp precedes
        raise ProtocolError(CloseReason.SHORT_PACKET, "a last value of another node is too short")
    # u8 type, u64 stamp, then the frame without its length and type
    _restore_value(cluster, node, smq.frame(bytes((smq.Type.PUBLISH,)) + packet[9:]), _stamp_of(packet))


def _restore_value(cluster: ClusteredBroker, node: RemoteNode, frame: bytes, stamp: int | None) -> None:
    frame = wire.with_subtopics(frame, node.subtopics) if node.subtopics else frame
    # The node may have sent the value before it received the number that this hub uses for the topic.
    tid = frame[smq.TID]
    topic = node.renumbered.get(tid)
    if topic is not None and tid not in cluster.broker.topic_table.by_key:
        frame = wire.rewritten(frame, topic.id, int.from_bytes(frame[smq.PTID], "big"))
    cluster.values.restore(frame, stamp, node.send_queue.epoch)


def _pressed(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for key in wire.parse_keys(packet):
        cluster.waits.pressed_by(node, key)


def _released(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for key in wire.parse_keys(packet):
        cluster.waits.released_by(node, key)


def _once(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    for number, check, at in wire.parse_keys_and_numbers(packet):
        key = number, check
        node.grow(TOPIC_BYTES * (bool(at) - (key in node.once)))
        if at:
            node.once[key] = at
        else:
            node.once.pop(key, None)


def _clock(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    node.heard_us = _stamp_of(packet)
    clock.heard(node.heard_us)


def _stamp_of(packet: bytes) -> int:
    stamp = int.from_bytes(packet[1:9], "big")  # u8 type, u64 stamp
    if len(packet) < 9 or stamp >= MAX_VALUE_STAMP:
        raise ProtocolError(CloseReason.SHORT_PACKET, "the time of another node is missing or out of range")
    return stamp


def _successor(cluster: ClusteredBroker, node: RemoteNode, packet: bytes) -> None:
    if len(packet) != 3:
        raise ProtocolError(CloseReason.SHORT_PACKET, "the number of the predecessor is missing")
    cluster.migration.succeeds(node, int.from_bytes(packet[1:], "big"))


HANDLERS: dict[int, Callable[[ClusteredBroker, RemoteNode, bytes], None]] = {
    LinkType.INTEREST: _interest,
    LinkType.NO_INTEREST: _no_interest,
    LinkType.NUMBERED: _numbered,
    LinkType.SUBTOPICS: _subtopics,
    LinkType.PEERS: _peers,
    LinkType.PEERS_GONE: _peers_gone,
    LinkType.SYNCED: _synced,
    LinkType.WATCH: _watch,
    LinkType.UNWATCH: _unwatch,
    LinkType.COUNT: _count,
    LinkType.END: _end,
    LinkType.TOPICS: _topics,
    LinkType.VALUE: _value,
    LinkType.PRESSED: _pressed,
    LinkType.RELEASED: _released,
    LinkType.ONCE: _once,
    LinkType.VALUE_AT: _value_at,
    LinkType.CLOCK: _clock,
    LinkType.PAUSE: lambda cluster, node, packet: cluster.migration.pauses(node),
    LinkType.PAUSED: lambda cluster, node, packet: cluster.migration.paused(node),
    LinkType.SUCCESSOR: _successor,
    LinkType.SUCCEED: lambda cluster, node, packet: cluster.migration.succeeded(node),
    LinkType.SUCCEEDED: lambda cluster, node, packet: node.hold(False),
    LinkType.FILTERS: lambda cluster, node, packet: cluster.mqtt.on_filters(node, packet),
    LinkType.PART: lambda cluster, node, packet: cluster.mqtt.on_part(node, packet),
    LinkType.RETAINED: lambda cluster, node, packet: cluster.retained.on_retained(node, packet),
    LinkType.SESSION: lambda cluster, node, packet: cluster.sessions.on_session(node, packet),
    LinkType.MESSAGES: lambda cluster, node, packet: cluster.mqtt.on_messages(node, packet),
    LinkType.STREAMED: lambda cluster, node, packet: cluster.mqtt.on_numbered(node, packet),
    LinkType.GREETING: lambda cluster, node, packet: cluster.streams.on_greeting(node, packet),
    LinkType.CONTINUE: lambda cluster, node, packet: cluster.streams.on_continue(node, packet),
    LinkType.ARRIVED: lambda cluster, node, packet: cluster.streams.on_arrived(node, packet),
    LinkType.DECLINED: lambda cluster, node, packet: cluster.mqtt.on_declined(packet),
}
