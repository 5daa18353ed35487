"""URLs of servers, and client addresses in PROXY protocol headers."""

from __future__ import annotations

import base64
import re
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
"""The schemes of `Url` with their default ports."""

_PATH_SAFE = "/%:@!$&'()*+,;=~-._"
_QUERY_SAFE = _PATH_SAFE + "?[]{}|^`\\"  # as in browsers: servers accept these without encoding


class UrlParts(NamedTuple):
    """Parts of a URL; missing parts are empty or None.

    Attributes:
        scheme: in lower case.
        host: name or address, IPv6 without brackets.
        port: None when it is missing.
        path, query: as in the URL, not decoded.
        user, password: decoded.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    query: str
    user: str | None
    password: str | None


def split_url(text: str) -> UrlParts:
    """Split a URL into its parts.

    Raises:
        ValueError: unbalanced brackets or an invalid port.
    """
    parts = urlsplit(text)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return UrlParts(parts.scheme.lower(), parts.hostname or "", parts.port, parts.path, parts.query, user, password)


@dataclass(frozen=True, slots=True)
class Url:
    """HTTP or WebSocket URL.

    Attributes:
        host: name (IDNA) or address, IPv6 without brackets.
        target: path and query as sent in a request, percent-encoded.
        user, password: from the URL, decoded.
    """

    scheme: str
    host: str
    port: int
    target: str
    user: str | None = None
    password: str | None = None

    @property
    def secure(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme in ("https", "wss")

    @property
    def websocket(self) -> bool:
        """Whether it is a WebSocket URL."""
        return self.scheme in ("ws", "wss")

    @property
    def origin(self) -> tuple[bool, str, int]:
        """The scope of credentials and connections: TLS or not, host and port."""
        return self.secure, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and port in the form of the Host field."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str, more_query: str = "") -> Url:
    """Parse an HTTP or WebSocket URL.

    Args:
        text: the URL.
        more_query: encoded parameters to append to its query.

    Raises:
        ValueError: it is not valid; the message does not contain the URL, which may have a password.
    """
    parts = split_url(text)
    if parts.scheme not in PORTS or not parts.host:
        raise ValueError(f"it must look like http://host:port/path (schemes: {', '.join(sorted(PORTS))})")
    if any(ord(c) <= 32 or c in "/\\\x7f" for c in parts.host):
        raise ValueError("its host must not contain spaces, slashes or control characters")
    host = parts.host if parts.host.isascii() else parts.host.encode("idna").decode()
    target = quote(parts.path or "/", safe=_PATH_SAFE)
    if query := "&".join(filter(None, [quote(parts.query, safe=_QUERY_SAFE), more_query])):
        target += f"?{query}"
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    if not port:
        raise ValueError("its port must be 1 to 65535")
    return Url(parts.scheme, host, port, target, parts.user, parts.password)


def basic_authorization(user: str, password: str | None) -> str:
    """Return the value of an Authorization field for Basic authentication (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password or ''}".encode()).decode()


# ---- PROXY protocol, versions 1 and 2, without I/O
#
# A proxy sends a header with the address of the client before the first byte of the client (HAProxy's
# proxy-protocol.txt, sections 2.1 and 2.2).

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
"""The first bytes of a header of version 2."""
MAX_V1_BYTES = 107
MAX_V2_BYTES = 4096
"""The maximum size, with additional fields: names and certificates of a TLS connection have a few hundred bytes."""
_V1 = re.compile(
    rb"PROXY (?:(TCP4|TCP6) ([0-9A-Fa-f.:]{2,45}) ([0-9A-Fa-f.:]{2,45}) ([0-9]{1,5}) ([0-9]{1,5})|UNKNOWN[^\r\n]*)\r\n"
)
_MAX_PORT = 65535
_V2_HEAD_BYTES = 16
"""Signature, command, family and length."""
_LOCAL, _PROXY = 0x20, 0x21  # commands, with the version in the upper half of the byte
_TCP4, _TCP6 = 0x11, 0x21
_ADDRESS_BYTES = {_TCP4: 12, 0x12: 12, _TCP6: 36, 0x22: 36, 0x31: 216, 0x32: 216}
"""By family and transport: IPv4, IPv6 and Unix sockets, with TCP (or stream) and UDP (or datagram)."""
_TLV_SSL, _CLIENT_SSL = 0x20, 0x01


