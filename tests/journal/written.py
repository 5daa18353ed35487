"""Journals for the tests: rows, segments and Parquet files, written by the package's own encoder."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from smqrt.journal import arrow, manifest, segment
from smqrt.journal.manifest import DataFile
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row

START_US = 1_763_733_600_000_000
"""2025-11-21 14:00 UTC."""
BATCHES = [7, 8, 20, 31, 32, 33, 50, 64, 70, 71]
"""The ends of the batches of a segment that tests damage."""
TOPICS = ["site1/a/temp", "site1/b/temp", "site2/a/temp", "größe/°C", None]


def row(seq: int, txn: str | None = None, step_us: int = 1000) -> Row:
    """Returns the row that stands at a number: every test knows what should be there."""
    topic = TOPICS[seq % len(TOPICS)]
    sub = f"sub{seq % 3}" if seq % 7 == 0 else None
    payload = bytes([seq % 251]) * (seq % 40)
    ids = (None if topic is None else 100 + seq % 5, sub, None if sub is None else seq % 3)
    return Row(seq, START_US + seq * step_us, topic, *ids, 2**32 - 1, f"uid-{seq % 9}", 0 if topic else 1, payload, txn)


def rows(first: int, end: int, txn: str | None = None, step_us: int = 1000) -> list[Row]:
    return [row(seq, txn, step_us) for seq in range(first, end)]


def append(opened: segment.SegmentFile, batch: Sequence[Row], flags: int = 0) -> None:
    times = [one.ts_us for one in batch]
    flags |= segment.HAS_TXN if any(one.txn for one in batch) else 0
    opened.append(arrow.encode(batch), batch[0].seq, len(batch), min(times), max(times), flags)


def write(journal: Path, ends: Iterable[Iterable[int]], node: str = "n1", first: int = 0, step_us: int = 1000) -> int:
    """Writes segments; returns the next number.

    Args:
        ends: for each segment, the numbers at which its batches end.
    """
    for batches in ends:
        opened = segment.SegmentFile.open(journal / "wal" / node, first, node, f"hub-{node}")
        for end in batches:
            append(opened, rows(first, end, step_us=step_us))
            first = end
        opened.close()
    return first


def random_ends(random_: random.Random, end: int, most_rows: int = 30) -> list[list[int]]:
    """Returns random batches in random segments, up to a number."""
    segments: list[list[int]] = [[]]
    at = 0
    while at < end:
        at = min(end, at + random_.randint(1, most_rows))
        segments[-1].append(at)
        if random_.random() < 0.2:
            segments.append([])
    return segments


def to_parquet(journal: Path, cuts: Iterable[int], node: str = "n1", group_rows: int = 16, step_us: int = 1000) -> None:
    """Moves the rows up to the last of `cuts` into Parquet files, as a compactor would; segments stay."""
    import pyarrow as pa
    from pyarrow import parquet

    with manifest.edit(journal) as known:
        first = known.nodes.get(node, 0)
        for end in cuts:
            source = Journal(journal)
            batches = [
                batch
                for part in source.plan({node: first}, {node: end})
                for chunk in part
                for batch in source.tables(chunk)
            ]
            path = journal / f"data/date=2025-11-21/hour=14/{node}-{first:020d}-{end - 1:020d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.Table.from_batches(batches), path, row_group_size=group_rows)
            names = sorted({one.topic for one in rows(first, end) if one.topic})
            times = (START_US + first * step_us, START_US + (end - 1) * step_us)
            name, size = path.relative_to(journal).as_posix(), path.stat().st_size
            known.add([DataFile(name, node, first, end - 1, end - first, *times, size, tuple(names))])
            first = known.nodes[node] = end


def as_version_1(journal: Path) -> dict[str, Any]:
    """Writes the manifest as the first version did, one JSON without pages; returns it, to be changed and written."""
    state = manifest.load(journal)
    files = [{name: getattr(file, name) for name in DataFile.__slots__} for file in state.all_files()]
    nodes = {node: {"compacted_through": through} for node, through in state.nodes.items()}
    values = {"version": 1, "nodes": nodes, "files": files}
    manifest.write_json(journal / manifest.FILE, values)
    return values


def drop_compacted(journal: Path, node: str = "n1") -> None:
    """Removes the segments whose rows are all Parquet."""
    through = manifest.load(journal).nodes[node]
    for path in segment.paths(journal / "wal" / node):
        entries = segment.read_index(path)
        if entries and entries[-1].next_seq <= through:
            path.unlink()
            path.with_suffix(segment.INDEXED).unlink()
