"""Requests of the HTTP client: where they go, and the bytes they become."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from urllib.parse import quote_from_bytes, urljoin

from smqrt.errors import ArgumentError, StreamError
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
