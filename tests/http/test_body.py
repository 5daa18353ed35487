"""Request bodies: reading, limits, memory, turns of other greenlets, and the values in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import pytest

from smqrt.errors import ArgumentError
from smqrt.http.body import BODIES, Body, BodyMemory, ChunkedDecoder, Form, HttpLimits
from smqrt.http.forms import read_form
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from tests.http.cpu import linear, seconds
from tests.http.http_bench import HOST, echo, get
from tests.support.waiting import let_others_run, wait_until

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


def test_bodies_share_one_limit() -> None:
    memory = BodyMemory(100)
    memory.take(60)
    memory.take(40)
    with pytest.raises(HttpError) as refused:
        memory.take(1)
    assert (refused.value.status, refused.value.headers, refused.value.close) == (503, {"Retry-After": "1"}, True)
    assert memory.held_bytes == 100
    memory.give_back(60)
    memory.take(1)
    assert memory.held_bytes == 41


def test_chunked_body(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect()
    wire.send(b"POST /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    let_others_run()
    wire.send(b"0A\r\n01234")
    let_others_run()
    wire.send(b"56789\r")
    let_others_run()
    wire.send(b"\n0\r\n\r\n" + get("/b"))
    assert wire.answer().body == b"a|abc0123456789"
    assert wire.answer().body == b"b|"


def test_pieces_of_a_large_body(bench: Any) -> None:
    sizes: list[int] = []

    def handler(request: Request, relpath: str) -> None:
        for piece in request.chunks(10_000):
            sizes.append(len(piece))
        request.response.write(b"%d" % sum(sizes))

    bench.handle(handler)
    wire = bench.connect()
    wire.send(b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: 10000000\r\n\r\n" + bytes(10_000_000) + get())
    assert wire.answer().body == b"10000000"
    assert max(sizes) <= 10_000
    assert wire.answer().status == 200


@pytest.mark.parametrize("framing", ["Content-Length: 2000", "Transfer-Encoding: chunked"])
def test_a_body_over_the_limit_is_413(start: Any, framing: str) -> None:
    bench = start(HttpLimits(body_bytes=1000))
    bench.handle(echo)
    wire = bench.connect()
    body = b"7D0\r\n" + bytes(2000) + b"\r\n0\r\n\r\n" if "chunked" in framing else bytes(2000)
    wire.send(b"POST / HTTP/1.1\r\n" + HOST + framing.encode() + b"\r\n\r\n" + body)
    assert wire.answer().status == 413
    assert wire.ended()


def test_continue_is_sent_when_the_body_is_wanted(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect()
    wire.send(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert wire.answer().status == 100
    wire.send(b"abc")
    assert wire.answer().body == b"a|abc"
    assert wire.ask("/b").status == 200


def test_no_continue_when_the_body_has_begun(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect()
    wire.send(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\na")
    let_others_run()
    wire.send(b"bc")
    assert wire.answer().body == b"a|abc"


def test_no_continue_when_it_is_not_wanted(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.error(401))
    wire = bench.connect()
    wire.send(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert wire.answer().status == 401
    assert wire.ended()


class Wire:
    """A connection that a body is read from; `later` arrives piece by piece."""

    def __init__(self, data: bytes = b"", *later: bytes) -> None:
        self.data = data
        self.later = list(later)
        self.continued = 0

    def receive(self, within_s: float) -> bytes:
        return self.later.pop(0)

    def send_continue(self) -> None:
        self.continued += 1


def body_of(wire: Wire, length: int | None, memory: BodyMemory | None = None) -> Body:
    return Body(wire, length, expects_continue=True, limits=HttpLimits(), memory=memory or BodyMemory(1 << 20))


def test_an_announced_length_over_the_limit_reads_nothing() -> None:
    wire = Wire(b"", b"x" * 11)
    with pytest.raises(HttpError) as refused:
        body_of(wire, 11).whole(10)
    assert (refused.value.status, refused.value.close) == (413, True)
    assert (wire.continued, len(wire.later)) == (0, 1)


def test_the_next_request_stays_in_the_connection() -> None:
    for length, data in ((3, b"abc"), (None, b"3\r\nabc\r\n0\r\n\r\n")):
        wire = Wire(data + b"GET /")
        assert body_of(wire, length).whole(10) == b"abc"
        assert wire.data == b"GET /"


def test_skipping_takes_what_has_arrived_without_waiting() -> None:
    wire = Wire(b"abc", b"de")
    body = body_of(wire, 5)
    assert not body.skip_buffered()
    assert (wire.data, len(wire.later)) == (b"", 1)
    wire.data = wire.later.pop() + b"GET /"
    assert body.has_arrived
    assert body.skip_buffered()
    assert wire.data == b"GET /"


def test_a_chunked_body_has_arrived_only_when_read() -> None:
    body = body_of(Wire(b"0\r\n\r\n"), None)
    assert not body.has_arrived
    assert body.skip_buffered()
    assert body.has_arrived


def test_a_tap_keeps_the_beginning_only() -> None:
    body = body_of(Wire(b"abc", b"def", b"ghi"), 9)
    assert body.tapped == b""
    body.tap(5)
    assert body.whole(10) == b"abcdefghi"
    assert body.tapped == b"abcde"


def test_a_forgotten_body_gives_back_its_memory_once() -> None:
    memory = BodyMemory(100)
    memory.take(10)
    body = body_of(Wire(b"x" * 60), 60, memory)
    body.whole(60)
    assert memory.held_bytes == 70
    for _ in range(2):
        body.forget()
    assert memory.held_bytes == 10
    assert list(body.pieces()) == []


class PostedForm:
    """A request with a form of one field and files."""

    has_body = True

    def __init__(self, *contents: bytes) -> None:
        part = b'--XX\r\nContent-Disposition: form-data; name="f"; filename="%d"\r\n\r\n%b\r\n'
        self.data = b"".join(part % one for one in enumerate(contents)) + b"--XX--"

    def get(self, name: str) -> str | None:
        return "multipart/form-data; boundary=XX" if name == "content-type" else None

    def body(self) -> bytes:
        return self.data

    def chunks(self, size_bytes: int = 65536) -> Iterator[bytes]:
        return iter([self.data])

    def reader(self) -> Body:
        return body_of(Wire(self.data), len(self.data))


def test_files_are_read_by_one_iterator_only() -> None:
    form = Form(PostedForm(b"a", b"b"))
    first = form.files(100_000)
    assert next(first).read() == b"a"
    with pytest.raises(ArgumentError, match="another iterator reads the files"):
        form.files(100_000)
    assert [one.read() for one in first] == [b"b"]
    assert list(form.files(100_000)) == []


def test_saved_files_replace_others_only_when_complete(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    upload = next(Form(PostedForm(b"x" * 100)).files(100_000))
    with pytest.raises(HttpError) as refused:
        upload.save(tmp_path / "kept", limit_bytes=99)
    assert refused.value.status == 413
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"
    upload = next(Form(PostedForm(b"x" * 100)).files(100_000))
    assert upload.save(tmp_path / "kept", limit_bytes=100) == 100
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [b"x" * 100]
