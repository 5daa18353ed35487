"""Retention: rows that are old enough, or too many, are removed; but not those that a pipeline has yet to read.

Compacted files that a reader has planned to read are held: it has hard links of its own to them for as long as it
lives.

    held/20261123T150000Z-4711-9f3a/n1-….parquet    until when at most, the process, a name that nobody else has
    held/20261123T150000Z-4711-9f3a/.lock           locked by that process; it names the machine

So files that are joined, or expire, between a plan and the read stay where they were planned. A link takes no room
until the file itself has gone. Spark's own Parquet reader needs this: our readers find rows that have moved by number.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, merge
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import manifest, parquet_files, readers
from smqrt.journal import segment as index
from smqrt.journal.files import FILE_MODE, make_folder, there
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.segment import DATA, INDEXED, remove_summary, summary_of
from smqrt.journal.settings import JournalSettings

HELD_FOLDER = "held"
HOLD_S = 24 * 3600.0
"""So long files are held at most. A process takes a new folder when half of that is over: a plan has twelve hours."""
_TIME = "%Y%m%dT%H%M%SZ"
_LOCK = ".lock"
_HERE = socket.gethostname().encode()
_NEW = ".new-"
_NEW_S = 60.0


class _Segment(NamedTuple):
    """A segment and how long its files are together."""

    path: Path
    size_bytes: int


class _Piece(NamedTuple):
    """A segment or a Parquet file: what goes together, and goes as a whole."""

    paths: tuple[Path, ...]
    node: str
    end: int
    ts_max_us: int
    size_bytes: int


def expired(journal: Path, settings: JournalSettings, now_us: int) -> list[Path]:
    """Return the files that may be removed, oldest first; give them to `remove`.

    Segments and Parquet files go when all their rows are older than `retain_s`, and the oldest while all together are
    longer than `max_bytes`. Rows that a pipeline has yet to read stay, unless it is given up (`reader_timeout_s`), or
    all are longer than `hard_bytes`, or less than `min_free_bytes` are free on the disk. The newest segment of a node
    stays in any case. Only what goes is looked at, and of each node the first that stays.

    Args:
        journal: its folder.
        settings: these of them count.
        now_us: the time, microseconds since 1970.

    Raises:
        JournalError: the manifest or what a pipeline has said can't be read.
    """
    try:
        with there(journal):
            return _oldest(journal, settings, now_us)
    except OSError as error:
        raise JournalError(f"{journal} can't be looked through: {error}.") from None


def _oldest(journal: Path, settings: JournalSettings, now_us: int) -> list[Path]:
    state = manifest.load(journal)
    needed = readers.needed(readers.load(journal), settings.reader_timeout_s, now_us)
    short = settings.min_free_bytes - shutil.disk_usage(journal).free
    nodes = {folder.name: _segments(folder) for folder in index.node_folders(journal)}
    total = sum(page.bytes for page in state.pages())
    total += sum(segment.size_bytes for segments in nodes.values() for segment in segments)
    found: list[Path] = []
    waiting = [_in_turn(journal, state, node, nodes.get(node, []), now_us) for node in {*nodes, *state.nodes}]
    oldest = [(piece.ts_max_us, at, piece) for at, pieces in enumerate(waiting) if (piece := next(pieces, None))]
    heapify(oldest)
    while oldest:  # of a node none goes after one that stays: its rows have no holes, and nothing behind is looked at
        _, at, piece = heappop(oldest)
        if _goes(piece, settings, now_us, total, {} if short > 0 else needed):
            total, short = total - piece.size_bytes, short - piece.size_bytes
            found += piece.paths
            if following := next(waiting[at], None):
                heappush(oldest, (following.ts_max_us, at, following))
    return found


def release_held(journal: Path, settings: JournalSettings, now_us: int) -> None:
    """Remove links of readers that are no longer needed, or that a full disk has no room for.

    Args:
        journal, settings, now_us: as for `expired`.

    Raises:
        OSError: the journal's folder can't be read.
    """
    release_links(journal, now_us / 1e6, is_full=shutil.disk_usage(journal).free < settings.min_free_bytes)


def _goes(piece: _Piece, settings: JournalSettings, now_us: int, total: int, needed: dict[str, int]) -> bool:
    """Return whether a piece goes, while all that is left is `total` bytes long."""
    if settings.hard_bytes is not None and total > settings.hard_bytes:
        return True
    if piece.end > needed.get(piece.node, piece.end):
        return False
    old = settings.retain_s is not None and piece.ts_max_us < now_us - int(settings.retain_s * 1e6)
    return old or (settings.max_bytes is not None and total > settings.max_bytes)


def _in_turn(journal: Path, state: Manifest, node: str, segments: list[_Segment], now_us: int) -> Iterator[_Piece]:
    """Yield the pieces of a node in the order of their rows, none older than one before it: a clock may go back.

    Times of the future are of a clock that was wrong: such rows are at least as old as the next ones that aren't.
    """
    latest_us, future = -(1 << 62), list[_Piece]()
    sealed = filter(None, map(_of_segment, segments[:-1], segments[1:]))
    for piece in merge(_files(journal, state, node), sealed, key=lambda piece: piece.end):
        future.append(piece)
        if piece.ts_max_us <= now_us:
            latest_us = max(piece.ts_max_us, latest_us)
            yield from (each._replace(ts_max_us=latest_us) for each in future)
            future.clear()
    yield from future


def _files(journal: Path, state: Manifest, node: str) -> Iterator[_Piece]:
    for file in state.files(node):
        yield _Piece((journal / file.path,), node, file.last + 1, file.ts_max_us, file.bytes)


def _of_segment(segment: _Segment, following: _Segment) -> _Piece | None:
    """Return a sealed segment; None when it has just gone."""
    try:
        latest_us = summary_of(segment.path).ts_max_us
    except FileNotFoundError:
        return None
    paths = (segment.path, segment.path.with_suffix(INDEXED))
    return _Piece(paths, segment.path.parent.name, index.first_seq(following.path), latest_us, segment.size_bytes)


def _segments(folder: Path) -> list[_Segment]:
    """Return the segments of a node, oldest first."""
    return [_Segment(path, _size(path) + _size(path.with_suffix(INDEXED))) for path in index.paths(folder)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remove(journal: Path, paths: Iterable[Path]) -> int:
    """Remove files of a journal; Parquet files go from the manifest first, so that no reader looks for them.

    Args:
        journal: its folder.
        paths: of `expired`.

    Returns:
        How many bytes that gave back.

    Raises:
        JournalError: a file can't be removed.
    """
    files = list(paths)
    compacted = [path for path in files if path.suffix not in (DATA, INDEXED)]
    if compacted:
        with manifest.edit(journal) as changes:
            changes.remove(_listed(journal, compacted))
    freed = 0
    for path in files:
        try:
            size = path.stat().st_size
            path.unlink()
            if path.suffix == DATA:
                remove_summary(path)
            freed += size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalError(f"{path} can't be removed: {error.strerror}; give this user the folder.") from None
    return freed


def _listed(journal: Path, paths: Iterable[Path]) -> Iterator[DataFile]:
    """Yield what the manifest says of compacted files, where it still lists them."""
    state = manifest.load(journal)
    for path in paths:
        node, first, last = path.stem.rsplit("-", 2)
        name = path.relative_to(journal).as_posix()
        yield from (file for file in state.files(node, int(first), int(last) + 1) if file.path == name)


# ---- files that a reader holds


@dataclass(frozen=True)
class _HeldFolder:
    """A folder of this process; `lock` is the descriptor that says that it lives."""

    folder: Path
    until_s: float
    lock: int
    process: int


_holds: dict[Path, _HeldFolder] = {}
_making = threading.Lock()


def hold_files(journal: Path, files: Sequence[DataFile]) -> list[Path]:
    """Return where files of a journal can be read from now on, for at least twelve hours of this process.

    Where no links can be made (a journal of another user, a file system without them), that is where the files are
    now: then they go when their grace is over.

    Args:
        journal: its folder.
        files: that the manifest lists.

    Raises:
        FileNotFoundError: one has gone since the manifest was read: read it anew.
    """
    try:
        folder = _own_folder(journal)
        return [_linked(parquet_files.compacted_path(journal, file.path), folder) for file in files]
    except FileNotFoundError:
        raise
    except OSError:
        return [_checked_path(parquet_files.compacted_path(journal, file.path)) for file in files]


def held_until_s(path: Path) -> float | None:
    """Return until when a path that `hold_files` gave is there, seconds since 1970; None: it is the file itself."""
    return next((one.until_s for one in list(_holds.values()) if one.folder == path.parent), None)


def _linked(path: Path, folder: Path) -> Path:
    with suppress(FileExistsError):  # of an earlier plan
        os.link(path, folder / path.name)
    return folder / path.name


def _checked_path(path: Path) -> Path:
    path.stat()
    return path


def _own_folder(journal: Path) -> Path:
    with _making:
        known, now_s = _holds.get(journal), time.time()
        usable = known is not None and known.process == os.getpid() and known.until_s - now_s > HOLD_S / 2
        if known is None or not usable or not known.folder.is_dir():
            known = _holds[journal] = _make_hold(journal, now_s + HOLD_S)
        return known.folder


def _make_hold(journal: Path, until_s: float) -> _HeldFolder:
    """Make a folder that is locked before it has its name."""
    until = time.strftime(_TIME, time.gmtime(until_s))
    name = f"{until}-{os.getpid()}-{os.urandom(4).hex()}"
    beside, folder = journal / HELD_FOLDER / f"{_NEW}{name}", journal / HELD_FOLDER / name
    make_folder(beside)
    lock = os.open(beside / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    os.write(lock, _HERE)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    beside.rename(folder)
    made = _HeldFolder(folder, until_s, lock, os.getpid())
    atexit.register(_end, made)
    return made


def _end(made: _HeldFolder) -> None:
    if made.process == os.getpid():  # and not one that was forked
        shutil.rmtree(made.folder, ignore_errors=True)


def release_links(journal: Path, now_s: float, is_full: bool = False) -> None:
    """Remove the links of processes that have ended, and those whose time is over.

    Args:
        journal: its folder.
        now_s: the time, seconds since 1970.
        is_full: the disk is: those links go too that alone keep what has expired, though somebody may be reading it.
    """
    for folder in _held_folders(journal):
        if _is_over(folder, now_s):
            shutil.rmtree(folder, ignore_errors=True)
    if is_full:
        links = [path for folder in _held_folders(journal) for path in folder.glob("*.parquet")]
        count = Counter(path.name for path in links)
        for path in links:
            with suppress(FileNotFoundError):
                if path.stat().st_nlink <= count[path.name]:
                    path.unlink()
                    count[path.name] -= 1


def _held_folders(journal: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(journal / HELD_FOLDER) as found:
        return [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
    return []


def _is_over(folder: Path, now_s: float) -> bool:
    if folder.name.startswith(_NEW):
        return now_s - _changed_s(folder) > _NEW_S
    until = folder.name.partition("-")[0]
    return until < time.strftime(_TIME, time.gmtime(now_s)) or _is_left(folder / _LOCK)


def _changed_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _is_left(lock: Path) -> bool:
    """Return whether the process that has made a lock has ended; not known of another machine, which may lock otherwise."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if os.read(fd, len(_HERE) + 1) != _HERE:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
