"""`smqrt pipeline test`: runs queries on recorded messages and compares the results with golden files.

A test works without a hub and starts Spark once. Each query runs as a stream, in one micro-batch over all recorded
messages, so its results depend only on these messages: an update publishes each group once, and the silence of an alert
is measured by the times of the messages.
(help: pipeline-rules)
"""

from __future__ import annotations

import json
import keyword
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from smqrt.errors import PipelineError
from smqrt.journal import arrow, segment
from smqrt.journal.record import Flag, Row
from smqrt.journal.remote import open_journal
from smqrt.pipeline import alerts, checkpoint, discover, failing_rows, session, sinks
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.discover import Catalog, column, load
from smqrt.pipeline.failing_rows import FailingRow
from smqrt.pipeline.failures import running_error
from smqrt.pipeline.graph import FrameFactory, Graph, JournalSource, QueryPlan, plans
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


FOLDER = "tests"
"""The folder, in that of the pipelines, of the recorded messages and of one golden file for each query."""


# ---- Golden files: a list with one JSON object per line, for short diffs. Rows have no order, and numbers that differ
# by rounding are equal.

TOLERANCE = 1e-9
"""Relative tolerance of numbers, because the order of a sum changes its rounding."""
_MAX_SHOWN = 10
_MIN_SIMILARITY = 0.5
"""The share of equal fields from which two rows are shown as one difference."""


def load_golden(file: Path) -> list[object]:
    """Read a golden file.

    Raises:
        PipelineError: it is not a JSON list.
    """
    try:
        rows = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} can't be read: {error}; smqrt pipeline test --update rewrites it.") from None
    if not isinstance(rows, list):
        raise PipelineError(f"{file} must contain a JSON list of rows; smqrt pipeline test --update rewrites it.")
    return rows


def save_golden(file: Path, rows: Sequence[object]) -> None:
    """Write a golden file: the sorted rows, one per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(_text(row) for row in rows)
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n", "utf-8")


def differences(expected: Sequence[object], found: Sequence[object]) -> tuple[list[object], list[object]]:
    """Return the expected rows that were not found, and the rows found that were not expected."""
    unexpected: dict[str, list[object]] = {}
    for row in found:
        unexpected.setdefault(_text(row), []).append(row)
    missing = []
    for row in expected:
        if same := unexpected.get(_text(row)):
            same.pop()
        else:
            missing.append(row)
    extra = [row for rows in unexpected.values() for row in rows]
    still_missing = []
    for row in missing:  # compared one by one, since numbers may differ by rounding
        match = next((number for number, other in enumerate(extra) if equal(row, other)), None)
        if match is None:
            still_missing.append(row)
        else:
            del extra[match]
    return sorted(still_missing, key=_text), sorted(extra, key=_text)


def equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal except for rounding."""
    if isinstance(one, float) or isinstance(other, float):
        return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def explain(missing: Sequence[object], extra: Sequence[object]) -> Iterator[str]:
    """Yield lines about differences: "-" was expected, "+" was found. Similar rows are listed together."""
    unpaired, pairs = list(extra), list[tuple[object, object]]()
    for row in missing:
        similarities = []
        for other in unpaired:
            left, right = dict(_leaves("", row)), dict(_leaves("", other))
            names = left.keys() | right.keys()
            same = sum(name in left and name in right and equal(left[name], right[name]) for name in names)
            similarities.append(same / len(names) if names else 0.0)
        best = max(similarities, default=0.0)
        pairs.append((row, unpaired.pop(similarities.index(best)) if best >= _MIN_SIMILARITY else None))
    pairs += [(None, row) for row in unpaired]
    for expected, found in pairs[:_MAX_SHOWN]:
        if expected is not None:
            yield f"  - {_text(expected)}"
        if found is not None:
            yield f"  + {_text(found)}"
        if expected is None or found is None:
            continue
        left, right = dict(_leaves("", expected)), dict(_leaves("", found))
        for name in sorted(left.keys() | right.keys()):
            if name not in right:
                yield f"      {name}: expected {_text(left[name])}, it is missing"
            elif name not in left:
                yield f"      {name}: {_text(right[name])} was not expected"
            elif not equal(left[name], right[name]):
                yield f"      {name}: expected {_text(left[name])}, found {_text(right[name])}"
    if len(pairs) > _MAX_SHOWN:
        yield f"  ... and {len(pairs) - _MAX_SHOWN} more"


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), part)
    else:
        yield path, value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


