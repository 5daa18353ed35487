"""WSGI applications (PEP 3333) mounted in the tree of directories: Flask, Django, WsgiDAV."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import IO, Any

from smqrt.http.body import too_large
from smqrt.http.message import Request
from smqrt.http.response import Response
from smqrt.http.status import HttpError
from smqrt.http.tree import Directory
from smqrt.http.wsgi_websocket import KEY, EnvironWebSocket, WebSocketServer, websocket_error
from smqrt.loop.scheduling import Turn
from smqrt.smq.wsgi import REQUEST

log = logging.getLogger("smqrt.wsgi")

Environ = dict[str, Any]
"""What WSGI tells of a request: values of any kind."""
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
"""What `sys.exc_info` gives."""
Application = Callable[[Environ, Callable[..., Callable[[bytes], object]]], Iterable[bytes]]

_STATUS = re.compile(r"([2-5][0-9]{2})(?: .*)?")
_HOP_BY_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
_NEVER_PASSED_ON = frozenset(("content-type", "content-length", "proxy"))  # "Proxy" would become HTTP_PROXY
_FILE_PIECE_BYTES = 64 << 10
BODY_BYTES = 64 << 20
"""The longest body a mounted application gets, unless it says otherwise: frameworks keep what they call JSON whole."""


class WsgiDirectory(Directory):
    """A directory that a WSGI application answers.

    The application runs in the worker of its request and may block it. `wsgi.input` is the body as it arrives, under
    the server's time limits; what it reads as a whole counts as other bodies do. An exception is answered as one of a
    directory function is. A request that asks for a WebSocket has one in `wsgi.websocket`.

    Args:
        application: a WSGI application; `SCRIPT_NAME` is this directory, `PATH_INFO` begins with a slash.
        name, priority: see `Directory`.
        body_bytes: the longest body it gets, None for any length; 413 is answered to longer ones.

    Attributes:
        websockets: what its WebSockets share.
    """

    def __init__(
        self,
        application: Application,
        name: str | None = None,
        priority: int = 0,
        *,
        body_bytes: int | None = BODY_BYTES,
    ) -> None:
        super().__init__(name, priority)
        self.application = application
        self.body_bytes = body_bytes
        self.websockets = WebSocketServer(application)

    def _own(self, request: Request, relpath: str) -> bool:
        if super()._own(request, relpath):
            return True
        answer(self.application, request, self.baseuri(), relpath, self.body_bytes, self.websockets)
        return True


def answer(
    application: Application,
    request: Request,
    base: str,
    relpath: str,
    body_bytes: int | None = BODY_BYTES,
    websockets: WebSocketServer | None = None,
) -> None:
    """Let a WSGI application answer a request; blocks the greenlet until it has.

    Args:
        base: the path of what it is mounted on, with "/" at its end.
        relpath: the rest of the path.
        body_bytes: the longest body, None for any length.
        websockets: makes `wsgi.websocket` for requests that ask for one; None for none.

    Raises:
        ClientGoneError: the client is gone.
        HttpError: the body was too long, too slow or malformed.
        Exception: what the application raises.
    """
    if body_bytes is not None and (request.content_length or 0) > body_bytes:
        raise too_large(body_bytes)
    body = Input(request, body_bytes)
    environ = environ_of(request, base, relpath, body)
    sock = None if websockets is None else websockets.offer(request, environ)
    answering = _Answer(request, body, sock)
    pieces: Iterable[bytes] = ()
    is_failed = True
    try:
        pieces = application(environ, answering.start)
        answering.give(pieces)
        is_failed = False
    except Exception as error:
        if body.failure is not None:  # a framework makes something of its own of it
            raise body.failure from None
        if sock is None or not sock.closed or not isinstance(error, websocket_error()):
            raise
        log.debug("%s: the WebSocket ended: %s", request.path, error)  # the client has left: that is no mistake
    finally:
        if sock is not None:
            sock.end(is_failed)
            environ[KEY] = None
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def environ_of(request: Request, base: str, relpath: str, body: io.BufferedIOBase) -> Environ:
    """Build what WSGI tells of a request. Args as `answer`; body: `wsgi.input`."""
    host, port = request.local
    environ: Environ = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": _wsgi_text(base.removesuffix("/")),
        "PATH_INFO": _wsgi_text("/" + relpath),
        "QUERY_STRING": str(request.query),
        "CONTENT_TYPE": request.get("content-type") or "",
        "SERVER_NAME": host,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": f"HTTP/{request.version}",
        "REMOTE_ADDR": str(request.peer[0]),
        "REMOTE_PORT": str(request.peer[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "https" if request.secure else "http",
        "wsgi.input": body,
        "wsgi.input_terminated": True,
        "wsgi.errors": _Errors(request.path),
        "wsgi.multithread": True,  # of greenlets: what they share must be guarded all the same
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.file_wrapper": FileWrapper,
        REQUEST: request,
    }
    if request.content_length:
        environ["CONTENT_LENGTH"] = str(request.content_length)
    if (login := request.user()) is not None:
        environ["REMOTE_USER"], environ["AUTH_TYPE"] = _wsgi_text(login.name), login.kind
    for name, value in request.fields():
        if name.lower() not in _NEVER_PASSED_ON and "_" not in name:  # it would look like one with a dash
            environ["HTTP_" + name.upper().replace("-", "_")] = value
    return environ


class FileWrapper:
    """`wsgi.file_wrapper`: a file as an iterable of its pieces."""

    def __init__(self, file: IO[bytes], size_bytes: int = _FILE_PIECE_BYTES) -> None:
        self._file, self._size_bytes = file, size_bytes

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self._file.read(self._size_bytes), b"")

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._file, "close", None)
        if close is not None:
            close()


class Input(io.BufferedReader):
    """`wsgi.input`: the body as it arrives; what is not yet read stays with the client.

    One call gives no more than the server's limit for bodies in memory: a stranger's Content-Length is no size for a
    buffer.

    Attributes:
        failure: what the body ended with, if it did not come whole.
    """

    def __init__(self, request: Request, limit_bytes: int | None) -> None:
        self._arriving = _Arriving(request, limit_bytes)
        super().__init__(self._arriving, _FILE_PIECE_BYTES)
        self._most_bytes = request.body_limit_bytes

    @property
    def failure(self) -> HttpError | None:
        """See the class."""
        return self._arriving.failure

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes, fewer at the end; all without a size or with one over the limit. Raises as `Request.body`."""
        return super().read(-1 if size is None or size > self._most_bytes else size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """A line; one longer than the limit comes in parts. Raises as `Request.chunks`."""
        return super().readline(self._most_bytes if size is None or size < 0 else size)

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        """All lines, or some of together `hint` bytes. Raises as `Request.body`."""
        return super().readlines(hint) if hint and hint > 0 else self.read().splitlines(keepends=True)


class _Arriving(io.RawIOBase):
    """The body as it arrives; at most one piece of it is in memory."""

    def __init__(self, request: Request, limit_bytes: int | None) -> None:
        self._request = request
        self._pieces = request.chunks()
        self._rest = memoryview(b"")
        self._limit_bytes = limit_bytes
        self._size = 0
        self.failure: HttpError | None = None

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what has arrived; 0 at the end. Raises as `Request.chunks`, and HttpError 413."""
        if not self._rest:
            self._rest = memoryview(self._guarded(self._next))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def readall(self) -> bytes:
        """The whole rest, counted as held. Raises as `Request.body`."""
        rest, self._rest = bytes(self._rest), memoryview(b"")
        return rest + self._guarded(self._all)

    def _all(self) -> bytes:
        if self._request.is_read:  # when a login form was looked for in it
            return b"".join(self._pieces)
        return self._request.rest()

    def _next(self) -> bytes:
        piece = next(self._pieces, b"")
        self._size += len(piece)
        if self._limit_bytes is not None and self._size > self._limit_bytes:
            raise too_large(self._limit_bytes)
        return piece

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except HttpError as error:
            self.failure = error
            raise


class _Errors(io.TextIOBase):
    """`wsgi.errors`: lines of the server's log."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        if text.strip():
            log.error("%s: %s", self._path, text.rstrip())
        return len(text)


class _Answer:
    """The answer of one application to one request."""

    def __init__(self, request: Request, body: Input, sock: EnvironWebSocket | None) -> None:
        self._body, self._request, self._sock = body, request, sock
        self._response: Response = request.response
        self._started = False

    @property
    def _is_over(self) -> bool:
        """Whether a hub or a WebSocket has answered, or taken the connection: what the application says is dropped."""
        return self._response.ended or (not self._started and self._response.committed)

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExceptionInfo | None = None
    ) -> Callable[[bytes], object]:
        """`start_response`.

        Raises:
            RuntimeError: called twice, with nothing having gone wrong.
            ValueError: the status or a field is none.
            HttpError: the body did not come whole; what the application makes of that is not sent.
            Exception: that of `exc_info`, when the head was sent already.
        """
        if self._is_over:
            return self.write
        if self._body.failure is not None and not self._response.committed:
            raise self._body.failure
        if exc_info is not None and exc_info[1] is not None and self._response.committed:
            raise exc_info[1].with_traceback(exc_info[2])
        if exc_info is None and self._started:
            raise RuntimeError("start_response was called twice: a second call needs exc_info")
        found = _STATUS.fullmatch(status)
        if found is None:
            raise ValueError(f"status {status!r}: use three digits from 200, a space and the reason")
        if self._started:
            self._response.reset()
        self._started = True
        self._response.status = int(found[1])
        for name, value in headers:
            self._add(name, value)
        return self.write

    def _add(self, name: str, value: str) -> None:
        if name.lower() not in _HOP_BY_HOP:
            self._response.headers.add(name, value)
        elif name.lower() == "connection" and value.lower() == "close":
            self._response.close = True

    def write(self, data: bytes) -> None:
        """What `start_response` gives: sends at once, as PEP 3333 has it. Raises as `Response.write`."""
        if self._is_over:
            return
        self._send(data)
        self._response.flush()

    def give(self, pieces: Iterable[bytes]) -> None:
        """Send what the application gives, each piece before the next is asked for, and end the response."""
        if self._is_over and not (self._sock is not None and self._sock.is_opened):
            return
        self._announce(pieces)
        at_hand, turn = isinstance(pieces, list | tuple), Turn()
        for piece in pieces:  # a generator may use its WebSocket only now
            if piece and not self._is_over:
                self._send(piece)
                if not at_hand and not self._is_whole():
                    self._response.flush()
                turn.breathe()
        if not self._started and self._sock is not None:
            self._sock.close()  # gevent-websocket would have answered the handshake
        elif not self._started:
            raise RuntimeError("the application did not call start_response")
        self._response.end()

    def _announce(self, pieces: Iterable[bytes]) -> None:
        """An answer of one piece has a length."""
        single = isinstance(pieces, list | tuple) and len(pieces) == 1
        if single and self._started and not self._response.size and "content-length" not in self._response.headers:
            self._response.headers.set("Content-Length", str(len(pieces[0])))  # type: ignore[index]

    def _send(self, data: bytes) -> None:
        if not self._started:
            raise RuntimeError("the application wrote before it called start_response")
        self._response.write(data)

    def _is_whole(self) -> bool:
        """Whether all of the announced length was written: then it may leave in one send with the head."""
        return self._response.headers.get("content-length") == str(self._response.size)


def _wsgi_text(path: str) -> str:
    """A path as PEP 3333 has it: its bytes as latin-1."""
    return path.encode("utf-8", "surrogateescape").decode("latin-1")
