"""Announcements of the hub that pipelines go to: `hub.json` of every open journal, there while the journal is served.

Of several hubs that share a folder the first one announces itself, and another takes over when it is gone, knowing by
then what pipelines have committed to the first: so a commit that comes again is recognized by either.
The first one is who holds `hub.lock`. The files are readable by their owner only: who may read the journal's folder as
its owner may commit to its hub.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import gevent
from gevent.event import AsyncResult, Event
from gevent.lock import BoundedSemaphore

from smqrt.errors import JournalError
from smqrt.journal import manifest, numbers, segment
from smqrt.journal.files import MOVED, there, write_whole
from smqrt.journal.reader import Journal
from smqrt.journal.segment import DATA, summary_of
from smqrt.journal.tokens import journal_token
from smqrt.loop.greenlet_pool import in_thread

log = logging.getLogger("smqrt.journal")

HUB_FILE = "hub.json"
_LOCK = "hub.lock"
LOOK_S = 1.0


class Announced(Protocol):
    """What is announced: `smqrt.journal.writer.JournalWriter`."""

    @property
    def path(self) -> Path:
        """Its folder."""

    def learn(self) -> None:
        """Take note of what pipelines have committed to other hubs of the folder; blocks the greenlet."""


class Announcer:
    """Keeps `hub.json` of every open journal.

    Args:
        opened: the journals by name, looked at every second.
        url: the server's address, without a slash at the end.
    """

    def __init__(self, opened: Mapping[str, Announced], url: str) -> None:
        self._opened = opened
        self._url = url
        self._told: dict[Path, str] = {}
        self._held: dict[Path, int] = {}
        self._said: dict[Path, str] = {}
        self._turn = BoundedSemaphore()
        self._looking: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Begin; what is open now is announced at once."""
        self.refresh()
        self._looking = gevent.spawn(self._look)

    def refresh(self) -> None:
        """Announce what was opened and takes back what was closed since the last look."""
        with self._turn:
            wanted = self._wanted()
            for path in self._held.keys() - wanted.keys():
                self._withdraw(path)
            for path, (journal, url) in wanted.items():
                if self._told.get(path) != url:
                    self._try(journal, url)

    def stop(self) -> None:
        """Take everything back."""
        if self._looking is not None:
            self._looking.kill()
        for path in list(self._held):
            self._withdraw(path)

    def _look(self) -> None:
        while True:
            gevent.sleep(LOOK_S)
            self.refresh()

    def _wanted(self) -> dict[Path, tuple[Announced, str]]:
        """Return the journals and their addresses by folder, of each folder the one that was opened first."""
        wanted: dict[Path, tuple[Announced, str]] = {}
        for name, journal in list(self._opened.items()):
            wanted.setdefault(journal.path, (journal, f"{self._url}/rtl/journal/{quote(name, safe='')}"))
        return wanted

    def _try(self, journal: Announced, url: str) -> None:
        try:
            if self._holds(journal.path):
                journal.learn()
                announce(journal.path, url)
                self._told[journal.path] = url
        except JournalError as error:
            self._say(journal.path, logging.ERROR, str(error))

    def _holds(self, path: Path) -> bool:
        """Return whether no other process announces the folder; from now on none does."""
        if path not in self._held and (fd := hold(path)) is not None:
            self._held[path] = fd
        if path not in self._held:
            self._say(path, logging.INFO, f"{path}: pipelines go to another hub of this folder, while that is there")
        return path in self._held

    def _say(self, path: Path, level: int, sentence: str) -> None:
        """Log what is tried again every second, once."""
        if self._said.get(path) != sentence:
            self._said[path] = sentence
            log.log(level, "%s", sentence)

    def _withdraw(self, path: Path) -> None:
        self._told.pop(path, None)
        self._said.pop(path, None)
        withdraw(path)
        os.close(self._held.pop(path))


# ---- files


