"""Tables as bytes, to cross between Python and Lua in one piece. The other half is lib/core/table_codec.lua.

A value is a letter and what follows: "s" a string with its length, "i" an integer, "n" a float, "t" and "f" booleans,
"m" a table with the number of its fields, then keys and values in turn. Lists are tables with the keys 1, 2, ...
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Table = dict[Any, Any]
"""A table that was decoded: keys and values are bytes, bool, int, float or tables."""


def dump(value: object) -> bytes:
    """`value` as bytes; None as a field of a table is left out.

    Raises:
        TypeError: it is neither str, bytes, bool, int, float, list, tuple nor a mapping of such.
    """
    parts: list[bytes] = []
    _dump(value, parts)
    return b"".join(parts)


def _dump(value: object, parts: list[bytes]) -> None:
    if isinstance(value, str | bytes | bytearray):
        data = value.encode() if isinstance(value, str) else bytes(value)
        parts += (b"s", struct.pack(">I", len(data)), data)
    elif isinstance(value, bool):
        parts.append(b"t" if value else b"f")
    elif isinstance(value, int):
        parts.append(struct.pack(">cq", b"i", value))
    elif isinstance(value, float):
        parts.append(struct.pack(">cd", b"n", value))
    else:
        _dump_fields(value, parts)


def _dump_fields(value: Any, parts: list[bytes]) -> None:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
    fields = [(key, item) for key, item in pairs if item is not None]
    parts.append(struct.pack(">cI", b"m", len(fields)))
    for key, item in fields:
        _dump(key, parts)
        _dump(item, parts)


def dump_list(values: Iterable[object], breathe: Callable[[], object] = bool) -> bytes:
    """The same for a long list; `breathe` is called after each value."""
    parts: list[bytes] = [b""]
    count = 0
    for count, value in enumerate(values, 1):
        _dump(count, parts)
        _dump(value, parts)
        breathe()
    parts[0] = struct.pack(">cI", b"m", count)
    return b"".join(parts)


def dump_packed(fields: Mapping[str, bytes]) -> bytes:
    """A table whose values are bytes of `dump` or `dump_list`."""
    parts = [struct.pack(">cI", b"m", len(fields))]
    for key, packed in fields.items():
        _dump(key, parts)
        parts.append(packed)
    return b"".join(parts)


def load(data: bytes) -> Table:
    """The inverse: strings as bytes, tables as dicts."""
    table: Table = _load(data, 0)[0]
    return table


def _load(data: bytes, at: int) -> tuple[Any, int]:
    kind, at = data[at : at + 1], at + 1
    if kind == b"s":
        end = at + 4 + int.from_bytes(data[at : at + 4])
        return data[at + 4 : end], end
    if kind == b"m":
        return _load_fields(data, at)
    if kind in b"tf":
        return kind == b"t", at
    return struct.unpack_from(">q" if kind == b"i" else ">d", data, at)[0], at + 8


def _load_fields(data: bytes, at: int) -> tuple[dict[Any, Any], int]:
    count, at = int.from_bytes(data[at : at + 4]), at + 4
    fields = {}
    for _ in range(count):
        key, at = _load(data, at)
        fields[key], at = _load(data, at)
    return fields, at
