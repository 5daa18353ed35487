"""Snapshots of a server for the API, the console and commands.

They are dicts and lists for JSON. Keys are stable, and keys of quantities contain the unit. Long lists are pages:
`{"items", "after", "total"}`, see `smqrt.operations.api_pages`. These functions run in a greenlet and
yield to the event loop.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import monotonic, time
from typing import Any

import gevent

import smqrt
from smqrt.apps.lua.applications import Application
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.session import MqttSession
from smqrt.broker.outbox import Drop, Outbox, QueuedMemory
from smqrt.broker.sessions import Session
from smqrt.broker.topics import Traffic
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.mesh import Mesh, open_meshes
from smqrt.cluster.link import Link
from smqrt.errors import ArgumentError
from smqrt.journal import writer
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import DiskThreads
from smqrt.operations.api_pages import LIMIT, Snapshot, T, check_limit, largest, page, paged, whole
from smqrt.operations.context import Parts, process_usage
from smqrt.operations.limit_usage import limit_usage
from smqrt.operations.logs import iso
from smqrt.operations.topics import text
from smqrt.settings.limits import snapshot as limit_states
from smqrt.smq import close_log
from smqrt.smq.close_log import Closed, explanation_of
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.transport.admission import open_connections
from smqrt.transport.unix_sockets import is_local_client
from smqrt.wire.cluster_packets import Refusal

# ---- Clusters (help: cluster)

_MAX_ROWS = 1024
"""The limit of links, addresses, hubs and channels: a cluster has at most 1023 nodes."""


def clusters() -> list[Snapshot]:
    """Return a row for each node of this process. Applications create further nodes with `smq.mtl`."""
    rows = []
    for mesh in list(open_meshes):
        node, now_s = mesh.node, mesh.node.clock_s()
        row: Snapshot = {
            "node": node.number,
            "fixed": node.is_fixed,
            "links": [_link(one, now_s) for one in links(mesh)[:_MAX_ROWS]],
            "links_lost": node.links_lost,
            "refused": {Refusal(code).name.lower(): count for code, count in sorted(node.refused.items()) if code},
            "addresses": [
                {
                    "address": one.address,
                    "state": "this node" if one.is_self else "linked" if one.up else "not linked",
                    "why": "" if one.up or one.is_self else one.why,
                }
                for one in mesh.dialers[:_MAX_ROWS]
            ],
            "missing": [
                {"to": one.to, "why": one.why, "for_s": round(now_s - one.since_s, 3)}
                for one in mesh.expected.missing()[:_MAX_ROWS]
            ],
            "hubs": [_clustered_hub(one) for one in list(node.members.values())[:_MAX_ROWS]],
            "channels": [
                {"channel": one.name.decode("utf-8", "replace"), "nodes": sorted(one.nodes()), **one.counts()}
                for one in list(node.channels.values())[:_MAX_ROWS]
            ],
        }
        rows.append(row)
    return rows


def links(mesh: Mesh) -> list[Link]:
    """Return the open links, ordered by the numbers of the other nodes."""
    return sorted(mesh.node.links.values(), key=lambda link: link.number)


def _link(link: Link, now_s: float) -> Snapshot:
    return {
        "node": link.number,
        "via": link.transport.via,
        "since_s": round(now_s - link.since_s, 3),
        "silent_s": round(now_s - link.heard_s, 3),
        "round_trip_ms": None if link.round_trip_s is None else round(link.round_trip_s * 1000, 3),
        "queued_bytes": link.transport.outbox.queued_bytes,
        "unacknowledged_bytes": link.unacked_bytes,
        "sent_bytes": link.sent_bytes,
        "received_bytes": link.transport.processed_bytes,
    }


def _clustered_hub(clustered: ClusteredBroker) -> Snapshot:
    broker: Any = clustered.broker  # a `GeventBroker`; the cluster declares it as a `Broker`
    return {
        "cluster": clustered.name,
        "hub": broker.number,
        "app": broker.app,
        "nodes": sorted(one.number for one in clustered.remotes),
        "joining": sorted(one.number for one in clustered.remotes if not one.synced),
        "peers": len(broker.sessions),
        "phantoms": len(clustered.phantoms),
        "interest": len(clustered.interest),
        "lost": {reason.name.lower(): broker.stats.drops[reason] for reason in (Drop.LINK_LOST, Drop.LINK_SLOW)},
    }


def clustered_hubs() -> Iterable[tuple[GeventBroker, ClusteredBroker]]:
    """Return the hubs of this process that are in a cluster."""
    return [(one, one.cluster) for one in all_brokers() if isinstance(one.cluster, ClusteredBroker)]


# ---- Pipeline queries, from the status files of their processes

log = logging.getLogger("smqrt.admin")

_STATUS_FOLDER, _STATUS_FILE = ".pipelines", "status.json"
_MAX_QUERIES, _MAX_STATUS_BYTES = 500, 1 << 16
_STATUS_TYPES: dict[str, Callable[[Any], object]] = {
    "name": str, "kind": str, "state": str, "batch": int, "batch_ms": int, "rows": int, "rows_per_s": float,
    "lag_rows": int, "lag_s": float, "published": int, "error": str, "warning": str, "trouble": str, "updated": float,
}  # fmt: skip
"""The keys of a status file with their types."""

_threads = DiskThreads("of the pipelines")


def queries(folders: Sequence[Path]) -> dict[Path, list[Snapshot]]:
    """Return the states of the queries of the applications in these folders. Blocks. Empty when the disk hangs."""
    if not folders:
        return {}
    try:
        return _threads.call(_read_statuses, list(folders))
    except TimeoutError as error:
        log.warning("the states of pipelines can't be read: %s", error)
        return {}


def _read_statuses(folders: list[Path]) -> dict[Path, list[Snapshot]]:
    """Read all status files, in a thread. Invalid files are skipped."""
    by_folder: dict[Path, list[Snapshot]] = {folder: [] for folder in folders}
    for folder, states in by_folder.items():
        paths: list[Path] = []
        with suppress(OSError):
            paths = sorted((folder / _STATUS_FOLDER).glob(f"*/{_STATUS_FILE}"))[:_MAX_QUERIES]
        for path in paths:
            # A query may be writing its file, and other programs may have written invalid files.
            with suppress(OSError, ValueError, TypeError, RecursionError):
                with path.open("rb") as file:
                    found = json.loads(file.read(_MAX_STATUS_BYTES))
                status = {name: kind(found[name]) for name, kind in _STATUS_TYPES.items() if name in found}
                if status:
                    states.append(status)
    return by_folder


# ---- Recent log records and traces

_LOG_PRECISION = "microseconds"
"""The precision of times in the log. Lines of several workers are ordered by these times."""


def log_rows(parts: Parts, limit: int = LIMIT) -> Snapshot:
    """Return a page of the last errors and warnings, the newest first, without a next page. See `traces`."""
    check_limit(limit)
    items = [
        {
            "number": one.number,
            "at": iso(one.at_s, _LOG_PRECISION),
            "level": one.level,
            "logger": one.logger,
            "text": one.text,
        }
        for one in islice(parts.log.newest_first(), limit)
    ]
    return {"items": items, "after": None, "total": parts.log.errors + parts.log.warnings}


def traces(parts: Parts, limit: int = LIMIT) -> list[Snapshot]:
    """Return the last trace lines of each application: `app`, its name, and `lines`.

    The last row, with None as the name, has the lines without an application: timers, events, greenlets.

    Args:
        parts: the server.
        limit: the number of lines of each application, 1 to 1000; the last 200 are kept.

    Raises:
        ArgumentError: the limit is out of range.
    """
    check_limit(limit)
    places: list[tuple[str | None, Path | None]] = [(one.name, one.path.resolve()) for one in parts.applications]
    rows: list[Snapshot] = []
    for name, folder in [*places, (None, None)]:
        lines = [{"at": iso(one.at_s, _LOG_PRECISION), "text": one.text} for one in parts.log.traces(folder)[-limit:]]
        rows.append({"app": name, "lines": lines})
    return rows


LATELY_S = 300.0
"""The period of values whose keys contain `lately`."""
_TOPICS_PER_TIME_CHECK = 5000
"""The number of topics between two checks of the time slice: 0.3 ms of work."""


class NotFoundError(ArgumentError):
    """The hub, client or application does not exist, or no longer exists."""


# ---- Server


def server(parts: Parts) -> Snapshot:
    """Return the state and the usage of the process."""
    health, usage, uptime_s = parts.health, process_usage(), monotonic() - parts.began_s
    obstacles = health.obstacles()
    brokers = all_brokers()
    return {
        "version": smqrt.__version__,
        "pid": usage.pid,
        "started": iso(time() - uptime_s),
        "uptime_s": round(uptime_s, 3),
        "phase": health.phase,
        "ready": not obstacles,
        "obstacles": obstacles,
        "cpu_s": usage.cpu_s,
        "memory_bytes": usage.memory_bytes,
        "open_files": usage.open_files,
        "open_files_limit": usage.open_files_limit,
        "loop_lag_s": round(parts.lag.last_s, 6),
        "loop_lag_worst_s": round(parts.lag.max_s, 6),
        "loop_lag_5s_s": round(parts.lag.max_of(5), 6),
        "connections": open_connections.open,
        "hubs": len(brokers),
        "peers": sum(len(one.sessions) for one in brokers),
        "queued_bytes": QueuedMemory.total_bytes,
        "lua_memory_bytes": parts.vm.memory_bytes(),
        "lua_activities": parts.vm.activities.blocked,
        "acme": parts.acme(),
        "log_errors": parts.log.errors,
        "log_warnings": parts.log.warnings,
        "log_errors_lately": parts.log.errors_since(time() - LATELY_S),
        "python": platform.python_version(),
        "gevent": gevent.__version__,
        "platform": sys.platform,
    }


def listeners(parts: Parts) -> list[Snapshot]:
    """Return the listeners."""
    return [
        {
            "name": name,
            "host": one.address[0],
            "port": one.address[1],
            "tls": parts.listeners.tls_snapshot(name),
            "loopback": one.is_unix or is_local_client(one.address[0]),
            "accepted": one.counts.accepted,
            "open": one.counts.open,
            "refused": one.counts.refused,
            "reassigned": one.counts.given,
            "given": one.counts.given,  # the former name, for one release
            "handshakes": one.handshakes[0],
            "handshakes_failed": one.handshakes[1],
        }
        for name, one in parts.listeners.items()
    ]


# ---- Hubs, clients and topics


def hubs(parts: Parts) -> list[Snapshot]:
    """Return the open hubs in the order of their creation."""
    return [hub(one) for one in all_brokers()]


def hub(broker: GeventBroker) -> Snapshot:
    """Return a hub with its counters."""
    stats, total = broker.stats, traffic(broker)
    return {
        "id": broker.number,
        "key": broker.key,
        "app": broker.app,
        "made_at": broker.made_at,
        "peers": len(broker.sessions),
        "topics": len(broker.topic_table.by_name),
        "subtopics": len(broker.subtopic_table.by_name),
        "names_bytes": broker.topic_table.names_bytes + broker.subtopic_table.names_bytes,
        "last_values": broker.last_values.count if broker.last_values else 0,
        "last_value_bytes": broker.last_values.size_bytes if broker.last_values else 0,
        "subscriptions": stats.subscriptions,
        "messages": total.messages,
        "arrived": total.arrived,
        "bytes": total.bytes,
        "copies": total.copies,
        "copied_bytes": total.copied_bytes,
        "connects": stats.connects,
        "refusals": stats.refusals,
        "denied": stats.denied,
        "closes": {reason.name.lower(): count for reason, count in stats.ends.items() if count},
        "drops": broker.drops(),
        "refused": broker.refused(),
        "queued_bytes": queued_bytes(broker),
        "journal": next((name for name, one in writer.opened.items() if one.broker is broker), None),
        "mqtt": None if broker.devices is None else mqtt(broker.devices),
    }


def mqtt(devices: Devices) -> Snapshot:
    """Return the counters of the MQTT clients of a hub."""
    return {
        "clients": len(devices.sessions) - len(devices.offline),
        "sessions": len(devices.sessions),
        "offline": len(devices.offline),
        "retained": len(devices.retained.by_name),
        "retained_bytes": devices.retained.size_bytes,
        "filters": len(devices.filters.by_text),
        "unnamed_topics": devices.unnamed_topics,
        "hidden_failures": devices.hidden_failures,
    }


def traffic(broker: GeventBroker) -> Traffic:
    """Return the traffic of a hub. Yields to the event loop while the topics are counted."""
    turn = Turn()
    # A copy, because other greenlets create and remove topics meanwhile.
    for number, topic in enumerate(list(broker.topic_table.by_key.values())):
        if not number % _TOPICS_PER_TIME_CHECK:
            turn.yield_if_due()
        topic.count()
    return broker.topic_table.traffic


def queued_bytes(broker: GeventBroker) -> int:
    """Return the bytes in the send queues of a hub."""
    return sum(one.outbox.queued_bytes for one in list(broker.sessions.values()))


def _sessions(broker: GeventBroker) -> dict[int, Session]:
    return broker.sessions  # type: ignore[return-value]  # all clients of a `GeventBroker` are `Session`s


def broker_of(number: int) -> GeventBroker:
    """Return the hub with a number. Raises NotFoundError."""
    for broker in all_brokers():
        if broker.number == number:
            return broker
    raise NotFoundError(f"hub: there is no hub {number}; /api/v1/hubs lists the hubs")


_PEER_SIZES: dict[str, Callable[[Session], float]] = {
    "dropped": lambda session: session.outbox.dropped,
    "queued_bytes": lambda session: session.outbox.queued_bytes,
    "subscriptions": lambda session: _subscriptions(session),
    "newest": lambda session: session.since_s or 0.0,
}


def peers(
    parts: Parts, hub: int | None = None, after: str | None = None, limit: int = LIMIT, search: str = "", sort: str = ""
) -> Snapshot:
    """Return a page of the clients, ordered by hub and ETID.

    Args:
        parts: the server.
        hub: only clients of this hub.
        after: the `after` of the previous page.
        limit: items on the page, 1 to 1000.
        search: only clients whose uid, info, address, user or ETID contains this text.
        sort: "dropped", "queued_bytes", "subscriptions" or "newest": the largest first, without a next page.

    Raises:
        ArgumentError: there is no such hub, or an argument is invalid.
    """
    brokers = all_brokers() if hub is None else [broker_of(hub)]
    sessions = [(broker.number, session) for broker in brokers for session in list(_sessions(broker).values())]
    needle = search.lower()

    def matches(entry: tuple[int, Session]) -> bool:
        session = entry[1]
        return (
            needle in text(session.uid).lower()
            or needle in str(session.etid)
            or needle in close_log.address_of(session.outbox)
            or needle in text(session.info).lower()
            or needle in close_log.user_of(session).lower()
        )

    wanted = matches if needle else None
    if sort:
        size = _size(sort, _PEER_SIZES)
        found = largest(sessions, lambda entry: size(entry[1]), limit, wanted)
    else:
        last = None if after is None else peer_id(after, "after")
        found = page(sessions, lambda entry: (entry[0], entry[1].etid), last, limit, wanted)
    return paged(found, lambda entry: peer(*entry), lambda key: f"{key[0]}.{key[1]}")


def peer_id(value: str, what: str = "id") -> tuple[int, int]:
    """Return hub and ETID of the id of a client, such as "1.3055123". Raises ArgumentError for an invalid id."""
    number, dot, etid = value.partition(".")
    if not dot or not (number + etid).isascii() or not (number + etid).isdigit() or len(value) > 32:
        raise ArgumentError(f"{what}: {value[:40]!r} is not the id of a client; an id is HUB.ETID, such as 1.3055123")
    return int(number), int(etid)


def session_of(value: str) -> Session:
    """Return the session of the client with an id. Raises NotFoundError."""
    number, etid = peer_id(value)
    session = _sessions(broker_of(number)).get(etid)
    if session is None:
        raise NotFoundError(f"id: there is no client {value}; it may have disconnected")
    return session


def peer(hub: int, session: Session) -> Snapshot:
    """Return a client with its counters; `mqtt` is None for SMQ clients."""
    outbox: Outbox = session.outbox
    connected_s = session.broker.clock() - (session.since_s or 0.0)
    received, sent = close_log.transferred(outbox)
    return {
        "id": f"{hub}.{session.etid}",
        "hub": hub,
        "etid": session.etid,
        "uid": text(session.uid),
        "info": text(session.info),
        "user": close_log.user_of(session),
        "address": close_log.address_of(outbox),
        "transport": close_log.transport_of(outbox),
        "connected_s": round(connected_s, 3),
        "since": iso(time() - connected_s),
        "subscriptions": _subscriptions(session),
        "names_made": session.names_made,
        "bytes_received": received,
        "bytes_sent": sent,
        "queued_bytes": outbox.queued_bytes,
        "dropped": outbox.dropped,
        "mqtt": _mqtt_client(session),
    }


def _device(session: Session) -> Device | None:
    """Return the session of an MQTT client; None for an SMQ client."""
    return session.device if isinstance(session, MqttSession) else None


def _subscriptions(session: Session) -> int:
    device = _device(session)
    return len(session.topics) if device is None else len(device.subscriptions)


def _mqtt_client(session: Session) -> Snapshot | None:
    device = _device(session)
    return None if device is None else mqtt_session(device)


def mqtt_session(device: Device) -> Snapshot:
    """Return the session of an MQTT client with its queues."""
    return {
        "client_id": device.client_id,
        "version": _MQTT_VERSIONS[device.version],
        "in_flight": len(device.in_flight),
        "waiting": len(device.waiting),
        "waiting_bytes": device.waiting_bytes,
        "lost": device.dropped,
        "expiry_s": device.expiry_s,
    }


_MQTT_VERSIONS = {3: "3.1", 4: "3.1.1", 5: "5"}


def subscriptions(value: str, limit: int = LIMIT) -> Snapshot:
    """Return a page of the topics, or MQTT filters, of a client. Errors: see `session_of` and `page`."""
    session = session_of(value)
    device = _device(session)
    names = [one.name or b"" for one in session.topics] if device is None else [*map(str.encode, device.subscriptions)]
    return paged(page(names, lambda one: one, None, limit), text, text)


# ---- Applications, journals, pipelines


def apps(parts: Parts) -> list[Snapshot]:
    """Return the applications, including those that failed or were stopped."""
    return [
        {
            "name": one.name,
            "uri": one.uri,
            "path": str(one.path),
            "about": one.about,
            "state": app_state(one),
            "error": one.error,
        }
        for one in parts.applications
    ]


def app_state(application: Application) -> str:
    """Return "changing", "running", "failed" or "stopped"."""
    if application.changing:
        return "changing"
    if application.running:
        return "running"
    return "stopped" if application.error is None else "failed"


def app_named(parts: Parts, name: str) -> Application:
    """Return the application with a name; "-" for the one at the root. Raises NotFoundError."""
    for application in parts.applications:
        if application.name == ("" if name == "-" else name):
            return application
    raise NotFoundError(f"name: there is no application {name!r}; /api/v1/apps lists the applications")


def journals(parts: Parts) -> list[Snapshot]:
    """Return the open journals with their counters (help: journal)."""
    return [
        {"name": name, "path": str(one.path), **one.stats(), "sync_s": round(one.sync_s, 6)}
        for name, one in list(writer.opened.items())
    ]


def pipelines(parts: Parts) -> list[Snapshot]:
    """Return the processes of pipelines with the states of their queries."""
    states = list(parts.pipelines())
    by_folder = queries([folder for folder, _ in states])
    return [{"path": str(folder), "state": state, "queries": by_folder.get(folder, [])} for folder, state in states]


# ---- Closed connections and limits


def closed(
    parts: Parts, after: str | None = None, limit: int = LIMIT, hub: int | None = None, reason: str = "", uid: str = ""
) -> Snapshot:
    """Return a page of the last closed connections, the newest first.

    Args:
        parts: the server.
        after: the `after` of the previous page.
        limit: items on the page, 1 to 1000.
        hub: only connections of this hub.
        reason: only connections with this close reason, such as "slow_consumer".
        uid: only connections of clients with this uid.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def wanted(one: Closed) -> bool:
        is_reason = not reason or one.reason.name.lower() == reason.lower()
        return is_reason and (hub is None or one.hub == hub) and (not uid or text(one.uid) == uid)

    def row(one: Closed) -> Snapshot:
        explanation = explanation_of(one.reason)
        return {
            "number": one.number,
            "at": iso(one.at_s),
            "connected_s": None if one.connected_s is None else round(one.connected_s, 3),
            **close_log.fields(one),
            "what": explanation.what,
            "remedy": explanation.remedy,
            "trouble": explanation.is_trouble,
        }

    # Keys are negative numbers: pages are in ascending order of their keys, and the newest connection comes first.
    before = None if after is None else whole("after", after)
    found = page(
        close_log.closes.newest_first(), lambda one: -one.number, None if before is None else -before, limit, wanted
    )
    return paged(found, row, lambda key: str(-key))


def limits(parts: Parts) -> list[Snapshot]:
    """Return the limits, with their use and the number of refusals of each; see `limit_usage`."""
    usage = limit_usage(parts)
    return [
        {
            "name": one.name,
            **usage(one.name),
            "rule": one.rule,
            "setting": one.setting,
            "reached": one.count,
            "last": one.last or None,
            "last_at": iso(one.last_s) if one.last_s else None,
        }
        for one in limit_states()
    ]


# ---- Arguments and pages


def _size(name: str, sizes: dict[str, Callable[[T], float]]) -> Callable[[T], float]:
    if name not in sizes:
        raise ArgumentError(f"sort: {name[:40]!r} is not one of {', '.join(sizes)}")
    return sizes[name]
