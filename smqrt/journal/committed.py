"""Committed batches of a journal, and staged results, which are committed later.

A node has a snapshot, `wal/<node>/txn.json`, written when a segment is sealed. Later commits are in the newest
segments. A query may move to another hub of the same folder, so every hub reads the commits of all nodes.

Staged results are in `staged/<query>/<batch>/`, for all hubs of the folder. The tasks of a stream stage their rows in
named parts. When all tasks are done, the micro-batch is sealed: these parts are its results, even if a repetition
stages other parts. Each part is committed by its name, so no process has all results of a micro-batch in memory.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import arrow, manifest, record, segment
from smqrt.journal.files import (
    age_s,
    crc32,
    existing_folder,
    is_journal,
    make_folder,
    sync_folder,
    write_beside,
    write_whole,
)

log = logging.getLogger("smqrt.journal")

MAX_QUERIES = 50_000
"""Maximum number of query names with commits; a micro-batch of many MiB has one name for each part."""
COMMITS_FILE = "txn.json"
"""A node's snapshot. Older versions had one in the journal's folder for all nodes, which is read too."""
_THROUGH = "@through"  # a key among the queries, whose names can't begin with @
_NEWEST = 2  # segments with rows to read: the one in use, and the one before it, which may be unsealed
STAGED_FOLDER = "staged"
MAX_STAGED_BYTES = 2 << 30
"""Maximum size of all staged parts of a journal, bytes."""
MIN_PART_BYTES = 16 << 10
"""A smaller part counts as this many bytes: a file with one row takes disk space, too."""
STALE_S = 86400.0
"""Unsealed parts are removed after this time when space is short."""
MAX_PARTS = 10_000
"""Maximum number of parts of a micro-batch."""
_SEALED = "sealed.json"
_PART = re.compile(r"[0-9a-f]{16}\.[0-9]{1,6}")


class CommittedBatches:
    """The last committed batch of each query.

    Above `MAX_QUERIES` it drops the queries with the oldest commits: every name is in memory and in each snapshot.

    Args:
        found: the result of `last_batches`.

    Attributes:
        forgotten: number of dropped queries.
    """

    def __init__(self, found: Mapping[str, int]) -> None:
        self._last = dict(found)
        self.forgotten = 0
        self._drop_oldest()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, query: str) -> int:
        """Return the last batch of a query; -1 without one."""
        return self._last.get(query, -1)

    def add(self, query: str, batch: int) -> None:
        """Add a commit."""
        self._last.pop(query, None)  # the new entry is at the end: the order is that of the commits
        self._last[query] = batch
        self._drop_oldest()

    def merge(self, more: Mapping[str, int]) -> None:
        """Add the commits of other hubs."""
        add_later(self._last, more)
        self._drop_oldest()

    def all(self) -> dict[str, int]:
        """Return a copy: the last batch of each query, in the order of the commits."""
        return dict(self._last)

    def _drop_oldest(self) -> None:
        while len(self._last) > MAX_QUERIES:
            del self._last[next(iter(self._last))]
            if not self.forgotten:
                log.warning(
                    "limit reached: the journal stores commits of %d queries; the queries with the oldest commits are "
                    "dropped, and a micro-batch that one of them repeats is published twice",
                    MAX_QUERIES,
                )
            self.forgotten += 1


def last_batches(journal: Path) -> dict[str, int]:
    """Return the last committed batch of each query. Hubs may write at the same time.

    Args:
        journal: its folder.

    Raises:
        JournalError: a snapshot or a batch is damaged.
        OSError: a file can't be read, or the folder is missing.
    """
    found: dict[str, int] = {}
    with existing_folder(journal):
        for folder in segment.node_folders(journal):
            add_later(found, _node_batches(folder))
    return found


def add_later(known: dict[str, int], more: Mapping[str, int]) -> None:
    """Update `known` with the later batches of `more`."""
    for query, batch in more.items():
        known[query] = max(batch, known.get(query, batch))


def load_snapshot(folder: Path) -> dict[str, int]:
    """Return the last batch of each query from a node's snapshot.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: it is damaged.
    """
    found = _read_snapshot(folder.parent.parent / COMMITS_FILE)
    add_later(found, _read_snapshot(folder / COMMITS_FILE))
    found.pop(_THROUGH, None)
    return found


def save_snapshot(folder: Path, batches: Mapping[str, int], through: int) -> None:
    """Write the snapshot of a node.

    Args:
        folder: `<journal>/wal/<node>`.
        batches: the last batch of each query.
        through: the snapshot contains the commits of all rows below this number.

    Raises:
        OSError: the disk is full or broken.
    """
    manifest.write_json(folder / COMMITS_FILE, {**batches, _THROUGH: through})


class OtherNodes:
    """Commits of the other nodes of a journal; each is read once.

    Args:
        journal: its folder.
        node: the node that is left out.
    """

    def __init__(self, journal: Path, node: str) -> None:
        self._wal, self._node = journal / "wal", node
        self._seen: dict[Path, int] = {}
        self._snapshots: dict[Path, tuple[int, ...]] = {}

    def exist(self) -> bool:
        """Return whether the journal has other nodes.

        Raises:
            OSError: its folder can't be read.
        """
        with os.scandir(self._wal) as found:
            return any(one.name != self._node for one in found if one.is_dir())

    def new_commits(self) -> dict[str, int]:
        """Return the last batch of each query with a commit since the last call. Raises as `last_batches`."""
        found: dict[str, int] = {}
        for folder in (path for path in self._wal.iterdir() if path.is_dir() and path.name != self._node):
            seen, paths = self._seen.get(folder), segment.paths(folder)
            end = max([seen or 0, *map(_end_of_segment, paths[-1:])])  # first: later rows are read again next time
            if seen is None:
                add_later(found, _node_batches(folder))
            else:
                for path in paths[max(0, bisect_right(paths, seen, key=segment.first_seq) - 1) :]:
                    with suppress(FileNotFoundError):
                        add_later(found, batches_of_segment(path, seen))
            with suppress(FileNotFoundError):  # last: a snapshot has the commits of removed segments
                snapshot = (folder / COMMITS_FILE).stat()
                version = snapshot.st_ino, snapshot.st_mtime_ns, snapshot.st_size
                if self._snapshots.get(folder) != version:
                    add_later(found, load_snapshot(folder))
                    self._snapshots[folder] = version
            self._seen[folder] = end
        return found


def batches_of_segment(path: Path, since: int = 0) -> dict[str, int]:
    """Return the last batch of each query that has rows in a segment.

    Args:
        path: of the segment.
        since: rows below this number are ignored.

    Raises:
        JournalError, OSError: as `last_batches`.
    """
    found: dict[str, int] = {}
    flagged = [entry for entry in segment.with_transactions(path) if entry.first_seq >= since]
    if not flagged:
        return found
    with path.open("rb") as file:
        for entry in flagged:
            file.seek(entry.offset)
            batch = file.read(entry.length)
            if crc32(batch) != entry.crc32:
                continue  # `journal verify` reports it; a later commit of the query has a higher number
            values = {str(txn) for txn in arrow.decode_column(batch, "txn") if txn is not None}
            add_later(found, dict(sorted(map(record.parse_transaction, values))))
    return found


def _end_of_segment(path: Path) -> int:
    """Return the number after the last row of a segment."""
    try:
        with path.with_suffix(segment.INDEXED).open("rb") as file:
            batches = os.fstat(file.fileno()).st_size // segment.INDEX.size
            file.seek(max(0, batches - 1) * segment.INDEX.size)
            entries = segment.parse_index(file.read(segment.INDEX.size))
    except FileNotFoundError:
        entries = []
    return entries[0].next_seq if entries else segment.first_seq(path)


def _node_batches(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _unsaved_segments(folder):
        with suppress(FileNotFoundError):  # removed meanwhile: its commits are in the snapshot, which is read next
            add_later(found, batches_of_segment(path))
    add_later(found, load_snapshot(folder))
    return found


def _unsaved_segments(folder: Path) -> Iterable[Path]:
    """Return the segments that may have commits which the node's snapshot lacks."""
    through = _read_snapshot(folder / COMMITS_FILE).get(_THROUGH)
    if through is not None:
        paths = segment.paths(folder)
        return paths[max(0, bisect_right(paths, through, key=segment.first_seq) - 1) :]
    try:  # a snapshot of an older version: the time it was saved only approximates its content
        since = (folder / COMMITS_FILE).stat().st_mtime
    except FileNotFoundError:
        return segment.paths(folder)
    filled = []
    for path in segment.paths(folder):
        with suppress(FileNotFoundError):
            if path.with_suffix(segment.INDEXED).stat().st_size >= segment.INDEX.size:
                filled.append(path)
    unsaved = []
    for path in filled:
        with suppress(FileNotFoundError):
            if path in filled[-_NEWEST:] or path.stat().st_mtime >= since:
                unsaved.append(path)
    return unsaved


