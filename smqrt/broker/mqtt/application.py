"""QoS, retain flag, expiry and properties of messages of the application, and of those that it gets.

The application publishes a batch with attributes, as an MQTT client does. Its handlers get the attributes of the
messages of MQTT clients with the payload (`MqttPayload`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from smqrt.broker.mqtt.filters import mqtt_name
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, MqttBatch, mqtt_batch
from smqrt.errors import ArgumentError
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import (
    PacketType,
    count_user_properties,
    is_topic_name,
    pack_properties,
    unpack_properties,
)

if TYPE_CHECKING:
    from smqrt.broker.mqtt.devices import Devices
    from smqrt.broker.topics import Topic

MAX_EXPIRY_S = 0xFFFFFFFF
_SET_BY_THE_HUB = ("topicalias", "subscriptionidentifier")


class PublishOptions(NamedTuple):
    """The options of `publish` for MQTT clients.

    Attributes:
        qos: 0, 1 or 2; None for `mqtt.smq_qos`.
        retain: whether the message replaces the retained one of its topic.
        expiry_s: seconds until the message expires; None for never.
        properties: properties of MQTT 5, with the names of `smqrt.wire.mqtt.fields`; other names are user properties.
    """

    qos: int | None = None
    retain: bool = False
    expiry_s: float | None = None
    properties: Mapping[str, object] | None = None


class MqttAttributes(NamedTuple):
    """The attributes of a message of an MQTT client, as handlers of the application get them.

    Attributes:
        qos: 0, 1 or 2, as it was published.
        retain: whether the message was published with the retain flag.
        expiry: seconds until the message expires; None for never.
        properties: the properties of MQTT 5; a user property that occurs several times is a list.
    """

    qos: int
    retain: bool
    expiry: float | None
    properties: dict[str, Any]  # `PropertyValue`; a handler knows the type of the property that it reads


class MqttPayload(bytes):
    """The payload of a message of an MQTT client.

    Attributes:
        batch: the batch of the message.
    """

    batch: MqttBatch

    def attributes(self, now_s: float) -> MqttAttributes:
        """Return the attributes of the message.

        Args:
            now_s: the time on the clock of the broker.
        """
        return attributes_of(self.batch, now_s)


def attributes_of(message: MqttBatch | Message, now_s: float) -> MqttAttributes:
    """Return the attributes of a message, at the time `now_s` on the clock of the broker."""
    expiry_s = None if message.expires_s == NO_EXPIRY_S else max(message.expires_s - now_s, 0.0)
    properties = unpack_properties(message.properties, 0, len(message.properties), PacketType.PUBLISH)
    return MqttAttributes(message.qos, message.retain, expiry_s, properties)


def mqtt_payload(data: bytes, batch: MqttBatch) -> MqttPayload:
    """Return the payload of a message of a batch."""
    found = MqttPayload(data)
    found.batch = batch
    return found


class CheckedOptions(NamedTuple):
    """Checked `PublishOptions`.

    Attributes:
        qos, retain: as in `PublishOptions`.
        properties: the properties, packed.
        expires_s: when the message expires, on the clock of the broker.
    """

    qos: int
    retain: bool
    properties: bytes
    expires_s: float


def checked_options(devices: Devices | None, options: PublishOptions) -> CheckedOptions | None:
    """Return the options of a message; None at a hub without MQTT clients when there are none.

    Args:
        devices: the MQTT clients of the hub; None if it accepts none.
        options: the options.

    Raises:
        ArgumentError: the hub accepts no MQTT clients, or a value is invalid.
    """
    if devices is not None:
        qos, expires_s = _qos(devices, options.qos), _expires_s(devices, options.expiry_s)
        return CheckedOptions(qos, options.retain, _packed(devices, options.properties), expires_s)
    for name, value in zip(("qos", "retain", "expiry", "properties"), options, strict=True):
        if value is not None and value is not False:
            raise ArgumentError(
                f"{name}: this hub accepts no MQTT clients; create it with the option mqtt, or omit {name}"
            )
    return None


def batch_of(devices: Devices, topic: Topic | None, frame: bytes, options: CheckedOptions, has_hook: bool) -> MqttBatch:
    """Return a message of the application with its attributes; keep it if it is to be retained.

    Args:
        devices: the MQTT clients of the hub.
        topic: the topic; None for an id without a topic.
        frame: the message as a Publish frame.
        options: its options.
        has_hook: whether `onpublish` decides about the message; then it is retained after that.

    Raises:
        ArgumentError: the topic can't have a retained message, or a limit of retained messages is reached.
    """
    batch = mqtt_batch(frame, options.qos, options.retain, options.properties, options.expires_s)
    if not options.retain:
        return batch
    message = _retained(topic, batch)
    reached = devices.retained.reached(message)
    if reached is not None:
        reached.refused("a message of the application")
        raise ArgumentError(f"retain: {reached.rule}, see {reached.setting}; delete retained messages first")
    if has_hook:
        batch.on_accepted = lambda: devices.retain(message)
    else:
        devices.retain(message)
    return batch


def _qos(devices: Devices, qos: object) -> int:
    if qos is None:
        return devices.limits.smq_qos
    if isinstance(qos, bool) or not isinstance(qos, int) or not 0 <= qos <= 2:
        raise ArgumentError(f"qos: {str(qos)[:40]!r} is not a QoS; use 0, 1 or 2")
    return qos


def _expires_s(devices: Devices, expiry_s: object) -> float:
    if expiry_s is None:
        return NO_EXPIRY_S
    is_number = isinstance(expiry_s, int | float) and not isinstance(expiry_s, bool)
    if not is_number or not 0 < expiry_s <= MAX_EXPIRY_S:  # type: ignore[operator]
        raise ArgumentError(f"expiry: {str(expiry_s)[:40]!r}; seconds above 0, at most {MAX_EXPIRY_S}, are needed")
    return devices.broker.clock() + expiry_s  # type: ignore[operator]


def _packed(devices: Devices, properties: object) -> bytes:
    """Return checked properties, packed."""
    if not properties:
        return b""
    if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
        raise ArgumentError(f"properties: names and values are needed, not {type(properties).__name__}")
    for name in _SET_BY_THE_HUB:
        if name in properties:
            raise ArgumentError(f"properties: the hub sets {name} for each client; omit it")
    if "messageexpiryinterval" in properties:
        raise ArgumentError("properties: messageexpiryinterval is the argument expiry; use that")
    response = properties.get("responsetopic")
    if response is not None and not is_topic_name(str(response)):
        raise ArgumentError("properties: responsetopic is empty or has a wildcard; use the name of a topic")
    limits, count = devices.limits, count_user_properties(properties)
    if count > limits.user_properties:
        raise ArgumentError(
            f"properties: {count} user properties; at most {limits.user_properties} are possible, see "
            "mqtt.user_properties"
        )
    packed = pack_properties(properties, PacketType.PUBLISH)
    if len(packed) > limits.packet_bytes:
        raise ArgumentError(f"properties: {len(packed)} bytes; at most {limits.packet_bytes}, see mqtt.packet_bytes")
    return packed


def _retained(topic: Topic | None, batch: MqttBatch) -> Message:
    name = topic.name if topic is not None else None
    if name is None or mqtt_name(name) is None:
        shown = "a client" if name is None else ascii(name[:64])[1:]
        raise ArgumentError(f"retain: {shown} is not a topic that MQTT can name; publish to a topic without + and #")
    payload = batch[smq.PUBLISH_HEADER_BYTES :]
    return Message(name, payload, batch.qos, True, batch.properties, batch.expires_s)
