"""The MQTT engine: paho's client, driven from outside, and extended where it can't do what the specification says.

Paho encodes CONNECT and SUBSCRIBE, queues what is to be written, and keeps the connection alive. Done here:

* Packets are cut from memory (paho reads a byte at a time) and decoded by code of our own: paho's takes the square of
  the number of properties.
* What is in flight is kept over connections and sent again as the standard says: with DUP when the broker kept the
  session, as new when it did not; PUBREL once PUBREC came. Duplicates of QoS 2 are dropped, session or packet.
* Receive maximum, maximum packet size, maximum QoS, topic aliases and server keep-alive are respected, both ways.
* Refusals of PUBLISH and CONNACK of all kinds are told; nothing is tried again behind the caller's back.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any, Protocol

from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion, _ConnectionState
from paho.mqtt.subscribeoptions import SubscribeOptions

from smqrt.errors import MqttError
from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.ending import End, disconnected
from smqrt.mqtt.framing import (
    MAX_PACKET_BYTES,
    identifier_of,
    parse_acknowledgement,
    parse_answer,
    parse_connack,
    parse_disconnect,
    parse_publish,
    publish_packet,
)
from smqrt.mqtt.options import Will, to_bytes
from smqrt.mqtt.pipe import Pipe
from smqrt.mqtt.subscriptions import Request
from smqrt.wire.mqtt_properties import (
    MALFORMED,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    Packet,
    Props,
    TooManyPropertiesError,
    encode,
    varint,
)

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
SUBACK, UNSUBACK, PINGRESP, DISCONNECT = 0x90, 0xB0, 0xD0, 0xE0
RECEIVE_MAXIMUM, ALIAS_INVALID = 0x93, 0x94
UNKNOWN_ID, FIRST_FAILURE = 0x92, 0x80
MAX_WAITING_PACKETS, MAX_WAITING_BYTES = 500, 256 << 10
"""So much waits to be written at most, before the rest is left in the client's queue, which has its own bounds."""
MAX_ANSWERS = 2 * MAX_WAITING_PACKETS
"""With more packets waiting the broker is not read: it would have us acknowledge for ever what it doesn't take."""
MAX_ASKED = 100  # subscriptions that wait for their answer; packet identifiers are few
INFLIGHT_3 = 20  # ordinary brokers of MQTT 3.1.1 drop what goes beyond, and can't say so
MAX_INFLIGHT = 0x7FFF  # half of the packet identifiers: a free one is found soon
PINGS_PER_KEEPALIVE = 2
_SUCCESS = MQTTErrorCode.MQTT_ERR_SUCCESS
_AGAIN = MQTTErrorCode.MQTT_ERR_AGAIN
_PROTOCOL = MQTTErrorCode.MQTT_ERR_PROTOCOL
_ENDS = {0x8D: End("mqtt", "pingtimeout", detail="the broker did not answer a ping")}


class _Nobody:
    """Who waits for a QoS 0 packet in paho."""

    def _set_as_published(self) -> None:
        pass


_NOBODY = _Nobody()


class _Packed:
    """Properties for paho, which asks for nothing but their bytes."""

    def __init__(self, properties: Props | None, packet: Packet) -> None:
        self._data = encode(properties, packet)

    def pack(self) -> bytes:
        return self._data


class Events(Protocol):
    """Who is told what happens."""

    def on_wake(self) -> None:
        """Something is to be written."""

    def on_connack(self, code: int, present: bool, properties: dict[str, Any]) -> None:
        """The broker answered CONNECT."""

    def on_message(self, topic: str, payload: bytes, properties: dict[str, Any], cpt: int) -> None:
        """A message came; `cpt` is the first byte of its packet."""

    def on_answer(self, mid: int, code: int, properties: dict[str, Any]) -> None:
        """SUBACK or UNSUBACK came; code 0 with MQTT 3.1.1's UNSUBACK."""

    def on_left_out(self) -> None:
        """A message was refused: it has too many properties."""

    def on_room(self) -> None:
        """More messages may be sent."""

    def on_end(self, end: End | None) -> None:
        """The connection is over; None when this side asked for it."""