def _read_snapshot(path: Path) -> dict[str, int]:
    try:
        return {str(query): int(batch) for query, batch in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError) as error:
        raise JournalError(f"{path} is damaged ({error}); remove it: it is rebuilt from the journal.") from None


# ---- staged results


def checked_part(name: object) -> str:
    """Return the name of a part. Raises ArgumentError for an invalid one."""
    if isinstance(name, str) and _PART.fullmatch(name):
        return name
    raise ArgumentError(f"part: {str(name)[:100]!r} is not the name of a part, such as 0123456789abcdef.0.")


class StagedResults:
    """The staged results of a journal. All methods block on the disk.

    Args:
        journal: its folder.
        committed: returns the number of a query's last committed micro-batch.
    """

    def __init__(self, journal: Path, committed: Callable[[str], int]) -> None:
        self._journal, self._folder, self._committed = journal, journal / STAGED_FOLDER, committed
        self._staged_bytes = -1

    def put(self, query: str, batch: int, part: str, rows: bytes) -> None:
        """Store a part.

        Args:
            query, batch, part: its query, its micro-batch, and its name.
            rows: the rows, as in the body of a commit.

        Raises:
            JournalError: `MAX_STAGED_BYTES` is reached, or the part can't be written.
        """
        self._check_space(len(rows))
        folder = self._folder_of(query, batch)
        try:
            if is_journal(self._journal):  # a journal that is missing is not created again
                make_folder(folder)
            write_whole(folder / part, rows)
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None
        if self._staged_bytes >= 0:  # -1: another thread has removed parts, so the sum is computed again
            self._staged_bytes += max(len(rows), MIN_PART_BYTES)

    def seal(self, query: str, batch: int, parts: Sequence[str]) -> list[str]:
        """Store which parts are the results of a micro-batch. Only the first call for a micro-batch has an effect.

        Args:
            query, batch: the query and the micro-batch.
            parts: the names of the parts.

        Returns:
            The parts of the first call.

        Raises:
            ArgumentError: a part is not staged.
            JournalError: the names can't be stored.
        """
        folder = self._folder_of(query, batch)
        try:
            if not (folder / _SEALED).exists():
                for part in parts:
                    if not (folder / part).exists():
                        raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.")
                beside = write_beside(folder / _SEALED, json.dumps(list(parts)).encode())
                with suppress(FileExistsError):
                    os.link(beside, folder / _SEALED)  # not a rename, which would replace the parts of an earlier call
                beside.unlink()
                sync_folder(folder)
            return [checked_part(name) for name in json.loads((folder / _SEALED).read_bytes())]
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None

    def open(self, query: str, batch: int, part: str) -> IO[bytes]:
        """Open the rows of a part.

        Raises:
            ArgumentError: the part is not staged.
        """
        try:
            return (self._folder_of(query, batch) / part).open("rb")
        except OSError:
            raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.") from None

    def forget(self, query: str, batch: int) -> None:
        """Remove the staged parts of a micro-batch, and of those before it."""
        for folder in self._batches(self._folder / query):
            if int(folder.name) <= batch:
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty: it has a later micro-batch
            (self._folder / query).rmdir()
        self._staged_bytes = -1

    # ---- space

    def _check_space(self, more_bytes: int) -> None:
        """At the limit, remove parts that are no longer needed. Raise JournalError if that is not enough."""
        if self._staged_bytes < 0:
            self._staged_bytes = sum(self._sizes())
        if self._staged_bytes + more_bytes <= MAX_STAGED_BYTES:
            return
        for query in self._queries():
            for folder in self._batches(query):
                is_stale = not (folder / _SEALED).exists() and age_s(folder) > STALE_S
                if is_stale or int(folder.name) <= self._committed(query.name):
                    shutil.rmtree(folder, ignore_errors=True)
        self._staged_bytes = sum(self._sizes())
        if self._staged_bytes + more_bytes > MAX_STAGED_BYTES:
            raise JournalError(
                f"limit reached: {self._folder} has {self._staged_bytes >> 20} MiB of uncommitted results; let their "
                "streams continue, or give this one a smaller maxBytesPerTrigger."
            )

    def _sizes(self) -> Iterator[int]:
        for query in self._queries():
            for folder in self._batches(query):
                with suppress(FileNotFoundError), os.scandir(folder) as files:
                    yield from (max(file.stat().st_size, MIN_PART_BYTES) for file in files)

    def _queries(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []

    @staticmethod
    def _batches(query: Path) -> list[Path]:
        return [path for path in query.iterdir() if path.name.isdecimal()] if query.is_dir() else []

    def _folder_of(self, query: str, batch: int) -> Path:
        return self._folder / query / str(batch)
