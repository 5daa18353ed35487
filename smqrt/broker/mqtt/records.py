"""Records of the MQTT sessions and retained messages of a hub, for a hot restart.

A record has numbers, texts, bytes and lists, so that it can be sent to another process. Times are those of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from smqrt.auth.identity import Rights
from smqrt.broker import sessions
from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.authentication import Exchange
from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.retained import RetainedFeed
from smqrt.broker.mqtt.wills import Will
from smqrt.broker.outbox import Outbox

Record = dict[str, Any]


def record_of(devices: Devices) -> Record:
    """Return the record of all sessions that are kept, and of the retained messages."""
    return {
        "sessions": [session_record(one) for one in devices.sessions.values() if one.client is None],
        "retained": [message_record(one) for one in devices.retained.by_name.values()],
        "arrivals": devices.arrivals.record(),
    }


def restore(devices: Devices, record: Record) -> None:
    """Restore sessions and retained messages at a hub whose names are adopted already.

    A session that a client has opened here meanwhile is left as it is.
    """
    # Older versions have no `arrivals`.
    restore_all(devices, record.get("arrivals"), map(message_of, record["retained"]), record["sessions"], message_of)


def restore_all(
    devices: Devices,
    arrivals: list[object] | None,
    retained: Iterable[Message],
    sessions: Iterable[Record],
    message_at: Callable[[Any], Message],
) -> None:
    """Restore sessions and retained messages, see `restore`.

    Args:
        devices: the MQTT clients of the hub.
        arrivals: see `Arrivals.record`; None for none.
        retained: the retained messages.
        sessions: the records of the sessions.
        message_at: returns a message for its form in these records.
    """
    if arrivals is not None:
        devices.arrivals.restore(arrivals)
    for message in retained:
        devices.retained.set(message)
    for one in sessions:
        if one["id"] not in devices.sessions:
            device = restore_session(devices, one, message_at)
            will = will_of(one.get("will"), message_at)  # older versions have none
            if will is not None:
                devices.wills.delay(device, will, will.due_s or 0)
    devices.search.finish_now()


def restore_session(devices: Devices, record: Record, message_at: Callable[[Any], Message] | None = None) -> Device:
    """Restore a session, and return it; see `session_record`.

    After the last session, `TopicSearch.finish_now` finds the topics of their filters together.

    Args:
        devices: the MQTT clients of the hub.
        record: the record.
        message_at: returns a message for its form in the record; by default `message_of`.
    """
    message_at = message_at or message_of
    device = Device(devices, record["id"])
    device.user, device.version, device.expiry_s = record["user"], record["version"], record["expiry_s"]
    device.last_number, device.dropped = record["last_number"], record["dropped"]
    if record["in_flight"]:  # sessions without messages share empty containers
        device.in_flight = {number: None if one is None else message_at(one) for number, one in record["in_flight"]}
    if record["unreleased"]:
        device.unreleased = set(record["unreleased"])
    devices.add_session(device)
    for one in record["waiting"]:
        device.keep(message_at(one))
    devices.offline[device] = None
    device.ends_s = NO_EXPIRY_S if record["ends_s"] is None else record["ends_s"]
    for text, *options in record["subscriptions"]:
        devices.add_subscription(device, text, Options(*options))
    if device.in_flight:
        device.count_stored()
    devices.session_changed(device)
    return device


def session_record(device: Device, form_of: Callable[[Message], object] | None = None) -> Record:
    """Return the record of a session.

    Args:
        device: the session.
        form_of: returns the form of a message in the record; by default `message_record`.
    """
    form_of = form_of or message_record
    return {
        **settings_record(device),
        "in_flight": [[number, one and form_of(one)] for number, one in device.in_flight.items()],
        "waiting": [form_of(one) for one in device.waiting],
        "unreleased": sorted(device.unreleased),
        "will": will_record(device.will, form_of),
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


# ---- connected clients


def client_record(client: MqttClient) -> Record:
    """Return the record of a connected client, beside that of each client of a hub (`sessions.client_record`)."""
    device = client.device
    assert device is not None
    return {
        "session": session_record(device),
        "unsent": list(device.unsent),
        "feeds": [_feed_record(one) for one in device.feeds],
        "version": client.version,
        "window": client.window,
        "limit": client.peer_limit_bytes,
        "keepalive_s": client.keepalive_s,
        "exchange": None if client.exchange is None else client.exchange.record(),
        "aliases_out": [list(one) for one in client.aliases_out.items()],
        "max_aliases_out": client.max_aliases_out,
        "is_bridge": client.is_bridge,
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
    client.max_aliases_out = found.get("max_aliases_out", 0)  # older versions have none
    client.is_bridge = found.get("is_bridge", False)
    if found.get("aliases_out"):
        client.aliases_out = dict(found["aliases_out"])
    client.device = device = restore_session(devices, found["session"])
    devices.offline.pop(device)
    device.identity = client.identity
    if client.identity is not None and devices.limits.acl == "deliver":
        devices.check_messages_of(device)
    if found.get("exchange") is not None:  # older versions have none
        client.exchange = Exchange.restored(client, found["exchange"])
    device.will = will_of(found["session"]["will"])
    for text, options, names, messages in found["feeds"]:
        device.feed(RetainedFeed(devices.retained, text, Options(*options), names, map(message_of, messages)))
    device.continue_with(client, found["unsent"])
    return client


def _feed_record(feed: RetainedFeed) -> list[object]:
    return [feed.text, list(feed.options), list(feed.names), [message_record(one) for one in feed.found]]


def will_record(will: Will | None, form_of: Callable[[Message], object] | None = None) -> list[object] | None:
    """Return the record of a will; None for none. See `session_record`."""
    if will is None:
        return None
    expiry_s = None if will.expiry_s == NO_EXPIRY_S else will.expiry_s
    return [(form_of or message_record)(will.message), will.delay_s, expiry_s, will.due_s]


def will_of(record: list[Any] | None, message_at: Callable[[Any], Message] | None = None) -> Will | None:
    """Return the will of a record; see `restore_session`."""
    if record is None:
        return None
    message, delay_s, expiry_s, due_s = record
    return Will((message_at or message_of)(message), delay_s, NO_EXPIRY_S if expiry_s is None else expiry_s, due_s)


# ---- messages


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
