"""WebSockets of requests (RFC 6455), in plain blocking style."""

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
from smqrt.process.current_application import close_with_app
from smqrt.smq.handshake import websocket_key
from smqrt.transport.stream import Stream
from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec

MAX_MESSAGE_BYTES = 1 << 20
INTERNAL_ERROR = 1011
_REASON_BYTES = 123  # of the 125 of a control frame
SEND_S = 30.0
"""A client that takes nothing for so long is gone, as for responses."""


class WebSocketClosedError(SmqrtError, ConnectionError):
    """The connection is closed: nothing can be sent to the client any more."""


class WebSocket:
    """The WebSocket that a request asks for; its connection leaves HTTP.

        def answer(request, relpath):
            with WebSocket(request) as client:
                for message in client:
                    client.send(message)

    It ends with `close`, at the end of `with`, when nobody refers to it any more, and with the application.

    Args:
        request: whose response has not begun.
        max_message_bytes: the largest message that is taken; the client is cut off with a larger one.
        subprotocol: one of those that the client offers in its header Sec-WebSocket-Protocol, sent in the answer; None
            for the response's field of that name, if it was set.

    Attributes:
        close_code: why it was closed (RFC 6455 §7.4.1), None while it is open or when no word came.

    Raises:
        HttpError: 426, the request asks for no WebSocket; 403, it comes from a page of another host that is not in the
            setting `origins`; 400, the client does not offer the sub-protocol.
        RuntimeError: the response has begun.
    """

    def __init__(
        self, request: Request, *, max_message_bytes: int = MAX_MESSAGE_BYTES, subprotocol: str | None = None
    ) -> None:
        if max_message_bytes < 1:
            raise ArgumentError(f"max_message_bytes: {max_message_bytes} is too small; use at least 1")
        key = websocket_key(request)
        if key is None:
            raise HttpError(426, "This address speaks WebSocket.", headers={"Upgrade": "websocket"})
        request.access.check_origin(request)
        lines = request.upgrade_lines(subprotocol)
        taken = request.detach()
        taken.watcher.close()
        self.close_code: int | None = None
        self._pieces: list[bytes] = []  # of a large frame that has not come whole
        self._codec = WebSocketCodec(max_message_bytes=max_message_bytes)
        self._loop: Any = get_hub().loop
        self._stream = Stream(taken.transport, taken.data)
        self._stream.push_or_forget(websocket.switching_protocols(key, lines))
        close_with_app(self)

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more. The end of a client shows in `receive`."""
        return self._stream.closed

    def receive(self, timeout_s: float | None = None) -> str | bytes | None:
        """Wait for the next message; blocks the greenlet.

        Args:
            timeout_s: for how long; None for ever.

        Returns:
            a text or bytes, as the client sent it; None when the connection is closed.

        Raises:
            TimeoutError: nothing came in time; the connection stays.
        """
        end_s = None if timeout_s is None else monotonic() + timeout_s
        try:
            return self._received(end_s)
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
        """Send a text as a text, bytes as binary; blocks the greenlet while the client does not read. Any greenlet may
        send.

        Raises:
            WebSocketClosedError: the connection is closed, or was now: the client took nothing for `timeout_s`.
        """
        is_text = isinstance(message, str)
        data = message.encode() if isinstance(message, str) else bytes(message)
        self._write(self._codec.message(data, is_text), timeout_s)
        Turn().yield_if_due()

    def send_control(self, opcode: int, data: bytes = b"") -> None:
        """Send a ping or a pong. Raises as `send`.

        Args:
            opcode: `smqrt.wire.websocket.PING` or `PONG`.
            data: what it carries, at most 125 bytes.
        """
        self._write(websocket.encode(opcode, data), SEND_S)

    def _write(self, frame: bytes, timeout_s: float) -> None:
        try:
            self._stream.write(frame, timeout_s)
        except StreamError as error:
            self.close()
            raise WebSocketClosedError(f"the WebSocket is closed: {error}") from None

    def close(self, code: int = websocket.CLOSE_NORMAL, reason: str = "") -> None:
        """Say goodbye and close; who waits in `receive` gets None. A second call does nothing.

        Args:
            code: 1000, or 3000 to 4999 of your own.
            reason: for the client; 123 bytes of it are sent.
        """
        if self._stream.closed:
            return
        if self.close_code is None:
            self.close_code = code
        _end(self._stream, self._codec, code, reason)

    def __enter__(self) -> WebSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(INTERNAL_ERROR if isinstance(error, Exception) else websocket.CLOSE_NORMAL)

    def __del__(self) -> None:
        if hasattr(self, "_stream") and not self._stream.closed:  # the garbage may be collected by any thread
            self._loop.run_callback_threadsafe(_end, self._stream, self._codec, websocket.CLOSE_NORMAL, "")

    def _received(self, end_s: float | None) -> str | bytes | None:
        while True:
            Turn().yield_if_due()  # who always finds something lets the others run
            message = self._codec.next()
            self._reply()
            if message is not None:
                self._pieces.append(message.data)
                if message.done_bytes == message.frame_bytes:
                    return self._whole(message.is_text)
            elif self._codec.close_code is not None:
                self.close_code = self._codec.close_code
                self.close()
                return None
            elif not self._codec.has_more and not self._fill(end_s):
                self.close()
                return None

    def _whole(self, is_text: bool) -> str | bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data.decode() if is_text else data

    def _fill(self, end_s: float | None) -> bool:
        timeout_s = None if end_s is None else max(end_s - monotonic(), 0.0)
        data = self._stream.read(timeout_s=timeout_s)
        self._codec.feed(data)
        return bool(data)

    def _reply(self) -> None:
        if replies := self._codec.take_replies():
            self._stream.push_or_forget(replies)


def _end(stream: Stream, codec: WebSocketCodec, code: int, reason: str) -> None:
    if stream.closed:
        return
    goodbye = codec.close(code, reason.encode()[:_REASON_BYTES].decode("utf-8", "ignore").encode())
    if goodbye:
        stream.push_or_forget(goodbye)
    stream.close(graceful=True)
