"""Listening: addresses, clear refusals, many clients, no file descriptors left."""

from __future__ import annotations

import _socket
import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from select import POLLOUT
from typing import Any

import pytest
from gevent import get_hub, monkey, socket

from smqrt.errors import StartError
from smqrt.transport import listener as module
from smqrt.transport.listener import Listener, sockets_per_port
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture
def listen() -> Iterator[Callable[..., tuple[Listener, list[Any]]]]:
    """A factory of started listeners with the list of sockets they accepted."""
    listeners: list[Listener] = []
    accepted: list[Any] = []

    def begin(host: str = "127.0.0.1", **keywords: Any) -> tuple[Listener, list[Any]]:
        listener = Listener(host, 0, lambda sock, address: accepted.append(sock), **keywords)
        listener.start()
        listeners.append(listener)
        return listener, accepted

    yield begin
    for listener in listeners:
        listener.close()
    for sock in accepted:
        sock.close()


def test_accepted_sockets_are_plain_and_nodelay(listen: Any) -> None:
    listener, accepted = listen()
    client = socket.create_connection(listener.address)
    wait_until(lambda: accepted)
    (sock,) = accepted
    assert isinstance(sock, _socket.socket)
    assert not hasattr(sock, "_sock"), "gevent's own costs more with each call"
    assert sock.gettimeout() == 0.0
    assert sock.getsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY)
    assert sock.getpeername() == client.getsockname()
    client.close()


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "0.0.0.0"])
def test_hosts(listen: Any, host: str) -> None:
    listener, accepted = listen(host)
    client = socket.create_connection((listener.address[0], listener.address[1]))
    wait_until(lambda: len(accepted) == 1)
    client.close()


def test_many_at_once(listen: Any) -> None:
    listener, accepted = listen()
    clients = [socket.create_connection(listener.address) for _ in range(3 * module.ACCEPTS_AT_ONCE)]
    wait_until(lambda: len(accepted) == len(clients))
    for client in clients:
        client.close()


def test_a_burst_is_accepted_in_a_few_turns(listen: Any) -> None:
    """The kernel holds 4096 for us, and ten thousand clients may come back in a tenth of a second."""
    listener, accepted = listen()
    clients = [_socket.socket() for _ in range(1000)]
    for client in clients:
        client.connect(listener.address)
    assert not accepted
    let_others_run(10)
    assert len(accepted) == len(clients)
    for client in clients:
        client.close()


@dataclass
class Crowd:
    """Clients of a listener that needs a millisecond to begin with each, after its first turn."""

    listener: Listener
    clients: list[_socket.socket]
    begun: list[Any]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    begun: list[Any] = []

    def begin(sock: Any, address: Any) -> None:
        begun.append(sock)
        time.sleep(0.001)

    listener = Listener("127.0.0.1", 0, begin)
    clients = [_socket.socket() for _ in range(100)]
    for client in clients:
        client.connect(listener.address)
        client.settimeout(5)
    listener.start()
    wait_until(lambda: begun)
    yield Crowd(listener, clients, begun)
    listener.close()
    for each in [*clients, *begun]:
        each.close()


def waiting(listener: Listener) -> int:
    """How many the kernel holds for the listener: tcpi_unacked (linux/tcp.h)."""
    info = _socket.socket(fileno=os.dup(listener.filenos()[0])).getsockopt(_socket.IPPROTO_TCP, _socket.TCP_INFO, 28)
    return int(struct.unpack_from("=I", info, 24)[0])


def test_the_kernel_queue_is_emptied_first(crowd: Crowd) -> None:
    assert waiting(crowd.listener) == 0
    assert len(crowd.begun) < 50, "the others have turns in between"
    wait_until(lambda: len(crowd.begun) == 100)
    peers = [sock.getpeername() for sock in crowd.begun]
    assert peers == [client.getsockname() for client in crowd.clients], "in their order"


def test_accepted_connections_are_served_after_a_stop(crowd: Crowd) -> None:
    crowd.listener.stop()
    wait_until(lambda: len(crowd.begun) == 100)


def test_accepted_connections_get_503_when_the_server_stops(crowd: Crowd) -> None:
    crowd.listener.reject_queued()
    assert len(crowd.begun) < 50
    assert crowd.clients[-1].recv(1000).startswith(b"HTTP/1.1 503 ")


def test_closing_a_listener_closes_accepted_connections(crowd: Crowd) -> None:
    crowd.listener.close()
    with contextlib.suppress(ConnectionResetError):
        assert crowd.clients[-1].recv(1000) == b""


def test_stop_and_start(listen: Any) -> None:
    listener, accepted = listen()
    listener.stop()
    client = socket.create_connection(listener.address)
    let_others_run()
    assert accepted == []
    listener.start()
    wait_until(lambda: len(accepted) == 1)
    client.close()


def test_a_listener_can_have_its_own_limit(listen: Any, caplog: pytest.LogCaptureFixture) -> None:
    full, taken = listen()
    full.name, full.max_connections = "main", 2
    clients = [socket.create_connection(full.address, timeout=5) for _ in range(3)]
    assert clients[2].recv(1000).startswith(b"HTTP/1.1 503 ")
    assert "2 connections are open at main; see the setting listener.NAME.max_connections" in caplog.text
    other, _ = listen()
    clients.append(socket.create_connection(other.address, timeout=5))
    wait_until(lambda: len(taken) == 3, "the list of all that were accepted")
    taken.pop(0).close()
    clients.append(socket.create_connection(full.address, timeout=5))
    wait_until(lambda: len(taken) == 3, "there is room again")
    assert (full.counts.open, full.counts.refused) == (2, 1)
    for client in clients:
        client.close()


