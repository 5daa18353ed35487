"""Disk work of a hub's journal in threads: sync, check, retention.

The event loop does not wait for this work.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gevent import get_hub
from gevent.event import Event

from smqrt.errors import JournalError
from smqrt.journal import committed, readers, retention
from smqrt.journal.record import Clock
from smqrt.journal.segment import LOCK, BatchEntry, NumberReserve, SegmentFile, is_open_at, summary_of
from smqrt.journal.settings import JournalSettings
from smqrt.loop.threads import DedicatedThreads

log = logging.getLogger("smqrt.journal")

RETRY_S = 0.5
"""A failed job is repeated after this time."""
RETENTION_S = 60.0
"""Time between two removals of expired files."""
CHECK_S = 1.0
"""Time between two checks of the folder's presence and the delay of the disk."""
SLOW_S = 10.0
"""A sync that takes longer is logged."""
MAX_UNSYNCED_BYTES = 256 << 20
"""With more unsynced data, publishers wait for a slow disk. Otherwise the kernel would block the event loop."""
CLOSE_S = 5.0
"""Time for which `close` waits for the disk: less than the 10 s after which Docker kills the process. Then the data is
in the page cache, and only a power failure can lose it.
"""


class Unconfirmed(JournalError):
    """The journal was closed before the disk confirmed the written data."""


