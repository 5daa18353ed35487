"""What there is in a journal, in figures: `smqrt journal stats`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from smqrt.journal import manifest, readers
from smqrt.journal.inspect import latest
from smqrt.journal.planning import WAL, Chunk
from smqrt.journal.reader import Journal
from smqrt.journal.remote import RemoteJournal
from smqrt.journal.timestamps import iso


@dataclass
class Figures:
    """What there is in a journal.

    Attributes:
        rows: how many.
        segments, segment_bytes: in how many segments, and how long those are together.
        files, file_bytes: the same of the compacted files; 0 bytes when they are elsewhere.
        first_us, last_us: times of the first and the last row, None when there is none.
        rate: rows a second between those.
        offsets: by node the number of the oldest row, and of the next one.
        topics: rows by topic, the most frequent first; "" are messages to one client. None: not counted.
        readers: by query how many rows it has yet to read; known in the journal's folder only.
        stale_readers: since when those of them have read nothing that have been silent for a day.
    """

    rows: int = 0
    segments: int = 0
    segment_bytes: int = 0
    files: int = 0
    file_bytes: int = 0
    first_us: int | None = None
    last_us: int | None = None
    rate: float = 0.0
    offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    topics: dict[str, int] | None = None
    readers: dict[str, int] = field(default_factory=dict)
    stale_readers: dict[str, str] = field(default_factory=dict)

    def as_fields(self) -> dict[str, Any]:
        """Returns the figures as JSON has them."""
        fields = asdict(self)
        first, last = fields.pop("first_us"), fields.pop("last_us")
        return fields | {"first": first and iso(first), "last": last and iso(last)}


def figures(journal: Journal, count_topics: bool = True) -> Figures:
    """Returns the figures of a journal.

    Args:
        journal: the journal.
        count_topics: count rows by topic, which reads them all.

    Raises:
        JournalError: it can't be read.
        ImportError: pyarrow is missing, and there are compacted files.
    """
    end = journal.end()
    begin = {node: seq for node, seq in journal.begin().items() if node in end}
    chunks = [chunk for part in journal.plan(begin, end) for chunk in part]
    found = Figures(rows=sum(chunk.rows for chunk in chunks))
    found.offsets = {node: (seq, end[node]) for node, seq in begin.items()}
    _sizes(journal, found, chunks)
    _times(journal, found, chunks, end)
    if count_topics:
        found.topics = dict(sum((_topics(journal, chunk) for chunk in chunks), Counter[str]()).most_common())
    if not isinstance(journal, RemoteJournal):
        _readers(journal, found)
    return found


def _readers(journal: Journal, found: Figures) -> None:
    begin = {node: first for node, (first, _) in found.offsets.items()}
    end = {node: last for node, (_, last) in found.offsets.items()}
    now_us = time.time_ns() // 1000
    for reader in readers.load(journal.path):
        behind = found.readers[reader.name] = reader.behind(begin, end)
        if behind and reader.silent_s(now_us) > readers.STALE_S:
            found.stale_readers[reader.name] = iso(reader.seen_us)


def _sizes(journal: Journal, found: Figures, chunks: list[Chunk]) -> None:
    segments = {chunk.file for chunk in chunks if chunk.kind == WAL}
    files = {chunk.file for chunk in chunks if chunk.kind != WAL}
    found.segments, found.files = len(segments), len(files)
    found.segment_bytes = sum(chunk.length for chunk in chunks if chunk.kind == WAL)
    if not isinstance(journal, RemoteJournal):
        found.file_bytes = sum(page.bytes for page in manifest.load(journal.path).pages())


def _times(journal: Journal, found: Figures, chunks: list[Chunk], end: dict[str, int]) -> None:
    firsts = {chunk.node: chunk for chunk in reversed(chunks)}
    times = [next(iter(journal.rows_of(chunk))).ts_us for chunk in firsts.values()]
    if not times:
        return
    found.first_us, found.last_us = min(times), latest(journal, end, 1)[-1].row.ts_us
    seconds = (found.last_us - found.first_us) / 1e6
    found.rate = round(found.rows / seconds, 3) if seconds > 0 else 0.0


def _topics(journal: Journal, chunk: Chunk) -> Counter[str]:
    try:
        return Counter(dict(_counted(journal, chunk)))
    except ImportError:
        return Counter(row.topic or "" for row in journal.rows_of(chunk))


def _counted(journal: Journal, chunk: Chunk) -> Iterator[tuple[str, int]]:
    """Yields (topic, rows) of a chunk, by pyarrow, which takes no time."""
    import pyarrow

    columns = [batch.column("topic") for batch in journal.tables(chunk, ["topic"])]
    for pair in pyarrow.chunked_array(columns, pyarrow.string()).value_counts():
        yield pair["values"].as_py() or "", pair["counts"].as_py()
