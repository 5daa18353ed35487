"""Metrics of a server in the text format of Prometheus (help: metrics).

`FAMILIES` is the table of all metrics. Each scrape reads their values from the counters of the server. Tests compare
the page of the manual and the dashboard with the table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

import smqrt
from smqrt.auth import service as identity
from smqrt.auth.identity import Method
from smqrt.auth.service import IdentityService, LoginFailure
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.outbox import QueuedMemory
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.cluster.link import Link
from smqrt.journal import writer
from smqrt.loop.scheduling import Turn
from smqrt.operations import snapshots
from smqrt.operations.context import BUCKETS_S, PHASES, Parts, process_usage
from smqrt.operations.snapshots import clustered_hubs, links
from smqrt.settings.limits import snapshot as limit_states
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.transport.admission import open_connections

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Samples of a metric: the values of the labels, and the value."""
MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_HUB, _CLUSTER = ("hub", "app"), ("hub", "app", "cluster")


class Scrape:
    """The state of a server that is read once for all metrics.

    Args:
        parts: the parts of the server.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.usage = process_usage()
        self.brokers = all_brokers()
        self.traffic = {broker.number: snapshots.traffic(broker) for broker in self.brokers}
        self.journals = {name: (journal, journal.stats()) for name, journal in list(writer.opened.items())}
        self.pipelines = snapshots.pipelines(parts)
        self.lua_memory_bytes = parts.vm.memory_bytes()

    def certificate_orders(self) -> list[Mapping[str, object]]:
        """Return the state of the certificate ordered by ACME; empty when ACME is off."""
        state = self.parts.acme()
        return [state] if state else []


class Family(NamedTuple):
    """One metric.

    Attributes:
        name: the name in Prometheus; the name of a counter ends in `_total`.
        labels: the names of the labels.
        help: the meaning.
        samples: returns the values with the values of their labels.
        kind: "counter", "gauge" or "histogram".
    """

    name: str
    labels: tuple[str, ...]
    help: str
    samples: Callable[[Scrape], Samples]
    kind: str


# ---- families by their labels


def _family(name: str, labels: tuple[str, ...], help: str, samples: Callable[[Scrape], Samples]) -> Family:
    return Family(name, labels, help, samples, "counter" if name.endswith("_total") else "gauge")


def _process(name: str, help: str, value: Callable[[Scrape], float]) -> Family:
    """Return a metric of the process, without labels."""
    return _family(name, (), help, lambda scrape: [((), value(scrape))])


def _listener(name: str, help: str, key: str) -> Family:
    """Return a metric of each listener: `key` of its snapshot."""

    def samples(scrape: Scrape) -> Samples:
        return [((str(one["name"]),), float(str(one[key]))) for one in snapshots.listeners(scrape.parts)]

    return _family(name, ("listener",), help, samples)


def _hub_labels(broker: GeventBroker) -> tuple[str, str]:
    return str(broker.number), broker.app


def _hub(name: str, help: str, value: Callable[[GeventBroker], float]) -> Family:
    """Return a metric of each hub."""
    return _family(name, _HUB, help, lambda scrape: [(_hub_labels(one), value(one)) for one in scrape.brokers])


def _mqtt(name: str, help: str, value: Callable[[Devices], float]) -> Family:
    """Return a metric of each hub that accepts MQTT clients."""

    def samples(scrape: Scrape) -> Samples:
        return [(_hub_labels(one), value(one.devices)) for one in scrape.brokers if one.devices is not None]

    return _family(name, _HUB, help, samples)


def _hub_traffic(name: str, help: str, key: str) -> Family:
    """Return a metric of each hub: an attribute of its `Traffic`, which is counted once for all metrics."""

    def samples(scrape: Scrape) -> Samples:
        return [(_hub_labels(one), getattr(scrape.traffic[one.number], key)) for one in scrape.brokers]

    return _family(name, _HUB, help, samples)


def _hub_reasons(name: str, label: str, help: str, counts: Callable[[GeventBroker], dict[str, int]]) -> Family:
    """Return a metric of each hub and reason."""

    def samples(scrape: Scrape) -> Samples:
        return [((*_hub_labels(one), key), count) for one in scrape.brokers for key, count in counts(one).items()]

    return _family(name, (*_HUB, label), help, samples)


def _clustered(name: str, help: str, value: Callable[[ClusteredBroker], float]) -> Family:
    """Return a metric of each hub in a cluster."""

    def samples(scrape: Scrape) -> Samples:
        return [((*_hub_labels(broker), clustered.name), value(clustered)) for broker, clustered in clustered_hubs()]

    return _family(name, _CLUSTER, help, samples)


def _link(name: str, help: str, value: Callable[[Link], float]) -> Family:
    """Return a metric of each link to another node."""

    def samples(scrape: Scrape) -> Samples:
        return [((str(mesh.node.number), str(one.number)), value(one)) for mesh in open_meshes for one in links(mesh)]

    return _family(name, ("node", "peer"), help, samples)


def _journal(name: str, help: str, key: str) -> Family:
    """Return a metric of each journal: `key` of its statistics."""

    def samples(scrape: Scrape) -> Samples:
        return [((journal,), stats[key]) for journal, (_, stats) in scrape.journals.items()]

    return _family(name, ("journal",), help, samples)


def _garbage(name: str, help: str, key: str) -> Family:
    """Return a metric of each generation of Python's garbage collector."""

    def samples(scrape: Scrape) -> Samples:
        return [((str(generation),), stats[key]) for generation, stats in enumerate(gc.get_stats())]

    return _family(name, ("generation",), help, samples)


