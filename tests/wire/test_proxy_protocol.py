"""The PROXY protocol as bytes: what is a header, and what never will be."""

from __future__ import annotations

import random
import struct

import pytest

from smqrt.wire.proxy_protocol import MAX_V2_BYTES, SIGNATURE, NoProxyHeader, ProxyHeader, parse
from tests.wire.proxy_headers import V4, version_2

V6 = bytes(15) + b"\1" + bytes(16) + struct.pack(">HH", 4711, 443)
TLS = b"\x20" + struct.pack(">H", 5) + b"\x01\0\0\0\0"
CUT = b"\x20\0\x09\x01"


GOOD = {
    b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 443\r\n": (("192.0.2.7", 4711), False),
    b"PROXY TCP6 2001:db8::7 ::1 0 65535\r\n": (("2001:db8::7", 0), False),
    b"PROXY TCP6 ::ffff:192.0.2.7 ::1 1 1\r\n": (("192.0.2.7", 1), False),
    b"PROXY UNKNOWN\r\n": (None, False),
    b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n": (None, False),
    version_2(): (("192.0.2.7", 4711), False),
    version_2(family=0x21, body=V6): (("::1", 4711), False),
    version_2(body=V4 + TLS): (("192.0.2.7", 4711), True),
    version_2(body=V4 + b"\x20\0\5\0\0\0\0\0" + b"\x02\0\4host\x04\0\0"): (("192.0.2.7", 4711), False),
    version_2(family=0, body=b""): (None, False),
    version_2(family=0, body=bytes(30)): (None, False),
    version_2(0x20, 0, b""): (None, False),
    version_2(0x20): (None, False),
    version_2(family=0x12): (None, False),
    version_2(family=0x31, body=bytes(216)): (None, False),
    version_2(body=V4 + b"\x04" + struct.pack(">H", 4000) + bytes(4000)): (("192.0.2.7", 4711), False),
}
BAD = (
    b"GET / HTTP/1.1\r\n",
    b"\0\0",
    b"\x16\x03\x01",
    b"PROXX",
    b"PROXY\r\n",
    b"PROXY  TCP4 1.2.3.4 1.2.3.4 1 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 1\n" + bytes(107),
    b"PROXY TCP4 1.2.3 1.2.3.4 1 1\r\n",
    b"PROXY TCP4 01.2.3.4 1.2.3.4 1 1\r\n",
    b"PROXY TCP4 ::1 ::1 1 1\r\n",
    b"PROXY TCP6 1.2.3.4 1.2.3.4 1 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 65536 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 01 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 -1 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
    b"PROXY UDP4 1.2.3.4 1.2.3.4 1 1\r\n",
    b"PROXY UNKNOWN " + b"x" * 107,
    SIGNATURE + b"\x22\x11\0\0",
    SIGNATURE + b"\x11\x11\0\0",
    version_2(family=0x41),
    version_2(body=V4[:11]),
    version_2(family=0x21),
    version_2(body=V4 + CUT),
    version_2(body=V4 + b"\1"),
    version_2(length=MAX_V2_BYTES),
    SIGNATURE[:11] + b"x",
)


@pytest.mark.parametrize("data", GOOD)
def test_a_header_is_read_in_any_pieces(data: bytes) -> None:
    client, is_tls = GOOD[data]
    for behind in (b"", b"GET / HTTP/1.1\r\n", b"\r\n"):
        assert parse(data + behind) == ProxyHeader(len(data), client, is_tls)
    for cut in range(len(data)):
        assert parse(data[:cut]) is None


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(NoProxyHeader):
        parse(data)


def test_mutated_headers_are_read_or_refused() -> None:
    random_ = random.Random(13)
    headers = [*GOOD, *BAD]
    for _ in range(20_000):
        data = bytearray(random_.choice(headers))
        for _ in range(random_.randrange(1, 4)):
            at = random_.randrange(len(data) or 1)
            data[at : at + random_.randrange(2)] = random_.randbytes(random_.randrange(3))
        try:
            found = parse(bytes(data))
        except NoProxyHeader:
            continue
        assert found is None or (found.size_bytes <= len(data) and found.size_bytes <= MAX_V2_BYTES)


def line_of(size: int) -> bytes:
    return b"PROXY UNKNOWN " + b"x" * (size - 16) + b"\r\n"


def test_a_line_has_at_most_107_bytes() -> None:
    assert parse(line_of(107)) == ProxyHeader(107)
    assert parse(line_of(107)[:106]) is None
    with pytest.raises(NoProxyHeader, match="107 bytes"):
        parse(line_of(108))


def test_a_header_has_at_most_4096_bytes() -> None:
    body = V4 + b"\x04" + struct.pack(">H", 4096 - 16 - 12 - 3) + bytes(4065)
    assert parse(version_2(body=body)) == ProxyHeader(4096, ("192.0.2.7", 4711))
    with pytest.raises(NoProxyHeader, match="4096 bytes"):
        parse(version_2(body=body + b"x"))


@pytest.mark.parametrize(("family", "size"), [(0x11, 12), (0x12, 12), (0x21, 36), (0x22, 36), (0x31, 216), (0x32, 216)])
def test_each_family_has_addresses_of_its_size(family: int, size: int) -> None:
    assert parse(version_2(family=family, body=bytes(size))) is not None
    found = parse(version_2(family=family, body=bytes(size) + TLS))
    assert found is not None
    assert found.is_tls
    with pytest.raises(NoProxyHeader, match="too short"):
        parse(version_2(family=family, body=bytes(size - 1)))


@pytest.mark.parametrize("flags", [0, 1, 2, 3, 0xFE])
def test_the_lowest_flag_says_that_tls_is_used(flags: int) -> None:
    field = b"\x20" + struct.pack(">H", 5) + bytes((flags,)) + bytes(4)
    found = parse(version_2(body=V4 + b"\x02\0\1h" + field))
    assert found == ProxyHeader(16 + 12 + 4 + 8, ("192.0.2.7", 4711), flags & 1 == 1)


def test_an_empty_field_of_tls_says_nothing() -> None:
    found = parse(version_2(body=V4 + TLS + b"\x20\0\0"))
    assert found is not None
    assert found.is_tls
    assert parse(version_2(body=V4 + b"\x20\0\0")) == ProxyHeader(31, ("192.0.2.7", 4711), False)
