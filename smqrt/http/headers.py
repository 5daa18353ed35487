"""Header fields: those of a response, ordered, in any letter case and never able to split the head; the values of the
fields that have a form of their own: dates, ranges (RFC 9110 §14), cookies (RFC 6265).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache
from html import escape
from http import HTTPStatus
from time import time
from typing import overload

from smqrt.errors import SmqrtError

# ---- Status codes, the error a handler may raise, and the small error pages.

_HEAD = (
    '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{}</title>'
    '<link rel="icon" href="data:,"><style>:root{{color-scheme:light dark}}'
    "body{{font:1.05rem/1.5 system-ui,sans-serif;max-width:34rem;margin:12vh auto;padding:0 1.2rem}}"
    "h1{{font-size:1.4rem}}</style></head>"
)
REASONS: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}


class HttpError(SmqrtError):
    """A request that is answered with an error status.

    Args:
        status: the status code of the answer.
        detail: one sentence for the page and the log.
        headers: further headers of the answer, such as `Allow`.
        close: end the connection behind the answer, because the byte stream can't be trusted any more.
    """

    def __init__(
        self, status: int, detail: str = "", *, headers: dict[str, str] | None = None, close: bool = False
    ) -> None:
        super().__init__(detail or reason(status))
        self.status = status
        self.detail = detail
        self.headers = headers or {}
        self.close = close


class BadRequest(HttpError):
    """The bytes are no request we accept: 400 and the end of the connection."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(status, detail, close=True)


class ClientGoneError(ConnectionError):
    """The client of an exchange is gone: nothing can be sent to it any more."""


def reason(status: int) -> str:
    """Return the reason phrase of a status code."""
    return REASONS.get(status, "Unknown")


def error_page(status: int, detail: str = "") -> bytes:
    """Build the small HTML page of an error status; `detail` is escaped."""
    return _page(status, detail) if detail else _page_without_detail(status)


@lru_cache(64)
def _page_without_detail(status: int) -> bytes:
    return _page(status, "")


def _page(status: int, detail: str) -> bytes:
    title = f"{status} {reason(status)}"
    text = f"<p>{escape(detail)}</p>" if detail else ""
    head = _HEAD.format(title)
    return f'<!DOCTYPE html><html lang="en">{head}<body><h1>{title}</h1>{text}</body></html>\n'.encode()


_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FRAMING = ("content-length", "connection")
_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_MAX_KNOWN = 1024
MAX_RANGES = 10  # more in one request are an attack; it gets the whole file
_SPEC = re.compile(r"([0-9]{0,15})-([0-9]{0,15})")
_ONE_VALUE = frozenset(
    [
        "age",
        "content-length",
        "content-location",
        "content-range",
        "content-type",
        "date",
        "etag",
        "expires",
        "from",
        "if-range",
        "last-modified",
        "location",
        "max-forwards",
        "referer",
        "retry-after",
        "server",
        "set-cookie",
        "user-agent",
    ]
)
_NONE: Mapping[str, str] = {}
_NEVER_IN_A_COOKIE = re.compile(r"[\x00-\x1f\x7f;]")


class Headers:
    """Header fields by name; a name keeps its place and the spelling it was set with.

    Args:
        fields: to begin with. Raises as `set`.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, str] = _NONE) -> None:
        self._fields: dict[str, list[tuple[str, str]]] = {}
        for name, value in fields.items():
            self.set(name, value)

    def set(self, name: str, value: str) -> None:
        """Set a field, in place of all of that name.

        Raises:
            ValueError: the name is no token, the value has a control character or is not latin-1, or the field is the
                framing's own.
        """
        self._fields[check_field(name, value)] = [(name, value)]

    def add(self, name: str, value: str) -> None:
        """Add a further field of that name, as cookies need it. Raises as `set`."""
        self._fields.setdefault(check_field(name, value), []).append((name, value))

    def set_cookie(self, name: str, field: str) -> None:
        """Add a Set-Cookie field, in place of those for the cookie `name`. Raises as `set`."""
        check_field("Set-Cookie", field)
        others = [other for other in self._fields.get("set-cookie", ()) if not other[1].startswith(f"{name}=")]
        self._fields["set-cookie"] = [*others, ("Set-Cookie", field)]

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first field of that name."""
        fields = self._fields.get(name.lower())
        return fields[0][1] if fields else default

    def says(self, name: str, token: str) -> bool:
        """Return whether a field of that name has that token in its list."""
        value = self.get(name)
        return value is not None and token in [part.strip().lower() for part in value.split(",")]

    def remove(self, name: str) -> None:
        """Remove the fields of that name, if there are any."""
        self._fields.pop(name.lower(), None)

    def clear(self) -> None:
        """Remove all fields but cookies: what was given to the browser stays given (spec: bas-api §17)."""
        self._fields = {name: fields for name, fields in self._fields.items() if name == "set-cookie"}

    def merge(self, others: Headers) -> None:
        """Set the fields of others, in place of those of their names."""
        self._fields.update([(key, list(fields)) for key, fields in others._fields.items()])

    def copy(self) -> Headers:
        """Return fields of their own that are the same now."""
        copied = Headers()
        copied._fields = {name: list(fields) for name, fields in self._fields.items()}
        return copied

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._fields

    def __bool__(self) -> bool:
        return bool(self._fields)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for fields in self._fields.values():
            yield from fields

    def encode(self) -> bytes:
        """Return the fields as lines of a head, without those that only the server can know."""
        kept = [fields for key, fields in self._fields.items() if key not in _FRAMING]
        return "".join([f"{name}: {value}\r\n" for fields in kept for name, value in fields]).encode("latin-1")


