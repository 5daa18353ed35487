"""Writer of a hub's journal: writes batches of the recorder and of pipelines to segments.

No recorded message is lost silently. When the disk is full, the batch stays in memory, publishers wait, and one log
entry reports that. Writing continues when the disk has space.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gevent
from gevent import get_hub
from gevent.event import Event

from smqrt.broker.broker import Broker
from smqrt.broker.routes import is_behind, is_received, recorded_destination
from smqrt.broker.topics import Route, Topic
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, recovery, segment
from smqrt.journal.arrow import LAYOUTS, encode, schema_message
from smqrt.journal.columns import Piece
from smqrt.journal.commit import OutRow
from smqrt.journal.durability import RETRY_S, Durability, Unconfirmed
from smqrt.journal.files import FILE_MODE
from smqrt.journal.record import Clock, Flag, Row, transaction
from smqrt.journal.recorder import HubRecorder
from smqrt.journal.segment import NumberReserve
from smqrt.journal.settings import JournalSettings, parse
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread
from smqrt.process import current_process
from smqrt.smq.gevent_broker import GeventBroker
from smqrt.wire import smq
from smqrt.workers.worker_rpc import worker_place

log = logging.getLogger("smqrt.journal")

_Commit = tuple[str, int]
"""The name of a query, and the number of its batch."""
SEAL_S = 600.0
"""A segment is sealed after this time, even if it is small: only sealed segments are compacted."""
SEAL_CHECK_S = 60.0
CLOCK_CHECK_S = 1.0
COMMITS_LOCK = "commits.lock"
"""A file in the journal's folder. When several hubs share the folder, the hub that stores a commit locks it."""
BEHIND_S, BEHIND_POLL_S = 30.0, 0.005
"""Time for which a commit waits for slow subscribers and handlers, and the time between two checks. After that,
messages that don't fit into their queues are dropped and counted.
"""
COMMITS_LOCK_S, COMMITS_LOCK_POLL_S = 5.0, 0.005
"""Time for which a commit waits for commits to other hubs of the folder, and the time between two checks."""
opened: dict[str, JournalWriter] = {}
"""The journals that hubs of this process write, by name."""


class _Address(NamedTuple):
    topic: Topic
    name: str
    stid: int
    subtopic: str | None


class OutgoingMessages:
    """The messages of one commit. The constructor may switch to other greenlets.

    Args:
        broker: the hub's broker; missing topics are created.
        rows: topic, subtopic and payload of the messages.

    Raises:
        ArgumentError: a payload or a name is too long for a message; then no message is published.
    """

    def __init__(self, broker: Broker, rows: Iterable[OutRow]) -> None:
        self._broker = broker
        self._messages: list[tuple[_Address, bytes]] = []
        known: dict[tuple[bytes, bytes | None], _Address] = {}
        turn = Turn()
        for topic, subtopic, payload in rows:
            if len(payload) > smq.MAX_PAYLOAD_BYTES:
                raise ArgumentError(
                    f"{_text(topic)}: {len(payload)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}"
                )
            address = known.get((topic, subtopic))
            if address is None:
                tid, stid = broker.create(topic), broker.createsub(subtopic)
                found = broker.topic_table.by_key[tid.to_bytes(4, "big")]
                address = _Address(found, _text(topic), stid, None if subtopic is None else _text(subtopic))
                known[topic, subtopic] = address
            self._messages.append((address, payload))
            turn.yield_if_due()

    def __len__(self) -> int:
        return len(self._messages)

    def rows(self, seq: int, now_us: int, txn: str | None) -> list[Row]:
        """Return the rows for the journal.

        Args:
            seq: the number of the first row.
            now_us: the time of the rows, microseconds since 1970.
            txn: "query:batch" of the commit; None for rows without one.
        """
        server = self._broker.server
        etid, uid, routed = server.etid, server.uid.decode(), Flag.PIPELINE | Flag.SERVER
        flags: dict[int, int] = {}
        found = []
        for number, (to, payload) in enumerate(self._messages, seq):
            flag = flags.get(to.topic.id)
            if flag is None:
                unrouted = Flag(0) if is_received(self._broker, to.topic) else Flag.UNROUTED
                flag = flags[to.topic.id] = int(routed | unrouted)
            found.append(Row(number, now_us, to.name, to.topic.id, to.subtopic, to.stid, etid, uid, flag, payload, txn))
        return found

    def deliver(self) -> None:
        """Publish the messages, which must be in the journal. Other greenlets run meanwhile.

        They are routed like messages of the server: to subscribers of this and other nodes, to last values, traces and
        `ondrop`. Like a publishing client, the commit waits for slow subscribers and handlers, for `BEHIND_S` at most.
        """
        broker, turn = self._broker, Turn()
        routes: dict[int, Route] = {}
        until_s = time.monotonic() + BEHIND_S
        for to, payload in self._messages:
            topic = to.topic
            while is_behind(broker, topic) and time.monotonic() < until_s:
                gevent.sleep(BEHIND_POLL_S)
                routes.clear()
            route = routes.get(topic.id) or routes.setdefault(topic.id, recorded_destination(broker, topic))
            has_hook = not topic.subscribers
            route.deliver(smq.publish_frame(topic.id, broker.server.etid, to.stid, payload))
            # Subscriptions may have changed while other greenlets ran, or in `ondrop`, which is called here.
            if turn.yield_if_due() or has_hook:
                routes.clear()


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


