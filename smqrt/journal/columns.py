"""Kernels of the journal: recorded frames to columns, and small batches to large ones.

The recorder collects a stream of Publish frames as they were received, with four kinds of frames of its own between
them. A *stamp* sets the time of all frames before it, back to the previous stamp. A *toggle* switches flags for the
frames after it. *Attributes* are those of MQTT of the frames after them. A *large message* is elsewhere, since it does
not fit a frame. So recording a message only appends its bytes to a list.

LuaJIT runs both kernels where lupa is installed (`columns.lua`, `gather.lua`); no compiler is needed. Otherwise Python
builds rows one by one, and pyarrow reads batches one by one. A property test compares both implementations. The layout
of the columns is defined in three places: `record.py`, `columns.lua` and `_null_counts_and_sizes`. The test also finds
differences between them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.journal.arrow import EQUAL_VALIDITIES, NULL_MQTT, PLAIN, WITH_MQTT, BatchLayout, encode
from smqrt.journal.record import SEGMENT_COLUMNS, Flag, Row

if TYPE_CHECKING:
    import pyarrow as pa

TOPIC, SUBTOPIC, UID, PROPERTIES = 1, 2, 3, 4
"""Kinds of names; the name of properties is their JSON."""
LARGE_MESSAGE = 5
"""Instead of a kind of name: a large message that must be written first."""

log = logging.getLogger("smqrt")

_STAMP, _TOGGLE, _ATTRIBUTES, _LARGE, _PUBLISH = 0, 1, 2, 3, 8  # 8 is SMQ's Publish; no other SMQ frame is recorded
_STAMPED = struct.Struct(">HBq")
_ATTRIBUTED = struct.Struct(">HBBBI")  # length, type, QoS, retain, number of the properties
_HEAD = struct.Struct(">HBIII")  # length, type, topic, publisher, subtopic
MAX_ROWS = 8192
MAX_BATCH_BYTES = 1 << 20
MAX_TEXT_BYTES = 512 << 10
_MAX_BATCHES = 1 << 14  # of one call of the gather kernel, which allocates space for them once
_INDEX_COLUMNS = {column.name: at for at, column in enumerate(SEGMENT_COLUMNS)}

Piece = bytes | memoryview


def stamp(ts_us: int) -> bytes:
    """Return the frame that sets the time of the frames before it: `ts_us`, microseconds since 1970, UTC."""
    return _STAMPED.pack(_STAMPED.size, _STAMP, ts_us)


def toggle(flags: int) -> bytes:
    """Return the frame that toggles `flags` (u8) for the frames after it."""
    return bytes((0, 4, _TOGGLE, flags))


def attributes(qos: int, retain: bool, number: int) -> bytes:
    """Return the frame with the attributes of MQTT of the frames after it; `number` is that of their properties."""
    return _ATTRIBUTED.pack(_ATTRIBUTED.size, _ATTRIBUTES, qos, retain, number)


NO_ATTRIBUTES = attributes(0, False, 0)
"""The frame after messages of an MQTT client."""


LARGE = bytes((0, 3, _LARGE))
"""The frame for a message that does not fit a frame."""


class Columns(Protocol):
    """Collects frames until a batch is taken."""

    def append(self, data: bytes | memoryview, at: int) -> tuple[int, int, int]:
        """Add frames of `data` from `at` on.

        Returns `(at, kind, number)`: the position that was reached. `kind` is 0 at the end of `data` or when the batch
        is full. Otherwise it is the kind of a name that must be set with `name` first, or `LARGE_MESSAGE` at a large
        message, which the caller writes and skips.
        """
        ...

    def name(self, kind: int, number: int, text: bytes | None) -> None:
        """Set the name of a topic, subtopic or publisher, or properties; None is stored as null."""
        ...

    def forget(self, kind: int, number: int) -> None:
        """Remove a name, so that it is requested again."""
        ...

    def server(self, etid: int) -> None:
        """Set the ETID of the hub's own client."""
        ...

    def take(self, seq: int) -> tuple[int, int, int, Sequence[Piece]]:
        """Return the collected rows as a batch that begins with `seq`: `(rows, first us, last us, pieces)`."""
        ...


