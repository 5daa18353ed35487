"""The trace logger: a directory that shows the server's trace in a browser, over a WebSocket (spec: bas-api §4, §17).

    GET with X-Requested-With    204 it is free, 503 somebody looks already
    WebSocket                    binary frames: byte 1 and a greeting, then byte 2 and lines of the trace;
                                 byte 3: another viewer has taken over
    GET                          the page

What viewers don't take is bounded and counted; nobody who traces ever waits for them.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from html import escape
from importlib import resources

import gevent
from gevent import get_hub
from gevent.monkey import get_original

from smqrt.errors import ProtocolError, StreamError
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.status import reason
from smqrt.http.tree import Directory
from smqrt.net.handover import websocket_key
from smqrt.net.stream import Stream
from smqrt.wire import websocket

NAME = "tracelogger.service"
HELLO, LINES, TAKEN_OVER = b"\x01", b"\x02", b"\x03"
HISTORY_BYTES = 64 << 10  # of the past, for who comes to see what went wrong
WAITING_BYTES = 256 << 10  # beyond, the oldest lines are left out
FRAME_BYTES = 32 << 10
LINE_BYTES = 16 << 10  # of one record; the rest of it is cut
BODY_BYTES = 4 << 10  # of a request, as far as the application has read it
QUEUE_BYTES = 64 << 10  # handed to the connection, not yet taken by the viewer
PATIENCE_S = 30.0  # a viewer that takes nothing for so long is closed
_MAX_MESSAGE_BYTES = 1024  # viewers have nothing to say
_SECRET = frozenset(("authorization", "proxy-authorization", "cookie", "set-cookie"))
_PASSWORD = re.compile(rb"((?:^|[&?\s])[\w.-]{0,32}(?:password|passwd|pwd)=)[^&\s]+", re.IGNORECASE)  # in a form
_SHOWN = 8  # characters of a secret, to tell one from the other
_SERVICE = "/rtl/tracelogger.service/"  # in the page, which is a file as well
_QUIET = "no trace"  # in Request.env: requests of viewers are not shown
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'"


@dataclass
class TraceOptions:
    """What is shown of HTTP requests beside the trace; nothing at first.

    Attributes:
        request: a line for each request, with the status of its answer.
        requestheaders: its header fields; of cookies and passwords the beginning.
        responseheaders: the header fields that the application set.
        requestbody: the beginning of its body, as far as the application has read it.
    """

    request: bool = False
    requestheaders: bool = False
    responseheaders: bool = False
    requestbody: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is."""
        return self.request or self.requestheaders or self.responseheaders or self.requestbody


_thread_id = get_original("_thread", "get_ident")
OPTIONS = tuple(item.name for item in fields(TraceOptions))


