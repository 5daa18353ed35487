"""Log of a server: formats, levels and the last records.

Each JSON record is one line. Its keys are in this order: `time`, `level`, `logger`, `event`, `message`, `worker` on a
server with workers, the fields of the event, and `error` with a traceback. Secrets are removed from all records.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

from smqrt.printable import json_line, printable
from smqrt.process.current_process import current_app

# ---- The last records, in memory of a fixed size

ROOT = "smqrt"
TRACES = "smqrt.trace"
"""The logger of the traces of applications. They are shown at the level "info", unless a setting changes it."""
MAX_KEPT = 200
"""The limit of kept errors and warnings, and of kept trace lines of each application."""
_MAX_TEXT_CHARS = 4096
_MAX_TRACE_CHARS = 512
_MAX_APPLICATIONS = 256
"""The limit of applications whose traces are kept separately; the traces of further applications are kept together."""


class TraceLine(NamedTuple):
    """A trace line of an application.

    Attributes:
        at_s: Unix time in seconds.
        text: the text without control characters.
    """

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of the log.

    Attributes:
        number: serial number of errors and warnings.
        at_s: Unix time in seconds.
        level: "WARNING" or above.
        logger: name of the logger.
        text: the message with the traceback, without control characters.
    """

    number: int
    at_s: float
    level: str
    logger: str
    text: str


class LogTail(logging.Handler):
    """Keeps the last errors and warnings, and the last traces of each application, between `start` and `stop`.

    Accepts records from any thread.

    Attributes:
        errors, warnings: the numbers of errors and warnings since `start`.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors = self.warnings = 0
        self._entries: deque[Entry] = deque(maxlen=MAX_KEPT)
        self._traces: dict[Path | None, deque[TraceLine]] = {}
        # Separate from the entries, in which warnings could displace errors.
        self._error_times_s: deque[float] = deque(maxlen=MAX_KEPT)
        self._logger = logging.getLogger(ROOT)
        self._last_resort: logging.Handler | None = None

    def start(self) -> None:
        """Start keeping records. A second call does nothing."""
        if self in self._logger.handlers:
            return
        # Python uses `logging.lastResort` only while no handler exists, so it is added as a handler.
        self._last_resort = None if self._logger.hasHandlers() else logging.lastResort
        for handler in filter(None, (self, self._last_resort)):
            self._logger.addHandler(handler)

    def stop(self) -> None:
        """Stop keeping records. A second call does nothing."""
        for handler in filter(None, (self, self._last_resort)):
            self._logger.removeHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            if record.levelno >= logging.ERROR:
                self.errors += 1
                self._error_times_s.append(record.created)
            elif record.levelno >= logging.WARNING:
                self.warnings += 1
            if record.levelno >= logging.WARNING:
                number, text = self.errors + self.warnings, self.format(record)[:_MAX_TEXT_CHARS]
                safe_text = printable(text, lines=True)
                self._entries.append(Entry(number, record.created, record.levelname, record.name, safe_text))
            elif record.name == TRACES:
                scope = current_app.get()
                folder = scope.folder if scope else None
                if folder not in self._traces and len(self._traces) >= _MAX_APPLICATIONS:
                    folder = None  # too many applications: bounded memory
                lines = self._traces.setdefault(folder, deque(maxlen=MAX_KEPT))
                lines.append(TraceLine(record.created, printable(record.getMessage()[:_MAX_TRACE_CHARS])))
        except Exception:  # the caller must not fail because a record has wrong arguments
            self.handleError(record)

    def newest_first(self) -> Iterator[Entry]:
        """Iterate over the kept errors and warnings."""
        return iter(list(reversed(self._entries)))

    def errors_since(self, at_s: float) -> int:
        """Return the number of kept errors since a Unix time."""
        return sum(one >= at_s for one in list(self._error_times_s))

    def traces(self, folder: Path | None) -> list[TraceLine]:
        """Return the last trace lines of the application in `folder`; None means lines without an application."""
        return list(self._traces.get(folder, ()))


# ---- Removal of secrets

MAX_LINE_CHARS = 16384
"""Maximum length of a line. Some lines contain text from clients."""
HIDDEN = "***"

_NAMES = r"[\w.-]{0,32}(?:passwd|password|secret|token|api[_-]?key|private[_-]?key)[\w.-]{0,32}|pwd|upwd|ha1"
_VALUE = r"\"[^\"\r\n]{0,4096}\"?|'[^'\r\n]{0,4096}'?|[^\s&;,\"'}\])]{1,4096}"
# All repetitions are bounded, so that the search takes linear time.
_SECRETS = (
    # Authorization: Basic dXNlcjpwYXNz, Cookie: z9ZAqJtI=…
    (
        re.compile(
            r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)([\"']?\s{0,4}[:=]\s{0,4}[\"']?)[^\r\n\"']{1,4096}"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(basic|bearer|digest)\s{1,4}[A-Za-z0-9+/=._~-]{16,4096}"), rf"\1 {HIDDEN}"),
    # http://user:password@host
    (re.compile(r"://([^\s:/@\"']{0,256}):[^\s/@\"']{1,256}@"), rf"://\1:{HIDDEN}@"),
    # JSON Web Tokens and password hashes
    (re.compile(r"\beyJ[A-Za-z0-9_-]{5,4096}\.[A-Za-z0-9_-]{2,8192}\.[A-Za-z0-9_-]{0,4096}"), HIDDEN),
    (re.compile(r"\$(?:argon2(?:id|i|d)|2[aby]|pbkdf2[\w-]{0,16}|scrypt)\$[^\s\"']{8,512}"), HIDDEN),
    # password=…, "token": "…"
    (re.compile(rf"(?i)(?<![\w.-])({_NAMES})([\"']?\s{{0,4}}[=:]\s{{0,4}})(?:{_VALUE})"), rf"\1\2{HIDDEN}"),
)
_COLORS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31;1"}


class LogOptions(Protocol):
    """The group `log` of the settings."""

    @property
    def level(self) -> str | None: ...
    @property
    def levels(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def time(self) -> bool: ...
    @property
    def color(self) -> bool | None: ...


def without_secrets(text: str) -> str:
    """Return a text in which `***` replaces the passwords, tokens, cookies and keys that the patterns recognize."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def levels_of(text: str) -> dict[str, str]:
    """Return the levels by logger for a string such as "smqrt.close=debug,smqrt.lua=warning"."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): level.strip() for name, _, level in pairs}


class TextFormatter(logging.Formatter):
    """Formats records as text.

    Args:
        has_time: start each record with the time and the level.
        is_colored: show warnings and errors in colour.
        worker: the name of this worker, such as "w1", as a prefix of each record; empty without workers.
    """

    def __init__(self, has_time: bool = False, is_colored: bool = False, worker: str = "") -> None:
        super().__init__()
        self._has_time, self._is_colored, self._worker = has_time, is_colored, worker

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line = printable(without_secrets(_cut(super().format(record))), lines=True)
        if self._worker:
            line = f"{self._worker}: {line}"
        if self._has_time:
            line = f"{iso(record.created)} {record.levelname.lower():7} {line}"
        color = _COLORS.get(record.levelno) if self._is_colored else None
        return f"\x1b[{color}m{line}\x1b[0m" if color else line


class JsonFormatter(logging.Formatter):
    """Formats records as JSON, one line each.

    Args:
        worker: the name of this worker, such as "w1"; empty without workers.
    """

    def __init__(self, worker: str = "") -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        event = getattr(record, "event", "log")
        line: dict[str, object] = {
            "time": iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            "message": without_secrets(_cut(record.getMessage())),
        }
        if self._worker:
            line["worker"] = self._worker
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line |= {
                name: without_secrets(_cut(value)) if isinstance(value, str) else value
                for name, value in fields.items()
                if name not in line
            }
        if record.exc_info:
            line["error"] = without_secrets(_cut(self.formatException(record.exc_info)))
        return json_line(line)


def iso(at_s: float, unit: str = "milliseconds") -> str:
    """Return a time in Unix seconds as ISO 8601 in UTC, with milliseconds or `unit`."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec=unit).replace("+00:00", "Z")


