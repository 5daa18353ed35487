"""Python half of system functions, timers, `mako`, `loadconf` and application management.

(spec: bas-api §3, §7, §8.1, runtime §1.2, §2.1, §6, §7)
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Generic, Protocol, TextIO, TypeVar

from gevent import get_hub, subprocess

import smqrt
from smqrt.apps.lua.api.dirs import DirsBinding
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.bridge import Function, LuaValue, LuaValues, fail, from_utf8, methods, utf8
from smqrt.apps.lua.vm import Services, Vm, clock_ms, sleep_ms
from smqrt.errors import ArgumentError
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.resources import Io, IoError
from smqrt.http.tracelogger import FOR_VIEWERS
from smqrt.loop.threads import in_thread
from smqrt.printable import PrintableFormatter
from smqrt.process.current_process import AppScope, current_app
from smqrt.settings.limits import Limit, current_limits
from smqrt.workers.worker_rpc import worker_place

# ---- System functions: version, clock, trace and output

BAS_VERSION = 5803  # the highest version that known applications require; a higher one would promise more functions
BUILD_DATE = b"2026-11-21"
SHOWN_PRIORITY = 7  # the lowest priority that is logged; 0 is the highest


def now() -> tuple[int, int]:
    """Return the Unix time: seconds and nanoseconds."""
    return divmod(time.time_ns(), 1_000_000_000)


def same_address(first: bytes, second: bytes) -> bool:
    """Return whether two texts are the same IP address; an IPv4 address equals its IPv6-mapped form."""
    try:
        return _plain(first) == _plain(second)
    except ValueError:
        return False


def _plain(text: bytes) -> object:
    address = ip_address(text.decode("latin-1"))
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


class _StderrFallback(logging.StreamHandler[TextIO]):
    """Writes traces to stderr until logging is configured."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if not logging.getLogger().handlers:
            super().emit(record)


def install_system(vm: Vm, services: Services) -> None:
    """Install trace and output, `ba.version`, `ba.cmpaddr`, `ba.datetime`, the byte order functions of `ba.socket`,
    `ba.timer`, `ba.thread`, `ba.sleep`, `ba.clock` and `ba.exec`.
    """
    trace_log = services.log
    if not trace_log.hasHandlers():
        handler = _StderrFallback()
        handler.setFormatter(PrintableFormatter())
        trace_log.addHandler(handler)
        trace_log.setLevel(logging.INFO)

    def trace(priority: int, text: bytes, is_for_viewers: bool) -> None:
        if priority <= SHOWN_PRIORITY:
            extra = {FOR_VIEWERS: True} if is_for_viewers else None
            trace_log.info("%s", text.decode("utf-8", "replace"), extra=extra)

    def version() -> tuple[int, int, bytes]:
        return BAS_VERSION, vm.number, BUILD_DATE

    def port(secure: bool) -> int | None:
        return (services.https_port if secure else services.http_port) or None

    def soon(ref: int, handle: int) -> None:
        get_hub().loop.run_callback(vm.start, ref, handle)

    vm.namespace("ba.trace", {"trace": trace, "print": services.output})
    system: dict[str, Function] = {"version": version, "cmpaddr": same_address, "port": port}
    vm.namespace("ba.system", system)
    vm.namespace("ba.socket", {})
    vm.namespace("ba.datetime", {"now": now})
    timers = Timers(vm)
    vm.namespace("ba.timer", methods(timers, "start stop active"))
    vm.namespace("ba.thread", {"clock": clock_ms, "soon": soon}, {"exec": execute}, parking={"sleep": sleep_ms})


# ---- Timers and shell commands

MIN_INTERVAL_MS = 1.0  # a shorter interval would occupy the loop
MAX_OUTPUT_BYTES = 64 * 1024  # documented limit of `ba.exec`

APP_TIMERS = Limit("app_timers", "limits.app_timers", "active timers of an application")


