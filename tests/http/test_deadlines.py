"""Nobody holds a connection by being slow, and being slow costs the others nothing (help: limits)."""

from __future__ import annotations

from time import monotonic, process_time
from typing import Any

import gevent

from smqrt.http.body import HttpLimits
from smqrt.http.message import Request
from smqrt.transport import tls
from tests.support.waiting import wait_until

QUICK = HttpLimits(first_byte_s=0.1, header_s=0.2, body_idle_s=0.1, keep_alive_s=0.15, send_idle_s=0.1)
HEAD = b"GET / HTTP/1.1\r\nHost: test\r\n"


def lasts(wire: Any) -> float:
    begin = monotonic()
    while wire.more():
        pass
    return monotonic() - begin


def test_the_usual_limits() -> None:
    limits = HttpLimits()
    assert (limits.first_byte_s, limits.header_s, limits.body_idle_s, limits.keep_alive_s) == (5, 10, 10, 60)
    assert limits.head_bytes == 16384


def test_first_byte(start: Any) -> None:
    bench = start(QUICK)
    assert 0.05 < lasts(bench.connect()) < 3
    assert len(bench.server) == 0


def test_whole_head(start: Any) -> None:
    """A byte now and then does not move the deadline."""
    bench = start(QUICK)
    wire = bench.connect()
    begin = monotonic()

    def trickle() -> None:
        for byte in HEAD * 100:
            wire.send(bytes((byte,)))
            gevent.sleep(0.02)

    sender = gevent.spawn(trickle)
    assert wire.answer().status == 408
    assert 0.15 < monotonic() - begin < 5
    sender.kill()


def test_body(start: Any) -> None:
    bench = start(QUICK)
    bench.handle(lambda request, relpath: request.response.write(request.body()))
    wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\nabc")
    begin = monotonic()
    assert wire.answer().status == 408
    assert 0.05 < monotonic() - begin < 4
    assert wire.ended()


def test_a_body_that_keeps_coming_is_fine(start: Any) -> None:
    bench = start(HttpLimits(body_idle_s=0.4))
    bench.handle(lambda request, relpath: request.response.write(request.body()))
    wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 10\r\n\r\n")
    for _ in range(10):
        gevent.sleep(0.05)
        wire.send(b"x")
    assert wire.answer().body == b"x" * 10


def test_keep_alive(start: Any) -> None:
    bench = start(QUICK)
    bench.handle(lambda request, relpath: None)
    wire = bench.connect()
    wire.ask("/")
    gevent.sleep(0.08)
    wire.ask("/")
    assert 0.1 < lasts(wire) < 0.4


def test_a_handler_may_take_its_time(start: Any) -> None:
    bench = start(QUICK)
    bench.handle(lambda request, relpath: gevent.sleep(0.5))
    assert bench.connect().ask("/").status == 200


def test_a_client_that_does_not_read_is_closed(start: Any) -> None:
    bench = start(QUICK)
    ended: list[str] = []

    def handler(request: Request, relpath: str) -> None:
        try:
            request.response.end(bytes(50 << 20))
        finally:
            ended.append("yes")

    bench.handle(handler)
    bench.connect().send(HEAD + b"\r\n")
    wait_until(lambda: ended and not len(bench.server))
    assert ended == ["yes"]


def test_a_refused_client_that_stays_is_closed(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("smqrt.transport.tls.LINGER_S", 0.1)
    bench = start(QUICK)
    wire = bench.connect().send(b"nonsense\r\n\r\n")
    assert wire.answer().status == 400
    assert not bench.server
    wait_until(lambda: not tls.under_way())


def test_two_hundred_slow_ones_cost_the_others_nothing(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.write(b"quick"))
    slow = [bench.connect() for _ in range(200)]
    for wire in slow[::2]:
        wire.send(HEAD)
    wait_until(lambda: len(bench.server) == 200)
    wire = bench.connect()
    begin, begin_cpu = monotonic(), process_time()
    for _ in range(200):
        assert wire.ask("/").body == b"quick"
    assert process_time() - begin_cpu < 1
    assert monotonic() - begin < 4, "the shortest deadline of a slow one is 5 s"
    for wire in slow:
        wire.close()
    wait_until(lambda: len(bench.server) == 1)


def test_a_body_that_drips(start: Any) -> None:
    """Every pause is short, and yet it is over in the end: a body has a deadline that grows with what came."""
    bench = start(HttpLimits(body_idle_s=1.0, body_grace_s=0.3, body_rate_bytes_s=1000.0))
    bench.handle(lambda request, relpath: request.response.write(request.body()))
    for head in (b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\n" + head)
        begin = monotonic()

        def drip(wire: Any = wire) -> None:
            while True:
                wire.send(b"1\r\nx\r\n")
                gevent.sleep(0.02)

        sender = gevent.spawn(drip)
        assert wire.answer().status == 408
        assert 0.25 < monotonic() - begin < 2.0
        sender.kill()


def test_a_body_at_the_least_speed(start: Any) -> None:
    """Who sends as fast as is asked for may take any time."""
    bench = start(HttpLimits(body_idle_s=1.0, body_grace_s=0.3, body_rate_bytes_s=1000.0))
    bench.handle(lambda request, relpath: request.response.write(b"%d" % len(request.body())))
    wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 1500\r\n\r\n")
    for _ in range(15):
        wire.send(b"x" * 100)
        gevent.sleep(0.04)
    assert wire.answer().body == b"1500"


def test_a_slow_page_costs_the_client_nothing(start: Any) -> None:
    """Only what the server waits for the client counts."""
    bench = start(HttpLimits(body_idle_s=1.0, body_grace_s=0.2, body_rate_bytes_s=1000.0))

    def read_slowly(request: Request, relpath: str) -> None:
        pieces = request.chunks()
        next(pieces)
        gevent.sleep(0.4)
        request.response.write(b"%d" % sum(map(len, pieces)))

    bench.handle(read_slowly)
    wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 200\r\n\r\n" + b"x" * 100)
    gevent.sleep(0.3)
    wire.send(b"x" * 100)
    assert wire.answer().body == b"100"
