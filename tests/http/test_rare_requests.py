"""Rare forms of requests in RFC 9110 and 9112: underscores, repeated fields, extensions, trailers, absolute targets."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.http.client.exchange import ClientResponse
from smqrt.http.wsgi import WsgiDirectory
from tests.http.http_bench import Bench, Kept

CHUNKED = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


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
