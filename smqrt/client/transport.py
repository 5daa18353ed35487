"""The transport below SMQ: the HTTP exchange that comes first, one request out and one head in (specification: smq.md
§1.1), and the framing behind it.

Inside the client everything to send is a *frame* (see `smqrt.wire.smq`), everything received a *packet*.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from smqrt.client.close_reason import ConnectionEnd, not_smq
from smqrt.errors import ArgumentError, CloseReason, ProtocolError
from smqrt.wire import websocket
from smqrt.wire.url import Url, basic_authorization

_MAX_HEAD_BYTES = 16384
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\Z")
_MAX_MESSAGE_BYTES = 0xFFFF
"""The largest SMQ packet is smaller; a server that announces more is not an SMQ broker."""
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


class Handshake:
    """One HTTP exchange with a broker. Bytes in, the bytes behind the head out.

    Attributes:
        request: the bytes to send first.
    """

    def __init__(self, url: Url, headers: Iterable[tuple[str, str]]) -> None:
        self._url = url
        self._key = websocket.new_key() if url.websocket else None
        self._received = bytearray()
        self.request = self._build(headers)

    def _build(self, headers: Iterable[tuple[str, str]]) -> bytes:
        fields = [("Host", self._url.authority)]
        if self._key:
            fields += websocket.request_headers(self._key)
        else:
            fields += [("SimpleMQ", "1"), ("SendSmqHttpResponse", "true")]
        if self._url.user is not None:
            fields.append(("Authorization", basic_authorization(self._url.user, self._url.password)))
        fields += [check_header(name, value) for name, value in headers]
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"GET {self._url.target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def receive(self, data: bytes) -> bytes | None:
        """Take bytes from the socket.

        Returns:
            What came behind the head when the broker accepted, None while the head is incomplete.

        Raises:
            ConnectionEnd: the answer is not that of an SMQ broker.
        """
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            self._refuse_strangers()
            return None
        self._check(bytes(head))
        return bytes(rest)

    def _refuse_strangers(self) -> None:
        start = bytes(self._received[:5])
        if not b"HTTP/".startswith(start) or len(self._received) > _MAX_HEAD_BYTES:
            raise self._not_smq("does not speak HTTP")

    def _check(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.match(first)
        if match is None:
            raise self._not_smq("does not speak HTTP")
        status = int(match[1])
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if status != (101 if self._key else 200):
            reason = (match[2] or b"").decode("latin-1")
            hint = f" and points to {fields[b'location'].decode('latin-1')}" if b"location" in fields else ""
            raise self._not_smq(f"answered {status} {reason}".rstrip() + hint, can_reconnect=status >= 500)
        if self._key is None and fields.get(b"smqbroker", b"").lower() != b"true":
            raise self._not_smq("answered like a web page")
        if self._key and fields.get(b"sec-websocket-accept", b"").decode("latin-1") != websocket.accept_key(self._key):
            raise self._not_smq("answered the WebSocket upgrade with a wrong key")

    def _not_smq(self, what: str, can_reconnect: bool = False) -> ConnectionEnd:
        return not_smq(f"{self._url} is not an SMQ broker: it {what}", can_reconnect)


def check_header(name: str, value: str) -> tuple[str, str]:
    """The header field, when it may be sent.

    Raises:
        ArgumentError: the name is no token, or the value holds a line break, NUL or a character outside latin-1.
    """
    if not _FIELD_NAME.match(name):
        raise ArgumentError(f"headers: {name!r} is not a header name")
    if any(c in value for c in "\r\n\0") or not _is_latin1(value):
        raise ArgumentError(f"headers: the value of {name} must be latin-1 text without line breaks")
    return name, value


def _is_latin1(text: str) -> bool:
    return all(ord(c) < 256 for c in text)


class Framing(Protocol):
    """The framing of packets: unchanged on a raw socket, as masked binary messages on a WebSocket."""

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
        self._codec = websocket.WebSocketCodec(is_client=True, max_message_bytes=_MAX_MESSAGE_BYTES)

    @property
    def closed(self) -> bool:
        return self._codec.close_code is not None

    def encode(self, frames: Iterable[bytes]) -> bytes:
        return b"".join(websocket.encode_masked(websocket.BINARY, frame[2:]) for frame in frames)

    def receive(self, data: bytes) -> list[bytes]:
        self._codec.feed(data)
        packets = []
        while (message := self._codec.next()) or self._codec.has_more:
            if message:
                packets.append(message.data)
        return packets

    def take_replies(self) -> bytes:
        replies, self._codec.replies = self._codec.replies, b""
        return replies
