"""Records of the MQTT sessions and retained messages of a hub, for a hot restart.

A record has numbers, texts, bytes and lists, so that it can be sent to another process. Times are those of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

from smqrt.auth.identity import Rights
from smqrt.broker import sessions
from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.device import Device, Will
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.retained import RetainedFeed
from smqrt.broker.outbox import Outbox

Record = dict[str, Any]


def record_of(devices: Devices) -> Record:
    """Return the record of all sessions that are kept, and of the retained messages."""
    return {
        "sessions": [session_record(one) for one in devices.sessions.values() if one.client is None],
        "retained": [_message_record(one) for one in devices.retained.by_name.values()],
    }


def restore(devices: Devices, record: Record) -> None:
    """Restore sessions and retained messages at a hub whose names are adopted already.

    A session that a client has opened here meanwhile is left as it is.
    """
    for one in record["retained"]:
        devices.retained.set(_message_of(one))
    for one in record["sessions"]:
        if one["id"] not in devices.sessions:
            restore_session(devices, one)


def restore_session(devices: Devices, record: Record) -> Device:
    """Restore a session, and return it; see `session_record`."""
    device = Device(devices, record["id"])
    device.user, device.version, device.expiry_s = record["user"], record["version"], record["expiry_s"]
    device.in_flight = {number: None if one is None else _message_of(one) for number, one in record["in_flight"]}
    for one in record["waiting"]:
        device.keep(_message_of(one))
    device.unreleased, device.last_number = set(record["unreleased"]), record["last_number"]
    device.dropped = record["dropped"]
    devices.sessions[device.client_id] = device
    devices.offline[device] = None
    device.ends_s = NO_EXPIRY_S if record["ends_s"] is None else record["ends_s"]
    for text, *options in record["subscriptions"]:
        for _ in devices.subscribe(device, text, Options(*options)):
            pass
    return device


def session_record(device: Device) -> Record:
    """Return the record of a session."""
    return {
        "id": device.client_id,
        "user": device.user,
        "version": device.version,
        "expiry_s": device.expiry_s,
        "ends_s": None if device.ends_s == NO_EXPIRY_S else device.ends_s,
        "subscriptions": [[text, *options] for text, options in device.subscriptions.items()],
        "in_flight": [[number, one and _message_record(one)] for number, one in device.in_flight.items()],
        "waiting": [_message_record(one) for one in device.waiting],
        "unreleased": sorted(device.unreleased),
        "last_number": device.last_number,
        "dropped": device.dropped,
    }


# ---- connected clients


def client_record(client: MqttClient) -> Record:
    """Return the record of a connected client, beside that of each client of a hub (`sessions.client_record`)."""
    device = client.device
    assert device is not None
    return {
        "session": session_record(device),
        "unsent": list(device.unsent),
        "feeds": [_feed_record(one) for one in device.feeds],
        "will": None if device.will is None else _will_record(device.will),
        "version": client.version,
        "window": client.window,
        "limit": client.peer_limit_bytes,
        "keepalive_s": client.keepalive_s,
        "aliases": [[number, name] for number, name in client.aliases.items()],
    }


def join(broker: Broker, outbox: Outbox, record: Record, found: Record, rights: Rights | None) -> MqttClient:
    """Restore a connected client at a hub whose names are adopted already; the connection is not used yet.

    Args:
        broker: the hub.
        outbox: the client's connection.
        record: see `sessions.client_record`.
        found: see `client_record`.
        rights: see `sessions.join`.

    Raises:
        CannotJoin: its ETID or its client id is in use here, or the hub accepts no MQTT clients.
    """
    devices: Devices | None = broker.devices
    if devices is None:
        raise sessions.CannotJoin(record["etid"])
    client = sessions.join(broker, outbox, record, rights, MqttClient)
    assert isinstance(client, MqttClient)
    client.client_id, client.version = found["session"]["id"], found["version"]
    client.window, client.peer_limit_bytes = found["window"], found["limit"]
    client.keepalive_s, client.aliases = found["keepalive_s"], dict(found["aliases"])
    client.device = device = restore_session(devices, found["session"])
    devices.offline.pop(device)
    device.will = None if found["will"] is None else _will_of(found["will"])
    for text, options, names, messages in found["feeds"]:
        device.feed(RetainedFeed(devices.retained, text, Options(*options), names, map(_message_of, messages)))
    device.continue_with(client, found["unsent"])
    return client


def _feed_record(feed: RetainedFeed) -> list[object]:
    return [feed.text, list(feed.options), list(feed.names), [_message_record(one) for one in feed.found]]


def _will_record(will: Will) -> list[object]:
    return [_message_record(will.message), will.delay_s, None if will.expiry_s == NO_EXPIRY_S else will.expiry_s]


def _will_of(record: list[Any]) -> Will:
    message, delay_s, expiry_s = record
    return Will(_message_of(message), delay_s, NO_EXPIRY_S if expiry_s is None else expiry_s)


# ---- messages


def _message_record(message: Message) -> list[object]:
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


def _message_of(record: list[Any]) -> Message:
    name, payload, qos, retain, properties, expires_s, identifiers = record
    return Message(name, payload, qos, retain, properties, NO_EXPIRY_S if expires_s is None else expires_s, identifiers)
