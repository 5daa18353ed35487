"""Lua runtime of a server, and the services of the server that its API uses.

Lua functions and tables never cross to Python: a table in Lua holds them, and Python refers to them by integers. Only
None, bool, int, float and bytes cross from Python to Lua. See decisions 0003 and 0040.
"""

from __future__ import annotations

import atexit
import logging
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from gevent import get_hub
from lupa import __version__ as lupa_version

from smqrt.apps.lua.activities import Activities, LuaThread
from smqrt.apps.lua.bridge import Function, LuaError, LuaValue, LuaValues, Op, encoded, guarded
from smqrt.errors import StartError
from smqrt.http.access import Private
from smqrt.http.client.client import HttpConversation
from smqrt.http.logins import Logins
from smqrt.http.resources import Io
from smqrt.http.server import HttpServer
from smqrt.http.tree import ResourceReader, Root
from smqrt.loop.greenlets import ErrorLimit
from smqrt.loop.scheduling import TimedDeferred
from smqrt.process.current_process import AppScope, current_app
from smqrt.transport.tls_contexts import ClientTls, ServerTls
from smqrt.workers.worker_rpc import WorkerRpc

# ---- Parts of the server that the Lua API uses.

JSON_VALUES = 1 << 18


def _to_stdout(line: bytes) -> None:
    sys.stdout.write(line.decode("utf-8", "replace") + "\n")
    sys.stdout.flush()


@dataclass
class Services:
    """The argument of every `install(vm, services)` in `smqrt/apps/lua/api`; absent parts are None.

    root: the root of the virtual directories (`smqrt.http.tree.Root`).
    rtl: the directory `/rtl/`.
    ios: the named io objects (`disk`, `home`, `vm`, ...).
    private: the files of applications that are hidden from clients.
    logins: sessions and logins of browsers (`smqrt.http.logins.Logins`).
    json_values: maximum number of values of `ba.json.decode`.
    argv: all words of the command line, in order.
    log: the log of `trace`.
    output: called with each line that `print` writes outside of pages.
    tls: the TLS clients and servers of Lua by their numbers (`ClientTls`, `ServerTls`).
    sockets: the sockets of Lua (`smqrt.apps.lua.api.sockets.SocketBinding`).
    mqtt: the MQTT clients of Lua (`smqrt.apps.lua.api.mqtt.MqttBinding`).
    smq_clients: the SMQ clients of Lua (`smqrt.apps.lua.api.smq_client.SmqClientBinding`).
    hubs: the hubs of Lua (`smqrt.apps.lua.api.smq_hub.HubBinding`).
    mqtt_brokers: the MQTT brokers of Lua (`smqrt.apps.lua.api.mqttbroker.PortBinding`).
    http_clients: the HTTP clients of Lua by their numbers.
    http_server: the HTTP server (`smqrt.http.server.HttpServer`), to which sockets can be returned.
    key_file: the file of `ba.tpm`; None for the user's (`smqrt.crypto.keyfile.default_path`).
    processes: the child processes of Lua (`smqrt.apps.lua.api.processes.ProcessBinding`).
    exchanges: the HTTP requests that Lua processes (`smqrt.apps.lua.api.exchange.Exchanges`).
    http_port, https_port: the listening ports; 0 for none.
    scopes: the scopes of running applications, by their numbers.
    stop: requests a shutdown of the server, with the exit status.
    load_certificates: reloads the certificates of the TLS ports, in a thread (blocking) or not; returns the error, None
        for success.
    conf: the mako.conf in force.
    tracelogger: whether the trace logger is enabled, regardless of that file.
    worker_rpc: the workers of the server; None for a single process.
    """

    root: Root = field(default_factory=Root)
    rtl: ResourceReader | None = None
    ios: dict[str, Io] = field(default_factory=dict)
    private: Private = field(default_factory=Private)
    logins: Logins = field(default_factory=Logins)
    json_values: int = JSON_VALUES
    argv: list[str] = field(default_factory=list)
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("smqrt.trace"))
    output: Callable[[bytes], None] = _to_stdout
    tls: dict[int, ClientTls | ServerTls] = field(default_factory=dict)
    sockets: Any = None
    mqtt: Any = None
    smq_clients: Any = None
    hubs: Any = None
    mqtt_brokers: Any = None
    http_clients: dict[int, HttpConversation] = field(default_factory=dict)
    http_server: HttpServer | None = None
    key_file: Path | None = None
    processes: Any = None
    exchanges: Any = None
    scopes: WeakValueDictionary[int, AppScope] = field(default_factory=WeakValueDictionary)
    http_port: int = 0
    https_port: int = 0
    stop: Callable[[int], None] | None = None
    load_certificates: Callable[[bool], str | None] | None = None
    conf: Path | None = None
    tracelogger: bool = False
    worker_rpc: WorkerRpc | None = None

    def known_application(self) -> int | bool | None:
        """Return the number of the application whose code this greenlet runs.

        None for an application without a number, False outside of applications. Lua passes the number to blocking
        calls, which may run in another greenlet.
        """
        owner = current_app.get()
        if owner is None:
            return False
        return next((number for number, scope in list(self.scopes.items()) if scope is owner), None)

    def scope_of(self, application: int | None) -> AppScope | None:
        """Return the scope of the application whose code is running.

        Args:
            application: its number from `core.application` of Lua, for greenlets without a current application.
        """
        return current_app.get() or self.scopes.get(application or 0)


