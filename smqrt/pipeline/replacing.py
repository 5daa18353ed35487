"""Replacement of rows of a table by those that a backfill has computed: readers see the old ones, then the new ones.

A table with commits gets one that removes all files and adds others. One of plain Parquet files gets a folder beside
it, and a file that says which folders count, which is replaced as a whole (see `tables.show_version`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.journal import locations
from smqrt.pipeline import checkpoint, process, sinks, stateful_plan, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, Ranges

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_INFERRED = "spark.sql.sources.partitionColumnTypeInference.enabled"


@contextmanager
def standing_still(query: Path, declaration: Declaration) -> Iterator[None]:
    """Keeps a query from being started while its rows are replaced.

    Args:
        query: `<state>/<name>`.
        declaration: the query.

    Raises:
        PipelineError: it runs.
    """
    if working := process.running(query) or process.elsewhere(query):
        where = f"as process {working}" if isinstance(working, int) else f"on {working}"
        raise PipelineError(
            f"{declaration.where}: {declaration.name} is running, {where}: end it with smqrt pipeline stop "
            f"{declaration.name}, replace its rows, and run it again; it goes on where it was."
        )
    process.claim(query)
    try:
        yield
    finally:
        process.release(query)


def stream_end(query: Path, declaration: Declaration) -> Offsets | None:
    """Returns where the rows end that a query has written itself: what comes after is written when it goes on.

    Args:
        query, declaration: as for `standing_still`.

    Returns:
        None when it never ran.

    Raises:
        PipelineError: nobody knows.
    """
    began = checkpoint.start_offsets(query)
    if began is None:
        return None
    name = declaration.name
    if not checkpoint.exists(query):
        raise PipelineError(
            f"{declaration.where}: {name}: there is no checkpoint in {query}, and so nobody knows which rows its table "
            f"has: smqrt pipeline run {name} --once first, which says where it goes on."
        )
    if checkpoint.last_begun_batch(query) > checkpoint.last_batch(query):
        raise PipelineError(
            f"{declaration.where}: {name}: its last micro-batch is not done: smqrt pipeline run {name} --once does it, "
            "then rows can be replaced."
        )
    return checkpoint.committed_offsets(query) or began


def check_stateless(stream: DataFrame, declaration: Declaration) -> None:
    """Makes sure that no row of a range is still to come from what a checkpoint remembers.

    Args:
        stream: the result of the query as a stream.
        declaration: the query.

    Raises:
        PipelineError: it has windows, joins or the like.
    """
    harmless = (stateful_plan.DISTINCT, stateful_plan.DISTINCT_WITHIN)
    kinds = [one.kind for one in stateful_plan.operators_of(stream, declaration) or () if one.kind not in harmless]
    if kinds:
        raise PipelineError(
            f"{declaration.where}: {declaration.name} remembers rows in its checkpoint ({', '.join(kinds)}), of which "
            f"results are still to come: they can't be replaced beside it. smqrt pipeline reset {declaration.name} and "
            "run --from earliest compute all anew."
        )


@dataclass(frozen=True)
class Replacement:
    """New rows for a range of the journal.

    Attributes:
        declaration: of the table.
        query: `<state>/<name>`.
        location: folder or URI of the table.
        start, end: the range, the next seq of each node.
        key: of this backfill, a part of a file's name.
        stream_end: what `stream_end` has returned.
    """

    declaration: Declaration
    query: Path
    location: str
    start: Offsets
    end: Offsets
    key: str
    stream_end: Offsets | None

    def apply(self, frame: DataFrame) -> str:
        """Replaces the rows of the range; returns what was done.

        Args:
            frame: the rows that are to be there.

        Raises:
            PipelineError: nobody knows which rows of the table are those of the range.
        """
        rows = sinks.partitioned(frame, self.declaration)
        if table := tables.open_lake_table(self.declaration, self.location):
            return self._in_lake(rows, table)
        if locations.is_elsewhere(self.location):
            raise PipelineError(
                f"{self.declaration.where}: {self.declaration.name}: rows of a table of plain Parquet files can be "
                f"replaced on this machine only, and {self.location} is elsewhere: take format='delta' or 'iceberg'."
            )
        return self._in_folders(rows)

    def _in_lake(self, rows: DataFrame, table: tables.LakeTable) -> str:
        parts = self._parts()
        if table.exists() and any(not self._covers(range_) for range_ in parts.values()):
            old = tables.lake_frame(rows.sparkSession, self.location)
            rows = rows.unionByName(self._others(old, rows), allowMissingColumns=True)
        version = table.replace(rows, f"replaced.{self.declaration.name}:{self.key}")
        checkpoint.add_table_range(self.query, f"{self.location}{tables.BACKFILL}{self.key}", self.start, self.end)
        return f"rows replaced in {self.location}, version {version}"

    def _in_folders(self, rows: DataFrame) -> str:
        parts = {name: range_ for name, range_ in self._parts().items() if self._overlaps(range_)}
        cut = {name: range_ for name, range_ in parts.items() if not self._covers(range_)}
        for name in cut:
            with _as_texts(rows.sparkSession):
                old = tables.folder_frame(rows.sparkSession, name)
            rows = rows.unionByName(self._others(old, rows), allowMissingColumns=True)
        tables.remove_hidden(self.location)
        folder = f"{self.location}{tables.VERSION}{self.key}.{secrets.token_hex(3)}"
        by = self.declaration.options["partition_by"]
        writer = rows.write.mode("overwrite")
        (writer.partitionBy(*by) if by else writer).parquet(folder)
        process.crash_at("before_replace", 0)
        self._move_stream(parts)
        checkpoint.add_table_range(self.query, folder, *_hull([(self.start, self.end), *cut.values()]))
        process.crash_at("amid_replace", 0)
        version = tables.show_version(self.location, folder, parts)
        process.crash_at("after_replace", 0)
        return f"rows replaced in {self.location}, version {version}"

    def _move_stream(self, replaced: Ranges) -> None:
        """Lets the stream go on in another folder when the one that it wrote to is replaced."""
        folder = checkpoint.table_folder(self.query) or self.location
        if self.stream_end is not None and folder in replaced and checkpoint.exists(self.query):
            fresh = f"{self.location}{tables.BACKFILL}{secrets.token_hex(6)}"
            tables.continue_log(folder, fresh)
            checkpoint.add_table_range(self.query, folder, *replaced[folder])
            checkpoint.keep_table_folder(self.query, fresh, self.stream_end)

    def _parts(self) -> Ranges:
        """What the table is made of, and the rows of the journal that each was made of."""
        found = checkpoint.written_ranges(self.query)
        began = checkpoint.start_offsets(self.query)
        if began is not None and self.stream_end is not None and checkpoint.last_batch(self.query) >= 0:
            folder = checkpoint.table_folder(self.query) or self.location
            found[folder] = (began, self.stream_end)
        return found

    def _others(self, old: DataFrame, rows: DataFrame) -> DataFrame:
        """The rows of before that are not of the range, with the types of the new ones."""
        from pyspark.sql import functions as F

        for each in (old, rows):
            kinds = dict(each.dtypes)
            if (kinds.get("node"), kinds.get("seq")) != ("string", "bigint"):
                raise self._unknown_rows()
        types = dict(rows.dtypes)
        columns = [F.col(f"`{name}`").cast(types.get(name, kind)).alias(name) for name, kind in old.dtypes]
        return old.where(~F.coalesce(self._is_inside(), F.lit(False))).select(*columns)

    def _is_inside(self) -> Column:
        from pyspark.sql import functions as F

        ranges = [
            (F.col("node") == node) & (F.col("seq") >= self.start.get(node, 0)) & (F.col("seq") < seq)
            for node, seq in self.end.items()
        ]
        return reduce(or_, ranges)

    def _unknown_rows(self) -> PipelineError:
        start, end = _hull([(self.start, self.end), *self._parts().values()])
        return PipelineError(
            f"{self.declaration.where}: {self.declaration.name}: which rows of its table belong to a part of the "
            "journal, only columns node and seq of the result would tell, and it has none; replace all of them: "
            f"--from '{checkpoint.offset_text(start)}' --to '{checkpoint.offset_text(end)}'."
        )

    def _overlaps(self, other: tuple[Offsets, Offsets]) -> bool:
        return checkpoint.overlap(self.start, self.end, *other)

    def _covers(self, other: tuple[Offsets, Offsets]) -> bool:
        return checkpoint.covers(self.start, self.end, *other)


def _hull(ranges: list[tuple[Offsets, Offsets]]) -> tuple[Offsets, Offsets]:
    """The range from the first to the last row of all of them."""
    nodes = {node for _, end in ranges for node in end}
    start = {node: min(first.get(node, 0) for first, last in ranges if node in last) for node in nodes}
    return start, {node: max(last[node] for _, last in ranges if node in last) for node in nodes}


@contextmanager
def _as_texts(spark: SparkSession) -> Iterator[None]:
    """Spark takes the folder `hour=07` for the number 7, and would name the next one so."""
    before: Any = spark.conf.get(_INFERRED)
    spark.conf.set(_INFERRED, "false")
    try:
        yield
    finally:
        spark.conf.set(_INFERRED, before)
