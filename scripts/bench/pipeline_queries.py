"""Queries over one journal: as segments through smq, as compacted Parquet, and by DuckDB on the same files."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
from pipeline_data import BUSY_ROWS, FLUSH_ROWS, Measure, Took, compared, interleaved, make_journals
from pyspark.sql import functions as F

from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.reader import Journal
from smqrt.pipeline import graph, read_journal, row_checks
from smqrt.pipeline.api import Declaration

FRAGMENT_ROWS = 200
RAW = "ts timestamp, payload binary"
PRUNED = "seq bigint, ts timestamp, topic string"
MINUTE = "time_bucket(INTERVAL 1 minute, ts::TIMESTAMP)"
TEMP = "(decode(payload)->>'$.temp')::DOUBLE"


class Shelf:
    """One journal four times: as a hub wrote it, as a busy one did, compacted, and compacted with typed columns.

    Args:
        folder: where to.
        rows: how many.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows, self.folder = rows, folder
        self.journal, self.plain, self.typed = folder / "journal", folder / "plain", folder / "typed"
        self.busy = folder / "busy"
        self.payload_bytes = make_journals(rows, {self.journal: FLUSH_ROWS, self.busy: BUSY_ROWS})
        self.plain_bytes = self._compacted(self.plain, CompactOptions(everything=True, grace_s=0))
        self._compacted(
            self.typed, CompactOptions(everything=True, grace_s=0, schemas={"#": "device string, temp double"})
        )

    def _compacted(self, target: Path, options: CompactOptions) -> int:
        shutil.copytree(self.journal, target, copy_function=os.link)
        return compact(target, options).file_bytes

    def fragments(self) -> Path:
        """Writes the rows as a hub would that wrote Parquet: a file for every 200 rows."""
        from pyarrow import parquet

        target, journal = self.folder / "fragments", Journal(self.plain)
        target.mkdir()
        plan = journal.plan(journal.begin(), journal.end(), max_rows=self.rows)
        for chunk in (chunk for part in plan for chunk in part):
            for batch in journal.tables(chunk, batch_rows=1 << 16):
                for first in range(0, batch.num_rows, FRAGMENT_ROWS):
                    piece, name = batch.slice(first, FRAGMENT_ROWS), f"{batch['seq'][first]}.parquet"
                    with parquet.ParquetWriter(target / name, piece.schema, compression="zstd") as writer:
                        writer.write_batch(piece)
        return target


def noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def counted(frame: Any) -> Any:
    return frame.groupBy(F.window("ts", "1 minute"), "topic").agg(F.count("*"), F.max("seq"))


def averaged(frame: Any, value: Any) -> Any:
    return frame.groupBy(F.window("ts", "1 minute")).agg(F.avg(value))


def raw_temp() -> Any:
    return F.get_json_object(F.col("payload").cast("string"), "$.temp").cast("double")


