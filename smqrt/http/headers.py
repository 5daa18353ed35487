"""HTTP header fields, error statuses and error pages.

Header fields of a response are ordered, case-insensitive and checked against injection. The module also parses dates,
ranges (RFC 9110 §14) and cookies (RFC 6265).
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

# ---- Status codes, errors that handlers may raise, and error pages

_HEAD = (
    '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{}</title>'
    '<link rel="icon" href="data:,"><style>:root{{color-scheme:light dark}}'
    "body{{font:1.05rem/1.5 system-ui,sans-serif;max-width:34rem;margin:12vh auto;padding:0 1.2rem;"
    "color:light-dark(#1b2330,#e7ebf0);background:light-dark(#f3f4f6,#11151b);overflow-wrap:anywhere}}"
    "h1{{font-size:1.4rem;margin:.5rem 0}}a{{color:light-dark(#2358c7,#86b1ff)}}</style></head>"
)
REASONS: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}


class HttpError(SmqrtError):
    """An error that becomes the response to a request.

    Args:
        status: status code of the response.
        detail: sentence for the error page and the log.
        headers: further header fields of the response, such as `Allow`.
        close: close the connection after the response, because the position in the byte stream is unreliable.
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
    """A malformed request; becomes a 400 response and closes the connection."""

    def __init__(self, detail: str, status: int = 400) -> None:
        super().__init__(status, detail, close=True)


class ClientGoneError(ConnectionError):
    """The client has closed the connection, or the connection was lost."""


def reason(status: int) -> str:
    """Return the reason phrase of a status code."""
    return REASONS.get(status, "Unknown")


def error_page(status: int, detail: str = "") -> bytes:
    """Return the HTML page of an error status; `detail` is escaped."""
    return _page(status, detail) if detail else _page_without_detail(status)


@lru_cache(64)
def _page_without_detail(status: int) -> bytes:
    return _page(status, "")


def _page(status: int, detail: str) -> bytes:
    title = f"{status} {reason(status)}"
    text = f"<p>{escape(detail)}</p>" if detail else ""
    head = _HEAD.format(title)
    body = f'<main><a href="/">‹ Start page</a><h1>{title}</h1>{text}</main>'
    return f'<!DOCTYPE html><html lang="en">{head}<body>{body}</body></html>\n'.encode()


# ---- Header fields

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_SET_BY_SERVER = ("content-length", "connection")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_MAX_CACHED = 1024  # names that passed the check
MAX_RANGES = 10  # a request with more is treated as an attack: the response is the whole file
_RANGE = re.compile(r"([0-9]{0,15})-([0-9]{0,15})")
_ONE_VALUE = frozenset((
    "age", "content-length", "content-location", "content-range", "content-type", "date", "etag", "expires", "from",
    "if-range", "last-modified", "location", "max-forwards", "referer", "retry-after", "server", "set-cookie",
    "user-agent",
))  # fmt: skip
_NO_FIELDS: Mapping[str, str] = {}
_INVALID_IN_COOKIE = re.compile(r"[\x00-\x1f\x7f;]")


class Headers:
    """Header fields by name. A name keeps its position and its spelling.

    Args:
        fields: initial fields. Raises as `set`.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, str] = _NO_FIELDS) -> None:
        self._fields: dict[str, tuple[tuple[str, str], ...]] = {}  # tuples, which copies share
        for name, value in fields.items():
            self.set(name, value)

    def set(self, name: str, value: str) -> None:
        """Set a field, replacing all fields of that name.

        Raises:
            ValueError: the name is not a token, the value has a control character or is not latin-1, or only the server
                may set the field.
        """
        self._fields[check_field(name, value)] = ((name, value),)

    def add(self, name: str, value: str) -> None:
        """Add a field and keep those of the same name. Raises as `set`."""
        key = check_field(name, value)
        self._fields[key] = (*self._fields.get(key, ()), (name, value))

    def set_cookie(self, name: str, field: str) -> None:
        """Add a Set-Cookie field, replacing those for the cookie `name`. Raises as `set`."""
        check_field("Set-Cookie", field)
        others = [other for other in self._fields.get("set-cookie", ()) if not other[1].startswith(f"{name}=")]
        self._fields["set-cookie"] = (*others, ("Set-Cookie", field))

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first field of a name, or `default`."""
        fields = self._fields.get(name.lower())
        return fields[0][1] if fields else default

    def has_token(self, name: str, token: str) -> bool:
        """Return whether the list in a field contains a token."""
        value = self.get(name)
        return value is not None and token in [part.strip().lower() for part in value.split(",")]

    def remove(self, name: str) -> None:
        """Remove the fields of a name, if present."""
        self._fields.pop(name.lower(), None)

    def clear(self) -> None:
        """Remove all fields except cookies (spec: bas-api §17)."""
        self._fields = {name: fields for name, fields in self._fields.items() if name == "set-cookie"}

    def merge(self, others: Headers) -> None:
        """Set all fields of `others`, replacing fields of the same names."""
        self._fields.update(others._fields)

    def add_missing(self, others: Headers) -> None:
        """Set the fields of `others` whose names are missing."""
        for key, fields in others._fields.items():
            self._fields.setdefault(key, fields)

    def copy(self) -> Headers:
        """Return an independent copy."""
        copied = Headers()
        copied._fields = self._fields.copy()
        return copied

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._fields

    def __bool__(self) -> bool:
        return bool(self._fields)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for fields in self._fields.values():
            yield from fields

    def encode(self) -> bytes:
        """Return the fields as header lines, without those that the server sets."""
        lines = ""
        for key, fields in self._fields.items():
            if key not in _SET_BY_SERVER:
                for name, value in fields:
                    lines += f"{name}: {value}\r\n"
        return lines.encode("latin-1")


