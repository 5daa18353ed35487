"""Announcement of a journal's hub, and the listing for remote readers.

`hub.json` in the folder of an open journal has the hub's address while the journal is served. When several hubs share
a folder, the one that holds `hub.lock` is announced. When that hub stops, another one is announced. It first reads
the commits to the former hub, so that it recognizes a repeated commit. The files are readable by their owner only,
since they allow commits to the hub.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import gevent
from gevent.event import AsyncResult, Event
from gevent.lock import BoundedSemaphore

from smqrt.errors import JournalError
from smqrt.journal import manifest, segment
from smqrt.journal.files import IS_MISSING, existing_folder, journal_token, write_whole
from smqrt.journal.reader import Journal
from smqrt.journal.segment import DATA, summary_of
from smqrt.loop.threads import in_thread

log = logging.getLogger("smqrt.journal")

HUB_FILE = "hub.json"
_LOCK = "hub.lock"
REFRESH_S = 1.0


class Announced(Protocol):
    """An announced journal: `smqrt.journal.writer.JournalWriter`."""

    @property
    def path(self) -> Path:
        """Its folder."""

    def read_other_commits(self) -> None:
        """Read the commits of pipelines to other hubs of the folder; blocks the greenlet."""


class Announcer:
    """Writes `hub.json` for every open journal.

    Args:
        opened: the journals by name; read once a second.
        url: the server's address, without a slash at the end.
    """

    def __init__(self, opened: Mapping[str, Announced], url: str) -> None:
        self._opened = opened
        self._url = url
        self._announced_urls: dict[Path, str] = {}
        self._locks: dict[Path, int] = {}
        self._logged: dict[Path, str] = {}
        self._lock = BoundedSemaphore()
        self._refresher: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Announce all open journals now, and look for changes once a second."""
        self.refresh()
        self._refresher = gevent.spawn(self._refresh_regularly)

    def refresh(self) -> None:
        """Announce new journals, and withdraw closed ones."""
        with self._lock:
            wanted: dict[Path, tuple[Announced, str]] = {}
            for name, journal in list(self._opened.items()):  # of one folder, the journal that was opened first
                wanted.setdefault(journal.path, (journal, f"{self._url}/rtl/journal/{quote(name, safe='')}"))
            for path in self._locks.keys() - wanted.keys():
                self._withdraw(path)
            for path, (journal, url) in wanted.items():
                if self._announced_urls.get(path) != url:
                    self._try_announce(journal, url)

    def stop(self) -> None:
        """Withdraw all announcements."""
        if self._refresher is not None:
            self._refresher.kill()
        for path in list(self._locks):
            self._withdraw(path)

    def _refresh_regularly(self) -> None:
        while True:
            gevent.sleep(REFRESH_S)
            self.refresh()

    def _try_announce(self, journal: Announced, url: str) -> None:
        path = journal.path
        try:
            if path not in self._locks:
                lock = lock_announcement(path)
                if lock is None:
                    message = f"{path}: pipelines use another hub of this folder while it runs"
                    self._log_once(path, logging.INFO, message)
                    return
                self._locks[path] = lock
            journal.read_other_commits()  # before pipelines find this hub: it must recognize a repeated commit
            announce(path, url)
            self._announced_urls[path] = url
        except JournalError as error:
            self._log_once(path, logging.ERROR, str(error))

    def _log_once(self, path: Path, level: int, message: str) -> None:
        """Log a message, unless it was the last one about this journal: the attempt is repeated every second."""
        if self._logged.get(path) != message:
            self._logged[path] = message
            log.log(level, "%s", message)

    def _withdraw(self, path: Path) -> None:
        self._announced_urls.pop(path, None)
        self._logged.pop(path, None)
        withdraw(path)  # before the lock is released: afterwards another hub may write the file
        os.close(self._locks.pop(path))


# ---- files


