"""Cross-origin resource sharing: what a browser is told of the pages of other origins that may read an answer (Fetch
standard, §3.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from smqrt.errors import ArgumentError
from smqrt.http.headers import completed
from smqrt.http.response import Response
from smqrt.transport.origins import Origins

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
MAX_AGE_S = 600
_ASKS_FOR_METHOD, _ASKS_FOR_HEADERS = "access-control-request-method", "access-control-request-headers"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ALLOWS = re.compile(rb"^access-control-allow-origin:", re.IGNORECASE | re.MULTILINE)
_VARY = re.compile(rb"^vary:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_ORIGIN_FIELD, _CREDENTIALS = "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials"


class CorsRequest(Protocol):
    """What the rules look at: see `smqrt.http.message.Request`."""

    method: str
    response: Response

    def get(self, name: str) -> str | None:
        """A header field, None without it."""


class Cors:
    """The rules of a directory, or of the whole server.

    Args:
        origins: whose pages may send and read, see `Origins`; None for those of the setting `origins`.
        methods: that they may use, an iterable or a text with commas; None for every method.
        headers: that they may send; None for every header.
        expose: headers of answers that their scripts may read, beside those that every script may.
        credentials: whether they may send cookies and logins and read what is answered then. None for those that
            `origins` names; pages of `*` and `null` never may.
        max_age_s: seconds that a browser may keep the answer to a preflight.

    Raises:
        ArgumentError: one of them is wrong.
    """

    def __init__(
        self,
        origins: str | Iterable[str] | Origins | None = None,
        *,
        methods: str | Iterable[str] | None = None,
        headers: str | Iterable[str] | None = None,
        expose: str | Iterable[str] = (),
        credentials: bool | None = None,
        max_age_s: int = MAX_AGE_S,
    ) -> None:
        self.origins = origins if isinstance(origins, Origins | None) else Origins(origins)
        self._methods = None if methods is None else _tokens("methods", methods)
        self._headers = None if headers is None else _tokens("headers", headers)
        exposed = ", ".join(_tokens("expose", expose))
        self._expose = {"Access-Control-Expose-Headers": exposed} if exposed else {}
        if isinstance(max_age_s, bool) or not isinstance(max_age_s, int) or not 0 <= max_age_s < 1 << 31:
            raise ArgumentError(f"max_age: whole seconds are needed, 0 or more, not {max_age_s!r}")
        self._max_age_s = max_age_s
        if credentials and self.origins is not None and self.origins.all:
            raise ArgumentError("credentials: pages of every origin (`*`) can't have them; name the origins")
        self._credentials = credentials is not False

    def say(self, request: CorsRequest, origins: Origins) -> bool:
        """Have the answer to a request say which page may read it; tells whether the page that has sent it may.

        Args:
            origins: those of the server, or of the hub that is asked.
        """
        listed = self.origins if self.origins is not None else origins
        origin = request.get("origin")
        allowed = self._allowed(listed, origin)
        if allowed or listed.differ:
            request.response.finishers += (Finisher(allowed | self._expose if allowed else {}, listed.differ),)
        return bool(allowed) and origin is not None

    def takes(self, method: str) -> bool:
        """Tells whether pages of other hosts may use a method."""
        return self._methods is None or method in self._methods

    def _allowed(self, origins: Origins, origin: str | None) -> dict[str, str]:
        """The fields that let a page of `origin` read; empty when it may not."""
        if origin is not None and origins.names(origin):
            return {_ORIGIN_FIELD: origin} | ({_CREDENTIALS: "true"} if self._credentials else {})
        if origins.all:
            return {_ORIGIN_FIELD: "*"}
        if origin is not None and origins.has(origin):
            return {_ORIGIN_FIELD: "null"}  # any page can have this origin: no credentials
        return {}

    def answer_preflight(self, request: CorsRequest) -> None:
        """Say what a page may send that may read the answers. Raises as `Response.end`."""
        method = request.get(_ASKS_FOR_METHOD) or ""
        methods = self._methods
        if methods is None:
            methods = METHODS if method in METHODS or not _TOKEN.fullmatch(method) else (*METHODS, method)
        headers = self._headers
        if headers is None:
            asked = (request.get(_ASKS_FOR_HEADERS) or "").split(",")
            headers = tuple(name.strip() for name in asked if _TOKEN.fullmatch(name.strip()))
        response = request.response
        response.status = 204
        response.headers.set("Access-Control-Allow-Methods", ", ".join(methods))
        if headers:
            response.headers.set("Access-Control-Allow-Headers", ", ".join(headers))
        response.headers.set("Access-Control-Max-Age", str(self._max_age_s))
        response.headers.set("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
        response.end()


class Finisher:
    """Adds fields to the head of an answer, whoever answers; not to one whose application says itself who may read."""

    def __init__(self, fields: dict[str, str], differs: bool) -> None:
        self._fields, self._differs = fields, differs

    def __call__(self, lines: bytes) -> bytes:
        """Give the header lines with those that are missing."""
        if _ALLOWS.search(lines):
            return lines
        return completed(_varied(lines) if self._differs else lines, self._fields)


def is_preflight(request: CorsRequest) -> bool:
    """Whether a browser asks what a page of another origin may send."""
    return request.method == "OPTIONS" and None not in (request.get("origin"), request.get(_ASKS_FOR_METHOD))


def wanted_method(request: CorsRequest) -> str:
    """The method that a preflight is about."""
    return request.get(_ASKS_FOR_METHOD) or ""


def _varied(fields: bytes) -> bytes:
    """`fields` with Origin in its first Vary line (RFC 9110 §12.5.5)."""
    lines = _VARY.findall(fields)
    if not lines:
        return fields + b"Vary: Origin\r\n"
    names = {name.strip().lower() for line in lines for name in line.split(b",")}
    if b"origin" in names or b"*" in names:
        return fields
    return _VARY.sub(lambda line: b"Vary: " + b", ".join(filter(None, (line[1].rstrip(), b"Origin"))), fields, count=1)


def _tokens(what: str, names: str | Iterable[str]) -> tuple[str, ...]:
    listed = names.split(",") if isinstance(names, str) else list(names)
    for name in listed:
        if not isinstance(name, str) or (name.strip() and _TOKEN.fullmatch(name.strip()) is None):
            raise ArgumentError(f"{what}: {name!r} is no name; write them with commas between, such as X-Name, Accept")
    return tuple(name.strip() for name in listed if name.strip())
