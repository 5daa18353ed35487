"""The disk's work for the journal of a hub: keep what was written, look whether it is still there, remove what
has expired. The event loop waits for none of it.
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
from gevent.threadpool import ThreadPool

from smqrt.errors import JournalError
from smqrt.journal import committed, readers, retention
from smqrt.journal.numbers import NumberReserve
from smqrt.journal.segment import LOCK, BatchEntry, SegmentFile, is_open_at, summary_of
from smqrt.journal.settings import JournalSettings
from smqrt.journal.timestamps import Clock

log = logging.getLogger("smqrt.journal")

RETRY_S = 0.5
"""What the disk could not do is tried again after so long."""
RETENTION_S = 60.0
LOOK_S = 1.0
"""How often it is looked whether the folder is still there, and how long the disk takes."""
SLOW_S = 10.0
"""A disk that takes longer to keep what was written is told about."""
MOST_UNSYNCED_BYTES = 256 << 20
"""So much may wait for a disk that is slow; then publishers wait, before the kernel makes the event loop wait."""
CLOSE_S = 5.0
"""How long `close` waits for the disk. Less than the 10 s after which docker kills; what the system has then is lost by
a power failure only."""


class Unconfirmed(JournalError):
    """The journal ends, and its disk has not confirmed what was written."""


class Durability:
    """Keeps the segments of one node on the disk.

    Args:
        settings: of the journal.
        folder: of the node, `<journal>/wal/<node>`.
        lock: the descriptor of `segment.lock`.
        segment: what is appended to.
        sealed: called when the disk has finished a segment.
        kept: called with the number below which the disk has every row, when there are more of them.
        clock: gives the time of rows.
        numbers: what rows may have.

    Attributes:
        segment: what is appended to.
        syncs: how often the disk has confirmed it.
    """

    def __init__(
        self,
        settings: JournalSettings,
        folder: Path,
        lock: int,
        segment: SegmentFile,
        sealed: Callable[[], None],
        kept: Callable[[int], None],
        clock: Clock,
        numbers: NumberReserve,
    ) -> None:
        self._on_sealed, self._on_kept, self._clock, self._numbers = sealed, kept, clock, numbers
        self._is_reserving = False
        self.segment, self.syncs, self.sync_s = segment, 0, 0.0
        self._settings, self._folder, self._lock = settings, folder, lock
        self._sealed: deque[tuple[SegmentFile, dict[str, int]]] = deque()
        self._lost: deque[tuple[SegmentFile, BatchEntry]] = deque()
        self._put_back: deque[SegmentFile] = deque()
        self._disk, self._cleaner = DiskThread(), DiskThread()
        self._gone: OSError | None = None
        self._behind: OSError | None = None
        self._failing: set[str] = set()
        self._is_slow = False
        self._readers = readers.ReaderWatch(settings)
        self._timers = [
            _every(settings.sync_s, self.sync),
            _every(LOOK_S, self._look),
            _every(RETENTION_S, self.retire),
        ]

    # ---- how it is

    @property
    def fault(self) -> OSError | None:
        """Why nothing may be written at the moment; None when it may."""
        return self._gone or self._behind

    @property
    def is_sealing(self) -> bool:
        """The disk has yet to finish a segment: the next one isn't sealed before, so that few are open."""
        return bool(self._sealed)

    @property
    def unsynced_bytes(self) -> int:
        """How much the disk has not confirmed."""
        return sum(segment.unsynced_bytes for segment in self._open())

    @property
    def unsynced_rows(self) -> int:
        """The same in rows."""
        return sum(segment.unsynced_rows for segment in self._open())

    def _open(self) -> list[SegmentFile]:
        return list(dict.fromkeys([*(segment for segment, _ in list(self._sealed)), self.segment]))

    def stats(self) -> dict[str, int]:
        """What the disk has to do, and whether all is well; see `JournalWriter.stats`."""
        return {
            "syncs": self.syncs,
            "unsynced_bytes": self.unsynced_bytes,
            "disk_jobs": self._disk.jobs + self._cleaner.jobs,
            "disk_age_s": int(self._disk.age_s),
            "readers_stale": self._readers.stale,
            "readers_given_up": self._readers.given_up,
            "alarm": int(bool(self.fault or self._failing or self._is_slow)),
        }

    # ---- keeping

    def sync(self) -> None:
        """Have the disk keep what was written."""
        if self.segment.unsynced_bytes:
            self._disk.ask("sync", self._keep, self._kept)

    def _keep(self) -> None:
        segment, began_s = self.segment, time.monotonic()
        self._lost.extend((segment, entry) for entry in segment.sync())
        self.sync_s += time.monotonic() - began_s

    def _kept(self, error: Exception | None) -> None:
        self.syncs += error is None
        self._told("can't be synced", error)
        if error is None:
            self._on_kept(self._open()[0].synced_seq)

    def reserve(self, seq: int) -> None:
        """Have the disk keep that more numbers are used; `seq` is that of the next row."""
        if not self._is_reserving:
            self._is_reserving = True
            self._disk.ask("reserve", lambda: self._numbers.extend(seq), self._reserved)

    def _reserved(self, error: Exception | None) -> None:
        self._is_reserving = error is not None
        self._told("can't reserve numbers", error)

    def seal(self, following: SegmentFile, txns: Mapping[str, int]) -> None:
        """Have the disk finish the segment, and append to the next one.

        Args:
            following: the next one.
            txns: the last commit of each query.
        """
        self._sealed.append((self.segment, dict(txns)))
        self.segment = following
        self._disk.ask("seal", self._finish, self._finished)

    def _finish(self) -> None:
        while self._sealed:
            segment, txns = self._sealed[0]
            self._check()
            self._lost.extend((segment, entry) for entry in segment.sync(kept_bytes=0))
            committed.save_snapshot(segment.path.parent, txns, segment.next_seq)
            summary_of(segment.path)
            self._sealed.popleft()
            segment.close()

    def _finished(self, error: Exception | None) -> None:
        self._told("can't finish a segment", error)
        if error is None:
            self._on_kept(self._open()[0].synced_seq)
            self._on_sealed()

    def _told(self, what: str, error: Exception | None) -> None:
        """Says what fails once, and once that it doesn't any more."""
        if error is not None and what not in self._failing:
            self._failing.add(what)
            log.error("the journal %s %s: %s; it is tried again", self._settings.path, what, error)
        elif error is None and what in self._failing:
            self._failing.discard(what)
            log.warning("the journal %s: the disk does it again (it %s)", self._settings.path, what)
        while self._lost:
            segment, lost = self._lost.popleft()
            rows = f"rows {lost.first_seq} to {lost.next_seq - 1}"
            log.error("%s: %s are lost: the disk failed, and what it has is something else", segment.path, rows)

    # ---- looking

    def _look(self) -> None:
        self._watch(self._disk.age_s)
        self._disk.ask("look", self._check, self._looked, retries=False)

    def _watch(self, age_s: float) -> None:
        slow, path = age_s > SLOW_S, self._settings.path
        if slow and not self._is_slow:
            log.error("the journal %s: no sync for %.0f s; is the disk broken, or busy?", path, age_s)
        elif self._is_slow and not slow:
            log.warning("the journal %s: the disk keeps it again", path)
        self._is_slow = slow
        behind = slow and self.unsynced_bytes > MOST_UNSYNCED_BYTES
        if behind and not self._behind:
            what = f"the disk has not kept {self.unsynced_bytes >> 20} MiB"
            self._behind = OSError(errno.ETIMEDOUT, what)
            log.error("the journal %s can't be written (%s); publishers wait until it has", path, what)
        elif not behind:
            self._behind = None

    def _check(self) -> None:
        """Looks whether the files are where they were. Of what was removed, what is open here is put back: once the
        loop knows, and appends no more.

        Raises:
            OSError: they are not.
        """
        lock = self._folder / LOCK
        if not is_open_at(self._lock, lock):
            _lock_copy(lock, self._lock)
        for segment in self._open():
            if segment.is_there():
                continue
            if not self._gone:
                raise OSError(errno.ENOENT, f"{segment.path.name} was removed")
            segment.put_back()
            self._put_back.append(segment)

    def _looked(self, error: Exception | None) -> None:
        while self._put_back:
            log.warning("%s was made again from what the hub has open", self._put_back.popleft().path)
        if error is not None and not self._gone:
            self._gone = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
            log.error(
                "the journal %s can't be written (%s); publishers wait, and what comes is kept: bring it back",
                self._settings.path,
                self._gone.strerror,
            )
        elif error is None and self._gone:
            self._gone = None
            self._disk.ask("reserve", self._numbers.repeat, self._reserved)
            log.warning("the journal %s is there again", self._settings.path)

    # ---- removing, ending

    def retire(self) -> None:
        """Have what has expired removed. A clock that jumps makes nothing older than it is."""
        longest_s = max(self._settings.retain_s or 0.0, self._settings.reader_timeout_s or 0.0)
        now_us = self._clock.now_us() - self._clock.leapt_us(longest_s)
        self._cleaner.ask("retire", lambda: self._remove_expired(now_us), self._retired, retries=False)

    def _remove_expired(self, now_us: int) -> None:
        path = self._settings.path
        retention.release_held(path, self._settings, now_us)
        files = retention.expired(path, self._settings, now_us)
        freed = retention.remove(path, files) if files else 0
        for sentence in self._readers.look(now_us):
            log.warning("the journal %s: %s", path, sentence)
        if freed:
            log.info("the journal %s: %d files (%d bytes) are older or more than is kept", path, len(files), freed)

    def _retired(self, error: Exception | None) -> None:
        self._told("has old parts that can't be removed", error)

    def join(self, timeout_s: float = CLOSE_S) -> bool:
        """Waits until the disk has done everything; returns whether it has. Blocks."""
        return self._disk.join(timeout_s) and self._cleaner.join(timeout_s)

    def close(self, txns: Mapping[str, int], closed: Callable[[], None]) -> bool:
        """Has the disk keep everything, and waits for that, but not for ever. Blocks.

        Args:
            txns: the last commit of each query.
            closed: called when it has, be it later.

        Returns:
            Whether the disk has.
        """
        for timer in self._timers:
            timer.stop()

        def finished(error: Exception | None) -> None:
            self._finished(error)
            if error is None:
                self._disk.close()
                self._cleaner.close()
                closed()

        def settle() -> None:
            self._finish()
            with suppress(OSError):  # the next hub goes on behind what is reserved
                self._numbers.settle(self.segment.next_seq)

        self._on_sealed = lambda: None  # of a segment that is being finished: this one is not the last
        self._sealed.append((self.segment, dict(txns)))
        self._disk.ask("seal", settle, finished)
        self._cleaner.join(CLOSE_S)
        return self._disk.join(CLOSE_S)


