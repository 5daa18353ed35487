"""How what an MQTT client tells reaches Lua: called at once, or taken by the activity that runs the client."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from gevent import get_hub

from smqrt.broker.deferred import Deferred
from smqrt.lua import table_codec
from smqrt.lua.bridge import LuaError, fail
from smqrt.lua.vm import Vm
from smqrt.net.callbacks import ROOM_JOBS, Callbacks

log = logging.getLogger("smqrt.mqtt")

_NAMES = {"pub": "onpub", "ack": "onsuback", "status": "onstatus"}
_MAX_BYTES = 4 << 20  # of messages that wait; then the connection is not read
_JOBS_PER_TAKE = 4  # six values each; what crosses to Lua at once is limited


class LuaCall:
    """A callback in Lua.

    Args:
        event_ref: the Lua function for all that happens.
        number: of the client.
        kind: "pub", "ack" or "status".
        ref: of the application's function, None for that of the client; given back when this is unused.
    """

    __slots__ = ("_event_ref", "_kind", "_number", "_ref", "_vm")

    def __init__(self, vm: Vm, event_ref: int, number: int, kind: str, ref: int | None) -> None:
        self._vm, self._event_ref, self._number = vm, event_ref, number
        self._kind, self._ref = kind.encode(), ref

    def __call__(self, *arguments: Any) -> Any:
        """Call it in this greenlet; the first value it returns, NotImplemented after an error, which is logged."""
        try:
            values = self._vm.run(self._event_ref, self._number, *self.values(*arguments))
        except LuaError as error:
            log.error("the callback %s of an MQTT client failed: %s", _NAMES[self._kind.decode()], error)
            return NotImplemented
        return values[0] if values else None

    def values(self, first: Any, second: Any, third: Any, fourth: Any = None) -> tuple[Any, ...]:
        """Kind and reference, then the four arguments of an event: properties are flat, None when there are none."""
        if self._kind == b"pub":
            return b"pub", self._ref, first.encode(), second, table_codec.dump(third) if third else None, fourth
        if self._kind == b"ack":
            return b"ack", self._ref, first.encode(), second, table_codec.dump(third) if third else None, None
        return b"status", self._ref, first, second, third, None

    def size_bytes(self, arguments: tuple[Any, ...]) -> int:
        """Of the message among the arguments."""
        return len(arguments[1]) if self._kind == b"pub" else 0

    def __del__(self) -> None:
        if self._ref is not None:
            get_hub().loop.run_callback(self._vm.free, self._ref)


class Inbox(Callbacks):
    """Callbacks that wait until an activity takes them. What is no `LuaCall` runs at once."""

    def __init__(self) -> None:
        super().__init__(log)
        self._calls: deque[tuple[LuaCall, tuple[Any, ...]]] = deque()
        self._taking: Deferred[tuple[Any, ...]] | None = None
        self._word: str | None = None
        self._bytes = 0

    def post(self, fn: Callable[..., Any], *args: Any) -> None:
        """See `Callbacks`."""
        if not isinstance(fn, LuaCall):
            fn(*args)
            return
        self._calls.append((fn, args))
        self._bytes += fn.size_bytes(args)
        if len(self._calls) == ROOM_JOBS or self._bytes > _MAX_BYTES:
            self._room.clear()
        self._answer()

    def end(self, word: str) -> None:
        """Nothing more will come."""
        self._word = word
        self._answer()

    def take(self) -> Any:
        """Up to four calls, six values each; nil and a word when nothing more will come. Parks until there is one."""
        if self._calls or self._word is not None:
            return self._values()
        self._taking = Deferred()
        return self._taking

    def _answer(self) -> None:
        if self._taking is not None:
            get_hub().loop.run_callback(self._hand_over, self._taking)
            self._taking = None

    def _hand_over(self, taking: Deferred[tuple[Any, ...]]) -> None:
        if not taking.done:
            taking.resolve(self._values())

    def _values(self) -> tuple[Any, ...]:
        if not self._calls:
            return fail(self._word or "socketclosed")
        found: tuple[Any, ...] = ()
        for _ in range(min(_JOBS_PER_TAKE, len(self._calls))):
            call, args = self._calls.popleft()
            self._bytes -= call.size_bytes(args)
            found += call.values(*args)
        if len(self._calls) < ROOM_JOBS // 2 and self._bytes <= _MAX_BYTES // 2:
            self._room.set()
        return found
