"""Processes, status files and metrics of pipeline queries.

The file is replaced atomically, so readers always see a complete file. Reading it does not need Spark.
"""

from __future__ import annotations

import json
import os
import platform
import signal
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
from smqrt.pipeline import jvm, row_checks

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from pyspark.sql import SparkSession


# ---- Query process: pid file, stop file, crash points
#
# <state>/<query>/pid     "4711 83541 HOST": the process, its start time in the kernel, and its machine. The start
#                         time distinguishes it from a later process with the same number.
# <state>/<query>/stop    a request to stop the query; its runner removes it

_PID, _STOP = "pid", "stop"
_START_TIME_FIELD = 19
"""Index in /proc/N/stat, after the name in parentheses, of the start time in clock ticks since boot."""


def claim(query: Path) -> None:
    """Register this process as the one that runs the query.

    Args:
        query: the folder of the query's state, `<state>/<name>`.
    """
    query.mkdir(parents=True, exist_ok=True)
    (query / _STOP).unlink(missing_ok=True)
    temporary = query / (_PID + ".new")  # renamed, so that readers never see an incomplete file
    temporary.write_text(f"{os.getpid()} {_started(os.getpid())} {_host()}\n")
    temporary.rename(query / _PID)


def release(query: Path) -> None:
    """Remove the registration of this process; do nothing when another process has claimed the query."""
    words = _read(query)
    if words[:1] == [str(os.getpid())] and words[2:] == [_host()]:
        (query / _PID).unlink(missing_ok=True)
        (query / _STOP).unlink(missing_ok=True)


def running(query: Path) -> int | None:
    """Return the process of this machine that runs the query; None without one, or when it has ended."""
    words = _read(query)
    if len(words) != 3 or words[2] != _host() or not words[0].isdigit():
        return None
    return int(words[0]) if _started(int(words[0])) == words[1] else None


def elsewhere(query: Path) -> str | None:
    """Return the name of the other machine on which the query runs, or ran until a crash; else None."""
    words = _read(query)
    return words[2] if len(words) == 3 and words[2] != _host() else None


def request_stop(query: Path) -> None:
    """Request a stop of this query from the process that runs it."""
    (query / _STOP).touch()


def stop_requested(query: Path) -> bool:
    """Return whether a stop of the query was requested."""
    return (query / _STOP).exists()


def _host() -> str:
    return platform.node() or "localhost"


def _read(query: Path) -> list[str]:
    try:
        return (query / _PID).read_text().split()
    except OSError:
        return []


def _started(pid: int) -> str:
    """Return the start time of a process; empty when it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[_START_TIME_FIELD]


# ---- Crash points for tests

CRASH_VARIABLE = "SMQRT_FAULT"
"""POINT or POINT:NUMBER, such as "after_commit:3"; without a number every number matches."""


def crash_at(name: str, number: int, of_worker: bool = False) -> None:
    """Kill the pipeline's process and its child processes if the environment names this crash point.

    Args:
        name: "before_commit" or "after_commit": before or after the hub stores the results, and before Spark records
            the micro-batch; "before_part": after the preceding parts of the results.
        number: the number of the micro-batch or of the part.
        of_worker: whether this is a Python worker of Spark, whose process group isn't the pipeline's.
    """
    wanted, _, of = os.environ.get(CRASH_VARIABLE, "").partition(":")
    if wanted == name and of in ("", str(number)):
        group = os.getpgrp()
        if of_worker:
            # The parent of the first process of the workers' group is the JVM.
            parent = Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[1]
            os.killpg(os.getpgid(int(parent)), signal.SIGKILL)  # the JVM is in the group of the pipeline
        os.killpg(group, signal.SIGKILL)


FILE = "status.json"
DISK_FULL = "disk full"
LIVE = ("starting", "running", "waiting", "stuck", DISK_FULL)
"""The states in which a process runs the query; the others are finished, stopped, failed and dead."""

_EPOCH = "1970-01-01T00:00:00"
"""Spark's watermark before the first row."""
_LAG_INTERVAL_S = 1.0
_NO_TROUBLE: dict[str, Any] = {"trouble": "", "stuck_since": 0.0}

LagSeconds = Callable[[str, dict[str, int]], float | None]
"""Takes a query and the next row number per node; returns the seconds since the oldest unprocessed row arrived."""
LagRows = Callable[[str, dict[str, int], dict[str, int]], int | None]
"""Takes a query and two offsets; returns the number of rows between them that the query has not processed."""


