"""A hub's journal: the recorder's batches go into segments, and to the disk in time.

Nothing recorded is lost silently: when the disk takes nothing, the batch is kept, publishers are made to wait, the log
says so once, and everything goes on by itself when there is room again.
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
from smqrt.journal.arrow import encode, schema_message
from smqrt.journal.columns import Piece
from smqrt.journal.commit import OutRow
from smqrt.journal.durability import RETRY_S, Durability, Unconfirmed
from smqrt.journal.files import FILE_MODE
from smqrt.journal.numbers import NumberReserve
from smqrt.journal.record import Flag, Row
from smqrt.journal.recorder import HubRecorder
from smqrt.journal.settings import JournalSettings, parse
from smqrt.journal.timestamps import Clock
from smqrt.loop.greenlet_pool import in_thread
from smqrt.loop.scheduling import Turn
from smqrt.process import current_application
from smqrt.smq.gevent_broker import GeventBroker
from smqrt.wire import smq
from smqrt.workers.worker_identity import worker_place


class _Destination(NamedTuple):
    topic: Topic
    name: str
    stid: int
    subtopic: str | None


class Outgoing:
    """The messages of one commit; making it may let others have their turn.

    Args:
        broker: the hub's broker, whose topics are made when they are missing.
        rows: what to publish.

    Raises:
        ArgumentError: a payload or a name is too long for a message; nothing is published then.
    """

    def __init__(self, broker: Broker, rows: Iterable[OutRow]) -> None:
        self._broker = broker
        self._messages: list[tuple[_Destination, bytes]] = []
        known: dict[tuple[bytes, bytes | None], _Destination] = {}
        turn = Turn()
        for topic, subtopic, payload in rows:
            if len(payload) > smq.MAX_PAYLOAD_BYTES:
                raise ArgumentError(_too_long(topic, payload))
            address = known.get((topic, subtopic))
            if address is None:
                address = known[topic, subtopic] = self._address(topic, subtopic)
            self._messages.append((address, payload))
            turn.yield_if_due()

    def __len__(self) -> int:
        return len(self._messages)

    def _address(self, topic: bytes, subtopic: bytes | None) -> _Destination:
        tid, stid = self._broker.create(topic), self._broker.createsub(subtopic)
        found = self._broker.topic_table.by_key[tid.to_bytes(4, "big")]
        return _Destination(found, _text(topic), stid, None if subtopic is None else _text(subtopic))

    def rows(self, seq: int, now_us: int, txn: str | None) -> list[Row]:
        """Return the rows for the journal.

        Args:
            seq: the number of the first.
            now_us: their time, microseconds since 1970.
            txn: "query:batch" of the commit.
        """
        server = self._broker.server
        etid, uid, routed = server.etid, server.uid.decode(), Flag.PIPELINE | Flag.SERVER
        flags: dict[int, int] = {}
        made = []
        for number, (to, payload) in enumerate(self._messages, seq):
            flag = flags.get(to.topic.id)
            if flag is None:
                unrouted = Flag(0) if is_received(self._broker, to.topic) else Flag.UNROUTED
                flag = flags[to.topic.id] = int(routed | unrouted)
            made.append(Row(number, now_us, to.name, to.topic.id, to.subtopic, to.stid, etid, uid, flag, payload, txn))
        return made

    def deliver(self) -> None:
        """Publish the messages, which the journal has already; others have their turn meanwhile.

        They take the way of what the server publishes: to subscribers of this and other nodes, into last values and
        traces, to `ondrop`. The commit waits for slow subscribers and handlers as a client that publishes does, for
        `BEHIND_S` at most.
        """
        broker, turn = self._broker, Turn()
        routes: dict[int, Route] = {}
        until_s = time.monotonic() + BEHIND_S
        for to, payload in self._messages:
            topic = to.topic
            while is_behind(broker, topic) and time.monotonic() < until_s:
                gevent.sleep(BEHIND_LOOK_S)
                routes.clear()
            route = routes.get(topic.id) or routes.setdefault(topic.id, recorded_destination(broker, topic))
            has_hook = not topic.subscribers
            route.deliver(smq.publish_frame(topic.id, broker.server.etid, to.stid, payload))
            # Subscribers may come and go while others have their turn, or by `ondrop`, which is called here.
            if turn.yield_if_due() or has_hook:
                routes.clear()


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _too_long(topic: bytes, payload: bytes) -> str:
    return f"{_text(topic)}: {len(payload)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}"


log = logging.getLogger("smqrt.journal")

_Commit = tuple[str, int]
"""The name of a query, and the number of its batch."""
SEAL_S = 600.0
"""A segment is sealed after so long, however short it is: only sealed ones are compacted."""
TIDY_S = 60.0
FOLLOW_S = 1.0
COMMITS_LOCK = "commits.lock"
"""In the journal's folder: held by the one of several hubs that stores a commit."""
BEHIND_S, BEHIND_LOOK_S = 30.0, 0.005
"""How long a commit waits for subscribers and handlers that are behind, and how often it looks. Beyond, what is too
much for their queues is dropped and counted.
"""
TURN_S, TURN_LOOK_S = 5.0, 0.005
"""How long a commit waits for those to other hubs of the folder, and how often it looks."""
opened: dict[str, JournalWriter] = {}
"""The journals that hubs of this process write, by name."""


