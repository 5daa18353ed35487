"""Log of a server: formats, levels, the last records, and the access log.

Each JSON record is one line. Its keys are in this order: `time`, `level`, `logger`, `event`, `message`, `worker` on a
server with workers, the fields of the event, and `error` with a traceback. Secrets are removed from all records.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple, Protocol, TextIO

import gevent
from gevent.event import Event

from smqrt.http.message import Request
from smqrt.loop.threads import DiskThreads
from smqrt.printable import json_line, printable
from smqrt.process.current_process import current_app
from smqrt.settings.limits import Limit
from smqrt.smq import close_log
from smqrt.smq.close_log import Closed

# ---- the last records, in memory of a fixed size

ROOT = "smqrt"
TRACES = "smqrt.trace"
"""The logger of the traces of applications. They are shown at the level "info", unless a setting changes it."""
KEPT = 200
"""The number of kept errors and warnings, and of kept trace lines of each application."""
_TEXT_CHARACTERS = 4096
_TRACE_CHARACTERS = 512
_APPLICATIONS = 256
"""The limit of applications whose traces are kept separately; the traces of further applications are kept together."""


class Traced(NamedTuple):
    """A line of a trace.

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
        errors, warnings: their numbers since `start`.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors = self.warnings = 0
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._traces: dict[Path | None, deque[Traced]] = {}
        # Separate from the entries, in which warnings could displace errors.
        self._error_times_s: deque[float] = deque(maxlen=KEPT)
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
                number, text = self.errors + self.warnings, self.format(record)[:_TEXT_CHARACTERS]
                safe_text = printable(text, lines=True)
                self._entries.append(Entry(number, record.created, record.levelname, record.name, safe_text))
            elif record.name == TRACES:
                scope = current_app.get()
                folder = scope.folder if scope else None
                if folder not in self._traces and len(self._traces) >= _APPLICATIONS:
                    folder = None  # too many applications: bounded memory
                lines = self._traces.setdefault(folder, deque(maxlen=KEPT))
                lines.append(Traced(record.created, printable(record.getMessage()[:_TRACE_CHARACTERS])))
        except Exception:  # the caller must not fail because a record has wrong arguments
            self.handleError(record)

    def newest_first(self) -> Iterator[Entry]:
        """Iterate over the kept errors and warnings."""
        return iter(list(reversed(self._entries)))

    def errors_since(self, at_s: float) -> int:
        """Return the number of kept errors since a Unix time."""
        return sum(one >= at_s for one in list(self._error_times_s))

    def traces(self, folder: Path | None) -> list[Traced]:
        """Return the last trace lines of the application in `folder`; None means lines without an application."""
        return list(self._traces.get(folder, ()))


# ---- removal of secrets

LINE_CHARS = 16384
"""Maximum length of a line, since clients can put text into some."""
HIDDEN = "***"

_NAMES = r"[\w.-]{0,32}(?:passwd|password|secret|token|api[_-]?key|private[_-]?key)[\w.-]{0,32}|pwd|upwd|ha1"
_VALUE = r"\"[^\"\r\n]{0,4096}\"?|'[^'\r\n]{0,4096}'?|[^\s&;,\"'}\])]{1,4096}"
# Each pattern starts with a fixed word, and all repetitions are bounded: the search takes linear time.
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
    """Return the levels by logger for a text such as "smqrt.close=debug,smqrt.lua=warning"."""
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
    return text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]} … ({len(text) - LINE_CHARS} characters more)"


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


# ---- Access log: one line for each request and each closed SMQ connection.
#
# Lines are queued in memory and written by a thread, so that a slow disk does not block clients. When the queue is
# full, new lines are discarded, and a later line has their number.

log = logging.getLogger("smqrt.access")

MAX_QUEUED_LINES = 20_000
"""The limit of lines that wait for the disk, about 5 MB."""
MAX_BATCH_LINES = 1000
COLLECT_S = 0.2
"""Lines of this time are written together."""
CLOSE_S = 2.0
"""The time limit of the last writes, in `close`."""
PATH_CHARS = 2048
STDOUT = "-"
_BEGAN = "access_began_s"  # in Request.env
_QUOTED = ("path", "uid", "detail", "user")
_SECRET_PARAMETER = re.compile(
    r"(?i)([?&](?:[\w.-]{0,32}(?:pass|pwd|secret|token|key|auth|cred|session|sig|jwt|code|otp)[\w.-]{0,32})=)[^&#\s]*"
)

LINES = Limit("access_log_lines", "", f"{MAX_QUEUED_LINES} lines of the access log wait for the disk")


