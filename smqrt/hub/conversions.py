"""Conversions between the values of Python applications and those of a broker.

Each `as_…` function takes the name of the argument, which its error names, and the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeGuard

from smqrt.errors import ArgumentError

Text = str | bytes
Name = str | bytes
"""A name as applications see it: `bytes` when it is not UTF-8."""


def is_number(value: object) -> TypeGuard[int]:
    """Return whether it is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_number(what: str, value: object) -> int:
    """Return a whole number; a bool is not accepted."""
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a number is needed, not {type(value).__name__}")


def as_text(what: str, value: object) -> bytes:
    """Return a str or bytes as bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise ArgumentError(f"{what}: a str or bytes is needed, not {type(value).__name__}")


def as_destination(what: str, value: object) -> bytes | int:
    """Return the name of a topic or sub-topic as bytes, or its number."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a name (str or bytes) or an id is needed, not {type(value).__name__}")


def as_function(what: str, value: object) -> Callable[..., object]:
    """Return a callable value."""
    if callable(value):
        return value
    raise ArgumentError(f"{what}: a function is needed, not {type(value).__name__}")


def text_of(name: bytes) -> Name:
    """Return a name as applications see it: str, or bytes when it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


def name_or_none(name: bytes | None) -> Name | None:
    """Return `text_of(name)`; None for None."""
    return None if name is None else text_of(name)


def text_names(names: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, Name]]:
    """Return pairs of id and name, with the names as `text_of` returns them."""
    return ((number, text_of(name)) for number, name in names)
