"""WSGI applications (PEP 3333) in the directory tree, such as Flask and Django."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any

from smqrt.errors import ArgumentError
from smqrt.http.body import too_large
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.response import Response
from smqrt.http.tree import Directory
from smqrt.http.websocket import INTERNAL_ERROR, WebSocket, WebSocketClosedError
from smqrt.loop.scheduling import Turn
from smqrt.smq.handshake import REQUEST, websocket_key
from smqrt.wire import websocket

# ---- `environ["wsgi.websocket"]`: WebSockets for WSGI applications, with the methods of gevent-websocket's object
#
# gevent-websocket responds to the handshake before it calls the application. Here the first call of `receive` or `send`
# responds, so that the application may also respond with plain HTTP, or pass the request to a hub.

log = logging.getLogger("smqrt.wsgi")

KEY, VERSION_KEY = "wsgi.websocket", "wsgi.websocket_version"
_CLOSED = "Connection is already closed"


def websocket_error() -> type[OSError]:
    """Return gevent-websocket's class of errors if the application has imported it, else `WebSocketClosedError`."""
    module = sys.modules.get("geventwebsocket.exceptions")
    found: type[OSError] = WebSocketClosedError if module is None else module.WebSocketError
    return found


class Client:
    """A client in `handler.server.clients`. Applications may add attributes.

    Args:
        address: address of the client, the key in `clients`.
        ws: its WebSocket.
    """

    def __init__(self, address: tuple[str, int], ws: EnvironWebSocket) -> None:
        self.address, self.ws = address, ws


class WebSocketServer:
    """State shared by the WebSockets of one mounted application: `handler.server` of gevent-websocket.

    Args:
        application: the WSGI application. Its `app_protocol(path)`, if present, returns the sub-protocol for a path.

    Attributes:
        clients: the connected clients by address.
    """

    def __init__(self, application: Any) -> None:
        self.application = application
        self.clients: dict[tuple[str, int], Client] = {}

    def offer(self, request: Request, environ: dict[str, Any]) -> EnvironWebSocket | None:
        """Add a WebSocket to the environ of a WebSocket request and return it; None for other requests."""
        if websocket_key(request) is None:
            return None
        offered = EnvironWebSocket(self, request, environ)
        environ[KEY], environ[VERSION_KEY] = offered, offered.version
        return offered

    def protocol_of(self, request: Request, path: str) -> str | None:
        """Return the sub-protocol of the application for a path, if the client offers it."""
        find = getattr(self.application, "app_protocol", None)
        chosen = find(path) if find is not None else None
        offers = (request.get("Sec-WebSocket-Protocol") or "").split(",")
        return str(chosen) if chosen in [one.strip() for one in offers] and chosen else None


class WebSocketHandler:
    """The parts of gevent-websocket's handler that applications use.

    Attributes:
        server: state shared by all WebSockets of the application.
        websocket: the WebSocket of this request.
        environ: environ of the request.
        client_address: address and port of the client. The port is changed if several clients would have the same.
        active_client: this client in `server.clients`.
    """

    logger = log

    def __init__(self, server: WebSocketServer, sock: EnvironWebSocket, address: tuple[str, int]) -> None:
        while address in server.clients:  # a proxy may not forward ports
            address = address[0], address[1] - 1
        self.server, self.websocket, self.client_address = server, sock, address
        self.application, self.environ = server.application, sock.environ
        self.active_client = server.clients[address] = Client(address, sock)


