"""WebSocket, client side (RFC 6455): the request's header lines, masked frames out; bytes in, messages out."""

from __future__ import annotations

import base64
import os

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import websocket
from smqrt.wire.websocket import Assembler, Frame

MAX_MESSAGE_BYTES = 0xFFFF
"""The largest SMQ packet is smaller; a server that announces more is not an SMQ broker."""

_OPCODES = frozenset(
    (websocket.CONTINUATION, websocket.TEXT, websocket.BINARY, websocket.CLOSE, websocket.PING, websocket.PONG)
)


def new_key() -> str:
    """A fresh `Sec-WebSocket-Key`."""
    return base64.b64encode(os.urandom(16)).decode()


def request_headers(key: str) -> list[tuple[str, str]]:
    """The header fields that ask for an upgrade."""
    return [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Key", key),
        ("Sec-WebSocket-Version", "13"),
    ]


def encode(opcode: int, payload: bytes) -> bytes:
    """A masked final frame, as clients send."""
    head = bytearray(websocket.header(opcode, len(payload)))
    head[1] |= 0x80
    key = os.urandom(4)
    return bytes(head) + key + websocket.mask(payload, key)


class Decoder:
    """The stream of frames from a server.

    Attributes:
        replies: frames to send back (a pong, the answer to a close); the caller takes and clears them. Of several pings
            that arrive at once the last is answered (RFC 6455 §5.5.3).
        closed: whether the server ended the conversation.
    """

    __slots__ = ("_assembler", "_buffer", "_ping", "closed", "replies")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._assembler = Assembler(MAX_MESSAGE_BYTES)
        self._ping: bytes | None = None
        self.replies = bytearray()
        self.closed = False

    def receive(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes.

        Raises:
            ProtocolError: the server broke RFC 6455 or sent a message over `MAX_MESSAGE_BYTES`.
        """
        self._buffer += data
        messages: list[bytes] = []
        while not self.closed and (frame := self._next_frame()):
            if frame.opcode >= websocket.CLOSE:
                self._control(frame)
            elif (message := self._assembler.add(frame)) is not None:
                messages.append(message)
        if self._ping is not None and not self.closed:
            self.replies += encode(websocket.PONG, self._ping)
            self._ping = None
        return messages

    def _next_frame(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        _check_head(buffer[0], buffer[1])
        width = {126: 2, 127: 8}.get(buffer[1], 0)
        start = 2 + width
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[2:start], "big") if width else buffer[1]
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                CloseReason.MESSAGE_TOO_LARGE, f"a frame of {size} bytes; {MAX_MESSAGE_BYTES} are allowed"
            )
        if len(buffer) < start + size:
            return None
        frame = Frame(bool(buffer[0] & 0x80), buffer[0] & 0x0F, bytes(buffer[start : start + size]))
        del buffer[: start + size]
        return frame

    def _control(self, frame: Frame) -> None:
        if frame.opcode == websocket.PING:
            self._ping = frame.payload
        elif frame.opcode == websocket.CLOSE:
            self.closed = True
            self.replies += encode(websocket.CLOSE, frame.payload[:2])


def _check_head(first: int, second: int) -> None:
    opcode = first & 0x0F
    if first & 0x70:
        raise _violation("a reserved bit is set")
    if second & 0x80:
        raise _violation("a server frame that is masked")
    if opcode >= websocket.CLOSE and (not first & 0x80 or second > 125):
        raise _violation("a control frame that is fragmented or over 125 bytes")
    if opcode not in _OPCODES:
        raise _violation(f"unknown opcode {opcode}")


def _violation(detail: str) -> ProtocolError:
    return ProtocolError(CloseReason.WEBSOCKET_PROTOCOL, detail)
