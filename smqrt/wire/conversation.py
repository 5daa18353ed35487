"""One side of a WebSocket connection (RFC 6455): bytes in, messages out, the pieces of large ones as they come."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import websocket, wsclient
from smqrt.wire.websocket import BINARY, CLOSE, CONTINUATION, MAX_FRAGMENTS, PING, PONG, TEXT

PIECE_BYTES = 65535
"""A frame up to this size comes whole, a larger one in pieces of at most this size."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
FRAMES_AT_A_TIME = 1000
"""Of those that carry nothing for the application: 1 to 2 ms of work."""

NO_CODE = 1005
"""Stands for the code of a close frame without one."""

_KNOWN = frozenset((CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG))


class Violation(ProtocolError):
    """The other side broke a rule.

    Attributes:
        code: to close the connection with.
    """

    def __init__(self, detail: str, code: int = websocket.CLOSE_PROTOCOL_ERROR) -> None:
        super().__init__(CloseReason.WEBSOCKET_PROTOCOL, detail)
        self.code = code


class Message(NamedTuple):
    """A message, or a piece of a large one: then `done_bytes` of `frame_bytes` have come with it."""

    data: bytes
    is_text: bool
    done_bytes: int = 0
    frame_bytes: int = 0


class _Large:
    """A frame that is worked off in pieces."""

    __slots__ = ("decoder", "done", "first", "key", "size")

    def __init__(self, first: int, size: int, key: bytes) -> None:
        self.first, self.size, self.key, self.done = first, size, key, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")() if first & 0x0F == TEXT else None

    def piece(self, data: bytes) -> bytes:
        """The next piece, unmasked."""
        turn = self.done % 4
        self.done += len(data)
        return websocket.mask(data, self.key[turn:] + self.key[:turn]) if self.key else data

    def message(self, data: bytes) -> Message:
        """The piece as a message, its text checked."""
        if self.decoder:
            try:
                self.decoder.decode(data, self.done == self.size)
            except UnicodeDecodeError:
                raise _not_utf8() from None
        return Message(data, self.decoder is not None, self.done, self.size)