# ---- Recorded messages, as written by `smqrt journal export FILE.jsonl`: one JSON object per line. The minimum is:
#     {"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"device": "a", "temp": 21.5}}

NODE = "n1"

_BATCH_ROWS = 4096
_FIELDS = ("topic", "ts", "payload", "payload_hex", "subtopic", "uid", "flags", "qos", "retain", "properties")
_IGNORED_FIELDS = ("node", "seq", "tid", "stid", "ptid", "txn", "broker", "json")
"""Fields that are valid only for one connection or one start of a broker."""


def write_journal(file: Path, to: Path) -> int:
    """Write a journal with the messages of a file, in their order.

    Args:
        file: a file with one JSON object per line; empty lines are ignored.
        to: folder of the journal, which is created.

    Returns:
        The number of messages.

    Raises:
        PipelineError: the file can't be read, or a line isn't a message; the message begins with file:line.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}.") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_journal_row(len(rows), json.loads(line)))
            except ValueError as error:
                raise PipelineError(f"{file}:{number}: {error}; a line is like {_EXAMPLE}") from None
    if not rows:
        raise PipelineError(f"{file} contains no message; write one JSON object per line: {_EXAMPLE}")
    format_ = 1 if all(row.qos is None for row in rows) else arrow.FORMAT
    written = segment.SegmentFile.open(to / "wal" / NODE, 0, NODE, "recorded", format_)
    try:
        for first in range(0, len(rows), _BATCH_ROWS):
            some = rows[first : first + _BATCH_ROWS]
            times_us = [row.ts_us for row in some]
            batch = arrow.encode(some, arrow.LAYOUTS[format_])
            written.append(batch, first, len(some), min(times_us), max(times_us), 0)
    finally:
        written.close()
    return len(rows)


_EXAMPLE = '{"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"temp": 21.5}}'


def _journal_row(seq: int, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ValueError("it isn't a JSON object")
    for name in values:
        if name not in _FIELDS and name not in _IGNORED_FIELDS:
            raise ValueError(f"a message has no field {name!r}; its fields are {', '.join(_FIELDS)}")
    topic, given = values.get("topic"), values.get("flags") or 0
    try:
        flags = given if isinstance(given, int) else int(sum(Flag[str(word).upper()] for word in given))
    except (KeyError, TypeError):
        known = ", ".join(flag.name.lower() for flag in Flag if flag.name)
        raise ValueError(f"flags={given!r}: the flags are {known}") from None
    if topic is None:
        flags |= Flag.DIRECT
    if "payload_hex" in values:
        payload = bytes.fromhex(values["payload_hex"])
    elif "payload" in values:
        found = values["payload"]
        payload = (found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)).encode()
    else:
        raise ValueError("there is no payload")
    subtopic, uid = values.get("subtopic"), values.get("uid")
    ts: Any = values.get("ts")
    if isinstance(ts, int | float) and not isinstance(ts, bool):
        ts_us = round(ts * 1_000_000)
    else:
        try:
            moment = datetime.fromisoformat(ts)
        except (TypeError, ValueError):
            raise ValueError(f"ts={ts!r} is neither an ISO time nor seconds since 1970") from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        # Whole seconds and microseconds separately: a float would round the microseconds.
        ts_us = int(moment.replace(microsecond=0).timestamp()) * 1_000_000 + moment.microsecond
    mqtt = _mqtt_fields(values)
    return Row(seq, ts_us, topic, None, subtopic, None, None, uid, flags, payload, None, *mqtt)


def _mqtt_fields(values: Mapping[str, Any]) -> tuple[int | None, bool | None, str | None]:
    """Return qos, retain and properties; a message with one of them is of an MQTT client."""
    qos, retain, properties = (values.get(name) for name in ("qos", "retain", "properties"))
    if qos is None and retain is None and properties is None:
        return None, None, None
    if qos not in (None, 0, 1, 2) or not isinstance(retain, bool | None):
        raise ValueError(f"qos={qos!r}, retain={retain!r}: qos is 0, 1 or 2, and retain is true or false")
    text = properties if isinstance(properties, str) else json.dumps(properties or {}, ensure_ascii=False)
    return qos or 0, bool(retain), text


# ---- A pipeline to start from

_PIPELINE_TEXT = '''"""The mean temperature of each device and minute.

