"""The MQTT engine: paho's client, driven from outside, and extended where it can't do what the specification says.

Paho encodes, decodes, frames CONNECT, SUBSCRIBE and DISCONNECT, and keeps the connection alive. Changed here:

* Packets are cut from memory (paho reads a byte at a time), PUBLISH without properties is coded directly.
* What is in flight is kept over connections and sent again as the standard says: with DUP when the broker kept the
  session, as new when it did not; PUBREL once PUBREC came. Duplicates of QoS 2 are dropped, session or packet.
* Receive maximum, maximum packet size, maximum QoS, topic aliases and server keep-alive are respected, both ways.
* Refusals of PUBLISH and CONNACK of all kinds are told; nothing is tried again behind the caller's back.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Mapping
from time import monotonic
from typing import Any, Protocol

from paho.mqtt import _packet
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion, _ConnectionState
from paho.mqtt.exception import MalformedPacket
from paho.mqtt.subscribeoptions import SubscribeOptions

from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.ending import End, disconnected
from smqrt.mqtt.framing import (
    MAX_PACKET_BYTES,
    PacketTooLargeError,
    length_bytes,
    parse_connack,
    parse_publish,
    publish_packet,
)
from smqrt.mqtt.pipe import Pipe
from smqrt.mqtt.properties import PacketTypes, as_dict, as_paho
from smqrt.mqtt.subscriptions import Request

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 0x20, 0x30, 0x40, 0x50, 0x60, 0x70
MALFORMED, PROTOCOL_ERROR, RECEIVE_MAXIMUM, ALIAS_INVALID, TOO_LARGE = 0x81, 0x82, 0x93, 0x94, 0x95
UNKNOWN_ID, FIRST_FAILURE = 0x92, 0x80
MAX_WAITING_PACKETS = 500
PINGS_PER_KEEPALIVE = 2
_SUCCESS = MQTTErrorCode.MQTT_ERR_SUCCESS
_AGAIN = MQTTErrorCode.MQTT_ERR_AGAIN
_PROTOCOL = MQTTErrorCode.MQTT_ERR_PROTOCOL
_ENDS = {0x8D: End("mqtt", "pingtimeout", detail="the broker did not answer a ping")}


class ProtocolViolation(MalformedPacket):
    """The broker broke a rule; `code` is the reason code to part with."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Nobody:
    """Who waits for a QoS 0 packet in paho."""

    def _set_as_published(self) -> None:
        pass


_NOBODY = _Nobody()


