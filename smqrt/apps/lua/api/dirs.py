"""Python half of virtual directories, file servers, Lua Server Pages and trace loggers.

(spec: bas-api §1, §4, §17, runtime §4)
"""

from __future__ import annotations

import itertools
import re
from codecs import BOM_UTF8
from collections.abc import Hashable
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

from gevent import get_hub

from smqrt.apps.lua.api.exchange import Base, Exchange, Exchanges
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.bridge import (
    LuaError,
    LuaResult,
    LuaValue,
    LuaValues,
    fail,
    from_latin1,
    from_utf8,
    methods,
    options_of,
    utf8,
)
from smqrt.apps.lua.vm import LuaFunction, Services, Vm
from smqrt.errors import ArgumentError
from smqrt.http.access import MAX_AGE_S
from smqrt.http.dav.directory import MAX_LOCKS, MAX_UPLOADS, DavDirectory, WfsDirectory
from smqrt.http.dav.share import canonical
from smqrt.http.headers import Headers, HttpError, check_field
from smqrt.http.message import Request
from smqrt.http.open_files import call_blocking_unless_local
from smqrt.http.resources import IoError, Stat
from smqrt.http.tracelogger import FRAME_BYTES, NAME, OPTIONS, QUESTION, WAITING_BYTES, Line, Lines, TraceLogger
from smqrt.http.tree import Branch, Directory, ResourceReader
from smqrt.process.current_process import close_with_app
from smqrt.workers.worker_rpc import Message, News


