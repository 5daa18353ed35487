"""Protocol state of an MQTT connection and of its session, without I/O.

`feed` adds received bytes, `next` handles one packet, `take` returns the bytes to send. An object receives the events
(`EndpointEvents`). The caller passes the time. `MqttClientEndpoint` adds the parts of a client; servers have sessions
of their own (`smqrt.broker.mqtt`). MqttError means that the peer violated the protocol or is silent; `fail` sends the
reason if the version has reasons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from smqrt.errors import MqttError
from smqrt.wire.mqtt.fields import FIRST_FAILURE, PacketType, Props, Reason, TooManyPropertiesError, varint
from smqrt.wire.mqtt.packets import (
    MAX_PACKET_BYTES,
    DisconnectPacket,
    PacketSplitter,
    PublishPacket,
    decode_acknowledgement,
    decode_publish,
    encode,
    encode_acknowledgement,
    encode_publish,
)

# ---- Session state: QoS 1 and 2 (MQTT 5 §4.1, §4.3, §4.4)
#
# Client and server have the same state: the messages in flight to the peer, in the order of sending, and the packet
# identifiers of received QoS 2 messages that are not released yet. After a reconnect, the messages in flight are sent
# again: with DUP if the peer has kept its part of the session, otherwise as new messages; after PUBREC, only PUBREL is.

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
        size_bytes: the size of topic, payload and properties.
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
        """Handle the end: the message was written (QoS 0), was acknowledged (QoS 1 and 2), or failed with `error`."""


class PendingAcknowledgement:
    """The acknowledgement of a received message that the application has not given yet.

    Attributes:
        packet_identifier: of the message.
        qos: 1 or 2.
        code: the reason code of PUBACK or PUBREC; None before the application acknowledges the message.
    """

    __slots__ = ("code", "packet_identifier", "qos")

    def __init__(self, packet_identifier: int, qos: int, code: int | None = None) -> None:
        self.packet_identifier, self.qos, self.code = packet_identifier, qos, code


class MqttSession:
    """One side's part of a session.

    Attributes:
        in_flight: QoS 1 and 2 messages that were sent and are not acknowledged, by packet identifier.
        in_flight_bytes: their size.
        unsent: messages in flight that must be sent again on this connection.
        unreleased: packet identifiers of received QoS 2 messages without PUBREL.
        requests: the number of topic filters of SUBSCRIBE and UNSUBSCRIBE packets that wait for their answer, by packet
            identifier.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, OutgoingMessage] = {}
        self.in_flight_bytes = 0
        self.unsent: OrderedDict[int, OutgoingMessage] = OrderedDict()
        self.unreleased: set[int] = set()
        self.requests: dict[int, int] = {}
        self._last_identifier = 0

    def new_identifier(self) -> int:
        """Return a free packet identifier. `MAX_INFLIGHT` and `MAX_REQUESTS` ensure that there is one."""
        number = self._last_identifier
        while True:
            number = number % _IDENTIFIERS + 1
            if number not in self.in_flight and number not in self.requests:
                self._last_identifier = number
                return number

    def resume(self, is_kept: bool) -> None:
        """Begin a connection: all messages in flight must be sent again.

        Args:
            is_kept: whether the peer has kept its part of the session. If not, messages that it has confirmed with
                PUBREC are complete, and its unreleased messages are forgotten.
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

    def forget(self, message: OutgoingMessage) -> None:
        """Handle a message that is dropped before it is sent; for sessions that keep messages elsewhere too."""

    def settle(self, message: OutgoingMessage, error: str | int | None = None) -> None:
        """Remove a message that is acknowledged, or failed with `error`."""
        number = message.packet_identifier
        if self.in_flight.pop(number, None):
            self.in_flight_bytes -= message.size_bytes
        self.unsent.pop(number, None)
        message.finish(error)

    # ---- acknowledgements of sent messages

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


MAX_WAITING_PACKETS, MAX_WAITING_BYTES = 500, 256 << 10
"""The maximum of packets and bytes that wait to be written. More messages stay in the queue of the application."""
MAX_ANSWERS = 2 * MAX_WAITING_PACKETS
"""Above this number of waiting packets the peer is not read, since it does not read its acknowledgements."""
_TOPIC_ALIAS = b"\x23"  # the property


class ConnectionState(Enum):
    """State of a connection."""

    CONNECTING = "CONNACK has not been sent or received"
    OPEN = "accepted"
    CLOSING = "DISCONNECT waits to be written"
    CLOSED = "closed"


class EndpointEvents(Protocol):
    """Events of clients and servers."""

    def on_wake(self) -> None:
        """`take` has bytes to send."""

    def on_message(self, message: PublishPacket) -> int:
        """A message was received. Its topic alias is resolved, and repeated QoS 2 messages are left out.

        Returns:
            The reason code for the acknowledgement: 0, or a failure.
        """

    def on_room(self) -> None:
        """More messages may be sent."""

    def on_disconnect(self, code: int, properties: Props) -> None:
        """DISCONNECT was received: the connection is closed."""


class MqttEndpoint:
    """One side of a connection.

    Args:
        events: receives the events.
        session: the state that is kept after the connection.
        version: 5 or 4 (MQTT 3.1.1).
        limit_bytes: the largest packet that is accepted.

    Attributes:
        state: see `ConnectionState`.
        session: this side's part of the session.
    """

    def __init__(self, events: EndpointEvents, session: MqttSession, version: int, limit_bytes: int) -> None:
        self._events, self.session, self._version = events, session, version
        self.state = ConnectionState.CLOSED
        self._sent_0 = 0  # the number of QoS 0 messages sent
        self._unwritten: list[OutgoingMessage] = []  # QoS 0 messages in the order of sending, see `written`
        self._taken_0 = 0  # how many of them `take` has returned
        self._handlers: dict[int, Callable[[int, bytes], None]] = {
            PacketType.PUBLISH: self._on_publish,
            PacketType.PUBACK: self._on_puback,
            PacketType.PUBREC: self._on_pubrec,
            PacketType.PUBREL: self._on_pubrel,
            PacketType.PUBCOMP: self._on_pubcomp,
        }
        self._reset(limit_bytes)

    def _reset(self, limit_bytes: int) -> None:
        """Begin a connection; only the session of an earlier one is kept."""
        self._splitter = PacketSplitter(limit_bytes)
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._unwritten.clear()
        self._taken_0 = 0
        self._fed_s = self._heard_s = self._wrote_s = 0.0
        self._window = self._receive_maximum = 0xFFFF
        self._unreleased_before = 0
        self._peer_limit_bytes = MAX_PACKET_BYTES
        self._alias_limit_in = self._alias_limit_out = 0
        self._aliases_in: dict[int, str] = {}
        self._aliases_out: dict[bytes, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether the connection was accepted and is not closed."""
        return self.state is ConnectionState.OPEN

    def _resume(self, is_kept: bool) -> None:
        """Begin to use the session of an accepted connection; see `MqttSession.resume`."""
        self.session.resume(is_kept)
        # The receive maximum counts the messages of one connection (§3.1.2.11.3).
        self._unreleased_before = len(self.session.unreleased)

    # ---- bytes

    def feed(self, data: bytes, now_s: float) -> None:
        """Add received bytes."""
        self._splitter.feed(data)
        self._fed_s = now_s

    def next(self) -> bool:
        """Handle the next packet; return false while it is incomplete.

        Raises:
            MqttError: the peer violated the protocol; see `fail`.
        """
        packet = self._splitter.next()
        if packet is None:
            return False
        self._heard_s = self._fed_s  # only a complete packet counts for the keep-alive [MQTT-3.1.2-22]
        if self.state is ConnectionState.CONNECTING or self.state is ConnectionState.OPEN:
            first, body = packet
            handler = self._handlers.get(first >> 4)
            if handler is None:
                raise MqttError(Reason.PROTOCOL_ERROR, f"unexpected packet {first:#x}")
            handler(first, body)
        return True  # packets that follow our DISCONNECT are ignored

    def take(self, now_s: float) -> bytes:
        """Return the bytes to send; after DISCONNECT the connection is closed."""
        if not self._out:
            return b""
        data = b"".join(self._out)
        self._out.clear()
        self._out_bytes, self._wrote_s = 0, now_s
        self._taken_0 = len(self._unwritten)
        if self.state is ConnectionState.CLOSING:
            self.state = ConnectionState.CLOSED
        return data

    def written(self) -> None:
        """Complete the QoS 0 messages that `take` has returned: the operating system has their bytes."""
        if self._taken_0:
            messages = self._unwritten[: self._taken_0]
            del self._unwritten[: self._taken_0]
            self._taken_0 = 0
            for message in messages:
                message.finish()

    @property
    def has_unwritten(self) -> bool:
        """Whether QoS 0 messages wait for `written`."""
        return bool(self._unwritten)

    @property
    def has_output(self) -> bool:
        """Whether there are bytes to send."""
        return bool(self._out)

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if len(self._out) == 1:
            self._events.on_wake()

    @property
    def _has_space(self) -> bool:
        return len(self._out) < MAX_WAITING_PACKETS and self._out_bytes < MAX_WAITING_BYTES

    @property
    def is_congested(self) -> bool:
        """Whether so many packets wait to be written that the peer should not be read."""
        return len(self._out) > MAX_ANSWERS

    # ---- the end

    def disconnect(self, code: int = 0, properties: Props | None = None) -> None:
        """Send DISCONNECT after the waiting packets, if the connection is open. Later received packets are ignored."""
        if self.state is ConnectionState.OPEN:
            self._send(encode(DisconnectPacket(code, properties or {}), self._version))
            self.state = ConnectionState.CLOSING

    def fail(self, error: MqttError) -> None:
        """Close the connection because the peer violated the protocol; MQTT 5 sends the reason."""
        if self.state is ConnectionState.OPEN and self._version == 5:
            self._send(encode(DisconnectPacket(error.code), 5))
        self.state = ConnectionState.CLOSED

    def abort(self) -> None:
        """Handle a lost connection: drop the waiting packets. Unwritten QoS 0 messages fail with "lost"."""
        self._out.clear()
        self._out_bytes = 0
        self.state = ConnectionState.CLOSED
        lost, self._unwritten, self._taken_0 = self._unwritten, [], 0
        for message in lost:
            message.finish("lost")

    def _closed_by_peer(self, packet: DisconnectPacket) -> None:
        self.state = ConnectionState.CLOSED
        self._events.on_disconnect(packet.code, packet.properties)

    # ---- messages out

    def can_send(self, qos: int) -> bool:
        """Return whether a message may be sent now.

        It needs an open connection, room in the receive maximum of the peer [MQTT-3.3.4-7], [MQTT-3.3.4-9], and no
        message that must be sent again.
        """
        session = self.session
        if self.state is not ConnectionState.OPEN:
            return False
        if qos and len(session.in_flight) >= self._window:
            return False
        return self._has_space and not session.unsent

    def send(self, message: OutgoingMessage) -> None:
        """Send a message for the first time; `can_send` was true."""
        if message.qos:
            self.session.begin(message)
        self._transmit(message)

    def send_again(self) -> None:
        """Send the messages in flight of an earlier connection, as far as there is room [MQTT-4.4.0-1]."""
        session = self.session
        while session.unsent and self._has_space and len(session.in_flight) - len(session.unsent) < self._window:
            number, message = session.unsent.popitem(last=False)
            if message.is_released:
                self._send(encode_acknowledgement(PacketType.PUBREL, number, self._version))
            else:
                self._transmit(message)

    def _transmit(self, message: OutgoingMessage) -> None:
        flags = message.is_dup << 3 | message.qos << 1 | message.retain
        topic, properties = message.topic, b""
        if self._version == 5:
            if self._alias_limit_out:
                topic, properties = self._aliased(message)
            else:
                properties = message.properties
            properties = varint(len(properties)) + properties
        packet = encode_publish(flags, topic, message.packet_identifier, properties, message.payload)
        if len(packet) > self._peer_limit_bytes:
            self._aliases_out.pop(topic, None)  # the peer does not receive a new alias in this packet
            self.session.settle(message, "toolarge")
            return
        self._send(packet)
        if not message.qos:
            self._sent_0 += 1
            if message.packet_identifier:  # it had another QoS on an earlier connection
                self.session.settle(message)
            else:
                self._unwritten.append(message)

    def _aliased(self, message: OutgoingMessage) -> tuple[bytes, bytes]:
        """Return topic and properties; a topic that was sent with an alias before is empty."""
        aliases, topic = self._aliases_out, message.topic
        number = aliases.get(topic)
        is_known = number is not None
        if number is None and len(aliases) < self._alias_limit_out:
            aliases[topic] = number = len(aliases) + 1
        if number is None:
            return topic, message.properties
        return b"" if is_known else topic, message.properties + _TOPIC_ALIAS + number.to_bytes(2)

    def _on_puback(self, first: int, body: bytes) -> None:
        packet = decode_acknowledgement(first, body, self._version)
        self.session.acknowledged(packet.packet_identifier, packet.code)
        self._events.on_room()

    def _on_pubrec(self, first: int, body: bytes) -> None:
        packet = decode_acknowledgement(first, body, self._version)
        number = packet.packet_identifier
        is_accepted = self.session.received(number, packet.code)
        if is_accepted is False:
            self._events.on_room()
            return
        code = Reason.PACKET_IDENTIFIER_NOT_FOUND if is_accepted is None else 0
        self._send(encode_acknowledgement(PacketType.PUBREL, number, self._version, code))

    def _on_pubcomp(self, first: int, body: bytes) -> None:
        packet = decode_acknowledgement(first, body, self._version)
        self.session.completed(packet.packet_identifier)
        self._events.on_room()

    # ---- messages in

    def _on_publish(self, first: int, body: bytes) -> None:
        try:
            message = decode_publish(first, body, self._version)
        except TooManyPropertiesError as error:
            self._on_excess(first, body, error)
            return
        if not message.topic or "topicalias" in message.properties:
            message = message._replace(topic=self._resolved(message))
        self._receive(message)

    def _receive(self, message: PublishPacket) -> None:
        qos = message.flags >> 1 & 3
        if not qos:
            self._events.on_message(message)
        elif qos == 1:
            code = self._events.on_message(message)
            self._send(encode_acknowledgement(PacketType.PUBACK, message.packet_identifier, self._version, code))
        else:
            number, unreleased, code = message.packet_identifier, self.session.unreleased, 0
            if number not in unreleased:  # otherwise it was delivered before
                if len(unreleased) >= self._receive_maximum + self._unreleased_before:
                    raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
                unreleased.add(number)
                code = self._events.on_message(message)
                if code >= FIRST_FAILURE:
                    unreleased.discard(number)  # a refusal ends the exchange (§4.3.3)
            self._send(encode_acknowledgement(PacketType.PUBREC, number, self._version, code))

    def _on_excess(self, first: int, body: bytes, error: TooManyPropertiesError) -> None:
        """Handle a message with too many properties."""
        raise error

    def _resolved(self, message: PublishPacket) -> str:
        topic, alias = message.topic, message.properties.get("topicalias")
        if not isinstance(alias, int):
            raise MqttError(Reason.PROTOCOL_ERROR, "a message without a topic")
        if alias > self._alias_limit_in:
            raise MqttError(Reason.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if topic:
            self._aliases_in[alias] = topic
        elif alias not in self._aliases_in:
            raise MqttError(Reason.PROTOCOL_ERROR, f"topic alias {alias} is unknown")
        return self._aliases_in[alias]

    def _on_pubrel(self, first: int, body: bytes) -> None:
        number = decode_acknowledgement(first, body, self._version).packet_identifier
        unreleased = self.session.unreleased
        code = 0 if number in unreleased else Reason.PACKET_IDENTIFIER_NOT_FOUND
        unreleased.discard(number)
        self._send(encode_acknowledgement(PacketType.PUBCOMP, number, self._version, code))
