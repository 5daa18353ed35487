"""A hub's journal: the recorder's batches go into segments, and to the disk in time.

Nothing recorded is lost silently: when the disk takes nothing, the batch is kept, publishers are made to wait, the log
says so once, and everything goes on by itself when there is room again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gevent import get_hub
from gevent.threadpool import ThreadPool

from smqrt import place
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, index, recovery, retention, segment
from smqrt.journal.arrow import encode
from smqrt.journal.columns import Piece
from smqrt.journal.outgoing import Outgoing, OutRow
from smqrt.journal.recorder import HubRecorder
from smqrt.journal.settings import JournalSettings, parse
from smqrt.net.broker import Broker

log = logging.getLogger("smqrt.journal")

RETRY_S = 0.5
RETENTION_S = 60.0
SLOW_S = 10.0
"""A disk that takes longer to keep what was written is told about."""
SEAL_S = 600.0
"""A segment is sealed after so long, however short it is: only sealed ones are compacted."""
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
        self._counts = dict.fromkeys(("rows", "bytes", "batches", "syncs", "stalls", "commits", "duplicates"), 0)
        self._unsynced = self._is_slow = self._retiring = False
        self._syncing_since_s: float | None = None
        self._disk = ThreadPool(1)  # one thing after the other, and nothing of it in the loop
        self._recorder = HubRecorder(broker.hub, settings, lambda: self._seq, self._write)
        broker.hub.record(self._recorder)
        self._timers = [self._every(settings.sync_s, self._sync), self._every(RETENTION_S, self._tidy)]
        self._retry = get_hub().loop.timer(RETRY_S, RETRY_S)
        opened[settings.name] = self

    def _recover(self) -> None:
        recovered = recovery.recover(self._wal)
        if recovered.removed_bytes:
            log.warning("%s: a torn tail of %d bytes was cut off", self.path, recovered.removed_bytes)
        self._seq, self._txns = recovered.next_seq, recovered.txns
        try:
            self._segment = self._begin()
        except OSError as error:
            raise JournalError(f"{self._wal} can't be written: {error.strerror}; make room on the disk.") from None

    def _begin(self) -> segment.SegmentFile:
        begun = segment.SegmentFile.open(self._wal, self._seq, self.settings.node, self.settings.name)
        self._begun_s, self._begun_seq = time.monotonic(), self._seq
        return begun

    def _every(self, seconds: float, function: Callable[[], None]) -> Any:
        timer = get_hub().loop.timer(seconds, seconds, ref=False)
        timer.start(function)
        return timer

    # ---- batches

    def _write(self, rows: int, first_us: int, last_us: int, pieces: Sequence[Piece]) -> bool:
        try:
            self._append(rows, first_us, last_us, pieces)
        except OSError as error:
            self._stall(error, (rows, first_us, last_us, [bytes(piece) for piece in pieces]))
            return False
        return True

    def _append(self, rows: int, first_us: int, last_us: int, pieces: Sequence[Any], flags: int = 0) -> None:
        self._segment.append(pieces, self._seq, rows, first_us, last_us, flags)
        self._seq += rows
        self._unsynced = True
        self._counts["rows"] += rows
        self._counts["batches"] += 1
        self._counts["bytes"] += sum(map(len, pieces))
        if self.settings.sync == "always":
            self._segment.sync()
        if self._segment.size_bytes > self.settings.segment_bytes:
            self._seal()

    def _stall(self, error: OSError, batch: tuple[int, int, int, list[bytes]]) -> None:
        self._stuck = batch
        self._counts["stalls"] += 1
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

    def _seal(self) -> None:
        sealed = self._segment
        try:
            self._segment = self._begin()
        except OSError as error:
            log.error("the journal %s: no new segment (%s); the present one goes on", self.path, error.strerror)
            return
        self._disk.spawn(_finish, sealed, dict(self._txns))

    def _sync(self) -> None:
        if self._syncing_since_s is not None:
            self._watch_sync(time.monotonic() - self._syncing_since_s)
        elif self._unsynced:
            self._unsynced, self._syncing_since_s = False, time.monotonic()
            self._disk.spawn(_error_of, self._segment.sync).rawlink(self._synced)

    def _watch_sync(self, waited_s: float) -> None:
        if waited_s > SLOW_S and not self._is_slow:
            self._is_slow = True
            log.error("the journal %s: no sync for %.0f s; is the disk broken, or busy?", self.path, waited_s)

    def _synced(self, result: Any) -> None:
        if self._is_slow:
            log.warning("the journal %s: the disk keeps it again", self.path)
        self._syncing_since_s, self._is_slow = None, False
        self._counts["syncs"] += 1
        if result.value is not None:
            self._unsynced = True
            log.error("the journal %s can't be synced: %s", self.path, result.value)

    def _tidy(self) -> None:
        if time.monotonic() - self._begun_s > SEAL_S and self._seq > self._begun_seq:
            self._seal()
        self._retire()

    def _retire(self) -> None:
        if not self._retiring:  # else the disk takes longer than the time between two
            self._retiring = True
            self._disk.spawn(_error_of, _remove_expired, self.path, self.settings).rawlink(self._retired)

    def _retired(self, result: Any) -> None:
        self._retiring = False
        if result.value is not None:
            log.error("the journal %s: old parts can't be removed: %s", self.path, result.value)

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
        if self._has(query, batch):  # also when the same was sent again while this one was looked at
            self._counts["duplicates"] += 1
            return False
        self._store(outgoing, f"{query}:{batch}")
        self._txns[query] = batch
        self._counts["commits"] += 1
        outgoing.deliver()
        return True

    def _has(self, query: str, batch: int) -> bool:
        return self._txns.get(query, -1) >= batch

    def learn(self) -> None:
        """Take note of what pipelines have committed to other hubs of this folder; blocks the greenlet.

        Raises:
            JournalError: a file of theirs is damaged or can't be read.
        """
        try:
            committed.merge(self._txns, get_hub().threadpool.apply(committed.last_batches, (self.path,)))
        except OSError as error:
            raise JournalError(f"{error.filename} can't be read: {error.strerror}; give this user the files.") from None

    def publish(self, rows: Iterable[OutRow]) -> None:
        """Store and publish rows that belong to no batch; raises as `commit`."""
        outgoing = Outgoing(self._broker, rows)
        self._store(outgoing, None)
        outgoing.deliver()

    def _store(self, outgoing: Outgoing, txn: str | None) -> None:
        self._recorder.flush()
        if self._recorder.full:
            raise JournalError(f"the journal {self.path} can't be written; make room on the disk")
        if not len(outgoing):
            return
        now_us = time.time_ns() // 1000
        batch = encode(outgoing.rows(self._seq, now_us, txn))
        try:
            self._append(len(outgoing), now_us, now_us, batch, index.HAS_TXN if txn else 0)
        except OSError as error:
            raise JournalError(f"the journal {self.path} can't be written ({error.strerror}); make room") from None

    # ---- looking and ending

    def flush(self) -> None:
        """Write what is recorded so far, so that readers see it."""
        self._recorder.flush()

    def stats(self) -> dict[str, int]:
        """Counters since the hub began: rows, bytes, batches, syncs, commits, duplicates, stalls (times that the disk
        took nothing), skipped (messages that were not selected), and `next_seq`.
        """
        return self._counts | {"skipped": self._recorder.messages_skipped, "next_seq": self._seq}

    def close(self) -> None:
        """Write and sync the rest, and let go of the folder; blocks."""
        if opened.pop(self.settings.name, None) is None:
            return
        if self._stuck:
            self._try_again()
        self._recorder.close()
        for timer in (*self._timers, self._retry):
            timer.stop()
        if self._stuck:
            lost = self._stuck[0] + self._recorder.waiting()
            log.error("the journal %s ends with %d messages that the disk did not take", self.path, lost)
        self._disk.join()
        _finish(self._segment, self._txns)
        self._disk.kill()
        os.close(self._lock)


def _finish(sealed: segment.SegmentFile, txns: dict[str, int]) -> None:
    try:
        sealed.sync(kept_bytes=0)
        committed.save(sealed.path.parent, txns)
    except OSError as error:
        log.error("%s can't be synced: %s", sealed.path, error)
    sealed.close()


def _error_of(job: Callable[..., object], *args: Any) -> Exception | None:
    """Does a job; what it raises is returned, since gevent would print it with its whole stack."""
    try:
        job(*args)
    except Exception as error:
        return error
    return None


def _remove_expired(path: Path, settings: JournalSettings) -> None:
    files = retention.expired(path, settings, time.time_ns() // 1000)
    freed = retention.remove(path, files) if files else 0
    if freed:
        log.info("the journal %s: %d files (%d bytes) are older or more than is kept", path, len(files), freed)


def record(broker: Broker, value: Any) -> JournalWriter | None:
    """Begin the journal of a hub, as the option `journal` of `create` says.

    Args:
        broker: the hub's broker.
        value: true, a folder, or a mapping of settings (help: journal); false and None for no journal.

    Raises:
        ArgumentError, JournalError: as `parse` and `JournalWriter`.
    """
    settings = parse(value, place.folder())
    return JournalWriter(settings, broker) if settings else None


def close_all() -> None:
    """Close every journal of this process, as the server does when it stops."""
    for journal in list(opened.values()):
        journal.close()
