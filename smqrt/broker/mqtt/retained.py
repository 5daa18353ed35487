"""Retained messages of a hub, which new MQTT subscribers get (MQTT 5 §3.3.1.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from smqrt.broker.mqtt.filters import FilterTable, Options, mqtt_name
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, mqtt_batch, packed_identifier
from smqrt.broker.state import BrokerState
from smqrt.broker.topics import Topic
from smqrt.settings.limits import Limit, MqttSettings
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import check_filter

NAMES_PER_STEP = 200
"""Names that are compared with a filter at once."""
RETAINED = Limit("mqtt_retained", "mqtt.retained", "the hub's limit of retained messages is reached")
RETAINED_MEMORY = Limit("mqtt_retained_bytes", "mqtt.retained_bytes", "the hub's limit of retained bytes is reached")


def name_matcher(text: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether a topic name matches a filter; an empty one matches all names.

    Raises:
        ArgumentError: `text` is not a filter.
    """
    if not text:
        return lambda name: True
    check_filter(text)
    if "+" not in text and "#" not in text:
        wanted = text.encode()
        return lambda name: name == wanted
    fixed = text.partition("+")[0].partition("#")[0].rstrip("/").encode()
    if fixed and text.encode() == fixed + b"/#":  # the most frequent form
        below = fixed + b"/"
        return lambda name: name.startswith(below) or name == fixed
    table = FilterTable()
    table.named(text)
    return lambda name: name.startswith(fixed) and table.match(name) is not None


class RetainedMessages:
    """The retained messages of a hub. Last values of topics without a retained message count as such for subscribers.

    Args:
        broker: the hub.
        limits: the limits of MQTT clients.
        properties_of: returns the packed properties of a message that no MQTT client has published.
        on_change: called with the name of each message that is set or deleted.

    Attributes:
        by_name: the messages by topic name.
        limits: the limits of MQTT clients.
        size_bytes: their memory, approximately.
    """

    __slots__ = ("_broker", "_on_change", "_properties_of", "by_name", "limits", "size_bytes")

    def __init__(
        self,
        broker: BrokerState,
        limits: MqttSettings,
        properties_of: Callable[[bytes], bytes],
        on_change: Callable[[bytes], None],
    ) -> None:
        self._broker, self.limits = broker, limits
        self._properties_of, self._on_change = properties_of, on_change
        self.by_name: dict[bytes, Message] = {}
        self.size_bytes = 0

    def set(self, message: Message) -> bool:
        """Keep a message as the retained one of its topic; return false over a limit.

        A message without payload deletes the retained one [MQTT-3.3.1-6].
        """
        name = message.name
        known = self.by_name.get(name)
        if not message.payload:
            if known is not None:
                self.forget(known)
            return True
        growth = message.size_bytes - (known.size_bytes if known is not None else 0)
        limit = self._limit(known, growth)
        if limit is not None:
            limit.refused(f"the topic {ascii(name[:64])[1:]}")
            return False
        self.by_name[name] = message
        self.size_bytes += growth
        self._on_change(name)
        return True

    def reached(self, message: Message) -> Limit | None:
        """Return the limit that forbids to keep a message; None when it can be kept, or deletes one."""
        if not message.payload:
            return None
        known = self.by_name.get(message.name)
        return self._limit(known, message.size_bytes - (known.size_bytes if known is not None else 0))

    def _limit(self, known: Message | None, growth: int) -> Limit | None:
        """Return the limit that a message exceeds which replaces another one, or none, and has more bytes."""
        if known is None and len(self.by_name) >= self.limits.retained:
            return RETAINED
        return RETAINED_MEMORY if self.size_bytes + growth > self.limits.retained_bytes else None

    def forget(self, message: Message) -> None:
        """Delete a retained message."""
        del self.by_name[message.name]
        self.size_bytes -= message.size_bytes
        self._on_change(message.name)

    def frame(self, topic: Topic) -> bytes:
        """Return the retained message of a topic for an SMQ subscriber, or for a handler; empty without one."""
        found = self.by_name.get(topic.name or b"")
        if found is None or found.expires_s <= self._broker.clock() or len(found.payload) > smq.MAX_PAYLOAD_BYTES:
            return b""
        frame = smq.publish_frame(topic.id, self._broker.server.etid, 0, found.payload)
        return mqtt_batch(frame, found.qos, True, found.properties, found.expires_s)

    def names(self, text: str) -> Iterator[bytes | None]:
        """Return the names of the present retained messages that match a filter, in portions.

        Args:
            text: the filter; an empty one matches all.

        Yields:
            a name; None after many names, so that others have their turn.

        Raises:
            ArgumentError: `text` is not a filter.
        """
        matches, now_s = name_matcher(text), self._broker.clock()
        for count, name in enumerate(list(self.by_name), 1):
            found = self.by_name.get(name)
            if found is not None and found.expires_s > now_s and matches(name):
                yield name
            if not count % NAMES_PER_STEP:
                yield None

    def delete(self, text: str) -> Iterator[int]:
        """Delete the retained messages that match a filter, in portions.

        Args:
            text: the filter.

        Yields:
            the number of messages that this portion has deleted, 0 or 1.

        Raises:
            ArgumentError: `text` is not a filter.
        """
        check_filter(text)  # an empty one would match all
        for name in self.names(text):
            found = self.by_name.get(name) if name is not None else None
            if found is not None:
                self.forget(found)
                if self._broker.cluster is not None:
                    self._broker.cluster.mqtt.retained_changed(found.name)
            yield int(found is not None)

    def matching(self, text: str, options: Options) -> RetainedFeed:
        """Return the retained messages for a new subscription."""
        return RetainedFeed(self, text, options)

    def names_for(self, text: str) -> list[bytes]:
        """Return the names of topics with a retained message or last values; a filter may not match some of them."""
        if "+" not in text and "#" not in text:
            return [text.encode()]
        values = self._broker.last_values
        names = (one.topic.name for one in values or () if one.newest)
        others = [name for name in names if name is not None and name not in self.by_name]
        return [*self.by_name, *(name for name in others if mqtt_name(name) is not None)]

    def of_topic(self, name: bytes, options: Options) -> Iterable[Message]:
        """Return the retained message of a topic, or its last values, for a subscription."""
        identifiers = packed_identifier(options.identifier)
        found = self.by_name.get(name)
        if found is None:
            return self._last_values(name, options, identifiers)
        if found.expires_s != NO_EXPIRY_S and found.expires_s <= self._broker.clock():
            self.forget(found)
            return ()
        qos = min(found.qos, options.qos)
        return (Message(name, found.payload, qos, True, found.properties, found.expires_s, identifiers),)

    def _last_values(self, name: bytes, options: Options, identifiers: bytes) -> Iterator[Message]:
        """Return the last values of a topic as retained messages."""
        topic, values = self._broker.topic_table.by_name.get(name), self._broker.last_values
        if topic is None or values is None:
            return
        qos = min(options.qos, self.limits.smq_qos)
        for frame in smq.frames(values.initial_frames(topic)):
            properties = self._properties_of(frame)
            payload = frame[smq.PUBLISH_HEADER_BYTES :]
            yield Message(name, payload, qos, True, properties, NO_EXPIRY_S, identifiers)


