"""How frames travel: unchanged on a raw socket, as masked binary messages on a WebSocket.

Inside the client everything to send is a *frame* (see `smqrt.wire.smq`), everything received a *packet*.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import websocket, wsclient


class Framing(Protocol):
    """What the two transports have in common."""

    @property
    def closed(self) -> bool:
        """Whether the broker ended the conversation below SMQ."""

    def encode(self, frames: Iterable[bytes]) -> bytes:
        """The bytes on the wire of `frames`."""

    def receive(self, data: bytes) -> list[bytes]:
        """The packets that `data` completes."""

    def take_replies(self) -> bytes:
        """Bytes that the transport itself wants to send."""


class RawFraming:
    """`u16 length` before each packet."""

    closed = False

    def __init__(self) -> None:
        self._rest = b""

    def encode(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(frames)

    def receive(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        packets, start, end = [], 0, len(data)
        while end - start >= 2:
            size = data[start] << 8 | data[start + 1]
            if size < 3:
                raise ProtocolError(CloseReason.SHORT_PACKET, f"a frame of length {size}")
            if start + size > end:
                break
            packets.append(data[start + 2 : start + size])
            start += size
        self._rest = data[start:]
        return packets

    def take_replies(self) -> bytes:
        return b""


class WebSocketFraming:
    """One binary message for each packet."""

    def __init__(self) -> None:
        self._decoder = wsclient.Decoder()

    @property
    def closed(self) -> bool:
        return self._decoder.closed

    def encode(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(wsclient.encode(websocket.BINARY, frame[2:]) for frame in frames)

    def receive(self, data: bytes) -> list[bytes]:
        return self._decoder.receive(data)

    def take_replies(self) -> bytes:
        replies = bytes(self._decoder.replies)
        self._decoder.replies.clear()
        return replies