class EnvironWebSocket:
    """The WebSocket of a request, with the interface of gevent-websocket.

    The first call of `receive`, `send`, `send_frame` or `close` responds to the handshake. It rejects a request from a
    page of another origin with 403, as `smqrt.app.WebSocket` does. The connection is closed when the application
    returns.

    Args:
        server: state shared by all WebSockets of the application.
        request: the request for a WebSocket.
        environ: environ of the request.

    Raises:
        OSError: in all methods, gevent-websocket's WebSocketError (`websocket_error`): the connection is closed, or the
            request was answered with plain HTTP.
    """

    OPCODE_CONTINUATION, OPCODE_TEXT, OPCODE_BINARY = websocket.CONTINUATION, websocket.TEXT, websocket.BINARY
    OPCODE_CLOSE, OPCODE_PING, OPCODE_PONG = websocket.CLOSE, websocket.PING, websocket.PONG

    def __init__(self, server: WebSocketServer, request: Request, environ: dict[str, Any]) -> None:
        self._server, self._request = server, request
        self._sock: WebSocket | None = None
        self._handler: WebSocketHandler | None = None
        self._is_over = False
        self.environ: Mapping[str, Any] = environ
        self.origin: str | None = environ.get("HTTP_ORIGIN")
        self.protocol: str | None = environ.get("HTTP_SEC_WEBSOCKET_PROTOCOL")
        self.version: str = environ["HTTP_SEC_WEBSOCKET_VERSION"]
        self.path: str = environ["PATH_INFO"]

    @property
    def closed(self) -> bool:
        """Whether the connection is closed, or the request was answered with plain HTTP."""
        if self._sock is not None:
            return self._sock.closed
        return self._is_over or self._request.is_answered

    @property
    def handler(self) -> WebSocketHandler:
        """The handler, see `WebSocketHandler`. The first use adds the client to `handler.server.clients`."""
        if self._handler is None:
            self._handler = WebSocketHandler(self._server, self, self._request.peer)
        return self._handler

    @property
    def logger(self) -> logging.Logger:
        """The logger of gevent-websocket's interface."""
        return log

    @property
    def is_opened(self) -> bool:
        """Whether the handshake is complete."""
        return self._sock is not None

    def receive(self) -> str | bytearray | None:
        """Wait for the next message; blocks the greenlet.

        Returns:
            text as str, binary data as bytearray; None once, after the connection was closed.
        """
        message = self._opened().receive()
        return bytearray(message) if isinstance(message, bytes) else message

    def send(self, message: object, binary: bool | None = None) -> None:
        """Send a message; blocks the greenlet while the client does not read. Any greenlet may send.

        Args:
            message: str or bytes. With `binary=False` any value, converted with `str`.
            binary: whether to send binary data; None for binary unless it is a str.

        Raises:
            ArgumentError: the message is neither str nor bytes, or bytes to be sent as text are not UTF-8.
        """
        sock = self._opened()  # before the check: programs send the None of `receive`, and expect WebSocketError
        as_text = isinstance(message, str) if binary is None else not binary
        data: str | bytes
        if not as_text:
            data = _binary(message)
        elif not isinstance(message, bytes | bytearray | memoryview):
            data = str(message)
        else:
            try:
                data = bytes(message).decode()
            except UnicodeDecodeError as error:
                raise ArgumentError(f"message: not UTF-8 at byte {error.start + 1}; send it as binary") from None
        try:
            sock.send(data)
        except WebSocketClosedError as error:
            raise websocket_error()(str(error)) from None

    def send_frame(self, message: object, opcode: int) -> None:
        """Send one frame: text, binary data, ping, pong or close.

        Args:
            message: payload.
            opcode: one of `OPCODE_TEXT`, `OPCODE_BINARY`, `OPCODE_PING`, `OPCODE_PONG`, `OPCODE_CLOSE`.

        Raises:
            ArgumentError: see `send`; an unknown opcode; more than 125 bytes in a ping or pong.
        """
        sock = self._opened()
        if opcode in (self.OPCODE_TEXT, self.OPCODE_BINARY):
            self.send(message, opcode == self.OPCODE_BINARY)
        elif opcode == self.OPCODE_CLOSE:
            self.close(message=message)
        elif opcode in (self.OPCODE_PING, self.OPCODE_PONG):
            data = _binary(message)
            if len(data) > websocket.MAX_CONTROL_BYTES:
                raise ArgumentError(
                    f"message: {len(data)} bytes; limit of a ping or pong: {websocket.MAX_CONTROL_BYTES}"
                )
            try:
                sock.send_control(opcode, data)
            except WebSocketClosedError as error:
                raise websocket_error()(str(error)) from None
        else:
            raise ArgumentError(f"opcode: {opcode!r} cannot be sent; use one of the OPCODE_ names")

    def close(self, code: int = websocket.CLOSE_NORMAL, message: object = b"") -> None:
        """Send a close frame and close. A second call does nothing.

        Args:
            code: 1000, or a code of the application from 3000 to 4999.
            message: reason, str or bytes, of which 123 bytes are sent.
        """
        if not self.closed:
            self._opened().close(code, _binary(message or b"").decode("utf-8", "replace"))

    def end(self, is_failed: bool) -> None:
        """Close after the application has returned or has raised an exception."""
        self._is_over = True
        if self._sock is not None:
            self._sock.close(INTERNAL_ERROR if is_failed else websocket.CLOSE_NORMAL)
        if self._handler is not None:
            self._server.clients.pop(self._handler.client_address, None)
        self.environ = {}  # breaks a reference cycle: it contains this object

    def _opened(self) -> WebSocket:
        """Return the connection, after the handshake."""
        if self.closed:
            raise websocket_error()(_CLOSED)
        if self._sock is None:
            chosen = self._server.protocol_of(self._request, self.path)
            try:
                self._sock = WebSocket(self._request, subprotocol=chosen)
            except HttpError as rejection:
                self._request.response.error(rejection.status, rejection.detail)
                raise websocket_error()(f"the handshake was rejected: {rejection.detail}") from None
            _ = self.handler  # adds the client to `clients`
        return self._sock


