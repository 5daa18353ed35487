"""A WebSocket, either side of it."""

from __future__ import annotations

from smqrt.errors import ArgumentError, ProtocolError
from smqrt.http.message import RequestServer
from smqrt.lua.bridge import fail
from smqrt.lua.socket_handles import AGAIN, StreamHandle, Values
from smqrt.net.contexts import ClientTls, ServerTls
from smqrt.net.scheduling import share
from smqrt.net.stream import Stream
from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec, WebSocketMessage

MAX_WRITE_BYTES = 65535
MAX_PING_BYTES = 125

ONWARD: Values = ("onward",)  # no read gives this


class WebSocketHandle(StreamHandle):
    """A WebSocket behind its handshake. See `StreamHandle` for the arguments; `is_client`: this side connected."""

    __slots__ = ("_last", "codec")

    def __init__(
        self,
        stream: Stream,
        is_client: bool,
        tls: ClientTls | ServerTls | None = None,
        host: str = "",
        server: RequestServer | None = None,
    ) -> None:
        super().__init__(stream, tls, host, server)
        self.codec = WebSocketCodec(is_client)
        self._last: Values | None = None

    def receive(self) -> Values | None:
        """See `SocketHandle`: the data and whether it is text; of a large frame also the bytes so far and in all."""
        if self._last is not None:
            return self._last
        turn = share()
        while not turn.spent():
            values = self._step()
            if values is not ONWARD:
                return values
        return AGAIN

    def _step(self) -> Values | None:
        """Look at what is there and, when that is nothing, at what has arrived: what a read gives, or `ONWARD`."""
        codec = self.codec
        try:
            message = codec.next()
        except ProtocolError as violation:
            return self._end_with("socketreadfailed", websocket.close_code(violation.reason))
        if codec.replies:
            self._reply()
        if message is not None:
            return _values(message)
        if codec.close_code is not None:
            return self._end_with("socketclosed", codec.close_code)
        return ONWARD if codec.has_more else self._fill()

    def _fill(self) -> Values | None:
        data = self.stream.try_read()
        if data is None:
            return None
        if not data:
            return self.gone()
        self.codec.feed(data)
        return ONWARD

    def put(self, data: bytes, is_text: bool | None) -> bool:
        """See `SocketHandle`. Raises ArgumentError for data that no frame may carry."""
        if len(data) > MAX_WRITE_BYTES:
            raise ArgumentError(f"write: {len(data)} bytes; a WebSocket message takes at most {MAX_WRITE_BYTES} a call")
        if is_text and not data.isascii():
            _check_text(data)
        return self.stream.push(self.codec.message(data, bool(is_text)))

    def ping(self, data: bytes) -> bool:
        """Send a ping; false when the queue is full. Raises StreamError, ArgumentError."""
        if len(data) > MAX_PING_BYTES:
            raise ArgumentError(f"ping: {len(data)} bytes; a ping takes at most {MAX_PING_BYTES}")
        return self.stream.try_write(self.codec.ping(data))

    def close(self, code: int = websocket.CLOSE_NORMAL, text: bytes = b"") -> None:
        """Say goodbye and close; the reader, if any, gets nil, "socketclosed"."""
        if not self.stream.closed:
            goodbye = self.codec.close(code, text)
            if goodbye:
                self.stream.push_or_forget(goodbye)
            self.stream.close(linger=True)

    def _reply(self) -> None:
        replies, self.codec.replies = self.codec.replies, b""
        self.stream.push_or_forget(replies)

    def _end_with(self, word: str, code: int) -> Values:
        self._last = fail(word, code)
        self.close(code)
        return self._last


def _values(message: WebSocketMessage) -> Values:
    return tuple(message) if message.frame_bytes else message[:2]


def _check_text(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"write: the text is not UTF-8 at byte {error.start + 1}; send it as binary") from None
