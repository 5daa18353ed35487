"""Rows that the workers of a server share, in an SQLite file.

Each worker keeps a copy of the rows in memory. It reads what the others have written when it next asks for `changes`.
The file is in the folder of the workers. Rows are encrypted with a key that ends with the server.
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
"""Part of the file's name: workers of two versions of smqrt, as at a hot restart, use different files."""
ENDED_S = 60.0
"""How long deletions are kept, so that other workers read them."""
MISSED_S = ENDED_S / 2
"""A worker that has not read for this long may have missed deletions, and reads all rows again."""
LOCK_S = 0.010
"""How long a write blocks this process while another worker writes; then the write is postponed."""
AGAIN_S = 0.050
"""After a write that did not get the lock, the next ones don't wait for it during this time; after another failure,
such as a full disk, nothing is tried during this time."""
OPEN_S = 5.0
MAX_READ, MAX_READ_BYTES = 1000, 1 << 20  # in one call: about 10 ms
MAX_WRITTEN, MAX_TRANSACTIONS = 200, 5  # rows in a transaction, and transactions in a call: about 2 ms, 10 ms
PAGE_BYTES = 1024  # SQLite writes whole pages, and a row is small
MAX_WAITING = 50_000
"""Postponed writes, with a full disk for example; the oldest are dropped."""
RETRY_LOCK_S = 0.0005
WAITING = Limit("worker_changes", "", "changes for other workers can't be written, and too many of them wait")
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
    """A row that another worker has written; `data` is None when it deleted the row."""

    owner: int
    name: bytes
    data: bytes | None


class SharedRows:
    """Rows by owner and name. The head row of an owner exists while the owner does; its other rows need it.

    Rows of the owner 0 need no head. A write that fails, since another worker holds the lock or the disk is full, is
    postponed and repeated with the next one. No call blocks the process for longer than about 20 ms.

    Args:
        directory: of the workers of this server.
        secret: of the workers of this server.
        head: the name of an owner's head row.

    Attributes:
        writer: the number of this process among all that ever opened the rows, from 1.
        is_complete: whether the last `changes` returned all that there were.

    Raises:
        StartError: the file can't be created; one sentence.
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
            self._db.execute("PRAGMA synchronous = OFF")  # the rows end with the server: a power failure ends both
            self._db.executescript(_TABLES)
            self.writer = self._db.execute("INSERT INTO writers DEFAULT VALUES").lastrowid or 0
            self._db.execute("PRAGMA busy_timeout = 0")  # SQLite would block the loop; see `_execute_with_lock`
        except sqlite3.Error as error:
            raise StartError(f"The workers can't share rows in {directory}: {error}; set TMPDIR.") from None
        self._next_nonce = itertools.count().__next__

    # ---- reading

    def changes(self) -> list[Row]:
        """Return the last state of each row that other workers have changed since the last call, the oldest first.

        There may be more, see `is_complete`.
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
                        data = None if sealed is None else self._decrypt(owner, name, sealed)
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

    def living_if_missed(self) -> set[int] | None:
        """Return the owners that exist, if this worker may have missed deletions, since it has not read for `MISSED_S`.

        `changes` then begins again with all rows. Otherwise return None.
        """
        if monotonic() - self._read_at_s < MISSED_S or self._waiting:
            return None
        try:
            living = {owner for (owner,) in self._db.execute(_OWNERS, (self._head,))}
        except sqlite3.Error:
            return None
        self._last_version, self._read_at_s = 0, monotonic()
        return living

    # ---- writing

    def put(self, owner: int, name: bytes, data: bytes | None, keep_s: float | None = None) -> None:
        """Write a row.

        Args:
            owner: its number, 0 for rows without an owner.
            name: of the row.
            data: None to delete it.
            keep_s: how long it is needed; None: as long as its owner exists.
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
        """Write in one transaction what the `with` block writes; the block must not switch greenlets.

        Args:
            alone: exclude other workers from writing meanwhile: the result of `changes` inside stays valid.

        Returns:
            whether `alone` succeeded, as it does unless another worker holds the lock; False without `alone`.
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
        """Write postponed rows, at most `MAX_TRANSACTIONS` transactions; return whether all are written."""
        if self._waiting and monotonic() < self._rest_until_s:
            return False
        for _ in range(MAX_TRANSACTIONS):
            if len(self._waiting) < 2:
                for sql, *values in self._waiting:  # a single row needs no transaction around it
                    if not self._execute_with_lock(str(sql), values):
                        return False
                self._waiting.clear()
                return True
            if not self._begin() or not self._write_begun():
                return False
        return not self._waiting

    def purge(self) -> bool:
        """Delete some of the rows that are not needed any more; return whether there may be more."""
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
            _sleep(RETRY_LOCK_S)  # blocks the loop: a switch would break `together`

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

    def _decrypt(self, owner: int, name: bytes, sealed: bytes) -> bytes | None:
        try:
            nonce, text = sealed[: _NONCE.size], sealed[_NONCE.size :]
            return self._cipher.decrypt(nonce, text, b"%d %b" % (owner, name))
        except InvalidTag:  # not written by a worker of this server
            return None
