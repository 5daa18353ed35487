"""Conversion of values, texts and errors between Lua and Python.

A Python exception must never pass through lupa's C frames. A guard around each function that Lua calls catches it, and
the Lua half raises it again as a Lua error at the calling line of the application (decision 0003).
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from functools import wraps
from typing import Any

from gevent import get_hub

from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, ClosedError, JournalError, SmqrtError, StreamError

log = logging.getLogger("smqrt.lua")

LuaValue = None | bool | int | float | bytes
"""Values that cross, in both directions (decision 0003)."""

LuaValues = tuple[LuaValue, ...]

LuaResult = LuaValue | LuaValues | Deferred[Any]
"""Result of a function that Lua calls: a value, several values, or a Deferred that parks the activity."""

LuaOptions = dict[str, Any]
"""Options by name; the Lua half has checked the types of their values."""

Function = Callable[..., LuaResult]
"""A function that Lua calls. The Lua half checks its arguments."""

_TRACEBACK = "\nstack traceback:\n"


class LuaError(SmqrtError):
    """An uncaught error of an application's Lua code.

    Args:
        text: the message with file and line, followed by Lua's traceback.
    """

    def __init__(self, text: LuaValue | str) -> None:
        super().__init__(text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text))

    @property
    def message(self) -> str:
        """The message without the traceback."""
        return str(self).partition(_TRACEBACK)[0]

    @property
    def traceback(self) -> str:
        """The lines of Lua's traceback; empty when there is none."""
        return str(self).partition(_TRACEBACK)[2]


class Op:
    """A Python function that Lua calls by yielding the Op: it runs without Lua on the C stack, so it may block.

    An Op is not callable, so that Lua code can only yield it.

    Args:
        fn: the function.
        parks: whether `fn` never blocks; it may return a `Deferred`, whose wait needs no greenlet.
        name: the name of the call, for reports of waiting activities.
    """

    __slots__ = ("fn", "name", "parks")

    def __init__(self, fn: Function, parks: bool = False, name: str = "") -> None:
        self.fn = fn
        self.parks = parks
        self.name = name


def encoded(value: LuaValue | str) -> LuaValue:
    """Return a value for Lua: text as UTF-8 bytes, other values unchanged."""
    return utf8(value) if isinstance(value, str) else value


def fail(word: str, *more: LuaValue | str) -> LuaValues:
    """Return `nil, word, ...`, with which the API reports errors of the environment (spec: bas-api §15)."""
    return (None, *map(encoded, (word, *more)))


def guarded(fn: Function, failure: object) -> Callable[..., object]:
    """Wrap a function so that an exception becomes the return values `failure, message`.

    Args:
        fn: the function.
        failure: the marker that the Lua half recognizes.
    """

    def call(*args: LuaValue) -> object:
        try:
            return fn(*args)
        except BaseException as error:
            return failure, error_text(error, fn)

    return call


def error_text(error: BaseException, fn: Callable[..., object]) -> bytes:
    """Return the message of the Lua error for an exception of `fn`; log exceptions that indicate a bug."""
    if isinstance(error, ArgumentError | ClosedError | JournalError | LuaError):
        return str(error).encode("utf-8", "surrogateescape")
    if not isinstance(error, Exception):
        # Ctrl-C and SystemExit belong to the main greenlet, which can't run while Lua is on the C stack.
        hub = get_hub()
        hub.loop.run_callback(hub.handle_error, None, type(error), error, error.__traceback__)
    log.error("internal error in %s", getattr(fn, "__qualname__", fn), exc_info=error)
    return f"internal error: {type(error).__name__}: {error}".encode("utf-8", "replace")


def methods(binding: object, names: str, wrapper: Callable[[Function], Function] | None = None) -> dict[str, Function]:
    """Return the methods of a binding that its Lua half calls, by name.

    Args:
        binding: the binding.
        names: the names, separated by spaces.
        wrapper: wraps each of them.
    """
    found = {name: getattr(binding, name) for name in names.split()}
    return {name: wrapper(function) for name, function in found.items()} if wrapper else found


def with_error_words(function: Function) -> Function:
    """Wrap a function so that a StreamError becomes nil, the error word and the details, if any."""

    @wraps(function)
    def call(*args: LuaValue) -> LuaResult:
        try:
            return function(*args)
        except StreamError as error:
            return fail(error.word, error.detail) if error.detail else fail(error.word)

    return call


def address(host: str, port: int) -> tuple[bytes, int, bool]:
    """Return an address for Lua: the text, the port, whether it is IPv6."""
    return host.encode(), port, ":" in host


def options_of(names_and_values: LuaValues) -> LuaOptions:
    """Return the options that Lua passed as alternating names and values."""
    pairs = zip(names_and_values[::2], names_and_values[1::2], strict=True)
    return {from_latin1(name): value for name, value in pairs if isinstance(name, bytes)}


def utf8(text: str) -> bytes:
    """Return the bytes of a path or parameter; invalid UTF-8 that `from_utf8` decoded is restored."""
    return text.encode("utf-8", "surrogateescape")


def from_utf8(data: bytes) -> str:
    """The inverse of `utf8`."""
    return data.decode("utf-8", "surrogateescape")


def latin1(text: str) -> bytes:
    """Return the bytes of a header field."""
    return text.encode("latin-1", "replace")


def from_latin1(data: bytes) -> str:
    """The inverse of `latin1`: UTF-8 in a header field passes unchanged."""
    return data.decode("latin-1")


