"""HTTP requests, the connection taken away from HTTP, and uploads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import Event

from smqrt.http.body import Body, BodyMemory, HttpLimits
from smqrt.http.disk import DiskIo
from smqrt.http.headers import BadRequest, HttpError
from smqrt.http.message import Detached, Request, UploadError, receive
from tests.http.http_bench import HOST, echo, get
from tests.support.waiting import wait_until


def test_params(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.write(repr(request.params()).encode()))
    wire = bench.connect()
    wire.send(
        b"POST /?a=1&b&a=%C3%A4+x HTTP/1.1\r\n"
        + HOST
        + b"Content-Type: application/x-www-form-urlencoded; charset=x\r\n"
        b"Content-Length: 9\r\n\r\nc=2&a=%26"
    )
    assert eval(wire.answer().body) == [("a", "1"), ("b", ""), ("a", "ä x"), ("c", "2"), ("a", "&")]
    assert wire.ask("/?" + "&".join(["a=1"] * 2000)).status == 413


def test_request_attributes(bench: Any) -> None:
    seen: list[Request] = []
    bench.handle(lambda request, relpath: seen.append(request), name="dir")
    wire = bench.connect()
    wire.ask("/dir/%C3%A4/b%20c?x=%41&y", headers="X-Case: one\r\nx-case: two\r\n")
    (request,) = seen
    assert (request.method, request.path, request.query, request.version) == ("GET", "/dir/ä/b c", "x=%41&y", "1.1")
    assert request.target == "/dir/%C3%A4/b%20c?x=%41&y"
    assert request.headers == [("Host", "test"), ("X-Case", "one"), ("x-case", "two")]
    assert request.get("X-CASE") == "one,two"
    assert request.get("none", "default") == "default"
    assert request.peer == wire.sock.getsockname()
    assert request.local == bench.listener.address
    assert request.secure is False


def take_over(request: Request, relpath: str) -> None:
    """Answer every piece of data with its length, without HTTP."""
    detached = request.detach()
    assert isinstance(detached, Detached)
    detached.transport.send(b"[" + detached.data + b"]")

    def readable() -> None:
        data = bytearray(100)
        size = detached.transport.recv_into(data)
        if size:
            detached.transport.send(b"<" + bytes(data[:size]) + b">")
        else:
            detached.watcher.stop()
            detached.transport.close()

    detached.watcher.start(readable)
    request.response.write(b"the response is dead")


def read_until(wire: Any, end: bytes) -> bytes:
    while not wire.data.endswith(end):
        assert wire.more()
    data, wire.data = wire.data, b""
    return data


@pytest.mark.parametrize(
    "method", [b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 0\r\n", b"GET / HTTP/1.0\r\n"]
)
@pytest.mark.parametrize("behind", [b"", b"\x00\x0b\x01SMQ bytes\r\n\r\n"])
def test_detach_keeps_the_bytes_behind_the_head(bench: Any, method: bytes, behind: bytes) -> None:
    bench.handle(take_over)
    wire = bench.connect().send(method + HOST + b"\r\n" + behind)
    assert read_until(wire, b"]") == b"[" + behind + b"]"
    assert len(bench.server) == 0
    wire.send(b"more")
    assert read_until(wire, b">") == b"<more>"
    wire.close()


def test_detach_of_a_handler_that_blocked(bench: Any) -> None:
    has_ended = Event()

    def handler(request: Request, relpath: str) -> None:
        gevent.sleep(0.01)
        take_over(request, relpath)
        gevent.sleep(0.01)
        has_ended.set()

    bench.handle(handler)
    wire = bench.connect().send(get("/", b"SimpleMQ: x\r\n") + b"abc")
    assert read_until(wire, b"]") == b"[abc]"
    assert has_ended.wait(5)
    wire.send(b"more")
    assert read_until(wire, b">") == b"<more>"


def test_detach_behind_other_requests(bench: Any) -> None:
    bench.handle(take_over, name="take")
    bench.handle(echo)
    wire = bench.connect().send(get("/a") + get("/take/") + b"abc")
    assert wire.answer().body == b"a|"
    assert read_until(wire, b"]") == b"[abc]"


def test_detach_of_a_request_that_arrives_byte_by_byte(bench: Any) -> None:
    bench.handle(take_over)
    wire = bench.connect()
    for byte in get():
        wire.send(bytes((byte,)))
        gevent.sleep(0)
    assert read_until(wire, b"]") == b"[]"


def test_detach_comes_first_and_once(bench: Any) -> None:
    errors: list[str] = []

    def handler(request: Request, relpath: str) -> None:
        request.response.flush()
        try:
            request.detach()
        except RuntimeError as error:
            errors.append(str(error))

    bench.handle(handler)
    wire = bench.connect()
    assert wire.ask("/").status == 200
    assert re.search("begun", errors[0])
    assert wire.ask("/").status == 200


def test_an_error_behind_detach_leaves_the_connection_alone(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    def handler(request: Request, relpath: str) -> None:
        take_over(request, relpath)
        raise LookupError("behind detach")

    bench.handle(handler)
    wire = bench.connect().send(get())
    assert read_until(wire, b"]") == b"[]"
    wire.send(b"more")
    assert read_until(wire, b">") == b"<more>"
    assert "behind detach" in caplog.text


def test_an_ended_response_has_nothing_to_detach(bench: Any) -> None:
    errors: list[str] = []

    def handler(request: Request, relpath: str) -> None:
        request.response.end(b"done")
        try:
            request.detach(within=True)
        except RuntimeError as error:
            errors.append(str(error))

    bench.handle(handler)
    assert bench.connect().ask("/").body == b"done"
    assert errors == ["the response has ended: there is nothing to detach"]


def test_a_request_that_has_ended_keeps_no_values(bench: Any) -> None:
    seen: list[Request] = []

    def handler(request: Request, relpath: str) -> None:
        request.env["value"] = 1
        request.response.write(request.body())
        seen.append(request)

    bench.handle(handler)
    wire = bench.connect().send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc")
    assert wire.answer().body == b"abc"
    wait_until(lambda: not seen[0].env)
    assert not seen[0].is_read
    with pytest.raises(RuntimeError, match="the request has ended"):
        seen[0].body()


def test_without_a_host_the_authority_is_the_connections(bench: Any) -> None:
    bench.handle(lambda request, relpath: request.response.write(request.authority.encode()))
    assert bench.connect().send(b"GET / HTTP/1.0\r\n\r\n").answer().body == b"127.0.0.1:%d" % bench.listener.address[1]
    assert bench.connect().ask("/").body == b"test"


def test_a_proxy_may_replace_client_scheme_and_host(bench: Any) -> None:
    seen: list[object] = []

    def handler(request: Request, relpath: str) -> None:
        own = request.peer
        request.apply_claim(None)
        seen.append((request.peer == own, request.secure, request.get("host")))
        request.apply_claim(("192.0.2.1", 80), secure=True, host="a.example", prefix="/app")
        seen.append((request.peer, request.secure, request.response.secure, request.get("host"), request.prefix))
        with pytest.raises(BadRequest, match="malformed Host"):
            request.apply_claim(None, host="a/b")

    bench.handle(handler)
    assert bench.connect().ask("/").status == 200
    assert seen == [(True, False, "test"), (("192.0.2.1", 80), True, True, "a.example", "/app")]


def test_a_subprotocol_must_be_one_the_client_offered(bench: Any) -> None:
    lines: list[bytes] = []

    def handler(request: Request, relpath: str) -> None:
        request.response.headers.add("Set-Cookie", "a=b")
        lines.append(request.upgrade_lines())
        lines.append(request.upgrade_lines("two"))
        request.upgrade_lines("three")

    bench.handle(handler)
    answer = bench.connect().ask("/", headers="Sec-WebSocket-Protocol: one, two\r\n")
    assert answer.status == 400
    assert b"offers one, two." in answer.body
    assert lines == [b"Set-Cookie: a=b\r\n", b"Set-Cookie: a=b\r\nSec-WebSocket-Protocol: two\r\n"]


class Posted:
    """A request with a body, for uploads."""

    def __init__(self, *pieces: bytes | Exception, content_type: str = "") -> None:
        self.pieces, self.content_type = pieces, content_type

    def get(self, name: str) -> str | None:
        return self.content_type if name == "content-type" else None

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def reader(self) -> Body:
        return Body(None, 0, False, HttpLimits(), BodyMemory(100))  # type: ignore[arg-type]


class Events:
    """Callbacks of an upload that takes so many pieces; None for all of them."""

    def __init__(self, accepts: bool = True, pieces: int | None = None) -> None:
        self.accepts, self.left = accepts, pieces
        self.names: list[str] = []

    def begin(self, name: str) -> bool:
        self.names.append(name)
        return self.accepts

    def wants_more(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left is None or self.left >= 0

    def end(self) -> None:
        self.names.append("end")


FORM = "multipart/form-data; boundary=XX"
FIELD = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n'


@pytest.mark.parametrize(
    ("name", "posted", "word"),
    [
        ("folder/", Posted(b"x"), "invalidname"),
        ("none/kept", Posted(b"x"), "notfound"),
        ("kept", Posted(b"x", BadRequest("malformed chunk size")), "socketreadfailed"),
        ("kept", Posted(b"x", HttpError(408, "too slow")), "timeout"),
        ("kept", Posted(b"x", HttpError(503, "no memory")), "mem"),
        ("kept", Posted(b"x", OSError(28, "full")), "nospace"),
        ("kept", Posted(b"--XX--", content_type=FORM), "failed"),
        ("kept", Posted(FIELD + b"v" * 200, content_type=FORM), "mem"),
    ],
)  # fmt: skip
def test_a_failed_upload_has_its_word(tmp_path: Path, name: str, posted: Any, word: str) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    with pytest.raises(UploadError) as failure:
        receive(posted, DiskIo(tmp_path), name, Events())
    assert failure.value.word == word
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


@pytest.mark.parametrize("events", [Events(accepts=False), Events(pieces=1)], ids=["at once", "in the middle"])
def test_an_upload_that_is_stopped_stores_nothing(tmp_path: Path, events: Events) -> None:
    posted: Any = Posted(b"x", b"y")
    receive(posted, DiskIo(tmp_path), "new", events)
    assert events.names == ["new"]
    assert list(tmp_path.iterdir()) == []
