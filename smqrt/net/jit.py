"""The kernels of `wire/kernels.py` in LuaJIT, which lupa's wheel ships: no compiler needed, chosen when it is there."""

from __future__ import annotations

import ctypes
import logging
import os
from importlib import resources
from typing import Any

from smqrt.wire.kernels import BUFFER_BYTES, MAX_LANES, MAX_RUNS, Kernels, PureKernels

log = logging.getLogger("smqrt")


class JitKernels:
    """The kernels as compiled LuaJIT loops. One per process is enough: a receive is worked off before the next."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.net").joinpath("jit.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        self.scan, self.unmask, self.encode, self.lanes, self.spread, *addresses, self._keep = chunk(BUFFER_BYTES)
        buffer_at, ends_at, shares_at, lanes_at, share_ends_at = addresses
        self.chars = (ctypes.c_char * BUFFER_BYTES).from_address(buffer_at)
        self.view = memoryview(self.chars).cast("B")
        self.ends = _u32_array(ends_at, MAX_RUNS)
        self.shares = (ctypes.c_char * BUFFER_BYTES).from_address(shares_at)
        self.share_lanes = _u32_array(lanes_at, MAX_LANES)
        self.share_ends = _u32_array(share_ends_at, MAX_LANES)


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