class ProxyHeader(NamedTuple):
    """Contents of a header.

    Attributes:
        size_bytes: the size of the header.
        client: the address and port of the client. None when the connection is a health check of the proxy, or the
            proxy does not have them.
        is_tls: whether the client uses TLS to the proxy.
    """

    size_bytes: int
    client: tuple[str, int] | None = None
    is_tls: bool = False


class NoProxyHeader(ValueError):
    """The data is not a header of the PROXY protocol; the message names the violated rule."""


def parse(data: bytes) -> ProxyHeader | None:
    """Parse the header at the beginning of `data`; return None while it is not complete.

    Raises:
        NoProxyHeader: the data is not the beginning of a header.
    """
    if data[:1] == b"P":
        return _version_1(data)
    if data[: len(SIGNATURE)] != SIGNATURE[: len(data)]:
        raise NoProxyHeader("neither PROXY nor the signature of version 2")
    return _version_2(data) if len(data) >= _V2_HEAD_BYTES else None


def _version_1(data: bytes) -> ProxyHeader | None:
    line, end, _ = data[:MAX_V1_BYTES].partition(b"\r\n")
    if not b"PROXY ".startswith(line[:6]):
        raise NoProxyHeader("the first word is not PROXY")
    if not end:
        if len(data) >= MAX_V1_BYTES:
            raise NoProxyHeader(f"no end of line in {MAX_V1_BYTES} bytes")
        return None
    match = _V1.fullmatch(line + end)
    if match is None:
        raise NoProxyHeader("a malformed line of version 1")
    size = len(line) + 2
    if match[1] is None:
        return ProxyHeader(size)
    addresses, ports = [], []
    for text in match.group(2, 3):
        try:
            address = ip_address(text.decode())
        except ValueError:
            raise NoProxyHeader("a malformed address") from None
        if (address.version == 4) is not (match[1] == b"TCP4"):
            raise NoProxyHeader("an address of another family")
        addresses.append(plain(address))
    for text in match.group(4, 5):
        if int(text) > _MAX_PORT or (text[:1] == b"0" and text != b"0"):
            raise NoProxyHeader("a malformed port")
        ports.append(int(text))
    return ProxyHeader(size, (addresses[0], ports[0]))


def plain(address: IPv4Address | IPv6Address) -> str:
    """Return the text of an address; an IPv4-mapped address as IPv4, so that a machine has only one text."""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _version_2(data: bytes) -> ProxyHeader | None:
    command, family, length = struct.unpack_from(">BBH", data, len(SIGNATURE))
    size = _V2_HEAD_BYTES + length
    if command not in (_LOCAL, _PROXY):
        raise NoProxyHeader("neither LOCAL nor PROXY of version 2")
    if size > MAX_V2_BYTES:
        raise NoProxyHeader(f"a header of more than {MAX_V2_BYTES} bytes")
    if len(data) < size:
        return None
    if command == _LOCAL or family == 0:
        return ProxyHeader(size)
    if family not in _ADDRESS_BYTES:
        raise NoProxyHeader("an unknown family of addresses")
    at = _V2_HEAD_BYTES + _ADDRESS_BYTES[family]
    if at > size:
        raise NoProxyHeader("addresses that are too short")
    is_tls = _has_tls(data[at:size])
    if family == _TCP4:
        packed, port = struct.unpack_from(">4s4xH", data, _V2_HEAD_BYTES)
        return ProxyHeader(size, (str(IPv4Address(packed)), port), is_tls)
    if family == _TCP6:
        packed, port = struct.unpack_from(">16s16xH", data, _V2_HEAD_BYTES)
        return ProxyHeader(size, (plain(IPv6Address(packed)), port), is_tls)
    return ProxyHeader(size, None, is_tls)  # UDP or a Unix socket: there is no TCP address


def _has_tls(fields: bytes) -> bool:
    """Parse the type-length-value fields; return whether the client uses TLS."""
    at, is_tls = 0, False
    while at < len(fields):
        if at + 3 > len(fields):
            raise NoProxyHeader("a field that is cut off")
        kind, length = struct.unpack_from(">BH", fields, at)
        value = fields[at + 3 : at + 3 + length]
        if len(value) < length:
            raise NoProxyHeader("a field that is cut off")
        if kind == _TLV_SSL and value:
            is_tls = bool(value[0] & _CLIENT_SSL)
        at += 3 + length
    return is_tls