def test_an_error_in_on_accept_closes_that_client_only(listen: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(sock: Any, address: Any) -> None:
        raise LookupError("on_accept")

    broken = Listener("127.0.0.1", 0, fails)
    broken.start()
    for _ in range(2):
        client = socket.create_connection(broken.address, timeout=2)
        assert client.recv(1) == b""
        client.close()
    assert caplog.text.count("on_accept") >= 2
    broken.close()


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", None, "in use"),
        ("203.0.113.1", 0, "no such address"),
        ("no.such.host.invalid", 0, "unknown host"),
        ("127.0.0.1", 99999, "0 to 65535"),
    ],
)
def test_one_sentence_when_it_cannot_listen(listen: Any, host: str, port: int | None, words: str) -> None:
    taken, _ = listen()
    with pytest.raises(StartError) as raised:
        Listener(host, taken.address[1] if port is None else port, print)
    assert words in str(raised.value)
    assert str(raised.value).startswith(f"cannot listen on {host}:")
    assert "\n" not in str(raised.value)


NO_DESCRIPTORS = """
import _socket, gevent, json, logging, resource
from gevent import monkey, socket
from smqrt.transport import listener as module

class Counting(logging.Handler):
    lines = 0
    def emit(self, record):
        Counting.lines += "ulimit" in record.getMessage()

logging.getLogger("smqrt").addHandler(Counting())
module.PAUSE_S = 0.1
accepted, failures = [], []
listener = module.Listener("127.0.0.1", 0, lambda sock, address: accepted.append(sock))
failed = listener._accept_failed
listener._accept_failed = lambda error: (failures.append(error), failed(error))
listener.start()
clients = [socket.socket() for _ in range(5)]
keep = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 1, keep[1]))
holes = []
try:
    while True:
        holes.append(_socket.socket())
except OSError:
    pass
for client in clients:
    client.connect(listener.address)
gevent.sleep(0.25)
without = len(accepted)
for hole in holes:
    hole.close()
resource.setrlimit(resource.RLIMIT_NOFILE, keep)
with gevent.Timeout(10, False):
    while len(accepted) < 5:
        gevent.sleep(0.01)
print(json.dumps([without, len(failures), Counting.lines, len(accepted)]))
"""


def test_no_file_descriptors_left() -> None:
    """Accepting pauses, says so once, and goes on; nothing spins. In a process where nothing else opens or closes."""
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTORS], capture_output=True, text=True, timeout=60, check=True
    )
    without, failures, lines, accepted = json.loads(done.stdout)
    assert (without, lines, accepted) == (0, 1, 5)
    assert 1 <= failures <= 5, "it tries again now and then, and does not spin"


@pytest.mark.parametrize(("sockets", "fit"), [(1, False), (4, True)])
def test_with_several_sockets_the_kernel_holds_more(listen: Any, sockets: int, fit: bool) -> None:
    listener, accepted = listen(sockets=sockets, backlog=64)
    listener.stop()
    clients = [_socket.socket() for _ in range(128)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex(listener.address)
    time.sleep(0.2)  # a second later those that did not fit try again
    poll = monkey.get_original("select", "poll")()
    for client in clients:
        poll.register(client, POLLOUT)
    assert (len(poll.poll(0)) == len(clients)) is fit
    listener.start()
    wait_until(lambda: len(accepted) == len(clients), "all are accepted", 10)
    for client in clients:
        client.close()


def test_a_port_with_several_sockets_is_exclusive(listen: Any) -> None:
    taken, _ = listen(sockets=4)
    for sockets in (1, 4):
        with pytest.raises(StartError, match="the port is in use"):
            Listener("127.0.0.1", taken.address[1], print, sockets=sockets)
    assert len(set(taken.filenos())) == 4


def test_so_many_sockets_as_a_storm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= sockets_per_port() <= module.MAX_SOCKETS
    for held, needed in (("128", 4), ("4096", 4), ("8192", 2), ("16384", 1), ("65535", 1)):
        monkeypatch.setattr(Path, "read_text", lambda path, held=held: held)
        assert sockets_per_port() == needed


@pytest.mark.parametrize("sockets", [1, 4])
def test_queued_connections_get_503_when_the_server_stops(sockets: int) -> None:
    listener = Listener("127.0.0.1", 0, lambda sock, address: sock.close(), sockets=sockets)
    waiting = [socket.create_connection(listener.address) for _ in range(3)]
    waiting[0].sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    listener.reject_queued()
    listener.close()
    for client in waiting:
        assert client.recv(100).startswith(b"HTTP/1.1 503 "), "and not just a reset"
        client.close()


def test_opening_a_port_does_not_switch_greenlets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lua opens ports, and nobody may run while it waits inside a call: servers have gevent's sockets."""
    monkeypatch.setattr("socket.getaddrinfo", socket.getaddrinfo)
    ran: list[int] = []
    loop: Any = get_hub().loop
    timer = loop.timer(0, 0.0001)
    timer.start(lambda: ran.append(1))
    try:
        listener = Listener("localhost", 0, lambda sock, address: None)
        assert not ran
    finally:
        timer.close()
    listener.close()
