"""Ios that applications implement in Lua, as Python sees them (spec: bas-api §4, §6).

Their operations block the greenlet that calls: static files, pages and file servers wait for the callbacks, which may
wait for anything. A thread may call them too; the loop does the work for it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar, cast

from gevent import get_hub, monkey

from smqrt.apps.lua.api.files import FilesBinding, with_error_words
from smqrt.apps.lua.bridge import LuaError, LuaResult, LuaValue, LuaValues, from_utf8, utf8
from smqrt.apps.lua.vm import Vm
from smqrt.http.disk import ZipIo
from smqrt.http.open_files import disks
from smqrt.http.resources import Io, IoError, Stat, segments
from smqrt.loop import greenlets
from smqrt.loop.threads import new_lock
from smqrt.process.current_process import close_with_app

_ASKED_BYTES = 64 << 10  # of a callback, in one call
_PATIENCE_S = 60.0  # of a thread that waits for the loop
_thread_id = monkey.get_original("_thread", "get_ident")
_ENTRY = struct.Struct(">?qQ")

T = TypeVar("T")


class LuaIoCallbacks:
    """The way to the callbacks of one application's io; they are forgotten with it.

    Args:
        vm: the runtime.
        serve: the reference of the Lua function that calls them.
        ref: the reference of their table.
    """

    def __init__(self, vm: Vm, serve: int, ref: int) -> None:
        self.ref = ref
        self._vm, self._serve = vm, serve
        self._loop: Any = get_hub().loop
        self._thread = _thread_id()
        self._is_closed = False

    def ask(self, operation: bytes, *args: LuaValue) -> LuaValues:
        """Give what Lua answers.

        Raises:
            IoError: what went wrong.
        """
        if _thread_id() != self._thread:
            return self._from_thread(self._ask, operation, *args)
        return self._ask(operation, *args)

    def _ask(self, operation: bytes, *args: LuaValue) -> LuaValues:
        if self._is_closed:
            raise IoError("ioerror", "the application of this io has ended")
        try:
            values = self._vm.run(self._serve, self.ref, operation, *args)
        except LuaError as error:
            raise IoError("ioerror", str(error)) from None
        if len(values) > 1 and values[0] is None and isinstance(values[1], bytes):
            raise IoError(values[1].decode("ascii", "replace"))
        return values

    def _from_thread(self, function: Callable[..., T], *args: object) -> T:
        """Have the loop call `function`, and wait for it; in another thread."""
        answers: list[tuple[T | None, Exception | None]] = []
        over = new_lock()
        over.acquire()

        def call() -> None:
            try:
                answers.append((function(*args), None))
            except Exception as error:
                answers.append((None, error.with_traceback(None)))
            finally:
                over.release()

        self._loop.run_callback_threadsafe(greenlets.start, call)
        if not over.acquire(timeout=_PATIENCE_S):
            raise IoError("ioerror", "the application's io did not answer")
        value, fault = answers[0]
        if fault is not None:
            raise fault
        return cast(T, value)

    def start(self, operation: bytes, *args: LuaValue) -> None:
        """Have Lua do something soon that nobody waits for. From any thread."""
        self._loop.run_callback_threadsafe(self._vm.start, self._serve, self.ref, operation, *args)

    def close(self) -> None:
        """The application has ended: Python asks it no more, and its functions can be collected."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run_callback_threadsafe(self._vm.free, self.ref)

    __del__ = close


