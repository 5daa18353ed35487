"""Tables of MQTT sessions and retained messages in the `persist` file of a hub."""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from smqrt.broker.mqtt.ledger import RECEIVED, Group
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.saved_sessions import SavedRow, restored_message

SCHEMAS = (
    "CREATE TABLE IF NOT EXISTS mqtt_retained (name BLOB PRIMARY KEY, payload BLOB, qos INTEGER, properties BLOB,"
    " expires REAL, checksum INTEGER) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS mqtt_sessions (id TEXT PRIMARY KEY, record TEXT, checksum INTEGER) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS mqtt_messages (number INTEGER PRIMARY KEY, name BLOB, payload BLOB, qos INTEGER,"
    " retain INTEGER, properties BLOB, expires REAL, identifiers BLOB, checksum INTEGER)",
    "CREATE TABLE IF NOT EXISTS mqtt_queue (number INTEGER PRIMARY KEY, session INTEGER, position INTEGER,"
    " state INTEGER, packet INTEGER, message INTEGER, checksum INTEGER)",
    "CREATE TABLE IF NOT EXISTS mqtt_hub (identity BLOB, start INTEGER)",
    "CREATE TABLE IF NOT EXISTS mqtt_streams (stream INTEGER PRIMARY KEY, number INTEGER, used REAL)",
    "CREATE TABLE IF NOT EXISTS mqtt_nodes (identity BLOB PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS mqtt_origins (message INTEGER PRIMARY KEY, origin BLOB)",
)
"""A message that several sessions wait for is one row of `mqtt_messages`."""


class DamagedError(Exception):
    """A row was changed by something else."""


# ---- writing


def write(connection: sqlite3.Connection, group: Group, shift_s: float) -> None:
    """Write a group, within a transaction.

    Args:
        connection: the file.
        group: the changes.
        shift_s: what is added to times, in seconds: the file has those of `time.time`.

    Raises:
        sqlite3.Error: the file can't be written.
    """
    messages = [_message_row(number, one, shift_s) for number, one in group.messages]
    rows = [(*row, _checksum(repr(row).encode())) for row in group.rows]
    origins = [(number, one.origin.to_bytes(16, "big")) for number, one in group.messages if one.origin]
    gone_messages = [(number,) for number in group.gone_messages]
    for statement, values in (
        ("INSERT OR REPLACE INTO mqtt_messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", messages),
        ("INSERT OR REPLACE INTO mqtt_queue VALUES (?, ?, ?, ?, ?, ?, ?)", rows),
        ("DELETE FROM mqtt_queue WHERE number = ?", [(number,) for number in group.gone_rows]),
        ("DELETE FROM mqtt_messages WHERE number = ?", gone_messages),
        ("INSERT OR REPLACE INTO mqtt_origins VALUES (?, ?)", origins),
        ("DELETE FROM mqtt_origins WHERE message = ?", gone_messages if _has_origins(connection, origins) else []),
    ):
        if values:  # each call releases the lock of the interpreter
            connection.executemany(statement, values)
    for client_id, record in group.records.items():
        if record is None:
            connection.execute("DELETE FROM mqtt_sessions WHERE id = ?", (client_id,))
        else:
            text = json.dumps(shifted(record, shift_s), default=_text_of)
            row = client_id, text, _checksum(client_id.encode(), text.encode())
            connection.execute("INSERT OR REPLACE INTO mqtt_sessions VALUES (?, ?, ?)", row)
    if group.streams:
        streams = [(_signed(stream), number, time.time()) for stream, number in group.streams.items()]
        connection.executemany("INSERT OR REPLACE INTO mqtt_streams VALUES (?, ?, ?)", streams)
    for identity, is_known in group.nodes.items():
        connection.execute("DELETE FROM mqtt_nodes WHERE identity = ?", (identity,))
        if is_known:
            connection.execute("INSERT INTO mqtt_nodes VALUES (?)", (identity,))
    for name, message in group.retained.items():
        if message is None:
            connection.execute("DELETE FROM mqtt_retained WHERE name = ?", (name,))
        else:
            expires = _expires(message, shift_s)
            checksum = _checksum(name, message.payload, message.properties, str(expires).encode())
            retained = name, message.payload, message.qos, message.properties, expires, checksum
            connection.execute("INSERT OR REPLACE INTO mqtt_retained VALUES (?, ?, ?, ?, ?, ?)", retained)


