"""What a journal holds at this moment, as its hub tells others: a listing of segments, and where each node ends."""

from __future__ import annotations

import json
from pathlib import Path

from smqrt.journal import manifest as manifests
from smqrt.journal.index import INDEX, INDEXED, first_seq, paths
from smqrt.journal.reader import Journal


def manifest(journal: Path) -> bytes:
    """Returns what a reader needs in order to plan, as JSON: `wal`, `manifest` and `end`, see `segments` and `ends`.

    Args:
        journal: its folder.

    Raises:
        JournalError: it can't be read.
    """
    end = ends(journal)  # first: what is before it is in the listing
    wal = segments(journal)  # before the manifest: what is compacted meanwhile is then in both, never in neither
    compacted = manifests.text(journal)  # as it is: it may be long
    rest = json.dumps({"version": manifests.VERSION, "wal": wal, "end": end}, separators=(",", ":")).encode()
    return b'%b,"manifest":%b}' % (rest[:-1], compacted)


def segments(journal: Path) -> dict[str, list[dict[str, int]]]:
    """Returns, for each node, its segments in ascending order: `first` (sequence number), `arrows_bytes`, `idx_bytes`.

    The index was looked at before the data it points into, so that every batch it lists is there.
    """
    folders = sorted(folder for folder in (journal / "wal").glob("*") if folder.is_dir())
    return {folder.name: [_segment(path) for path in paths(folder)] for folder in folders}


def ends(journal: Path) -> dict[str, int]:
    """Returns, for each node, the sequence number that its next row will have. Raises as `manifest`."""
    try:
        return Journal(journal).end()
    except FileNotFoundError:  # a segment was sealed and compacted amidst
        return Journal(journal).end()


def _segment(path: Path) -> dict[str, int]:
    idx_bytes = _size(path.with_suffix(INDEXED)) // INDEX.size * INDEX.size
    return {"first": first_seq(path), "arrows_bytes": _size(path), "idx_bytes": idx_bytes}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # just removed, or not yet there
        return 0
