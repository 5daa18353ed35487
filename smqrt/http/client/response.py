"""One response, put together from what the socket gives."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress

import httptools

from smqrt.errors import StreamError

MAX_HEAD_BYTES = 65536
_END = re.compile(rb"\r?\n\r?\n")
_SWITCHING = 101


class Response:
    """Bytes in, status, header fields and body out.

    Args:
        bodiless: whether it answers a HEAD request, so that no body follows.

    Attributes:
        status: None while the head is incomplete.
        headers: in order, with the server's spelling (latin-1).
        complete: whether all of it is there.
        tail: bytes behind the head of a response that changes the protocol.
    """

    def __init__(self, bodiless: bool = False) -> None:
        self.status: int | None = None
        self.headers: list[tuple[str, str]] = []
        self.complete = False
        self.tail = b""
        self.started = False
        self._bodiless = bodiless
        self._until_end = False
        self._uninvited = False
        self._head = b""
        self._chunks: deque[bytes] = deque()
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket.

        Raises:
            StreamError: "invalidresponse".
        """
        self.started = True
        try:
            if self.status is None:
                data = self._feed_head(self._head + data)
            if self.complete:
                self.tail += data
            elif data:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                raise StreamError("invalidresponse", str(error)) from None
            self._uninvited = True

    def end(self) -> None:
        """The server has closed the connection.

        Raises:
            StreamError: "socketclosed": something is missing.
        """
        if not (self.complete or self._until_end):
            raise StreamError("socketclosed", "the server closed the connection within its response")
        self.complete = True

    def take(self, size_bytes: int) -> bytes:
        """The next bytes of the body, at most `size_bytes`; b"" when none are there now."""
        if not self._chunks:
            return b""
        data = self._chunks.popleft()
        if len(data) > size_bytes:
            self._chunks.appendleft(data[size_bytes:])
        return data[:size_bytes]

    @property
    def has_data(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._chunks)

    def get(self, name: str) -> str | None:
        """The first field of this name, in any letter case."""
        name = name.lower()
        return next((value for field, value in self.headers if field.lower() == name), None)

    @property
    def switches(self) -> bool:
        """Whether another protocol begins behind the head."""
        return self.status == _SWITCHING

    @property
    def persistent(self) -> bool:
        """Whether the connection can take another request behind this response."""
        tokens = (self.get("connection") or "").lower()
        kept = "keep-alive" in tokens if self._parser.get_http_version() == "1.0" else "close" not in tokens
        return self.complete and kept and not (self._until_end or self._uninvited or self.tail or self.switches)

    def _feed_head(self, data: bytes) -> bytes:
        """Take the heads, those of interim responses included; gives what is behind."""
        while self.status is None:
            match = _END.search(data)
            if match is None:
                if len(data) > MAX_HEAD_BYTES or not b"HTTP/".startswith(data[:5]):
                    raise StreamError("invalidresponse", "the server does not speak HTTP")
                self._head = data
                return b""
            with suppress(httptools.HttpParserUpgrade):  # the status tells the same
                self._parser.feed_data(data[: match.end()])
            data = data[match.end() :]
        self._head = b""
        return data

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """The first bytes of a response: of this one, or of one that nobody asked for."""
        self._uninvited = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head, or one behind the body, which nobody asked for."""
        if self.status is None:
            self.headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """The end of a head."""
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200 and status != _SWITCHING:
            self.headers.clear()  # of an interim response: the real one follows
            return
        self.status = status
        if self._bodiless or status == _SWITCHING:
            self.complete = True
        framed = self.get("content-length") is not None or "chunked" in (self.get("transfer-encoding") or "").lower()
        self._until_end = not (framed or self._bodiless or status in (_SWITCHING, 204, 304))

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self.complete:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        """The end of a response, perhaps an interim one."""
        if self.status is not None:
            self.complete = True
