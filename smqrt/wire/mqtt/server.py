"""Server side of an MQTT connection: CONNECT and its answer, subscriptions, keep-alive.

The broker calls `accept` or `refuse` after `on_connect`, and `answer` after `on_subscribe`, at once or later.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from smqrt.errors import MqttError
from smqrt.wire.mqtt.endpoint import MAX_INFLIGHT, ConnectionState, EndpointEvents, MqttEndpoint, MqttSession
from smqrt.wire.mqtt.fields import RETURN_CODES, PacketType, Props, Reason, is_topic_name, number_of
from smqrt.wire.mqtt.packets import (
    MAX_PACKET_BYTES,
    PINGRESP,
    ConnackPacket,
    ConnectPacket,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    UnsubscribePacket,
    WillMessage,
    check_flags,
    connect_version,
    decode_connect,
    decode_disconnect,
    decode_ping,
    decode_subscribe,
    decode_unsubscribe,
    encode,
)

KEEPALIVE_FACTOR = 1.5
"""A connection is closed after 1.5 times the keep-alive without a packet [MQTT-3.1.2-22]."""
_CONNECT = 0x10  # the first byte
_NO_PROPERTIES: Props = MappingProxyType({})


class ServerEvents(EndpointEvents, Protocol):
    """Events of a server."""

    def on_connect(self, packet: ConnectPacket) -> None:
        """CONNECT was received; to be answered with `accept` or `refuse`."""

    def on_subscribe(self, packet: SubscribePacket) -> None:
        """SUBSCRIBE was received; to be answered with `answer`."""

    def on_unsubscribe(self, packet: UnsubscribePacket) -> None:
        """UNSUBSCRIBE was received; to be answered with `answer`."""


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


class MqttServerEndpoint(MqttEndpoint):
    """Protocol state of a server, for one connection.

    Args:
        events: receives the events.
        limit_bytes: the largest packet that is accepted.

    Attributes:
        version: the version of the client; 0 before CONNECT.
        will: the message to publish when the connection ends. None without one, before the client is accepted, and
            after a normal DISCONNECT [MQTT-3.1.2-8], [MQTT-3.1.2-10].
    """

    def __init__(self, events: ServerEvents, limit_bytes: int = MAX_PACKET_BYTES) -> None:
        super().__init__(events, MqttSession(), 0, limit_bytes)
        self._server_events = events
        self.will: WillMessage | None = None
        self._offered_will: WillMessage | None = None
        self._keepalive_s = 0
        self._session_expiry_s = 0
        self._max_qos, self._retain_available = 2, True
        self.state = ConnectionState.CONNECTING
        self._splitter.only = _CONNECT  # [MQTT-3.1.0-1]
        self._handlers |= {
            PacketType.CONNECT: self._on_connect,
            PacketType.SUBSCRIBE: self._on_subscribe,
            PacketType.UNSUBSCRIBE: self._on_unsubscribe,
            PacketType.PINGREQ: self._on_pingreq,
            PacketType.DISCONNECT: self._on_disconnect,
        }

    @property
    def version(self) -> int:
        """5 or 4 (MQTT 3.1.1)."""
        return self._version

    # ---- CONNECT

    def _on_connect(self, first: int, body: bytes) -> None:
        if self._version:
            raise MqttError(Reason.PROTOCOL_ERROR, "a second CONNECT")  # [MQTT-3.1.0-2]
        check_flags(first)
        self._version = connect_version(body)
        packet = decode_connect(first, body)
        if not packet.client_identifier and packet.version == 4 and not packet.clean_start:  # 3.1.1 [MQTT-3.1.3-8]
            raise MqttError(Reason.CLIENT_IDENTIFIER_NOT_VALID, "a session without a client identifier")
        self._splitter.only = 0
        if packet.will is not None:
            check_message_properties(packet.will.properties)
        self._offered_will = packet.will
        self._keepalive_s = packet.keepalive_s
        properties = packet.properties
        self._session_expiry_s = number_of(properties, "sessionexpiryinterval", 0)
        self._window = min(number_of(properties, "receivemaximum", 0xFFFF), MAX_INFLIGHT)
        self._peer_limit_bytes = number_of(properties, "maximumpacketsize", MAX_PACKET_BYTES)
        self._alias_limit_out = number_of(properties, "topicaliasmaximum", 0)
        self._server_events.on_connect(packet)

    def accept(
        self, session: MqttSession, is_session_present: bool, properties: Mapping[str, object] = _NO_PROPERTIES
    ) -> None:
        """Accept the client if it is still connected. `send_again` sends the messages in flight of its session.

        Args:
            session: the kept session of the client, or a new one.
            is_session_present: whether it was kept.
            properties: the properties of CONNACK. The connection enforces their limits.
        """
        if self.state is not ConnectionState.CONNECTING:
            return
        self.session, self.will = session, self._offered_will
        self._receive_maximum = number_of(properties, "receivemaximum", 0xFFFF)
        self._alias_limit_in = number_of(properties, "topicaliasmaximum", 0)
        self._keepalive_s = number_of(properties, "serverkeepalive", self._keepalive_s)
        self._max_qos = number_of(properties, "maximumqos", 2)
        self._retain_available = bool(number_of(properties, "retainavailable", 1))
        self.state = ConnectionState.OPEN
        self._send(encode(ConnackPacket(is_session_present, 0, properties), self._version))
        self._resume(is_session_present)

    def refuse(self, code: int, properties: Props = _NO_PROPERTIES) -> None:
        """Refuse the client: send CONNACK with the reason, if its version has one, and close."""
        return_code = RETURN_CODES.get(code) if self._version == 4 else code
        if self.state is ConnectionState.CONNECTING and self._version and return_code:
            self._send(encode(ConnackPacket(False, return_code, properties), self._version))
        self.state = ConnectionState.CLOSED

    def fail(self, error: MqttError) -> None:
        """See `MqttEndpoint`; a CONNECT without an answer is refused."""
        if self.state is ConnectionState.CONNECTING:
            self.refuse(error.code)
        super().fail(error)

    def check_alive(self, now_s: float) -> None:
        """Check the keep-alive of the client.

        Raises:
            MqttError: KEEP_ALIVE_TIMEOUT; no packet has arrived within 1.5 times the keep-alive.
        """
        if not self._keepalive_s or self.state is not ConnectionState.OPEN:
            return
        if now_s - self._heard_s > self._keepalive_s * KEEPALIVE_FACTOR:
            raise MqttError(Reason.KEEP_ALIVE_TIMEOUT, "no packet within 1.5 times the keep-alive")

    # ---- packets of the client

    @property
    def is_congested(self) -> bool:
        """See `MqttEndpoint`; true also while CONNECT is not answered."""
        return super().is_congested or bool(self._version) and self.state is ConnectionState.CONNECTING

    def next(self) -> bool:
        """See `MqttEndpoint`. Packets after CONNECT wait until it is answered."""
        if self._version and self.state is ConnectionState.CONNECTING:
            return False
        return super().next()

    def _receive(self, message: PublishPacket) -> None:
        """Check the limits of CONNACK and the rules for clients."""
        if message.qos > self._max_qos:
            raise MqttError(Reason.QOS_NOT_SUPPORTED, "a QoS that this server does not support")  # [MQTT-3.2.2-11]
        if message.retain and not self._retain_available and self._version == 5:
            raise MqttError(Reason.RETAIN_NOT_SUPPORTED, "this server does not retain messages")  # [MQTT-3.2.2-14]
        if message.properties:
            check_message_properties(message.properties)
        super()._receive(message)

    def _on_subscribe(self, first: int, body: bytes) -> None:
        check_flags(first)
        self._server_events.on_subscribe(decode_subscribe(first, body, self._version))

    def _on_unsubscribe(self, first: int, body: bytes) -> None:
        check_flags(first)
        self._server_events.on_unsubscribe(decode_unsubscribe(first, body, self._version))

    def answer(
        self, packet: SubscribePacket | UnsubscribePacket, codes: bytes, properties: Props = _NO_PROPERTIES
    ) -> None:
        """Send SUBACK or UNSUBACK: a reason code for each filter, in their order [MQTT-3.8.4-6], [MQTT-3.9.3-1]."""
        kind = PacketType.SUBACK if isinstance(packet, SubscribePacket) else PacketType.UNSUBACK
        self._send(encode(SubscribeAnswer(kind, packet.packet_identifier, codes, properties), self._version))

    def _on_pingreq(self, first: int, body: bytes) -> None:
        check_flags(first)
        decode_ping(first, body, self._version)
        self._send(PINGRESP)  # [MQTT-3.12.4-1]

    def _on_disconnect(self, first: int, body: bytes) -> None:
        check_flags(first)
        packet = decode_disconnect(first, body, self._version)
        if not self._session_expiry_s and number_of(packet.properties, "sessionexpiryinterval", 0):
            raise MqttError(Reason.PROTOCOL_ERROR, "DISCONNECT sets a session expiry, but CONNECT did not")
        if packet.code == Reason.SUCCESS:
            self.will = None
        self._closed_by_peer(packet)
