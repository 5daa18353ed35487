"""Trace logger: the server's log in a browser (spec: bas-api §4, §17).

    GET with X-Requested-With    204: no viewer, 503: there is a viewer
    WebSocket                    binary frames: byte 1 and a greeting, then byte 2 and lines of the trace;
                                 byte 3: a later viewer has replaced this one
    GET                          the page

Lines that a slow viewer does not read are dropped beyond a limit, and logging never blocks. A server with several
workers has one trace and one viewer: see the part about several workers.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from heapq import heappop, heappush
from html import escape
from importlib import resources
from itertools import count, islice
from time import monotonic, time
from typing import Any, NamedTuple

import gevent
from gevent import get_hub
from gevent.event import Event
from gevent.monkey import get_original

from smqrt.errors import ProtocolError, StreamError
from smqrt.http.headers import reason
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.tree import Directory
from smqrt.smq.handshake import websocket_key
from smqrt.transport.stream import Stream
from smqrt.wire import websocket
from smqrt.workers.worker_rpc import Message, News, WorkerRpc

# ---- Trace lines, bounded, merged from several workers by time

HOLD_S = 0.2
"""Time for which a line waits for older lines of other workers."""
_CHECK_S = 0.05


class Line(NamedTuple):
    """A line, or the lines of one log record.

    Attributes:
        at_s: time in Unix seconds.
        data: UTF-8, including the line feed.
    """

    at_s: float
    data: bytes


class Lines:
    """A queue of lines with a limit in bytes. Beyond it, the oldest lines are dropped and counted.

    Args:
        max_bytes: the limit.

    Attributes:
        added: number of lines added so far, including dropped ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines: deque[Line] = deque()
        self._bytes = self._dropped = 0
        self.added = 0

    def __len__(self) -> int:
        """Return the number of lines in the queue."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        """Iterate over the lines, the oldest first."""
        return iter(self._lines)

    def copy(self, max_bytes: int, behind: int = 0) -> Lines:
        """Return a copy with another limit.

        Args:
            max_bytes: see `Lines`.
            behind: copy only the lines added after this number; dropped ones among these are counted.
        """
        copy = Lines(max_bytes)
        present = min(self.added - behind, len(self._lines))
        for line in islice(self._lines, len(self._lines) - present, None):
            copy.add(line)
        # `behind` 0 requests the past, whose beginning is always missing and does not count as dropped.
        copy._dropped = self.added - behind - present if behind else 0
        return copy

    def add(self, line: Line) -> int:
        """Add a line; return how many lines were dropped for it."""
        self.added += 1
        self._lines.append(line)
        self._bytes += len(line.data)
        before = self._dropped
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._lines.popleft().data)
            self._dropped += 1
        return self._dropped - before

    def count_dropped(self, lines: int) -> None:
        """Count lines that were dropped by another worker."""
        self._dropped += lines

    def take_dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def take(self, max_bytes: int) -> list[Line]:
        """Remove and return the oldest lines, about `max_bytes`, but at least one if there is one."""
        taken: list[Line] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0].data) <= max_bytes):
            taken.append(self._lines.popleft())
            size += len(taken[-1].data)
        self._bytes -= size
        return taken


class MergedLines:
    """Merges lines of several workers by time. Each line is delivered `HOLD_S` after its time, a late one at once.

    Until `begin`, it collects past lines.

    Args:
        deliver: receives each line.
        past_bytes: limit for past lines; the oldest are dropped.
        max_bytes: limit for waiting lines; beyond it, the oldest is delivered early.
    """

    def __init__(self, deliver: Callable[[Line], object], past_bytes: int, max_bytes: int) -> None:
        self._deliver = deliver
        self._max_bytes, self._past_bytes = max_bytes, past_bytes
        self._waiting: list[tuple[float, int, Line]] = []
        self._bytes = 0
        self._number = count().__next__
        self._is_past, self._is_closed = True, False
        self._timer: Any = get_hub().loop.timer(_CHECK_S, _CHECK_S)

    def add(self, line: Line) -> None:
        """Add a line."""
        if self._is_closed:
            return
        heappush(self._waiting, (line.at_s, self._number(), line))
        self._bytes += len(line.data)
        if self._is_past:
            while self._bytes > self._past_bytes:
                self._pop()
            return
        while self._bytes > self._max_bytes:
            self._deliver(self._pop())
        self._update_timer()

    def begin(self) -> None:
        """End the collection of past lines and deliver them. A second call does nothing."""
        if self._is_past and not self._is_closed:
            self._is_past = False
            self._deliver_due()

    def deliver_all(self) -> None:
        """Deliver all waiting lines; called before `close`."""
        while self._waiting:
            self._deliver(self._pop())

    def close(self) -> None:
        """Discard the waiting lines, and ignore later ones. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._timer.stop()
            self._timer.close()
            self._waiting.clear()

    def _pop(self) -> Line:
        line = heappop(self._waiting)[-1]
        self._bytes -= len(line.data)
        return line

    def _deliver_due(self) -> None:
        now_s = time()
        # A line from the future is delivered at once: the clock was set back.
        while self._waiting and not now_s - HOLD_S < self._waiting[0][0] <= now_s:
            self._deliver(self._pop())
        self._update_timer()

    def _update_timer(self) -> None:
        if not self._waiting:
            self._timer.stop()
        elif not self._timer.active:
            self._timer.start(self._deliver_due)


