"""The MQTT side of a hub: filters, sessions and retained messages of its MQTT clients.

`Devices` subscribes to each topic that a filter matches, like one more client of the hub, and passes the batches on to
the MQTT clients. So all routes, hooks, the journal and backpressure are the same as for SMQ clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from struct import unpack
from weakref import ref

from smqrt.broker.mqtt.arrivals import Arrivals
from smqrt.broker.mqtt.client_ids import MAX_UID_BYTES, uid_of
from smqrt.broker.mqtt.delivery import DeliveryQueue
from smqrt.broker.mqtt.device import NEVER_S, Device
from smqrt.broker.mqtt.features import ALL_FEATURES, Features
from smqrt.broker.mqtt.filters import (
    Delivery,
    Filter,
    FilterSet,
    FilterTable,
    Group,
    Options,
    mqtt_name,
    shared_options,
    split_shared,
)
from smqrt.broker.mqtt.gaps import GapReports
from smqrt.broker.mqtt.ledger import Ledger
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, OTHER_GROUPS, ArrivedBatch, Message, MqttBatch, Run
from smqrt.broker.mqtt.readers import ReaderTable
from smqrt.broker.mqtt.retained import RetainedMessages
from smqrt.broker.mqtt.shared_delivery import any_device, deliver_shared, forward
from smqrt.broker.mqtt.shared_rows import SharedRows
from smqrt.broker.mqtt.system_topics import SystemTopics
from smqrt.broker.mqtt.take_overs import TakeOvers
from smqrt.broker.mqtt.topic_search import TopicSearch
from smqrt.broker.mqtt.wills import Wills
from smqrt.broker.outbox import Drop, run_at_once, run_in_background
from smqrt.broker.state import BrokerPeer, BrokerState
from smqrt.broker.topics import Topic
from smqrt.settings.limits import Limit, MqttSettings
from smqrt.wire import smq
from smqrt.wire.kernels import mqtt_packets, packed_in_python
from smqrt.wire.mqtt.fields import PacketType, pack_properties

SELF = b"$smq/self"
"""The topic name of messages to a client's ETID."""
EXPIRY_CHECK_S = 1.0
EXPIRY_CHECKS_PER_STEP = 200
PRESSURE_S = 1.0
"""The maximum time for which publishers wait for a client that does not acknowledge: it may be gone."""
SUBSCRIPTION_BYTES = 400
"""Memory of a subscription beside its filter, approximately."""
MAX_PRESSED = 100
"""Slow clients for which a publisher looks, so that its messages do not take longer while there are thousands."""
AT_ONCE_BYTES, DELIVERIES_AT_ONCE = 4096, 8
"""The largest batch and the number of subscribers for a delivery that is not divided into portions."""
MAX_PASSING = 10_000
"""Topics that only messages of MQTT clients have created, and only MQTT clients have subscribed to with wildcards."""
_SUBTOPIC, _PUBLISHER = "subtopic", "publisher"

FILTERS = Limit("mqtt_filters", "mqtt.filters", "the client's limit of topic filters is reached")
SESSIONS = Limit("mqtt_sessions", "mqtt.sessions", "the hub's limit of sessions without a connection is reached")
QUEUED = Limit("mqtt_queued", "mqtt.queued_messages", "the queue of a session is full, and its oldest message is lost")


