"""Header fields of trusted proxies: whom they speak for, and which scheme, host and prefix the client used.

Two families say it: `X-Forwarded-For`, `-Proto`, `-Host`, `-Port`, `-Prefix`, and `Forwarded` (RFC 7239). A proxy
appends the address it was called from, so the addresses are walked from the right: over those of trusted proxies to the
first that is none, which is the client's; what stands left of it was said by the client. The walk ends at an address
that is malformed, unknown or obfuscated: the client is then the last proxy that was believed. Scheme and host are those
of the same hop, where there are as many of them as addresses; else the last ones, the nearest proxy's.

A proxy that sets one family may pass the other one on as the client sent it. So where both are there they must not
differ, and only what both say counts; or the setting `proxy.headers` says which one is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from smqrt.http.headers import BadRequest
from smqrt.transport.trusted_proxies import TrustedNetworks
from smqrt.wire.proxy_protocol import plain

X_FORWARDED, FORWARDED, AUTO = "x-forwarded", "forwarded", "auto"
_X_FIELDS = ("for", "proto", "host", "port", "prefix")
_NAMES = frozenset(("forwarded", *(f"x-forwarded-{name}" for name in _X_FIELDS)))
_PAIR = re.compile(
    r"""[ \t]*+([!#$%&'*+\-.^_`|~0-9A-Za-z]++)=(?:([!#$%&'*+\-.^_`|~0-9A-Za-z:\[\]]++)|"((?:[^"\\]|\\.)*+)")[ \t]*+"""
)
_ESCAPED = re.compile(r"\\(.)")
_NODE = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15}))(?::([0-9]{1,5}))?")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)+")
_MAX_PREFIX, _MAX_PORT = 255, 65535
_SCHEMES = {"http": False, "ws": False, "https": True, "wss": True}

Hop = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """What proxies say of a request; None for what they don't.

    Attributes:
        client: its address and port; 0 when the port is not known.
        secure: whether it used https.
        host: host and port as it named them.
        prefix: the path under which the proxy mounts the server; empty for none.
    """

    client: Hop | None = None
    secure: bool | None = None
    host: str | None = None
    prefix: str = ""


class ClaimedRequest(Protocol):
    """A request, as far as proxies change it: `smqrt.http.message.Request`."""

    peer: Hop
    headers: list[tuple[str, str]]

    def has_any(self, names: frozenset[str]) -> bool:
        """Return whether one of these header fields is there."""
        ...

    def speaks_for(
        self, client: Hop | None, secure: bool | None = None, host: str | None = None, prefix: str = ""
    ) -> None:
        """Take what a trusted proxy says of the client for true."""
        ...


class Proxies:
    """The proxies in front of a server.

    Args:
        trusted: their networks.
        headers: which family they use: "x-forwarded", "forwarded", or "auto".
    """

    def __init__(self, trusted: TrustedNetworks, headers: str = AUTO) -> None:
        self.trusted, self._headers = trusted, headers

    def apply(self, request: ClaimedRequest) -> None:
        """Let a request be the one that the client made, if it comes from a trusted proxy.

        Raises:
            BadRequest: what the proxy says is malformed, or contradicts itself.
        """
        if request.has_any(_NAMES) and self.trusted.has(request.peer[0]):
            claim = self._claim(request)
            request.speaks_for(claim.client, claim.secure, claim.host, claim.prefix)

    def _claim(self, request: ClaimedRequest) -> Claim:
        fields: dict[str, list[str]] = {}
        for name, value in request.headers:
            lower = name.lower()
            if lower in _NAMES:
                fields.setdefault(lower, []).append(value)
        standard = fields.pop("forwarded", None)
        has = self.trusted.has
        if self._headers == X_FORWARDED or (standard is None and self._headers == AUTO):
            return of_x_forwarded(fields, has)
        if standard is None:
            return Claim()
        if self._headers == FORWARDED or not fields:
            return of_forwarded(standard, has)
        return _agreed(of_x_forwarded(fields, has), of_forwarded(standard, has))


def _agreed(one: Claim, other: Claim) -> Claim:
    """What both say."""
    for a, b in ((one.client and one.client[0], other.client and other.client[0]), (one.secure, other.secure),
                 (one.host, other.host)):  # fmt: skip
        if a is not None and b is not None and a != b:
            raise BadRequest(
                "Forwarded and X-Forwarded-* contradict each other; let the proxy remove the one it does not set, or "
                "see the setting proxy.headers"
            )
    return Claim(
        one.client if other.client else None,
        one.secure if other.secure is not None else None,
        one.host if other.host is not None else None,
    )