# ---- Trace of a server with several workers
#
# The worker with the viewer requests the lines of the others.
#
#     request     {uri, claim, behind: [start, number]}
#                     the trace logger, the claim of the viewer (the latest one counts), the lines it has already
#     responses   {do: "lines", start, number, missed, lines: [[at_s, data], …]}
#                     the first one has the past lines, also if there are none
#                 {do: "replaced"}
#                     there is a later viewer
#
# `TraceLogger._viewer` of each worker is the one viewer of the server: its own, or that of another worker.

QUESTION = "trace lines"
PAST_S = 0.5
"""Time for which a viewer waits for the past lines of other workers."""
REPLACED: Message = {"do": "replaced"}

Claim = tuple[float, int]
"""Monotonic time of a viewer's connection, and number of its worker."""


class RemoteViewer:
    """The viewer of another worker, which has requested the lines of this worker.

    Args:
        claim: see `Claim`.
        past: the past lines, which are sent first.
        missed: number of dropped lines before them.
    """

    def __init__(self, claim: Claim, past: list[Line], missed: int) -> None:
        self.claim = claim
        self._batch: tuple[list[Line], int] | None = (past, missed)
        self._more = Event()
        self._is_over = self._is_replaced = False

    def is_ready(self) -> bool:
        """Return whether the last batch was sent."""
        return self._batch is None and not self._is_over

    def show(self, lines: list[Line], missed: int) -> None:
        """Send lines, and the number of dropped lines before them."""
        self._batch = lines, missed
        self._more.set()

    def end(self, is_replaced: bool = False) -> None:
        """End `news`. `is_replaced`: whether there is a later viewer; otherwise the trace logger is closed."""
        self._is_over, self._is_replaced = True, is_replaced
        self._more.set()

    def news(self, number: Callable[[], int], more: Callable[[], object]) -> News:
        """Yield the messages for the other worker.

        Args:
            number: returns the number of lines up to the last one that was sent.
            more: called when the next batch can be sent.
        """
        while self._batch is not None or not self._is_over:
            if self._batch is None:
                self._more.wait()
                self._more.clear()
                continue
            (lines, missed), self._batch = self._batch, None
            yield {"do": "lines", "start": _START, "number": number(), "missed": missed, "lines": lines}
            more()
        if self._is_replaced:
            yield REPLACED