def lock_announcement(journal: Path) -> int | None:
    """Lock a journal for announcements, until the descriptor is closed or the process ends.

    Args:
        journal: its folder.

    Returns:
        A file descriptor; None when another process has the lock.

    Raises:
        JournalError: the folder can't be used.
    """
    path = journal / _LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"{path} can't be used: {error.strerror}; give this user access to the folder.") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it even after a kill
    except OSError:
        os.close(fd)
        return None
    return fd


def announce(journal: Path, url: str) -> None:
    """Write the address of a journal to `hub.json`.

    Args:
        journal: its folder.
        url: its address on the hub, without a slash at the end.

    Raises:
        JournalError: as `journal_token`, or `hub.json` can't be written.
    """
    values = {"url": url, "token": journal_token(journal), "pid": os.getpid()}
    path = journal / HUB_FILE
    try:
        write_whole(path, (json.dumps(values) + "\n").encode(), sync=False)  # a sync would block the event loop
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}; pipelines need it to find the hub.") from None


def withdraw(journal: Path) -> None:
    """Remove `hub.json`, unless another process has replaced it.

    Args:
        journal: the journal's folder.
    """
    path = journal / HUB_FILE
    with suppress(OSError, ValueError, AttributeError):
        if json.loads(path.read_text("utf-8")).get("pid") == os.getpid():
            path.unlink()


# ---- listing of a served journal: its segments, the root of its manifest, and the end of each node
#
# Creating the listing blocks on the disk, so a hub does that in a thread. Readers request the ends often. A hub has the
# end of its own node in memory. It reads the ends of other nodes in a thread, at most a few times a second for all
# readers. A request that waits for rows costs one comparison in a timer that all requests share.

_MTIME_STEP_S = 0.1
"""Two changes within a tick of the kernel's clock have the same modification time."""

OTHER_ENDS_S = 0.2
"""Time for which the ends of other nodes are cached, seconds."""
TICK_S = 0.02
"""Time between two checks of new rows for waiting requests, seconds."""
MAX_WAITING = 1000
"""Maximum number of waiting requests; further requests are answered at once."""

_Version = tuple[tuple[str, int], ...]


