"""After a crash: where the journal of a node ends, and the torn end of its newest segment cut off."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import committed, index, manifest, readers, salvage, summary
from smqrt.journal.files import touch
from smqrt.journal.index import INDEX, INDEXED, REMEDY, Entry

DAMAGED = ".damaged"
_NEWEST = 2  # segments with rows: the one that was written to, and the one before it, which may not have been sealed


class Recovered(NamedTuple):
    """What `recover` found.

    Attributes:
        next_seq: the number of the next row.
        removed_bytes: how much was cut off.
        txns: the last committed batch of each query, whichever node of the journal stored it.
        damages: a sentence for each part of a segment that can't be read, though what follows it can.
    """

    next_seq: int
    removed_bytes: int
    txns: dict[str, int]
    damages: tuple[str, ...] = ()


class _Repaired(NamedTuple):
    entries: list[Entry]
    cut: int
    damages: list[str]


def recover(folder: Path, schema: bytes = b"") -> Recovered:
    """Makes a node's folder ready to be appended to. Only its locked writer may call it.

    What isn't whole (length, crc32) at the end of the newest segment is cut off. What isn't, and is followed by whole
    batches, is damaged: it stays where it is, as do the batches behind it, and no number is given again. The index is
    corrected from the batches, and what it was is kept beside when something is damaged (`.damaged`); an index that is
    empty or gone is made again.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
        schema: with which its segments begin; one that is damaged in a few bytes is mended.

    Raises:
        JournalError: a file can't be read or cut, or isn't a journal's.
    """
    journal = folder.parent.parent
    try:
        next_seq, removed, damages = _repair_newest(folder, schema)
        next_seq = max(next_seq, _least_next(journal, folder.name))
        return Recovered(next_seq, removed, committed.last_batches(journal), tuple(damages))
    except OSError as error:
        raise JournalError(f"{folder} can't be recovered: {error}; give this user the files.") from None


def _repair_newest(folder: Path, schema: bytes) -> tuple[int, int, list[str]]:
    """Returns the number behind the last row, how many bytes were cut off, and what is damaged."""
    next_seq = removed = filled = 0
    damages: list[str] = []
    for path in reversed(index.paths(folder)):
        entries, cut, damaged = _repair(path, schema)
        removed += cut
        damages += damaged
        filled += bool(entries)
        next_seq = max([next_seq, index.first_seq(path), *(entry.next_seq for entry in entries)])
        if filled == _NEWEST:
            break
    return next_seq, removed, damages


def _least_next(journal: Path, node: str) -> int:
    """Numbers below it were given: their rows are Parquet by now, or a pipeline has seen them."""
    known = [manifest.load(journal).nodes.get(node, 0)]
    known += [reader.offset.get(node, 0) for reader in readers.load(journal)]
    return max(known)


def _repair(path: Path, schema: bytes) -> _Repaired:
    """Cuts off what isn't whole at the end of a segment, and corrects its index."""
    recorded, found = index.read_index(path), salvage.salvage(path)
    if not found.fits:  # nobody knows what to do with it: it stays as it is, and its numbers stay given
        return _Repaired(found.entries, 0, [f"{path}: its batches contradict each other; {REMEDY}"])
    damages = list(_sentences(path, found))
    if found.entries and not found.schema_bytes and salvage.is_nearly(path, schema, found.entries[0].offset):
        _overwrite(path, schema)
    indexed, right_size = path.with_suffix(INDEXED), len(found.entries) * INDEX.size
    size, index_size = path.stat().st_size, indexed.stat().st_size if indexed.exists() else 0
    is_right = index_size == right_size and found.entries == recorded
    if (found.damaged and not is_right) or not recorded:
        _keep_beside(*([indexed] if recorded else [path] if size != found.end else []))
    if size != found.end:
        _truncate(path, found.end)
    if not is_right:
        _rewrite(indexed, found.entries)
    return _Repaired(found.entries, size - found.end + max(0, index_size - right_size), damages)


def _sentences(path: Path, found: salvage.Salvaged) -> Iterator[str]:
    if found.entries and not found.schema_bytes:
        yield f"{path}: its beginning is damaged; {REMEDY}"
    for entry in found.damaged:
        rows = f"rows {entry.first_seq} to {entry.next_seq - 1}"
        yield f"{path}: {rows} are damaged, those behind them are whole; {REMEDY}"


def _keep_beside(*files: Path) -> None:
    for path in files:
        beside = path.with_name(path.name + DAMAGED)
        beside.unlink(missing_ok=True)
        touch(beside)
        beside.write_bytes(path.read_bytes())


def _truncate(path: Path, size: int) -> None:
    """Cuts a file; the disk keeps it before anything is appended."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def _overwrite(path: Path, start: bytes) -> None:
    with path.open("r+b") as file:
        file.write(start)
        os.fsync(file.fileno())


def _rewrite(path: Path, entries: Iterable[Entry]) -> None:
    summary.remove(path)
    beside = path.with_suffix(".new")
    touch(beside)
    with beside.open("wb") as file:
        file.writelines(INDEX.pack(*entry) for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
