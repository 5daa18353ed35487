"""WSGI applications mounted in the tree (PEP 3333)."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.validate import validator

import pytest
from gevent.event import Event

from smqrt.http.body import HttpLimits
from smqrt.http.tree import Directory
from smqrt.http.wsgi import WsgiDirectory
from tests.http.http_bench import Bench
from tests.support.waiting import wait_until

PLAIN = [("Content-Type", "text/plain")]


def mount(bench: Bench, application: Any, name: str | None = "app", **options: Any) -> WsgiDirectory:
    directory = WsgiDirectory(application, name, **options)
    bench.root.insert(directory)
    return directory


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answers with the value of the variable that the query names."""
    start_response("200 OK", PLAIN)
    return [repr(environ.get(environ["QUERY_STRING"])).encode()]


def test_application_variables(bench: Bench) -> None:
    outer = Directory("outer")
    bench.root.insert(outer)
    outer.insert(WsgiDirectory(validator(echo), "app"))
    wire = bench.connect()

    def told(name: str, path: str = "x/y", headers: str = "") -> Any:
        return eval(wire.ask(f"/outer/app/{path}?{name}", headers=headers).body)  # our own repr

    assert told("SCRIPT_NAME") == "/outer/app"
    assert told("PATH_INFO") == "/x/y"
    assert told("PATH_INFO", "") == "/"
    assert told("PATH_INFO", "%C3%A4%20b") == "/\xc3\xa4 b"  # bytes as latin-1
    assert told("REQUEST_METHOD") == "GET"
    assert told("SERVER_PROTOCOL") == "HTTP/1.1"
    assert told("wsgi.url_scheme") == "http"
    assert told("REMOTE_ADDR") == "127.0.0.1"
    assert told("SERVER_PORT") == str(bench.listener.address[1])
    assert told("HTTP_X_A", headers="X-A: 1\r\nX-A: 2\r\n") == "1,2"
    assert told("HTTP_PROXY", headers="Proxy: evil\r\n") is None
    assert told("CONTENT_TYPE", headers="Content-Type: a/b\r\n") == "a/b"
    assert told("HTTP_CONTENT_TYPE", headers="Content-Type: a/b\r\n") is None


def test_the_ways_to_read_a_body(bench: Bench) -> None:
    seen: list[Any] = []
    ways: dict[str, Callable[[Any], Any]] = {
        "/read": lambda body: body.read(),
        "/parts": lambda body: [body.read(3), body.read(100), body.read(1)],
        "/lines": lambda body: [body.readline(), body.readline(2), body.readlines()],
        "/iterate": lambda body: list(body),
        "/huge": lambda body: body.read(1 << 40),
    }

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        seen.append(ways[environ["PATH_INFO"]](environ["wsgi.input"]))
        start_response("204 No Content", [])
        return []

    mount(bench, application)
    wire = bench.connect()
    for path in ways:
        wire.send(f"POST /app{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nab\ncd\nef".encode())
        assert wire.answer().status == 204
    assert seen == [
        b"ab\ncd\nef",
        [b"ab\n", b"cd\nef", b""],
        [b"ab\n", b"cd", [b"\n", b"ef"]],
        [b"ab\n", b"cd\n", b"ef"],
        b"ab\ncd\nef",
    ]
    chunked = b"POST /app/read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert wire.send(chunked).answer().status == 204
    assert seen[-1] == b"abc"


def test_a_body_over_the_limit(bench: Bench) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        try:
            while environ["wsgi.input"].read(10):
                pass
        except Exception:  # as frameworks do
            start_response("500 Mine", PLAIN)
            return [b"mine"]
        start_response("200 OK", PLAIN)
        return [b"all"]

    mount(bench, application, body_bytes=20)
    announced = b"POST /app/ HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    assert bench.connect().send(announced % 20 + b"x" * 20).answer().body == b"all"
    assert bench.connect().send(announced % 21).answer().status == 413
    chunked = b"POST /app/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n15\r\n" + b"x" * 21
    assert bench.connect().send(chunked).answer().status == 413