def _identity(name: str, labels: tuple[str, ...], help: str, samples: Callable[[IdentityService], Samples]) -> Family:
    """Return a metric of the identity service, without values when the server has none."""

    def of_service(scrape: Scrape) -> Samples:
        return samples(service) if (service := identity.server_identity_service()) is not None else ()

    return _family(name, labels, help, of_service)


def _state_counts(name: str, help: str, states: tuple[str, ...], current: Callable[[Scrape], list[object]]) -> Family:
    """Return a metric of each state: how often `current` returns it."""

    def samples(scrape: Scrape) -> Samples:
        found = current(scrape)
        return [((state,), found.count(state)) for state in states]

    return _family(name, ("state",), help, samples)


def _queries(scrape: Scrape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the application and the state of each pipeline query."""
    for one in scrape.pipelines:
        queries: Any = one["queries"]
        for query in queries:
            yield Path(str(one["path"])).name, query


def _query(name: str, help: str, key: str) -> Family:
    """Return a metric of each pipeline query."""

    def samples(scrape: Scrape) -> Samples:
        return [((app, query.get("name", "")), query.get(key, 0)) for app, query in _queries(scrape)]

    return _family(name, ("app", "query"), help, samples)


# ---- the table

FAMILIES = (
    _family("smqrt_info", ("version",), "1, with the version as a label.", lambda _: [((smqrt.__version__,), 1)]),
    _process("smqrt_ready", "1 when /readyz answers 200.", lambda scrape: not scrape.parts.health.obstacles()),
    _family(
        "smqrt_phase",
        ("phase",),
        "1 for the current phase of the server.",
        lambda scrape: [((one,), one == scrape.parts.health.phase) for one in PHASES],
    ),
    # The process: the names that all client libraries of Prometheus use.
    _process("process_cpu_seconds_total", "CPU time of all threads of the process.", lambda scrape: scrape.usage.cpu_s),
    _process("process_resident_memory_bytes", "Resident memory.", lambda scrape: scrape.usage.memory_bytes),
    _process("process_virtual_memory_bytes", "Virtual memory.", lambda scrape: scrape.usage.virtual_bytes),
    _process("process_threads", "Threads of the process.", lambda scrape: scrape.usage.threads),
    _process("process_open_fds", "Open file descriptors.", lambda scrape: scrape.usage.open_files),
    _process("process_max_fds", "Limit of open file descriptors.", lambda scrape: scrape.usage.open_files_limit),
    _process(
        "process_start_time_seconds",
        "Start time of the process, in Unix seconds.",
        lambda scrape: scrape.usage.started_s,
    ),
    _garbage("python_gc_collections_total", "Runs of Python's garbage collector.", "collections"),
    _garbage("python_gc_objects_collected_total", "Objects freed by Python's garbage collector.", "collected"),
    # The event loop.
    Family(
        "smqrt_loop_lag_seconds",
        (),
        "Delay of a timer of the event loop, measured 20 times a second.",
        lambda _: (),  # `Metrics.lines` makes the histogram
        "histogram",
    ),
    _process(
        "smqrt_loop_lag_max_seconds",
        "Maximum delay in the last minute: the time of the longest turn of the loop.",
        lambda scrape: scrape.parts.lag.max_s,
    ),
    # Listeners.
    _process("smqrt_connections", "Open connections.", lambda _: open_connections.open),
    _listener("smqrt_listener_accepted_total", "Accepted connections.", "accepted"),
    _listener("smqrt_listener_connections", "Open connections of the listener.", "open"),
    _listener("smqrt_listener_refused_total", "Connections refused because a limit was reached.", "refused"),
    _listener("smqrt_listener_reassigned_total", "Connections passed to a worker with fewer connections.", "given"),
    _listener("smqrt_listener_handshakes_total", "Completed TLS handshakes.", "handshakes"),
    _listener(
        "smqrt_listener_handshakes_failed_total", "TLS handshakes that failed or timed out.", "handshakes_failed"
    ),
    _family(
        "smqrt_certificate_expiry_timestamp_seconds",
        ("listener",),
        "Expiry of the certificate of the listener, in Unix seconds.",
        lambda scrape: [((name,), at_s) for name, at_s in scrape.parts.listeners.expiries().items()],
    ),
    _family(
        "smqrt_certificate_reload_failures_total",
        ("listener",),
        "Failed reloads of certificate files.",
        lambda scrape: [((name,), count) for name, (count, _) in scrape.parts.listeners.reload_failures().items()],
    ),
    _family(
        "smqrt_certificate_files_broken",
        ("listener",),
        "1 while the certificate files are invalid; the previous certificates stay in use.",
        lambda scrape: [((name,), broken) for name, (_, broken) in scrape.parts.listeners.reload_failures().items()],
    ),
    _family(
        "smqrt_acme_orders_total",
        ("outcome",),
        "ACME certificate orders, by outcome: ordered or failed.",
        lambda scrape: [
            ((outcome,), float(str(order[outcome])))
            for order in scrape.certificate_orders()
            for outcome in ("ordered", "failed")
        ],
    ),
    _family(
        "smqrt_acme_failing",
        (),
        "1 if the last ACME order failed.",
        lambda scrape: [((), order["fault"] is not None) for order in scrape.certificate_orders()],
    ),
    _family(
        "smqrt_acme_next_order_timestamp_seconds",
        (),
        "Time of the next ACME order, in Unix seconds.",
        lambda scrape: [((), float(str(order["next_s"]))) for order in scrape.certificate_orders()],
    ),
    # Users and rules.
    _identity(
        "smqrt_logins_total",
        ("method",),
        "Accepted clients of hubs, by method of authentication.",
        lambda service: [((one.value,), service.logins[one]) for one in Method],
    ),
    _identity(
        "smqrt_logins_refused_total",
        ("reason",),
        "Failed logins at hubs and by users of the users file.",
        lambda service: [((one.name.lower(),), service.rejections[one]) for one in LoginFailure],
    ),
    _identity(
        "smqrt_acl_denied_total",
        ("action",),
        "Actions denied by the access control list.",
        lambda service: [
            ((action.value,), count)
            for action, count in (service.rights.denied if service.rights is not None else {}).items()
        ],
    ),
    _identity(
        "smqrt_auth_files_broken",
        (),
        "1 while the users file, the access control list or the keys are invalid; the previous ones stay in use.",
        lambda service: [((), service.reload_failed)],
    ),
    # Hubs.
    _hub("smqrt_hub_peers", "Connected clients.", lambda hub: len(hub.sessions)),
    _hub("smqrt_hub_topics", "Named topics.", lambda hub: len(hub.topic_table.by_name)),
    _hub("smqrt_hub_subtopics", "Sub-topics.", lambda hub: len(hub.subtopic_table.by_name)),
    _hub(
        "smqrt_hub_names_bytes",
        "Bytes of the names of topics and sub-topics.",
        lambda hub: hub.topic_table.names_bytes + hub.subtopic_table.names_bytes,
    ),
    _hub(
        "smqrt_hub_last_values",
        "Last values kept for new subscribers.",
        lambda hub: hub.last_values.count if hub.last_values else 0,
    ),
    _hub(
        "smqrt_hub_last_value_bytes",
        "Memory of last values, in bytes.",
        lambda hub: hub.last_values.size_bytes if hub.last_values else 0,
    ),
    _hub("smqrt_hub_subscriptions", "Subscriptions to named topics.", lambda hub: hub.stats.subscriptions),
    _mqtt(
        "smqrt_mqtt_sessions",
        "Sessions of MQTT clients, with and without a connection.",
        lambda devices: len(devices.sessions),
    ),
    _mqtt(
        "smqrt_mqtt_sessions_offline",
        "Sessions of MQTT clients without a connection.",
        lambda devices: len(devices.offline),
    ),
    _mqtt("smqrt_mqtt_retained", "Retained messages of MQTT clients.", lambda devices: len(devices.retained.by_name)),
    _mqtt(
        "smqrt_mqtt_retained_bytes",
        "Memory of retained messages, in bytes.",
        lambda devices: devices.retained.size_bytes,
    ),
    _mqtt(
        "smqrt_mqtt_filters", "Different topic filters of MQTT clients.", lambda devices: len(devices.filters.by_text)
    ),
    _mqtt(
        "smqrt_mqtt_held",
        "Packets to MQTT clients that wait until their changes are saved.",
        lambda devices: len(devices.ledger.held) if devices.ledger else 0,
    ),
    _mqtt(
        "smqrt_mqtt_kept_bytes",
        "Messages with QoS 1 and 2 that other nodes have not acknowledged, with their memory, approximately.",
        lambda devices: devices.broker.cluster.mqtt.kept_bytes if devices.broker.cluster else 0,
    ),
    _mqtt(
        "smqrt_mqtt_commits_total",
        "Commits of MQTT sessions and retained messages.",
        lambda devices: devices.ledger.commits if devices.ledger else 0,
    ),
    _mqtt(
        "smqrt_mqtt_commit_failures_total",
        "Failed commits of MQTT sessions and retained messages; each is repeated.",
        lambda devices: devices.ledger.failures if devices.ledger else 0,
    ),
    _mqtt(
        "smqrt_mqtt_unnamed_topics_total",
        "Topics so far that MQTT can't name, and that its clients do not see.",
        lambda devices: devices.unnamed_topics,
    ),
    _mqtt(
        "smqrt_mqtt_hidden_failures_total",
        "Messages of MQTT 3.1 and 3.1.1 clients that were acknowledged, but not accepted.",
        lambda devices: devices.hidden_failures,
    ),
    _hub_traffic(
        "smqrt_hub_messages_total", "Messages published here by clients and the server, each counted once.", "messages"
    ),
    _hub_traffic(
        "smqrt_hub_remote_messages_total",
        "Messages from other nodes or workers; their node or worker counts them as published.",
        "arrived",
    ),
    _hub_traffic("smqrt_hub_bytes_total", "Bytes of published messages, including SMQ headers.", "bytes"),
    _hub_traffic(
        "smqrt_hub_copies_total", "Copies of messages for subscribers, including those dropped later.", "copies"
    ),
    _hub_traffic("smqrt_hub_copied_bytes_total", "Bytes of copies of messages.", "copied_bytes"),
    _hub("smqrt_hub_connects_total", "Accepted clients.", lambda hub: hub.stats.connects),
    _hub("smqrt_hub_refusals_total", "Rejected clients.", lambda hub: hub.stats.refusals),
    _hub(
        "smqrt_hub_denied_total",
        "Topics and sub-topics that an application denied to clients.",
        lambda hub: hub.stats.denied,
    ),
    _hub_reasons(
        "smqrt_hub_closes_total",
        "reason",
        "Closed connections, by close reason; see troubleshooting.",
        lambda hub: {reason.name.lower(): count for reason, count in hub.stats.ends.items()},
    ),
    _hub_reasons(
        "smqrt_hub_dropped_messages_total", "reason", "Dropped copies of messages, by reason.", lambda hub: hub.drops()
    ),
    _hub_reasons(
        "smqrt_hub_limit_reached_total", "limit", "How often a limit of the hub was reached.", lambda hub: hub.refused()
    ),
    _hub("smqrt_hub_queued_bytes", "Bytes in the send queues of the hub.", snapshots.queued_bytes),
    _process("smqrt_queued_bytes", "Bytes in the send queues of all hubs.", lambda _: QueuedMemory.total_bytes),
    _process("smqrt_queued_limit_bytes", "Limit of bytes in the send queues.", lambda _: QueuedMemory.limit_bytes),
    _family(
        "smqrt_limit_reached_total",
        ("limit",),
        "How often a limit of the server was reached.",
        lambda _: [((one.name,), one.count) for one in limit_states()],
    ),
    # Clusters.
    _clustered(
        "smqrt_cluster_nodes",
        "Other nodes in the cluster of the hub.",
        lambda clustered: sum(remote.synced for remote in clustered.remotes),
    ),
    _clustered("smqrt_cluster_phantoms", "Clients of other nodes.", lambda clustered: len(clustered.phantoms)),
    _clustered(
        "smqrt_cluster_interest", "Topics with subscribers at other nodes.", lambda clustered: len(clustered.interest)
    ),
    _link(
        "smqrt_cluster_link_round_trip_seconds",
        "Round-trip time of the last ping to another node.",
        lambda link: link.round_trip_s or 0.0,
    ),
    _link(
        "smqrt_cluster_link_queued_bytes",
        "Bytes in the send queue of another node.",
        lambda link: link.transport.outbox.queued_bytes,
    ),
    _link("smqrt_cluster_link_sent_bytes_total", "Bytes sent over a link.", lambda link: link.sent_bytes),
    _link(
        "smqrt_cluster_link_received_bytes_total",
        "Bytes received over a link.",
        lambda link: link.transport.processed_bytes,
    ),
    _family(
        "smqrt_cluster_links_lost_total",
        ("node",),
        "Lost links to other nodes.",
        lambda _: [((str(one.node.number),), one.node.links_lost) for one in open_meshes],
    ),
    _family(
        "smqrt_cluster_links_missing",
        ("node",),
        "Expected links to other nodes that are not open.",
        lambda _: [((str(one.node.number),), len(one.expected.missing())) for one in open_meshes],
    ),
    # Journals.
    _journal("smqrt_journal_rows_total", "Recorded messages.", "rows"),
    _journal("smqrt_journal_bytes_total", "Bytes written.", "bytes"),
    _journal("smqrt_journal_syncs_total", "Calls of fsync.", "syncs"),
    _family(
        "smqrt_journal_sync_seconds_total",
        ("journal",),
        "Total time of calls of fsync.",
        lambda scrape: [((name,), journal.sync_s) for name, (journal, _) in scrape.journals.items()],
    ),
    _journal("smqrt_journal_unsynced_bytes", "Bytes not yet confirmed by the disk.", "unsynced_bytes"),
    _journal("smqrt_journal_lag_seconds", "Waiting time of the oldest job for the disk.", "disk_age_s"),
    _journal("smqrt_journal_stalls_total", "How often the disk accepted no data.", "stalls"),
    _journal("smqrt_journal_alarm", "1 while publishers wait for the disk, or it fails or is slow.", "alarm"),
    _journal("smqrt_journal_readers_stale", "Pipelines that have read nothing for a day.", "readers_stale"),
    # Applications.
    _state_counts(
        "smqrt_applications",
        "Applications, by state.",
        ("running", "failed", "stopped", "changing"),
        lambda scrape: [snapshots.app_state(one) for one in scrape.parts.applications],
    ),
    _state_counts(
        "smqrt_pipeline_processes",
        "Processes that run pipelines, by state.",
        ("running", "waiting", "ended", "stopped"),
        lambda scrape: [one["state"] for one in scrape.pipelines],
    ),
    _family(
        "smqrt_pipeline_query_state",
        ("app", "query", "state"),
        "1 for the current state of a pipeline query.",
        lambda scrape: [((app, query.get("name", ""), query.get("state", "")), 1) for app, query in _queries(scrape)],
    ),
    _query("smqrt_pipeline_query_lag_seconds", "Age of the oldest row that a query has not read.", "lag_s"),
    _query("smqrt_pipeline_query_lag_rows", "Rows that a query has not read.", "lag_rows"),
    _process(
        "smqrt_lua_memory_bytes",
        "Memory of the Lua runtime, including garbage.",
        lambda scrape: scrape.lua_memory_bytes,
    ),
    _process("smqrt_lua_activities", "Blocked Lua activities.", lambda scrape: scrape.parts.vm.activities.blocked),
)


def manual() -> str:
    """Return the table of the manual in Markdown."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for row in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


FORMER_NAMES = {
    "smqrt_hub_remote_messages_total": "smqrt_hub_arrived_messages_total",
    "smqrt_listener_reassigned_total": "smqrt_listener_given_total",
    "smqrt_loop_lag_max_seconds": "smqrt_loop_lag_worst_seconds",
}
"""The current and the former names of renamed metrics. For one release both are exported."""


class Metrics:
    """The metrics of a server.

    Args:
        parts: the parts of the server.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def lines(self) -> Iterator[bytes]:
        """Yield all metrics in the text format of Prometheus, one family at a time. Other greenlets run in between."""
        scrape, turn = Scrape(self._parts), Turn()
        for row in FAMILIES:
            turn.yield_if_due()
            if row.kind == "histogram":
                lag, total, buckets = self._parts.lag, 0, []
                for max_s, count in zip([*map(str, BUCKETS_S), "+Inf"], lag.buckets, strict=True):
                    total += count  # a bucket of Prometheus includes the smaller ones
                    buckets.append((max_s, float(total)))
                histogram = HistogramMetricFamily(row.name, row.help)
                histogram.add_metric([], buckets, lag.total_s)
                yield generate_latest(_FamilyRegistry(histogram))
                continue
            yield generate_latest(_FamilyRegistry(_samples_family(row, scrape)))
            if former := FORMER_NAMES.get(row.name):
                renamed = row._replace(name=former, help=f"Former name of {row.name}. {row.help}")
                yield generate_latest(_FamilyRegistry(_samples_family(renamed, scrape)))


def _samples_family(row: Family, scrape: Scrape) -> CounterMetricFamily | GaugeMetricFamily:
    family: CounterMetricFamily | GaugeMetricFamily
    if row.kind == "counter":
        family = CounterMetricFamily(row.name.removesuffix("_total"), row.help, labels=row.labels)
    else:
        family = GaugeMetricFamily(row.name, row.help, labels=row.labels)
    for labels, value in row.samples(scrape):
        family.add_metric(labels, value)
    return family


class _FamilyRegistry:
    """A registry of one family."""

    def __init__(self, family: MetricFamily) -> None:
        self._family = family

    def collect(self) -> list[MetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        return [self._family]