class PureColumns:
    """`Columns` in Python: the reference, and the fallback without LuaJIT.

    Args:
        layout: the layout of the batches.
    """

    def __init__(self, layout: BatchLayout = PLAIN) -> None:
        self._layout = layout
        self._names: dict[int, dict[int, str | None]] = {TOPIC: {}, SUBTOPIC: {0: None}, UID: {}, PROPERTIES: {0: None}}
        self._mqtt: tuple[int, bool, str] | None = None  # of the messages to come
        self._rows: list[Row] = []
        self._bytes = self._flags = 0
        self._stamped = 0
        self._server = -1

    def append(self, data: bytes | memoryview, at: int) -> tuple[int, int, int]:
        """See `Columns`."""
        data = bytes(data)
        end = len(data)
        while at < end:
            length = data[at] << 8 | data[at + 1]
            if data[at + 2] == _PUBLISH:
                if len(self._rows) >= MAX_ROWS or self._bytes >= MAX_BATCH_BYTES:
                    self._stamp_ahead(data, at)
                    return at, 0, 0
                missing = self._message(data, at, length)
                if missing:
                    return at, *missing
            elif data[at + 2] == _STAMP:
                self._stamp(_STAMPED.unpack_from(data, at)[2])
            elif data[at + 2] == _TOGGLE:
                self._flags ^= data[at + 3]
            elif data[at + 2] == _LARGE:
                return at, LARGE_MESSAGE, 0
            else:
                _, _, qos, retain, number = _ATTRIBUTED.unpack_from(data, at)
                if number not in self._names[PROPERTIES]:
                    return at, PROPERTIES, number
                properties = self._names[PROPERTIES][number]
                self._mqtt = None if properties is None else (qos, bool(retain), properties)
            at += length
        return at, 0, 0

    def _message(self, data: bytes, at: int, length: int) -> tuple[int, int] | None:
        _, _, tid, ptid, stid = _HEAD.unpack_from(data, at)
        for kind, number in ((TOPIC, tid), (UID, ptid), (SUBTOPIC, stid)):
            if number not in self._names[kind]:
                return kind, number
        topic, uid, subtopic = self._names[TOPIC][tid], self._names[UID][ptid], self._names[SUBTOPIC][stid]
        flags = self._flags | (Flag.DIRECT if topic is None else 0) | (Flag.SERVER if ptid == self._server else 0)
        payload = data[at + _HEAD.size : at + length]
        self._rows.append(
            Row(0, 0, topic, tid, subtopic, stid, ptid, uid, int(flags), payload, None, *self._mqtt or ())
        )
        self._bytes += length
        return None

    def _stamp(self, ts_us: int) -> None:
        for at in range(self._stamped, len(self._rows)):
            self._rows[at] = self._rows[at]._replace(ts_us=ts_us)
        self._stamped = len(self._rows)

    def _stamp_ahead(self, data: bytes, at: int) -> None:
        while at < len(data) and data[at + 2] != _STAMP:
            at += data[at] << 8 | data[at + 1]
        if at < len(data):
            self._stamp(_STAMPED.unpack_from(data, at)[2])

    def name(self, kind: int, number: int, text: bytes | None) -> None:
        """See `Columns`."""
        self._names[kind][number] = None if text is None else text.decode("utf-8", "replace")

    def forget(self, kind: int, number: int) -> None:
        """See `Columns`."""
        self._names[kind].pop(number, None)

    def server(self, etid: int) -> None:
        """See `Columns`."""
        self._server = etid

    def take(self, seq: int) -> tuple[int, int, int, Sequence[Piece]]:
        """See `Columns`."""
        rows = [row._replace(seq=seq + at) for at, row in enumerate(self._rows)]
        self._rows, self._bytes, self._stamped = [], 0, 0
        if not rows:
            return 0, 0, 0, []
        times = [row.ts_us for row in rows]
        return len(rows), min(times), max(times), encode(rows, self._layout)


