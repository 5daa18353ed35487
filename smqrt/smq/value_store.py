"""Last values over restarts: a table in the file of a hub's names (`namestore.py`), written behind by its thread.

Nobody waits for it: what was published within the last `sync_s` seconds may be missing after a crash, and then an older
value is there. A commit is on the disk when it is done (SQLite in WAL mode, synchronous=FULL).
"""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections.abc import Iterator

import gevent

from smqrt.auth.identity import Identity, Method
from smqrt.broker.last_values import LastValues
from smqrt.broker.topics import Topics
from smqrt.broker.value_clock import MAX_STAMP, clock
from smqrt.errors import ArgumentError
from smqrt.smq.name_store import CLOSE_S, SqliteNames, fault_of, unfinished
from smqrt.wire import smq

log = logging.getLogger("smqrt")

GROUP_ROWS = 1000
"""The most values of one commit: they are taken out of the tables of the hub in one turn of the loop."""
RETRY_S = 2.0

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS last_values (tid INTEGER, stid INTEGER, payload BLOB, source TEXT, checksum INTEGER,"
    " PRIMARY KEY (tid, stid)) WITHOUT ROWID"
)

_STAMPS_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS last_value_stamps (tid INTEGER, stid INTEGER, stamp INTEGER, checksum INTEGER,"
    " PRIMARY KEY (tid, stid)) WITHOUT ROWID"
)
"""When values were published, with the checksum of the value; of places without a value, when it was taken away. A
table of its own: a process of an older version writes values without it, and then the checksums differ."""

Row = tuple[int, int, bytes, str, int]
Stamp = tuple[int, int, int, int]


class SqliteValues:
    """A `ValueStore` in the file of a hub's names.

    Args:
        names: that file.
        sync_s: seconds from a change to its commit.

    Raises:
        ArgumentError: the file can't be used.
    """

    def __init__(self, names: SqliteNames, sync_s: float) -> None:
        self._names, self._sync_s = names, sync_s
        self._writer: gevent.Greenlet[..., None] | None = None
        self._complained = self._closed = self._is_writing = False
        self._values: LastValues | None = None
        self._topics: Topics | None = None
        try:
            names.connection.execute(_SCHEMA)
            names.connection.execute(_STAMPS_SCHEMA)
        except sqlite3.Error as error:
            raise names.unusable(str(error)) from error
        names.at_close.append(self.close)

    def load(self, values: LastValues, topics: Topics, server_etid: int) -> None:
        """Give `values` what the file has; values of topics that no filter names any more are removed.

        Raises:
            ArgumentError: the file was damaged.
        """
        self._values, self._topics = values, topics
        obsolete: list[tuple[int, int]] = []
        sources: dict[str, Identity | None] = {}  # values share one
        stamps = self._stamps()
        for tid, stid, payload, source in self._rows():
            topic = topics.get(tid)
            stamp, checksum = stamps.pop((tid, stid), (0, 0))
            stamp = stamp if checksum == _checksum(tid, stid, payload, source) else 0
            if topic is None or not values.selects(topic):
                obsolete.append((tid, stid))
            else:
                if source not in sources:
                    sources[source] = _identity(source)
                values.restore(topic, smq.publish_frame(tid, server_etid, stid, payload), sources[source], stamp)
        if obsolete:
            log.info("persist: %s: %d last values of topics that have none any more", self._names.path, len(obsolete))
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
            clock.heard(stamp)
        return found

    def _rows(self) -> Iterator[tuple[int, int, bytes, str]]:
        try:
            rows = self._names.connection.execute("SELECT tid, stid, payload, source, checksum FROM last_values")
            for tid, stid, payload, source, checksum in rows.fetchall():
                if not isinstance(payload, bytes) or checksum != _checksum(tid, stid, payload, source):
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
            if not self._complained:
                self._complained = True
                log.error("persist: %s: %s; last values are not saved until it takes them", self._names.path, error)
            if not self._closed:
                self._writer = gevent.spawn_later(RETRY_S, self._write)
                return
        finally:
            self._is_writing = False
        self._writer = None
        unfinished.discard(self)

    def _write_group(self) -> bool:
        """Write a portion; false when nothing is left."""
        assert self._values is not None
        assert self._topics is not None
        changes = self._values.take_changes(GROUP_ROWS)
        if not changes:
            return False
        rows = [_row(key, stid, *change) for (key, stid), change in changes.items() if change is not None]
        gone = [_numbers(key, stid) for (key, stid), change in changes.items() if change is None]
        checksums = {row[:2]: row[4] for row in rows}
        stamps = [(_numbers(*place), self._values.stamp_at(place)) for place in changes]
        stamped = [(*at, stamp, checksums.get(at, 0)) for at, stamp in stamps if stamp]
        unstamped = [at for at, stamp in stamps if not stamp]
        fault = self._names.disk.apply(fault_of, (self._commit, rows, gone, stamped, unstamped))
        if fault is not None:
            by_key = self._topics.by_key
            self._values.give_back(changes, by_key.get)
            raise fault
        if self._complained:
            self._complained = False
            log.warning("persist: %s takes last values again", self._names.path)
        return True

    def _commit(
        self, rows: list[Row], gone: list[tuple[int, int]], stamps: list[Stamp], unstamped: list[tuple[int, int]]
    ) -> None:
        """Run in the thread."""
        connection = self._names.connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO last_values VALUES (?, ?, ?, ?, ?)", rows)
            connection.executemany("DELETE FROM last_values WHERE tid = ? AND stid = ?", gone)
            connection.executemany("INSERT OR REPLACE INTO last_value_stamps VALUES (?, ?, ?, ?)", stamps)
            connection.executemany("DELETE FROM last_value_stamps WHERE tid = ? AND stid = ?", unstamped)

    def close(self) -> None:
        """Write what is left; waits for the disk up to `CLOSE_S`. The file of names is closed next."""
        if self._closed:
            return
        self._closed = True
        if self._is_writing and self._writer is not None:
            self._writer.join(CLOSE_S)
        elif self._writer is not None:
            self._writer.kill()
        if self._values is not None and not self._is_writing:
            last = gevent.spawn(self._write)
            last.join(CLOSE_S)
        if self._is_writing or self._complained:
            count = sum(1 for _ in self._values.unsaved()) if self._values is not None else 0
            log.error("persist: %s: closed with %d last values that the disk did not take", self._names.path, count)
        unfinished.discard(self)


def _numbers(key: bytes, stid: bytes) -> tuple[int, int]:
    return int.from_bytes(key, "big"), int.from_bytes(stid, "big")


def _row(key: bytes, stid: bytes, frame: bytes, source: Identity | None) -> Row:
    tid, sub = _numbers(key, stid)
    payload = frame[smq.PUBLISH_HEADER_BYTES :]
    text = _source(source)
    return tid, sub, payload, text, _checksum(tid, sub, payload, text)


def _checksum(tid: int, stid: int, payload: bytes, source: str) -> int:
    return zlib.crc32(b"%d %d %b %b" % (tid, stid, source.encode(), payload))


def _source(identity: Identity | None) -> str:
    """Who published, as text: what decides over rights, and no secrets."""
    if identity is None:
        return ""
    client_id = identity.client_id.decode("utf-8", "surrogateescape")
    return json.dumps([identity.user, list(identity.groups), identity.method.value, client_id])


def _identity(source: str) -> Identity | None:
    if not source:
        return None
    try:
        user, groups, method, client_id = json.loads(source)
        return Identity(user, tuple(groups), Method(method), client_id.encode("utf-8", "surrogateescape"))
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(f"persist: {source!r} names no publisher: {error}") from None