class DirsBinding:
    """Directories by handle."""

    def __init__(self, services: Services, exchanges: Exchanges, files: FilesBinding, compiler: Compiler) -> None:
        self._root = services.root
        self._exchanges = exchanges
        self._compiler = compiler
        self._io_of, self._io_handle = files.io, files.handle_of
        self._next_handle = itertools.count(1).__next__
        self._dirs: dict[int, Directory] = {}
        self._handles: dict[Branch, int] = {}

    def register(self, directory: Directory) -> int:
        """Return a new handle for `directory`."""
        handle = self._next_handle()
        self._dirs[handle] = directory
        self._handles[directory] = handle
        return handle

    def directory(self, handle: int) -> Directory:
        """Return the directory of a handle."""
        return self._dirs[handle]

    def new_dir(self, name: bytes, priority: int) -> int:
        return self.register(Directory(from_utf8(name), priority))

    def new_reader(self, name: bytes, priority: int, io: int) -> int:
        return self.register(ResourceReader(from_utf8(name), priority, io=self._io_of(io)))

    def collect(self, handle: int) -> None:
        """Unlink a directory whose Lua object was collected."""
        directory = self._dirs.pop(handle, None)
        if directory is not None:
            directory.unlink()
            self._handles.pop(directory, None)
            if isinstance(directory, TraceLogger):
                directory.close()

    def insert_root(self, handle: int, path: bytes | None) -> None:
        parent: Branch = self._root
        for segment in from_utf8(path or b"").split("/"):
            if segment:
                child = Directory(segment)
                parent.insert(child)
                parent = child
        parent.insert(self._dirs[handle])

    def insert(self, handle: int, child: int) -> None:
        self._dirs[handle].insert(self._dirs[child])

    def insert_prolog(self, handle: int, child: int) -> None:
        self._reader(handle).insertprolog(self._dirs[child])

    def unlink(self, handle: int) -> tuple[bool, int | None]:
        """Unlink a directory; return whether it was linked, and the handle of its parent."""
        directory = self._dirs[handle]
        parent = directory.parent
        return directory.unlink(), self._handles.get(parent) if parent is not None else None

    def set_function(self, handle: int, is_set: bool) -> None:
        directory = self._dirs[handle]
        directory.func = partial(self.call, handle, (directory, "")) if is_set else None

    def set_cors(
        self,
        handle: int,
        origins: bytes | None,
        methods: bytes | None,
        headers: bytes | None,
        expose: bytes | None,
        credentials: bool | None,
        max_age_s: int | None,
    ) -> None:
        origins_, methods_, headers_, expose_ = (
            None if names is None else from_utf8(names) for names in (origins, methods, headers, expose)
        )
        self._dirs[handle].setcors(
            origins_,
            methods=methods_,
            headers=headers_,
            expose=expose_ or "",
            credentials=credentials,
            max_age_s=MAX_AGE_S if max_age_s is None else max_age_s,
        )

    def call(self, handle: int, base: Base, request: Request, relpath: str) -> bool:
        """Call the Lua function of a directory; return whether it handled the request.

        `base` is the directory and folder to which paths in the function are relative.
        """
        return self._exchanges.call(request, handle, utf8(relpath), base)

    def set_pages(self, handle: int, is_set: bool) -> None:
        self._reader(handle).pages = Pages(self._exchanges, self._compiler, handle) if is_set else None

    def baseuri(self, handle: int) -> bytes:
        return utf8(self._dirs[handle].baseuri())

    def name(self, handle: int) -> bytes:
        return utf8(self._dirs[handle].name)

    def io_of(self, handle: int) -> int:
        return self._io_handle(self._reader(handle).io)

    def clear_headers(self, handle: int) -> None:
        self._reader(handle).headers = {}

    def add_header(self, handle: int, name: bytes, value: bytes) -> None:
        field, text = from_latin1(name), from_latin1(value)
        try:
            check_field(field, text)
        except ValueError as error:
            raise ArgumentError(f"header: {error}") from None
        self._reader(handle).headers[field] = text

    def service(self, handle: int, exchange: int, relpath: bytes, as_forward: bool, written: bytes | None) -> LuaResult:
        """Answer the request of an exchange with a directory; blocks.

        Args:
            handle: of the directory.
            exchange: handle of the exchange.
            relpath: path below the directory.
            as_forward: whether this is `forward`, not `include`.
            written: the data in the caller's buffer.
        """

        def operation(exchange: Exchange) -> tuple[bool]:
            request = exchange.request
            needs_checks = request.needs_checks
            request.forwards += as_forward
            request.needs_checks = needs_checks and not as_forward
            try:
                return (self._dirs[handle].service(request, from_utf8(relpath)),)
            finally:
                request.forwards -= as_forward
                request.needs_checks = needs_checks

        return self._exchanges.inside(exchange, written, operation)

    def _reader(self, handle: int) -> ResourceReader:
        directory = self._dirs[handle]
        if not isinstance(directory, ResourceReader):
            raise ArgumentError("this directory is not a resource reader; create one with ba.create.resrdr")
        return directory


class FileServersBinding:
    """Functions that only file servers have."""

    def __init__(self, dirs: DirsBinding, files: FilesBinding) -> None:
        self._dirs, self._files = dirs, files

    def create(
        self,
        name: bytes,
        priority: int,
        io: int,
        with_manager: bool,
        lockdir: bytes | None,
        max_uploads: int | None,
        max_locks: int | None,
    ) -> int:
        file_server = (WfsDirectory if with_manager else DavDirectory)(
            from_utf8(name),
            priority,
            io=self._files.io(io),
            lockdir=from_utf8(lockdir) if lockdir else None,
            max_uploads=max_uploads or MAX_UPLOADS,
            max_locks=max_locks or MAX_LOCKS,
        )
        return self._dirs.register(file_server)

    def locks(self, handle: int) -> LuaValues | bool:
        """Return True and five values for each lock; False if the server has no folder for locks."""
        locks = self._file_server(handle).locks
        if locks is None:
            return False
        return (True, *(value for lock in locks.describe() for value in lock))

    def is_locked(self, handle: int, path: bytes) -> bool:
        locks = self._file_server(handle).locks
        return locks is not None and locks.guards(_canonical(path))

    def unlock(self, handle: int, path: bytes) -> bool:
        locks = self._file_server(handle).locks
        return locks is not None and locks.release(_canonical(path))

    def set_timeout(self, handle: int, seconds: int) -> bool:
        self._manager(handle).session_s = seconds
        return True

    def set_text(self, handle: int, name: bytes, text: bytes) -> bool:
        setattr(self._manager(handle), name.decode(), from_utf8(text))
        return True

    def set_hook(self, handle: int, name: bytes, inner: int) -> bool:
        """Make the function of the directory `inner` a hook of the file manager."""
        manager = self._manager(handle)
        setattr(manager, name.decode(), partial(self._dirs.call, inner, (manager, "")))
        return True

    def _file_server(self, handle: int) -> DavDirectory:
        directory = self._dirs.directory(handle)
        if not isinstance(directory, DavDirectory):
            raise ArgumentError("this directory is not a file server; create one with ba.create.dav")
        return directory

    def _manager(self, handle: int) -> WfsDirectory:
        directory = self._dirs.directory(handle)
        if not isinstance(directory, WfsDirectory):
            raise ArgumentError("this directory is not a web file manager; create one with ba.create.wfs")
        return directory


