"""Applications that copy from socket to socket, as the TCP proxy in tests/apps/examples: both sides do their worst."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.request import urlopen

import pytest

from tests.conftest import REPOSITORY
from tests.hostile.conftest import Attack, Besieged

ATTACK_S = 0.4
PIECE = bytes(65536)


class Target:
    """Where the proxy connects to: takes connections and does what `speaks` and `reads` say, all of them at once."""

    def __init__(self, speaks: bool, reads: bool) -> None:
        self._events = speaks * selectors.EVENT_WRITE | reads * selectors.EVENT_READ
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
        self.port = self._listener.getsockname()[1]
        self.came_bytes = self.accepted = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        open_ones: list[socket.socket] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, events in selector.select(0.05):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._listener:
                        open_ones.append(sock.accept()[0])
                        self.accepted += 1
                        open_ones[-1].setblocking(False)
                        if self._events:
                            selector.register(open_ones[-1], self._events)
                    else:
                        self._exchange(selector, sock, events)
        for sock in [self._listener, *open_ones]:
            sock.close()

    def _exchange(self, selector: selectors.BaseSelector, sock: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                sock.send(PIECE)
            if events & selectors.EVENT_READ:
                data = sock.recv(1 << 18)
                self.came_bytes += len(data)
                if not data:
                    selector.unregister(sock)
        except BlockingIOError:
            pass
        except OSError:
            selector.unregister(sock)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def target(speaks: bool = False, reads: bool = False) -> Iterator[Target]:
    running = Target(speaks, reads)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def server(besiege: Callable[..., Besieged]) -> Besieged:
    return besiege(REPOSITORY / "tests/apps/examples/tcpproxy")


def proxy_port(server: Besieged, target_port: int) -> int:
    return int(urlopen(f"http://127.0.0.1:{server.port}/tcpproxy/port.lsp?target={target_port}").read())


def connect(port: int, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", port), 20) for _ in range(count)]


def works(port: int, sockets: list[socket.socket], attack: Attack, reads: bool) -> int:
    """Sends on all sockets as fast as they take it; gives how much came."""
    until_s, came = time.monotonic() + ATTACK_S, 0
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_WRITE | (selectors.EVENT_READ if reads else 0))
        while time.monotonic() < until_s:
            for key, events in selector.select(0.1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                with suppress(BlockingIOError):
                    if events & selectors.EVENT_WRITE:
                        attack.sent(sock.send(PIECE))
                    if events & selectors.EVENT_READ:
                        came += len(sock.recv(1 << 18))
    return came


CASES = {
    "both sides send and read": (True, True, True),
    "nobody reads": (True, False, False),
    "the target sends, the clients do not read": (True, True, False),
    "the clients send, the target does not read": (False, False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_pairs(server: Besieged, name: str) -> None:
    speaks, reads, clients_read = CASES[name]
    with target(speaks, reads) as other:
        port = proxy_port(server, other.port)
        with server.attack(f"socket to socket in Lua, 100 pairs: {name}") as attack:
            sockets = connect(port, 100)
            came = works(port, sockets, attack, clients_read)
        for sock in sockets:
            sock.close()
    assert came > 1 << 20 or not (speaks and clients_read)
    assert other.came_bytes > 1 << 20 or not reads


def test_many_clients_connect_and_leave(server: Besieged) -> None:
    with target(reads=True) as other:
        port = proxy_port(server, other.port)
        with server.attack("socket to socket in Lua: 2,000 connections that come and go") as attack:
            for _ in range(10):
                for sock in connect(port, 200):
                    sock.send(b"x")
                    attack.sent(1)
                    sock.close()


def test_many_clients_when_the_target_refuses(server: Besieged) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    port = proxy_port(server, nobody)
    with server.attack("socket to socket in Lua: 1,000 connections, and nobody at the target"):
        for sock in connect(port, 1000):
            assert sock.recv(10) == b""
            sock.close()
