"""The kernels of `wire/kernels.py` in LuaJIT, which lupa's wheel ships: no compiler needed, chosen when it is there."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from smqrt.wire.kernels import BUFFER_BYTES, MAX_PARTITIONS, MAX_RUNS, Kernels, PureKernels

log = logging.getLogger("smqrt")

COLUMN_ROWS = 8192
"""The most rows of one journal batch."""
COLUMN_TEXT_BYTES, COLUMN_PAYLOAD_BYTES = 512 << 10, 1 << 20

Header = Callable[[int, tuple[int, ...], Sequence[int]], bytes]


class JitKernels:
    """The kernels as compiled LuaJIT loops. One per process is enough: a receive is worked off before the next."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.net").joinpath("jit.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        self.scan, self.unmask, self.encode, *others = chunk(BUFFER_BYTES)
        self.partition_table, self.partition, self._count, *addresses, self._keep = others
        buffer_at, ends_at, partitioned_at, partition_ids_at, partition_ends_at = addresses
        self.chars = (ctypes.c_char * BUFFER_BYTES).from_address(buffer_at)
        self.view = memoryview(self.chars).cast("B")
        self.ends = _u32_array(ends_at, MAX_RUNS)
        self.partitioned = (ctypes.c_char * BUFFER_BYTES).from_address(partitioned_at)
        self.partition_ids = _u32_array(partition_ids_at, MAX_PARTITIONS)
        self.partition_ends = _u32_array(partition_ends_at, MAX_PARTITIONS)

    def count(self, run: bytes) -> int:
        """See `Kernels.count`."""
        found: int = self._count(_address(run), len(run))
        return found


def _address(data: bytes) -> int | None:
    """Where the bytes are: for Lua a string of its own would be a copy in new memory."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


def _u32_array(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def load() -> Kernels:
    """The fastest kernels this machine has; `SMQRT_KERNELS=pure` asks for the Python ones."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureKernels()
    try:
        return JitKernels()
    except Exception as error:
        log.info("LuaJIT kernels are not available (%s); the Python ones serve", error)
        return PureKernels()


class JitColumns:
    """Recorded frames become the columns of a journal batch, as compiled LuaJIT loops.

    The twin of `smqrt.journal.columns.PureColumns`, which says what the methods do.

    Args:
        header: makes the header of a batch from its rows, the nulls of each column and the bytes of each buffer.
    """

    def __init__(self, header: Header) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.net").joinpath("columns.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        parts = chunk(COLUMN_ROWS, COLUMN_TEXT_BYTES, COLUMN_PAYLOAD_BYTES)
        self._append, self._take, self.name, self.forget, self.server, address, room, self._keep = parts
        self._body = memoryview((ctypes.c_char * room).from_address(address)).cast("B")
        self._header = header

    def append(self, data: bytes, at: int) -> tuple[int, int, int]:
        """See `PureColumns.append`."""
        found: tuple[int, int, int] = self._append(_address(data), len(data), at)
        return found

    def take(self, seq: int) -> tuple[int, int, int, list[bytes | memoryview]]:
        """See `PureColumns.take`; the pieces are good until the next call."""
        rows, size, ts_min, ts_max, *measures = self._take(seq)
        if not rows:
            return 0, 0, 0, []
        nulls, lengths = _measured(rows, *measures)
        return rows, ts_min, ts_max, [self._header(rows, nulls, lengths), self._body[:size]]


def _measured(
    rows: int, no_topic: int, no_subtopic: int, no_uid: int, topic: int, subtopic: int, uid: int, payload: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The nulls of each column and the bytes of each buffer, in the order of the journal's columns."""
    bits, offsets, longs = (rows + 7) >> 3, (rows + 1) * 4, rows * 8
    topics = bits if no_topic else 0, offsets, topic
    subtopics = bits if no_subtopic else 0, offsets, subtopic
    uids = bits if no_uid else 0, offsets, uid
    seq_ts = 0, longs, 0, longs
    tail = 0, rows * 4, 0, offsets, payload, bits, offsets, 0
    lengths = (*seq_ts, *topics, 0, longs, *subtopics, 0, longs, 0, longs, *uids, *tail)
    return (0, 0, no_topic, 0, no_subtopic, 0, 0, no_uid, 0, 0, rows), lengths


def columns(header: Header) -> JitColumns | None:
    """The compiled columns, or None where LuaJIT is not available or `SMQRT_KERNELS=pure` asks for the Python ones."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return None
    try:
        return JitColumns(header)
    except Exception as error:
        log.info("LuaJIT is not available (%s); the journal's columns are made in Python", error)
        return None
