"""Rows to Arrow IPC streams and back, without pyarrow.

See Arrow columnar format 1.5, "Serialization and IPC". All segments of a format have the same columns, so the metadata
of all their record batches has the same layout: a template, which `BatchLayout.header` fills with numbers. The body has
the buffers of the columns in order, each padded to 8 bytes.

Format 2 has the columns of MQTT, too. In a batch without messages of MQTT clients these are null, and their buffers are
zeros of another column, so that they need no space (decision 0047).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal.record import MQTT_COLUMNS, SEGMENT_COLUMNS, Column, Row

FORMAT = 2
"""The newest format of segments. Formats from 2 on are named in the schema's metadata, as `format`."""

_VERSION_5 = 4  # in Arrow's enum MetadataVersion, which counts from 0
_SCHEMA, _RECORD_BATCH = 1, 3  # in the union MessageHeader
_BINARY, _UTF8, _BOOL, _INT, _TIMESTAMP = 4, 5, 6, 2, 10  # in the union Type
_MICROSECONDS = 2  # in the enum TimeUnit
_CONTINUATION = 0xFFFFFFFF  # begins each message
_CODES = {"BIGINT": "q", "TIMESTAMP": "q", "INT": "i"}
"""Columns of numbers, with the type code of `array`; others are bits, text or bytes."""
_BITS = "BOOLEAN"

_INDEX = {one.name: at for at, one in enumerate(SEGMENT_COLUMNS)}
TXN, _QOS = _INDEX["txn"], _INDEX["qos"]
_PADDING = [bytes(size) for size in range(8)]


# ---- Flatbuffers, as far as Arrow needs them (flatbuffers.dev, "Internals")
#
# A table is a vtable, which has the position of each slot, then its fields. Objects are written after the field that
# refers to them: every offset points forward.

_U32 = struct.Struct("<I")
_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "q": 8}

_Object = Callable[["_FlatBuffer"], int]
"""Writes an object and returns its position."""
_Slot = tuple[str, int] | _Object | None
"""A field: (struct character, number), an object, or absent."""


class _FlatBuffer:
    """A buffer under construction.

    Args:
        root: the root table.
    """

    def __init__(self, root: _Object) -> None:
        self.data = bytearray(4)
        _U32.pack_into(self.data, 0, root(self))

    def align(self, size: int, ahead: int = 0) -> int:
        """Pad so that the position `ahead` bytes after the end is a multiple of `size`; return the end."""
        self.data += bytes(-(len(self.data) + ahead) % size)
        return len(self.data)


def _table(*slots: _Slot) -> _Object:
    """Return a table of fields; a slot that is None is left out."""

    def write(writer: _FlatBuffer) -> int:
        offsets, size = [], 4  # the table begins with the offset of its vtable
        for slot in slots:
            width = _SIZES[slot[0]] if isinstance(slot, tuple) else 4
            at = size + -size % width
            offsets.append(0 if slot is None else at)  # 0: absent
            size = size if slot is None else at + width
        vtable = writer.align(2)
        writer.data += struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), size, *offsets)
        start = writer.align(8)
        writer.data += struct.pack("<i", start - vtable) + bytes(size - 4)
        for slot, offset in zip(slots, offsets, strict=True):
            at = start + offset
            if isinstance(slot, tuple):
                struct.pack_into("<" + slot[0], writer.data, at, slot[1])
            elif slot is not None:
                _U32.pack_into(writer.data, at, slot(writer) - at)
        return start

    return write


def _string(text: str) -> _Object:
    """Return a string."""

    def write(writer: _FlatBuffer) -> int:
        start, raw = writer.align(4), text.encode("utf-8", "replace")
        writer.data += _U32.pack(len(raw)) + raw + b"\0"
        return start

    return write


def _vector(*children: _Object) -> _Object:
    """Return a vector of tables."""

    def write(writer: _FlatBuffer) -> int:
        start = writer.align(4)
        writer.data += _U32.pack(len(children)) + bytes(4 * len(children))
        for at, child in enumerate(children, 1):
            _U32.pack_into(writer.data, start + 4 * at, child(writer) - start - 4 * at)
        return start

    return write


def _structs(count: int, raw: bytes) -> _Object:
    """Return a vector of `count` structs of 8-byte numbers."""

    def write(writer: _FlatBuffer) -> int:
        start = writer.align(8, ahead=4)
        writer.data += _U32.pack(count) + raw
        return start

    return write


