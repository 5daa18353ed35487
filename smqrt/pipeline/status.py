"""Status of queries: `<state>/<query>/status.json`, written by the process that runs the query, read by everybody.

The file is replaced as a whole, so a reader never sees half of it. Nobody needs Spark to read it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import JournalError, PipelineError
from smqrt.journal import readers
from smqrt.pipeline import jvm, process, row_checks

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from pyspark.sql import SparkSession


FILE = "status.json"
DISK_FULL = "disk full"
LIVE = ("starting", "running", "waiting", "stuck", DISK_FULL)
"""The states in which a process works on the query; the others are finished, stopped, failed and dead."""

_LAG_EVERY_S = 1.0
_UNTROUBLED: dict[str, Any] = {"trouble": "", "stuck_since": 0.0}

LagSeconds = Callable[[str, dict[str, int]], float | None]
"""Tells for a query and the next sequence number per node how many seconds the oldest waiting row has waited."""
LagRows = Callable[[str, dict[str, int], dict[str, int]], int | None]
"""Tells for a query how many rows wait from one offset up to another."""


@dataclass(frozen=True)
class Status:
    """The last that is known of a query.

    Attributes:
        name, kind: the query and what it is: publish, table or alert.
        state: starting, running, waiting (for rows), stuck (there are rows, and it makes no progress), disk full (it
            waits for room), finished, stopped, failed, or dead: its process is gone without a word.
        pid: the process.
        since, updated: when the process took the query on, and when it last told something, in Unix seconds.
        query_id: Spark's identity of the query, the key of its commits.
        batch: number of the last micro-batch; batch_ms: how long it took.
        offset: the next sequence number of each node that it reads.
        rows: rows read since `since`; rows_per_s: rows that came a second before the last micro-batch.
        processed_rows_per_s: rows that the last micro-batch worked off a second.
        lag_rows: rows in the journal that wait to be read; lag_s: for how many seconds the oldest of them has waited.
        state_rows, state_bytes: what windows, joins and the like keep.
        watermark: ISO time before which rows are too late; empty without one.
        dropped_by_watermark: rows, or groups of them, that were too late for a window or a join since `since`.
        future: rows that were left out since `since` because their time was in the future.
        published: rows published since `since`.
        bad_json: payloads that were no JSON object since `since`; wrong_type: rows with a JSON field of another type.
        expectations: rows that failed one since `since`, by its name; "on_error" are those that a function fails with,
            "fits the table" and "fits a message" those that can't be kept or published.
        ui: address of Spark's own user interface; empty when it is off.
        error: why it failed, one sentence.
        warning: what is wrong with it although it runs, one sentence: state that grows for ever.
        trouble: what keeps it from going on, one sentence; stuck_since: since when it is stuck, Unix seconds, else 0.
    """

    name: str
    kind: str = ""
    state: str = "starting"
    pid: int = 0
    since: float = 0.0
    updated: float = 0.0
    query_id: str = ""
    batch: int = -1
    batch_ms: int = 0
    offset: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    rows_per_s: float = 0.0
    processed_rows_per_s: float = 0.0
    lag_rows: int = 0
    lag_s: float = 0.0
    state_rows: int = 0
    state_bytes: int = 0
    watermark: str = ""
    dropped_by_watermark: int = 0
    future: int = 0
    published: int = 0
    bad_json: int = 0
    wrong_type: int = 0
    expectations: dict[str, int] = field(default_factory=dict)
    ui: str = ""
    error: str = ""
    warning: str = ""
    trouble: str = ""
    stuck_since: float = 0.0


def read(query: Path) -> Status | None:
    """Read the status of one query.

    Args:
        query: the folder of its state, `<state>/<name>`.

    Returns:
        Its status, "dead" when its process is gone without having said so, which only its own machine can tell; None
        when it never ran.
    """
    try:
        values = dict(json.loads((query / FILE).read_text("utf-8")))
        status = Status(**{item.name: values[item.name] for item in fields_of(Status) if item.name in values})
    except (OSError, ValueError, TypeError):
        return None
    died = status.state in LIVE and process.running(query) is None and process.elsewhere(query) is None
    return replace(status, state="dead", rows_per_s=0.0) if died else status


def read_all(state: Path) -> list[Status]:
    """Read the status of every query that ever ran with this folder of state, by name."""
    folders = sorted(path for path in state.iterdir() if path.is_dir()) if state.is_dir() else []
    return [status for folder in folders if (status := read(folder))]


class StatusWriter:
    """Keeps the status files of the queries that this process runs.

    Args:
        state: folder with one folder for each query.
        lag_seconds: how long the oldest waiting row of a query has waited; asked at most once a second for each.
        lag_rows: how many rows wait; without it all numbers that Spark has not read count.
    """

    def __init__(self, state: Path, lag_seconds: LagSeconds | None = None, lag_rows: LagRows | None = None) -> None:
        self._state, self._lag_seconds, self._rows_between = state, lag_seconds, lag_rows
        self._lock = threading.Lock()
        self._statuses: dict[str, Status] = {}
        self._names: dict[str, str] = {}
        self._lag_asked_s: dict[str, float] = {}
        self._ui = ""
        self._heard_s: dict[str, float] = {}
        self._pace_s: dict[str, float] = {}

    def starting(self, name: str, kind: str, pace_s: float = 0.0) -> None:
        """A query is about to start in this process, which is written down in its folder.

        Args:
            pace_s: the shortest time between its micro-batches.
        """
        process.claim(self._state / name)
        before = read(self._state / name) or Status(name)  # how far it is stays known if this process gets no further
        now = Status(name, kind, pid=os.getpid(), since=time.time(), ui=self._ui)
        with self._lock:
            self._heard_s[name], self._pace_s[name] = time.monotonic(), pace_s
            self._put(replace(now, query_id=before.query_id, batch=before.batch, offset=before.offset))

    def reached(self, name: str, batch: int, offset: dict[str, int]) -> None:
        """A query has ended behind this micro-batch; Spark may not have told of it yet."""
        with self._lock:
            if now := self._statuses.get(name):
                self._put(replace(now, batch=batch, offset=offset))

    def count(self, name: str, published: int) -> None:
        """Add to the published rows of a query; they reach the file with the next thing that Spark tells."""
        with self._lock:
            if now := self._statuses.get(name):
                self._statuses[name] = replace(now, published=now.published + published)

    def left_out(self, name: str, why: str, rows: int) -> None:
        """Add to the rows that a query has left out; as for `count`."""
        with self._lock:
            if now := self._statuses.get(name):
                self._statuses[name] = replace(now, expectations=_sums(now.expectations, {why: rows}))

    def ended(self, name: str, state: str, error: str = "") -> None:
        """A query is over in this process.

        Args:
            state: "finished" (all there was is done), "stopped" or "failed".
            error: with "failed", why.
        """
        with self._lock:
            if now := self._statuses.get(name):
                self._put(replace(now, state=state, error=error, rows_per_s=0.0))
        process.release(self._state / name)

    def waits_behind(self, name: str) -> int | None:
        """The number of the micro-batch behind which a query waits for rows; None when it doesn't wait."""
        now = self._statuses.get(name)
        return now.batch if now and now.state == "waiting" else None

    def troubled(self, name: str, trouble: str) -> None:
        """Note what keeps a query from going on, until the next micro-batch is done."""
        with self._lock:
            if (now := self._statuses.get(name)) and now.trouble != trouble:
                self._put(replace(now, trouble=trouble))

    def without_room(self, name: str, trouble: str) -> None:
        """A query waits until a disk that is full has room."""
        with self._lock:
            if now := self._statuses.get(name):
                since = now.stuck_since or time.time()
                self._put(replace(now, state=DISK_FULL, rows_per_s=0.0, trouble=trouble, stuck_since=since))

    def warned(self, name: str, warning: str) -> None:
        """Note what is wrong with a query although it runs; empty for nothing."""
        with self._lock:
            if (now := self._statuses.get(name)) and now.warning != warning:
                self._put(replace(now, warning=warning))

    def quiet(self, least_s: float) -> list[tuple[Status, float]]:
        """Return the queries of which nothing has been heard, though they might, for so long, and for how long."""
        with self._lock:
            now_s = time.monotonic()
            heard = [(now, now_s - self._heard_s[name] - self._pace_s[name]) for name, now in self._statuses.items()]
        return [(now, quiet_s) for now, quiet_s in heard if now.state in LIVE and quiet_s >= least_s]

    def under_way(self, name: str, lag_rows: int, trouble: str) -> None:
        """Somebody has seen that rows wait for a micro-batch to end.

        Args:
            trouble: why it takes too long; empty when it doesn't yet.
        """
        with self._lock:
            now = self._statuses[name]
            if now.state == DISK_FULL:
                return
            if now.state in LIVE and trouble:
                since = now.stuck_since or time.time()
                self._put(replace(now, state="stuck", lag_rows=lag_rows, trouble=trouble, stuck_since=since))
            elif now.state in LIVE:
                self._put(replace(now, state="running", lag_rows=lag_rows))

    def statuses(self) -> list[Status]:
        """The queries of this process, in the order in which they started."""
        with self._lock:
            return list(self._statuses.values())

    def watch(self, spark: SparkSession) -> Callable[[], None]:
        """Let Spark tell about its queries, whose names are those given to `starting`.

        Args:
            spark: the session.

        Returns:
            A function that ends it.
        """
        self._ui = spark.sparkContext.uiWebUrl or ""
        return jvm.listen(spark, _Listener(self))

    def started(self, query_id: str, name: str) -> None:
        """Spark has started a query."""
        with self._lock:
            if now := self._statuses.get(name):
                self._names[query_id] = name
                self._heard_s[name] = time.monotonic()
                state = DISK_FULL if now.state == DISK_FULL else "waiting"  # until a micro-batch is done
                self._put(replace(now, state=state, query_id=query_id))

    def progressed(self, progress: Mapping[str, object]) -> None:
        """Spark has done a micro-batch, or looked and found nothing.

        Args:
            progress: the JSON of a StreamingQueryProgress.
        """
        name = str(progress.get("name"))
        ends = _ends(progress)
        lag = self._lag_rows(name, progress)
        lag_s = self._lag_s(name, ends) if lag else 0.0
        with self._lock:
            if now := self._statuses.get(name):
                self._heard_s[name] = time.monotonic()
                after = _after(now, progress, lag, now.lag_s if lag_s is None else lag_s)
                # Spark tells of the last micro-batch when the query is over already.
                self._put(after if now.state in LIVE else replace(after, state=now.state, rows_per_s=0.0))

    def idle(self, query_id: str) -> None:
        """Spark has found nothing to do for a while."""
        with self._lock:
            now = self._statuses.get(self._names.get(query_id, ""))
            if now and now.state in LIVE:
                self._heard_s[now.name] = time.monotonic()
                self._put(replace(now, state="waiting", rows_per_s=0.0, lag_rows=0, lag_s=0.0, **_UNTROUBLED))

    def _lag_rows(self, name: str, progress: Mapping[str, Any]) -> int:
        lag = _lag_rows(progress)
        if not lag or self._rows_between is None:
            return lag
        ranges = [(_offsets(one.get("endOffset")), _offsets(one.get("latestOffset"))) for one in progress["sources"]]
        found = [self._rows_between(name, *each) for each in ranges]
        return lag if None in found else sum(filter(None, found))

    def _lag_s(self, name: str, ends: dict[str, int]) -> float | None:
        now = time.monotonic()
        if self._lag_seconds is None or now - self._lag_asked_s.get(name, -_LAG_EVERY_S) < _LAG_EVERY_S:
            return None
        self._lag_asked_s[name] = now
        return self._lag_seconds(name, ends)

    def _put(self, status: Status) -> None:
        self._statuses[status.name] = status = replace(status, updated=time.time())
        folder = self._state / status.name
        temporary, text = folder / (FILE + ".new"), json.dumps(asdict(status), indent=1)
        try:
            temporary.write_text(text, "utf-8")
            temporary.rename(folder / FILE)
        except OSError:
            with suppress(OSError):  # a full disk must end no query that could go on
                _overwrite(folder / FILE, text.encode())


