"""WebSocket (RFC 6455), both sides: the handshake's fields, frames out, frames in; bytes in, messages out.

`parse_head` holds the rules of a frame's head and `Assembler` those of fragments. The broker's data path decodes whole
masked binary frames in a kernel (`kernels.py`) and leaves the others, a fragment, a text message, a ping, a close, an
error, to `parse_client_frame`; everybody else has a `WebSocketCodec`.
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

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_OPCODES = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_PROTOCOL_ERROR, CLOSE_NO_CODE, CLOSE_INVALID_TEXT = 1000, 1001, 1002, 1005, 1007
"""Close codes (RFC 6455 §7.4.1); `CLOSE_NO_CODE` is never sent: it stands for a close frame without a code."""
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
"""The most frames of one message. The sense of fragments is large messages; 16 MiB in so many are 4 KiB each."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_CONTROL_BYTES = 125
"""The most that a ping, a pong or a close carries."""
PIECE_BYTES = 65535
"""A codec gives a frame up to this size whole, a larger one in pieces of at most this size."""
FRAMES_AT_A_TIME = 1000
"""Of those that carry nothing for the application: 1 to 2 ms of work."""


class Frame(NamedTuple):
    """One frame, unmasked, or a part of one."""

    fin: bool
    opcode: int
    payload: bytes


def close_code(reason: CloseReason) -> int:
    """The code of the close frame that tells the other side about `reason`."""
    return _CLOSE_CODES.get(reason, CLOSE_NORMAL)


# ---- the handshake


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


# ---- frames out


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


def encode_masked(opcode: int, payload: bytes) -> bytes:
    """A masked final frame, as clients send."""
    head = bytearray(header(opcode, len(payload)))
    head[1] |= 0x80
    key = os.urandom(4)
    return bytes(head) + key + mask(payload, key)


def close_payload(code: int, text: bytes = b"") -> bytes:
    """The payload of a close frame; `text` is cut to the 123 bytes that fit."""
    return b"" if code == CLOSE_NO_CODE else code.to_bytes(2, "big") + text[:123]


def mask(payload: bytes, key: bytes) -> bytes:
    """`payload` XOR the four-byte `key`, which masks and unmasks."""
    size = len(payload)
    pad = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(pad, "little")).to_bytes(size, "little")


# ---- frames in


def parse_head(data: bytes, at: int, is_masked: bool) -> tuple[int, int, int] | None:
    """The head of the frame at `data[at]`: its first byte, the size of its payload, and where its mask (without one,
    its payload) starts; None when more bytes are needed.

    Args:
        is_masked: whether frames have to have a mask (those of a client), or may not have one (those of a server).

    Raises:
        ProtocolError: the sender broke RFC 6455 §5.2.
    """
    if len(data) - at < 2:
        return None
    first, second = data[at], data[at + 1]
    opcode, size, start = first & 0x0F, second & 0x7F, at + 2
    if first & 0x70:
        raise _violation("a reserved bit is set")
    if opcode not in _OPCODES:
        raise _violation(f"unknown opcode {opcode}")
    if (second >= 0x80) is not is_masked:
        raise _violation("a client frame that is not masked" if is_masked else "a server frame that is masked")
    if opcode >= CLOSE and (first < 0x80 or size > MAX_CONTROL_BYTES):
        raise _violation("a control frame that is fragmented or over 125 bytes")
    if size > 125:
        start += 2 if size == 126 else 8
        if len(data) < start:
            return None
        size = int.from_bytes(data[at + 2 : start], "big")
        if size < 126 or (size < 65536 and start - at > 4):
            raise _violation("a frame length that is not minimal")
    return first, size, start


def parse_client_frame(data: bytes, limit_bytes: int, at: int = 0) -> tuple[Frame | None, int]:
    """The frame at `data[at]` and where it ends, or `(None, at)` when more bytes are needed.

    Raises:
        ProtocolError: the client broke RFC 6455, or the frame is larger than `limit_bytes`.
    """
    head = parse_head(data, at, is_masked=True)
    if head is None:
        return None, at
    first, size, start = head
    if size > limit_bytes:
        raise _too_large(size, limit_bytes)
    end = start + 4 + size
    if len(data) < end:
        return None, at
    payload = mask(data[start + 4 : end], data[start : start + 4])
    return Frame(first >= 0x80, first & 0x0F, payload), end


def checked(opcode: int, message: bytes) -> bytes:
    """The message, whose first frame has `opcode`.

    Raises:
        ProtocolError: it is a text that is not UTF-8.
    """
    if opcode == TEXT:
        try:
            message.decode()
        except UnicodeDecodeError:
            raise _not_utf8() from None
    return message


def check_close(payload: bytes) -> int:
    """The code to answer a close frame with.

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
        """Whether a message is under way, whose first frame had `opcode`."""
        return self._joined is not None

    def state(self) -> tuple[int, int, bytes] | None:
        """What is under way, for `of`; None when nothing is."""
        return None if self._joined is None else (self.opcode, self._count, bytes(self._joined))

    @classmethod
    def of(cls, opcode: int, count: int, joined: bytes) -> Assembler:
        """One that goes on where another one was."""
        made = cls()
        made.opcode, made._count, made._joined = opcode, count, bytearray(joined)
        return made

    def add(self, frame: Frame, limit_bytes: int) -> bytes | None:
        """The whole message when `frame` was its last fragment.

        Raises:
            ProtocolError: a continuation without a start, a start inside a message, a message over the limit or of
                more than `MAX_FRAGMENTS`, or a text that is not UTF-8.
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
    """A message, or a piece of a large one: then `done_bytes` of `frame_bytes` have come with it."""

    data: bytes
    is_text: bool
    done_bytes: int = 0
    frame_bytes: int = 0