class JournalWriter:
    """The journal of one hub; from here on everything selected that is published there is recorded.

    Args:
        settings: where, what and how.
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
        self._wal = self.path / "wal" / settings.node
        self._lock = segment.lock(self._wal)
        try:
            self._recover()
        except BaseException:
            os.close(self._lock)  # so that another try is not refused because of this one
            raise
        self._stuck: tuple[int, int, int, list[bytes]] | None = None
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
            lambda seq: self._recorder.kept(seq),
            self._clock,
            self._numbers,
        )
        self._recorder = HubRecorder(
            broker, settings, lambda: self._seq, self._write, self._clock.now_us, self._durability.sync
        )
        broker.record(self._recorder)
        self._follower = get_hub().loop.timer(FOLLOW_S, FOLLOW_S, ref=False)
        self._follower.start(self._follow)
        self._tidier = get_hub().loop.timer(TIDY_S, TIDY_S, ref=False)
        self._tidier.start(self._tidy)
        self._retry = get_hub().loop.timer(RETRY_S, RETRY_S)
        opened[settings.name] = self

    def _recover(self) -> None:
        recovered = recovery.recover(self._wal, schema_message(self.settings.node, self.settings.name))
        if recovered.removed_bytes:
            log.warning("%s: a torn tail of %d bytes was cut off", self.path, recovered.removed_bytes)
        for damage in recovered.damages:
            log.error("%s", damage)
        self._seq, self._txns = recovered.next_seq, committed.CommittedBatches(recovered.txns)
        try:
            self._numbers = NumberReserve(self._wal, self._seq, recovered.end)
            self._segment = self._begin()
            recovery.remove_empty(self._wal, self._seq)
        except OSError as error:
            raise JournalError(f"{self._wal} can't be written: {error.strerror}; make room on the disk.") from None

    def _begin(self) -> segment.SegmentFile:
        begun = segment.SegmentFile.open(self._wal, self._seq, self.settings.node, self.settings.name)
        self._begun_s, self._begun_seq, self._seals_at_s = time.monotonic(), self._seq, 0.0
        return begun

    # ---- batches

    def _write(self, rows: int, first_us: int, last_us: int, pieces: Sequence[Piece]) -> bool:
        try:
            self._append(rows, first_us, last_us, pieces)
        except OSError as error:
            self._stall(error, (rows, first_us, last_us, [bytes(piece) for piece in pieces]))
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
                raise OSError(errno.ETIMEDOUT, "the disk has not kept which numbers are used")
        self._segment.append(pieces, self._seq, rows, first_us, last_us, flags | (segment.HAS_TXN if commit else 0))
        if commit:  # before the segment is sealed: what is saved then has the commits of all its rows
            self._txns.note(*commit)
        self._seq += rows
        self._counts["rows"] += rows
        self._counts["batches"] += 1
        self._counts["bytes"] += sum(map(len, pieces))
        self._seal_if_long()

    def _stall(self, error: OSError, batch: tuple[int, int, int, list[bytes]]) -> None:
        self._stuck = batch
        self._counts["stalls"] += 1
        if error is not self._durability.fault:  # else it is told already
            log.error(
                "the journal %s can't be written (%s); publishers wait and nothing is lost: make room on the disk",
                self.path,
                error.strerror,
            )
        self._retry.start(self._try_again)

    def _try_again(self) -> None:
        assert self._stuck
        try:
            self._append(*self._stuck)
        except OSError:
            return
        log.warning("the journal %s is being written again", self.path)
        self._retry.stop()
        self._stuck = None
        self._recorder.room_again()

    def _seal_if_long(self) -> None:
        if self._segment.size_bytes > self.settings.segment_bytes:
            self._seal()

    def _seal(self) -> None:
        """Begin a new segment, unless the disk has yet to finish the one before: then the present one goes on."""
        if self._durability.is_sealing or time.monotonic() < self._seals_at_s:
            return
        try:
            if not segment.is_open_at(self._lock, self._wal / segment.LOCK):
                raise OSError(errno.ENOENT, "its folder is gone")  # and is not made anew
            self._segment = self._begin()
        except OSError as error:
            self._seals_at_s = time.monotonic() + RETRY_S
            log.error("the journal %s: no new segment (%s); the present one goes on", self.path, error.strerror)
            return
        self._durability.seal(self._segment, self._txns.all())

    def _tidy(self) -> None:
        if time.monotonic() - self._begun_s > SEAL_S and self._seq > self._begun_seq and not self._durability.fault:
            self._seal()

    def _follow(self) -> None:
        if jumped_us := self._clock.follow():
            way, seconds = "back" if jumped_us < 0 else "forward", abs(jumped_us) / 1e6
            log.warning(
                "the journal %s: this machine's clock was set %s by %.0f s, and so is the time of messages from %d on",
                self.path,
                way,
                seconds,
                self._seq + self._recorder.waiting(),
            )

    # ---- what pipelines write

    def commit(self, query: str, batch: int, rows: Iterable[OutRow]) -> bool:
        """Store the results of a pipeline's batch with its number, in one write, then publish them.

        Args:
            query: the streaming query's id.
            batch: the number of its batch; batches come in ascending order.
            rows: what to publish.

        Returns:
            False when this batch is stored already: nothing happens then.

        Raises:
            ArgumentError: a payload or a name is too long for a message.
            JournalError: the disk takes nothing; try again later.
        """
        outgoing = Outgoing(self._broker, () if self._has(query, batch) else rows)
        with self._alone():
            is_new = not self._has(query, batch)  # also when the same was sent again while this one was looked at
            if is_new:
                deliver = self._stored(outgoing, (query, batch))
        self._counts["commits" if is_new else "duplicates"] += 1
        if is_new:
            deliver()
        else:
            self._wait_for_disk()
        return is_new

    def _has(self, query: str, batch: int) -> bool:
        return self._txns.last(query) >= batch

    def committed(self, query: str) -> int:
        """Return the number of the last batch of a query that is known to be stored (see `learn`); -1: none."""
        return self._txns.last(query)

    def queries(self) -> list[str]:
        """Return the names under which pipelines have committed."""
        return list(self._txns.all())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets no other hub of this folder commit meanwhile, and takes note of what was committed to them before: a
        query may come from one to the other, and back.
        """
        try:
            if not self._others.are_there():
                yield
                return
            lock = os.open(self.path / COMMITS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise self._refusal(error) from None
        try:
            self._wait_for_turn(lock)
            self.learn()
            yield
        finally:
            os.close(lock)

    def _wait_for_turn(self, lock: int) -> None:
        until_s = time.monotonic() + TURN_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a wait in a thread would have no deadline
                return
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise JournalError(f"another hub of {self.path} commits for {TURN_S:g} s; try again.") from None
            gevent.sleep(TURN_LOOK_S)

    def learn(self) -> None:
        """Take note of what pipelines have committed to other hubs of this folder; blocks the greenlet.

        Raises:
            JournalError: a file of theirs is damaged or can't be read.
        """
        try:
            self._txns.learn(in_thread(self._others.news))
        except OSError as error:
            raise JournalError(f"{error.filename} can't be read: {error.strerror}; give this user the files.") from None

    def publish(self, rows: Iterable[OutRow]) -> None:
        """Store and publish rows that belong to no batch; raises as `commit`."""
        self._stored(Outgoing(self._broker, rows), None)()

    def _stored(self, outgoing: Outgoing, commit: _Commit | None) -> Callable[[], None]:
        """Store the messages. Returns what waits for the disk and publishes them, behind those that were stored before:
        a commit that waits for a slow subscriber is not overtaken, also when its pipeline has given up on it.
        """
        self._store(outgoing, commit)
        before, delivered = self._delivered, Event()
        self._delivered = delivered

        def deliver() -> None:
            try:
                self._wait_for_disk()
                before.wait()  # each of those before waits for `BEHIND_S` at most
                outgoing.deliver()
            finally:
                delivered.set()

        return deliver

    def _wait_for_disk(self) -> None:
        """With `sync = "always"` returns when the disk has everything; blocks.

        Raises:
            Unconfirmed: the journal ends before.
        """
        if not self._recorder.waits_for_disk or not self._durability.unsynced_rows:
            return
        kept = Event()
        self._recorder.send_later(lambda _: kept.set(), b"", self._broker.server)
        while not kept.wait(RETRY_S):
            if opened.get(self.settings.name) is not self:
                raise Unconfirmed(f"the journal {self.path} ends, and its disk has not confirmed this; ask again.")

    def _store(self, outgoing: Outgoing, commit: _Commit | None) -> None:
        self._recorder.flush()
        if self._recorder.full:
            raise self._refusal(self._durability.fault)
        if not len(outgoing):
            return
        now_us = self._clock.now_us()
        batch = encode(outgoing.rows(self._seq, now_us, "{}:{}".format(*commit) if commit else None))
        try:
            self._append(len(outgoing), now_us, now_us, batch, commit, segment.RESULTS)
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, fault: OSError | None) -> JournalError:
        why = fault.strerror if fault else "the disk takes nothing"
        remedy = "bring it back" if fault and fault is self._durability.fault else "make room on the disk"
        return JournalError(f"the journal {self.path} can't be written ({why}); {remedy}.")

    # ---- looking and ending

    def flush(self) -> None:
        """Write what is recorded so far, so that readers see it."""
        self._recorder.flush()

    def end(self) -> dict[str, int]:
        """Return, by node, the number of the next row: of the one node that it writes."""
        return {self.settings.node: self._seq}

    @property
    def broker(self) -> Broker:
        """The broker whose messages it keeps."""
        return self._broker

    @property
    def sync_s(self) -> float:
        """Seconds that the disk took for all syncs together."""
        return self._durability.sync_s

    def stats(self) -> dict[str, int]:
        """Counters since the hub began: rows, bytes, batches, syncs, commits, duplicates, stalls (times that the disk
        took nothing), skipped (messages that were not selected), and `next_seq`. And how the disk is: `unsynced_bytes`
        that it has not confirmed, `disk_jobs` that wait for it, `disk_age_s` for how long the oldest does, `alarm`, 1
        while publishers wait or the disk fails or is slow, `readers_stale`, the pipelines that have read nothing for a
        day, and `readers_given_up`, those of them for which nothing is kept any more. `queries` under whose names
        commits are remembered, and `queries_forgotten`, because there were too many.
        """
        disk = self._durability.stats()
        disk["alarm"] |= self._stuck is not None
        commits = {"queries": len(self._txns), "queries_forgotten": self._txns.forgotten}
        return self._counts | disk | commits | {"skipped": self._recorder.messages_skipped, "next_seq": self._seq}

    def close(self) -> None:
        """Write and sync the rest, and let go of the folder; blocks until the disk has it, but not forever."""
        if opened.pop(self.settings.name, None) is None:
            return
        if self._stuck:
            self._try_again()
        self._recorder.close()
        self._tidier.stop()
        self._follower.stop()
        self._retry.stop()
        if self._stuck:
            lost = self._stuck[0] + self._recorder.waiting()
            log.error("the journal %s ends with %d messages that the disk did not take", self.path, lost)
        if not self._durability.close(self._txns.all(), lambda: os.close(self._lock)):
            if rows := self._durability.unsynced_rows:
                log.error("the journal %s ends with %d messages that the disk has not confirmed", self.path, rows)
            else:
                log.warning("the journal %s ends with an unfinished segment; the next start finishes it", self.path)