_START = f"{os.getpid()} {monotonic()}"
"""Identifies this process, so that its line numbers are not confused with those of its predecessor."""


def behind_of(question: Message) -> int:
    """Return how many lines of this process the requesting worker has already."""
    start, number = question["behind"]
    return int(number) if start == _START else 0


class WorkerLines:
    """The lines of all workers, for the viewer of this worker.

    Args:
        worker_rpc: the workers.
        uri: returns the path of the trace logger, which identifies it in the other workers.
        claim: claim of the viewer.
        merged: merges the lines.
        missed: called with the number of lines that other workers have dropped.
        replaced: called when another worker has a later viewer.
    """

    def __init__(
        self,
        worker_rpc: WorkerRpc,
        uri: Callable[[], str],
        claim: Claim,
        merged: MergedLines,
        missed: Callable[[int], object],
        replaced: Callable[[], object],
    ) -> None:
        self._uri, self._claim, self._merged = uri, claim, merged
        self._missed, self._replaced = missed, replaced
        self._behind: dict[int, list[Any]] = {}
        self._without_past = set(worker_rpc.others)
        self._greenlets: list[gevent.Greenlet[..., None]] = [
            gevent.spawn(worker_rpc.follow, number, partial(self._question, number), partial(self._receive, number))
            for number in worker_rpc.others
        ]
        self._greenlets.append(gevent.spawn(self._begin))

    def add(self, line: Line) -> None:
        """Add a line of this worker."""
        self._merged.add(line)

    def deliver_all(self) -> None:
        """Deliver all waiting lines; called before the trace logger is closed."""
        self._merged.deliver_all()

    def close(self) -> None:
        """End the requests. A second call does nothing."""
        gevent.killall(self._greenlets, block=False)
        self._merged.close()

    def _begin(self) -> None:
        gevent.sleep(PAST_S)
        self._merged.begin()

    def _question(self, number: int) -> Message:
        behind = self._behind.get(number, ["", 0])
        return {"do": QUESTION, "uri": self._uri(), "claim": self._claim, "behind": behind}

    def _receive(self, worker: int, message: Message) -> None:
        if message == REPLACED:
            self._replaced()
            return
        self._behind[worker] = [message["start"], message["number"]]
        self._missed(message["missed"])
        for at_s, data in message["lines"]:
            self._merged.add(Line(at_s, data))
        self._without_past.discard(worker)
        if not self._without_past:
            self._merged.begin()


NAME = "tracelogger.service"
HELLO, LINES, TAKEN_OVER = b"\x01", b"\x02", b"\x03"
HISTORY_BYTES = 64 << 10  # of past lines for a new viewer
WAITING_BYTES = 256 << 10  # of unsent lines; beyond it, the oldest are dropped
FRAME_BYTES = 32 << 10
LINE_BYTES = 16 << 10  # of one record; the rest is cut
BODY_BYTES = 4 << 10  # of a request body: the beginning of the part that the application has read
QUEUE_BYTES = 64 << 10  # in the send queue of the viewer's connection
FOR_VIEWERS = "for_viewers"  # attribute of records that `on_line` does not receive
VIEWER_TIMEOUT_S = 30.0  # a viewer that reads nothing for this time is disconnected
_MAX_MESSAGE_BYTES = 1024  # messages of viewers are ignored
_SECRET = frozenset(("authorization", "proxy-authorization", "cookie", "set-cookie"))
_PASSWORD = re.compile(rb"((?:^|[&?\s])[\w.-]{0,32}(?:password|passwd|pwd)=)[^&\s]+", re.IGNORECASE)  # in a form
_SHOWN = 8  # characters of a secret, enough to distinguish two secrets in a trace
_SERVICE = "/rtl/tracelogger.service/"  # placeholder in the page, which is also served as a file
_NOT_TRACED = "not traced"  # in Request.env: requests of viewers are not traced
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'"


