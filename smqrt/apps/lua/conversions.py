"""Numbers as texts and texts as numbers, as Lua converts them, for the tables whose fields Python checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from smqrt.settings.options import Rule

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