@dataclass(frozen=True)
class Status:
    """The last known status of a query.

    Attributes:
        name, kind: the query and its kind: publish, table or alert.
        state: starting, running, waiting (for rows), stuck (no progress despite unprocessed rows), disk full (it waits
            for disk space), finished, stopped, failed, or dead (its process ended without setting a state).
        pid: the process.
        since, updated: the times of the query's start and of the last change of the status, in Unix seconds.
        query_id: Spark's id of the query, the key of its commits.
        batch: number of the last micro-batch; batch_ms: its duration.
        offset: the next sequence number of each node that it reads.
        rows: rows read since `since`; rows_per_s: rows that arrived per second before the last micro-batch.
        processed_rows_per_s: rows that the last micro-batch processed per second.
        lag_rows: unprocessed rows in the journal; lag_s: the seconds since the oldest of them arrived.
        state_rows, state_bytes: the state of windows, joins and other operators.
        watermark: ISO time before which rows are too late; empty without a watermark.
        dropped_by_watermark: rows, or groups of them, that were too late for a window or a join since `since`.
        future: rows that were left out since `since` because their time was in the future.
        published: rows published since `since`.
        bad_json: payloads since `since` that were not a JSON object; wrong_type: rows with a field of another type.
        expectations: rows since `since` that failed an expectation, by its name. "on_error" counts rows that make a
            function fail; "fits the table" and "fits a message" count rows that can't be stored or published.
        ui: address of Spark's user interface; empty when it is disabled.
        error: the cause of a failure, one sentence.
        warning: a problem of a running query, one sentence, such as state that grows without bound.
        trouble: the obstacle to progress, one sentence; stuck_since: when it became stuck, in Unix seconds, else 0.
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
        Its status; None when it never ran. Its state is "dead" when its process on this machine has ended without
        setting a state.
    """
    try:
        values = dict(json.loads((query / FILE).read_text("utf-8")))
        status = Status(**{item.name: values[item.name] for item in fields_of(Status) if item.name in values})
    except (OSError, ValueError, TypeError):
        return None
    died = status.state in LIVE and running(query) is None and elsewhere(query) is None
    return replace(status, state="dead", rows_per_s=0.0) if died else status


def read_all(state: Path) -> list[Status]:
    """Read the status of every query that ever ran with this folder of state, by name."""
    folders = sorted(path for path in state.iterdir() if path.is_dir()) if state.is_dir() else []
    return [status for folder in folders if (status := read(folder))]


