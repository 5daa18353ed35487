"""Compacted files that a reader holds: hard links of its own to what it has planned to read, for as long as it lives.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smqrt.journal import merge
from smqrt.journal.files import FILE_MODE, make_folder
from smqrt.journal.manifest import DataFile

FOLDER = "held"
HOLD_S = 24 * 3600.0
"""So long files are held at most. A process takes a new folder when half of that is over: a plan has twelve hours."""
_TIME = "%Y%m%dT%H%M%SZ"
_LOCK = ".lock"
_HERE = socket.gethostname().encode()
_NEW = ".new-"
_NEW_S = 60.0


@dataclass(frozen=True)
class _Hold:
    """A folder of this process; `lock` is the descriptor that says that it lives."""

    folder: Path
    until_s: float
    lock: int
    process: int


_holds: dict[Path, _Hold] = {}
_making = threading.Lock()


def hold(journal: Path, files: Sequence[DataFile]) -> list[Path]:
    """Returns where files of a journal can be read from now on, for at least twelve hours of this process.

    Where no links can be made (a journal of another user, a file system without them), that is where the files are
    now: then they go when their grace is over.

    Args:
        journal: its folder.
        files: that the manifest lists.

    Raises:
        FileNotFoundError: one has gone since the manifest was read: read it anew.
    """
    try:
        folder = _folder(journal)
        return [_linked(merge.opened(journal, file.path), folder) for file in files]
    except FileNotFoundError:
        raise
    except OSError:
        return [_there(merge.opened(journal, file.path)) for file in files]


def until_s(path: Path) -> float | None:
    """Returns until when a path is there that `hold` has returned, seconds since 1970; None: it is the file itself."""
    return next((one.until_s for one in list(_holds.values()) if one.folder == path.parent), None)


def _linked(path: Path, folder: Path) -> Path:
    with suppress(FileExistsError):  # of an earlier plan
        os.link(path, folder / path.name)
    return folder / path.name


def _there(path: Path) -> Path:
    path.stat()
    return path


def _folder(journal: Path) -> Path:
    with _making:
        known, now_s = _holds.get(journal), time.time()
        usable = known is not None and known.process == os.getpid() and known.until_s - now_s > HOLD_S / 2
        if known is None or not usable or not known.folder.is_dir():
            known = _holds[journal] = _made(journal, now_s + HOLD_S)
        return known.folder


def _made(journal: Path, until_s: float) -> _Hold:
    """Makes a folder that is locked before it has its name."""
    until = time.strftime(_TIME, time.gmtime(until_s))
    name = f"{until}-{os.getpid()}-{os.urandom(4).hex()}"
    beside, folder = journal / FOLDER / f"{_NEW}{name}", journal / FOLDER / name
    make_folder(beside)
    lock = os.open(beside / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    os.write(lock, _HERE)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    beside.rename(folder)
    made = _Hold(folder, until_s, lock, os.getpid())
    atexit.register(_end, made)
    return made


def _end(made: _Hold) -> None:
    if made.process == os.getpid():  # and not one that was forked
        shutil.rmtree(made.folder, ignore_errors=True)


def release(journal: Path, now_s: float, is_full: bool = False) -> None:
    """Removes the links of processes that have ended, and those whose time is over.

    Args:
        journal: its folder.
        now_s: the time, seconds since 1970.
        is_full: the disk is: those links go too that alone keep what has expired, though somebody may be reading it.
    """
    for folder in _folders(journal):
        if _is_over(folder, now_s):
            shutil.rmtree(folder, ignore_errors=True)
    if is_full:
        links = [path for folder in _folders(journal) for path in folder.glob("*.parquet")]
        count = Counter(path.name for path in links)
        for path in links:
            with suppress(FileNotFoundError):
                if path.stat().st_nlink <= count[path.name]:
                    path.unlink()
                    count[path.name] -= 1


def _folders(journal: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(journal / FOLDER) as found:
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
    """Whether the process that has made a lock has ended; not known of another machine, which may lock otherwise."""
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
