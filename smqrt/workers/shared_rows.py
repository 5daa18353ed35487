"""Rows that the workers of a server share: each keeps what it wants of them in memory, and learns what the others have
written when it next looks (SQLite in the folder of the workers; decision 0033)."""

from __future__ import annotations

import hmac
import itertools
import logging
import sqlite3
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent import monkey

from smqrt.errors import StartError
from smqrt.settings.limit_register import Limit, LineLimit

log = logging.getLogger("smqrt")

FORMAT = 1
"""In the file's name: workers of two versions of smqrt, as at a hot restart, never read each other's rows wrongly."""
ENDED_S = 60.0
"""How long it is remembered that rows have gone."""
MISSED_S = ENDED_S / 2
"""Who has not looked for so long may have missed that rows have gone, and reads all of them again."""
LOCK_S = 0.010
"""How long a write holds this process while another worker writes; then it is done later."""
AGAIN_S = 0.050
"""After a write that had to wait in vain the next ones don't wait at all for so long; after another failure, of a full
disk as an example, nothing is tried for so long."""
OPEN_S = 5.0
MOST_READ, MOST_READ_BYTES = 1000, 1 << 20  # at once: 10 ms
MAX_WRITTEN, MAX_TRANSACTIONS = 200, 5  # in one transaction, and at once: 2 ms, 10 ms
PAGE_BYTES = 1024  # pages are written as a whole: a row is small
MOST_WAITING = 50_000
"""Writes that may wait, for a disk that is full as an example; the oldest go."""
WAITING = Limit("worker_changes", "", "what is to be told to other workers can't be written, and too much of it waits")
_NONCE = struct.Struct(">IQ")
_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")

_TABLES = """
CREATE TABLE IF NOT EXISTS rows (
    version INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL,
    name BLOB NOT NULL,
    data BLOB,
    writer INTEGER NOT NULL,
    until_s REAL,
    UNIQUE (owner, name)
);
CREATE INDEX IF NOT EXISTS ends ON rows (until_s) WHERE until_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS writers (writer INTEGER PRIMARY KEY AUTOINCREMENT);
"""
_NEW = "SELECT version, owner, name, data, writer FROM rows WHERE version > ? ORDER BY version LIMIT ?"
_PUT = "INSERT OR REPLACE INTO rows (owner, name, data, writer, until_s) SELECT ?1, ?2, ?3, ?4, ?5"
_PUT_IF = f"{_PUT} WHERE EXISTS (SELECT 1 FROM rows WHERE owner = ?1 AND name = ?6 AND data IS NOT NULL)"
_END = "DELETE FROM rows WHERE owner = ?"
_OLD = "DELETE FROM rows WHERE version IN (SELECT version FROM rows WHERE until_s < ? LIMIT ?)"
_OWNERS = "SELECT owner FROM rows WHERE name = ? AND data IS NOT NULL"


class Row(NamedTuple):
    """A row that another worker has written; `data` is None when it took it away."""

    owner: int
    name: bytes
    data: bytes | None


