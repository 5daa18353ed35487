"""Recorder of a hub: converts published messages to batches for the writer.

Recording a message is one append to a list. Once per turn of the event loop the messages get a time stamp. Once per
flush they become the columns of a batch, in LuaJIT. A frame batch of many kilobytes becomes columns immediately.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gevent import get_hub

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, MqttBatch
from smqrt.broker.mqtt.session import MqttSession
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Topic
from smqrt.journal.arrow import PLAIN, WITH_MQTT, BatchLayout, encode
from smqrt.journal.columns import (
    LARGE,
    LARGE_MESSAGE,
    NO_ATTRIBUTES,
    PROPERTIES,
    SUBTOPIC,
    TOPIC,
    UID,
    Columns,
    Piece,
    attributes,
    fastest_columns,
    stamp,
    toggle,
)
from smqrt.journal.mqtt_columns import NO_PROPERTIES, Key, key_of, properties_json
from smqrt.journal.planning import Filter
from smqrt.journal.record import Flag, Row
from smqrt.journal.settings import JournalSettings
from smqrt.smq import data_path
from smqrt.wire.smq import Type, frames, unpack_publish

log = logging.getLogger("smqrt.journal")

FEED_BATCHES = 512
"""This many frame batches, with their time stamps, become columns at once: they fit into the processor's cache, and
joining them takes no new memory from the system.
"""
MAX_SERVER_UNSENT_BYTES = 16 << 20
"""When more bytes of the server's own messages wait for the disk, its publish queue waits, too."""
_ROWS_WITHOUT_STAMP = -1
"""Value of `_stamped` when rows have no stamp yet, even if no frame batch is in the list."""
MAX_PROPERTIES, MAX_PROPERTY_BYTES = 1000, 1 << 20
"""Number and bytes of different MQTT properties that are kept with their JSON; most devices use few. Above, all are
forgotten.
"""
_UNROUTED, _ASSEMBLED = toggle(Flag.UNROUTED), toggle(Flag.ASSEMBLED)

Write = Callable[[int, int, int, Sequence[Piece]], bool]
"""`(rows, first us, last us, pieces) -> written`; False: the write failed, and the writer keeps the batch."""

Deliver = Callable[[bytes], bool | None]


@dataclass(slots=True)
class _Unsent:
    """Frames that are delivered once the disk has the rows below `seq`; None while these rows are not written.

    `holds` is whether their publisher waits for the delivery.
    """

    seq: int | None
    deliver: Deliver
    batch: bytes
    publisher: BrokerPeer
    holds: bool

    def is_synced(self, next_seq: int) -> bool:
        return self.seq is not None and self.seq <= next_seq


