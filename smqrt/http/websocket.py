"""Blocking WebSockets (RFC 6455) for HTTP requests."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from types import TracebackType
from typing import Any

from gevent import get_hub

from smqrt.errors import ArgumentError, ProtocolError, SmqrtError, StreamError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.loop.scheduling import Turn
from smqrt.process.current_process import close_with_app
from smqrt.smq.handshake import websocket_key
from smqrt.transport.stream import Stream
from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec

MAX_MESSAGE_BYTES = 1 << 20
INTERNAL_ERROR = 1011
_REASON_BYTES = 123  # a control frame has 125 bytes, two of them for the code
SEND_S = 30.0
"""The connection is closed if the client accepts no bytes for this time."""


class WebSocketClosedError(SmqrtError, ConnectionError):
    """The connection is closed, so nothing can be sent to the client."""


class WebSocket:
    """The WebSocket of a request. Its connection is detached from HTTP.

        def answer(request, relpath):
            with WebSocket(request) as client:
                for message in client:
                    client.send(message)

    It is closed by `close`, at the end of `with`, by garbage collection, and when the application ends.

    Args:
        request: a request whose response has not begun.
        max_message_bytes: size limit of a received message; a larger one closes the connection.
        subprotocol: a sub-protocol that the client offers in Sec-WebSocket-Protocol. None for the response's field of
            that name, if it was set.

    Attributes:
        close_code: close code (RFC 6455 §7.4.1); None while it is open, or if it was closed without one.

    Raises:
        HttpError: 426, the request is not for a WebSocket; 403, it is from a page of an origin that the setting
            `origins` does not allow; 400, the client does not offer the sub-protocol.
        RuntimeError: the response has begun.
    """

    def __init__(
        self, request: Request, *, max_message_bytes: int = MAX_MESSAGE_BYTES, subprotocol: str | None = None
    ) -> None:
        if max_message_bytes < 1:
            raise ArgumentError(f"max_message_bytes: {max_message_bytes} is too small; use at least 1")
        key = websocket_key(request)
        if key is None:
            raise HttpError(426, "This URL accepts only WebSocket connections.", headers={"Upgrade": "websocket"})
        request.access.check_origin(request)
        lines = request.upgrade_lines(subprotocol)
        detached = request.detach()
        detached.watcher.close()
        self.close_code: int | None = None
        self._pieces: list[bytes] = []  # of a large frame that is incomplete
        self._codec = WebSocketCodec(max_message_bytes=max_message_bytes)
        self._loop: Any = get_hub().loop
        self._stream = Stream(detached.transport, detached.data)
        self._stream.push_or_forget(websocket.switching_protocols(key, lines))
        close_with_app(self)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed. Only `receive` detects that the client has closed it."""
        return self._stream.closed

    def receive(self, timeout_s: float | None = None) -> str | bytes | None:
        """Wait for the next message; blocks the greenlet.

        Args:
            timeout_s: longest wait; None for no limit.

        Returns:
            a str or bytes, as the client sent it; None after the connection was closed.

        Raises:
            TimeoutError: no message arrived in time; the connection stays open.
        """
        end_s = None if timeout_s is None else monotonic() + timeout_s
        try:
            while True:
                Turn().yield_if_due()  # also if the next message is always in memory
                message = self._codec.next()
                if replies := self._codec.take_replies():
                    self._stream.push_or_forget(replies)
                if message is not None:
                    self._pieces.append(message.data)
                    if message.done_bytes == message.frame_bytes:
                        data = b"".join(self._pieces)
                        self._pieces.clear()
                        return data.decode() if message.is_text else data
                elif self._codec.close_code is not None:
                    self.close_code = self._codec.close_code
                    break
                elif not self._codec.has_more:
                    data = self._stream.read(timeout_s=None if end_s is None else max(end_s - monotonic(), 0.0))
                    if not data:
                        break
                    self._codec.feed(data)
            self.close()
        except ProtocolError as violation:
            self.close(websocket.close_code(violation.reason))
        except StreamError as error:
            if error.word == "timeout":
                raise TimeoutError(f"no message within {timeout_s:g} s") from None
            self.close()
        return None

    def __iter__(self) -> Iterator[str | bytes]:
        """Iterate over the messages until the connection is closed."""
        while (message := self.receive()) is not None:
            yield message

    def send(self, message: str | bytes, timeout_s: float = SEND_S) -> None:
        """Send a str as text, bytes as binary; blocks the greenlet while the client does not read.

        Any greenlet may send.

        Raises:
            WebSocketClosedError: the connection is closed. This call closes it if the client reads nothing for
                `timeout_s`.
        """
        is_text = isinstance(message, str)
        data = message.encode() if isinstance(message, str) else bytes(message)
        self._write(self._codec.message(data, is_text), timeout_s)
        Turn().yield_if_due()  # a loop of sends must not block other greenlets

    def send_control(self, opcode: int, data: bytes = b"") -> None:
        """Send a ping or a pong. Raises as `send`.

        Args:
            opcode: `smqrt.wire.websocket.PING` or `PONG`.
            data: payload, at most 125 bytes.
        """
        self._write(websocket.encode(opcode, data), SEND_S)

    def _write(self, frame: bytes, timeout_s: float) -> None:
        try:
            self._stream.write(frame, timeout_s)
        except StreamError as error:
            self.close()
            raise WebSocketClosedError(f"the WebSocket is closed: {error}") from None

    def close(self, code: int = websocket.CLOSE_NORMAL, reason: str = "") -> None:
        """Send a close frame and close; `receive` then returns None. A second call does nothing.

        Args:
            code: 1000, or a code of the application from 3000 to 4999.
            reason: text for the client, of which 123 bytes are sent.
        """
        if self._stream.closed:
            return
        if self.close_code is None:
            self.close_code = code
        _close_stream(self._stream, self._codec, code, reason)

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(INTERNAL_ERROR if isinstance(error, Exception) else websocket.CLOSE_NORMAL)

    def __del__(self) -> None:
        if hasattr(self, "_stream") and not self._stream.closed:
            # Any thread may run the garbage collector, and only the loop may use the stream.
            self._loop.run_callback_threadsafe(_close_stream, self._stream, self._codec, websocket.CLOSE_NORMAL, "")


def _close_stream(stream: Stream, codec: WebSocketCodec, code: int, reason: str) -> None:
    if stream.closed:
        return
    frame = codec.close(code, reason.encode()[:_REASON_BYTES].decode("utf-8", "ignore").encode())
    if frame:
        stream.push_or_forget(frame)
    stream.close(graceful=True)
