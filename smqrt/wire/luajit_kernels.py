"""The kernels of `wire/kernels.py` in LuaJIT, which lupa's wheel ships: no compiler needed, chosen when it is there."""

from __future__ import annotations

import ctypes
import logging
import os
from importlib import resources
from typing import Any

from smqrt.wire.kernels import BUFFER_BYTES, MAX_PARTITIONS, MAX_RUNS, Kernels, PureKernels

log = logging.getLogger("smqrt")

_TRIAL, _FOUND = b"\x00\x05one\x00\x05two", ((2, 10, False), 5, 2)
"""Two frames, and what `scan`, `ends` and `count` make of them."""


class JitKernels:
    """The kernels as compiled LuaJIT loops. One per process is enough: a receive is worked off before the next."""

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
        self.ends, self.frames = _u32_array(ends_at, MAX_RUNS), _u32_array(frames_at, MAX_RUNS)
        self.partitioned = (ctypes.c_char * BUFFER_BYTES).from_address(partitioned_at)
        self.partition_ids = _u32_array(partition_ids_at, MAX_PARTITIONS)
        self.partition_ends = _u32_array(partition_ends_at, MAX_PARTITIONS)

    def count(self, run: bytes) -> int:
        """See `Kernels.count`."""
        return self.measure(run)[0]

    def measure(self, run: bytes | memoryview) -> tuple[int, int]:
        """See `Kernels.measure`."""
        address = _address(run) if isinstance(run, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(run))
        found: tuple[int, int] = self._measure(address, len(run))
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
        kernels = JitKernels()
        _try(kernels)
        return kernels
    except Exception as error:
        log.info("LuaJIT kernels are not available (%s); the Python ones serve", error)
        return PureKernels()


def _try(kernels: Kernels) -> None:
    """Raises ValueError when the loops, which take and give addresses, see other bytes than Python does."""
    kernels.view[: len(_TRIAL)] = _TRIAL
    found = kernels.scan(len(_TRIAL), 0), kernels.ends[0], kernels.count(_TRIAL)
    if found != _FOUND:
        raise ValueError(f"they find {found} in place of {_FOUND}")
