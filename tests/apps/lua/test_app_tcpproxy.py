"""The application in examples/tcpproxy, between a client and an echo server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from gevent import socket
from gevent.server import StreamServer

from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "tcpproxy"


def echo(sock: socket.socket, _address: object) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


@pytest.fixture
def target() -> Iterator[StreamServer]:
    running = StreamServer(("127.0.0.1", 0), echo)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def port(server: AppServer, target: StreamServer) -> int:
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    return int(server.ask(f"/port.lsp?target={target.server_port}").text)


def sockets(server: AppServer) -> object:
    return server.vm.eval("return ba.socket.stat()")[0]


def test_both_directions_and_the_end(server: AppServer, port: int) -> None:
    ends = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(50)]
    for number, end in enumerate(ends):
        end.sendall(b"%05d" % number)
    for number, end in enumerate(ends):
        assert end.recv(100) == b"%05d" % number
        end.close()
    wait_until(lambda: sockets(server) == 1)


def test_much_data_and_a_slow_reader(port: int) -> None:
    data = os.urandom(1 << 20) * 48
    end = socket.create_connection(("127.0.0.1", port), timeout=10)
    sending = gevent.spawn(end.sendall, data)
    gevent.sleep(0.3)  # all of it would be through by then
    assert not sending.ready()
    got = bytearray()
    while len(got) < len(data):
        got += end.recv(1 << 20)
    assert got == data


def test_a_target_that_is_not_there(target: StreamServer, port: int) -> None:
    target.stop()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as end:
        assert end.recv(10) == b""