class RetainedFeed:
    """The retained messages for a new subscription, which are looked up while they are sent.

    It is an iterator of messages; it returns None after many names that do not match, so that others have their turn.

    Args:
        retained: the retained messages of the hub.
        text: the filter.
        options: its options.
        names: the names of the topics that are left; None for all. There may be very many, so they are listed when the
            first message is sent: many feeds of a client may wait.
        found: messages that were looked up already.
    """

    __slots__ = ("_matches", "_names", "_retained", "found", "options", "text")

    def __init__(
        self,
        retained: RetainedMessages,
        text: str,
        options: Options,
        names: Iterable[bytes] | None = None,
        found: Iterable[Message] = (),
    ) -> None:
        self._retained, self.text, self.options = retained, text, options
        self._names = None if names is None else deque(names)
        self.found = deque(found)
        self._matches = name_matcher(text)

    @property
    def has_begun(self) -> bool:
        """Whether the names are listed."""
        return self._names is not None

    @property
    def names(self) -> deque[bytes]:
        """The names of the topics that are left; the filter may not match some."""
        if self._names is None:
            self._names = deque(self._retained.names_for(self.text))
        return self._names

    def __iter__(self) -> Iterator[Message | None]:
        return self

    def __next__(self) -> Message | None:
        for _ in range(NAMES_PER_STEP):
            if self.found:
                return self.found.popleft()
            if not self.names:
                raise StopIteration
            name = self.names.popleft()
            if self._matches(name):
                self.found.extend(self._retained.of_topic(name, self.options))
        return None
