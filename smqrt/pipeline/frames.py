"""The rows of the journal as DataFrames: what a declaration and a run ask for, of the source `smq` or of `history`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smqrt.journal import typed, uris
from smqrt.pipeline import fields, session
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, Start

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = {
    "minPartitions": "min_partitions",
    "rowsPerPartition": "rows_per_partition",
    "bytesPerPartition": "bytes_per_partition",
}
"""Options of the source, and what they are called in a declaration."""
_PART_OF_DRIVER = 8
"""Rows of a micro-batch are in its memory several times: as they come, as columns, as what is made of them."""


@dataclass(frozen=True)
class Journal:
    """Which journal to read, and how to get at it.

    Attributes:
        place: path or URL.
        token: what the hub asks for, with a URL; cafile: as for `open_journal`.
    """

    place: str
    token: str | None = None
    cafile: str | None = None

    def stream(self, spark: SparkSession, source: Declaration, start: Start, reports_as: str) -> DataFrame:
        """Returns the rows of a source as a stream.

        Args:
            spark: the session.
            source: the declaration.
            start: where the stream begins when its checkpoint is new.
            reports_as: the name under which it tells the journal how far it is.
        """
        options = self._options(spark, source) | {
            "startingOffsets": json.dumps(start.starting),
            "maxRowsPerTrigger": str(source.options["max_rows"]),
            "maxBytesPerTrigger": str(source.options["max_bytes"] or session.driver_bytes(spark) // _PART_OF_DRIVER),
            "queryName": reports_as,
        }
        if start.split and source.options["watermark"]:
            # Spark gives the windows that a micro-batch closes with the next one: those of old rows shall not come
            # with new ones.
            options["splitAt"] = json.dumps([*([start.pending] if start.pending else []), start.split])
        elif start.split:
            options["splitAt"] = json.dumps(start.split)
        frame: DataFrame = spark.readStream.format("smq").options(**options).load()
        return frame

    def batch(
        self, spark: SparkSession, source: Declaration, start: Offsets, end: Offsets, ordered: bool = False
    ) -> DataFrame:
        """Returns the rows of a source between two offsets.

        With the column `fields.TYPED`, where files may have fields of the payload that the source asks for.

        Args:
            spark, source: as for `stream`.
            start, end: the next seq of each node.
            ordered: in the order of their numbers, which Spark's own reader does not keep.
        """
        from smqrt.pipeline import history

        if ordered:
            return history.sourced(spark, self._options(spark, source), start, end)
        ddl = source.options["json"]
        wanted = history.Wanted(json=fields.readable(ddl), computes=False, variant=ddl == fields.VARIANT)
        frame = history.frame(spark, self._options(spark, source), start, end, wanted)
        return frame if wanted.json is None else frame.withColumnRenamed(typed.COLUMN, fields.TYPED)

    def _options(self, spark: SparkSession, source: Declaration) -> dict[str, str]:
        options = {
            "url" if uris.is_address(self.place) else "path": self.place,
            "topics": json.dumps(source.options["topics"]),
            "includePipeline": str(source.options["include_pipeline"]).lower(),
            "failOnDataLoss": str(source.options["fail_on_data_loss"]).lower(),
            "parallelism": str(spark.sparkContext.defaultParallelism),
        }
        options |= {name: str(source.options[key]) for name, key in PARTITIONS.items() if source.options[key]}
        if source.options["exclude"]:
            options["exclude"] = json.dumps(source.options["exclude"])
        given = {"token": self.token, "cafile": self.cafile}
        return options | {name: value for name, value in given.items() if value}
