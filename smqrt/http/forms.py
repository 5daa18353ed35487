"""Parsers for queries, cookies and forms, without I/O and in bounded memory.

Parameters are application/x-www-form-urlencoded. Forms with files are multipart/form-data (RFC 7578), parsed as they
arrive by the package `multipart`; this module adds the limits and one event for each field, file and piece of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, NoReturn, SupportsIndex, overload
from urllib.parse import unquote_to_bytes

import multipart
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from smqrt.errors import SmqrtError
from smqrt.http.headers import BadRequest, HttpError

# ---- Fields: values by name, of queries, forms and cookies


class MissingFieldError(HttpError, KeyError):
    """A field that the client did not send; becomes a 400 response unless the application catches it."""

    def __init__(self, name: str) -> None:
        super().__init__(400, f"The field {name!r} is missing.")

    __str__ = Exception.__str__  # KeyError would put the sentence in quotes


class Fields(dict[str, str]):
    """Values by name. `fields[name]` returns the first value of a name, `getall` returns all.

    `fields[name]` raises MissingFieldError for a missing name.

    Args:
        pairs: names and values in the order of the client.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__()
        self.pairs: list[tuple[str, str]] = list(pairs)
        for name, value in self.pairs:
            self.setdefault(name, value)

    def __missing__(self, name: str) -> NoReturn:
        raise MissingFieldError(name)

    def getall(self, name: str) -> list[str]:
        """Return all values of a name, in their order."""
        return [value for key, value in self.pairs if key == name]


class QueryText(str):
    """A query as the client sent it, without the "?".

    The parameters are available by `query[name]`, `in`, `get`, `getall`, `keys` and `items`.
    """

    @cached_property
    def fields(self) -> Fields:
        """The parameters, percent-decoded. Invalid UTF-8 becomes U+FFFD.

        Raises:
            HttpError: 413, too many parameters.
        """
        return decoded(parse_parameters(self.encode("ascii", "replace")))

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first parameter of a name. Raises as `fields`."""
        return self.fields.get(name, default)

    def getall(self, name: str) -> list[str]:
        """Return all parameters of a name. Raises as `fields`."""
        return self.fields.getall(name)

    def keys(self) -> Iterable[str]:
        """Return the names of the parameters, each once. Raises as `fields`."""
        return self.fields.keys()

    def items(self) -> Iterable[tuple[str, str]]:
        """Return names and values, the first of each name. Raises as `fields`."""
        return self.fields.items()

    def __getitem__(self, key: SupportsIndex | slice | str) -> str:
        return self.fields[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, name: object) -> bool:
        return name in self.fields


def decoded(pairs: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Return names and values as text. Invalid UTF-8 becomes U+FFFD."""
    return Fields((name.decode("utf-8", "replace"), value.decode("utf-8", "replace")) for name, value in pairs)


def cookies_of(field: str) -> Fields:
    """Return the cookies of a Cookie header field (RFC 6265 §4.2), without quotes around values."""
    pairs = (part.strip().partition("=") for part in field.split(";"))
    return Fields(
        (name, value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value)
        for name, equals, value in pairs
        if equals and name
    )


# ---- Parsers of parameters and multipart forms

