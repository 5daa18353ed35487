"""PROXY protocol, versions 1 and 2, without I/O.

A proxy sends a header with the address of the client before the first byte of the client (HAProxy's
proxy-protocol.txt, sections 2.1 and 2.2).
"""

from __future__ import annotations

import re
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

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
