"""The crossing between Lua and Python: values, texts, errors, and the guard around every function that Lua may call.

A Python exception must never travel through lupa's C frames. The guard catches it, and the Lua shim around the
function raises it again as a Lua error at the line of the application that made the call (decision 0003).
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
from smqrt.settings.options import Rule

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


# ---- Numbers as texts and texts as numbers, as Lua converts them, for the tables whose fields Python checks.

_INTEGER = re.compile(r"[+-]?\d+")
_HEX_INTEGER = re.compile(r"([+-]?)0[xX]([0-9a-fA-F]+)")
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_HEX_FLOAT = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?\d+)?")
_WHITE = " \f\n\r\t\v"
_LONGEST = 200  # characters of a number, as in Lua


def number_of(text: str) -> int | float | None:
    """Returns the number that Lua reads in `text`; None when it reads none."""
    digits = text.strip(_WHITE)
    if len(digits) > _LONGEST:
        return None
    if _INTEGER.fullmatch(digits):
        whole = int(digits)
        return whole if -(1 << 63) <= whole < 1 << 63 else float(whole)
    if found := _HEX_INTEGER.fullmatch(digits):  # of 64 bits, what is above is cut off
        bits = int(found[1] + found[2], 16) & (1 << 64) - 1
        return bits - (1 << 64) if bits >> 63 else bits
    if _FLOAT.fullmatch(digits):
        return float(digits)
    try:
        return float.fromhex(digits) if _HEX_FLOAT.fullmatch(digits) else None
    except OverflowError:
        return None


def text_of(number: float) -> str:
    """Returns the text that Lua makes of a number: an integer's digits, a float with its point."""
    if isinstance(number, int):
        return str(number)
    digits = f"{number:.14g}"
    return f"{digits}.0" if digits.lstrip("-").isdecimal() else digits


def as_text(value: Any) -> Any:
    """Returns a number as its text, everything else as it is."""
    return text_of(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def as_number(value: Any) -> Any:
    """Returns the text of a number as that number, everything else as it is."""
    if not isinstance(value, str):
        return value
    number = number_of(value)
    return value if number is None else number


def for_options(known: Mapping[str, Field[object]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for options in the kinds that the options take.

    Args:
        known: see `smqrt.settings.options.options_of`.
        values: by the names of the options; other names keep their values.
    """
    return {
        name: _for_rule(known[name].metadata["rule"], value) if name in known else value
        for name, value in values.items()
    }


def _for_rule(rule: Rule[Any], value: Any) -> Any:
    if rule.kind in (int, float):
        return as_number(value)
    return as_text(value) if rule.kind is str else value


# ---- Tables as bytes, to cross between Python and Lua in one piece. The other half is lib/core/table_codec.lua.
#
# A value is a letter and what follows: "s" a string with its length, "i" an integer, "n" a float, "t" and "f" booleans,
# "m" a table with the number of its fields, then keys and values in turn. Lists are tables with the keys 1, 2, ...

Table = dict[Any, Any]
"""A table that was decoded: keys and values are bytes, bool, int, float or tables."""


def dump(value: object) -> bytes:
    """`value` as bytes; None as a field of a table is left out.

    Raises:
        TypeError: it is neither str, bytes, bool, int, float, list, tuple nor a mapping of such.
    """
    parts: list[bytes] = []
    _dump(value, parts)
    return b"".join(parts)


def _dump(value: object, parts: list[bytes]) -> None:
    if isinstance(value, str | bytes | bytearray):
        data = value.encode() if isinstance(value, str) else bytes(value)
        parts += (b"s", struct.pack(">I", len(data)), data)
    elif isinstance(value, bool):
        parts.append(b"t" if value else b"f")
    elif isinstance(value, int):
        parts.append(struct.pack(">cq", b"i", value))
    elif isinstance(value, float):
        parts.append(struct.pack(">cd", b"n", value))
    else:
        _dump_fields(value, parts)


def _dump_fields(value: Any, parts: list[bytes]) -> None:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
    fields = [(key, item) for key, item in pairs if item is not None]
    parts.append(struct.pack(">cI", b"m", len(fields)))
    for key, item in fields:
        _dump(key, parts)
        _dump(item, parts)


def dump_list(values: Iterable[object], breathe: Callable[[], object] = bool) -> bytes:
    """The same for a long list; `yield_if_due` is called after each value."""
    parts: list[bytes] = [b""]
    count = 0
    for count, value in enumerate(values, 1):
        _dump(count, parts)
        _dump(value, parts)
        breathe()
    parts[0] = struct.pack(">cI", b"m", count)
    return b"".join(parts)


def dump_packed(fields: Mapping[str, bytes]) -> bytes:
    """A table whose values are bytes of `dump` or `dump_list`."""
    parts = [struct.pack(">cI", b"m", len(fields))]
    for key, packed in fields.items():
        _dump(key, parts)
        parts.append(packed)
    return b"".join(parts)


def load(data: bytes) -> Table:
    """The inverse: strings as bytes, tables as dicts."""
    table: Table = _load(data, 0)[0]
    return table


def _load(data: bytes, at: int) -> tuple[Any, int]:
    kind, at = data[at : at + 1], at + 1
    if kind == b"s":
        end = at + 4 + int.from_bytes(data[at : at + 4])
        return data[at + 4 : end], end
    if kind == b"m":
        return _load_fields(data, at)
    if kind in b"tf":
        return kind == b"t", at
    return struct.unpack_from(">q" if kind == b"i" else ">d", data, at)[0], at + 8


def _load_fields(data: bytes, at: int) -> tuple[dict[Any, Any], int]:
    count, at = int.from_bytes(data[at : at + 4]), at + 4
    fields = {}
    for _ in range(count):
        key, at = _load(data, at)
        fields[key], at = _load(data, at)
    return fields, at
