"""Forms with files (multipart/form-data, RFC 7578), read as they arrive: sans-I/O, bounded memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from smqrt.errors import SmqrtError

MAX_HEAD_BYTES = 8192  # of one part
MAX_VALUE_BYTES = 1 << 20  # of a field that is no file; it is kept whole
MAX_PARTS = 1000

_BOUNDARY = re.compile(r'\bboundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:\\["\\]|[^"])*)"|([^\s;"]+))', re.IGNORECASE)


class MultipartError(SmqrtError):
    """The body is no form: the text says what is wrong with it."""


class Field(NamedTuple):
    """A field of the form."""

    name: str
    value: bytes


class File(NamedTuple):
    """A file begins; its `bytes` follow in pieces. `filename` has no folders in front."""

    name: str
    filename: str
    content_type: str
    encoding: str


Event = Field | File | bytes


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary that a Content-Type field announces, None when it is not multipart/form-data."""
    match = _BOUNDARY.search(content_type)
    if match is None or content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        return None
    return (match[1] or match[2]).encode("latin-1")


def read_form(pieces: Iterable[bytes], boundary: bytes) -> Iterator[Event]:
    """Read a form.

    pieces: the body as it arrives.
    Gives each `Field`, and for each file a `File` followed by its content as `bytes`.
    Raises MultipartError when the body breaks the rules or a limit.
    """
    yield from _Form(pieces, boundary).events()


class _Form:
    def __init__(self, pieces: Iterable[bytes], boundary: bytes) -> None:
        self._pieces = iter(pieces)
        self._mark = b"\r\n--" + boundary
        self._data = b"\r\n"  # the first mark may stand at the very beginning

    def events(self) -> Iterator[Event]:
        for _ in self._until_mark():
            pass  # what stands before the first part is nobody's
        for _ in range(MAX_PARTS):
            if self._at_end():
                return
            yield from self._part(_headers(self._head()))
        raise MultipartError(f"more than {MAX_PARTS} parts")

    def _part(self, headers: dict[str, str]) -> Iterator[Event]:
        names = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(_disposition(headers))}
        name = _unquoted(names.get("name", ""))
        if "filename" not in names:
            yield Field(name, self._value(name))
            return
        filename = re.split(r"[/\\]", _unquoted(names["filename"]))[-1]
        kind = headers.get("content-type", "application/octet-stream")
        yield File(name, filename, kind, headers.get("content-transfer-encoding", "binary"))
        yield from self._until_mark()

    def _value(self, name: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        for piece in self._until_mark():
            size += len(piece)
            if size > MAX_VALUE_BYTES:
                raise MultipartError(f"field {name!r} is longer than {MAX_VALUE_BYTES} bytes")
            parts.append(piece)
        return b"".join(parts)

    def _until_mark(self) -> Iterator[bytes]:
        mark, kept = self._mark, len(self._mark) - 1
        while (at := self._data.find(mark)) < 0:
            if len(self._data) > kept:
                piece, self._data = self._data[:-kept], self._data[-kept:]
                yield piece
            self._more()
        if at:
            yield self._data[:at]
        self._data = self._data[at + len(mark) :]

    def _at_end(self) -> bool:
        while len(self._data) < 2:
            self._more()
        return self._data.startswith(b"--")

    def _head(self) -> bytes:
        """The header lines of a part; what follows the mark on its own line is blanks."""
        while (at := self._data.find(b"\r\n\r\n")) < 0:
            if len(self._data) > MAX_HEAD_BYTES:
                raise MultipartError(f"the head of a part is longer than {MAX_HEAD_BYTES} bytes")
            self._more()
        head, self._data = self._data[:at], self._data[at + 4 :]
        if head.partition(b"\r\n")[0].strip():
            raise MultipartError("something follows a boundary on its line")
        return head

    def _more(self) -> None:
        piece = next(self._pieces, b"")
        if not piece:
            raise MultipartError("the form ends in the middle of a part")
        self._data += piece


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("utf-8", "surrogateescape").split("\r\n")
    fields = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in fields}


def _disposition(headers: dict[str, str]) -> str:
    value = headers.get("content-disposition", "")
    if not value.lower().startswith("form-data"):
        raise MultipartError("a part has no Content-Disposition: form-data")
    return value


def _unquoted(text: str) -> str:
    """Undo what browsers do to quotes and line ends in names."""
    return re.sub(r'\\(["\\])', r"\1", text).replace("%22", '"').replace("%0D%0A", "\r\n")