class _LargeFrame:
    """A frame that is worked off in pieces."""

    __slots__ = ("decoder", "done", "fin", "key", "opcode", "size")

    def __init__(self, first: int, size: int, key: bytes) -> None:
        self.fin, self.opcode = first >= 0x80, first & 0x0F
        self.size, self.key, self.done = size, key, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")() if self.opcode == TEXT else None

    def piece(self, data: bytes) -> bytes:
        """The next piece, unmasked."""
        turn = self.done % 4
        self.done += len(data)
        return mask(data, self.key[turn:] + self.key[:turn]) if self.key else data

    def fragment(self, piece: bytes) -> Frame:
        """The piece as a fragment of the message that this frame is a fragment of."""
        opcode, self.opcode = self.opcode, CONTINUATION
        return Frame(self.fin and self.done == self.size, opcode, piece)

    def message(self, piece: bytes) -> WebSocketMessage:
        """The piece as a message, its text checked."""
        if self.decoder:
            try:
                self.decoder.decode(piece, self.done == self.size)
            except UnicodeDecodeError:
                raise _not_utf8() from None
        return WebSocketMessage(piece, self.decoder is not None, self.done, self.size)


class WebSocketCodec:
    """One side of a connection: decodes what arrives and encodes what is sent.

    Args:
        is_client: whether this side connected: it masks, the other one does not.

    Attributes:
        max_message_bytes: a larger message is refused.
        has_more: whether `next` stopped only because it had looked at many frames; it goes on at the next call.
        close_code: of the close frame that came, None before.
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
        self._ping: bytes | None = None  # what the last ping carried, until it is answered
        self._answer = b""  # to a close
        self._buffer, self._at = b"", 0
        self._large: _LargeFrame | None = None
        self._assembler: Assembler | None = None  # while a message comes in fragments

    # ---- out

    def message(self, data: bytes, is_text: bool) -> bytes:
        """A message as one frame."""
        return self._encode(TEXT if is_text else BINARY, data)

    def ping(self, data: bytes) -> bytes:
        """A ping; at most 125 bytes."""
        return self._encode(PING, data)

    def close(self, code: int, text: bytes = b"") -> bytes:
        """A close frame, empty when one was sent before."""
        if self.close_sent:
            return b""
        self.close_sent = True
        return self._encode(CLOSE, close_payload(code, text))

    def take_replies(self) -> bytes:
        """What is to be sent back: the pong to the last ping, the answer to a close. Made here and not when a ping
        comes, since one read can bring thousands of them."""
        pong = b"" if self._ping is None else self._encode(PONG, self._ping)
        replies, self._ping, self._answer = pong + self._answer, None, b""
        return replies

    # ---- in

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
        self._at = 0

    def next(self) -> WebSocketMessage | None:
        """The next message or piece, None when more has to arrive (or the other side has closed).

        Raises:
            ProtocolError: the other side broke RFC 6455, or sent a message over `max_message_bytes`.
        """
        self.has_more = False
        for _ in range(FRAMES_AT_A_TIME):
            if self.close_code is not None:
                return None
            message = None
            if self._large is None:
                frame = self._frame()
                if frame is not None:
                    message = self._whole(frame)
                elif self._large is None:
                    return None
            else:
                piece = self._piece(self._large)
                if not piece:
                    return None
                message = self._part(self._large, piece)
            if message is not None:
                return message
        self.has_more = True
        return None

    def _frame(self) -> Frame | None:
        """The next frame; None when more has to arrive, or for a large one, which begins."""
        buffer = self._buffer
        head = parse_head(buffer, self._at, not self._is_client)
        if head is None:
            return None
        first, size, start = head
        if size > self.max_message_bytes:
            raise _too_large(size, self.max_message_bytes)
        begin = start if self._is_client else start + 4
        if size > PIECE_BYTES:
            if begin <= len(buffer):
                self._large, self._at = _LargeFrame(first, size, buffer[start:begin]), begin
            return None
        end = begin + size
        if len(buffer) < end:
            return None
        self._at = end
        payload = buffer[begin:end]
        return Frame(first >= 0x80, first & 0x0F, payload if self._is_client else mask(payload, buffer[start:begin]))

    def _piece(self, large: _LargeFrame) -> bytes:
        end = min(len(self._buffer), self._at + min(PIECE_BYTES, large.size - large.done))
        data, self._at = self._buffer[self._at : end], end
        return large.piece(data) if data else b""

    def _whole(self, frame: Frame) -> WebSocketMessage | None:
        if frame.opcode >= CLOSE:
            self._control(frame)
            return None
        if frame.fin and frame.opcode and self._assembler is None:
            return WebSocketMessage(checked(frame.opcode, frame.payload), frame.opcode == TEXT)
        return self._fragment(frame)

    def _part(self, large: _LargeFrame, piece: bytes) -> WebSocketMessage | None:
        if large.done == large.size:
            self._large = None
        if self._assembler is None and large.fin and large.opcode:
            return large.message(piece)
        return self._fragment(large.fragment(piece))

    def _fragment(self, frame: Frame) -> WebSocketMessage | None:
        assembler = self._assembler = self._assembler or Assembler()
        message = assembler.add(frame, self.max_message_bytes)
        if message is None:
            return None
        self._assembler = None
        return WebSocketMessage(message, assembler.opcode == TEXT)

    def _control(self, frame: Frame) -> None:
        if frame.opcode == PING:
            self._ping = frame.payload  # only the last is answered (RFC 6455 §5.5.3): pings can't pile up
        elif frame.opcode == CLOSE:
            self.close_code = check_close(frame.payload)
            self._answer = self.close(self.close_code)