log = logging.getLogger("smqrt.lua")

CORE = ("arguments", "types", "coroutine", "overtime", "activity", "namespace", "table_codec", "sandbox", "require")
"""Parts of the Lua half, in the order of their dependencies."""

VERSION = "5.4"
"""Default version of Lua."""

_LIBRARY_NAME = re.compile(r"[A-Za-z0-9_]+(?:[./][A-Za-z0-9_]+)*")
_NOT_FOR_APPLICATIONS = ("core", "ba")  # parts of the runtime, which applications can't require


def lupa_of(version: str) -> Any:
    """Return the lupa module of a version of Lua, such as "5.4".

    Raises:
        StartError: the installed lupa does not include this version.
    """
    try:
        return import_module(f"lupa.lua{version.replace('.', '')}")
    except ImportError:
        raise StartError(
            f"lua.version: lupa {lupa_version} has no Lua {version}. Update it (pip install -U lupa), or remove the "
            "setting."
        ) from None


def chunk_name(name: str) -> bytes:
    """Return the chunk name of a library; its prefix distinguishes library frames from those of applications."""
    return f"@smqrt/apps/lua/lib/{_library_path(name)}".encode()


@cache
def library_source(name: str) -> bytes | None:
    """Return the source of a library in `smqrt/apps/lua/lib`, by its name with dots or slashes; None if absent."""
    if not _LIBRARY_NAME.fullmatch(name):
        return None
    file = resources.files("smqrt.apps.lua") / "lib" / _library_path(name)
    return file.read_bytes() if file.is_file() else None


def requirable_source(name: str) -> bytes | None:
    """As `library_source`, only for libraries that applications may `require`."""
    return None if re.split(r"[./]", name)[0] in _NOT_FOR_APPLICATIONS else library_source(name)


def _library_path(name: str) -> str:
    return name.replace(".", "/") + ".lua"


def clock_ms() -> int:
    """Return the milliseconds of the monotonic clock."""
    return time.monotonic_ns() // 1_000_000


class Sleep(TimedDeferred[None]):
    """A Deferred that resolves after a time."""

    __slots__ = ()

    def _expired(self) -> None:
        self.resolve()


def pause() -> None:
    """Do nothing. Like every blocking call, it yields to others if the activity's share of the loop is used up."""


def sleep_ms(ms: float) -> Sleep:
    """Park the activity for a time in milliseconds."""
    return Sleep(max(ms, 0) / 1000)


