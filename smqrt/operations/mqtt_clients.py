"""Sessions of MQTT clients and retained messages, for operators.

These functions run in a greenlet and yield to the event loop: a hub may have 100,000 sessions and 250,000 messages.
"""

from __future__ import annotations

import logging
from math import isinf
from typing import Any

from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.retained import name_matcher
from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn
from smqrt.operations.api_pages import LIMIT, Snapshot, known, page, paged
from smqrt.operations.snapshots import NotFoundError, broker_of, mqtt_session
from smqrt.operations.topics import text
from smqrt.printable import printable
from smqrt.wire.mqtt.fields import PacketType, unpack_properties

log = logging.getLogger("smqrt.admin")

STATES = ("offline", "connected", "all")
"""Which sessions are listed."""
_MAX_SHOWN_BYTES = 512
"""Bytes of a payload, or of a property, in a list."""


def devices_of(hub: int) -> Devices:
    """Return the MQTT clients of a hub.

    Raises:
        NotFoundError: there is no such hub.
        ArgumentError: it accepts no MQTT clients.
    """
    devices: Devices | None = broker_of(hub).devices
    if devices is None:
        raise ArgumentError(f"hub: hub {hub} accepts no MQTT clients; create it with the option mqtt")
    return devices


# ---- Sessions


def sessions(
    hub: int, after: str | None = None, limit: int = LIMIT, search: str = "", state: str = "offline"
) -> Snapshot:
    """Return a page of the sessions of a hub's MQTT clients, ordered by client identifier.

    Args:
        hub: the number of the hub.
        after: the `after` of the previous page.
        limit: items on the page, 1 to 1000.
        search: only sessions whose client identifier or user contains this text.
        state: "offline" for sessions without a connection, "connected" or "all".

    Raises:
        ArgumentError: there is no such hub, or an argument is invalid.
    """
    if state not in STATES:
        raise ArgumentError(f"state: {state[:40]!r} is not one of {', '.join(STATES)}")
    broker = broker_of(hub)
    devices: Devices | None = broker.devices
    now_s, needle = broker.clock(), search.lower()
    if devices is None:
        found: list[Device] = []
    else:
        found = list(devices.offline if state == "offline" else devices.sessions.values())

    def wanted(device: Device) -> bool:
        is_found = needle in device.client_id.lower() or needle in (device.user or "").lower()
        return is_found and (state != "connected" or device.client is not None)

    last = None if after is None else after.encode()
    chosen = page(found, lambda device: device.client_id.encode(), last, limit, wanted)
    return paged(chosen, lambda device: session(hub, device, now_s), text)


def session(hub: int, device: Device, now_s: float) -> Snapshot:
    """Return a session; `id` is that of the connected client, and None without one."""
    return {
        "hub": hub,
        "id": None if device.client is None else f"{hub}.{device.client.etid}",
        "user": device.user or "",
        "subscriptions": len(device.subscriptions),
        "connected": device.client is not None,
        "ends_in_s": None if isinf(device.ends_s) else round(device.ends_s - now_s, 3),
        **mqtt_session(device),
    }


def _device_of(hub: int, options: dict[str, object]) -> Device:
    client_id = known(options, ("client",)).get("client")
    if not isinstance(client_id, str):
        raise ArgumentError("client: the client identifier of a session is needed; /api/v1/mqtt-sessions lists them")
    device = devices_of(hub).sessions.get(client_id)
    if device is None:
        raise NotFoundError(f"client: hub {hub} has no session {printable(client_id[:64])!r}; it may have ended")
    return device


def disconnect_session(hub: int, options: dict[str, object]) -> Snapshot:
    """Disconnect an MQTT client; its session is kept. MQTT 5 clients get the reason 0x98.

    Args:
        hub: the number of the hub.
        options: `client`, the client identifier.

    Raises:
        ArgumentError: there is no such hub or session.
    """
    device = _device_of(hub, options)
    is_connected = isinstance(device.client, MqttClient)
    log.info("MQTT client %s: disconnect requested by an operator", printable(device.client_id[:64]))
    if isinstance(device.client, MqttClient):
        device.client.kick()
    return {"hub": hub, "client": device.client_id, "disconnected": is_connected}


def end_session(hub: int, options: dict[str, object]) -> Snapshot:
    """Disconnect an MQTT client, and delete its session with its subscriptions and messages.

    The arguments and errors are those of `disconnect_session`.
    """
    device = _device_of(hub, options)
    log.info("MQTT session %s: end requested by an operator", printable(device.client_id[:64]))
    if isinstance(device.client, MqttClient):
        device.client.kick()
    if device.devices.sessions.get(device.client_id) is device:
        device.devices.end(device)
    return {"hub": hub, "client": device.client_id, "deleted": True}


# ---- Retained messages


def retained(hub: int, filter: str = "", after: str | None = None, limit: int = LIMIT) -> Snapshot:
    """Return a page of the retained messages of a hub, ordered by topic.

    Args:
        hub: the number of the hub.
        filter: a topic filter, such as "house/+/temp"; empty for all messages.
        after: the `after` of the previous page.
        limit: items on the page, 1 to 1000.

    Raises:
        ArgumentError: there is no such hub, it accepts no MQTT clients, or an argument is invalid.
    """
    devices = devices_of(hub)
    matches, now_s = name_matcher(filter), devices.broker.clock()
    by_name = devices.retained.by_name
    if filter and "+" not in filter and "#" not in filter:
        messages = [one for one in [by_name.get(filter.encode())] if one is not None]
    else:
        messages = list(by_name.values())
    chosen = page(
        messages,
        lambda message: message.name,
        None if after is None else after.encode(),
        limit,
        lambda message: message.expires_s > now_s and matches(message.name),
    )
    return paged(chosen, lambda message: _message(message, now_s), text)


def _message(message: Message, now_s: float) -> Snapshot:
    properties = unpack_properties(message.properties, 0, len(message.properties), PacketType.PUBLISH)
    return {
        "topic": message.name.decode("utf-8", "replace"),
        "qos": message.qos,
        "bytes": len(message.payload),
        "payload": text(message.payload[:_MAX_SHOWN_BYTES]),
        "expires_in_s": None if isinf(message.expires_s) else round(message.expires_s - now_s, 3),
        "properties": {name[:_MAX_SHOWN_BYTES]: _shown(value) for name, value in properties.items()},
    }


def _shown(value: Any) -> Any:
    """Return a property for JSON."""
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, bytes):
        return text(value[:_MAX_SHOWN_BYTES])
    return value[:_MAX_SHOWN_BYTES] if isinstance(value, str) else value


def delete_retained(hub: int, options: dict[str, object]) -> Snapshot:
    """Delete the retained messages of a hub that match a filter. Yields to the event loop.

    Args:
        hub: the number of the hub.
        options: `filter`, a topic filter; "#" deletes all but those of topics that begin with `$`.

    Raises:
        ArgumentError: there is no such hub, it accepts no MQTT clients, or the filter is missing or invalid.
    """
    wanted = known(options, ("filter",)).get("filter")
    if not isinstance(wanted, str) or not wanted:
        raise ArgumentError('filter: a topic filter is needed, such as "house/+/temp"')
    devices, turn, count = devices_of(hub), Turn(), 0
    for number in devices.retained.delete(wanted):
        count += number
        turn.yield_if_due()
    log.info("%d retained messages of hub %d deleted by an operator: %s", count, hub, printable(wanted[:64]))
    return {"hub": hub, "filter": wanted, "deleted": count}
