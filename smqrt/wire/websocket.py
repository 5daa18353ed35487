"""WebSocket (RFC 6455) for servers and clients, without I/O.

`parse_head` checks the head of a frame and `Assembler` joins fragments. The broker's data path decodes whole masked
binary frames in a kernel (`kernels.py`) and passes other ones (fragments, text, pings, closes, errors) to
`parse_client_frame`. All other code uses a `WebSocketCodec`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import os
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Appended to a client's key for `Sec-WebSocket-Accept` (RFC 6455 §1.3)."""

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_OPCODES = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR, CLOSE_NO_CODE, CLOSE_INVALID_TEXT = 1000, 1001, 1002, 1005, 1007
"""Close codes (RFC 6455 §7.4.1). `CLOSE_NO_CODE` is never sent: it stands for a close frame without a code."""
CLOSE_POLICY, CLOSE_TOO_BIG = 1008, 1009
_CLOSE_CODES = {
    CloseReason.WEBSOCKET_PROTOCOL: CLOSE_PROTOCOL_ERROR,
    CloseReason.MESSAGE_TOO_LARGE: CLOSE_TOO_BIG,
    CloseReason.TOO_MANY_FRAGMENTS: CLOSE_POLICY,
    CloseReason.INVALID_TEXT: CLOSE_INVALID_TEXT,
    CloseReason.SHUTDOWN: CLOSE_GOING_AWAY,
    CloseReason.RESTARTED: CLOSE_GOING_AWAY,
}

MAX_FRAGMENTS = 4096
"""The maximum number of frames of a message: 4 KiB each in the largest message, of 16 MiB."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_CONTROL_BYTES = 125
"""The maximum payload of a ping, pong or close frame."""
PIECE_BYTES = 65535
"""A codec returns larger frames in pieces of this size."""
FRAMES_AT_A_TIME = 1000
"""The maximum number of frames that one call decodes to find a message: 1 to 2 ms of work."""
_FIN, _MASKED, _RESERVED, _OPCODE, _SIZE = 0x80, 0x80, 0x70, 0x0F, 0x7F
"""Bits of the first byte (`_FIN`, `_RESERVED`, `_OPCODE`) and of the second one (`_MASKED`, `_SIZE`) of a frame."""
_SIZE_U16, _SIZE_U64 = 126, 127
"""Values of the size field if the size follows in two or eight bytes."""
_MASK_BYTES = 4


class Frame(NamedTuple):
    """A frame without its mask, or a part of a frame. The codec uses it for control frames and fragments."""

    fin: bool
    opcode: int
    payload: bytes


def close_code(reason: CloseReason) -> int:
    """Return the code of the close frame for a close reason."""
    return _CLOSE_CODES.get(reason, CLOSE_NORMAL)


# ---- handshake


def new_key() -> str:
    """Return a random `Sec-WebSocket-Key`."""
    return base64.b64encode(os.urandom(16)).decode()


def request_headers(key: str) -> list[tuple[str, str]]:
    """Return the header fields of an upgrade request."""
    return [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Key", key),
        ("Sec-WebSocket-Version", "13"),
    ]


def accept_key(key: str) -> str:
    """Return the `Sec-WebSocket-Accept` value for a client's `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key.strip().encode("latin-1") + _GUID).digest()).decode()


