"""Packets of MQTT clients in traces: type, packet identifier, topic, QoS and flags."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.filters import split_shared
from smqrt.broker.mqtt.retained import name_matcher
from smqrt.broker.routes import MAX_FRAMES_SHOWN, MAX_NAME_SHOWN_BYTES, MAX_PAYLOAD_SHOWN_BYTES, text
from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.fields import PacketType, reason_words
from smqrt.wire.mqtt.packets import (
    Acknowledgement,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PacketSplitter,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    UnsubscribePacket,
    decode,
)

if TYPE_CHECKING:
    from smqrt.broker.mqtt.session import MqttSession

_DUP, _NO_LOCAL, _RETAIN_AS_PUBLISHED = 0x08, 4, 8

Fields = dict[str, object]


class TracedOutbox:
    """The connection of a traced client: records the packets that are sent.

    Args:
        session: the client.
    """

    __slots__ = ("_outbox", "_session")

    def __init__(self, session: MqttSession) -> None:
        self._session, self._outbox = session, session.outbox

    def send_packet(self, data: bytes) -> None:
        """See `MqttOutbox`."""
        self._record(data)
        self._outbox.send_packet(data)  # type: ignore[attr-defined]  # the outbox of an MQTT client is a `MqttOutbox`

    def send_packets(self, data: bytes, key: bytes) -> None:
        """See `MqttOutbox`."""
        self._record(data)
        self._outbox.send_packets(data, key)  # type: ignore[attr-defined]

    @property
    def has_room(self) -> bool:
        """See `MqttOutbox`."""
        return bool(self._outbox.has_room)  # type: ignore[attr-defined]

    def _record(self, data: bytes) -> None:
        splitter = PacketSplitter()
        splitter.feed(data)
        for _ in range(MAX_FRAMES_SHOWN):
            packet = splitter.next()
            if packet is None:
                return
            trace_packet(self._session, *packet, is_sent=True)


def trace_packet(session: MqttSession, first: int, body: bytes, is_sent: bool = False) -> None:
    """Record a packet in the traces that it concerns.

    Args:
        session: the client.
        first: the first byte of the packet.
        body: its body.
        is_sent: whether the hub has sent it.
    """
    if is_sent and not any(trace.is_about(session) for trace in session.broker.traces):
        return
    try:
        packet = decode(first, body, session.codec, not is_sent)
    except (MqttError, ArgumentError) as error:
        kind, fields = first >> 4, Fields(detail=str(error)[:MAX_NAME_SHOWN_BYTES])
        _add(session, PacketType(kind).name if kind else "packet 0", [fields], is_sent)
        return
    trace_decoded(session, PacketType(first >> 4), packet, is_sent)


def trace_decoded(session: MqttSession, kind: PacketType, packet: Packet, is_sent: bool) -> None:
    """Record a decoded packet; see `trace_packet`."""
    _add(session, kind.name, islice(_fields(packet, session.version), MAX_FRAMES_SHOWN), is_sent)


def _add(session: MqttSession, name: str, rows: Iterator[Fields] | list[Fields], is_sent: bool) -> None:
    client: Fields = {"etid": session.etid, "uid": text(session.uid)}
    if is_sent:
        client["sent"] = True
    for fields in rows:
        for trace in session.broker.traces:
            if trace.is_about(session) or (trace.topic is not None and _concerns(fields, trace.topic)):
                trace.add(name, **client, **fields)


def _concerns(fields: Fields, topic: bytes) -> bool:
    """Return whether a packet has the topic, or a filter that matches it."""
    named = fields.get("topic")
    if not isinstance(named, str):
        return False
    if named.encode() == topic:
        return True
    shared = split_shared(named)
    try:
        return shared is not None and bool(shared[1]) and name_matcher(shared[1])(topic)
    except ArgumentError:  # an invalid filter
        return False


def _fields(packet: Packet, version: int) -> Iterator[Fields]:
    """Return the fields of a packet; one row for each filter of SUBSCRIBE and UNSUBSCRIBE."""
    match packet:
        case PublishPacket():
            yield _publish(packet)
        case SubscribePacket():
            for one in packet.subscriptions:
                flags = [
                    *(["no local"] if one.options & _NO_LOCAL else []),
                    *(["retain as published"] if one.options & _RETAIN_AS_PUBLISHED else []),
                ]
                more = {"flags": ", ".join(flags)} if flags else {}
                yield {
                    "topic": text(one.topic.encode()),
                    "id": packet.packet_identifier,
                    "qos": one.options & 3,
                    **more,
                }
        case UnsubscribePacket():
            for topic in packet.topics:
                yield {"topic": text(topic.encode()), "id": packet.packet_identifier}
        case SubscribeAnswer():
            codes = ", ".join(f"{code:#04x}" for code in packet.codes[:MAX_FRAMES_SHOWN])
            yield {"id": packet.packet_identifier, **({"codes": codes} if codes else {})}
        case Acknowledgement():
            yield {"id": packet.packet_identifier, **_code(packet.code, 5)}
        case ConnectPacket():
            will = {} if packet.will is None else {"will": text(packet.will.topic.encode())}
            start = {"flags": "clean start"} if packet.clean_start else {}
            yield {
                "version": {3: "3.1", 4: "3.1.1"}.get(packet.version, "5"),
                "keepalive_s": packet.keepalive_s,
                **start,
                **will,
            }
        case ConnackPacket():
            yield {**({"flags": "session present"} if packet.session_present else {}), **_code(packet.code, version)}
        case DisconnectPacket():
            yield _code(packet.code, 5)
        case _:
            yield {}


def _publish(packet: PublishPacket) -> Fields:
    flags = [
        *(["dup"] if packet.flags & _DUP else []),
        *(["retain"] if packet.retain else []),
        *([f"alias {packet.properties['topicalias']}"] if "topicalias" in packet.properties else []),
    ]
    return {
        "topic": text(packet.topic.encode()),
        **({"id": packet.packet_identifier} if packet.qos else {}),
        "qos": packet.qos,
        **({"flags": ", ".join(flags)} if flags else {}),
        "bytes": len(packet.payload),
        "payload": text(packet.payload, MAX_PAYLOAD_SHOWN_BYTES),
    }


def _code(code: int, version: int) -> Fields:
    return {"code": f"{code:#04x} {reason_words(code, version)}"} if code else {}
