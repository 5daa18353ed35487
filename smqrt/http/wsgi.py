"""WSGI applications (PEP 3333) mounted in the tree of directories: Flask, Django, WsgiDAV."""

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
from smqrt.smq.handshake import websocket_key
from smqrt.smq.wsgi import REQUEST
from smqrt.wire import websocket

# ---- `environ["wsgi.websocket"]`: WebSockets for WSGI applications, with the methods of gevent-websocket's object.
#
# gevent-websocket answers the handshake before it calls the application. Here it is answered when the application first
# receives or sends, so that the application may also answer such a request as plain HTTP, or give it to a hub.

log = logging.getLogger("smqrt.wsgi")

KEY, VERSION_KEY = "wsgi.websocket", "wsgi.websocket_version"
_CLOSED = "Connection is already closed"


def websocket_error() -> type[OSError]:
    """Return the class of errors: gevent-websocket's where the application has imported it, else ours."""
    module = sys.modules.get("geventwebsocket.exceptions")
    found: type[OSError] = WebSocketClosedError if module is None else module.WebSocketError
    return found


class Client:
    """A client in `handler.server.clients`; an application may set attributes of its own.

    Args:
        address: of the client, the key in `clients`.
        ws: its WebSocket.
    """

    def __init__(self, address: tuple[str, int], ws: EnvironWebSocket) -> None:
        self.address, self.ws = address, ws


class WebSocketServer:
    """What the WebSockets of one mounted application share: `handler.server` of gevent-websocket.

    Args:
        application: the WSGI application. Its `app_protocol(path)`, if it has that, names the sub-protocol of a path.

    Attributes:
        clients: the clients that are connected, by their address.
    """

    def __init__(self, application: Any) -> None:
        self.application = application
        self.clients: dict[tuple[str, int], Client] = {}

    def offer(self, request: Request, environ: dict[str, Any]) -> EnvironWebSocket | None:
        """Put a WebSocket into the environ of a request that asks for one; None when it does not."""
        if websocket_key(request) is None:
            return None
        offered = EnvironWebSocket(self, request, environ)
        environ[KEY], environ[VERSION_KEY] = offered, offered.version
        return offered

    def protocol_of(self, request: Request, path: str) -> str | None:
        """Return the sub-protocol that the application speaks at a path, if the client offers it."""
        find = getattr(self.application, "app_protocol", None)
        chosen = find(path) if find is not None else None
        offers = (request.get("Sec-WebSocket-Protocol") or "").split(",")
        return str(chosen) if chosen in [one.strip() for one in offers] and chosen else None


class WebSocketHandler:
    """What applications use of gevent-websocket's handler.

    Attributes:
        server: what all WebSockets of the application share.
        websocket: the WebSocket of this request.
        environ: of the request.
        client_address: the client's address and port; another number where several clients would have the same.
        active_client: this client in `server.clients`.
    """

    logger = log

    def __init__(self, server: WebSocketServer, sock: EnvironWebSocket, address: tuple[str, int]) -> None:
        while address in server.clients:  # a proxy may name no ports
            address = address[0], address[1] - 1
        self.server, self.websocket, self.client_address = server, sock, address
        self.application, self.environ = server.application, sock.environ
        self.active_client = server.clients[address] = Client(address, sock)


