"""The record of all MQTT sessions and retained messages of a hub as few objects, for a hot restart.

Each message is packed once, also when several sessions wait for it; the records of sessions refer to it by its place.
So another process gets some long byte strings instead of a million short ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from struct import Struct

from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.records import Record, restore_all, session_record

SESSIONS_PER_TEXT = 1000
_HEAD = Struct(">IIIIBd")
"""Of a message: the lengths of name, payload, properties and identifiers; the QoS, and 4 for retained; its expiry."""
_RETAINED = 4


def packed_record(devices: Devices) -> Record:
    """Return the record of all sessions that are kept, and of the retained messages."""
    messages = list(devices.retained.by_name.values())
    retained, places = len(messages), dict[int, int]()

    def place_of(message: Message) -> int:
        place = places.get(id(message))
        if place is None:
            place = places[id(message)] = len(messages)
            messages.append(message)
        return place

    records = [session_record(one, place_of) for one in devices.sessions.values() if one.client is None]
    texts = [
        json.dumps(records[at : at + SESSIONS_PER_TEXT], separators=(",", ":")).encode()
        for at in range(0, len(records), SESSIONS_PER_TEXT)
    ]
    arrivals = devices.arrivals.record()
    return {"messages": packed_messages(messages), "retained": retained, "sessions": texts, "arrivals": arrivals}


def restore_packed(devices: Devices, record: Record) -> None:
    """Restore a `packed_record`; see `records.restore`."""
    messages = unpacked_messages(record["messages"])
    sessions = (one for text in record["sessions"] for one in json.loads(text))
    restore_all(devices, record["arrivals"], messages[: record["retained"]], sessions, messages.__getitem__)


def packed_messages(messages: Iterable[Message]) -> bytes:
    """Return messages as one byte string."""
    pieces: list[bytes] = []
    pack = _HEAD.pack
    for one in messages:
        name, payload, properties, identifiers = one.name, one.payload, one.properties, one.identifiers
        flags = one.qos | _RETAINED if one.retain else one.qos
        lengths = len(name), len(payload), len(properties), len(identifiers)
        pieces += (pack(*lengths, flags, one.expires_s), name, payload, properties, identifiers)
    return b"".join(pieces)


def unpacked_messages(data: bytes) -> list[Message]:
    """Return the messages of `packed_messages`."""
    found: list[Message] = []
    unpack, at = _HEAD.unpack_from, 0
    while at < len(data):
        name, payload, properties, identifiers, flags, expires_s = unpack(data, at)
        at += _HEAD.size
        payload_at = at + name
        properties_at = payload_at + payload
        identifiers_at = properties_at + properties
        end = identifiers_at + identifiers
        found.append(
            Message(
                data[at:payload_at],
                data[payload_at:properties_at],
                flags & 3,
                flags & _RETAINED != 0,
                data[properties_at:identifiers_at],
                expires_s,
                data[identifiers_at:end],
            )
        )
        at = end
    return found