class Engine(Client):
    """The protocol's state of one client over all its connections.

    Args:
        events: who is told.
        version: 5 or 4 (MQTT 3.1.1).
        client_id: the client identifier.
        inflight: how many QoS 1 and 2 messages may wait for their acknowledgement; the broker may want less. None: as
            many as the broker wants, and 20 with MQTT 3.1.1.
        use_aliases: send topic aliases to brokers that accept them.
        limit_bytes: the largest packet, both ways; `maximumpacketsize` among CONNECT's properties is for what comes in.
    """

    def __init__(
        self,
        events: Events,
        version: int,
        client_id: str,
        inflight: int | None = None,
        use_aliases: bool = False,
        limit_bytes: int = MAX_PACKET_BYTES,
    ) -> None:
        protocol = MQTTProtocolVersion.MQTTv5 if version == 5 else MQTTProtocolVersion.MQTTv311
        clean = None if version == 5 else True
        super().__init__(CallbackAPIVersion.VERSION2, client_id, clean, None, protocol, reconnect_on_failure=False)
        self._host = "broker"  # paho asks for one; the connection is made elsewhere
        self._events = events
        self._is_v5 = version == 5
        self._inflight_limit = inflight or (MAX_INFLIGHT if version == 5 else INFLIGHT_3)
        self._window = self._inflight_limit
        self._limit_bytes = limit_bytes
        self._use_aliases, self._alias_limit = use_aliases, 0
        self._aliases_out: dict[bytes, int] = {}
        self._aliases_in: dict[int, str] = {}
        self._own: Mapping[str, Any] = {}
        self._broker_limit_bytes = limit_bytes
        self._max_qos, self._retain_available = 2, True
        self._flying: dict[int, Delivery] = {}
        self.flying_bytes = 0
        self._again: OrderedDict[int, Delivery] = OrderedDict()
        self._handed_bytes = 0
        self._sent_0 = self._proven_0 = 0
        self._pings: deque[int] = deque()
        self._received: set[int] = set()
        self._asked: set[int] = set()
        self._pipe = Pipe(MAX_PACKET_BYTES)
        self._end: End | None = None
        self.idle = True
        self.on_socket_register_write = lambda *_: events.on_wake()
        self.on_disconnect = self._parted
        self._handlers: dict[int, Callable[[bytes], MQTTErrorCode]] = {
            CONNACK: self._connack,
            PUBACK: self._puback,
            PUBREC: self._pubrec,
            PUBREL: self._pubrel,
            PUBCOMP: self._pubcomp,
            SUBACK: self._suback,
            UNSUBACK: self._unsuback,
            PINGRESP: self._pingresp,
        }
        if self._is_v5:
            self._handlers[DISCONNECT] = self._disconnected

    # ---- connections

    def start(self, clean: bool, keepalive_s: int, properties: Mapping[str, Any]) -> Pipe:
        """Begin a connection with CONNECT.

        Args:
            clean: forget the session on both sides.
            properties: those of CONNECT.
        """
        self._own = properties
        limit_bytes = properties.get("maximumpacketsize", self._limit_bytes)
        if self._is_v5:
            self._clean_start = clean
            self._connect_properties = _Packed({"maximumpacketsize": limit_bytes} | dict(properties), Packet.CONNECT)  # type: ignore[assignment]
        else:
            self._clean_session = clean
        self._keepalive = keepalive_s
        self._pipe, self._end = Pipe(limit_bytes), None
        self._pipe.packets.only = CONNACK
        self._handed_bytes = 0
        self._pings.clear()
        self._asked.clear()
        self._aliases_in.clear()
        self._aliases_out.clear()
        self.reconnect()
        return self._pipe

    def set_will(self, will: Will | None) -> None:
        """Have another will, or none, from the next connection on."""
        self.will_clear()
        if will is None:
            return
        self.will_set(will.topic, to_bytes(will.payload), will.qos, will.retain)
        if self._is_v5:
            self._will_properties = _Packed(will.properties, Packet.WILL)  # type: ignore[assignment]

    def _create_socket(self) -> Any:
        return self._pipe

    def _messages_reconnect_reset(self) -> None:
        """Decided when CONNACK tells whether the broker kept the session."""

    def stop(self) -> None:
        """The connection is gone."""
        self._sock_close()
        self._state = _ConnectionState.MQTT_CS_CONNECTION_LOST

    @property
    def ping_s(self) -> float:
        """After so long without a packet the broker is pinged, after as long again without an answer it is lost."""
        return self._keepalive

    @property
    def is_open(self) -> bool:
        """Whether the broker has accepted and the connection stands."""
        return self._state == _ConnectionState.MQTT_CS_CONNECTED and self._sock is not None

    def _connack(self, body: bytes) -> MQTTErrorCode:
        flags, code, properties = parse_connack(body, self._is_v5)
        present = bool(flags & 1)
        if code == 0:
            if present and self._check_clean_session():
                raise MqttError(PROTOCOL_ERROR, "a session is present that was not asked for")
            self._accepted(present, properties)
        self._events.on_connack(code, present, properties)
        return _SUCCESS

    def _accepted(self, present: bool, properties: Mapping[str, Any]) -> None:
        self._state = _ConnectionState.MQTT_CS_CONNECTED
        self._pipe.packets.only = 0
        # a ping after half of the time, the end after the other half; the broker waits for one and a half times
        self._keepalive = properties.get("serverkeepalive", self._keepalive) / PINGS_PER_KEEPALIVE
        if name := properties.get("assignedclientidentifier"):
            self._client_id = name.encode()
        self._window = min(self._inflight_limit, properties.get("receivemaximum", 0xFFFF))
        self._broker_limit_bytes = min(properties.get("maximumpacketsize", MAX_PACKET_BYTES), self._limit_bytes)
        self._max_qos = properties.get("maximumqos", 2)
        self._retain_available = bool(properties.get("retainavailable", 1))
        self._alias_limit = properties.get("topicaliasmaximum", 0) if self._use_aliases else 0
        self._settle(present)

    def _settle(self, present: bool) -> None:
        """What was in flight goes on with a session that the broker kept; otherwise it begins anew, and what the broker
        has taken over (PUBREC) is over."""
        if not present:
            self._received.clear()
            for item in [item for item in self._flying.values() if item.released]:
                self._settled(item)
        self._again = OrderedDict(self._flying)
        for item in self._again.values():
            item.dup = present

    def send_again(self) -> None:
        """Send again what is in flight, as far as there is room; to be called when the broker has accepted."""
        while self._again and self._has_space and len(self._flying) - len(self._again) < self._window:
            mid, item = self._again.popitem(last=False)
            if item.released:
                self._answer(PUBREL | 2, mid)
            else:
                self._transmit(item)

    def part(self, reason: int = 0) -> None:
        """Send DISCONNECT, behind what waits to be written, and end the connection behind it."""
        if not self.is_open:
            return
        self._state = _ConnectionState.MQTT_CS_DISCONNECTING
        body = bytes((reason,)) if self._is_v5 and reason else b""
        self._packet_queue(DISCONNECT, bytes((DISCONNECT, len(body))) + body, 0, 0)

    # ---- messages out

    @property
    def flying(self) -> Collection[Delivery]:
        """QoS 1 and 2 messages on their way, over all connections."""
        return self._flying.values()

    @property
    def _has_space(self) -> bool:
        waiting_bytes = self._handed_bytes - self._pipe.taken_bytes
        return len(self._out_packet) < MAX_WAITING_PACKETS and waiting_bytes < MAX_WAITING_BYTES

    @property
    def is_congested(self) -> bool:
        """Whether so much waits to be written that the broker should not be read."""
        return len(self._out_packet) > MAX_ANSWERS

    def has_room(self, qos: int) -> bool:
        """Whether a message may be sent now."""
        if qos and len(self._flying) >= self._window:
            return False
        return self._has_space and not self._again

    @property
    def may_ask(self) -> bool:
        """Whether SUBSCRIBE or UNSUBSCRIBE may be sent now."""
        return self.is_open and self._has_space and len(self._asked) < MAX_ASKED

    def _packet_queue(self, command: int, packet: Any, mid: int, qos: int, info: Any = None) -> MQTTErrorCode:
        self._handed_bytes += len(packet)
        return super()._packet_queue(command, packet, mid, qos, info)

    def send(self, item: Delivery) -> None:
        """Send a message for the first time; `has_room` was true."""
        item.qos = min(item.qos, self._max_qos)
        item.retain = item.retain and self._retain_available
        if item.qos:
            item.mid = self._mid_generate()
            self._flying[item.mid] = item
            self.flying_bytes += item.size_bytes
        self._transmit(item)

    def _transmit(self, item: Delivery) -> None:
        flags = item.dup << 3 | item.qos << 1 | item.retain
        topic, properties = self._aliased(item) if self._is_v5 else (item.topic, b"")
        packet = publish_packet(flags, topic, item.mid, properties, item.payload)
        if len(packet) > self._broker_limit_bytes:
            self._settled(item, "toolarge")
            return
        self._packet_queue(PUBLISH, packet, item.mid, item.qos, _NOBODY)
        if not item.qos:
            self._sent_0 += 1
            item.finish()

    def _aliased(self, item: Delivery) -> tuple[bytes, bytes]:
        """Topic and packed properties, a known topic as its alias."""
        properties = item.properties
        if not self._alias_limit:
            return item.topic, varint(len(properties)) + properties
        known = self._aliases_out.get(item.topic)
        if known is None and len(self._aliases_out) < self._alias_limit:
            self._aliases_out[item.topic] = len(self._aliases_out) + 1
        number = self._aliases_out.get(item.topic)
        if number:
            properties += struct.pack("!BH", 0x23, number)
        return b"" if known else item.topic, varint(len(properties)) + properties

    def _settled(self, item: Delivery, error: str | int | None = None) -> None:
        if self._flying.pop(item.mid, None):
            self.flying_bytes -= item.size_bytes
        self._again.pop(item.mid, None)
        item.finish(error)

    def _mid_generate(self) -> int:
        mid = super()._mid_generate()
        while mid in self._flying or mid in self._asked:
            mid = super()._mid_generate()
        return mid

    def _progress(self) -> MQTTErrorCode:
        self._events.on_room()
        return _SUCCESS

    def _puback(self, body: bytes) -> MQTTErrorCode:
        mid, code = parse_acknowledgement(body, self._is_v5)
        item = self._flying.get(mid)
        if item is not None and item.qos == 1:
            self._settled(item, code if code >= FIRST_FAILURE else None)
        return self._progress()

    def _pubcomp(self, body: bytes) -> MQTTErrorCode:
        mid, _ = parse_acknowledgement(body, self._is_v5)
        item = self._flying.get(mid)
        if item is not None and item.qos == 2 and item.released:
            self._settled(item)
        return self._progress()

    def _pubrec(self, body: bytes) -> MQTTErrorCode:
        mid, code = parse_acknowledgement(body, self._is_v5)
        item = self._flying.get(mid)
        if item is None or item.qos != 2:
            return self._answer(PUBREL | 2, mid, UNKNOWN_ID)
        if code >= FIRST_FAILURE:
            self._settled(item, code)
            return self._progress()
        item.released = True
        self._again.pop(mid, None)
        return self._answer(PUBREL | 2, mid)

    def _answer(self, command: int, mid: int, code: int = 0) -> MQTTErrorCode:
        has_code = code and self._is_v5
        packet = struct.pack("!BBHB", command, 3, mid, code) if has_code else struct.pack("!BBH", command, 2, mid)
        return self._packet_queue(command, packet, mid, 1)

    # ---- messages in

    def _packet_read(self) -> MQTTErrorCode:
        try:
            packet = self._pipe.packets.next()
            if packet is None:
                self.idle = True
                return _AGAIN
            return self._digest(*packet)
        except MqttError as error:
            return self._violated(error.code, error)

    def _digest(self, command: int, body: bytes) -> MQTTErrorCode:
        self._last_bytes_received = monotonic()
        if self._state == _ConnectionState.MQTT_CS_DISCONNECTING:
            return _SUCCESS  # DISCONNECT waits to be written: nothing that comes may keep it from going out
        kind = command & 0xF0
        if kind == PUBLISH:
            return self._published(command, body)
        handler = self._handlers.get(kind)
        if handler is None or (kind == CONNACK and self.is_open):
            raise MqttError(PROTOCOL_ERROR, f"packet {command:#x} is none of a broker, or in the wrong place")
        return handler(body)

    def _violated(self, code: int, error: Exception) -> MQTTErrorCode:
        self._end = End("mqtt", "protocolerror", {"reasoncode": code}, f"the broker broke the protocol: {error}")
        if self._is_v5 and self._state == _ConnectionState.MQTT_CS_CONNECTED:
            self._pipe.farewell = bytes((0xE0, 1, code))
        return _PROTOCOL

    def _published(self, cpt: int, body: bytes) -> MQTTErrorCode:
        qos = cpt >> 1 & 3
        try:
            topic, mid, properties, payload = parse_publish(cpt, body, self._is_v5)
        except TooManyPropertiesError:
            self._events.on_left_out()
            kind = PUBACK if qos == 1 else PUBREC
            return self._answer(kind, identifier_of(body), QUOTA_EXCEEDED) if qos else _SUCCESS
        if "topicalias" in properties or not topic:
            topic = self._resolved(topic, properties)
        if qos == 2:
            return self._once(mid, topic, payload, properties, cpt)
        self._events.on_message(topic, payload, properties, cpt)
        return self._answer(PUBACK, mid) if qos else _SUCCESS

    def _once(self, mid: int, topic: str, payload: bytes, properties: dict[str, Any], cpt: int) -> MQTTErrorCode:
        if mid not in self._received:
            if len(self._received) >= self._own.get("receivemaximum", 0xFFFF):
                raise MqttError(RECEIVE_MAXIMUM, "more messages than the receive maximum")
            self._received.add(mid)
            self._events.on_message(topic, payload, properties, cpt)
        return self._answer(PUBREC, mid)

    def _resolved(self, topic: str, properties: Mapping[str, Any]) -> str:
        alias = properties.get("topicalias")
        if alias is None:
            raise MqttError(PROTOCOL_ERROR, "a message without a topic")
        if alias > self._own.get("topicaliasmaximum", 0):
            raise MqttError(ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if topic:
            self._aliases_in[alias] = topic
        elif alias not in self._aliases_in:
            raise MqttError(PROTOCOL_ERROR, f"topic alias {alias} means nothing")
        return self._aliases_in[alias]

    def _pubrel(self, body: bytes) -> MQTTErrorCode:
        mid, _ = parse_acknowledgement(body, self._is_v5)
        if mid in self._received:
            self._received.discard(mid)
            return self._answer(PUBCOMP, mid)
        return self._answer(PUBCOMP, mid, UNKNOWN_ID)

    # ---- the rest

    def ask(self, request: Request) -> int:
        """Send SUBSCRIBE or UNSUBSCRIBE; returns the packet identifier that the answer will have."""
        topic = request.topic.encode()
        if request.options is None:
            properties: Any = _Packed(request.properties, Packet.UNSUBSCRIBE)
            _, mid = self._send_unsubscribe(False, [topic], properties)
        else:
            properties = _Packed(request.properties, Packet.SUBSCRIBE)
            _, mid = self._send_subscribe(False, [(topic, self._subscribe_options(request.options))], properties)
        self._asked.add(mid)
        return mid

    def _subscribe_options(self, bits: int) -> SubscribeOptions | int:
        if not self._is_v5:
            return bits
        return SubscribeOptions(bits & 3, bool(bits & 4), bool(bits & 8), bits >> 4)

    def _suback(self, body: bytes) -> MQTTErrorCode:
        return self._answered(*parse_answer(Packet.SUBACK, body, self._is_v5))

    def _unsuback(self, body: bytes) -> MQTTErrorCode:
        return self._answered(*parse_answer(Packet.UNSUBACK, body, self._is_v5))

    def _answered(self, mid: int, code: int, properties: dict[str, Any]) -> MQTTErrorCode:
        self._asked.discard(mid)
        self._events.on_answer(mid, code, properties)
        return self._progress()

    @property
    def unproven(self) -> int:
        """How many QoS 0 messages were sent without a sign of the broker that it got them: the answer to a ping comes
        behind all that was sent before the ping."""
        return self._sent_0 - self._proven_0

    def forget_unproven(self) -> None:
        """Count from now on."""
        self._proven_0 = self._sent_0

    def prove(self) -> None:
        """Ping the broker."""
        self._send_pingreq()

    def _send_pingreq(self) -> MQTTErrorCode:
        self._pings.append(self._sent_0)
        return super()._send_pingreq()

    def _pingresp(self, body: bytes) -> MQTTErrorCode:
        if body:
            raise MqttError(MALFORMED, "a PINGRESP packet with a body")
        self._ping_t = 0.0
        if self._pings:
            self._proven_0 = self._pings.popleft()
        return self._progress()

    def _disconnected(self, body: bytes) -> MQTTErrorCode:
        code, properties = parse_disconnect(body)
        self._sock_close()
        self._events.on_end(disconnected({"reasoncode": code, "properties": properties}))
        return _SUCCESS

    def tick(self, is_reading: bool) -> None:
        """Keep the connection alive. While the application is too busy to read, answers are not waited for."""
        if not is_reading:
            self._ping_t, self._last_bytes_received = 0.0, monotonic()
        self.loop_misc()

    def _parted(self, _client: object, _data: object, _flags: Any, reason: Any, _properties: Any) -> None:
        if reason.value == 0:
            self._events.on_end(None)
        else:
            self._events.on_end(self._end or _ENDS.get(reason.value) or End("sock", "socketclosed"))
