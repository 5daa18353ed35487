"""JSON payloads as shredded VARIANT columns in compacted files: Spark alone can write them (`compact --json variant`).

A query for one field then reads that field only, and so does DuckDB.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError
from smqrt.pipeline.failures import first_line
from smqrt.pipeline.session import spark

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

COLUMN = "variant"
_SETTINGS = {
    "spark.sql.variant.writeShredding.enabled": "true",
    "spark.sql.variant.inferShreddingSchema": "true",
    "spark.sql.files.maxPartitionBytes": str(1 << 40),
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_FILE = {"parquet.block.row.count.limit": str(1 << 16)}


def parsed() -> Column:
    """Returns the payload as a VARIANT; null where it is no JSON."""
    from pyspark.sql import functions as F

    return F.try_parse_json(F.col("payload").cast("string"))


class Shredder:
    """Adds a column `variant` to Parquet files of a journal. Spark starts when the first file comes.

    Use it in a `with` block, which ends Spark.

    Args:
        place: a folder for what Spark puts aside, such as the journal's.
        session: a Spark that runs already, and that others end.

    Raises:
        PipelineError: pyspark or Java is missing, when a file comes.
    """

    def __init__(self, place: Path, session: SparkSession | None = None) -> None:
        self._place, self._given, self._session = place / ".variant", session, session

    def __enter__(self) -> Shredder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None and self._session is not self._given:
            self._session.stop()
        shutil.rmtree(self._place, ignore_errors=True)

    def __call__(self, source: Path, target: Path) -> None:
        """Write the rows of `source` to `target`, in the same order, with a VARIANT of each payload that is JSON.

        Raises:
            PipelineError: Spark does not start, or can't do it.
        """
        self._session = self._session or spark("local[*]", "smqrt journal compact", self._place)
        folder, rows = self._place / "written", self._place / "rows.parquet"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        rows.unlink(missing_ok=True)
        os.link(source, rows)  # Spark takes no file with a dot in front, and makes columns of folders like hour=12
        try:
            self._write(self._session, rows, folder)
        except Exception as error:
            raise PipelineError(f"Spark can't make a VARIANT of {source}: {first_line(error)}") from error
        (part,) = folder.glob("part-*.parquet")
        part.replace(target)

    @staticmethod
    def _write(session: SparkSession, source: Path, folder: Path) -> None:
        for name, value in _SETTINGS.items():
            session.conf.set(name, value)
        rows = session.read.parquet(str(source)).withColumn(COLUMN, parsed())
        rows.coalesce(1).write.options(**_FILE).parquet(str(folder))
