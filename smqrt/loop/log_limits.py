"""Rate limit for logged errors that remote clients can cause."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic
from types import CodeType, TracebackType
from typing import Any

from gevent import get_hub

ERRORS_PER_S = 10  # per callback, each with its traceback: a client can repeat a message that makes it fail


class ErrorLimit:
    """Limits the logged errors of one callback to `ERRORS_PER_S`, and counts the others."""

    __slots__ = ("_second_ends_s", "_shown", "_suppressed")

    def __init__(self) -> None:
        self._second_ends_s = 0.0
        self._shown = self._suppressed = 0

    def others(self) -> str | None:
        """Return None when this error is suppressed, else a suffix for its line with the number suppressed before."""
        now_s = monotonic()
        if now_s >= self._second_ends_s:
            self._second_ends_s, self._shown = now_s + 1, 0
        if self._shown >= ERRORS_PER_S:
            self._suppressed += 1
            return None
        suffix = f" ({self._suppressed} more are not shown)" if self._suppressed else ""
        self._shown, self._suppressed = self._shown + 1, 0
        return suffix


def limit_errors_of_greenlets() -> None:
    """Limit the errors of greenlets on standard error, per raising line; gevent prints all of them."""
    hub: Any = get_hub()
    print_all, limits = hub.print_exception, defaultdict[tuple[CodeType, int] | None, ErrorLimit](ErrorLimit)

    def print_exception(context: Any, kind: Any, error: Any, traceback: TracebackType | None) -> None:
        innermost = traceback
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        # A program has a bounded number of lines, so this dictionary is bounded as well.
        raised_at = (innermost.tb_frame.f_code, innermost.tb_lineno) if innermost is not None else None
        if (suffix := limits[raised_at].others()) is not None:
            print_all(f"{context!r}{suffix}" if suffix else context, kind, error, traceback)

    hub.print_exception = print_exception