def _every(seconds: float, function: Callable[[], None]) -> Any:
    timer = get_hub().loop.timer(seconds, seconds, ref=False)
    timer.start(function)
    return timer


def _lock_copy(path: Path, lock: int) -> None:
    """Locks a copy of the folder that has come in its place, in the place of the one that is gone.

    Raises:
        OSError: there is none.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise OSError(errno.ENOENT, "its folder was moved, removed or unmounted") from None
    try:
        if os.read(fd, 32).strip() != str(os.getpid()).encode():
            raise OSError(errno.ENOENT, "another folder is in its place")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.dup2(fd, lock, inheritable=False)
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
    """Does jobs one after the other in a thread.

    A job is of a kind. Of each kind at most one runs and one waits, so that what waits is bounded by the kinds there
    are; nothing is skipped, since the one that waits does what is to be done when it runs.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool(1)  # it is given one job at a time: handing it a third would wait, or raise in the loop
        self._waiting: dict[str, _Job] = {}
        self._running: _Job | None = None
        self._retry = get_hub().loop.timer(RETRY_S, ref=False)
        self._idle = Event()
        self._idle.set()

    def ask(
        self, kind: str, work: Callable[[], object], done: Callable[[Exception | None], None], retries: bool = True
    ) -> None:
        """Have a job done. One of the same kind that waits is replaced by it, and keeps its place.

        Args:
            kind: what it is about.
            work: the job, called in the thread.
            done: called in the loop with what `work` raised, or None.
            retries: what has failed is done again every `RETRY_S`, until it succeeds.
        """
        job = _Job(kind, work, done, retries, time.monotonic())
        if before := self._waiting.get(kind):
            job.since_s, job.not_before_s = before.since_s, before.not_before_s
        self._waiting[kind] = job
        self._idle.clear()
        self._next()

    @property
    def jobs(self) -> int:
        """How many jobs wait or run."""
        return len(self._waiting) + bool(self._running)

    @property
    def age_s(self) -> float:
        """For how long the oldest job that is not done has been waiting; 0 when all are."""
        jobs = [*self._waiting.values(), *filter(None, [self._running])]
        return time.monotonic() - min(job.since_s for job in jobs) if jobs else 0.0

    def join(self, timeout_s: float) -> bool:
        """Waits until everything is done; returns whether it is. Blocks."""
        return bool(self._idle.wait(timeout_s))

    def close(self) -> None:
        """Ends the thread, unless it is in the middle of something; what waits is dropped."""
        self._waiting.clear()
        self._retry.stop()
        if self._running is None:
            self._pool.kill()

    def _next(self) -> None:
        if self._running is not None:
            return
        now_s = time.monotonic()
        ready = next((job for job in self._waiting.values() if job.not_before_s <= now_s), None)
        if ready is None:
            self._wait()
            return
        self._running = self._waiting.pop(ready.kind)
        self._pool.spawn(_error_of, ready.work).rawlink(self._ended)

    def _wait(self) -> None:
        if self._waiting:
            self._retry.stop()
            self._retry.start(self._next)
        else:
            self._idle.set()

    def _ended(self, result: Any) -> None:
        job, self._running = self._running, None
        assert job
        error: Exception | None = result.value
        if error is not None and job.retries:
            self._put_back(job)
        try:
            job.done(error)
        finally:
            self._next()

    def _put_back(self, job: _Job) -> None:
        newer = self._waiting.get(job.kind, job)
        newer.since_s, newer.not_before_s = job.since_s, time.monotonic() + RETRY_S
        self._waiting.setdefault(job.kind, job)


def _error_of(job: Callable[[], object]) -> Exception | None:
    """Does a job; what it raises is returned, since gevent would print it with its whole stack."""
    try:
        job()
    except Exception as error:
        return error
    return None