class _FlatTable:
    """Reads a table: `_FlatTable.root(data)`, then slot by slot.

    Raises:
        ValueError, struct.error: the bytes are not a flatbuffer.
    """

    def __init__(self, data: bytes | memoryview, start: int) -> None:
        self.data, self.start = data, start
        self._vtable = start - struct.unpack_from("<i", data, start)[0]

    @classmethod
    def root(cls, data: bytes | memoryview) -> _FlatTable:
        """Return the root table."""
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

    def table(self, slot: int) -> _FlatTable:
        """Return the table of a slot."""
        return _FlatTable(self.data, self._follow(self._at(slot)))

    def tables(self, slot: int) -> list[_FlatTable]:
        """Return the tables of a slot's vector."""
        start = self._follow(self._at(slot))
        count = _U32.unpack_from(self.data, start)[0]
        return [_FlatTable(self.data, self._follow(start + 4 * at)) for at in range(1, count + 1)]

    def string(self, slot: int) -> str:
        """Return the string of a slot."""
        start = self._follow(self._at(slot))
        size = _U32.unpack_from(self.data, start)[0]
        return str(self.data[start + 4 : start + 4 + size], "utf-8")


# ---- Batches and schemas of segments


def _type(column: Column) -> tuple[int, _Object]:
    if column.type == "TIMESTAMP":
        return _TIMESTAMP, _table(("h", _MICROSECONDS), _string("UTC"))
    if column.type == _BITS:
        return _BOOL, _table()
    if column.type in _CODES:
        return _INT, _table(("i", 64 if column.type == "BIGINT" else 32), ("B", 1))
    return (_UTF8 if column.type == "STRING" else _BINARY), _table()


def _field(column: Column) -> _Object:
    number, described = _type(column)
    return _table(_string(column.name), ("B", column.nullable), ("B", number), described, None, _vector())


def _message(kind: int, header: _Object, body_size: int = 0) -> bytes:
    data = _FlatBuffer(_table(("h", _VERSION_5), ("B", kind), header, ("q", body_size))).data
    data += bytes(-len(data) % 8)
    return struct.pack("<Ii", _CONTINUATION, len(data)) + data


def schema_message(node: str, broker: str, format_: int = 1) -> bytes:
    """Return the first message of a segment.

    Args:
        node: the name of the writer's node.
        broker: the name of its hub.
        format_: the format of the segment.
    """
    metadata = {"node": node, "broker": broker} | ({"format": str(format_)} if format_ > 1 else {})
    pairs = [_table(_string(key), _string(value)) for key, value in metadata.items()]
    fields = map(_field, LAYOUTS[format_].columns)
    return _message(_SCHEMA, _table(("h", 0), _vector(*fields), _vector(*pairs)))


def message_size(start: bytes | memoryview) -> int:
    """Return the size of a message without its body, in bytes, from its first 8 bytes.

    Raises:
        ValueError: the bytes don't begin a message.
    """
    mark, size = struct.unpack_from("<Ii", start) if len(start) >= 8 else (0, 0)
    if mark != _CONTINUATION or size <= 0 or size % 8:
        raise ValueError("no Arrow message starts here")
    return 8 + int(size)


def schema_metadata(message: bytes | memoryview) -> dict[str, str]:
    """Return {"node": …, "broker": …} of a segment's first message; from format 2 on also `format`.

    Raises:
        ValueError: the message is not the schema of a segment.
        JournalError: a newer version wrote it.
    """
    try:
        schema = _FlatTable.root(message[8 : message_size(message)]).table(2)
        found = {pair.string(0): pair.string(1) for pair in schema.tables(2)}
    except struct.error as error:
        raise ValueError(f"no Arrow schema: {error}") from None
    newer = found.get("format", "")  # format 1 has no such entry
    if newer.isdecimal() and int(newer) > FORMAT:
        raise JournalError(
            f"A segment of {found.get('node')!r} has format {newer}, written by a newer smqrt; this one reads up to "
            f"{FORMAT}. Update smqrt."
        )
    return found


