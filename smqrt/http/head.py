"""Strict parser for request heads.

Three steps: the grammar below, llhttp (httptools), then checks of framing. Input that two servers could interpret
differently (request smuggling) is rejected with 400, never repaired. The grammar excludes bare CR or LF, NUL, folded
lines, whitespace before a colon, and targets other than the origin form and the absolute form of http and https. Two
forms that RFC 9112 allows are normalized here: an absolute target becomes an origin target and the Host (§3.2.2), and
raw UTF-8 in a target becomes percent-encoded.

A name with an underscore is a valid token. Servers that derive variables from names (CGI, WSGI) confuse
`Content_Length` with `Content-Length`. A field that can be confused with a framing field is rejected. One that can be
confused with a field that identifies a client is dropped. Any other one is dropped if the field with dashes is present.
"""

from __future__ import annotations

import re

import httptools

from smqrt.http.forms import QueryText
from smqrt.http.headers import BadRequest, joined_fields, spelled_fields

MAX_FIELDS = 100  # browsers send about 15

_LINE = (
    rb"([A-Z][A-Z-]{0,31}) "
    rb"((?:/|[Hh][Tt][Tt][Pp][Ss]?://)[\x21\x22\x24-\x5b\x5d-\x7e\x80-\xff]*+|\*) HTTP/1\.[01]\r\n"
)
_HEAD = re.compile(_LINE + rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+\r\n)*+\r\n")
_REQUEST_LINE = re.compile(_LINE)
_ABSOLUTE = re.compile(rb"[a-z]+://([^/?]*)(.*)", re.IGNORECASE)
_NON_ASCII = re.compile(rb"[\x80-\xff]")
_INVALID_IN_HEAD = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r(?!\n|\Z)")
_HOST = re.compile(r"(?:[0-9A-Za-z.\-_~%!$&'()*+,;=]+|\[[0-9A-Fa-f:.]+(?:%25[0-9A-Za-z.\-_~]+)?\])(?::([0-9]{1,5}))?")
_AUTHORIZATION = re.compile(rb"(?<=\n)([Aa]uthorization):([\t\x20-\x7e\x80-\xff]*)\r\n")
_LENGTH = re.compile(r"[0-9]{1,15}")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_FRAMING = frozenset(("content-length", "transfer-encoding", "expect"))
_WEBSOCKET_FIELDS = ("sec-websocket-key", "sec-websocket-version")
_SINGLE = (  # a second one changes the meaning of the message, or its sender
    "host", *_FRAMING, *_WEBSOCKET_FIELDS, "authorization", "proxy-authorization", "origin", "destination",
)  # fmt: skip
_EQUAL = ("content-type",)  # repeated lines are accepted if they are equal
_DATES = ("if-modified-since", "if-unmodified-since")  # ignored with more than one value: RFC 9110 §13.1
_REJECTED_WITH_UNDERSCORES = frozenset(("content-length", "transfer-encoding"))
_IDENTIFYING = ("x-forwarded-", "x-real-", "sec-", "proxy-")  # beginnings of names
_MAX_PORT = 65535
NO_QUERY = QueryText()
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 1024  # of one cached head


