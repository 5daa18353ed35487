"""The metrics of a server for Prometheus, read from its counters when they are asked for (help: metrics)."""

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
from smqrt.broker.outbox import QueuedMemory
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.cluster.link import Link
from smqrt.journal import writer
from smqrt.loop.scheduling import Turn
from smqrt.operations import health, snapshots
from smqrt.operations.context import Parts
from smqrt.operations.health import BUCKETS_S, PHASES
from smqrt.operations.snapshots import links, members
from smqrt.settings.limit_register import snapshot as limit_states
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.transport.admission import open_connections

# ---- The table of all metrics (help: metrics). Tests compare the page of the manual and the dashboard with it.

Samples = Iterable[tuple[tuple[str, ...], float]]


class Family(NamedTuple):
    """One metric.

    Attributes:
        kind: "counter", "gauge" or "histogram".
        name: as Prometheus has it; that of a counter ends in `_total`.
        labels: their names.
        help: what it tells.
        samples: gives the values with their labels.
    """

    kind: str
    name: str
    labels: tuple[str, ...]
    help: str
    samples: Callable[[Scrape], Samples]


class Scrape:
    """What is looked at once for all metrics.

    Args:
        parts: the server.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.usage = health.usage()
        self.brokers = all_brokers()
        self.traffic = {one.number: snapshots.traffic(one) for one in self.brokers}
        self.journals = {name: (one, one.stats()) for name, one in list(writer.opened.items())}
        self.pipelines = snapshots.pipelines(parts)
        self.lua_memory_bytes = parts.vm.memory_bytes()

    def hubs(self, value: Callable[[GeventBroker], float]) -> Samples:
        """Returns a value for each hub."""
        return [(_hub_labels(one), value(one)) for one in self.brokers]

    def by_reason(self, values: Callable[[GeventBroker], dict[str, int]]) -> Samples:
        """Returns values for each hub and reason."""
        return [((*_hub_labels(one), reason), count) for one in self.brokers for reason, count in values(one).items()]

    def listeners(self, key: str) -> Samples:
        """Returns what is said of each listener under `key`."""
        return [((str(one["name"]),), float(str(one[key]))) for one in snapshots.listeners(self.parts)]

    def acme(self) -> list[Mapping[str, object]]:
        """Returns what is told of the certificate that the server orders; nothing when it orders none."""
        told = self.parts.acme()
        return [told] if told else []

    def journal(self, key: str) -> Samples:
        """Returns a counter of each journal."""
        return [((name,), stats[key]) for name, (_, stats) in self.journals.items()]


def _hub_labels(broker: GeventBroker) -> tuple[str, str]:
    return str(broker.number), broker.app


_LINK = ("node", "peer")


def _links(value: Callable[[Link], float]) -> Callable[[Scrape], Samples]:
    return lambda _: [
        ((str(mesh.node.number), str(link.number)), value(link)) for mesh in open_meshes for link in links(mesh)
    ]


def _members(value: Callable[[ClusteredBroker], float]) -> Callable[[Scrape], Samples]:
    return lambda _: [((*_hub_labels(broker), member.name), value(member)) for broker, member in members()]


def _one(value: Callable[[Scrape], float]) -> Callable[[Scrape], Samples]:
    return lambda scrape: [((), value(scrape))]


def _closes(broker: GeventBroker) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in broker.stats.ends.items()}


def _apps(scrape: Scrape) -> Samples:
    states = [snapshots.app_state(one) for one in scrape.parts.applications]
    return [((state,), states.count(state)) for state in ("running", "failed", "stopped", "changing")]


def _pipelines(scrape: Scrape) -> Samples:
    states = [one["state"] for one in scrape.pipelines]
    return [((state,), states.count(state)) for state in ("running", "waiting", "ended", "stopped")]


def _queries(key: str) -> Callable[[Scrape], Samples]:
    """What is said of each query of pipelines under `key`."""

    def samples(scrape: Scrape) -> Samples:
        for one in scrape.pipelines:
            found: Any = one["queries"]
            for query in found:
                yield (Path(str(one["path"])).name, query.get("name", "")), query.get(key, 0)

    return samples


def _query_states(scrape: Scrape) -> Samples:
    for one in scrape.pipelines:
        found: Any = one["queries"]
        for query in found:
            yield (Path(str(one["path"])).name, query.get("name", ""), query.get("state", "")), 1


def _garbage(key: str) -> Callable[[Scrape], Samples]:
    return lambda scrape: [((str(at),), one[key]) for at, one in enumerate(gc.get_stats())]


def _identity(samples: Callable[[IdentityService], Samples]) -> Callable[[Scrape], Samples]:
    """Samples of the identity service; none without one."""
    return lambda scrape: samples(found) if (found := identity.of_server()) is not None else ()


def _denied(service: IdentityService) -> Samples:
    denied = service.rights.denied if service.rights is not None else {}
    return [((action.value,), count) for action, count in denied.items()]


_HUB, _REASON = ("hub", "app"), ("hub", "app", "reason")

FAMILIES = (
    Family("gauge", "smqrt_info", ("version",), "1, with the version.", lambda _: [((smqrt.__version__,), 1)]),
    Family(
        "gauge",
        "smqrt_ready",
        (),
        "1 when /readyz answers 200.",
        _one(lambda scrape: not scrape.parts.health.obstacles()),
    ),
    Family(
        "gauge",
        "smqrt_phase",
        ("phase",),
        "1 for the phase that the server is in.",
        lambda scrape: [((one,), one == scrape.parts.health.phase) for one in PHASES],
    ),
    # The process: names that all client libraries of Prometheus use.
    Family(
        "counter",
        "process_cpu_seconds_total",
        (),
        "CPU that the process has used, of all its threads.",
        _one(lambda scrape: scrape.usage.cpu_s),
    ),
    Family(
        "gauge",
        "process_resident_memory_bytes",
        (),
        "Memory that the process has.",
        _one(lambda scrape: scrape.usage.memory_bytes),
    ),
    Family(
        "gauge",
        "process_virtual_memory_bytes",
        (),
        "Addresses that the process has.",
        _one(lambda scrape: scrape.usage.virtual_bytes),
    ),
    Family("gauge", "process_threads", (), "Threads of the process.", _one(lambda scrape: scrape.usage.threads)),
    Family("gauge", "process_open_fds", (), "File descriptors in use.", _one(lambda scrape: scrape.usage.open_files)),
    Family("gauge", "process_max_fds", (), "Limit of open files.", _one(lambda scrape: scrape.usage.open_files_limit)),
    Family(
        "gauge",
        "process_start_time_seconds",
        (),
        "When the process began, in Unix seconds.",
        _one(lambda scrape: scrape.usage.started_s),
    ),
    Family(
        "counter",
        "python_gc_collections_total",
        ("generation",),
        "Passes of Python's garbage collector.",
        _garbage("collections"),
    ),
    Family(
        "counter",
        "python_gc_objects_collected_total",
        ("generation",),
        "Objects that these passes freed.",
        _garbage("collected"),
    ),
    # The event loop.
    Family(
        "histogram",
        "smqrt_loop_lag_seconds",
        (),
        "How late the event loop called a timer, looked at 20 times a second.",
        lambda _: (),
    ),
    Family(
        "gauge",
        "smqrt_loop_lag_max_seconds",
        (),
        "The latest of these in the last minute: how long the longest turn was.",
        _one(lambda scrape: scrape.parts.lag.worst_s),
    ),
    # Listeners.
    Family("gauge", "smqrt_connections", (), "Connections that are open.", _one(lambda _: open_connections.open)),
    Family(
        "counter",
        "smqrt_listener_accepted_total",
        ("listener",),
        "Connections that were accepted.",
        lambda scrape: scrape.listeners("accepted"),
    ),
    Family(
        "gauge",
        "smqrt_listener_connections",
        ("listener",),
        "Connections of the listener that are open.",
        lambda scrape: scrape.listeners("open"),
    ),
    Family(
        "counter",
        "smqrt_listener_refused_total",
        ("listener",),
        "Connections that were refused because of a limit.",
        lambda scrape: scrape.listeners("refused"),
    ),
    Family(
        "counter",
        "smqrt_listener_reassigned_total",
        ("listener",),
        "Connections that were passed on to another worker, which has fewer.",
        lambda scrape: scrape.listeners("given"),
    ),
    Family(
        "counter",
        "smqrt_listener_handshakes_total",
        ("listener",),
        "TLS handshakes that were done.",
        lambda scrape: scrape.listeners("handshakes"),
    ),
    Family(
        "counter",
        "smqrt_listener_handshakes_failed_total",
        ("listener",),
        "TLS handshakes that failed, or took too long.",
        lambda scrape: scrape.listeners("handshakes_failed"),
    ),
    Family(
        "gauge",
        "smqrt_certificate_expiry_timestamp_seconds",
        ("listener",),
        "When the certificate of the listener expires, in Unix seconds.",
        lambda scrape: [((name,), at_s) for name, at_s in scrape.parts.listeners.expiries().items()],
    ),
    Family(
        "counter",
        "smqrt_certificate_reload_failures_total",
        ("listener",),
        "How often the files of certificates could not be read again.",
        lambda scrape: [((name,), count) for name, (count, _) in scrape.parts.listeners.reload_failures().items()],
    ),
    Family(
        "gauge",
        "smqrt_certificate_files_broken",
        ("listener",),
        "1 while the files of certificates can't be used, and those read before are in use.",
        lambda scrape: [((name,), is_so) for name, (_, is_so) in scrape.parts.listeners.reload_failures().items()],
    ),
    Family(
        "counter",
        "smqrt_acme_orders_total",
        ("outcome",),
        "Certificates that the server ordered by ACME: ordered, or failed.",
        lambda scrape: [((name,), float(str(told[name]))) for told in scrape.acme() for name in ("ordered", "failed")],
    ),
    Family(
        "gauge",
        "smqrt_acme_failing",
        (),
        "1 while the last order by ACME has failed.",
        lambda scrape: [((), told["fault"] is not None) for told in scrape.acme()],
    ),
    Family(
        "gauge",
        "smqrt_acme_next_order_timestamp_seconds",
        (),
        "When the next order by ACME is due, in Unix seconds.",
        lambda scrape: [((), float(str(told["next_s"]))) for told in scrape.acme()],
    ),
    # Users and rules.
    Family(
        "counter",
        "smqrt_logins_total",
        ("method",),
        "Clients of hubs that were let in, by how they proved who they are.",
        _identity(lambda service: [((one.value,), service.logins[one]) for one in Method]),
    ),
    Family(
        "counter",
        "smqrt_logins_refused_total",
        ("reason",),
        "Logins that failed, of hubs and by users of the users file.",
        _identity(lambda service: [((one.name.lower(),), service.refusals[one]) for one in LoginFailure]),
    ),
    Family(
        "counter",
        "smqrt_acl_denied_total",
        ("action",),
        "What the access control list denied to clients.",
        _identity(_denied),
    ),
    Family(
        "gauge",
        "smqrt_auth_files_broken",
        (),
        "1 while the users file, the list or the keys can't be used, and those read before are in use.",
        _identity(lambda service: [((), service.is_broken)]),
    ),
    # Hubs.
    Family(
        "gauge",
        "smqrt_hub_peers",
        _HUB,
        "Clients that are connected.",
        lambda scrape: scrape.hubs(lambda one: len(one.sessions)),
    ),
    Family(
        "gauge",
        "smqrt_hub_topics",
        _HUB,
        "Topics with a name.",
        lambda scrape: scrape.hubs(lambda one: len(one.topic_table.by_name)),
    ),
    Family(
        "gauge",
        "smqrt_hub_subtopics",
        _HUB,
        "Sub-topics.",
        lambda scrape: scrape.hubs(lambda one: len(one.subtopic_table.by_name)),
    ),
    Family(
        "gauge",
        "smqrt_hub_names_bytes",
        _HUB,
        "Bytes of the names of topics and sub-topics.",
        lambda scrape: scrape.hubs(lambda one: one.topic_table.names_bytes + one.subtopic_table.names_bytes),
    ),
    Family(
        "gauge",
        "smqrt_hub_last_values",
        _HUB,
        "Last values that the hub keeps for new subscribers.",
        lambda scrape: scrape.hubs(lambda one: one.last_values.count if one.last_values else 0),
    ),
    Family(
        "gauge",
        "smqrt_hub_last_value_bytes",
        _HUB,
        "Bytes of memory of last values.",
        lambda scrape: scrape.hubs(lambda one: one.last_values.size_bytes if one.last_values else 0),
    ),
    Family(
        "gauge",
        "smqrt_hub_subscriptions",
        _HUB,
        "Subscriptions to topics with a name.",
        lambda scrape: scrape.hubs(lambda one: one.stats.subscriptions),
    ),
    Family(
        "counter",
        "smqrt_hub_messages_total",
        _HUB,
        "Messages that clients and the server published here, each once.",
        lambda scrape: scrape.hubs(lambda one: scrape.traffic[one.number].messages),
    ),
    Family(
        "counter",
        "smqrt_hub_remote_messages_total",
        _HUB,
        "Messages that came from other nodes of a cluster, or other workers; they are counted as published there.",
        lambda scrape: scrape.hubs(lambda one: scrape.traffic[one.number].arrived),
    ),
    Family(
        "counter",
        "smqrt_hub_bytes_total",
        _HUB,
        "Bytes of these, with the headers of SMQ.",
        lambda scrape: scrape.hubs(lambda one: scrape.traffic[one.number].bytes),
    ),
    Family(
        "counter",
        "smqrt_hub_copies_total",
        _HUB,
        "Copies of messages for subscribers; those that were dropped later are among them.",
        lambda scrape: scrape.hubs(lambda one: scrape.traffic[one.number].copies),
    ),
    Family(
        "counter",
        "smqrt_hub_copied_bytes_total",
        _HUB,
        "Bytes of these.",
        lambda scrape: scrape.hubs(lambda one: scrape.traffic[one.number].copied_bytes),
    ),
    Family(
        "counter",
        "smqrt_hub_connects_total",
        _HUB,
        "Clients that were let in.",
        lambda scrape: scrape.hubs(lambda one: one.stats.connects),
    ),
    Family(
        "counter",
        "smqrt_hub_refusals_total",
        _HUB,
        "Clients that were not let in.",
        lambda scrape: scrape.hubs(lambda one: one.stats.refusals),
    ),
    Family(
        "counter",
        "smqrt_hub_denied_total",
        _HUB,
        "Topics and sub-topics that an application did not allow a client.",
        lambda scrape: scrape.hubs(lambda one: one.stats.denied),
    ),
    Family(
        "counter",
        "smqrt_hub_closes_total",
        _REASON,
        "Connections that ended, by reason; see troubleshooting.",
        lambda scrape: scrape.by_reason(_closes),
    ),
    Family(
        "counter",
        "smqrt_hub_dropped_messages_total",
        _REASON,
        "Copies of messages that a subscriber did not get, by reason.",
        lambda scrape: scrape.by_reason(lambda one: one.drops()),
    ),
    Family(
        "counter",
        "smqrt_hub_limit_reached_total",
        ("hub", "app", "limit"),
        "How often a limit of the hub was reached.",
        lambda scrape: scrape.by_reason(lambda one: one.refused()),
    ),
    Family(
        "gauge",
        "smqrt_hub_queued_bytes",
        _HUB,
        "What waits for clients that do not read.",
        lambda scrape: scrape.hubs(snapshots.queued_bytes),
    ),
    Family(
        "gauge",
        "smqrt_queued_bytes",
        (),
        "The same, of all hubs together.",
        _one(lambda _: QueuedMemory.total_bytes),
    ),
    Family(
        "gauge",
        "smqrt_queued_limit_bytes",
        (),
        "What may wait of all hubs together.",
        _one(lambda _: QueuedMemory.limit_bytes),
    ),
    Family(
        "counter",
        "smqrt_limit_reached_total",
        ("limit",),
        "How often a limit of the server was reached.",
        lambda _: [((one.name,), one.count) for one in limit_states()],
    ),
    # Clusters.
    Family(
        "gauge",
        "smqrt_cluster_nodes",
        ("hub", "app", "cluster"),
        "Other nodes that a hub works together with.",
        _members(lambda one: sum(remote.synced for remote in one.remotes)),
    ),
    Family(
        "gauge",
        "smqrt_cluster_phantoms",
        ("hub", "app", "cluster"),
        "Clients of other nodes.",
        _members(lambda one: len(one.phantoms)),
    ),
    Family(
        "gauge",
        "smqrt_cluster_interest",
        ("hub", "app", "cluster"),
        "Topics that other nodes want.",
        _members(lambda one: len(one.interest)),
    ),
    Family(
        "gauge",
        "smqrt_cluster_link_round_trip_seconds",
        _LINK,
        "How long the newest ping to another node and its answer took.",
        _links(lambda link: link.round_trip_s or 0.0),
    ),
    Family(
        "gauge",
        "smqrt_cluster_link_queued_bytes",
        _LINK,
        "What waits for another node.",
        _links(lambda link: link.transport.outbox.queued_bytes),
    ),
    Family(
        "counter",
        "smqrt_cluster_link_sent_bytes_total",
        _LINK,
        "Bytes that were sent over a link to another node.",
        _links(lambda link: link.sent_bytes),
    ),
    Family(
        "counter",
        "smqrt_cluster_link_received_bytes_total",
        _LINK,
        "Bytes that came over a link.",
        _links(lambda link: link.transport.worked_off_bytes),
    ),
    Family(
        "counter",
        "smqrt_cluster_links_lost_total",
        ("node",),
        "How many links to other nodes have ended.",
        lambda _: [((str(one.node.number),), one.node.links_lost) for one in open_meshes],
    ),
    Family(
        "gauge",
        "smqrt_cluster_links_missing",
        ("node",),
        "Links to other nodes that there should be and are not.",
        lambda _: [((str(one.node.number),), len(one.expected.missing())) for one in open_meshes],
    ),
    # Journals.
    Family(
        "counter",
        "smqrt_journal_rows_total",
        ("journal",),
        "Messages that were recorded.",
        lambda scrape: scrape.journal("rows"),
    ),
    Family(
        "counter",
        "smqrt_journal_bytes_total",
        ("journal",),
        "Bytes that were written.",
        lambda scrape: scrape.journal("bytes"),
    ),
    Family(
        "counter",
        "smqrt_journal_syncs_total",
        ("journal",),
        "How often the disk was asked to keep what was written (fsync).",
        lambda scrape: scrape.journal("syncs"),
    ),
    Family(
        "counter",
        "smqrt_journal_sync_seconds_total",
        ("journal",),
        "How long these took together.",
        lambda scrape: [((name,), one.sync_s) for name, (one, _) in scrape.journals.items()],
    ),
    Family(
        "gauge",
        "smqrt_journal_unsynced_bytes",
        ("journal",),
        "Bytes that the disk has not confirmed.",
        lambda scrape: scrape.journal("unsynced_bytes"),
    ),
    Family(
        "gauge",
        "smqrt_journal_lag_seconds",
        ("journal",),
        "For how long the oldest job has waited for the disk.",
        lambda scrape: scrape.journal("disk_age_s"),
    ),
    Family(
        "counter",
        "smqrt_journal_stalls_total",
        ("journal",),
        "How often the disk took nothing.",
        lambda scrape: scrape.journal("stalls"),
    ),
    Family(
        "gauge",
        "smqrt_journal_alarm",
        ("journal",),
        "1 while publishers wait for the disk, or it fails or is slow.",
        lambda scrape: scrape.journal("alarm"),
    ),
    Family(
        "gauge",
        "smqrt_journal_readers_stale",
        ("journal",),
        "Pipelines that have read nothing for a day.",
        lambda scrape: scrape.journal("readers_stale"),
    ),
    # Applications.
    Family("gauge", "smqrt_applications", ("state",), "Applications, by state.", _apps),
    Family("gauge", "smqrt_pipeline_processes", ("state",), "Processes that run pipelines, by state.", _pipelines),
    Family(
        "gauge",
        "smqrt_pipeline_query_state",
        ("app", "query", "state"),
        "1 for the state that a query of pipelines is in.",
        _query_states,
    ),
    Family(
        "gauge",
        "smqrt_pipeline_query_lag_seconds",
        ("app", "query"),
        "For how long the oldest row has waited to be read by a query.",
        _queries("lag_s"),
    ),
    Family(
        "gauge",
        "smqrt_pipeline_query_lag_rows",
        ("app", "query"),
        "Rows that wait to be read by a query.",
        _queries("lag_rows"),
    ),
    Family(
        "gauge",
        "smqrt_lua_memory_bytes",
        (),
        "Memory of the Lua runtime, garbage included.",
        _one(lambda scrape: scrape.lua_memory_bytes),
    ),
    Family(
        "gauge",
        "smqrt_lua_activities",
        (),
        "Activities of Lua that wait for something.",
        _one(lambda scrape: scrape.parts.vm.activities.blocked),
    ),
)


def manual() -> str:
    """Returns the table of the manual in Markdown."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for row in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


