"""Rare forms of requests in RFC 9110 and 9112: underscores, repeated fields, extensions, trailers, absolute targets."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.http.client.exchange import ClientResponse
from smqrt.http.forms import File, read_form
from smqrt.http.wsgi import WsgiDirectory
from tests.http.http_bench import Bench

CHUNKED = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


class Kept:
    """Answers, and keeps what it read of each request, which is empty once it is over."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []

    def __call__(self, request: Any, relpath: str) -> None:
        self.requests.append(request)
        self.bodies.append(request.body())
        request.response.write(b"seen")


@pytest.fixture
def kept(bench: Bench) -> Kept:
    kept = Kept()
    bench.handle(kept)
    return kept


def test_a_name_with_an_underscore(bench: Bench, kept: Kept) -> None:
    headers = "x_api_key: a\r\nX_Forwarded_For: 1.2.3.4\r\nX-Twin: b\r\nX_Twin: c\r\n"
    assert bench.connect().ask(headers=headers).status == 200
    assert kept.requests[0].headers == [("Host", "test"), ("x_api_key", "a"), ("X-Twin", "b")]
    assert kept.requests[0].get("x-api-key") is None


def test_wsgi_gets_no_name_with_an_underscore(bench: Bench) -> None:
    seen: list[dict[str, Any]] = []

    def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.append(dict(environ))
        start_response("200 OK", [])
        return [b""]

    bench.root.insert(WsgiDirectory(application, "app"))
    headers = "X_Api: a\r\nX-B: 1\r\nX-B: 2\r\nCookie: a=b\r\nCookie: c=d\r\n"
    assert bench.connect().ask("/app/", headers=headers).status == 200
    assert "HTTP_X_API" not in seen[0]
    assert (seen[0]["HTTP_X_B"], seen[0]["HTTP_COOKIE"]) == ("1,2", "a=b; c=d")


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
    "body",
    [
        b"3;a=b\r\nabc\r\n0\r\n\r\n",
        b'3 ; a = "b c" ;d\r\nabc\r\n0;x\r\n\r\n',
        b"3;\r\nabc\r\n0\r\n\r\n",
        b"3 \t\r\nabc\r\n0  \r\n\r\n",
        b"3\r\nabc\r\n0\r\nX: y\r\nZ:\r\n\r\n",
    ],
)
def test_extensions_blanks_and_trailers(bench: Bench, kept: Kept, body: bytes) -> None:
    wire = bench.connect().send(CHUNKED + body + CHUNKED)
    for byte in body:  # the second time in pieces
        wire.send(bytes((byte,)))
    assert [wire.answer().status, wire.answer().status] == [200, 200]
    assert kept.bodies == [b"abc"] * 2
    assert len(kept.requests[0].headers) == 2

    response = ClientResponse()
    head = b"HTTP/1.1 200 OK\r\nConnection: x\r\nConnection: Close\r\nTransfer-Encoding: chunked\r\n\r\n"
    for at in range(len(head + body)):
        response.feed((head + body)[at : at + 1])
    assert (response.take(99), response.complete) == (b"abc", True)
    assert (response.get("connection"), response.persistent) == ("x,Close", False)


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


@pytest.mark.parametrize(
    ("options", "filename"),
    [
        (b"filename*=utf-8''%C3%A4.txt", "ä.txt"),
        (b"filename=\"a.txt\"; filename*=UTF-8'en'..%2F%c3%a4", "ä"),
        (b"filename*=iso-8859-1''%e4", "ä"),
        (b"filename=\"a.txt\"; filename*=utf-8''%00", "a.txt"),
    ],
)
def test_an_extended_name_of_a_file(options: bytes, filename: str) -> None:
    body = b"--x\r\nContent-Disposition: form-data; name=f; %b\r\n\r\nhi\r\n--x--\r\n" % options
    file = next(iter(read_form([body], b"x")))
    assert isinstance(file, File)
    assert (file.name, file.filename) == ("f", filename)