@dataclass
class TraceOptions:
    """Parts of HTTP requests in the trace; none by default.

    Attributes:
        request: a line for each request, with the status of its response.
        requestheaders: its header fields; only the beginning of cookies and passwords.
        responseheaders: the header fields that the application has set.
        requestbody: the beginning of its body, as far as the application has read it.
    """

    request: bool = False
    requestheaders: bool = False
    responseheaders: bool = False
    requestbody: bool = False

    @property
    def any(self) -> bool:
        """Whether any option is set."""
        return self.request or self.requestheaders or self.responseheaders or self.requestbody


_thread_id = get_original("_thread", "get_ident")
OPTIONS = tuple(item.name for item in fields(TraceOptions))


class TraceLogger(Directory):
    """A directory that sends log records to one viewer at a time.

    Args:
        name, priority: see `Directory`.
        server: server whose requests can be traced, or None.
        logger: name of the logger, which includes its children.
        worker_rpc: the workers of the server; None without other workers.

    Attributes:
        options: parts of requests in the trace.
        dropped: number of lines dropped because of slow viewers, in total.
        on_line: called in the loop with each line of this process; must not block. May be None.
    """

    def __init__(
        self,
        name: str = NAME,
        priority: int = 0,
        server: HttpServer | None = None,
        logger: str = "smqrt",
        worker_rpc: WorkerRpc | None = None,
    ) -> None:
        super().__init__(name, priority)
        self.options = TraceOptions()
        self.dropped = 0
        self.on_line: Callable[[Line], object] | None = None
        self._server = server
        self._worker_rpc, self._label = worker_rpc, f"{worker_rpc.place.label}: " if worker_rpc else ""
        self._history = Lines(HISTORY_BYTES)
        self._waiting = Lines(WAITING_BYTES)
        self._viewer: _Viewer | RemoteViewer | None = None
        self._worker_lines: WorkerLines | None = None
        self._flushing = False
        self._logger = logging.getLogger(logger)
        self._log_handler = _LogHandler(self)
        self._loop, self._thread = get_hub().loop, _thread_id()
        # logging uses `lastResort` only without other handlers, so it is added to keep its output.
        self._last_resort = None if self._logger.hasHandlers() else logging.lastResort
        for handler in filter(None, (self._log_handler, self._last_resort)):
            self._logger.addHandler(handler)

    @property
    def has_viewer(self) -> bool:
        """Whether there is a viewer, of any worker."""
        return self._viewer is not None

    def configure(self, options: Mapping[str, bool]) -> None:
        """Set options. Missing ones do not change; unknown ones are ignored."""
        for name in OPTIONS:
            if name in options:
                setattr(self.options, name, options[name])
        if self._server is not None:
            others = tuple(one for one in self._server.observers if one is not self)
            self._server.observers = (*others, self) if self.options.any else others

    def close(self) -> None:
        """Disconnect the viewer and remove the directory from the tree."""
        self.on_line = None
        for handler in filter(None, (self._log_handler, self._last_resort)):
            self._logger.removeHandler(handler)
        self.unlink()
        if self._server is not None:
            self._server.observers = tuple(one for one in self._server.observers if one is not self)
        if self._worker_lines is not None:
            self._worker_lines.deliver_all()
        self._flush()
        if self._viewer is not None:
            self._viewer.end()

    # Lines

    def show(self, text: str, at_s: float | None = None, is_for_viewers: bool = False) -> None:
        """Add a log record or a request to the trace. Any thread may call this; it never blocks.

        Args:
            text: one line, or several of one record.
            at_s: time in Unix seconds; None for now.
            is_for_viewers: whether `on_line` does not receive it.
        """
        at_s = time() if at_s is None else at_s
        if _thread_id() != self._thread:
            self._loop.run_callback_threadsafe(self.show, text, at_s, is_for_viewers)
            return
        if self._label:
            text = "\n".join(self._label + one for one in text.split("\n"))
        line = Line(at_s, text.encode("utf-8", "backslashreplace")[:LINE_BYTES] + b"\n")
        self._history.add(line)
        if self.on_line is not None and not is_for_viewers:
            self.on_line(line)
        if self._worker_lines is not None:
            self._worker_lines.add(line)
        elif self._viewer is not None:
            self._add_waiting(line)

    def _add_waiting(self, line: Line) -> None:
        self.dropped += self._waiting.add(line)
        if not self._flushing:
            self._flushing = True
            self._loop.run_callback(self._flush)

    def _flush(self) -> None:
        """Send the viewer as many lines as it accepts; at most `WAITING_BYTES` wait. Called by the loop."""
        self._flushing = False
        viewer = self._viewer
        while viewer is not None and self._waiting and viewer.is_ready():
            viewer.show(self._waiting.take(FRAME_BYTES), self._waiting.take_dropped())

    # Requests

    def began(self, request: Request) -> None:
        """See `HttpServer.observers`."""
        if self.options.requestbody and request.has_body:
            request.reader().tap(BODY_BYTES)

    def ended(self, request: Request, is_detached: bool) -> None:
        """See `HttpServer.observers`."""
        options, response = self.options, request.response
        if _NOT_TRACED in request.env:
            return
        outcome = "detached" if is_detached else f"{response.status} {reason(response.status)}"
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

    def _serve_own(self, request: Request, relpath: str) -> bool:
        if super()._serve_own(request, relpath):
            return True
        if relpath:
            return False
        request.env[_NOT_TRACED], response = True, request.response
        if request.method not in ("GET", "HEAD"):
            response.error(405, headers={"Allow": "GET, HEAD"})
        elif key := websocket_key(request):
            if not request.reject_denied_origin():
                self._connect(request, key)
        elif request.get("x-requested-with") is not None:
            response.status = 503 if self.has_viewer else 204
            response.headers.set("Cache-Control", "no-store")
        else:
            response.headers.set("Content-Type", "text/html; charset=utf-8")
            response.headers.set("Cache-Control", "no-store")
            response.headers.set("Content-Security-Policy", _POLICY)
            response.headers.set("X-Content-Type-Options", "nosniff")
            response.headers.set("X-Frame-Options", "DENY")
            response.write(_page().replace(_SERVICE, escape(self.baseuri())).encode())
        return True

    def _connect(self, request: Request, key: str) -> None:
        lines = request.upgrade_lines()
        detached = request.detach()
        detached.watcher.close()
        stream = Stream(detached.transport, detached.data)
        viewer = _Viewer(self, stream, (monotonic(), self._worker_rpc.place.number if self._worker_rpc else 0))
        self._replace_viewer(viewer)
        stream.push_or_forget(websocket.switching_protocols(key, lines))
        viewer.send(HELLO + b"smqrt\n")
        if self._worker_rpc is None:
            self._waiting = self._history.copy(WAITING_BYTES)
        else:
            merged = MergedLines(self._add_waiting, HISTORY_BYTES, WAITING_BYTES)
            for line in self._history:
                merged.add(line)
            replaced = partial(viewer.end, is_replaced=True)
            self._worker_lines = WorkerLines(
                self._worker_rpc, self.baseuri, viewer.claim, merged, self._count_dropped, replaced
            )
        self._flush()

    def _count_dropped(self, lines: int) -> None:
        self.dropped += lines
        self._waiting.count_dropped(lines)

    def lines(self, question: Message) -> News:
        """Yield the lines of this worker for the viewer of another one, see `smqrt.http.tracelogger`."""
        when_s, number = question["claim"]
        waiting = self._history.copy(WAITING_BYTES, behind_of(question))
        viewer = RemoteViewer((when_s, number), waiting.take(WAITING_BYTES), waiting.take_dropped())
        if not self._replace_viewer(viewer):
            yield REPLACED
            return
        try:
            yield from viewer.news(lambda: self._history.added - len(self._waiting), self._flush)
        finally:
            self.forget(viewer)

    def _replace_viewer(self, viewer: _Viewer | RemoteViewer) -> bool:
        """Replace the current viewer unless it is a later one; return whether that was done."""
        previous = self._viewer
        if previous is not None and previous.claim > viewer.claim:
            return False
        if previous is not None:
            previous.end(is_replaced=True)
            self.forget(previous)
        self._viewer = viewer
        return True

    def forget(self, viewer: _Viewer | RemoteViewer) -> None:
        """Remove a viewer that has disconnected."""
        if self._viewer is not viewer:
            return
        self._viewer = None
        self._waiting = Lines(WAITING_BYTES)
        if self._worker_lines is not None:
            self._worker_lines.close()
            self._worker_lines = None