def hold(journal: Path) -> int | None:
    """Make this process the one that announces a journal, until the descriptor is closed or the process ends.

    Args:
        journal: its folder.

    Returns:
        A file descriptor; None when another process is the one.

    Raises:
        JournalError: the folder can't be used.
    """
    path = journal / _LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"{path} can't be used: {error.strerror}; give this user the folder.") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def announce(journal: Path, url: str) -> None:
    """Tell where a journal is served now.

    Args:
        journal: its folder.
        url: its address on the hub, without a slash at the end.

    Raises:
        JournalError: as `journal_token`, or `hub.json` can't be written.
    """
    values = {"url": url, "token": journal_token(journal), "pid": os.getpid()}
    path = journal / HUB_FILE
    try:
        write_whole(path, (json.dumps(values) + "\n").encode(), sync=False)  # the event loop waits for no disk
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}; pipelines need it to find the hub.") from None


def withdraw(journal: Path) -> None:
    """Take back what this process announced; what another one announced since stays."""
    path = journal / HUB_FILE
    with suppress(OSError, ValueError, AttributeError):
        if json.loads(path.read_text("utf-8")).get("pid") == os.getpid():
            path.unlink()


# ---- Listings of a served journal: its segments and the root of its manifest, and where each node ends.
#
# The first waits for the disk: a hub asks in a thread. The ends are the question that readers ask all the time,
# answered
# from memory: the hub knows its own node. Other hubs of the folder are looked at in a thread, at most a few times a
# second for all who ask. Who waits for more rows costs a comparison in a tick that all share.

_SETTLED_S = 0.1
"""What changes twice within a tick of the kernel's clock has the same time of change."""

OTHERS_S = 0.2
"""So old may be what is known of other hubs' nodes, seconds."""
TICK_S = 0.02
"""How often it is looked whether there is more for those who wait, seconds."""
MAX_WAITING = 1000
"""Who would be one more is answered at once."""

_Version = tuple[tuple[str, int], ...]


