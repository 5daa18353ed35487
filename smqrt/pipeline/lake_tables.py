"""Tables that have commits of their own, Delta's and Iceberg's, behind one face."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smqrt.journal import uris
from smqrt.journal.deltalog import imported
from smqrt.pipeline import delta, iceberg
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.lake_files import Joined

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS: dict[str, type[delta.DeltaTable | iceberg.IcebergTable]] = {
    "delta": delta.DeltaTable,
    "iceberg": iceberg.IcebergTable,
}


class LakeTable(Protocol):
    """What a pipeline needs of a table; `delta.DeltaTable` says what each method does."""

    location: str

    def exists(self) -> bool: ...
    def end(self, name: str) -> Offsets | None: ...
    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int: ...
    def optimize(self, target_bytes: int | None = None) -> Joined: ...
    def vacuum(self, retain: timedelta) -> int: ...
    def delete(self, condition: str) -> int: ...


def opened(declaration: Declaration, location: str) -> LakeTable | None:
    """Returns the table of a query; None when it is one of plain Parquet files.

    Args:
        declaration: of a table.
        location: its folder or URI.

    Raises:
        PipelineError: a library is missing, or there is something else in the folder.
    """
    made = KINDS.get(declaration.options["format"])
    return made(location, declaration.options["partition_by"]) if made else None


def check_installed(declaration: Declaration) -> None:
    """Raises PipelineError or JournalError when the library is missing that the table of a query needs."""
    if declaration.options["format"] == "delta":
        imported()
    elif declaration.options["format"] == "iceberg":
        iceberg.check_installed()


def is_there(location: Path | str) -> bool:
    """Whether a folder or URI is such a table."""
    return is_delta(location) or iceberg.is_table(location)


def is_delta(location: Path | str) -> bool:
    """Whether a folder or URI is a Delta table."""
    if not uris.is_elsewhere(location):
        return (Path(location) / "_delta_log").is_dir()
    return delta.is_table(str(location))


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Returns the rows of such a table.

    Raises:
        PipelineError: a library is missing, or rows can't be read without the format's own jar.
    """
    return delta.frame(spark, location) if is_delta(location) else iceberg.frame(spark, location)


def files(location: str) -> list[str]:
    """Returns the Parquet files that such a table is made of.

    Raises:
        PipelineError: as `frame`.
    """
    return delta.files(location) if is_delta(location) else iceberg.files(location)
