"""Lines that strangers can cause in the log: so many a second, and the others are counted."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic
from types import CodeType, TracebackType
from typing import Any

from gevent import get_hub

ERRORS_PER_S = 10  # of one callback, with tracebacks: a stranger may have found a message that it fails at


class ErrorLimit:
    """Lets `ERRORS_PER_S` errors of one callback into the log in a second, and counts the others."""

    __slots__ = ("_left_out", "_second_ends_s", "_shown")

    def __init__(self) -> None:
        self._second_ends_s = 0.0
        self._shown = self._left_out = 0

    def others(self) -> str | None:
        """Returns None when this error is left out, else what its line says of those that were before it."""
        now_s = monotonic()
        if now_s >= self._second_ends_s:
            self._second_ends_s, self._shown = now_s + 1, 0
        if self._shown >= ERRORS_PER_S:
            self._left_out += 1
            return None
        others = f" ({self._left_out} more are not shown)" if self._left_out else ""
        self._shown, self._left_out = self._shown + 1, 0
        return others


def limit_errors_of_greenlets() -> None:
    """Let so many errors of greenlets onto standard error in a second, for each line that raises; gevent prints all."""
    hub: Any = get_hub()
    show, limits = hub.print_exception, defaultdict[Any, ErrorLimit](ErrorLimit)

    def print_exception(context: Any, kind: Any, error: Any, traceback: Any) -> None:
        if (others := limits[_raised_at(traceback)].others()) is not None:
            show(f"{context!r}{others}" if others else context, kind, error, traceback)

    hub.print_exception = print_exception


def _raised_at(traceback: TracebackType | None) -> tuple[CodeType, int] | None:
    """Where the error was raised; programs have only so many lines."""
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code, traceback.tb_lineno