class Conversation:
    """Decodes what arrives and encodes what is sent.

    Args:
        is_client: whether this side connected: it masks, the other one does not.

    Attributes:
        max_message_bytes: a larger message is refused.
        replies: to send back (the pong to the last ping, the answer to a close); the caller takes and clears them.
        has_more: whether `next` stopped only because it had looked at many frames; it goes on at the next call.
        close_code: of the close frame that came, None before.
        close_sent: whether this side has said goodbye.
    """

    __slots__ = (
        "_at",
        "_buffer",
        "_encode",
        "_fragments",
        "_fragments_count",
        "_is_client",
        "_is_text",
        "_large",
        "close_code",
        "close_sent",
        "has_more",
        "max_message_bytes",
        "replies",
    )

    def __init__(self, is_client: bool = False) -> None:
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.replies = b""
        self.close_code: int | None = None
        self.close_sent = False
        self.has_more = False
        self._is_client = is_client
        self._encode = wsclient.encode if is_client else websocket.encode
        self._buffer, self._at = b"", 0
        self._large: _Large | None = None
        self._fragments: bytearray | None = None
        self._fragments_count = 0
        self._is_text = False

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
        body = b"" if code == NO_CODE else code.to_bytes(2, "big") + text[:123]
        return self._encode(CLOSE, body)

    # ---- in

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._buffer = self._buffer[self._at :] + data if self._at < len(self._buffer) else data
        self._at = 0

    def next(self) -> Message | None:
        """The next message or piece, None when more has to arrive (or the other side has closed).

        Raises:
            Violation: the other side broke RFC 6455, or sent a message over `max_message_bytes`.
        """
        self.has_more = False
        for _ in range(FRAMES_AT_A_TIME):
            if self.close_code is not None:
                return None
            message = None
            if self._large is None:
                whole = self._frame()
                if whole is not None:
                    message = self._whole(*whole)
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

    def _frame(self) -> tuple[int, bytes] | None:
        """First byte and payload of the next frame; None when more has to arrive, or for a large one, which begins."""
        head = self._head()
        if head is None:
            return None
        first, size, start, end = head
        if size <= PIECE_BYTES:
            return None if len(self._buffer) < end else (first, self._payload(start, end))
        begin = end - size
        if begin <= len(self._buffer):
            self._begin(first)
            self._large, self._at = _Large(first, size, self._buffer[start:begin]), begin
        return None

    def _whole(self, first: int, payload: bytes) -> Message | None:
        opcode = first & 0x0F
        if opcode >= CLOSE:
            self._control(opcode, payload)
            return None
        if first & 0x80 and opcode and self._fragments is None:
            return Message(_checked(payload), True) if opcode == TEXT else Message(payload, False)
        self._begin(first)
        return self._fragment(payload, bool(first & 0x80))

    def _part(self, large: _Large, piece: bytes) -> Message | None:
        is_end = large.done == large.size
        if is_end:
            self._large = None
        if self._fragments is None:
            return large.message(piece)
        return self._fragment(piece, is_end and bool(large.first & 0x80))

    def _head(self) -> tuple[int, int, int, int] | None:
        """First byte, payload size, where the mask (or the payload) starts, where the frame ends."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < 2:
            return None
        first, second = buffer[at], buffer[at + 1]
        self._check(first, second)
        size, start = second & 0x7F, at + 2
        if size > 125:
            start += 2 if size == 126 else 8
            if len(buffer) < start:
                return None
            size = _long_size(buffer[at + 2 : start])
        if size > self.max_message_bytes:
            raise _too_big(self.max_message_bytes)
        return first, size, start, start + size + (0 if self._is_client else 4)

    def _check(self, first: int, second: int) -> None:
        opcode = first & 0x0F
        if first & 0x70:
            raise Violation("a reserved bit is set")
        if opcode not in _KNOWN:
            raise Violation(f"unknown opcode {opcode}")
        if bool(second & 0x80) is self._is_client:
            raise Violation("a server frame that is masked" if self._is_client else "a client frame that is not masked")
        if opcode >= CLOSE and (not first & 0x80 or second & 0x7F > 125):
            raise Violation("a control frame that is fragmented or over 125 bytes")

    def _payload(self, start: int, end: int) -> bytes:
        buffer, self._at = self._buffer, end
        if self._is_client:
            return buffer[start:end]
        return websocket.mask(buffer[start + 4 : end], buffer[start : start + 4])

    def _begin(self, first: int) -> None:
        """Check that a data frame may come now; the first of several opens the list of fragments."""
        opcode = first & 0x0F
        if (opcode == CONTINUATION) != (self._fragments is not None):
            raise Violation("a message inside a message" if opcode else "a continuation without a message")
        if self._fragments is None and not first & 0x80:
            self._fragments, self._fragments_count, self._is_text = bytearray(), 0, opcode == TEXT

    def _piece(self, large: _Large) -> bytes:
        end = min(len(self._buffer), self._at + min(PIECE_BYTES, large.size - large.done))
        data, self._at = self._buffer[self._at : end], end
        return large.piece(data) if data else b""

    def _fragment(self, payload: bytes, is_last: bool) -> Message | None:
        assert self._fragments is not None
        self._fragments += payload
        self._fragments_count += 1
        if len(self._fragments) > self.max_message_bytes:
            raise _too_big(self.max_message_bytes)
        if self._fragments_count > MAX_FRAGMENTS:
            raise Violation(f"a message of more than {MAX_FRAGMENTS} frames", websocket.CLOSE_POLICY)
        if not is_last:
            return None
        data, self._fragments = bytes(self._fragments), None
        return Message(_checked(data) if self._is_text else data, self._is_text)

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            self.replies = self._encode(PONG, payload)  # to the last only (RFC 6455 §5.5.3): pings can't pile up
        elif opcode == CLOSE:
            try:
                code = websocket.check_close(payload) if payload else NO_CODE
            except ProtocolError as error:
                raise Violation(str(error)) from None
            self.close_code = code
            self.replies += self.close(code)


def _long_size(digits: bytes) -> int:
    size = int.from_bytes(digits, "big")
    if size < 126 or (len(digits) == 8 and size < 65536):
        raise Violation("a frame length that is not minimal")
    return size


def _checked(data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError:
        raise _not_utf8() from None
    return data


def _not_utf8() -> Violation:
    return Violation("a text message that is not UTF-8", websocket.CLOSE_INVALID_TEXT)


def _too_big(limit_bytes: int) -> Violation:
    return Violation(f"a message over {limit_bytes} bytes", websocket.CLOSE_TOO_BIG)