def valid_key(key: str) -> bool:
    """Return whether `key` is a `Sec-WebSocket-Key`: 16 bytes in base64."""
    try:
        return len(base64.b64decode(key.strip(), validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def switching_protocols(key: str, extra: bytes = b"") -> bytes:
    """Return the response 101; `extra` has whole header lines."""
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept_key(key).encode() + b"\r\n" + extra + b"\r\n"
    )


# ---- encoding


def header(opcode: int, size_bytes: int) -> bytes:
    """Return the head of an unmasked final frame."""
    if size_bytes < _SIZE_U16:
        return bytes((_FIN | opcode, size_bytes))
    if size_bytes < 65536:
        return bytes((_FIN | opcode, _SIZE_U16)) + size_bytes.to_bytes(2, "big")
    return bytes((_FIN | opcode, _SIZE_U64)) + size_bytes.to_bytes(8, "big")


def encode(opcode: int, payload: bytes) -> bytes:
    """Return an unmasked final frame, as servers send it."""
    return header(opcode, len(payload)) + payload


def encode_masked(opcode: int, payload: bytes) -> bytes:
    """Return a masked final frame, as clients send it."""
    head = bytearray(header(opcode, len(payload)))
    head[1] |= _MASKED
    key = os.urandom(_MASK_BYTES)
    return bytes(head) + key + mask(payload, key)


def close_payload(code: int, text: bytes = b"") -> bytes:
    """Return the payload of a close frame; `text` is cut to the 123 bytes that fit."""
    return b"" if code == CLOSE_NO_CODE else code.to_bytes(2, "big") + text[:123]


def mask(payload: bytes | bytearray, key: bytes | bytearray) -> bytes:
    """Return `payload` XOR the four-byte `key`, which masks and unmasks."""
    size = len(payload)
    # One XOR of two large integers is faster than a loop over the bytes.
    pad = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(pad, "little")).to_bytes(size, "little")


# ---- decoding


def parse_head(data: bytes | bytearray, at: int, is_masked: bool) -> tuple[int, int, int] | None:
    """Parse the head of the frame at `data[at]`.

    Args:
        data: the bytes.
        at: where the frame starts.
        is_masked: true for frames of clients, which must have a mask; false for those of servers, which must not.

    Returns:
        The first byte, the size of the payload, and the start of the mask, or of the payload if there is no mask.
        None when more bytes are needed.

    Raises:
        ProtocolError: the sender violated RFC 6455 §5.2.
    """
    if len(data) - at < 2:
        return None
    first, second = data[at], data[at + 1]
    opcode, size, start = first & _OPCODE, second & _SIZE, at + 2
    if first & _RESERVED:
        raise _violation("a reserved bit is set")
    if opcode not in _OPCODES:
        raise _violation(f"unknown opcode {opcode}")
    if (second >= _MASKED) is not is_masked:
        raise _violation("a client frame that is not masked" if is_masked else "a server frame that is masked")
    if opcode >= CLOSE and (first < _FIN or size > MAX_CONTROL_BYTES):
        raise _violation("a control frame that is fragmented or over 125 bytes")
    if size >= _SIZE_U16:
        start += 2 if size == _SIZE_U16 else 8
        if len(data) < start:
            return None
        size = int.from_bytes(data[at + 2 : start], "big")
        if size < _SIZE_U16 or (size < 65536 and start - at > 4):  # a shorter form was possible (§5.2)
            raise _violation("a frame length that is not minimal")
    return first, size, start


def parse_client_frame(data: bytes | bytearray, limit_bytes: int, at: int = 0) -> tuple[Frame | None, int]:
    """Return the frame at `data[at]` and its end, or `(None, at)` when more bytes are needed.

    Raises:
        ProtocolError: the client violated RFC 6455, or the frame is larger than `limit_bytes`.
    """
    head = parse_head(data, at, is_masked=True)
    if head is None:
        return None, at
    first, size, start = head
    if size > limit_bytes:
        raise _too_large(size, limit_bytes)
    end = start + _MASK_BYTES + size
    if len(data) < end:
        return None, at
    payload = mask(data[start + _MASK_BYTES : end], data[start : start + _MASK_BYTES])
    return Frame(first >= _FIN, first & _OPCODE, payload), end


def checked(opcode: int, message: bytes) -> bytes:
    """Check a message whose first frame has `opcode`, and return it.

    Raises:
        ProtocolError: a text message is not UTF-8.
    """
    if opcode == TEXT:
        try:
            message.decode()
        except UnicodeDecodeError:
            raise _not_utf8() from None
    return message


def check_close(payload: bytes) -> int:
    """Check a close frame; return the code for the answer.

    Raises:
        ProtocolError: a body of one byte, a code that may not be sent, or text that is not UTF-8.
    """
    if not payload:
        return CLOSE_NO_CODE
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


def _violation(detail: str) -> ProtocolError:
    return ProtocolError(CloseReason.WEBSOCKET_PROTOCOL, detail)


def _too_large(size_bytes: int, limit_bytes: int) -> ProtocolError:
    return ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"a frame of {size_bytes} bytes; {limit_bytes} are allowed")


