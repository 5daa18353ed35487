"""Applications in Lua and Python: loading, stopping and starting them again (spec: runtime §2).

An application is a folder or a ZIP file. Its files are served from the moment it is opened, its pages once `.preload`
has succeeded. One in Python has `.preload.py`, run once with the names `app`, `dir` and `io`:

    from smqrt.http.tree import Directory

    def hello(request, relpath):
        request.response.write(b"Hello " + relpath.encode())

    greeter = Directory("hello")
    greeter.setfunc(hello)
    dir.insert(greeter)

    def onunload():
        print("good bye")

A directory's function gets the HTTP request and the rest of the path; it may block in gevent's way, and returning
exactly False passes the request on. What `.preload.py` defines is `app`: as its variables, as `app["name"]` and as
`app.name`.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smqrt import app_folder
from smqrt.errors import SmqrtError
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.files import StaticFile
from smqrt.http.message import Request
from smqrt.http.resources import Io, IoError
from smqrt.http.tree import Directory, ResourceReader
from smqrt.lua.api import dirs, exchange, files, pages, request, response, sessions, system
from smqrt.lua.bridge import LuaError
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm
from smqrt.manual import first_sentence

PYTHON_PRELOAD = ".preload.py"


class Namespace(dict[str, Any]):
    """What an application defines: a dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the application defines no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class PythonAppError(SmqrtError):
    """An application's own code failed; the text begins with its file and line, Python's traceback follows."""


class PythonApplication:
    """A running Python application.

    Args:
        label: what tracebacks call `.preload.py`, such as "chat/.preload.py".
        io: the application's folder.
        reader: the directory that serves it.
    """

    def __init__(self, label: str, io: Io, reader: ResourceReader) -> None:
        self._label = label
        self.namespace = Namespace(__name__="__preload__", __file__=label, io=io, dir=reader)
        self.namespace["app"] = self.namespace

    def load(self) -> None:
        """Run `.preload.py`; may block.

        Raises:
            PythonAppError: it failed.
        """
        source = self.namespace["io"].read(PYTHON_PRELOAD)
        lines = source.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self._label] = len(source), None, lines, self._label  # tracebacks show the lines
        self._guard(lambda: exec(compile(source, self._label, "exec", dont_inherit=True), self.namespace))

    def stop(self) -> None:
        """Run `onunload`, when there is one; may block. Raises as `load`."""
        onunload = self.namespace.get("onunload")
        if callable(onunload):
            self._guard(onunload)

    def clear(self) -> None:
        """Forget what the application defined."""
        self.namespace.clear()

    def _guard(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raise PythonAppError(self._described(error)) from error

    def _described(self, error: Exception) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self._label]
        if isinstance(error, SyntaxError) and error.filename == self._label:
            lines.append(error.lineno)
        position = f"{self._label}:{lines[-1]}: " if lines else f"{self._label}: "
        own = frames[next((at for at, frame in enumerate(frames) if frame.filename == self._label), len(frames)) :]
        summary = f"{position}{type(error).__name__}: {error}"
        return "\n".join([summary, "traceback:", *traceback.StackSummary.from_list(own).format()]).rstrip()


log = logging.getLogger("smqrt.lua")

_README, _README_BYTES = "README.md", 8192  # its beginning is enough

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

    def __init__(self, applications: Applications, number: int, io: Io, reader: ResourceReader) -> None:
        self._vm = applications.vm
        self._entries = applications.entries
        self._number = number
        self._io = applications.files.handle_of(io)
        self._reader = applications.dirs.register(reader)

    def load(self) -> None:
        """See `Script.load`."""
        done, *message = self._vm.run(self._entries["load"], self._number, self._io, self._reader)
        if not done:
            raise LuaError(message[0])

    def stop(self) -> None:
        """See `Script.stop`."""
        message = self._vm.run(self._entries["stop"], self._number)[0]
        if message is not None:
            raise LuaError(message)

    def clear(self) -> None:
        """See `Script.clear`."""
        self._vm.run(self._entries["clear"], self._number)


@dataclass
class Running:
    """What an application is while it runs: what it has made, its directory, and its code in the order it was
    started.
    """

    owner: app_folder.AppScope
    reader: ResourceReader
    scripts: list[Script]