class JournalWriter:
    """The journal of one hub. It records all selected messages from its creation on.

    Args:
        settings: settings of the journal.
        broker: the hub's broker.

    Raises:
        ArgumentError: another journal of this process has the name.
        JournalError: the folder can't be used, or another process writes to it.

    Attributes:
        settings: as given.
        path: the journal's folder.
    """

    def __init__(self, settings: JournalSettings, broker: Broker) -> None:
        if settings.name in opened:
            raise ArgumentError(f"journal.name: {settings.name!r} is the name of another hub's journal; choose another")
        self.settings, self.path = settings, Path(settings.path)
        self._broker = broker
        self._format = 1 if broker.devices is None else 2
        self._wal = self.path / "wal" / settings.node
        self._lock = segment.lock(self._wal)
        try:
            self._recover()
        except BaseException:
            os.close(self._lock)  # so that another attempt can lock it
            raise
        self._unwritten_batch: tuple[int, int, int, list[bytes]] | None = None
        self._delivered = Event()
        self._delivered.set()
        self._clock, self._others = Clock(), committed.OtherNodes(self.path, settings.node)
        self._counts = dict.fromkeys(("rows", "bytes", "batches", "stalls", "commits", "duplicates"), 0)
        self._durability = Durability(
            settings,
            self._wal,
            self._lock,
            self._segment,
            self._seal_if_long,
            lambda seq: self._recorder.on_synced(seq),
            self._clock,
            self._numbers,
        )
        layout, sync = LAYOUTS[self._format], self._durability.sync
        self._recorder = HubRecorder(broker, settings, lambda: self._seq, self._write, self._clock.now_us, sync, layout)
        broker.record(self._recorder)
        self._clock_timer = get_hub().loop.timer(CLOCK_CHECK_S, CLOCK_CHECK_S, ref=False)
        self._clock_timer.start(self._follow_clock)
        self._seal_timer = get_hub().loop.timer(SEAL_CHECK_S, SEAL_CHECK_S, ref=False)
        self._seal_timer.start(self._seal_if_old)
        self._retry_timer = get_hub().loop.timer(RETRY_S, RETRY_S)
        opened[settings.name] = self

    def _recover(self) -> None:
        node, name = self.settings.node, self.settings.name
        recovered = recovery.recover(self._wal, *(schema_message(node, name, format_) for format_ in LAYOUTS))
        if recovered.removed_bytes:
            log.warning("%s: an incomplete end of %d bytes was cut off", self.path, recovered.removed_bytes)
        for fault in recovered.faults:
            log.error("%s", fault)
        self._seq, self._txns = recovered.next_seq, committed.CommittedBatches(recovered.txns)
        try:
            self._numbers = NumberReserve(self._wal, self._seq, recovered.end)
            self._segment = self._open_segment()
            recovery.remove_empty(self._wal, self._seq)
        except OSError as error:
            raise JournalError(f"{self._wal} can't be written: {error.strerror}; make room on the disk.") from None

    def _open_segment(self) -> segment.SegmentFile:
        node, name = self.settings.node, self.settings.name
        begun = segment.SegmentFile.open(self._wal, self._seq, node, name, self._format)
        self._segment_opened_s, self._segment_first_seq, self._retry_seal_at_s = time.monotonic(), self._seq, 0.0
        return begun

    # ---- batches

    def _write(self, rows: int, first_us: int, last_us: int, pieces: Sequence[Piece]) -> bool:
        try:
            self._append(rows, first_us, last_us, pieces)
        except OSError as error:
            # As bytes: the memory of the pieces is used again for the next batch.
            self._unwritten_batch = rows, first_us, last_us, [bytes(piece) for piece in pieces]
            self._counts["stalls"] += 1
            if error is not self._durability.fault:  # a fault was logged already
                log.error(
                    "the journal %s can't be written (%s); publishers wait and nothing is lost: make room on the disk",
                    self.path,
                    error.strerror,
                )
            self._retry_timer.start(self._retry_write)
            return False
        return True

    def _append(
        self,
        rows: int,
        first_us: int,
        last_us: int,
        pieces: Sequence[Any],
        commit: _Commit | None = None,
        flags: int = 0,
    ) -> None:
        if fault := self._durability.fault:
            raise fault
        if self._numbers.is_short(self._seq + rows):
            self._durability.reserve(self._seq + rows)
            if self._seq + rows > self._numbers.below:
                raise OSError(errno.ETIMEDOUT, "the reservation of numbers waits for the disk")
        self._segment.append(pieces, self._seq, rows, first_us, last_us, flags | (segment.HAS_TXN if commit else 0))
        if commit:  # before the segment is sealed, so that its snapshot has the commits of all its rows
            self._txns.add(*commit)
        self._seq += rows
        self._counts["rows"] += rows
        self._counts["batches"] += 1
        self._counts["bytes"] += sum(map(len, pieces))
        self._seal_if_long()

    def _retry_write(self) -> None:
        assert self._unwritten_batch
        try:
            self._append(*self._unwritten_batch)
        except OSError:
            return
        log.warning("the journal %s can be written again", self.path)
        self._retry_timer.stop()
        self._unwritten_batch = None
        self._recorder.resume()

    def _seal_if_long(self) -> None:
        if self._segment.size_bytes > self.settings.segment_bytes:
            self._seal()

    def _seal(self) -> None:
        """Open a new segment and seal the current one, unless the previous one is still being sealed."""
        if self._durability.is_sealing or time.monotonic() < self._retry_seal_at_s:
            return
        try:
            if not segment.is_open_at(self._lock, self._wal / segment.LOCK):
                raise OSError(errno.ENOENT, "its folder is missing")  # a missing folder is not created again
            self._segment = self._open_segment()
        except OSError as error:
            self._retry_seal_at_s = time.monotonic() + RETRY_S
            log.error(
                "the journal %s: can't open a new segment (%s); the current one stays in use", self.path, error.strerror
            )
            return
        self._durability.seal(self._segment, self._txns.all())

    def _seal_if_old(self) -> None:
        if (
            time.monotonic() - self._segment_opened_s > SEAL_S
            and self._seq > self._segment_first_seq
            and not self._durability.fault
        ):
            self._seal()

    def _follow_clock(self) -> None:
        if jumped_us := self._clock.follow():
            direction, seconds = "back" if jumped_us < 0 else "forward", abs(jumped_us) / 1e6
            log.warning(
                "the journal %s: this machine's clock was set %s by %.0f s; messages from %d on have the new time",
                self.path,
                direction,
                seconds,
                self._seq + self._recorder.waiting(),
            )

    # ---- commits of pipelines

    def commit(self, query: str, batch: int, rows: Iterable[OutRow]) -> bool:
        """Store the results of a pipeline's batch with its number, in one write, then publish them.

        Args:
            query: the streaming query's id.
            batch: the number of its batch; batches come in ascending order.
            rows: topic, subtopic and payload of the messages.

        Returns:
            False when this batch is stored already.

        Raises:
            ArgumentError: a payload or a name is too long for a message.
            JournalError: the disk is full or broken; try again later.
        """
        outgoing = OutgoingMessages(self._broker, () if self._txns.last(query) >= batch else rows)
        with self._exclusively():
            is_new = self._txns.last(query) < batch  # the same batch may have been committed while this one was decoded
            if is_new:
                deliver = self._publish_later(outgoing, (query, batch))
        self._counts["commits" if is_new else "duplicates"] += 1
        if is_new:
            deliver()
        else:
            self._wait_for_disk()  # the earlier attempt may not be synced yet
        return is_new

    def committed(self, query: str) -> int:
        """Return the number of the last known batch of a query (see `read_other_commits`); -1 without one."""
        return self._txns.last(query)

    def queries(self) -> list[str]:
        """Return the names of the queries with commits."""
        return list(self._txns.all())

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Exclude commits to other hubs of this folder, and read earlier ones: a query may move to another hub."""
        try:
            if not self._others.exist():
                yield
                return
            lock = os.open(self.path / COMMITS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise self._write_error(error) from None
        try:
            until_s = time.monotonic() + COMMITS_LOCK_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # polled: a lock in a thread would have no timeout
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise JournalError(
                            f"another hub of {self.path} has been committing for {COMMITS_LOCK_S:g} s; try again."
                        ) from None
                gevent.sleep(COMMITS_LOCK_POLL_S)
            self.read_other_commits()
            yield
        finally:
            os.close(lock)

    def read_other_commits(self) -> None:
        """Read the commits of pipelines to other hubs of this folder; blocks the greenlet.

        Raises:
            JournalError: a file of another hub is damaged or can't be read.
        """
        try:
            self._txns.merge(in_thread(self._others.new_commits))
        except OSError as error:
            raise JournalError(
                f"{error.filename} can't be read: {error.strerror}; give this user access to the files."
            ) from None

    def publish(self, rows: Iterable[OutRow]) -> None:
        """Store and publish rows without a batch. Raises as `commit`."""
        self._publish_later(OutgoingMessages(self._broker, rows), None)()

    def _publish_later(self, outgoing: OutgoingMessages, commit: _Commit | None) -> Callable[[], None]:
        """Store the messages, and return a function that publishes them once the disk has them.

        It publishes after all messages that were stored before. So later commits don't overtake one that waits for a
        slow subscriber, even if its pipeline no longer waits.
        """
        self._recorder.flush()  # earlier messages get lower numbers
        if self._recorder.full:
            raise self._write_error(self._durability.fault)
        if len(outgoing):
            now_us = self._clock.now_us()
            rows = outgoing.rows(self._seq, now_us, transaction(*commit) if commit else None)
            batch = encode(rows, LAYOUTS[self._format])
            try:
                self._append(len(outgoing), now_us, now_us, batch, commit, segment.RESULTS)
            except OSError as error:
                raise self._write_error(error) from None
        before, delivered = self._delivered, Event()
        self._delivered = delivered

        def deliver() -> None:
            try:
                self._wait_for_disk()
                before.wait()  # each earlier commit waits for `BEHIND_S` at most
                outgoing.deliver()
            finally:
                delivered.set()

        return deliver

    def _wait_for_disk(self) -> None:
        """With `sync = "always"`, block until the disk has all rows.

        Raises:
            Unconfirmed: the journal was closed before.
        """
        if not self._recorder.waits_for_disk or not self._durability.unsynced_rows:
            return
        synced = Event()
        self._recorder.send_later(lambda _: synced.set(), b"", self._broker.server)
        while not synced.wait(RETRY_S):
            if opened.get(self.settings.name) is not self:
                raise Unconfirmed(f"the journal {self.path} was closed before its disk confirmed this; try again.")

    def _write_error(self, fault: OSError | None) -> JournalError:
        reason = fault.strerror if fault else "the disk is full or broken"
        remedy = "restore it" if fault and fault is self._durability.fault else "make room on the disk"
        return JournalError(f"the journal {self.path} can't be written ({reason}); {remedy}.")

    # ---- state, closing

    def flush(self) -> None:
        """Write all recorded messages, so that readers see them."""
        self._recorder.flush()

    def end(self) -> dict[str, int]:
        """Return, by node, the number of the next row, for the node that it writes."""
        return {self.settings.node: self._seq}

    @property
    def broker(self) -> Broker:
        """The broker whose messages are recorded."""
        return self._broker

    @property
    def sync_s(self) -> float:
        """The total time of all syncs, seconds."""
        return self._durability.sync_s

    def stats(self) -> dict[str, int]:
        """Return counters since the hub was started, and the state of the disk.

        Counters: rows, bytes, batches, syncs, commits, duplicates, stalls (failed writes), skipped (messages that were
        not selected), `next_seq`, `queries` (with stored commits), `queries_forgotten` (dropped at their limit).

        State: `unsynced_bytes` (not confirmed by the disk), `disk_jobs` (waiting or running), `disk_age_s` (age of the
        oldest job), `alarm` (1 while publishers wait, or the disk fails or is slow), `readers_stale` (pipelines without
        a report for a day), `readers_given_up` (stale readers for which rows are no longer kept).
        """
        disk = self._durability.stats()
        disk["alarm"] |= self._unwritten_batch is not None
        commits = {"queries": len(self._txns), "queries_forgotten": self._txns.forgotten}
        return self._counts | disk | commits | {"skipped": self._recorder.messages_skipped, "next_seq": self._seq}

    def close(self) -> None:
        """Write and sync the remaining messages, and unlock the folder. Blocks for the disk, at most `CLOSE_S`."""
        if opened.pop(self.settings.name, None) is None:
            return
        if self._unwritten_batch:
            self._retry_write()
        self._recorder.close()
        self._seal_timer.stop()
        self._clock_timer.stop()
        self._retry_timer.stop()
        if self._unwritten_batch:
            lost = self._unwritten_batch[0] + self._recorder.waiting()
            log.error("the journal %s was closed with %d messages that could not be written", self.path, lost)
        if not self._durability.close(self._txns.all(), lambda: os.close(self._lock)):
            if rows := self._durability.unsynced_rows:
                log.error("the journal %s was closed with %d messages that the disk has not confirmed", self.path, rows)
            else:
                log.warning("the journal %s was closed with an unsealed segment; the next start recovers it", self.path)


class HubJournal:
    """The journal of a hub from the option `journal` of `create`; it can be closed and opened again.

    Args:
        broker: the hub's broker.
        value: true, a folder, or a mapping of settings (help: journal); false and None for no journal.

    Raises:
        ArgumentError, JournalError: as `parse` and `JournalWriter`.

    Attributes:
        writer: the latest writer; None before `open`, and without a journal.
    """

    def __init__(self, broker: GeventBroker, value: object) -> None:
        self._broker = broker
        settings, place = parse(value, current_process.base_folder()), worker_place()
        if settings and not place.is_first:  # workers share the folder, but each one writes its own node
            settings = replace(settings, node=f"{settings.node}-{place.label}")
        self._settings = settings
        self.writer: JournalWriter | None = None
        if self._settings:
            broker.attach(self)

    def open(self) -> None:
        """Start recording. Raises as `JournalWriter`."""
        if self._settings:
            self.writer = JournalWriter(self._settings, self._broker)

    def close(self) -> None:
        """Close the journal; blocks until it is written."""
        if self.writer:
            self.writer.close()


_process = os.getpid()


@atexit.register
def _close_at_exit() -> None:
    """Close the journals of a program that ends without closing its hubs."""
    if opened and os.getpid() == _process:
        close_all()


def close_all() -> None:
    """Close every journal of this process, in parallel, since they may share a disk."""
    gevent.joinall([gevent.spawn(journal.close) for journal in list(opened.values())], raise_error=True)