def with_missing_fields(lines: bytes, fields: Mapping[str, str]) -> bytes:
    """Return header lines with those of `fields` whose names are not among them."""
    present = {line.partition(b":")[0].lower() for line in lines.split(b"\r\n")}
    missing = [field for field in fields.items() if field[0].lower().encode() not in present]
    return lines + "".join([f"{name}: {value}\r\n" for name, value in missing]).encode("latin-1")


def joined_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return what header lines say, by name in lower case, in the order of the first line of each.

    Several lines of a name are one list with "," between (RFC 9110 §5.3), cookies with "; " (RFC 6265 §5.4). Of fields
    with one value the first counts; a Set-Cookie can't be joined, so the first counts too.
    """
    lines: dict[str, list[str]] = {}
    for name, value in pairs:
        lines.setdefault(name.lower(), []).append(value)
    return {
        name: values[0] if len(values) == 1 or name in _ONE_VALUE else ("; " if name == "cookie" else ",").join(values)
        for name, values in lines.items()
    }


def spelled_fields(pairs: Sequence[tuple[str, str]], fields: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return `fields`, which `joined_fields` made of `pairs`, with names in the spelling of their first lines."""
    names = {name.lower(): name for name, _ in reversed(pairs)}
    return [(names[key], value) for key, value in fields.items()]


def check_field(name: str, value: str) -> str:
    """Reject a field that would break the head; return the name in lower case.

    Raises:
        ValueError: naming the field and the rule.
    """
    key = _checked_name(name)
    if not (value.isascii() and value.isprintable()):  # nearly all are
        _check_value(name, value)
    return key


@lru_cache(_MAX_KNOWN)
def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"header name {name!r} is not a token: use letters, digits and '-'")
    key = name.lower()
    if key == "transfer-encoding":
        raise ValueError("header Transfer-Encoding is set by the server itself; set Content-Length or none")
    return key


def _check_value(name: str, value: str) -> None:
    if _UNSAFE.search(value) is not None:
        raise ValueError(f"value of header {name} has a control character: a line end would start another header")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"value of header {name} is not latin-1: percent-encode it") from None


def http_date(unix_s: float) -> str:
    """Return the HTTP form of a time in seconds since 1970."""
    return formatdate(unix_s, usegmt=True)


def parse_date(text: str) -> int | None:
    """Read an HTTP date; None when it is none."""
    try:
        return int(parsedate_to_datetime(text).timestamp())
    except (ValueError, OverflowError):
        return None


def date_line() -> bytes:
    """Return the `Date: …` line of now, with its line end."""
    return _date_line(int(time()))


@lru_cache(1)
def _date_line(now_s: int) -> bytes:
    return b"Date: %s\r\n" % http_date(now_s).encode()


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `first` up to and without `end`."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def parse_ranges(header: str, size: int) -> list[Span] | None:
    """Read a `Range` header for something of `size` bytes.

    Returns:
        the spans that can be given, none of them empty (an empty list: 416); None when the header is to be ignored.
    """
    unit, _, text = header.partition("=")
    specs = text.split(",")
    if unit.strip().lower() != "bytes" or len(specs) > MAX_RANGES:
        return None
    spans: list[Span] = []
    for spec in specs:
        match = _SPEC.fullmatch(spec.strip())
        if match is None or not any(match.groups()):
            return None
        if match[1] and match[2] and int(match[2]) < int(match[1]):
            return None
        span = _span(match[1], match[2], size)
        if span.first < span.end:
            spans.append(span)
    return None if sum(map(len, spans)) > size else spans  # overlapping: the whole is smaller


def _span(first: str, last: str, size: int) -> Span:
    if not first:
        return Span(max(size - int(last), 0), size)
    return Span(int(first), min(int(last) + 1, size) if last else size)


def cookie_of(fields: str, name: str) -> str | None:
    """The value of cookie `name` in a Cookie header field, without quotes; None when it is not there."""
    for part in fields.split(";"):
        key, equals, value = part.strip().partition("=")
        if equals and key == name:
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return None


def set_cookie_field(name: str, value: str, attributes: dict[str, str | None]) -> str:
    """Build the value of a Set-Cookie field.

    Args:
        name, value: of the cookie.
        attributes: by name, such as `{"Path": "/", "Max-Age": "60", "Secure": None}`; None for one without a value.

    Raises:
        ValueError: a part has what would end it and begin another: the name is no token, or something else has a
            semicolon or a control character.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"cookie name {name!r} is no token: use letters, digits, '-' and '_'")
    for what, text in {"value": value, **attributes}.items():
        if text is not None and _NEVER_IN_A_COOKIE.search(text) is not None:
            fault = f"{what} {text!r} of cookie {name} has a semicolon or a control character"
            raise ValueError(f"{fault}: percent-encode it")
    parts = [f"{key}={text}" if text is not None else key for key, text in attributes.items()]
    return "; ".join([f"{name}={value}", *parts])
