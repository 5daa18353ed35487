"""Files of a journal for readers, and the rows in them.

`JournalFiles` is what a reader needs of a journal's storage: `FolderFiles` here, `HubFiles` in `remote`. `ChunkReader`
reads rows and Arrow batches from either.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from smqrt.errors import JournalError
from smqrt.journal import arrow, manifest, numbers, parquet_files, segment, tables
from smqrt.journal.files import MOVED, Unreachable, crc32, there
from smqrt.journal.filters import Filter
from smqrt.journal.planning import (
    PARQUET,
    WAL,
    Chunk,
    JournalSnapshot,
    SealedSegment,
    SegmentIndex,
    segment_file,
)
from smqrt.journal.record import Row
from smqrt.journal.segment import DATA, INDEXED, REMEDY, BatchEntry

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1 << 14
_SCHEMA_BYTES = 8192  # more than any schema of a segment has
_NEWEST = -1


class JournalFiles(Protocol):
    """Access to the files of a journal."""

    def location(self, file: str) -> str:
        """Return the full path or address of a file, for messages."""

    def snapshot(self) -> JournalSnapshot:
        """Return the present segments and the manifest. Raises JournalError when they can't be read."""

    def gaps(self, node: str) -> list[tuple[int, int]]:
        """Return the gaps in the numbers of a node; see `numbers.gaps`."""

    def end(self, snapshot: JournalSnapshot, node: str) -> int:
        """Return the number of the next row of a node."""

    def index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """Return the index of a segment.

        Args:
            node, first: the segment.
            newest: the index of the newest segment may be missing.
            until: rows before this number are enough; 0 for all.

        Raises:
            FileNotFoundError: the segment does not exist any more.
        """

    def sealed(self, node: str, first: int) -> SealedSegment | None:
        """Return what a sealed segment contains; None when only its index can tell.

        Raises:
            FileNotFoundError: the segment does not exist any more.
        """

    def read(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """Return a part of a file behind `head`; less when the file is shorter.

        Raises:
            FileNotFoundError: the file does not exist any more.
        """

    def open_parquet(self, chunk: Chunk) -> IO[bytes]:
        """Open the Parquet file of a chunk.

        Raises:
            FileNotFoundError: the file does not exist any more.
        """


class FolderFiles:
    """The files of a journal in a folder; see `JournalFiles`.

    Args:
        path: the journal's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def location(self, file: str) -> str:
        """See `JournalFiles`."""
        return str(self._path / file)

    def snapshot(self) -> JournalSnapshot:
        """See `JournalFiles`."""
        try:
            with there(self._path):
                # Segments before the manifest: rows that are compacted meanwhile are in both, never in neither.
                wal = {folder.name: segment.firsts(folder) for folder in segment.node_folders(self._path)}
                return JournalSnapshot(wal, manifest.load(self._path))
        except FileNotFoundError:
            raise Unreachable(f"{self._path} {MOVED}") from None

    def gaps(self, node: str) -> list[tuple[int, int]]:
        """See `JournalFiles`."""
        return numbers.gaps(self._path / WAL / node)

    def end(self, snapshot: JournalSnapshot, node: str) -> int:
        """See `JournalFiles`."""
        end = snapshot.manifest.nodes.get(node, 0)
        for first in snapshot.wal.get(node, [])[_NEWEST:]:
            end = max(end, first, self.index(node, first, newest=True).end)
        return end

    def index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """See `JournalFiles`."""
        path = (self._path / segment_file(node, first)).with_suffix(INDEXED)
        try:
            with path.open("rb") as opened:  # mapped, so that only the part that is used is read
                size = os.fstat(opened.fileno()).st_size
                data = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) if size else b""
            return SegmentIndex(memoryview(data), str(path))
        except FileNotFoundError:
            if newest and path.with_suffix(DATA).exists():
                return SegmentIndex(b"", str(path))
            raise

    def sealed(self, node: str, first: int) -> SealedSegment | None:
        """See `JournalFiles`."""
        path = f"{self._path}/{segment_file(node, first)}"
        found = segment.summary_of(path)
        if not found.is_dense:
            return None
        return SealedSegment(found.end, os.stat(path).st_size, found.ts_min_us, found.ts_max_us)

    def read(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """See `JournalFiles`. To avoid a copy, `head` overwrites the bytes before the part in a private mapping."""
        with (self._path / file).open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= offset:
                return memoryview(head)
            mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY if head else mmap.ACCESS_READ)
        if offset < len(head):
            return memoryview(head + mapped[offset : offset + length])
        if head:
            mapped[offset - len(head) : offset] = head
        return memoryview(mapped)[offset - len(head) : offset + length]

    def open_parquet(self, chunk: Chunk) -> IO[bytes]:
        """See `JournalFiles`."""
        return parquet_files.compacted_path(self._path, chunk.file).open("rb")


class ChunkReader:
    """Reads the rows of chunks.

    Args:
        files: the files of the journal.
        verify: compare batches of segments with their checksums.

    Attributes:
        verify: as given.
    """

    def __init__(self, files: JournalFiles, verify: bool) -> None:
        self._files, self.verify = files, verify
        self._brokers: dict[tuple[str, int], str] = {}

    def rows(self, chunk: Chunk, topics: Filter | None) -> Iterator[tuple[int, Iterable[Row]]]:
        """Yield (number after the last row, rows) of a chunk.

        Args:
            chunk: the chunk.
            topics: which rows; None for all, also those without a topic.

        Raises:
            JournalError: the rows are damaged.
            FileNotFoundError: the file does not exist any more.
        """
        if chunk.kind == PARQUET:
            for seq, batch in self.tables(chunk, None, topics, BATCH_ROWS):
                yield seq, _as_rows(batch)
            return
        entries = self._entries(chunk)
        data = self._files.read(chunk.file, entries[0].offset, entries[-1].end - entries[0].offset)
        for entry, batch in self._checked_batches(chunk.file, entries, data):
            rows = arrow.decode(batch)[max(0, chunk.start - entry.first_seq) :]
            kept = [row for row in rows if row.seq < chunk.end]
            seq = min(chunk.end, rows[-1].seq + 1) if rows else chunk.start
            if topics is not None:
                kept = [row for row in kept if row.topic is not None and topics.matches(row.topic)]
            yield seq, kept

    def tables(
        self, chunk: Chunk, columns: Sequence[str] | None, topics: Filter | None, batch_rows: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (number after the last row, RecordBatch) of a chunk.

        Arguments as for `Journal.tables`; raises as `rows`.
        """
        import pyarrow as pa

        try:
            if chunk.kind == WAL:
                broker = self._broker(chunk.node, int(Path(chunk.file).stem))
                skip, stream = self._stream(chunk, broker)
                yield from tables.of_segment(stream, chunk, broker, skip, columns, topics, batch_rows)
            else:
                yield from tables.of_parquet(self._files.open_parquet(chunk), chunk, columns, topics, batch_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self.damaged(chunk.file, chunk.offset, str(error)) from error

    def damaged(self, file: str, offset: int, what: str) -> JournalError:
        """Return the error for a damaged file."""
        return JournalError(f"{self._files.location(file)} is damaged at offset {offset}: {what}; {REMEDY}.")

    def _stream(self, chunk: Chunk, broker: str) -> tuple[int, memoryview]:
        """Return (rows before the wanted ones, Arrow stream with the batches of a chunk), checked."""
        entries, head = self._entries(chunk), arrow.schema_message(chunk.node, broker)
        length = entries[-1].end - entries[0].offset
        stream = self._files.read(chunk.file, entries[0].offset, length, head)
        if self.verify or len(stream) < len(head) + length:
            for _ in self._checked_batches(chunk.file, entries, stream[len(head) :]):
                pass
        return max(0, chunk.start - entries[0].first_seq), stream

    def _entries(self, chunk: Chunk) -> list[BatchEntry]:
        first = int(Path(chunk.file).stem)
        entries = self._files.index(chunk.node, first, until=chunk.end).between(chunk.start, chunk.end)
        if not entries or entries[0].first_seq > chunk.start or entries[-1].next_seq < chunk.end:
            raise self.damaged(chunk.file, chunk.offset, "the index doesn't have the rows any more")
        return entries

    def _checked_batches(
        self, file: str, entries: Sequence[BatchEntry], data: memoryview
    ) -> Iterator[tuple[BatchEntry, memoryview]]:
        for entry in entries:
            at = entry.offset - entries[0].offset
            batch = data[at : at + entry.length]
            if len(batch) < entry.length:
                raise self.damaged(file, entry.offset, f"the batch has {len(batch)} of its {entry.length} bytes")
            if self.verify and crc32(batch) != entry.crc32:
                raise self.damaged(file, entry.offset, "the batch's checksum is wrong")
            yield entry, batch

    def _broker(self, node: str, first: int) -> str:
        """Return the broker's name in the schema of a segment."""
        key = node, first
        if key not in self._brokers:
            file = segment_file(node, first)
            try:
                head = bytes(self._files.read(file, 0, _SCHEMA_BYTES))
                self._brokers[key] = arrow.schema_metadata(head)["broker"]
            except (ValueError, KeyError, struct.error) as error:
                raise self.damaged(file, 0, f"no schema of a journal is there ({error})") from None
        return self._brokers[key]


def _as_rows(batch: Any) -> Iterator[Row]:
    """Return the rows of a RecordBatch with all columns."""
    import pyarrow as pa

    columns = [batch.column(name) for name in tables.NAMES if name not in ("node", "broker")]
    columns[1] = columns[1].cast(pa.int64())  # ts
    return map(Row._make, zip(*(column.to_pylist() for column in columns), strict=True))