def _overwrite(path: Path, text: bytes) -> None:
    """Replace what is in a file on a disk that is full, as far as its blocks have room for it."""
    with path.open("r+b", buffering=0) as file:
        found = os.fstat(file.fileno())
        if len(text) <= found.st_blocks * 512:
            file.write(text.ljust(found.st_size))


class _Listener:
    """A listener that takes progress as JSON: see `jvm.listen`."""

    def __init__(self, status: StatusWriter) -> None:
        self._status = status

    def onQueryStarted(self, event: Any) -> None:
        self._status.started(event.id().toString(), event.name())

    def onQueryProgress(self, event: Any) -> None:
        self._status.progressed(json.loads(event.progress().json()))

    def onQueryIdle(self, event: Any) -> None:
        self._status.idle(event.id().toString())

    def onQueryTerminated(self, event: Any) -> None:
        """The runner, which has the exception, tells how a query ended."""

    class Java:
        implements = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


def _after(now: Status, progress: Mapping[str, Any], lag_rows: int, lag_s: float) -> Status:
    rows = int(progress.get("numInputRows") or 0)
    operators = progress.get("stateOperators") or []
    observed = progress.get("observedMetrics") or {}
    return replace(
        now,
        state="running" if rows or lag_rows else "waiting",
        batch=int(progress.get("batchId", now.batch)),
        batch_ms=int(progress.get("batchDuration") or 0),
        offset=_ends(progress) or now.offset,
        rows=now.rows + rows,
        rows_per_s=_rate(progress),
        processed_rows_per_s=round(float(progress.get("processedRowsPerSecond") or 0.0), 1),
        lag_rows=lag_rows,
        lag_s=round(lag_s, 3),
        state_rows=_sum(operators, "numRowsTotal"),
        state_bytes=_sum(operators, "memoryUsedBytes"),
        watermark=_watermark(progress) or now.watermark,
        dropped_by_watermark=now.dropped_by_watermark + _sum(operators, "numRowsDroppedByWatermark"),
        future=now.future + _observed(observed, row_checks.future_observation(""), row_checks.FUTURE),
        bad_json=now.bad_json + _observed(observed, row_checks.json_observation(""), row_checks.BAD_JSON),
        wrong_type=now.wrong_type + _observed(observed, row_checks.json_observation(""), row_checks.WRONG_TYPE),
        expectations=_sums(now.expectations, row_checks.failed_counts(observed)),
        **_UNTROUBLED,
    )