class JitColumns:
    """`Columns` in LuaJIT.

    LuaJIT gets the address of the joined bytes, since a Lua string would be another copy, in new memory each time.

    Args:
        layout: the layout of the batches.
    """

    def __init__(self, layout: BatchLayout = PLAIN) -> None:
        import lupa.luajit21 as lupa

        self._layout = layout

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.journal").joinpath("columns.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        parts = chunk(MAX_ROWS, MAX_TEXT_BYTES, MAX_BATCH_BYTES, layout is WITH_MQTT)
        self._append, self._take, self.name, self.forget, self.server, *memory, self._keep = parts
        self._body, self._payloads = _memory(*memory[:2]), _memory(*memory[2:])

    def append(self, data: bytes | memoryview, at: int) -> tuple[int, int, int]:
        """See `Columns`."""
        found: tuple[int, int, int] = self._append(_address(data), len(data), at)
        return found

    def take(self, seq: int) -> tuple[int, int, int, list[bytes | memoryview]]:
        """See `Columns`; the pieces are valid until the next call."""
        rows, before, payloads, behind, ts_min, ts_max, *measures, mqtt_nulls, properties = self._take(seq)
        if not rows:
            return 0, 0, 0, []
        nulls, lengths = _null_counts_and_sizes(rows, *measures)
        shared: Sequence[tuple[int, int]] = ()
        if self._layout is WITH_MQTT:
            nulls, lengths = _with_mqtt(rows, nulls, lengths, mqtt_nulls, properties)
            shared = NULL_MQTT if mqtt_nulls == rows else EQUAL_VALIDITIES
        body = self._body[:before], self._payloads[:payloads], self._body[before : before + behind]
        return rows, ts_min, ts_max, [self._layout.header(rows, nulls, lengths, shared), *body]


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _address(data: bytes | memoryview) -> int | None:
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _null_counts_and_sizes(
    rows: int, no_topic: int, no_subtopic: int, no_uid: int, topic: int, subtopic: int, uid: int, payload: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the null counts of each column and the bytes of each buffer, in the order of the journal's columns."""
    bits, offsets, longs = (rows + 7) >> 3, (rows + 1) * 4, rows * 8
    topics = bits if no_topic else 0, offsets, topic
    subtopics = bits if no_subtopic else 0, offsets, subtopic
    uids = bits if no_uid else 0, offsets, uid
    seq_ts = 0, longs, 0, longs
    tail = 0, rows * 4, 0, offsets, payload, bits, offsets, 0
    lengths = (*seq_ts, *topics, 0, longs, *subtopics, 0, longs, 0, longs, *uids, *tail)
    return (0, 0, no_topic, 0, no_subtopic, 0, 0, no_uid, 0, 0, rows), lengths


def _with_mqtt(
    rows: int, nulls: tuple[int, ...], lengths: tuple[int, ...], mqtt_nulls: int, properties: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Add the columns of MQTT: qos, retain and properties."""
    bits = (rows + 7) >> 3
    return (*nulls, *[mqtt_nulls] * 3), (*lengths, bits, rows * 4, bits, bits, bits, (rows + 1) * 4, properties)


def fastest_columns(layout: BatchLayout = PLAIN) -> Columns:
    """Return the fastest implementation on this machine; `SMQRT_KERNELS=pure` selects Python.

    Args:
        layout: the layout of the batches.
    """
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureColumns(layout)
    try:
        return JitColumns(layout)
    except Exception as error:
        log.info("LuaJIT is not available (%s); the journal's columns are built in Python", error)
        return PureColumns(layout)


# ---- Joining small batches
#
# A hub writes a batch every 10 ms; pyarrow needs some 8 us for each, however few rows it has. All batches of a segment
# have the same header layout, so that their columns can be copied together at 0.02 us a row (decision 0013).


class Gatherer:
    """The LuaJIT kernel with its own memory; it builds one batch at a time.

    Args:
        layout: the layout of the batches.
    """

    def __init__(self, layout: BatchLayout = PLAIN) -> None:
        import lupa.luajit21 as lupa

        self._layout = layout
        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.journal").joinpath("gather.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        offsets, constant = layout.header_layout()
        table = self._runtime.table_from([one for part in constant for one in part])
        functions = chunk(_MAX_BATCHES, layout.header_bytes, *offsets, table)
        self._survey, self._nulls, self._bits, self._booleans, self._numbers, self._text_bytes, self._texts = functions
        self._error: Any = lupa.LuaError

    def batches(self, data: memoryview, schema: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield pyarrow.RecordBatches of about `batch_rows` rows.

        Args:
            data: complete batches of a segment.
            schema: the wanted columns, as pyarrow.Schema; those that the segment lacks are null.
            batch_rows: batches are joined until they have this many rows.

        Raises:
            pyarrow.ArrowInvalid: the data are not valid batches.
        """
        import pyarrow as pa

        buffer, at = pa.py_buffer(data), 0
        try:
            while at < buffer.size:
                at, rows = self._survey(buffer.address, at, buffer.size, batch_rows)
                columns = [self._column(_INDEX_COLUMNS[field.name], field.type, rows) for field in schema]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
        except self._error as error:
            raise pa.ArrowInvalid(str(error)) from None

    def _column(self, column: int, kind: Any, rows: int) -> Any:
        import pyarrow as pa

        if column >= self._layout.fields:
            return pa.nulls(rows, kind)
        first, missing = self._layout.first_buffer[column], self._nulls(column)
        valid = None
        if missing:
            valid = pa.allocate_buffer((rows + 7) >> 3)
            self._bits(column, first, valid.address)
        return pa.Array.from_buffers(kind, rows, [valid, *self._values(first + 1, kind, rows)], missing)

    def _values(self, buffer: int, kind: Any, rows: int) -> list[Any]:
        import pyarrow as pa

        if pa.types.is_boolean(kind):
            values = pa.allocate_buffer((rows + 7) >> 3)
            self._booleans(buffer, values.address)
            return [values]
        if pa.types.is_primitive(kind):
            values = pa.allocate_buffer(rows * kind.bit_width // 8)
            self._numbers(buffer, kind.bit_width // 8, values.address)
            return [values]
        ends, text = pa.allocate_buffer((rows + 1) * 4), pa.allocate_buffer(self._text_bytes(buffer))
        self._texts(buffer, ends.address, text.address)
        return [ends, text]


_threads = threading.local()


def gatherer(layout: BatchLayout = PLAIN) -> Gatherer | None:
    """Return this thread's kernel, which no other thread may use. None without LuaJIT, or with `SMQRT_KERNELS=pure`.

    Args:
        layout: the layout of the batches.
    """
    kernels: dict[BatchLayout, Gatherer | None] = _threads.__dict__.setdefault("kernels", {})
    if layout not in kernels:
        kernels[layout] = None
        if os.environ.get("SMQRT_KERNELS") != "pure":
            try:
                kernels[layout] = Gatherer(layout)
            except Exception as error:
                log.info("LuaJIT is not available (%s); pyarrow reads the journal's batches one by one", error)
    return kernels[layout]