def test_a_slow_body_is_408_despite_the_application(start: Callable[..., Bench]) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        try:
            environ["wsgi.input"].read()
        except Exception:
            start_response("500 Mine", PLAIN)
        return [b"mine"]

    bench = start(HttpLimits(body_idle_s=0.1))
    mount(bench, application)
    assert bench.connect().send(b"POST /app/ HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab").answer().status == 408


def test_the_head_waits_for_the_first_piece(bench: Bench) -> None:
    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", PLAIN)
        yield b""
        try:
            raise OSError
        except OSError:
            fields = [("X-B", "b"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
            start_response("503 Later", fields, sys.exc_info())
        yield b"sorry"

    mount(bench, application)
    answer = bench.connect().ask("/app/")
    assert (answer.status, answer.body, answer.fields["x-b"]) == (503, b"sorry", "b")
    assert answer.head.count(b"Set-Cookie") == 2
    assert "content-type" not in answer.fields


def test_pieces_leave_before_the_next_is_asked_for(bench: Bench) -> None:
    go_on = Event()
    closed: list[bool] = []

    class Pieces:
        def __iter__(self) -> Iterator[bytes]:
            yield b"one"
            assert go_on.wait(3)
            yield b"two"

        def close(self) -> None:
            closed.append(True)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Pieces:
        start_response("200 OK", PLAIN)
        return Pieces()

    mount(bench, application)
    wire = bench.connect().send(b"GET /app/ HTTP/1.1\r\nHost: x\r\n\r\n")
    while b"one" not in wire.data:
        assert wire.more()
    go_on.set()
    assert wire.answer().body == b"onetwo"
    assert closed == [True]


def test_lengths(bench: Bench) -> None:
    answers: dict[str, Any] = {
        "/one": lambda start: (start("200 OK", PLAIN), [b"x" * 20_000])[1],
        "/announced": lambda start: (start("200 OK", [("Content-Length", "4")]), iter([b"ab", b"cd", b"ef"]))[1],
        "/written": lambda start: (start("200 OK", PLAIN)(b"written"), [b"!"])[1],
        "/none": lambda start: (start("304 Not Modified", [("Content-Length", "7")]), [])[1],
        "/close": lambda start: (start("200 OK", [("Connection", "close"), ("Keep-Alive", "9")]), [b"x"])[1],
    }
    mount(bench, lambda environ, start: answers[environ["PATH_INFO"]](start))
    wire = bench.connect()
    one = wire.ask("/app/one")
    assert one.fields["content-length"] == "20000"
    assert len(one.body) == 20_000
    assert wire.ask("/app/one", "HEAD").fields["content-length"] == "20000"
    assert wire.ask("/app/announced").body == b"abcd"
    assert wire.ask("/app/written").body == b"written!"
    assert wire.ask("/app/none").status == 304
    last = wire.ask("/app/close")
    assert "keep-alive" not in last.fields
    assert wire.ended()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda start: [b"without a start"],
        lambda start: (start("200 OK", []), start("200 OK", []), [b""])[2],
        lambda start: (start("OK", []), [b""])[1],
        lambda start: (start("100 Continue", []), [b""])[1],
        lambda start: (start("200 OK", [("X", "a\r\nY: b")]), [b""])[1],
        lambda start: 1 / 0,
    ],
)
def test_faults_of_an_application_are_answered_with_500(bench: Bench, wrong: Any) -> None:
    mount(bench, lambda environ, start: wrong(start))
    wire = bench.connect()
    assert wire.ask("/app/").status == 500
    assert wire.ask("/app/").status == 500  # the connection lives on


def test_an_iterable_is_closed_when_the_client_is_gone(bench: Bench) -> None:
    closed: list[bool] = []
    began = Event()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
        start_response("200 OK", PLAIN)
        try:
            while True:
                began.set()
                yield b"x" * 65536
        finally:
            closed.append(True)

    mount(bench, application)
    wire = bench.connect().send(b"GET /app/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert began.wait(3)
    wire.close()
    wait_until(lambda: closed == [True])


def test_a_file(bench: Bench) -> None:
    file = io.BytesIO(b"x" * 200_000)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", PLAIN)
        return environ["wsgi.file_wrapper"](file, 4096)

    mount(bench, application, None)
    assert len(bench.connect().ask("/").body) == 200_000
    assert file.closed