class Devices(DeliveryQueue):
    """The MQTT clients of one hub, and the outbox that gets the messages to them.

    Args:
        broker: the hub.
        settings: the limits of its MQTT clients.
        features: what it offers to them.

    Attributes:
        sessions: sessions by client id, with and without a connection.
        hashed: those with a long client id, by uid, which is a hash of the id.
        filters: the filters of all sessions.
        by_topic: the filters that match each topic, of topics that have some.
        search: finds the topics of filters.
        gaps: reports lost messages to the application.
        retained: the retained messages.
        readers: the subscribers that may read a topic.
        shared_rows: packets that several sessions send; see `SharedRows`.
        system: the `$SYS` topics.
        take_overs: clients that replace each other.
        wills: publishes the wills of clients.
        arrivals: see `Arrivals`.
        again: ids of received messages with QoS 2, by session and packet identifier, that other nodes of a cluster may
            not have, because the node that has received them was killed.
        counts: counters for these.
        handshake_s: time limit for a re-authentication.
        subscription_bytes: the memory of all subscriptions, approximately.
        waiting_bytes: the memory of the messages that wait in all sessions, and of those in flight and the wills of
            sessions without a connection, approximately.
        pack: see `Encoder`.
        ledger: the changes that are to be saved; None for a hub without `persist`.
        unnamed_topics: topics that MQTT can't name; they do not exist for MQTT clients.
        hidden_failures: messages of MQTT 3.1 and 3.1.1 clients that the hub has not accepted, and has acknowledged all
            the same: these versions have no acknowledgement with a reason.
    """

    __slots__ = (
        "__weakref__",
        "_is_notifying",
        "_pressed",
        "again",
        "arrivals",
        "by_topic",
        "counts",
        "features",
        "filters",
        "gaps",
        "handshake_s",
        "hashed",
        "hidden_failures",
        "ledger",
        "limits",
        "offline",
        "pack",
        "readers",
        "retained",
        "search",
        "sessions",
        "shared_rows",
        "subscription_bytes",
        "system",
        "take_overs",
        "unnamed_topics",
        "waiting_bytes",
        "wills",
    )

    def __init__(
        self, broker: BrokerState, settings: MqttSettings | None = None, features: Features = ALL_FEATURES
    ) -> None:
        super().__init__(broker)
        self.limits, self.features = settings or MqttSettings(), features
        self.handshake_s = 4.0
        self.sessions: dict[str, Device] = {}
        self.hashed: dict[bytes, Device] = {}
        self.offline: dict[Device, None] = {}
        self.gaps = GapReports(broker, self.sessions)
        self.filters = FilterTable()
        self.wills = Wills(self)
        self.arrivals = Arrivals()
        self.again: dict[Device, dict[int, int]] = {}
        self.retained = RetainedMessages(broker, self.limits, self.properties_of, self._retained_changed)
        self.readers = ReaderTable()
        self.shared_rows = SharedRows()
        self.take_overs = TakeOvers(lambda: broker.clock(), lambda *later: broker.call_later(*later))
        self.system = SystemTopics(self)
        self.counts = self.system.counts
        self.waiting_bytes = self.subscription_bytes = 0
        self.ledger: Ledger | None = None
        self.pack: Callable[[bytes, int, bytes], bytes] = partial(mqtt_packets, packed_in_python)
        self.by_topic: dict[Topic, FilterSet] = {}
        self._pressed: dict[Device, list[BrokerPeer]] = {}
        self.search = TopicSearch(self)
        self._is_notifying = False
        self.unnamed_topics = self.hidden_failures = 0
        if broker.topic_table.by_name:
            run_in_background(self._count_unnamed())
        broker.topic_table.on_named += (self._on_topic,)
        broker.topic_table.represented = self._represented
        broker.devices = self
        self._check_expiry_later()

    # ---- topics and filters

    def _on_topic(self, topic: Topic) -> None:
        """Subscribe to a new topic that filters match, or count it when MQTT can't name it."""
        assert topic.name is not None
        found = self.filters.match(topic.name)
        self.set_filters(topic, found)
        if found is None and mqtt_name(topic.name) is None:
            self.unnamed_topics += 1

    def _count_unnamed(self) -> Iterator[None]:
        """Count the topics from before this object that MQTT can't name, in portions: a file may have many."""
        for name in list(self.broker.topic_table.by_name):
            self.unnamed_topics += mqtt_name(name) is None
            yield

    def set_filters(self, topic: Topic, found: FilterSet | None) -> None:
        """Set the filters that match a topic; None for none."""
        known = self.by_topic.get(topic)
        if found is known:
            return
        if topic.observers:
            self.broker.notify_observers_later(topic)
        if found is None:
            del self.by_topic[topic]
            self.readers.forget(topic.name or b"")
            self.broker.unsubscribed(topic, self)
            return
        was_shared_only = known is not None and known.is_shared_only
        self.by_topic[topic] = found
        if known is None:
            self.broker.subscribed(topic, self)
        elif self.broker.cluster is not None and was_shared_only is not found.is_shared_only:
            self._interest_changed(topic, found)

    def subscribe(self, device: Device, text: str, options: Options) -> Iterator[None]:
        """Subscribe a client to a filter, in portions: a new filter may match all topics of the hub.

        Args:
            device: the client.
            text: a valid filter, perhaps of a shared subscription.
            options: its options; they replace those of the same filter.
        """
        self.add_subscription(device, text, options)
        yield from self.search.finish()

    def add_subscription(self, device: Device, text: str, options: Options) -> None:
        """Subscribe a client as `subscribe`, but look for topics later, see `TopicSearch.finish`."""
        group, wanted = split_shared(text) or (None, text)
        known = self.filters.by_text.get(wanted)
        one = known or self.filters.named(wanted)
        had_members = bool(one.members)
        if text not in device.subscriptions:
            self._count_filter(device, text, 1)
        device.subscriptions[text] = options = shared_options(options)
        self.session_changed(device)
        if group is None:
            one.add(device, options)
        else:
            shared = one.group(group)
            shared.members[device] = options
            shared.note(device)
        self.filters.changed(one)
        if self.broker.cluster is not None:
            self.broker.cluster.mqtt.filter_changed(text)
        if known is None and one.has_wildcard:
            self.search.add(one)
        elif known is None:
            self._match_named(one)
        else:
            self._notify_observers(one)
            if self.broker.cluster is not None and bool(one.members) is not had_members:
                run_at_once(self._interests_changed(one), self.broker.clock)

    def _count_filter(self, device: Device, text: str, sign: int) -> None:
        device.wildcards += sign * text.count("+")
        self.subscription_bytes += sign * (len(text.encode()) + SUBSCRIPTION_BYTES)

    def _match_named(self, one: Filter) -> None:
        """Subscribe to the topic with the name of a new filter without wildcards."""
        table, name = self.broker.topic_table, one.text.encode()
        found = table.by_name.get(name)
        if found is not None:
            self.set_filters(found, self.filters.match(name))
        elif self.broker.cluster is not None and self.broker.limits.of_all(table, name) is None:
            table.named(name)  # other nodes send messages only to topics that this node knows; `_on_topic` subscribes

    def name_topics(self) -> Iterator[None]:
        """Create the topics of filters without wildcards, in portions: the hub has joined a cluster with sessions."""
        for one in list(self.filters.by_text.values()):
            if not one.has_wildcard:
                self._match_named(one)
            yield

    def unsubscribe(self, device: Device, text: str) -> bool:
        """End a subscription; return whether there was one."""
        if device.subscriptions.pop(text, None) is None:
            return False
        self._count_filter(device, text, -1)
        device.forget_feeds(text)
        self.session_changed(device)
        group, wanted = split_shared(text) or (None, text)
        one = self.filters.by_text[wanted]
        had_members = bool(one.members)
        if group is None:
            one.discard(device)
        else:
            shared = one.groups[group]
            del shared.members[device]
            shared.note(device)
            if not shared.members:
                del one.groups[group]
        self.filters.changed(one)
        self._notify_observers(one)
        if self.broker.cluster is not None:
            self.broker.cluster.mqtt.filter_changed(text)
        if self.broker.cluster is not None and bool(one.members) is not had_members:
            run_at_once(self._interests_changed(one), self.broker.clock)
        if one.is_empty:
            self.filters.remove(one)
            if not one.has_wildcard:
                topic = self.broker.topic_table.by_name.get(one.text.encode())
                if topic is not None and topic.name is not None:
                    self.set_filters(topic, self.filters.match(topic.name))
            else:
                self.search.removed()
        return True

    def _represented(self, topic: Topic) -> int:
        """Return the number of MQTT subscribers of a topic, less the one that `Topic.subscribers` counts."""
        found = self.by_topic.get(topic)
        return 0 if found is None else found.subscribers - 1

    def _notify_observers(self, one: Filter) -> None:
        """Notify the observers of the topics that a filter matches: it has more subscribers, or fewer."""
        table = self.broker.topic_table
        if not one.has_wildcard:
            topic = table.by_name.get(one.text.encode())
            if topic is not None:
                self.broker.notify_observers_later(topic)
        elif not self._is_notifying:
            self._is_notifying = True
            run_in_background(self._notify_all())

    def _notify_all(self) -> Iterator[None]:
        self._is_notifying = False
        for topic in list(self.by_topic):
            if topic.observers:
                self.broker.notify_observers_later(topic)
            yield

    def topic_for(self, name: bytes) -> Topic | None:
        """Return the topic for a message of a client; a new one is created only if somebody needs it."""
        broker = self.broker
        topic = broker.topic_table.by_name.get(name)
        if topic is not None or not self._is_needed(name):
            return topic
        reached = broker.limits.of_all(broker.topic_table, name)
        if reached:
            broker.refuse(None, reached)
            return None
        if broker.recorder is not None or broker.cluster is not None:  # these refer to topics by their ids
            return broker.topic_table.named(name)
        return broker.topic_table.passing_named(name)

    def _is_needed(self, name: bytes) -> bool:
        broker, hooks = self.broker, self.broker.hooks
        if hooks.onpublish is not None or hooks.ondrop is not None or broker.recorder is not None:
            return True
        if self.wants(name) or (broker.cluster is not None and broker.cluster.mqtt.wants(name)):
            return True
        if broker.handler_filters is not None and broker.handler_filters.wants(name):
            return True
        return broker.last_values is not None and broker.last_values.selects_name(name)

    def _remove_unused(self) -> Iterator[None]:
        """Remove topics that only MQTT clients have created, and nobody subscribes to any more; limit the others."""
        table, values, handlers = self.broker.topic_table, self.broker.last_values, self.broker.handler_filters
        excess = len(table.passing) - MAX_PASSING
        for topic in list(table.passing):
            excess -= 1
            is_handled = handlers is not None and handlers.has(topic)
            is_old = excess >= 0 and topic.subscribers == (topic in self.by_topic) + is_handled
            is_unused = not topic.subscribers or is_old
            if is_unused and topic in table.passing and not topic.observers:
                if values is not None and values.selects(topic) and values.initial_frames(topic):
                    yield
                    continue
                self.set_filters(topic, None)
                if handlers is not None:
                    handlers.release(topic)
                table.remove_named(topic)
            yield

    def wants(self, name: bytes) -> bool:
        """Return whether a topic that does not exist has an MQTT subscriber."""
        return self.filters.match(name) is not None

    # ---- messages to MQTT clients

    def deliver_batch(self, batch: bytes) -> Iterator[None]:
        """See `DeliveryQueue`."""
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        if topic is None:  # it was removed
            yield
        elif topic.name is None:
            self._send_to_one(topic, batch)
            yield
        elif isinstance(batch, ArrivedBatch) and batch.group == OTHER_GROUPS:
            if self.broker.cluster is not None:
                yield from self.broker.cluster.mqtt.send_to_groups(topic.name, batch, (), True)
        elif (found := self.by_topic.get(topic)) is None:
            if isinstance(batch, ArrivedBatch) and batch.group:
                forward(self, batch.group, topic.name, batch)
            yield from self._send_to_groups(topic.name, batch, ())
            yield
        else:
            if self.ledger is not None and isinstance(batch, MqttBatch) and batch.qos:
                self._save_received(self.ledger, batch, found)
            yield from self.deliver_run(self.run(topic.name, topic.key, batch), found)
            if isinstance(batch, MqttBatch) and batch.qos and batch.origin and not batch.group:
                self.arrivals.note_delivered(batch.origin + self._count(batch) - 1)

    def _send_to_groups(self, name: bytes, batch: bytes, own: Iterable[Group]) -> Iterator[None]:
        """Send messages of a client of this hub to shared subscriptions of other nodes, see `ClusterMqtt`."""
        if self.broker.cluster is not None and isinstance(batch, MqttBatch) and batch.group is None:
            yield from self.broker.cluster.mqtt.send_to_groups(name, batch, [group.text for group in own])

    def deliver_at_once(self, batch: bytes) -> bool:
        """See `DeliveryQueue`; the most frequent case, without the generators of `deliver_batch`."""
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        found = self.by_topic.get(topic) if topic is not None else None
        if found is None or self.ledger is not None or self.readers.is_used or len(batch) > AT_ONCE_BYTES:
            return False
        deliveries = found.known_deliveries
        if deliveries is None or len(deliveries) > DELIVERIES_AT_ONCE or found.has_groups:
            return False
        if isinstance(batch, ArrivedBatch) and batch.group:
            return False
        assert topic is not None
        assert topic.name is not None
        cluster = self.broker.cluster
        if cluster is not None and isinstance(batch, MqttBatch) and cluster.mqtt.has_groups(topic.name):
            return False
        self._count_copies(batch, len(deliveries))
        run = self.run(topic.name, topic.key, batch)
        for one in deliveries:
            one.device.deliver(run, one)
        if isinstance(batch, MqttBatch) and batch.origin:
            self.arrivals.note_delivered(batch.origin + self._count(batch) - 1)
        return True

    def _count_copies(self, batch: bytes, copies: int) -> None:
        size, counts = len(batch), self.counts
        messages = 1 if size == batch[0] << 8 | batch[1] else self._count(batch)
        counts.delivered += messages * copies
        counts.delivered_bytes += (size - messages * smq.PUBLISH_HEADER_BYTES) * copies

    def is_saved(self, batch: bytes) -> bool:
        """Return whether a session that is saved gets the messages of a batch."""
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        found = self.by_topic.get(topic) if topic is not None else None
        return found is not None and found.is_saved

    def _save_received(self, ledger: Ledger, batch: MqttBatch, found: FilterSet) -> None:
        """Save packet identifiers and the number in a stream of messages, in one group with the messages.

        Before the delivery, since a shared subscription may send the messages to another node, after the commit.
        """
        batch.is_delivered, is_saved = True, found.is_saved
        if batch.arrived is not None and is_saved:
            ledger.touch(batch.arrived)
        if batch.received is not None and (is_saved or self.broker.cluster is not None):
            device, numbers = batch.received
            device.expect_releases(unpack(f">{len(numbers) >> 1}H", numbers), True, batch.origin)

    def check_messages_of(self, device: Device) -> None:
        """Ask the access control list about the messages of a client, since it has filters that are denied as a whole.

        Its rights may have changed; what was found before is computed again.
        """
        device.is_checked = self.readers.is_used = True
        self.readers.version += 1

    def deliver_run(self, run: Run, found: FilterSet) -> Iterator[None]:
        """Pass a batch to the subscribers of its topic, in portions."""
        deliveries, may_read, batch = found.known_deliveries, any_device, run.batch
        if deliveries is None:
            deliveries = yield from found.deliveries()
        group = batch.group if isinstance(batch, ArrivedBatch) else None
        if group:  # the one that the other node has chosen
            groups = [one for one in (self.filters.group(group),) if one is not None]
        else:
            groups = found.groups if found.has_groups else []  # now: later, a `WideSet` may have to find them again
        chosen: list[Delivery] = deliveries
        if self.readers.is_used:
            readers = yield from self.readers.of(run.name, deliveries)
            chosen, may_read = deliveries if readers.chosen is None else readers.chosen, readers.has
        self._count_copies(batch, len(chosen))
        run.skips_numbers = len(chosen) > DELIVERIES_AT_ONCE
        if not group:
            for one in chosen:
                one.device.deliver(run, one)
                yield
        if group and not groups:
            forward(self, group, run.name, batch)
        elif group != "":
            yield from deliver_shared(self, run, groups, may_read)
            yield from self._send_to_groups(run.name, batch, groups)

    def _count(self, batch: bytes) -> int:
        known = batch.messages if isinstance(batch, MqttBatch) else 0
        return known or self.broker.measure(batch)[0]

    def has_groups(self, topic: Topic) -> bool:
        """Return whether a topic has shared subscriptions."""
        found = self.by_topic.get(topic)
        return found is not None and found.has_groups

    def is_shared_only(self, topic: Topic) -> bool:
        """Return whether MQTT clients have only shared subscriptions of a topic; false when they have none."""
        found = self.by_topic.get(topic)
        return found is not None and found.is_shared_only

    def _interests_changed(self, one: Filter) -> Iterator[None]:
        """Announce topics that have other than shared subscriptions now, or no longer, because of a filter."""
        table, name = self.broker.topic_table.by_name, one.text.encode()
        topics = list(self.by_topic) if one.has_wildcard else [table[name]] if name in table else []
        for topic in topics:
            found = self.by_topic.get(topic)
            if found is not None and one in found.filters and (one.members or found.is_shared_only):
                self._interest_changed(topic, found)
            yield

    def _interest_changed(self, topic: Topic, found: FilterSet) -> None:
        cluster = self.broker.cluster
        if cluster is not None:
            (cluster.unsubscribed if found.is_shared_only else cluster.subscribed)(topic)

    def texts(self) -> Iterator[str]:
        """Return all filters, and the shared subscriptions with their groups."""
        for text, one in self.filters.by_text.items():
            yield text
            yield from (group.text for group in one.groups.values())

    def groups_changed(self, device: Device) -> None:
        """Note that a member of shared subscriptions has connected or disconnected, also at other nodes."""
        cluster = self.broker.cluster
        for text in device.subscriptions:
            if text.startswith("$share/") and (shared := split_shared(text)) is not None:
                group, wanted = shared
                self.filters.by_text[wanted].groups[group or ""].note(device)
                if cluster is not None:
                    cluster.mqtt.filter_changed(text)

    def run(self, name: bytes, key: bytes, batch: bytes) -> Run:
        """Return a batch for encoding."""
        return Run(name, key, batch, self.limits.smq_qos, self, self.broker.clock())

    def properties_of(self, frame: bytes) -> bytes:
        """Return sub-topic and publisher of an SMQ message as user properties, packed."""
        found: dict[str, object] = {}
        stid, publisher = int.from_bytes(frame[smq.STID], "big"), int.from_bytes(frame[smq.PTID], "big")
        if stid and (name := self.broker.subtopic_table.by_id.get(stid)) is not None:
            found[_SUBTOPIC] = name.decode("utf-8", "replace").replace("\0", "\ufffd")
        found[_PUBLISHER] = str(publisher)
        return pack_properties(found, PacketType.PUBLISH)

    def _send_to_one(self, topic: Topic, batch: bytes) -> None:
        """Send messages to the ETID of an MQTT client under the name `SELF`."""
        session = self.broker.sessions.get(topic.id)
        device: Device | None = getattr(session, "device", None)
        if device is not None:
            for message in self.run(SELF, topic.key, batch).messages(1, False, b""):
                device.enqueue(message)

    def session_overflowed(self, device: Device) -> None:
        """Count a message that was lost because too many waited in a session."""
        self.broker.stats.drop(Drop.OVER_BUDGET, 1)
        self.gaps.lost(device.client_id)
        QUEUED.refused(f"the MQTT client {ascii(device.client_id[:64])}")

    # ---- backpressure: publishers with QoS 1 and 2 wait for connected clients whose queues fill
    #
    # They get their acknowledgements later, so nothing is lost as long as a client is only slower for a while.

    def pressed(self, device: Device) -> None:
        """Let publishers wait for a connected client for at most `PRESSURE_S`."""
        if device.is_pressed or device.is_stuck or device.client is None:
            return
        device.is_pressed = True
        waiting: list[BrokerPeer] = []
        self._pressed[device] = waiting

        def expire() -> None:
            if self._pressed.get(device) is waiting:  # not a later one
                device.is_stuck = True
                self._resume_publishers(device)

        self.broker.call_later(PRESSURE_S, expire)

    def relieved(self, device: Device) -> None:
        """End `pressed`: the queue of the client has room again, or it has disconnected."""
        device.is_stuck = False
        self._resume_publishers(device)

    def _resume_publishers(self, device: Device) -> None:
        device.is_pressed = device.is_stuck
        for publisher in self._pressed.pop(device, ()):
            publisher.outbox.resume()

    def must_wait(self, topic: Topic | None, publisher: BrokerPeer) -> bool:
        """Return whether a publisher to a topic has to wait for one of its subscribers; it is resumed then."""
        if not self._pressed:
            return False
        found = self.by_topic.get(topic) if topic is not None else None
        if found is None or found.is_wide:  # the latter takes too long
            return False
        for device, waiting in islice(self._pressed.items(), MAX_PRESSED):
            if found.has(device) and publisher.etid != device.etid:
                waiting.append(publisher)
                return True
        return False

    # ---- changes, see `smqrt.smq.mqtt_file`

    def _retained_changed(self, name: bytes) -> None:
        if self.ledger is not None:
            self.ledger.touch(name)

    def session_changed(self, device: Device) -> None:
        """Save a session soon, if it is kept."""
        if self.ledger is not None:
            self.ledger.session_changed(device)

    # ---- sessions

    def open(self, client_id: str, clean: bool) -> tuple[Device, bool]:
        """Return the session for a connection, and whether it was kept."""
        if self.ledger is not None:
            self.ledger.forget_lost(client_id)
        device = self.sessions.get(client_id)
        if device is not None and (clean or device.ends_s <= self.broker.clock()):
            self.end(device)
            device = None
        if device is not None:
            self.offline.pop(device, None)
            return device, True
        device = Device(self, client_id)
        self.add_session(device)
        return device, False

    def add_session(self, device: Device) -> None:
        """Add a session with a client id that no other one has."""
        client_id = device.client_id
        self.sessions[client_id] = device
        if len(client_id.encode()) > MAX_UID_BYTES:
            self.hashed[uid_of(client_id)] = device

    def count_connected(self) -> None:
        """Count a client that has connected."""
        self.counts.max_connected = max(self.counts.max_connected, len(self.sessions) - len(self.offline))

    def left(self, device: Device) -> None:
        """Keep the session of a client that has disconnected, or end it."""
        device.disconnected()
        device.left_s = self.broker.clock()
        self.groups_changed(device)
        if device.is_pressed or device.is_stuck:
            self.relieved(device)
        cluster = self.broker.cluster
        # The client may not know that it has lost its session, and would not subscribe again to one that is kept.
        is_doubtful = cluster is not None and device.is_blank and cluster.mqtt.is_doubtful(device.client_id)
        if not device.expiry_s or is_doubtful:
            self.end(device)
            return
        if len(self.offline) >= self.limits.sessions:
            SESSIONS.refused(f"the MQTT client {ascii(device.client_id[:64])}")
            self.end(device)
            return
        if self.waiting_bytes > self.limits.total_queued_bytes:
            device.drop_in_flight()
        self.offline[device] = None
        device.ends_s = NO_EXPIRY_S
        if device.expiry_s != NEVER_S:
            device.ends_s = self.broker.clock() + device.expiry_s
        self.session_changed(device)

    def end(self, device: Device) -> None:
        """End a session: its subscriptions and messages go. A will that is delayed is published (MQTT 5 §3.1.3.2.2)."""
        self.offline.pop(device, None)
        self.again.pop(device, None)
        will, device.will = device.will, None
        if will is not None:
            self.wills.publish(will, self.broker.server)
        if self.sessions.get(device.client_id) is device:
            del self.sessions[device.client_id]
            if self.hashed:
                self.hashed.pop(uid_of(device.client_id), None)
            self.session_changed(device)
        run_at_once(self._end_subscriptions(device), self.broker.clock)

    def _end_subscriptions(self, device: Device) -> Iterator[None]:
        for text in list(device.subscriptions):
            self.unsubscribe(device, text)
            yield
        device.forget_messages()

    def _end_expired(self) -> None:
        if self.broker.closed:
            return
        run_in_background(self._expire())
        self.shared_rows.clear()
        self.system.tick()
        if self.broker.topic_table.passing:
            run_in_background(self._remove_unused())
        self._check_expiry_later()

    def _expire(self) -> Iterator[None]:
        now_s = self.broker.clock()
        for count, device in enumerate(list(self.offline), 1):
            if device.ends_s <= now_s and device in self.offline:
                self.end(device)
                self.counts.expired += 1
                yield
            elif not count % EXPIRY_CHECKS_PER_STEP:
                yield

    def _check_expiry_later(self) -> None:
        devices = ref(self)  # the timer must not keep a closed hub

        def check() -> None:
            found = devices()
            if found is not None:
                found._end_expired()

        self.broker.call_later(EXPIRY_CHECK_S, check)

    # ---- retained messages

    def retain(self, message: Message) -> bool:
        """Keep a new message as the retained one of its topic, at all nodes of a cluster; return false over a limit."""
        if not self.features.retain:
            return True
        is_kept = self.retained.set(message)
        if is_kept and self.broker.cluster is not None:
            self.broker.cluster.mqtt.retained_changed(message.name)
        return is_kept


def is_valid_name(name: bytes, levels: int) -> bool:
    """Return whether MQTT clients can use a topic name with at most so many levels."""
    return mqtt_name(name) is not None and name.count(b"/") < levels
