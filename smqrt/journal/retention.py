"""Retention: removal of old and excess rows, and files that readers hold.

Rows that a pipeline has not read are kept. As long as its process runs, a reader holds the compacted files that it has
planned to read. For that it creates hard links:

    held/20261123T150000Z-4711-9f3a/n1-….parquet    latest end of the hold, process id, random
    held/20261123T150000Z-4711-9f3a/.lock           locked by that process; contains the machine's name

So files that are merged or expire between a plan and the read remain available at the planned path. A link takes no
disk space until the file itself is removed. Spark's Parquet reader needs this; our readers find moved rows by number.
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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import manifest, parquet_files, readers, segment
from smqrt.journal.files import FILE_MODE, existing_folder, make_folder
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.segment import DATA, INDEXED, remove_summary, summary_of
from smqrt.journal.settings import JournalSettings

HELD_FOLDER = "held"
HOLD_S = 24 * 3600.0
"""Maximum time of a hold. A process uses a new folder after half of it, so that each plan is valid for 12 hours."""
_TIME = "%Y%m%dT%H%M%SZ"
_LOCK = ".lock"
_MACHINE = socket.gethostname().encode()
_UNFINISHED = ".new-"
_UNFINISHED_S = 60.0


class _Segment(NamedTuple):
    """A segment and the size of its files."""

    path: Path
    size_bytes: int


class _Piece(NamedTuple):
    """A segment or a Parquet file, which is removed as a whole."""

    paths: tuple[Path, ...]
    node: str
    end: int
    ts_max_us: int
    size_bytes: int


def expired(journal: Path, settings: JournalSettings, now_us: int) -> list[Path]:
    """Return the files that may be removed, oldest first, for `remove`.

    Segments and Parquet files are removed when all their rows are older than `retain_s`. While the total size exceeds
    `max_bytes`, the oldest files are removed. Rows that a pipeline has not read are kept, unless it is given up
    (`reader_timeout_s`), the total size exceeds `hard_bytes`, or less than `min_free_bytes` are free on the disk. The
    newest segment of a node is always kept. Of each node only the files to remove and the next one are read.

    Args:
        journal: its folder.
        settings: the limits.
        now_us: the time, microseconds since 1970.

    Raises:
        JournalError: the manifest or a progress report can't be read.
    """
    try:
        with existing_folder(journal):
            state = manifest.load(journal)
            needed = readers.needed(readers.load(journal), settings.reader_timeout_s, now_us)
            missing_bytes = settings.min_free_bytes - shutil.disk_usage(journal).free
            segments = {
                folder.name: [
                    _Segment(path, _size(path) + _size(path.with_suffix(INDEXED))) for path in segment.paths(folder)
                ]
                for folder in segment.node_folders(journal)
            }
            total_bytes = sum(page.bytes for page in state.pages())
            total_bytes += sum(one.size_bytes for some in segments.values() for one in some)
            nodes = {*segments, *state.nodes}
            pieces = [_node_pieces(journal, state, node, segments.get(node, []), now_us) for node in nodes]
            oldest = [(piece.ts_max_us, at, piece) for at, some in enumerate(pieces) if (piece := next(some, None))]
            heapify(oldest)
            found: list[Path] = []
            while oldest:
                _, at, piece = heappop(oldest)
                if not _is_expired(piece, settings, now_us, total_bytes, {} if missing_bytes > 0 else needed):
                    continue  # later pieces of the node are kept, too, without reading them: its rows stay dense
                total_bytes, missing_bytes = total_bytes - piece.size_bytes, missing_bytes - piece.size_bytes
                found += piece.paths
                if following := next(pieces[at], None):
                    heappush(oldest, (following.ts_max_us, at, following))
            return found
    except OSError as error:
        raise JournalError(f"{journal} can't be read: {error}.") from None


def release_held(journal: Path, settings: JournalSettings, now_us: int) -> None:
    """Remove links that are no longer needed; on a full disk, also links to expired files.

    Args:
        journal, settings, now_us: as for `expired`.

    Raises:
        OSError: the journal's folder can't be read.
    """
    release_links(journal, now_us / 1e6, is_full=shutil.disk_usage(journal).free < settings.min_free_bytes)


def _is_expired(
    piece: _Piece, settings: JournalSettings, now_us: int, total_bytes: int, needed: dict[str, int]
) -> bool:
    """Return whether a piece is removed, when the journal still has `total_bytes`."""
    if settings.hard_bytes is not None and total_bytes > settings.hard_bytes:
        return True
    if piece.end > needed.get(piece.node, piece.end):
        return False
    is_old = settings.retain_s is not None and piece.ts_max_us < now_us - int(settings.retain_s * 1e6)
    return is_old or (settings.max_bytes is not None and total_bytes > settings.max_bytes)


def _node_pieces(journal: Path, state: Manifest, node: str, segments: list[_Segment], now_us: int) -> Iterator[_Piece]:
    """Yield the pieces of a node in the order of their rows, with ascending times, even if the clock was set back.

    A time in the future comes from a wrong clock: such rows get the time of the next rows with a valid time.
    """

    def sealed() -> Iterator[_Piece]:
        for one, following in pairwise(segments):
            try:
                ts_max_us = summary_of(one.path).ts_max_us
            except FileNotFoundError:  # removed meanwhile
                continue
            paths, end = (one.path, one.path.with_suffix(INDEXED)), segment.first_seq(following.path)
            yield _Piece(paths, node, end, ts_max_us, one.size_bytes)

    latest_us, future = -(1 << 62), list[_Piece]()
    files = (
        _Piece((journal / file.path,), node, file.last + 1, file.ts_max_us, file.bytes) for file in state.files(node)
    )
    for piece in merge(files, sealed(), key=lambda piece: piece.end):
        future.append(piece)
        if piece.ts_max_us <= now_us:
            latest_us = max(piece.ts_max_us, latest_us)
            yield from (each._replace(ts_max_us=latest_us) for each in future)
            future.clear()
    yield from future


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remove(journal: Path, paths: Iterable[Path]) -> int:
    """Remove files of a journal. Parquet files are removed from the manifest first, so that no reader opens them.

    Args:
        journal: its folder.
        paths: the result of `expired`.

    Returns:
        The size of the removed files, bytes.

    Raises:
        JournalError: a file can't be removed.
    """
    files = list(paths)
    compacted = [path for path in files if path.suffix not in (DATA, INDEXED)]
    if compacted:
        with manifest.edit(journal) as changes:
            state = manifest.load(journal)
            for path in compacted:
                node, first, last = path.stem.rsplit("-", 2)
                name = path.relative_to(journal).as_posix()
                listed = state.files(node, int(first), int(last) + 1)
                changes.remove(file for file in listed if file.path == name)
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
            raise JournalError(
                f"{path} can't be removed: {error.strerror}; give this user access to the folder."
            ) from None
    return freed


# ---- held files


@dataclass(frozen=True)
class _HeldFolder:
    """A folder of this process; `lock` is the descriptor of its lock."""

    folder: Path
    until_s: float
    lock: int
    process: int


_holds: dict[Path, _HeldFolder] = {}
_holds_lock = threading.Lock()


def hold_files(journal: Path, files: Sequence[DataFile]) -> list[Path]:
    """Return paths at which files of a journal stay for at least 12 hours, as long as this process runs.

    If links can't be created (in a journal of another user, or on a file system without links), it returns the files'
    own paths, which are valid until the grace period of the files is over.

    Args:
        journal: its folder.
        files: files that the manifest lists.

    Raises:
        FileNotFoundError: a file was removed since the manifest was read: load it again.
    """
    try:
        with _holds_lock:
            hold, now_s = _holds.get(journal), time.time()
            usable = hold is not None and hold.process == os.getpid() and hold.until_s - now_s > HOLD_S / 2
            if hold is None or not usable or not hold.folder.is_dir():
                hold = _holds[journal] = _make_hold(journal, now_s + HOLD_S)
        held = []
        for file in files:
            path = parquet_files.compacted_path(journal, file.path)
            with suppress(FileExistsError):  # from an earlier plan
                os.link(path, hold.folder / path.name)
            held.append(hold.folder / path.name)
        return held
    except FileNotFoundError:
        raise
    except OSError:
        paths = [parquet_files.compacted_path(journal, file.path) for file in files]
        for path in paths:
            path.stat()  # raises FileNotFoundError for a removed file
        return paths


def held_until_s(path: Path) -> float | None:
    """Return the time until which a path is held, seconds since 1970; None for a file's own path.

    Args:
        path: from `hold_files`.
    """
    return next((one.until_s for one in list(_holds.values()) if one.folder == path.parent), None)


def _make_hold(journal: Path, until_s: float) -> _HeldFolder:
    """Create a folder, and lock it before it gets its final name: unlocked folders are removed."""
    until = time.strftime(_TIME, time.gmtime(until_s))
    name = f"{until}-{os.getpid()}-{os.urandom(4).hex()}"
    beside, folder = journal / HELD_FOLDER / f"{_UNFINISHED}{name}", journal / HELD_FOLDER / name
    make_folder(beside)
    lock = os.open(beside / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    os.write(lock, _MACHINE)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    beside.rename(folder)
    hold = _HeldFolder(folder, until_s, lock, os.getpid())
    atexit.register(_remove_hold, hold)
    return hold


def _remove_hold(hold: _HeldFolder) -> None:
    if hold.process == os.getpid():  # not in a forked process
        shutil.rmtree(hold.folder, ignore_errors=True)


def release_links(journal: Path, now_s: float, is_full: bool = False) -> None:
    """Remove the links of processes that have ended, and those whose hold has expired.

    Args:
        journal: its folder.
        now_s: the time, seconds since 1970.
        is_full: whether the disk is full: then links to expired files are removed, too, even if a reader uses them.
    """
    for folder in _held_folders(journal):
        if _is_released(folder, now_s):
            shutil.rmtree(folder, ignore_errors=True)
    if is_full:
        links = [path for folder in _held_folders(journal) for path in folder.glob("*.parquet")]
        count = Counter(path.name for path in links)
        for path in links:
            with suppress(FileNotFoundError):
                if path.stat().st_nlink <= count[path.name]:  # only holds are left: the file itself has expired
                    path.unlink()
                    count[path.name] -= 1


def _held_folders(journal: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(journal / HELD_FOLDER) as found:
        return [Path(one.path) for one in found if one.is_dir(follow_symlinks=False)]
    return []


def _is_released(folder: Path, now_s: float) -> bool:
    """Return whether a hold has expired, or its process has ended."""
    if folder.name.startswith(_UNFINISHED):
        try:
            return now_s - folder.stat().st_mtime > _UNFINISHED_S
        except FileNotFoundError:
            return False
    if folder.name.partition("-")[0] < time.strftime(_TIME, time.gmtime(now_s)):
        return True
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if os.read(fd, len(_MACHINE) + 1) != _MACHINE:  # another machine's lock may not be visible here
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