class Timers:
    """Active timers by handle.

    The timers of the event loop repeat by themselves, so a late callback does not delay the next one.
    """

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._watchers: dict[int, Any] = {}
        self._owners: dict[int, AppScope | None] = {}
        self._counts: Counter[AppScope | None] = Counter()

    def start(self, handle: int, tick_ref: int, interval_ms: float, now: bool) -> None:
        """Start a timer that calls the Lua function `tick_ref` with `handle`.

        Args:
            handle: of the timer; an active timer with this handle is replaced.
            tick_ref: reference of the function.
            interval_ms: time between two calls.
            now: whether to call the function in the next iteration of the loop too.

        Raises:
            ArgumentError: the application has too many active timers.
        """
        self.stop(handle)
        # Only pages and .preload have a current application. Timers that callbacks start are counted together.
        owner, max_timers = current_app.get(), current_limits().app_timers
        if max_timers is not None and self._counts[owner] >= max_timers:
            name = owner.name if owner is not None else ""
            APP_TIMERS.refused(f"a timer of {name or 'an application'}")
            raise ArgumentError(f"timer:set: {max_timers} timers are active; see the setting limits.app_timers")
        self._owners[handle] = owner
        self._counts[owner] += 1
        seconds = max(interval_ms, MIN_INTERVAL_MS) / 1000
        watcher = get_hub().loop.timer(0.0 if now else seconds, seconds)
        watcher.start(self._vm.start, tick_ref, handle)
        self._watchers[handle] = watcher

    def stop(self, handle: int) -> bool:
        """Stop a timer; return whether it was active."""
        watcher = self._watchers.pop(handle, None)
        if watcher is None:
            return False
        owner = self._owners.pop(handle)
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]
        watcher.stop()
        watcher.close()
        return True

    def active(self, handle: int) -> bool:
        """Return whether the timer is active."""
        return handle in self._watchers


def execute(command: bytes) -> LuaValues:
    """Run a shell command and return its output (stdout and stderr, at most 64 KiB) and exit code.

    Returns None, code, output when the command failed.
    """
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            output: bytes = process.stdout.read(MAX_OUTPUT_BYTES)
            while process.stdout.read(MAX_OUTPUT_BYTES):  # discard the rest: the command would block on a full pipe
                pass
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    return (output, code) if code == 0 else (None, code, output)


# ---- `loadconf` and `mako`

log = logging.getLogger("smqrt.lua")

MAX_CONF_BYTES = 1 << 20  # against reading a large file by mistake


def install_loadconf(vm: Vm, services: Services) -> Callable[[], LuaValues]:
    """Install `loadconf`.

    Returns:
        A function that runs mako.conf and returns its variables (see `bridge.load`), or None and the error message. It
        may block.
    """
    refs: list[int] = []

    def source() -> LuaValues:
        path = services.conf
        return (None,) if path is None else in_thread(_read_conf, path)

    vm.namespace("ba.loadconf", {"attach": refs.append}, {"source": source})
    return lambda: vm.run(refs[0])