class Durability:
    """Syncs and checks the segments of one node, and removes expired files.

    Args:
        settings: settings of the journal.
        folder: the node's folder, `<journal>/wal/<node>`.
        lock: the descriptor from `segment.lock`.
        segment: the segment to which rows are appended.
        sealed: called when a segment was sealed.
        synced: called after a sync, with the number below which the disk has every row.
        clock: the clock of rows.
        numbers: the reservation of numbers.

    Attributes:
        segment: the segment to which rows are appended.
        syncs: number of successful syncs.
        sync_s: total time of all syncs, seconds.
    """

    def __init__(
        self,
        settings: JournalSettings,
        folder: Path,
        lock: int,
        segment: SegmentFile,
        sealed: Callable[[], None],
        synced: Callable[[int], None],
        clock: Clock,
        numbers: NumberReserve,
    ) -> None:
        self._on_sealed, self._on_synced, self._clock, self._numbers = sealed, synced, clock, numbers
        self._is_reserving = False
        self.segment, self.syncs, self.sync_s = segment, 0, 0.0
        self._settings, self._folder, self._lock = settings, folder, lock
        self._sealed: deque[tuple[SegmentFile, dict[str, int]]] = deque()
        self._lost: deque[tuple[SegmentFile, BatchEntry]] = deque()
        self._restored: deque[SegmentFile] = deque()
        self._disk, self._cleaner = DiskThread(), DiskThread()  # two: syncs don't wait for the removal of files
        self._missing: OSError | None = None
        self._overload: OSError | None = None
        self._failing: set[str] = set()
        self._is_slow = False
        self._readers = readers.ReaderWatch(settings)
        self._timers = [
            _every(settings.sync_s, self.sync),
            _every(CHECK_S, self._check_disk),
            _every(RETENTION_S, self.start_retention),
        ]

    # ---- state

    @property
    def fault(self) -> OSError | None:
        """The reason why no data can be written now; None when writing is possible."""
        return self._missing or self._overload

    @property
    def is_sealing(self) -> bool:
        """Whether a segment is being sealed. The next segment is opened after that, so that few files are open."""
        return bool(self._sealed)

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that the disk has not confirmed."""
        return sum(segment.unsynced_bytes for segment in self._open_segments())

    @property
    def unsynced_rows(self) -> int:
        """Rows that the disk has not confirmed."""
        return sum(segment.unsynced_rows for segment in self._open_segments())

    def _open_segments(self) -> list[SegmentFile]:
        return list(dict.fromkeys([*(segment for segment, _ in list(self._sealed)), self.segment]))

    def stats(self) -> dict[str, int]:
        """Return the state of the disk; see `JournalWriter.stats`."""
        return {
            "syncs": self.syncs,
            "unsynced_bytes": self.unsynced_bytes,
            "disk_jobs": self._disk.jobs + self._cleaner.jobs,
            "disk_age_s": int(self._disk.age_s),
            "readers_stale": self._readers.stale,
            "readers_given_up": self._readers.given_up,
            "alarm": int(bool(self.fault or self._failing or self._is_slow)),
        }

    # ---- syncing

    def sync(self) -> None:
        """Start a sync of all written data."""
        if self.segment.unsynced_bytes:
            self._disk.submit("sync", self._sync_segment, self._on_sync_done)

    def _sync_segment(self) -> None:
        segment, began_s = self.segment, time.monotonic()
        self._lost.extend((segment, entry) for entry in segment.sync())
        self.sync_s += time.monotonic() - began_s

    def _on_sync_done(self, error: Exception | None) -> None:
        self.syncs += error is None
        self._report_failure("sync", error)
        if error is None:
            self._on_synced(self._open_segments()[0].synced_seq)

    def reserve(self, seq: int) -> None:
        """Start a reservation of more numbers; `seq` is the number of the next row."""
        if not self._is_reserving:
            self._is_reserving = True
            self._disk.submit("reserve", lambda: self._numbers.extend(seq), self._on_reserve_done)

    def _on_reserve_done(self, error: Exception | None) -> None:
        self._is_reserving = error is not None  # a failed job is repeated
        self._report_failure("reservation of numbers", error)

    def seal(self, following: SegmentFile, txns: Mapping[str, int]) -> None:
        """Start sealing the segment, and use the next one.

        Args:
            following: the next segment.
            txns: the last commit of each query.
        """
        self._sealed.append((self.segment, dict(txns)))
        self.segment = following
        self._disk.submit("seal", self._seal_segments, self._on_seal_done)

    def _seal_segments(self) -> None:
        while self._sealed:
            segment, txns = self._sealed[0]
            self._check_files()
            self._lost.extend((segment, entry) for entry in segment.sync(kept_bytes=0))
            committed.save_snapshot(segment.path.parent, txns, segment.next_seq)
            summary_of(segment.path)  # stores the summary for readers
            self._sealed.popleft()  # last: after a failure, all of this is repeated
            segment.close()

    def _on_seal_done(self, error: Exception | None) -> None:
        self._report_failure("sealing of a segment", error)
        if error is None:
            self._on_synced(self._open_segments()[0].synced_seq)
            self._on_sealed()

    def _report_failure(self, what: str, error: Exception | None) -> None:
        """Log a failure when it begins and when it ends."""
        if error is not None and what not in self._failing:
            self._failing.add(what)
            log.error("the journal %s: %s failed: %s; retrying", self._settings.path, what, error)
        elif error is None and what in self._failing:
            self._failing.discard(what)
            log.warning("the journal %s: %s succeeded after a failure", self._settings.path, what)
        while self._lost:
            segment, lost = self._lost.popleft()
            rows = f"rows {lost.first_seq} to {lost.next_seq - 1}"
            log.error("%s: %s are lost: the disk failed and returns different data", segment.path, rows)

    # ---- checking

    def _check_disk(self) -> None:
        age_s, path = self._disk.age_s, self._settings.path
        is_slow = age_s > SLOW_S
        if is_slow and not self._is_slow:
            log.error("the journal %s: no sync for %.0f s; the disk is broken or busy", path, age_s)
        elif self._is_slow and not is_slow:
            log.warning("the journal %s: disk syncs recovered", path)
        self._is_slow = is_slow
        is_overloaded = is_slow and self.unsynced_bytes > MAX_UNSYNCED_BYTES
        if is_overloaded and not self._overload:
            what = f"{self.unsynced_bytes >> 20} MiB are not synced"
            self._overload = OSError(errno.ETIMEDOUT, what)
            log.error("the journal %s can't be written (%s); publishers wait until the disk recovers", path, what)
        elif not is_overloaded:
            self._overload = None
        self._disk.submit("check", self._check_files, self._on_check_done, retries=False)

    def _check_files(self) -> None:
        """Check that the lock and the segments are at their paths, and restore removed segments.

        A segment is restored at the second check. By then the event loop has the error and appends nothing.

        Raises:
            OSError: a file is missing.
        """
        lock = self._folder / LOCK
        if not is_open_at(self._lock, lock):
            _lock_replacement(lock, self._lock)
        for segment in self._open_segments():
            if segment.is_present():
                continue
            if not self._missing:
                raise OSError(errno.ENOENT, f"{segment.path.name} was removed")
            segment.restore()
            self._restored.append(segment)

    def _on_check_done(self, error: Exception | None) -> None:
        while self._restored:
            log.warning("%s was removed; it is restored from the open file", self._restored.popleft().path)
        if error is not None and not self._missing:
            self._missing = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
            log.error(
                "the journal %s can't be written (%s); publishers wait and nothing is lost: restore it",
                self._settings.path,
                self._missing.strerror,
            )
        elif error is None and self._missing:
            self._missing = None
            self._disk.submit("reserve", self._numbers.repeat, self._on_reserve_done)
            log.warning("the journal %s is available again", self._settings.path)

    # ---- retention, closing

    def start_retention(self) -> None:
        """Start the removal of expired files. After a jump of the clock, rows don't expire early."""
        longest_s = max(self._settings.retain_s or 0.0, self._settings.reader_timeout_s or 0.0)
        now_us = self._clock.now_us() - self._clock.jumped_us(longest_s)
        self._cleaner.submit("retention", lambda: self._remove_expired(now_us), self._on_retention_done, retries=False)

    def _remove_expired(self, now_us: int) -> None:
        path = self._settings.path
        retention.release_held(path, self._settings, now_us)
        files = retention.expired(path, self._settings, now_us)
        freed = retention.remove(path, files) if files else 0
        for sentence in self._readers.check(now_us):
            log.warning("the journal %s: %s", path, sentence)
        if freed:
            log.info("the journal %s: removed %d expired files (%d bytes)", path, len(files), freed)

    def _on_retention_done(self, error: Exception | None) -> None:
        self._report_failure("removal of expired files", error)

    def join(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until all jobs are done; return whether they are. Blocks."""
        return self._disk.join(timeout_s) and self._cleaner.join(timeout_s)

    def close(self, txns: Mapping[str, int], closed: Callable[[], None]) -> bool:
        """Seal the segment, and wait for that for `CLOSE_S` at most. Blocks.

        Args:
            txns: the last commit of each query.
            closed: called when all data is on the disk, even after this method has returned.

        Returns:
            Whether all data is on the disk.
        """
        for timer in self._timers:
            timer.stop()

        def finished(error: Exception | None) -> None:
            self._on_seal_done(error)
            if error is None:
                self._disk.close()
                self._cleaner.close()
                closed()

        def seal_and_release() -> None:
            self._seal_segments()
            with suppress(OSError):  # not needed: the next hub then continues after the reservation
                self._numbers.release(self.segment.next_seq)

        self._on_sealed = lambda: None  # for a segment that is being sealed now, it would start another segment
        self._sealed.append((self.segment, dict(txns)))
        self._disk.submit("seal", seal_and_release, finished)
        self._cleaner.join(CLOSE_S)
        return self._disk.join(CLOSE_S)


def _every(seconds: float, function: Callable[[], None]) -> Any:
    timer = get_hub().loop.timer(seconds, seconds, ref=False)
    timer.start(function)
    return timer


def _lock_replacement(path: Path, lock: int) -> None:
    """Lock the copy that has replaced the folder. Raise OSError if there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise OSError(errno.ENOENT, "its folder was moved, removed or unmounted") from None
    try:
        if os.read(fd, 32).strip() != str(os.getpid()).encode():  # a copy of our lock file has our process id
            raise OSError(errno.ENOENT, "another folder is in its place")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(fd, lock, inheritable=False)  # all users of the descriptor have the new lock
    finally:
        os.close(fd)


# ---- the thread


@dataclass(slots=True)
class _Job:
    kind: str
    work: Callable[[], object]
    done: Callable[[Exception | None], None]
    retries: bool
    since_s: float
    not_before_s: float = 0.0


class DiskThread:
    """Runs jobs one after the other in a thread.

    Each job has a kind. Of each kind at most one job runs and one waits, which bounds the queue. No work is skipped,
    since a waiting job handles all work that is due when it runs.
    """

    def __init__(self) -> None:
        # It gets one job at a time: while its thread is busy, `submit` would block, or raise in the event loop.
        self._pool = DedicatedThreads()
        self._waiting: dict[str, _Job] = {}
        self._running: _Job | None = None
        self._retry = get_hub().loop.timer(RETRY_S, ref=False)
        self._idle = Event()
        self._idle.set()

    def submit(
        self, kind: str, work: Callable[[], object], done: Callable[[Exception | None], None], retries: bool = True
    ) -> None:
        """Queue a job. It replaces a waiting job of the same kind, at the same position.

        Args:
            kind: the kind of the job.
            work: the job, called in the thread.
            done: called in the event loop with the exception that `work` raised, or None.
            retries: whether a failed job is repeated every `RETRY_S` until it succeeds.
        """
        job = _Job(kind, work, done, retries, time.monotonic())
        if before := self._waiting.get(kind):
            job.since_s, job.not_before_s = before.since_s, before.not_before_s
        self._waiting[kind] = job
        self._idle.clear()
        self._start_next()

    @property
    def jobs(self) -> int:
        """Number of jobs that wait or run."""
        return len(self._waiting) + bool(self._running)

    @property
    def age_s(self) -> float:
        """Seconds since the oldest unfinished job was queued; 0 without a job."""
        jobs = [*self._waiting.values(), *filter(None, [self._running])]
        return time.monotonic() - min(job.since_s for job in jobs) if jobs else 0.0

    def join(self, timeout_s: float) -> bool:
        """Wait until all jobs are done; return whether they are. Blocks."""
        return bool(self._idle.wait(timeout_s))

    def close(self) -> None:
        """Stop the thread, unless a job is running; waiting jobs are dropped."""
        self._waiting.clear()
        self._retry.stop()
        if self._running is None:
            self._pool.close()

    def _start_next(self) -> None:
        if self._running is not None:
            return
        now_s = time.monotonic()
        ready = next((job for job in self._waiting.values() if job.not_before_s <= now_s), None)
        if ready is not None:
            self._running = self._waiting.pop(ready.kind)
            self._pool.submit(_run_job, ready.work).rawlink(self._on_job_done)
        elif self._waiting:
            self._retry.stop()
            self._retry.start(self._start_next)
        else:
            self._idle.set()

    def _on_job_done(self, result: Any) -> None:
        job, self._running = self._running, None
        assert job
        error: Exception | None = result.value
        if error is not None and job.retries:
            newer = self._waiting.setdefault(job.kind, job)  # a newer job of this kind includes the failed one's work
            newer.since_s, newer.not_before_s = job.since_s, time.monotonic() + RETRY_S
        try:
            job.done(error)
        finally:
            self._start_next()


def _run_job(job: Callable[[], object]) -> Exception | None:
    """Run a job; return its exception, since gevent would print a raised one with its stack."""
    try:
        job()
    except Exception as error:
        return error
    return None
