"""The MQTT side of a hub: filters, sessions and retained messages of its MQTT clients.

`Devices` subscribes to each topic that a filter matches, like one more client of the hub, and passes the batches on to
the MQTT clients. So all routes, hooks, the journal and backpressure are the same as for SMQ clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from weakref import ref

from smqrt.broker.mqtt.device import NEVER_S, Device, Will
from smqrt.broker.mqtt.filters import Filter, FilterSet, FilterTable, Options, mqtt_name, shared_options, split_shared
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, ArrivedBatch, Message, MqttBatch, Run, mqtt_batch
from smqrt.broker.mqtt.retained import RetainedMessages
from smqrt.broker.outbox import Drop, Outbox, run_at_once, run_in_background
from smqrt.broker.routes import GuardedRoute, destination
from smqrt.broker.state import BrokerPeer, BrokerState
from smqrt.broker.topics import Topic
from smqrt.settings.limits import Limit, MqttSettings
from smqrt.wire import smq
from smqrt.wire.kernels import mqtt_packets, packed_in_python
from smqrt.wire.mqtt.fields import PacketType, pack_properties

DELIVERY_S = 0.004
"""Time for deliveries at once; the rest follows in the next turns."""
SELF = b"$smq/self"
"""The topic name of messages to a client's ETID."""
EXPIRY_CHECK_S = 1.0
MAX_UNSENT_BYTES, BATCH_BYTES = 64 << 20, 200
"""Memory of the batches that wait for delivery, when publishers are faster; further ones are lost and counted."""
MAX_TIMER_S = 10.0
"""The longest timer for a will: it keeps the will, also after the client is back. A client may choose days."""
EXPIRY_CHECKS_PER_STEP = 200
PRESSURE_S = 1.0
"""The maximum time for which publishers wait for a client that does not acknowledge: it may be gone."""
MAX_PASSING = 10_000
"""Topics that only messages of MQTT clients have created, and only MQTT clients have subscribed to with wildcards."""
_SUBTOPIC, _PUBLISHER = "subtopic", "publisher"

FILTERS = Limit("mqtt_filters", "mqtt.filters", "the client's limit of topic filters is reached")
SESSIONS = Limit("mqtt_sessions", "mqtt.sessions", "the hub's limit of sessions without a connection is reached")
QUEUED = Limit("mqtt_queued", "mqtt.queued_messages", "the queue of a session is full, and its oldest message is lost")


