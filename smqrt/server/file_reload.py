"""The parts of a server that read their files again, when these change or when SIGHUP asks: certificates, users, rules.

Files are looked at by their size, time and inode, which works on every mount. A change counts when they look the same
twice in a row, so that nobody reads a half-written one. Looking is done in a thread, as reading should be: a network
disk that hangs holds only those who wait for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError
from smqrt.loop.threads import DiskThreads

log = logging.getLogger("smqrt")

POLL_S = 1.0
Reload = Callable[[], str | None]
"""Reads again; gives why it could not, one sentence, and None when it did. May block its greenlet."""
Paths = Callable[[], Iterable[str | Path]]
Look = tuple[tuple[int, int, int] | None, ...]


def look(paths: Iterable[str | Path]) -> Look:
    """Returns time, size and inode of each file, None for one that is not to be had. Blocks."""
    return tuple(map(_look_at, paths))


def _look_at(path: str | Path) -> tuple[int, int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


class _Part:
    """What is read again.

    Attributes:
        known: how its files looked before they were read.
        last: how they looked last.
    """

    def __init__(self, name: str, reload: Reload, paths: Paths) -> None:
        self.name, self.reload, self.paths = name, reload, paths
        self.known = self.last = look(paths())

    def has_changed(self, now: Look) -> bool:
        """Whether the files are others than those that were read, and have been so for one look."""
        settled, self.last = now == self.last, now
        return settled and now != self.known


class Renewal:
    """The list of these parts.

    Args:
        report: takes each line meant for the person at the terminal.
        poll_s: seconds between two looks at the files.

    Attributes:
        answered: called when what was asked for is done.
    """

    def __init__(self, report: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._report, self._poll_s = report, poll_s
        self._parts: list[_Part] = []
        self._threads = DiskThreads("of the configuration")
        self._one_at_a_time = BoundedSemaphore()
        self.answered: Callable[[], object] = lambda: None
        self._is_asked = False
        self._asked: gevent.Greenlet[..., None] | None = None
        self._watch: gevent.Greenlet[..., None] | None = None

    def add(self, name: str, reload: Reload, paths: Paths = tuple) -> None:
        """Add a part, whose files have not been read yet or were read a moment ago.

        Args:
            name: what is read, in the plural, for the log: "certificates".
            reload: reads it again, and leaves everything as it was when it can't.
            paths: gives the files; asked at every look, since they may be others after a reload. None: at SIGHUP only.
        """
        self._parts.append(_Part(name, reload, paths))

    def start(self) -> None:
        """Begin to look at the files."""
        if self._watch is None:
            self._watch = gevent.spawn(self._look_for_ever)

    def stop(self) -> None:
        """Look no more, and read nothing more."""
        for one in (self._watch, self._asked):
            if one is not None:
                one.kill(block=False)
        self._watch = self._asked = None

    def ask(self) -> None:
        """Have all parts read again, soon; never blocks. Asked many times at once, it is done once or twice."""
        self._is_asked = True
        if not self._asked:
            self._asked = gevent.spawn(self._answer)

    def _answer(self) -> None:
        while self._is_asked:
            self._is_asked = False
            self.run()
        self.answered()

    def run(self) -> dict[str, str]:
        """Read all parts again; blocks this greenlet. One that fails does not hinder the others.

        Returns:
            Why some could not, by their names.
        """
        if not self._parts:
            self._report("there is nothing to read again")
        outcomes = {part.name: self._renew(part) for part in list(self._parts)}
        return {name: fault for name, fault in outcomes.items() if fault is not None}

    def _look_for_ever(self) -> None:
        while True:
            gevent.sleep(self._poll_s)
            for part in list(self._parts):
                try:
                    if part.has_changed(self._threads.call(look, list(part.paths()))):
                        self._renew(part)
                except TimeoutError as error:
                    log.error("cannot look whether the %s have changed: %s", part.name, error)
                except Exception:  # the others are looked at all the same
                    log.exception("looking whether the %s have changed failed", part.name)

    def _renew(self, part: _Part) -> str | None:
        with self._one_at_a_time:
            fault = self._fault(part)
        if fault is None:
            self._report(f"{part.name} read again")
        else:
            log.error("%s kept as they were: %s", part.name, fault)
        return fault

    def _fault(self, part: _Part) -> str | None:
        try:
            part.known = part.last = self._threads.call(look, list(part.paths()))  # before, or a change might be missed
            return part.reload()
        except TimeoutError as error:
            return str(error)
        except Exception as error:
            log.exception("reading the %s again failed", part.name)
            return f"{type(error).__name__}: {error}"


# ---- Changes of the code of applications, found by looking at their files: works on every mount, needs no thread.
#
# Pages are read anew at every change by themselves; what needs a restart is `.preload` and the modules.


RELOAD_POLL_S = 0.25
PIPELINES = "pipelines"
_NO_CODE = ("__pycache__", ".git", "node_modules", ".venv", ".journal", ".pipelines")
K = TypeVar("K")
Signature = dict[str, tuple[int, int, int]]


def signature(path: Path) -> Signature:
    """Returns size, time and inode of every file of code in a folder, or of the ZIP file."""
    if not path.is_dir():
        return _look([str(path)])
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in _NO_CODE]
        suits = _is_pipeline if PIPELINES in Path(folder).relative_to(path).parts[:1] else is_code
        files += [os.path.join(folder, name) for name in names if suits(name)]
    return _look(files)


def is_code(name: str) -> bool:
    """Whether a change of this file restarts its application."""
    return name == ".preload" or name.endswith((".lua", ".py"))


def _is_pipeline(name: str) -> bool:
    return name.endswith((".py", ".sql"))


def split_pipelines(files: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Returns which of the files are the application's own code, and which are its pipelines'.

    Args:
        files: what changed.
        folder: the application's.
    """
    beginning = str(folder / PIPELINES) + os.sep
    pipelines = [file for file in files if file.startswith(beginning)]
    return [file for file in files if file not in pipelines], pipelines