class Events(Protocol):
    """Who is told what happens."""

    def on_wake(self) -> None:
        """Something is to be written."""

    def on_connack(self, code: int, present: bool, properties: dict[str, Any]) -> None:
        """The broker answered CONNECT."""

    def on_message(self, topic: str, payload: bytes, properties: dict[str, Any], cpt: int) -> None:
        """A message came; `cpt` is the first byte of its packet."""

    def on_answer(self, mid: int, codes: list[int], properties: dict[str, Any]) -> None:
        """SUBACK or UNSUBACK came; no codes with MQTT 3.1.1's UNSUBACK."""

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
        inflight: how many QoS 1 and 2 messages may wait for their acknowledgement; the broker may want less.
        use_aliases: send topic aliases to brokers that accept them.
    """

    def __init__(self, events: Events, version: int, client_id: str, inflight: int, use_aliases: bool = False) -> None:
        protocol = MQTTProtocolVersion.MQTTv5 if version == 5 else MQTTProtocolVersion.MQTTv311
        clean = None if version == 5 else True
        super().__init__(CallbackAPIVersion.VERSION2, client_id, clean, None, protocol, reconnect_on_failure=False)
        self._host = "broker"  # paho asks for one; the connection is made elsewhere
        self._events = events
        self._is_v5 = version == 5
        self._inflight_limit, self._window = inflight, inflight
        self._use_aliases, self._alias_limit = use_aliases, 0
        self._aliases_out: dict[bytes, int] = {}
        self._aliases_in: dict[int, str] = {}
        self._own: Mapping[str, Any] = {}
        self._broker_limit_bytes = MAX_PACKET_BYTES
        self._max_qos, self._retain_available = 2, True
        self._flying: dict[int, Delivery] = {}
        self._again: deque[Delivery] = deque()
        self._received: set[int] = set()
        self._asked: set[int] = set()
        self._pipe = Pipe(MAX_PACKET_BYTES)
        self._end: End | None = None
        self.idle = True
        self.on_socket_register_write = lambda *_: events.on_wake()
        self.on_subscribe = self.on_unsubscribe = self._on_answer
        self.on_disconnect = self._parted

    # ---- connections

    def start(self, clean: bool, keepalive_s: int, properties: Mapping[str, Any]) -> Pipe:
        """Begin a connection with CONNECT.

        Args:
            clean: forget the session on both sides.
            properties: those of CONNECT, which were given to paho as well.
        """
        self._own = properties
        if self._is_v5:
            self._clean_start = clean
        else:
            self._clean_session = clean
        self._keepalive = keepalive_s
        self._pipe, self._end = Pipe(properties.get("maximumpacketsize", MAX_PACKET_BYTES)), None
        self._asked.clear()
        self._aliases_in.clear()
        self._aliases_out.clear()
        self.reconnect()
        return self._pipe

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

    def _handle_connack(self) -> MQTTErrorCode:
        flags, code, properties = parse_connack(self._in_packet["packet"], self._is_v5)
        present = bool(flags & 1)
        if code == 0:
            if present and self._check_clean_session():
                raise ProtocolViolation(PROTOCOL_ERROR, "a session is present that was not asked for")
            self._accepted(present, properties)
        self._events.on_connack(code, present, properties)
        return _SUCCESS

    def _accepted(self, present: bool, properties: Mapping[str, Any]) -> None:
        self._state = _ConnectionState.MQTT_CS_CONNECTED
        # a ping after half of the time, the end after the other half; the broker waits for one and a half times
        self._keepalive = properties.get("serverkeepalive", self._keepalive) / PINGS_PER_KEEPALIVE
        if name := properties.get("assignedclientidentifier"):
            self._client_id = name.encode()
        self._window = min(self._inflight_limit, properties.get("receivemaximum", 0xFFFF))
        self._broker_limit_bytes = properties.get("maximumpacketsize", MAX_PACKET_BYTES)
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
        self._again = deque(item for item in self._flying.values() if not item.released)
        for item in self._again:
            item.dup = present

    def resume(self) -> None:
        """Send again what is in flight; to be called once when the broker has accepted."""
        for item in self._flying.values():
            if item.released:
                self._send_pubrel(item.mid)
        self._send_again()

    def _send_again(self) -> None:
        while self._again and len(self._flying) - len(self._again) < self._window:
            self._transmit(self._again.popleft())

    def part(self, reason: int = 0) -> None:
        """Send DISCONNECT and end the connection behind it."""
        if self._sock is None:
            return
        self._state = _ConnectionState.MQTT_CS_DISCONNECTING
        body = bytes((reason,)) if self._is_v5 and reason else b""
        self._packet_queue(0xE0, bytes((0xE0, len(body))) + body, 0, 0)

    # ---- messages out

    @property
    def flying(self) -> Collection[Delivery]:
        """QoS 1 and 2 messages on their way, over all connections."""
        return self._flying.values()

    def has_room(self, qos: int) -> bool:
        """Whether a message may be sent now."""
        if len(self._out_packet) >= MAX_WAITING_PACKETS or self._again:
            return False
        return qos == 0 or len(self._flying) < self._window

    def send(self, item: Delivery) -> None:
        """Send a message for the first time; `has_room` was true."""
        item.qos = min(item.qos, self._max_qos)
        item.retain = item.retain and self._retain_available
        if item.qos:
            item.mid = self._mid_generate()
            self._flying[item.mid] = item
        self._transmit(item)

    def _transmit(self, item: Delivery) -> None:
        flags = item.dup << 3 | item.qos << 1 | item.retain
        topic, properties = self._aliased(item) if self._is_v5 else (item.topic, b"")
        packet = publish_packet(flags, topic, item.mid, properties, item.payload)
        if len(packet) > self._broker_limit_bytes:
            self._settled(item, "toolarge")
            return
        self._packet_queue(PUBLISH, packet, item.mid, item.qos, _NOBODY)  # type: ignore[arg-type]
        if not item.qos:
            item.finish()

    def _aliased(self, item: Delivery) -> tuple[bytes, bytes]:
        """Topic and packed properties, a known topic as its alias."""
        properties = item.properties
        if not self._alias_limit:
            return item.topic, length_bytes(len(properties)) + properties
        known = self._aliases_out.get(item.topic)
        if known is None and len(self._aliases_out) < self._alias_limit:
            self._aliases_out[item.topic] = len(self._aliases_out) + 1
        number = self._aliases_out.get(item.topic)
        if number:
            properties += struct.pack("!BH", 0x23, number)
        return b"" if known else item.topic, length_bytes(len(properties)) + properties

    def _settled(self, item: Delivery, error: str | int | None = None) -> None:
        if item.mid:
            self._flying.pop(item.mid, None)
        if item in self._again:
            self._again.remove(item)
        item.finish(error)

    def _mid_generate(self) -> int:
        mid = super()._mid_generate()
        while mid in self._flying or mid in self._asked:
            mid = super()._mid_generate()
        return mid

    def _progress(self) -> MQTTErrorCode:
        self._send_again()
        self._events.on_room()
        return _SUCCESS

    def _handle_pubackcomp(self, cmd: str) -> MQTTErrorCode:
        decode = _packet.decode_puback if cmd == "PUBACK" else _packet.decode_pubcomp
        mid, code = self._acknowledged(decode)
        item = self._flying.get(mid)
        if item is None or (item.qos, item.released) != ((1, False) if cmd == "PUBACK" else (2, True)):
            return _SUCCESS
        self._settled(item, code if code >= FIRST_FAILURE and cmd == "PUBACK" else None)
        return self._progress()

    def _handle_pubrec(self) -> MQTTErrorCode:
        mid, code = self._acknowledged(_packet.decode_pubrec)
        item = self._flying.get(mid)
        if item is None or item.qos != 2:
            return self._answer(PUBREL | 2, mid, UNKNOWN_ID)
        if code >= FIRST_FAILURE:
            self._settled(item, code)
            return self._progress()
        item.released = True
        return self._send_pubrel(mid)

    def _acknowledged(self, decode: Any) -> tuple[int, int]:
        body = self._in_packet["packet"]
        if len(body) == 2:
            return body[0] << 8 | body[1], 0
        packet = decode(self._in_packet["command"], body, self._protocol)
        return packet.mid, packet.reason.value

    def _answer(self, command: int, mid: int, code: int) -> MQTTErrorCode:
        packet = struct.pack("!BBHB", command, 3, mid, code) if self._is_v5 else struct.pack("!BBH", command, 2, mid)
        return self._packet_queue(command, packet, mid, 1)

    # ---- messages in

    def _packet_read(self) -> MQTTErrorCode:
        try:
            packet = self._pipe.packets.next()
            if packet is None:
                self.idle = True
                return _AGAIN
            return self._digest(*packet)
        except PacketTooLargeError as error:
            return self._violated(TOO_LARGE, error)
        except MalformedPacket as error:
            return self._violated(getattr(error, "code", MALFORMED), error)

    def _digest(self, command: int, body: bytes) -> MQTTErrorCode:
        self._last_bytes_received = monotonic()
        if (self._state == _ConnectionState.MQTT_CS_CONNECTED) == (command & 0xF0 == CONNACK):
            raise ProtocolViolation(PROTOCOL_ERROR, f"packet {command:#x} in the wrong place")
        if command & 0xF0 == PUBLISH:
            return self._published(command, body)
        into = self._in_packet
        into["command"], into["packet"], into["remaining_length"] = command, bytearray(body), len(body)
        answer = self._packet_handle()
        if answer == _PROTOCOL:
            raise ProtocolViolation(PROTOCOL_ERROR, f"packet {command:#x} is none of a broker")
        return answer

    def _violated(self, code: int, error: Exception) -> MQTTErrorCode:
        self._end = End("mqtt", "protocolerror", {"reasoncode": code}, f"the broker broke the protocol: {error}")
        if self._is_v5 and self._state == _ConnectionState.MQTT_CS_CONNECTED:
            self._pipe.farewell = bytes((0xE0, 1, code))
        return _PROTOCOL

    def _published(self, cpt: int, body: bytes) -> MQTTErrorCode:
        topic, mid, properties, payload = parse_publish(cpt, body, self._is_v5)
        if "topicalias" in properties or not topic:
            topic = self._resolved(topic, properties)
        qos = cpt >> 1 & 3
        if qos == 2:
            return self._once(mid, topic, payload, properties, cpt)
        self._events.on_message(topic, payload, properties, cpt)
        return self._send_puback(mid) if qos else _SUCCESS

    def _once(self, mid: int, topic: str, payload: bytes, properties: dict[str, Any], cpt: int) -> MQTTErrorCode:
        if mid not in self._received:
            if len(self._received) >= self._own.get("receivemaximum", 0xFFFF):
                raise ProtocolViolation(RECEIVE_MAXIMUM, "more messages than the receive maximum")
            self._received.add(mid)
            self._events.on_message(topic, payload, properties, cpt)
        return self._send_pubrec(mid)

    def _resolved(self, topic: str, properties: Mapping[str, Any]) -> str:
        alias = properties.get("topicalias")
        if alias is None:
            raise ProtocolViolation(PROTOCOL_ERROR, "a message without a topic")
        if alias > self._own.get("topicaliasmaximum", 0):
            raise ProtocolViolation(ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if topic:
            self._aliases_in[alias] = topic
        elif alias not in self._aliases_in:
            raise ProtocolViolation(PROTOCOL_ERROR, f"topic alias {alias} means nothing")
        return self._aliases_in[alias]

    def _handle_pubrel(self) -> MQTTErrorCode:
        mid, _ = self._acknowledged(_packet.decode_pubrel)
        if mid in self._received:
            self._received.discard(mid)
            return self._send_pubcomp(mid)
        return self._answer(PUBCOMP, mid, UNKNOWN_ID)

    # ---- the rest

    def ask(self, request: Request) -> int:
        """Send SUBSCRIBE or UNSUBSCRIBE; returns the packet identifier that the answer will have."""
        topic = request.topic.encode()
        if request.options is None:
            properties = as_paho(request.properties, PacketTypes.UNSUBSCRIBE) if self._is_v5 else None
            _, mid = self._send_unsubscribe(False, [topic], properties)
        else:
            properties = as_paho(request.properties, PacketTypes.SUBSCRIBE) if self._is_v5 else None
            _, mid = self._send_subscribe(False, [(topic, self._subscribe_options(request.options))], properties)
        self._asked.add(mid)
        return mid

    def _subscribe_options(self, bits: int) -> SubscribeOptions | int:
        if not self._is_v5:
            return bits
        return SubscribeOptions(bits & 3, bool(bits & 4), bool(bits & 8), bits >> 4)

    def _on_answer(self, _client: object, _data: object, mid: int, codes: Any, properties: Any) -> None:
        self._asked.discard(mid)
        self._events.on_answer(mid, [code.value for code in codes], as_dict(properties))

    def tick(self, is_reading: bool) -> None:
        """Keep the connection alive. While the application is too busy to read, answers are not waited for."""
        if not is_reading:
            self._ping_t, self._last_bytes_received = 0.0, monotonic()
        self.loop_misc()

    def _parted(self, _client: object, _data: object, flags: Any, reason: Any, properties: Any) -> None:
        if flags.is_disconnect_packet_from_server:
            code = reason.value if reason is not None else 0
            self._events.on_end(disconnected({"reasoncode": code, "properties": as_dict(properties)}))
        elif reason.value == 0:
            self._events.on_end(None)
        else:
            self._events.on_end(self._end or _ENDS.get(reason.value) or End("sock", "socketclosed"))