class JournalListing:
    """The JSON listing for remote readers: `wal` (see `segments`), `manifest` (its root), and `gaps` by node.

    It is created again when a segment or the manifest has changed. New rows don't change it.

    Args:
        journal: its folder.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._cached: tuple[_Version, bytes, str] | None = None

    def text(self) -> tuple[bytes, str]:
        """Return the JSON, and its ETag.

        Raises:
            JournalError: the journal can't be read.
        """
        watched = [self._journal / manifest.FILE, self._journal / "wal", *segment.node_folders(self._journal)]
        version = tuple((str(path), path.stat().st_mtime_ns) for path in watched if path.exists())
        cached = self._cached
        if cached is not None and cached[0] == version:
            return cached[1:]
        body = listing(self._journal)
        tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
        newest_s = max((changed_ns for _, changed_ns in version), default=0) / 1e9
        is_settled = abs(time.time() - newest_s) > _MTIME_STEP_S  # abs: a wrong clock may have set it in the future
        self._cached = (version, body, tag) if is_settled else None  # else a later change could have the same time
        return body, tag


def listing(journal: Path) -> bytes:
    """Return the JSON listing; see `JournalListing`.

    Raises:
        JournalError: it can't be read.
    """
    try:
        with existing_folder(journal):
            wal = segments(journal)  # before the manifest: rows that are compacted meanwhile are in both
            compacted = manifest.text(journal)  # as text: to parse and encode a long manifest would take too long
    except FileNotFoundError:
        raise JournalError(f"{journal} {IS_MISSING}") from None
    gaps = {folder.name: found for folder in segment.node_folders(journal) if (found := segment.gaps(folder))}
    rest = json.dumps({"version": manifest.VERSION, "wal": wal, "gaps": gaps}, separators=(",", ":")).encode()
    return b'%b,"manifest":%b}' % (rest[:-1], compacted)


def segments(journal: Path) -> dict[str, list[dict[str, int]]]:
    """Return, by node, its segments in ascending order: `first` (sequence number).

    Sealed segments also have `idx_bytes`, `ts_min_us` and `ts_max_us`, and without missing numbers `end` and `bytes`.
    """
    nodes: dict[str, list[dict[str, int]]] = {}
    for folder in segment.node_folders(journal):
        listed = nodes[folder.name] = []
        firsts = segment.firsts(folder)
        for first in firsts[:-1]:
            path = f"{folder}/{segment.name(first)}{DATA}"
            try:
                summary, size_bytes = summary_of(path), os.stat(path).st_size
            except FileNotFoundError:  # compacted meanwhile
                continue
            entry = {"first": first, "idx_bytes": summary.index_bytes}
            entry |= {"ts_min_us": summary.ts_min_us, "ts_max_us": summary.ts_max_us}
            listed.append(entry | ({"end": summary.end, "bytes": size_bytes} if summary.is_dense else {}))
        listed += [{"first": first} for first in firsts[-1:]]  # without sizes: the newest segment grows
    return nodes


# ---- ends of nodes


class ServedJournal(Protocol):
    """A journal that a hub serves, and usually writes."""

    @property
    def path(self) -> Path:
        """Its folder."""

    def end(self) -> Mapping[str, int]:
        """Return, by node, the number of the next row, for the nodes that this hub writes."""


class JournalEnds:
    """The end of each node of a journal: the number of its next row.

    Args:
        journal: the journal.
        is_open: returns whether it is still served; requests don't wait for a closed journal.
    """

    def __init__(self, journal: ServedJournal, is_open: Callable[[], bool]) -> None:
        self._journal, self._is_open = journal, is_open
        self._other_ends: Mapping[str, int] = {}
        self._read_s = float("-inf")
        self._reading: AsyncResult[None] | None = None
        self._new_rows = Event()
        self._waiting, self._watching = 0, False

    def now(self) -> dict[str, int]:
        """Return, by node, the number of the next row.

        Raises:
            JournalError: the journal can't be read.
        """
        own = self._journal.end()
        if not own or time.monotonic() - self._read_s > OTHER_ENDS_S:
            self._read_disk(own)
        return {**self._other_ends, **self._journal.end()}

    def _read_disk(self, own: Mapping[str, int]) -> None:
        """Read the ends of other nodes from the disk, or wait for a read that is running."""
        if self._reading is None:
            reading = self._reading = AsyncResult()
            try:
                self._other_ends = in_thread(lambda: Journal(self._journal.path).end(own))
                self._read_s = time.monotonic()
                reading.set()
            except BaseException as error:
                reading.set_exception(error if isinstance(error, Exception) else JournalError("the hub was closed."))
                raise
            finally:
                self._reading = None
        else:
            self._reading.get()
            if not own:  # the read may have begun before this request
                self._read_disk(own)

    def after(self, known: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        """Return `now()` once there are rows after `known`, after `timeout_s`, or when the journal is closed.

        Args:
            known: by node, the number of the next row so far.
            timeout_s: the longest wait, seconds.

        Raises:
            JournalError: the journal can't be read.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.now()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._waiting >= MAX_WAITING or not self._is_open() or _has_new_rows(found, known):
                return found
            self._waiting += 1
            if not self._watching:
                self._watching = True
                gevent.spawn(self._watch, found)
            try:
                self._new_rows.wait(left_s)
            finally:
                self._waiting -= 1

    def _watch(self, seen: Mapping[str, int]) -> None:
        """Wake the waiting requests once there are more rows; end when no request waits."""
        while self._waiting:
            gevent.sleep(TICK_S)
            try:
                must_wake = not self._is_open() or _has_new_rows(self.now(), seen)
            except Exception:
                must_wake = True  # each request gets the error itself
            if must_wake:
                break
        # A new event before the old one is set: a woken request may wait again.
        woken, self._new_rows, self._watching = self._new_rows, Event(), False
        woken.set()


def _has_new_rows(found: Mapping[str, int], known: Mapping[str, int]) -> bool:
    return any(seq > known.get(node, -1) for node, seq in found.items())
