"""WebSocket connections of clients, as the transport of another protocol.

`upgrade` sends the HTTP request and returns a `Stream` of the bytes inside binary messages. The borders of messages
have no meaning.
"""

from __future__ import annotations

import re
from time import monotonic
from typing import Any

from smqrt.errors import ProtocolError, StreamError
from smqrt.printable import printable
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Buffer, TlsTransport
from smqrt.wire import websocket
from smqrt.wire.url import Url
from smqrt.wire.websocket import WebSocketCodec

_MAX_HEAD_BYTES = 16384
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\Z")
_READ_BYTES = 8192  # up to 4,000 frames, which take about 10 ms
_FRAME_BYTES = 65536  # of a sent message: a larger one would stay in memory while the socket is full
_MAX_OUT_BYTES = 2 * _FRAME_BYTES  # no pongs are added to more unsent bytes


def upgrade(stream: Stream, url: Url, subprotocol: str, timeout_s: float) -> Stream:
    """Turn a new connection into a WebSocket, and return the stream of its messages. Blocks the greenlet.

    Args:
        stream: connected, after the TLS handshake of a `wss` URL; the result replaces it.
        url: the host and the target of the request.
        subprotocol: the protocol inside the messages.
        timeout_s: for the response.

    Raises:
        StreamError: "invalidresponse" (another server than a WebSocket server with this sub-protocol), "timeout", and
            the errors of the stream. The stream is closed.
    """
    try:
        rest = _handshake(stream, url, subprotocol, monotonic() + timeout_s)
        transport, unread = stream.release()
        return Stream(WebSocketTransport(transport, rest + unread))  # type: ignore[arg-type]  # it has the same methods
    except BaseException:
        stream.close()
        raise


def _handshake(stream: Stream, url: Url, subprotocol: str, end_s: float) -> bytes:
    """Send the request, and return the bytes after the head of the response."""
    key = websocket.new_key()
    fields = [("Host", url.authority), *websocket.request_headers(key), ("Sec-WebSocket-Protocol", subprotocol)]
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    stream.write(f"GET {url.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"), max(end_s - monotonic(), 0.0))
    received = bytearray()
    while (end := received.find(b"\r\n\r\n", max(0, len(received) - _MAX_HEAD_BYTES))) < 0:
        if len(received) > _MAX_HEAD_BYTES or not b"HTTP/".startswith(bytes(received[:5])):
            raise _rejected(url, "it does not answer with HTTP")
        data = stream.read(_MAX_HEAD_BYTES, max(end_s - monotonic(), 0.0))
        if not data:
            raise _rejected(url, "it closed the connection without a response")
        received += data
    first, *fields_received = bytes(received[:end]).split(b"\r\n")
    match = _STATUS_LINE.match(first)
    if match is None or int(match[1]) != 101:
        raise _rejected(url, f"it answered {printable(first.decode('latin-1'))}")
    parts = (line.partition(b":") for line in fields_received)
    found = {name.strip().lower(): value.strip().decode("latin-1") for name, _, value in parts}
    if found.get(b"sec-websocket-accept") != websocket.accept_key(key):
        raise _rejected(url, "it answered the upgrade with a wrong key")
    if found.get(b"sec-websocket-protocol", subprotocol) != subprotocol:
        raise _rejected(url, f"it does not accept the sub-protocol {subprotocol}")
    return bytes(received[end + 4 :])


def _rejected(url: Url, what: str) -> StreamError:
    # Without the path, whose query may contain a token.
    return StreamError("invalidresponse", f"{url.scheme}://{url.authority} accepts no WebSocket at this path: {what}")


class WebSocketTransport:
    """A transport whose data is in the binary messages of a WebSocket.

    `send` counts data as sent when the socket has its whole frame. Until then, it raises `BlockingIOError`, and the
    caller must pass the same data again, as `Stream` does.

    Args:
        transport: connected and non-blocking, after the handshake; closed with this object.
        data: bytes that were received behind the handshake.
    """

    __slots__ = ("_codec", "_frame_data_bytes", "_inner", "_out", "_read")

    def __init__(self, transport: Any, data: bytes = b"") -> None:
        self._inner = transport
        self._codec = WebSocketCodec(is_client=True)
        self._codec.feed(data)
        self._read = b""  # of the last message
        self._out = b""  # frames that the socket has not accepted
        self._frame_data_bytes = 0  # size of the data in the last frame, until the socket has accepted it

    def recv_into(self, buffer: bytearray | memoryview, size_bytes: int = 0) -> int:
        """Receive at most `size_bytes` (0: the length of the buffer); return the size, 0 at the end of the stream.

        Receives from the socket at most once.

        Raises:
            BlockingIOError: no data.
            OSError: the connection is broken, or the server violated the protocol.
        """
        try:
            if not self._next():
                if self._codec.close_code is not None:
                    return 0
                got = self._inner.recv_into(memoryview(data := bytearray(_READ_BYTES)), _READ_BYTES)
                if not got:
                    return 0
                self._codec.feed(bytes(data[:got]))
                if not self._next() and self._codec.close_code is None:
                    raise BlockingIOError("no whole message")
        except ProtocolError as error:
            self._out += self._codec.close(websocket.close_code(error.reason))
            raise OSError(f"the server violated the WebSocket protocol: {error}") from None
        finally:
            self._reply()
        part = self._read[: size_bytes or len(buffer)]
        buffer[: len(part)] = part
        self._read = self._read[len(part) :]
        return len(part)

    def _next(self) -> bool:
        """Decode the next message with data; return whether there is one."""
        codec = self._codec
        while not self._read:
            message = codec.next()
            if message is None:
                if codec.has_more:
                    continue
                return False
            if message.is_text:
                raise OSError("the server sent a text message; only binary ones are allowed")
            self._read = message.data
        return True

    def _reply(self) -> None:
        """Send pongs, and the answer to a close frame; what the socket does not accept is sent with the next data."""
        replies = self._codec.take_replies()
        if len(self._out) <= _MAX_OUT_BYTES:  # else the server sends pings and reads nothing
            self._out += replies
        if self._out:
            try:
                self._flush()
            except OSError:
                pass  # a broken connection: the next call raises it

    def send(self, data: Buffer) -> int:
        """Send `data`, or its beginning, as one message, and return the size. See the class for `BlockingIOError`."""
        if not self._frame_data_bytes:
            part = bytes(data[:_FRAME_BYTES])
            self._out += self._codec.message(part, False)
            self._frame_data_bytes = len(part)
        self._flush()
        sent, self._frame_data_bytes = self._frame_data_bytes, 0
        return sent

    def _flush(self) -> None:
        while self._out:
            self._out = self._out[self._inner.send(self._out) :]
        if type(self._inner) is TlsTransport:
            self._inner.flush()

    def close(self) -> None:
        """Send a close frame if the socket accepts it, and close the socket."""
        self._send_close()
        self._inner.close()

    def shutdown(self, how: int) -> None:
        """Send a close frame (unless `how` is 0, reading only), then shut the socket down."""
        if how:
            self._send_close()
        self._inner.shutdown(how)

    def _send_close(self) -> None:
        self._out += self._codec.close(websocket.CLOSE_NORMAL)
        try:
            self._flush()
        except OSError:
            pass  # the peer has disconnected, or reads nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # getpeername, fileno, setsockopt and others of the socket