def _sum(operators: Iterable[Mapping[str, Any]], field: str) -> int:
    return sum(int(operator.get(field) or 0) for operator in operators)


def _observed(observed: Mapping[str, Any], own: str, column: str) -> int:
    return sum(int(values.get(column) or 0) for name, values in observed.items() if name.startswith(own))


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _rate(progress: Mapping[str, Any]) -> float:
    """Rows that came a second; for a first batch, which has no time before it, rows that were worked off a second."""
    rate = progress.get("inputRowsPerSecond") or progress.get("processedRowsPerSecond") or 0.0
    return round(float(rate), 1)


def _watermark(progress: Mapping[str, Any]) -> str:
    watermark = str((progress.get("eventTime") or {}).get("watermark", ""))
    return "" if watermark.startswith("1970-01-01T00:00:00") else watermark


def _lag_rows(progress: Mapping[str, Any]) -> int:
    return sum(
        max(0, latest - _offsets(source.get("endOffset")).get(node, 0))
        for source in progress.get("sources") or []
        for node, latest in _offsets(source.get("latestOffset")).items()
    )


def _ends(progress: Mapping[str, Any]) -> dict[str, int]:
    """Where the query is: what the slowest of its sources will read next, per node."""
    ends: dict[str, int] = {}
    for source in progress.get("sources") or []:
        for node, end in _offsets(source.get("endOffset")).items():
            ends[node] = min(end, ends.get(node, end))
    return ends


