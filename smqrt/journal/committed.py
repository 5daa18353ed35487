"""Commits of pipelines that a journal has: the last micro-batch of each query, and the results that wait for theirs.

A node keeps a snapshot, `wal/<node>/txn.json`, written whenever a segment is sealed; what came since is in the newest
segments. A query may move to another hub of the same folder, so every hub knows the commits of all.

Results wait in `staged/<query>/<batch>/`, whichever hub took them. The tasks of a stream stage their rows in parts,
each under a name of its own. When all are done the parts of the micro-batch are sealed: from then on these are its
results, whatever a repetition of it stages, and each part is committed by its name. So the results of a micro-batch are
never in one place in memory.
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
from smqrt.journal.files import age_s, crc32, is_journal, make_folder, sync_folder, there, write_beside, write_whole

log = logging.getLogger("smqrt.journal")

MAX_QUERIES = 50_000
"""Names under which a hub remembers commits; a micro-batch of many MiB has one for each part."""
COMMITS_FILE = "txn.json"
"""In a node's folder. Once there was one for all nodes, in the journal's folder; it is still looked at."""
_THROUGH = "@through"  # among the queries, none of which has such a name
_NEWEST = 2  # segments with rows: the one that was written to, and the one before it, which may not have been sealed
STAGED_FOLDER = "staged"
MAX_STAGED_BYTES = 2 << 30
"""Of all parts that wait in a journal."""
MIN_PART_BYTES = 16 << 10
"""A part counts as so long at least: a file of one row isn't free either."""
STALE_S = 86400.0
"""Parts that nobody has sealed are in nobody's results after so long."""
MOST_PARTS = 10_000
"""Of a micro-batch."""
_SEALED = "sealed.json"
_PART = re.compile(r"[0-9a-f]{16}\.[0-9]{1,6}")


class CommittedBatches:
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
        """Return the last batch of a query; -1 when there is none."""
        return self._last.get(query, -1)

    def note(self, query: str, batch: int) -> None:
        """Take note of a commit."""
        self._last.pop(query, None)  # it goes to the end
        self._last[query] = batch
        self._shorten()

    def learn(self, more: Mapping[str, int]) -> None:
        """Take note of commits to other hubs."""
        add_later(self._last, more)
        self._shorten()

    def all(self) -> dict[str, int]:
        """Return a copy: queries in the order of their last commits, and their last batches."""
        return dict(self._last)

    def _shorten(self) -> None:
        while len(self._last) > MAX_QUERIES:
            del self._last[next(iter(self._last))]
            if not self.forgotten:
                log.warning(
                    "the journal knows commits of %d queries, and forgets those that have committed nothing for "
                    "longest: a micro-batch of theirs that is repeated now is published twice",
                    MAX_QUERIES,
                )
            self.forgotten += 1


def last_batches(journal: Path) -> dict[str, int]:
    """Return the last committed batch of each query. Hubs may write to the journal meanwhile.

    Args:
        journal: its folder.

    Raises:
        JournalError: a snapshot or a batch is damaged.
        OSError: a file can't be read, or the folder isn't there.
    """
    found: dict[str, int] = {}
    with there(journal):
        for folder in segment.node_folders(journal):
            add_later(found, _of_node(folder))
    return found


def add_later(known: dict[str, int], more: Mapping[str, int]) -> None:
    """Add to `known` what `more` knows of later batches."""
    for query, batch in more.items():
        known[query] = max(batch, known.get(query, batch))


def load_snapshot(folder: Path) -> dict[str, int]:
    """Return the last batch of each query as a node's snapshot has it.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: it is damaged.
    """
    found = _read(folder.parent.parent / COMMITS_FILE)
    add_later(found, _read(folder / COMMITS_FILE))
    found.pop(_THROUGH, None)
    return found


def save_snapshot(folder: Path, batches: Mapping[str, int], through: int) -> None:
    """Write the snapshot of a node.

    Args:
        folder: `<journal>/wal/<node>`.
        batches: the last batch of each query.
        through: the commits of all rows below this number are among them.

    Raises:
        OSError: the disk is full or broken.
    """
    manifest.write_json(folder / COMMITS_FILE, {**batches, _THROUGH: through})