# ---- Lua's conversions between numbers and texts, for tables whose fields Python checks

_INTEGER = re.compile(r"[+-]?\d+")
_HEX_INTEGER = re.compile(r"([+-]?)0[xX]([0-9a-fA-F]+)")
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_HEX_FLOAT = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?\d+)?")
_WHITE = " \f\n\r\t\v"
_MAX_NUMBER_CHARACTERS = 200  # as in Lua


def number_of(text: str) -> int | float | None:
    """Return the number that Lua reads from a string; None when it is not a number."""
    digits = text.strip(_WHITE)
    if len(digits) > _MAX_NUMBER_CHARACTERS:
        return None
    if _INTEGER.fullmatch(digits):
        whole = int(digits)
        return whole if -(1 << 63) <= whole < 1 << 63 else float(whole)
    if found := _HEX_INTEGER.fullmatch(digits):  # Lua keeps the lowest 64 bits
        bits = int(found[1] + found[2], 16) & (1 << 64) - 1
        return bits - (1 << 64) if bits >> 63 else bits
    if _FLOAT.fullmatch(digits):
        return float(digits)
    try:
        return float.fromhex(digits) if _HEX_FLOAT.fullmatch(digits) else None
    except OverflowError:
        return None


def text_of(number: float) -> str:
    """Return Lua's text of a number: an integer's digits, a float with its decimal point."""
    if isinstance(number, int):
        return str(number)
    digits = f"{number:.14g}"
    return f"{digits}.0" if digits.lstrip("-").isdecimal() else digits


def as_text(value: Any) -> Any:
    """Return the text of a number, other values unchanged."""
    return text_of(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def as_number(value: Any) -> Any:
    """Return the number of a string that is one, other values unchanged."""
    if not isinstance(value, str):
        return value
    number = number_of(value)
    return value if number is None else number


def for_options(known: Mapping[str, Field[object]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options, converted to the types of the options as Lua would convert them.

    Args:
        known: see `smqrt.settings.option_types.options_of`.
        values: values by option name; values of unknown options stay unchanged.
    """
    converted = {}
    for name, value in values.items():
        kind = known[name].metadata["rule"].kind if name in known else None
        converted[name] = as_number(value) if kind in (int, float) else as_text(value) if kind is str else value
    return converted


# ---- Tables as bytes, which cross between Python and Lua in one piece. The Lua half is lib/core/table_codec.lua.
#
# A value is a letter and its content: "s" length and bytes of a string, "i" an integer, "n" a float, "t" true,
# "f" false, "m" a table: the number of fields, then alternating keys and values. Lists have the keys 1, 2, ...

Table = dict[Any, Any]
"""A decoded table: keys and values are bytes, bool, int, float or tables."""


def dump(value: object) -> bytes:
    """Return a value as bytes, without fields of tables whose value is None.

    Raises:
        TypeError: it is neither str, bytes, bool, int, float, list, tuple nor a mapping of these.
    """
    parts: list[bytes] = []
    _dump(value, parts)
    return b"".join(parts)


def _dump(value: object, parts: list[bytes]) -> None:
    if isinstance(value, str | bytes | bytearray):
        data = value.encode() if isinstance(value, str) else bytes(value)
        parts += (b"s", struct.pack(">I", len(data)), data)
    elif isinstance(value, bool):  # before int, of which bool is a subclass
        parts.append(b"t" if value else b"f")
    elif isinstance(value, int):
        parts.append(struct.pack(">cq", b"i", value))
    elif isinstance(value, float):
        parts.append(struct.pack(">cd", b"n", value))
    else:
        table: Any = value
        pairs = table.items() if isinstance(table, Mapping) else enumerate(table, 1)
        fields = [(key, item) for key, item in pairs if item is not None]
        parts.append(struct.pack(">cI", b"m", len(fields)))
        for key, item in fields:
            _dump(key, parts)
            _dump(item, parts)


def dump_list(values: Iterable[object], yield_if_due: Callable[[], object] = bool) -> bytes:
    """As `dump` for a long list; calls `yield_if_due` after each value."""
    parts: list[bytes] = [b""]
    count = 0
    for count, value in enumerate(values, 1):
        _dump(count, parts)
        _dump(value, parts)
        yield_if_due()
    parts[0] = struct.pack(">cI", b"m", count)
    return b"".join(parts)


def dump_packed(fields: Mapping[str, bytes]) -> bytes:
    """Return a table whose values are results of `dump` or `dump_list`."""
    parts = [struct.pack(">cI", b"m", len(fields))]
    for key, packed in fields.items():
        _dump(key, parts)
        parts.append(packed)
    return b"".join(parts)


def load(data: bytes) -> Table:
    """Return the value of `dump`: strings as bytes, tables as dicts."""
    table: Table = _load(data, 0)[0]
    return table


def _load(data: bytes, at: int) -> tuple[Any, int]:
    kind, at = data[at : at + 1], at + 1
    if kind == b"s":
        end = at + 4 + int.from_bytes(data[at : at + 4])
        return data[at + 4 : end], end
    if kind == b"m":
        count, at = int.from_bytes(data[at : at + 4]), at + 4
        fields = {}
        for _ in range(count):
            key, at = _load(data, at)
            fields[key], at = _load(data, at)
        return fields, at
    if kind in b"tf":
        return kind == b"t", at
    return struct.unpack_from(">q" if kind == b"i" else ">d", data, at)[0], at + 8