class StatusWriter:
    """Writes the status files of the queries that this process runs.

    Args:
        state: folder with one folder for each query.
        lag_seconds: measures the age of the oldest unprocessed row; called at most once a second for each query.
        lag_rows: counts the unprocessed rows; without it, the lag is the difference of the row numbers.
    """

    def __init__(self, state: Path, lag_seconds: LagSeconds | None = None, lag_rows: LagRows | None = None) -> None:
        self._state, self._lag_seconds, self._rows_between = state, lag_seconds, lag_rows
        self._lock = threading.Lock()
        self._statuses: dict[str, Status] = {}
        self._names: dict[str, str] = {}
        self._lag_measured_s: dict[str, float] = {}
        self._ui = ""
        self._last_event_s: dict[str, float] = {}
        self._trigger_s: dict[str, float] = {}

    def starting(self, name: str, kind: str, trigger_s: float = 0.0) -> None:
        """Register a query that is about to start in this process.

        Args:
            trigger_s: the shortest time between its micro-batches.
        """
        claim(self._state / name)
        before = read(self._state / name) or Status(name)  # keeps its position visible if this process fails early
        now = Status(name, kind, pid=os.getpid(), since=time.time(), ui=self._ui)
        with self._lock:
            self._last_event_s[name], self._trigger_s[name] = time.monotonic(), trigger_s
            self._put(replace(now, query_id=before.query_id, batch=before.batch, offset=before.offset))

    def set_position(self, name: str, batch: int, offset: dict[str, int]) -> None:
        """Set the last micro-batch of a query; Spark may not have reported it yet."""
        with self._lock:
            if now := self._statuses.get(name):
                self._put(replace(now, batch=batch, offset=offset))

    def add_published(self, name: str, published: int) -> None:
        """Add to the published rows of a query. The next event of Spark writes them to the file."""
        with self._lock:
            if now := self._statuses.get(name):
                self._statuses[name] = replace(now, published=now.published + published)

    def add_left_out(self, name: str, why: str, rows: int) -> None:
        """Add to the rows that a query has left out. The next event of Spark writes them to the file."""
        with self._lock:
            if now := self._statuses.get(name):
                self._statuses[name] = replace(now, expectations=_sums(now.expectations, {why: rows}))

    def ended(self, name: str, state: str, error: str = "") -> None:
        """Set the final state of a query.

        Args:
            state: "finished" (all rows are processed), "stopped" or "failed".
            error: the cause of the failure.
        """
        with self._lock:
            if now := self._statuses.get(name):
                self._put(replace(now, state=state, error=error, rows_per_s=0.0))
        release(self._state / name)

    def idle_batch(self, name: str) -> int | None:
        """Return the last micro-batch of a query that waits for rows; None when it does not wait."""
        now = self._statuses.get(name)
        return now.batch if now and now.state == "waiting" else None

    def set_trouble(self, name: str, trouble: str) -> None:
        """Set the obstacle to a query's progress; the next completed micro-batch clears it."""
        with self._lock:
            if (now := self._statuses.get(name)) and now.trouble != trouble:
                self._put(replace(now, trouble=trouble))

    def set_disk_full(self, name: str, trouble: str) -> None:
        """Set that a query waits for space on a full disk."""
        with self._lock:
            if now := self._statuses.get(name):
                since = now.stuck_since or time.time()
                self._put(replace(now, state=DISK_FULL, rows_per_s=0.0, trouble=trouble, stuck_since=since))

    def set_warning(self, name: str, warning: str) -> None:
        """Set a problem of a running query; an empty text clears it."""
        with self._lock:
            if (now := self._statuses.get(name)) and now.warning != warning:
                self._put(replace(now, warning=warning))

    def silent(self, least_s: float) -> list[tuple[Status, float]]:
        """Return the live queries without events, each with the seconds without events.

        Args:
            least_s: the minimum of seconds without an event of Spark, beyond the trigger of the query.
        """
        with self._lock:
            now_s = time.monotonic()
            silences = [
                (now, now_s - self._last_event_s[name] - self._trigger_s[name]) for name, now in self._statuses.items()
            ]
        return [(now, silent_s) for now, silent_s in silences if now.state in LIVE and silent_s >= least_s]

    def set_batch_running(self, name: str, lag_rows: int, trouble: str) -> None:
        """Set that a micro-batch is running while rows are unprocessed.

        Args:
            trouble: why it takes too long; empty otherwise.
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
        """Return the queries of this process, in the order in which they started."""
        with self._lock:
            return list(self._statuses.values())

    def watch(self, spark: SparkSession) -> Callable[[], None]:
        """Receive Spark's events about its queries, whose names are those given to `starting`.

        Args:
            spark: the session.

        Returns:
            A function that removes the listener.
        """
        self._ui = spark.sparkContext.uiWebUrl or ""
        return jvm.listen(spark, _Listener(self))

    def started(self, query_id: str, name: str) -> None:
        """Handle the event that Spark has started a query."""
        with self._lock:
            if now := self._statuses.get(name):
                self._names[query_id] = name
                self._last_event_s[name] = time.monotonic()
                state = DISK_FULL if now.state == DISK_FULL else "waiting"  # until a micro-batch is completed
                self._put(replace(now, state=state, query_id=query_id))

    def progressed(self, progress: Mapping[str, object]) -> None:
        """Handle the event that Spark has completed a micro-batch, or has found no rows.

        Args:
            progress: the JSON of a StreamingQueryProgress.
        """
        name = str(progress.get("name"))
        ends = _ends(progress)
        sources: Any = progress.get("sources") or []
        ranges = [(_offsets(one.get("endOffset")), _offsets(one.get("latestOffset"))) for one in sources]
        lag_rows = sum(max(0, seq - end.get(node, 0)) for end, latest in ranges for node, seq in latest.items())
        if lag_rows and self._rows_between is not None:
            found = [self._rows_between(name, *each) for each in ranges]
            lag_rows = lag_rows if None in found else sum(filter(None, found))
        lag_s: float | None = 0.0
        if lag_rows:
            now_s, lag_s = time.monotonic(), None  # None keeps the last measurement
            if self._lag_seconds and now_s - self._lag_measured_s.get(name, -_LAG_INTERVAL_S) >= _LAG_INTERVAL_S:
                self._lag_measured_s[name] = now_s
                lag_s = self._lag_seconds(name, ends)
        with self._lock:
            if now := self._statuses.get(name):
                self._last_event_s[name] = time.monotonic()
                after = _after(now, progress, lag_rows, now.lag_s if lag_s is None else lag_s)
                # Spark reports the last micro-batch after the query has ended.
                self._put(after if now.state in LIVE else replace(after, state=now.state, rows_per_s=0.0))

    def idle(self, query_id: str) -> None:
        """Handle the event that Spark has found no rows for ten seconds."""
        with self._lock:
            now = self._statuses.get(self._names.get(query_id, ""))
            if now and now.state in LIVE:
                self._last_event_s[now.name] = time.monotonic()
                self._put(replace(now, state="waiting", rows_per_s=0.0, lag_rows=0, lag_s=0.0, **_NO_TROUBLE))

    def _put(self, status: Status) -> None:
        self._statuses[status.name] = status = replace(status, updated=time.time())
        folder = self._state / status.name
        temporary, text = folder / (FILE + ".new"), json.dumps(asdict(status), indent=1)
        try:
            temporary.write_text(text, "utf-8")
            temporary.rename(folder / FILE)
        except OSError:
            with suppress(OSError):  # a full disk must not end a query that can continue
                # Without space for a second file, the first one is overwritten if the text fits into its blocks.
                data = text.encode()
                with (folder / FILE).open("r+b", buffering=0) as file:
                    found = os.fstat(file.fileno())
                    if len(data) <= found.st_blocks * 512:  # st_blocks counts units of 512 bytes on every file system
                        file.write(data.ljust(found.st_size))


class _Listener:
    """Listener that receives progress as JSON: see `jvm.listen`."""

    def __init__(self, status: StatusWriter) -> None:
        self._status = status

    def onQueryStarted(self, event: Any) -> None:
        self._status.started(event.id().toString(), event.name())

    def onQueryProgress(self, event: Any) -> None:
        self._status.progressed(json.loads(event.progress().json()))

    def onQueryIdle(self, event: Any) -> None:
        self._status.idle(event.id().toString())

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing: the runner has the exception and sets the final state of a query."""

    class Java:
        implements = ["org.apache.spark.sql.streaming.PythonStreamingQueryListener"]