class OtherNodes:
    """Commits of the other nodes of a journal; those that were seen once are not read again.

    Args:
        journal: its folder.
        node: the one that doesn't count.
    """

    def __init__(self, journal: Path, node: str) -> None:
        self._wal, self._node = journal / "wal", node
        self._seen: dict[Path, int] = {}
        self._snapshots: dict[Path, tuple[int, ...]] = {}

    def are_there(self) -> bool:
        """Return whether the journal has other nodes.

        Raises:
            OSError: its folder can't be read.
        """
        with os.scandir(self._wal) as found:
            return any(one.name != self._node for one in found if one.is_dir())

    def news(self) -> dict[str, int]:
        """Return the last batch of each query that was committed since the last call. Raises as `last_batches`."""
        found: dict[str, int] = {}
        for folder in (path for path in self._wal.iterdir() if path.is_dir() and path.name != self._node):
            add_later(found, self._of(folder))
        return found

    def _of(self, folder: Path) -> dict[str, int]:
        seen, paths = self._seen.get(folder), segment.paths(folder)
        end = max([seen or 0, *map(_end, paths[-1:])])  # before: what comes meanwhile is read again
        found = _of_node(folder) if seen is None else _since(paths, seen)
        add_later(found, self._new_snapshot(folder))  # after: a segment is removed when its commits are in there
        self._seen[folder] = end
        return found

    def _new_snapshot(self, folder: Path) -> dict[str, int]:
        try:
            about = (folder / COMMITS_FILE).stat()
        except FileNotFoundError:
            return {}
        version = about.st_ino, about.st_mtime_ns, about.st_size
        if self._snapshots.get(folder) == version:
            return {}
        found = load_snapshot(folder)
        self._snapshots[folder] = version
        return found


