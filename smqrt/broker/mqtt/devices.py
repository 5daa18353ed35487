"""The MQTT side of a hub: filters, sessions and retained messages of its MQTT clients.

`Devices` subscribes to each topic that a filter matches, like one more client of the hub, and passes the batches on to
the MQTT clients. So all routes, hooks, the journal and backpressure are the same as for SMQ clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from struct import unpack
from weakref import ref

from smqrt.broker.mqtt.arrivals import Arrivals
from smqrt.broker.mqtt.delivery import DeliveryQueue
from smqrt.broker.mqtt.device import NEVER_S, Device, Will
from smqrt.broker.mqtt.filters import Filter, FilterSet, FilterTable, Options, mqtt_name, shared_options, split_shared
from smqrt.broker.mqtt.gaps import GapReports
from smqrt.broker.mqtt.ledger import Ledger
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, ArrivedBatch, Message, MqttBatch, Run, mqtt_batch
from smqrt.broker.mqtt.readers import ReaderTable
from smqrt.broker.mqtt.retained import RetainedMessages
from smqrt.broker.mqtt.system_topics import SystemTopics
from smqrt.broker.mqtt.take_overs import TakeOvers
from smqrt.broker.outbox import Drop, run_at_once, run_in_background
from smqrt.broker.routes import GuardedRoute, destination
from smqrt.broker.state import BrokerPeer, BrokerState
from smqrt.broker.topics import Topic
from smqrt.settings.limits import Limit, MqttSettings
from smqrt.wire import smq
from smqrt.wire.kernels import mqtt_packets, packed_in_python
from smqrt.wire.mqtt.fields import PacketType, pack_properties

SELF = b"$smq/self"
"""The topic name of messages to a client's ETID."""
EXPIRY_CHECK_S = 1.0
MAX_TIMER_S = 10.0
"""The longest timer for a will: it keeps the will, also after the client is back. A client may choose days."""
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

    Attributes:
        sessions: sessions by client id, with and without a connection.
        filters: the filters of all sessions.
        retained: the retained messages.
        readers: the subscribers that may read a topic.
        system: the `$SYS` topics.
        take_overs: clients that replace each other.
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
        "_by_topic",
        "_gaps",
        "_is_notifying",
        "_is_sweeping",
        "_pressed",
        "again",
        "arrivals",
        "counts",
        "filters",
        "handshake_s",
        "hidden_failures",
        "ledger",
        "limits",
        "offline",
        "pack",
        "readers",
        "retained",
        "sessions",
        "subscription_bytes",
        "system",
        "take_overs",
        "unnamed_topics",
        "waiting_bytes",
    )

    def __init__(self, broker: BrokerState, settings: MqttSettings | None = None) -> None:
        super().__init__(broker)
        self.limits = settings or MqttSettings()
        self.handshake_s = 4.0
        self.sessions: dict[str, Device] = {}
        self.offline: dict[Device, None] = {}
        self._gaps = GapReports(broker, self.sessions)
        self.filters = FilterTable()
        self.arrivals = Arrivals()
        self.again: dict[Device, dict[int, int]] = {}
        self.retained = RetainedMessages(broker, self.limits, self.properties_of, self._retained_changed)
        self.readers = ReaderTable()
        self.take_overs = TakeOvers(lambda: broker.clock(), lambda *later: broker.call_later(*later))
        self.system = SystemTopics(self)
        self.counts = self.system.counts
        self.waiting_bytes = self.subscription_bytes = 0
        self.ledger: Ledger | None = None
        self.pack: Callable[[bytes, int, bytes], bytes] = partial(mqtt_packets, packed_in_python)
        self._by_topic: dict[Topic, FilterSet] = {}
        self._pressed: dict[Device, list[BrokerPeer]] = {}
        self._is_sweeping = self._is_notifying = False
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
        self._set(topic, found)
        if found is None and mqtt_name(topic.name) is None:
            self.unnamed_topics += 1

    def _count_unnamed(self) -> Iterator[None]:
        """Count the topics from before this object that MQTT can't name, in portions: a file may have many."""
        for name in list(self.broker.topic_table.by_name):
            self.unnamed_topics += mqtt_name(name) is None
            yield

    def _set(self, topic: Topic, found: FilterSet | None) -> None:
        known = self._by_topic.get(topic)
        if found is known:
            return
        if topic.observers:
            self.broker.notify_observers_later(topic)
        if found is None:
            del self._by_topic[topic]
            self.readers.forget(topic.name or b"")
            self.broker.unsubscribed(topic, self)
            return
        was_shared_only = known is not None and known.is_shared_only
        self._by_topic[topic] = found
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
        one.forget_deliveries()
        if self.broker.cluster is not None:
            self.broker.cluster.mqtt.filter_changed(text)
        if known is None:
            yield from self._match_topics(one)
        else:
            self._notify_observers(one)
            if self.broker.cluster is not None and bool(one.members) is not had_members:
                run_at_once(self._interests_changed(one), self.broker.clock)

    def _count_filter(self, device: Device, text: str, sign: int) -> None:
        device.wildcards += sign * text.count("+")
        self.subscription_bytes += sign * (len(text.encode()) + SUBSCRIPTION_BYTES)

    def _match_topics(self, one: Filter) -> Iterator[None]:
        table = self.broker.topic_table
        if one.has_wildcard:
            for topic in list(table.by_name.values()):
                if topic.name is not None and self._may_match(one, topic.name):
                    self._set(topic, self.filters.match(topic.name))
                yield
            return
        name = one.text.encode()
        found = table.by_name.get(name)
        if found is not None:
            self._set(found, self.filters.match(name))
        elif self.broker.cluster is not None and self.broker.limits.of_all(table, name) is None:
            table.named(name)  # other nodes send messages only to topics that this node knows; `_on_topic` subscribes

    def name_topics(self) -> Iterator[None]:
        """Create the topics of filters without wildcards, in portions: the hub has joined a cluster with sessions."""
        for one in list(self.filters.by_text.values()):
            if not one.has_wildcard:
                yield from self._match_topics(one)
            yield

    @staticmethod
    def _may_match(one: Filter, name: bytes) -> bool:
        """Return false for most topics that a filter does not match: their names begin differently."""
        fixed = one.text.partition("+")[0].partition("#")[0].rstrip("/")
        return name.startswith(fixed.encode())

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
        one.forget_deliveries()
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
                    self._set(topic, self.filters.match(topic.name))
            elif not self._is_sweeping:
                self._is_sweeping = True
                run_in_background(self._sweep())
        return True

    def _sweep(self) -> Iterator[None]:
        """Find the filters of topics again that have matched a removed filter, in portions."""
        self._is_sweeping = False  # filters that are removed from now on start another one
        for topic, found in list(self._by_topic.items()):
            if found.is_stale and topic in self._by_topic and topic.name is not None:
                self._set(topic, self.filters.match(topic.name))
            yield

    def _represented(self, topic: Topic) -> int:
        """Return the number of MQTT subscribers of a topic, less the one that `Topic.subscribers` counts."""
        found = self._by_topic.get(topic)
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
        for topic in list(self._by_topic):
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
            is_old = excess >= 0 and topic.subscribers == (topic in self._by_topic) + is_handled
            is_unused = not topic.subscribers or is_old
            if is_unused and topic in table.passing and not topic.observers:
                if values is not None and values.selects(topic) and values.initial_frames(topic):
                    yield
                    continue
                self._set(topic, None)
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
        elif (found := self._by_topic.get(topic)) is not None:
            yield from self.deliver_run(self.run(topic.name, topic.key, batch), found)
            if isinstance(batch, MqttBatch) and batch.qos:
                if self.ledger is not None and found.is_saved:
                    self._save_received(self.ledger, batch)
                if batch.origin:
                    self.arrivals.note_delivered(batch.origin + self._count(batch) - 1)

    def deliver_at_once(self, batch: bytes) -> bool:
        """See `DeliveryQueue`; the most frequent case, without the generators of `deliver_batch`."""
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        found = self._by_topic.get(topic) if topic is not None else None
        if found is None or self.ledger is not None or self.readers.is_used or len(batch) > AT_ONCE_BYTES:
            return False
        deliveries = found.known_deliveries
        if deliveries is None or len(deliveries) > DELIVERIES_AT_ONCE or found.has_groups:
            return False
        if isinstance(batch, ArrivedBatch) and batch.group:
            return False
        assert topic is not None
        assert topic.name is not None
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
        found = self._by_topic.get(topic) if topic is not None else None
        return found is not None and found.is_saved

    @staticmethod
    def _save_received(ledger: Ledger, batch: MqttBatch) -> None:
        """Save packet identifiers and the number in a stream of delivered messages, in one group with the messages."""
        if batch.arrived is not None:
            ledger.touch(batch.arrived)
        if batch.received is not None:
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
        deliveries, may_read, batch = found.known_deliveries, _any_device, run.batch
        if deliveries is None:
            deliveries = yield from found.deliveries()
        if self.readers.is_used:
            readers = yield from self.readers.of(run.name, deliveries)
            deliveries, may_read = readers.deliveries, readers.has
        self._count_copies(batch, len(deliveries))
        run.skips_numbers = len(deliveries) > DELIVERIES_AT_ONCE
        group = batch.group if isinstance(batch, ArrivedBatch) else None
        if not group:
            for one in deliveries:
                one.device.deliver(run, one)
                yield
        if group != "" and found.has_groups:
            yield from self._deliver_shared(run, found, group, may_read)

    def _deliver_shared(
        self, run: Run, found: FilterSet, wanted: str | None, may_read: Callable[[Device], bool]
    ) -> Iterator[None]:
        """Deliver a batch to one client of each shared subscription, or of the one with the text `wanted`."""
        cluster = self.broker.cluster
        for group in list(found.groups):
            if wanted is not None and group.text != wanted:
                continue
            if (
                wanted is None
                and cluster is not None
                and not group.is_connected
                and cluster.mqtt.send_to_group(group.text, run.name, run.batch)  # a client is connected to another node
            ):
                continue
            has_ids = isinstance(run.batch, MqttBatch) and run.batch.origin != 0
            for part in run.singles() if run.count > 1 or has_ids else (run,):
                chosen = yield from group.choose(may_read)
                if chosen is not None:
                    chosen.device.deliver(part, chosen, True)
                yield

    def _count(self, batch: bytes) -> int:
        known = batch.messages if isinstance(batch, MqttBatch) else 0
        return known or self.broker.measure(batch)[0]

    def has_group(self, text: str, name: str) -> bool:
        """Return whether there is a shared subscription of a filter with this name."""
        found = self.filters.by_text.get(text)
        return found is not None and name in found.groups

    def has_groups(self, topic: Topic) -> bool:
        """Return whether a topic has shared subscriptions."""
        found = self._by_topic.get(topic)
        return found is not None and found.has_groups

    def is_shared_only(self, topic: Topic) -> bool:
        """Return whether MQTT clients have only shared subscriptions of a topic; false when they have none."""
        found = self._by_topic.get(topic)
        return found is not None and found.is_shared_only

    def _interests_changed(self, one: Filter) -> Iterator[None]:
        """Announce topics that have other than shared subscriptions now, or no longer, because of a filter."""
        table, name = self.broker.topic_table.by_name, one.text.encode()
        topics = list(self._by_topic) if one.has_wildcard else [table[name]] if name in table else []
        for topic in topics:
            found = self._by_topic.get(topic)
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
        self._gaps.lost(device.client_id)
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
        found = self._by_topic.get(topic) if topic is not None else None
        if found is None:
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
        device = self.sessions[client_id] = Device(self, client_id)
        return device, False

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
        if not device.expiry_s:
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
            self.publish_will(will, self.broker.server)
        if self.sessions.get(device.client_id) is device:
            del self.sessions[device.client_id]
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
            if not count % EXPIRY_CHECKS_PER_STEP:
                yield

    def _check_expiry_later(self) -> None:
        devices = ref(self)  # the timer must not keep a closed hub

        def check() -> None:
            found = devices()
            if found is not None:
                found._end_expired()

        self.broker.call_later(EXPIRY_CHECK_S, check)

    # ---- wills

    def leave_will(self, device: Device, will: Will, peer: BrokerPeer) -> None:
        """Publish the will of a client whose connection has ended, now or after its delay."""
        delay_s = min(will.delay_s, device.expiry_s)
        if delay_s:
            self.delay_will(device, will, self.broker.clock() + delay_s)
        else:
            self.publish_will(will, peer)

    def delay_will(self, device: Device, will: Will, due_s: float) -> None:
        """Publish a will at a time, unless the client is back.

        Args:
            device: the session.
            will: the will.
            due_s: the time, on the clock of the broker.
        """
        will = device.will = replace(will, due_s=due_s)

        def publish_when_due() -> None:
            if device.will is not will:  # the client is back, or the session has ended
                return
            left_s = due_s - self.broker.clock()
            if left_s > 0:
                self.broker.call_later(min(left_s, MAX_TIMER_S), publish_when_due)
                return
            device.will = None
            self.publish_will(will, self.broker.server)
            self.session_changed(device)

        self.broker.call_later(min(max(due_s - self.broker.clock(), 0), MAX_TIMER_S), publish_when_due)

    def forget_wills(self) -> None:
        """Publish no more wills: the sessions have moved to another process."""
        for device in self.sessions.values():
            device.will = None

    def publish_will(self, will: Will, peer: BrokerPeer) -> None:
        """Publish a will; `onpublish` may swallow it, unless it answers later: then the will is retained before."""
        message, broker = will.message, self.broker
        expires_s = broker.clock() + will.expiry_s
        topic = self.topic_for(message.name)
        drops: list[Drop] = []
        if topic is not None:
            frame = smq.publish_frame(topic.id, peer.etid, 0, message.payload)
            batch = mqtt_batch(frame, message.qos, message.retain, message.properties, expires_s)
            batch.drops = drops
            route = GuardedRoute if broker.hooks.onpublish is not None else destination
            route(broker, topic.id, peer.etid, peer).deliver(batch)
        if message.retain and Drop.SWALLOWED not in drops:
            self.retain(Message(message.name, message.payload, message.qos, True, message.properties, expires_s))

    def retain(self, message: Message) -> bool:
        """Keep a new message as the retained one of its topic, at all nodes of a cluster; return false over a limit."""
        is_kept = self.retained.set(message)
        if is_kept and self.broker.cluster is not None:
            self.broker.cluster.mqtt.retained_changed(message.name)
        return is_kept


def _any_device(device: Device) -> bool:
    return True


def is_valid_name(name: bytes, levels: int) -> bool:
    """Return whether MQTT clients can use a topic name with at most so many levels."""
    return mqtt_name(name) is not None and name.count(b"/") < levels