class Devices(Outbox):
    """The MQTT clients of one hub, and the outbox that gets the messages to them.

    Args:
        broker: the hub.
        settings: the limits of its MQTT clients.

    Attributes:
        sessions: sessions by client id, with and without a connection.
        filters: the filters of all sessions.
        retained: the retained messages.
        waiting_bytes: the memory of the messages that wait in all sessions, approximately.
        pack: see `Encoder`.
        changed_names: names of retained messages that have changed since they were saved.
        changed_sessions: ids of sessions that have changed since they were saved.
        on_changed: called at a change, with true for a session; None when nothing is saved.
    """

    __slots__ = (
        "__weakref__",
        "_by_topic",
        "_delivery",
        "_is_delivering",
        "_is_notifying",
        "_is_sweeping",
        "_pressed",
        "_unsent",
        "_unsent_bytes",
        "broker",
        "changed_names",
        "changed_sessions",
        "filters",
        "limits",
        "offline",
        "on_changed",
        "pack",
        "retained",
        "sessions",
        "waiting_bytes",
    )

    def __init__(self, broker: BrokerState, settings: MqttSettings | None = None) -> None:
        super().__init__()
        self.budget_bytes = 1 << 62  # each connection has a budget of its own
        self.broker = broker
        self.limits = settings or MqttSettings()
        self.sessions: dict[str, Device] = {}
        self.offline: dict[Device, None] = {}
        self.filters = FilterTable()
        self.retained = RetainedMessages(broker, self.limits, self.properties_of, self._retained_changed)
        self.waiting_bytes = 0
        self.changed_names: dict[bytes, None] = {}
        self.changed_sessions: dict[str, None] = {}
        self.on_changed: Callable[[bool], object] | None = None
        self.pack: Callable[[bytes, int, bytes], bytes] = partial(mqtt_packets, packed_in_python)
        self._by_topic: dict[Topic, FilterSet] = {}
        self._pressed: dict[Device, list[BrokerPeer]] = {}
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._delivery: Iterator[None] = iter(())
        self._is_delivering = self._is_sweeping = self._is_notifying = False
        broker.topic_table.on_named += (self._on_topic,)
        broker.topic_table.represented = self._represented
        broker.devices = self
        self._check_expiry_later()

    # ---- topics and filters

    def _on_topic(self, topic: Topic) -> None:
        """Subscribe to a new topic that filters match."""
        assert topic.name is not None
        self._set(topic, self.filters.match(topic.name))

    def _set(self, topic: Topic, found: FilterSet | None) -> None:
        known = self._by_topic.get(topic)
        if found is known:
            return
        if topic.observers:
            self.broker.notify_observers_later(topic)
        if found is None:
            del self._by_topic[topic]
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
            device.wildcards += text.count("+")
        device.subscriptions[text] = options = shared_options(options)
        self.session_changed(device)
        if group is None:
            one.add(device, options)
        else:
            one.group(group).members[device] = options
        one.forget_deliveries()
        if self.broker.cluster is not None:
            self.broker.cluster.mqtt.filter_changed(text)
        if known is None:
            yield from self._match_topics(one)
        else:
            self._notify_observers(one)
            if self.broker.cluster is not None and bool(one.members) is not had_members:
                run_at_once(self._interests_changed(one), self.broker.clock)

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

    @staticmethod
    def _may_match(one: Filter, name: bytes) -> bool:
        """Return false for most topics that a filter does not match: their names begin differently."""
        fixed = one.text.partition("+")[0].partition("#")[0].rstrip("/")
        return name.startswith(fixed.encode())

    def unsubscribe(self, device: Device, text: str) -> bool:
        """End a subscription; return whether there was one."""
        if device.subscriptions.pop(text, None) is None:
            return False
        device.wildcards -= text.count("+")
        self.session_changed(device)
        group, wanted = split_shared(text) or (None, text)
        one = self.filters.by_text[wanted]
        had_members = bool(one.members)
        if group is None:
            one.discard(device)
        else:
            members = one.groups[group].members
            del members[device]
            if not members:
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

    def flush(self) -> None:
        """Pass the batches of this turn on: for `DELIVERY_S` now, then in the next turns."""
        batches, self.queue = self.queue, []
        for batch in batches:
            if self._unsent_bytes > MAX_UNSENT_BYTES:
                self.broker.stats.drop(Drop.OVER_GLOBAL_BUDGET, smq.count_frames(batch))
            else:
                self._unsent.append(batch)
                self._unsent_bytes += len(batch) + BATCH_BYTES
        if not self._is_delivering:
            self._is_delivering = True
            clock, steps = self.broker.clock, self._deliver_all()
            self._delivery = steps
            until_s = clock() + DELIVERY_S
            while self._is_delivering and clock() < until_s:
                deque(islice(steps, 8), maxlen=0)
            if self._is_delivering:
                run_in_background(steps)

    def deliver_now(self) -> None:
        """Deliver all batches at once: the clients are frozen, and what they have sent must be in their sessions."""
        self.flush()
        if self._is_delivering:
            deque(self._delivery, maxlen=0)

    def _deliver_all(self) -> Iterator[None]:
        while self._unsent:
            batch = self._unsent.popleft()
            self._unsent_bytes -= len(batch) + BATCH_BYTES
            topic = self.broker.topic_table.by_key.get(batch[smq.TID])
            if topic is None:
                yield
            elif topic.name is None:
                self._send_to_one(topic, batch)
                yield
            elif (found := self._by_topic.get(topic)) is not None:
                run = self.run(topic.name, topic.key, batch)
                group = batch.group if isinstance(batch, ArrivedBatch) else None
                if not group:
                    for one in found.deliveries:
                        one.device.deliver(run, one)
                        yield
                if group != "":
                    yield from self._deliver_shared(run, batch, found, group)
        self._is_delivering = False

    def _deliver_shared(self, run: Run, batch: bytes, found: FilterSet, wanted: str | None) -> Iterator[None]:
        """Deliver a batch to one client of each shared subscription, or of the one with the text `wanted`."""
        cluster = self.broker.cluster
        for group in found.groups:
            if wanted is not None and group.text != wanted:
                continue
            if (
                wanted is None
                and cluster is not None
                and not group.is_connected
                and cluster.mqtt.send_to_group(group.text, run.name, batch)  # a client is connected to another node
            ):
                continue
            for part in run.singles() if run.count > 1 else (run,):
                if (chosen := group.choose()) is not None:
                    chosen.device.deliver(part, chosen)
                yield

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
        """Tell other nodes that a member of shared subscriptions has connected or disconnected."""
        cluster = self.broker.cluster
        if cluster is not None:
            for text in device.subscriptions:
                if text.startswith("$share/"):
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

    def publish_large(self, topic: Topic, batch: MqttBatch) -> None:
        """Publish a message that does not fit an SMQ packet: to MQTT clients and to handlers of the server.

        Others miss it. With `onpublish`, which gets packets of SMQ, nobody gets it.
        """
        cluster, size = self.broker.cluster, len(batch.large or b"")
        if self.broker.hooks.onpublish is not None:
            self.broker.stats.drop(Drop.SWALLOWED, 1)
            batch.dropped(Drop.SWALLOWED)
            return
        self.broker.topic_table.traffic.add(1, size, 0)
        is_reached = self.deliver_large(topic, batch)
        if cluster is not None:
            sent, missed = cluster.mqtt.send_large(topic, batch)
            is_reached = is_reached or sent + missed > 0
            if missed:
                self.broker.stats.drop(Drop.TOO_LARGE, missed)
        if not is_reached:
            self.broker.stats.drop(Drop.UNROUTED, 1)
            batch.dropped(Drop.UNROUTED)

    def deliver_large(self, topic: Topic, batch: MqttBatch) -> bool:
        """Deliver a message that does not fit an SMQ packet at this node; return whether it has subscribers."""
        server, missed = self.broker.server, 0
        topic.settle()
        for outbox in topic.raw + topic.ws:
            if outbox is self or outbox is server.outbox:
                outbox.put(batch)
            else:
                missed += 1
        if missed:
            self.broker.stats.drop(Drop.TOO_LARGE, missed)
        return bool(missed or topic.raw)

    def session_overflowed(self, device: Device) -> None:
        """Count a message that was lost because too many waited in a session."""
        self.broker.stats.drop(Drop.OVER_BUDGET, 1)
        QUEUED.refused(f"the MQTT client {ascii(device.client_id[:64])}")

    # ---- backpressure: publishers with QoS 1 and 2 wait for connected clients whose queues fill
    #
    # They get their acknowledgements later, so nothing is lost as long as a client is only slower for a while.

    def pressed(self, device: Device) -> None:
        """Let publishers wait for a connected client for at most `PRESSURE_S`."""
        if device.is_pressed or device.is_stuck or device.client is None:
            return
        device.is_pressed = True
        self._pressed[device] = []

        def expire() -> None:
            if device.is_pressed:
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

    def must_wait(self, topic: Topic, publisher: BrokerPeer) -> bool:
        """Return whether a publisher to a topic has to wait for one of its subscribers; it is resumed then."""
        if not self._pressed:
            return False
        found = self._by_topic.get(topic)
        if found is None:
            return False
        for device, waiting in self._pressed.items():
            if found.has(device) and publisher.etid != device.etid:
                waiting.append(publisher)
                return True
        return False

    # ---- changes, see `smqrt.smq.mqtt_file`

    def _retained_changed(self, name: bytes) -> None:
        if self.on_changed is not None:
            self.changed_names[name] = None
            self.on_changed(False)

    def session_changed(self, device: Device) -> None:
        """Save a session soon, if it is kept."""
        if self.on_changed is not None and (device.expiry_s or device.client_id not in self.sessions):
            self.changed_sessions[device.client_id] = None
            self.on_changed(True)

    def saved_bytes(self, key: bytes | str) -> int:
        """Return the size of what is saved for a name of `changed_names` or an id of `changed_sessions`."""
        if isinstance(key, bytes):
            kept = self.retained.by_name.get(key)
            return 0 if kept is None else kept.size_bytes
        device = self.sessions.get(key)
        return 0 if device is None else device.waiting_bytes + 100 * len(device.subscriptions)

    # ---- sessions

    def open(self, client_id: str, clean: bool) -> tuple[Device, bool]:
        """Return the session for a connection, and whether it was kept."""
        device = self.sessions.get(client_id)
        if device is not None and (clean or device.ends_s <= self.broker.clock()):
            self.end(device)
            device = None
        if device is not None:
            self.offline.pop(device, None)
            self.session_changed(device)
            return device, True
        device = self.sessions[client_id] = Device(self, client_id)
        return device, False

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
        self.offline[device] = None
        self.session_changed(device)
        device.ends_s = NO_EXPIRY_S
        if device.expiry_s != NEVER_S:
            device.ends_s = self.broker.clock() + device.expiry_s

    def end(self, device: Device) -> None:
        """End a session: its subscriptions and messages go. A will that is delayed is published (MQTT 5 §3.1.3.2.2)."""
        self.offline.pop(device, None)
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
        if self.broker.topic_table.passing:
            run_in_background(self._remove_unused())
        self._check_expiry_later()

    def _expire(self) -> Iterator[None]:
        now_s = self.broker.clock()
        for count, device in enumerate(list(self.offline), 1):
            if device.ends_s <= now_s and device in self.offline:
                self.end(device)
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
        if not delay_s:
            self.publish_will(will, peer)
            return
        device.will = will
        due_s = self.broker.clock() + delay_s

        def publish_when_due() -> None:
            if device.will is not will:  # the client is back, or the session has ended
                return
            left_s = due_s - self.broker.clock()
            if left_s > 0:
                self.broker.call_later(min(left_s, MAX_TIMER_S), publish_when_due)
                return
            device.will = None
            self.publish_will(will, self.broker.server)

        self.broker.call_later(min(delay_s, MAX_TIMER_S), publish_when_due)

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


def is_valid_name(name: bytes, levels: int) -> bool:
    """Return whether MQTT clients can use a topic name with at most so many levels."""
    return mqtt_name(name) is not None and name.count(b"/") < levels