class SharedRows:
    """Rows by owner and name. A row `head` says that its owner lives: others are written only while it is there.

    The rows of the owner 0, which belong to nobody, need no head. What can't be written at once, since another worker
    holds the lock or the disk is full, waits and is tried again with the next write: nothing here holds the process for
    longer than some 20 ms. What is written is encrypted with a key that ends with the server.

    Args:
        directory: of the workers of this server.
        secret: of the workers of this server.
        head: the name of the row that says that its owner lives.

    Attributes:
        writer: the number of this process among all that ever opened the rows, from 1.
        is_complete: whether the last `changes` gave all that there were.

    Raises:
        StartError: the file can't be made; one sentence.
    """

    def __init__(self, directory: Path, secret: bytes, head: bytes) -> None:
        self._head = head
        self._cipher = AESGCM(hmac.digest(secret, b"rows of workers", "sha256"))
        self._seen, self._looked_s = 0, monotonic()
        self.is_complete = False
        self._waiting: deque[tuple[object, ...]] = deque()
        self._depth = 0
        self._patient_s = self._rest_until_s = 0.0
        self._lines = LineLimit()
        try:
            self._db = _opened(directory / f"shared-{FORMAT}.db")
            self.writer = self._db.execute("INSERT INTO writers DEFAULT VALUES").lastrowid or 0
            self._db.execute("PRAGMA busy_timeout = 0")  # from now on others may be waiting for this process
        except sqlite3.Error as error:
            raise StartError(f"What workers share can't be kept in {directory}: {error}; set TMPDIR.") from None
        self._count = itertools.count().__next__

    # ---- reading

    def changes(self) -> list[Row]:
        """What other workers have written since the last time, the oldest first: of each row the last state. There may
        be more when that is much, see `is_complete`."""
        rows: list[Row] = []
        if self._waiting and not self._depth:
            self.write()
        try:
            cursor = self._db.execute(_NEW, (self._seen, MOST_READ))
            try:
                self.is_complete = self._read(cursor, rows)
            finally:
                cursor.close()  # one that is left in the middle keeps the log from being written anew
        except sqlite3.Error as error:
            self._complain("read", error)
        else:
            self._looked_s = monotonic()
        return rows

    def _read(self, cursor: sqlite3.Cursor, rows: list[Row]) -> bool:
        """Read what there is into `rows`, but no more than may be at once; tell whether that was all."""
        size = count = 0
        for version, owner, name, sealed, writer in cursor:
            self._seen, count = version, count + 1
            if writer != self.writer:
                data = None if sealed is None else self._opened(owner, name, sealed)
                rows.append(Row(owner, name, data))
                size += len(sealed or b"")
                if size > MOST_READ_BYTES:
                    return False
        return count < MOST_READ

    def living_if_missed(self) -> set[int] | None:
        """When this worker has not looked for so long that it may have missed whose rows have gone, as one that was
        stopped: the owners that live, and `changes` gives everything again. Otherwise None."""
        if monotonic() - self._looked_s < MISSED_S or self._waiting:
            return None
        try:
            living = {owner for (owner,) in self._db.execute(_OWNERS, (self._head,))}
        except sqlite3.Error:
            return None
        self._seen, self._looked_s = 0, monotonic()
        return living

    # ---- writing

    def put(self, owner: int, name: bytes, data: bytes | None, keep_s: float | None = None) -> None:
        """Write a row.

        Args:
            data: None to take it away.
            keep_s: how long it is of use; None for as long as its owner lives.
        """
        if data is None:
            keep_s = ENDED_S
        until_s = None if keep_s is None else time() + keep_s
        sealed = None if data is None else self._sealed(owner, name, data)
        is_free = owner == 0 or (name == self._head and data is not None)
        row = (owner, name, sealed, self.writer, until_s)
        self._add((_PUT, *row) if is_free else (_PUT_IF, *row, self._head))

    def end(self, owner: int) -> None:
        """Take all rows of an owner away."""
        with self.together():
            self._add((_END, owner))
            self._add((_PUT, owner, self._head, None, self.writer, time() + ENDED_S))

    def _add(self, step: tuple[object, ...]) -> None:
        self._waiting.append(step)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            WAITING.refused("a change")
        if not self._depth:
            self.write()

    @contextmanager
    def together(self, alone: bool = False) -> Iterator[bool]:
        """Write at once what is written inside; nothing inside may switch greenlets.

        Args:
            alone: keep other workers from writing meanwhile: what `changes` gives inside stays true.

        Returns:
            whether that could be done, as it nearly always can; without `alone` not known yet.
        """
        is_mine = alone and not self._depth and self.write() and self._begin()
        self._depth += 1
        try:
            yield is_mine
        finally:
            self._depth -= 1
            if is_mine:
                self._write_begun()
            elif not self._depth:
                self.write()

    def write(self) -> bool:
        """Write what waits, or as much of it as may be at once; tell whether nothing waits any more."""
        if self._waiting and monotonic() < self._rest_until_s:
            return False
        for _ in range(MAX_TRANSACTIONS):
            if len(self._waiting) < 2:
                return self._write_last()
            if not self._begin() or not self._write_begun():
                return False
        return not self._waiting

    def _write_last(self) -> bool:
        """Write what one step is left of, which needs no transaction around it."""
        for sql, *values in self._waiting:
            if not self._patiently(str(sql), values):
                return False
        self._waiting.clear()
        return True

    def purge(self) -> bool:
        """Forget rows that are of no use any more, some of them; tell whether there may be more."""
        if not self._begin():
            return False
        try:
            count = self._db.execute(_OLD, (time(), MAX_WRITTEN)).rowcount
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo(error)
            return False
        return count == MAX_WRITTEN

    def _begin(self) -> bool:
        return self._patiently("BEGIN IMMEDIATE", ())

    def _patiently(self, sql: str, values: Sequence[Any]) -> bool:
        """Do what needs the lock, unless that takes too long; tell whether it was done."""
        until_s = monotonic() + LOCK_S
        while True:
            try:
                self._db.execute(sql, values)
                return True
            except sqlite3.Error as error:
                now_s = monotonic()
                if "locked" not in str(error):
                    self._undo(error)
                    return False
                if now_s >= until_s or now_s < self._patient_s:
                    self._patient_s = max(self._patient_s, now_s + AGAIN_S)
                    self._complain("written", error)
                    return False
            _sleep(0.0005)

    def _write_begun(self) -> bool:
        """Write what waits, or a part of it, and end the transaction; tell whether that was done."""
        steps = list(itertools.islice(self._waiting, MAX_WRITTEN))
        try:
            for sql, *values in steps:
                self._db.execute(str(sql), values)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo(error)
            return False
        for _ in steps:
            self._waiting.popleft()
        return True

    def _undo(self, error: sqlite3.Error) -> None:
        with suppress(sqlite3.Error):
            self._db.execute("ROLLBACK")
        self._rest_until_s = monotonic() + AGAIN_S
        self._complain("written", error)

    def _complain(self, done: str, error: sqlite3.Error) -> None:
        self._lines.warn(f"what workers share can't be {done} now, and is tried again: {error}")

    # ---- encryption

    def _sealed(self, owner: int, name: bytes, data: bytes) -> bytes:
        nonce = _NONCE.pack(self.writer, self._count())
        return nonce + self._cipher.encrypt(nonce, data, b"%d %b" % (owner, name))

    def _opened(self, owner: int, name: bytes, sealed: bytes) -> bytes | None:
        try:
            nonce, text = sealed[: _NONCE.size], sealed[_NONCE.size :]
            return self._cipher.decrypt(nonce, text, b"%d %b" % (owner, name))
        except InvalidTag:  # written by nobody of this server
            return None


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=OPEN_S)
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = OFF")  # it ends with the server
    db.executescript(_TABLES)
    return db