class JournalListing:
    """What a reader needs in order to plan, as JSON: `wal`, see `segments`, `manifest`, its root, and `gaps`, by node
    those of its numbers.

    It is made anew when a segment or the manifest has come or gone, not when rows have.

    Args:
        journal: its folder.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._known: tuple[_Version, bytes, str] | None = None

    def text(self) -> tuple[bytes, str]:
        """Return the JSON and what stands for it as long as it is the same, an ETag.

        Raises:
            JournalError: the journal can't be read.
        """
        known, version = self._known, _version(self._journal)
        if known is not None and known[0] == version:
            return known[1:]
        body = listing(self._journal)
        tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
        newest_s = max((changed_ns for _, changed_ns in version), default=0) / 1e9
        is_settled = abs(time.time() - newest_s) > _SETTLED_S  # in the future, too: of a clock that was wrong then
        self._known = (version, body, tag) if is_settled else None
        return body, tag


def _version(journal: Path) -> _Version:
    """Return what changes when a segment or the manifest comes or goes."""
    watched = [journal / manifest.FILE, journal / "wal", *segment.node_folders(journal)]
    return tuple((str(path), path.stat().st_mtime_ns) for path in watched if path.exists())


def listing(journal: Path) -> bytes:
    """Return what a reader needs in order to plan; see `JournalListing`.

    Raises:
        JournalError: it can't be read.
    """
    try:
        with there(journal):
            wal = segments(journal)  # before the manifest: what is compacted meanwhile is in both, never in neither
            compacted = manifest.text(journal)  # as it is: it may be long
    except FileNotFoundError:
        raise JournalError(f"{journal} {MOVED}") from None
    gaps = {folder.name: found for folder in segment.node_folders(journal) if (found := numbers.gaps(folder))}
    rest = json.dumps({"version": manifest.VERSION, "wal": wal, "gaps": gaps}, separators=(",", ":")).encode()
    return b'%b,"manifest":%b}' % (rest[:-1], compacted)


def segments(journal: Path) -> dict[str, list[dict[str, int]]]:
    """Return, for each node, its segments in ascending order: `first` (sequence number), and of those that don't grow
    any more `idx_bytes`, `ts_min_us`, `ts_max_us` and, if they have rows without holes, `end` and `bytes`.
    """
    return {folder.name: list(_segments(folder)) for folder in segment.node_folders(journal)}


def _segments(folder: Path) -> Iterator[dict[str, int]]:
    firsts = segment.firsts(folder)
    for first in firsts[:-1]:
        path = f"{folder}/{segment.name(first)}{DATA}"
        try:
            found, size_bytes = summary_of(path), os.stat(path).st_size
        except FileNotFoundError:  # just compacted
            continue
        told = {"first": first, "idx_bytes": found.index_bytes}
        told |= {"ts_min_us": found.ts_min_us, "ts_max_us": found.ts_max_us}
        yield told | ({"end": found.end, "bytes": size_bytes} if found.is_dense else {})
    yield from ({"first": first} for first in firsts[-1:])


# ---- ends


class ServedJournal(Protocol):
    """A journal that a hub writes, or only serves."""

    @property
    def path(self) -> Path:
        """Its folder."""

    def end(self) -> Mapping[str, int]:
        """Where the nodes end that this hub writes."""


class JournalEnds:
    """Where each node of a journal ends.

    Args:
        journal: the journal.
        is_open: whether it is served; when it is no more, nobody waits for it.
    """

    def __init__(self, journal: ServedJournal, is_open: Callable[[], bool]) -> None:
        self._journal, self._is_open = journal, is_open
        self._others: Mapping[str, int] = {}
        self._looked_s = float("-inf")
        self._looking: AsyncResult[None] | None = None
        self._more = Event()
        self._waiting, self._watching = 0, False

    def now(self) -> dict[str, int]:
        """Return, by node, the number of the next row.

        Raises:
            JournalError: the journal can't be read.
        """
        own = self._journal.end()
        if not own or time.monotonic() - self._looked_s > OTHERS_S:
            self._look(own)
        return {**self._others, **self._journal.end()}

    def _look(self, own: Mapping[str, int]) -> None:
        """Look at the disk, or waits for who does so already."""
        if self._looking is None:
            looking = self._looking = AsyncResult()
            try:
                self._others = in_thread(lambda: Journal(self._journal.path).end(own))
                self._looked_s = time.monotonic()
                looking.set()
            except BaseException as error:
                looking.set_exception(error if isinstance(error, Exception) else JournalError("the hub ends."))
                raise
            finally:
                self._looking = None
        else:
            self._looking.get()
            if not own:  # its answer may be older than the question
                self._look(own)

    def after(self, known: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        """Return as `now`, when there are more rows than `known` says, the time is over, or the journal is closed."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.now()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._waiting >= MAX_WAITING or not self._is_open() or _is_more(found, known):
                return found
            self._wait(found, left_s)

    def _wait(self, seen: Mapping[str, int], timeout_s: float) -> None:
        self._waiting += 1
        if not self._watching:
            self._watching = True
            gevent.spawn(self._watch, seen)
        try:
            self._more.wait(timeout_s)
        finally:
            self._waiting -= 1

    def _watch(self, seen: Mapping[str, int]) -> None:
        """Wake those who wait when there is more; ends with the last of them."""
        while self._waiting:
            gevent.sleep(TICK_S)
            try:
                is_more = not self._is_open() or _is_more(self.now(), seen)
            except Exception:
                is_more = True  # each gets the error by itself
            if is_more:
                break
        woken, self._more, self._watching = self._more, Event(), False
        woken.set()


def _is_more(found: Mapping[str, int], known: Mapping[str, int]) -> bool:
    return any(seq > known.get(node, -1) for node, seq in found.items())
