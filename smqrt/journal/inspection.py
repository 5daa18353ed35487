"""Inspection of a journal: rows as text, JSON or files, and statistics."""

from __future__ import annotations

import csv
import heapq
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import manifest, readers, tables
from smqrt.journal.files import touch
from smqrt.journal.planning import WAL, Chunk
from smqrt.journal.reader import Journal, Offsets
from smqrt.journal.record import COLUMNS, Flag, Row, iso
from smqrt.journal.remote import RemoteJournal
from smqrt.printable import json_line, printable

_FIRST_WINDOW_ROWS = 4096
_WAIT_S = 10.0
"""Maximum time of one wait for rows in `follow`, seconds."""
_FLAG_NAMES = {
    Flag.DIRECT: "direct",
    Flag.UNROUTED: "unrouted",
    Flag.ASSEMBLED: "assembled",
    Flag.PIPELINE: "pipeline",
    Flag.SERVER: "server",
}

OnRows = Callable[[int], None]
"""Called with the number of further rows that were processed."""
_GROUP_ROWS = 1 << 16
"""Batches are joined until they have this many rows, which become one row group of a Parquet file."""
_PROGRESS_ROWS = 1024
NEEDS_PYARROW = "{what} needs pyarrow, which is not installed: pip install 'smqrt[spark]'"


class RecordedRow(NamedTuple):
    """A row and the node that recorded it."""

    node: str
    row: Row


# ---- rows


def in_order(
    journal: Journal, start: Offsets, end: Offsets, topics: Sequence[str] | None = None
) -> Iterator[RecordedRow]:
    """Yield the rows of all nodes by time; the rows of one node stay in sequence.

    Args:
        journal: the journal.
        start, end: the range of rows by node; `end` is exclusive.
        topics: patterns of the topics; None for all rows, also messages to one client.

    Raises:
        JournalError: the journal can't be read.
    """

    def of(node: str, last: int) -> Iterator[RecordedRow]:
        return (RecordedRow(node, row) for row in journal.rows({node: start.get(node, 0)}, {node: last}, topics))

    return heapq.merge(*(of(node, last) for node, last in end.items()), key=lambda recorded: recorded.row.ts_us)


def latest(journal: Journal, end: Offsets, count: int, topics: Sequence[str] | None = None) -> list[RecordedRow]:
    """Return the last `count` rows before `end`, oldest first. It reads backwards until it has enough rows.

    Args:
        journal: the journal.
        end: by node, the number after the last row.
        count: number of rows.
        topics: as for `in_order`.

    Raises:
        JournalError: the journal can't be read.
    """
    begin = journal.begin()
    rows: list[RecordedRow] = []
    for node, last in end.items():
        found: deque[Row] = deque()
        part_rows = window = max(_FIRST_WINDOW_ROWS, count)
        while last > begin.get(node, 0) and len(found) < count:
            start = max(begin.get(node, 0), last - window)
            for part in reversed(journal.plan({node: start}, {node: last}, max_rows=part_rows)):
                if len(found) < count:  # after a gap in the numbers, a window may have many parts
                    found.extendleft(reversed([row for chunk in part for row in journal.rows_of(chunk, topics)]))
            last, window = start, window * 4  # rare topics need large windows
        rows += (RecordedRow(node, row) for row in deque(found, count))
    rows.sort(key=lambda recorded: recorded.row.ts_us)
    return rows[len(rows) - count :] if count < len(rows) else rows


def follow(journal: Journal, start: Offsets, topics: Sequence[str] | None = None) -> Iterator[RecordedRow]:
    """Yield rows from `start` on as they are written. The iterator does not end.

    Args:
        journal: the journal.
        start: by node, the number of the first row.
        topics: as for `in_order`.

    Raises:
        JournalError: the journal can't be read.
    """
    while True:
        end = journal.wait(start, _WAIT_S)
        if any(last > start.get(node, 0) for node, last in end.items()):
            yield from in_order(journal, start, end, topics)
        start = end


# ---- text and JSON


def flag_names(flags: int) -> list[str]:
    """Return the names of the flags that are set, such as ["direct", "assembled"]."""
    return [name for flag, name in _FLAG_NAMES.items() if flags & flag]


