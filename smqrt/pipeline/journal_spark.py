"""Spark for commands of a journal: SQL (`query --spark`) and VARIANT columns (`journal compact --json variant`).

Results of a query are of any size: they never pass the driver's memory. Of a file with VARIANT columns a query for one
field reads that field only, and so does DuckDB.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from smqrt.errors import PipelineError
from smqrt.journal.reader import Offsets
from smqrt.pipeline import failures, jvm, session
from smqrt.pipeline.failures import first_line
from smqrt.pipeline.history import read_journal
from smqrt.pipeline.row_checks import VARIANT, payload_variant

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql import DataFrame, SparkSession


_BATCH_ROWS = 8192
_LINE_AND_POSITION = re.compile(r"\.?; line \d+ pos \d+;?$")
_TEXT = "try_validate_utf8(cast(payload as string))"


class Spark:
    """A Spark that knows a journal.

    Args:
        journal: its folder or address.
        given: `token` and `cafile`, for an address.
        start, end: from where to where (exclusive), by node.
        topics: patterns of the topics that the view has; None for all, also messages to one client.
        spark: one to use, which goes on; None starts one, which takes seconds.

    Raises:
        PipelineError: pyspark or Java is missing.
    """

    def __init__(
        self,
        journal: str,
        given: Mapping[str, str | None],
        start: Offsets,
        end: Offsets,
        topics: Sequence[str] | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        self._folder = TemporaryDirectory(prefix="smqrt-query-")
        self._group = f"smqrt-query-{uuid4()}"
        self._own = spark is None
        started = spark or session.start_spark("local[*]", "smqrt query", Path(self._folder.name, "spark"))
        self._spark = started.newSession()
        self._spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # others read it as UTC
        begin, behind = json.dumps(start), json.dumps(end)
        options: dict[str, Any] = {**given, "topics": topics or (), "start": begin, "end": behind}
        rows = read_journal(self._spark, journal, **options)
        shown = rows.selectExpr("*", f"{_TEXT} as text").withColumn("json", payload_variant())
        shown.createOrReplaceTempView("messages")

    def __enter__(self) -> Spark:
        return self

    def __exit__(self, *_exception: object) -> None:
        with suppress(Exception):  # its Java may be gone
            if self._own:
                self._spark.stop()
        self._folder.cleanup()

    def run(self, sql: str) -> tuple[Schema, Iterator[RecordBatch]]:
        """Answers a question; arguments and results as of `duckdb_views.DuckDB.run`.

        Spark writes the result to a temporary folder, from where it is read a few rows at a time.

        Raises:
            PipelineError: Spark can't do it.
        """
        from pyarrow import parquet

        folder = Path(self._folder.name, "result")
        context = self._spark.sparkContext
        context.setJobGroup(self._group, "smqrt query")
        try:
            _plain(self._spark.sql(sql)).write.parquet(folder.as_uri())
        except Exception as error:
            raise PipelineError(_LINE_AND_POSITION.sub(".", failures.sentence("this query", error))) from None
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        files = [parquet.ParquetFile(path) for path in sorted(folder.glob("*.parquet"))]
        return files[0].schema_arrow, (batch for file in files for batch in file.iter_batches(_BATCH_ROWS))

    def cancel(self) -> None:
        """Ends the question under way; its thread gets a PipelineError, and so does one that comes later."""
        with suppress(Exception):  # it has ended meanwhile
            # Also jobs that are not there yet: a question has several, and between two of them there is none to end.
            jvm.cancel_group(self._spark, self._group)

    def share(self) -> float:
        """Returns how much of the stages under way is done: 0 to 1."""
        tracker = self._spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        counts = [(stage.numCompletedTasks, stage.numTasks) for stage in stages if stage]
        return sum(done for done, _ in counts) / max(1, sum(tasks for _, tasks in counts))


def _plain(frame: DataFrame) -> DataFrame:
    """VARIANT as the text of its JSON, which everybody reads."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import VariantType

    names = [field.name for field in frame.schema if isinstance(field.dataType, VariantType)]
    return frame.withColumns({name: F.to_json(name) for name in names}) if names else frame


# ---- `smqrt journal compact --json variant`: JSON payloads as shredded VARIANT columns, which Spark alone can write

_SHREDDING_SETTINGS = {
    "spark.sql.variant.writeShredding.enabled": "true",
    "spark.sql.variant.inferShreddingSchema": "true",
    "spark.sql.files.maxPartitionBytes": str(1 << 40),
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_SHREDDED_FILE = {"parquet.block.row.count.limit": str(1 << 16)}


class Shredder:
    """Adds a column `variant` to Parquet files of a journal. Spark starts when the first file comes.

    Use it in a `with` block, which ends Spark.

    Args:
        folder: for what Spark puts aside, such as the journal's.
        spark: a Spark that runs already, and that others end.

    Raises:
        PipelineError: pyspark or Java is missing, when a file comes.
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
            PipelineError: Spark does not start, or can't do it.
        """
        self._spark = self._spark or session.start_spark("local[*]", "smqrt journal compact", self._folder)
        folder, rows = self._folder / "written", self._folder / "rows.parquet"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        rows.unlink(missing_ok=True)
        os.link(source, rows)  # Spark takes no file with a dot in front, and makes columns of folders like hour=12
        try:
            self._write(self._spark, rows, folder)
        except Exception as error:
            raise PipelineError(f"Spark can't make a VARIANT of {source}: {first_line(error)}") from error
        (part,) = folder.glob("part-*.parquet")
        part.replace(target)

    @staticmethod
    def _write(spark: SparkSession, source: Path, folder: Path) -> None:
        for name, value in _SHREDDING_SETTINGS.items():
            spark.conf.set(name, value)
        rows = spark.read.parquet(str(source)).withColumn(VARIANT, payload_variant())
        rows.coalesce(1).write.options(**_SHREDDED_FILE).parquet(str(folder))
