"""Topic names keep their numbers over restarts: one SQLite file per hub.

Names are committed in groups by a thread: while the disk syncs one group, the next one gathers. Whoever has to know
that a name is safe waits for the `Deferred` of `add`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import gevent
from gevent import get_hub
from gevent.threadpool import ThreadPool

from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, SmqrtError

log = logging.getLogger("smqrt")

GROUP_ROWS = 1000
"""The most names of one commit: their answers are sent in one turn of the loop."""
RETRY_S = 0.5
SLOW_S = 10.0
"""Who waits for a disk that takes longer is told that the name was denied."""
CLOSE_S = 10.0
"""How long `close` waits for the disk."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS names (kind TEXT, name BLOB, number INTEGER, checksum INTEGER,"
    " PRIMARY KEY (kind, name), UNIQUE (kind, number)) WITHOUT ROWID"
)

Row = tuple[str, bytes, int, int]

FORMAT = 1
"""Of the file: its `user_version`; 0 is the same without last values."""


class Unfinished(Protocol):
    """What is to be saved before the process ends."""

    def close(self) -> None:
        """Save it."""


unfinished: set[Unfinished] = set()
"""Those with names, or values, that are not safe yet; nobody else may hold them."""


class NotSavedError(SmqrtError):
    """A name could not be made safe."""


class SqliteNames:
    """A `NameStore` in an SQLite file in WAL mode.

    What the disk does not take is kept and tried again; who waited for it is told at once.

    Args:
        path: the file; it is made with mode 0600 when it does not exist. Beside it lies `<path>-lock`.

    Attributes:
        connection: for whoever keeps more in the file; used in the thread `disk` only, once the hub is there.
        at_close: called before the file is closed.

    Raises:
        ArgumentError: the file can't be opened, is no such database, or another hub uses it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._lock = _locked(path)
        except ArgumentError:
            gc.collect()  # a hub that nobody refers to any more may hold it
            self._lock = _locked(path)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._check_format()
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=FULL")
            self.connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ArgumentError(f"persist: {path}: {error}; give a file that this process may write") from error
        self.disk = ThreadPool(1)
        self.at_close: list[Callable[[], None]] = []
        self._rows: list[Row] = []
        self._unsaved: dict[tuple[str, bytes], Deferred[None]] = {}
        self._writer: gevent.Greenlet[..., None] | None = None
        self._closed = self._complained = False

    def _check_format(self) -> None:
        found = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if found > FORMAT:
            self.connection.close()
            raise self.unusable(
                f"it has format {found}, written by a newer smqrt; this one reads up to {FORMAT}: use the newer one"
            )
        self.connection.execute(f"PRAGMA user_version = {FORMAT}")

    def load(self, kind: str) -> Iterable[tuple[bytes, int]]:
        """See `NameStore`."""
        try:
            rows = self.connection.execute(
                "SELECT name, number, checksum FROM names WHERE kind = ?", (kind,)
            ).fetchall()
        except sqlite3.Error as error:
            raise self.unusable(str(error)) from error
        for name, number, checksum in rows:
            if not (isinstance(name, bytes) and isinstance(number, int) and 0 < number < 1 << 32):
                raise self.unusable(f"{name!r} has the number {number!r}")
            if checksum != _checksum(kind, name, number):
                raise self.unusable(f"{name!r} was changed")
        return [(name, number) for name, number, _ in rows]

    def unusable(self, fault: str) -> ArgumentError:
        return ArgumentError(f"persist: {self.path}: {fault}; restore it from a backup or remove it")

    def add(self, kind: str, name: bytes, number: int) -> None:
        """See `NameStore`."""
        pending: Deferred[None] = Deferred()
        self._unsaved[kind, name] = pending
        if self._closed:
            pending.reject(NotSavedError(f"{self.path} was closed"))
            return
        self._rows.append((kind, name, number, _checksum(kind, name, number)))
        if self._writer is None:
            unfinished.add(self)
            self._writer = gevent.spawn(self._write)

    def unsaved(self, kind: str, name: bytes) -> Deferred[None] | None:
        """See `NameStore`."""
        return self._unsaved.get((kind, name))

    # ---- the disk

    def _write(self) -> None:
        try:
            while self._rows:
                group, self._rows = self._rows[:GROUP_ROWS], self._rows[GROUP_ROWS:]
                self._write_group(group)
        finally:
            self._writer = None
            unfinished.discard(self)

    def _write_group(self, group: list[Row]) -> None:
        slow = get_hub().loop.timer(SLOW_S)
        slow.start(self._deny, group, f"the disk takes longer than {SLOW_S:g} s")
        try:
            fault = self.disk.apply(fault_of, (self._commit, group))
            if fault is None:
                self._saved(group)
            else:
                self._rows[:0] = group
                self._deny(group, str(fault))
                gevent.sleep(RETRY_S)
        finally:
            slow.stop()
            slow.close()

    def _commit(self, group: list[Row]) -> None:
        """Run in the thread."""
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", group)

    def _saved(self, group: list[Row]) -> None:
        if self._complained:
            self._complained = False
            log.warning("persist: %s takes names again", self.path)
        for kind, name, *_ in group:
            self._unsaved.pop((kind, name)).resolve()

    def _deny(self, group: list[Row], fault: str) -> None:
        """Tell those who wait; who asks for the same name later waits for the next attempt."""
        if not self._complained:
            self._complained = True
            log.error(
                "persist: %s: %s; clients that ask for a new name are denied it until the disk takes names again",
                self.path,
                fault,
            )
        error = NotSavedError(fault)
        waiting = [self._unsaved.pop((kind, name)) for kind, name, *_ in group]
        self._unsaved.update(((kind, name), Deferred()) for kind, name, *_ in group)
        for pending in waiting:
            pending.reject(error)

    def close(self) -> None:
        """See `NameStore`; waits for the disk up to `CLOSE_S`."""
        if self._closed:
            return
        for save in self.at_close:
            save()
        self._closed = True
        writer = self._writer
        if writer is not None:
            writer.join(CLOSE_S)
        if self._unsaved:
            log.error("persist: %s: closed with %d names that the disk did not take", self.path, len(self._unsaved))
        self._rows.clear()
        for pending in list(self._unsaved.values()):
            pending.reject(NotSavedError(f"{self.path} was closed"))
        if self._writer is None:  # else a thread is in there still
            self.disk.kill()
            self.connection.close()
        self._lock.close()


def _locked(path: str) -> Any:
    """The open lock file of `path`: a file of its own, since closing the database itself a second time would take away
    the locks that SQLite holds on it.
    """
    try:
        fd = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArgumentError(f"persist: {path}: {error.strerror}; give a file that this process may write") from None
    file = os.fdopen(fd, "r+b", buffering=0)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        file.close()
        raise ArgumentError(
            f"persist: {path} is used by another hub, of process {owner}; give each hub a file of its own"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return file


def _checksum(kind: str, name: bytes, number: int) -> int:
    return zlib.crc32(b"%b %d %b" % (kind.encode(), number, name))


@atexit.register
def _finish() -> None:
    """A process that just ends has its names saved, too."""
    for store in list(unfinished):
        store.close()


def fault_of(commit: Callable[..., object], *args: object) -> Exception | None:
    """Run a commit in a thread; gives the disk's error, because gevent prints each one that is raised there."""
    try:
        commit(*args)
    except (sqlite3.Error, OSError) as error:
        return error
    return None
