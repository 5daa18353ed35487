"""Requests that two servers could read differently: 400, a close, and nobody sees them (decision 0001)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.waiting import let_others_run

GOOD = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: test\r\n\r\n"


def post(headers: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"POST / HTTP/" + version + b"\r\nHost: test\r\n" + headers + b"\r\n" + body


def handshake(more: bytes = b"", version: bytes = b"1.1") -> bytes:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" + KEY
    return b"GET / HTTP/" + version + b"\r\nHost: test\r\n" + upgrade + more + b"\r\n"


KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"

# name: bytes. Each is one connection's whole input; behind most of them waits a request that must never be seen.
PROBES: dict[str, bytes] = {
    # who is meant
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two equal Hosts": b"GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost: \r\n\r\n",
    "Host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "Host with user info": b"GET / HTTP/1.1\r\nHost: me@a\r\n\r\n",
    "Host with a blank": b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    "Host with a long port": b"GET / HTTP/1.1\r\nHost: a:123456\r\n\r\n",
    "Host with a port that is none": b"GET / HTTP/1.1\r\nHost: a:65536\r\n\r\n",
    "address with a port that is none": b"GET / HTTP/1.1\r\nHost: [::1]:99999\r\n\r\n",
    # where a body ends
    "length and chunked": post(b"Content-Length: 5\r\n" + CHUNKED, b"0\r\n\r\n" + SMUGGLED),
    "chunked and length": post(CHUNKED + b"Content-Length: 5\r\n", b"0\r\n\r\n" + SMUGGLED),
    "two lengths": post(b"Content-Length: 0\r\nContent-Length: 40\r\n", SMUGGLED),
    "two equal lengths": post(b"Content-Length: 0\r\nContent-Length: 0\r\n", SMUGGLED),
    "list of lengths": post(b"Content-Length: 0, 0\r\n", SMUGGLED),
    "length with plus": post(b"Content-Length: +3\r\n", b"abc" + SMUGGLED),
    "length with minus": post(b"Content-Length: -1\r\n", SMUGGLED),
    "length with underscore": post(b"Content-Length: 1_0\r\n", b"0123456789" + SMUGGLED),
    "length in hex": post(b"Content-Length: 0x3\r\n", b"abc" + SMUGGLED),
    "length with a fraction": post(b"Content-Length: 3.0\r\n", b"abc" + SMUGGLED),
    "length with a blank": post(b"Content-Length: 1 0\r\n", b"0123456789" + SMUGGLED),
    "length with another digit": post("Content-Length: \xb2\r\n".encode("latin-1"), b"ab" + SMUGGLED),
    "empty length": post(b"Content-Length:\r\n", SMUGGLED),
    "endless length": post(b"Content-Length: " + b"9" * 30 + b"\r\n", SMUGGLED),
    "xchunked": post(b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "gzip, chunked": post(b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "chunked, identity": post(b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n" + SMUGGLED),
    "identity": post(b"Transfer-Encoding: identity\r\n", SMUGGLED),
    "chunked twice": post(CHUNKED + CHUNKED, b"0\r\n\r\n" + SMUGGLED),
    "chunked and other": post(CHUNKED + b"Transfer-Encoding: x\r\n", b"0\r\n\r\n" + SMUGGLED),
    "chunked in quotes": post(b'Transfer-Encoding: "chunked"\r\n', b"0\r\n\r\n" + SMUGGLED),
    "chunked with vertical tab": post(b"Transfer-Encoding: \x0bchunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "chunked in 1.0": post(CHUNKED, b"0\r\n\r\n" + SMUGGLED, version=b"1.0"),
    "empty coding": post(b"Transfer-Encoding:\r\n", SMUGGLED),
    # chunks
    "chunk size with plus": post(CHUNKED, b"+3\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size with minus": post(CHUNKED, b"-3\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size with 0x": post(CHUNKED, b"0x3\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size with underscore": post(CHUNKED, b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n"),
    "chunk size behind blank": post(CHUNKED, b" 3\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "no chunk size": post(CHUNKED, b"\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size that overflows": post(CHUNKED, b"10000000000000003\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size with many zeros": post(CHUNKED, b"0" * 40 + b"3\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk size that never ends": post(CHUNKED, b"0" * 4000),
    "chunk extension with bare LF": post(CHUNKED, b"3;\nxx\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk line ends in LF": post(CHUNKED, b"3\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk line ends in CR": post(CHUNKED, b"3\rabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk longer than its size": post(CHUNKED, b"3\r\nabcd\r\n0\r\n\r\n" + SMUGGLED),
    "chunk shorter than its size": post(CHUNKED, b"5\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "chunk ends in LF": post(CHUNKED, b"3\r\nabc\n0\r\n\r\n" + SMUGGLED),
    "extensions of a line without end": post(CHUNKED, b"3;" + b"a" * 2000 + b"\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "extension with a bare CR": post(CHUNKED, b"3;a\rb\r\nabc\r\n0\r\n\r\n" + SMUGGLED),
    "trailer with a bare LF": post(CHUNKED, b"0\r\nX: a\nY: b\r\n\r\n" + SMUGGLED),
    "trailer with a blank before its colon": post(CHUNKED, b"0\r\nX : y\r\n\r\n" + SMUGGLED),
    "trailer that is a coding": post(CHUNKED, b"0\r\nTransfer_Encoding: chunked\r\n\r\n" + SMUGGLED),
    "trailer that is a length": post(CHUNKED, b"0\r\nContent-Length: 5\r\n\r\n" + SMUGGLED),
    "request as a trailer": post(CHUNKED, b"0\r\n" + SMUGGLED),
    # WebSocket handshakes
    "two keys": handshake(KEY),
    "two equal keys in other letters": handshake(KEY.lower()),
    "two versions": handshake(b"Sec-WebSocket-Version: 13\r\n"),
    "a second version": handshake(b"Sec-WebSocket-Version: 8\r\n"),
    "handshake in 1.0": handshake(version=b"1.0"),
    "handshake with a length": handshake(b"Content-Length: 5\r\n") + b"\x81\x80abc",
    "chunked handshake": handshake(CHUNKED) + b"0\r\n\r\n",
    # lines
    "blank before colon": b"GET / HTTP/1.1\r\nHost : test\r\n\r\n",
    "tab before colon": b"GET / HTTP/1.1\r\nHost: test\r\nX\t: y\r\n\r\n",
    "blank before length's colon": post(b"Content-Length : 5\r\n", b"abcde" + SMUGGLED),
    "blank before name": b"GET / HTTP/1.1\r\n Host: test\r\nHost: test\r\n\r\n",
    "folded line": b"GET / HTTP/1.1\r\nHost: test\r\nX: a\r\n b\r\n\r\n",
    "folded coding": post(b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "bare LF throughout": GOOD.replace(b"\r\n", b"\n"),
    "bare LF behind the request line": b"GET / HTTP/1.1\nHost: test\r\n\r\n",
    "bare LF in a value": b"GET / HTTP/1.1\r\nHost: test\r\nX: a\nY: b\r\n\r\n",
    "bare LF before the end": b"GET / HTTP/1.1\r\nHost: test\r\n\n",
    "bare CR in a value": b"GET / HTTP/1.1\r\nHost: test\r\nX: a\rY: b\r\n\r\n",
    "bare CR throughout": GOOD.replace(b"\r\n", b"\r"),
    "CR before CRLF": b"GET / HTTP/1.1\r\nHost: test\r\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: test\r\nX: a\0b\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nHost: test\r\nX\0: a\r\n\r\n",
    "NUL in the target": b"GET /\0 HTTP/1.1\r\nHost: test\r\n\r\n",
    "DEL in a value": b"GET / HTTP/1.1\r\nHost: test\r\nX: \x7f\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost: test\r\nnonsense\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\nHost: test\r\n: value\r\n\r\n",
    "length with an underscore in its name": post(b"Content_Length: 5\r\n", b"abcde" + SMUGGLED),
    "coding with an underscore in its name": post(b"transfer_Encoding: chunked\r\n", b"0\r\n\r\n" + SMUGGLED),
    "other letter in a name": "GET / HTTP/1.1\r\nHost: test\r\nÄ: 5\r\n\r\n".encode("latin-1"),
    "slash in a name": b"GET / HTTP/1.1\r\nHost: test\r\nX/Y: 5\r\n\r\n",
    "two empty lines first": b"\r\n\r\n" + GOOD,
    "empty lines without end": b"\r\n" * 5000,
    "bare LF first": b"\n" + GOOD,
    "bare CR first": b"\r" + GOOD,
    "blank first": b" " + GOOD,
    # request lines
    "two credentials": b"GET / HTTP/1.1\r\nHost: test\r\nAuthorization: a b\r\nAuthorization: c d\r\n\r\n",
    "two origins": b"GET / HTTP/1.1\r\nHost: test\r\nOrigin: http://a\r\nOrigin: http://b\r\n\r\n",
    "two types": post(b"Content-Type: a/b\r\nContent-Type: c/d\r\n"),
    "absolute target without Host": b"GET http://test/ HTTP/1.1\r\n\r\n",
    "absolute target without a host": b"GET http:///x HTTP/1.1\r\nHost: test\r\n\r\n",
    "absolute target with user info": b"GET http://me@test/ HTTP/1.1\r\nHost: test\r\n\r\n",
    "absolute target with a port that is none": b"GET http://test:70000/ HTTP/1.1\r\nHost: test\r\n\r\n",
    "absolute target of another scheme": b"GET ftp://test/ HTTP/1.1\r\nHost: test\r\n\r\n",
    "authority target": b"CONNECT test:443 HTTP/1.1\r\nHost: test\r\n\r\n",
    "authority target of GET": b"GET test:443 HTTP/1.1\r\nHost: test\r\n\r\n",
    "star target of GET": b"GET * HTTP/1.1\r\nHost: test\r\n\r\n",
    "relative target": b"GET index.html HTTP/1.1\r\nHost: test\r\n\r\n",
    "fragment in the target": b"GET /a#b HTTP/1.1\r\nHost: test\r\n\r\n",
    "backslash in the target": b"GET /a\\b HTTP/1.1\r\nHost: test\r\n\r\n",
    "raw byte in the target": b"GET /\xe9 HTTP/1.1\r\nHost: test\r\n\r\n",
    "blank in the target": b"GET /a b HTTP/1.1\r\nHost: test\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nHost: test\r\n\r\n",
    "two blanks": b"GET  / HTTP/1.1\r\nHost: test\r\n\r\n",
    "tab for a blank": b"GET\t/ HTTP/1.1\r\nHost: test\r\n\r\n",
    "blank behind the version": b"GET / HTTP/1.1 \r\nHost: test\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: test\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nHost: test\r\n\r\n",
    "HTTP/01.1": b"GET / HTTP/01.1\r\nHost: test\r\n\r\n",
    "http/1.1": b"GET / http/1.1\r\nHost: test\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case method": b"get / HTTP/1.1\r\nHost: test\r\n\r\n",
    "unknown method": b"FROB / HTTP/1.1\r\nHost: test\r\n\r\n",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "random": bytes(range(256)),
    # escapes
    "broken escape": b"GET /%zz HTTP/1.1\r\nHost: test\r\n\r\n",
    "short escape": b"GET /a%2 HTTP/1.1\r\nHost: test\r\n\r\n",
    "escaped NUL": b"GET /a%00b HTTP/1.1\r\nHost: test\r\n\r\n",
    "escaped line end": b"GET /a%0d%0ab HTTP/1.1\r\nHost: test\r\n\r\n",
    "escaped slash": b"GET /a%2fb HTTP/1.1\r\nHost: test\r\n\r\n",
    "escaped backslash": b"GET /a%5Cb HTTP/1.1\r\nHost: test\r\n\r\n",
}


class Seen:
    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, request: Any, relpath: str) -> None:
        self.paths.append(request.path)
        request.body()
        request.response.write(b"seen")


@pytest.mark.parametrize("name", PROBES)
def test_refused_and_closed(bench: Any, name: str) -> None:
    seen = Seen()
    bench.handle(seen)
    wire = bench.connect().send(PROBES[name])
    answer = wire.answer()
    assert (answer.status, answer.fields["connection"]) == (400, "close"), answer
    assert wire.ended()
    assert seen.paths == []


@pytest.mark.parametrize(
    "name", ["two lengths", "length and chunked", "folded line", "bare LF in a value", "trailer that is a length"]
)
def test_refused_behind_a_good_request(bench: Any, name: str) -> None:
    seen = Seen()
    bench.handle(seen)
    wire = bench.connect().send(GOOD + PROBES[name])
    assert wire.answer().body == b"seen"
    assert wire.answer().status == 400
    assert wire.ended()
    assert seen.paths == ["/"]


@pytest.mark.parametrize("name", ["bare LF throughout", "TLS hello", "HTTP/0.9", "SSH"])
def test_refused_before_the_head_is_complete(bench: Any, name: str) -> None:
    """Nobody waits ten seconds for the end of something that can't become a request."""
    wire = bench.connect()
    for byte in PROBES[name][:40]:
        try:
            wire.send(bytes((byte,)))
        except ConnectionError:
            break
    assert wire.answer().status == 400


