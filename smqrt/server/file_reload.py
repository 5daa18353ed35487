"""Reload of settings, certificates and users, at SIGHUP or when their files change.

A poll compares size, time and inode of the files, which works on every mount. A change counts when two polls in a row
see the same, so that a half-written file is not read. Polling and reading run in a thread: a network disk that hangs
blocks only its own reader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.loop.threads import DiskThreads

log = logging.getLogger("smqrt")

POLL_S = 1.0
Reload = Callable[[], str | None]
"""Reads files again. Returns why it failed, one sentence, or None. May block its greenlet."""
Paths = Callable[[], Iterable[str | Path]]
FileState = tuple[int, int, int]
"""Modification time in ns, size in bytes and inode."""


def file_state(path: str | Path) -> FileState | None:
    """Return the state of a file, None when it can't be read. Blocks."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


def _states(paths: Iterable[str | Path]) -> list[FileState | None]:
    return [file_state(path) for path in paths]


class _Part:
    """A set of files that is reloaded as one.

    Attributes:
        loaded: the states of the files when they were read.
        last: the states at the last poll.
    """

    def __init__(self, name: str, reload: Reload, paths: Paths) -> None:
        self.name, self.reload, self.paths = name, reload, paths
        self.loaded = self.last = _states(paths())

    def has_changed(self, now: list[FileState | None]) -> bool:
        """Whether the files differ from those that were read, and have not changed since the last poll."""
        settled, self.last = now == self.last, now
        return settled and now != self.loaded


class FileReloader:
    """The parts of a server that reload their files.

    Args:
        report: takes each line for the terminal.
        poll_s: seconds between two polls of the files.

    Attributes:
        on_reloaded: called when a reload that `ask` requested is done.
    """

    def __init__(self, report: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._report, self._poll_s = report, poll_s
        self._parts: list[_Part] = []
        self._threads = DiskThreads("of the configuration")
        self._one_at_a_time = BoundedSemaphore()
        self.on_reloaded: Callable[[], object] = lambda: None
        self._is_asked = False
        self._asked: gevent.Greenlet[..., None] | None = None
        self._poller: gevent.Greenlet[..., None] | None = None

    def add(self, name: str, reload: Reload, paths: Paths = tuple) -> None:
        """Add a part whose files have just been read, or have not been read yet.

        Args:
            name: what is read, in the plural, for the log: "certificates".
            reload: reads the files again. When that fails, it changes nothing.
            paths: returns the files at every poll, since a reload may change them. None: at SIGHUP only.
        """
        self._parts.append(_Part(name, reload, paths))

    def start(self) -> None:
        """Start polling the files."""
        if self._poller is None:
            self._poller = gevent.spawn(self._poll)

    def stop(self) -> None:
        """Stop polling and reloading."""
        for greenlet in (self._poller, self._asked):
            if greenlet is not None:
                greenlet.kill(block=False)
        self._poller = self._asked = None

    def ask(self) -> None:
        """Reload all parts soon; never blocks. Many calls at once cause one or two reloads."""
        self._is_asked = True
        if not self._asked:
            self._asked = gevent.spawn(self._reload_when_asked)

    def _reload_when_asked(self) -> None:
        while self._is_asked:
            self._is_asked = False
            self.run()
        self.on_reloaded()

    def run(self) -> dict[str, str]:
        """Reload all parts; blocks this greenlet. A part that fails does not stop the others.

        Returns:
            The failures by the names of the parts.
        """
        if not self._parts:
            self._report("nothing to reload")
        outcomes = {part.name: self._reload(part) for part in list(self._parts)}
        return {name: fault for name, fault in outcomes.items() if fault is not None}

    def _poll(self) -> None:
        while True:
            gevent.sleep(self._poll_s)
            for part in list(self._parts):
                try:
                    if part.has_changed(self._threads.call(_states, list(part.paths()))):
                        self._reload(part)
                except TimeoutError as error:
                    log.error("%s: cannot check the files for changes: %s", part.name, error)
                except Exception:  # the other parts go on
                    log.exception("%s: checking the files for changes failed", part.name)

    def _reload(self, part: _Part) -> str | None:
        with self._one_at_a_time:
            try:
                # Before the reload: a change during it is seen by the next poll.
                part.loaded = part.last = self._threads.call(_states, list(part.paths()))
                fault = part.reload()
            except TimeoutError as error:
                fault = str(error)
            except Exception as error:
                log.exception("%s: reload failed", part.name)
                fault = f"{type(error).__name__}: {error}"
        if fault is None:
            self._report(f"{part.name} reloaded")
        else:
            log.error("%s not reloaded: %s", part.name, fault)
        return fault
