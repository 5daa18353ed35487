"""Virtual directories for Lua: the Python half (spec: bas-api §4)."""

from __future__ import annotations

import itertools
from functools import partial

from smqrt.apps.lua.api.exchange import Base, Exchange, Exchanges
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.api.pages import Compiler, Pages
from smqrt.apps.lua.bridge import LuaResult, from_latin1, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.access import MAX_AGE_S
from smqrt.http.headers import check_field
from smqrt.http.message import Request
from smqrt.http.tracelogger import TraceLogger
from smqrt.http.tree import Branch, Directory, ResourceReader


class DirsBinding:
    """Keeps what the handles of Lua stand for."""

    def __init__(self, services: Services, exchanges: Exchanges, files: FilesBinding, compiler: Compiler) -> None:
        self._root = services.root
        self._exchanges = exchanges
        self._compiler = compiler
        self._io_of, self._io_handle = files.io, files.handle_of
        self._next_handle = itertools.count(1).__next__
        self._dirs: dict[int, Directory] = {}
        self._handles: dict[Branch, int] = {}

    def register(self, directory: Directory) -> int:
        """Give `directory` a handle for Lua."""
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

    def of(self, handle: int) -> Directory:
        """Give the directory with this handle."""
        return self._dirs[handle]

    def collect(self, handle: int) -> None:
        """The Lua object is gone, and the directory with it."""
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
        """Whether it was linked, and the handle of the parent it was taken from."""
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
        """Ask the Lua function of a directory; tell whether it has answered. `base`: where relative paths start."""
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
        """Let a directory answer the request of an exchange; `written`: what is in the caller's buffer."""
        return self._exchanges.inside(exchange, written, self._service, handle, relpath, as_forward)

    def _service(self, exchange: Exchange, handle: int, relpath: bytes, as_forward: bool) -> tuple[bool]:
        request = exchange.request
        is_fresh = request.is_fresh
        request.forwards += as_forward
        request.is_fresh = is_fresh and not as_forward
        try:
            return (self._dirs[handle].service(request, from_utf8(relpath)),)
        finally:
            request.forwards -= as_forward
            request.is_fresh = is_fresh

    def _reader(self, handle: int) -> ResourceReader:
        directory = self._dirs[handle]
        if not isinstance(directory, ResourceReader):
            raise ArgumentError("this directory reads no files: ba.create.resrdr makes one that does")
        return directory


_DIRECT = (
    "new_dir new_reader collect insert_root insert insert_prolog unlink set_function set_cors set_pages baseuri name "
    "io_of clear_headers add_header"
)


def install(vm: Vm, services: Services, exchanges: Exchanges, files: FilesBinding, compiler: Compiler) -> DirsBinding:
    """Give Lua the virtual directories; return what knows their handles."""
    binding = DirsBinding(services, exchanges, files, compiler)
    vm.namespace("ba.dirs", methods(binding, _DIRECT), {"service": binding.service})
    return binding
