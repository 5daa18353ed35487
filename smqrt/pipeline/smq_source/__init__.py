"""The data source `smq`: Spark reads a journal and publishes through its hub.

    spark.read.format("smq").option("topics", "site1/#").load("app/.journal")
    spark.readStream.format("smq").option("startingOffsets", "earliest").load("app/.journal")

Spark finds it through the package `pyspark_smq` and imports that package in every Python worker. Modules other than
pyspark are therefore imported when the source is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from smqrt.pipeline.smq_source.reading import BatchReader, StreamReader
    from smqrt.pipeline.smq_source.writing import BatchWriter, StreamWriter

__all__ = ["DefaultSource", "register"]

_ROOT = str(Path(__file__).parents[3])
"""The location of the package: an archive, or a folder of sys.path."""
_UNPICKLE = (
    "(root in __import__('sys').path or __import__('sys').path.append(root), "
    f"__import__('importlib').import_module({__name__!r}).DefaultSource(options))[1]"
)


class DefaultSource(DataSource):
    """`format("smq")`; every option is described in help/format-smq.md."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark passes --py-files to every Python worker except that of a stream on the driver, which unpickles this
        # object. The pickle itself therefore adds the archive to sys.path, before anything of smqrt can be imported.
        return eval, (_UNPICKLE, {"root": _ROOT, "options": self.options})

    @classmethod
    def name(cls) -> str:
        return "smq"

    def schema(self) -> str:
        from smqrt.journal.record import DDL
        from smqrt.pipeline.smq_source.options import ReadOptions

        ReadOptions.parse(self.options)
        return DDL

    def reader(self, schema: StructType) -> BatchReader:
        from smqrt.pipeline.smq_source.options import ReadOptions
        from smqrt.pipeline.smq_source.reading import BatchReader

        return BatchReader(ReadOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        from smqrt.pipeline.smq_source.options import ReadOptions
        from smqrt.pipeline.smq_source.reading import StreamReader

        return StreamReader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from smqrt.pipeline.smq_source.options import WriteOptions
        from smqrt.pipeline.smq_source.writing import BatchWriter

        return BatchWriter(WriteOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from smqrt.pipeline.smq_source.options import WriteOptions
        from smqrt.pipeline.smq_source.writing import StreamWriter

        return StreamWriter(WriteOptions.parse(self.options), schema, overwrite)


def register(spark: SparkSession) -> None:
    """Register the source in a session whose workers have smqrt only through --py-files.

    Workers find registered sources, but no sources in the packages of such files.

    Args:
        spark: the session.
    """
    spark.dataSource.register(DefaultSource)