def _template(fields: int, buffers: int) -> tuple[struct.Struct, list[bytes]]:
    """Return the layout of a batch's header, and the constant bytes between its numbers."""
    # A header is built with four marks, which occur nowhere else in it, and is split at them.
    marks = [struct.pack("<q", 0x7E57AB1E00000000 + at) for at in range(4)]
    rows, body = (struct.unpack("<q", mark)[0] for mark in marks[:2])
    nodes, places = marks[2] + bytes(16 * fields - 8), marks[3] + bytes(16 * buffers - 8)
    header = _message(_RECORD_BATCH, _table(("q", rows), _structs(fields, nodes), _structs(buffers, places)), body)
    first, rest = header.split(marks[1])
    second, rest = rest.split(marks[0])
    third, rest = rest.split(nodes)
    fourth, last = rest.split(places)
    parts = [first, second, third, fourth, last]
    sizes = [f"{len(part)}s" for part in parts]
    layout = f"<{sizes[0]}q{sizes[1]}q{sizes[2]}{2 * fields}q{sizes[3]}{2 * buffers}q{sizes[4]}"
    return struct.Struct(layout), parts


class BatchLayout:
    """The layout of all batches of one format.

    Args:
        columns: the columns of its segments.

    Attributes:
        columns: as given.
        fields: the number of columns.
        first_buffer: the first buffer of each column, which has its validity, offsets for text and bytes, and its data.
        buffers: the number of all buffers.
        header_bytes: the size of every header; a multiple of 8.
        template, parts: the layout of a header, and the constant bytes between its numbers.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns, self.fields = tuple(columns), len(columns)
        counts = (3 if one.type in ("STRING", "BINARY") else 2 for one in columns)
        *self.first_buffer, self.buffers = accumulate(counts, initial=0)
        self.template, self.parts = _template(self.fields, self.buffers)
        self.header_bytes = self.template.size

    def header_layout(self) -> tuple[tuple[int, int, int, int], list[tuple[int, bytes]]]:
        """Return the layout of all headers.

        Returns the offsets of the body's size, the rows, the first (length, nulls) and the first (offset, size), and
        (offset, bytes) of the constant parts between them.
        """
        numbers = list(accumulate((8, 8, 16 * self.fields, 16 * self.buffers), initial=0))
        constant = list(accumulate(map(len, self.parts), initial=0))
        body, rows, nodes, buffers = map(add, constant[1:-1], numbers[:-1])
        return (body, rows, nodes, buffers), list(zip(map(add, constant, numbers), self.parts, strict=False))

    def header(
        self, rows: int, nulls: Sequence[int], lengths: Sequence[int], shared: Sequence[tuple[int, int]] = ()
    ) -> bytes:
        """Return the message header of a batch; the body follows it in the file.

        Args:
            rows: number of rows.
            nulls: number of nulls of each column.
            lengths: bytes of each buffer, without the padding to 8. The order is Arrow's: per column validity, offsets
                for text and bytes, data. 0 for a validity that is left out.
            shared: (buffer, other) of buffers that have no bytes of their own, but those of another buffer.

        Raises:
            struct.error: `nulls` or `lengths` have a wrong number of items.
        """
        sizes = [(size + 7) & -8 for size in lengths]
        for buffer, _ in shared:
            sizes[buffer] = 0
        *starts, body_bytes = accumulate(sizes, initial=0)
        for buffer, other in shared:
            starts[buffer] = starts[other]
        places = [0] * (2 * self.buffers)
        places[1::2] = lengths
        places[0::2] = starts
        nodes = [rows] * (2 * self.fields)
        nodes[1::2] = nulls
        start, middle, before_nodes, before_buffers, end = self.parts
        return self.template.pack(start, body_bytes, middle, rows, before_nodes, *nodes, before_buffers, *places, end)


PLAIN, WITH_MQTT = BatchLayout(SEGMENT_COLUMNS[:-MQTT_COLUMNS]), BatchLayout(SEGMENT_COLUMNS)
LAYOUTS = {1: PLAIN, 2: WITH_MQTT}
"""The layouts by format."""
_BY_SIZE = {one.header_bytes - 8: one for one in LAYOUTS.values()}
MIN_HEADER_BYTES, MAX_HEADER_BYTES = PLAIN.header_bytes, WITH_MQTT.header_bytes

_FIRST_MQTT, _FIRST_TXN = WITH_MQTT.first_buffer[_QOS], WITH_MQTT.first_buffer[TXN]
NULL_MQTT = [(_FIRST_MQTT + at, _FIRST_TXN + source) for at, source in enumerate((0, 1, 0, 0, 0, 1))]
"""The buffers of null columns of MQTT, and those of a null column `txn` that have the same zeros: bits are those of its
validity, and numbers those of its offsets.
"""
EQUAL_VALIDITIES = [(_FIRST_MQTT + 2, _FIRST_MQTT), (_FIRST_MQTT + 4, _FIRST_MQTT)]
"""The three columns of MQTT are null in the same rows, and share one bitmap."""
_NO_MQTT = (None,) * MQTT_COLUMNS


def encode(rows: Sequence[Row], layout: BatchLayout = PLAIN) -> list[bytes]:
    """Return a batch: its header and the pieces of its body, in the order of the file.

    Args:
        rows: at least one; together below 2 GiB per column.
        layout: the layout of the segment; columns that it lacks are left out.
    """
    nulls: list[int] = []
    lengths: list[int] = []
    pieces = [b""]
    shared: list[tuple[int, int]] = []
    is_plain = layout is WITH_MQTT and all(row[_QOS:] == _NO_MQTT for row in rows)
    for column, values in zip((PLAIN if is_plain else layout).columns, zip(*rows, strict=True), strict=False):
        missing, buffers = _encoded(values, column.type)
        nulls.append(missing)
        for buffer in buffers:
            size = len(buffer)
            lengths.append(size)
            if size:
                pieces.append(buffer)
                if size & 7:
                    pieces.append(_PADDING[-size & 7])
    if is_plain:
        bits, numbers = (len(rows) + 7) // 8, 4 * len(rows) + 4
        lengths += (bits, numbers - 4, bits, bits, bits, numbers, 0)
        shared = NULL_MQTT
        if nulls[TXN] < len(rows):
            shared = [(buffer, _FIRST_MQTT + 5) for buffer in range(_FIRST_MQTT, _FIRST_MQTT + 5)]
            pieces.append(bytes(numbers + -numbers % 8))
        nulls += (len(rows),) * MQTT_COLUMNS
    pieces[0] = layout.header(len(rows), nulls, lengths, shared)
    return pieces


_Buffers = tuple[int, Sequence[bytes]]


def _encoded(values: Sequence[Any], kind: str) -> _Buffers:
    """Return the number of nulls and the buffers of a column."""
    if kind == _BITS:
        missing, validity = _validity(values) if None in values else (0, b"")
        return missing, (validity, _packed(values))
    code = _CODES.get(kind)
    return _fixed(values, code) if code else _variable(values, kind)


def _fixed(values: Sequence[Any], code: str) -> _Buffers:
    if values[0] is not None:
        try:
            return 0, (b"", array(code, values).tobytes())
        except TypeError:  # a later value is None: trying is faster than a search for None
            pass
    missing, validity = _validity(values)
    if missing == len(values):
        return missing, (validity, bytes(missing * array(code).itemsize))
    return missing, (validity, array(code, [value or 0 for value in values]).tobytes())


def _variable(values: Sequence[Any], kind: str) -> _Buffers:
    if values[0] is not None:
        try:
            return 0, (b"", *_joined(values, kind))
        except TypeError:
            pass
    missing, validity = _validity(values)
    if missing == len(values):
        return missing, (validity, bytes(4 * missing + 4), b"")
    empty: Any = "" if kind == "STRING" else b""
    return missing, (validity, *_joined([empty if value is None else value for value in values], kind))


def _joined(values: Sequence[Any], kind: str) -> tuple[bytes, bytes]:
    if kind == "STRING":
        text = "".join(values)
        if not text.isascii():
            return _joined([value.encode("utf-8", "replace") for value in values], "BINARY")
        data = text.encode("ascii")
    else:
        data = b"".join(values)
    return array("i", accumulate(map(len, values), initial=0)).tobytes(), data


def _validity(values: Sequence[Any]) -> tuple[int, bytes]:
    """Return how many values are None, and the bitmap of the others."""
    missing = values.count(None)
    if missing == len(values):
        return missing, bytes((len(values) + 7) // 8)
    return missing, _packed([value is not None for value in values])


def _packed(values: Sequence[bool | None]) -> bytes:
    """Return a bitmap."""
    bits = "".join(["1" if value else "0" for value in reversed(values)])
    return int(bits, 2).to_bytes((len(values) + 7) // 8, "little")


class BatchHeader(NamedTuple):
    """The header of a batch: rows, nulls per column, (offset, size) per buffer, the body's size in bytes, layout."""

    rows: int
    nulls: tuple[int, ...]
    buffers: list[tuple[int, int]]
    body_bytes: int
    layout: BatchLayout = PLAIN