class Head:
    """A parsed head.

    Attributes:
        method: in upper case.
        target: in origin form, with raw UTF-8 percent-encoded.
        path: path of the target, percent-decoded once, with invalid UTF-8 as surrogate escapes. Begins with "/", or is
            "*" for `OPTIONS *`.
        query: the part after the first "?", as the client sent it, with access to its parameters.
        version: "1.0" or "1.1".
        host: the Host header, or the host of an absolute target; empty without one.
        headers: name and value in the order and spelling of the client (latin-1), line by line.
        content_length: bytes of the body; None if it is chunked.
        keep_alive: whether the client wants to reuse the connection.
        expects_continue: whether the client waits for `100 Continue` before it sends the body.
    """

    __slots__ = (
        "_index", "content_length", "expects_continue", "headers", "host", "keep_alive", "method", "path", "query",
        "target", "version",
    )  # fmt: skip

    method: str
    target: str
    path: str
    query: QueryText
    version: str
    host: str
    headers: list[tuple[str, str]]
    content_length: int | None
    keep_alive: bool
    expects_continue: bool
    _index: dict[str, str]

    def __init__(self, data: bytes) -> None:
        """Parse `data`, a head with its final empty line.

        Raises:
            BadRequest: the head is malformed; the text names the rule.
        """
        match = _HEAD.fullmatch(data)
        if match is None:
            if _INVALID_IN_HEAD.search(data) is not None:
                raise BadRequest("control character or bare line end in the head")
            raise BadRequest("malformed request line" if _REQUEST_LINE.match(data) is None else "malformed header line")
        host: str | None = None
        if not match[2].startswith((b"/", b"*")) or not match[2].isascii():
            target, host = _origin_form(match[1], match[2])
            data = b"".join((data[: match.start(2)], target, data[match.end(2) :]))
        self.headers = []
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an Upgrade field is an offer that the handler may accept
        except httptools.HttpParserError as error:
            raise BadRequest(f"malformed request: {error}") from None
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        if len(self.headers) > MAX_FIELDS:
            raise BadRequest(f"more than {MAX_FIELDS} header fields", status=431)
        if any("_" in name for name, _ in self.headers):
            self._drop_underscore_names()
        path, mark, query = self.target.partition("?")
        self.query = QueryText(query) if mark else NO_QUERY
        self.path = decode_path(path) if "%" in path else path
        if path == "*" and self.method != "OPTIONS":
            raise BadRequest("the target * is for OPTIONS only")
        self._index = {name.lower(): value for name, value in self.headers}
        if len(self._index) != len(self.headers):
            self._join_duplicates()
        self.host = self._index.get("host", "")
        self._check_host()
        if host is not None:
            self.replace_host(host)
        self.keep_alive = self.version == "1.1"
        if "connection" in self._index:
            tokens = {token.strip().lower() for token in self._index["connection"].split(",")}
            self.keep_alive = "close" not in tokens and (self.keep_alive or "keep-alive" in tokens)
        self.expects_continue = False
        self.content_length = 0
        if not _FRAMING.isdisjoint(self._index):
            self._read_framing()
        if "sec-websocket-key" in self._index:
            # RFC 6455 §4.1: a GET of HTTP/1.1. A body would be parsed as frames.
            if self.version == "1.0":
                raise BadRequest("a WebSocket handshake needs HTTP/1.1")
            if self.content_length != 0:
                raise BadRequest("a WebSocket handshake has no body")

    def copy_from(self, other: Head) -> None:
        """Copy the values of another head."""
        self.method, self.target, self.version = other.method, other.target, other.version
        self.path, self.query, self.host = other.path, other.query, other.host
        self.headers, self._index = list(other.headers), other._index  # shared: `replace_host` creates a new one
        self.content_length, self.keep_alive = other.content_length, other.keep_alive
        self.expects_continue = other.expects_continue

    def replace_host(self, host: str) -> None:
        """Replace the Host field. Raises BadRequest for a malformed one."""
        self._index = {**self._index, "host": host}
        self._check_host()
        self.host = host
        kept = [(name, value) for name, value in self.headers if name.lower() != "host"]
        self.headers = [("Host", host), *kept]

    def on_url(self, url: bytes) -> None:
        """Store the target; a callback of httptools."""
        self.target = url.decode("ascii")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header field; a callback of httptools."""
        self.headers.append((name.decode("ascii"), value.decode("latin-1").strip(" \t")))

    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the header field of a name, in any letter case.

        Several lines are joined by "," (cookies by "; "). For single-value fields, the first line is used.
        """
        return self._index.get(name.lower(), default)

    def fields(self) -> list[tuple[str, str]]:
        """Return names and values as `get` does, each name once, in the spelling of its first line."""
        if len(self._index) == len(self.headers):
            return self.headers
        return spelled_fields(self.headers, self._index)

    def has_any(self, names: frozenset[str]) -> bool:
        """Return whether a field of these names (in lower case) is present."""
        return not names.isdisjoint(self._index)

    def _drop_underscore_names(self) -> None:
        names = {name.lower() for name, _ in self.headers}
        kept: list[tuple[str, str]] = []
        for name, value in self.headers:
            dashed = name.lower().replace("_", "-")
            if "_" not in name:
                kept.append((name, value))
            elif dashed in _REJECTED_WITH_UNDERSCORES:
                raise BadRequest(f"header {name} can be confused with {dashed.title()}: use '-' in the name")
            elif dashed not in names and not dashed.startswith(_IDENTIFYING):
                kept.append((name, value))
        self.headers = kept

    def _join_duplicates(self) -> None:
        values: dict[str, set[str]] = {}
        names = [name.lower() for name, _ in self.headers]
        for name, (_, value) in zip(names, self.headers, strict=True):
            values.setdefault(name, set()).add(value)
        for name in _SINGLE:
            if names.count(name) > 1:
                raise BadRequest(f"more than one {name.title()} header")
        for name in _EQUAL:
            if len(values.get(name, ())) > 1:
                raise BadRequest(f"more than one {name.title()} header with different values")
        self._index = joined_fields(self.headers)
        for name in _DATES:
            if names.count(name) > 1:
                del self._index[name]

    def _check_host(self) -> None:
        host = self._index.get("host")
        if host is None:
            if self.version != "1.0":
                raise BadRequest("no Host header")
            return
        match = _HOST.fullmatch(host)
        if match is None or int(match[1] or 0) > _MAX_PORT:
            raise BadRequest("malformed Host header")

    def _read_framing(self) -> None:
        index = self._index
        length, coding, expect = index.get("content-length"), index.get("transfer-encoding"), index.get("expect")
        if coding is not None:
            if length is not None:
                raise BadRequest("both Content-Length and Transfer-Encoding")
            if coding.lower() != "chunked" or self.version == "1.0":
                raise BadRequest("Transfer-Encoding may only be chunked, in HTTP/1.1")
            self.content_length = None
        elif length is not None:
            if _LENGTH.fullmatch(length) is None:
                raise BadRequest("malformed Content-Length header")
            self.content_length = int(length)
        if expect is not None and expect.lower() != "100-continue":
            raise BadRequest("the only supported expectation is 100-continue", status=417)
        self.expects_continue = expect is not None and self.version == "1.1"


