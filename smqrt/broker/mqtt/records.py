"""Records of the MQTT sessions and retained messages of a hub, for a hot restart.

A record has numbers, texts, bytes and lists, so that it can be sent to another process. Times are those of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message

Record = dict[str, Any]


def record_of(devices: Devices) -> Record:
    """Return the record of all sessions that are kept, and of the retained messages."""
    return {
        "sessions": [session_record(one) for one in devices.sessions.values() if one.client is None],
        "retained": [message_record(one) for one in devices.retained.by_name.values()],
    }


def restore(devices: Devices, record: Record) -> None:
    """Restore sessions and retained messages at a hub whose names are adopted already.

    A session that a client has opened here meanwhile is left as it is.
    """
    for one in record["retained"]:
        devices.retained.set(message_of(one))
    for one in record["sessions"]:
        if one["id"] not in devices.sessions:
            restore_session(devices, one)


def restore_session(devices: Devices, record: Record) -> None:
    """Restore a session; see `session_record`."""
    device = Device(devices, record["id"])
    device.user, device.version, device.expiry_s = record["user"], record["version"], record["expiry_s"]
    device.in_flight = {number: None if one is None else message_of(one) for number, one in record["in_flight"]}
    for one in record["waiting"]:
        device.keep(message_of(one))
    device.unreleased, device.last_number = set(record["unreleased"]), record["last_number"]
    device.dropped = record["dropped"]
    devices.sessions[device.client_id] = device
    devices.offline[device] = None
    device.ends_s = NO_EXPIRY_S if record["ends_s"] is None else record["ends_s"]
    for text, *options in record["subscriptions"]:
        for _ in devices.subscribe(device, text, Options(*options)):
            pass
    devices.session_changed(device)


def session_record(device: Device) -> Record:
    """Return the record of a session."""
    return {
        **settings_record(device),
        "in_flight": [[number, one and message_record(one)] for number, one in device.in_flight.items()],
        "waiting": [message_record(one) for one in device.waiting],
        "unreleased": sorted(device.unreleased),
    }


def settings_record(device: Device) -> Record:
    """Return the record of a session without its messages."""
    return {
        "id": device.client_id,
        "user": device.user,
        "version": device.version,
        "expiry_s": device.expiry_s,
        "ends_s": None if device.ends_s == NO_EXPIRY_S else device.ends_s,
        "subscriptions": [[text, *options] for text, options in device.subscriptions.items()],
        "last_number": device.last_number,
        "dropped": device.dropped,
    }


def message_record(message: Message) -> list[object]:
    """Return the record of a message."""
    expires_s = None if message.expires_s == NO_EXPIRY_S else message.expires_s
    return [
        message.name,
        message.payload,
        message.qos,
        message.retain,
        message.properties,
        expires_s,
        message.identifiers,
    ]


def message_of(record: list[Any]) -> Message:
    """Return the message of a record."""
    name, payload, qos, retain, properties, expires_s, identifiers = record
    return Message(name, payload, qos, retain, properties, NO_EXPIRY_S if expires_s is None else expires_s, identifiers)