class HubRecorder:
    """The `Recorder` of one hub (`smqrt.broker.state`).

    Args:
        broker: the broker to record.
        settings: the topics, and how often to flush.
        next_seq: returns the sequence number of the next row.
        write: called with each batch.
        now_us: returns the time, microseconds UTC.
        sync: starts a sync; `on_synced` is called when the disk has the rows.
        layout: the layout of the batches, `WITH_MQTT` for a hub that accepts MQTT clients.

    Attributes:
        is_buffered: whether `record` only appends.
        full: whether a write has failed, so that publishers wait.
        messages_skipped: number of messages that were not selected.
        record: adds a frame batch; called by the broker.
        waits_for_disk: whether messages are delivered only after a sync.
    """

    def __init__(
        self,
        broker: Broker,
        settings: JournalSettings,
        next_seq: Callable[[], int],
        write: Write,
        now_us: Callable[[], int],
        sync: Callable[[], None],
        layout: BatchLayout = PLAIN,
    ) -> None:
        self._now_us, self._sync, self._layout = now_us, sync, layout
        self._broker = broker
        self._filter = Filter(settings.topics, settings.exclude)
        self._direct = settings.direct
        self._next_seq, self._write = next_seq, write
        self._columns: Columns = fastest_columns(layout)
        self._columns.server(broker.server.etid)
        self._frame_batches: list[bytes] = []
        self._stamped = 0
        self._unknown_names: list[tuple[int, int]] = []  # (kind, number), looked up again after the next write
        self._disconnected_uids: dict[int, bytes] = {}  # by ETID, of clients that disconnected since the last flush
        self._properties: list[Key] = [NO_PROPERTIES]  # by their numbers, less one: 0 means none
        self._property_numbers, self._property_bytes = {NO_PROPERTIES: 1}, 0
        self._large: deque[tuple[MqttBatch, str, int, int]] = deque()  # (message, properties, flags, time)
        self._waiting_outboxes: set[Any] = set()
        self._flush_s = settings.flush_ms / 1000
        self._timer: Any = None
        self._recorded = self.full = False
        self.messages_skipped = 0
        self._at_once = settings.sync in ("publish", "always")
        self.record: Callable[[bytes], None] = self._record_now if self._at_once else self._frame_batches.append
        self.is_buffered = not self._at_once
        self.waits_for_disk = settings.sync == "always"
        self._unsent: deque[_Unsent] = deque()
        self._unsent_bytes = 0
        data_path.turn_ends.append(self._end_turn)

    # ---- called by the broker

    def selects(self, topic: Topic | None) -> bool:
        """See `Recorder`."""
        if topic is None or topic.name is None:
            return self._direct
        return self._filter.matches(topic.name.decode("utf-8", "replace"))

    def record_large(self, batch: bytes | memoryview) -> None:
        """See `Recorder`. The frames are read in place, while they are in the processor's cache. A copy would need new
        memory from the system, which takes longer than building the columns.
        """
        if self.full or self._at_once or (isinstance(batch, memoryview) and batch.readonly):
            self.record(bytes(batch))
            return
        self._feed()
        rest = batch[self._consume(batch, is_stamped=False) :]
        if rest:
            self._frame_batches.append(bytes(rest))
        self._stamped = _ROWS_WITHOUT_STAMP

    def record_of(self, peer: BrokerPeer) -> Callable[[bytes], None]:
        """See `Recorder`. The server publishes wills of MQTT clients beside its own messages."""
        may_be_mqtt = self._layout is WITH_MQTT and (peer is self._broker.server or isinstance(peer, MqttSession))
        return self._record_any if may_be_mqtt else self.record

    def _record_any(self, batch: bytes) -> None:
        if isinstance(batch, MqttBatch):
            self.record_mqtt(batch)
        else:
            self.record(batch)

    def record_unrouted(self, batch: bytes) -> None:
        """See `Recorder`."""
        if isinstance(batch, MqttBatch):
            self.record_mqtt(batch, is_unrouted=True)
            return
        self._frame_batches.extend((_UNROUTED, batch))
        self.record(_UNROUTED)

    def record_mqtt(self, batch: MqttBatch, is_unrouted: bool = False) -> None:
        """Add a batch of an MQTT client.

        Args:
            batch: the messages.
            is_unrouted: whether they have no subscriber.
        """
        frames = self._frame_batches
        if batch.large is not None:
            now_us, properties = self._now_us(), properties_json(key_of(batch, self._broker.clock()))
            self._large.append((batch, properties, int(Flag.UNROUTED) if is_unrouted else 0, now_us))
            frames.append(stamp(now_us))  # of the messages before it
            self.record(LARGE)
            return
        number, mark = self._property_number(batch), [_UNROUTED] if is_unrouted else []
        frames.extend((attributes(batch.qos, batch.retain, number), *mark, batch, *mark))
        self.record(NO_ATTRIBUTES)

    def _property_number(self, batch: MqttBatch) -> int:
        """Return the number of the properties of a batch for the columns."""
        has_any = batch.properties or batch.expires_s != NO_EXPIRY_S
        key = key_of(batch, self._broker.clock()) if has_any else NO_PROPERTIES
        found = self._property_numbers.get(key)
        if found is not None:
            return found
        if len(self._properties) >= MAX_PROPERTIES or self._property_bytes > MAX_PROPERTY_BYTES:
            self._feed()  # recorded frames refer to the numbers
            if not self._frame_batches:
                for number in range(2, len(self._properties) + 1):
                    self._columns.forget(PROPERTIES, number)
                del self._properties[1:]
                self._property_numbers, self._property_bytes = {NO_PROPERTIES: 1}, 0
        self._properties.append(key)
        self._property_bytes += len(key[0])
        found = self._property_numbers[key] = len(self._properties)
        return found

    def record_assembled(self, deliver: Callable[[bytes], bool | None], batch: bytes) -> bool:
        """See `Recorder`."""
        self._frame_batches.append(_ASSEMBLED)
        try:
            return bool(deliver(batch))
        finally:
            self._frame_batches.append(_ASSEMBLED)  # the second toggle ends the flag

    def skipped(self, batch: bytes) -> None:
        """See `Recorder`."""
        is_one = len(batch) == batch[0] << 8 | batch[1]
        self.messages_skipped += 1 if is_one else data_path.kernels.count(batch)

    def hold(self, publisher: BrokerPeer) -> bool:
        """See `Recorder`."""
        self._waiting_outboxes.add(publisher.outbox)
        return True

    def left(self, client: BrokerPeer) -> None:
        """See `Recorder`."""
        self._disconnected_uids[client.etid] = client.uid

    # ---- delivery after a sync

    def send_later(self, deliver: Deliver, batch: bytes, publisher: BrokerPeer) -> bool:
        """See `Recorder`."""
        self._unsent_bytes += len(batch)
        holds = publisher is not self._broker.server or self._unsent_bytes > MAX_SERVER_UNSENT_BYTES
        self._unsent.append(_Unsent(None if self.full else self._next_seq(), deliver, batch, publisher, holds))
        self._sync()
        return holds

    def on_synced(self, next_seq: int) -> None:
        """Deliver the messages whose rows the disk has.

        Args:
            next_seq: the disk has the rows below this number.
        """
        while self._unsent and self._unsent[0].is_synced(next_seq):
            one = self._unsent.popleft()
            self._unsent_bytes -= len(one.batch)
            try:
                waits = one.deliver(one.batch)
            except Exception:  # the other messages must still be delivered
                log.exception("error while a message was routed; it is lost")
                waits = False
            if one.holds and not waits:
                one.publisher.outbox.resume()

    # ---- time

    def _end_turn(self) -> None:
        batches = self._frame_batches
        if len(batches) != self._stamped:
            batches.append(stamp(self._now_us()))
            self._stamped = len(batches)
            self._recorded = True
            if self._stamped > FEED_BATCHES:
                self._feed()
            if self._timer is None:
                self._timer = get_hub().loop.timer(self._flush_s, self._flush_s)
                self._timer.start(self._tick)

    def _tick(self) -> None:
        if self._recorded or self._disconnected_uids:
            self.flush()
        else:
            self._timer.stop()
            self._timer = None

    def _record_now(self, batch: bytes) -> None:
        self._frame_batches.append(batch)
        self.flush()

    # ---- batches

    def flush(self) -> None:
        """Write all recorded messages, unless a write has failed."""
        self._feed()
        if not self.full:
            self._take()
        if not self.full:
            self._forget_unknown_names()
            self._recorded = False

    def _feed(self) -> None:
        """Convert recorded frames to columns, and write full batches."""
        batches = self._frame_batches
        if self.full:
            return
        if len(batches) != self._stamped:
            batches.append(stamp(self._now_us()))
        if not batches:
            return
        data = b"".join(batches)
        batches.clear()
        self._stamped = 0
        at = self._consume(data, is_stamped=True)
        if at < len(data):
            batches.append(data[at:])

    def _consume(self, data: bytes | memoryview, is_stamped: bool) -> int:
        """Convert frames to columns. The frames end with a stamp, or get one later.

        Returns the position that was reached: the end, or where a write failed.
        """
        at, end = 0, len(data)
        while at < end and not self.full:
            at, kind, number = self._columns.append(data, at)
            if kind == LARGE_MESSAGE:
                self._take()
                if not self.full:
                    self._write_large()
                    at += len(LARGE)
            elif kind:
                self._columns.name(kind, number, self._name(kind, number))
            elif at < end:
                if not is_stamped:
                    self._columns.append(stamp(self._now_us()), 0)
                self._take()
        return at

    def _take(self) -> None:
        rows, first_us, last_us, pieces = self._columns.take(self._next_seq())
        if rows:
            self.full = not self._write(rows, first_us, last_us, pieces)

    def _write_large(self) -> None:
        """Write the oldest large message as a batch of its own."""
        batch, properties, flags, ts_us = self._large.popleft()
        tid, ptid, _, _ = unpack_publish(batch)
        names = self._name(TOPIC, tid), self._uid(ptid)
        topic, uid = (None if name is None else name.decode("utf-8", "replace") for name in names)
        flags |= Flag.SERVER if ptid == self._broker.server.etid else 0
        mqtt = batch.qos, batch.retain, properties
        row = Row(self._next_seq(), ts_us, topic, tid, None, 0, ptid, uid, flags, batch.large or b"", None, *mqtt)
        self.full = not self._write(1, ts_us, ts_us, encode([row], self._layout))

    def _name(self, kind: int, number: int) -> bytes | None:
        if kind == PROPERTIES:
            return properties_json(self._properties[number - 1]).encode()
        if kind == SUBTOPIC:
            return self._broker.subtopic_table.by_id.get(number)
        if kind == UID:
            return self._uid(number)
        topic = self._broker.topic_table.get(number)
        if topic is None or topic.name is None:
            self._unknown_names.append((TOPIC, number))
        return topic.name if topic else None

    def _uid(self, etid: int) -> bytes | None:
        session = self._broker.server if etid == self._broker.server.etid else self._broker.sessions.get(etid)
        uid = session.uid if session else self._disconnected_uids.get(etid)
        if uid is None:
            self._unknown_names.append((UID, etid))
            return None
        try:
            uid.decode()
        except UnicodeDecodeError:
            return uid.hex().encode()
        return uid

    def _forget_unknown_names(self) -> None:
        for kind, number in self._unknown_names:
            self._columns.forget(kind, number)
        self._unknown_names.clear()
        for etid in self._disconnected_uids:
            self._columns.forget(UID, etid)
            self._columns.forget(TOPIC, etid)
        self._disconnected_uids.clear()

    # ---- backpressure

    def resume(self) -> None:
        """Write the waiting messages, and resume the publishers. Call it when writing is possible again."""
        self.full = False
        self.flush()
        if not self.full:
            for one in self._unsent:
                one.seq = one.seq or self._next_seq()
            self._sync()
            self._resume_publishers()

    def _resume_publishers(self) -> None:
        outboxes, self._waiting_outboxes = self._waiting_outboxes, set()
        for outbox in outboxes:
            outbox.resume()

    def waiting(self) -> int:
        """Return the number of recorded messages that are not in a batch yet."""
        return len(self._large) + sum(frame[2] == Type.PUBLISH for frame in frames(b"".join(self._frame_batches)))

    def close(self) -> None:
        """Write the remaining messages, and stop recording."""
        self._broker.record(None)
        self.flush()
        self._resume_publishers()  # the hub may continue without a journal
        data_path.turn_ends.remove(self._end_turn)
        if self._timer is not None:
            self._timer.stop()