_cached_heads: dict[bytes, Head] = {}


def parse(data: bytes) -> Head:
    """Return the `Head` for these bytes, from a cache if possible: clients often repeat the same head.

    Heads with credentials are cached without these: those of Digest never repeat, those of Basic contain a password.

    Raises:
        BadRequest: as `Head`.
    """
    head = _cached_heads.get(data)
    if head is not None:
        return head
    line = _AUTHORIZATION.search(data) if len(data) <= _MAX_CACHED_BYTES else None
    if line is None:
        head = Head(data)
        if len(data) <= _MAX_CACHED_BYTES and head.get("authorization") is None:
            _cache(data, head)
        return head
    rest = data[: line.start()] + data[line.end() :]
    without = _cached_heads.get(rest)
    if without is not None and len(without.headers) < MAX_FIELDS:
        return _with_field(without, data.count(b"\n", 0, line.start()) - 1, line)  # without the request line
    head = Head(data)
    _cache(rest, _without_authorization(head))
    return head


def _cache(data: bytes, head: Head) -> None:
    if len(_cached_heads) >= _MAX_CACHED:
        _cached_heads.clear()
    _cached_heads[data] = head


def _with_field(head: Head, at: int, line: re.Match[bytes]) -> Head:
    """Return a head with a further field, as parsed from a line after `at` other fields."""
    name, value = line[1].decode("ascii"), line[2].decode("latin-1").strip(" \t")
    found = Head.__new__(Head)
    found.copy_from(head)
    found.headers.insert(at, (name, value))
    found._index = {**head._index, name.lower(): value}
    return found


def _without_authorization(head: Head) -> Head:
    """Return a head without its field Authorization."""
    found = Head.__new__(Head)
    found.copy_from(head)
    found.headers = [field for field in head.headers if field[0].lower() != "authorization"]
    found._index = {name: value for name, value in head._index.items() if name != "authorization"}
    return found


def _origin_form(method: bytes, target: bytes) -> tuple[bytes, str | None]:
    """Return a target in origin form with raw UTF-8 percent-encoded, and the host of an absolute target."""
    host: str | None = None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, rest = absolute.groups()
        if _HOST.fullmatch(authority.decode("latin-1")) is None:
            raise BadRequest("malformed host in the target")
        host = authority.decode("ascii")
        empty = b"*" if method == b"OPTIONS" else b"/"
        target = rest if rest.startswith(b"/") else b"/" + rest if rest else empty
    try:
        target.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("invalid UTF-8 in the target: percent-encode the bytes") from None
    return _NON_ASCII.sub(lambda match: b"%%%02X" % match[0][0], target), host


def decode_path(path: str) -> str:
    """Percent-decode a path, once.

    Raises:
        BadRequest: a malformed escape, or an encoded slash, backslash or control character. These serve only to bypass
            path checks.
    """
    raw = _ESCAPE.sub(_decode_escape, path.encode("ascii"))
    return raw.decode("utf-8", "surrogateescape")


def _decode_escape(match: re.Match[bytes]) -> bytes:
    digits = match[1]
    if digits is None:
        raise BadRequest("malformed percent escape in the path")
    code = int(digits, 16)
    if code < 0x20 or code in b"/\\\x7f":
        raise BadRequest("encoded slash, backslash or control character in the path")
    return bytes((code,))


def check_beginning(data: bytes, checked: int = 0) -> None:
    """Reject the beginning of a head that cannot become valid, without waiting for its end.

    Args:
        data: the bytes that have arrived, without an empty line yet.
        checked: length of the part that passed this check before.

    Raises:
        BadRequest: characters that no head contains (a TLS ClientHello, bare line ends), or a malformed request line.
    """
    if _INVALID_IN_HEAD.search(data, max(checked - 2, 0)) is not None:
        raise BadRequest("control character or bare line end in the head")
    if b"\r\n" in data and _REQUEST_LINE.match(data) is None:
        raise BadRequest("malformed request line")
