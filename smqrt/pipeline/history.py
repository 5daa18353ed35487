"""Batch reads of a journal: Spark's own Parquet reader for compacted files, the source `smq` for the rest.

The plan is made once. It holds the files that the manifest lists for a range (`journal.retention`). Rows in other files
are a range of numbers, which selects the same rows even if they are compacted before they are read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from smqrt.errors import ArgumentError, JournalError, PipelineError
from smqrt.journal import files as locations
from smqrt.journal import payload_schema, planning, retention
from smqrt.journal.files import check_footer
from smqrt.journal.manifest import DataFile
from smqrt.journal.planning import Filter
from smqrt.journal.reader import Journal
from smqrt.journal.reader import Offsets as JournalOffsets
from smqrt.journal.record import COLUMNS, Flag
from smqrt.journal.remote import RemoteJournal, open_journal
from smqrt.journal.segment import REMEDY
from smqrt.pipeline import checkpoint, failures, jvm, session
from smqrt.pipeline.failures import first_line
from smqrt.pipeline.row_checks import VARIANT, payload_variant
from smqrt.pipeline.smq_source import scan
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql import Column, DataFrame, SparkSession


_PARQUET_OPTIONS = {
    # By default Spark's reader does not compare the checksums of pages.
    "parquet.page.verify-checksum.enabled": "true",
    # A session may be configured to skip unreadable files, and rows would be missing silently.
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
}
_LATE = (
    "The result of read_journal is read more than twelve hours after it was planned, and the journal has released its "
    "files: call read_journal again, and keep rows that are needed for longer with cache() or in a table."
)
_TOO_LATE = (
    "select cast(raise_error(:why) as boolean) from values (1) where current_timestamp() >= timestamp_seconds(:until_s)"
)
_LISTING = "spark.sql.sources.parallelPartitionDiscovery.threshold"
_MAX_ATTEMPTS = 3
"""The maximum number of attempts for a plan, since compaction may remove a file at the same time."""
_MAX_GAPS = 2
"""The maximum number of reads by the source for a node; each starts a Python process for its plan."""


@dataclass(frozen=True)
class ReadColumns:
    """The columns of a read.

    Attributes:
        columns: columns of the journal.
        json: fields of JSON payloads as DDL, for the column `json`; None leaves the column out.
        computes: whether `json` is computed from the payload for files without it; otherwise it is NULL there.
        variant: whether the result has a column `variant`.
    """

    columns: tuple[str, ...] = tuple(column.name for column in COLUMNS)
    json: str | None = None
    computes: bool = True
    variant: bool = False

    @property
    def names(self) -> list[str]:
        """The names of all columns, in order."""
        return [*self.columns, *[payload_schema.JSON_COLUMN] * (self.json is not None), *[VARIANT] * self.variant]


def read_journal(
    spark: SparkSession,
    path: Path | str,
    *,
    topics: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    start: str = "earliest",
    end: str = "latest",
    columns: Sequence[str] | None = None,
    json: str | None = None,
    variant: bool = False,
    include_pipeline: bool = True,
    fail_on_data_loss: bool = True,
    token: str | None = None,
    cafile: str | None = None,
) -> DataFrame:
    """Return the rows of a journal as a DataFrame, like `format("smq")`, but as fast as Spark reads Parquet.

    Filters and the selection of columns, including fields of `json`, are applied in the files. The call chooses the
    rows: for twelve hours, later messages, compaction and retention do not change the result.

    Args:
        spark: the session.
        path: the journal's folder, also as file:///…, or the http(s) address of a hub's journal.
        topics: MQTT filters; empty means every row, including those to one client.
        exclude: MQTT filters of topics to leave out.
        start, end: "earliest", "latest", a duration before now such as "2h", an ISO time, a seq, or JSON by node; `end`
            is exclusive.
        columns: columns of the journal; by default all.
        json: fields of JSON payloads as DDL, such as "device string, temp double": adds a column `json`, a struct of
            these fields, NULL where the payload is not a JSON object. It is read from files that were compacted with
            the same fields (`compact --schema`), and computed for others.
        variant: adds a column `variant`, the whole payload where it is JSON. It is read from files that were compacted
            with `--json variant`, and computed for others.
        include_pipeline: whether to include rows that pipelines have published.
        fail_on_data_loss: whether missing rows of the range are an error; otherwise they are skipped.
        token: with an address, the content of the file `token` in the journal's folder.
        cafile: with an https address, PEM file with certificates to trust instead of the system's.

    Raises:
        JournalError: there is no such journal, rows are missing, or a file is damaged.
        PipelineError: `start` or `end` is invalid.
        ArgumentError: a filter, a column or the DDL is invalid.
    """
    options = {"url" if locations.is_address(path) else "path": str(path)}
    for name, value in (("topics", topics), ("exclude", exclude)):
        if value:
            options[name] = dumps([value] if isinstance(value, str) else list(value))
    options["includePipeline"] = str(include_pipeline).lower()
    options["failOnDataLoss"] = str(fail_on_data_loss).lower()
    options |= {name: value for name, value in (("token", token), ("cafile", cafile)) if value}
    journal = _open(ReadOptions.parse(options))
    begin, behind = checkpoint.offsets(journal, start), checkpoint.offsets(journal, end, end=True)
    if json is not None:
        payload_schema.parse_ddl(json)
    known = ReadColumns().columns
    for name in columns or ():
        if name not in known:
            raise ArgumentError(f'The journal has no column "{name}". It has: {", ".join(known)}.')
    chosen = known if columns is None else tuple(columns)
    return frame(spark, options, begin, behind, ReadColumns(chosen, json, True, variant))


def _open(options: ReadOptions) -> Journal | RemoteJournal:
    return open_journal(options.journal, options.token, cafile=options.cafile, retry_s=options.retry_s)


def frame(
    spark: SparkSession, options: Mapping[str, str], start: Offsets, end: Offsets, wanted: ReadColumns = ReadColumns()
) -> DataFrame:
    """Return the rows between two offsets, read by Spark's own reader if the journal is a folder.

    Args:
        spark: the session.
        options: options of the source `smq`, without its offsets.
        start, end: by node.
        wanted: the columns.

    Raises:
        JournalError: rows are missing, or a file is damaged.
    """
    read = ReadOptions.parse(options)
    if locations.is_address(read.journal):
        return frame_by_source(spark, options, start, end, wanted)
    plan, paths = _make_plan(read, start, end, wanted)
    frames = list(_native(spark, read, plan, paths, wanted))
    for gap in plan.gaps if frames or plan.gaps else [{}]:
        first, behind = ({node: range_[at] for node, range_ in gap.items()} for at in (0, 1))
        frames.append(frame_by_source(spark, options, first, behind, wanted))
    return reduce(lambda one, more: one.unionByName(more), frames)


# ---- The plan: files for Spark's own reader, and ranges for the source

Range = tuple[int, int]


class _Plan(NamedTuple):
    """The files that Spark reads itself, and the ranges that the source reads.

    Attributes:
        files: compacted files.
        ranges: by node, the wanted rows.
        gaps: by node, ranges (first, after the last) outside these files; each element is one read.
    """

    files: list[DataFile]
    ranges: dict[str, Range]
    gaps: list[dict[str, Range]]


def _make_plan(read: ReadOptions, start: Offsets, end: Offsets, wanted: ReadColumns) -> tuple[_Plan, list[Path]]:
    """Return the plan, and the held path of each of its files."""

    def is_native(file: DataFile) -> bool:
        return wanted.json is None or not wanted.computes or has_json(file, topics, wanted.json)

    journal, topics = _open(read), read.filter()
    for _ in range(_MAX_ATTEMPTS):
        begin, last = journal.begin(start), journal.end()
        start, end = scan.checked(start, end, begin, last, read.fail_on_data_loss)
        files, through = journal.compacted(start, end, topics)
        ranges = {node: (start.get(node, 0), seq) for node, seq in end.items()}
        plan = _divide(files, through, ranges, is_native)
        try:
            paths = retention.hold_files(journal.path.absolute(), plan.files)
        except FileNotFoundError as error:  # compaction has just replaced it: plan again
            missing = str(error.filename)
            continue
        # Spark compares the checksums of pages. The manifest has the checksum of the footer, which has their positions.
        for file, path in zip(plan.files, paths, strict=True):
            try:
                with path.open("rb") as opened:
                    check_footer(opened, file.footer_crc32)
            except (OSError, ValueError) as error:
                raise JournalError(f"{file.path} is damaged: {error}; {REMEDY}.") from None
        return plan, paths
    raise JournalError(f"{missing} is missing; {REMEDY}.")


def _divide(
    files: Iterable[DataFile], through: Offsets, ranges: dict[str, Range], is_native: Callable[[DataFile], bool]
) -> _Plan:
    native: list[DataFile] = []
    gaps: list[dict[str, Range]] = [{} for _ in range(_MAX_GAPS)]
    by_node = {node: list(some) for node, some in groupby(files, lambda file: file.node)}
    for node, (first, behind) in ranges.items():
        some, compacted = by_node.get(node, []), through[node]
        # The ranges of files that the source must read, and of the rows that are not compacted.
        left: list[Range] = []
        for is_read_natively, group in groupby(some, is_native):
            if not is_read_natively:
                ones = list(group)
                left.append((ones[0].first, ones[-1].last + 1))
        if compacted < behind:
            joined = left and left[-1][1] == compacted
            left[-1:] = [(left[-1][0], behind)] if joined else [*left[-1:], (compacted, behind)]
        if len(left) > _MAX_GAPS:  # the source then reads the files between them too
            left = [(left[0][0], left[-2][1]), left[-1]]
        for gap, range_ in zip(gaps, left, strict=False):
            gap[node] = (max(first, range_[0]), min(behind, range_[1]))
        native += [file for file in some if not any(a <= file.first and file.last < b for a, b in left)]
    return _Plan(native, ranges, [gap for gap in gaps if gap])


def has_json(file: DataFile, topics: Filter | None, fields: str) -> bool:
    """Return whether the column `json` of a file has all of these fields, for all of these topics."""
    schemas = file.schemas
    if not schemas or not set(_fields((("#", fields),))) <= set(_fields(schemas)):
        return False
    made, wanted = Filter([pattern for pattern, _ in schemas]), topics or Filter()
    if file.topics is not None:
        return all(made.matches_uncached(name) for name in file.topics if wanted.matches_uncached(name))
    return all(any(planning.covers(one, other) for one in made.topics) for other in wanted.topics)


@lru_cache(maxsize=64)
def _fields(schemas: tuple[tuple[str, str], ...]) -> tuple[tuple[str, payload_schema.PayloadType], ...]:
    return payload_schema.merge_schemas(dict(schemas)).fields


# ---- Spark's own reader


def _native(
    spark: SparkSession, read: ReadOptions, plan: _Plan, paths: Sequence[Path], wanted: ReadColumns
) -> Iterator[DataFrame]:
    """Yield one frame for all files with the same columns."""
    from pyspark.sql import functions as F

    groups: dict[tuple[bool, bool], list[str]] = {}
    topics = read.filter()
    for file, path in zip(plan.files, paths, strict=True):
        has = (wanted.json is not None and has_json(file, topics, wanted.json), wanted.variant and file.variant)
        groups.setdefault(has, []).append(str(path))
    conditions = list(_row_conditions(read, plan))
    if paths and (until_s := retention.held_until_s(paths[0])) is not None:
        # The files may be removed after this time. Before it, Spark's optimizer removes the condition; after it, Spark
        # computes the subquery, which ends the query with a message, before it opens any file.
        late = spark.sql(_TOO_LATE, {"why": _LATE, "until_s": until_s}).scalar()
        is_valid = F.current_timestamp() < F.timestamp_seconds(F.lit(until_s))
        conditions.append(F.when(is_valid, F.lit(True)).otherwise(late))
    for (has_json_column, has_variant), some in groups.items():
        columns = [f"{column.name} {column.type}" for column in COLUMNS]
        if has_json_column and wanted.json:
            columns.append(f"{payload_schema.JSON_COLUMN} {payload_schema.parse_ddl(wanted.json)}")
        columns += [f"{VARIANT} VARIANT"] * has_variant
        # The driver lists the files itself; a Spark task for each file takes ten times as long.
        with session.setting(spark, _LISTING, str(2**31 - 1)):
            found = spark.read.schema(", ".join(columns)).options(**_PARQUET_OPTIONS).parquet(*some)
        yield _with_columns(reduce(lambda frame, condition: frame.where(condition), conditions, found), wanted)


def _with_columns(found: DataFrame, wanted: ReadColumns) -> DataFrame:
    """Return the wanted columns; missing ones are computed or NULL."""
    from pyspark.sql import functions as F

    if wanted.json is not None and payload_schema.JSON_COLUMN not in found.columns:
        found = found.withColumn(
            payload_schema.JSON_COLUMN, F.lit(None).cast(str(payload_schema.parse_ddl(wanted.json)))
        )
    if wanted.variant and VARIANT not in found.columns:
        found = found.withColumn(VARIANT, payload_variant())
    return found.select(*wanted.names)


def _row_conditions(read: ReadOptions, plan: _Plan) -> Iterator[Column]:
    """Yield the conditions for the wanted rows of the files."""
    from pyspark.sql import functions as F

    # The first and last file of a node may have rows outside the range.
    for node, some in groupby(plan.files, lambda file: file.node):
        first, behind = plan.ranges[node]
        ones, seq = list(some), F.col("seq")
        others = F.col("node") != node
        if ones[0].first < first:
            yield others | (seq >= first)
        if ones[-1].last >= behind:
            yield others | (seq < behind)
    if (topics := read.filter()) is not None:
        yield matches(topics)
    if not read.include_pipeline:
        yield F.col("flags").bitwiseAND(int(Flag.PIPELINE)) == 0


def matches(topics: Filter) -> Column:
    """Return the condition that a filter selects a topic, in a form that lets Spark skip Parquet files."""
    from pyspark.sql import functions as F

    names = topics.literal()
    if names is not None:
        return F.col("topic").isin(list(names))
    found = reduce(lambda one, more: one | more, map(_matches, topics.topics))
    return reduce(lambda one, other: one & ~_matches(other), topics.exclude, found)


def _matches(pattern: str) -> Column:
    from pyspark.sql import functions as F

    topic, levels = F.col("topic"), pattern.split("/")
    if pattern == "#":
        return topic.isNotNull()
    if planning.literal(pattern):
        return topic == pattern
    fixed = "/".join(levels[: next(at for at, level in enumerate(levels) if level in ("+", "#"))])
    if pattern == f"{fixed}/#":
        return (topic == fixed) | topic.startswith(f"{fixed}/")
    whole = topic.rlike(rf"(?s)\A(?:{Filter([pattern]).regex()})\z")
    return topic.startswith(f"{fixed}/") & whole if fixed else whole


# ---- The source


def frame_by_source(
    spark: SparkSession, options: Mapping[str, str], start: Offsets, end: Offsets, wanted: ReadColumns = ReadColumns()
) -> DataFrame:
    """Return the rows between two offsets, all read by the source, in the order of their numbers per node.

    Args:
        spark, options, start, end, wanted: as for `frame`.
    """
    has_json = wanted.json is not None and wanted.computes
    names = {*wanted.columns, *["payload"] * wanted.variant} or {"seq"}  # Spark can't count rows without columns
    columns = [f"{one.name} {one.type}" for one in COLUMNS if one.name in names]
    columns += (
        [f"{payload_schema.JSON_COLUMN} {payload_schema.parse_ddl(wanted.json)}"] if has_json and wanted.json else []
    )
    ends = {"startingOffsets": json.dumps(start), "endingOffsets": json.dumps(end)}
    found = spark.read.format("smq").schema(", ".join(columns)).options(**options, **ends).load()
    return _with_columns(found, wanted)


# ---- Spark for commands of a journal: SQL (`query --spark`) and VARIANT columns (`journal compact --json variant`).
#
# Results of any size are possible, because the driver does not hold them in memory. From a file with VARIANT columns a
# query for one field reads only that field, even in DuckDB.

_BATCH_ROWS = 8192
_LINE_AND_POSITION = re.compile(r"\.?; line \d+ pos \d+;?$")
_TEXT = "try_validate_utf8(cast(payload as string))"


class Spark:
    """A Spark session with a view of a journal.

    Args:
        journal: its folder or address.
        given: `token` and `cafile`, for an address.
        start, end: the range (end exclusive), by node.
        topics: patterns of the topics in the view; None selects all, including messages to one client.
        spark: a session to use, which is not stopped; None starts one, which takes seconds.

    Raises:
        PipelineError: pyspark or Java is missing.
    """

    def __init__(
        self,
        journal: str,
        given: Mapping[str, str | None],
        start: JournalOffsets,
        end: JournalOffsets,
        topics: Sequence[str] | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self._folder = TemporaryDirectory(prefix="smqrt-query-")
        self._group = f"smqrt-query-{uuid4()}"
        self._own = spark is None
        started = spark or session.start_spark("local[*]", "smqrt query", Path(self._folder.name, "spark"))
        self._spark = started.newSession()
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # other programs read UTC
        begin, behind = json.dumps(start), json.dumps(end)
        options: dict[str, Any] = {**given, "topics": topics or (), "start": begin, "end": behind}
        rows = read_journal(self._spark, journal, **options)
        shown = rows.selectExpr("*", f"{_TEXT} as text").withColumn("json", payload_variant())
        shown.createOrReplaceTempView("messages")

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_exception: object) -> None:
        with suppress(Exception):  # the JVM may have ended
            if self._own:
                self._spark.stop()
        self._folder.cleanup()

    def run(self, sql: str) -> tuple[Schema, Iterator[RecordBatch]]:
        """Run a query; arguments and results are those of `duckdb_views.DuckDB.run`.

        Spark writes the result to a temporary folder, from which it is read a few rows at a time.

        Raises:
            PipelineError: Spark can't run it.
        """
        from pyarrow import parquet
        from pyspark.sql import functions as F
        from pyspark.sql.types import VariantType

        folder = Path(self._folder.name, "result")
        context = self._spark.sparkContext
        context.setJobGroup(self._group, "smqrt query")
        try:
            found = self._spark.sql(sql)
            # VARIANT becomes the text of its JSON, which every reader supports.
            names = [field.name for field in found.schema if isinstance(field.dataType, VariantType)]
            plain = found.withColumns({name: F.to_json(name) for name in names}) if names else found
            plain.write.parquet(folder.as_uri())
        except Exception as error:
            raise PipelineError(_LINE_AND_POSITION.sub(".", failures.sentence("this query", error))) from None
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        files = [parquet.ParquetFile(path) for path in sorted(folder.glob("*.parquet"))]
        return files[0].schema_arrow, (batch for file in files for batch in file.iter_batches(_BATCH_ROWS))

    def cancel(self) -> None:
        """Cancel the current query, which raises PipelineError in its thread, and later queries."""
        with suppress(Exception):  # the query has already ended
            # This includes later jobs: a query has several jobs, and at times none of them is running.
            jvm.cancel_group(self._spark, self._group)

    def share(self) -> float:
        """Return the completed share of the current stages, from 0 to 1."""
        tracker = self._spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        counts = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage]
        return sum(done for done, _ in counts) / max(1, sum(tasks for _, tasks in counts))


# ---- `smqrt journal compact --json variant`: JSON payloads as shredded VARIANT columns, which only Spark can write

_SHREDDING_SETTINGS = {
    "spark.sql.variant.writeShredding.enabled": "true",
    "spark.sql.variant.inferShreddingSchema": "true",
    "spark.sql.files.maxPartitionBytes": str(1 << 40),
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_SHREDDED_FILE = {"parquet.block.row.count.limit": str(1 << 16)}


class Shredder:
    """Adds a column `variant` to Parquet files of a journal. Spark starts with the first file.

    Use it in a `with` block, which stops Spark at its end.

    Args:
        folder: for temporary files, such as the journal's folder.
        spark: a session to use, which is not stopped.

    Raises:
        PipelineError: with the first file, if pyspark or Java is missing.
    """

    def __init__(self, folder: Path, spark: SparkSession | None = None) -> None:
        self._folder, self._given, self._spark = folder / ".variant", spark, spark

    def __enter__(self) -> Shredder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spark is not None and self._spark is not self._given:
            self._spark.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __call__(self, source: Path, target: Path) -> None:
        """Write the rows of `source` to `target`, in the same order, with a VARIANT of each payload that is JSON.

        Raises:
            PipelineError: Spark does not start, or can't write the file.
        """
        self._spark = self._spark or session.start_spark("local[*]", "smqrt journal compact", self._folder)
        folder, rows = self._folder / "written", self._folder / "rows.parquet"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        rows.unlink(missing_ok=True)
        os.link(source, rows)  # Spark ignores files with a dot in front, and reads folders like hour=12 as columns
        try:
            for name, value in _SHREDDING_SETTINGS.items():
                self._spark.conf.set(name, value)
            shredded = self._spark.read.parquet(str(rows)).withColumn(VARIANT, payload_variant())
            shredded.coalesce(1).write.options(**_SHREDDED_FILE).parquet(str(folder))
        except Exception as error:
            raise PipelineError(f"Spark can't make a VARIANT of {source}: {first_line(error)}") from error
        (part,) = folder.glob("part-*.parquet")
        part.replace(target)
