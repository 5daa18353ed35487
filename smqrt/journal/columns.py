"""Frames to batches of columns.

The recorder collects a stream of Publish frames as they were received, with two kinds of frames of its own between
them. A *stamp* sets the time of all frames before it, back to the previous stamp. A *toggle* switches flags for the
frames after it. So recording a message only appends its bytes to a list.

LuaJIT builds the columns where lupa is installed (`columns.lua`); no compiler is needed. Otherwise Python builds rows
one by one. A property test compares both. The layout of the columns is in three places (`record.py`, `columns.lua`,
`_measured`), which that test keeps equal.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Sequence
from importlib import resources
from typing import Any, Protocol

from smqrt.journal.arrow import batch_header, encode
from smqrt.journal.record import Flag, Row

TOPIC, SUBTOPIC, UID = 1, 2, 3
"""Kinds of names."""

log = logging.getLogger("smqrt")

_STAMP, _TOGGLE, _PUBLISH = 0, 1, 8  # 8 is SMQ's Publish; no other SMQ frame is recorded
_STAMPED = struct.Struct(">HBq")
_HEAD = struct.Struct(">HBIII")  # length, type, topic, publisher, subtopic
MAX_ROWS = 8192
MAX_BATCH_BYTES = 1 << 20
MAX_TEXT_BYTES = 512 << 10

Piece = bytes | memoryview


def stamp(ts_us: int) -> bytes:
    """Return the frame that sets the time of the frames before it: `ts_us`, microseconds since 1970, UTC."""
    return _STAMPED.pack(_STAMPED.size, _STAMP, ts_us)


def toggle(flags: int) -> bytes:
    """Return the frame that toggles `flags` (u8) for the frames after it."""
    return bytes((0, 4, _TOGGLE, flags))


class Columns(Protocol):
    """Collects frames until a batch is taken."""

    def append(self, data: bytes | memoryview, at: int) -> tuple[int, int, int]:
        """Add frames of `data` from `at` on.

        Returns `(at, kind, number)`: the position that was reached. `kind` is 0 at the end of `data` or when the batch
        is full. Otherwise it is the kind of a name that must be set with `name` first.
        """
        ...

    def name(self, kind: int, number: int, text: bytes | None) -> None:
        """Set the name of a topic, subtopic or publisher; None is stored as null."""
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
    """`Columns` in Python: the reference, and the fallback without LuaJIT."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str | None]] = {TOPIC: {}, SUBTOPIC: {0: None}, UID: {}}
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
            else:
                self._flags ^= data[at + 3]
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
        self._rows.append(Row(0, 0, topic, tid, subtopic, stid, ptid, uid, int(flags), payload, None))
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
        return len(rows), min(times), max(times), encode(rows)


class JitColumns:
    """`Columns` in LuaJIT.

    LuaJIT gets the address of the joined bytes, since a Lua string would be another copy, in new memory each time.
    """

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.journal").joinpath("columns.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        parts = chunk(MAX_ROWS, MAX_TEXT_BYTES, MAX_BATCH_BYTES)
        self._append, self._take, self.name, self.forget, self.server, *memory, self._keep = parts
        self._body, self._payloads = _memory(*memory[:2]), _memory(*memory[2:])

    def append(self, data: bytes | memoryview, at: int) -> tuple[int, int, int]:
        """See `Columns`."""
        found: tuple[int, int, int] = self._append(_address(data), len(data), at)
        return found

    def take(self, seq: int) -> tuple[int, int, int, list[bytes | memoryview]]:
        """See `Columns`; the pieces are valid until the next call."""
        rows, before, payloads, behind, ts_min, ts_max, *measures = self._take(seq)
        if not rows:
            return 0, 0, 0, []
        nulls, lengths = _measured(rows, *measures)
        body = self._body[:before], self._payloads[:payloads], self._body[before : before + behind]
        return rows, ts_min, ts_max, [batch_header(rows, nulls, lengths), *body]


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _address(data: bytes | memoryview) -> int | None:
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _measured(
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


def fastest_columns() -> Columns:
    """Return the fastest implementation on this machine; `SMQRT_KERNELS=pure` selects Python."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureColumns()
    try:
        return JitColumns()
    except Exception as error:
        log.info("LuaJIT is not available (%s); the journal's columns are built in Python", error)
        return PureColumns()
