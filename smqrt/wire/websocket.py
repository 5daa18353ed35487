"""WebSocket, server side: the handshake's answer, frames out, and the decoder of everything that is not a plain binary
frame (RFC 6455).

The data path decodes whole masked binary frames in a kernel (`kernels.py`); what that leaves, a fragment, a text
message, a ping, a close, an error, comes here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR, CLOSE_INVALID_TEXT = 1000, 1001, 1002, 1007
CLOSE_POLICY, CLOSE_TOO_BIG = 1008, 1009

MAX_FRAGMENTS = 4096
"""The most frames of one message. The sense of fragments is large messages; 16 MiB in so many are 4 KiB each."""

_KNOWN = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))


class Frame(NamedTuple):
    """One frame, unmasked."""

    fin: bool
    opcode: int
    payload: bytes


def accept_key(key: str) -> str:
    """The `Sec-WebSocket-Accept` value for a client's `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key.strip().encode("latin-1") + _GUID).digest()).decode()


def valid_key(key: str) -> bool:
    """Whether `key` is a `Sec-WebSocket-Key`: 16 bytes in base64."""
    try:
        return len(base64.b64decode(key.strip(), validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def switching_protocols(key: str, extra: bytes = b"") -> bytes:
    """The 101 answer; `extra` holds whole header lines."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n" + extra + b"\r\n"
    )


def header(opcode: int, size_bytes: int) -> bytes:
    """The head of an unmasked final frame."""
    if size_bytes < 126:
        return bytes((0x80 | opcode, size_bytes))
    if size_bytes < 65536:
        return bytes((0x80 | opcode, 126)) + size_bytes.to_bytes(2, "big")
    return bytes((0x80 | opcode, 127)) + size_bytes.to_bytes(8, "big")


def encode(opcode: int, payload: bytes) -> bytes:
    """An unmasked final frame, as servers send."""
    return header(opcode, len(payload)) + payload


def close_frame(code: int, text: bytes = b"") -> bytes:
    """A close frame; `text` is cut to the 123 bytes that fit."""
    return encode(CLOSE, code.to_bytes(2, "big") + text[:123])


def mask(payload: bytes, key: bytes) -> bytes:
    """`payload` XOR the four-byte `key`, which masks and unmasks."""
    size = len(payload)
    pad = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(pad, "little")).to_bytes(size, "little")


def _violation(detail: str) -> ProtocolError:
    return ProtocolError(CloseReason.WEBSOCKET_PROTOCOL, detail)


def checked(opcode: int, message: bytes) -> bytes:
    """The message, whose first frame has `opcode`.

    Raises:
        ProtocolError: it is a text that is not UTF-8.
    """
    if opcode == TEXT:
        try:
            message.decode()
        except UnicodeDecodeError:
            raise ProtocolError(CloseReason.INVALID_TEXT, "a text message that is not UTF-8") from None
    return message


def parse_client_frame(data: bytes, limit_bytes: int, at: int = 0) -> tuple[Frame | None, int]:
    """The frame at `data[at]` and where it ends, or `(None, at)` when more bytes are needed.

    Raises:
        ProtocolError: the client broke RFC 6455, or the frame is larger than `limit_bytes`.
    """
    if len(data) - at < 2:
        return None, at
    size, start = _payload_size(data, at)
    if size is None:
        return None, at
    if size > limit_bytes:
        raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"a frame of {size} bytes; {limit_bytes} are allowed")
    end = start + 4 + size
    if len(data) < end:
        return None, at
    payload = mask(data[start + 4 : end], data[start : start + 4])
    return Frame(bool(data[at] & 0x80), data[at] & 0x0F, payload), end


def _payload_size(data: bytes, at: int) -> tuple[int | None, int]:
    """The size of the payload (None when more bytes are needed), and where the mask starts."""
    _check_head(data[at], data[at + 1])
    short, start = data[at + 1] & 0x7F, at + 2
    if short < 126:
        return short, start
    width = 2 if short == 126 else 8
    if len(data) < start + width:
        return None, start
    size = int.from_bytes(data[start : start + width], "big")
    if size < 126 or (width == 8 and size < 65536):
        raise _violation("a frame length that is not minimal")
    return size, start + width


def _check_head(first: int, second: int) -> None:
    opcode = first & 0x0F
    if first & 0x70:
        raise _violation("a reserved bit is set")
    if opcode not in _KNOWN:
        raise _violation(f"unknown opcode {opcode}")
    if not second & 0x80:
        raise _violation("a client frame that is not masked")
    if opcode >= CLOSE and (not first & 0x80 or second & 0x7F > 125):
        raise _violation("a control frame that is fragmented or over 125 bytes")


class Assembler:
    """Joins the fragments of one message at a time."""

    __slots__ = ("_count", "_joined", "_limit_bytes", "_opcode")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._joined: bytearray | None = None
        self._opcode = self._count = 0

    @property
    def busy(self) -> bool:
        """Whether a message is under way."""
        return self._joined is not None

    def add(self, frame: Frame) -> bytes | None:
        """The whole message when `frame` was its last fragment.

        Raises:
            ProtocolError: a continuation without a start, a start inside a message, a message over the limit or of
                more than `MAX_FRAGMENTS`, or a text that is not UTF-8.
        """
        if (frame.opcode == CONTINUATION) != self.busy:
            raise _violation("a continuation without a message" if not self.busy else "a message inside a message")
        if self._joined is None:
            self._joined, self._opcode, self._count = bytearray(), frame.opcode, 0
        self._joined += frame.payload
        self._count += 1
        if len(self._joined) > self._limit_bytes:
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"a message over {self._limit_bytes} bytes")
        if self._count > MAX_FRAGMENTS:
            raise ProtocolError(CloseReason.TOO_MANY_FRAGMENTS, f"a message of more than {MAX_FRAGMENTS} frames")
        if not frame.fin:
            return None
        message, self._joined = bytes(self._joined), None
        return checked(self._opcode, message)


def check_close(payload: bytes) -> int:
    """The code to answer a close frame with.

    Raises:
        ProtocolError: a body of one byte, a code that may not be sent, or text that is not UTF-8.
    """
    if not payload:
        return CLOSE_NORMAL
    if len(payload) == 1:
        raise _violation("a close body of one byte")
    code = int.from_bytes(payload[:2], "big")
    if not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise _violation(f"close code {code} may not be sent")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise _violation("a close text that is not UTF-8") from None
    return code