@pytest.mark.parametrize(
    ("name", "probe"),
    [
        ("long target", b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: test\r\n\r\n"),
        ("long value", b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"a" * 20000 + b"\r\n\r\n"),
        ("endless value", b"GET / HTTP/1.1\r\nHost: test\r\nX: " + b"a" * 20000),
        ("many headers", b"GET / HTTP/1.1\r\nHost: test\r\n" + b"X: y\r\n" * 101 + b"\r\n"),
    ],
)
def test_too_large_a_head_is_431(bench: Any, name: str, probe: bytes) -> None:
    seen = Seen()
    bench.handle(seen)
    wire = bench.connect().send(probe)
    assert wire.answer().status == 431
    assert wire.ended()
    assert seen.paths == []


def test_unknown_expectation_is_417(bench: Any) -> None:
    wire = bench.connect().send(post(b"Expect: magic\r\nContent-Length: 3\r\n", b"abc"))
    assert wire.answer().status == 417
    assert wire.ended()


@pytest.mark.parametrize(
    "body",
    [b"3\r\nabc\r\n", b"3\r\nab", b""],
    ids=["between chunks", "within a chunk", "before the first"],
)
def test_a_bad_chunk_that_comes_later(bench: Any, body: bytes) -> None:
    seen = Seen()
    bench.handle(seen)
    wire = bench.connect().send(post(CHUNKED, body))
    let_others_run()
    wire.send(b"xyz\r\n" + SMUGGLED)
    assert wire.answer().status == 400
    assert wire.ended()
    assert seen.paths == ["/"]


@pytest.mark.parametrize(
    "body",
    [(b"1;" + b"a" * 900 + b"\r\nx\r\n") * 30 + b"0\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 4000 + b"\r\n"],
    ids=["extensions", "trailers"],
)
def test_more_that_is_ignored_than_the_limit(bench: Any, body: bytes) -> None:
    bench.handle(Seen())
    wire = bench.connect().send(post(CHUNKED, body + SMUGGLED))
    assert wire.answer().status == 400
    assert wire.ended()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: [::1]:9357\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: test:65535\r\n\r\n",
        b"\r\n" + GOOD,
        handshake(),
        handshake(b"Content-Length: 0\r\n"),
        b"GET / HTTP/1.1\r\nhost:test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \t test \t\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET /?a=b&c=%zz%00 HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET /%C3%A4%e4%20 HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: test\r\nEmpty:\r\nLatin: \xe4\r\n\r\n",
        b"DELETE /x HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n",
        b"PROPFIND /x HTTP/1.1\r\nHost: test\r\n\r\n",
        b"M-SEARCH /x HTTP/1.1\r\nHost: test\r\n\r\n",
        post(b"Transfer-Encoding: Chunked\r\n", b"0003\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"),
        b"GET / HTTP/1.1\r\nHost: test\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
    ],
)
def test_good_ones_pass(bench: Any, head: bytes) -> None:
    seen = Seen()
    bench.handle(seen)
    assert bench.connect().send(head).answer().status == 200
    assert len(seen.paths) == 1


def test_an_empty_line_before_each_request(bench: Any) -> None:
    """Old clients end a body with a line end that does not belong to it; it may come in pieces of its own."""
    seen = Seen()
    bench.handle(seen)
    wire = bench.connect()
    for piece in (b"\r", b"\n", GOOD, b"\r\n" + GOOD + b"\r\n" + GOOD):
        wire.send(piece)
        let_others_run()
    assert [wire.answer().status for _ in range(3)] == [200] * 3
    assert seen.paths == ["/"] * 3
    wire.send(b"\r\n")
    let_others_run()
    wire.send(b"\r\n" + GOOD)
    assert wire.answer().status == 400
