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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.errors import JournalError
from smqrt.journal.files import write_whole
from smqrt.journal.tokens import journal_token

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
        """Begins; what is open now is announced at once."""
        self.refresh()
        self._looking = gevent.spawn(self._look)

    def refresh(self) -> None:
        """Announces what was opened and takes back what was closed since the last look."""
        with self._turn:
            wanted = self._wanted()
            for path in self._held.keys() - wanted.keys():
                self._withdraw(path)
            for path, (journal, url) in wanted.items():
                if self._told.get(path) != url:
                    self._try(journal, url)

    def stop(self) -> None:
        """Takes everything back."""
        if self._looking is not None:
            self._looking.kill()
        for path in list(self._held):
            self._withdraw(path)

    def _look(self) -> None:
        while True:
            gevent.sleep(LOOK_S)
            self.refresh()

    def _wanted(self) -> dict[Path, tuple[Announced, str]]:
        """The journals and their addresses by folder, of each folder the one that was opened first."""
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
        """Whether no other process announces the folder; from now on none does."""
        if path not in self._held and (fd := hold(path)) is not None:
            self._held[path] = fd
        if path not in self._held:
            self._say(path, logging.INFO, f"{path}: pipelines go to another hub of this folder, while that is there")
        return path in self._held

    def _say(self, path: Path, level: int, sentence: str) -> None:
        """Logs what is tried again every second, once."""
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
    """Makes this process the one that announces a journal, until the descriptor is closed or the process ends.

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
    """Tells where a journal is served now.

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
    """Takes back what this process announced; what another one announced since stays."""
    path = journal / HUB_FILE
    with suppress(OSError, ValueError, AttributeError):
        if json.loads(path.read_text("utf-8")).get("pid") == os.getpid():
            path.unlink()
