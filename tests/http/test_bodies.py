"""Bodies: what they may take of the memory, and that reading them leaves the others their turn."""

from __future__ import annotations

import logging
from typing import Any

import gevent
import gevent.event
import pytest

from smqrt.http.body import BODIES, ChunkedDecoder, HttpLimits
from smqrt.http.forms import read_form
from smqrt.http.message import Request
from tests.http.cpu import linear, seconds
from tests.support.waiting import wait_until

POST = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n"


def test_chunks_of_one_byte_cost_the_same_each() -> None:
    def decode(chunks: int) -> object:
        return ChunkedDecoder().feed(b"1\r\nx\r\n" * chunks)

    assert linear(decode, 20_000)
    assert seconds(lambda: decode(10_000)) < 0.05


def test_a_chunk_in_pieces_of_one_byte() -> None:
    decoder = ChunkedDecoder()
    body = b"3\r\nabc\r\n0A\r\n0123456789\r\n0\r\n\r\n"
    assert b"".join(decoder.feed(bytes((byte,))) for byte in body) == b"abc0123456789"
    assert decoder.complete
    assert decoder.rest == b""


@pytest.mark.parametrize("chunked", [False, True])
def test_others_have_their_turn_while_a_body_is_there(bench: Any, chunked: bool) -> None:
    """The whole body is in the socket's buffer from the beginning, and the page reads it byte by byte."""
    turns = 0

    def count() -> None:
        nonlocal turns
        while True:
            gevent.sleep(0)
            turns += 1

    def read(request: Request, relpath: str) -> None:
        nonlocal turns
        gevent.sleep(0.05)  # it is all there
        turns = 0
        size = sum(1 for _ in request.chunks(1))
        request.response.write(b"%d %d" % (size, turns))

    bench.handle(read)
    body = b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n" if chunked else b"x" * 200_000
    head = b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" if chunked else POST % len(body)
    counter = gevent.spawn(count)
    sender = gevent.spawn(bench.connect().send, head + body)
    size, turns_meanwhile = map(int, sender.get().answer().body.split())
    counter.kill()
    assert size == (20_000 if chunked else 200_000)
    assert turns_meanwhile > 1


def test_bodies_share_a_memory(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is held counts until its request is over; what finds no room is refused, counted, and logged once."""
    bench = start(HttpLimits(bodies_bytes=250_000))
    go_on = gevent.event.Event()

    def hold(request: Request, relpath: str) -> None:
        request.response.write(b"%d" % len(request.body()))
        go_on.wait()

    bench.handle(hold)
    first, second = (bench.connect().send(POST % 100_000 + b"x" * 100_000) for _ in range(2))
    wait_until(lambda: bench.server.bodies.held_bytes == 200_000)
    with caplog.at_level(logging.WARNING, "smqrt"):
        for _ in range(3):
            refused = bench.connect().send(POST % 100_000 + b"x" * 100_000).answer()
            assert (refused.status, refused.fields["retry-after"]) == (503, "1")
    assert [record.message for record in caplog.records] == [
        "refused: a request body: limit reached: bodies_mib (0); see the setting bodies_mib"
    ]
    assert BODIES.count == 3
    go_on.set()
    assert (first.answer().body, second.answer().body) == (b"100000", b"100000")
    wait_until(lambda: bench.server.bodies.held_bytes == 0)
    assert bench.connect().send(POST % 200_000 + b"x" * 200_000).answer().status == 200


def test_a_body_that_ends_early_is_counted_no_more(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.write(request.body()))
    wire = bench.connect().send(POST % 100_000 + b"x" * 50_000)
    wait_until(lambda: bench.server.bodies.held_bytes == 50_000)
    wire.close()
    wait_until(lambda: bench.server.bodies.held_bytes == 0)


def test_the_fields_of_forms_count_as_well() -> None:
    held: list[int] = []
    part = b'--XX\r\nContent-Disposition: form-data; name="a"%b\r\n\r\n' + b"v" * 1000 + b"\r\n"
    list(read_form([part % b"" + part % b'; filename="b"' + b"--XX--"], b"XX", held.append))
    assert sum(held) == 1000


def test_a_form_that_finds_no_room(start: Any) -> None:
    bench = start(HttpLimits(bodies_bytes=1000))

    def read(request: Request, relpath: str) -> None:
        request.response.write(b"%d" % len(list(read_form(request.chunks(), b"XX", request.reader().hold))))

    bench.handle(read)
    part = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    for size, status in ((900, 200), (900, 200), (1100, 503)):
        body = part + b"v" * size + b"\r\n--XX--"
        assert bench.connect().send(POST % len(body) + body).answer().status == status
    wait_until(lambda: bench.server.bodies.held_bytes == 0)
