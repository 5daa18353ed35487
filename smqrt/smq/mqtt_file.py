"""MQTT sessions and retained messages in the `persist` file of a hub.

Retained messages are written `sync_s` seconds after a change, sessions within `SESSIONS_S`, and both when the hub is
closed. After a crash, changes of these times may be missing.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Any

import gevent

from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.records import restore_session, session_record
from smqrt.smq.persist_file import CLOSE_S, VALUES_RETRY_S, SqliteNames, unfinished

log = logging.getLogger("smqrt")

SESSIONS_S = 10.0
"""Time from the change of a session to its commit: its waiting messages are written as a whole."""
GROUP_ROWS = 500
"""Maximum number of rows in one commit."""
GROUP_BYTES = 1 << 20
"""Maximum size of the messages in one commit, approximately: they are encoded in the thread of the loop."""
_RETAINED = (
    "CREATE TABLE IF NOT EXISTS mqtt_retained (name BLOB PRIMARY KEY, payload BLOB, qos INTEGER, properties BLOB,"
    " expires REAL, checksum INTEGER) WITHOUT ROWID"
)
_SESSIONS = (
    "CREATE TABLE IF NOT EXISTS mqtt_sessions (id TEXT PRIMARY KEY, record TEXT, checksum INTEGER) WITHOUT ROWID"
)
Row = tuple[object, ...]


class SqliteMqtt:
    """Saves the MQTT sessions and retained messages of a hub.

    Args:
        names: the file.
        devices: the MQTT clients of the hub.
        sync_s: seconds from a change of a retained message to its commit.

    Raises:
        ArgumentError: the file can't be used, or was damaged.
    """

    def __init__(self, names: SqliteNames, devices: Devices, sync_s: float) -> None:
        self._names, self._devices, self._sync_s = names, devices, sync_s
        self._writer: gevent.Greenlet[..., None] | None = None
        self._due_s = 0.0
        self._is_closed = self._is_writing = self._failure_logged = False
        try:
            for schema in (_RETAINED, _SESSIONS):
                names.connection.execute(schema)
            self._load()
        except sqlite3.Error as error:
            raise names.unusable(str(error)) from error
        devices.on_changed = self._wake
        if devices.changed_names or devices.changed_sessions:
            self._wake(False)
        names.at_close.append(self.close)

    # ---- reading

    def _load(self) -> None:
        connection, devices, now_s = self._names.connection, self._devices, time.time()
        to_clock_s = devices.broker.clock() - now_s
        names_before, ids_before = (
            set(devices.retained.by_name),
            set(devices.sessions),
        )  # of a hot restart: they are newer
        for name, payload, qos, properties, expires, checksum in connection.execute("SELECT * FROM mqtt_retained"):
            if checksum != _checksum(name, payload, properties, str(expires).encode()):
                raise self._names.unusable(f"the retained message of {name!r} was changed")
            expires_s = NO_EXPIRY_S if expires is None else expires + to_clock_s
            if name not in names_before and (expires is None or expires > now_s):
                devices.retained.set(Message(name, payload, qos, True, properties, expires_s))
        for client_id, text, checksum in connection.execute("SELECT * FROM mqtt_sessions"):
            if checksum != _checksum(client_id.encode(), text.encode()):
                raise self._names.unusable(f"the session of {client_id!r} was changed")
            record = json.loads(text, object_hook=_bytes_of)
            if client_id not in ids_before:
                restore_session(devices, _shifted(record, to_clock_s))
        devices.changed_names = dict.fromkeys(names_before)
        devices.changed_sessions = dict.fromkeys(ids_before)

    # ---- writing

    def _wake(self, is_session: bool) -> None:
        """Write soon: something has changed."""
        if self._is_closed:
            return
        due_s = time.monotonic() + (SESSIONS_S if is_session else self._sync_s)
        if self._writer is not None:
            if self._is_writing or due_s >= self._due_s - 0.01:
                return
            self._writer.kill(block=False)
        self._start(due_s)

    def _start(self, due_s: float) -> None:
        unfinished.add(self)
        self._due_s = due_s
        self._writer = gevent.spawn_later(max(due_s - time.monotonic(), 0), self._write)

    def _write(self) -> None:
        self._is_writing = True
        try:
            while self._write_group(self._retained_rows, self._devices.changed_names):
                pass
            while self._write_group(self._session_rows, self._devices.changed_sessions):
                pass
        except (sqlite3.Error, OSError) as error:
            if not self._failure_logged:
                self._failure_logged = True
                path = self._names.path
                log.error("persist: %s: %s; MQTT sessions and retained messages are not saved until then", path, error)
            if not self._is_closed:
                self._start(time.monotonic() + VALUES_RETRY_S)
                return
        finally:
            self._is_writing = False
        self._writer = None
        unfinished.discard(self)
        if not self._is_closed and (self._devices.changed_names or self._devices.changed_sessions):
            self._start(time.monotonic() + self._sync_s)  # changed while the last group was written

    def _write_group(
        self, rows_of: Callable[[dict[Any, None]], tuple[str, list[Row], str, list[Row]]], changed: dict[Any, None]
    ) -> bool:
        """Write a group of changes; return False when there are none."""
        if not changed:
            return False
        taken: dict[Any, None] = {}
        size = 0
        while changed and len(taken) < GROUP_ROWS and size < GROUP_BYTES:
            key = next(iter(changed))
            del changed[key]
            taken[key] = None
            size += self._devices.saved_bytes(key)
        try:
            self._names.disk.call(self._commit, *rows_of(taken))
        except (sqlite3.Error, OSError):
            changed.update(taken)
            raise
        if self._failure_logged:
            self._failure_logged = False
            log.warning("persist: %s: MQTT sessions and retained messages are saved again", self._names.path)
        return True

    def _retained_rows(self, names: dict[bytes, None]) -> tuple[str, list[Row], str, list[Row]]:
        """Return the statements and rows that write changed retained messages, and remove deleted ones."""
        rows: list[Row] = []
        shift_s = time.time() - self._devices.broker.clock()
        retained = self._devices.retained.by_name
        for name in names:
            found = retained.get(name)
            if found is not None:
                expires = None if found.expires_s == NO_EXPIRY_S else found.expires_s + shift_s
                checksum = _checksum(name, found.payload, found.properties, str(expires).encode())
                rows.append((name, found.payload, found.qos, found.properties, expires, checksum))
        removed: list[Row] = [(name,) for name in names if name not in retained]
        statement = "INSERT OR REPLACE INTO mqtt_retained VALUES (?, ?, ?, ?, ?, ?)"
        return statement, rows, "DELETE FROM mqtt_retained WHERE name = ?", removed

    def _session_rows(self, ids: dict[str, None]) -> tuple[str, list[Row], str, list[Row]]:
        """Return the statements and rows that write changed sessions, and remove those that have ended."""
        rows: list[Row] = []
        shift_s = time.time() - self._devices.broker.clock()
        kept = {one for one in ids if (found := self._devices.sessions.get(one)) is not None and found.expiry_s}
        for client_id in kept:
            record = _shifted(session_record(self._devices.sessions[client_id]), shift_s)
            text = json.dumps(record, default=_text_of)
            rows.append((client_id, text, _checksum(client_id.encode(), text.encode())))
        removed: list[Row] = [(client_id,) for client_id in ids if client_id not in kept]
        statement = "INSERT OR REPLACE INTO mqtt_sessions VALUES (?, ?, ?)"
        return statement, rows, "DELETE FROM mqtt_sessions WHERE id = ?", removed

    def _commit(self, insert: str, rows: Iterable[Row], delete: str, removed: Iterable[Row]) -> None:
        """Write a group. Runs in the thread."""
        connection = self._names.connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(insert, rows)
            connection.executemany(delete, removed)

    def close(self) -> None:
        """Write the last changes; waits for the disk up to `CLOSE_S`. `SqliteNames.close` then closes the file."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_writing and self._writer is not None:
            self._writer.join(CLOSE_S)
        elif self._writer is not None:
            self._writer.kill(block=False)
        if not self._is_writing:
            gevent.spawn(self._write).join(CLOSE_S)
        left = len(self._devices.changed_names) + len(self._devices.changed_sessions)
        if left:
            log.error("persist: %s: closed with %d unsaved MQTT sessions and messages", self._names.path, left)
        unfinished.discard(self)


def _shifted(record: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the record of a session with its times on another clock."""
    found = dict(record)
    if found["ends_s"] is not None:
        found["ends_s"] += seconds

    def moved(message: list[Any] | None) -> list[Any] | None:
        if message is None or message[5] is None:  # `expires_s`, see `records`
            return message
        return [*message[:5], message[5] + seconds, *message[6:]]

    found["waiting"] = [moved(one) for one in found["waiting"]]
    found["in_flight"] = [[number, moved(one)] for number, one in found["in_flight"]]
    return found


def _text_of(value: object) -> dict[str, str]:
    assert isinstance(value, bytes)
    return {"b64": b64encode(value).decode()}


def _bytes_of(found: dict[str, Any]) -> object:
    return b64decode(found["b64"]) if found.keys() == {"b64"} else found


def _checksum(*parts: bytes) -> int:
    return zlib.crc32(b"\0".join(parts))
