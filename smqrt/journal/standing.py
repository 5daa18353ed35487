"""Contents of a journal at this moment, as its hub tells others: a listing of segments, and the end of each node.

Everything here waits for the disk: a hub asks in a thread.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path

from smqrt.errors import JournalError
from smqrt.journal import index, manifest
from smqrt.journal.files import there
from smqrt.journal.index import DATA, summary_of
from smqrt.journal.locations import MOVED
from smqrt.journal.reader import Journal

_SETTLED_S = 0.1
"""What changes twice within a tick of the kernel's clock has the same time of change."""

_Version = tuple[tuple[str, int], ...]


class Listing:
    """What a reader needs in order to plan, as JSON: `wal`, see `segments`, and `manifest`, its root.

    It is made anew when a segment or the manifest has come or gone, not when rows have.

    Args:
        journal: its folder.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._known: tuple[_Version, bytes, str] | None = None

    def text(self) -> tuple[bytes, str]:
        """Returns the JSON and what stands for it as long as it is the same, an ETag.

        Raises:
            JournalError: the journal can't be read.
        """
        known, version = self._known, _version(self._journal)
        if known is not None and known[0] == version:
            return known[1:]
        body = listing(self._journal)
        tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
        newest_s = max((changed_ns for _, changed_ns in version), default=0) / 1e9
        is_settled = abs(time.time() - newest_s) > _SETTLED_S  # in the future, too: of a clock that was wrong then
        self._known = (version, body, tag) if is_settled else None
        return body, tag


def _version(journal: Path) -> _Version:
    """What changes when a segment or the manifest comes or goes."""
    places = [journal / manifest.FILE, journal / "wal", *_folders(journal)]
    return tuple((str(place), place.stat().st_mtime_ns) for place in places if place.exists())


def listing(journal: Path) -> bytes:
    """Returns what a reader needs in order to plan; see `Listing`.

    Raises:
        JournalError: it can't be read.
    """
    try:
        with there(journal):
            wal = segments(journal)  # before the manifest: what is compacted meanwhile is in both, never in neither
            compacted = manifest.text(journal)  # as it is: it may be long
    except FileNotFoundError:
        raise JournalError(f"{journal} {MOVED}") from None
    rest = json.dumps({"version": manifest.VERSION, "wal": wal}, separators=(",", ":")).encode()
    return b'%b,"manifest":%b}' % (rest[:-1], compacted)


def segments(journal: Path) -> dict[str, list[dict[str, int]]]:
    """Returns, for each node, its segments in ascending order: `first` (sequence number), and of those that don't grow
    any more `idx_bytes`, `ts_min_us`, `ts_max_us` and, if they have rows without holes, `end` and `bytes`.
    """
    return {folder.name: list(_segments(folder)) for folder in _folders(journal)}


def _segments(folder: Path) -> Iterator[dict[str, int]]:
    firsts = index.firsts(folder)
    for first in firsts[:-1]:
        path = f"{folder}/{index.name(first)}{DATA}"
        try:
            found, size_bytes = summary_of(path), os.stat(path).st_size
        except FileNotFoundError:  # just compacted
            continue
        told = {"first": first, "idx_bytes": found.index_bytes}
        told |= {"ts_min_us": found.ts_min_us, "ts_max_us": found.ts_max_us}
        yield told | ({"end": found.end, "bytes": size_bytes} if found.is_dense else {})
    yield from ({"first": first} for first in firsts[-1:])


def ends(journal: Path, known: Collection[str] = ()) -> dict[str, int]:
    """Returns, for each node, the sequence number that its next row will have.

    Args:
        journal: its folder.
        known: nodes that need not be looked at.

    Raises:
        JournalError: it can't be read.
    """
    try:
        return Journal(journal).end(known)
    except FileNotFoundError:  # a segment was sealed and compacted amidst
        return Journal(journal).end(known)


def _folders(journal: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(journal / "wal") if entry.is_dir())
    except FileNotFoundError:
        return []