class ApplicationDirectory(ResourceReader):
    """The directory of an application: what it serves runs as the application's own code.

    Args:
        name, priority, io: see `ResourceReader`.
        owner: the application.
        find_session: gives the session of a request, None when it has none.
    """

    def __init__(
        self, name: str, priority: int, io: Io, owner: app_folder.AppScope, find_session: Callable[[Request], object]
    ) -> None:
        super().__init__(name, priority, io=io)
        self._owner, self._find_session = owner, find_session

    # What may run code; the files, which most requests are for, need none of this.

    def _call(self, request: Request, relpath: str) -> bool:
        return self._as_own(request, super()._call, request, relpath)

    def _run(self, request: Request, entry: StaticFile) -> bool:
        return self._as_own(request, super()._run, request, entry)

    def _ask(self, children: list[Directory], request: Request, relpath: str) -> bool:
        return bool(children) and self._as_own(request, super()._ask, children, request, relpath)

    def _as_own(self, request: Request, answer: Callable[..., bool], *args: Any) -> bool:
        request.env["find_session"] = self._find_session
        token = app_folder.current_app.set(self._owner)
        try:
            return answer(*args)
        finally:
            app_folder.current_app.reset(token)


class Application:
    """One application.

    Attributes:
        name: the path segment it is mounted under, "" for the root.
        path: its folder or ZIP file.
        about: what it is: the first sentence of its README.md, empty without one.
        error: why it does not run, the author's file and line first; None when it runs.
    """

    def __init__(self, name: str, path: Path, start: Callable[[], Running]) -> None:
        self.name = name
        self.path = path
        self.about = ""
        self.error: str | None = None
        self._start = start
        self._running: Running | None = None

    @property
    def uri(self) -> str:
        """Where it is mounted: "/" or "/name/"."""
        return f"/{self.name}/" if self.name else "/"

    def load(self) -> None:
        """Open the folder and run `.preload`; may block. A failure is logged and stays in `error`."""
        self.error = None
        try:
            self._running = self._start()
            self.about = _about(self._running.reader.io)
        except IoError as error:
            self.error = f"{self.path}: {error}"
            log.error("application %s: %s", self.uri, self.error)
            return
        try:
            with app_folder.running_app(self._running.owner):
                for script in self._running.scripts:
                    script.load()
        except SmqrtError as error:
            self.error = str(error)
            log.error("application %s failed: %s", self.uri, self.error)
            self._take_down()

    def unload(self) -> None:
        """Run `onunload`, take the application off the tree, empty its table; may block. Its errors are logged."""
        if self._running is None:
            return
        for script in self._running.scripts:
            try:
                with app_folder.running_app(self._running.owner):
                    script.stop()
            except SmqrtError as error:
                log.error("onunload of application %s failed: %s", self.uri, error)
        self._take_down()

    def reload(self) -> None:
        """Stop it and start it again, from the present state of its files. Its clients, who come back at once, are
        asked to try again meanwhile.
        """
        substitute = self._running and _substitute(self._running.reader)
        try:
            self.unload()
            self.load()
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
    assert reader.parent is not None
    reader.parent.insert(substitute)
    return substitute


def _restarting(request: Request, relpath: str) -> None:
    request.response.error(503, "The application is starting anew.", {"Retry-After": "1"})


class Applications:
    """The applications of a server, and the part of the Lua API that serves them.

    Args:
        vm: the runtime.
        services: the server; its `root` and `ios` are used.
    """

    def __init__(self, vm: Vm, services: Services) -> None:
        self.vm = vm
        self.services = services
        self.entries: dict[str, int] = {}
        self.exchanges = services.exchanges = exchange.install(vm)
        request.install(vm, services, self.exchanges)
        response.install(vm, services, self.exchanges)
        self._sessions = sessions.install(vm, services, self.exchanges)
        self.sessions = self._sessions.sessions
        self.files = files.install(vm, services)
        self.dirs = dirs.install(vm, services, self.exchanges, self.files, pages.install(vm))
        self.run_exit_functions = system.install_mako(vm, services)
        vm.namespace("ba.apps", {"entry": self._entry})
        self._next_number = itertools.count(1).__next__

    def load(self, name: str, path: Path, priority: int = 0, inner: str = "") -> Application:
        """Load an application; may block. Look at its `error` for the outcome.

        Args:
            name: the path segment it answers, "" for the root.
            path: a folder or a ZIP file.
            priority: -127 to 127, higher is asked first.
            inner: the folder inside the ZIP file.
        """
        number = self._next_number()
        application = Application(name, path, lambda: self._start(number, name, path, priority, inner))
        application.load()
        return application

    def _start(self, number: int, name: str, path: Path, priority: int, inner: str) -> Running:
        io: Io = DiskIo(path) if path.is_dir() else ZipIo(path, inner)
        io.private = self.services.private
        owner = app_folder.AppScope(path.resolve() if path.is_dir() else None)
        reader = ApplicationDirectory(name, priority, io, owner, self._sessions.find)
        reader.headers = dict(SECURITY_HEADERS)
        scripts: list[Script] = [LuaScript(self, number, io, reader)]
        if _has(io, PYTHON_PRELOAD):
            scripts.insert(0, PythonApplication(files.label(io, PYTHON_PRELOAD), io, reader))
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


def _has(io: Io, name: str) -> bool:
    try:
        return not io.stat(name).isdir
    except IoError:
        return False