class AccessLog:
    """Writes the access log.

    Args:
        path: a file to append to; "-" for standard output.
        as_json: write a JSON object on each line, instead of text.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: str, as_json: bool = False) -> None:
        self.path, self._as_json = path, as_json
        self._file = self._open()
        self._lines: deque[str] = deque()
        self._discarded, self._is_torn = 0, False
        self._more, self._closed = Event(), False
        self._threads = DiskThreads("of the access log")
        self._writer = gevent.spawn(self._work)
        close_log.observers.append(self.connection_closed)

    def began(self, request: Request) -> None:
        """See `RequestObserver`."""
        request.env[_BEGAN] = monotonic()

    def ended(self, request: Request, is_detached: bool) -> None:
        """See `RequestObserver`."""
        response = request.response
        user = ""
        with suppress(Exception):  # an application's function may fail: the user stays unknown
            login = request.user()
            user = login.name if login is not None else ""
        began_s = request.env.get(_BEGAN)
        self._add(
            address=request.peer[0],
            user=user,
            method=request.method,
            path=without_query_secrets(request.target),
            status=101 if is_detached else response.status,
            bytes=response.size,
            ms=round((monotonic() - began_s) * 1000, 1) if began_s is not None else None,
        )

    def refused(self, address: str, status: int, detail: str) -> None:
        """Write a line for a connection that sent no valid request."""
        self._add(address=address, user="", method="", path="", status=status, bytes=0, ms=None, detail=detail)

    def connection_closed(self, closed: Closed) -> None:
        """Write a line for a closed SMQ connection."""
        self._add(
            address=closed.address,
            user=closed.user,
            method="SMQ",
            path=f"hub {closed.hub}",
            status=closed.reason.name.lower(),
            bytes=closed.bytes_sent,
            ms=None if closed.connected_s is None else round(closed.connected_s * 1000, 1),
            uid=closed.uid.decode("utf-8", "backslashreplace")[:256],
            bytes_received=closed.bytes_received,
        )

    def _add(self, **fields: object) -> None:
        if len(self._lines) >= MAX_QUEUED_LINES:
            self._discarded += 1
            LINES.refused("a line of the access log")
            return
        self._lines.append(self._line(iso(time()), fields))
        self._more.set()

    def _line(self, at: str, fields: dict[str, object]) -> str:
        if self._as_json:
            return json.dumps({"time": at, "event": "access"} | fields, ensure_ascii=True) + "\n"
        words = [at]
        for name, value in fields.items():
            if name in _QUOTED:  # clients choose these values, which may contain spaces and quotes
                words.append('"' + printable(str(value)).replace('"', "'") + '"')
            else:
                words.append("-" if value is None or value == "" else str(value))
        return " ".join(words) + "\n"

    def reopen(self) -> str | None:
        """Open the file again after another program has renamed it, and return the error, if any. Blocks."""
        if self.path == STDOUT:
            return None
        try:
            new = self._threads.call(self._open)
        except (OSError, TimeoutError) as error:
            return f"{self.path}: {error}"
        old, self._file = self._file, new
        self._threads.call(os.close, old)
        return None

    def _open(self) -> int:
        if self.path == STDOUT:
            return sys.__stdout__.fileno() if sys.__stdout__ is not None else 1
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _work(self) -> None:
        while not self._closed or self._lines:
            self._more.wait()
            self._more.clear()
            if not self._closed:
                gevent.sleep(COLLECT_S)
            while self._lines:
                lines = [self._lines.popleft() for _ in range(min(len(self._lines), MAX_BATCH_LINES))]
                discarded, self._discarded = self._discarded, 0
                if discarded:
                    lines.append(self._line(iso(time()), {"detail": f"{discarded} lines were left out"}))
                data = "".join(lines).encode("utf-8", "backslashreplace")
                error: Exception | None
                try:
                    written, error = self._threads.call(_write_lines, self._file, data, self._is_torn)
                    if written > 0:
                        self._is_torn = not data[:written].endswith(b"\n")
                except (OSError, TimeoutError) as failed:
                    written, error = 0, failed
                if error is not None:
                    lost = data[max(0, written) :].count(b"\n")
                    # The line about discarded lines was also lost. It does not count itself; its number counts again.
                    self._discarded += lost - bool(discarded) + discarded
                    LINES.refused(f"{lost} lines of the access log", f"{self.path} can't be written: {error}")

    def close(self) -> None:
        """Write the queued lines within two seconds, then stop. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        close_log.observers.remove(self.connection_closed)
        self._more.set()
        self._writer.join(CLOSE_S)
        if not self._writer.ready():
            log.error("access log %s: %d lines could not be written before the shutdown", self.path, len(self._lines))
            self._writer.kill(block=False)
        elif self.path != STDOUT:
            os.close(self._file)


def _write_lines(file: int, data: bytes, is_torn: bool) -> tuple[int, OSError | None]:
    """Append lines. After an incomplete line, which a full disk has caused, start a new line first.

    Args:
        file: the file descriptor; other processes may append to the same file.
        data: the lines.
        is_torn: whether the last write of this process was incomplete; used when the file can't be read.

    Returns:
        The number of bytes of `data` that were written, and the error, if any.
    """
    head = b"\n" if _ends_incomplete(file, is_torn) else b""
    view, written = memoryview(head + data), 0
    try:
        while written < len(view):
            written += os.write(file, view[written:])
    except OSError as error:
        return written - len(head), error
    return len(data), None


def _ends_incomplete(file: int, is_torn: bool) -> bool:
    try:
        size = os.fstat(file).st_size if stat.S_ISREG(os.fstat(file).st_mode) else 0
        if not size:
            return False
        # `file` is opened for writing only.
        readable = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return is_torn
    try:
        return os.pread(readable, 1, size - 1) not in (b"\n", b"")
    finally:
        os.close(readable)


def without_query_secrets(target: str) -> str:
    """Return the target of a request. `***` replaces the values of parameters whose names suggest secrets."""
    path, mark, query = target[:PATH_CHARS].partition("?")
    path = without_secrets(path)
    return path + _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", mark + query) if mark else path