def smq(spark: Any, shelf: Shelf, schema: str | None = None, name: str = "smq", journal: Path | None = None) -> Any:
    reader = spark.read.format(name).option("rowsPerPartition", max(1000, shelf.rows // 4))
    return (reader.schema(schema) if schema else reader).load(str(journal or shelf.journal))


def parquet(spark: Any, folder: Path) -> Any:
    return spark.read.parquet(str(folder / "data") if (folder / "data").exists() else str(folder))


def ducked(folder: Path, values: str) -> Callable[[], object]:
    """Returns a query of DuckDB by minute, with as many threads as Spark has."""
    connection = duckdb.connect(config={"threads": 2})
    connection.execute("SET TimeZone = 'UTC'")
    files = f"{folder}/data/**/*.parquet"
    return lambda: connection.execute(f"SELECT {MINUTE}, {values} FROM '{files}' GROUP BY ALL").fetchall()


def per_second(rows: int, took: Took) -> str:
    return f"{rows / took.seconds / 1e6:.2f} M/s"


def tuples(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """Arrow batches beside rows as tuples: counting by minute and topic, with all columns read and with three."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    from pipeline_tuples import TupleSource

    spark.sparkContext.addPyFile(str(Path(__file__).with_name("pipeline_tuples.py")))
    spark.dataSource.register(TupleSource)

    def reading(name: str, schema: str | None) -> Callable[[], None]:
        return lambda: noop(counted(smq(spark, shelf, schema, name)))

    took = interleaved(
        {
            f"{name} {columns}": reading(name, schema)
            for columns, schema in (("all", None), ("pruned", PRUNED))
            for name in ("smq", "smq_tuples")
        },
        rounds,
    )

    def beside(columns: str) -> Measure:
        slow, fast = took[f"smq_tuples {columns}"], took[f"smq {columns}"]
        detail = f"{per_second(shelf.rows, fast)} and {per_second(shelf.rows, slow)}"
        return compared(f"count, {columns} columns: tuples / Arrow", slow, fast, 6, detail)

    return [beside("all"), beside("pruned")]


def native(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """The source smq beside Spark's own Parquet reader: counting by minute and topic."""
    flushes = {FLUSH_ROWS: shelf.journal, BUSY_ROWS: shelf.busy}

    def reading(journal: Path) -> Callable[[], None]:
        return lambda: noop(counted(smq(spark, shelf, PRUNED, journal=journal)))

    contestants: dict[str | int, Callable[[], object]] = {rows: reading(journal) for rows, journal in flushes.items()}
    took = interleaved({"parquet": lambda: noop(counted(parquet(spark, shelf.plain)))} | contestants, rounds)

    def beside(rows: int) -> Measure:
        detail = f"{per_second(shelf.rows, took[rows])} and {per_second(shelf.rows, took['parquet'])}"
        title = f"count by minute and topic, flushes of {rows} rows: Parquet / smq"
        return compared(title, took["parquet"], took[rows], 0.8, detail)

    return [beside(rows) for rows in flushes]


def history(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """Compacted history: `read_journal` beside Spark on the same files, and fields of JSON beside the source smq."""

    def typed() -> Any:
        return averaged(read_journal(spark, shelf.typed, json="temp double"), F.col("json.temp"))

    def sourced(read: Any) -> Any:
        source = Declaration("bench", "source", noop, options={"json": "temp double", "prefix": ""})
        return averaged(row_checks.parse_json(read, source)[0], F.col("temp"))

    def declared() -> Any:
        options: dict[str, Any] = dict.fromkeys(("exclude", *graph.SOURCE_OPTIONS.values()))
        options |= {"topics": ["#"], "json": "temp double", "include_pipeline": True, "fail_on_data_loss": True}
        source, journal = Declaration("bench", "source", noop, options=options), Journal(shelf.typed)
        return graph.JournalSource(str(shelf.typed)).batch(spark, source, journal.begin(), journal.end())

    took = interleaved(
        {
            "parquet": lambda: noop(counted(parquet(spark, shelf.plain))),
            "read_journal": lambda: noop(counted(read_journal(spark, shelf.plain))),
            "all parquet": lambda: noop(parquet(spark, shelf.plain)),
            "all read_journal": lambda: noop(read_journal(spark, shelf.plain)),
            "smq raw": lambda: noop(averaged(smq(spark, shelf, RAW, journal=shelf.typed), raw_temp())),
            "typed": lambda: noop(typed()),
            "smq declared": lambda: noop(sourced(smq(spark, shelf, journal=shelf.typed))),
            "declared": lambda: noop(sourced(declared())),
        },
        rounds,
    )

    def beside(title: str, slow: str, fast: str, bar: float) -> Measure:
        detail = f"{per_second(shelf.rows, took[fast])} and {per_second(shelf.rows, took[slow])}"
        return compared(title, took[slow], took[fast], bar, detail)

    return [
        beside("count by minute and topic: Parquet / read_journal", "parquet", "read_journal", 0.95),
        beside("all columns: Parquet / read_journal", "all parquet", "all read_journal", 0.95),
        beside("mean of a field: smq / read_journal, typed", "smq raw", "typed", 3),
        beside("mean of a field of @source: smq / a backfill, typed", "smq declared", "declared", 3),
    ]


def ducks(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """Spark beside DuckDB on the same files."""
    count, mean = "topic, count(*), max(seq)", f"avg({TEMP})"
    took = interleaved(
        {
            "count": lambda: noop(counted(parquet(spark, shelf.plain))),
            "duck count": ducked(shelf.plain, count),
            "raw": lambda: noop(averaged(parquet(spark, shelf.plain), raw_temp())),
            "duck raw": ducked(shelf.plain, mean),
            "typed": lambda: noop(averaged(parquet(spark, shelf.typed), F.col("json.temp"))),
        },
        rounds,
    )

    def beside(title: str, ours: str, theirs: str, bar: float) -> Measure:
        detail = f"{per_second(shelf.rows, took[ours])} and {per_second(shelf.rows, took[theirs])}"
        return compared(title, took[theirs], took[ours], bar, detail)

    return [
        beside("count: Spark / DuckDB", "count", "duck count", 1 / 8),
        beside("mean of raw JSON: Spark / DuckDB", "raw", "duck raw", 1 / 6),
        beside("mean of a typed column: Spark / DuckDB on raw", "typed", "duck raw", 1 / 3),
    ]


def streams(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """A stream that works off a backlog beside a batch, stateless."""
    turns = iter(range(10**6))

    def filtered(frame: Any) -> Any:
        return frame.where(F.length("payload") > 300).select("seq", "topic")

    def stream() -> None:
        reader = spark.readStream.format("smq").options(startingOffsets="earliest")
        frame = filtered(reader.option("rowsPerPartition", max(1000, shelf.rows // 4)).load(str(shelf.journal)))
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(shelf.folder / f"c{next(turns)}"))
        writer.trigger(availableNow=True).start().awaitTermination()

    took = interleaved({"batch": lambda: noop(filtered(smq(spark, shelf))), "stream": stream}, rounds)
    detail = f"{per_second(shelf.rows, took['stream'])} and {per_second(shelf.rows, took['batch'])}, start included"
    return [compared("backlog: stream / batch", took["batch"], took["stream"], 0.5, detail)]


def compaction(spark: Any, shelf: Shelf, rounds: int) -> list[Measure]:
    """What compaction brings, beside a file for every flush."""
    fragments = shelf.fragments()
    took = interleaved(
        {
            "fragments": lambda: noop(counted(parquet(spark, fragments))),
            "compacted": lambda: noop(counted(parquet(spark, shelf.plain))),
        },
        rounds,
    )
    files = -(-shelf.rows // FRAGMENT_ROWS)
    detail = f"{took['fragments'].seconds:.2f} s of {files} files and {took['compacted'].seconds:.2f} s"
    share = shelf.plain_bytes / shelf.payload_bytes
    megabytes = f"{shelf.plain_bytes / 1e6:.0f} of {shelf.payload_bytes / 1e6:.0f} MB"
    return [
        compared("count: fragments / compacted", took["fragments"], took["compacted"], 10, detail),
        Measure("compacted bytes / payload bytes", share, 0.6, most=True, detail=megabytes),
    ]
