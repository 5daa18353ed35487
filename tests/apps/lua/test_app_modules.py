"""The application in examples/modules: serpent, JSONS, EventEmitter and tokens in one application, from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gevent import socket

from smqrt.wire.websocket import BINARY, TEXT
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "modules"


@pytest.fixture
def app(server: AppServer) -> AppServer:
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    return server


def join(app: AppServer, name: str) -> Client:
    return Client(app.port, f"/ws.lsp?token={app.ask(f'/token.lsp?name={name}').text}")


def got(client: Client) -> Any:
    message = client.receive()
    assert message is not None
    assert message.is_text
    return json.loads(message.data)


def test_a_room_that_speaks_json(app: AppServer) -> None:
    ann, bob = join(app, "Ann"), join(app, "Bob")
    ann.send(TEXT, b'{"text": "h\xc3\xa4llo", "list": [1, null]}')
    assert got(ann) == got(bob) == {"text": "hällo", "list": [1, None], "from": "Ann"}
    bob.send(TEXT, b'{"n": 1}{"n"', fin=False)  # a message in two frames with two documents
    bob.send(0, b": 2}")
    assert [got(ann)["n"], got(ann)["n"]] == [1, 2]
    assert [got(bob)["n"], got(bob)["n"]] == [1, 2]
    bob.send(BINARY, b"\x00\x01")
    bob.send(TEXT, b'{"n": 3}')
    assert got(ann) == got(bob) == {"n": 3, "from": "Bob", "binary": "\x00\x01"}
    ann.send(TEXT, b'{"wait": 5}')
    assert got(ann) == {"nothing": True, "word": "timeout"}
    ann.send(TEXT, b'{"large": true}')
    assert got(ann) == {"ok": False, "word": "toomuchdata"}
    ann.sock.close()
    bob.send(TEXT, b"not JSON")
    wait_until(lambda: '"Bob left: parse"' in app.ask("/show.lsp").text)
    shown = app.ask("/show.lsp").text
    assert shown.startswith("{\n  log = {\n    "), shown
    assert '"Ann joined",\n    "Bob joined"' in shown
    assert '"Ann left: socketclosed"' in shown
    assert '"nil socketclosed false"' in shown
    assert "port = true" in shown


def test_a_document_that_is_too_large(app: AppServer) -> None:
    for frames in ([b'{"a": "' + b"x" * 1000 + b'"}'], [b'{"a": "', b"x" * 600, b"x" * 600]):
        client = join(app, "Eve")
        for at, data in enumerate(frames):
            client.send(0 if at else TEXT, data, fin=at == len(frames) - 1)
        assert client.receive() is None
    wait_until(lambda: app.ask("/show.lsp").text.count('"Eve left: toomuchdata"') == 2)


def test_a_stream_over_tcp(app: AppServer) -> None:
    with socket.create_connection(("127.0.0.1", int(app.ask("/port.lsp").text)), timeout=5) as sock:
        for piece in (b'{"a"', b':1}\n[2] {"b', b'":[{}]}'):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while more := sock.recv(65536):
            data += more
    assert data.count(b"count") == 2
    assert data.index(b'"a":1') < data.index(b"[2]") < data.index(b'"b":[{}]')


def test_a_forged_token(app: AppServer) -> None:
    token = app.ask("/token.lsp?name=Ann").text
    assert app.ask(f"/ws.lsp?token={token[:-1]}").status == 403
