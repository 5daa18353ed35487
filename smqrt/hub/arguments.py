"""Checks of what applications pass to the hub API; each error names the argument."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from smqrt.errors import ArgumentError
from smqrt.hub.peer import is_number


def positive(what: str, value: Any) -> int:
    """A whole number above 0."""
    if is_number(value) and value > 0:
        return int(value)
    raise ArgumentError(f"{what}: a positive whole number is needed, not {value!r}")


def number(what: str, value: Any) -> int:
    """A whole number."""
    if is_number(value):
        return int(value)
    raise ArgumentError(f"{what}: a number is needed, not {type(value).__name__}")


def path(what: str, value: Any) -> str:
    """The path of a file."""
    if isinstance(value, str | bytes | os.PathLike) and value:
        return os.fsdecode(value)
    raise ArgumentError(f"{what}: the path of a file is needed, not {value!r}")


def text(what: str, value: Any) -> bytes:
    """A str or bytes, as bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return value
    raise ArgumentError(f"{what}: a str or bytes is needed, not {type(value).__name__}")


def name(what: str, value: Any) -> bytes | int:
    """The name of a topic or sub-topic as bytes, or its number."""
    if is_number(value):
        return int(value)
    if isinstance(value, str | bytes):
        return text(what, value)
    raise ArgumentError(f"{what}: a name (str or bytes) or an id is needed, not {type(value).__name__}")


def function(what: str, value: Any) -> Callable[..., Any]:
    """Something that can be called."""
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise ArgumentError(f"{what}: a function is needed, not {type(value).__name__}")
