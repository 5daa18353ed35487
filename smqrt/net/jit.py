"""The kernels of `wire/kernels.py` in LuaJIT, which lupa's wheel ships: no compiler needed, chosen when it is there."""

from __future__ import annotations

import ctypes
import logging
import os
from importlib import resources
from typing import Any

from smqrt.wire.kernels import BUFFER_BYTES, Kernels, PureKernels

log = logging.getLogger("smqrt")


class JitKernels:
    """The kernels as compiled LuaJIT loops. One per process is enough: a receive is worked off before the next."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.net").joinpath("jit.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        self.scan, self.unmask, self.encode, at, ends_at, self._keep = chunk(BUFFER_BYTES)
        self.chars = (ctypes.c_char * BUFFER_BYTES).from_address(at)
        self.view = memoryview(self.chars).cast("B")
        self.ends = memoryview((ctypes.c_uint32 * (BUFFER_BYTES // 3 + 1)).from_address(ends_at)).cast("B").cast("I")


def load() -> Kernels:
    """The fastest kernels this machine has; `SMQRT_KERNELS=pure` asks for the Python ones."""
    if os.environ.get("SMQRT_KERNELS") == "pure":
        return PureKernels()
    try:
        return JitKernels()
    except Exception as error:
        log.info("LuaJIT kernels are not available (%s); the Python ones serve", error)
        return PureKernels()
