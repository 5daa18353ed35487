"""Applications in Lua and Python: loading, stopping and starting them again (spec: runtime §2).

An application is a folder or a ZIP file. Its files are served from the moment it is opened, its pages once `.preload`
has succeeded. What one in Python is: `smqrt.app`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smqrt.apps.lua.api import (
    dirs,
    exchange,
    files,
    logins,
    luaio,
    luasocket,
    mako,
    pages,
    request,
    response,
    tracelogger,
    uploads,
)
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.apps.python.application import PythonApplication
from smqrt.apps.python.directory import PRELOAD, ApplicationDirectory
from smqrt.errors import SmqrtError
from smqrt.http.blocking_io import disks
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.message import Request
from smqrt.http.resources import Io, IoError
from smqrt.http.tree import Branch, Directory, ResourceReader
from smqrt.hub.smq import Smq
from smqrt.manual.pages import first_sentence
from smqrt.process import current_application

log = logging.getLogger("smqrt.lua")

_README, _README_BYTES = "README.md", 8192  # its beginning is enough

_LAST = -127  # the lowest priority

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
}


class Script(Protocol):
    """An application's own code."""

    def load(self) -> None:
        """Run `.preload`; may block. Raises SmqrtError when it failed."""

    def stop(self) -> None:
        """Run `onunload`; may block. Raises SmqrtError when it failed."""

    def clear(self) -> None:
        """Forget what the application defined."""


class LuaScript:
    """The Lua side of an application; its table keeps its identity when the application starts again."""

    def __init__(
        self,
        applications: Applications,
        number: int,
        io: Io,
        reader: ApplicationDirectory,
        entry: int | None,
        owner: current_application.AppScope,
    ) -> None:
        self._vm, self._services = applications.vm, applications.services
        self._entries = applications.entries
        self._files, self._dirs = applications.files, applications.dirs
        self._number = number
        self._io, self._reader = io, reader
        self._entry, self._owner = entry, owner
        self._hubs: list[int] = []  # of .preload.py, by the integers that Lua has for them

    def load(self) -> None:
        """See `Script.load`."""
        # Handles only now: Lua gives those back that it has got, and never one of an application that failed before.
        io, reader = self._files.handle_of(self._io), self._dirs.register(self._reader)
        variables: Any = self._owner.names.get("app", {})  # of .preload.py
        hubs = {name: value for name, value in variables.items() if isinstance(value, Smq)}
        shared: list[Any] = []
        if self._services.hubs is not None:
            label = f" of Lua in {self._reader.label}"
            for name, smq in hubs.items():
                self._hubs.append(self._services.hubs.share(smq, label))
                shared += (name.encode(), self._hubs[-1])
        done, *message = self._vm.run(self._entries["load"], self._number, io, reader, self._entry, *shared)
        if not done:
            raise LuaError(message[0])

    def stop(self) -> None:
        """See `Script.stop`."""
        message = self._vm.run(self._entries["stop"], self._number)[0]
        if message is not None:
            raise LuaError(message)

    def clear(self) -> None:
        """See `Script.clear`."""
        for number in self._hubs:  # first: callbacks would find an empty environment
            self._services.hubs.unload(number)
        self._vm.run(self._entries["clear"], self._number)


@dataclass
class Running:
    """What an application is while it runs: what it has made, its directory, its code in the order it was started, and
    whether that has run its `onunload`.
    """

    owner: current_application.AppScope
    reader: ResourceReader
    scripts: list[Script]
    has_ended: bool = False