def layout_of(batch: bytes | memoryview) -> BatchLayout:
    """Return the layout of a batch.

    Args:
        batch: at least its header.

    Raises:
        ValueError: the bytes are not a batch of a segment.
    """
    layout = _BY_SIZE.get(_U32.unpack_from(batch, 4)[0]) if len(batch) >= MIN_HEADER_BYTES else PLAIN
    if layout is None:
        raise ValueError("no batch of a journal starts here")
    if len(batch) < layout.header_bytes:
        raise ValueError(f"{len(batch)} bytes are too few for the header of a batch")
    return layout


def read_header(batch: bytes | memoryview) -> BatchHeader:
    """Return the header of a batch.

    Args:
        batch: at least its first `MAX_HEADER_BYTES`, or all of it.

    Raises:
        ValueError: the bytes are not a batch of a segment.
    """
    layout = layout_of(batch)
    start, body_size, middle, rows, before_nodes, *numbers = layout.template.unpack_from(batch)
    split = 2 * layout.fields
    nodes, (before_buffers, *spans, end) = numbers[:split], numbers[split:]
    if [start, middle, before_nodes, before_buffers, end] != layout.parts:
        raise ValueError("no batch of a journal starts here")
    starts, sizes = spans[::2], spans[1::2]
    if rows < 0 or min(spans) < 0 or max(map(add, starts, sizes)) > body_size:
        raise ValueError("the header of the batch is inconsistent")
    return BatchHeader(rows, tuple(nodes[1::2]), list(zip(starts, sizes, strict=True)), body_size, layout)


