"""Printable text: what strangers sent, for a terminal or a log, without the characters that steer a terminal."""

from __future__ import annotations

import json
import logging
import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
_DISPLACING = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"  # turn the direction, or break the line
_UNSAFE = f"{_CONTROLS}{_DISPLACING}\ud800-\udfff"
_IN_LINES = re.compile(f"[{_UNSAFE}]")
_IN_A_LINE = re.compile(f"[\n{_UNSAFE}]")
_SHORT = {"\n": "\\n", "\r": "\\r"}


def printable(text: str | bytes, lines: bool = False) -> str:
    r"""Gives text that is safe to print: what steers a terminal stands there as `\x1b`, `\n` or `\u202e`.

    Args:
        text: bytes are taken as UTF-8; those that are none become `\xff`.
        lines: leave line feeds as they are.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, text)


def json_line(value: object) -> str:
    r"""Gives a value as JSON in one line that is safe to print: the same characters stand there as `\u001b`.

    Raises:
        TypeError: JSON has no such value; `bytes` and others become their `repr`.
    """
    return _IN_A_LINE.sub(_json_escaped, json.dumps(value, ensure_ascii=False, default=repr))


class PrintableFormatter(logging.Formatter):
    """Makes log records safe to print; the lines of tracebacks stay lines."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return printable(super().format(record), lines=True)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _json_escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
