"""State of an MQTT session (MQTT 5 §4.1): QoS 1 and 2 in both directions (§4.3, §4.4).

Client and server have the same state: the messages in flight to the peer, in the order of sending, and the packet
identifiers of received QoS 2 messages that are not released yet. After a reconnect the messages in flight are sent
again: with DUP when the peer kept its part of the session, as new ones when it did not, and only PUBREL after PUBREC.
"""

from __future__ import annotations

from collections import OrderedDict

from smqrt.wire.mqtt.reasons import FIRST_FAILURE

_IDENTIFIERS = 0xFFFF
MAX_INFLIGHT = 0x7FFF  # half of the packet identifiers, so that a free one is found soon


class OutgoingMessage:
    """A message to the peer.

    Args:
        properties: packed, without their length.

    Attributes:
        packet_identifier: 0 before it is sent, and with QoS 0.
        is_dup: whether it may have been sent before, in this session.
        is_released: whether PUBREC was received, and PUBREL is due.
        size_bytes: topic, payload and properties.
    """

    __slots__ = (
        "is_dup",
        "is_released",
        "packet_identifier",
        "payload",
        "properties",
        "qos",
        "retain",
        "size_bytes",
        "topic",
    )

    def __init__(self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes) -> None:
        self.topic, self.payload, self.qos, self.retain = topic, payload, qos, retain
        self.properties = properties
        self.size_bytes = len(topic) + len(payload) + len(properties)
        self.packet_identifier = 0
        self.is_dup = self.is_released = False

    def finish(self, error: str | int | None = None) -> None:
        """Called when the message is sent (QoS 0) or acknowledged (QoS 1 and 2), or failed with `error`."""


class MqttSession:
    """The part of a session that one peer keeps.

    Attributes:
        in_flight: QoS 1 and 2 messages that are sent and not acknowledged, by packet identifier.
        in_flight_bytes: their size.
        unsent: those of them that are to be sent again on this connection.
        unreleased: packet identifiers of received QoS 2 messages without PUBREL.
        requests: packet identifiers of SUBSCRIBE and UNSUBSCRIBE that wait for their answer.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, OutgoingMessage] = {}
        self.in_flight_bytes = 0
        self.unsent: OrderedDict[int, OutgoingMessage] = OrderedDict()
        self.unreleased: set[int] = set()
        self.requests: set[int] = set()
        self._last_identifier = 0

    def new_identifier(self) -> int:
        """Return a free packet identifier. `MAX_INFLIGHT` and `MAX_REQUESTS` make sure that there is one."""
        number = self._last_identifier
        while True:
            number = number % _IDENTIFIERS + 1
            if number not in self.in_flight and number not in self.requests:
                self._last_identifier = number
                return number

    def resume(self, is_kept: bool) -> None:
        """Begin a connection: all messages in flight are to be sent again.

        Args:
            is_kept: whether the peer kept its part of the session. If not, messages that it confirmed with PUBREC are
                done, and so are those that it would release.
        """
        self.requests.clear()
        if not is_kept:
            self.unreleased.clear()
            for message in [message for message in self.in_flight.values() if message.is_released]:
                self.settle(message)
        for number, message in self.in_flight.items():
            message.is_dup = is_kept and (message.is_dup or number not in self.unsent)
        self.unsent = OrderedDict(self.in_flight)

    def begin(self, message: OutgoingMessage) -> None:
        """Assign a packet identifier to a message with QoS 1 or 2 before it is sent the first time."""
        message.packet_identifier = number = self.new_identifier()
        self.in_flight[number] = message
        self.in_flight_bytes += message.size_bytes

    def settle(self, message: OutgoingMessage, error: str | int | None = None) -> None:
        """Remove a message that is acknowledged, or failed with `error`."""
        number = message.packet_identifier
        if self.in_flight.pop(number, None):
            self.in_flight_bytes -= message.size_bytes
        self.unsent.pop(number, None)
        message.finish(error)

    # ---- acknowledgements of what was sent

    def acknowledged(self, number: int, code: int) -> None:
        """Handle PUBACK; ignored without its message in flight."""
        message = self.in_flight.get(number)
        if message is not None and message.qos == 1:
            self.settle(message, code if code >= FIRST_FAILURE else None)

    def received(self, number: int, code: int) -> bool | None:
        """Handle PUBREC; return whether to send PUBREL: None for an unknown message, False when it was refused."""
        message = self.in_flight.get(number)
        if message is None or message.qos != 2:
            return None
        if code >= FIRST_FAILURE:
            self.settle(message, code)
            return False
        message.is_released = True
        self.unsent.pop(number, None)
        return True

    def completed(self, number: int) -> None:
        """Handle PUBCOMP."""
        message = self.in_flight.get(number)
        if message is not None and message.qos == 2 and message.is_released:
            self.settle(message)