def of_x_forwarded(fields: dict[str, list[str]], is_trusted: Callable[[str], bool]) -> Claim:
    """Read the fields `x-forwarded-…`.

    Args:
        fields: their values, line by line, by names in lower case.
        is_trusted: whether an address is a trusted proxy's.

    Raises:
        BadRequest: scheme, host, port or prefix are malformed.
    """
    words = {name: _words(fields.get(f"x-forwarded-{name}", ())) for name in _X_FIELDS}
    hops = words["for"]
    client, at = walk(hops, is_trusted)

    def said(name: str) -> str | None:
        values = words[name]
        if not values:
            return None
        return values[at] if len(values) == len(hops) and at < len(values) else values[-1]

    host = said("host")
    return Claim(client, _scheme(said("proto")), _with_port(host, said("port")), _prefix(said("prefix")))


def of_forwarded(lines: Sequence[str], is_trusted: Callable[[str], bool]) -> Claim:
    """Read the field `Forwarded`, line by line.

    Raises:
        BadRequest: it is malformed.
    """
    elements = [element for line in lines for element in _elements(line)]
    client, at = walk([element.get("for", "") for element in elements], is_trusted)
    element = elements[at] if at < len(elements) else elements[-1] if elements else {}
    return Claim(client, _scheme(element.get("proto")), element.get("host"))


def walk(hops: Sequence[str], is_trusted: Callable[[str], bool]) -> tuple[Hop | None, int]:
    """Go from the right over trusted proxies.

    Returns:
        the client, None when the nearest hop names nobody; and where it stands.
    """
    client: Hop | None = None
    found = len(hops)
    for at in range(len(hops) - 1, -1, -1):
        hop = node(hops[at])
        if hop is None:
            break
        client, found = hop, at
        if not is_trusted(hop[0]):
            break
    return client, found


def node(text: str) -> Hop | None:
    """Read an address with or without port; None for one that is unknown, obfuscated or malformed."""
    match = _NODE.fullmatch(text)
    if "%" in text:
        return None  # a zone, which means something on one machine only
    try:
        if match is None:
            return plain(ip_address(text)), 0  # IPv6 without brackets, as X-Forwarded-For has it
        port = int(match[3] or 0)
        return (plain(ip_address(match[1] or match[2])), port) if port <= _MAX_PORT else None
    except ValueError:
        return None


def _words(lines: Sequence[str]) -> list[str]:
    return [word.strip(" \t") for line in lines for word in line.split(",")]


def _elements(line: str) -> list[dict[str, str]]:
    elements: list[dict[str, str]] = []
    for element in _split(line):
        pairs: dict[str, str] = {}
        for name, value in element:
            if name in pairs:
                raise BadRequest("malformed Forwarded header: a parameter twice")
            pairs[name] = value
        elements.append(pairs)
    return elements


def _split(line: str) -> list[list[tuple[str, str]]]:
    """The pairs of each element, by one pass over the line."""
    elements: list[list[tuple[str, str]]] = [[]]
    at = 0
    while True:
        match = _PAIR.match(line, at)
        if match is None:
            raise BadRequest("malformed Forwarded header")
        value = _ESCAPED.sub(r"\1", match[3]) if match[2] is None else match[2]
        elements[-1].append((match[1].lower(), value))
        at = match.end() + 1
        if at > len(line):
            return elements
        if line[at - 1] == ",":
            elements.append([])
        elif line[at - 1] != ";":
            raise BadRequest("malformed Forwarded header")


def _scheme(text: str | None) -> bool | None:
    if text is None:
        return None
    secure = _SCHEMES.get(text.lower())
    if secure is None:
        raise BadRequest("a proxy names a scheme that is neither http nor https")
    return secure


def _with_port(host: str | None, port: str | None) -> str | None:
    if host is None or port is None or re.search(r":[0-9]+\Z", host):
        return host
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= _MAX_PORT:
        raise BadRequest("malformed X-Forwarded-Port header")
    return host if int(port) in (80, 443) else f"{host}:{int(port)}"


def _prefix(text: str | None) -> str:
    text = (text or "").rstrip("/")
    if not text:
        return ""
    if len(text) > _MAX_PREFIX or not _PREFIX.fullmatch(text) or any(part in (".", "..") for part in text.split("/")):
        raise BadRequest("malformed X-Forwarded-Prefix header")
    return text