class HubJournal:
    """The journal of a hub, as the option `journal` of `create` says; it can be closed and opened again.

    Args:
        broker: the hub's broker.
        value: true, a folder, or a mapping of settings (help: journal); false and None for no journal.

    Raises:
        ArgumentError, JournalError: as `parse` and `JournalWriter`.

    Attributes:
        writer: the latest one; None before `open`, and without a journal.
    """

    def __init__(self, broker: GeventBroker, value: object) -> None:
        self._broker = broker
        self._settings = _of_worker(parse(value, current_application.base_folder()))
        self.writer: JournalWriter | None = None
        if self._settings:
            broker.attach(self)

    def open(self) -> None:
        """Begin to record. Raises as `JournalWriter`."""
        if self._settings:
            self.writer = JournalWriter(self._settings, self._broker)

    def close(self) -> None:
        """Write it to its end; blocks."""
        if self.writer:
            self.writer.close()


def _of_worker(settings: JournalSettings | None) -> JournalSettings | None:
    """Workers share the folder, each as a node of its own; worker 0 has the node's own name."""
    place = worker_place()
    if settings is None or place.is_first:
        return settings
    return replace(settings, node=f"{settings.node}-{place.label}")


_process = os.getpid()


@atexit.register
def _end() -> None:
    """A program that ends without closing its hub ends in order, too."""
    if opened and os.getpid() == _process:
        close_all()


def close_all() -> None:
    """Close every journal of this process, as the server does when it stops; at once, since they may share a disk."""
    gevent.joinall([gevent.spawn(journal.close) for journal in list(opened.values())], raise_error=True)
