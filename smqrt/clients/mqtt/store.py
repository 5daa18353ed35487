"""State of an MQTT client on disk: its unacknowledged messages, and the QoS 2 messages that it is receiving.

All changes are recorded in their order, and a thread writes those that wait as one transaction of SQLite. Nothing is
sent to the broker before the changes that precede it are on disk. A process may therefore be killed at any time:

* A message has its packet identifier on disk before it is sent. After a restart it is sent again with the same one, so
  that the broker recognizes a message of QoS 2 that it has.
* PUBREC is on disk before PUBREL is sent, so that PUBREL is repeated and not the message.
* The packet identifier of a received message of QoS 2 is on disk before the application gets the message, and before
  PUBREC is sent; it is removed before PUBCOMP is sent.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from typing import Any, NamedTuple

import gevent
from gevent import get_hub

from smqrt.clients.mqtt.delivery import Delivery
from smqrt.errors import ArgumentError, ClosedError, QueueFullError, StoreError
from smqrt.loop.threads import DedicatedThreads
from smqrt.wire.mqtt.endpoint import MAX_INFLIGHT, MqttSession, OutgoingMessage

log = logging.getLogger("smqrt.mqtt")

_FORMAT = 1  # `user_version` of the database
_SCHEMA = """
CREATE TABLE client (number INTEGER PRIMARY KEY CHECK (number = 1), identifier TEXT NOT NULL);
CREATE TABLE outgoing (
    sequence INTEGER PRIMARY KEY, packet_identifier INTEGER NOT NULL UNIQUE, topic BLOB NOT NULL, payload BLOB NOT NULL,
    qos INTEGER NOT NULL, retain INTEGER NOT NULL, properties BLOB NOT NULL, is_released INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE incoming (packet_identifier INTEGER PRIMARY KEY);
"""
_INSERT = (
    "INSERT INTO outgoing (packet_identifier, topic, payload, qos, retain, properties, is_released) "
    "VALUES (?, ?, ?, ?, ?, ?, 0)"
)
_DELETE = "DELETE FROM outgoing WHERE packet_identifier = ?"
_RELEASE = "UPDATE outgoing SET is_released = 1 WHERE packet_identifier = ?"
_ADD_INCOMING = "INSERT OR IGNORE INTO incoming VALUES (?)"
_REMOVE_INCOMING = "DELETE FROM incoming WHERE packet_identifier = ?"


class Change(NamedTuple):
    """A statement with its parameters."""

    statement: str
    parameters: tuple[Any, ...]


# ---- in the thread of the database


def _open(path: str) -> sqlite3.Connection:
    """Open or create a database that no other process can open meanwhile."""
    database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found not in (0, _FORMAT):
            raise StoreError(f"store {path}: format {found} is not known. Use the version of smqrt that wrote it.")
        if not found:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT")
        database.execute("BEGIN IMMEDIATE")  # takes the lock
        database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def write_changes(database: sqlite3.Connection, changes: Iterable[Change]) -> None:
    """Write changes as one transaction."""
    database.execute("BEGIN IMMEDIATE")
    try:
        for statement, parameters in changes:
            database.execute(statement, parameters)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


# ---- in the loop


class ClientStore:
    """The database of one client. Opens it in a thread, and blocks the greenlet until then.

    Args:
        path: of the database; created when it does not exist. One client uses it at a time.

    Raises:
        StoreError: the file can't be opened, is no store, or another client uses it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._threads = DedicatedThreads()
        self._changes: list[Change] = []  # recorded, and not in a transaction yet
        self._recorded = self._committed = 0
        self._writing: gevent.Greenlet[[], str | None] | None = None
        self._database: sqlite3.Connection | None = None
        try:
            self._database = self._threads.call(_open, path)
        except sqlite3.Error as error:
            self._threads.close()
            hint = "Another client uses it." if "locked" in str(error) else "Check the path and the permissions."
            raise StoreError(f"store {path}: can't be opened: {error}. {hint}") from None
        except BaseException:
            self._threads.close()
            raise

    def load(self, identifier: str, is_given: bool) -> tuple[str, StoredSession]:
        """Return the client identifier of the store and its session. After an error, the store is closed.

        Args:
            identifier: of the client, saved in a new store.
            is_given: whether the application has chosen it.

        Raises:
            ArgumentError: the store belongs to another client identifier.
            StoreError: the store can't be read or written.
        """
        assert self._database is not None
        try:
            found, outgoing, incoming = self._threads.call(_load, self._database, identifier)
            if is_given and found != identifier:
                raise ArgumentError(f"clientidentifier must be {found!r}, that of the store {self.path}")
        except sqlite3.Error as error:
            self.close()
            raise StoreError(f"store {self.path}: can't be read: {error}. Check the disk.") from None
        except BaseException:
            self.close()
            raise
        return found, StoredSession(self, outgoing, incoming)

    # ---- changes

    def record(self, statement: str, *parameters: object) -> Change:
        """Record a change, which the next transaction writes."""
        change = Change(statement, parameters)
        self._changes.append(change)
        self._recorded += 1
        return change

    def withdraw(self, change: Change) -> bool:
        """Remove a change that is in no transaction yet; return whether it was removed."""
        for at in reversed(range(len(self._changes))):
            if self._changes[at] is change:
                del self._changes[at]
                self._recorded -= 1
                return True
        return False

    @property
    def is_dirty(self) -> bool:
        """Whether some changes are not on disk."""
        return self._committed < self._recorded

    def commit(self) -> None:
        """Block this greenlet until all changes that are recorded now are on disk.

        Raises:
            StoreError: the disk is full or defective. The changes are written with the next transaction.
            ClosedError: the store is closed.
        """
        target = self._recorded
        while self._committed < target:
            error = self._begin().get()
            if error is not None:
                raise StoreError(error)

    def commit_soon(self) -> None:
        """Begin to write the changes, without waiting."""
        if self.is_dirty and self._database is not None:
            self._begin()

    def _begin(self) -> gevent.Greenlet[[], str | None]:
        if self._database is None:
            raise ClosedError(f"store {self.path}: the client has ended")
        if self._writing is None:
            self._writing = gevent.spawn(self._write)  # of its own: a caller may be killed
        return self._writing

    def _write(self) -> str | None:
        """Write the recorded changes; return the error, or None."""
        if self._database is None:
            return f"store {self.path}: the client has ended"
        changes, self._changes = self._changes, []
        try:
            self._threads.call(write_changes, self._database, changes)
        except sqlite3.Error as error:
            self._changes[:0] = changes
            return f"store {self.path}: can't be written: {error}. Free space on its disk."
        finally:
            self._writing = None
        self._committed += len(changes)
        return None

    def close(self) -> None:
        """Write the last changes and close the database; blocks this greenlet. A second call does nothing."""
        try:
            if self._database is not None:
                self.commit()
        except (ClosedError, StoreError) as error:
            log.warning("%s", error)
        database, self._database = self._database, None
        if database is not None:
            self._threads.call(database.close)
            self._threads.close()


def _load(database: sqlite3.Connection, identifier: str) -> tuple[str, list[tuple[Any, ...]], list[int]]:
    database.execute("INSERT OR IGNORE INTO client VALUES (1, ?)", (identifier,))
    (found,) = database.execute("SELECT identifier FROM client").fetchone()
    columns = "packet_identifier, topic, payload, qos, retain, properties, is_released"
    outgoing = database.execute(f"SELECT {columns} FROM outgoing ORDER BY sequence").fetchall()
    return found, outgoing, [number for (number,) in database.execute("SELECT packet_identifier FROM incoming")]


class StoredIdentifiers(set[int]):
    """Packet identifiers of received QoS 2 messages, on disk too."""

    def __init__(self, store: ClientStore, numbers: Iterable[int]) -> None:
        super().__init__(numbers)
        self._store = store

    def add(self, number: int) -> None:
        """Add and record an identifier."""
        if number not in self:
            super().add(number)
            self._store.record(_ADD_INCOMING, number)

    def discard(self, number: object) -> None:
        """Remove an identifier, and record that."""
        if number in self:
            super().discard(number)
            self._store.record(_REMOVE_INCOMING, number)

    def clear(self) -> None:
        """Remove all identifiers, and record that."""
        for number in list(self):
            self.discard(number)


class StoredSession(MqttSession):
    """A session whose messages of QoS 1 and 2 are on disk from the time when they are handed in.

    Args:
        store: records the changes.
        outgoing: the rows of the messages.
        incoming: the packet identifiers of received QoS 2 messages.

    Attributes:
        stored: the messages on disk by packet identifier: queued and in flight.
    """

    def __init__(self, store: ClientStore, outgoing: Iterable[tuple[Any, ...]], incoming: Iterable[int]) -> None:
        super().__init__()
        self._store = store
        self.unreleased: set[int] = StoredIdentifiers(store, incoming)
        self.stored: dict[int, OutgoingMessage] = {}
        for number, topic, payload, qos, retain, properties, is_released in outgoing:
            message = Delivery(topic, payload, qos, bool(retain), properties)
            message.packet_identifier, message.is_released = number, bool(is_released)
            self.stored[number] = message
            self.begin(message)

    def keep(self, message: OutgoingMessage) -> None:
        """Assign a packet identifier to a message, and block until the message is on disk.

        Raises:
            QueueFullError: 32,767 messages are on disk.
            StoreError: the disk is full or defective.
            ClosedError: the store is closed.
        """
        if len(self.stored) >= MAX_INFLIGHT:
            raise QueueFullError(
                f"{MAX_INFLIGHT} messages of QoS 1 and 2 are in the store {self._store.path} and not acknowledged; "
                "publish more slowly"
            )
        if gevent.getcurrent() is get_hub():
            raise ArgumentError("publish waits for the disk with the option store: call it in a greenlet")
        message.packet_identifier = number = self.new_identifier()
        self.stored[number] = message
        row = message.topic, message.payload, message.qos, message.retain, message.properties
        change = self._store.record(_INSERT, number, *row)
        try:
            self._store.commit()
        except BaseException:
            del self.stored[number]
            if not self._store.withdraw(change):
                self._store.record(_DELETE, number)
            raise

    def forget(self, message: OutgoingMessage) -> None:
        """Remove a message that will not be sent."""
        if self.stored.pop(message.packet_identifier, None) is not None:
            self._store.record(_DELETE, message.packet_identifier)

    def new_identifier(self) -> int:
        """Return a packet identifier that no message on disk has."""
        while (number := super().new_identifier()) in self.stored:
            pass
        return number

    def begin(self, message: OutgoingMessage) -> None:
        """Add a message to those in flight; its packet identifier is that on disk."""
        self.in_flight[message.packet_identifier] = message
        self.in_flight_bytes += message.size_bytes

    def settle(self, message: OutgoingMessage, error: str | int | None = None) -> None:
        """Remove a message that is acknowledged, or failed with `error`, also from the disk."""
        self.forget(message)
        super().settle(message, error)

    def received(self, number: int, code: int) -> bool | None:
        """Handle PUBREC; see `MqttSession`."""
        message = self.in_flight.get(number)
        was_released = message is not None and message.is_released
        is_accepted = super().received(number, code)
        if is_accepted and not was_released:
            self._store.record(_RELEASE, number)
        return is_accepted
