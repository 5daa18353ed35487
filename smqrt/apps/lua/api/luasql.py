"""Python half of `luasql` and `sqlutil` (spec: bas-api §11, §17).

The statements run in threads; see `smqrt.apps.lua.sqlite`.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
from time import monotonic
from typing import Any

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaValue, LuaValues, fail, from_utf8, methods
from smqrt.apps.lua.sqlite import Connection, Database, Rows, SqlFailure, SqlJob, SqlScript, Value, full_path, quoted
from smqrt.apps.lua.vm import Services, Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import ClosedError
from smqrt.loop.scheduling import Deadlines
from smqrt.loop.threads import Threads
from smqrt.process import current_process

THREADS, THREADS_PER_APPLICATION = 32, 8  # so that one application with slow statements does not block the others
MAX_CONNECTIONS = 256
"""Limit of the open connections of one application; each has a file descriptor and up to 2 MB of cached pages."""
LIMIT_REACHED = "LIMIT"
"""Replaces an SQLite error code: Lua collects garbage, which closes lost connections, and tries again."""
RECENT_S, MAX_RECENT = 10.0, 1000
DATA_MODE = 0o700  # databases are private to the server's user, like all data that the server writes

_NO_APPLICATION = "no application"


class _Answer(Deferred[LuaValues]):
    """The result of a job as Lua values. Cancelling it cancels the job."""

    __slots__ = ("_job", "_shape")

    def __init__(self, job: Deferred[Any], shape: Callable[[Any], LuaValues]) -> None:
        super().__init__()
        self._job, self._shape = job, shape
        job.then(self._settled)

    def _settled(self, value: object, error: BaseException | None) -> None:
        if error is None:
            self.resolve(self._shape(value))
        elif isinstance(error, SqlFailure):
            self.resolve(fail(error.code, str(error)))
        else:
            self.reject(error)

    def _release(self) -> None:
        self._job.cancel()


class _Opening(Deferred[LuaValues]):
    """The handle of a connection that is being opened. Closes the connection if opening fails or is cancelled."""

    __slots__ = ("_connection", "_handle", "_on_open")

    def __init__(self, connection: Connection, handle: int, on_open: Callable[[], object]) -> None:
        super().__init__()
        self._connection, self._handle, self._on_open = connection, handle, on_open
        connection.call("open").then(self._settled)

    def _settled(self, value: object, error: BaseException | None) -> None:
        if self.done or error is not None:  # done: cancelled while it was being opened
            self._connection.shut()
        if error is None:
            self._on_open()
            self.resolve((self._handle,))
        elif isinstance(error, SqlFailure):
            self.resolve(fail(error.code, str(error)))
        else:
            self.reject(error)


class Recent:
    """The databases that were opened recently.

    The file of a connection to such a database is opened with the first statement: one job for a thread instead of
    two. A page that opens a connection, runs a query and closes it then uses a fifth less CPU time.
    """

    def __init__(self) -> None:
        self._until_s: dict[Hashable, float] = {}

    def has(self, name: Hashable) -> bool:
        """Return whether the name was added within `RECENT_S`."""
        return self._until_s.get(name, 0.0) > monotonic()

    def add(self, name: Hashable) -> None:
        """Add a name, or renew its time."""
        if len(self._until_s) >= MAX_RECENT:
            self._until_s.clear()  # simpler than removing old entries; a removed name only costs one more job
        self._until_s[name] = monotonic() + RECENT_S


class SqlBinding:
    """The SQLite connections of Lua by handle.

    Args:
        home: returns the folder to which paths are relative.
        scope_of: see `Services.scope_of`.
    """

    def __init__(
        self, home: Callable[[], str], scope_of: Callable[[int | None], current_process.AppScope | None]
    ) -> None:
        self._home, self._scope_of = home, scope_of
        self._threads = Threads(THREADS, THREADS_PER_APPLICATION)
        self._deadlines: Deadlines[Any] = Deadlines()
        self._opened = Recent()
        self._next_handle = itertools.count(1).__next__
        self._connections: dict[int, Connection] = {}
        self._of_group: defaultdict[Hashable, set[Connection]] = defaultdict(set)

    # ---- parking

    def connect(self, path: bytes, mode: bytes, application: int | None) -> Deferred[LuaValues] | LuaValues:
        """Return the handle of a new connection, or nil, `LIMIT_REACHED` and a message.

        Args:
            path: of the database, absolute or relative to `home`.
            mode: see `Database`.
            application: see `Services.scope_of`.
        """
        scope = self._scope_of(application)
        group: Hashable = scope or _NO_APPLICATION
        connections = self._of_group[group]
        # The set also has closed connections whose last job is still running; they don't count.
        if len(connections) >= MAX_CONNECTIONS and sum(not one.is_closed for one in connections) >= MAX_CONNECTIONS:
            return fail(LIMIT_REACHED, f"{MAX_CONNECTIONS} connections are open; close those you don't need")
        handle, name = self._next_handle(), (self._full(path), mode.decode())
        closed = partial(self._forget, group, handle)
        connection = Connection(Database(*name), self._threads, group, self._deadlines, closed)
        self._connections[handle] = connection
        connections.add(connection)
        if scope:
            scope.add(connection)
        if self._opened.has(name):
            return (handle,)  # the first statement opens it
        return _Opening(connection, handle, partial(self._opened.add, name))

    def execute(self, handle: int, sql: bytes, parameters: bytes | None) -> Deferred[LuaValues]:
        """Return the number of changed rows; for a query, the number of the cursor, its columns and packed rows.

        Args:
            handle: of the connection.
            sql: the statement.
            parameters: the packed arguments of `bind`: a list or values by name. Text is given as bytes, a blob as
                {"blob": bytes}. None for no parameters.
        """
        bound: list[Value] | dict[str, Value] = []
        if parameters is not None:
            fields: dict[Any, Any] = bridge.load(parameters)
            values = fields[b"values"]
            if b"count" in fields:  # a list may have holes, which are NULL
                bound = [_bound(values.get(at)) for at in range(1, fields[b"count"] + 1)]
            else:
                bound = {from_utf8(name): _bound(value) for name, value in values.items()}
        return self._call(_shape_of_result, handle, "execute", sql, bound)

    def fetch(self, handle: int, cursor: int) -> Deferred[LuaValues]:
        return self._call(lambda rows: (rows.packed, rows.cursor), handle, "fetch", cursor)

    def column_types(self, handle: int, sql: bytes) -> Deferred[LuaValues]:
        return self._call(_one, handle, "column_types", sql)

    def manual(self, handle: int, is_manual: bool, kind: bytes) -> Deferred[LuaValues]:
        return self._call(_true, handle, "manual", is_manual, kind.decode())

    def end(self, handle: int, command: bytes, kind: bytes) -> Deferred[LuaValues]:
        return self._call(_true, handle, "end", command.decode(), kind.decode())

    def prepare(self, handle: int, sql: bytes) -> Deferred[LuaValues]:
        return self._call(_one, handle, "prepare", sql)

    def execute_all(self, handle: int, sql: bytes) -> Deferred[LuaValues]:
        return self._call(_true, handle, "execute_all", SqlScript(sql))

    def last_id(self, handle: int) -> Deferred[LuaValues]:
        return self._call(_one, handle, "last_id")

    def tables(self, handle: int) -> Deferred[LuaValues]:
        return self._call(_one, handle, "tables")

    def close(self, handle: int) -> Deferred[LuaValues] | bool:
        connection = self._connections.get(handle)
        if connection is None:
            return False
        closed: Deferred[LuaValues] = Deferred()  # of this call: cancelling it does not affect other calls of `shut`
        connection.shut().then(lambda _value, _error: closed.resolve((True,)))
        return closed

    def make_folder(self, path: bytes) -> Deferred[LuaValues]:
        """Create a folder and its parents, unless it exists."""
        return _Answer(self._threads.submit(_NO_APPLICATION, _make_folder, self._full(path)), _true_or_fault)

    def exists(self, path: bytes) -> Deferred[LuaValues]:
        """Return whether the file exists."""
        return _Answer(self._threads.submit(_NO_APPLICATION, os.path.isfile, self._full(path)), _one)

    # ---- direct

    def set_busy_timeout(self, handle: int, milliseconds: float) -> bool:
        self._of(handle).busy_timeout_s = milliseconds / 1000
        return True

    def drop(self, handle: int) -> None:
        """Close a connection whose Lua object was collected."""
        if connection := self._connections.get(handle):
            connection.shut()

    def drop_cursor(self, handle: int, cursor: int) -> None:
        if connection := self._connections.get(handle):
            connection.drop_cursor(cursor)

    def _forget(self, group: Hashable, handle: int) -> None:
        connections = self._of_group[group]
        connections.discard(self._connections.pop(handle))
        if not connections:
            del self._of_group[group]

    def _full(self, path: bytes) -> str:
        return full_path(from_utf8(path), self._home())

    def _of(self, handle: int) -> Connection:
        connection = self._connections.get(handle)
        if connection is None or connection.is_closed:
            raise ClosedError("the connection is closed")
        return connection

    def _call(self, shape: Callable[[Any], LuaValues], handle: int, method: str, *arguments: object) -> _Answer:
        job: SqlJob = self._of(handle).call(method, *arguments)
        return _Answer(job, shape)


def _true(_value: object) -> LuaValues:
    return (True,)


def _one(value: LuaValue) -> LuaValues:
    return (value,)


def _shape_of_result(result: Rows | int) -> LuaValues:
    return (result.cursor, result.columns, result.packed) if isinstance(result, Rows) else (result,)


def _bound(value: Any) -> Value:
    if isinstance(value, dict):
        return bytes(value[b"blob"])
    if not isinstance(value, bytes):
        return value  # type: ignore[no-any-return]
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value  # becomes a blob: SQLite accepts only UTF-8 as text


def _make_folder(path: str) -> str:
    try:
        os.makedirs(path, DATA_MODE, exist_ok=True)
    except OSError as error:
        return error.strerror or "can't create the folder"
    return ""


def _true_or_fault(fault: str) -> LuaValues:
    return fail(fault) if fault else (True,)


_PARKING = "connect execute fetch column_types manual end prepare execute_all last_id tables close make_folder exists"


def install(vm: Vm, services: Services) -> None:
    """Install `luasql`."""

    def home() -> str:
        io = services.ios.get("home")
        return io.realpath() if io else os.getcwd()

    binding = SqlBinding(home, services.scope_of)
    functions = methods(binding, "set_busy_timeout drop drop_cursor")
    functions |= {"quote": quoted, "version": lambda: sqlite3.sqlite_version.encode()}
    vm.namespace("luasql", functions, parking=methods(binding, _PARKING))
