"""Uploads: request bodies written to files as they arrive, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from smqrt.http.forms import Field, File, MultipartError, boundary_of, read_form
from smqrt.http.headers import BadRequest, ClientGoneError, HttpError
from smqrt.http.message import Request
from smqrt.http.open_files import NewFile
from smqrt.http.resources import Io, IoError

PIECE_BYTES = 256 << 10
"""Bytes per write by a thread. A call of a thread costs 60 us; each upload has twice this in memory."""
_RECEIVED_BYTES = 64 << 10


class UploadError(Exception):
    """An upload failed.

    Attributes:
        word: error word for applications (spec: bas-api §15).
        detail: a sentence for people.
    """

    def __init__(self, word: str, detail: str) -> None:
        super().__init__(f"{word}: {detail}")
        self.word, self.detail = word, detail


class UploadWatcher(Protocol):
    """Callbacks of an upload; they may block."""

    def begin(self, name: str) -> bool:
        """Called before each file with its name; return whether to accept it."""

    def wants_more(self) -> bool:
        """Return whether to continue; called for every piece."""

    def end(self) -> None:
        """Called when all files are complete and closed."""


def is_form(request: Request) -> bool:
    """Return whether the body is a form with files."""
    return boundary_of(request.get("content-type") or "") is not None


def receive(request: Request, io: Io, name: str, watcher: UploadWatcher) -> None:
    """Write the body of a request, or each file of a form in it, to a file; blocks the greenlet.

    Args:
        request: a request whose body was not read.
        io: stores the file. An incomplete file is removed; on a disk, an existing file of that name then remains.
        name: name of the file. The form's file name is appended to a folder ("" or a name with "/" at its end); it must
            not be hidden.
        watcher: receives the events.

    Raises:
        UploadError: the upload failed.
        ClientGoneError: the client has closed the connection.
    """
    boundary = boundary_of(request.get("content-type") or "")
    try:
        if boundary is None:
            if not name or name.endswith("/"):
                raise IoError("invalidname", "a body that is not a form has no file name: add one")
            _receive_file(request.chunks(_RECEIVED_BYTES), io, name, watcher)
        else:
            _receive_form(request, boundary, io, name, watcher)
    except IoError as error:
        raise UploadError(error.word, str(error)) from None
    except OSError as error:
        if isinstance(error, ClientGoneError):
            raise
        raise UploadError(IoError.of(error, name).word, str(error)) from None
    except MultipartError as error:
        raise UploadError("failed", str(error)) from None
    except BadRequest as error:
        raise UploadError("socketreadfailed", str(error)) from None
    except HttpError as error:
        raise UploadError("timeout" if error.status == 408 else "mem", str(error)) from None


def _receive_file(pieces: Iterator[bytes], io: Io, name: str, watcher: UploadWatcher) -> None:
    if not watcher.begin(name):
        return
    with _Target(io, name) as target:
        for piece in pieces:
            if not watcher.wants_more():
                return
            target.write(piece)
        target.finish()
    watcher.end()


def _receive_form(request: Request, boundary: bytes, io: Io, name: str, watcher: UploadWatcher) -> None:
    events = read_form(request.chunks(_RECEIVED_BYTES), boundary, request.hold)
    event = next(events, None)
    found = False
    while event is not None:
        if not isinstance(event, File):
            assert isinstance(event, Field)
            event = next(events, None)
            continue
        found = True
        path = _path_of(name, event)
        if not watcher.begin(path):
            return
        with _Target(io, path) as target:
            event = next(events, None)
            while isinstance(event, bytes):
                if not watcher.wants_more():
                    return
                target.write(event)
                event = next(events, None)
            target.finish()
    if not found:
        raise UploadError("failed", "the form has no file")
    watcher.end()


def _path_of(name: str, file: File) -> str:
    if name and not name.endswith("/"):
        return name
    if file.filename.startswith(".") or not file.filename:
        raise IoError("invalidname", f"file name {file.filename!r} in the form is hidden or empty")
    return name + file.filename


class _Target:
    """A file that is written in larger pieces than those that arrive. An incomplete file is removed."""

    def __init__(self, io: Io, name: str) -> None:
        self._file = NewFile(io, name)
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._buffered_bytes += len(piece)
        if self._buffered_bytes >= PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        pieces, self._pieces, self._buffered_bytes = self._pieces, [], 0
        if pieces:
            self._file.write(*pieces)

    def finish(self) -> None:
        self._flush()
        self._file.finish()

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(IoError):
            self._file.abort()
