"""File systems (ios) that applications implement in Lua (spec: bas-api §4, §6).

Their operations block the calling greenlet, since the callbacks may block: static files, pages and file servers wait.
A thread may call them too; a greenlet of the event loop then runs the callback.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import IO, Any, cast

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

_READ_BYTES = 64 << 10  # the most that one call of `read` requests
_THREAD_TIMEOUT_S = 60.0  # of a thread that waits for a callback
_thread_id = monkey.get_original("_thread", "get_ident")  # gevent's function returns the number of the greenlet
_ENTRY = struct.Struct(">?qQ")


class LuaIoCallbacks:
    """The callbacks of one io of an application. Deleting the object releases them.

    Args:
        vm: the runtime.
        serve: reference of the Lua function that runs the callbacks.
        ref: reference of the table of callbacks.
    """

    def __init__(self, vm: Vm, serve: int, ref: int) -> None:
        self.ref = ref
        self._vm, self._serve = vm, serve
        self._loop: Any = get_hub().loop
        self._thread = _thread_id()
        self._is_closed = False

    def ask(self, operation: bytes, *args: LuaValue) -> LuaValues:
        """Run a callback and return its values; blocks. Other threads than the loop's may call it too.

        Raises:
            IoError: the callback failed or returned an error word, or the application has ended.
        """
        if _thread_id() == self._thread:
            return self._ask(operation, *args)
        answers: list[LuaValues | Exception] = []
        over = new_lock()
        over.acquire()

        def call() -> None:
            try:
                answers.append(self._ask(operation, *args))
            except Exception as error:
                answers.append(error.with_traceback(None))  # its frames belong to the other thread
            finally:
                over.release()

        self._loop.run_callback_threadsafe(greenlets.start, call)
        if not over.acquire(timeout=_THREAD_TIMEOUT_S):
            raise IoError("ioerror", "the application's io did not answer")
        answer = answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

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

    def start(self, operation: bytes, *args: LuaValue) -> None:
        """Run a callback soon, without waiting for it. Thread-safe."""
        self._loop.run_callback_threadsafe(self._vm.start, self._serve, self.ref, operation, *args)

    def close(self) -> None:
        """Release the callbacks. Later operations raise IoError. Called when the application ends."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run_callback_threadsafe(self._vm.free, self.ref)

    __del__ = close


class LuaIo(Io):
    """An io whose operations are callbacks in Lua.

    Args:
        callbacks: its operations.
        prefix: the folder of the application's io that is the root of this io; empty for the whole.
    """

    kind = "lua"
    in_loop = True  # its operations switch greenlets, which a thread of a disk can't

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
        # object(): each version is new, since the content may change without its time.
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
        """See `Io.realpath`. The files have no path in the file system; the prefix `lua:` marks the result."""
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
        name: name in the io.
        number: handle of the file in Lua.
        mode: the mode of `open`, without "b".
    """

    def __init__(self, owner: LuaIo, name: str, number: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self._owner, self._name, self._number = owner, name, number
        self._ask = owner.callbacks.ask
        self._position = 0

    def readable(self) -> bool:
        """Return whether the file is open for reading."""
        return "r" in self.mode or "+" in self.mode

    def writable(self) -> bool:
        """Return whether the file is open for writing."""
        return self.mode != "r"

    def seekable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read `size` bytes, or less at the end of the file. Reads to the end for -1."""
        if size < 0:
            return self.readall()
        pieces: list[bytes] = []
        while size:
            piece_bytes = min(size, _READ_BYTES)
            values = self._ask(b"read", self._number, piece_bytes)
            data = cast(bytes, values[0] if values else None) or b""
            if len(data) > piece_bytes:
                raise IoError("ioerror", f"{self._name}: read returned more than {piece_bytes} bytes")
            if not data:
                break
            self._position += len(data)
            pieces.append(data)
            size -= len(data)
        return b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or less of it at the end of the file; return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        self._ask(b"operate", self._number, b"write", bytes(data))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position and return it; `whence` as for other files."""
        base = {0: 0, 1: self._position}.get(whence)
        position = offset + (self._owner.stat(self._name).size if base is None else base)
        if position != self._position:  # an io without a `seek` callback supports reads in order
            self._ask(b"operate", self._number, b"seek", position)
        self._position = position
        return position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def flush(self) -> None:
        """Call the `flush` callback."""
        if not self.closed and self.writable():
            self._ask(b"operate", self._number, b"flush")

    def close(self) -> None:
        """Close the file."""
        if self.closed:
            return
        number, self._number = self._number, -1
        self._close_without_flush()
        self._ask(b"close", number)

    def _close_without_flush(self) -> None:
        self.mode = "r"  # `close` of the base class calls `flush`, which then does nothing
        super().close()

    def __del__(self) -> None:
        if not self.closed:
            number = self._number
            self._close_without_flush()
            self._owner.callbacks.start(b"close", number)


class LuaIoBinding:
    """The functions of the Lua half lib/ba/luaio.lua."""

    def __init__(self, vm: Vm, files: FilesBinding) -> None:
        self._vm, self._files = vm, files
        self._serve = 0

    def attach(self, serve: int) -> None:
        """Set the reference of the Lua function that runs the callbacks."""
        self._serve = serve

    def new(self, ref: int, is_shared: bool) -> int:
        """Create an io from a table of callbacks and return its handle.

        Args:
            ref: reference of the table.
            is_shared: whether the io belongs to a module of several applications; else it ends with the application.
        """
        callbacks = LuaIoCallbacks(self._vm, self._serve, ref)
        if not is_shared:
            close_with_app(callbacks)
        return self._files.handle_of(LuaIo(callbacks))

    @with_error_words
    def archive(self, handle: int, name: bytes, data: bytes) -> LuaResult:
        """Create an io from the content of a ZIP file, which is in the io with this handle; return its handle."""
        archive = _archive(f"lua:/{from_utf8(name)}", data)
        archive.private = self._files.io(handle).private
        return self._files.handle_of(archive)

    def sub(self, handle: int, prefix: bytes) -> int:
        """Create an io for a folder of another Lua io, and return its handle."""
        base = self._files.io(handle)
        assert isinstance(base, LuaIo)
        below = LuaIo(base.callbacks, from_utf8(prefix))
        below.private = base.private
        return self._files.handle_of(below)

    def close_soon(self, number: int) -> None:
        """Close an open file in the next iteration of the loop."""
        get_hub().loop.run_callback(self._vm.start, self._serve, 0, b"close", number)

    def facts(self, handle: int) -> tuple[int, bytes] | None:
        """Return the reference of the callbacks and the prefix; None if the io is not implemented in Lua."""
        io = self._files.io(handle)
        return (io.callbacks.ref, utf8(io.prefix)) if isinstance(io, LuaIo) else None


def install(vm: Vm, files: FilesBinding) -> None:
    """Install `ba.create.luaio`."""
    binding = LuaIoBinding(vm, files)
    functions = {name: getattr(binding, name) for name in ("attach", "new", "sub", "facts", "close_soon")}
    vm.namespace("ba.luaio", functions, {"archive": binding.archive})