def _look(files: list[str]) -> Signature:
    seen = {}
    for file in files:
        try:
            info = os.stat(file)
        except OSError:
            continue
        seen[file] = (info.st_mtime_ns, info.st_size, info.st_ino)
    return seen


class FolderWatch:
    """One watched folder or ZIP file.

    A change counts when the files look the same at two polls in a row, so that a half-written file is not loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = self._last = signature(path)

    def poll(self) -> list[str]:
        """Returns the files that changed since the last time they were returned; usually none."""
        now = signature(self._path)
        settled, self._last = now == self._last, now
        if not settled or now == self._loaded:
            return []
        changed = [file for file in now.keys() | self._loaded.keys() if now.get(file) != self._loaded.get(file)]
        self._loaded = now
        return sorted(changed)


def watch(watches: dict[K, FolderWatch], on_change: Callable[[K, list[str]], None]) -> gevent.Greenlet[..., None]:
    """Starts the greenlet that polls; kill it to stop.

    Args:
        watches: by whatever the caller knows the application by.
        on_change: called in that greenlet with that key and the changed files.
    """

    def run() -> None:
        while True:
            gevent.sleep(RELOAD_POLL_S)
            for key, one in watches.items():
                if files := one.poll():
                    on_change(key, files)

    return gevent.spawn(run)


def syntax_error(files: list[str], folder: Path, vm: Vm) -> str | None:
    """Returns why one of the files would not compile, with its line; None when all would.

    Args:
        files: what changed; files that are gone, and what is neither Lua nor Python, do not count.
        folder: the application's; messages name files from it on.
        vm: the Lua runtime.
    """
    for file in files:
        name = os.path.relpath(file, folder.parent)
        try:
            source = Path(file).read_bytes()
            if file.endswith(".py"):
                compile(source, name, "exec")
            elif is_code(os.path.basename(file)):
                vm.free(vm.compile(source, f"@{name}"))
        except (SyntaxError, SmqrtError, ValueError) as error:
            if isinstance(error, SyntaxError):
                return f"{name}:{error.lineno}: {error.msg}"
            return str(error).splitlines()[0]
        except OSError:
            continue
    return None