def as_line(recorded: RecordedRow) -> str:
    """Return a row as a line of text: time, topic, uid, payload, flags, and the QoS of MQTT unless it is 0."""
    row = recorded.row
    target = row.topic if row.topic is not None else f"(to {row.tid})"
    target = f"{target} ({row.subtopic})" if row.subtopic else target
    try:
        payload = row.payload.decode()
        if payload != printable(payload):  # control characters would change the terminal
            payload = json_line(payload)
    except UnicodeDecodeError:
        payload = f"0x{row.payload.hex()}"
    parts = [iso(row.ts_us), printable(target), printable(row.uid or "-"), payload]
    marks = flag_names(row.flags) + ([f"qos {row.qos}"] if row.qos else []) + (["retain"] if row.retain else [])
    return "  ".join(parts + [f"[{name}]" for name in marks])


def as_fields(recorded: RecordedRow) -> dict[str, object]:
    """Return the JSON fields of a row: `payload` as text, or `payload_hex` when it is not UTF-8."""
    row = recorded.row
    fields: dict[str, object] = {"node": recorded.node, "seq": row.seq, "ts": iso(row.ts_us), "topic": row.topic}
    fields |= {"tid": row.tid, "subtopic": row.subtopic, "stid": row.stid, "ptid": row.ptid, "uid": row.uid}
    fields |= {"flags": flag_names(row.flags), "txn": row.txn}
    try:
        properties = None if row.properties is None else json.loads(row.properties)
    except ValueError:  # no hub writes this
        properties = row.properties
    fields |= {"qos": row.qos, "retain": row.retain, "properties": properties}
    try:
        fields["payload"] = row.payload.decode()
    except UnicodeDecodeError:
        fields["payload_hex"] = row.payload.hex()
    return fields


# ---- statistics