def _not_utf8() -> ProtocolError:
    return ProtocolError(CloseReason.INVALID_TEXT, "a text message that is not UTF-8")


class Assembler:
    """Joins the fragments of one message at a time."""

    __slots__ = ("_count", "_joined", "opcode")

    def __init__(self) -> None:
        self._joined: bytearray | None = None
        self.opcode = self._count = 0

    @property
    def busy(self) -> bool:
        """Whether there is an incomplete message; its first frame had `opcode`."""
        return self._joined is not None

    def state(self) -> tuple[int, int, bytes] | None:
        """Return the incomplete message as arguments for `of`; None if there is none."""
        return None if self._joined is None else (self.opcode, self._count, bytes(self._joined))

    @classmethod
    def of(cls, opcode: int, count: int, joined: bytes) -> Assembler:
        """Return an assembler with the incomplete message of another assembler; see `state`."""
        made = cls()
        made.opcode, made._count, made._joined = opcode, count, bytearray(joined)
        return made

    def add(self, frame: Frame, limit_bytes: int) -> bytes | None:
        """Add a fragment; return the whole message if it was the last one.

        Raises:
            ProtocolError: a continuation without a start, a start inside a message, a message over the limit or of
                more than `MAX_FRAGMENTS`, or text that is not UTF-8.
        """
        if (frame.opcode == CONTINUATION) != self.busy:
            raise _violation("a continuation without a message" if not self.busy else "a message inside a message")
        if self._joined is None:
            self._joined, self.opcode, self._count = bytearray(), frame.opcode, 0
        self._joined += frame.payload
        self._count += 1
        if len(self._joined) > limit_bytes:
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"a message over {limit_bytes} bytes")
        if self._count > MAX_FRAGMENTS:
            raise ProtocolError(CloseReason.TOO_MANY_FRAGMENTS, f"a message of more than {MAX_FRAGMENTS} frames")
        if not frame.fin:
            return None
        message, self._joined = bytes(self._joined), None
        return checked(self.opcode, message)


# ---- one side of a connection


class WebSocketMessage(NamedTuple):
    """A message, or a piece of a large one: `done_bytes` of `frame_bytes` are decoded, this piece included."""

    data: bytes
    is_text: bool
    done_bytes: int = 0
    frame_bytes: int = 0


class _LargeFrame:
    """A large frame, which is decoded in pieces."""

    __slots__ = ("decoder", "done", "fin", "key", "opcode", "size")

    def __init__(self, first: int, size: int, key: bytes) -> None:
        self.fin, self.opcode = first >= _FIN, first & _OPCODE
        self.size, self.key, self.done = size, key, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")() if self.opcode == TEXT else None

    def piece(self, data: bytes) -> bytes:
        """Unmask the next piece."""
        shift = self.done % _MASK_BYTES  # the position in the mask where this piece starts
        self.done += len(data)
        return mask(data, self.key[shift:] + self.key[:shift]) if self.key else data

    def fragment(self, piece: bytes) -> Frame:
        """Return a piece as a fragment of the message of this frame."""
        opcode, self.opcode = self.opcode, CONTINUATION
        return Frame(self.fin and self.done == self.size, opcode, piece)

    def message(self, piece: bytes) -> WebSocketMessage:
        """Return a piece as a message, after checking its text."""
        if self.decoder:
            try:
                self.decoder.decode(piece, self.done == self.size)
            except UnicodeDecodeError:
                raise _not_utf8() from None
        return WebSocketMessage(piece, self.decoder is not None, self.done, self.size)


