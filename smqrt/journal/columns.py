"""From recorded frames to the columns of a batch, in Python; `smqrt.net.jit.JitColumns` is the LuaJIT twin.

What is recorded is a stream of Publish frames, exactly as they arrived, with two frames of the recorder's own between
them: *stamp* gives everything before it, back to the stamp before, its time; *toggle* switches flags on or off for what
comes after it. So recording a message is appending its bytes to a list.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from smqrt.journal.arrow import encode
from smqrt.journal.record import Flag, Row

TOPIC, SUBTOPIC, UID = 1, 2, 3
"""Kinds of names."""

_STAMP, _TOGGLE, _PUBLISH = 0, 1, 8
_STAMPED = struct.Struct(">HBq")
_HEAD = struct.Struct(">HBIII")
MAX_ROWS = 8192
MAX_BATCH_BYTES = 1 << 20

Piece = bytes | memoryview


def stamp(ts_us: int) -> bytes:
    """The frame that gives what was recorded before it the time `ts_us` (microseconds since 1970, UTC)."""
    return _STAMPED.pack(_STAMPED.size, _STAMP, ts_us)


def toggle(flags: int) -> bytes:
    """The frame that switches `flags` (u8) for what is recorded after it."""
    return bytes((0, 4, _TOGGLE, flags))


class Columns(Protocol):
    """Collects frames until a batch is taken."""

    def append(self, data: bytes, at: int) -> tuple[int, int, int]:
        """Take frames of `data` from `at` on.

        Returns `(at, kind, number)`: where it stopped. `kind` is 0 at the end of `data` or when the batch is full, else
        the kind of a name that `name` has to give first.
        """
        ...

    def name(self, kind: int, number: int, text: bytes | None) -> None:
        """Give the name of a topic, sub-topic or publisher; None is stored as null."""
        ...

    def forget(self, kind: int, number: int) -> None:
        """Ask for this name again next time."""
        ...

    def server(self, etid: int) -> None:
        """Tell the ETID of the hub's own client."""
        ...

    def take(self, seq: int) -> tuple[int, int, int, Sequence[Piece]]:
        """The rows collected so far as a batch that begins with `seq`: `(rows, first us, last us, pieces)`."""
        ...


class PureColumns:
    """`Columns` in Python: the reference, and what serves where LuaJIT is not available."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str | None]] = {TOPIC: {}, SUBTOPIC: {0: None}, UID: {}}
        self._rows: list[Row] = []
        self._bytes = self._flags = 0
        self._stamped = 0
        self._server = -1

    def append(self, data: bytes, at: int) -> tuple[int, int, int]:
        """See `Columns`."""
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