class LuaIo(Io):
    """An io in Lua.

    Args:
        callbacks: of the application.
        prefix: the folder in it that is the root.
    """

    kind = "lua"
    in_loop = True

    def __init__(self, callbacks: LuaIoCallbacks, prefix: str = "") -> None:
        self.callbacks, self.prefix = callbacks, prefix

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        mode = mode.replace("b", "")
        number = self.callbacks.ask(b"open", self._full(name), mode.encode("latin-1", "replace"))[0]
        assert isinstance(number, int)
        return cast(IO[bytes], LuaFile(self, name, number, mode))

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        mtime, size, isdir = cast(tuple[int, int, bool], self.callbacks.ask(b"stat", self._full(name)))
        own = (segments(name) or [""])[-1]
        return Stat(own, size, mtime, isdir, (mtime, size, object()))

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`."""
        return _unpacked(cast(bytes, self.callbacks.ask(b"files", self._full(path))[0]))

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        below: Io
        if self.stat(path).isdir:
            below = LuaIo(self.callbacks, from_utf8(self._full(path)))
        else:
            below = _archive(self.realpath(path), self.read(path))
        below.private = self.private
        return below

    def mkdir(self, name: str) -> None:
        """See `Io.mkdir`."""
        self.callbacks.ask(b"change", b"mkdir", self._full(name))

    def rmdir(self, name: str) -> None:
        """See `Io.rmdir`."""
        self.callbacks.ask(b"change", b"rmdir", self._full(name))

    def remove(self, name: str) -> None:
        """See `Io.remove`."""
        self.callbacks.ask(b"change", b"remove", self._full(name))

    def rename(self, old: str, new: str) -> None:
        """See `Io.rename`."""
        self.callbacks.ask(b"change", b"rename", self._full(old), self._full(new))

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`; these files have no path, so it is one that names the io."""
        return f"lua:/{from_utf8(self._full(name))}"

    def _full(self, name: str) -> bytes:
        parts = segments(name)
        return utf8("/".join([self.prefix, *parts] if self.prefix else parts))


def _archive(name: str, data: bytes) -> ZipIo:
    return disks.call("", ZipIo, name, "", data)


def _unpacked(entries: bytes) -> Iterator[Stat]:
    at = 0
    while at < len(entries):
        length = int.from_bytes(entries[at : at + 4], "big")
        name = from_utf8(entries[at + 4 : at + 4 + length])
        at += 4 + length
        isdir, mtime, size = _ENTRY.unpack_from(entries, at)
        at += _ENTRY.size
        yield Stat(name, size, mtime, isdir, (mtime, size, object()))


class LuaFile(io.RawIOBase):
    """An open file of an io in Lua.

    Args:
        owner: the io.
        name: in the io.
        number: by which Lua knows it.
        mode: how it was opened.
    """

    def __init__(self, owner: LuaIo, name: str, number: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self._owner, self._name, self._number = owner, name, number
        self._ask = owner.callbacks.ask
        self._position = 0

    def readable(self) -> bool:
        """Tell whether it was opened to read."""
        return "r" in self.mode or "+" in self.mode

    def writable(self) -> bool:
        """Tell whether it was opened to write."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """Tell that it has positions."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read so much, or to the end when there is less, or for -1."""
        if size < 0:
            return self.readall()
        pieces: list[bytes] = []
        while size and (piece := self._read_piece(min(size, _ASKED_BYTES))):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _read_piece(self, size: int) -> bytes:
        """What the application gives at once; empty at the end."""
        values = self._ask(b"read", self._number, size)
        data = cast(bytes, values[0] if values else None) or b""
        if len(data) > size:
            raise IoError("ioerror", f"{self._name}: read gave more than {size} bytes")
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer as much as there is, at most."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        self._ask(b"operate", self._number, b"write", bytes(data))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as files do."""
        base = {0: 0, 1: self._position}.get(whence)
        position = offset + (self._owner.stat(self._name).size if base is None else base)
        if position != self._position:  # else it works without `seek`
            self._ask(b"operate", self._number, b"seek", position)
        self._position = position
        return position

    def tell(self) -> int:
        """Give the position."""
        return self._position

    def flush(self) -> None:
        """Have the application write what it keeps."""
        if not self.closed and self.writable():
            self._ask(b"operate", self._number, b"flush")

    def close(self) -> None:
        """Close it."""
        if self.closed:
            return
        number, self._number = self._number, -1
        self._close_without_flush()
        self._ask(b"close", number)

    def _close_without_flush(self) -> None:
        self.mode = "r"  # `close` of the base would flush
        super().close()

    def __del__(self) -> None:
        if not self.closed:
            number = self._number
            self._close_without_flush()
            self._owner.callbacks.start(b"close", number)


class LuaIoBinding:
    """What the Lua half needs."""

    def __init__(self, vm: Vm, files: FilesBinding) -> None:
        self._vm, self._files = vm, files
        self._serve = 0

    def attach(self, serve: int) -> None:
        """Take the reference of the Lua function that calls the callbacks."""
        self._serve = serve

    def new(self, ref: int, is_shared: bool) -> int:
        """Make an io of the callbacks with this reference; the answer is its handle. It ends with the application,
        unless it belongs to a module that others share."""
        callbacks = LuaIoCallbacks(self._vm, self._serve, ref)
        if not is_shared:
            close_with_app(callbacks)
        return self._files.handle_of(LuaIo(callbacks))

    @with_error_words
    def archive(self, handle: int, name: bytes, data: bytes) -> LuaResult:
        """Make an io of the ZIP file with this content, in the io with this handle."""
        archive = _archive(f"lua:/{from_utf8(name)}", data)
        archive.private = self._files.io(handle).private
        return self._files.handle_of(archive)

    def sub(self, handle: int, prefix: bytes) -> int:
        """Make an io of a folder of another one."""
        base = self._files.io(handle)
        assert isinstance(base, LuaIo)
        below = LuaIo(base.callbacks, from_utf8(prefix))
        below.private = base.private
        return self._files.handle_of(below)

    def close_soon(self, number: int) -> None:
        """Close an open file in the next turn of the loop."""
        get_hub().loop.run_callback(self._vm.start, self._serve, 0, b"close", number)

    def facts(self, handle: int) -> tuple[int, bytes] | None:
        """The reference of the callbacks and the prefix; None when it is not an io in Lua."""
        io = self._files.io(handle)
        return (io.callbacks.ref, utf8(io.prefix)) if isinstance(io, LuaIo) else None


def install(vm: Vm, files: FilesBinding) -> None:
    """Give Lua `ba.create.luaio`."""
    binding = LuaIoBinding(vm, files)
    functions = {name: getattr(binding, name) for name in ("attach", "new", "sub", "facts", "close_soon")}
    vm.namespace("ba.luaio", functions, {"archive": binding.archive})
