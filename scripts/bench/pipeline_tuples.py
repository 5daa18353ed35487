"""The source smq as it would be with rows as tuples; a module of its own, as Spark's workers load it by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from smqrt.journal.record import DDL
from smqrt.pipeline.smq_source.options import ReadOptions
from smqrt.pipeline.smq_source.reading import BatchReader


class TupleReader(DataSourceReader):
    """Reads what smq reads, and gives it row by row."""

    def __init__(self, inner: BatchReader) -> None:
        self.inner = inner

    def partitions(self) -> Any:
        return self.inner.partitions()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in self.inner.read(partition):
            yield from zip(*[column.to_pylist() for column in batch.columns], strict=True)


class TupleSource(DataSource):
    """`format("smq_tuples")`."""

    @classmethod
    def name(cls) -> str:
        return "smq_tuples"

    def schema(self) -> str:
        return DDL

    def reader(self, schema: Any) -> DataSourceReader:
        return TupleReader(BatchReader(ReadOptions.parse(self.options), schema))
