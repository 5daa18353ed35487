"""`smqrt pipeline test`: every query on a recorded slice, compared with what it is expected to give. No hub, one Spark.

Each query runs as the stream that it is, in one micro-batch over the whole slice. So what it gives depends on the slice
alone: an update tells each group once, and the silence that an alert waits for goes by the times of the messages.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

import json
import keyword
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from smqrt.errors import PipelineError
from smqrt.journal import arrow, segment
from smqrt.journal.record import Flag, Row
from smqrt.journal.remote import open_journal
from smqrt.pipeline import alerts, checkpoint, failing_rows, references, session, sinks
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.discover import Catalog, load
from smqrt.pipeline.failing_rows import FailingRow
from smqrt.pipeline.failures import running_error
from smqrt.pipeline.graph import FrameFactory, Graph, JournalSource, QueryPlan, plans
from smqrt.pipeline.references import column
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- Files of `smqrt pipeline init` and `test`: a pipeline to start from, recorded rows, and the results to expect.
#
# Golden files have one JSON object a line in a list, so that diffs are short. Rows have no order, and numbers that
# differ
# by rounding are equal.

FOLDER = "tests"
"""In the folder of pipelines: the slice, and one golden file for each query."""


# ---- golden files

TOLERANCE = 1e-9
"""By how much of itself a number may differ; sums in another order round differently."""

_SHOWN = 10


def load_golden(file: Path) -> list[object]:
    """Read a golden file.

    Raises:
        PipelineError: it is no JSON list.
    """
    try:
        rows = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} can't be read: {error}; smqrt pipeline test --update writes it anew.") from None
    if not isinstance(rows, list):
        raise PipelineError(f"{file} must hold a JSON list of rows; smqrt pipeline test --update writes it anew.")
    return rows


def save_golden(file: Path, rows: Sequence[object]) -> None:
    """Write a golden file: rows sorted, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(_text(row) for row in rows)
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n", "utf-8")


def differences(expected: Sequence[object], found: Sequence[object]) -> tuple[list[object], list[object]]:
    """Return the expected rows that were not found, and the rows found that were not expected."""
    extra: dict[str, list[object]] = {}
    for row in found:
        extra.setdefault(_text(row), []).append(row)
    missing = [row for row in expected if not _taken(extra, _text(row))]
    rest = [row for rows in extra.values() for row in rows]
    still = []
    for row in missing:
        near = next((number for number, other in enumerate(rest) if equal(row, other)), None)
        if near is None:
            still.append(row)
        else:
            del rest[near]
    return sorted(still, key=_text), sorted(rest, key=_text)


def equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal but for rounding."""
    if isinstance(one, float) or isinstance(other, float):
        return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def explain(missing: Sequence[object], extra: Sequence[object]) -> Iterator[str]:
    """Yield lines that tell differences: "-" was expected, "+" was found; rows that are alike stand together."""
    pairs = list(_pairs(list(missing), list(extra)))
    for expected, found in pairs[:_SHOWN]:
        if expected is not None:
            yield f"  - {_text(expected)}"
        if found is not None:
            yield f"  + {_text(found)}"
        if expected is not None and found is not None:
            yield from (f"      {line}" for line in _fields("", expected, found))
    if len(pairs) > _SHOWN:
        yield f"  ... and {len(pairs) - _SHOWN} more"


def _pairs(missing: list[object], extra: list[object]) -> Iterator[tuple[object, object]]:
    for row in missing:
        likeness = [_alike(row, other) for other in extra]
        best = max(likeness, default=0.0)
        yield row, extra.pop(likeness.index(best)) if best >= 0.5 else None
    yield from ((None, row) for row in extra)


def _alike(one: object, other: object) -> float:
    """Return which part of two rows is equal."""
    left, right = dict(_leaves("", one)), dict(_leaves("", other))
    names = left.keys() | right.keys()
    same = sum(1 for name in names if name in left and name in right and equal(left[name], right[name]))
    return same / len(names) if names else 0.0


def _fields(path: str, expected: object, found: object) -> Iterator[str]:
    left, right = dict(_leaves(path, expected)), dict(_leaves(path, found))
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield f"{name}: expected {_text(left[name])}, it is missing"
        elif name not in left:
            yield f"{name}: {_text(right[name])} was not expected"
        elif not equal(left[name], right[name]):
            yield f"{name}: expected {_text(left[name])}, found {_text(right[name])}"


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), part)
    else:
        yield path, value


def _taken(rows: dict[str, list[object]], text: str) -> bool:
    if not rows.get(text):
        return False
    rows[text].pop()
    return True


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


# ---- recorded rows: what `smqrt journal export FILE.jsonl` writes, one JSON object a line; by hand, these are enough:
#     {"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"device": "a", "temp": 21.5}}

NODE = "n1"

_BATCH_ROWS = 4096
_KNOWN = ("topic", "ts", "payload", "payload_hex", "subtopic", "uid", "flags")
_IGNORED = ("node", "seq", "tid", "stid", "ptid", "txn", "broker", "json")


def write_journal(file: Path, to: Path) -> int:
    """Write a journal with the messages of a file, in their order.

    Args:
        file: with one JSON object a line; empty lines don't count.
        to: folder of the journal; made.

    Returns:
        How many messages it has.

    Raises:
        PipelineError: the file can't be read, or a line isn't a message; the sentence begins with file:line.
    """
    rows = list(_journal_rows(file))
    if not rows:
        raise PipelineError(f"{file} holds no message; write one JSON object a line: {_EXAMPLE}")
    written = segment.SegmentFile.open(to / "wal" / NODE, 0, NODE, "recorded")
    try:
        for first in range(0, len(rows), _BATCH_ROWS):
            some = rows[first : first + _BATCH_ROWS]
            times_us = [row.ts_us for row in some]
            written.append(arrow.encode(some), first, len(some), min(times_us), max(times_us), 0)
    finally:
        written.close()
    return len(rows)


_EXAMPLE = '{"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"temp": 21.5}}'


def _journal_rows(file: Path) -> Iterator[Row]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}.") from None
    lines = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    for seq, (number, line) in enumerate(lines):
        try:
            yield _journal_row(seq, json.loads(line))
        except ValueError as error:
            raise PipelineError(f"{file}:{number}: {error}; a line is like {_EXAMPLE}") from None


def _journal_row(seq: int, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ValueError("it isn't a JSON object")
    for name in values:
        if name not in _KNOWN and name not in _IGNORED:
            raise ValueError(f"there is no {name!r} in a message; it has {', '.join(_KNOWN)}")
    topic, flags = values.get("topic"), _flags(values.get("flags"))
    if topic is None:
        flags |= Flag.DIRECT
    # What lasts only as long as a connection or a broker says nothing in a test.
    subtopic, uid = values.get("subtopic"), values.get("uid")
    return Row(
        seq, _time_us(values.get("ts")), topic, None, subtopic, None, None, uid, flags, _payload_bytes(values), None
    )


def _time_us(value: Any) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * 1_000_000)
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"ts={value!r} is neither an ISO time nor seconds since 1970") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + moment.microsecond


def _payload_bytes(values: dict[str, Any]) -> bytes:
    if "payload_hex" in values:
        return bytes.fromhex(values["payload_hex"])
    if "payload" not in values:
        raise ValueError("there is no payload")
    payload = values["payload"]
    return (payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)).encode()


def _flags(value: Any) -> int:
    if value is None or isinstance(value, int):
        return value or 0
    try:
        return int(sum(Flag[str(word).upper()] for word in value))
    except (KeyError, TypeError):
        raise ValueError(
            f"flags={value!r}: there are {', '.join(flag.name.lower() for flag in Flag if flag.name)}"
        ) from None


# ---- a pipeline to start from

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
    # The window itself carries the watermark, and so is forgotten when it is over; a column made of it does not.
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
    """Make a pipeline file, and the rows and the expected results of its test.

    Rows that are there already are kept: then the results are yours to look at, and to keep with `--update`.

    Args:
        folder: where pipelines lie, usually `<application>/pipelines`; made when it isn't there.
        name: of the file, and of the query in it.

    Returns:
        The files that were made.

    Raises:
        PipelineError: `name` can't be a function's name, the file is there already, or one can't be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise PipelineError(f"{name!r} names a Python function too: take letters, digits and '_', as in per_minute.")
    files = {folder / f"{name}.py": _PIPELINE_TEXT.replace("NAME", name)}
    if not list((folder / FOLDER).glob("*.jsonl")):
        files |= {folder / FOLDER / "messages.jsonl": _messages(), folder / FOLDER / f"{name}.json": _means(name)}
    for path in files:
        if path.exists():
            raise PipelineError(f"{path} is there already: choose another name.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise PipelineError(f"{error.filename} can't be written: {error.strerror}.") from None
    return list(files)


def _messages() -> str:
    rows = ({"topic": topic, "ts": f"{_DAY}{time}Z", "payload": payload} for time, topic, payload in _EXAMPLE_ROWS)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _means(name: str) -> str:
    """As `smqrt pipeline test --update` writes it."""
    rows = (
        {
            "topic": f"{name}/{device}",
            "payload": {"device": device, "minute": f"{_DAY}{minute}:00.000Z", "mean": mean, "n": n},
        }
        for device, minute, mean, n in _MEANS
    )
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


_QUICK = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
_ALL_ROWS, _ALL_BYTES = 2**31 - 1, 2**62


def run(
    folder: Path,
    journal: Path | None = None,
    update: bool = False,
    names: Sequence[str] = (),
    say: Callable[[str], None] = print,
    spark: SparkSession | None = None,
    stopping: threading.Event | None = None,
) -> int:
    """Run the queries of a folder on a recorded slice, and compares what they give with golden files.

    Args:
        folder: of the pipelines, or one file of it.
        journal: the slice: a journal's folder, or a .jsonl file (see `fixtures`); the .jsonl file in the
            folder `tests` if not given.
        update: write the golden files instead of comparing.
        names: which queries, such as "hot" or "readings.dead_letters"; none means all.
        say: is told the lines to print.
        spark: a session to use, which is left running; None starts one and stops it at the end.
        stopping: once it is set, no other query is run and nothing is said.

    Returns:
        0, or 1 when a query fails or gives something else.

    Raises:
        PipelineError: the pipelines or the slice can't be read, or Spark doesn't start.
    """
    stopping = stopping or threading.Event()
    say = _unless(stopping, say)
    catalog = _tested(load(folder))
    wanted = _wanted(catalog, names)
    with tempfile.TemporaryDirectory(prefix="smqrt-test-") as scratch:
        recorded = _recorded_journal(catalog.folder, journal, Path(scratch))
        own = spark or session.start_spark("local[2]", "smqrt pipeline test", Path(scratch), _QUICK)
        try:
            test = _Test(own, catalog, JournalSource(str(recorded)), Path(scratch))
            wanted_still = takewhile(lambda _: not stopping.is_set(), wanted)
            passed = [_one(test, plan, catalog.folder / FOLDER, update, say) for plan in wanted_still]
        finally:
            if spark is None:
                own.stop()
    if not names:
        _tell_unused(catalog.folder / FOLDER, [plan.name for plan in wanted], say)
    return 0 if all(passed) else 1


def _unless(stopping: threading.Event, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: None if stopping.is_set() else say(line)


class _Test:
    """The slice, and Spark to run queries on it."""

    def __init__(self, spark: SparkSession, catalog: Catalog, journal: JournalSource, scratch: Path) -> None:
        self._spark, self._catalog, self._journal, self._scratch = spark, catalog, journal, scratch

    def rows(self, plan: QueryPlan, say: Callable[[str], None]) -> list[dict[str, object]]:
        """Return what a query gives, as golden files have it; `say` is told which rows of the slice are left out.

        For a table its rows; else its messages: `topic`, `subtopic` if there is one, and `payload`, which is what JSON
        it holds, or text; `payload_hex` when it is neither.
        """
        left_out = failing_rows.LeftOutRows()
        while True:
            try:
                return self._collected(self._frame(plan, left_out.rows), plan)
            except PipelineError:
                raise
            except Exception as error:
                more = self._failing_rows(plan, error, left_out.rows)
                if not more:
                    raise PipelineError(running_error(plan.declaration, error)) from None
                left_out.add(more, None, open_journal(self._journal.location))
                say(f"         {plan.name}: {failing_rows.summary(more)}")

    def _failing_rows(self, plan: QueryPlan, error: Exception, known: failing_rows.RowNumbers) -> list[FailingRow]:
        """Return the rows that a query fails with, which `on_error` lets it leave out."""
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
            lambda reference: references.table(self._spark, reference, self._catalog.folder),
        )

    def _frame(self, plan: QueryPlan, left_out: failing_rows.RowNumbers) -> DataFrame:
        start = checkpoint.QueryStart({}, None)
        graph = self._graph(
            lambda source: failing_rows.without(
                self._journal.stream(self._spark, source, start, f"test.{plan.name}"), left_out
            )
        )
        frame = plan.make(graph)
        return frame if plan.declaration.kind == "table" else as_messages(frame, plan.declaration)

    def _collected(self, frame: DataFrame, plan: QueryPlan) -> list[dict[str, object]]:
        table = plan.declaration.kind == "table"
        found: list[dict[str, object]] = []
        raised: list[Exception] = []

        def take(batch: DataFrame, number: int) -> None:
            if plan.declaration.options["mode"] == "complete":
                found.clear()
            try:
                found.extend(_table_rows(batch) if table else message_rows(batch))
            except Exception as error:
                raised.append(error)
                # Spark looks through this text with a regular expression that overflows its stack when it is long.
                raise RuntimeError(type(error).__name__) from None

        writer = frame.writeStream.outputMode(plan.declaration.options["mode"]).foreachBatch(take)
        # A new one each time: an earlier try may have failed inside its only micro-batch.
        writer = writer.option("checkpointLocation", tempfile.mkdtemp(dir=self._scratch))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except Exception:
            if raised:
                raise raised[-1] from None
            raise
        return found


def _wanted(catalog: Catalog, names: Sequence[str]) -> list[QueryPlan]:
    found = plans(catalog, catalog.select())
    letters = [plan.name for plan in found if plan.shared]
    catalog.select([name for name in names if name not in letters])  # says which name is unknown
    return [plan for plan in found if plan.name in names] if names else found


def _tested(catalog: Catalog) -> Catalog:
    """One micro-batch takes the whole slice, and nothing waits for the clock on the wall."""
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
    recorded = journal or _slice(folder / FOLDER)
    if not recorded.exists():
        raise PipelineError(f"There is no {recorded}; give --journal a journal's folder or a .jsonl file.")
    if recorded.is_dir():
        return recorded
    write_journal(recorded, scratch / "journal")
    return scratch / "journal"


def _slice(folder: Path) -> Path:
    found = sorted(folder.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    there = f"There are {len(found)} .jsonl files" if found else "There is no .jsonl file"
    raise PipelineError(
        f"{there} in {folder}; say with --journal on which rows to test. "
        f"smqrt journal export --to {folder}/messages.jsonl records some."
    )


def _one(test: _Test, plan: QueryPlan, folder: Path, update: bool, say: Callable[[str], None]) -> bool:
    file = folder / f"{plan.name}.json"
    try:
        rows = test.rows(plan, say)
        expected = load_golden(file) if file.exists() and not update else None
    except PipelineError as error:
        say(f"FAILED   {plan.name}: {error}")
        return False
    if update:
        return _updated(plan, file, rows, say)
    if expected is None:
        say(f"FAILED   {plan.name}: there is no {file}; look at its {_count(rows)}, then keep them with --update:")
        _say_all(explain([], rows), say)
        return False
    return _compared(plan, file, differences(expected, rows), rows, say)


def _updated(plan: QueryPlan, file: Path, rows: Sequence[object], say: Callable[[str], None]) -> bool:
    same = file.exists() and file.read_text("utf-8").strip() and differences(load_golden(file), rows) == ([], [])
    if not same:
        save_golden(file, rows)
    say(f"{'the same' if same else 'written '} {plan.name}: {_count(rows)} in {file}")
    return True


def _compared(
    plan: QueryPlan,
    file: Path,
    different: tuple[list[object], list[object]],
    rows: Sequence[object],
    say: Callable[[str], None],
) -> bool:
    missing, extra = different
    if not missing and not extra:
        say(f"ok       {plan.name}: {_count(rows)}")
        return True
    say(f"FAILED   {plan.name}: {_count(missing)} of {file} missing (-), {_count(extra)} not expected (+)")
    _say_all(explain(missing, extra), say)
    return False


def _tell_unused(folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
    for file in sorted(folder.glob("*.json")):
        if file.stem not in names:
            say(f"unused   {file}: there is no query of that name")


def _say_all(lines: Iterator[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line)


def _count(rows: Sequence[object]) -> str:
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def _table_rows(batch: DataFrame) -> list[dict[str, object]]:
    from pyspark.sql import functions as F

    times = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "ignoreNullFields": "false"}
    columns = F.struct(*(column(name) for name in batch.columns))
    return [json.loads(row.row) for row in batch.select(F.to_json(columns, times).alias("row")).collect()]


def message_rows(batch: DataFrame) -> Iterator[dict[str, object]]:
    """Yield the messages of what `sinks.as_messages` returned, as golden files have them."""
    for row in batch.collect():
        told = {"topic": row.topic} if row.subtopic is None else {"topic": row.topic, "subtopic": row.subtopic}
        yield told | _payload(bytes(row.payload or b""))


def _payload(payload: bytes) -> dict[str, object]:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}
    try:
        return {"payload": json.loads(text)}
    except ValueError:
        return {"payload": text}
