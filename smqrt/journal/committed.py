"""Commits of pipelines that a journal has: the last micro-batch of each query, whichever node stored it.

A node keeps a snapshot, `wal/<node>/txn.json`, written whenever a segment is sealed; what came since is in the newest
segments. A query may move to another hub of the same folder, so every hub knows the commits of all.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from smqrt.errors import JournalError
from smqrt.journal import arrow, index, manifest, record
from smqrt.journal.files import crc32, there

log = logging.getLogger("smqrt.journal")

MOST_QUERIES = 50_000
"""Names under which a hub remembers commits; a micro-batch of many MiB has one for each part."""
FILE = "txn.json"
"""In a node's folder. Once there was one for all nodes, in the journal's folder; it is still looked at."""
_THROUGH = "@through"  # among the queries, none of which has such a name
_NEWEST = 2  # segments with rows: the one that was written to, and the one before it, which may not have been sealed


class Batches:
    """The last batch of each query that a hub knows to be committed. Of too many queries it forgets those that have
    committed nothing for longest: every name stays in memory, and in each snapshot.

    Args:
        found: of `last_batches`.

    Attributes:
        forgotten: how many queries were.
    """

    def __init__(self, found: Mapping[str, int]) -> None:
        self._last = dict(found)
        self.forgotten = 0
        self._shorten()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, query: str) -> int:
        """Returns the last batch of a query; -1 when there is none."""
        return self._last.get(query, -1)

    def note(self, query: str, batch: int) -> None:
        """Takes note of a commit."""
        self._last.pop(query, None)  # it goes to the end
        self._last[query] = batch
        self._shorten()

    def learn(self, more: Mapping[str, int]) -> None:
        """Takes note of commits to other hubs."""
        merge(self._last, more)
        self._shorten()

    def all(self) -> dict[str, int]:
        """Returns a copy: queries in the order of their last commits, and their last batches."""
        return dict(self._last)

    def _shorten(self) -> None:
        while len(self._last) > MOST_QUERIES:
            del self._last[next(iter(self._last))]
            if not self.forgotten:
                log.warning(
                    "the journal knows commits of %d queries, and forgets those that have committed nothing for "
                    "longest: a micro-batch of theirs that is repeated now is published twice",
                    MOST_QUERIES,
                )
            self.forgotten += 1


def last_batches(journal: Path) -> dict[str, int]:
    """Returns the last committed batch of each query. Hubs may write to the journal meanwhile.

    Args:
        journal: its folder.

    Raises:
        JournalError: a snapshot or a batch is damaged.
        OSError: a file can't be read, or the folder isn't there.
    """
    found: dict[str, int] = {}
    with there(journal):
        for folder in sorted(path for path in (journal / "wal").glob("*") if path.is_dir()):
            merge(found, _of_node(folder))
    return found


def merge(known: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds to `known` what `more` knows of later batches."""
    for query, batch in more.items():
        known[query] = max(batch, known.get(query, batch))


def snapshot(folder: Path) -> dict[str, int]:
    """Returns the last batch of each query as a node's snapshot has it.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: it is damaged.
    """
    found = _read(folder.parent.parent / FILE)
    merge(found, _read(folder / FILE))
    found.pop(_THROUGH, None)
    return found


def save(folder: Path, batches: Mapping[str, int], through: int) -> None:
    """Writes the snapshot of a node.

    Args:
        folder: `<journal>/wal/<node>`.
        batches: the last batch of each query.
        through: the commits of all rows below this number are among them.

    Raises:
        OSError: the disk is full or broken.
    """
    manifest.write_json(folder / FILE, {**batches, _THROUGH: through})


class Others:
    """Commits of the other nodes of a journal; those that were seen once are not read again.

    Args:
        journal: its folder.
        node: the one that doesn't count.
    """

    def __init__(self, journal: Path, node: str) -> None:
        self._wal, self._node = journal / "wal", node
        self._seen: dict[Path, int] = {}

    def are_there(self) -> bool:
        """Says whether the journal has other nodes.

        Raises:
            OSError: its folder can't be read.
        """
        with os.scandir(self._wal) as found:
            return any(one.name != self._node for one in found if one.is_dir())

    def news(self) -> dict[str, int]:
        """Returns the last batch of each query that was committed since the last call. Raises as `last_batches`."""
        found: dict[str, int] = {}
        for folder in (path for path in self._wal.iterdir() if path.is_dir() and path.name != self._node):
            merge(found, self._of(folder))
        return found

    def _of(self, folder: Path) -> dict[str, int]:
        seen, paths = self._seen.get(folder), index.paths(folder)
        end = max([seen or 0, *map(_end, paths[-1:])])  # before: what comes meanwhile is read again
        found = _of_node(folder) if seen is None else _since(paths, seen)
        self._seen[folder] = end
        return found


def _since(paths: list[Path], seq: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in paths[max(0, bisect_right(paths, seq, key=index.first_seq) - 1) :]:
        with suppress(FileNotFoundError):
            merge(found, of_segment(path, seq))
    return found


def of_segment(path: Path, since: int = 0) -> dict[str, int]:
    """Returns the last batch of each query that has rows in a segment.

    Args:
        path: of the segment.
        since: rows below this number don't count.

    Raises:
        JournalError, OSError: as `last_batches`.
    """
    found: dict[str, int] = {}
    flagged = [entry for entry in index.with_transactions(path) if entry.first_seq >= since]
    if not flagged:
        return found
    with path.open("rb") as file:
        for entry in flagged:
            file.seek(entry.offset)
            batch = file.read(entry.length)
            if crc32(batch) != entry.crc32:
                continue  # `journal verify` names it; later commits of the query say what this one does
            values = set(arrow.decode_column(batch, "txn")) - {None}
            merge(found, dict(sorted(map(record.parse_transaction, values))))
    return found


def _end(path: Path) -> int:
    """Returns the number behind the last row of a segment."""
    try:
        with path.with_suffix(index.INDEXED).open("rb") as file:
            batches = os.fstat(file.fileno()).st_size // index.INDEX.size
            file.seek(max(0, batches - 1) * index.INDEX.size)
            entries = index.parse_index(file.read(index.INDEX.size))
    except FileNotFoundError:
        entries = []
    return entries[0].next_seq if entries else index.first_seq(path)


def _of_node(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _unsaved(folder):
        with suppress(FileNotFoundError):  # removed meanwhile: then the snapshot has its commits by now
            merge(found, of_segment(path))
    merge(found, snapshot(folder))
    return found


def _unsaved(folder: Path) -> Iterable[Path]:
    """Returns the segments that may have commits which the node's snapshot lacks."""
    through = _read(folder / FILE).get(_THROUGH)
    if through is not None:
        paths = index.paths(folder)
        return paths[max(0, bisect_right(paths, through, key=index.first_seq) - 1) :]
    try:  # an older one, which doesn't tell: when it was saved says only about when it was made
        since = (folder / FILE).stat().st_mtime
    except FileNotFoundError:
        return index.paths(folder)
    filled = [path for path in index.paths(folder) if _has_rows(path)]
    return [path for path in filled if path in filled[-_NEWEST:] or _written_s(path) >= since]


def _has_rows(path: Path) -> bool:
    try:
        return path.with_suffix(index.INDEXED).stat().st_size >= index.INDEX.size
    except FileNotFoundError:
        return False


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _read(path: Path) -> dict[str, int]:
    try:
        return {str(query): int(batch) for query, batch in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise JournalError(f"{path} is damaged ({error}); remove it: it is made again from the journal.") from None
