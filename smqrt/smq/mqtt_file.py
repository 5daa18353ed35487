"""MQTT sessions and retained messages in the `persist` file of a hub.

A thread commits changes in groups: during a commit, the next group is collected. Acknowledgements wait for the commit
of their changes, see `MqttSettings.sync`; other changes are written within `sync_s`, and when the hub is closed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time

import gevent
from gevent import get_hub

from smqrt.broker.mqtt.arrivals import MAX_STREAMS
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.ledger import Group, Ledger
from smqrt.broker.mqtt.records import restore_session
from smqrt.broker.mqtt.saved_sessions import restore_saved, saved_record
from smqrt.loop.scheduling import Turn
from smqrt.smq import mqtt_tables
from smqrt.smq.persist_file import CLOSE_S, RETRY_S, SLOW_S, SqliteNames, unfinished

log = logging.getLogger("smqrt")

GATHER_S = 0.001
"""Time from the first change for which a packet waits to its commit. What is complete by then is not written."""
_POLL_S = 0.005


class SqliteMqtt:
    """Saves the MQTT sessions and retained messages of a hub.

    When a commit fails, it is repeated until it succeeds; publishers get no acknowledgements meanwhile.

    Args:
        names: the file.
        devices: the MQTT clients of the hub.
        sync_s: seconds from a change that no packet waits for to its commit.

    Raises:
        ArgumentError: the file can't be used, or was damaged.
    """

    def __init__(self, names: SqliteNames, devices: Devices, sync_s: float) -> None:
        self._names, self._devices, self._sync_s = names, devices, sync_s
        self._writer: gevent.Greenlet[..., None] | None = None
        self._due_s = 0.0
        self._is_closed = self._is_writing = self._failure_logged = False
        try:
            for schema in mqtt_tables.SCHEMAS:
                names.connection.execute(schema)
            self._ledger, self._kept = restore(names.connection, devices, time.time())
        except sqlite3.Error as error:
            raise names.unusable(str(error)) from error
        except mqtt_tables.DamagedError as error:
            raise names.unusable(str(error)) from None
        names.at_close.append(self.close)
        self._ledger.on_change = self._wake
        if self._ledger.dirty or self._kept is not None:
            self._wake(False)

    # ---- writing

    def _wake(self, is_urgent: bool) -> None:
        """Write soon: something has changed, and with `is_urgent` a packet waits for it."""
        if self._is_closed or self._is_writing:  # the writer looks for changes at its end
            return
        due_s = time.monotonic() + (GATHER_S if is_urgent and self._ledger.waits else self._sync_s)
        if self._writer is not None:
            if due_s >= self._due_s:
                return
            self._writer.kill(block=False)
        unfinished.add(self)
        self._due_s = due_s
        self._writer = gevent.spawn_later(max(due_s - time.monotonic(), 0), self._write)

    def _write(self) -> None:
        """Write groups while packets wait."""
        ledger, turn = self._ledger, Turn()
        self._is_writing = True
        try:
            while self._write_group(turn):
                self._send_released(turn)
                if not ledger.held or (self._devices.is_delivering and ledger.held[0][0] > ledger.cut):
                    break
        finally:
            self._is_writing = False
            self._writer = None
            unfinished.discard(self)
        is_urgent = ledger.is_urgent
        ledger.is_awake = ledger.is_urgent = False
        if self._is_closed or not (ledger.dirty or ledger.held):
            return
        if self._devices.is_delivering and ledger.cut < ledger.seq:
            ledger.barrier()  # for the next group, which must not end within a batch
        self._wake(is_urgent)

    def _write_group(self, turn: Turn) -> bool:
        """Write a group; return false when the hub was closed before the disk accepted it."""
        ledger = self._ledger
        group = ledger.begin_group(is_last=self._is_closed)
        for _ in ledger.fill(group, saved_record):
            turn.yield_if_due()
        if self._kept is None and group.is_empty:
            ledger.saved = group.through
            return True
        while not self._try_commit(group):
            if self._is_closed:
                return False
            gevent.sleep(RETRY_S)
        self._kept = None
        ledger.saved = group.through
        return True

    def _try_commit(self, group: Group) -> bool:
        """Commit a group; return whether the disk has accepted it."""
        slow = get_hub().loop.timer(SLOW_S, ref=False)
        slow.start(self._report, f"the disk takes longer than {SLOW_S:g} s")
        try:
            self._names.disk.call(self._commit, group, time.time() - self._devices.broker.clock())
        except (sqlite3.Error, OSError) as error:
            self._ledger.failures += 1
            self._report(str(error))
            return False
        finally:
            slow.stop()
            slow.close()
        self._ledger.commits += 1
        if self._failure_logged:
            self._failure_logged = False
            log.warning("persist: %s: MQTT sessions and retained messages are saved again", self._names.path)
        return True

    def _report(self, fault: str) -> None:
        """Log the first failure."""
        if not self._failure_logged:
            self._failure_logged = True
            effect = "MQTT clients wait" if self._ledger.waits else "MQTT sessions are not saved"
            log.error("persist: %s: %s; %s until the disk accepts writes again", self._names.path, fault, effect)

    def _commit(self, group: Group, shift_s: float) -> None:
        """Write a group. Runs in the thread."""
        connection = self._names.connection
        is_relaxed = self._devices.limits.sync == "publish"
        if is_relaxed:  # a crash of the process loses nothing that was written
            connection.execute("PRAGMA synchronous=NORMAL")
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if self._kept is not None:
                    mqtt_tables.remove_unused(connection, self._kept)
                mqtt_tables.write(connection, group, shift_s)
        finally:
            if is_relaxed:
                connection.execute("PRAGMA synchronous=FULL")

    def _send_released(self, turn: Turn) -> None:
        """Send the packets whose changes are saved."""
        while True:
            try:
                for _ in self._ledger.released():
                    turn.yield_if_due()
                return
            except Exception:  # the packets of other clients are still sent
                log.exception("error while an MQTT packet was sent that waited for the disk")

    def close(self) -> None:
        """Write the last changes; waits for the disk up to `CLOSE_S`. `SqliteNames.close` then closes the file."""
        if self._is_closed:
            return
        end_s = time.monotonic() + CLOSE_S
        while self._devices.is_delivering and time.monotonic() < end_s:
            gevent.sleep(_POLL_S)
        self._is_closed = True
        if self._writer is not None:
            if self._is_writing:
                self._writer.join(CLOSE_S)
            else:
                self._writer.kill(block=False)
        if not self._is_writing and not self._failure_logged:
            gevent.spawn(self._write).join(CLOSE_S)
        if self._is_writing or self._failure_logged or self._ledger.dirty:
            log.error("persist: %s: closed with unsaved MQTT sessions or messages", self._names.path)
        self._names.is_hanging |= self._is_writing
        self._ledger.detach()
        unfinished.discard(self)


def restore(connection: sqlite3.Connection, devices: Devices, now_s: float) -> tuple[Ledger, list[int] | None]:
    """Restore sessions and retained messages, and begin to collect changes.

    What a hot restart has restored before is newer than the file, and will replace it.

    Args:
        connection: the file.
        devices: the MQTT clients of the hub.
        now_s: the time of `time.time`.

    Returns:
        The changes of the hub; and the numbers of the sessions that are kept if the file has others, which
        `mqtt_tables.remove_unused` removes together with the first changes.

    Raises:
        DamagedError: a row of the file was changed.
        sqlite3.Error: the file can't be read.
    """
    clock_s = devices.broker.clock()
    shift_s = clock_s - now_s
    arrivals = devices.arrivals
    arrivals.identity, arrivals.start = mqtt_tables.begin_start(connection, arrivals.identity or os.urandom(16))
    arrivals.last_origin = 0
    arrivals.nodes |= dict.fromkeys(mqtt_tables.nodes(connection))
    arrivals.numbers = {**mqtt_tables.streams(connection, MAX_STREAMS), **arrivals.numbers}
    names_before, ids_before = set(devices.retained.by_name), set(devices.sessions)
    for message in mqtt_tables.retained_messages(connection, shift_s):
        if message.name not in names_before and message.expires_s > clock_s:
            devices.retained.set(message)
    records = list(mqtt_tables.session_records(connection, shift_s))
    messages = mqtt_tables.messages(connection, shift_s)
    queues = mqtt_tables.queues(connection, messages)
    ledger = Ledger(devices, devices.limits.sync != "interval", mqtt_tables.next_number(connection, records))
    changed = list(devices.sessions.values())
    for record in records:
        if record["id"] in ids_before:
            continue
        if "waiting" in record:  # the layout before there were rows
            restore_session(devices, record)
            changed.append(devices.sessions[record["id"]])
        else:
            rows = queues.get(record["number"], ())
            restore_saved(devices, ledger, record, rows, messages, devices.limits.will_grace_s)
    devices.search.finish_now()
    ledger.recorded.update(record["id"] for record in records)
    devices.ledger = ledger
    for device in changed:
        ledger.session_changed(device)
    for name in names_before:
        ledger.touch(name)
    for one in arrivals.numbers.items():
        ledger.touch(one)
    kept = [one.rows.number for one in devices.sessions.values() if one.rows is not None]
    has_unused = queues.keys() - kept or any(one.body is not None and not one.body.users for one in messages.values())
    return ledger, kept if has_unused else None
