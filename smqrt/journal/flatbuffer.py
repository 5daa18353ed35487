"""Flatbuffers, as much as Arrow's messages need: written front to back, read by slot number.

A table is a vtable (where each slot is), then its fields; what a field refers to is written behind it, so every
offset points forward, as the format wants it (flatbuffers.dev, "Internals").
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

_U32 = struct.Struct("<I")
_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "q": 8}

Child = Callable[["Writer"], int]
"""Writes an object and returns its position."""
Slot = tuple[str, int] | Child | None
"""A field: (struct character, number), an object, or absent."""


class Writer:
    """A buffer under construction.

    Args:
        root: the root table.
    """

    def __init__(self, root: Child) -> None:
        self.data = bytearray(4)
        _U32.pack_into(self.data, 0, root(self))

    def align(self, size: int, ahead: int = 0) -> int:
        """Pads until the byte `ahead` of here is aligned; returns the position."""
        self.data += bytes(-(len(self.data) + ahead) % size)
        return len(self.data)


def table(*slots: Slot) -> Child:
    """Returns a table of fields; a slot that is None is left out."""

    def write(writer: Writer) -> int:
        offsets, size = _places(slots)
        vtable = writer.align(2)
        writer.data += struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), size, *offsets)
        start = writer.align(8)
        writer.data += struct.pack("<i", start - vtable) + bytes(size - 4)
        for slot, offset in zip(slots, offsets, strict=True):
            _fill(writer, slot, start + offset)
        return start

    return write


def _places(slots: Sequence[Slot]) -> tuple[list[int], int]:
    """Returns where each field stands behind the table's start (0: absent), and the table's size."""
    offsets, end = [], 4
    for slot in slots:
        size = _SIZES[slot[0]] if isinstance(slot, tuple) else 4
        at = end + -end % size
        offsets.append(0 if slot is None else at)
        end = end if slot is None else at + size
    return offsets, end


def _fill(writer: Writer, slot: Slot, at: int) -> None:
    if isinstance(slot, tuple):
        struct.pack_into("<" + slot[0], writer.data, at, slot[1])
    elif slot is not None:
        _U32.pack_into(writer.data, at, slot(writer) - at)


def string(text: str) -> Child:
    """Returns a string."""

    def write(writer: Writer) -> int:
        start, raw = writer.align(4), text.encode("utf-8", "replace")
        writer.data += _U32.pack(len(raw)) + raw + b"\0"
        return start

    return write


def vector(*children: Child) -> Child:
    """Returns a vector of tables."""

    def write(writer: Writer) -> int:
        start = writer.align(4)
        writer.data += _U32.pack(len(children)) + bytes(4 * len(children))
        for at, child in enumerate(children, 1):
            _U32.pack_into(writer.data, start + 4 * at, child(writer) - start - 4 * at)
        return start

    return write


def structs(count: int, raw: bytes) -> Child:
    """Returns a vector of `count` structs of 8-byte numbers."""

    def write(writer: Writer) -> int:
        start = writer.align(8, ahead=4)
        writer.data += _U32.pack(count) + raw
        return start

    return write


class Table:
    """A table that is read: `Table.root(data)`, then slot by slot.

    Raises:
        ValueError, struct.error: the bytes are no flatbuffer.
    """

    def __init__(self, data: bytes | memoryview, start: int) -> None:
        self.data, self.start = data, start
        self._vtable = start - struct.unpack_from("<i", data, start)[0]

    @classmethod
    def root(cls, data: bytes | memoryview) -> Table:
        """Returns the root table."""
        return cls(data, _U32.unpack_from(data, 0)[0])

    def _at(self, slot: int) -> int:
        size = struct.unpack_from("<H", self.data, self._vtable)[0]
        where = 4 + 2 * slot
        offset = struct.unpack_from("<H", self.data, self._vtable + where)[0] if where < size else 0
        if not offset:
            raise ValueError(f"slot {slot} is absent")
        return self.start + int(offset)

    def _follow(self, at: int) -> int:
        return at + int(_U32.unpack_from(self.data, at)[0])

    def table(self, slot: int) -> Table:
        """Returns the table a slot refers to."""
        return Table(self.data, self._follow(self._at(slot)))

    def tables(self, slot: int) -> list[Table]:
        """Returns the tables of a slot's vector."""
        start = self._follow(self._at(slot))
        count = _U32.unpack_from(self.data, start)[0]
        return [Table(self.data, self._follow(start + 4 * at)) for at in range(1, count + 1)]

    def string(self, slot: int) -> str:
        """Returns the string of a slot."""
        start = self._follow(self._at(slot))
        size = _U32.unpack_from(self.data, start)[0]
        return str(self.data[start + 4 : start + 4 + size], "utf-8")
