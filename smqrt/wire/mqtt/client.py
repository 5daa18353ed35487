"""Client side of MQTT connections: CONNECT, subscriptions, pings, confirmation of QoS 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from smqrt.errors import MqttError
from smqrt.wire.mqtt.endpoint import (
    MAX_INFLIGHT,
    ConnectionState,
    EndpointEvents,
    MqttEndpoint,
    MqttSession,
    OutgoingMessage,
    PendingAcknowledgement,
)
from smqrt.wire.mqtt.fields import FIRST_FAILURE, PacketType, Props, Reason, TooManyPropertiesError, number_of
from smqrt.wire.mqtt.packets import (
    MAX_PACKET_BYTES,
    PINGREQ,
    AuthPacket,
    ConnectPacket,
    PublishPacket,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    WillMessage,
    check_flags,
    decode_auth,
    decode_connack,
    decode_disconnect,
    decode_ping,
    decode_subscribe_answer,
    encode,
    encode_acknowledgement,
    publish_alias,
    publish_identifier,
)

MAX_REQUESTS = 100  # unanswered SUBSCRIBE and UNSUBSCRIBE packets; each uses a packet identifier
INFLIGHT_3 = 20  # MQTT 3.1.1 has no receive maximum, and common servers drop further messages
PINGS_PER_KEEPALIVE = 2
_CONNACK, _AUTH = 0x20, 0xF0  # the first bytes


class ClientEvents(EndpointEvents, Protocol):
    """Events of a client."""

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        """The server answered CONNECT."""

    def on_answer(self, packet_identifier: int, codes: bytes, properties: Props) -> None:
        """SUBACK or UNSUBACK was received, with a code for each topic filter; those of UNSUBACK of MQTT 3.1.1 are 0."""

    def on_auth(self, code: int, properties: Props) -> None:
        """AUTH was received: a challenge (CONTINUE_AUTHENTICATION), or the end of an authentication (SUCCESS)."""

    def on_left_out(self) -> None:
        """A message was refused because it has too many properties."""


class DeferringEvents(ClientEvents, Protocol):
    """Events of a client whose application acknowledges messages itself."""

    def on_deferred(self, message: PublishPacket, pending: PendingAcknowledgement) -> None:
        """A message with QoS 1 or 2 was received: `DeferringClientEndpoint.acknowledge` answers it."""


class MqttClientEndpoint(MqttEndpoint):
    """Protocol state of a client, over all its connections.

    Args:
        events: receives the events.
        version: 5, 4 (MQTT 3.1.1) or 3 (MQTT 3.1).
        client_identifier: an empty one is replaced by the one that the server assigns.
        inflight: the maximum number of unacknowledged QoS 1 and 2 messages; the receive maximum of the server may be
            less. None: the receive maximum, and 20 with MQTT 3.1.1.
        use_aliases: send topic aliases to servers that accept them.
        limit_bytes: the largest packet in both directions. For received packets, the property `maximumpacketsize` of
            CONNECT replaces it.
        session: the state of earlier connections; None for a new session.

    Attributes:
        will, username, password: used for the next connection.
        ping_s: the server is pinged after this time without a packet. It is lost after the same time without an answer.
            0: no pings.
    """

    def __init__(
        self,
        events: ClientEvents,
        version: int,
        client_identifier: str,
        inflight: int | None = None,
        use_aliases: bool = False,
        limit_bytes: int = MAX_PACKET_BYTES,
        session: MqttSession | None = None,
    ) -> None:
        super().__init__(events, session or MqttSession(), version, limit_bytes)
        self._client_events = events
        self._identifier = client_identifier
        self._inflight = inflight or (MAX_INFLIGHT if version == 5 else INFLIGHT_3)
        self._use_aliases, self._limit_bytes = use_aliases, limit_bytes
        self.will: WillMessage | None = None
        self.username: str | None = None
        self.password: bytes | None = None
        self.ping_s = 0.0
        self._is_clean = True
        self._keepalive_s, self._pinged_s, self._unanswered_s = 0, 0.0, 0.0
        self._max_qos, self._retain_available, self._is_limited = 2, True, False
        self._confirmed_0 = 0  # the number of QoS 0 messages sent before the last answered ping
        self._method: object = None  # the authentication method of CONNECT
        self._is_authenticating = False  # again, on an open connection
        self._pings: deque[int] = deque()  # the number of QoS 0 messages sent before each
        self._handlers |= {
            PacketType.CONNACK: self._on_connack,
            PacketType.SUBACK: self._on_subscribe_answer,
            PacketType.UNSUBACK: self._on_subscribe_answer,
            PacketType.PINGRESP: self._on_pingresp,
        }
        if version == 5:
            self._handlers[PacketType.DISCONNECT] = self._on_disconnect
            self._handlers[PacketType.AUTH] = self._on_auth

    # ---- connections

    def connect(self, is_clean: bool, keepalive_s: int, properties: Props) -> None:
        """Begin a connection with CONNECT.

        Args:
            is_clean: drop the session on both sides.
            keepalive_s: the keep-alive of CONNECT.
            properties: the properties of CONNECT.
        """
        limit_bytes = number_of(properties, "maximumpacketsize", self._limit_bytes)
        self._reset(limit_bytes)
        self._splitter.only = _CONNACK
        self._method, self._is_authenticating = properties.get("authenticationmethod"), False
        if self._method is not None:
            self._splitter.also = _AUTH
        if self._version == 5:
            self._receive_maximum = number_of(properties, "receivemaximum", 0xFFFF)
        self._alias_limit_in = number_of(properties, "topicaliasmaximum", 0)
        self._is_clean, self._keepalive_s = is_clean, keepalive_s
        self._pings.clear()
        self.state = ConnectionState.CONNECTING
        self._send(self.connect_packet(is_clean, keepalive_s, {"maximumpacketsize": limit_bytes} | dict(properties)))

    def connect_packet(self, is_clean: bool, keepalive_s: int, properties: Props) -> bytes:
        """Return the CONNECT packet of the next connection; the arguments are those of `connect`.

        Raises:
            ArgumentError: MQTT can't encode the identifier, the credentials or the properties.
        """
        names = self._identifier, is_clean, keepalive_s, properties, self.will, self.username, self.password
        return encode(ConnectPacket(self._version, *names), self._version)

    def _on_connack(self, first: int, body: bytes) -> None:
        if self.state is ConnectionState.OPEN:
            raise MqttError(Reason.PROTOCOL_ERROR, "a second CONNACK")
        check_flags(first)
        packet = decode_connack(first, body, self._version)
        if packet.code == 0:
            if self._version == 3:  # it does not report the session; the server keeps one unless it must drop it
                packet = packet._replace(session_present=not self._is_clean)
            if packet.session_present and self._is_clean:
                raise MqttError(Reason.PROTOCOL_ERROR, "a session is present after a clean start")
            self._accept(packet.session_present, packet.properties)
        self._client_events.on_connack(packet.code, packet.session_present, packet.properties)

    def _accept(self, is_session_present: bool, properties: Props) -> None:
        """Open the connection with the limits of the server."""
        self.state = ConnectionState.OPEN
        self._splitter.only = 0
        # A ping after half of the keep-alive, and the end after the other half: the server waits 1.5 times as long.
        self.ping_s = number_of(properties, "serverkeepalive", self._keepalive_s) / PINGS_PER_KEEPALIVE
        self._identifier = str(properties.get("assignedclientidentifier") or self._identifier)
        self._window = min(self._inflight, number_of(properties, "receivemaximum", 0xFFFF))
        self._peer_limit_bytes = min(number_of(properties, "maximumpacketsize", MAX_PACKET_BYTES), self._limit_bytes)
        self._max_qos = number_of(properties, "maximumqos", 2)
        self._retain_available = bool(number_of(properties, "retainavailable", 1))
        self._alias_limit_out = number_of(properties, "topicaliasmaximum", 0) if self._use_aliases else 0
        self._resume(is_session_present)
        self._is_limited = self._max_qos < 2 or not self._retain_available
        if self._is_limited and not is_session_present:  # messages in flight are sent as new ones
            for message in self.session.unsent.values():
                self._lower(message)

    def _lower(self, message: OutgoingMessage) -> None:
        message.qos = min(message.qos, self._max_qos)
        message.retain = message.retain and self._retain_available

    def _on_disconnect(self, first: int, body: bytes) -> None:
        check_flags(first)
        self._closed_by_peer(decode_disconnect(first, body, self._version))

    # ---- authentication (§4.12)

    def authenticate(self, code: int, data: bytes | None) -> None:
        """Send AUTH, for a client with an authentication method.

        Args:
            code: CONTINUE_AUTHENTICATION, the answer to a challenge, or REAUTHENTICATE to begin on an open connection.
            data: for the server; None for no data.
        """
        if self.state is not ConnectionState.CONNECTING and not self.is_open:
            return
        self._is_authenticating = self.is_open
        properties: dict[str, object] = {"authenticationmethod": self._method}
        if data is not None:
            properties["authenticationdata"] = data
        self._send(encode(AuthPacket(code, properties), 5))

    def _on_auth(self, first: int, body: bytes) -> None:
        check_flags(first)
        code, properties = decode_auth(first, body, 5)
        method = properties.get("authenticationmethod", self._method if code == Reason.SUCCESS else None)
        if self._method is None or method != self._method:
            raise MqttError(Reason.PROTOCOL_ERROR, "AUTH with another authentication method than CONNECT")
        if code not in (Reason.SUCCESS, Reason.CONTINUE_AUTHENTICATION):
            raise MqttError(Reason.PROTOCOL_ERROR, f"AUTH with the code {code:#x}")
        is_end = code == Reason.SUCCESS
        if self.is_open and not self._is_authenticating or is_end and not self.is_open:
            raise MqttError(Reason.PROTOCOL_ERROR, "unexpected AUTH")
        if is_end:
            self._is_authenticating = False
        self._client_events.on_auth(code, properties)

    # ---- keep-alive

    def check_alive(self, now_s: float, is_reading: bool = True) -> None:
        """Ping the server when nothing was received or sent for `ping_s`.

        Args:
            now_s: the present time, of the same clock as for `feed`.
            is_reading: false while the application is slow and the connection is not read; no answer is expected then.

        Raises:
            MqttError: KEEP_ALIVE_TIMEOUT; the server sent neither an answer nor any other packet.
        """
        if not is_reading:
            self._heard_s = now_s
        if not self.ping_s or self.state is not ConnectionState.OPEN:
            return
        is_silent = now_s - self._heard_s >= self.ping_s
        if self._pings and is_silent and now_s - self._unanswered_s >= self.ping_s:
            raise MqttError(Reason.KEEP_ALIVE_TIMEOUT, "the broker did not answer a ping")
        if is_silent and not self._pings or now_s - max(self._wrote_s, self._pinged_s) >= self.ping_s:
            self.ping(now_s)  # also when the last one is not answered: the server expects packets

    def ping(self, now_s: float) -> None:
        """Send PINGREQ. The server answers it after it has read all earlier packets."""
        if not self._pings:
            self._unanswered_s = now_s
        self._pings.append(self._sent_0)
        self._pinged_s = now_s
        self._send(PINGREQ)

    def _on_pingresp(self, first: int, body: bytes) -> None:
        check_flags(first)
        decode_ping(first, body, self._version)
        if self._pings:
            self._confirmed_0 = self._pings.popleft()
        self._events.on_room()

    @property
    def unconfirmed(self) -> int:
        """The number of QoS 0 messages that were sent after the last answered ping."""
        return self._sent_0 - self._confirmed_0

    def forget_unconfirmed(self) -> None:
        """Restart `unconfirmed` at 0."""
        self._confirmed_0 = self._sent_0

    # ---- messages and subscriptions

    def send(self, message: OutgoingMessage) -> None:
        """Send a message for the first time, with a QoS that this server supports; `can_send` was true."""
        if self._is_limited:
            self._lower(message)
        super().send(message)

    @property
    def can_ask(self) -> bool:
        """Whether SUBSCRIBE or UNSUBSCRIBE may be sent now."""
        return self.is_open and self._has_space and len(self.session.requests) < MAX_REQUESTS

    def subscribe(self, subscriptions: Sequence[Subscription], properties: Props) -> int:
        """Send SUBSCRIBE; return the packet identifier, or 0 if it is too large for the server [MQTT-3.2.2-15]."""
        packet = SubscribePacket(self.session.new_identifier(), subscriptions, properties)
        return self._ask(packet, len(subscriptions))

    def unsubscribe(self, topics: Sequence[str], properties: Props) -> int:
        """Send UNSUBSCRIBE; the result is as for `subscribe`."""
        return self._ask(UnsubscribePacket(self.session.new_identifier(), topics, properties), len(topics))

    def _ask(self, packet: SubscribePacket | UnsubscribePacket, count: int) -> int:
        data = encode(packet, self._version)
        if len(data) > self._peer_limit_bytes:
            return 0
        self.session.requests[packet.packet_identifier] = count
        self._send(data)
        return packet.packet_identifier

    def answer_too_large(self, count: int) -> None:
        """Fail a request for `count` topic filters that was not sent (packet identifier 0) with PACKET_TOO_LARGE."""
        self._client_events.on_answer(0, bytes((Reason.PACKET_TOO_LARGE,)) * count, {})

    def _on_subscribe_answer(self, first: int, body: bytes) -> None:
        check_flags(first)
        packet = decode_subscribe_answer(first, body, self._version)
        count = self.session.requests.pop(packet.packet_identifier, 1)
        codes = packet.codes or bytes(count)  # UNSUBACK of MQTT 3.1.1 has no codes
        if len(codes) != count:
            raise MqttError(Reason.MALFORMED_PACKET, "an answer with another number of codes than topic filters")
        self._client_events.on_answer(packet.packet_identifier, codes, packet.properties)
        self._events.on_room()

    def _on_excess(self, first: int, body: bytes, error: TooManyPropertiesError) -> None:
        """Refuse the message and keep the connection, since the message is from another client.

        Store its topic alias: later messages may have only the alias.
        """
        if self._alias_limit_in:
            message = publish_alias(first, body)
            if not message.topic or message.properties:
                self._resolved(message)
        self._client_events.on_left_out()
        qos = first >> 1 & 3
        if qos:
            self._answer(PendingAcknowledgement(publish_identifier(body), qos, Reason.QUOTA_EXCEEDED))

    def _answer(self, answer: PendingAcknowledgement) -> None:
        """Send PUBACK or PUBREC."""
        kind = PacketType.PUBACK if answer.qos == 1 else PacketType.PUBREC
        self._send(encode_acknowledgement(kind, answer.packet_identifier, self._version, answer.code or 0))


class DeferringClientEndpoint(MqttClientEndpoint):
    """A client whose application acknowledges messages itself; `acknowledge` sends the answers in order of receipt.

    [MQTT-4.6.0-2] and [MQTT-4.6.0-3] demand this order.
    """

    def __init__(self, events: DeferringEvents, *arguments: Any) -> None:
        self._answers: deque[PendingAcknowledgement] = deque()  # of this connection, in order of receipt
        # Messages of QoS 2 that the application has, and has not acknowledged in a connection. The broker sends them
        # again after a reconnect; the application does not get them again.
        self._held: dict[int, PendingAcknowledgement] = {}
        self._queued: set[int] = set()  # the packet identifiers of QoS 2 in `_answers`
        self._deferring_events = events
        super().__init__(events, *arguments)

    def _reset(self, limit_bytes: int) -> None:
        super()._reset(limit_bytes)
        self._answers.clear()
        self._queued.clear()

    def _resume(self, is_kept: bool) -> None:
        super()._resume(is_kept)
        if not is_kept:
            self._held.clear()

    def _receive(self, message: PublishPacket) -> None:
        qos, number = message.qos, message.packet_identifier
        if not qos:
            self._events.on_message(message)
            return
        pending = self._held.get(number) if qos == 2 else None
        if pending is None and qos == 2 and number in self.session.unreleased:
            self._send(encode_acknowledgement(PacketType.PUBREC, number, self._version))  # delivered before
            return
        unanswered = len(self._answers) + len(self.session.unreleased)
        if unanswered >= self._receive_maximum + self._unreleased_before:
            raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
        if pending is None:
            pending = PendingAcknowledgement(number, qos)
            self._answers.append(pending)
            if qos == 2:
                self._held[number] = pending
                self._queued.add(number)
            self._deferring_events.on_deferred(message, pending)
        elif number not in self._queued:  # sent again on a later connection
            self._queued.add(number)
            self._answers.append(pending)
        self._send_answers()

    def acknowledge(self, pending: PendingAcknowledgement, code: int = 0) -> None:
        """Acknowledge a message; PUBACK or PUBREC follows those of all earlier messages. A second call does nothing."""
        if pending.code is None:
            pending.code = code
            self._send_answers()

    def _answer(self, answer: PendingAcknowledgement) -> None:
        self._answers.append(answer)
        self._send_answers()

    def _send_answers(self) -> None:
        answers, session = self._answers, self.session
        while answers and (code := answers[0].code) is not None and self.is_open:
            answer = answers.popleft()
            number = answer.packet_identifier
            if answer.qos == 2 and self._held.pop(number, None) is answer:
                self._queued.discard(number)
                if code < FIRST_FAILURE:
                    session.unreleased.add(number)
            super()._answer(answer)