def _offsets(value: Any) -> dict[str, int]:
    """Offsets of our own source, which Spark hands on as an object or as its text; of other sources none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    numbers = value.items() if isinstance(value, dict) else ()
    return {str(node): seq for node, seq in numbers if isinstance(seq, int) and not isinstance(seq, bool)}


# ---- Metrics of running queries for Prometheus: `smqrt pipeline run --metrics PORT` answers on /metrics.
#
# The figures are those of the status files, read anew with every request.

_GAUGES = {
    "rows_per_s": ("smqrt_pipeline_rows_per_second", "Rows that came a second before the last micro-batch."),
    "processed_rows_per_s": (
        "smqrt_pipeline_processed_rows_per_second",
        "Rows that the last micro-batch worked off a second.",
    ),
    "lag_rows": ("smqrt_pipeline_lag_rows", "Rows in the journal that wait to be read."),
    "lag_s": ("smqrt_pipeline_lag_seconds", "How long the oldest of them has waited."),
    "state_rows": ("smqrt_pipeline_state_rows", "Rows that windows, joins and the like keep."),
    "state_bytes": ("smqrt_pipeline_state_bytes", "Memory of these rows."),
    "batch": ("smqrt_pipeline_batch", "Number of the last micro-batch."),
}
_COUNTERS = {
    "rows": ("smqrt_pipeline_rows", "Rows read since the query began."),
    "published": ("smqrt_pipeline_published", "Rows published since the query began."),
    "dropped_by_watermark": (
        "smqrt_pipeline_dropped_by_watermark",
        "Rows, or groups of them, that were too late for windows and joins.",
    ),
    "future": ("smqrt_pipeline_future", "Rows left out because their time was in the future."),
    "bad_json": ("smqrt_pipeline_bad_json", "Payloads that were no JSON object."),
    "wrong_type": ("smqrt_pipeline_wrong_type", "Rows with a JSON field of another type."),
}


class PipelineMetrics:
    """The metrics of the queries of one folder of state, in the form that prometheus-client asks for.

    Args:
        state: the folder.
        names: only these queries; none means all.
        journal: folder or URL of the journal, of whose readers it tells too, where it is a folder.
    """

    def __init__(self, state: Path, names: Iterable[str] = (), journal: str = "") -> None:
        self._state, self._names, self._journal = state, set(names), journal

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with one value for each query."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statuses = [each for each in read_all(self._state) if not self._names or each.name in self._names]
        up = GaugeMetricFamily("smqrt_pipeline_up", "1 while the query runs.", labels=["query"])
        took = GaugeMetricFamily("smqrt_pipeline_batch_seconds", "Time of the last micro-batch.", labels=["query"])
        stuck = GaugeMetricFamily(
            "smqrt_pipeline_stuck_seconds",
            "For how long it has made no progress, although rows wait.",
            labels=["query"],
        )
        for each in statuses:
            stuck.add_metric([each.name], max(0.0, time.time() - each.stuck_since) if each.stuck_since else 0.0)
            up.add_metric([each.name], float(each.state in LIVE))
            took.add_metric([each.name], each.batch_ms / 1000)
        yield from (up, took, stuck)
        for family, kinds in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            yield from (_filled(family(*kinds[field], labels=["query"]), field, statuses) for field in kinds)
        yield _watermark_lag(statuses)
        yield _failed_expectations(statuses)
        if self._journal and "://" not in self._journal:
            yield from _readers(Path(self._journal))


def _filled(metric: Any, field: str, statuses: list[Status]) -> Metric:
    for each in statuses:
        metric.add_metric([each.name], float(getattr(each, field)))
    return metric  # type: ignore[no-any-return]


def _watermark_lag(statuses: list[Status]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    text = "How far the watermark is behind now, of queries that have one."
    metric = GaugeMetricFamily("smqrt_pipeline_watermark_lag_seconds", text, labels=["query"])
    for each in statuses:
        if each.watermark:
            metric.add_metric([each.name], time.time() - datetime.fromisoformat(each.watermark).timestamp())
    return metric


def _readers(journal: Path) -> Iterator[Metric]:
    """Whoever reads the journal, also when it doesn't run: rows are kept for it."""
    from prometheus_client.core import GaugeMetricFamily

    lag = GaugeMetricFamily("smqrt_journal_reader_lag_rows", "Rows that wait for a reader.", labels=["reader"])
    text = "For how long a reader has not told how far it is."
    silent = GaugeMetricFamily("smqrt_journal_reader_silent_seconds", text, labels=["reader"])
    with suppress(JournalError):  # the figures of the queries are not worse for it
        for reader, behind in readers.waiting(journal):
            lag.add_metric([reader.name], behind)
            silent.add_metric([reader.name], reader.silent_s(time.time_ns() // 1000))
    yield from (lag, silent)


def _failed_expectations(statuses: list[Status]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    text = "Rows that failed an expectation."
    metric = CounterMetricFamily("smqrt_pipeline_expectation_failures", text, labels=["query", "expectation"])
    for each in statuses:
        for name, rows in each.expectations.items():
            metric.add_metric([each.name, name], rows)
    return metric


def serve(state: Path, names: Iterable[str], port: int, journal: str = "") -> int:
    """Answer Prometheus on http://127.0.0.1:port/metrics from a thread, until the process ends.

    Args:
        state: the folder of state.
        names: only these queries; none means all.
        port: 0 picks a free one.
        journal: as for `PipelineMetrics`.

    Returns:
        The port.

    Raises:
        PipelineError: the port is taken, or prometheus-client isn't installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise PipelineError("--metrics needs prometheus-client: pip install 'smqrt[spark]'") from None
    registry = CollectorRegistry()
    registry.register(PipelineMetrics(state, names, journal))
    try:
        server, _ = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise PipelineError(f"--metrics: port {port} can't be used ({error.strerror}); choose another.") from None
    return int(server.server_port)
