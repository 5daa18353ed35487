"""Parameters of queries and forms (application/x-www-form-urlencoded)."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from smqrt.http.status import BadRequest

MAX_PARAMETERS = 1000
_PIECE_BYTES = 8192  # decoded at once: 0.5 ms when all of it is escapes


def parse_parameters(text: bytes, breathe: Callable[[], object] = bool) -> list[tuple[bytes, bytes]]:
    """Give names and values, percent-decoded, in their order.

    Args:
        text: as it came.
        breathe: called now and then in a long text, to let others run.

    Raises:
        BadRequest: 413, there are more than MAX_PARAMETERS.
    """
    if text.count(b"&") >= MAX_PARAMETERS:
        raise BadRequest(f"more than {MAX_PARAMETERS} parameters", status=413)
    pairs = (field.partition(b"=") for field in text.split(b"&") if field)
    return [(_decoded(name, breathe), _decoded(value, breathe)) for name, _, value in pairs]


def as_text(value: bytes) -> str:
    """Give a name or value as text; bytes that are no UTF-8 become surrogate escapes."""
    return value.decode("utf-8", "surrogateescape")


def _decoded(text: bytes, breathe: Callable[[], object]) -> bytes:
    text = text.replace(b"+", b" ")
    if b"%" not in text:
        return text
    if len(text) > _PIECE_BYTES:
        return b"".join(_unquoted(text, breathe))
    breathe()  # there may be a thousand of them
    return unquote_to_bytes(text)


def _unquoted(text: bytes, breathe: Callable[[], object]) -> list[bytes]:
    parts: list[bytes] = []
    at = 0
    while at < len(text):
        end = at + _PIECE_BYTES
        cut = text.rfind(b"%", end - 2, end)  # an escape stays whole
        end = cut if cut > at else end
        parts.append(unquote_to_bytes(text[at:end]))
        at = end
        breathe()
    return parts
