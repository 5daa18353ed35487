"""Names, bounds and current use of the limits.

A limit has a bound when it is a quantity; `hosts`, for example, has none. Its use is the present value where reading it
is cheap: limits of hubs show the fullest hub, limits of addresses the address with the most. The use of limits of
clients has to be searched among all clients: `client_usage` does it, on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from smqrt.broker.mqtt.device import Device
from smqrt.broker.sessions import Session
from smqrt.loop import threads
from smqrt.loop.scheduling import Turn
from smqrt.operations import access_log, otel
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.context import Parts
from smqrt.settings.limits import UNLIMITED, current_limits, current_mqtt
from smqrt.smq import data_path
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.transport.admission import open_connections

TITLES = {
    "access_log_lines": "waiting lines of the access log",
    "app_requests": "concurrent requests of an application",
    "app_timers": "active timers of an application",
    "bodies": "memory of request bodies",
    "calls_of_threads": "waiting calls of threads (publish_threadsafe)",
    "client_name_bytes": "bytes of new names of a client",
    "client_names": "new names of a client",
    "client_observes": "observed topics of a client",
    "client_subscriptions": "subscriptions of a client",
    "cluster_filters": "filters of a node",
    "cluster_forged": "messages through NATS with an invalid signature",
    "cluster_kept": "MQTT messages kept for lost nodes",
    "cluster_strangers": "cluster connections without a proof of the password",
    "connect_rate": "new connections per second",
    "connect_rate_per_address": "new connections per second of an address",
    "connections": "open connections",
    "connections_per_address": "open connections of an address",
    "connections_per_user": "SMQ connections of a user",
    "disk_jobs": "waiting operations of a disk",
    "handshakes": "unfinished handshakes of an address",
    "hosts": "host names of the server",
    "hub_origins": "origins that may connect to a hub",
    "idle": "seconds without data from a client",
    "last_value_bytes": "bytes of the last values of a hub",
    "last_values": "last values of a hub",
    "last_values_of_topic": "last values of a topic",
    "listener_connections": "open connections of a listener",
    "logins": "failed logins",
    "lua_memory": "memory of Lua",
    "message_bytes": "bytes of a message or name",
    "mqtt_filters": "topic filters of an MQTT client",
    "mqtt_queued": "waiting messages of an MQTT session",
    "mqtt_retained": "retained messages of a hub",
    "mqtt_retained_bytes": "bytes of the retained messages of a hub",
    "mqtt_sessions": "MQTT sessions of a hub without a connection",
    "mqtt_take_overs": "take-overs of one MQTT client identifier",
    "name_bytes": "bytes of the names of a hub",
    "names": "topics of a hub, also its sub-topics",
    "origins": "origins that may use the server",
    "otel_spans": "waiting spans for the collector",
    "passwords_waiting": "waiting password checks",
    "proxy_protocol": "connections without a PROXY header",
    "publish_bytes": "published bytes per second of a client",
    "publish_rate": "published messages per second of a client",
    "sessions": "HTTP sessions",
    "sessions_per_address": "HTTP sessions of an address",
    "tls_handshake": "seconds of a TLS handshake",
    "traces": "running traces",
    "uploads": "uploads in progress of an uploader",
    "worker_changes": "waiting changes for other workers",
}
"""The limits as noun phrases, by name."""

_BYTES = frozenset(
    ("bodies", "client_name_bytes", "last_value_bytes", "lua_memory", "message_bytes", "mqtt_retained_bytes")
) | {"name_bytes", "publish_bytes"}
"""The limits whose bound and use are bytes."""

Use = tuple[float | None, float | str | None]
"""The use, None if it is not known, and the bound: a number, "unlimited", or None for a limit that is no quantity."""


class _HubLimit(NamedTuple):
    """A limit of each hub: its use and its bound."""

    used: Callable[[GeventBroker], int]
    bound: Callable[[GeventBroker], int]


_OF_HUBS = {
    "names": _HubLimit(
        lambda broker: max(len(broker.topic_table.by_name), len(broker.subtopic_table.by_name)),
        lambda broker: broker.limits.names,
    ),
    "name_bytes": _HubLimit(
        lambda broker: max(broker.topic_table.names_bytes, broker.subtopic_table.names_bytes),
        lambda broker: broker.limits.names_bytes,
    ),
}
_OF_LAST_VALUES = {
    "last_values": _HubLimit(
        lambda broker: broker.last_values.count if broker.last_values else 0,
        lambda broker: broker.last_values.limits.values if broker.last_values else 0,
    ),
    "last_value_bytes": _HubLimit(
        lambda broker: broker.last_values.size_bytes if broker.last_values else 0,
        lambda broker: broker.last_values.limits.size_bytes if broker.last_values else 0,
    ),
}
_OF_MQTT = {
    "mqtt_retained": _HubLimit(
        lambda broker: len(broker.devices.retained.by_name), lambda broker: broker.devices.limits.retained
    ),
    "mqtt_retained_bytes": _HubLimit(
        lambda broker: broker.devices.retained.size_bytes, lambda broker: broker.devices.limits.retained_bytes
    ),
    "mqtt_sessions": _HubLimit(
        lambda broker: len(broker.devices.offline), lambda broker: broker.devices.limits.sessions
    ),
}


def limit_usage(parts: Parts) -> Callable[[str], Snapshot]:
    """Return a function that returns `title`, `unit`, `used` and `bound` of the limit with a name.

    `unit` is "bytes", or empty. See `Use` for the others.

    Args:
        parts: the parts of this process.
    """
    uses = {**_settings(), **_of_server(parts)}
    brokers = all_brokers()
    groups = (
        (_OF_HUBS, brokers),
        (_OF_LAST_VALUES, [one for one in brokers if one.last_values is not None]),
        (_OF_MQTT, [one for one in brokers if one.devices is not None]),
    )
    for limits, concerned in groups:
        for name, limit in limits.items():
            if concerned:
                fullest = max(concerned, key=limit.used)
                uses[name] = limit.used(fullest), limit.bound(fullest)

    def usage(name: str) -> Snapshot:
        used, bound = uses.get(name, (None, None))
        unit = "bytes" if name in _BYTES else ""
        return {"title": TITLES.get(name, name.replace("_", " ")), "unit": unit, "used": used, "bound": bound}

    return usage


def _settings() -> dict[str, Use]:
    """Return the bounds that are settings; their use is not known."""
    limits, mqtt = current_limits(), current_mqtt()
    bounds: dict[str, float | None] = {
        "app_requests": limits.app_requests,
        "app_timers": limits.app_timers,
        "client_name_bytes": limits.client_names_bytes,
        "client_names": limits.client_names,
        "client_observes": limits.observes,
        "client_subscriptions": limits.subscriptions,
        "connect_rate": limits.connect_rate,
        "connect_rate_per_address": limits.connect_rate_per_address,
        "connections_per_user": limits.connections_per_user,
        "handshakes": limits.handshakes_per_address,
        "idle": limits.idle_s,
        "message_bytes": limits.message_bytes,
        "mqtt_filters": mqtt.filters,
        "mqtt_queued": mqtt.queued_messages,
        "mqtt_retained": mqtt.retained,
        "mqtt_retained_bytes": mqtt.retained_bytes,
        "mqtt_sessions": mqtt.sessions,
        "name_bytes": limits.names_bytes,
        "names": limits.names,
        "publish_bytes": limits.publish_bytes_per_s,
        "publish_rate": limits.publish_rate,
    }
    return {name: (None, UNLIMITED if bound is None else bound) for name, bound in bounds.items()}


def _of_server(parts: Parts) -> dict[str, Use]:
    """Return the limits of this process, and the fixed ones."""
    lua_mib = current_limits().lua_memory_mib
    bodies = parts.http.bodies
    return {
        "access_log_lines": (None, access_log.MAX_QUEUED_LINES),
        "bodies": (bodies.held_bytes, bodies.limit_bytes),
        "connections": (open_connections.open, open_connections.maximum),
        "connections_per_address": (open_connections.most_of_an_address, open_connections.per_address or UNLIMITED),
        "disk_jobs": (None, threads.MAX_WAITING),
        "lua_memory": (parts.vm.memory_bytes(), UNLIMITED if lua_mib is None else lua_mib << 20),
        "otel_spans": (None, otel.MAX_QUEUED_SPANS),
    }


# ---- The use of limits of clients

_CLIENTS_PER_TIME_CHECK = 500
"""The number of clients between two checks of the time slice: 0.5 ms of work."""

_OF_SESSIONS: dict[str, tuple[Callable[[Session], int], Callable[[GeventBroker], float | None]]] = {
    "client_names": (lambda session: session.names_made, lambda broker: broker.limits.client_names),
    "client_name_bytes": (lambda session: session.names_made_bytes, lambda broker: broker.limits.client_names_bytes),
    "client_subscriptions": (lambda session: len(session.topics), lambda broker: broker.limits.subscriptions),
    "client_observes": (lambda session: len(session.observed or ()), lambda broker: broker.limits.observes),
}
_OF_DEVICES: dict[str, tuple[Callable[[Device], int], Callable[[GeventBroker], float | None]]] = {
    "mqtt_filters": (lambda device: len(device.subscriptions), lambda broker: broker.devices.limits.filters),
    "mqtt_queued": (lambda device: len(device.waiting), lambda broker: broker.devices.limits.queued_messages),
}


def client_usage() -> list[Snapshot]:
    """Return `name`, `used` and `bound` of the limits of clients, users and addresses: those of the fullest one.

    Yields to the event loop while it looks at all clients.
    """
    addresses = max(data_path.unfinished.values(), default=0)
    uses: dict[str, tuple[int, float | None]] = {"handshakes": (addresses, data_path.limits.handshakes_per_address)}

    def add(name: str, used: int, bound: float | None) -> None:
        if name not in uses or used > uses[name][0]:
            uses[name] = used, bound

    for broker in all_brokers():
        for name, used in _highest(broker.sessions.values(), _OF_SESSIONS).items():
            add(name, used, _OF_SESSIONS[name][1](broker))
        add("connections_per_user", max(broker.users.values(), default=0), broker.limits.connections_per_user)
        if broker.devices is not None:
            for name, used in _highest(broker.devices.sessions.values(), _OF_DEVICES).items():
                add(name, used, _OF_DEVICES[name][1](broker))
    return [
        {"name": name, "used": used, "bound": UNLIMITED if bound is None else bound}
        for name, (used, bound) in uses.items()
    ]


def _highest(clients: Iterable[Any], limits: dict[str, tuple[Callable[[Any], int], Any]]) -> dict[str, int]:
    """Return the highest use of each limit. Clients that connect meanwhile are not looked at."""
    turn, all_clients = Turn(), list(clients)
    highest = dict.fromkeys(limits, 0)
    for first in range(0, len(all_clients), _CLIENTS_PER_TIME_CHECK):
        turn.yield_if_due()
        some = all_clients[first : first + _CLIENTS_PER_TIME_CHECK]
        for name, (used, _) in limits.items():
            highest[name] = max(highest[name], max(map(used, some)))
    return highest
