"""The application in examples/ntp, with an NTP server that loses the first question."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from gevent import socket

from tests.apps.lua.app_server import AppServer

APP = Path(__file__).parent.parent / "examples" / "ntp"
NOON = 1_700_000_000 + 2_208_988_800


@pytest.fixture
def clock() -> Iterator[socket.socket]:
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    yield sock
    sock.close()


def answer(sock: socket.socket, losses: int) -> None:
    while True:
        question, address = sock.recvfrom(1000)
        assert question[0] == 0x1B
        assert len(question) == 48
        if losses:
            losses -= 1
        else:
            sock.sendto(b"\x1c" + bytes(39) + struct.pack(">II", NOON, 1 << 31), address)


@pytest.fixture
def app(server: AppServer) -> AppServer:
    assert server.applications.load("", APP).error is None
    return server


@pytest.mark.parametrize("losses", [0, 1])
def test_the_time(app: AppServer, clock: socket.socket, losses: int) -> None:
    serving = gevent.spawn(answer, clock, losses)
    reply = app.ask(f"/ntp.lsp?server=127.0.0.1&port={clock.getsockname()[1]}")
    assert json.loads(reply.body) == {"unix": 1_700_000_000, "fraction": 0.5, "text": "2023-11-14T22:13:20Z"}
    serving.kill()


def test_no_server_answers(app: AppServer, clock: socket.socket) -> None:
    port = clock.getsockname()[1]
    clock.close()
    reply = app.ask(f"/ntp.lsp?server=127.0.0.1&port={port}")
    assert (reply.status, reply.text) == (504, "no answer")