def _has_origins(connection: sqlite3.Connection, new: list[tuple[int, bytes]]) -> bool:
    """Return whether messages of the file have ids: only in a cluster."""
    return bool(new) or connection.execute("SELECT 1 FROM mqtt_origins LIMIT 1").fetchone() is not None


def _signed(number: int) -> int:
    """Return an unsigned 64-bit number in the form of SQLite."""
    return number - (1 << 64) if number >> 63 else number


def begin_start(connection: sqlite3.Connection, identity: bytes) -> tuple[bytes, int]:
    """Count a start, and return the identity of the sessions in the file with the number of the start.

    Args:
        connection: the file.
        identity: the identity of a new file.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        found = connection.execute("SELECT identity, start FROM mqtt_hub").fetchone()
        known, start = found or (identity, 0)
        connection.execute("DELETE FROM mqtt_hub")
        connection.execute("INSERT INTO mqtt_hub VALUES (?, ?)", (known, start + 1))
    return known, start + 1


def nodes(connection: sqlite3.Connection) -> list[bytes]:
    """Return the identities of the other hubs of the cluster."""
    return [identity for (identity,) in connection.execute("SELECT identity FROM mqtt_nodes").fetchall()]


def streams(connection: sqlite3.Connection, limit: int) -> dict[int, int]:
    """Return the last numbers of the streams that were used last, at most `limit`; remove others."""
    rows = connection.execute("SELECT stream, number FROM mqtt_streams ORDER BY used DESC LIMIT ?", (limit,)).fetchall()
    if len(rows) == limit:
        connection.execute(
            "DELETE FROM mqtt_streams WHERE stream NOT IN (SELECT stream FROM mqtt_streams ORDER BY used DESC LIMIT ?)",
            (limit,),
        )
    return {stream & (1 << 64) - 1: number for stream, number in reversed(rows)}


def _message_row(number: int, message: Message, shift_s: float) -> tuple[object, ...]:
    expires = _expires(message, shift_s)
    flags = b"%d %d %d %a" % (number, message.qos, message.retain, expires)
    checksum = _checksum(message.name, message.payload, message.properties, message.identifiers, flags)
    name, payload, properties, identifiers = message.name, message.payload, message.properties, message.identifiers
    return number, name, payload, message.qos, int(message.retain), properties, expires, identifiers, checksum


def _expires(message: Message, shift_s: float) -> float | None:
    return None if message.expires_s == NO_EXPIRY_S else message.expires_s + shift_s


def remove_unused(connection: sqlite3.Connection, sessions: list[int]) -> None:
    """Remove the rows of sessions that have ended, and messages without a row; within a transaction.

    Args:
        connection: the file.
        sessions: the numbers of the sessions that are kept.
    """
    connection.execute("CREATE TEMP TABLE mqtt_kept (session INTEGER PRIMARY KEY)")
    connection.executemany("INSERT OR IGNORE INTO mqtt_kept VALUES (?)", [(number,) for number in sessions])
    connection.execute("DELETE FROM mqtt_queue WHERE session NOT IN (SELECT session FROM mqtt_kept)")
    connection.execute("DROP TABLE mqtt_kept")
    connection.execute(
        "DELETE FROM mqtt_messages WHERE number NOT IN (SELECT message FROM mqtt_queue WHERE message IS NOT NULL)"
    )
    connection.execute("DELETE FROM mqtt_origins WHERE message NOT IN (SELECT number FROM mqtt_messages)")


# ---- reading


def retained_messages(connection: sqlite3.Connection, shift_s: float) -> Iterator[Message]:
    """Return the retained messages.

    Args:
        connection: the file.
        shift_s: what is added to times, in seconds.

    Raises:
        DamagedError: a row was changed.
        sqlite3.Error: the file can't be read.
    """
    with closing(connection.execute("SELECT * FROM mqtt_retained")) as found:
        for name, payload, qos, properties, expires, checksum in found:
            if checksum != _checksum(name, payload, properties, str(expires).encode()):
                raise DamagedError(f"the retained message of {name!r} was changed")
            yield Message(name, payload, qos, True, properties, NO_EXPIRY_S if expires is None else expires + shift_s)


def session_records(connection: sqlite3.Connection, shift_s: float) -> Iterator[dict[str, Any]]:
    """Return the records of sessions; arguments and errors as `retained_messages`."""
    with closing(connection.execute("SELECT * FROM mqtt_sessions")) as found:
        for client_id, text, checksum in found:
            if checksum != _checksum(client_id.encode(), text.encode()):
                raise DamagedError(f"the session of {client_id!r} was changed")
            yield shifted(_DECODER.decode(text), shift_s)


def messages(connection: sqlite3.Connection, shift_s: float) -> dict[int, Message]:
    """Return the messages of sessions by key; arguments and errors as `retained_messages`."""
    kept: dict[int, Message] = {}
    with closing(connection.execute("SELECT * FROM mqtt_messages")) as found:
        for number, name, payload, qos, retain, properties, expires, identifiers, checksum in found:
            flags = b"%d %d %d %a" % (number, qos, retain, expires)
            if checksum != _checksum(name, payload, properties, identifiers, flags):
                raise DamagedError(f"message {number} of {name!r} was changed")
            expires = None if expires is None else expires + shift_s
            record = [name, payload, qos, bool(retain), properties, expires, identifiers]
            kept[number] = restored_message(number, record)
    with closing(connection.execute("SELECT message, origin FROM mqtt_origins")) as found:
        for number, origin in found:
            if number in kept:
                kept[number].origin = int.from_bytes(origin, "big")
    return kept


def queues(connection: sqlite3.Connection, known: dict[int, Message]) -> dict[int, list[SavedRow]]:
    """Return the rows of sessions by the number of the session, in order.

    Args:
        connection: the file.
        known: the messages.

    Raises:
        DamagedError: a row was changed, or its message is missing.
        sqlite3.Error: the file can't be read.
    """
    rows: dict[int, list[SavedRow]] = {}
    with closing(connection.execute("SELECT * FROM mqtt_queue ORDER BY position")) as found:
        for *row, checksum in found:
            if checksum != _checksum(repr(tuple(row)).encode()):
                raise DamagedError(f"row {row[0]} of the MQTT sessions was changed")
            number, session, position, state, packet, message = row
            if message is not None and message not in known:
                raise DamagedError(f"message {message} of the MQTT sessions is missing")
            rows.setdefault(session, []).append(SavedRow(number, position, state, packet, message))
    return rows


def next_number(connection: sqlite3.Connection, records: list[dict[str, Any]]) -> int:
    """Return the first number that nothing in the file has."""
    # The position of a received packet identifier is the id of its message.
    largest = f"CASE state WHEN {RECEIVED} THEN number ELSE max(number, position) END"
    queue = connection.execute(f"SELECT max({largest}) FROM mqtt_queue").fetchone()[0] or 0
    message = connection.execute("SELECT max(number) FROM mqtt_messages").fetchone()[0] or 0
    sessions = max((int(record.get("number", 0)) for record in records), default=0)
    return 1 + max(int(queue), int(message), sessions)


def shifted(record: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the record of a session with its times on another clock."""
    found = dict(record)
    if found["ends_s"] is not None:
        found["ends_s"] += seconds
    if found.get("will") is not None:
        message, delay_s, expiry_s, due_s = found["will"]
        found["will"] = [message, delay_s, expiry_s, None if due_s is None else due_s + seconds]
    if "waiting" in found:  # the former layout

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
    return b64decode(found["b64"]) if len(found) == 1 and "b64" in found else found


_DECODER = json.JSONDecoder(object_hook=_bytes_of)
"""`json.loads` would make one for each record."""


def _checksum(*parts: bytes) -> int:
    return zlib.crc32(b"\0".join(parts))
