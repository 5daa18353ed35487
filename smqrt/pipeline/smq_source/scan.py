"""What reading shares between batch and stream: planned ranges of the journal become Arrow batches in a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from smqrt.journal import planning, typed
from smqrt.journal.filters import Filter
from smqrt.journal.reader import Chunk, Journal
from smqrt.journal.record import Flag
from smqrt.journal.remote import RemoteJournal, open_journal
from smqrt.pipeline.smq_source import columns, merging, sizes
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_ALL_ROWS = 1 << 62


class Part(InputPartition):
    """What one task of Spark reads.

    Args:
        chunks: pieces of files, in the order of their rows.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(None)
        self.chunks = list(chunks)


@lru_cache(maxsize=4)
def opened(
    place: str, token: str | None, cafile: str | None, retry_s: float, verify: bool = True
) -> Journal | RemoteJournal:
    """Returns the journal: one object for each process, so that connections are used again.

    Args:
        place, token, cafile, retry_s: as for `open_journal`.
        verify: compare checksums; they are over all columns, so that this reads what a query may not need.
    """
    journal = open_journal(place, token, cafile=cafile, retry_s=retry_s)
    journal.verify = verify
    return journal


@dataclass(frozen=True)
class Scan:
    """What to read, without the ranges: it's sent to the workers.

    Attributes:
        options: of the read.
        schema: of the result, as Spark gave it.
        topics: exact names that Spark's filters leave, or None.
        ts_us: first and last microsecond that Spark's filters leave, or None.
    """

    options: ReadOptions
    schema: StructType
    topics: frozenset[str] | None = None
    ts_us: tuple[int, int] | None = None

    @property
    def journal(self) -> Journal | RemoteJournal:
        options, verify = self.options, not {"payload", typed.COLUMN}.isdisjoint(self.schema.fieldNames())
        return opened(options.journal, options.token, options.cafile, options.retry_s, verify)

    @property
    def filter(self) -> Filter | None:
        """What skips whole files: the names that Spark's filters leave, where they can be told from wildcards."""
        if self.topics and not any({"+", "#"} & set(name) for name in self.topics):
            return Filter(sorted(self.topics))
        return self.options.filter()

    def plan(self, start: Offsets, end: Offsets) -> list[Chunk]:
        """Returns the pieces of files that have the rows from `start` up to, without, `end`."""
        if self.topics is not None and not self.topics:
            return []
        plan = self.journal.plan(start, end, max_rows=_ALL_ROWS, ts_us=self.ts_us, topics=self.filter)
        return [chunk for chunks in plan for chunk in chunks]

    def parts(self, chunks: Sequence[Chunk]) -> list[Part]:
        """Returns the tasks that read these chunks."""
        return [Part(some) for some in planning.parts(chunks, sizes.rows_per_task(self.options, chunks))]

    def read(self, part: InputPartition) -> Iterator[Any]:
        """Yields the rows of a task as pyarrow.RecordBatches of Spark's schema."""
        if not isinstance(part, Part):
            return
        target = columns.arrow_schema(self.schema)
        names = columns.needed(self.schema.fieldNames(), *self._looked_at())
        journal, wanted, rows = self.journal, self.filter, self.options.batch_rows
        batches = (batch for chunk in part.chunks for batch in journal.tables(chunk, names, wanted, rows))
        fields = columns.json_ddl(self.schema)
        parser = typed.TypedColumn({"#": fields}) if fields else None
        for batch in merging.merged(batches, rows):
            if (kept := self._kept(batch)).num_rows:
                yield columns.shaped(_with_json(kept, parser) if parser else kept, target)

    def _looked_at(self) -> Iterator[str]:
        """Yields the columns that reading itself needs."""
        if typed.COLUMN in self.schema.fieldNames():
            yield from ("topic", "payload")
        if self.ts_us:
            yield "ts"
        if self.topics is not None:
            yield "topic"
        if not self.options.include_pipeline:
            yield "flags"

    def _kept(self, batch: Any) -> Any:
        """Returns the rows that every filter leaves."""
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = []
        if self.ts_us:
            ts = batch.column("ts").cast(pa.int64())
            masks += [pc.greater_equal(ts, self.ts_us[0]), pc.less_equal(ts, self.ts_us[1])]
        if self.topics is not None:
            masks.append(pc.is_in(batch.column("topic"), pa.array(sorted(self.topics), pa.string())))
        if not self.options.include_pipeline:
            masks.append(pc.equal(pc.bit_wise_and(batch.column("flags"), int(Flag.PIPELINE)), 0))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return batch.filter(masks[0]) if masks else batch


def _with_json(batch: Any, parser: typed.TypedColumn) -> Any:
    return batch.append_column(parser.field, parser.column(batch.column("topic"), batch.column("payload")))
