"""`smqrt pipeline test`: every query on a recorded slice, compared with what it is expected to give. No hub, one Spark.

Each query runs as the stream that it is, in one micro-batch over the whole slice. So what it gives depends on the slice
alone: an update tells each group once, and the silence that an alert waits for goes by the times of the messages.

(help: pipeline-rules)
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.journal.remote import open_journal
from smqrt.pipeline import alerts, checkpoint, failing_rows, fixtures, references, session, sinks
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.column_names import column
from smqrt.pipeline.discover import Catalog, load
from smqrt.pipeline.failing_rows import FailingRow
from smqrt.pipeline.failures import running_error
from smqrt.pipeline.graph import Frames, Graph, JournalSource, QueryPlan, plans
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    """Runs the queries of a folder on a recorded slice, and compares what they give with golden files.

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
            passed = [_one(test, plan, catalog.folder / fixtures.FOLDER, update, say) for plan in wanted_still]
        finally:
            if spark is None:
                own.stop()
    if not names:
        _tell_unused(catalog.folder / fixtures.FOLDER, [plan.name for plan in wanted], say)
    return 0 if all(passed) else 1


def _unless(stopping: threading.Event, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: None if stopping.is_set() else say(line)


class _Test:
    """The slice, and Spark to run queries on it."""

    def __init__(self, spark: SparkSession, catalog: Catalog, journal: JournalSource, scratch: Path) -> None:
        self._spark, self._catalog, self._journal, self._scratch = spark, catalog, journal, scratch

    def rows(self, plan: QueryPlan, say: Callable[[str], None]) -> list[dict[str, object]]:
        """Returns what a query gives, as golden files have it; `say` is told which rows of the slice are left out.

        For a table its rows; else its messages: `topic`, `subtopic` if there is one, and `payload`, which is what JSON
        it holds, or text; `payload_hex` when it is neither.
        """
        left_out = failing_rows.LeftOut()
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
                say(f"         {plan.name}: {failing_rows.told(more)}")

    def _failing_rows(self, plan: QueryPlan, error: Exception, known: failing_rows.Numbers) -> list[FailingRow]:
        """Returns the rows that a query fails with, which `on_error` lets it leave out."""
        if not failing_rows.is_wanted(plan.declaration, error):
            return []

        def compute(start: Offsets, end: Offsets, found: failing_rows.Numbers) -> Exception | None:
            without = failing_rows.joined(known, found)
            graph = self._graph(
                lambda one: failing_rows.without(self._journal.batch(self._spark, one, start, end), without)
            )
            return failing_rows.error_of(lambda: sinks.outgoing(plan.make(graph), plan.declaration))

        journal = open_journal(self._journal.location)
        span = failing_rows.Span(dict(journal.begin()), dict(journal.end()))
        return failing_rows.Search(compute, span, plan.name).rows()

    def _graph(self, sources: Frames) -> Graph:
        return Graph(
            self._catalog,
            sources,
            lambda reference: references.table(self._spark, reference, self._catalog.folder),
        )

    def _frame(self, plan: QueryPlan, left_out: failing_rows.Numbers) -> DataFrame:
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
    recorded = journal or _slice(folder / fixtures.FOLDER)
    if not recorded.exists():
        raise PipelineError(f"There is no {recorded}; give --journal a journal's folder or a .jsonl file.")
    if recorded.is_dir():
        return recorded
    fixtures.write_journal(recorded, scratch / "journal")
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
        expected = fixtures.load_golden(file) if file.exists() and not update else None
    except PipelineError as error:
        say(f"FAILED   {plan.name}: {error}")
        return False
    if update:
        return _updated(plan, file, rows, say)
    if expected is None:
        say(f"FAILED   {plan.name}: there is no {file}; look at its {_count(rows)}, then keep them with --update:")
        _say_all(fixtures.explain([], rows), say)
        return False
    return _compared(plan, file, fixtures.differences(expected, rows), rows, say)


def _updated(plan: QueryPlan, file: Path, rows: Sequence[object], say: Callable[[str], None]) -> bool:
    same = (
        file.exists()
        and file.read_text("utf-8").strip()
        and fixtures.differences(fixtures.load_golden(file), rows) == ([], [])
    )
    if not same:
        fixtures.save_golden(file, rows)
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
    _say_all(fixtures.explain(missing, extra), say)
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
    """Yields the messages of what `sinks.as_messages` returned, as golden files have them."""
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