Devices publish to site1/...: {"device": "d1", "temp": 21.5}. Results are published to NAME/{device}.
"""

from pyspark.sql import functions as F

from smqrt.pipeline import expect, publish, source


@source(topics="site1/#", json="device string, temp double", watermark="10 seconds")
@expect("temp between -60 and 150", on_fail="drop")
def NAME_readings(rows):
    return rows


@publish(to="NAME/{device}", mode="update")
def NAME(NAME_readings):
    # The window column has the watermark, so Spark removes its state after its end. A column computed from it has none.
    windows = NAME_readings.groupBy("device", F.window("ts", "1 minute").alias("minute"))
    means = windows.agg(F.round(F.avg("temp"), 2).alias("mean"), F.count("*").alias("n"))
    return means.select("device", F.col("minute.start").alias("minute"), "mean", "n")
'''
_EXAMPLE_ROWS = (
    ("12:00:01", "site1/hall", {"device": "d1", "temp": 20.0}),
    ("12:00:02", "site1/hall", {"device": "d2", "temp": 30.5}),
    ("12:00:31", "site1/hall", {"device": "d1", "temp": 21.0}),
    ("12:00:32", "site1/hall", {"device": "d2", "temp": 999}),
    ("12:00:33", "site1/hall", "no JSON"),
    ("12:01:10", "site1/hall", {"device": "d1", "temp": 22.25}),
    ("12:01:11", "site2/hall", {"device": "d3", "temp": 1.0}),
)
_MEANS = (("d1", "12:00", 20.5, 2), ("d1", "12:01", 22.25, 1), ("d2", "12:00", 30.5, 1))
_DAY = "2026-11-21T"


def make_pipeline(folder: Path, name: str) -> list[Path]:
    """Create a pipeline file, and the messages and the expected results of its test.

    Existing messages are kept: check the results, and save them with `--update`.

    Args:
        folder: the folder of pipelines, usually `<application>/pipelines`; created when it is missing.
        name: the name of the file and of its query.

    Returns:
        The created files.

    Raises:
        PipelineError: `name` is not a valid function name, the file already exists, or a file can't be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise PipelineError(f"{name!r} is not a function name: use letters, digits and '_', as in per_minute.")
    files = {folder / f"{name}.py": _PIPELINE_TEXT.replace("NAME", name)}
    if not list((folder / FOLDER).glob("*.jsonl")):
        rows = ({"topic": topic, "ts": f"{_DAY}{time}Z", "payload": payload} for time, topic, payload in _EXAMPLE_ROWS)
        means = (  # in the format of `smqrt pipeline test --update`
            {
                "topic": f"{name}/{device}",
                "payload": {"device": device, "minute": f"{_DAY}{minute}:00.000Z", "mean": mean, "n": n},
            }
            for device, minute, mean, n in _MEANS
        )
        files[folder / FOLDER / "messages.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        files[folder / FOLDER / f"{name}.json"] = "[\n" + ",\n".join(map(json.dumps, means)) + "\n]\n"
    for path in files:
        if path.exists():
            raise PipelineError(f"{path} already exists: choose another name.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise PipelineError(f"{error.filename} can't be written: {error.strerror}.") from None
    return list(files)


# A test ends before Java's optimizing compiler is useful, and parallel collectors start more threads.
_FAST_JVM = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
_ALL_ROWS, _ALL_BYTES = 2**31 - 1, 2**62
"""Limits with which one micro-batch has all recorded messages."""


def run(
    folder: Path,
    journal: Path | None = None,
    update: bool = False,
    names: Sequence[str] = (),
    say: Callable[[str], None] = print,
    spark: SparkSession | None = None,
    stopping: threading.Event | None = None,
) -> int:
    """Run the queries of a folder on recorded messages, and compare their results with golden files.

    Args:
        folder: the folder of pipelines, or one of its files.
        journal: the recorded messages: a journal's folder, or a .jsonl file (see `write_journal`); by default the
            .jsonl file in the folder `tests`.
        update: write the golden files instead of comparing.
        names: the queries, such as "hot" or "readings.dead_letters"; empty means all.
        say: prints a line.
        spark: a session to use, which is not stopped; None starts one and stops it at the end.
        stopping: set to end the test before the next query, without further output.

    Returns:
        0, or 1 when a query fails or has other results.

    Raises:
        PipelineError: the pipelines or the messages can't be read, or Spark doesn't start.
    """
    stopping, folder_catalog = stopping or threading.Event(), load(folder)
    printer = say

    def say_unless_stopped(line: str) -> None:
        if not stopping.is_set():
            printer(line)

    catalog = _test_catalog(folder_catalog)
    found = plans(catalog, catalog.select())
    letters = [plan.name for plan in found if plan.shared]
    catalog.select([name for name in names if name not in letters])  # raises PipelineError for an unknown name
    wanted = [plan for plan in found if plan.name in names] if names else found
    golden = catalog.folder / FOLDER
    with tempfile.TemporaryDirectory(prefix="smqrt-test-") as scratch:
        recorded = _recorded_journal(catalog.folder, journal, Path(scratch))
        own = spark or session.start_spark("local[2]", "smqrt pipeline test", Path(scratch), _FAST_JVM)
        try:
            test = _Test(own, catalog, JournalSource(str(recorded)), Path(scratch))
            passed = [
                _test_query(test, plan, golden, update, say_unless_stopped)
                for plan in takewhile(lambda _: not stopping.is_set(), wanted)
            ]
        finally:
            if spark is None:
                own.stop()
    if not names:  # otherwise the files of the other queries would be reported
        for file in sorted(golden.glob("*.json")):
            if file.stem not in [plan.name for plan in wanted]:
                say_unless_stopped(f"unused   {file}: no query has this name")
    return 0 if all(passed) else 1


class _Test:
    """Runs queries on recorded messages."""

    def __init__(self, spark: SparkSession, catalog: Catalog, journal: JournalSource, scratch: Path) -> None:
        self._spark, self._catalog, self._journal, self._scratch = spark, catalog, journal, scratch

    def rows(self, plan: QueryPlan, say: Callable[[str], None]) -> list[dict[str, object]]:
        """Return the results of a query in the format of golden files; `say` reports the rows that are left out.

        The results of a table are its rows. Those of other queries are messages: `topic`, `subtopic` unless it is NULL,
        and `payload` as JSON or text, or `payload_hex` when it is neither.
        """
        left_out, start = failing_rows.LeftOutRows(), checkpoint.QueryStart({}, None)

        def stream(source: Declaration) -> DataFrame:
            rows = self._journal.stream(self._spark, source, start, f"test.{plan.name}")
            return failing_rows.without(rows, left_out.rows)

        while True:
            try:
                frame = plan.make(self._graph(stream))
                frame = frame if plan.declaration.kind == "table" else as_messages(frame, plan.declaration)
                return self._run(frame, plan)
            except PipelineError:
                raise
            except Exception as error:
                more = self._failing_rows(plan, error, left_out.rows)
                if not more:
                    raise PipelineError(running_error(plan.declaration, error)) from None
                left_out.add(more, None, open_journal(self._journal.location))
                say(f"         {plan.name}: {failing_rows.summary(more)}")

    def _failing_rows(self, plan: QueryPlan, error: Exception, known: failing_rows.RowNumbers) -> list[FailingRow]:
        """Return the rows that make a query fail and that `on_error` leaves out."""
        if not failing_rows.is_wanted(plan.declaration, error):
            return []

        def compute(start: Offsets, end: Offsets, found: failing_rows.RowNumbers) -> Exception | None:
            without = failing_rows.merged(known, found)
            graph = self._graph(
                lambda one: failing_rows.without(self._journal.batch(self._spark, one, start, end), without)
            )
            return failing_rows.error_of(lambda: sinks.sink_frame(plan.make(graph), plan.declaration))

        journal = open_journal(self._journal.location)
        span = failing_rows.Span(dict(journal.begin()), dict(journal.end()))
        return failing_rows.Search(compute, span, plan.name).rows()

    def _graph(self, sources: FrameFactory) -> Graph:
        return Graph(
            self._catalog,
            sources,
            lambda reference: discover.table(self._spark, reference, self._catalog.folder),
        )

    def _run(self, frame: DataFrame, plan: QueryPlan) -> list[dict[str, object]]:
        from pyspark.sql import functions as F

        is_table = plan.declaration.kind == "table"
        times = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "ignoreNullFields": "false"}
        found: list[dict[str, object]] = []
        raised: list[Exception] = []

        def take(batch: DataFrame, number: int) -> None:
            if plan.declaration.options["mode"] == "complete":  # each micro-batch has all rows
                found.clear()
            try:
                if is_table:
                    columns = F.struct(*(column(name) for name in batch.columns))
                    rows = batch.select(F.to_json(columns, times).alias("row")).collect()
                    found.extend([json.loads(row.row) for row in rows])
                else:
                    found.extend(message_rows(batch))
            except Exception as error:
                raised.append(error)
                # Spark applies a regular expression to this text, which overflows the stack when the text is long.
                raise RuntimeError(type(error).__name__) from None

        writer = frame.writeStream.outputMode(plan.declaration.options["mode"]).foreachBatch(take)
        # A new folder each time: an earlier attempt may have failed in its only micro-batch.
        writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=self._scratch))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except Exception:
            if raised:
                raise raised[-1] from None
            raise
        return found


