"""Client address, scheme, host and prefix from the header fields of trusted proxies.

There are two families of fields: `X-Forwarded-For`, `-Proto`, `-Host`, `-Port`, `-Prefix`, and `Forwarded` (RFC 7239).
A proxy appends the address of its client. The addresses are read from the right, skipping trusted proxies. The first
other address is the client's; the client may have forged everything left of it. Reading stops at a malformed, unknown
or obfuscated address: then the last trusted proxy counts as the client. Scheme and host are those of the same hop if
there are as many of them as addresses, else the last ones, from the nearest proxy.

A proxy that sets one family may forward the other one from the client. So if both are present they must not differ, and
only values in both count. The setting `proxy.headers` selects one family instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

from smqrt.http.headers import BadRequest
from smqrt.transport.admission import TrustedNetworks
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
_SCHEMES = {"http": False, "ws": False, "https": True, "wss": True}  # some proxies send ws and wss for WebSockets

Hop = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Claim:
    """Values from the header fields of proxies; None for missing ones.

    Attributes:
        client: address and port of the client; port 0 if unknown.
        secure: whether the client used https.
        host: host and port as the client named them.
        prefix: the path under which the proxy mounts the server; empty for none.
    """

    client: Hop | None = None
    secure: bool | None = None
    host: str | None = None
    prefix: str = ""


class ClaimedRequest(Protocol):
    """The parts of a request that proxies change, see `smqrt.http.message.Request`."""

    peer: Hop
    headers: list[tuple[str, str]]

    def has_any(self, names: frozenset[str]) -> bool:
        """Return whether one of these header fields is present."""
        ...

    def apply_claim(
        self, client: Hop | None, secure: bool | None = None, host: str | None = None, prefix: str = ""
    ) -> None:
        """Apply the values of a trusted proxy."""
        ...


class Proxies:
    """The proxies in front of a server.

    Args:
        trusted: their networks.
        headers: the family that they use: "x-forwarded", "forwarded", or "auto".
    """

    def __init__(self, trusted: TrustedNetworks, headers: str = AUTO) -> None:
        self.trusted, self._headers = trusted, headers

    def apply(self, request: ClaimedRequest) -> None:
        """Replace the values of a trusted proxy in a request with those of the client.

        Raises:
            BadRequest: the fields are malformed or contradict each other.
        """
        is_trusted = self.trusted.has
        if not request.has_any(_NAMES) or not is_trusted(request.peer[0]):
            return
        fields: dict[str, list[str]] = {}
        for name, value in request.headers:
            lower = name.lower()
            if lower in _NAMES:
                fields.setdefault(lower, []).append(value)
        standard = fields.pop("forwarded", None)
        if self._headers == X_FORWARDED or (standard is None and self._headers == AUTO):
            claim = of_x_forwarded(fields, is_trusted)
        elif standard is None:
            claim = Claim()
        elif self._headers == FORWARDED or not fields:
            claim = of_forwarded(standard, is_trusted)
        else:
            claim = _agreed(of_x_forwarded(fields, is_trusted), of_forwarded(standard, is_trusted))
        request.apply_claim(claim.client, claim.secure, claim.host, claim.prefix)


def _agreed(one: Claim, other: Claim) -> Claim:
    """Return the values that both claims have."""
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
    """Parse the fields `x-forwarded-…`.

    Args:
        fields: values, line by line, by name in lower case.
        is_trusted: returns whether an address is that of a trusted proxy.

    Raises:
        BadRequest: the scheme, host, port or prefix is malformed.
    """
    words = {
        name: [word.strip(" \t") for line in fields.get(f"x-forwarded-{name}", ()) for word in line.split(",")]
        for name in _X_FIELDS
    }
    hops = words["for"]
    client, at = find_client(hops, is_trusted)

    def value_of(name: str) -> str | None:
        values = words[name]
        if not values:
            return None
        return values[at] if len(values) == len(hops) and at < len(values) else values[-1]

    secure, host, port = _scheme(value_of("proto")), value_of("host"), value_of("port")
    if host is not None and port is not None and not re.search(r":[0-9]+\Z", host):
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= _MAX_PORT:
            raise BadRequest("malformed X-Forwarded-Port header")
        host = host if int(port) in (80, 443) else f"{host}:{int(port)}"  # browsers omit default ports in Host
    prefix = (value_of("prefix") or "").rstrip("/")
    has_dots = any(part in (".", "..") for part in prefix.split("/"))
    if prefix and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix) or has_dots):
        raise BadRequest("malformed X-Forwarded-Prefix header")
    return Claim(client, secure, host, prefix)


def of_forwarded(lines: Sequence[str], is_trusted: Callable[[str], bool]) -> Claim:
    """Parse the field `Forwarded`, line by line.

    Raises:
        BadRequest: it is malformed.
    """
    elements = [element for line in lines for element in _elements(line)]
    client, at = find_client([element.get("for", "") for element in elements], is_trusted)
    element = elements[at] if at < len(elements) else elements[-1] if elements else {}
    return Claim(client, _scheme(element.get("proto")), element.get("host"))


def find_client(hops: Sequence[str], is_trusted: Callable[[str], bool]) -> tuple[Hop | None, int]:
    """Find the client among hops, from the right.

    Returns:
        the client and the index of its hop; None and the number of hops if the nearest hop has no usable address.
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
    """Parse an address with or without port. Returns None for an unknown, obfuscated or malformed one."""
    match = _NODE.fullmatch(text)
    if "%" in text:
        return None  # an IPv6 zone, which is valid on one machine only
    try:
        if match is None:
            return plain(ip_address(text)), 0  # IPv6 without brackets, as X-Forwarded-For has it
        port = int(match[3] or 0)
        return (plain(ip_address(match[1] or match[2])), port) if port <= _MAX_PORT else None
    except ValueError:
        return None


def _elements(line: str) -> list[dict[str, str]]:
    """Return the parameters of each element, in one pass over the line."""
    elements: list[dict[str, str]] = [{}]
    at = 0
    while True:
        match = _PAIR.match(line, at)
        if match is None:
            raise BadRequest("malformed Forwarded header")
        name = match[1].lower()
        if name in elements[-1]:
            raise BadRequest("malformed Forwarded header: duplicate parameter")
        elements[-1][name] = _ESCAPED.sub(r"\1", match[3]) if match[2] is None else match[2]
        at = match.end() + 1
        if at > len(line):
            return elements
        if line[at - 1] == ",":
            elements.append({})
        elif line[at - 1] != ";":
            raise BadRequest("malformed Forwarded header")


def _scheme(text: str | None) -> bool | None:
    if text is None:
        return None
    secure = _SCHEMES.get(text.lower())
    if secure is None:
        raise BadRequest("the scheme in a proxy header is neither http nor https")
    return secure
