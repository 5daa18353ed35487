"""One response, put together from what the socket gives."""

from __future__ import annotations

import re
from contextlib import suppress

import httptools

from smqrt.errors import StreamError

MAX_HEAD_BYTES = 65536  # with the heads of interim responses
MAX_FIELDS = 256
MAX_INTERIM = 32
MAX_FRAMING_BYTES = 65536  # chunk sizes, extensions and trailers without a byte of the body between them
_END = re.compile(rb"\r?\n\r?\n")
_SWITCHING = 101


class ClientResponse:
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
        self._head = bytearray()
        self._heads_bytes = 0
        self._interim = 0
        self._framing_bytes = 0
        self._pieces: list[bytes] = []  # of the body, while bytes are fed
        self._body, self._at = b"", 0  # not yet taken
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Take bytes from the socket.

        Raises:
            StreamError: "invalidresponse".
        """
        self.started = True
        try:
            if self.status is None:
                data = self._feed_head(data)
            if self.complete:
                self.tail += data
            elif data:
                self._feed_body(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                raise StreamError("invalidresponse", str(error)) from None
            self._uninvited = True
        finally:
            self._join_pieces()

    def _feed_body(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._framing_bytes = 0 if self._pieces else self._framing_bytes + len(data)
        if self._framing_bytes > MAX_FRAMING_BYTES:
            raise _excess(f"sent {self._framing_bytes} bytes of chunk sizes or trailers without a body")

    def _join_pieces(self) -> None:
        if self._pieces:
            self._body, self._at = self._body[self._at :] + b"".join(self._pieces), 0
            self._pieces = []

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
        data = self._body[self._at : self._at + size_bytes]
        self._at += len(data)
        if self._at >= len(self._body):
            self._body, self._at = b"", 0
        return data

    def put_back(self, data: bytes) -> None:
        """Let `data` be taken next."""
        self._body, self._at = data + self._body[self._at :], 0

    @property
    def has_data(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._body)

    def get(self, name: str) -> str | None:
        """The first field of this name, in any letter case."""
        name = name.lower()
        return next((value for field, value in self.headers if field.lower() == name), None)

    @property
    def announced_bytes(self) -> int:
        """How long the whole body is, 0 when the head does not tell."""
        text = self.get("content-length") or ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

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
            searched = max(len(self._head) - 3, 0)
            self._head += data
            match = _END.search(self._head, searched)
            self._check_head(match)
            if match is None:
                return b""
            head, data = bytes(self._head[: match.end()]), bytes(self._head[match.end() :])
            self._heads_bytes, self._head = self._heads_bytes + len(head), bytearray()
            with suppress(httptools.HttpParserUpgrade):  # the status tells the same
                self._parser.feed_data(head)
        return data

    def _check_head(self, match: re.Match[bytes] | None) -> None:
        end = len(self._head) if match is None else match.end()
        if not b"HTTP/".startswith(self._head[:5]):
            raise StreamError("invalidresponse", "the server does not speak HTTP")
        if self._heads_bytes + end > MAX_HEAD_BYTES:
            raise _excess(f"sent a head over {MAX_HEAD_BYTES} bytes")
        if self._head.count(b"\n", 0, end) > MAX_FIELDS + 2:
            raise _excess(f"sent a head of more than {MAX_FIELDS} fields")

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
            self._count_interim()
            return
        self.status = status
        if self._bodiless or status == _SWITCHING:
            self.complete = True
        framed = self.get("content-length") is not None or "chunked" in (self.get("transfer-encoding") or "").lower()
        self._until_end = not (framed or self._bodiless or status in (_SWITCHING, 204, 304))

    def _count_interim(self) -> None:
        self._interim += 1
        if self._interim > MAX_INTERIM:
            raise httptools.HttpParserError(f"the server sent more than {MAX_INTERIM} interim responses")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self.complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The end of a response, perhaps an interim one."""
        if self.status is not None:
            self.complete = True


def _excess(what: str) -> StreamError:
    return StreamError("invalidresponse", f"the server {what}")