class WebSocketCodec:
    """Codec of one side of a connection.

    Args:
        is_client: whether this side is the client, which masks its frames.
        max_message_bytes: the largest message that is accepted.

    Attributes:
        max_message_bytes: see above.
        has_more: whether `next` returned None because it had decoded `FRAMES_AT_A_TIME` frames; call it again.
        close_code: the code of the received close frame; None before.
        close_sent: whether this side has sent its close frame.
    """

    __slots__ = (
        "_assembler",
        "_at",
        "_answer",
        "_buffer",
        "_encode",
        "_is_client",
        "_large",
        "_ping",
        "close_code",
        "close_sent",
        "has_more",
        "max_message_bytes",
    )

    def __init__(self, is_client: bool = False, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_message_bytes = max_message_bytes
        self.close_code: int | None = None
        self.close_sent = False
        self.has_more = False
        self._is_client = is_client
        self._encode = encode_masked if is_client else encode
        self._ping: bytes | None = None  # payload of the last ping that is not answered
        self._answer = b""  # to a close frame
        self._buffer, self._at = b"", 0
        self._large: _LargeFrame | None = None
        self._assembler: Assembler | None = None  # while a message arrives in fragments

    # ---- encoding

    def message(self, data: bytes, is_text: bool) -> bytes:
        """Return a message as one frame."""
        return self._encode(TEXT if is_text else BINARY, data)

    def ping(self, data: bytes) -> bytes:
        """Return a ping frame; `data` has at most 125 bytes."""
        return self._encode(PING, data)

    def close(self, code: int, text: bytes = b"") -> bytes:
        """Return a close frame; empty when one was sent before."""
        if self.close_sent:
            return b""
        self.close_sent = True
        return self._encode(CLOSE, close_payload(code, text))

    def take_replies(self) -> bytes:
        """Return the frames to send back: the pong to the last ping, and the answer to a close.

        They are encoded here and not for each ping, because received data can contain thousands of pings.
        """
        pong = b"" if self._ping is None else self._encode(PONG, self._ping)
        replies, self._ping, self._answer = pong + self._answer, None, b""
        return replies

    # ---- decoding

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
        self._at = 0

    def next(self) -> WebSocketMessage | None:
        """Return the next message or piece; None when more bytes are needed or the other side has closed.

        Raises:
            ProtocolError: the other side violated RFC 6455, or sent a message over `max_message_bytes`.
        """
        self.has_more = False
        for _ in range(FRAMES_AT_A_TIME):
            if self.close_code is not None:
                return None
            message = None
            large = self._large
            if large is None:
                frame = self._frame()
                if frame is not None:
                    message = self._whole(frame)
                elif self._large is None:
                    return None
            else:
                end = min(len(self._buffer), self._at + min(PIECE_BYTES, large.size - large.done))
                data, self._at = self._buffer[self._at : end], end
                if not data:
                    return None
                piece = large.piece(data)
                if large.done == large.size:
                    self._large = None
                if self._assembler is None and large.fin and large.opcode:
                    message = large.message(piece)
                else:
                    message = self._fragment(large.fragment(piece))
            if message is not None:
                return message
        self.has_more = True
        return None

    def _frame(self) -> Frame | None:
        """Return the next frame; None when more bytes are needed, and at the start of a large frame."""
        buffer = self._buffer
        head = parse_head(buffer, self._at, not self._is_client)
        if head is None:
            return None
        first, size, start = head
        if size > self.max_message_bytes:
            raise _too_large(size, self.max_message_bytes)
        begin = start if self._is_client else start + _MASK_BYTES
        if size > PIECE_BYTES:
            if begin <= len(buffer):
                self._large, self._at = _LargeFrame(first, size, buffer[start:begin]), begin
            return None
        end = begin + size
        if len(buffer) < end:
            return None
        self._at = end
        payload = buffer[begin:end]
        payload = payload if self._is_client else mask(payload, buffer[start:begin])
        return Frame(first >= _FIN, first & _OPCODE, payload)

    def _whole(self, frame: Frame) -> WebSocketMessage | None:
        if frame.opcode >= CLOSE:
            if frame.opcode == PING:
                self._ping = (
                    frame.payload
                )  # only the last ping is answered (RFC 6455 §5.5.3), so that pongs do not accumulate
            elif frame.opcode == CLOSE:
                self.close_code = check_close(frame.payload)
                self._answer = self.close(self.close_code)
            return None
        if frame.fin and frame.opcode and self._assembler is None:
            return WebSocketMessage(checked(frame.opcode, frame.payload), frame.opcode == TEXT)
        return self._fragment(frame)

    def _fragment(self, frame: Frame) -> WebSocketMessage | None:
        assembler = self._assembler = self._assembler or Assembler()
        message = assembler.add(frame, self.max_message_bytes)
        if message is None:
            return None
        self._assembler = None
        return WebSocketMessage(message, assembler.opcode == TEXT)
