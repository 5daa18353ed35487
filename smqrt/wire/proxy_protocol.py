"""The PROXY protocol, versions 1 and 2: what a proxy says of a client before the client's own first byte (HAProxy's
proxy-protocol.txt, sections 2.1 and 2.2). Bytes in, a header out.
"""

from __future__ import annotations

import re
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
MAX_V1_BYTES = 107
MAX_V2_BYTES = 4096
"""With what proxies add to it: the names and certificates of a TLS connection are a few hundred bytes."""
_V1 = re.compile(
    rb"PROXY (?:(TCP4|TCP6) ([0-9A-Fa-f.:]{2,45}) ([0-9A-Fa-f.:]{2,45}) ([0-9]{1,5}) ([0-9]{1,5})|UNKNOWN[^\r\n]*)\r\n"
)
_MAX_PORT = 65535
_LOCAL, _PROXY = 0x20, 0x21
_TCP4, _TCP6 = 0x11, 0x21
_ADDRESS_BYTES = {0x11: 12, 0x12: 12, 0x21: 36, 0x22: 36, 0x31: 216, 0x32: 216}  # by family and transport
_TLV_SSL, _CLIENT_SSL = 0x20, 0x01


class ProxyHeader(NamedTuple):
    """What a proxy says.

    Attributes:
        size_bytes: of the header.
        client: the client's address and port; None when the connection is the proxy's own (a health check), or it does
            not know.
        is_tls: the client speaks TLS with the proxy.
    """

    size_bytes: int
    client: tuple[str, int] | None = None
    is_tls: bool = False


class NoProxyHeader(ValueError):
    """What came is no header of the protocol; the message says which rule it breaks."""


def parse(data: bytes) -> ProxyHeader | None:
    """Read a header at the beginning of `data`; None while it is not complete.

    Raises:
        NoProxyHeader: it will never be one.
    """
    if data[:1] == b"P":
        return _version_1(data)
    if data[: len(SIGNATURE)] != SIGNATURE[: len(data)]:
        raise NoProxyHeader("neither PROXY nor the signature of version 2")
    return _version_2(data) if len(data) >= 16 else None


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
    source, _ = (_address(match[1], text) for text in match.group(2, 3))
    port, _ = (_port(text) for text in match.group(4, 5))
    return ProxyHeader(size, (source, port))


def _address(family: bytes, text: bytes) -> str:
    try:
        address = ip_address(text.decode())
    except ValueError:
        raise NoProxyHeader("a malformed address") from None
    if (address.version == 4) is not (family == b"TCP4"):
        raise NoProxyHeader("an address of another family")
    return plain(address)


def plain(address: IPv4Address | IPv6Address) -> str:
    """Write an address so that one machine has one: IPv4 in IPv6 as IPv4."""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _port(text: bytes) -> int:
    if int(text) > _MAX_PORT or (text[:1] == b"0" and text != b"0"):
        raise NoProxyHeader("a malformed port")
    return int(text)


def _version_2(data: bytes) -> ProxyHeader | None:
    command, family, length = struct.unpack_from(">BBH", data, len(SIGNATURE))
    size = 16 + length
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
    at = 16 + _ADDRESS_BYTES[family]
    if at > size:
        raise NoProxyHeader("addresses that are too short")
    is_tls = _says_tls(data[at:size])
    if family == _TCP4:
        packed, port = struct.unpack_from(">4s4xH", data, 16)
        return ProxyHeader(size, (str(IPv4Address(packed)), port), is_tls)
    if family == _TCP6:
        packed, port = struct.unpack_from(">16s16xH", data, 16)
        return ProxyHeader(size, (plain(IPv6Address(packed)), port), is_tls)
    return ProxyHeader(size, None, is_tls)  # a client of UDP or of a Unix socket has no address of TCP


def _says_tls(fields: bytes) -> bool:
    """Walk over the type-length-value fields; whether that of TLS says that the client speaks it."""
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
