"""Access log: one line for each request and each closed SMQ connection.

Lines are queued in memory and written by a thread, so that a slow disk does not block clients. When the queue is full,
new lines are discarded, and a later line reports how many.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import sys
from collections import deque
from contextlib import suppress
from time import monotonic, time

import gevent
from gevent.event import Event

from smqrt.http.message import Request
from smqrt.loop.threads import DiskThreads
from smqrt.operations.logs import HIDDEN, iso, without_secrets
from smqrt.printable import printable
from smqrt.settings.limits import Limit
from smqrt.smq import close_log
from smqrt.smq.close_log import Closed

log = logging.getLogger("smqrt.access")

MAX_QUEUED_LINES = 20_000
"""The limit of lines that wait for the disk, about 5 MB."""
MAX_BATCH_LINES = 1000
COLLECT_S = 0.2
"""Lines that are added within this time are written together."""
CLOSE_S = 2.0
"""The time limit of the last writes, in `close`."""
MAX_PATH_CHARS = 2048
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
        self._discarded, self._is_incomplete = 0, False
        self._has_queued, self._closed = Event(), False
        self._threads = DiskThreads("of the access log")
        self._writer = gevent.spawn(self._write_loop)
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
        self._has_queued.set()

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

    def _write_loop(self) -> None:
        while not self._closed or self._lines:
            self._has_queued.wait()
            self._has_queued.clear()
            if not self._closed:
                gevent.sleep(COLLECT_S)
            while self._lines:
                lines = [self._lines.popleft() for _ in range(min(len(self._lines), MAX_BATCH_LINES))]
                discarded, self._discarded = self._discarded, 0
                if discarded:
                    lines.append(self._line(iso(time()), {"detail": f"{discarded} lines were discarded"}))
                data = "".join(lines).encode("utf-8", "backslashreplace")
                error: Exception | None
                try:
                    written, error = self._threads.call(_write_lines, self._file, data, self._is_incomplete)
                    if written > 0:
                        self._is_incomplete = not data[:written].endswith(b"\n")
                except (OSError, TimeoutError) as failed:
                    written, error = 0, failed
                if error is not None:
                    lost = data[max(0, written) :].count(b"\n")
                    # If the line about discarded lines was lost, its number counts again, but not the line itself.
                    self._discarded += lost - bool(discarded) + discarded
                    LINES.refused(f"{lost} lines of the access log", f"{self.path} can't be written: {error}")

    def close(self) -> None:
        """Write the queued lines within two seconds, then stop. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        close_log.observers.remove(self.connection_closed)
        self._has_queued.set()
        self._writer.join(CLOSE_S)
        if not self._writer.ready():
            log.error("access log %s: %d lines could not be written before the shutdown", self.path, len(self._lines))
            self._writer.kill(block=False)
        elif self.path != STDOUT:
            os.close(self._file)


def _write_lines(file: int, data: bytes, is_incomplete: bool) -> tuple[int, OSError | None]:
    """Append lines. After an incomplete line, caused by a full disk, start a new line first.

    Args:
        file: the file descriptor; other processes may append to the same file.
        data: the lines.
        is_incomplete: whether the last write of this process was incomplete; used when the file can't be read.

    Returns:
        The number of bytes of `data` that were written, and the error, if any.
    """
    head = b"\n" if _ends_incomplete(file, is_incomplete) else b""
    view, written = memoryview(head + data), 0
    try:
        while written < len(view):
            written += os.write(file, view[written:])
    except OSError as error:
        return written - len(head), error
    return len(data), None


def _ends_incomplete(file: int, is_incomplete: bool) -> bool:
    try:
        size = os.fstat(file).st_size if stat.S_ISREG(os.fstat(file).st_mode) else 0
        if not size:
            return False
        # `file` is opened for writing only.
        readable = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return is_incomplete
    try:
        return os.pread(readable, 1, size - 1) not in (b"\n", b"")
    finally:
        os.close(readable)


def without_query_secrets(target: str) -> str:
    """Return the target of a request. `***` replaces the values of parameters whose names suggest secrets."""
    path, mark, query = target[:MAX_PATH_CHARS].partition("?")
    path = without_secrets(path)
    return path + _SECRET_PARAMETER.sub(rf"\1{HIDDEN}", mark + query) if mark else path