def _canonical(path: bytes) -> str:
    try:
        return canonical(from_utf8(path))
    except HttpError:
        raise ArgumentError(f"{path!r} is not a path inside the file server") from None


_DIRECT = (
    "new_dir new_reader collect insert_root insert insert_prolog unlink set_function set_cors set_pages baseuri name "
    "io_of clear_headers add_header"
)
_FILE_SERVERS = "create locks is_locked unlock set_timeout set_text set_hook"


def install_dirs(
    vm: Vm, services: Services, exchanges: Exchanges, files: FilesBinding, compiler: Compiler
) -> DirsBinding:
    """Install the virtual directories and file servers; return the binding with their handles."""
    binding = DirsBinding(services, exchanges, files, compiler)
    vm.namespace("ba.dirs", methods(binding, _DIRECT), {"service": binding.service})
    file_servers = FileServersBinding(binding, files)
    vm.namespace("ba.fileservers", methods(file_servers, _FILE_SERVERS))
    return binding


# ---- Lua Server Pages: compiled at the first request and after each change

PROLOGUE = b"local _ENV,pathname,io,page,app=...;"
"""Start of a compiled page: its five arguments become local variables."""

_NEWLINE = re.compile(rb"\r\n|\n\r|\r")
_START_TAG = re.compile(rb"<\?lsp(?![A-Za-z0-9_])(=?)")
_ANY_TAG = re.compile(rb"<\?|\?>")
_UNSAFE = re.compile(rb'["\\\n\0]')
_ESCAPES = {b'"': b'\\"', b"\\": b"\\\\", b"\n": b"\\\n", b"\0": b"\\x00"}
_LUA_TOKEN = re.compile(
    rb"""--\[(=*)\[.*?\]\1\]|(?P<comment>--[^\n]*)|\[(=*)\[.*?\]\3\]|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|.""", re.S
)


class LspError(ValueError):
    """A page can't be translated to Lua. The message contains the line."""


def to_lua(text: bytes, raw: bool = False) -> bytes:
    """Return the Lua source of a page (spec: bas-api §1). Each line has the same number in the page and the source.

    Args:
        text: the content of the file.
        raw: whether to omit `PROLOGUE`.

    Raises:
        LspError: a start tag has no end tag.
    """
    text = _NEWLINE.sub(b"\n", text)
    parts = [] if raw else [PROLOGUE]
    position = 0
    while (tag := _START_TAG.search(text, position)) is not None:
        parts.append(_emission(text[position : tag.start()]))
        end = _end_of_tag(text, tag.end(), tag.start())
        code = text[tag.end() : end]
        if b"--" in code[code.rfind(b"\n") + 1 :]:
            # A comment in the last line would continue in the code after the tag, which is in the same line.
            *_, last = _LUA_TOKEN.finditer(code)
            code = code[: last.start()] if last.group("comment") else code
        parts.append(b"_emit(tostring(" + code + b"));" if tag.group(1) == b"=" else code)
        position = end + 2
    rest = text[position:]
    if rest.strip():
        parts.append(_emission(rest))
    return b"".join(parts)


