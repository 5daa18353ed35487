"""`environ["wsgi.websocket"]`: WebSockets for WSGI applications, with the methods of gevent-websocket's object.

gevent-websocket answers the handshake before it calls the application. Here it is answered when the application first
receives or sends, so that the application may also answer such a request as plain HTTP, or give it to a hub.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from smqrt.errors import ArgumentError
from smqrt.http.message import Request
from smqrt.http.status import HttpError
from smqrt.http.websocket import INTERNAL_ERROR, WebSocket, WebSocketClosedError
from smqrt.smq.handshake import websocket_key
from smqrt.wire import websocket

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
