"""Kernels of `kernels.py` in LuaJIT.

LuaJIT is part of lupa's wheel, so no compiler is needed. `load` chooses these kernels when they work.
"""

from __future__ import annotations

import ctypes
import logging
import os
from importlib import resources
from typing import Any

from smqrt.wire.kernels import BUFFER_BYTES, MAX_PARTITIONS, MAX_RUNS, Kernels, PureKernels

log = logging.getLogger("smqrt")

_TRIAL, _FOUND = b"\x00\x05one\x00\x05two", ((2, 10, False), 5, 2)
"""Two frames, and the results of `scan`, `ends` and `count` for them."""


class JitKernels:
    """Kernels as compiled LuaJIT loops. One process has one: a receive is processed before the next one."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.wire").joinpath("luajit_kernels.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        self.scan, self.unmask, self.encode, *others = chunk(BUFFER_BYTES)
        self.partition_table, self.partition, self._measure, *addresses, self._keep = others
        buffer_at, ends_at, frames_at, partitioned_at, partition_ids_at, partition_ends_at = addresses
        self.chars = (ctypes.c_char * BUFFER_BYTES).from_address(buffer_at)
        self.view = memoryview(self.chars).cast("B")
        self.ends, self.frames = _u32_view(ends_at, MAX_RUNS), _u32_view(frames_at, MAX_RUNS)
        self.partitioned = (ctypes.c_char * BUFFER_BYTES).from_address(partitioned_at)
        self.partition_ids = _u32_view(partition_ids_at, MAX_PARTITIONS)
        self.partition_ends = _u32_view(partition_ends_at, MAX_PARTITIONS)

    def count(self, batch: bytes) -> int:
        """See `Kernels.count`."""
        return self.measure(batch)[0]

    def measure(self, batch: bytes | memoryview) -> tuple[int, int]:
        """See `Kernels.measure`."""
        address = _address(batch) if isinstance(batch, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(batch))
        found: tuple[int, int] = self._measure(address, len(batch))
        return found


def _address(data: bytes) -> int | None:
    """Return the address of the bytes: passed as a string, Lua would copy them."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


def _u32_view(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def load() -> Kernels:
    """Return the fastest kernels that work on this machine; `SMQRT_KERNELS=pure` selects those in Python."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureKernels()
    try:
        kernels = JitKernels()
        kernels.view[: len(_TRIAL)] = _TRIAL  # checks that Lua sees the same bytes at the addresses as Python does
        found = kernels.scan(len(_TRIAL), 0), kernels.ends[0], kernels.count(_TRIAL)
        if found != _FOUND:
            raise ValueError(f"they return {found} instead of {_FOUND}")
        return kernels
    except Exception as error:
        log.info("LuaJIT kernels are not available (%s); the Python kernels are used", error)
        return PureKernels()