class Application:
    """One application.

    Attributes:
        name: the path segment it is mounted under, "" for the root.
        path: its folder or ZIP file.
        about: what it is: the first sentence of its README.md, empty without one.
        error: why it does not run, the author's file and line first; None when it runs, or was stopped.
        number: by which its Lua side knows it.
        priority: of its directory.
        changing: it is being loaded or unloaded.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        start: Callable[[], Running],
        number: int = 0,
        priority: int = 0,
        parent: Branch | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.number, self.priority = number, priority
        self.changing = False
        self.about = ""
        self.error: str | None = None
        self._start = start
        self._running: Running | None = None
        self._parent = parent
        self._notice: Directory | None = None  # answers in the place of an application that failed

    @property
    def uri(self) -> str:
        """Where it is mounted: "/" or "/name/"."""
        return f"/{self.name}/" if self.name else "/"

    @property
    def running(self) -> bool:
        """Whether it is loaded."""
        return self._running is not None

    def load(self) -> None:
        """Open the folder and run `.preload`; may block. A failure is logged and stays in `error`."""
        with self._change():
            self._load()

    @contextmanager
    def _change(self) -> Iterator[None]:
        outer, self.changing = self.changing, True
        try:
            yield
        finally:
            self.changing = outer

    def _load(self) -> None:
        self.error = None
        self._take_notice_down()
        try:
            self._running = self._start()
            self.about = _about(self._running.reader.io)
        except IoError as error:
            self.error = f"{self.path}: {error}"
            log.error("application %s: %s", self.uri, self.error)
            self._put_notice_up()
            return
        try:
            with current_application.running_app(self._running.owner):
                for script in self._running.scripts:
                    script.load()
            for function in self._running.owner.when_loaded:
                function()
        except SmqrtError as error:
            self.error = str(error)
            log.error("application %s failed: %s", self.uri, self.error)
            self._take_down()
            self._put_notice_up()

    def _put_notice_up(self) -> None:
        """Answer 503 in its place. At / that is the last to be asked, or it would answer for others."""
        if self._parent is None:
            return
        self._notice = Directory(self.name, self.priority if self.name else _LAST)
        self._notice.setfunc(self._say_failed)
        self._parent.insert(self._notice)

    def _take_notice_down(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.unlink()

    def _say_failed(self, request: Request, relpath: str) -> bool:
        notice = self._notice
        others = self._parent.children if self._parent is not None else ()
        if self.name and any(one.name == self.name and one is not notice for one in others):
            return False  # another one has the same place
        why = self.error if request.access.shows_errors(request) else "the server's log says why."
        request.response.error(503, f"The application {self.uri} failed: {why}")
        return True

    def end(self) -> None:
        """Run `onunload` only, once; `unload` does the rest. Meanwhile its hubs still serve those who are connected."""
        with self._change():
            self._end()

    def _end(self) -> str | None:
        """Returns what the first `onunload` that failed said."""
        running = self._running
        if running is None or running.has_ended:
            return None
        running.has_ended = running.owner.is_unloading = True
        failures = []
        for script in running.scripts:
            try:
                with current_application.running_app(running.owner):
                    script.stop()
            except SmqrtError as error:
                log.error("onunload of application %s failed: %s", self.uri, error)
                failures.append(str(error))
        return failures[0] if failures else None

    def unload(self) -> str | None:
        """Run `onunload`, take the application off the tree, empty its table; may block.

        Returns:
            the error of its `onunload`, which is logged too; None when there was none. It is unloaded in any case.
        """
        with self._change():
            return self._unload()

    def _unload(self) -> str | None:
        self._take_notice_down()
        failure = self._end()
        if self._running is not None:
            self._take_down()
        return failure

    def reload(self) -> None:
        """Stop it and start it again, from the present state of its files. Its clients, who come back at once, are
        asked to try again meanwhile.
        """
        substitute = self._running and _substitute(self._running.reader)
        with self._change():
            try:
                self._unload()
                self._load()
            finally:
                if substitute:
                    substitute.unlink()

    def _take_down(self) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        running.reader.unlink()
        running.owner.close()
        for script in running.scripts:
            script.clear()


def _substitute(reader: ResourceReader) -> Directory:
    """A directory that answers in the place of another that is taken down."""
    substitute = Directory(reader.name, reader.priority)
    substitute.setfunc(_restarting)
    if reader.parent is not None:  # an application may have taken it off the tree
        reader.parent.insert(substitute)
    return substitute


def _restarting(request: Request, relpath: str) -> None:
    request.response.error(503, "The application is starting anew.", {"Retry-After": "1"})


class Applications:
    """The applications of a server, and the part of the Lua API that serves them.

    Args:
        vm: the runtime.
        services: the server; its `root` and `ios` are used.

    Attributes:
        all: the applications in the order of their loading, also those that failed or were stopped.
    """

    def __init__(self, vm: Vm, services: Services) -> None:
        self.vm = vm
        self.services = services
        self.entries: dict[str, int] = {}
        self.all: list[Application] = []
        self.exchanges = services.exchanges = exchange.install(vm)
        request.install(vm, services, self.exchanges)
        deferred = response.install(vm, services, self.exchanges)
        self.sessions = logins.install_sessions(vm, services, self.exchanges).sessions
        self.files = files.install(vm, services)
        luaio.install(vm, self.files)
        uploads.install(vm, self.exchanges, self.files, deferred, self.sessions)
        self.dirs = dirs.install(vm, services, self.exchanges, self.files, pages.install(vm))
        logins.install(vm, services, self.exchanges, self.dirs)
        self._traces = tracelogger.install(vm, services, self.dirs)
        self.run_exit_functions = mako.install(vm, services, self.dirs)
        mako.install_loadconf(vm, services)
        self.send_mail_log = luasocket.install_log(vm)
        vm.namespace("ba.apps", {"entry": self._entry, "known_application": services.known_application})
        mako.install_management(vm, services, self, self.files)
        self._next_number = itertools.count(1).__next__

    def configure(self) -> None:
        """Set up what mako.conf asks for: users, file server, trace logger; may block. A failure is logged."""
        if self.services.conf is not None or self.services.tracelogger:
            try:
                self.vm.run(self.entries["configure"], self.services.tracelogger)
            except LuaError as error:
                log.error("%s: %s", self.services.conf or "tracelogger", error)

    def end(self) -> None:
        """The server stops: run every `onunload`, then what was given to `mako.onexit`; may block."""
        for application in list(self.all):
            application.end()
        self.run_exit_functions()
        self.send_mail_log()

    def unload(self) -> None:
        """Unload all, and what the server itself made beside them; may block."""
        for application in list(self.all):
            application.unload()
        self._traces.close()

    def load(self, name: str, path: Path, priority: int = 0, inner: str = "", entry: int | None = None) -> Application:
        """Load an application; may block. Look at its `error` for the outcome.

        Args:
            name: the path segment it answers, "" for the root.
            path: a folder or a ZIP file.
            priority: -127 to 127, higher is asked first.
            inner: the folder inside the ZIP file.
            entry: its number in `apps` of mako.conf.
        """
        application = self.make(name, path, lambda: _opened(path, inner), priority, entry)
        application.load()
        return application

    def make(
        self, name: str, path: Path, open_io: Callable[[], Io], priority: int = 0, entry: int | None = None
    ) -> Application:
        """Make an application that is not loaded yet.

        Args:
            name, priority, entry: see `load`.
            path: where it lies.
            open_io: gives its files; called at every start.
        """
        number = self._next_number()

        def start() -> Running:
            return self._start(number, name, path, open_io(), priority, entry)

        application = Application(name, path, start, number, priority, self.services.root)
        self.all.append(application)
        return application

    def _start(self, number: int, name: str, path: Path, io: Io, priority: int, entry: int | None) -> Running:
        io.private = self.services.private
        owner = self.services.scopes[number] = current_application.AppScope(
            path.resolve() if type(io) is DiskIo else None, self._hub_prefix(name, number)
        )
        folder = files.label(io, "")
        reader = ApplicationDirectory(name, priority, io, owner, self.sessions.of, folder)
        reader.headers = dict(SECURITY_HEADERS)
        scripts: list[Script] = [LuaScript(self, number, io, reader, entry, owner)]
        if _has(io, PRELOAD):
            scripts.insert(0, PythonApplication(name or path.resolve().stem, reader, owner))
        self.services.root.insert(reader)
        return Running(owner, reader, scripts)

    def _hub_prefix(self, name: str, number: int) -> str:
        """The application's name; several may have none, or the same."""
        before = sum(one.name == name and one.number < number for one in self.all)
        return f"{name}~{before}" if before else name

    def _entry(self, name: bytes, ref: int) -> None:
        self.entries[name.decode("ascii")] = ref


def _opened(path: Path, inner: str) -> Io:
    if path.is_dir():
        return DiskIo(path)
    try:
        return disks.call(str(path), ZipIo, path, inner)  # the directory of an archive may be long
    except TimeoutError as error:
        raise IoError.of(error, str(path)) from None


def _about(io: Io) -> str:
    try:
        with io.open(_README) as file:
            return first_sentence(file.read(_README_BYTES).decode("utf-8", "replace"))
    except IoError:
        return ""


def _has(io: Io, name: str) -> bool:
    try:
        return not io.stat(name).isdir
    except IoError:
        return False
