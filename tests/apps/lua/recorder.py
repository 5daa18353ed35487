"""The Python half that the Lua tests use."""

from __future__ import annotations

from typing import Any

from smqrt.apps.lua.vm import Vm


class Recorder:
    """The Python half that the tests give to Lua as table `test`."""

    def __init__(self, vm: Vm) -> None:
        self.vm = vm
        self.seen: list[Any] = []

    def record(self, *values: Any) -> None:
        """Keep what Lua says."""
        self.seen.append(values[0] if len(values) == 1 else values)

    def back(self, ref: int, *values: Any) -> Any:
        """Call into Lua from inside a call of Lua."""
        result = self.vm.call(ref, *values)
        return result if type(result) is tuple else b"pending"