def _end_of_tag(text: bytes, position: int, start: int) -> int:
    """Return the position of the end tag, skipping pairs such as `<?xml ?>` in the Lua code."""
    depth = 1
    for mark in _ANY_TAG.finditer(text, position):
        depth += 1 if mark.group() == b"<?" else -1
        if depth == 0:
            return mark.start()
    line = text.count(b"\n", 0, start) + 1
    raise LspError(f"start tag without end tag at line# {line}")


def _emission(text: bytes) -> bytes:
    """Return Lua code that emits text. A newline directly after a tag is not emitted, as in a Lua long string."""
    lead = b" "
    if text.startswith(b"\n"):
        lead, text = b"\n", text[1:]
    if not text:
        return lead
    return lead + b'_emit"' + _UNSAFE.sub(lambda match: _ESCAPES[match.group()], text) + b'";'


MAX_PAGE_BYTES = 16 << 20
_PAGE_FIELDS = Headers({"Content-Type": "text/html; charset=utf-8"})


class Compiler:
    """Compiles pages. The compiled functions stay in Lua, in a table by reader and name."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._ref = 0

    def attach(self, ref: int) -> None:
        """Set the reference of the Lua function that compiles."""
        self._ref = ref

    def compile(self, reader: int, pathname: bytes, text: bytes) -> None:
        """Compile a page.

        Args:
            reader: handle of the resource reader.
            pathname: path of the page in the reader.
            text: its content.

        Raises:
            LspError: a start tag has no end tag.
            LuaError: a syntax error of Lua.
        """
        done, *message = self._vm.run(self._ref, reader, pathname, to_lua(text))
        if not done:
            raise LuaError(message[0])


class Pages:
    """The pages of one resource reader, which calls this object for `*.lsp` (`ResourceReader.pages`).

    Args:
        exchanges: runs the compiled pages.
        compiler: compiles them.
        reader: handle of the reader.
    """

    def __init__(self, exchanges: Exchanges, compiler: Compiler, reader: int) -> None:
        self._exchanges = exchanges
        self._compiler = compiler
        self._reader = reader
        self._compiled: dict[str, tuple[Hashable, bytes, str]] = {}  # name -> version, name for Lua, folder

    def __call__(self, request: Request, found: Stat, name: str, directory: ResourceReader) -> None:
        """Respond with the page `name`, whose current state is `found`; compile it if it is new or has changed."""
        page = self._compiled.get(name)
        if page is None or page[0] != found.version:
            self._compiled.pop(name, None)
            pathname, io = utf8(name), directory.io
            try:
                stat, text = call_blocking_unless_local(io, name, io.read_published, name, MAX_PAGE_BYTES)
                self._compiler.compile(self._reader, pathname, text.removeprefix(BOM_UTF8))
            except (IoError, LspError, LuaError) as error:
                failure = error if isinstance(error, LuaError) else LuaError(f"{name}: {error}")
                self._exchanges.fail(request, failure)
                return
            page = self._compiled[name] = stat.version, pathname, name[: name.rfind("/") + 1]
        response = request.response
        if not response.committed:
            response.headers.add_missing(_PAGE_FIELDS)
        self._exchanges.page(request, self._reader, page[1], (directory, page[2]))  # page[2]: the folder


def parse(text: bytes, raw: bool) -> LuaResult:
    """Return the Lua source of a page, or nil and a message; see `ba.parselsp`."""
    try:
        return to_lua(text, raw)
    except LspError as error:
        return fail(str(error))


def install_pages(vm: Vm) -> Compiler:
    """Install `ba.parselsp`; return the compiler of pages."""
    compiler = Compiler(vm)
    vm.namespace("ba.pages", {"parse": parse, "attach": compiler.attach})
    return compiler


# ---- Trace loggers


class _Listener:
    """The callback of `ontrace` with the lines that are queued for it.

    Args:
        vm: the runtime.
        ref: reference of the Lua function that takes the lines; see lib/ba/tracelogger.lua.
        handle: of the trace logger.
        number: of this listener, different for each call of `ontrace`.
    """

    def __init__(self, vm: Vm, ref: int, handle: int, number: int) -> None:
        self._vm, self._handle, self.number = vm, handle, number
        self._function = LuaFunction(vm, ref)
        self._lines = Lines(WAITING_BYTES)
        self._is_busy = False

    def add(self, line: Line) -> None:
        """Queue a line, and schedule the callback."""
        self._lines.add(line)
        if not self._is_busy:
            self._is_busy = True
            # Scheduled, since the caller may be Lua code that traces.
            get_hub().loop.run_callback(self._vm.start, self._function.ref, self._handle, self.number)

    def take(self) -> bytes | None:
        """Return queued lines. If there are none, return None; the next line then schedules the callback again."""
        if not self._lines:
            self._is_busy = False
            return None
        dropped = self._lines.take_dropped()
        note = b"%d lines were dropped: the callback is too slow\n" % dropped if dropped else b""
        return note + b"".join(line.data for line in self._lines.take(FRAME_BYTES))


class TraceLoggers:
    """All trace loggers of a server."""

    def __init__(self, vm: Vm, services: Services, dirs: DirsBinding) -> None:
        self._vm = vm
        self._next_number = itertools.count(1).__next__
        self._listeners: WeakKeyDictionary[TraceLogger, _Listener] = WeakKeyDictionary()
        self._services = services
        self._dirs = dirs
        self._all: WeakSet[TraceLogger] = WeakSet()

    def new(self, name: bytes, priority: int) -> int:
        services = self._services
        tracelogger = TraceLogger(
            from_utf8(name) or NAME, priority, services.http_server, worker_rpc=services.worker_rpc
        )
        self._all.add(tracelogger)
        close_with_app(tracelogger)
        return self._dirs.register(tracelogger)

    def configure(self, handle: int, *names_and_values: LuaValue) -> bool:
        self._of(handle).configure(options_of(names_and_values))
        return True

    def ontrace(self, handle: int, ref: int | None = None) -> bool:
        """Send the lines of a trace logger to a Lua function; None stops it."""
        tracelogger = self._of(handle)
        if ref is None:
            self._listeners.pop(tracelogger, None)
            tracelogger.on_line = None
            return True
        listener = self._listeners[tracelogger] = _Listener(self._vm, ref, handle, self._next_number())
        tracelogger.on_line = listener.add
        return True

    def next_lines(self, handle: int, number: int) -> bytes | None:
        """Return queued lines for a callback; None if there are none or the callback was replaced."""
        listener = self._listeners.get(self._of(handle))
        return listener.take() if listener and listener.number == number else None

    def remove_callback(self, handle: int, number: int) -> None:
        """Remove a callback that has failed."""
        listener = self._listeners.get(self._of(handle))
        if listener and listener.number == number:
            self.ontrace(handle)

    def _of(self, handle: int) -> TraceLogger:
        tracelogger = self._dirs.directory(handle)
        assert isinstance(tracelogger, TraceLogger)
        return tracelogger

    def lines(self, question: Message) -> News:
        """Yield the lines that another worker requests for a viewer of its trace logger with the same address."""
        for one in list(self._all):
            if one.baseuri() == question["uri"]:
                yield from one.lines(question)
                return

    def close(self) -> None:
        """Disconnect all viewers."""
        for tracelogger in list(self._all):
            tracelogger.close()


def install_tracelogger(vm: Vm, services: Services, dirs: DirsBinding) -> TraceLoggers:
    """Install the trace loggers; return the object that closes them."""
    loggers = TraceLoggers(vm, services, dirs)
    if services.worker_rpc is not None:
        services.worker_rpc.server.news[QUESTION] = loggers.lines
    names = tuple(map(utf8, OPTIONS))
    functions = methods(loggers, "new configure ontrace next_lines remove_callback")
    vm.namespace("ba.tracelogger", functions | {"options": lambda: names})
    return loggers
