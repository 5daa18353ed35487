"""Allowed web origins and host names of a server (RFC 6454, RFC 9110 §7.2; help: security)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from smqrt.errors import ArgumentError

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s]+)")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}

OriginParts = tuple[str, str, int | None]  # scheme, name, port


def same_origin(origin: str, host: str, secure: bool) -> bool:
    """Return whether a page is from the server that it sends requests to.

    A page with `https` may use a connection without TLS, because a proxy may terminate TLS. A page with `http` may not
    use a connection with TLS.

    Args:
        origin: the header `Origin`.
        host: the header `Host`.
        secure: whether the connection is TLS.
    """
    match = _ORIGIN.fullmatch(origin.lower())
    if match is None or match[1] not in _PORTS or (secure and match[1] != "https"):  # such as "null" or "file"
        return False
    if match[2] == host.lower():  # the usual case
        return _AUTHORITY.fullmatch(match[2]) is not None
    port = _PORTS[match[1]]
    own = _authority(host, port)
    return own is not None and own == _authority(match[2], port)


class Origins:
    """A list of origins whose pages are allowed.

    Args:
        entries: `https://example.com`, `https://*.example.com` for every name below, `null`, `*` for all: an iterable,
            or a string with commas.

    Attributes:
        all: whether `*` is in the list.
        differ: whether permissions depend on the origin.

    Raises:
        ArgumentError: an invalid entry.
    """

    def __init__(self, entries: str | Iterable[str] = ()) -> None:
        words = _words("origins", entries)
        self._words = frozenset(words) & {"*", "null"}
        self._listed = frozenset(_origin_entry(word) for word in words if word not in self._words)
        self.all = "*" in self._words
        self.differ = bool(self._listed) or self._words == {"null"}

    def __bool__(self) -> bool:
        """Whether the list has entries."""
        return bool(self._words or self._listed)

    def has(self, origin: str) -> bool:
        """Return whether the list allows an `Origin` header."""
        if self._words and (self.all or origin.lower() in self._words):
            return True
        return self.names(origin)

    def names(self, origin: str) -> bool:
        """Return whether an entry other than `*` and `null` allows an `Origin` header."""
        page = _origin_parts(origin) if self._listed else None
        if page is None:
            return False
        scheme, name, port = page
        return any((scheme, pattern, port) in self._listed for pattern in _patterns(name))


class Hosts:
    """A list of host names of a server.

    Args:
        entries: `example.com`, `*.example.com` for every name below, `192.0.2.1`, `::1`, `*` for all; without ports: an
            iterable, or a string with commas.

    Raises:
        ArgumentError: an invalid entry.
    """

    def __init__(self, entries: str | Iterable[str] = ()) -> None:
        words = _words("hosts", entries)
        self.all = "*" in words
        self._names = frozenset(_host_entry(word) for word in words if word != "*")

    def __bool__(self) -> bool:
        """Whether the list has entries."""
        return self.all or bool(self._names)

    def has(self, name: str) -> bool:
        """Return whether the list has a name, as `host_name` returns it."""
        return self.all or any(pattern in self._names for pattern in _patterns(name))


def host_name(host: str) -> str:
    """Return the name in a `Host` header: in lower case, without port, brackets and final dot."""
    authority = _authority(host, None)
    return authority[0] if authority else host


def is_loopback(name: str) -> bool:
    """Return whether a name is a loopback name: `localhost`, a name below it, 127.0.0.0/8 or ::1."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    # A listener on an IPv6 address reports clients of IPv4 as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address is not None and (mapped or address).is_loopback


def _words(what: str, entries: str | Iterable[str]) -> list[str]:
    listed = entries.split(",") if isinstance(entries, str) else list(entries)
    for entry in listed:
        if not isinstance(entry, str):
            raise ArgumentError(f"{what}: string expected, not {entry!r}")
    return [word.strip().lower() for word in listed if word.strip()]


def _origin_entry(word: str) -> OriginParts:
    parts = _origin_parts(_ascii(word).removesuffix("/"))
    if parts is None:
        raise ArgumentError(
            f"origins: {word!r} is not an origin; write https://example.com, https://*.example.com, null, or * for all"
        )
    return parts


def _host_entry(word: str) -> str:
    name = _name(word) if _address(word) else host_name(_ascii(word))
    if "/" in name or ":" in word and _address(name) is None:
        raise ArgumentError(
            f"hosts: {word!r} is not a host name; write example.com, *.example.com, an address, or * for all"
        )
    return name


def _origin_parts(origin: str) -> OriginParts | None:
    match = _ORIGIN.fullmatch(origin.lower())
    authority = _authority(match[2], _PORTS.get(match[1])) if match else None
    return (match[1], *authority) if match and authority else None


def _authority(text: str, default_port: int | None) -> tuple[str, int | None] | None:
    match = _AUTHORITY.fullmatch(text.lower())
    return (_name(match[1].strip("[]")), int(match[2]) if match[2] else default_port) if match else None


def _name(text: str) -> str:
    address = _address(text)
    return text.removesuffix(".") if address is None else str(address)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _ascii(word: str) -> str:
    """Convert to the form that browsers send: names in other scripts as punycode."""
    try:
        return "".join(part if part.isascii() else part.encode("idna").decode() for part in re.split(r"([./:])", word))
    except UnicodeError:
        return word


def _patterns(name: str) -> list[str]:
    """Return the entries that match a name of at most 253 characters: itself, and `*.` with each parent domain."""
    labels = name[-253:].split(".")
    return [name, *("*." + ".".join(labels[at:]) for at in range(1, len(labels)))]
