"""A file that takes its name when it is whole, for uploads: until then the file that has the name stays."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import IO, TypeVar
from weakref import finalize

from smqrt.http.blocking_io import reach
from smqrt.http.resources import Io, IoError

PREFIX = ".smqrt-upload-"
"""How names of files that are not whole begin: hidden, in the same folder."""

T = TypeVar("T")


class NewFile:
    """A file that is being written. A context: left early, nothing remains of it. Blocks the greenlet.

    On a disk it is written beside its name and renamed. Other ios can't rename so that nobody sees a half: there it is
    written in place, and what was not finished is removed.

    Args:
        io: gets the file.
        name: the name; a file that has it is replaced.

    Attributes:
        file: to write to, with `reach_file`.

    Raises:
        IoError: it can't be made.
    """

    def __init__(self, io: Io, name: str) -> None:
        self._io, self._name = io, name
        folder = name.rpartition("/")[0]
        own = f"{PREFIX}{secrets.token_hex(8)}"
        self._path = (f"{folder}/{own}" if folder else own) if io.kind == "disk" else name
        self.file: IO[bytes] = reach(io, name, io.open, self._path, "w")
        self._finished = False
        # Also when the server ends meanwhile: then no greenlet comes to `abort`.
        self._leftover = finalize(self, _unlink, io.realpath(self._path)) if self._path != name else None

    def write(self, *pieces: bytes) -> None:
        """Add to it. Raises IoError."""
        reach_file(self._io, self._name, lambda: self.file.writelines(pieces))

    def finish(self) -> None:
        """Give it its name. Raises IoError."""
        reach_file(self._io, self._name, self._close_and_rename)
        self._finished = True

    def abort(self) -> None:
        """Drop it, unless it is finished."""
        if not self._finished:
            self._finished = True
            reach_file(self._io, self._name, self._drop)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _close_and_rename(self) -> None:
        self.file.close()
        if self._path != self._name:
            self._io.rename(self._path, self._name)
        self._keep()

    def _drop(self) -> None:
        try:
            self.file.close()
        except OSError:  # what was in the buffer had no room
            pass
        self._io.remove(self._path)
        self._keep()

    def _keep(self) -> None:
        if self._leftover is not None:
            self._leftover.detach()


def reach_file(io: Io, name: str, work: Callable[[], T]) -> T:
    """As `reach`, for work with open files, which has errors of the system. Raises IoError."""
    try:
        return reach(io, name, work)
    except OSError as error:
        raise IoError.of(error, name) from None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it is gone, or its disk
        pass