class Vm:
    """One Lua state with its activities.

    `run`, `call` and `start` run a Lua function by its reference; `stop` ends all waiting activities. See `Activities`.

    Args:
        version: version of Lua; None for `VERSION`.

    Attributes:
        lupa: the lupa module of that version.
        number: the version as a number, such as 504.

    Raises:
        StartError: lupa does not include this version.
    """

    def __init__(self, version: str | None = None) -> None:
        self.lupa = lupa_of(version or VERSION)
        major, minor = self.lupa.LUA_VERSION
        self.number = 100 * major + minor
        runtime = self.lupa.LuaRuntime(
            encoding=None,  # bytes: strings of Lua need not be UTF-8
            register_eval=False,  # Lua gets no other Python functions than those of `namespace`
            register_builtins=False,
            unpack_returned_tuples=True,  # a tuple becomes several values
            attribute_handlers=(_deny, _deny),
        )
        core = runtime.table()
        for part in CORE:
            name = f"core.{part}"
            source = library_source(name)
            assert source is not None, name
            runtime.compile(source, chunk_name(name))(core)
        self._failure, self._refs = core[b"failure"], dict(core[b"entries"])
        loop, first = core[b"loop"], self._refs[b"first"]
        activities = Activities(lambda: loop.coroutine(first), self._refs[b"close"], self._failure)
        self.activities = activities
        self.run, self.call, self.start, self.stop = activities.run, activities.call, activities.start, activities.stop
        _live.add(self)
        functions: dict[str, Function] = {
            "module_source": _module_source,
            "log_error": _log_error,
            "clock": clock_ms,
        }
        self.namespace("core.python", functions, {"pause": pause}, parking={"sleep": sleep_ms})

    def finish(self) -> None:
        """Disconnect Lua from Python permanently.

        Finalizers that run when the Lua state is freed must not call Python objects that are freed with it. Called
        automatically at process exit and when the `Vm` is deleted.
        """
        self.call(self._refs[b"finish"])

    def __del__(self) -> None:
        with suppress(LuaError, AttributeError):  # AttributeError: the constructor failed
            self.finish()

    def relax(self) -> None:
        """Reset the overtime state of Lua, since the activity that the watchdog was ending no longer runs."""
        self.call(self._refs[b"relax"])

    def hold_collector(self) -> None:
        """Stop the garbage collector while Lua receives a large value, for which it would collect in one long step.

        The Lua half that receives the value calls `core.collect`.
        """
        self.call(self._refs[b"hold"])

    def free(self, ref: int) -> None:
        """Release a Lua function or table. References are never reused, so a late call of it is an error."""
        self.call(self._refs[b"free"], ref)

    def namespace(
        self,
        name: str,
        functions: Mapping[str, Function],
        blocking: Mapping[str, Function] | None = None,
        source: bytes | None = None,
        parking: Mapping[str, Function] | None = None,
    ) -> None:
        """Install a part of the API: pass the Python half to the Lua half, which runs as `chunk(core, py)`.

        The return value of the Lua half is the module `name` for `require`.

        Args:
            name: name of the part, with dots for slashes in the path of its Lua half.
            functions: become `py.<key>`, called directly; they must not switch greenlets, nor keep a Lua value.
            blocking: become `py.<key>`; they run without Lua on the C stack and may block.
            source: the Lua half; None for the file `lib/<name>.lua`.
            parking: become `py.<key>`; they do not block, and may return a `Deferred`, whose wait needs no greenlet.

        Raises:
            LuaError: the Lua half fails.
            ValueError: there is no Lua half.
        """
        source = source if source is not None else library_source(name)
        if source is None:
            raise ValueError(f"no Lua half smqrt/apps/lua/lib/{name}.lua")
        halves: list[Any] = []
        for key, fn in functions.items():
            halves += (key.encode(), guarded(fn, self._failure))
        for key, fn in (blocking or {}).items():
            halves += (key.encode(), Op(fn, name=f"{name}.{key}"))
        for key, fn in (parking or {}).items():
            halves += (key.encode(), Op(fn, True, f"{name}.{key}"))
        self.run(self._refs[b"install"], name.encode(), source, chunk_name(name), len(functions), *halves)

    def compile(self, source: str | bytes, name: str = "=compile") -> int:
        """Compile Lua source text with the global environment, and return a reference to the function.

        Args:
            source: the source text.
            name: the chunk name; "@" and a path for a file.

        Raises:
            LuaError: a syntax error.
        """
        return _integer(self.run(self._refs[b"compile"], encoded(source), name.encode())[0])

    def eval(self, source: str | bytes, name: str = "=eval", *args: LuaValue) -> LuaValues:
        """Run Lua source text with the global environment in the current greenlet, and return its values.

        For start-up and tests.

        Args:
            source: the source text.
            name: the chunk name; "@" and a path for a file.
            args: arguments of the chunk.

        Raises:
            LuaError: a syntax or run-time error.
        """
        return self.run(self._refs[b"eval"], encoded(source), name.encode(), *args)

    def waiting(self) -> list[str]:
        """Return a line for each waiting activity: position in Lua, call, and duration of the wait."""
        return [
            f"{self._where(co)} in {name or 'Lua'} for {waited_s:.1f} s"
            for co, name, waited_s in self.activities.waiting()
        ]

    def _where(self, co: LuaThread) -> str:
        found = self.call(self._refs[b"where"], co)
        line = found[0] if type(found) is tuple and found else None
        return line.decode("utf-8", "replace") if isinstance(line, bytes) else "?"

    def collect(self) -> None:
        """Collect all garbage in one step, which takes seconds for a heap of gigabytes."""
        self.run(self._refs[b"collect"])

    def memory_bytes(self) -> int:
        """Return the memory of the Lua state, garbage included."""
        return _integer(self.run(self._refs[b"memory"])[0])