def _test_catalog(catalog: Catalog) -> Catalog:
    """Change the options for a test: one micro-batch for all messages, whose times replace the clock."""
    changed: dict[str, dict[str, Any]] = {
        "source": {"max_rows": _ALL_ROWS, "max_bytes": _ALL_BYTES, "recorded": True},
        "alert": {"clock": alerts.EVENT},
    }
    return Catalog(
        catalog.folder,
        [
            replace(
                each,
                options=each.options | changed.get(each.kind, {}),
                state=each.state and replace(each.state, recorded=True),
            )
            for each in catalog.declarations.values()
        ],
    )


def _recorded_journal(folder: Path, journal: Path | None, scratch: Path) -> Path:
    recorded = journal
    if recorded is None:
        found = sorted((folder / FOLDER).glob("*.jsonl"))
        if len(found) != 1:
            there = f"There are {len(found)} .jsonl files" if found else "There is no .jsonl file"
            raise PipelineError(
                f"{there} in {folder / FOLDER}; select the rows of the test with --journal. "
                f"smqrt journal export --to {folder / FOLDER}/messages.jsonl records messages."
            )
        [recorded] = found
    if not recorded.exists():
        raise PipelineError(f"{recorded} does not exist; give --journal a journal's folder or a .jsonl file.")
    if recorded.is_dir():
        return recorded
    write_journal(recorded, scratch / "journal")
    return scratch / "journal"


