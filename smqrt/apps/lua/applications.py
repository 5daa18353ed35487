"""Loading, unloading and reloading of applications (spec: runtime §2).

An application is a folder or a ZIP file. The server serves its files as soon as it is opened, and its pages after
`.preload` has succeeded. For applications in Python see `smqrt.app`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smqrt.apps.lua import api, bridge
from smqrt.apps.lua.api import dirs, exchange, files, logins, luaio, luasocket, mako, uploads
from smqrt.apps.lua.api import exchange as request
from smqrt.apps.lua.bridge import LuaError, from_utf8
from smqrt.apps.lua.vm import Services, Vm
from smqrt.apps.python.application import PythonApplication
from smqrt.apps.python.directory import PRELOAD, ApplicationDirectory
from smqrt.errors import SmqrtError, StartError
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.message import Request
from smqrt.http.open_files import disks
from smqrt.http.resources import Io, IoError, server_io
from smqrt.http.tree import Branch, Directory, ResourceReader
from smqrt.hub.smq import Smq
from smqrt.manual.pages import first_sentence
from smqrt.process import current_process

# ---- Configuration files in Lua, such as mako.conf

Value = Any
_NO_LOG = logging.Logger("none", logging.CRITICAL)
_NO_LOG.addHandler(logging.NullHandler())


def variables(file: Path, words: Sequence[str]) -> dict[str, Value]:
    """Run a file in a separate Lua state; the server's own state is created after its ports are open.

    Args:
        file: the file.
        words: all words of the command line, for `mako.argv`.

    Returns:
        Its globals: str, bool, int, float, or a dict of these.

    Raises:
        StartError: the file can't be read, or its Lua code fails; the message has file and line.
    """
    vm = Vm()
    ios = {"disk": DiskIo("/"), "home": DiskIo("."), "vm": server_io()}
    # No output: the server runs the file again after it has configured its log.
    services = Services(ios=dict(ios), argv=list(words), conf=file, log=_NO_LOG, output=lambda line: None)
    try:
        api.install(vm, services)
        files.install(vm, services)
        mako.install_mako(vm, services)
        answer = mako.install_loadconf(vm, services)()
    except SmqrtError as error:
        raise StartError(f"{file}: {error}") from None
    finally:
        vm.stop()
    if not isinstance(answer[0], bytes):
        message = from_utf8(answer[1] if isinstance(answer[1], bytes) else b"it failed")
        raise StartError(f"{file.parent}/{message}" if message.startswith(file.name) else message)
    found: dict[str, Value] = _texts(bridge.load(answer[0]))
    return found


def _texts(value: Value) -> Value:
    if isinstance(value, bytes):
        return from_utf8(value)
    return {_texts(key): _texts(item) for key, item in value.items()} if isinstance(value, dict) else value


log = logging.getLogger("smqrt.lua")

_README, _README_BYTES = "README.md", 8192  # only the first sentence is used

_LOWEST_PRIORITY = -127

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
}


class Script(Protocol):
    """The code of an application in one language."""

    def load(self) -> None:
        """Run `.preload`. May block. Raises SmqrtError when it fails."""

    def stop(self) -> None:
        """Run `onunload`. May block. Raises SmqrtError when it fails."""

    def clear(self) -> None:
        """Delete what the application has defined."""


class LuaScript:
    """The Lua code of an application; its table `app` stays the same object after a reload."""

    def __init__(
        self,
        applications: Applications,
        number: int,
        io: Io,
        reader: ApplicationDirectory,
        entry: int | None,
        owner: current_process.AppScope,
    ) -> None:
        self._vm, self._services = applications.vm, applications.services
        self._entries = applications.entries
        self._files, self._dirs = applications.files, applications.dirs
        self._number = number
        self._io, self._reader = io, reader
        self._entry, self._owner = entry, owner
        self._hubs: list[int] = []  # hubs of .preload.py, by their numbers in Lua

    def load(self) -> None:
        """See `Script.load`."""
        # Lua releases handles that it has received. Created earlier, those of an application that fails would leak.
        io, reader = self._files.handle_of(self._io), self._dirs.register(self._reader)
        variables: Any = self._owner.names.get("app", {})  # those of .preload.py
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
        for number in self._hubs:  # before the variables, which callbacks use
            self._services.hubs.unload(number)
        self._vm.run(self._entries["clear"], self._number)


@dataclass
class Running:
    """State of a loaded application.

    Attributes:
        owner: its scope, which closes what the application has created.
        reader: its directory.
        scripts: its code, in the order of loading.
        has_ended: whether `onunload` has run.
    """

    owner: current_process.AppScope
    reader: ResourceReader
    scripts: list[Script]
    has_ended: bool = False


class Application:
    """An application.

    Attributes:
        name: the path segment of its mount, "" for the root.
        path: its folder or ZIP file.
        about: the first sentence of its README.md; empty without one.
        error: the error with file and line if it failed; None if it is running or was stopped.
        number: its number in Lua.
        priority: the priority of its directory.
        changing: whether it is being loaded or unloaded.
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
        self._notice: Directory | None = None  # responds 503 for an application that failed

    @property
    def uri(self) -> str:
        """The path of its mount: "/" or "/name/"."""
        return f"/{self.name}/" if self.name else "/"

    @property
    def running(self) -> bool:
        """Whether it is loaded."""
        return self._running is not None

    @property
    def scope(self) -> current_process.AppScope | None:
        """What it has created; None unless it is loaded."""
        return self._running.owner if self._running is not None else None

    def has_file(self, name: str) -> bool:
        """Return whether it is loaded and its folder has this file."""
        if self._running is None:
            return False
        try:
            return not self._running.reader.io.stat(name).isdir
        except IoError:
            return False

    def load(self) -> None:
        """Open the folder and run `.preload`. May block. An error is logged and stored in `error`."""
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
        self._remove_notice()
        try:
            self._running = self._start()
            self.about = _about(self._running.reader.io)
        except IoError as error:
            self.error = f"{self.path}: {error}"
            log.error("application %s: %s", self.uri, self.error)
            self._insert_notice()
            return
        try:
            with current_process.running_app(self._running.owner):
                for script in self._running.scripts:
                    script.load()
            for function in self._running.owner.when_loaded:
                function()
        except SmqrtError as error:
            self.error = str(error)
            log.error("application %s failed: %s", self.uri, self.error)
            self._clear()
            self._insert_notice()

    def _insert_notice(self) -> None:
        """Respond 503 for the application; at / with the lowest priority, after all other applications."""
        if self._parent is None:
            return
        self._notice = Directory(self.name, self.priority if self.name else _LOWEST_PRIORITY)
        self._notice.setfunc(self._respond_failed)
        self._parent.insert(self._notice)

    def _remove_notice(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            notice.unlink()

    def _respond_failed(self, request: Request, relpath: str) -> bool:
        notice = self._notice
        others = self._parent.children if self._parent is not None else ()
        if self.name and any(one.name == self.name and one is not notice for one in others):
            return False  # another application has the same path
        reason = self.error if request.access.shows_errors(request) else "see the log of the server."
        request.response.error(503, f"The application {self.uri} failed: {reason}")
        return True

    def end(self) -> None:
        """Run only `onunload`, once; its hubs still serve connected clients. `unload` does the rest."""
        with self._change():
            self._end()

    def _end(self) -> str | None:
        """Run `onunload` of all scripts; return the first error."""
        running = self._running
        if running is None or running.has_ended:
            return None
        running.has_ended = running.owner.is_unloading = True
        failures = []
        for script in running.scripts:
            try:
                with current_process.running_app(running.owner):
                    script.stop()
            except SmqrtError as error:
                log.error("onunload of application %s failed: %s", self.uri, error)
                failures.append(str(error))
        return failures[0] if failures else None

    def unload(self) -> str | None:
        """Run `onunload`, remove the application from the tree, and clear its variables. May block.

        Returns:
            The error of `onunload`, which is also logged; None without an error. It is unloaded in either case.
        """
        with self._change():
            self._remove_notice()
            failure = self._end()
            if self._running is not None:
                self._clear()
            return failure

    def reload(self) -> None:
        """Unload the application and load it from the current files; meanwhile requests get 503 with Retry-After."""

        def respond(request: Request, relpath: str) -> None:
            request.response.error(503, "The application is restarting.", {"Retry-After": "1"})

        substitute = None
        if self._running is not None:
            reader = self._running.reader
            substitute = Directory(reader.name, reader.priority)
            substitute.setfunc(respond)
            if reader.parent is not None:  # an application may have removed its directory from the tree
                reader.parent.insert(substitute)
        with self._change():
            try:
                self.unload()
                self._load()
            finally:
                if substitute is not None:
                    substitute.unlink()

    def _clear(self) -> None:
        """Remove the running application from the tree, and close and delete everything that it has created."""
        assert self._running is not None
        running, self._running = self._running, None
        running.reader.unlink()
        running.owner.close()
        for script in running.scripts:
            script.clear()


class Applications:
    """The applications of a server, and the part of the Lua API that they use.

    Args:
        vm: the Lua runtime.
        services: the parts of the server; uses its `root` and `ios`.

    Attributes:
        all: all applications in the order of loading, including failed and stopped ones.
    """

    def __init__(self, vm: Vm, services: Services) -> None:
        self.vm = vm
        self.services = services
        self.entries: dict[str, int] = {}
        self.all: list[Application] = []
        # The order matters: a Lua half uses the parts that precede it.
        self.exchanges = services.exchanges = exchange.install_exchange(vm)
        request.install_request(vm, services, self.exchanges)
        deferred = exchange.install_response(vm, services, self.exchanges)
        self.sessions = logins.install_sessions(vm, services, self.exchanges).sessions
        self.files = files.install(vm, services)
        luaio.install(vm, self.files)
        uploads.install_uploads(vm, self.exchanges, self.files, deferred, self.sessions)
        self.dirs = dirs.install_dirs(vm, services, self.exchanges, self.files, dirs.install_pages(vm))
        logins.install(vm, services, self.exchanges, self.dirs)
        self._traces = dirs.install_tracelogger(vm, services, self.dirs)
        self.run_exit_functions = mako.install_mako(vm, services, self.dirs)
        mako.install_loadconf(vm, services)
        self.send_mail_log = luasocket.install_log(vm)
        vm.namespace("ba.apps", {"entry": self._entry, "known_application": services.known_application})
        mako.install_management(vm, services, self, self.files)
        self._next_number = itertools.count(1).__next__

    def configure(self) -> None:
        """Apply mako.conf: users, file server, trace logger. May block. An error is logged."""
        if self.services.conf is not None or self.services.tracelogger:
            try:
                self.vm.run(self.entries["configure"], self.services.tracelogger)
            except LuaError as error:
                log.error("%s: %s", self.services.conf or "tracelogger", error)

    def end(self) -> None:
        """Run every `onunload`, then the functions of `mako.onexit`, at shutdown. May block."""
        for application in list(self.all):  # a copy: an `onunload` may remove applications
            application.end()
        self.run_exit_functions()
        self.send_mail_log()

    def unload(self) -> None:
        """Unload all applications and the trace logger. May block."""
        for application in list(self.all):
            application.unload()
        self._traces.close()

    def load(self, name: str, path: Path, priority: int = 0, inner: str = "", entry: int | None = None) -> Application:
        """Load an application. May block. Its attribute `error` is set if it fails.

        Args:
            name: the path segment of its mount, "" for the root.
            path: a folder or a ZIP file.
            priority: -127 to 127; directories with a higher priority get a request first.
            inner: the folder inside the ZIP file.
            entry: its number in `apps` of mako.conf.
        """

        def open_io() -> Io:
            if path.is_dir():
                return DiskIo(path)
            try:
                return disks.call(str(path), ZipIo, path, inner)  # in a thread: the directory of an archive may be long
            except TimeoutError as error:
                raise IoError.of(error, str(path)) from None

        application = self.make(name, path, open_io, priority, entry)
        application.load()
        return application

    def make(
        self, name: str, path: Path, open_io: Callable[[], Io], priority: int = 0, entry: int | None = None
    ) -> Application:
        """Create an application without loading it.

        Args:
            name, priority, entry: see `load`.
            path: its folder or ZIP file.
            open_io: opens its files; called at every load.
        """
        number = self._next_number()

        def start() -> Running:
            return self._start(number, name, path, open_io(), priority, entry)

        application = Application(name, path, start, number, priority, self.services.root)
        self.all.append(application)
        return application

    def _start(self, number: int, name: str, path: Path, io: Io, priority: int, entry: int | None) -> Running:
        io.private = self.services.private
        # Names of hubs begin with that of the application, which several applications may share, so it gets a number.
        earlier = sum(one.name == name and one.number < number for one in self.all)
        owner = self.services.scopes[number] = current_process.AppScope(
            path.resolve() if type(io) is DiskIo else None, f"{name}~{earlier}" if earlier else name
        )
        folder = files.label(io, "")
        reader = ApplicationDirectory(name, priority, io, owner, self.sessions.of, folder)
        reader.headers = dict(SECURITY_HEADERS)
        scripts: list[Script] = [LuaScript(self, number, io, reader, entry, owner)]
        try:
            has_python = not io.stat(PRELOAD).isdir
        except IoError:
            has_python = False
        if has_python:
            scripts.insert(0, PythonApplication(name or path.resolve().stem, reader, owner))
        self.services.root.insert(reader)
        return Running(owner, reader, scripts)

    def _entry(self, name: bytes, ref: int) -> None:
        self.entries[name.decode("ascii")] = ref


def _about(io: Io) -> str:
    try:
        with io.open(_README) as file:
            return first_sentence(file.read(_README_BYTES).decode("utf-8", "replace"))
    except IoError:
        return ""