class TraceLogger(Directory):
    """A directory that shows what is logged, to one viewer at a time.

    Args:
        name, priority: see `Directory`.
        server: whose requests can be shown; None when there are none.
        logger: what is shown, with all below it.

    Attributes:
        options: what is shown of requests.
        left_out: lines that a viewer was too slow for, of all viewers together.
    """

    def __init__(
        self, name: str = NAME, priority: int = 0, server: HttpServer | None = None, logger: str = "smqrt"
    ) -> None:
        super().__init__(name, priority)
        self.options = TraceOptions()
        self.left_out = 0
        self._server = server
        self._history = _Lines(HISTORY_BYTES)
        self._waiting = _Lines(WAITING_BYTES)
        self._viewer: _Viewer | None = None
        self._flushing = False
        self._logger = logging.getLogger(logger)
        self._handler = _Handler(self)
        self._loop, self._thread = get_hub().loop, _thread_id()
        self._last_resort = None if self._logger.hasHandlers() else logging.lastResort
        for handler in filter(None, (self._handler, self._last_resort)):
            self._logger.addHandler(handler)  # also what is asked only while there is no other

    @property
    def taken(self) -> bool:
        """Whether somebody looks."""
        return self._viewer is not None

    def configure(self, options: Mapping[str, bool]) -> None:
        """Choose what is shown of requests; options that are not given stay, unknown ones are left aside."""
        for name in OPTIONS:
            if name in options:
                setattr(self.options, name, options[name])
        if self._server is not None:
            others = tuple(one for one in self._server.observers if one is not self)
            self._server.observers = (*others, self) if self.options.any else others

    def close(self) -> None:
        """Show nothing any more: the viewer is disconnected, the directory leaves the tree."""
        for handler in filter(None, (self._handler, self._last_resort)):
            self._logger.removeHandler(handler)
        self.unlink()
        if self._server is not None:
            self._server.observers = tuple(one for one in self._server.observers if one is not self)
        if self._viewer is not None:
            self._viewer.end(b"")

    # What is shown

    def show(self, text: str) -> None:
        """Show a text: a record of the log, or a request. Callable from everywhere, never blocks."""
        if _thread_id() != self._thread:
            self._loop.run_callback_threadsafe(self.show, text)
            return
        line = text.encode("utf-8", "backslashreplace")[:LINE_BYTES] + b"\n"
        self._history.add(line)
        if self._viewer is None:
            return
        self.left_out += self._waiting.add(line)
        if not self._flushing:
            self._flushing = True
            self._loop.run_callback(self._flush)

    def _flush(self) -> None:
        """Hub greenlet: hand the viewer what it takes; the rest waits, at most `WAITING_BYTES`."""
        self._flushing = False
        viewer = self._viewer
        while viewer is not None and self._waiting and viewer.takes():
            missing = self._waiting.take_left_out()
            note = b"... %d lines were left out: this viewer is too slow\n" % missing if missing else b""
            viewer.send(LINES + note + self._waiting.take(FRAME_BYTES))

    # Requests

    def began(self, request: Request) -> None:
        """See `HttpServer.observers`."""
        if self.options.requestbody and request.has_body:
            request.tap(BODY_BYTES)

    def ended(self, request: Request, is_detached: bool) -> None:
        """See `HttpServer.observers`."""
        options, response = self.options, request.response
        if _QUIET in request.env:
            return
        outcome = "handed over" if is_detached else f"{response.status} {reason(response.status)}"
        lines = [f"{request.peer[0]} {request.method} {request.target} {outcome}"]
        if options.requestheaders:
            lines += (f"> {name}: {_shown(name, value)}" for name, value in request.headers)
        if options.requestbody and (body := request.tapped()):
            body = _PASSWORD.sub(rb"\1...", body)
            lines += (f"> {line}" for line in body.decode("utf-8", "backslashreplace").splitlines())
        if options.responseheaders and not is_detached:
            lines += (f"< {name}: {_shown(name, value)}" for name, value in response.headers)
        self.show("\n".join(lines))

    # Viewers

    def _own(self, request: Request, relpath: str) -> bool:
        if super()._own(request, relpath):
            return True
        if relpath:
            return False
        request.env[_QUIET], response = True, request.response
        if request.method not in ("GET", "HEAD"):
            response.error(405, headers={"Allow": "GET, HEAD"})
        elif key := websocket_key(request):
            if not request.refuse_foreign():
                self._connect(request, key)
        elif request.get("x-requested-with") is not None:
            response.status = 503 if self.taken else 204
            response.headers.set("Cache-Control", "no-store")
        else:
            self._show_page(request)
        return True

    def _show_page(self, request: Request) -> None:
        headers = request.response.headers
        headers.set("Content-Type", "text/html; charset=utf-8")
        headers.set("Cache-Control", "no-store")
        headers.set("Content-Security-Policy", _POLICY)
        headers.set("X-Content-Type-Options", "nosniff")
        headers.set("X-Frame-Options", "DENY")
        request.response.write(_page().replace(_SERVICE, escape(self.baseuri())).encode())

    def _connect(self, request: Request, key: str) -> None:
        taken = request.detach()
        taken.watcher.close()
        stream = Stream(taken.transport, taken.data)
        before, self._viewer = self._viewer, _Viewer(self, stream)
        if before is not None:
            before.end(TAKEN_OVER)
        stream.push_or_forget(websocket.switching_protocols(key))
        self._waiting = self._history.copy(WAITING_BYTES)
        self._viewer.send(HELLO + b"smqrt\n")
        self._flush()

    def forget(self, viewer: _Viewer) -> None:
        """Called by a viewer that is gone."""
        if self._viewer is viewer:
            self._viewer = None
            self._waiting = _Lines(WAITING_BYTES)