class EnvironWebSocket:
    """The WebSocket of a request, as gevent-websocket has it.

    The handshake is answered by the first call of `receive`, `send`, `send_frame` or `close`. A request of a page of
    another host gets 403 then, as with `smqrt.app.WebSocket`. The connection is closed when the application returns.

    Args:
        server: what all WebSockets of the application share.
        request: asks for a WebSocket.
        environ: of the request.

    Raises:
        OSError: in all methods, gevent-websocket's WebSocketError (`websocket_error`): the connection is closed, or the
            request was answered otherwise.
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
        """Whether nothing can be sent or received any more; also when the request was answered otherwise."""
        if self._sock is not None:
            return self._sock.closed
        return self._is_over or self._request.is_answered

    @property
    def handler(self) -> WebSocketHandler:
        """The handler: see `WebSocketHandler`. From now on the client is in `handler.server.clients`."""
        if self._handler is None:
            self._handler = WebSocketHandler(self._server, self, self._request.peer)
        return self._handler

    @property
    def logger(self) -> logging.Logger:
        """Where gevent-websocket would log."""
        return log

    @property
    def is_opened(self) -> bool:
        """Whether the handshake was answered."""
        return self._sock is not None

    def receive(self) -> str | bytearray | None:
        """Wait for the next message; blocks the greenlet.

        Returns:
            a text as str, binary data as bytearray; None once, when the connection ends.
        """
        message = self._opened().receive()
        return bytearray(message) if isinstance(message, bytes) else message

    def send(self, message: object, binary: bool | None = None) -> None:
        """Send a message; blocks the greenlet while the client does not read. Any greenlet may send.

        Args:
            message: str or bytes; with `binary=False` any value, as its text.
            binary: send it as binary data; None for what is no str.

        Raises:
            ArgumentError: the message is neither, or bytes that are to be text are not UTF-8.
        """
        sock = self._opened()  # first: programs send the None that `receive` gave, and expect WebSocketError
        as_text = isinstance(message, str) if binary is None else not binary
        data = _text(message) if as_text else _binary(message)
        try:
            sock.send(data)
        except WebSocketClosedError as error:
            raise websocket_error()(str(error)) from None

    def send_frame(self, message: object, opcode: int) -> None:
        """Send one frame: a text, binary data, a ping, a pong or a close.

        Args:
            message: what it carries.
            opcode: one of `OPCODE_TEXT`, `OPCODE_BINARY`, `OPCODE_PING`, `OPCODE_PONG`, `OPCODE_CLOSE`.

        Raises:
            ArgumentError: see `send`; another opcode; over 125 bytes in a ping or pong.
        """
        sock = self._opened()
        if opcode in (self.OPCODE_TEXT, self.OPCODE_BINARY):
            self.send(message, opcode == self.OPCODE_BINARY)
        elif opcode == self.OPCODE_CLOSE:
            self.close(message=message)
        elif opcode in (self.OPCODE_PING, self.OPCODE_PONG):
            data = _binary(message)
            if len(data) > websocket.MAX_CONTROL_BYTES:
                raise ArgumentError(f"message: {len(data)} bytes; a ping or pong takes {websocket.MAX_CONTROL_BYTES}")
            try:
                sock.send_control(opcode, data)
            except WebSocketClosedError as error:
                raise websocket_error()(str(error)) from None
        else:
            raise ArgumentError(f"opcode: {opcode!r} is no frame that can be sent; use one of the OPCODE_ names")

    def close(self, code: int = websocket.CLOSE_NORMAL, message: object = b"") -> None:
        """Send a close frame and close. A second call does nothing.

        Args:
            code: 1000, or 3000 to 4999 of your own.
            message: the reason, str or bytes; 123 bytes of it are sent.
        """
        if not self.closed:
            self._opened().close(code, _binary(message or b"").decode("utf-8", "replace"))

    def end(self, is_failed: bool) -> None:
        """Close because the application has returned, or has raised an exception."""
        self._is_over = True
        if self._sock is not None:
            self._sock.close(INTERNAL_ERROR if is_failed else websocket.CLOSE_NORMAL)
        if self._handler is not None:
            self._server.clients.pop(self._handler.client_address, None)
        self.environ = {}  # it has this object: else both wait for the garbage collector

    def _opened(self) -> WebSocket:
        """Return the connection, after the handshake."""
        if self.closed:
            raise websocket_error()(_CLOSED)
        if self._sock is None:
            chosen = self._server.protocol_of(self._request, self.path)
            try:
                self._sock = WebSocket(self._request, subprotocol=chosen)
            except HttpError as refusal:
                self._request.response.error(refusal.status, refusal.detail)
                raise websocket_error()(f"the handshake was refused: {refusal.detail}") from None
            _ = self.handler  # enters the client
        return self._sock


def _text(message: object) -> str:
    if not isinstance(message, bytes | bytearray | memoryview):
        return str(message)
    try:
        return bytes(message).decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"message: not UTF-8 at byte {error.start + 1}; send it as binary") from None


def _binary(message: object) -> bytes:
    if isinstance(message, str):
        return message.encode()
    if isinstance(message, bytes | bytearray | memoryview):
        return bytes(message)
    raise ArgumentError(f"message: {type(message).__name__} can't be sent; use str or bytes")


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
                turn.yield_if_due()
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
        """Return whether all of the announced length was written: then it may leave in one send with the head."""
        return self._response.headers.get("content-length") == str(self._response.size)


def _wsgi_text(path: str) -> str:
    """A path as PEP 3333 has it: its bytes as latin-1."""
    return path.encode("utf-8", "surrogateescape").decode("latin-1")
