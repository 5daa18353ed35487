"""MQTT clients of a hub in a cluster: filters, and messages with their attributes, over links of version 2.

Nodes send each other their filters with wildcards. A node that has a topic which a filter of another node matches sends
it the messages with the name of the topic, until that node has created the topic and announces its subscribers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from math import ceil, inf

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.arrivals import AGAIN, prefix_of
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.filters import mqtt_name, split_shared
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, OTHER_GROUPS, ArrivedBatch, MqttBatch, mqtt_batch
from smqrt.broker.outbox import Drop, ahead, run_at_once, run_in_background
from smqrt.broker.state import BrokerPeer, TakeSession
from smqrt.broker.topics import Topic
from smqrt.cluster.leaving_nodes import AbsentNode, AbsentNodes, HubMigration
from smqrt.cluster.mqtt_filters import RemoteFilters, RemoteGroup
from smqrt.cluster.mqtt_streams import ENTRY_BYTES, Entry, MqttStreams
from smqrt.cluster.remote_node import RemoteNode, count_messages
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason, ProtocolError
from smqrt.settings.limits import Limit
from smqrt.wire import cluster_mqtt, smq
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_mqtt import NEVER_MS, Numbered, Wanted, WireMessages
from smqrt.wire.cluster_packets import LinkType
from smqrt.wire.mqtt.fields import is_topic_filter
from smqrt.wire.mqtt.filter_tree import FilterTree

MAX_FILTERS = 100_000
"""The maximum number of filters of one node. With more, it gets all messages."""
FILTER_BYTES = 400
"""The approximate memory for a filter of another node, without its text."""
GROUP_BYTES = 100
"""The approximate memory for a shared subscription in a set."""
GROUP_TRIES, GROUP_TRY_S = 5, 0.5
"""The number of times, and the seconds between two, that a hub looks for a client of a group that has left a node."""
PORTION_ITEMS = 64
"""Filters that one background step of a snapshot sends."""
FILTERS = Limit("cluster_filters", "", f"a node has more than {MAX_FILTERS} filters, and gets all messages from now on")
Put = Callable[[bytes], object]


class MqttNodes:
    """The MQTT side of one hub's cluster; see `smqrt.broker.state.ClusterMqtt`.

    Args:
        state: the state that the parts of the cluster share.
        migration: migrations of hubs.
        lost: the lost nodes.
        streams: numbered messages.

    Attributes:
        filters: the filters of other nodes.
        retained_changed, take_session, session_connected, is_doubtful: see `ClusterMqtt`.
        on_session_message: called with a message of another node for one session.
    """

    def __init__(self, state: ClusterState, migration: HubMigration, lost: AbsentNodes, streams: MqttStreams) -> None:
        self._state, self._migration, self._lost, self._streams = state, migration, lost, streams
        self.filters = RemoteFilters()
        self.retained_changed: Callable[[bytes], object] = lambda name: None
        self.take_session: TakeSession = lambda client_id, user, is_clean: True
        self.session_connected: Callable[[Device], object] = lambda device: None
        self.is_doubtful: Callable[[str], bool] = lambda client_id: False
        self.on_session_message: Callable[[Numbered], object] = lambda found: None
        self._own: dict[str, int] = {}
        """The filters that other nodes know of this hub."""
        self._postponed: deque[tuple[bytes, MqttBatch, Collection[str], bool]] = deque()
        """Messages for shared subscriptions that this process may not know yet, see `_postpone`."""
        self._postponed_bytes = 0
        self._changed: dict[str, None] = {}
        """Filters of other nodes that have changed since the routes were last checked."""
        devices, handlers = state.broker.devices, state.broker.handler_filters
        for text in [*(devices.texts() if devices is not None else ()), *(handlers or ())]:
            self.filter_changed(text)

    @property
    def _broker(self) -> Broker:
        return self._state.broker

    def nodes(self) -> list[RemoteNode]:
        """Return the nodes with links of version 2."""
        return [node for node in self._state.remotes if node.send_queue.version >= cluster_mqtt.VERSION]

    @property
    def awaits_clients(self) -> bool:
        """Whether this hub will take over the clients of another process."""
        return self._migration.awaits

    @property
    def has_lost(self) -> bool:
        """Whether a node cannot be reached, which may have sessions of MQTT clients."""
        return bool(self._lost.nodes)

    def asked(self) -> list[RemoteNode]:
        """Return the nodes that may have sessions of MQTT clients, also those whose hub migrates."""
        found = (*self._state.remotes, *self._migration.nodes)
        return [node for node in found if node.has_mqtt and node is self._migration.present(node)]

    def _nodes_with(self, bits: int) -> Iterable[RemoteNode]:
        """Return the nodes of a set; messages are kept for those whose hub migrates."""
        return dict.fromkeys(map(self._migration.present, self._state.nodes_with(bits, self._migration.nodes)))

    # ---- filters of this hub

    def filter_changed(self, text: str) -> None:
        """See `ClusterMqtt`."""
        wanted = self._wanted(text)
        if wanted == self._own.get(text, 0):
            return
        if wanted:
            self._own[text] = wanted
        else:
            del self._own[text]
        if self._migration.awaits:  # a snapshot follows
            return
        for node in self.nodes():
            node.send_queue.send(cluster_mqtt.filters([(text, wanted)]))
            ahead[node.send_queue] = None  # before the client gets its answer, see `ClusterState.send_all`

    def _wanted(self, text: str) -> int:
        """Return what this hub does with messages that a filter matches, as a `Wanted`."""
        devices, handlers = self._broker.devices, self._broker.handler_filters
        group, filter_text = split_shared(text) or (None, text)
        found = devices.filters.by_text.get(filter_text) if devices is not None else None
        if group is not None:
            shared = found.groups.get(group) if found is not None else None
            if shared is None:
                return 0
            return Wanted.CONNECTED if shared.is_connected else Wanted.OFFLINE
        wanted = 0
        if found is not None and found.has_wildcard and found.members:
            wanted = Wanted.MESSAGES
        handler = handlers.get(text) if handlers is not None else None
        if handler is not None:
            wanted |= Wanted.MESSAGES | (Wanted.ONCE if handler.once else 0)
        return wanted

    def snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Send a node the filters of this hub, in portions."""
        if node.send_queue.version < cluster_mqtt.VERSION:
            return
        if self._broker.devices is not None:
            node.send_queue.send([bytes((LinkType.FILTERS,))])
        if self._migration.awaits:
            return
        texts = list(self._own)
        for at in range(0, len(texts), PORTION_ITEMS):
            portion = [(text, self._own[text]) for text in texts[at : at + PORTION_ITEMS] if text in self._own]
            node.send_queue.send(cluster_mqtt.filters(portion))
            yield

    # ---- filters of other nodes

    def on_filters(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Filters packet."""
        if len(packet) == 1:
            node.has_mqtt = True
        was_lost = self._lost.at(node) if self._lost.nodes else []
        for text, wanted in cluster_mqtt.parse_filters(packet):
            shared = split_shared(text)
            if shared is None or not is_topic_filter(shared[1]):
                raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a filter of another node is not valid")
            is_known = text in node.filters
            if wanted and not is_known:
                if len(node.filters) >= MAX_FILTERS:
                    FILTERS.refused(f"node {node.number}")
                    text, wanted = "#", Wanted.MESSAGES
                    node.is_wide = True
                else:
                    node.grow(FILTER_BYTES + len(text))
            elif not wanted and is_known:
                node.grow(-FILTER_BYTES - len(text))
            for absent in was_lost:
                self._lost.discard_filter(absent, text)
            self._set(node, text, wanted)

    def _set(self, node: RemoteNode, text: str, wanted: int) -> None:
        if wanted:
            node.filters[text] = wanted
        elif node.is_wide and text == "#":
            return
        else:
            node.filters.pop(text, None)
        self.filters.set(text, wanted, node.bit)
        if not self._changed:
            run_in_background(self._forget_routes())
        self._changed[text] = None

    def _forget_routes(self) -> Iterator[None]:
        """Remove cached routes to the topics that changed filters match, in portions."""
        yield  # more filters may follow in this turn
        changed, self._changed = self._changed, {}
        tree: FilterTree[bool] = FilterTree()
        for text in changed:
            tree.set((split_shared(text) or (None, text))[1], True)
        for topic in list(self._broker.topic_table.by_name.values()):
            if (
                topic.cached
                and (name := mqtt_name(topic.name or b"")) is not None
                and any(True for _ in tree.match(name))
            ):
                topic.forget_routes()
            yield

    def forget(self, node: RemoteNode, absent: AbsentNode | None) -> Iterator[None]:
        """Remove the filters of a lost node, in portions; `absent` records them, for messages that are kept for it."""
        node.is_wide = False
        for text, wanted in list(node.filters.items()):
            if absent is not None:
                self._lost.add_filter(absent, text, wanted)
            self._set(node, text, 0)
            yield

    # ---- what other nodes want

    def wants(self, name: bytes) -> bool:
        """See `ClusterMqtt`."""
        state = self._state
        if any(not node.synced for node in state.remotes):
            return True
        key = state.numbers.topic(name)
        if state.interest.nodes(key) or (self._lost.nodes and self._lost.wanting(key, key[0], name)):
            return True
        lost = self._lost.filters
        return any(True for _ in self.filters.match(name)) or any(True for _ in (lost.match(name) if len(lost) else ()))

    def once(self, topic: Topic) -> int:
        """Return the bits of the nodes whose application has a filter with `once` for a topic."""
        return self.filters.once(topic.name or b"") if len(self.filters) else 0

    # ---- messages to other nodes

    def put(self, node: RemoteNode, topic: Topic, public: int, plain: Put | None) -> Put:
        """Return a function that sends batches to a node.

        Args:
            node: the node.
            topic: the topic of the batches.
            public: the ETID that other nodes use for the publisher.
            plain: sends a batch without attributes; None for a node that does not know the topic yet.
        """
        queue, name = node.send_queue, topic.name or b""

        def send(batch: bytes) -> None:
            if plain is not None and not isinstance(batch, MqttBatch):
                plain(batch)
            elif isinstance(batch, MqttBatch) and batch.qos and node.stream is not None:
                self._streams.put(node.stream, self._wired(name, batch, public), batch)
            else:
                queue.put(cluster_mqtt.messages(self._wired(name, batch, public)))

        return send

    def put_missed(self, missing: int, wanting: list[RemoteNode], topic: Topic, public: int) -> Put:
        """Return a function that keeps batches with QoS 1 and 2 for lost nodes, and counts others as missed.

        Args:
            missing: the bits of the lost nodes.
            wanting: the connected nodes that get the batches: a lost node may be among them again.
            topic, public: see `put`.
        """
        name, lost = topic.name or b"", self._lost
        known = [node.stream for node in wanting]
        streams = list(
            dict.fromkeys(one.stream for one in lost.of(missing) if one.stream is not None and one.stream not in known)
        )
        uncounted = sum(one.bit for one in lost.of(missing) if one.stream is not None)

        def send(batch: bytes) -> None:
            if not isinstance(batch, MqttBatch) or not batch.qos:
                lost.missed(missing, count_messages(batch))
                return
            lost.missed(missing & ~uncounted, count_messages(batch))
            for stream in streams:
                self._streams.put(stream, self._wired(name, batch, public), batch)

        return send

    def keeps(self, missing: int) -> bool:
        """Return whether messages with QoS 1 and 2 are kept for one of these lost nodes."""
        return any(one.stream is not None for one in self._lost.of(missing))

    def _wired(self, name: bytes, batch: bytes, public: int, group: str = "") -> WireMessages:
        frames = wire.rewritten(bytes(batch), 0, public)
        if not isinstance(batch, MqttBatch):
            return WireMessages(name, group.encode(), frames)
        left_ms = left_ms_of(batch.expires_s, self._broker.clock())
        properties, large = batch.properties, batch.large
        return WireMessages(name, group.encode(), frames, True, batch.qos, batch.retain, properties, left_ms, large)

    def _send(self, node: RemoteNode, messages: WireMessages, batch: bytes) -> None:
        """Send messages to a node, with a number if they have QoS 1 or 2."""
        if isinstance(batch, MqttBatch) and batch.qos and node.stream is not None:
            self._streams.put(node.stream, messages, batch)
        else:
            node.send_queue.put(cluster_mqtt.messages(messages))

    @property
    def kept_bytes(self) -> int:
        """See `ClusterMqtt`."""
        return self._streams.size_bytes

    def must_wait(self, publisher: BrokerPeer) -> bool:
        """See `ClusterMqtt`."""
        return self._streams.must_wait(publisher)

    def send_large(self, topic: Topic, batch: MqttBatch) -> tuple[int, int]:
        """See `ClusterMqtt`."""
        state, name = self._state, topic.name or b""
        public = state.public_etid(int.from_bytes(batch[smq.PTID], "big"))
        bits = state.interest.nodes(state.key_of(topic)) | self.filters.nodes(name)
        sent = missed = 0
        nodes = list(self._nodes_with(bits))
        for node in nodes:
            if node.send_queue.version >= cluster_mqtt.VERSION:
                self._send(node, self._wired(name, batch, public), batch)
                sent += 1
            else:
                missed += 1
        if self._lost.nodes and (missing := self.missing(topic, bits)):
            self.put_missed(missing, nodes, topic, public)(batch)
            sent += self.keeps(missing)
        put = self.group_put(topic)
        if put is not None:
            put(batch)
        return sent, missed

    # ---- shared subscriptions: the node of the publisher chooses the client, or the node of the client

    def missing(self, topic: Topic, bits: int) -> int:
        """Return the bits of lost nodes that want the messages to a topic; `bits` are those in sets of nodes."""
        key = self._state.key_of(topic)
        return self._lost.wanting(key, key[0], topic.name) | self._lost.left(bits)

    def group_put(self, topic: Topic) -> Put | None:
        """Return a function that sends batches to shared subscriptions that only other nodes have; None for none.

        `Devices` gets the batches, and calls `send_to_groups` when it delivers them. A client of a group that comes or
        leaves before that would otherwise double or lose messages.
        """
        name = topic.name or b""
        if not self.has_groups(name):
            return None

        def send(batch: bytes) -> None:
            devices = self._broker.devices
            if devices is None or (isinstance(batch, MqttBatch) and batch.origin & AGAIN):
                run_at_once(self.send_to_groups(name, batch, (), True), self._broker.clock)
                return
            if not isinstance(batch, MqttBatch):
                devices.put(ArrivedBatch.of(batch, OTHER_GROUPS))
            elif topic not in devices.by_topic:
                devices.put(batch)
            waits = devices.ledger is not None and devices.ledger.waits
            if isinstance(batch, MqttBatch) and batch.qos and not waits and not devices.is_behind:
                devices.flush()  # links are written before PUBACK

        return send

    def has_groups(self, name: bytes) -> bool:
        """See `ClusterMqtt`."""
        return self.filters.has_groups(name) or self._lost.filters.has_groups(name) or self._lost.has_unknown

    def send_to_groups(
        self, name: bytes, batch: bytes, own: Collection[str], leaves_own: bool = False
    ) -> Iterator[None]:
        """See `ClusterMqtt`."""
        connected = yield from self.filters.groups(name)
        lost = yield from self._lost.filters.groups(name)
        devices, known = self._broker.devices, set(own)
        for group in (*connected, *lost):
            is_own = leaves_own and devices is not None and devices.filters.group(group.text) is not None
            if is_own or group.text in known:
                continue
            known.add(group.text)
            bits = group.connected or group.offline
            if self.filters.group(group.text) is not group:
                self._keep_for_group(group.text, 0, name, batch)
            elif not self._send_to_group(group, name, batch, bits) and self._lost.nodes:
                self._keep_for_group(group.text, group.connected | group.offline, name, batch)
            yield
        if self._lost.has_unknown and isinstance(batch, MqttBatch) and batch.qos:
            self._postpone(name, batch, known, leaves_own)

    def _postpone(self, name: bytes, batch: MqttBatch, known: Collection[str], leaves_own: bool) -> None:
        """Keep a batch until all nodes are linked to which the former process of this hub was linked.

        Args:
            name: the name of the topic.
            batch: the messages.
            known: shared subscriptions that have got them.
            leaves_own: see `ClusterMqtt.send_to_groups`.
        """
        later = batch.like(batch)
        later.received, later.is_delivered = None, True  # their packet identifiers are saved, and free again then
        self._postponed.append((name, later, known, leaves_own))
        self._postponed_bytes += _memory_of(later, known)
        while self._postponed_bytes > self._streams.limit_bytes >> 2:
            _, oldest, known, _ = self._postponed.popleft()
            self._postponed_bytes -= _memory_of(oldest, known)
            self._broker.stats.drop(Drop.LINK_LOST, count_messages(oldest))

    def send_postponed(self) -> None:
        """Send the postponed messages, if all nodes are known now."""
        if self._postponed and not self._lost.has_unknown:
            postponed, self._postponed, self._postponed_bytes = self._postponed, deque(), 0
            run_in_background(self._send_all(postponed))

    def _send_all(self, postponed: deque[tuple[bytes, MqttBatch, Collection[str], bool]]) -> Iterator[None]:
        while postponed:
            name, batch, known, leaves_own = postponed.popleft()
            if batch.expires_s > self._broker.clock():
                yield from self.send_to_groups(name, batch, known, leaves_own)

    def send_to_group(self, text: str, name: bytes, batch: bytes) -> bool:
        """See `ClusterMqtt`."""
        group = self.filters.group(text)
        return group is not None and self._send_to_group(group, name, batch, group.connected)

    def forward_to_group(self, text: str, name: bytes, batch: bytes) -> None:
        """See `ClusterMqtt`.

        The other node gets a numbered batch back: it still keeps it, while this process might be killed. The batch does
        not circle: a node has announced that it has lost the clients before it returns a batch or sends it on.
        """
        if isinstance(batch, MqttBatch) and batch.arrived is not None:
            ledger = self._broker.devices.ledger
            if ledger is not None:
                ledger.touch(batch.arrived)
            if self._streams.decline(*batch.arrived):
                return
            batch.is_delivered = True
        group = self.filters.group(text)
        bits = 0 if group is None else group.connected or group.offline
        if group is not None and self._send_to_group(group, name, batch, bits):
            return
        if not self._keep_for_group(text, bits, name, batch):
            self._broker.stats.drop(Drop.UNROUTED, count_messages(batch))

    def on_declined(self, packet: bytes) -> None:
        """Process Declined: choose another client of the shared subscription."""
        entry = self._streams.take_declined(packet)
        if entry is not None and entry.messages.group:
            self._choose_again(entry, GROUP_TRIES)

    def _choose_again(self, entry: Entry, tries: int) -> None:
        """Deliver messages to a shared subscription whose client has left another node.

        This hub may not know yet where the client is now.
        """
        broker, text = self._broker, entry.messages.group.decode("utf-8", "replace")
        tables = (self.filters, self._lost.filters, broker.devices.filters)
        if tries and all(one.group(text) is None for one in tables):
            broker.call_later(GROUP_TRY_S, lambda: self._choose_again(entry, tries - 1))
            return
        left_ms = left_ms_of(entry.expires_s, broker.clock())
        self._deliver_to_group(entry.messages._replace(left_ms=left_ms), entry.origin & ~AGAIN)

    def _send_to_group(self, group: RemoteGroup, name: bytes, batch: bytes, bits: int) -> bool:
        nodes = [node for node in self._nodes_with(bits) if not node.gone]
        public = self._state.public_etid(int.from_bytes(batch[smq.PTID], "big"))
        group.turn += 1
        if isinstance(batch, MqttBatch) and batch.origin & AGAIN:
            first = next((one for one in self._state.remotes if prefix_of(one.identity) == batch.origin >> 64), None)
            if first is not None and first.bit & (group.connected | group.offline):
                return True  # the first node has saved it for a client of its own
        if nodes:
            turn = group.turn
            if isinstance(batch, MqttBatch) and batch.qos == 2 and (batch.received is not None or batch.origin):
                turn = hash(
                    self._streams.origin_of(batch) & ~AGAIN
                )  # sent again after a crash, it goes to the same node
            self._send(nodes[turn % len(nodes)], self._wired(name, batch, public, group.text), batch)
            return True
        return False

    def _keep_for_group(self, text: str, bits: int, name: bytes, batch: bytes) -> bool:
        """Keep a batch for a lost node with clients of a shared subscription, since no other node has any.

        Returns:
            Whether there is such a node.
        """
        known = self._lost.filters.group(text)
        lost = self._lost.left(bits) | (known.connected | known.offline if known is not None else 0)
        stream = next((one.stream for one in self._lost.of(lost) if one.stream is not None), None)
        if stream is not None and isinstance(batch, MqttBatch) and batch.qos:
            public = self._state.public_etid(int.from_bytes(batch[smq.PTID], "big"))
            self._streams.put(stream, self._wired(name, batch, public, text), batch)
            return True
        return False

    # ---- messages of other nodes

    def on_part(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Part packet."""
        if len(node.parts) + len(packet) > cluster_mqtt.MAX_BODY_BYTES:
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, "a message of another node is too large")
        node.parts += packet[1:]

    def body(self, node: RemoteNode, rest: bytes) -> bytes:
        """Return the parts so far and the rest of a body."""
        if not node.parts:
            return rest
        found = bytes(node.parts) + rest
        node.parts = bytearray()
        return found

    def on_messages(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Messages packet."""
        self._deliver(node, cluster_mqtt.parse_messages(self.body(node, packet[3:])))

    def on_numbered(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Streamed packet: messages that have arrived before are ignored."""
        found = cluster_mqtt.parse_numbered(self.body(node, packet[3:]))
        if not self._streams.takes(node, found):
            return
        if found.messages.session:
            self.on_session_message(found)
        else:
            self._deliver(node, found.messages, found)

    def _deliver(self, node: RemoteNode, found: WireMessages, numbered: Numbered | None = None) -> None:
        if found.group:
            arrived = (numbered.stream, numbered.number) if numbered is not None else None
            self._deliver_to_group(found, numbered.origin & ~AGAIN if numbered is not None else 0, arrived)
            return
        broker, count = self._broker, smq.count_frames(found.frames)
        topic = self._wanted_topic(found.name)
        if topic is None:
            broker.stats.drop(Drop.UNROUTED, count)
            return
        batch = self._unpacked(found, topic.id)
        if numbered is not None and isinstance(batch, MqttBatch):
            batch.origin, batch.arrived = numbered.origin & ~AGAIN, (numbered.stream, numbered.number)
        if found.large is not None and isinstance(batch, MqttBatch):
            if broker.devices is not None:
                large_messages.deliver(broker.devices, topic, batch)
        else:
            if count > 1:
                node.count_batch(topic.key, count - 1)
            (node.routes.get(topic.key) or node.resolve(topic.key)).deliver(batch)

    def _deliver_to_group(self, found: WireMessages, origin: int, arrived: tuple[int, int] | None = None) -> None:
        """Deliver messages to a client of a shared subscription, here or at another node.

        Args:
            found: the messages.
            origin, arrived: see `MqttBatch`.
        """
        broker = self._broker
        if broker.devices is None:
            broker.stats.drop(Drop.UNROUTED, smq.count_frames(found.frames))
            return
        topic = self._wanted_topic(found.name)
        batch = self._unpacked(found, topic.id if topic is not None else 0)
        if isinstance(batch, MqttBatch):
            batch.origin, batch.arrived = origin, arrived
            batch.is_delivered = arrived is None
        text = found.group.decode("utf-8", "replace")
        if topic is not None:
            broker.devices.put(batch)
        elif broker.devices.filters.group(text) is not None:  # the limit of topics is reached: others can't help
            broker.stats.drop(Drop.UNROUTED, smq.count_frames(found.frames))
        else:
            self._streams.in_order(lambda: self.forward_to_group(text, found.name, batch))

    def _wanted_topic(self, name: bytes) -> Topic | None:
        """Return the topic with this name; it is created if a filter matches it."""
        broker = self._broker
        topic = broker.topic_table.by_name.get(name)
        if topic is not None:
            return topic
        devices, handlers = broker.devices, broker.handler_filters
        if not (devices is not None and devices.wants(name)) and not (handlers is not None and handlers.wants(name)):
            return None
        if reached := broker.limits.of_all(broker.topic_table, name):
            broker.refuse(None, reached)
            return None
        return broker.topic_table.named(name)

    def _unpacked(self, found: WireMessages, topic_id: int) -> bytes:
        frames = wire.rewritten(found.frames, topic_id, int.from_bytes(found.frames[smq.PTID], "big"))
        group = found.group.decode("utf-8", "replace")
        if not found.is_mqtt:
            return ArrivedBatch.of(frames, group) if group else frames
        expires_s = expires_s_of(found.left_ms, self._broker.clock())
        batch = mqtt_batch(frames, found.qos, found.retain, found.properties, expires_s)
        batch.large, batch.group = found.large, group
        return batch


def _memory_of(batch: MqttBatch, groups: Collection[str]) -> int:
    """Return the memory of a postponed batch, approximately."""
    return len(batch) + len(batch.properties) + len(batch.large or b"") + ENTRY_BYTES + GROUP_BYTES * len(groups)


def left_ms_of(expires_s: float, now_s: float) -> int:
    """Return the time until a message expires, in ms, or `NEVER_MS`."""
    return NEVER_MS if expires_s == inf else max(ceil((expires_s - now_s) * 1000), 0)


def expires_s_of(left_ms: int, now_s: float) -> float:
    """Return when a message expires; the inverse of `left_ms_of`."""
    return NO_EXPIRY_S if left_ms == NEVER_MS else now_s + left_ms / 1000