def _after(now: Status, progress: Mapping[str, Any], lag_rows: int, lag_s: float) -> Status:
    rows = int(progress.get("numInputRows") or 0)
    operators = progress.get("stateOperators") or []
    observed = progress.get("observedMetrics") or {}
    watermark = str((progress.get("eventTime") or {}).get("watermark", ""))
    # The first micro-batch has no arrival rate, because no earlier trigger exists.
    rows_per_s = progress.get("inputRowsPerSecond") or progress.get("processedRowsPerSecond") or 0.0
    return replace(
        now,
        state="running" if rows or lag_rows else "waiting",
        batch=int(progress.get("batchId", now.batch)),
        batch_ms=int(progress.get("batchDuration") or 0),
        offset=_ends(progress) or now.offset,
        rows=now.rows + rows,
        rows_per_s=round(float(rows_per_s), 1),
        processed_rows_per_s=round(float(progress.get("processedRowsPerSecond") or 0.0), 1),
        lag_rows=lag_rows,
        lag_s=round(lag_s, 3),
        state_rows=_sum(operators, "numRowsTotal"),
        state_bytes=_sum(operators, "memoryUsedBytes"),
        watermark=watermark if watermark and not watermark.startswith(_EPOCH) else now.watermark,
        dropped_by_watermark=now.dropped_by_watermark + _sum(operators, "numRowsDroppedByWatermark"),
        future=now.future + _observed(observed, row_checks.future_observation(""), row_checks.FUTURE),
        bad_json=now.bad_json + _observed(observed, row_checks.json_observation(""), row_checks.BAD_JSON),
        wrong_type=now.wrong_type + _observed(observed, row_checks.json_observation(""), row_checks.WRONG_TYPE),
        expectations=_sums(now.expectations, row_checks.failed_counts(observed)),
        **_NO_TROUBLE,
    )


def _sum(operators: Iterable[Mapping[str, Any]], field: str) -> int:
    return sum(int(operator.get(field) or 0) for operator in operators)


def _observed(observed: Mapping[str, Any], prefix: str, column: str) -> int:
    return sum(int(values.get(column) or 0) for name, values in observed.items() if name.startswith(prefix))