FORMER_NAMES = {
    "smqrt_hub_remote_messages_total": "smqrt_hub_arrived_messages_total",
    "smqrt_listener_reassigned_total": "smqrt_listener_given_total",
    "smqrt_loop_lag_max_seconds": "smqrt_loop_lag_worst_seconds",
}
"""Present name to former name of renamed metrics. For one release both are sent."""


class Metrics:
    """The metrics of a server.

    Args:
        parts: the server.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def lines(self) -> Iterator[bytes]:
        """Yields all metrics in the text format of Prometheus, a part after the other; others run in between."""
        scrape, turn = Scrape(self._parts), Turn()
        for row in FAMILIES:
            turn.yield_if_due()
            yield generate_latest(_One(_family(row, scrape)))
            if former := FORMER_NAMES.get(row.name):
                row = row._replace(name=former, help=f"Former name of {row.name}. {row.help}")
                yield generate_latest(_One(_family(row, scrape)))


class _One:
    """A registry of one family."""

    def __init__(self, family: MetricFamily) -> None:
        self._family = family

    def collect(self) -> list[MetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        return [self._family]


def _family(row: Family, scrape: Scrape) -> MetricFamily:
    if row.kind == "histogram":
        lag = scrape.parts.lag
        at_most, buckets = 0, []
        for most_s, count in zip([*map(str, BUCKETS_S), "+Inf"], lag.buckets, strict=True):
            at_most += count
            buckets.append((most_s, float(at_most)))
        histogram = HistogramMetricFamily(row.name, row.help)
        histogram.add_metric([], buckets, lag.total_s)
        return histogram
    family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
        row.name.removesuffix("_total") if row.kind == "counter" else row.name, row.help, labels=row.labels
    )
    for labels, value in row.samples(scrape):
        family.add_metric(labels, value)
    return family
