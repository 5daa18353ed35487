"""Topic names keep their numbers over restarts: one SQLite file per hub, committed before the client is told."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable

from smqrt.errors import ArgumentError

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS names (kind TEXT, name BLOB, number INTEGER, checksum INTEGER,"
    " PRIMARY KEY (kind, name), UNIQUE (kind, number)) WITHOUT ROWID"
)


class SqliteNames:
    """A `NameStore` in an SQLite file in WAL mode; each name is committed and synced when `add` returns.

    Args:
        path: the file; it is made with mode 0600 when it does not exist.

    Raises:
        ArgumentError: the file can't be opened or is no such database.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ArgumentError(f"persist: {path}: {error}; give a file that this process may write") from error

    def load(self, kind: str) -> Iterable[tuple[bytes, int]]:
        """See `NameStore`."""
        try:
            rows = self._connection.execute(
                "SELECT name, number, checksum FROM names WHERE kind = ?", (kind,)
            ).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from error
        for name, number, checksum in rows:
            if not (isinstance(name, bytes) and isinstance(number, int) and 0 < number < 1 << 32):
                raise self._unusable(f"{name!r} has the number {number!r}")
            if checksum != _checksum(kind, name, number):
                raise self._unusable(f"{name!r} was changed")
        return [(name, number) for name, number, _ in rows]

    def _unusable(self, fault: str) -> ArgumentError:
        return ArgumentError(f"persist: {self._path}: {fault}; restore it from a backup or remove it")

    def add(self, kind: str, name: bytes, number: int) -> None:
        """See `NameStore`."""
        row = kind, name, number, _checksum(kind, name, number)
        self._connection.execute("INSERT INTO names VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        """See `NameStore`."""
        self._connection.close()


def _checksum(kind: str, name: bytes, number: int) -> int:
    return zlib.crc32(b"%b %d %b" % (kind.encode(), number, name))
