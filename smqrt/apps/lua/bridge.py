"""The crossing between Lua and Python: values, texts, errors, and the guard around every function that Lua may call.

A Python exception must never travel through lupa's C frames. The guard catches it, and the Lua shim around the
function raises it again as a Lua error at the line of the application that made the call (decision 0003).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from gevent import get_hub

from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, ClosedError, JournalError, SmqrtError, StreamError

log = logging.getLogger("smqrt.lua")

LuaValue = None | bool | int | float | bytes
"""All that crosses, in both directions (decision 0003)."""

LuaValues = tuple[LuaValue, ...]

LuaResult = LuaValue | LuaValues | Deferred[Any]
"""The answer of a function that Lua calls: a value, several, or what parks the activity until one of these comes."""

LuaOptions = dict[str, Any]
"""Options by name; the Lua half has checked what kind of value each of them is."""

Function = Callable[..., LuaResult]
"""A function that Lua calls. Its Lua half checks the arguments."""

_TRACEBACK = "\nstack traceback:\n"


class LuaError(SmqrtError):
    """An error that application Lua raised and did not catch.

    Args:
        text: the message with the author's file and line, and Lua's traceback below it.
    """

    def __init__(self, text: LuaValue | str) -> None:
        super().__init__(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))

    @property
    def message(self) -> str:
        """The message alone."""
        return str(self).partition(_TRACEBACK)[0]

    @property
    def traceback(self) -> str:
        """The lines of Lua's traceback, empty when there is none."""
        return str(self).partition(_TRACEBACK)[2]


class Op:
    """A Python function that Lua reaches by yielding it: it runs with no Lua on the C stack, so it may block.

    Not callable on purpose: Lua code that gets hold of one can do nothing with it but yield it.

    parks: `fn` never blocks; it may answer a `Deferred`, and the activity needs no greenlet while it waits.
    name: what an activity waits in, for reports.
    """

    __slots__ = ("fn", "name", "parks")

    def __init__(self, fn: Function, parks: bool = False, name: str = "") -> None:
        self.fn = fn
        self.parks = parks
        self.name = name


def encoded(value: LuaValue | str) -> LuaValue:
    """`value` as it may cross to Lua: text as UTF-8 bytes, everything else unchanged."""
    return utf8(value) if isinstance(value, str) else value


def fail(word: str, *more: LuaValue | str) -> LuaValues:
    """Return what Lua sees as `nil, word, ...`: how the API reports what the world did (spec: bas-api §15)."""
    return (None, *map(encoded, (word, *more)))


def guarded(fn: Function, failure: object) -> Callable[..., object]:
    """Return `fn` so that it never raises: an exception becomes the return values `failure, message`.

    failure: the marker that the Lua shim recognises.
    """

    def call(*args: LuaValue) -> object:
        try:
            return fn(*args)
        except BaseException as error:
            return failure, error_text(error, fn)

    return call


def error_text(error: BaseException, fn: Callable[..., object]) -> bytes:
    """The message of the Lua error that stands for `error`, raised by `fn`; what is nobody's expected error is
    logged."""
    if isinstance(error, ArgumentError | ClosedError | JournalError | LuaError):
        return str(error).encode("utf-8", "surrogateescape")
    if not isinstance(error, Exception):
        _hand_to_main_greenlet(error)
    log.error("internal error in %s", getattr(fn, "__qualname__", fn), exc_info=error)
    return f"internal error: {type(error).__name__}: {error}".encode("utf-8", "replace")


def _hand_to_main_greenlet(error: BaseException) -> None:
    """Ctrl-C and SystemExit are for the main greenlet, but not while Lua is on the C stack: in the next turn of the
    loop."""
    hub = get_hub()
    hub.loop.run_callback(hub.handle_error, None, type(error), error, error.__traceback__)


def methods(binding: object, names: str, wrapper: Callable[[Function], Function] | None = None) -> dict[str, Function]:
    """The methods of a binding that its Lua half calls.

    Args:
        names: with spaces in between.
        wrapper: what each of them is wrapped in.
    """
    found = {name: getattr(binding, name) for name in names.split()}
    return {name: wrapper(function) for name, function in found.items()} if wrapper else found


def with_words(function: Function) -> Function:
    """`function` with failures of a connection as Lua expects them: nil, an error word and the details, if any."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        try:
            return function(*args)
        except StreamError as error:
            return fail(error.word, error.detail) if error.detail else fail(error.word)

    return call


def address(host: str, port: int) -> tuple[bytes, int, bool]:
    """An address as Lua gets it: the text, the port, whether it is IPv6."""
    return host.encode(), port, ":" in host


def options_of(names_and_values: LuaValues) -> LuaOptions:
    """Options that Lua passed as names and values in turn."""
    pairs = zip(names_and_values[::2], names_and_values[1::2], strict=True)
    return {from_latin1(name): value for name, value in pairs if isinstance(name, bytes)}


def utf8(text: str) -> bytes:
    """The bytes of a path or parameter; bytes that were no UTF-8 come back as they were."""
    return text.encode("utf-8", "surrogateescape")


def from_utf8(data: bytes) -> str:
    """The inverse of `utf8`."""
    return data.decode("utf-8", "surrogateescape")


def latin1(text: str) -> bytes:
    """The bytes of a header field."""
    return text.encode("latin-1", "replace")


def from_latin1(data: bytes) -> str:
    """The inverse of `latin1`: UTF-8 in a header field passes unchanged."""
    return data.decode("latin-1")
