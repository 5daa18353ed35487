"""Heads: which forms are understood, and which are remembered."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.http import head as head_module
from smqrt.http.head import Head, check_beginning, parse
from smqrt.http.headers import BadRequest
from smqrt.http.message import Request
from tests.http.http_bench import Bench, Kept, echo


def test_requests_that_repeat_share_nothing_that_can_be_changed(bench: Any) -> None:
    seen = []

    def handler(request: Request, relpath: str) -> None:
        seen.append((list(request.headers), dict(request.env), request.query))
        request.headers.append(("X", "mine"))
        request.env["x"] = 1

    bench.handle(handler)
    wire = bench.connect()
    for _ in range(3):
        wire.ask("/a?b")
    wire.ask("/a?c")
    assert seen == [([("Host", "test")], {}, query) for query in ("b", "b", "b", "c")]


def test_memory_of_heads_is_bounded(bench: Any) -> None:
    from smqrt.http import head

    bench.handle(echo)
    wire = bench.connect()
    for number in range(600):
        wire.ask(f"/{number}")
    wire.ask("/" + "x" * 5000)
    assert len(head._cached_heads) <= 256
    assert max(map(len, head._cached_heads)) <= 1024


def test_a_name_with_an_underscore(bench: Bench, kept: Kept) -> None:
    headers = "x_api_key: a\r\nX_Forwarded_For: 1.2.3.4\r\nX-Twin: b\r\nX_Twin: c\r\n"
    assert bench.connect().ask(headers=headers).status == 200
    assert kept.requests[0].headers == [("Host", "test"), ("x_api_key", "a"), ("X-Twin", "b")]
    assert kept.requests[0].get("x-api-key") is None


def test_lines_of_a_name_are_one_list(bench: Bench, kept: Kept) -> None:
    lines = "Cookie: a=b\r\nConnection: keep-alive\r\ncookie: c=d\r\nconnection: Upgrade\r\nAccept: x\r\nAccept: y\r\n"
    stale = "If-Modified-Since: Thu, 01 Jan 2026 00:00:00 GMT\r\n" * 2
    assert bench.connect().ask(headers=lines + stale + "Content-Type: a/b\r\n" * 2).status == 200
    request = kept.requests[0]
    assert [request.get(name) for name in ("connection", "accept", "cookie", "content-type")] == [
        "keep-alive,Upgrade", "x,y", "a=b; c=d", "a/b",
    ]  # fmt: skip
    assert dict(request.cookies) == {"a": "b", "c": "d"}
    assert request.get("if-modified-since") is None
    assert ("Cookie", "a=b; c=d") in request.fields()


@pytest.mark.parametrize(
    ("line", "host", "path", "query"),
    [
        (b"GET http://other:81/a?b HTTP/1.1", "other:81", "/a", "b"),
        (b"GET HTTPS://[::1]?b HTTP/1.1", "[::1]", "/", "b"),
        (b"GET http://other HTTP/1.1", "other", "/", ""),
        (b"OPTIONS http://other HTTP/1.1", "other", "*", ""),
        ("GET /ä?ö HTTP/1.1".encode(), "test", "/ä", "%C3%B6"),
    ],
)
def test_targets(bench: Bench, kept: Kept, line: bytes, host: str, path: str, query: str) -> None:
    assert bench.connect().send(line + b"\r\nHost: test\r\n\r\n").answer().status in (200, 204)
    if path != "*":
        request = kept.requests[0]
        assert (request.host, request.get("host"), request.path, request.query) == (host, host, path, query)


def head(*lines: str, version: str = "1.1") -> Head:
    return Head("\r\n".join((f"GET / HTTP/{version}", "Host: test", *lines, "", "")).encode())


def test_heads_with_credentials_are_not_remembered() -> None:
    plain = b"GET / HTTP/1.1\r\nHost: test\r\n%b\r\n"
    assert parse(plain % b"X: a\r\n") is parse(plain % b"X: a\r\n")
    assert parse(plain % b"Authorization: Basic YTpi\r\n") is not parse(plain % b"Authorization: Basic YTpi\r\n")
    for data, kept in head_module._cached_heads.items():
        assert b"YTpi" not in data
        assert kept.get("authorization") is None


@pytest.mark.parametrize("before", ["", "Host: a\r\n", "Host: a\r\nX: 1\r\nX: 2\r\n"])
def test_a_head_that_differs_in_its_credentials_only_is_parsed_alike(before: str) -> None:
    rest = "" if "Host" in before else "Host: a\r\n"
    for value in ("Digest a=1", " \t Digest \xe9 ", "", "Basic YTpi"):
        data = f"GET /p?q HTTP/1.1\r\n{before}Authorization: {value}\r\n{rest}Accept: */*\r\n\r\n".encode("latin-1")
        head, alone = parse(data), Head(data)
        assert (head.headers, head._index) == (alone.headers, alone._index)
        assert (head.target, head.query, head.host, head.keep_alive) == ("/p?q", alone.query, "a", True)


def test_credentials_in_a_known_head_are_checked() -> None:
    begin, end = b"GET / HTTP/1.1\r\nHost: a\r\n", b"Accept: */*\r\n\r\n"
    parse(begin + b"Authorization: a\r\n" + end)
    for lines in (
        b"Authorization: a\r\nauthorization: b\r\n",
        b"Authorization: a\r\nAuthorization: a\r\n",
        b"AUTHORIZATION: a\r\nAuthorization: a\r\n",
        b"Authorization: a\0\r\n",
        b"Authorization : a\r\n",
        b"Authorization: a\n",
    ):
        with pytest.raises(BadRequest):
            parse(begin + lines + end)


def test_a_replaced_host_leaves_the_copied_head_alone() -> None:
    first, copied = head("X: a"), Head.__new__(Head)
    copied.copy_from(first)
    copied.replace_host("other:81")
    assert (copied.host, copied.get("host"), copied.headers[0]) == ("other:81", "other:81", ("Host", "other:81"))
    assert (first.host, first.get("host"), first.headers[0]) == ("test", "test", ("Host", "test"))


@pytest.mark.parametrize(
    ("lines", "version", "stays"),
    [
        (["Connection: Upgrade, CLOSE"], "1.1", False),
        (["Connection: keep-alive", "Connection: close"], "1.1", False),
        (["Connection: keep-alive, close"], "1.0", False),
        (["Connection: x, Keep-Alive"], "1.0", True),
        (["Connection: closed"], "1.1", True),
    ],
)
def test_close_in_any_list_ends_keep_alive(lines: list[str], version: str, stays: bool) -> None:
    assert head(*lines, version=version).keep_alive is stays


def test_only_http_1_1_clients_wait_for_continue() -> None:
    assert head("Expect: 100-Continue", "Content-Length: 1").expects_continue
    assert not head("Expect: 100-continue", "Content-Length: 1", version="1.0").expects_continue


def test_a_beginning_is_checked_across_its_pieces() -> None:
    check_beginning(b"GET / HTTP/1.1\r\nX: a\r", 0)
    with pytest.raises(BadRequest, match="bare line end"):
        check_beginning(b"GET / HTTP/1.1\r\nX: a\rb", len(b"GET / HTTP/1.1\r\nX: a\r"))
    check_beginning(b"GET", 0)
    with pytest.raises(BadRequest, match="malformed request line"):
        check_beginning(b"GET\r\n", 3)
