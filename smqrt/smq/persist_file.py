"""The `persist` file of a hub: names and last values (SQLite).

A thread commits names in groups: during a sync of the disk, the next group is collected. A client gets its answer when
the `Deferred` of its name is resolved. Publishing does not wait until last values are written: after a crash, changes
of the last `sync_s` seconds may be missing.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from typing import Protocol

import gevent
from gevent import get_hub

from smqrt.auth.identity import Identity, Method
from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import MAX_STAMP, LastValues, clock
from smqrt.broker.topics import Topics
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.loop.threads import DedicatedThreads
from smqrt.wire import smq

log = logging.getLogger("smqrt")

GROUP_ROWS = 1000
"""Maximum number of names in one commit: their answers are sent in one turn of the loop."""
RETRY_S = 0.5
"""Pause after a failed commit of names; later requests for these names wait for the next commit."""
VALUES_RETRY_S = 2.0
"""Pause after a failed commit of last values."""
SLOW_S = 10.0
"""When a commit takes longer, waiting clients are denied their names."""
CLOSE_S = 10.0
"""Maximum time that `close` waits for the disk."""

FORMAT = 1
"""Format of the file (`user_version`); 0 is the same without last values."""

_NAMES_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS names (kind TEXT, name BLOB, number INTEGER, checksum INTEGER,"
    " PRIMARY KEY (kind, name), UNIQUE (kind, number)) WITHOUT ROWID"
)
_VALUES_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS last_values (tid INTEGER, stid INTEGER, payload BLOB, source TEXT, checksum INTEGER,"
    " PRIMARY KEY (tid, stid)) WITHOUT ROWID"
)
_STAMPS_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS last_value_stamps (tid INTEGER, stid INTEGER, stamp INTEGER, checksum INTEGER,"
    " PRIMARY KEY (tid, stid)) WITHOUT ROWID"
)
"""The time of publication with the checksum of the value; without a value, the time of its removal. A separate table,
because a process of an older version writes values without their time; the checksums then differ."""

NameRow = tuple[str, bytes, int, int]
ValueRow = tuple[int, int, bytes, str, int]
StampRow = tuple[int, int, int, int]


class UnsavedStore(Protocol):
    """A store with unsaved changes."""

    def close(self) -> None:
        """Save the changes."""


unfinished: set[UnsavedStore] = set()
"""Stores with unsaved changes. The set keeps them in memory, and they are closed at the end of the process."""


class NotSavedError(SmqrtError):
    """A name could not be saved."""


class SqliteNames:
    """A `NameStore` in an SQLite file in WAL mode.

    When a commit fails, the waiting clients are denied at once, and the commit is repeated until it succeeds.

    Args:
        path: the file; it is created with mode 0600 when it does not exist. Its lock file is `<path>-lock`.

    Attributes:
        path: see above.
        connection: the open database; once the hub exists, it is used only in the thread of `disk`.
        disk: the thread of the commits.
        at_close: functions to call before the file is closed.
        is_hanging: whether a commit of one of these has not ended within `CLOSE_S`.

    Raises:
        ArgumentError: the file can't be opened, is not a `persist` file, or another hub uses it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._lock = _lock_file(path)
        except ArgumentError:
            gc.collect()  # an unreferenced hub may still hold the lock
            self._lock = _lock_file(path)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            # Transactions are explicit, and the thread of `disk` uses the connection later.
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            found = self.connection.execute("PRAGMA user_version").fetchone()[0]
            if found > FORMAT:
                self.connection.close()
                raise ArgumentError(
                    f"persist: {path}: it has format {found}, written by a newer smqrt; this one reads up to {FORMAT}: "
                    "use the newer one"
                )
            self.connection.execute(f"PRAGMA user_version = {FORMAT}")
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=FULL")  # in WAL mode, NORMAL would lose commits at a power cut
            self.connection.execute(_NAMES_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ArgumentError(f"persist: {path}: {error}; give a file that this process may write") from error
        self.disk = DedicatedThreads()
        self.at_close: list[Callable[[], None]] = []
        self.is_hanging = False
        self._rows: list[NameRow] = []
        self._unsaved: dict[tuple[str, bytes], Deferred[None]] = {}
        self._writer: gevent.Greenlet[..., None] | None = None
        self._closed = self._failure_logged = False

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
            if checksum != _name_checksum(kind, name, number):
                raise self.unusable(f"{name!r} was changed")
        return [(name, number) for name, number, _ in rows]

    def unusable(self, fault: str) -> ArgumentError:
        """Return the error of a damaged file."""
        return ArgumentError(f"persist: {self.path}: {fault}; restore it from a backup or remove it")

    def add(self, kind: str, name: bytes, number: int) -> None:
        """See `NameStore`."""
        pending: Deferred[None] = Deferred()
        self._unsaved[kind, name] = pending
        if self._closed:
            pending.reject(NotSavedError(f"{self.path} was closed"))
            return
        self._rows.append((kind, name, number, _name_checksum(kind, name, number)))
        if self._writer is None:
            unfinished.add(self)
            self._writer = gevent.spawn(self._write)

    def unsaved(self, kind: str, name: bytes) -> Deferred[None] | None:
        """See `NameStore`."""
        return self._unsaved.get((kind, name))

    def _write(self) -> None:
        try:
            while self._rows:
                group, self._rows = self._rows[:GROUP_ROWS], self._rows[GROUP_ROWS:]
                slow = get_hub().loop.timer(SLOW_S)  # answers the clients while the commit is still running
                slow.start(self._deny, group, f"the disk takes longer than {SLOW_S:g} s")
                try:
                    self.disk.call(self._commit, group)
                except (sqlite3.Error, OSError) as error:
                    self._rows[:0] = group  # the hub has created the topics, so the names are saved anyway
                    self._deny(group, str(error))
                    gevent.sleep(RETRY_S)
                else:
                    if self._failure_logged:
                        self._failure_logged = False
                        log.warning("persist: %s: names are saved again", self.path)
                    for kind, name, *_ in group:
                        self._unsaved.pop((kind, name)).resolve()
                finally:
                    slow.stop()
                    slow.close()
        finally:
            self._writer = None
            unfinished.discard(self)

    def _commit(self, group: list[NameRow]) -> None:
        """Write a group. Runs in the thread."""
        with self.connection:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.executemany("INSERT INTO names VALUES (?, ?, ?, ?)", group)

    def _deny(self, group: list[NameRow], fault: str) -> None:
        """Reject the waiting requests; later requests for the same names wait for the next attempt."""
        if not self._failure_logged:
            self._failure_logged = True
            log.error(
                "persist: %s: %s; clients are denied new names until the disk accepts writes again",
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
        for save in self.at_close:  # first: last values are written over the same connection
            save()
        self._closed = True
        writer = self._writer
        if writer is not None:
            writer.join(CLOSE_S)
        if self._unsaved:
            log.error("persist: %s: closed with %d unsaved names", self.path, len(self._unsaved))
        self._rows.clear()
        for pending in list(self._unsaved.values()):
            pending.reject(NotSavedError(f"{self.path} was closed"))
        if self._writer is None and not self.is_hanging:  # otherwise a thread still uses the connection
            self.disk.close()
            self.connection.close()
        self._lock.close()


def _lock_file(path: str) -> FileIO:
    """Return the open, locked file `<path>-lock`.

    The database can't be locked: closing a second descriptor of it would release SQLite's POSIX locks.
    """
    try:
        fd = os.open(f"{path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ArgumentError(f"persist: {path}: {error.strerror}; give a file that this process may write") from None
    file = FileIO(fd, "r+b")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"  # the id of the process, see below
        file.close()
        raise ArgumentError(
            f"persist: {path} is used by another hub, of process {owner}; give each hub a file of its own"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return file


def _name_checksum(kind: str, name: bytes, number: int) -> int:
    return zlib.crc32(b"%b %d %b" % (kind.encode(), number, name))


@atexit.register
def _save_at_exit() -> None:
    for store in list(unfinished):
        store.close()


class SqliteValues:
    """A `ValueStore` in the `persist` file of a hub.

    A finished commit is on the disk (WAL mode, synchronous=FULL).

    Args:
        names: the file.
        sync_s: seconds from a change to its commit.

    Raises:
        ArgumentError: the file can't be used.
    """

    def __init__(self, names: SqliteNames, sync_s: float) -> None:
        self._names, self._sync_s = names, sync_s
        self._writer: gevent.Greenlet[..., None] | None = None
        self._failure_logged = self._closed = self._is_writing = False
        self._values: LastValues | None = None
        self._topics: Topics | None = None
        try:
            names.connection.execute(_VALUES_SCHEMA)
            names.connection.execute(_STAMPS_SCHEMA)
        except sqlite3.Error as error:
            raise names.unusable(str(error)) from error
        names.at_close.append(self.close)

    def load(self, values: LastValues, topics: Topics, server_etid: int) -> None:
        """Restore the values of the file; delete values of topics that no filter selects.

        Raises:
            ArgumentError: the file was damaged.
        """
        self._values, self._topics = values, topics
        obsolete: list[tuple[int, int]] = []
        sources: dict[str, Identity | None] = {}  # many values have the same publisher
        stamps = self._stamps()
        for tid, stid, payload, source in self._rows():
            topic = topics.get(tid)
            stamp, checksum = stamps.pop((tid, stid), (0, 0))
            if checksum != _value_checksum(tid, stid, payload, source):
                stamp = 0  # the time of another value, see `_STAMPS_SCHEMA`
            if topic is None or not values.selects(topic):
                obsolete.append((tid, stid))
            else:
                if source not in sources:
                    sources[source] = _identity_from_text(source)
                values.restore(topic, smq.publish_frame(tid, server_etid, stid, payload), sources[source], stamp)
        if obsolete:
            log.info("persist: %s: deleted %d last values of unselected topics", self._names.path, len(obsolete))
            self._names.connection.executemany("DELETE FROM last_values WHERE tid = ? AND stid = ?", obsolete)
        for (tid, stid), (stamp, checksum) in stamps.items():
            topic = topics.get(tid)
            if topic is not None and not checksum and values.selects(topic):
                values.restore(topic, smq.publish_frame(tid, server_etid, stid, b""), None, stamp)
            else:
                obsolete.append((tid, stid))
        if obsolete:
            self._names.connection.executemany("DELETE FROM last_value_stamps WHERE tid = ? AND stid = ?", obsolete)
        values.keep_in(self)

    def _stamps(self) -> dict[tuple[int, int], tuple[int, int]]:
        try:
            rows = self._names.connection.execute("SELECT tid, stid, stamp, checksum FROM last_value_stamps")
            found = {(tid, stid): (stamp, checksum) for tid, stid, stamp, checksum in rows.fetchall()}
        except sqlite3.Error as error:
            raise self._names.unusable(str(error)) from error
        for place, (stamp, _) in found.items():
            if type(stamp) is not int or not 0 <= stamp < MAX_STAMP:
                raise self._names.unusable(f"the time of the last value of {place[0]}, {place[1]} was changed")
            clock.heard(stamp)  # messages of this process must have later stamps
        return found

    def _rows(self) -> Iterator[tuple[int, int, bytes, str]]:
        try:
            rows = self._names.connection.execute("SELECT tid, stid, payload, source, checksum FROM last_values")
            for tid, stid, payload, source, checksum in rows.fetchall():
                if not isinstance(payload, bytes) or checksum != _value_checksum(tid, stid, payload, source):
                    raise self._names.unusable(f"the last value of {tid}, {stid} was changed")
                yield tid, stid, payload, source
        except sqlite3.Error as error:
            raise self._names.unusable(str(error)) from error

    def wake(self) -> None:
        """See `ValueStore`."""
        if self._writer is None and not self._closed and self._values is not None:
            unfinished.add(self)
            self._writer = gevent.spawn_later(self._sync_s, self._write)

    def _write(self) -> None:
        self._is_writing = True
        try:
            while self._write_group():
                pass
        except (sqlite3.Error, OSError) as error:
            if not self._failure_logged:
                self._failure_logged = True
                log.error(
                    "persist: %s: %s; last values are not saved until the disk accepts writes again",
                    self._names.path,
                    error,
                )
            if not self._closed:
                self._writer = gevent.spawn_later(VALUES_RETRY_S, self._write)
                return
        finally:
            self._is_writing = False
        self._writer = None
        unfinished.discard(self)

    def _write_group(self) -> bool:
        """Write a group of changes; return False when there are none."""
        assert self._values is not None
        assert self._topics is not None
        changes = self._values.take_changes(GROUP_ROWS)
        if not changes:
            return False
        rows: list[ValueRow] = []
        removed: list[tuple[int, int]] = []
        stamps: list[StampRow] = []
        unstamped: list[tuple[int, int]] = []
        for (key, stid_bytes), change in changes.items():
            tid, stid = int.from_bytes(key, "big"), int.from_bytes(stid_bytes, "big")
            checksum = 0
            if change is None:
                removed.append((tid, stid))
            else:
                frame, identity = change
                payload, source = frame[smq.PUBLISH_HEADER_BYTES :], _identity_text(identity)
                checksum = _value_checksum(tid, stid, payload, source)
                rows.append((tid, stid, payload, source, checksum))
            if stamp := self._values.stamp_at((key, stid_bytes)):
                stamps.append((tid, stid, stamp, checksum))
            else:
                unstamped.append((tid, stid))
        try:
            self._names.disk.call(self._commit, rows, removed, stamps, unstamped)
        except (sqlite3.Error, OSError):
            self._values.requeue_changes(changes, self._topics.by_key.get)
            raise
        if self._failure_logged:
            self._failure_logged = False
            log.warning("persist: %s: last values are saved again", self._names.path)
        return True

    def _commit(
        self,
        rows: list[ValueRow],
        removed: list[tuple[int, int]],
        stamps: list[StampRow],
        unstamped: list[tuple[int, int]],
    ) -> None:
        """Write a group. Runs in the thread."""
        connection = self._names.connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO last_values VALUES (?, ?, ?, ?, ?)", rows)
            connection.executemany("DELETE FROM last_values WHERE tid = ? AND stid = ?", removed)
            connection.executemany("INSERT OR REPLACE INTO last_value_stamps VALUES (?, ?, ?, ?)", stamps)
            connection.executemany("DELETE FROM last_value_stamps WHERE tid = ? AND stid = ?", unstamped)

    def close(self) -> None:
        """Write the last changes; waits for the disk up to `CLOSE_S`. `SqliteNames.close` then closes the file."""
        if self._closed:
            return
        self._closed = True
        if self._is_writing and self._writer is not None:
            self._writer.join(CLOSE_S)
        elif self._writer is not None:
            self._writer.kill()
        if self._values is not None and not self._is_writing:
            last = gevent.spawn(self._write)  # a greenlet, so that the wait has a time limit
            last.join(CLOSE_S)
        if self._is_writing or self._failure_logged:
            count = sum(1 for _ in self._values.unsaved()) if self._values is not None else 0
            log.error("persist: %s: closed with %d unsaved last values", self._names.path, count)
        self._names.is_hanging |= self._is_writing
        unfinished.discard(self)


def _value_checksum(tid: int, stid: int, payload: bytes, source: str) -> int:
    return zlib.crc32(b"%d %d %b %b" % (tid, stid, source.encode(), payload))


def _identity_text(identity: Identity | None) -> str:
    """Return a publisher as text: the attributes that permissions depend on, without secrets."""
    if identity is None:
        return ""
    client_id = identity.client_id.decode("utf-8", "surrogateescape")
    return json.dumps([identity.user, list(identity.groups), identity.method.value, client_id])


def _identity_from_text(source: str) -> Identity | None:
    if not source:
        return None
    try:
        user, groups, method, client_id = json.loads(source)
        return Identity(user, tuple(groups), Method(method), client_id.encode("utf-8", "surrogateescape"))
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(f"persist: {source!r} is not a publisher: {error}") from None
