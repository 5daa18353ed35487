"""Uploads: the body of a request goes to a file as it arrives, in bounded memory, whatever holds the file."""

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
"""So much is collected before a thread writes it: a thread costs 60 us, and each upload keeps twice this."""
_RECEIVED_BYTES = 64 << 10


class UploadError(Exception):
    """An upload failed.

    Attributes:
        word: the short name applications test (spec: bas-api §15).
        detail: a sentence.
    """

    def __init__(self, word: str, detail: str) -> None:
        super().__init__(f"{word}: {detail}")
        self.word, self.detail = word, detail


class UploadWatcher(Protocol):
    """Who is told of an upload; its functions may block."""

    def begin(self, name: str) -> bool:
        """A file begins, which gets this name; whether it is wanted."""

    def wants_more(self) -> bool:
        """Return whether the upload shall go on; asked for every piece."""

    def end(self) -> None:
        """All is complete and closed."""


def is_form(request: Request) -> bool:
    """Return whether the body is a form with files."""
    return boundary_of(request.get("content-type") or "") is not None


def receive(request: Request, io: Io, name: str, watcher: UploadWatcher) -> None:
    """Write the body of a request to a file: all of it, or the files of a form. Blocks the greenlet.

    Args:
        request: whose body nobody has read.
        io: gets the file; one that was not completed is dropped, and on a disk the older one of its name stays.
        name: of the file. "" or what ends in "/": the name that the form has for it is put behind; it must not be
            hidden.
        watcher: is told.

    Raises:
        UploadError: it failed.
        ClientGoneError: the client went away.
    """
    boundary = boundary_of(request.get("content-type") or "")
    try:
        if boundary is None:
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
    _check_name(name)
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
        path = _named(name, event)
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


def _named(name: str, file: File) -> str:
    if name and not name.endswith("/"):
        return name
    if file.filename.startswith(".") or not file.filename:
        raise IoError("invalidname", f"the form names its file {file.filename!r}, which is hidden or no name")
    return name + file.filename


def _check_name(name: str) -> None:
    if not name or name.endswith("/"):
        raise IoError("invalidname", "a body that is no form has no name of its own: give one")


class _Target:
    """The file that is being written, in larger pieces than come. What was not finished is dropped."""

    def __init__(self, io: Io, name: str) -> None:
        self._file = NewFile(io, name)
        self._pieces: list[bytes] = []
        self._bytes = 0

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)
        if self._bytes >= PIECE_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        pieces, self._pieces, self._bytes = self._pieces, [], 0
        if pieces:
            self._file.write(*pieces)

    def finish(self) -> None:
        self._write_out()
        self._file.finish()

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(IoError):
            self._file.abort()
