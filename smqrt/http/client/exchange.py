"""Requests and responses of the HTTP client, without I/O: where a request goes and the bytes it becomes, a response put
together from what the socket gives."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import quote_from_bytes, urljoin

import httptools

from smqrt.errors import ArgumentError, StreamError
from smqrt.http.body import ChunkedDecoder
from smqrt.http.headers import BadRequest, joined_fields
from smqrt.wire import websocket
from smqrt.wire.url import Url, basic_authorization, parse_url

_CONTROL = re.compile(r"[\0-\x08\x0a-\x1f\x7f]")
_NEVER_IN_A_URL = re.compile(r"[\0-\x1f\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_SECRETS = frozenset(("authorization", "cookie", "proxy-authorization"))
_BODY_FIELDS = ("content-", "transfer-encoding")

Fields = list[tuple[str, str]]
Parameters = Iterable[tuple[bytes, bytes]]
MAX_HEAD_BYTES = 65536  # with the heads of interim responses
MAX_FIELDS = 256
MAX_INTERIM = 32
MAX_FRAMING_BYTES = 65536  # chunk sizes, extensions and trailers without a byte of the body between them
_END = re.compile(rb"\r?\n\r?\n")
_SWITCHING = 101


def url_of(text: str, query: Parameters = ()) -> Url:
    """Read an address and append parameters to its query.

    Raises:
        StreamError: "invalidurl".
    """
    try:
        url = parse_url(text, encode(query))
    except ValueError:
        raise StreamError("invalidurl", text) from None
    if "%" in url.host or _NEVER_IN_A_URL.search(text):
        raise StreamError("invalidurl", text)
    return url


def joined(url: Url, location: str) -> Url:
    """What a reference found at `url` means.

    Raises:
        StreamError: "invalidurl".
    """
    try:
        return url_of(urljoin(str(url), location))
    except ValueError:
        raise StreamError("invalidurl", location) from None


def encode(parameters: Parameters) -> str:
    """Parameters as a query or a form carries them."""
    return "&".join(
        f"{quote_from_bytes(name, safe='')}={quote_from_bytes(value, safe='')}" for name, value in parameters
    )


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request.

    Attributes:
        headers: more fields, in order; they replace those that are sent by themselves.
        size_bytes: of the body; None when it is sent in chunks, or there is none.
        user, password: for the server (Basic).
        trusted: whether the server has to be trusted (TLS only).
    """

    method: str
    url: Url
    headers: Fields = field(default_factory=list)
    size_bytes: int | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    trusted: bool = False

    def __post_init__(self) -> None:
        if not _TOKEN.match(self.method):
            raise ArgumentError(f"method {self.method!r} is no word that HTTP allows")
        for name, value in self.headers:
            _check_field(name, value)

    @property
    def length(self) -> int | None:
        """How long the body is; None when that is not known before."""
        if self.size_bytes is not None:
            return self.size_bytes
        given = self._given("content-length")
        if given is not None:
            return int(given) if given.isascii() and given.isdigit() else 0
        return None if self.chunked else 0

    @property
    def chunked(self) -> bool:
        """Whether the body is sent in chunks."""
        if self.size_bytes is not None or self._given("content-length") is not None:
            return False
        return self.method in _WITH_BODY or "chunked" in (self._given("transfer-encoding") or "").lower()

    def head(self, agent: str, persistent: bool, host: str | None = None, through: str | None = None) -> bytes:
        """The bytes of the request line and the fields.

        Args:
            agent: the User-Agent.
            persistent: whether the connection is to stay open.
            host: the Host field, when it is not what the URL says.
            through: the Proxy-Authorization of a proxy that forwards the request, "" for one that asks nobody; None
                without one.
        """
        fields: Fields = [("Host", host or self.url.authority), ("User-Agent", agent), ("Accept", "*/*")]
        if not persistent and not self.url.websocket:
            fields.append(("Connection", "close"))
        fields += self._framing() + self._credentials()
        if through:
            fields.append(("Proxy-Authorization", through))
        own = {name.lower() for name, _ in self.headers}
        fields = [pair for pair in fields if pair[0].lower() not in own] + self.headers
        target = str(self.url) if through is not None else self.url.target
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{self.method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def as_websocket(self, key: str) -> ClientRequest:
        """The same with the fields that ask for an upgrade to WebSocket."""
        return replace(self, method="GET", headers=[*self.headers, *websocket.request_headers(key)])

    def redirected(self, status: int, url: Url) -> ClientRequest | None:
        """The request that a redirect asks for; None when it would have to send the body again.

        Secrets stay with the origin they were meant for.
        """
        headers, method = self.headers, self.method
        if status == 303 and method != "HEAD" or (status in (301, 302) and method == "POST"):
            method = "GET"
            headers = [pair for pair in headers if not pair[0].lower().startswith(_BODY_FIELDS)]
        elif self.length != 0:
            return None
        if url.origin == self.url.origin:
            user, password = self.login
            return replace(self, method=method, url=url, headers=headers, size_bytes=None, user=user, password=password)
        headers = [pair for pair in headers if pair[0].lower() not in _SECRETS]
        return replace(self, method=method, url=url, headers=headers, size_bytes=None, user=None, password=None)

    def _framing(self) -> Fields:
        if self.chunked:
            return [("Transfer-Encoding", "chunked")]
        return [("Content-Length", str(self.length))] if self.length or self.method in _WITH_BODY else []

    def _credentials(self) -> Fields:
        user, password = self.login
        if user is None:
            return []
        return [("Authorization", basic_authorization(user, password))]

    @property
    def login(self) -> tuple[str | None, str | None]:
        """User and password for the server; what the address names when nothing else is said."""
        return (self.url.user, self.url.password) if self.user is None else (self.user, self.password)

    def _given(self, name: str) -> str | None:
        return next((value.strip() for field, value in self.headers if field.lower() == name), None)


def _check_field(name: str, value: str) -> None:
    if not _TOKEN.match(name):
        raise ArgumentError(f"{name!r} is not the name of a header field")
    if _CONTROL.search(value):
        raise ArgumentError(f"the value of header field {name} must be text without line breaks and control characters")


def check_host(host: str) -> None:
    """Raise ArgumentError when `host` can't be the value of a Host field."""
    if not host.isascii() or not host or re.search(r"[\0-\x20\x7f/\\@]", host):
        raise ArgumentError(f"host {host!r} is no name or address, with or without a port")


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
        self._head_lines = self._heads_bytes = 0
        self._interim = 0
        self._framing_bytes = 0
        self._chunks: ChunkedDecoder | None = None  # of a chunked body
        self._fields: dict[str, str] = {}
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
        if self._chunks is None:
            self._parser.feed_data(data)
        else:
            self._feed_chunks(self._chunks, data)
        self._framing_bytes = 0 if self._pieces else self._framing_bytes + len(data)
        if self._framing_bytes > MAX_FRAMING_BYTES:
            raise _excess(f"sent {self._framing_bytes} bytes of chunk sizes or trailers without a body")

    def _feed_chunks(self, chunks: ChunkedDecoder, data: bytes) -> None:
        """Take chunks with the server's decoder: llhttp refuses extensions and blanks that RFC 9112 §7.1 allows."""
        try:
            piece = chunks.feed(data)
        except BadRequest as error:
            raise StreamError("invalidresponse", error.detail) from None
        if piece:
            self._pieces.append(piece)
        if chunks.complete:
            self.complete, self._uninvited = True, bool(chunks.rest)

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
        """The field of this name, in any letter case; several lines are one list, joined by ",". Of fields that have
        one value, and of Set-Cookie, the first."""
        return self._fields.get(name.lower())

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
            before = len(self._head)
            self._head += data
            match = _END.search(self._head, max(before - 3, 0))
            self._check_head(before, match)
            if match is None:
                return b""
            head, data = bytes(self._head[: match.end()]), bytes(self._head[match.end() :])
            self._heads_bytes, self._head, self._head_lines = self._heads_bytes + len(head), bytearray(), 0
            with suppress(httptools.HttpParserUpgrade):  # the status tells the same
                self._parser.feed_data(head)
        return data

    def _check_head(self, before: int, match: re.Match[bytes] | None) -> None:
        """Look at what has come behind the first `before` bytes: all of it again for each byte would be a square."""
        end = len(self._head) if match is None else match.end()
        if not b"HTTP/".startswith(self._head[:5]):
            raise StreamError("invalidresponse", "the server does not speak HTTP")
        if self._heads_bytes + end > MAX_HEAD_BYTES:
            raise _excess(f"sent a head over {MAX_HEAD_BYTES} bytes")
        self._head_lines += self._head.count(b"\n", before, end)
        if self._head_lines > MAX_FIELDS + 2:
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
        self._fields = joined_fields(self.headers)
        if self._bodiless or status == _SWITCHING:
            self.complete = True
        is_chunked = "chunked" in (self.get("transfer-encoding") or "").lower()
        if is_chunked and not self.complete and status not in (204, 304):
            self._chunks = ChunkedDecoder()
        framed = self.get("content-length") is not None or is_chunked
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
