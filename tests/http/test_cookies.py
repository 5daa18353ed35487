"""Cookies: what a part holds never becomes another part; reading them takes a time that grows with the size."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.http.disk import DiskIo
from smqrt.http.headers import cookie_of
from smqrt.http.tree import ResourceReader
from tests.http.cpu import linear, seconds

BREAKING = ["a; Domain=example.com", "a\r\nX: y", "a\nX: y", "a\0", "a\x7f"]


def test_a_cookie_of_python(bench: Any) -> None:
    def serve(request: Any, relpath: str) -> None:
        request.response.set_cookie("a", "1", path="/x", max_age_s=0, secure=True)
        request.response.set_cookie("b", "2", httponly=False, domain="example.com")

    bench.handle(serve)
    answer = bench.connect().ask()
    cookies = [line for line in answer.head.split(b"\r\n") if line.startswith(b"Set-Cookie")]
    assert cookies == [
        b"Set-Cookie: a=1; Path=/x; Max-Age=0; SameSite=Lax; Secure; HttpOnly",
        b"Set-Cookie: b=2; Path=/; Domain=example.com; SameSite=Lax",
    ]


@pytest.mark.parametrize("text", BREAKING)
@pytest.mark.parametrize("part", ["name", "value", "path", "domain", "samesite"])
def test_no_part_of_a_cookie_can_add_another(bench: Any, part: str, text: str) -> None:
    refused: list[str] = []

    def serve(request: Any, relpath: str) -> None:
        try:
            request.response.set_cookie(**{"name": "a", "value": "1", part: text})
        except ValueError as error:
            refused.append(str(error))

    bench.handle(serve)
    assert "set-cookie" not in bench.connect().ask().fields
    assert len(refused) == 1


@pytest.mark.parametrize("text", BREAKING[1:])
def test_no_header_of_a_folder_can_add_another(bench: Any, tmp_path: Any, text: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    reader = ResourceReader(io=DiskIo(tmp_path))
    reader.headers = {"X-A": text}
    bench.root.insert(reader)
    answer = bench.connect().ask("/a.txt")
    assert answer.status == 500
    assert "x" not in answer.fields


def test_thousands_of_cookies() -> None:
    def read(size: int) -> object:
        return cookie_of("a=b;" * (size // 4) + "last=1", "last")

    assert read(16384) == "1"
    assert seconds(lambda: read(16384)) < 0.02
    assert linear(read, 16384)
