"""Refusals of one kind: each is counted, and at most one a second stands in the log."""

from __future__ import annotations

import logging
from time import monotonic

log = logging.getLogger("smqrt")

_LINE_EVERY_S = 1.0  # a stranger must not fill the log


class Refusals:
    """Counts refusals of one kind.

    Attributes:
        count: how many there were.
    """

    __slots__ = ("_next_line_s", "_unsaid", "count")

    def __init__(self) -> None:
        self.count = 0
        self._next_line_s, self._unsaid = 0.0, 0

    def add(self, sentence: str) -> None:
        """Counts a refusal and logs the sentence, unless there was a line in the last second."""
        self.count += 1
        now_s = monotonic()
        if now_s < self._next_line_s:
            self._unsaid += 1
            return
        others = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        log.warning("%s%s", sentence, others)
        self._next_line_s, self._unsaid = now_s + _LINE_EVERY_S, 0