def _test_query(test: _Test, plan: QueryPlan, folder: Path, update: bool, say: Callable[[str], None]) -> bool:
    file = folder / f"{plan.name}.json"
    try:
        rows = test.rows(plan, say)
        expected = load_golden(file) if file.exists() and not update else None
    except PipelineError as error:
        say(f"FAILED   {plan.name}: {error}")
        return False
    if update:
        same = file.exists() and file.read_text("utf-8").strip() and differences(load_golden(file), rows) == ([], [])
        if not same:
            save_golden(file, rows)
        say(f"{'the same' if same else 'written '} {plan.name}: {_count(rows)} in {file}")
        return True
    if expected is None:
        say(f"FAILED   {plan.name}: {file} does not exist; check the results ({_count(rows)}) and use --update:")
        missing, extra = list[object](), list[object](rows)
    else:
        missing, extra = differences(expected, rows)
        if not missing and not extra:
            say(f"ok       {plan.name}: {_count(rows)}")
            return True
        say(f"FAILED   {plan.name}: {_count(missing)} of {file} missing (-), {_count(extra)} not expected (+)")
    for line in explain(missing, extra):
        say(line)
    return False


def _count(rows: Sequence[object]) -> str:
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def message_rows(batch: DataFrame) -> Iterator[dict[str, object]]:
    """Yield the messages of a frame from `sinks.as_messages`, in the format of golden files."""
    for row in batch.collect():
        message: dict[str, object] = {"topic": row.topic}
        if row.subtopic is not None:
            message["subtopic"] = row.subtopic
        payload = bytes(row.payload or b"")
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            yield message | {"payload_hex": payload.hex()}
            continue
        try:
            message["payload"] = json.loads(text)
        except ValueError:
            message["payload"] = text
        yield message