@cache
def _page() -> str:
    return (resources.files("smqrt") / "rtl/tracelogger/index.html").read_text("utf-8")


def _shown(name: str, value: str) -> str:
    return f"{value[:_SHOWN]}…" if name.lower() in _SECRET and len(value) > _SHOWN else value


class _LogHandler(logging.Handler):
    """Logging handler of a trace logger."""

    def __init__(self, owner: TraceLogger) -> None:
        super().__init__()
        self._owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        try:
            self._owner.show(self.format(record), record.created, getattr(record, FOR_VIEWERS, False))
        except Exception:
            self.handleError(record)


class _Viewer:
    """The connection of one viewer, and the greenlet that reads from it."""

    def __init__(self, owner: TraceLogger, stream: Stream, claim: Claim) -> None:
        self._owner, self._stream, self.claim = owner, stream, claim
        self._codec = websocket.WebSocketCodec(max_message_bytes=_MAX_MESSAGE_BYTES)
        stream.queue_limit_bytes = QUEUE_BYTES
        self._awaits_space = False
        gevent.spawn(self._read)

    def is_ready(self) -> bool:
        """Return whether the send queue accepts a frame. Otherwise `_flush` is called later."""
        if self._stream.closed:
            return False
        if self._stream.queued_bytes < QUEUE_BYTES:
            return True
        if not self._awaits_space:
            self._awaits_space = True
            self._stream.writable(VIEWER_TIMEOUT_S).then(self._on_writable)
        return False

    def _on_writable(self, _value: None, error: BaseException | None) -> None:
        self._awaits_space = False
        if error is not None:
            self.end()
        else:
            self._owner._flush()

    def show(self, lines: list[Line], missed: int) -> None:
        """Send lines, and the number of dropped lines before them."""
        note = b"... %d lines were dropped: this viewer is too slow\n" % missed if missed else b""
        self.send(LINES + note + b"".join(line.data for line in lines))

    def send(self, payload: bytes) -> None:
        """Send a frame, or close a failed connection."""
        try:
            self._stream.push(self._codec.message(payload, is_text=False))
        except StreamError:
            self.end()

    def end(self, is_replaced: bool = False) -> None:
        """Close the connection. `is_replaced`: whether by a later viewer; then sends TAKEN_OVER first."""
        self._owner.forget(self)
        if not self._stream.closed:
            frame = self._codec.message(TAKEN_OVER, is_text=False) if is_replaced else b""
            self._stream.push_or_forget(frame + self._codec.close(1000 if is_replaced else 1001))
            self._stream.close(graceful=True)

    def _read(self) -> None:
        """Respond to pings and the close frame; messages of viewers are ignored."""
        codec = self._codec
        try:
            while codec.close_code is None and (data := self._stream.read()):
                codec.feed(data)
                while codec.next() is not None or codec.has_more:
                    pass
                self._stream.push_or_forget(codec.take_replies())
        except (StreamError, ProtocolError):
            pass  # disconnected, or a protocol error
        self.end()