FORM_TYPE = "multipart/form-data"
MAX_HEAD_LINE_BYTES = 8192  # of a header line of one part
MAX_HEAD_LINES = 8  # of one part; browsers send two
MAX_VALUE_BYTES = 1 << 20  # of a field that is not a file; it is kept in memory
MAX_VALUES_BYTES = 4 << 20  # of all fields of one form
MAX_PARTS = 1000
_MAX_BOUNDARY_BYTES = 70  # RFC 2046 §5.1.1
MAX_PARAMETERS = 1000
_OPTION = re.compile(r';[ \t]*+([^\s;="]++)[ \t]*+=[ \t]*+("(?:\\.|[^"\\])*+"[ \t]*+|[^;"]*+)')
_EXTENDED = re.compile(
    r"(utf-8|iso-8859-1)'[A-Za-z0-9-]*'((?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})*)", re.IGNORECASE
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PIECE_BYTES = 8192  # decoded at once: at most 0.5 ms, if all of it is escapes
PLUS_TO_SPACE = bytes.maketrans(b"+", b" ")  # for 4 MB, translate() takes 4 ms, replace() 30 ms
_PARSER_ERRORS = {  # text of the parser: text for the client
    "Unexpected end of multipart stream (parser closed)": "the form ends in the middle of a part",
    "Maximum segment count exceeded": f"the form has more than {MAX_PARTS} parts",
    "Maximum segment header count exceeded": f"the head of a part has more than {MAX_HEAD_LINES} lines",
    "Maximum segment header length exceeded": f"the head of a part has a line of over {MAX_HEAD_LINE_BYTES} bytes",
}


def parse_parameters(text: bytes, yield_turn: Callable[[], object] = lambda: None) -> list[tuple[bytes, bytes]]:
    """Return names and values of urlencoded parameters, percent-decoded, in their order.

    Args:
        text: the parameters as the client sent them.
        yield_turn: called regularly in a long text, so that other greenlets can run.

    Raises:
        BadRequest: 413, more than MAX_PARAMETERS.
    """
    if text.count(b"&") >= MAX_PARAMETERS:
        raise BadRequest(f"more than {MAX_PARAMETERS} parameters", status=413)
    pairs = (field.partition(b"=") for field in text.split(b"&") if field)
    return [(_percent_decoded(name, yield_turn), _percent_decoded(value, yield_turn)) for name, _, value in pairs]


def as_text(value: bytes) -> str:
    """Return a name or value as text. Invalid UTF-8 becomes surrogate escapes."""
    return value.decode("utf-8", "surrogateescape")


def _percent_decoded(text: bytes, yield_turn: Callable[[], object]) -> bytes:
    text = text.translate(PLUS_TO_SPACE)
    if b"%" not in text:
        return text
    if len(text) <= _PIECE_BYTES:
        yield_turn()  # also for short ones: there may be a thousand
        return unquote_to_bytes(text)
    parts: list[bytes] = []
    at = 0
    while at < len(text):
        end = at + _PIECE_BYTES
        cut = text.rfind(b"%", end - 2, end)  # do not cut an escape in two
        end = cut if cut > at else end
        parts.append(unquote_to_bytes(text[at:end]))
        at = end
        yield_turn()
    return b"".join(parts)


class MultipartError(SmqrtError):
    """A malformed form; the text names the fault."""


class FormTooLarge(MultipartError):
    """A form that exceeds a limit."""


class Field(NamedTuple):
    """A field of the form."""

    name: str
    value: bytes


class File(NamedTuple):
    """The head of a file; its content follows as `bytes`. `filename` has no folders."""

    name: str
    filename: str
    content_type: str
    encoding: str


Event = Field | File | bytes


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary in a Content-Type field, None if it is not multipart/form-data."""
    kind, options = parse_options_header(content_type)
    boundary: str = options.get("boundary", "")
    if kind != FORM_TYPE or not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
        return None
    return boundary.encode("latin-1")


def read_form(
    pieces: Iterable[bytes], boundary: bytes, hold: Callable[[int], object] = lambda count: None
) -> Iterator[Event]:
    """Parse a form.

    Args:
        pieces: the body as it arrives.
        hold: called with the number of bytes of a field's value before they are kept in memory.

    Yields:
        each `Field`; and for each file a `File`, followed by its content as `bytes`.

    Raises:
        MultipartError: the body is malformed or exceeds a limit.
    """
    form = _Form(boundary, hold)
    for piece in pieces:
        yield from form.feed(piece)
    yield from form.feed(b"")


class _Form:
    """Parser state of a form: the value of the current field and the size of all values."""

    def __init__(self, boundary: bytes, hold: Callable[[int], object]) -> None:
        self._hold = hold
        self._parser = PushMultipartParser(
            boundary,
            max_header_size=MAX_HEAD_LINE_BYTES,
            max_header_count=MAX_HEAD_LINES,
            max_segment_count=MAX_PARTS,
            header_charset="latin-1",  # accepts any byte; `_text` decodes it as UTF-8
        )
        self._field: str | None = None
        self._value = bytearray()
        self._values_bytes = 0

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yield the events of a piece. An empty piece ends the body."""
        try:
            for event in self._parser.parse(piece):
                if isinstance(event, MultipartSegment):
                    yield from self._begin(event)
                elif event is not None and self._field is None:
                    yield event
                elif event is not None:
                    self._hold(len(event))
                    self._value += event
                    self._values_bytes += len(event)
                    if len(self._value) > MAX_VALUE_BYTES:
                        raise FormTooLarge(f"field {self._field!r} is longer than {MAX_VALUE_BYTES} bytes")
                    if self._values_bytes > MAX_VALUES_BYTES:
                        raise FormTooLarge(f"the fields of the form have more than {MAX_VALUES_BYTES} bytes")
                elif self._field is not None:
                    yield Field(self._field, bytes(self._value))
                    self._field, self._value = None, bytearray()
        except multipart.MultipartError as error:
            raise MultipartError(_PARSER_ERRORS.get(str(error), f"the form is malformed: {error}")) from None

    def _begin(self, part: MultipartSegment) -> Iterator[Event]:
        disposition = part.header("Content-Disposition") or ""
        name = _extended(disposition, "name")
        name = _text(part.name or "") if name is None else name
        filename = _extended(disposition, "filename")
        if filename is None:
            if part.filename is None:
                self._field = name
                return
            filename = _text(part.filename)
        filename = re.split(r"[/\\]", filename)[-1]
        kind, encoding = part.header("Content-Type"), part.header("Content-Transfer-Encoding")
        yield File(name, filename, _text(kind or "application/octet-stream"), _text(encoding or "binary"))


def _extended(disposition: str, name: str) -> str | None:
    """Return the parameter `name*` (RFC 8187), None without a valid one.

    It has precedence over `name` (RFC 6266 §4.3). Browsers do not send it (RFC 7578 §4.2), other clients do.
    """
    if "*" not in disposition:
        return None
    at, match = disposition.find(";"), None
    while (option := _OPTION.match(disposition, at)) is not None and match is None:
        if option[1].lower() == f"{name}*":
            match = _EXTENDED.fullmatch(option[2].strip(' \t"'))
        at = option.end()
    if match is None:
        return None
    try:
        text = unquote_to_bytes(match[2]).decode("utf-8" if match[1].lower() == "utf-8" else "latin-1")
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def _text(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "surrogateescape")
