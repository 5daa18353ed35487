"""The header fields of a response: ordered, any letter case, never able to split the head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import overload

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_FRAMING = ("content-length", "connection")
_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_MAX_KNOWN = 1024


class Headers:
    """Header fields by name; a name keeps its place and the spelling it was set with."""

    __slots__ = ("_fields",)

    def __init__(self) -> None:
        self._fields: dict[str, list[tuple[str, str]]] = {}

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

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str) -> str: ...
    def get(self, name: str, default: str | None = None) -> str | None:
        """Give the first field of that name."""
        fields = self._fields.get(name.lower())
        return fields[0][1] if fields else default

    def says(self, name: str, token: str) -> bool:
        """Whether a field of that name has that token in its list."""
        value = self.get(name)
        return value is not None and token in [part.strip().lower() for part in value.split(",")]

    def remove(self, name: str) -> None:
        """Remove the fields of that name, if there are any."""
        self._fields.pop(name.lower(), None)

    def clear(self) -> None:
        """Remove all fields."""
        self._fields.clear()

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._fields

    def __bool__(self) -> bool:
        return bool(self._fields)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for fields in self._fields.values():
            yield from fields

    def encode(self) -> bytes:
        """Give the fields as lines of a head, without those that only the server can know."""
        kept = [fields for key, fields in self._fields.items() if key not in _FRAMING]
        return "".join([f"{name}: {value}\r\n" for fields in kept for name, value in fields]).encode("latin-1")


def check_field(name: str, value: str) -> str:
    """Refuse a field that would break the head; give the name in lower case.

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