def _cut(text: str) -> str:
    more = len(text) - MAX_LINE_CHARS
    return text if more <= 0 else f"{text[:MAX_LINE_CHARS]} … ({more} more characters)"


class ServerLog:
    """The log of this process.

    Args:
        options: the group `log` of the settings.
        worker: the name of this worker, such as "w1"; empty without workers.
        stream: where records are written; None for standard error.
    """

    def __init__(self, options: LogOptions, worker: str = "", stream: TextIO | None = None) -> None:
        self.is_json = options.format == "json"
        handler = logging.StreamHandler(stream)
        if options.color is not None:
            is_colored = options.color
        else:
            is_colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        text = TextFormatter(options.time, is_colored, worker)
        handler.setFormatter(JsonFormatter(worker) if self.is_json else text)
        logging.getLogger().addHandler(handler)
        self._handler = handler
        self._former_levels: dict[str, int] = {}
        self.apply(options)

    def apply(self, options: LogOptions) -> None:
        """Apply the levels of new settings. The format does not change."""
        for name, level in self._former_levels.items():
            logging.getLogger(name).setLevel(level)
        defaults = {ROOT: "info" if self.is_json else "warning", TRACES: "info"}
        levels = {**({ROOT: options.level} if options.level else defaults), **levels_of(options.levels)}
        self._former_levels = {name: logging.getLogger(name).level for name in levels}
        for name, word in levels.items():
            logging.getLogger(name).setLevel(word.upper())

    def report(self, otherwise: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that logs lines of the command when the format is JSON; else return `otherwise`."""
        serve = logging.getLogger(f"{ROOT}.serve")
        return (lambda line: serve.info("%s", line, extra={"event": "serve"})) if self.is_json else otherwise

    def close(self) -> None:
        """Remove the handler and restore the levels. Used by tests."""
        logging.getLogger().removeHandler(self._handler)
        for name, level in self._former_levels.items():
            logging.getLogger(name).setLevel(level)
