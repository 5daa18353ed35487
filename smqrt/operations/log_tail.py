"""The end of the server's log, and of what applications trace, in memory of a fixed size."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from smqrt.printable import printable
from smqrt.process.current_application import current_app

KEPT = 200
"""Errors and warnings; and as many lines of trace of each application."""
_TEXT_CHARACTERS = 4096
_TRACE_CHARACTERS = 512
_APPLICATIONS = 256
"""Applications whose traces are kept apart."""
_TRACES = "smqrt.trace"
_LOST_AT = logging.WARNING


class Traced(NamedTuple):
    """A line of trace.

    Attributes:
        at_s: when, in Unix seconds.
        text: safe to show.
    """

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of the log.

    Attributes:
        number: counts those that are kept.
        at_s: when, in Unix seconds.
        level: "WARNING" or above.
        logger: whose it is.
        text: what it says, with the traceback; safe to show.
    """

    number: int
    at_s: float
    level: str
    logger: str
    text: str


class LogTail(logging.Handler):
    """Keeps the last errors and warnings, and the last traces of each application, between `start` and `stop`. Takes
    records from any thread.

    Attributes:
        errors, warnings: how many there were.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors = self.warnings = 0
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._traces: dict[Path | None, deque[Traced]] = {}
        self._error_times_s: deque[float] = deque(maxlen=KEPT)
        self._logger = logging.getLogger("smqrt")
        self._last_resort: logging.Handler | None = None

    def start(self) -> None:
        """Take records; a second call does nothing."""
        if self in self._logger.handlers:
            return
        # logging's last resort prints only while there is no handler at all.
        self._last_resort = None if self._logger.hasHandlers() else logging.lastResort
        for handler in filter(None, (self, self._last_resort)):
            self._logger.addHandler(handler)

    def stop(self) -> None:
        """Take no more records; a second call does nothing."""
        for handler in filter(None, (self, self._last_resort)):
            self._logger.removeHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            if record.levelno >= _LOST_AT:
                self._keep(record)
            elif record.name == _TRACES:
                self._trace(record)
        except Exception:
            self.handleError(record)

    def newest_first(self) -> Iterator[Entry]:
        """The errors and warnings that are kept."""
        return iter(list(reversed(self._entries)))

    def errors_since(self, at_s: float) -> int:
        """How many errors there were since a time, of those that are kept."""
        return sum(one >= at_s for one in list(self._error_times_s))

    def traces(self, folder: Path | None) -> list[Traced]:
        """The last lines that the application in `folder` traced; None is for those that belong to none."""
        return list(self._traces.get(folder, ()))

    def _keep(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self.errors += 1
            self._error_times_s.append(record.created)
        else:
            self.warnings += 1
        text = self.format(record)[:_TEXT_CHARACTERS]
        number = self.errors + self.warnings
        self._entries.append(Entry(number, record.created, record.levelname, record.name, printable(text, lines=True)))

    def _trace(self, record: logging.LogRecord) -> None:
        scope = current_app.get()
        folder = scope.folder if scope else None
        if folder not in self._traces and len(self._traces) >= _APPLICATIONS:
            folder = None
        lines = self._traces.setdefault(folder, deque(maxlen=KEPT))
        lines.append(Traced(record.created, printable(record.getMessage()[:_TRACE_CHARACTERS])))