class LuaFunction:
    """A Lua function that Python calls; releases its reference when the object is deleted.

    Args:
        vm: the runtime.
        ref: the reference, owned by this object.
        what: name of the function in the log.
    """

    __slots__ = ("_vm", "_what", "ref")

    def __init__(self, vm: Vm, ref: int, what: str = "a Lua function") -> None:
        self._vm, self.ref, self._what = vm, ref, what

    def __call__(self, *arguments: LuaValue | str) -> LuaValue:
        """Run the function in this greenlet, which may block; return its first value, or None after a logged error."""
        return self.run(self._what, *arguments)

    def run(self, what: str, *arguments: LuaValue | str) -> LuaValue:
        """As `__call__`, with another name in the log."""
        try:
            values = self._vm.run(self.ref, *map(encoded, arguments))
        except LuaError as error:
            log.error("%s failed: %s", what, error)
            return None
        return values[0] if values else None

    def __del__(self) -> None:
        get_hub().loop.run_callback(self._vm.free, self.ref)  # Lua may be on the C stack now


_live: WeakSet[Vm] = WeakSet()


@atexit.register
def _finish_all() -> None:
    for vm in list(_live):
        vm.finish()


def _integer(value: LuaValue) -> int:
    assert isinstance(value, int | float)
    return int(value)


def _module_source(name: bytes) -> tuple[bytes, bytes] | None:
    text = name.decode("utf-8", "replace")
    source = requirable_source(text)
    return None if source is None else (source, chunk_name(text))


_limits: defaultdict[bytes, ErrorLimit] = defaultdict(ErrorLimit)
"""Limits of log lines by the kind of failure: "Cosocket failed", "Thread job failed" and others."""


def _log_error(text: bytes) -> None:
    if (others := _limits[text.partition(b":")[0]].line_suffix()) is not None:
        log.error("%s%s", text.decode("utf-8", "replace"), others)


def _deny(_obj: Any, _name: Any, _value: Any = None) -> None:
    """Hide the attributes of Python objects from Lua: return nil, since an exception would pass through lupa."""
