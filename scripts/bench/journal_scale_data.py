"""Journals of any size in seconds to minutes: a real manifest and real indexes, and sparse files in the place of rows.

Only what a measure reads has rows: one compacted file in the middle, and small files of one hour, to be merged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from smqrt.journal import arrow, committed, compact, manifest, segment
from smqrt.journal.manifest import DataFile
from smqrt.journal.record import Row
from smqrt.journal.segment import DATA, INDEX, INDEXED, summary_of

ROWS = 200_000
FILE_BYTES = 60_000_000
START_US = 1_763_683_200_000_000
STEP_US = 100_000_000  # a file: 200,000 rows in 100 s are 2,000 a second
BATCHES, BATCH_ROWS, BATCH_BYTES = 10_000, 20, 6400
TOPICS = tuple(f"site{at}/machine/temp" for at in range(20))
SMALL_FILES, SMALL_ROWS = 12, 5000
TOO_YOUNG = compact.CompactOptions(after_s=1e9, merge_bytes=0)
"""Leaves all segments alone: they have no rows."""
_FLUSH_ROWS = 1000
_HOUR_US = 3_600_000_000


@dataclass(frozen=True)
class Shape:
    """How large a journal is.

    Attributes:
        files: compacted ones, with 200,000 rows each.
        segments: with 10,000 batches of 20 rows each, behind the files.
    """

    files: int
    segments: int = 300

    @property
    def middle(self) -> int:
        """The number of the first row of the file that has rows."""
        return self.files // 2 * ROWS

    @property
    def middle_us(self) -> int:
        """The time of that row."""
        return START_US + self.files // 2 * STEP_US

    @property
    def behind(self) -> int:
        """The number behind the last compacted row."""
        return self.files * ROWS + SMALL_FILES * SMALL_ROWS

    @property
    def small_us(self) -> int:
        """When the hour of the small files begins: the next one."""
        return -(-(START_US + self.files * STEP_US) // _HOUR_US) * _HOUR_US

    @property
    def segments_us(self) -> int:
        """The time of the first row in a segment."""
        return self.small_us + _HOUR_US


def generate(journal: Path, shape: Shape) -> None:
    """Writes a journal."""
    journal.mkdir(parents=True)
    with manifest.edit(journal) as changes:
        changes.add(_sparse(journal, at) for at in range(shape.files) if at != shape.files // 2)
        changes.add(_real(journal, shape.middle, [ROWS], shape.middle_us, STEP_US // ROWS))
        step_us = _HOUR_US // SMALL_FILES // SMALL_ROWS
        changes.add(_real(journal, shape.files * ROWS, [SMALL_ROWS] * SMALL_FILES, shape.small_us, step_us))
        changes.nodes["n1"], changes.settled["n1"] = shape.behind, shape.files * ROWS
    for at in range(shape.segments):
        first = shape.behind + at * BATCHES * BATCH_ROWS
        _segment(journal / "wal" / "n1", first, shape.segments_us + at * STEP_US)
    newest = shape.behind + (shape.segments - 1) * BATCHES * BATCH_ROWS
    committed.save_snapshot(journal / "wal" / "n1", {"q": 1}, newest)  # as a hub does with each new segment
    compact.compact(journal, TOO_YOUNG)  # the first run looks for what a killed one has left


def _sparse(journal: Path, at: int) -> DataFile:
    """Makes a compacted file without rows, and returns what the manifest says of it."""
    first, last, ts_us = at * ROWS, (at + 1) * ROWS - 1, START_US + at * STEP_US
    hour = time.strftime("date=%Y-%m-%d/hour=%H", time.gmtime(ts_us // 1_000_000))
    path = f"data/{hour}/n1-{first:020d}-{last:020d}.parquet"
    (journal / path).parent.mkdir(parents=True, exist_ok=True)
    (journal / path).touch()
    os.truncate(journal / path, FILE_BYTES)
    return DataFile(path, "n1", first, last, ROWS, ts_us, ts_us + STEP_US - 1, FILE_BYTES, TOPICS, None, 1, 1)


def _real(journal: Path, first: int, counts: Iterable[int], ts_us: int, step_us: int) -> list[DataFile]:
    """Makes compacted files with so many rows each, `step_us` apart; returns what the manifest says of them."""
    with TemporaryDirectory(dir=journal.parent) as folder:
        beside = Path(folder)
        for count in counts:
            _recorded(beside / "wal" / "n1", [_row(first + at, ts_us + at * step_us) for at in range(count)])
            first, ts_us = first + count, ts_us + count * step_us
        compact.compact(beside, compact.CompactOptions(everything=True, max_group_bytes=1, merge_bytes=0))
        made = list(manifest.load(beside).files("n1"))
        for file in made:
            (journal / file.path).parent.mkdir(parents=True, exist_ok=True)
            (beside / file.path).rename(journal / file.path)
    return made


def _row(seq: int, ts_us: int) -> Row:
    payload = f'{{"device":"d{seq % 1000}","seq":{seq},"temp":{seq % 977 / 10}}}'.ljust(300).encode()
    return Row(seq, ts_us, TOPICS[seq % len(TOPICS)], 100 + seq % len(TOPICS), None, None, 77, "u", 0, payload, None)


def _recorded(folder: Path, rows: list[Row]) -> None:
    opened = segment.SegmentFile.open(folder, rows[0].seq, "n1", "hub")
    for at in range(0, len(rows), _FLUSH_ROWS):
        some = rows[at : at + _FLUSH_ROWS]
        opened.append(arrow.encode(some), some[0].seq, len(some), some[0].ts_us, some[-1].ts_us, 0)
    opened.close()


def _segment(folder: Path, first: int, ts_us: int) -> None:
    """Writes a segment's index, and a sparse file in the place of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    schema, path, step_us = arrow.schema_message("n1", "hub"), folder / segment.name(first), STEP_US // BATCHES
    with path.with_suffix(INDEXED).open("wb") as file:
        for at in range(BATCHES):
            begin_us, offset = ts_us + at * step_us, len(schema) + at * BATCH_BYTES
            numbers = (first + at * BATCH_ROWS, BATCH_ROWS, offset, BATCH_BYTES, begin_us, begin_us + step_us - 1)
            file.write(INDEX.pack(*numbers, 0, 0, 0))
    path.with_suffix(DATA).write_bytes(schema)
    os.truncate(path.with_suffix(DATA), len(schema) + BATCHES * BATCH_BYTES)
    summary_of(path.with_suffix(DATA))
