"""A named pipe, a serial line or another file that is no store: whoever reads or writes it waits in a greenlet, without
a thread.
"""

from __future__ import annotations

import errno
import io
import os
import stat as mode_bits
from typing import Any

import gevent
from gevent import get_hub

from smqrt.http.resources import IoError

_READ, _WRITE = 1, 2
_LOOK_S = 0.05  # between two looks whether somebody reads the pipe: the system tells nobody who waits to write
MAX_READ_BYTES = 1 << 20  # of one read: a device may have no end


def is_special(path: str) -> bool:
    """Tell whether a file is neither regular nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (mode_bits.S_ISREG(mode) or mode_bits.S_ISDIR(mode))


class PipeFile(io.RawIOBase):
    """An open special file. Opening never waits: to write, the first `write` waits until somebody reads.

    Args:
        path: the file.
        mode: as `open` takes it.

    Raises:
        OSError: what the system says.
    """

    def __init__(self, path: str, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self._path = path
        self._reads, self._writes = "r" in mode or "+" in mode, "r" not in mode or "+" in mode
        self._fd = -1
        self._waiting: list[Any] = []
        if not (self._writes and not self._reads and mode_bits.S_ISFIFO(os.stat(path).st_mode)):
            self._open()

    def _open(self) -> None:
        access = os.O_RDWR if self._reads and self._writes else os.O_WRONLY if self._writes else os.O_RDONLY
        self._fd = os.open(self._path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)

    def readable(self) -> bool:
        """Tell whether it was opened to read."""
        return self._reads

    def writable(self) -> bool:
        """Tell whether it was opened to write."""
        return self._writes

    def read(self, size: int = -1) -> bytes:
        """Read what there is next, at most `size` bytes and at most MAX_READ_BYTES; empty when the other end closed.
        Blocks this greenlet.

        Raises:
            IoError: it was closed meanwhile, or opened to write.
            OSError: what the system says.
        """
        if not self._reads:
            raise IoError("noaccess", "the file was opened for writing")
        wanted = MAX_READ_BYTES if size < 0 else min(size, MAX_READ_BYTES)
        self._wait(_READ)  # also for a pipe's first writer: until then a read would say that it is at its end
        while True:
            try:
                return os.read(self._live(), wanted)
            except BlockingIOError:
                self._wait(_READ)

    def write(self, data: Any) -> int:
        """Write all of `data`; blocks this greenlet until somebody has taken it. Raises as `read`."""
        if not self._writes:
            raise IoError("noaccess", "the file was opened for reading")
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._connected(), rest) :]
            except BlockingIOError:
                self._wait(_WRITE)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Raise IoError: it has no positions."""
        raise IoError("noimplementation", f"{self._path} has no positions")

    def close(self) -> None:
        """Close it; whoever waits gets an IoError."""
        hub = get_hub()
        for watcher in self._waiting:
            hub.cancel_wait(watcher, IoError("ioerror", f"{self._path} was closed"))
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            hub.loop.run_callback(os.close, fd)  # when nobody watches it any more
        super().close()

    def _live(self) -> int:
        if self.closed:
            raise IoError("ioerror", f"{self._path} was closed")
        return self._fd

    def _connected(self) -> int:
        while self._live() < 0:
            try:
                self._open()
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                gevent.sleep(_LOOK_S)
        return self._fd

    def _wait(self, events: int) -> None:
        hub = get_hub()
        watcher: Any = hub.loop.io(self._live(), events)
        self._waiting.append(watcher)
        try:
            hub.wait(watcher)
        finally:
            self._waiting.remove(watcher)
            watcher.stop()
            watcher.close()
