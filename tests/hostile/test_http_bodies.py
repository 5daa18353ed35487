"""Bodies of requests that are made to cost more than their bytes: forms, chunks, parameters, JSON."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hostile.conftest import Attack, Besieged

FORM = "multipart/form-data; boundary=XX"
URLENCODED = "application/x-www-form-urlencoded"
PART = b'--XX\r\nContent-Disposition: form-data; name="a"%b\r\n\r\nvalue\r\n'


def post_in_chunks(besieged: Besieged, path: str, chunk: bytes, count: int, attack: Attack) -> bytes:
    """Sends a chunked body of `count` equal chunks and returns the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{besieged.port}\r\nConnection: close\r\n"
    framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    data = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed * count + b"0\r\n\r\n"
    return besieged.exchange(data, attack)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("60 backslashes in a file name", b'; filename="' + b"\\" * 60),
        ("4,000 backslashes in a file name", b'; filename="' + b"\\" * 4000),
        ("1,000 parameters of a part", b"; a=b" * 800),
        ("1,000 quotes that begin a parameter", b'; a="' * 800),
        ("4,000 blanks before an equals sign", b"; a" + b" " * 4000),
    ],
)
def test_a_part_with(besieged: Besieged, name: str, parameter: bytes) -> None:
    with besieged.attack(f"form: {name}") as attack:
        assert b" 200 OK" in besieged.post("/lua/upload.lsp", PART % parameter + b"--XX--\r\n", FORM, attack)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("as many parts as it takes", lambda: PART % b"" * 1000 + b"--XX--"),
        ("parts without end", lambda: PART % b"" * 100_000),
        ("a preamble without end", lambda: b"x" * (8 << 20)),
        ("line ends without end", lambda: b"--XX\r\n" + b"\r\n" * (4 << 20)),
        ("nearly boundaries", lambda: PART % b'; filename="a"' + b"\r\n--X" * (2 << 20) + b"\r\n--XX--"),
        ("header lines without end", lambda: b"--XX\r\n" + b"A: b\r\n" * (1 << 20)),
        ("a long header line", lambda: b"--XX\r\nA: " + b"b" * (8 << 20)),
        ("fields of 1 MiB", lambda: (PART % b"").replace(b"value", b"v" * (1 << 20)) * 64),
    ],
)
def test_a_form_with(besieged: Besieged, name: str, body: Callable[[], bytes]) -> None:
    with besieged.attack(f"form: {name}") as attack:
        assert besieged.post("/lua/upload.lsp", body(), FORM, attack) or not besieged.alive
    assert besieged.alive


@pytest.mark.parametrize("path", ["/lua/body.lsp", "/lua/upload.lsp", "/lua/json.lsp"])
def test_a_body_in_chunks_of_one_byte(besieged: Besieged, path: str) -> None:
    with besieged.attack(f"300,000 chunks of one byte to {path}") as attack:
        assert post_in_chunks(besieged, path, b"x", 300_000, attack)


def test_a_body_at_full_speed(besieged: Besieged) -> None:
    with besieged.attack("a body of 128 MiB at full speed") as attack:
        assert b"134217728" in besieged.post("/lua/body.lsp", bytes(128 << 20), "text/plain", attack)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("4 MiB of escapes", lambda: b"a=" + b"%41" * ((4 << 20) // 3 - 1)),
        ("4 MiB of blanks", lambda: b"a=" + b"+" * ((4 << 20) - 2)),
        ("1,000 parameters", lambda: b"&".join(b"n%d=%b" % (n, b"%e4" * 1000) for n in range(999))),
        ("a million parameters", lambda: b"a&" * 1_000_000),
        ("4 MiB of bytes that are not UTF-8", lambda: b"a=" + b"\xff" * ((4 << 20) - 2)),
    ],
)
def test_parameters(besieged: Besieged, name: str, body: Callable[[], bytes]) -> None:
    with besieged.attack(f"parameters: {name}", grows_bytes=128 << 20) as attack:
        assert besieged.post("/lua/form.lsp", body(), URLENCODED, attack)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("1,000,000 lists in each other", b"[" * 1_000_000),
        ("1,000,000 objects in each other", b'{"a":' * 1_000_000),
        ("990 lists in each other, again and again", (b"[" * 990 + b"]" * 990) * 500),
        ("a number of a million digits", b"[" + b"1" * 1_000_000 + b"]"),
        ("a string of escapes", b'["' + b"\\u00e4" * 150_000 + b'"]'),
        ("a string of high surrogates", b'["' + b"\\ud83d" * 150_000 + b'"]'),
        ("a string of low surrogates", b'["' + b"\\udc00" * 150_000 + b'"]'),
        ("a string of pairs", b'["' + b"\\ud83d\\ude00" * 75_000 + b'"]'),
        ("a string of backslashes", b'["' + b"\\\\" * 500_000 + b'"]'),
        ("a million values", b"[" + b"1," * 999_999 + b"1]"),
        ("100,000 members", b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}"),
        ("comments", b"/**/" * 250_000 + b"[1]"),
        ("blanks", b" " * 1_000_000 + b"x"),
    ],
)
def test_json(besieged: Besieged, name: str, body: bytes) -> None:
    with besieged.attack(f"JSON: {name}", grows_bytes=128 << 20) as attack:
        assert besieged.post("/lua/json.lsp", body, "application/json", attack)
