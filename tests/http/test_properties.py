"""Arbitrary requests in arbitrary pieces: the same result, or one named refusal."""

from __future__ import annotations

import gc
import re
from typing import Any

import gevent
import httptools
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smqrt.http.body import ChunkedDecoder
from smqrt.http.head import Head, check_beginning
from smqrt.http.headers import BadRequest, parse_ranges
from smqrt.http.resources import IoError, segments
from smqrt.http.tree import normalize
from tests.http.http_bench import Bench
from tests.support.waiting import let_others_run

GOOD = (
    b"POST /a/b%20c?x=1 HTTP/1.1\r\nHost: test:80\r\nContent-Length: 3\r\nConnection: keep-alive\r\n"
    b"Accept: */*\r\nExpect: 100-continue\r\n\r\n"
)
PIECES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"chunked",
    b"Transfer-Encoding: ",
    b"%",
    b"/",
    b"..",
    b"1",
    b"+",
]


class Collector:
    """What llhttp alone makes of a head."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.names.append(name)


@st.composite
def mutants(draw: Any) -> bytes:
    """A good head with a few things changed."""
    data = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 3))
        data[place : place + length] = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4)))
    return bytes(data)


@settings(max_examples=200)
@example(b"GET /\xc2\x80a HTTP/1.1\r\nHost: test\r\n\r\n")
@given(mutants())
def test_a_mutant_is_understood_as_llhttp_does_or_refused(data: bytes) -> None:
    try:
        head = Head(data)
    except BadRequest:
        return
    collector = Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        # Raw UTF-8 in a target is accepted and percent-encoded; llhttp refuses it.
        target, end, rest = data.partition(b"\r\n")
        parser.feed_data(re.sub(rb"[\x80-\xff]", lambda byte: b"%%%02X" % ord(byte[0]), target) + end + rest)
    except httptools.HttpParserUpgrade:
        pass
    assert head.method.encode() == parser.get_method()
    assert [name.encode() for name, _ in head.headers] == collector.names
    assert data.count(b"\r\n") == data.count(b"\n") == data.count(b"\r") == len(head.headers) + 2
    assert head.path == "*" or head.path.startswith("/")
    assert not any(character < " " or character in "\\\x7f" for character in head.path)


@settings(max_examples=150)
@given(st.one_of(mutants(), st.binary(max_size=200)), st.data())
def test_the_beginning_of_a_good_head_is_never_refused(data: bytes, draw: Any) -> None:
    """And what is refused early would have been refused at the end."""
    cut = draw.draw(st.integers(0, len(data)))
    checked = draw.draw(st.integers(0, cut))
    beginning = data[:cut]
    if b"\r\n\r\n" in beginning:
        return
    try:
        check_beginning(beginning[:checked])
        check_beginning(beginning, checked)
    except BadRequest:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            try:
                Head(data[: end + 4])
            except BadRequest:
                return
            raise AssertionError("a good head was refused by its beginning") from None


@settings(max_examples=100)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8), st.binary(max_size=20), st.data())
def test_any_split_of_a_chunked_body_gives_the_same(chunks: list[bytes], behind: bytes, draw: Any) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n" + behind
    decoder, payload, place = ChunkedDecoder(), b"", 0
    while place < len(wire):
        end = draw.draw(st.integers(place + 1, len(wire)))
        payload += decoder.feed(wire[place:end])
        place = end
    assert decoder.complete
    assert payload == b"".join(chunks)
    assert decoder.rest == behind


@settings(max_examples=150)
@given(st.binary(max_size=80), st.data())
def test_any_split_of_bad_chunks_fails_alike(wire: bytes, draw: Any) -> None:
    def result(pieces: list[bytes]) -> tuple[bytes, bool] | str:
        decoder, payload = ChunkedDecoder(), b""
        try:
            for piece in pieces:
                payload += decoder.feed(piece)
        except BadRequest:
            return "refused"
        return payload, decoder.complete

    cut = draw.draw(st.integers(0, len(wire)))
    assert result([wire]) == result([wire[:cut], wire[cut:]]) == result([bytes((byte,)) for byte in wire])


@given(st.text(alphabet="0123456789-,= bytes", max_size=40), st.integers(0, 10_000))
def test_ranges_are_inside(header: str, size: int) -> None:
    for span in parse_ranges(header, size) or []:
        assert 0 <= span.first < span.end <= size


@given(st.text(alphabet="ab./\\\0", max_size=30))
def test_names_stay_below_their_root(name: str) -> None:
    place = normalize(name)
    assert place is None or not {"..", "."} & set(place.split("/"))
    try:
        parts = segments(name)
    except IoError:
        return
    assert not {"", ".", ".."} & set(parts)
    assert not any("/" in part or "\\" in part for part in parts)


@settings(max_examples=60)
@given(st.lists(st.one_of(mutants(), st.just(GOOD + b"abc"), st.binary(max_size=50)), min_size=1, max_size=3))
def test_random_sessions_leave_the_server_well(pieces: list[bytes]) -> None:
    bench = Bench()
    bench.handle(lambda request, relpath: request.response.write(b"seen"))
    try:
        wild = bench.connect()
        for piece in pieces:
            wild.sock.sendall(piece)
            gevent.sleep(0)
        assert bench.connect().ask("/").body == b"seen"
        wild.close()
        let_others_run()
    finally:
        bench.close()


def test_an_exchange_leaves_nothing_to_the_collector(bench: Any, tmp_path: Any) -> None:
    """A cycle per request would cost more than parsing it."""
    from smqrt.http.disk import DiskIo
    from smqrt.http.tree import ResourceReader

    (tmp_path / "a.txt").write_text("a")
    bench.root.insert(ResourceReader("files", io=DiskIo(tmp_path)))
    bench.handle(lambda request, relpath: request.response.write(request.body()))
    wire = bench.connect()

    def exchange() -> None:
        wire.ask("/files/a.txt")
        wire.send(b"POST /x HTTP/1.1\r\nHost: test\r\nContent-Length: 3\r\n\r\nabc").answer()

    exchange()
    gc.collect()
    gc.disable()
    try:
        for _ in range(100):
            exchange()
        assert gc.collect() < 20
    finally:
        gc.enable()