def _sums(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _ends(progress: Mapping[str, Any]) -> dict[str, int]:
    """Return the position of the query: for each node, the next row of its slowest source."""
    ends: dict[str, int] = {}
    for source in progress.get("sources") or []:
        for node, end in _offsets(source.get("endOffset")).items():
            ends[node] = min(end, ends.get(node, end))
    return ends


def _offsets(value: Any) -> dict[str, int]:
    """Return the offsets of the source `smq`, which Spark passes as an object or as text; empty for other sources."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    numbers = value.items() if isinstance(value, dict) else ()
    return {str(node): seq for node, seq in numbers if isinstance(seq, int) and not isinstance(seq, bool)}


# ---- Metrics for Prometheus, read from the status files at each request

_GAUGES = {
    "rows_per_s": ("smqrt_pipeline_rows_per_second", "Rows that arrived per second before the last micro-batch."),
    "processed_rows_per_s": (
        "smqrt_pipeline_processed_rows_per_second",
        "Rows that the last micro-batch processed per second.",
    ),
    "lag_rows": ("smqrt_pipeline_lag_rows", "Rows in the journal that wait to be read."),
    "lag_s": ("smqrt_pipeline_lag_seconds", "Time since the oldest of the unread rows in the journal arrived."),
    "state_rows": ("smqrt_pipeline_state_rows", "Rows in the state of windows, joins and the like."),
    "state_bytes": ("smqrt_pipeline_state_bytes", "Memory of the rows in the state of windows, joins and the like."),
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
    "bad_json": ("smqrt_pipeline_bad_json", "Payloads that were not a JSON object."),
    "wrong_type": ("smqrt_pipeline_wrong_type", "Rows with a JSON field of another type."),
}


class PipelineMetrics:
    """Metrics of the queries of one folder of state, as a collector of prometheus-client.

    Args:
        state: the folder.
        names: only these queries; empty means all.
        journal: folder or URL of the journal; the readers of a folder have metrics too.
    """

    def __init__(self, state: Path, names: Iterable[str] = (), journal: str = "") -> None:
        self._state, self._names, self._journal = state, set(names), journal

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with one value for each query."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statuses = [each for each in read_all(self._state) if not self._names or each.name in self._names]
        failures = CounterMetricFamily(
            "smqrt_pipeline_expectation_failures",
            "Rows that failed an expectation.",
            labels=["query", "expectation"],
        )
        watermark_lag = GaugeMetricFamily(
            "smqrt_pipeline_watermark_lag_seconds",
            "Time between the watermark and now, for queries that have one.",
            labels=["query"],
        )
        up = GaugeMetricFamily("smqrt_pipeline_up", "1 while the query runs.", labels=["query"])
        took = GaugeMetricFamily("smqrt_pipeline_batch_seconds", "Time of the last micro-batch.", labels=["query"])
        stuck = GaugeMetricFamily(
            "smqrt_pipeline_stuck_seconds",
            "Time without progress although rows wait to be read.",
            labels=["query"],
        )
        for each in statuses:
            stuck.add_metric([each.name], max(0.0, time.time() - each.stuck_since) if each.stuck_since else 0.0)
            up.add_metric([each.name], float(each.state in LIVE))
            took.add_metric([each.name], each.batch_ms / 1000)
            if each.watermark:
                lag_s = time.time() - datetime.fromisoformat(each.watermark).timestamp()
                watermark_lag.add_metric([each.name], lag_s)
            for name, rows in each.expectations.items():
                failures.add_metric([each.name, name], rows)
        yield from (up, took, stuck)
        for family, kinds in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field_name, (metric_name, text) in kinds.items():
                metric = family(metric_name, text, labels=["query"])
                for each in statuses:
                    metric.add_metric([each.name], float(getattr(each, field_name)))
                yield metric
        yield watermark_lag
        yield failures
        if self._journal and "://" not in self._journal:
            yield from _readers(Path(self._journal))


def _readers(journal: Path) -> Iterator[Metric]:
    """Yield the metrics of every reader of the journal. The journal keeps rows for a reader that is not running."""
    from prometheus_client.core import GaugeMetricFamily

    lag = GaugeMetricFamily("smqrt_journal_reader_lag_rows", "Rows that wait for a reader.", labels=["reader"])
    text = "Time since a reader last reported its progress."
    silent = GaugeMetricFamily("smqrt_journal_reader_silent_seconds", text, labels=["reader"])
    with suppress(JournalError):  # the metrics of the queries are valid without these
        for reader, behind in readers.backlogs(journal):
            lag.add_metric([reader.name], behind)
            silent.add_metric([reader.name], reader.silent_s(time.time_ns() // 1000))
    yield from (lag, silent)


def serve(state: Path, names: Iterable[str], port: int, journal: str = "") -> int:
    """Serve Prometheus metrics on http://127.0.0.1:port/metrics from a thread, until the process ends.

    Args:
        state: the folder of state.
        names: only these queries; empty means all.
        port: 0 selects a free port.
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
        raise PipelineError(f"--metrics: port {port} can't be used ({error.strerror}); use another port.") from None
    return int(server.server_port)
