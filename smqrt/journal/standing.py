"""What a journal holds at this moment, as its hub tells others: a listing of segments, and where each node ends."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

from smqrt.errors import JournalError

RECORD_BYTES = 64
_FIRST_AND_ROWS = struct.Struct("<qq")
_SEGMENT = re.compile(r"(\d{20})\.arrows")
_EMPTY: dict[str, Any] = {"version": 1, "nodes": {}, "files": []}


def manifest(journal: Path) -> dict[str, Any]:
    """Returns what a reader needs in order to plan: `wal`, `manifest` and `end`, see `segments` and `ends`.

    Args:
        journal: its folder.

    Raises:
        JournalError: `manifest.json` can't be read.
    """
    end = ends(journal)  # first: what is before it is in the listing
    wal = segments(journal)  # before the manifest: what is compacted meanwhile is then in both, never in neither
    return {"version": 1, "wal": wal, "manifest": _compacted(journal), "end": end}


def segments(journal: Path) -> dict[str, list[dict[str, int]]]:
    """Returns, for each node, its segments in ascending order: `first` (sequence number), `arrows_bytes`, `idx_bytes`.

    The index was looked at before the data it points into, so that every batch it lists is there.
    """
    folders = {node: journal / "wal" / node for node in nodes(journal)}
    return {node: [_segment(folder, first) for first in _firsts(folder)] for node, folder in folders.items()}


def ends(journal: Path) -> dict[str, int]:
    """Returns, for each node, the sequence number that its next row will have. Raises as `manifest`."""
    compacted = _compacted(journal).get("nodes", {})
    found = {node: int(values.get("compacted_through", 0)) for node, values in compacted.items()}
    for node in nodes(journal):
        folder = journal / "wal" / node
        if firsts := _firsts(folder):
            found[node] = max(found.get(node, 0), _end(folder, firsts[-1]))
    return found


def nodes(journal: Path) -> list[str]:
    """Returns the names of the nodes that have segments."""
    try:
        return sorted(entry.name for entry in os.scandir(journal / "wal") if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def _firsts(folder: Path) -> list[int]:
    names = (_SEGMENT.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in names if match)


def _segment(folder: Path, first: int) -> dict[str, int]:
    idx_bytes = _size(folder / f"{first:020d}.idx") // RECORD_BYTES * RECORD_BYTES
    return {"first": first, "arrows_bytes": _size(folder / f"{first:020d}.arrows"), "idx_bytes": idx_bytes}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # just removed, or not yet there
        return 0


def _end(folder: Path, first: int) -> int:
    """Where a segment ends: behind the last whole record of its index."""
    try:
        with open(folder / f"{first:020d}.idx", "rb") as file:
            whole = os.fstat(file.fileno()).st_size // RECORD_BYTES
            record = os.pread(file.fileno(), _FIRST_AND_ROWS.size, (whole - 1) * RECORD_BYTES) if whole else b""
    except FileNotFoundError:
        record = b""
    return sum(_FIRST_AND_ROWS.unpack(record)) if record else first


def _compacted(journal: Path) -> dict[str, Any]:
    path = journal / "manifest.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return _EMPTY
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} can't be read: {error}; `smqrt journal verify` tells more.") from None
    if not isinstance(values, dict):
        raise JournalError(f"{path} is no manifest; `smqrt journal verify` tells more.")
    return values
