"""`environ["wsgi.websocket"]` of mounted WSGI applications: what is written for gevent-websocket runs as it is."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from flask import Flask, abort, request
from gevent.event import Event
from geventwebsocket import Resource, WebSocketApplication, WebSocketError
from werkzeug.exceptions import NotFound
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.routing import Map, Rule

from smqrt.http.websocket import MAX_MESSAGE_BYTES, WebSocketClosedError
from smqrt.http.wsgi import WsgiDirectory
from smqrt.wire import websocket
from smqrt.wire.websocket import BINARY, CLOSE, PING, PONG, TEXT
from tests.apps.lua.websocket_client import Client
from tests.http.http_bench import Bench
from tests.support.waiting import let_others_run, wait_until

Start = Callable[..., Callable[[bytes], object]]
PLAIN = [("Content-Type", "text/plain")]
UPGRADE = "".join(f"{name}: {value}\r\n" for name, value in websocket.request_headers(websocket.new_key()))


def mount(bench: Bench, application: Any, name: str = "app") -> WsgiDirectory:
    directory = WsgiDirectory(application, name)
    bench.root.insert(directory)
    return directory


def open_client(bench: Bench, path: str = "/app/", headers: str = "") -> Client:
    client = Client(bench.listener.address[1], path, headers)
    bench.wires.append(client.sock)  # closed with the bench
    return client


def kept(values: list[Any], application: Callable[[Any], object]) -> Callable[[dict[str, Any], Start], list[bytes]]:
    """A WSGI application that runs `application(websocket)` and keeps what it gives or raises."""

    def run(environ: dict[str, Any], start_response: Start) -> list[bytes]:
        try:
            values.append(application(environ["wsgi.websocket"]))
        except Exception as error:
            values.append(error)
            raise
        return []

    return run


def echo(sock: Any) -> None:
    while (message := sock.receive()) is not None:
        sock.send(message)


# ---- what was written for gevent-websocket


class Chat(WebSocketApplication):  # type: ignore[misc]  # it has no types
    """As in the documentation of gevent-websocket: every message to every client."""

    log: list[Any] = []

    def on_open(self) -> None:
        self.log.append(("open", self.ws.path, len(self.ws.handler.server.clients)))
        assert self.ws.handler.active_client.ws is self.ws

    def on_message(self, message: str | None) -> None:
        if message is None:
            return
        self.ws.handler.active_client.nickname = json.loads(message)["nickname"]
        for client in self.ws.handler.server.clients.values():
            client.ws.send(json.dumps({"from": client.nickname, "text": message}))

    def on_close(self, reason: object) -> None:
        self.log.append(("close", reason))


def page(environ: dict[str, Any], start_response: Start) -> list[bytes]:
    start_response("200 OK", PLAIN)
    return [b"a page"]


def test_resource_and_websocket_application(bench: Bench) -> None:
    Chat.log = []
    directory = mount(bench, Resource([("^/chat", Chat), ("^/", page)]))
    one = open_client(bench, "/app/chat")
    one.send(TEXT, b'{"nickname": "one"}')
    assert json.loads((one.receive() or [b""])[0])["from"] == "one"
    two = open_client(bench, "/app/chat")
    two.send(TEXT, b'{"nickname": "two"}')
    for client, name in ((one, "one"), (two, "two")):
        assert json.loads((client.receive() or [b""])[0])["from"] == name
    one.send(CLOSE, struct.pack(">H", 1001))
    assert one.closed() == 1001
    wait_until(lambda: ("close", None) in Chat.log, "on_close")
    assert Chat.log[:2] == [("open", "/chat", 1), ("open", "/chat", 2)]
    assert [client.nickname for client in directory.websockets.clients.values()] == ["two"]
    two.sock.close()
    wait_until(lambda: not directory.websockets.clients, "the end of the other")
    assert bench.connect().ask("/app/").body == b"a page"


class Sockets:
    """The shape of flask-sockets: a middleware with routes of its own."""

    def __init__(self, app: Flask) -> None:
        self.url_map, self._app, self._below = Map(), app, app.wsgi_app
        app.wsgi_app = self  # type: ignore[method-assign]

    def route(self, rule: str) -> Callable[[Callable[..., object]], None]:
        return lambda function: self.url_map.add(Rule(rule, endpoint=function, websocket=True))

    def __call__(self, environ: dict[str, Any], start_response: Start) -> Any:
        try:
            function, values = self.url_map.bind_to_environ(environ).match()
            sock = environ["wsgi.websocket"]
            with self._app.app_context(), self._app.request_context(environ):
                function(sock, **values)
                return []
        except (NotFound, KeyError):
            return self._below(environ, start_response)


def test_routes_as_flask_sockets_has_them(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("shop")
    sockets = Sockets(app)

    @sockets.route("/echo/<int:number>")
    def answer(sock: Any, number: int) -> None:
        while not sock.closed:
            message = sock.receive()
            sock.send(message if message is None else f"{number} {request.args['q']} {message}")

    @app.route("/")
    def index() -> str:
        return "a page"

    mount(bench, app)
    client = open_client(bench, "/app/echo/7?q=x")
    client.send(TEXT, "grün".encode())
    assert client.receive() == ("7 x grün".encode(), True, 0, 0)
    assert bench.connect().ask("/app/").body == b"a page"
    assert bench.connect().ask("/app/nothing", headers=UPGRADE).status == 404
    client.send(CLOSE, struct.pack(">H", 1000))
    assert client.closed() == 1000
    let_others_run()
    assert not caplog.records


def test_a_view_of_flask(bench: Bench) -> None:
    app = Flask("shop")

    @app.route("/ws", websocket=True)
    def talk() -> str:
        if "no" in request.args:
            abort(403)
        echo(request.environ["wsgi.websocket"])
        return "what nobody sees"

    mount(bench, DispatcherMiddleware(page, {"/flask": app}))
    client = open_client(bench, "/app/flask/ws")
    client.send(BINARY, b"\0\xff")
    assert client.receive() == (b"\0\xff", False, 0, 0)
    assert bench.connect().ask("/app/flask/ws?no", headers=UPGRADE).status == 403
    client.send(CLOSE, struct.pack(">H", 1000))
    assert client.closed() == 1000


# ---- the object


def test_attributes_of_the_request(bench: Bench) -> None:
    told: list[Any] = []

    def look(sock: Any) -> object:
        before = sock.closed
        sock.send("x")
        names = ("origin", "path", "version", "protocol", "closed")
        return [before, *(getattr(sock, name) for name in names), sock.handler.client_address[0]]

    mount(bench, kept(told, look))
    client = open_client(bench, "/app/a/b", "Origin: http://x\r\nSec-WebSocket-Protocol: a, b\r\n")
    assert client.receive() == (b"x", True, 0, 0)
    assert client.closed() == 1000
    assert told == [[False, "http://x", "/a/b", "13", "a, b", False, "127.0.0.1"]]


SENT: dict[str, tuple[Callable[[Any], object], tuple[bytes, bool]]] = {
    "text": (lambda sock: sock.send("grün"), ("grün".encode(), True)),
    "bytes": (lambda sock: sock.send(b"\xff"), (b"\xff", False)),
    "bytearray": (lambda sock: sock.send(bytearray(b"\xff")), (b"\xff", False)),
    "text as binary": (lambda sock: sock.send("grün", True), ("grün".encode(), False)),
    "bytes as text": (lambda sock: sock.send(b"abc", binary=False), (b"abc", True)),
    "a number as text": (lambda sock: sock.send(7, False), (b"7", True)),
    "a frame": (lambda sock: sock.send_frame("abc", sock.OPCODE_TEXT), (b"abc", True)),
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent(bench: Bench, name: str) -> None:
    send, expected = SENT[name]
    mount(bench, kept([], send))
    client = open_client(bench)
    message = client.receive()
    assert message is not None
    assert message[:2] == expected
    assert client.closed() == 1000


def test_what_is_received(bench: Bench) -> None:
    got: list[Any] = []
    mount(bench, kept([], lambda sock: got.extend([sock.receive() for _ in range(3)])))
    client = open_client(bench)
    client.send(TEXT, "grün".encode())
    client.send(BINARY, b"\0\xff")
    client.send(TEXT, b"")
    assert client.closed() == 1000
    assert got == ["grün", bytearray(b"\0\xff"), ""]
    assert [type(one) for one in got] == [str, bytearray, str]


def test_pings(bench: Bench) -> None:
    mount(bench, kept([], lambda sock: (sock.send_frame(b"still there", sock.OPCODE_PING), echo(sock))))
    client = open_client(bench)
    client.send(PING, b"hello")
    client.send(TEXT, b"x")
    assert client.receive() == (b"x", True, 0, 0)
    pong, _ = websocket.parse_client_frame(client.codec.take_replies(), 1000)
    assert pong == (True, PONG, b"still there")


WRONG: dict[str, Callable[[Any], object]] = {
    "nothing": lambda sock: sock.send(None),
    "a number": lambda sock: sock.send(5),
    "an opcode": lambda sock: sock.send_frame(b"", 5),
    "a ping of 126 bytes": lambda sock: sock.send_frame(bytes(126), sock.OPCODE_PING),
    "bytes that are not text": lambda sock: sock.send(b"\xff", binary=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_may_not_be_sent(bench: Bench, name: str) -> None:
    told: list[Any] = []
    mount(bench, kept(told, WRONG[name]))
    assert open_client(bench).closed() == 1011
    assert str(told[0]).startswith(("message: ", "opcode: "))


def test_close(bench: Bench) -> None:
    told: list[Any] = []

    def end(sock: Any) -> object:
        sock.close(4001, "good-bye")
        sock.close()
        return sock.closed

    mount(bench, kept(told, end))
    assert open_client(bench).closed() == 4001
    assert told == [True]


@pytest.mark.parametrize("end", ["close", "eof", "violation"])
def test_the_client_ends(bench: Bench, caplog: pytest.LogCaptureFixture, end: str) -> None:
    """None once, the error of gevent-websocket then; an application that does not catch it is nothing to log."""
    told: list[Any] = []
    mount(bench, kept(told, lambda sock: (told.append(sock.receive()), told.append(sock.closed), sock.receive())))
    client = open_client(bench) if end != "violation" else None
    if client is None:
        client = open_client(bench)
        client.sock.sendall(b"\x8f\x00")
    elif end == "close":
        client.send(CLOSE, struct.pack(">H", 1000))
    else:
        client.sock.close()
    wait_until(lambda: len(told) == 3, "the end")
    assert told[:2] == [None, True]
    assert type(told[2]) is WebSocketError
    let_others_run()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_send_to_a_client_that_is_gone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def send(sock: Any) -> None:
        while True:
            sock.send(b"x" * 60_000)

    mount(bench, kept(told, send))
    open_client(bench).sock.close()
    wait_until(lambda: told, "the error")
    assert type(told[0]) is WebSocketError
    let_others_run()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_error_without_gevent_websocket(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "geventwebsocket.exceptions")
    told: list[Any] = []
    mount(bench, kept(told, lambda sock: (sock.close(), sock.send("x"))))
    assert open_client(bench).closed() == 1000
    wait_until(lambda: told, "the error")
    assert type(told[0]) is WebSocketClosedError


def test_a_message_over_the_limit_ends_it(bench: Bench) -> None:
    told: list[Any] = []
    mount(bench, kept(told, lambda sock: sock.receive()))
    client = open_client(bench)
    client.sock.sendall(b"\x82\xff" + (MAX_MESSAGE_BYTES + 1).to_bytes(8, "big") + b"mask")
    assert client.closed() == 1009
    assert told == [None]


# ---- what else an application may do with such a request


def test_plain_requests_have_none(bench: Bench) -> None:
    def application(environ: dict[str, Any], start_response: Start) -> list[bytes]:
        start_response("200 OK", PLAIN)
        return [str("wsgi.websocket" in environ).encode()]

    mount(bench, application)
    wire = bench.connect()
    assert wire.ask("/app/").body == b"False"
    assert wire.ask("/app/", headers=UPGRADE.replace("Version: 13", "Version: 8")).body == b"False"
    assert wire.ask("/app/", "POST", UPGRADE).body == b"False"
    assert wire.ask("/app/", headers=UPGRADE).body == b"True"  # and the connection goes on
    assert wire.ask("/app/").body == b"False"


def test_an_answer_before_it_is_used(bench: Bench) -> None:
    told: list[Any] = []

    def application(environ: dict[str, Any], start_response: Start) -> list[bytes]:
        start_response("404 Not Found", PLAIN)(b"none")
        kept(told, lambda sock: (told.append(sock.closed), sock.receive()))(environ, start_response)
        return []

    mount(bench, application)
    assert bench.connect().ask("/app/", headers=UPGRADE).status == 404
    wait_until(lambda: len(told) == 2, "the error")
    assert told[0] is True
    assert type(told[1]) is WebSocketError


def test_an_application_that_never_uses_it(bench: Bench) -> None:
    mount(bench, kept([], lambda sock: None))
    assert open_client(bench).closed() == 1000


def test_an_application_that_fails(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    mount(bench, kept([], lambda sock: 1 / 0))
    assert bench.connect().ask("/app/", headers=UPGRADE).status == 500
    mount(bench, kept([], lambda sock: 1 / len(sock.receive())), "other")
    client = open_client(bench, "/other/")
    client.send(TEXT, b"")
    assert client.closed() == 1011
    wait_until(lambda: caplog.text.count("ZeroDivisionError") >= 2, "both in the log")


def test_a_generator(bench: Bench) -> None:
    def application(environ: dict[str, Any], start_response: Start) -> Iterator[bytes]:
        echo(environ["wsgi.websocket"])
        yield b"what nobody sees"
        ended.set()

    ended = Event()
    mount(bench, application)
    client = open_client(bench)
    client.send(TEXT, b"x")
    assert client.receive() == (b"x", True, 0, 0)
    client.send(CLOSE, struct.pack(">H", 1000))
    assert client.closed() == 1000
    assert ended.wait(2)


def test_it_ends_when_the_application_returns(bench: Bench) -> None:
    kept_ones: list[Any] = []
    directory = mount(bench, kept([], lambda sock: (kept_ones.append(sock), sock.send("x"))))
    client = open_client(bench)
    assert client.receive() == (b"x", True, 0, 0)
    assert client.closed() == 1000
    wait_until(lambda: not directory.websockets.clients, "the end")
    with pytest.raises(WebSocketError, match="closed"):
        kept_ones[0].send("y")


def test_another_greenlet_sends(bench: Bench) -> None:
    mount(bench, kept([], lambda sock: (gevent.spawn(sock.send, "from elsewhere"), sock.receive())))
    client = open_client(bench)
    assert client.receive() == (b"from elsewhere", True, 0, 0)
    client.send(TEXT, b"end")
    assert client.closed() == 1000


def test_pages_of_other_hosts(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    mount(bench, kept(told, echo))
    answer = bench.connect().ask("/app/", headers=UPGRADE + "Origin: http://evil.example\r\n")
    assert answer.status == 403
    assert type(told[0]) is WebSocketError
    assert "evil.example" in caplog.text
    mount(bench, kept(told, lambda sock: None), "unused")
    assert bench.connect().ask("/unused/", headers=UPGRADE + "Origin: http://evil.example\r\n").status == 403
    assert "Traceback" not in caplog.text


class Protocols(Resource):  # type: ignore[misc]
    """Says which sub-protocol it speaks, as gevent-websocket asks."""

    def app_protocol(self, path: str) -> str:
        return {"/chat": "chat.v2"}.get(path, "")


@pytest.mark.parametrize(
    ("path", "offer", "chosen"),
    [("/chat", "chat.v1, chat.v2", True), ("/chat", "chat.v22", False), ("/chat", "", False), ("/x", "chat.v2", False)],
)
def test_sub_protocols(bench: Bench, path: str, offer: str, chosen: bool) -> None:
    mount(bench, Protocols([("^/", WebSocketApplication)]))
    field = f"Sec-WebSocket-Protocol: {offer}\r\n" if offer else ""
    wire = bench.connect()
    wire.send(f"GET /app{path} HTTP/1.1\r\nHost: x\r\n{UPGRADE}{field}\r\n".encode())
    while b"\r\n\r\n" not in wire.data:
        assert wire.more()
    assert wire.data.startswith(b"HTTP/1.1 101 ")
    assert (b"\r\nSec-WebSocket-Protocol: chat.v2\r\n" in wire.data) is chosen
