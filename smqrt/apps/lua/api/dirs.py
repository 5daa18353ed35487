"""Virtual directories and file servers for Lua: the Python half (spec: bas-api §4)."""

from __future__ import annotations

import itertools
from functools import partial

from smqrt.apps.lua.api.exchange import Base, Exchange, Exchanges
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.api.pages import Compiler, Pages
from smqrt.apps.lua.bridge import LuaResult, LuaValues, from_latin1, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.access import MAX_AGE_S
from smqrt.http.dav.directory import MAX_LOCKS, MAX_UPLOADS, DavDirectory, WfsDirectory
from smqrt.http.dav.names import canonical
from smqrt.http.headers import HttpError, check_field
from smqrt.http.message import Request
from smqrt.http.tracelogger import TraceLogger
from smqrt.http.tree import Branch, Directory, ResourceReader


class DirsBinding:
    """Directories by the handles that Lua has for them."""

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

        base: where relative paths start.
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
        """Let a directory answer the request of an exchange; `written`: data in the caller's buffer. Blocks."""

        def operation(exchange: Exchange) -> tuple[bool]:
            request = exchange.request
            is_fresh = request.is_fresh
            request.forwards += as_forward
            request.is_fresh = is_fresh and not as_forward
            try:
                return (self._dirs[handle].service(request, from_utf8(relpath)),)
            finally:
                request.forwards -= as_forward
                request.is_fresh = is_fresh

        return self._exchanges.inside(exchange, written, operation)

    def _reader(self, handle: int) -> ResourceReader:
        directory = self._dirs[handle]
        if not isinstance(directory, ResourceReader):
            raise ArgumentError("this directory does not read files: make one with ba.create.resrdr")
        return directory


class FileServersBinding:
    """Functions of file servers that other directories don't have."""

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
        """Return True and five values for each lock; False without a folder for locks."""
        locks = self._file_server(handle).locks
        if locks is None:
            return False
        return (True, *(value for lock in locks.about() for value in lock))

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
            raise ArgumentError("this directory is not a file server: make one with ba.create.dav")
        return directory

    def _manager(self, handle: int) -> WfsDirectory:
        directory = self._dirs.directory(handle)
        if not isinstance(directory, WfsDirectory):
            raise ArgumentError("this directory is not a web file manager: make one with ba.create.wfs")
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
    """Give Lua the virtual directories and file servers; return the table of their handles."""
    binding = DirsBinding(services, exchanges, files, compiler)
    vm.namespace("ba.dirs", methods(binding, _DIRECT), {"service": binding.service})
    file_servers = FileServersBinding(binding, files)
    vm.namespace("ba.fileservers", methods(file_servers, _FILE_SERVERS))
    return binding