@dataclass
class JournalStats:
    """Statistics of a journal.

    Attributes:
        rows: number of rows.
        segments, segment_bytes: number and size of the segments.
        files, file_bytes: number and size of the compacted files; the size is 0 for a remote journal.
        first_us, last_us: times of the first and the last row; None without rows.
        rate: rows per second between these times.
        offsets: by node, the numbers of the oldest row and of the next row.
        topics: rows by topic, the most frequent first; "" for messages to one client; None when not counted.
        readers: by query, its backlog in rows; empty for a remote journal.
        stale_readers: by stale query, the time of its last report.
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

    def as_fields(self) -> dict[str, object]:
        """Return the statistics as JSON fields."""
        fields = asdict(self)
        first, last = fields.pop("first_us"), fields.pop("last_us")
        return fields | {"first": first and iso(first), "last": last and iso(last)}


def journal_stats(journal: Journal, count_topics: bool = True) -> JournalStats:
    """Return the statistics of a journal.

    Args:
        journal: the journal.
        count_topics: whether rows are counted by topic, which reads all rows.

    Raises:
        JournalError: it can't be read.
        ImportError: pyarrow is missing, and there are compacted files.
    """
    end = journal.end()
    begin = {node: seq for node, seq in journal.begin().items() if node in end}
    chunks = [chunk for part in journal.plan(begin, end) for chunk in part]
    found = JournalStats(rows=sum(chunk.rows for chunk in chunks))
    found.offsets = {node: (seq, end[node]) for node, seq in begin.items()}
    wal = [chunk for chunk in chunks if chunk.kind == WAL]
    found.segments, found.segment_bytes = len({chunk.file for chunk in wal}), sum(chunk.length for chunk in wal)
    found.files = len({chunk.file for chunk in chunks if chunk.kind != WAL})
    firsts = {chunk.node: chunk for chunk in reversed(chunks)}
    if times := [next(iter(journal.rows_of(chunk))).ts_us for chunk in firsts.values()]:
        found.first_us, found.last_us = min(times), latest(journal, end, 1)[-1].row.ts_us
        seconds = (found.last_us - found.first_us) / 1e6
        found.rate = round(found.rows / seconds, 3) if seconds > 0 else 0.0
    if count_topics:
        found.topics = dict(sum((_topics(journal, chunk) for chunk in chunks), Counter[str]()).most_common())
    if not isinstance(journal, RemoteJournal):
        found.file_bytes = sum(page.bytes for page in manifest.load(journal.path).pages())
        now_us = time.time_ns() // 1000
        backlog = readers.Backlog(journal, _MAX_READ if count_topics else readers.MAX_READ, begin)
        for reader in readers.load(journal.path):
            behind = found.readers[reader.name] = backlog.of(reader)
            if behind and reader.silent_s(now_us) > readers.STALE_S:
                found.stale_readers[reader.name] = iso(reader.seen_us)
    return found


_MAX_READ = 1_000_000
"""Maximum number of rows that are read for one backlog, where no index marks results. Counting by topic reads all rows
anyway.
"""


def _topics(journal: Journal, chunk: Chunk) -> Counter[str]:
    try:
        import pyarrow

        columns = [batch.column("topic") for batch in journal.tables(chunk, ["topic"])]
    except ImportError:
        return Counter(row.topic or "" for row in journal.rows_of(chunk))
    counts = pyarrow.chunked_array(columns, pyarrow.string()).value_counts()
    return Counter({pair["values"].as_py() or "": pair["counts"].as_py() for pair in counts})


# ---- export


def export(
    journal: Journal,
    start: Offsets,
    end: Offsets,
    to: Path,
    topics: Sequence[str] | None = None,
    on_rows: OnRows = lambda count: None,
) -> int:
    """Write rows to a file in the format of its suffix. The file gets its name when it is complete.

    Args:
        journal: the journal.
        start, end: the range of rows by node; `end` is exclusive.
        to: a file with the suffix .parquet, .arrow, .csv or .jsonl.
        topics: patterns of the topics; None for all rows, also messages to one client.
        on_rows: called regularly with the number of further rows.

    Returns:
        The number of rows in the file.

    Raises:
        ArgumentError: the suffix is another one.
        JournalError: pyarrow is missing, or the file can't be written.
    """
    write = _WRITERS.get(to.suffix)
    if write is None:
        raise ArgumentError(f"{to} must end in one of {', '.join(_WRITERS)}: the suffix selects the format")
    beside = to.with_name(f".{to.name}.{os.getpid()}")  # in the same folder: a rename is atomic there only
    try:
        touch(beside)
        rows = write(journal, start, end, beside, topics, on_rows)
        os.replace(beside, to)
    except ImportError:
        raise JournalError(NEEDS_PYARROW.format(what=f"A {to.suffix} file")) from None
    except OSError as error:
        raise JournalError(f"{to} can't be written: {error.strerror or error}.") from None
    finally:
        beside.unlink(missing_ok=True)
    return rows


def _write_jsonl(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    rows = 0
    with to.open("w", encoding="utf-8") as file:
        for recorded in in_order(journal, start, end, topics):
            file.write(json.dumps(as_fields(recorded), ensure_ascii=False) + "\n")
            rows += 1
            if rows % _PROGRESS_ROWS == 0:
                on_rows(_PROGRESS_ROWS)
    return rows


def _write_csv(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    names = [column.name for column in COLUMNS if column.name != "broker"]
    rows = 0
    with to.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, "payload_hex"])
        writer.writeheader()
        for recorded in in_order(journal, start, end, topics):
            writer.writerow(as_fields(recorded) | {"flags": recorded.row.flags, "properties": recorded.row.properties})
            rows += 1
            if rows % _PROGRESS_ROWS == 0:
                on_rows(_PROGRESS_ROWS)
    return rows


def _write_parquet(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    from pyarrow import parquet

    def open_writer(schema: Any) -> Any:
        return parquet.ParquetWriter(to, schema, compression="zstd")

    return _write_tables(journal, start, end, topics, open_writer, on_rows)


def _write_arrow(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    from pyarrow import ipc

    return _write_tables(journal, start, end, topics, lambda schema: ipc.new_file(to, schema), on_rows)


def _write_tables(
    journal: Journal,
    start: Offsets,
    end: Offsets,
    topics: Sequence[str] | None,
    open_writer: Callable[[Any], Any],
    on_rows: OnRows,
) -> int:
    """Write joined record batches with the writer that `open_writer` returns for a schema."""
    import pyarrow

    schema = tables.schema()
    rows = 0
    with open_writer(schema) as writer:
        chunks = (chunk for part in journal.plan(start, end, topics=topics) for chunk in part)
        for batches in _grouped(batch for chunk in chunks for batch in journal.tables(chunk, topics=topics)):
            writer.write_table(pyarrow.Table.from_batches(batches, schema).combine_chunks())
            count = sum(batch.num_rows for batch in batches)
            on_rows(count)
            rows += count
    return rows


def _grouped(batches: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield batches in lists with about `_GROUP_ROWS` rows."""
    group: list[Any] = []
    rows = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        if rows >= _GROUP_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


_WRITERS: dict[str, Callable[[Journal, Offsets, Offsets, Path, Sequence[str] | None, OnRows], int]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}