def with_missing_fields(lines: bytes, fields: Mapping[str, str]) -> bytes:
    """Return header lines, extended by those of `fields` whose names are missing."""
    present = {line.partition(b":")[0].lower() for line in lines.split(b"\r\n")}
    missing = [field for field in fields.items() if field[0].lower().encode() not in present]
    return lines + "".join([f"{name}: {value}\r\n" for name, value in missing]).encode("latin-1")


def joined_fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the values of header lines by name in lower case, in the order of each name's first line.

    Several lines of a name are joined by "," (RFC 9110 §5.3), cookies by "; " (RFC 6265 §5.4). For single-value fields
    and for Set-Cookie, which cannot be joined, the first line is used.
    """
    lines: dict[str, list[str]] = {}
    for name, value in pairs:
        lines.setdefault(name.lower(), []).append(value)
    return {
        name: values[0] if len(values) == 1 or name in _ONE_VALUE else ("; " if name == "cookie" else ",").join(values)
        for name, values in lines.items()
    }


def spelled_fields(pairs: Sequence[tuple[str, str]], fields: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return `fields`, the result of `joined_fields(pairs)`, with names in the spelling of their first lines."""
    names = {name.lower(): name for name, _ in reversed(pairs)}
    return [(names[key], value) for key, value in fields.items()]


def check_field(name: str, value: str) -> str:
    """Check that a field cannot break the head; return the name in lower case.

    Raises:
        ValueError: the field is invalid; the text names the field and the rule.
    """
    key = _checked_name(name)
    if value.isascii() and value.isprintable():  # a fast check that nearly all values pass
        return key
    if _CONTROL_CHARACTER.search(value) is not None:
        raise ValueError(f"value of header {name} has a control character; a line end would start another header")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"value of header {name} is not latin-1: percent-encode it") from None
    return key


@lru_cache(_MAX_CACHED)
def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"header name {name!r} is not a token: use letters, digits and '-'")
    key = name.lower()
    if key == "transfer-encoding":
        raise ValueError("header Transfer-Encoding is set by the server; remove it, or set Content-Length instead")
    return key


def http_date(unix_s: float) -> str:
    """Return a time in seconds since 1970 as an HTTP date."""
    return formatdate(unix_s, usegmt=True)


def parse_date(text: str) -> int | None:
    """Return the time of an HTTP date in seconds since 1970, None for an invalid one."""
    try:
        return int(parsedate_to_datetime(text).timestamp())
    except (ValueError, OverflowError):
        return None


def date_line() -> bytes:
    """Return the `Date: …` line for the current time, with its line end."""
    return _date_line(int(time()))


@lru_cache(1)
def _date_line(now_s: int) -> bytes:
    return b"Date: %s\r\n" % http_date(now_s).encode()


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes from `first` to `end`, excluding `end`."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def parse_ranges(header: str, size: int) -> list[Span] | None:
    """Parse a `Range` field for a content of `size` bytes.

    Returns:
        the spans within the content, none of them empty. An empty list requires status 416. None if the field must be
        ignored.
    """
    unit, _, text = header.partition("=")
    specs = text.split(",")
    if unit.strip().lower() != "bytes" or len(specs) > MAX_RANGES:
        return None
    spans: list[Span] = []
    for spec in specs:
        match = _RANGE.fullmatch(spec.strip())
        if match is None or not any(match.groups()):
            return None
        if match[1] and match[2] and int(match[2]) < int(match[1]):
            return None
        if match[1]:
            span = Span(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)
        else:  # "-500" means the last 500 bytes
            span = Span(max(size - int(match[2]), 0), size)
        if span.first < span.end:
            spans.append(span)
    # Overlapping ranges could multiply the bytes to send: the whole content is smaller.
    return None if sum(map(len, spans)) > size else spans


def cookie_of(fields: str, name: str) -> str | None:
    """Return the value of a cookie in a Cookie header field, without quotes; None if it is missing."""
    for part in fields.split(";"):
        key, equals, value = part.strip().partition("=")
        if equals and key == name:
            return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
    return None


def set_cookie_field(name: str, value: str, attributes: dict[str, str | None]) -> str:
    """Return the value of a Set-Cookie field.

    Args:
        name, value: name and value of the cookie.
        attributes: values by name, such as `{"Path": "/", "Max-Age": "60", "Secure": None}`; None for no value.

    Raises:
        ValueError: the name is not a token, or another part has a semicolon or a control character.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"cookie name {name!r} is not a token: use letters, digits, '-' and '_'")
    for part, text in {"value": value, **attributes}.items():
        if text is not None and _INVALID_IN_COOKIE.search(text) is not None:
            fault = "has a semicolon or a control character: percent-encode it"
            raise ValueError(f"{part} {text!r} of cookie {name} {fault}")
    parts = [f"{key}={text}" if text is not None else key for key, text in attributes.items()]
    return "; ".join([f"{name}={value}", *parts])