def _binary(message: object) -> bytes:
    if isinstance(message, str):
        return message.encode()
    if isinstance(message, bytes | bytearray | memoryview):
        return bytes(message)
    raise ArgumentError(f"message: {type(message).__name__} cannot be sent; use str or bytes")


# ---- WSGI

Environ = dict[str, Any]
"""The environ of a WSGI request; values of any type."""
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
"""The result of `sys.exc_info`."""
Application = Callable[[Environ, Callable[..., Callable[[bytes], object]]], Iterable[bytes]]

_STATUS = re.compile(r"([2-5][0-9]{2})(?: .*)?")
# PEP 3333: only the server may send these.
_HOP_BY_HOP = frozenset(("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"))
_NOT_IN_ENVIRON = frozenset(("content-type", "content-length", "proxy"))  # "Proxy" would become HTTP_PROXY
_FILE_PIECE_BYTES = 64 << 10
BODY_BYTES = 64 << 20
"""Default limit of bodies for mounted applications: frameworks read JSON into memory."""


class WsgiDirectory(Directory):
    """A directory that is served by a WSGI application.

    The application runs in the greenlet of its request and may block it. `wsgi.input` reads the body while it arrives,
    within the server's time limits. A body that is read as a whole counts as memory for bodies. An exception gets the
    same response as one in a directory function. `wsgi.websocket` is the WebSocket of a WebSocket request.

    Args:
        application: a WSGI application. `SCRIPT_NAME` is this directory; `PATH_INFO` begins with a slash.
        name, priority: see `Directory`.
        body_bytes: limit of bodies, None for no limit. Larger ones get a 413 response.

    Attributes:
        websockets: state shared by its WebSockets.
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

    def _serve_own(self, request: Request, relpath: str) -> bool:
        if super()._serve_own(request, relpath):
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
    """Handle a request with a WSGI application; blocks the greenlet until the response is complete.

    Args:
        application: the WSGI application.
        request: the request.
        base: path of the application's directory, with "/" at its end.
        relpath: the rest of the path.
        body_bytes: limit of the body, None for no limit.
        websockets: creates `wsgi.websocket` for WebSocket requests; None for no WebSockets.

    Raises:
        ClientGoneError: the client has closed the connection.
        HttpError: the body was too large, too slow or malformed.
        Exception: any exception of the application.
    """
    if body_bytes is not None and (request.content_length or 0) > body_bytes:
        raise too_large(body_bytes)
    body = Input(request, body_bytes)
    environ = environ_of(request, base, relpath, body)
    sock = None if websockets is None else websockets.offer(request, environ)
    response = _WsgiResponse(request, body, sock)
    pieces: Iterable[bytes] = ()
    is_failed = True
    try:
        pieces = application(environ, response.start)
        response.send(pieces)
        is_failed = False
    except Exception as error:
        if body.failure is not None:  # `error` is then often an exception that a framework has raised instead
            raise body.failure from None
        if sock is None or not sock.closed or not isinstance(error, websocket_error()):
            raise
        log.debug("%s: the WebSocket was closed: %s", request.path, error)  # by the client, so it is not an error
    finally:
        if sock is not None:
            sock.end(is_failed)
            environ[KEY] = None
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def environ_of(request: Request, base: str, relpath: str, body: io.BufferedIOBase) -> Environ:
    """Return the environ of a request. Args as `answer`; `body` is `wsgi.input`."""
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
        "wsgi.multithread": True,  # requests run concurrently in greenlets, so shared state needs locks
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
        if name.lower() not in _NOT_IN_ENVIRON and "_" not in name:  # "X_A" would get the same key as "X-A"
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
    """`wsgi.input`: reads the body while it arrives. TCP slows down a client whose bytes are not read.

    One call returns at most the server's limit for bodies in memory, because applications pass the Content-Length of a
    client as the size.
    """

    def __init__(self, request: Request, limit_bytes: int | None) -> None:
        self._arriving = _ArrivingBody(request, limit_bytes)
        super().__init__(self._arriving, _FILE_PIECE_BYTES)
        self._max_bytes = request.body_limit_bytes

    @property
    def failure(self) -> HttpError | None:
        """The error that ended the body, if it is incomplete."""
        return self._arriving.failure

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, or all if `size` is missing or over the limit. Raises as `Request.body`."""
        return super().read(-1 if size is None or size > self._max_bytes else size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line. A line over the limit is returned in parts. Raises as `Request.chunks`."""
        return super().readline(self._max_bytes if size is None or size < 0 else size)

    def readlines(self, hint: int | None = -1, /) -> list[bytes]:
        """Read all lines, or lines of about `hint` bytes. Raises as `Request.body`."""
        return super().readlines(hint) if hint and hint > 0 else self.read().splitlines(keepends=True)


class _ArrivingBody(io.RawIOBase):
    """Reader of a body that arrives; at most one piece of it is in memory."""

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
        """Read arrived bytes into the buffer; return their number. Raises as `Request.chunks`, and HttpError 413."""
        if not self._rest:
            self._rest = memoryview(self._guarded(self._next))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size

    def readall(self) -> bytes:
        """Read the whole rest, which counts as memory for bodies. Raises as `Request.body`."""
        rest, self._rest = bytes(self._rest), memoryview(b"")
        if self._request.is_read:  # in memory, because an authenticator has looked for a login form in it
            return rest + self._guarded(lambda: b"".join(self._pieces))
        return rest + self._guarded(lambda: self._request.reader().whole(self._request.body_limit_bytes))

    def _next(self) -> bytes:
        piece = next(self._pieces, b"")
        self._size += len(piece)
        if self._limit_bytes is not None and self._size > self._limit_bytes:
            raise too_large(self._limit_bytes)
        return piece

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        """Call `read`, and store its HttpError as `failure`."""
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


class _WsgiResponse:
    """The response of an application to one request."""

    def __init__(self, request: Request, body: Input, sock: EnvironWebSocket | None) -> None:
        self._body, self._request, self._sock = body, request, sock
        self._response: Response = request.response
        self._started = False

    @property
    def _is_over(self) -> bool:
        """Whether a hub or a WebSocket has responded or detached the connection; then later output is ignored."""
        return self._response.ended or (not self._started and self._response.committed)

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExceptionInfo | None = None
    ) -> Callable[[bytes], object]:
        """Set status and header fields: the `start_response` of PEP 3333.

        Raises:
            RuntimeError: a second call without `exc_info`.
            ValueError: the status or a header field is invalid.
            HttpError: the body is incomplete; this replaces the error response of the application.
            Exception: the exception in `exc_info`, if the head was already sent.
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
            if name.lower() not in _HOP_BY_HOP:
                self._response.headers.add(name, value)
            elif name.lower() == "connection" and value.lower() == "close":
                self._response.close = True
        return self.write

    def write(self, data: bytes) -> None:
        """Send bytes at once (PEP 3333); the result of `start_response`. Raises as `Response.write`."""
        if self._is_over:
            return
        self._send(data)
        self._response.flush()

    def send(self, pieces: Iterable[bytes]) -> None:
        """Send each piece of the application before requesting the next, and end the response."""
        if self._is_over and not (self._sock is not None and self._sock.is_opened):
            return
        response, turn = self._response, Turn()
        is_list = isinstance(pieces, list | tuple)
        is_single = isinstance(pieces, list | tuple) and len(pieces) == 1
        if is_single and self._started and not response.size and "content-length" not in response.headers:
            response.headers.set("Content-Length", str(len(pieces[0])))  # type: ignore[index]
        for piece in pieces:  # the code of a generator runs only now, and may use its WebSocket
            if piece and not self._is_over:
                self._send(piece)
                is_whole = response.headers.get("content-length") == str(response.size)
                if not is_list and not is_whole:  # a whole body can be sent together with the head
                    response.flush()
                turn.yield_if_due()
        if not self._started and self._sock is not None:
            self._sock.close()  # gevent-websocket would have completed the handshake before calling the application
        elif not self._started:
            raise RuntimeError("the application did not call start_response")
        self._response.end()

    def _send(self, data: bytes) -> None:
        if not self._started:
            raise RuntimeError("the application wrote before it called start_response")
        self._response.write(data)


def _wsgi_text(path: str) -> str:
    """Return a path in the form of PEP 3333: its bytes decoded as latin-1."""
    return path.encode("utf-8", "surrogateescape").decode("latin-1")