@cache
def _page() -> str:
    return (resources.files("smqrt") / "rtl/tracelogger/index.html").read_text("utf-8")


def _shown(name: str, value: str) -> str:
    return f"{value[:_SHOWN]}…" if name.lower() in _SECRET and len(value) > _SHOWN else value


class _Lines:
    """Lines that wait, of so many bytes together: when more come, the oldest go and are counted."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = self._left_out = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def copy(self, most_bytes: int) -> _Lines:
        """The same lines with room for more."""
        copy = _Lines(most_bytes)
        copy._lines, copy._bytes = self._lines.copy(), self._bytes
        return copy

    def add(self, line: bytes) -> int:
        """Add a line; give how many went."""
        self._lines.append(line)
        self._bytes += len(line)
        before = self._left_out
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._lines.popleft())
            self._left_out += 1
        return self._left_out - before

    def take_left_out(self) -> int:
        """How many went since this was asked last."""
        left_out, self._left_out = self._left_out, 0
        return left_out

    def take(self, most_bytes: int) -> bytes:
        """Take lines from the front, about so many bytes, and at least one."""
        parts: list[bytes] = []
        size = 0
        while self._lines and (not parts or size + len(self._lines[0]) <= most_bytes):
            parts.append(self._lines.popleft())
            size += len(parts[-1])
        self._bytes -= size
        return b"".join(parts)


class _Handler(logging.Handler):
    """Hands records to a trace logger."""

    def __init__(self, owner: TraceLogger) -> None:
        super().__init__()
        self._owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            self._owner.show(self.format(record))
        except Exception:
            self.handleError(record)


class _Viewer:
    """The connection of one viewer, and the greenlet that reads from it."""

    def __init__(self, owner: TraceLogger, stream: Stream) -> None:
        self._owner, self._stream = owner, stream
        self._codec = websocket.WebSocketCodec(max_message_bytes=_MAX_MESSAGE_BYTES)
        stream.queue_limit_bytes = QUEUE_BYTES
        self._waits = False
        gevent.spawn(self._read)

    def takes(self) -> bool:
        """Whether there is room for a frame; if not, the owner is called once there is."""
        if self._stream.closed:
            return False
        if self._stream.queued_bytes < QUEUE_BYTES:
            return True
        if not self._waits:
            self._waits = True
            self._stream.writable(PATIENCE_S).then(self._room)
        return False

    def _room(self, _value: None, error: BaseException | None) -> None:
        self._waits = False
        if error is not None:
            self.end(b"")
        else:
            self._owner._flush()

    def send(self, payload: bytes) -> None:
        """Send a frame; a connection that fails ends by itself."""
        try:
            self._stream.push(self._codec.message(payload, is_text=False))
        except StreamError:
            self.end(b"")

    def end(self, last: bytes) -> None:
        """Send a last frame, unless it is empty, and close."""
        self._owner.forget(self)
        if not self._stream.closed:
            frame = self._codec.message(last, is_text=False) if last else b""
            self._stream.push_or_forget(frame + self._codec.close(1000 if last else 1001))
            self._stream.close(graceful=True)

    def _read(self) -> None:
        """Answer pings and the close; what viewers say has no meaning."""
        codec = self._codec
        try:
            while codec.close_code is None and (data := self._stream.read()):
                codec.feed(data)
                while codec.next() is not None or codec.has_more:
                    pass
                self._stream.push_or_forget(codec.take_replies())
        except (StreamError, ProtocolError):
            pass  # gone, or no WebSocket
        self.end(b"")
