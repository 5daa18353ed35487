"""Requests and responses on one connection: pipelines, one send each, and the end of the server."""

from __future__ import annotations

import errno
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.event import Event

from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from tests.http.http_bench import HOST, echo, get
from tests.support.waiting import let_others_run, wait_until

# keep-alive and pipelines


def test_keep_alive(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect()
    for number in range(5):
        answer = wire.ask(f"/{number}")
        assert answer.body == f"{number}|".encode()
        assert "connection" not in answer.fields
        assert "date" in answer.fields


@pytest.mark.parametrize(
    ("version", "header", "stays"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: x, Close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: keep-alive\r\n", True),
    ],
)
def test_connection_persistence(bench: Any, version: bytes, header: bytes, stays: bool) -> None:
    bench.handle(echo)
    wire = bench.connect().send(get("/a", header, version))
    answer = wire.answer()
    assert answer.body == b"a|"
    expected = "close" if not stays else "keep-alive" if version == b"1.0" else None
    assert answer.fields.get("connection") == expected
    if stays:
        assert wire.ask("/b").body == b"b|"
    else:
        assert wire.ended()


def test_the_handler_may_close(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.headers.set("Connection", "close"))
    wire = bench.connect()
    assert wire.ask("/").fields["connection"] == "close"
    assert wire.ended()


def test_pipelined_requests_are_answered_in_order(bench: Any) -> None:
    """The slow ones hold back the fast ones behind them."""

    def handler(request: Request, relpath: str) -> None:
        if int(relpath) % 3 == 0:
            gevent.sleep(0.01)
        request.response.write(relpath.encode() + request.body())

    bench.handle(handler)
    wire = bench.connect()
    posts = [b"POST /%d HTTP/1.1\r\n%sContent-Length: 1\r\n\r\nx" % (number, HOST) for number in range(12)]
    wire.send(b"".join(posts))
    assert [wire.answer().body for _ in posts] == [b"%dx" % number for number in range(12)]


def test_a_long_pipeline_is_held_back_and_complete(bench: Any) -> None:
    """What does not fit the receive buffer waits in TCP, a request cut in two included."""
    bench.handle(echo)
    wire = bench.connect()
    count = 3000
    sender = gevent.spawn(wire.send, b"".join(get(f"/{number}") for number in range(count)))
    assert [wire.answer().body for _ in range(count)] == [b"%d|" % number for number in range(count)]
    sender.join()


def test_a_long_pipeline_lets_others_have_a_turn(bench: Any) -> None:
    seen: list[str] = []
    other = bench.connect()

    def handler(request: Request, relpath: str) -> None:
        seen.append(relpath)
        if relpath == "9":
            other.sock._sock.send(get("/other"))

    bench.handle(handler)
    wire = bench.connect().send(b"".join(get(f"/{number}") for number in range(4000)))
    for _ in range(4000):
        wire.answer()
    assert seen.index("other") < 2000, "a share of time, however many requests a quick machine does in it"
    assert len(seen) == 4001


def test_arriving_byte_by_byte(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect()
    for byte in b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc" + get("/b"):
        wire.send(bytes((byte,)))
        gevent.sleep(0)
    assert wire.answer().body == b"a|abc"
    assert wire.answer().body == b"b|"


def test_half_closed_client_gets_its_answer(bench: Any) -> None:
    bench.handle(echo)
    wire = bench.connect().send(get("/a"))
    wire.sock.shutdown(socket.SHUT_WR)
    assert wire.answer().body == b"a|"
    assert wire.ended()


def test_handlers_of_different_connections_run_side_by_side(bench: Any) -> None:
    here, all_here = [], gevent.event.Event()

    def handler(request: Request, relpath: str) -> None:
        here.append(relpath)
        if len(here) == 20:
            all_here.set()
        assert all_here.wait(2)
        request.response.write(b"together")

    bench.handle(handler)
    wires = [bench.connect().send(get(f"/{number}")) for number in range(20)]
    assert {wire.answer().body for wire in wires} == {b"together"}


# responses


def sends_of(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    from smqrt.http.server import HttpConnection

    sends: list[bytes] = []
    original = HttpConnection.send
    monkeypatch.setattr(HttpConnection, "send", lambda self, data: (sends.append(data), original(self, data))[1])
    return sends


@pytest.mark.parametrize("size", [0, 1, 8192])
def test_one_send_with_length(bench: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    sends = sends_of(bench, monkeypatch)

    def handler(request: Request, relpath: str) -> None:
        for _ in range(size // 16):
            request.response.write(b"x" * 16)
        request.response.write(b"x" * (size % 16))

    bench.handle(handler)
    answer = bench.connect().ask("/")
    assert answer.fields["content-length"] == str(size)
    assert len(answer.body) == size
    assert len(sends) == 1


def test_a_page_passed_to_end_is_one_send(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sends = sends_of(bench, monkeypatch)
    bench.handle(lambda request, relpath: request.response.end(b"x" * 100_000))
    answer = bench.connect().ask("/")
    assert (answer.fields["content-length"], len(answer.body), len(sends)) == ("100000", 100_000, 1)


def test_above_the_buffer_it_is_chunked(bench: Any) -> None:
    pieces = [bytes([65 + number % 26]) * 1000 for number in range(40)]

    def handler(request: Request, relpath: str) -> None:
        for piece in pieces:
            request.response.write(piece)

    bench.handle(handler)
    wire = bench.connect()
    answer = wire.ask("/")
    assert answer.fields["transfer-encoding"] == "chunked"
    assert answer.body == b"".join(pieces)
    assert wire.ask("/").status == 200


def test_http_1_0_large_bodies_end_with_the_connection(bench: Any) -> None:
    bench.handle(lambda request, relpath: [request.response.write(b"x" * 5000) for _ in range(4)])
    wire = bench.connect().send(get("/", b"Connection: keep-alive\r\n", b"1.0"))
    answer = wire.answer()
    assert answer.fields["connection"] == "close"
    assert "transfer-encoding" not in answer.fields
    assert answer.body == b"x" * 20000


def test_announced_length_is_kept(bench: Any) -> None:
    def handler(request: Request, relpath: str) -> None:
        request.response.headers.set("Content-Length", "20000")
        for _ in range(int(relpath)):
            request.response.write(b"x" * 5000)

    bench.handle(handler)
    wire = bench.connect()
    answer = wire.ask("/4")
    assert answer.fields["content-length"] == "20000"
    assert "transfer-encoding" not in answer.fields
    assert wire.ask("/5").body == b"x" * 20000, "more than announced is cut off"
    wire.send(get("/3"))
    with pytest.raises(AssertionError, match="ended within a body"):
        wire.answer()


def test_flush_sends_what_is_there(bench: Any) -> None:
    go = gevent.event.Event()

    def handler(request: Request, relpath: str) -> None:
        request.response.write(b"first")
        request.response.flush()
        go.wait(2)
        request.response.write(b"second")

    bench.handle(handler)
    wire = bench.connect().send(get())
    while b"first" not in wire.data:
        wire.more()
    assert b"second" not in wire.data
    go.set()
    assert wire.answer().body == b"firstsecond"


def test_a_handler_that_writes_nothing_ends(bench: Any) -> None:
    bench.handle(lambda request, relpath: None)
    wire = bench.connect()
    assert wire.ask("/").fields["content-length"] == "0"
    assert wire.ask("/").status == 200


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(bench: Any, status: int) -> None:
    def handler(request: Request, relpath: str) -> None:
        request.response.status = status
        request.response.write(b"x" * int(relpath))

    bench.handle(handler)
    wire = bench.connect()
    for size in ("10", "10000"):
        answer = wire.ask("/" + size)
        assert answer.status == status
        assert not {"content-length", "transfer-encoding"} & answer.fields.keys()
    assert wire.ask("/0").status == status


@pytest.mark.parametrize("size", [10, 100_000])
def test_head_has_the_head_only(bench: Any, size: int) -> None:
    bench.handle(lambda request, relpath: request.response.end(b"x" * size))
    wire = bench.connect()
    assert wire.ask("/", "HEAD").fields["content-length"] == str(size)
    assert len(wire.ask("/").body) == size


def test_head_of_a_stream(bench: Any) -> None:
    bench.handle(lambda request, relpath: [request.response.write(b"x" * 5000) for _ in range(4)])
    wire = bench.connect()
    assert wire.ask("/", "HEAD").body == b""
    assert len(wire.ask("/").body) == 20000


def test_options_star(bench: Any) -> None:
    answer = bench.connect().ask("*", "OPTIONS")
    assert answer.status == 204
    assert "GET" in answer.fields["allow"]


def test_header_fields(bench: Any) -> None:
    def handler(request: Request, relpath: str) -> None:
        headers = request.response.headers
        headers.set("X-One", "1")
        headers.set("x-two", "2")
        headers.set("X-ONE", "one")
        headers.add("Set-Cookie", "a=1")
        headers.add("Set-Cookie", "b=2")
        headers.set("X-Gone", "x")
        headers.remove("x-gone")
        assert headers.get("x-one") == "one"

    bench.handle(handler)
    head = bench.connect().ask("/").head
    assert head.startswith(b"HTTP/1.1 200 OK\r\nX-ONE: one\r\nx-two: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n")
    assert b"Gone" not in head


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X", "a\r\nY: b"),
        ("X", "a\nb"),
        ("X", "a\rb"),
        ("X", "a\0b"),
        ("X: y\r\nZ", "a"),
        ("", "a"),
        ("X Y", "a"),
        ("X", "\u20ac"),
        ("Transfer-Encoding", "chunked"),
    ],
)
def test_header_fields_that_would_split_the_head(bench: Any, name: str, value: str) -> None:
    def handler(request: Request, relpath: str) -> None:
        with pytest.raises(ValueError, match="header"):
            request.response.headers.set(name, value)
        with pytest.raises(ValueError, match="header"):
            request.response.headers.add(name, value)
        request.response.write(b"refused")

    bench.handle(handler)
    assert bench.connect().ask("/").body == b"refused"


def test_reset_and_what_is_committed(bench: Any) -> None:
    def handler(request: Request, relpath: str) -> None:
        response = request.response
        response.status = 201
        response.headers.set("X", "y")
        response.write(b"old")
        response.reset("buffer")
        assert (response.status, response.size) == (201, 0)
        response.write(b"new")
        assert not response.committed
        response.flush()
        assert response.committed
        with pytest.raises(RuntimeError, match="begun"):
            response.reset()
        response.write(b"est")
        response.end()
        response.write(b"ignored")

    bench.handle(handler)
    answer = bench.connect().ask("/")
    assert (answer.status, answer.fields["x"], answer.body) == (201, "y", b"newest")


def test_after_an_error_500_the_next_request_works(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: Request, relpath: str) -> None:
        if relpath == "bad":
            request.response.write(b"half")
            raise LookupError("the author's mistake")
        request.response.write(b"fine")

    bench.handle(handler)
    wire = bench.connect()
    answer = wire.ask("/bad")
    assert answer.status == 500
    assert b"half" not in answer.body
    assert b"mistake" not in answer.body
    assert "the author's mistake" in caplog.text
    assert wire.ask("/good").body == b"fine"


def test_an_error_behind_the_head_ends_the_connection(bench: Any) -> None:
    def handler(request: Request, relpath: str) -> None:
        request.response.write(b"x" * 10000)
        raise LookupError("too late for a status")

    bench.handle(handler)
    wire = bench.connect().send(get())
    with pytest.raises(AssertionError, match="ended within a chunk"):
        wire.answer()


def test_an_error_of_another_connection_is_an_error(bench: Any) -> None:
    """A handler's own failing connection is not taken for the client's."""

    def handler(request: Request, relpath: str) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the database is down")

    bench.handle(handler)
    assert bench.connect().ask("/").status == 500


def test_http_errors(bench: Any) -> None:
    def handler(request: Request, relpath: str) -> None:
        raise HttpError(409, "<conflict>", headers={"X-Why": "because"})

    bench.handle(handler)
    wire = bench.connect()
    answer = wire.ask("/")
    assert (answer.status, answer.fields["x-why"]) == (409, "because")
    assert b"&lt;conflict&gt;" in answer.body
    assert wire.ask("/").status == 409


def test_a_client_that_goes_away_is_no_error(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    def handler(request: Request, relpath: str) -> None:
        try:
            for _ in range(1000):
                request.response.write(b"x" * 100_000)
                gevent.sleep(0.001)
        finally:
            ended.append("yes")

    bench.handle(handler)
    wire = bench.connect().send(get())
    wire.more()
    wire.close()
    wait_until(lambda: ended and not len(bench.server))
    assert ended == ["yes"]
    assert caplog.text == ""


def test_a_slow_reader_gets_everything_and_delays_no_others(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.end(bytes(20 << 20) if relpath else b"small"))
    slow = bench.connect().send(get("/big"))
    let_others_run()
    assert bench.connect().ask("/").body == b"small"
    assert len(slow.answer().body) == 20 << 20
    assert slow.ask("/").body == b"small"


# bodies that no handler reads


def test_a_small_unread_body_is_skipped(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.write(relpath.encode()))
    wire = bench.connect()
    wire.send(
        b"POST /a HTTP/1.1\r\n"
        + HOST
        + b"Content-Length: 30\r\n\r\n"
        + b"GET /no HTTP/1.1\r\nHost: test\r\n"
        + get("/b")
    )
    assert wire.answer().body == b"a"
    assert wire.answer().body == b"b"


def test_a_large_unread_body_does_not_block_the_connection(bench: Any) -> None:
    """A 401 to an upload reaches the client although it is still sending (spec: runtime §11)."""
    bench.handle(lambda request, relpath: request.response.error(401))
    wire = bench.connect()
    wire.send(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 5000000\r\n\r\n")

    def upload() -> None:
        try:
            wire.send(bytes(5_000_000))
        except OSError:
            pass

    sender = gevent.spawn(upload)
    answer = wire.answer()
    assert (answer.status, answer.fields["connection"]) == (401, "close")
    assert wire.ended()
    sender.kill()


def test_a_body_that_ends_early(bench: Any) -> None:
    errors: list[str] = []

    def handler(request: Request, relpath: str) -> None:
        try:
            request.body()
        except HttpError as error:
            errors.append(error.detail)
            raise

    bench.handle(handler)
    wire = bench.connect().send(b"POST /a HTTP/1.1\r\n" + HOST + b"Content-Length: 30\r\n\r\nabc")
    wire.sock.shutdown(socket.SHUT_WR)
    assert wire.answer().status == 400
    assert errors == ["the body ended early"]


# the end of the server


def test_drain_lets_the_busy_finish(bench: Any) -> None:
    begun = Event()

    def handler(request: Request, relpath: str) -> None:
        begun.set()
        gevent.sleep(0.05)
        request.response.write(b"finished")

    bench.handle(handler)
    idle, busy = bench.connect(), bench.connect()
    busy.send(get())
    assert begun.wait(5)
    assert len(bench.server) == 2
    assert bench.server.drain(2)
    answer = busy.answer()
    assert (answer.body, answer.fields["connection"]) == (b"finished", "close")
    assert idle.ended()


def test_drain_gives_up(bench: Any) -> None:
    begun = Event()
    bench.handle(lambda request, relpath: begun.set() or Event().wait())  # type: ignore[func-returns-value]
    bench.connect().send(get())
    assert begun.wait(5)
    assert not bench.server.drain(0.05)


# a body that is read while the response is under way


def send_back(request: Request, relpath: str) -> None:
    for piece in request.chunks():
        request.response.write(piece)


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_what_is_written_meanwhile_takes_nothing_of_the_body(bench: Any, framing: str) -> None:
    bench.handle(send_back)
    sent = b"".join(b"%05d" % number for number in range(60000))
    wire = bench.connect()
    if framing == "chunked":
        pieces = (sent[at : at + 3000] for at in range(0, len(sent), 3000))
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        wire.send(b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
    else:
        body = sent
        wire.send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(sent))
    sending = gevent.spawn(wire.send, body)
    assert wire.answer().body == sent
    sending.join()


@pytest.mark.parametrize("reads", [False, True])
def test_a_small_body_lets_the_connection_stay(bench: Any, reads: bool) -> None:
    """Also when the response is longer than what is kept, and nobody looks at the body."""

    def write(request: Request, relpath: str) -> None:
        request.response.write(b"x" * 20000)
        if reads:
            assert request.body() == b"hello"

    bench.handle(write)
    wire = bench.connect()
    for _ in range(2):
        wire.send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello")
        answer = wire.answer()
        assert len(answer.body) == 20000
        assert "connection" not in answer.fields