def _read_conf(path: Path) -> LuaValues:
    """Return the text of the file and its chunk name, None if there is no file, or None and an error message."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONF_BYTES + 1)
    except FileNotFoundError:
        return (None,)
    except OSError as error:
        return None, utf8(f"{path}: can't read: {error.strerror}")
    if len(text) > MAX_CONF_BYTES:
        return None, utf8(f"{path}: more than {MAX_CONF_BYTES} bytes")
    return text, utf8(f"@{path.name}")


def install_mako(vm: Vm, services: Services, dirs: DirsBinding | None = None) -> Callable[[], None]:
    """Install the `mako` table.

    Returns:
        A function that runs the functions of `mako.onexit` in the order of their registration. It may block; errors
        are logged.
    """
    refs: list[int] = []
    conf = services.conf

    def load_certificates(in_thread: bool) -> LuaValues:
        load = services.load_certificates
        error = load(in_thread) if load else "there are no certificates to read again"
        return (True,) if error is None else fail(error)

    functions: dict[str, Function] = {
        "argv": lambda: tuple(utf8(word) for word in services.argv),
        "environment": lambda: tuple(map(utf8, itertools.chain.from_iterable(os.environ.items()))),
        "cfgdir": lambda: utf8(f"{conf.parent}/".replace("//", "/")) if conf else _current_folder(),
        "cfgfname": lambda: utf8(str(conf)) if conf else None,
        "cwd": _current_folder,
        "date": lambda: BUILD_DATE,
        "execpath": lambda: utf8(os.path.dirname(os.path.realpath(sys.argv[0])) + "/"),
        "version": lambda: smqrt.__version__.encode(),
        "worker": lambda: (worker_place().number, worker_place().count),
        "port": lambda secure: (services.https_port if secure else services.http_port) or None,
        "rtl": lambda: dirs.register(services.rtl) if dirs and services.rtl else None,
        "load_certificates_here": lambda: load_certificates(in_thread=False),
        "can_stop": lambda: services.stop is not None,
        "stop": lambda status: services.stop(status) if services.stop else None,
        "attach": refs.append,
        "report": lambda text: log.error("%s", text.decode("utf-8", "replace")),
    }
    vm.namespace("ba.mako", functions, {"load_certificates": lambda: load_certificates(in_thread=True)})
    vm.namespace("ba.configured", {})

    def run() -> None:
        vm.run(refs[0])

    return run


def _current_folder() -> bytes:
    return utf8(os.getcwd() + "/")


# ---- Management of applications


class ManagedApplication(Protocol):
    """An application, see `smqrt.apps.lua.applications.Application`."""

    name: str
    path: Path
    number: int
    priority: int
    error: str | None
    changing: bool

    @property
    def running(self) -> bool: ...
    def load(self) -> None: ...
    def unload(self) -> str | None: ...
    def reload(self) -> None: ...


A = TypeVar("A", bound=ManagedApplication)


class ApplicationList(Protocol[A]):
    """The applications of a server, see `smqrt.apps.lua.applications.Applications`."""

    all: list[A]

    def make(self, name: str, path: Path, open_io: Callable[[], Io], priority: int = 0) -> A: ...


class ManagementBinding(Generic[A]):
    """Management functions; Lua refers to an application by its number. All but `apps` may block.

    Args:
        applications: the applications of the server.
        files: the io objects of Lua.
        home: returns the folder to which paths are relative.
    """

    def __init__(self, applications: ApplicationList[A], files: FilesBinding, home: Callable[[], Path]) -> None:
        self._applications, self._files, self._home = applications, files, home

    def apps(self) -> LuaValues:
        """Return the number, name, path, priority, running state and error of each application."""
        found: list[LuaValue] = []
        for one in self._applications.all:
            error = utf8(one.error) if one.error else None
            found += (one.number, utf8(one.name), utf8(str(one.path)), one.priority, one.running, error)
        return tuple(found)

    def create(self, name: bytes, priority: int, path: bytes, io: int | None, start: bool) -> LuaValues:
        """Create an application from a path or an io; return its number, or None and the error."""
        if any(one.name == from_utf8(name) for one in self._applications.all):
            return fail("exist")
        if io is None:
            folder = self._home() / from_utf8(path)
            if not folder.exists():
                return fail("notfound")
            application = self._applications.make(
                from_utf8(name), folder, lambda: DiskIo(folder) if folder.is_dir() else ZipIo(folder), priority
            )
        else:
            own_io = self._files.io(io)
            try:
                folder = Path(own_io.realpath())
            except IoError:
                folder = Path("io")  # a name for messages: this io has no path
            application = self._applications.make(from_utf8(name), folder, lambda: own_io, priority)
        if start:
            application.load()
        if application.error is not None:
            application.unload()
            self._applications.all.remove(application)
            return fail(application.error)
        return (application.number,)

    def start(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        if application.running:
            return fail("running")
        application.load()
        return (True,) if application.error is None else fail(application.error)

    def stop(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        if not application.running:
            return fail("stopped")
        return _unloaded(application)

    def reload(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        application.reload()
        return (True,) if application.error is None else fail(application.error)

    def remove(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        result = _unloaded(application)
        self._applications.all.remove(application)
        return result

    def _find(self, number: int) -> A | None:
        return next((one for one in self._applications.all if one.number == number), None)


def _unloaded(application: ManagedApplication) -> LuaValues:
    """Unload an application; return True, or False and the error of its `onunload`."""
    failure = application.unload()
    return (True,) if failure is None else (False, utf8(failure))


def _not_now(application: ManagedApplication | None) -> LuaValues:
    return fail("locked" if application else "notfound")


def install_management(vm: Vm, services: Services, applications: ApplicationList[A], files: FilesBinding) -> None:
    """Install the functions that manage applications."""

    def home() -> Path:
        io = services.ios.get("home")
        return Path(io.realpath() if io else ".")

    binding = ManagementBinding(applications, files, home)
    vm.namespace("ba.manage", methods(binding, "apps"), methods(binding, "create start stop reload remove"))