def decode(batch: bytes | memoryview) -> list[Row]:
    """Return the rows of a complete batch of a segment, header and body.

    Raises:
        JournalError: the bytes are not a complete batch.
    """
    columns = _columns(batch, range(len(SEGMENT_COLUMNS)))
    return list(map(Row._make, zip(*columns, strict=True)))


def decode_column(batch: bytes | memoryview, name: str) -> list[object]:
    """Return one column of a batch, such as `decode_column(batch, "txn")`; one that its format lacks is null.

    Raises:
        JournalError: the bytes are not a complete batch.
    """
    return _columns(batch, [_INDEX[name]])[0]


def decode_numbers(batch: bytes | memoryview, name: str) -> list[int]:
    """Return one column that has a number in each row: seq, ts or flags. Raises as `decode_column`."""
    return _columns(batch, [_INDEX[name]])[0]


def _columns(batch: bytes | memoryview, wanted: Sequence[int]) -> list[list[Any]]:
    try:
        header = read_header(batch)
        start = header.layout.header_bytes
        if len(batch) < start + header.body_bytes:
            raise ValueError("the batch is cut off")
        body = memoryview(batch)[start : start + header.body_bytes]
        return [_values(body, header, at) for at in wanted]
    except (ValueError, IndexError) as error:
        raise JournalError(f"These bytes are not a batch of a journal: {error}.") from None


def _values(body: memoryview, header: BatchHeader, at: int) -> list[Any]:
    rows, layout = header.rows, header.layout
    if at >= layout.fields:
        if rows * 8 > header.body_bytes:  # the column `seq` alone has 8 bytes for each row
            raise ValueError("a column is shorter than its rows")
        return list(repeat(None, rows))
    kind, first = layout.columns[at].type, layout.first_buffer[at]
    code = _CODES.get(kind)
    validity, second, *rest = (body[start : start + size] for start, size in header.buffers[first:][:3])
    if kind == _BITS:
        if len(second) * 8 < rows:
            raise ValueError("a column is shorter than its rows")
        values: list[Any] = [bool(second[row >> 3] >> (row & 7) & 1) for row in range(rows)]
    else:
        values = _numbers(second, code, rows) if code else _texts(_numbers(second, "i", rows + 1), rest[0], kind)
    if not header.nulls[at]:
        return values
    bits = int.from_bytes(validity, "little")
    return [value if bits >> row & 1 else None for row, value in enumerate(values)]


def _numbers(data: memoryview, code: str, count: int) -> list[Any]:
    numbers = array(code)
    numbers.frombytes(data[: count * numbers.itemsize])
    if len(numbers) != count:
        raise ValueError("a column is shorter than its rows")
    return numbers.tolist()


def _texts(ends: list[int], data: memoryview, kind: str) -> list[Any]:
    if ends[-1] > len(data):
        raise ValueError("a column is shorter than its rows")
    raw = bytes(data)
    values = [raw[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return values if kind == "BINARY" else [value.decode("utf-8", "replace") for value in values]
