"""Common base of the parts of an MQTT client at a hub: `publishing`, `subscribing` and `client`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.outbox import Outbox
from smqrt.broker.sessions import Session
from smqrt.broker.state import BrokerState
from smqrt.errors import MqttError
from smqrt.wire.mqtt.fields import (
    Props,
    Reason,
    count_user_properties,
    has_discouraged_characters,
    is_topic_name,
    user_properties_in,
)

RESERVED = "names that begin with $SYS or $share are reserved"
_SYSTEM, _SHARED = b"$SYS", b"$share"
_BRIDGE_START, _BRIDGE_END = b"$SYS/broker/connection/", b"/state"


class MqttOutbox(Protocol):
    """The connection of an MQTT client."""

    def send_packet(self, data: bytes) -> None:
        """Queue one packet."""

    def send_packets(self, data: bytes, key: bytes) -> None:
        """Queue PUBLISH packets with QoS 0 of one topic."""

    @property
    def has_room(self) -> bool:
        """Whether the queue takes more messages with QoS 1 and 2."""


class MqttSession(Session):
    """An MQTT client at the hub.

    Args:
        broker: the hub.
        outbox: its connection.
        seed: random, for hooks that expect the one of SMQ.
        origin: the request that opened the connection, see `smqrt.smq.handshake.Origin`.

    Attributes:
        counts: the counters of the hub.
        device: its session; None before it is accepted.
        version: 3, 4 or 5; 0 before CONNECT.
        client_id: the client id.
        skips_resume: whether the next `resume` of the outbox is to be ignored.
    """

    __slots__ = ("client_id", "counts", "device", "mqtt_outbox", "skips_resume", "version")

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.mqtt_outbox: Any = outbox
        self.device: Device | None = None
        self.counts = self.devices.counts
        self.version = 0
        self.client_id = ""
        self.skips_resume = False

    @property
    def devices(self) -> Devices:
        """The MQTT clients of the hub."""
        found: Devices = self.broker.devices
        return found

    @property
    def codec(self) -> int:
        """The version for encoding: 5, or 4 for MQTT 3.1 and 3.1.1."""
        return 5 if self.version == 5 else 4

    def ask_then(
        self, hook: Callable[..., Any] | None, arguments: tuple[Any, ...], then: Callable[[Any], bool]
    ) -> bool:
        """Call `then` with the answer of a hook, as `ask`; `then` returns whether the client has to wait further.

        Returns:
            Whether the client has to wait.
        """
        is_late = waits = False

        def answered(value: Any) -> None:
            nonlocal waits
            waits = then(value)
            self.skips_resume = is_late and waits  # `ask` resumes after this function

        is_waiting = self.ask(hook, arguments, answered)
        is_late = True
        return is_waiting or waits

    def check_properties(self, properties: Props, block: bytes = b"") -> None:
        """Check the characters of the properties of a packet, and the number of its user properties.

        Args:
            properties: the properties.
            block: the same, packed with their length, when they are to be forwarded: it also has those that have the
                names of properties of the standard.

        Raises:
            MqttError: there are too many, or a text has control characters.
        """
        for name, value in properties.items():
            check_characters(
                name, *(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))
            )
        limit = self.devices.limits.user_properties
        count = user_properties_in(block) if block else count_user_properties(properties)
        if count > limit:
            raise MqttError(Reason.QUOTA_EXCEEDED, f"a packet with {count} user properties; {limit} are possible")


def check_characters(*texts: str) -> None:
    """Check the characters of texts from a client, as mosquitto does.

    Raises:
        MqttError: a text has control characters or code points that are no characters.
    """
    for text in texts:
        if has_discouraged_characters(text):
            raise MqttError(Reason.MALFORMED_PACKET, f"the text {ascii(text[:64])} has a control character")


def check_message_properties(properties: Props) -> None:
    """Check the properties of a message or a will from a client; `decode` has checked their format.

    Raises:
        MqttError: a subscription identifier [MQTT-3.3.4-6], or an invalid response topic [MQTT-3.3.2-14].
    """
    if "subscriptionidentifier" in properties:
        raise MqttError(Reason.PROTOCOL_ERROR, "a message of a client with a subscription identifier")
    topic = properties.get("responsetopic")
    if topic is not None and not is_topic_name(str(topic)):
        raise MqttError(Reason.PROTOCOL_ERROR, "the response topic has a wildcard, or is empty")


def is_reserved(name: bytes) -> bool:
    """Return whether clients can't publish to a topic: `$SYS` and `$share`.

    The state of a bridge is the exception: mosquitto publishes it to the broker at the other end.
    """
    if name[:1] != b"$":
        return False
    if name.startswith(_BRIDGE_START) and name.endswith(_BRIDGE_END):
        return False
    return name.partition(b"/")[0] in (_SYSTEM, _SHARED)
