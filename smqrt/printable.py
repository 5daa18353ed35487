"""Escaping of control characters in untrusted text, for terminals and logs."""

from __future__ import annotations

import json
import logging
import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
# Marks of text direction and line breaks: they could move or hide other text of a line.
_LAYOUT = "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
_UNSAFE = f"{_CONTROLS}{_LAYOUT}\ud800-\udfff"  # surrogates can't be encoded
_IN_LINES = re.compile(f"[{_UNSAFE}]")
_IN_A_LINE = re.compile(f"[\n{_UNSAFE}]")
_SHORT = {"\n": "\\n", "\r": "\\r"}


def printable(text: str | bytes, lines: bool = False) -> str:
    r"""Return text that is safe to print, with control characters as `\x1b`, `\n` or `\u202e`.

    Args:
        text: the text; bytes are decoded as UTF-8, and invalid ones become `\xff`.
        lines: whether to keep line feeds.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, text)


def json_line(value: object) -> str:
    r"""Return a value as one line of JSON that is safe to print, with control characters as `\u001b`.

    Values without a JSON equivalent, such as `bytes`, become their `repr`.

    Raises:
        TypeError: a key of an object is not a JSON key.
    """
    return _IN_A_LINE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False, default=repr))


class PrintableFormatter(logging.Formatter):
    """Escapes control characters in log records; line feeds, as in tracebacks, are kept."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return printable(super().format(record), lines=True)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def place_of(function: object) -> str:
    """Return the name of a function with its file and line, for log lines; of another callable only its name."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