def _since(paths: list[Path], seq: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in paths[max(0, bisect_right(paths, seq, key=segment.first_seq) - 1) :]:
        with suppress(FileNotFoundError):
            add_later(found, batches_of_segment(path, seq))
    return found


def batches_of_segment(path: Path, since: int = 0) -> dict[str, int]:
    """Return the last batch of each query that has rows in a segment.

    Args:
        path: of the segment.
        since: rows below this number don't count.

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
                continue  # `journal verify` names it; later commits of the query say what this one does
            values = {str(txn) for txn in arrow.decode_column(batch, "txn") if txn is not None}
            add_later(found, dict(sorted(map(record.parse_transaction, values))))
    return found


def _end(path: Path) -> int:
    """Return the number after the last row of a segment."""
    try:
        with path.with_suffix(segment.INDEXED).open("rb") as file:
            batches = os.fstat(file.fileno()).st_size // segment.INDEX.size
            file.seek(max(0, batches - 1) * segment.INDEX.size)
            entries = segment.parse_index(file.read(segment.INDEX.size))
    except FileNotFoundError:
        entries = []
    return entries[0].next_seq if entries else segment.first_seq(path)


def _of_node(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in _unsaved(folder):
        with suppress(FileNotFoundError):  # removed meanwhile: then the snapshot has its commits by now
            add_later(found, batches_of_segment(path))
    add_later(found, load_snapshot(folder))
    return found


def _unsaved(folder: Path) -> Iterable[Path]:
    """Return the segments that may have commits which the node's snapshot lacks."""
    through = _read(folder / COMMITS_FILE).get(_THROUGH)
    if through is not None:
        paths = segment.paths(folder)
        return paths[max(0, bisect_right(paths, through, key=segment.first_seq) - 1) :]
    try:  # an older one, which doesn't tell: when it was saved says only about when it was made
        since = (folder / COMMITS_FILE).stat().st_mtime
    except FileNotFoundError:
        return segment.paths(folder)
    filled = [path for path in segment.paths(folder) if _has_rows(path)]
    return [path for path in filled if path in filled[-_NEWEST:] or _written_s(path) >= since]


def _has_rows(path: Path) -> bool:
    try:
        return path.with_suffix(segment.INDEXED).stat().st_size >= segment.INDEX.size
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


# ---- results that wait for their commit


def checked_part(name: object) -> str:
    """Return the name of a part; raises ArgumentError when it is invalid."""
    if isinstance(name, str) and _PART.fullmatch(name):
        return name
    raise ArgumentError(f"part: {str(name)[:100]!r} is no name of a part, such as 0123456789abcdef.0.")


class StagedResults:
    """The staged results of a journal. All methods wait for the disk.

    Args:
        journal: its folder.
        committed: gives the number of a query's last micro-batch that is stored.
    """

    def __init__(self, journal: Path, committed: Callable[[str], int]) -> None:
        self._journal, self._folder, self._committed = journal, journal / STAGED_FOLDER, committed
        self._waiting_bytes = -1

    def put(self, query: str, batch: int, part: str, rows: bytes) -> None:
        """Keep a part.

        Args:
            query, batch, part: whose it is, and its name.
            rows: as in the body of a commit.

        Raises:
            JournalError: too much waits, or it can't be written.
        """
        self._make_room(len(rows))
        folder = self._of(query, batch)
        try:
            if is_journal(self._journal):  # and is not made anew
                make_folder(folder)
            write_whole(folder / part, rows)
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None
        if self._waiting_bytes >= 0:  # else another thread has forgotten something: it is counted anew
            self._waiting_bytes += max(len(rows), MIN_PART_BYTES)

    def seal(self, query: str, batch: int, parts: Sequence[str]) -> list[str]:
        """Decide, for good, which parts are the results of a micro-batch.

        Args:
            query, batch: whose they are.
            parts: their names.

        Returns:
            What was decided, by this call or an earlier one.

        Raises:
            ArgumentError: there is no such part.
            JournalError: it can't be kept.
        """
        folder = self._of(query, batch)
        try:
            if not (folder / _SEALED).exists():
                self._decide(folder, parts)
            return [checked_part(name) for name in json.loads((folder / _SEALED).read_bytes())]
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None

    def _decide(self, folder: Path, parts: Sequence[str]) -> None:
        for part in parts:
            if not (folder / part).exists():
                raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.")
        beside = write_beside(folder / _SEALED, json.dumps(list(parts)).encode())
        with suppress(FileExistsError):
            os.link(beside, folder / _SEALED)  # and not rename: of two that decide at once, the first one does
        beside.unlink()
        sync_folder(folder)

    def open(self, query: str, batch: int, part: str) -> IO[bytes]:
        """Open the rows of a part.

        Raises:
            ArgumentError: there is no such part.
        """
        try:
            return (self._of(query, batch) / part).open("rb")
        except OSError:
            raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.") from None

    def forget(self, query: str, batch: int) -> None:
        """Remove what was staged for a micro-batch, and for those before it."""
        for folder in self._batches(self._folder / query):
            if int(folder.name) <= batch:
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # which has a later one
            (self._folder / query).rmdir()
        self._waiting_bytes = -1

    # ---- how much there is

    def _make_room(self, more_bytes: int) -> None:
        if self._waiting_bytes < 0:
            self._waiting_bytes = sum(self._sizes())
        if self._waiting_bytes + more_bytes <= MAX_STAGED_BYTES:
            return
        self._remove_stale()
        self._waiting_bytes = sum(self._sizes())
        if self._waiting_bytes + more_bytes > MAX_STAGED_BYTES:
            raise JournalError(
                f"{self._folder} has {self._waiting_bytes >> 20} MiB of results that nobody has committed yet; let "
                "their streams go on, or give this one a smaller maxBytesPerTrigger."
            )

    def _remove_stale(self) -> None:
        for query in self._queries():
            for folder in self._batches(query):
                old = not (folder / _SEALED).exists() and age_s(folder) > STALE_S
                if old or int(folder.name) <= self._committed(query.name):
                    shutil.rmtree(folder, ignore_errors=True)

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

    def _of(self, query: str, batch: int) -> Path:
        return self._folder / query / str(batch)
