"""Text between HTTP (str) and Lua (bytes)."""

from __future__ import annotations


def utf8(text: str) -> bytes:
    """The bytes of a path or parameter; bytes that were no UTF-8 come back as they were."""
    return text.encode("utf-8", "surrogateescape")


def from_utf8(data: bytes) -> str:
    """The inverse of `utf8`."""
    return data.decode("utf-8", "surrogateescape")


def latin1(text: str) -> bytes:
    """The bytes of a header field."""
    return text.encode("latin-1", "replace")


def from_latin1(data: bytes) -> str:
    """The inverse of `latin1`: UTF-8 in a header field passes unchanged."""
    return data.decode("latin-1")
