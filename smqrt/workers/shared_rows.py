"""Rows that the workers of a server share, in an SQLite file.

Each worker keeps a copy of the rows in memory, and calls `changes` to read the rows that other workers have written.
The file is in the folder of the workers. Rows are encrypted with a key that is lost when the server ends.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import sqlite3
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent import monkey

from smqrt.errors import StartError
from smqrt.settings.limits import Limit, LineLimit

log = logging.getLogger("smqrt")

FORMAT = 1
"""A part of the file name. Processes with different formats, as during a hot restart, use different files."""
ENDED_S = 60.0
"""Time for which deletions are kept, so that other workers can read them."""
MISSED_S = ENDED_S / 2
"""A worker that has not read for this time may have missed deletions, and reads all rows again."""
LOCK_S = 0.010
"""The maximum time that a write blocks this process while another worker writes; then the write is postponed."""
AGAIN_S = 0.050
"""If a write did not get the lock, later writes do not wait for it during this time. After another error, such as a
full disk, no write is tried during this time."""
OPEN_S = 5.0
MAX_READ, MAX_READ_BYTES = 1000, 1 << 20  # in one call: about 10 ms
MAX_WRITTEN, MAX_TRANSACTIONS = 200, 5  # rows in a transaction, and transactions in a call: about 2 ms, 10 ms
PAGE_BYTES = 1024  # SQLite writes whole pages, and a row is small
MAX_WAITING = 50_000
"""The maximum number of postponed writes, for example when the disk is full; the oldest are dropped."""
RETRY_LOCK_S = 0.0005
WAITING = Limit("worker_changes", "", "too many changes for other workers wait, since they can't be written")
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
# A deleted row has NULL as its data until `ENDED_S` have passed, so that other workers read the deletion. Each write
# has a new version, by which `changes` finds it.
_NEW = "SELECT version, owner, name, data, writer FROM rows WHERE version > ? ORDER BY version LIMIT ?"
_PUT = "INSERT OR REPLACE INTO rows (owner, name, data, writer, until_s) SELECT ?1, ?2, ?3, ?4, ?5"
# Only while the head row (?6) of the owner exists: another worker may have ended the owner.
_PUT_IF = f"{_PUT} WHERE EXISTS (SELECT 1 FROM rows WHERE owner = ?1 AND name = ?6 AND data IS NOT NULL)"
_END = "DELETE FROM rows WHERE owner = ?"
_OLD = "DELETE FROM rows WHERE version IN (SELECT version FROM rows WHERE until_s < ? LIMIT ?)"
_OWNERS = "SELECT owner FROM rows WHERE name = ? AND data IS NOT NULL"


class Row(NamedTuple):
    """A row that another worker has written; `data` is None for a deleted row."""

    owner: int
    name: bytes
    data: bytes | None


class SharedRows:
    """Rows by owner and name. An owner exists while its head row exists; its other rows are written only then.

    The owner 0 needs no head row. When the lock is taken or the disk is full, a write is postponed until the next one.
    No call blocks the process for longer than about 20 ms.

    Args:
        directory: the folder of the workers of this server.
        secret: the secret of the workers of this server.
        head: the name of head rows.

    Attributes:
        writer: the number of this process among all processes that have opened the rows, from 1.
        is_complete: whether the last call of `changes` returned all changes.

    Raises:
        StartError: the file can't be created; the text is one sentence.
    """

    def __init__(self, directory: Path, secret: bytes, head: bytes) -> None:
        self._head = head
        self._cipher = AESGCM(hmac.digest(secret, b"rows of workers", "sha256"))
        self._last_version, self._read_at_s = 0, monotonic()
        self.is_complete = False
        self._waiting: deque[tuple[object, ...]] = deque()
        self._depth = 0
        self._no_wait_until_s = self._rest_until_s = 0.0
        self._lines = LineLimit()
        try:
            self._db = sqlite3.connect(directory / f"shared-{FORMAT}.db", isolation_level=None, timeout=OPEN_S)
            self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = OFF")  # rows need not survive a power failure, which ends the server
            self._db.executescript(_TABLES)
            self.writer = self._db.execute("INSERT INTO writers DEFAULT VALUES").lastrowid or 0
            self._db.execute("PRAGMA busy_timeout = 0")  # SQLite would block the loop; see `_execute_with_lock`
        except sqlite3.Error as error:
            raise StartError(f"The workers can't share rows in {directory}: {error}; set TMPDIR.") from None
        self._next_nonce = itertools.count().__next__

    # ---- reading

    def changes(self) -> list[Row]:
        """Return the rows that other workers have changed since the last call, with their last state, the oldest first.

        There may be more rows; see `is_complete`.
        """
        rows: list[Row] = []
        if self._waiting and not self._depth:
            self.write()
        try:
            with closing(self._db.execute(_NEW, (self._last_version, MAX_READ))) as cursor:
                # Closed in any case: an open cursor prevents SQLite from restarting the WAL file.
                size_bytes = count = 0
                for version, owner, name, sealed, writer in cursor:
                    self._last_version, count = version, count + 1
                    if writer != self.writer:
                        data = None
                        if sealed is not None:
                            nonce, text = sealed[: _NONCE.size], sealed[_NONCE.size :]
                            with suppress(InvalidTag):  # not written by a worker of this server
                                data = self._cipher.decrypt(nonce, text, b"%d %b" % (owner, name))
                        rows.append(Row(owner, name, data))
                        size_bytes += len(sealed or b"")
                        if size_bytes > MAX_READ_BYTES:
                            break
                self.is_complete = count < MAX_READ and size_bytes <= MAX_READ_BYTES
        except sqlite3.Error as error:
            self._complain("read", error)
        else:
            self._read_at_s = monotonic()
        return rows

    def owners_if_missed(self) -> set[int] | None:
        """If this worker may have missed deletions, return the existing owners, and restart `changes` from the start.

        Returns:
            None when it has read within the last `MISSED_S`.
        """
        if monotonic() - self._read_at_s < MISSED_S or self._waiting:
            return None
        try:
            owners = {owner for (owner,) in self._db.execute(_OWNERS, (self._head,))}
        except sqlite3.Error:
            return None
        self._last_version, self._read_at_s = 0, monotonic()
        return owners

    # ---- writing

    def put(self, owner: int, name: bytes, data: bytes | None, keep_s: float | None = None) -> None:
        """Write a row.

        Args:
            owner: the number of the owner; 0 for rows without an owner.
            name: the name of the row.
            data: the content; None to delete the row.
            keep_s: how long the row is kept; None: as long as its owner exists.
        """
        if data is None:
            keep_s = ENDED_S
        until_s = None if keep_s is None else time() + keep_s
        sealed = None
        if data is not None:
            nonce = _NONCE.pack(self.writer, self._next_nonce())
            sealed = nonce + self._cipher.encrypt(nonce, data, b"%d %b" % (owner, name))
        needs_no_head = owner == 0 or (name == self._head and data is not None)
        row = (owner, name, sealed, self.writer, until_s)
        self._add((_PUT, *row) if needs_no_head else (_PUT_IF, *row, self._head))

    def end(self, owner: int) -> None:
        """Delete all rows of an owner."""
        with self.together():
            self._add((_END, owner))
            self._add((_PUT, owner, self._head, None, self.writer, time() + ENDED_S))

    def _add(self, step: tuple[object, ...]) -> None:
        self._waiting.append(step)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            WAITING.refused("a change")
        if not self._depth:
            self.write()

    @contextmanager
    def together(self, alone: bool = False) -> Iterator[bool]:
        """Combine the writes of the `with` block in one transaction; the block must not switch greenlets.

        Args:
            alone: prevent other workers from writing meanwhile, so that the result of `changes` remains valid.

        Returns:
            Whether `alone` succeeded: it fails if another worker has the lock. False without `alone`.
        """
        is_exclusive = alone and not self._depth and self.write() and self._begin()
        self._depth += 1
        try:
            yield is_exclusive
        finally:
            self._depth -= 1
            if is_exclusive:
                self._write_begun()
            elif not self._depth:
                self.write()

    def write(self) -> bool:
        """Write postponed rows in at most `MAX_TRANSACTIONS` transactions; return whether all are written."""
        if self._waiting and monotonic() < self._rest_until_s:
            return False
        for _ in range(MAX_TRANSACTIONS):
            if len(self._waiting) < 2:
                for sql, *values in self._waiting:  # a single row needs no explicit transaction
                    if not self._execute_with_lock(str(sql), values):
                        return False
                self._waiting.clear()
                return True
            if not self._begin() or not self._write_begun():
                return False
        return not self._waiting

    def purge(self) -> bool:
        """Delete some of the expired rows; return whether there may be more."""
        if not self._begin():
            return False
        try:
            count = self._db.execute(_OLD, (time(), MAX_WRITTEN)).rowcount
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(error)
            return False
        return count == MAX_WRITTEN

    def _begin(self) -> bool:
        return self._execute_with_lock("BEGIN IMMEDIATE", ())

    def _execute_with_lock(self, sql: str, values: Sequence[Any]) -> bool:
        """Execute a statement that needs the write lock, within `LOCK_S`; return whether it was executed."""
        until_s = monotonic() + LOCK_S
        while True:
            try:
                self._db.execute(sql, values)
                return True
            except sqlite3.Error as error:
                now_s = monotonic()
                if "locked" not in str(error):
                    self._roll_back(error)
                    return False
                if now_s >= until_s or now_s < self._no_wait_until_s:
                    self._no_wait_until_s = max(self._no_wait_until_s, now_s + AGAIN_S)
                    self._complain("written", error)
                    return False
            _sleep(RETRY_LOCK_S)  # blocks the loop, since a switch of greenlets would break `together`

    def _write_begun(self) -> bool:
        """Write postponed rows, at most `MAX_WRITTEN`, and commit; return whether that succeeded."""
        steps = list(itertools.islice(self._waiting, MAX_WRITTEN))
        try:
            for sql, *values in steps:
                self._db.execute(str(sql), values)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back(error)
            return False
        for _ in steps:
            self._waiting.popleft()
        return True

    def _roll_back(self, error: sqlite3.Error) -> None:
        with suppress(sqlite3.Error):
            self._db.execute("ROLLBACK")
        self._rest_until_s = monotonic() + AGAIN_S
        self._complain("written", error)

    def _complain(self, done: str, error: sqlite3.Error) -> None:
        self._lines.warn(f"shared rows of the workers can't be {done} now; trying again: {error}")
