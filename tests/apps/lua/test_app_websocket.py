"""The application in examples/websocket: echo and clock, as cosockets and as blocking code; a client in Lua."""

from __future__ import annotations

import time
from pathlib import Path

import gevent
import pytest

from smqrt.wire.websocket import BINARY, TEXT
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.clock import undisturbed_s

APP = Path(__file__).parent.parent / "examples" / "websocket"


@pytest.fixture
def app(server: AppServer) -> AppServer:
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    return server


both = pytest.mark.parametrize("way", ["", "-blocking"])


@both
def test_echo(app: AppServer, way: str) -> None:
    clients = [Client(app.port, f"/echo{way}.lsp") for _ in range(20)]
    for number, client in enumerate(clients):
        client.send(TEXT if number % 2 else BINARY, b"%d" % number)
    for number, client in enumerate(clients):
        assert client.receive() == (b"%d" % number, bool(number % 2), 0, 0)


@both
def test_clock(app: AppServer, way: str) -> None:
    client, other = Client(app.port, f"/clock{way}.lsp?ms=20"), Client(app.port, f"/clock{way}.lsp?ms=20")
    began_s, began_undisturbed_s = time.monotonic(), undisturbed_s()
    times = [client.receive() for _ in range(5)]
    assert time.monotonic() - began_s > 0.06
    assert undisturbed_s() - began_undisturbed_s < 1
    assert all(message and message.is_text and message.data.startswith(b"20") for message in times)
    client.send(TEXT, b"stop")
    assert client.closed() == 1000
    assert other.receive()


@both
def test_no_websocket(app: AppServer, way: str) -> None:
    assert app.ask(f"/echo{way}.lsp").status == 404


@pytest.mark.parametrize("cosocket", ["", "&cosocket=1"])
def test_a_client_in_lua(app: AppServer, cosocket: str) -> None:
    url = f"ws://127.0.0.1:{app.port}/echo.lsp"
    jobs = [gevent.spawn(app.ask, f"/ask.lsp?url={url}&text=hello{n}{cosocket}") for n in range(10)]
    gevent.joinall(jobs, timeout=5)
    assert [job.value.text for job in jobs] == [f"hello{n}" for n in range(10)]
