"""Requests and responses of the HTTP client, without I/O."""

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
_INVALID_IN_URL = re.compile(r"[\0-\x1f\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_SECRETS = frozenset(("authorization", "cookie", "proxy-authorization"))
_BODY_FIELDS = ("content-", "transfer-encoding")

Fields = list[tuple[str, str]]
Parameters = Iterable[tuple[bytes, bytes]]
MAX_HEAD_BYTES = 65536  # including the heads of interim responses
MAX_FIELDS = 256
MAX_INTERIM = 32
MAX_FRAMING_BYTES = 65536  # of chunk sizes, extensions and trailers without a byte of the body between them
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_SWITCHING = 101


def url_of(text: str, query: Parameters = ()) -> Url:
    """Parse a URL and append parameters to its query.

    Raises:
        StreamError: "invalidurl".
    """
    try:
        url = parse_url(text, encode(query))
    except ValueError:
        raise StreamError("invalidurl", text) from None
    if "%" in url.host or _INVALID_IN_URL.search(text):
        raise StreamError("invalidurl", text)
    return url


def joined(url: Url, location: str) -> Url:
    """Return the URL of a reference in a document at `url`.

    Raises:
        StreamError: "invalidurl".
    """
    try:
        return url_of(urljoin(str(url), location))
    except ValueError:
        raise StreamError("invalidurl", location) from None


def encode(parameters: Parameters) -> str:
    """Encode parameters for a query or a form."""
    return "&".join(
        f"{quote_from_bytes(name, safe='')}={quote_from_bytes(value, safe='')}" for name, value in parameters
    )


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of the HTTP client.

    Attributes:
        headers: further fields, in order; they replace the default ones.
        size_bytes: size of the body; None for chunks or no body.
        user, password: credentials for the server (Basic).
        trusted: whether the server must be trusted (TLS only).
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
            raise ArgumentError(f"method {self.method!r} is not a valid HTTP method")
        for name, value in self.headers:
            if not _TOKEN.match(name):
                raise ArgumentError(f"{name!r} is not the name of a header field")
            if _CONTROL.search(value):
                raise ArgumentError(
                    f"value of header field {name} must be text without line breaks and control characters"
                )

    @property
    def length(self) -> int | None:
        """Length of the body, None if it is unknown."""
        if self.size_bytes is not None:
            return self.size_bytes
        given = self._own_field("content-length")
        if given is not None:
            return int(given) if given.isascii() and given.isdigit() else 0
        return None if self.chunked else 0

    @property
    def chunked(self) -> bool:
        """Whether the body is sent in chunks."""
        if self.size_bytes is not None or self._own_field("content-length") is not None:
            return False
        return self.method in _WITH_BODY or "chunked" in (self._own_field("transfer-encoding") or "").lower()

    def head(
        self, agent: str, persistent: bool, host: str | None = None, proxy_authorization: str | None = None
    ) -> bytes:
        """Return the bytes of the request line and the header fields.

        Args:
            agent: value of User-Agent.
            persistent: whether to keep the connection open.
            host: Host field, if different from the URL.
            proxy_authorization: Proxy-Authorization for a proxy that forwards the request, "" if it needs none. None
                without such a proxy.
        """
        fields: Fields = [("Host", host or self.url.authority), ("User-Agent", agent), ("Accept", "*/*")]
        if not persistent and not self.url.websocket:
            fields.append(("Connection", "close"))
        if self.chunked:
            fields.append(("Transfer-Encoding", "chunked"))
        elif self.length or self.method in _WITH_BODY:
            fields.append(("Content-Length", str(self.length)))
        user, password = self.login
        if user is not None:
            fields.append(("Authorization", basic_authorization(user, password)))
        if proxy_authorization:
            fields.append(("Proxy-Authorization", proxy_authorization))
        own = {name.lower() for name, _ in self.headers}
        fields = [pair for pair in fields if pair[0].lower() not in own] + self.headers
        target = str(self.url) if proxy_authorization is not None else self.url.target
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        return f"{self.method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def as_websocket(self, key: str) -> ClientRequest:
        """Return the request with the fields for an upgrade to WebSocket."""
        return replace(self, method="GET", headers=[*self.headers, *websocket.request_headers(key)])

    def redirected(self, status: int, url: Url) -> ClientRequest | None:
        """Return the request for a redirect; None if it would have to send the body again.

        Credentials and cookies are not sent to another origin.
        """
        headers, method = self.headers, self.method
        # As browsers do (RFC 9110 §15.4): 303 means GET, and 301 or 302 changes a POST to a GET.
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

    @property
    def login(self) -> tuple[str | None, str | None]:
        """User and password for the server: `user` and `password`, or those in the URL."""
        return (self.url.user, self.url.password) if self.user is None else (self.user, self.password)

    def _own_field(self, name: str) -> str | None:
        return next((value.strip() for field, value in self.headers if field.lower() == name), None)


def check_host(host: str) -> None:
    """Raise ArgumentError if `host` is not a valid value of a Host field."""
    if not host.isascii() or not host or re.search(r"[\0-\x20\x7f/\\@]", host):
        raise ArgumentError(f"host {host!r} is not a name or address, with or without a port")


class ClientResponse:
    """Parser of a response.

    Args:
        bodiless: whether the request was HEAD, whose response has no body.

    Attributes:
        status: status code, None while the head is incomplete.
        headers: header fields in the order and spelling of the server (latin-1).
        complete: whether all of it has arrived.
        tail: bytes after the head of a response that changes the protocol.
    """

    def __init__(self, bodiless: bool = False) -> None:
        self.status: int | None = None
        self.headers: list[tuple[str, str]] = []
        self.complete = False
        self.tail = b""
        self.started = False
        self._bodiless = bodiless
        self._until_end = False
        self._has_unexpected = False
        self._head = bytearray()
        self._head_lines = self._heads_bytes = 0
        self._interim = 0
        self._framing_bytes = 0
        self._chunks: ChunkedDecoder | None = None  # of a chunked body
        self._fields: dict[str, str] = {}
        self._pieces: list[bytes] = []  # of the body, while bytes are fed
        self._body, self._at = b"", 0  # received body, and the position of the next byte to take
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse bytes from the connection.

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
                if self._chunks is None:
                    self._parser.feed_data(data)
                else:  # the server's decoder: llhttp rejects extensions and whitespace that RFC 9112 §7.1 allows
                    piece = self._chunks.feed(data)
                    if piece:
                        self._pieces.append(piece)
                    if self._chunks.complete:
                        self.complete, self._has_unexpected = True, bool(self._chunks.rest)
                self._framing_bytes = 0 if self._pieces else self._framing_bytes + len(data)
                if self._framing_bytes > MAX_FRAMING_BYTES:
                    raise _too_much(f"sent {self._framing_bytes} bytes of chunk sizes or trailers without a body")
        except BadRequest as error:
            raise StreamError("invalidresponse", error.detail) from None
        except httptools.HttpParserError as error:
            if not self.complete:
                raise StreamError("invalidresponse", str(error)) from None
            self._has_unexpected = True
        finally:
            if self._pieces:
                self._body, self._at = self._body[self._at :] + b"".join(self._pieces), 0
                self._pieces = []

    def end(self) -> None:
        """End the response because the server has closed the connection.

        Raises:
            StreamError: "socketclosed", the response is incomplete.
        """
        if not (self.complete or self._until_end):
            raise StreamError("socketclosed", "the server closed the connection before its response was complete")
        self.complete = True

    def take(self, size_bytes: int) -> bytes:
        """Return the next received bytes of the body, at most `size_bytes`; b"" if there are none."""
        data = self._body[self._at : self._at + size_bytes]
        self._at += len(data)
        if self._at >= len(self._body):
            self._body, self._at = b"", 0
        return data

    def put_back(self, data: bytes) -> None:
        """Insert `data` before the bytes that `take` returns next."""
        self._body, self._at = data + self._body[self._at :], 0

    @property
    def may_be_chunked(self) -> bool:
        """Whether chunks, or a head that announces them, can come next."""
        return self.status is None or self._chunks is not None

    @property
    def has_data(self) -> bool:
        """Whether `take` would return bytes."""
        return bool(self._body)

    def get(self, name: str) -> str | None:
        """Return the header field of a name, in any letter case.

        Several lines are joined by ",". For single-value fields and Set-Cookie, the first line is used.
        """
        return self._fields.get(name.lower())

    @property
    def announced_bytes(self) -> int:
        """Announced length of the body, 0 if it is unknown."""
        text = self.get("content-length") or ""
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0

    @property
    def switches(self) -> bool:
        """Whether another protocol begins after the head."""
        return self.status == _SWITCHING

    @property
    def persistent(self) -> bool:
        """Whether the connection can carry another request after this response."""
        tokens = (self.get("connection") or "").lower()
        kept = "keep-alive" in tokens if self._parser.get_http_version() == "1.0" else "close" not in tokens
        return self.complete and kept and not (self._until_end or self._has_unexpected or self.tail or self.switches)

    def _feed_head(self, data: bytes) -> bytes:
        """Parse heads, including those of interim responses; return the bytes after them."""
        while self.status is None:
            before = len(self._head)
            self._head += data
            # Only bytes after the first `before` are scanned, here and below, to avoid quadratic time.
            match = _HEAD_END.search(self._head, max(before - 3, 0))
            end = len(self._head) if match is None else match.end()
            if not b"HTTP/".startswith(self._head[:5]):
                raise StreamError("invalidresponse", "the response of the server is not HTTP")
            if self._heads_bytes + end > MAX_HEAD_BYTES:
                raise _too_much(f"sent a head over {MAX_HEAD_BYTES} bytes")
            self._head_lines += self._head.count(b"\n", before, end)
            if self._head_lines > MAX_FIELDS + 2:  # the status line and the empty line are not fields
                raise _too_much(f"sent a head of more than {MAX_FIELDS} fields")
            if match is None:
                return b""
            head, data = bytes(self._head[: match.end()]), bytes(self._head[match.end() :])
            self._heads_bytes, self._head, self._head_lines = self._heads_bytes + len(head), bytearray(), 0
            with suppress(httptools.HttpParserUpgrade):  # the caller detects the upgrade by the status
                self._parser.feed_data(head)
        return data

    # ---- Callbacks of the parser

    def on_message_begin(self) -> None:
        """Record the beginning of a response: of this one, or of an unexpected one."""
        self._has_unexpected = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a field of the head. Trailers are ignored."""
        if self.status is None:
            self.headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """Evaluate a complete head."""
        if self.complete:
            return
        status = self._parser.get_status_code()
        if status < 200 and status != _SWITCHING:
            self.headers.clear()  # of an interim response; the final one follows
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise httptools.HttpParserError(f"the server sent more than {MAX_INTERIM} interim responses")
            return
        self.status = status
        self._fields = joined_fields(self.headers)
        if self._bodiless or status == _SWITCHING:
            self.complete = True
        is_chunked = "chunked" in (self.get("transfer-encoding") or "").lower()
        if is_chunked and not self.complete and status not in (204, 304):
            self._chunks = ChunkedDecoder()
        # Without a length and chunks, the end of the stream ends the body (RFC 9112 §6.3).
        framed = self.get("content-length") is not None or is_chunked
        self._until_end = not (framed or self._bodiless or status in (_SWITCHING, 204, 304))

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body."""
        if not self.complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Record the end of the response. The end of an interim response is ignored."""
        if self.status is not None:
            self.complete = True


def _too_much(violation: str) -> StreamError:
    return StreamError("invalidresponse", f"the server {violation}")
