"""Listeners on Unix sockets: the file, its permissions and its end; clients without an address."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent import socket

from smqrt.errors import StartError
from smqrt.transport import listener as listener_module
from smqrt.transport.admission import BUSY, ConnectionLimit, TrustedNetworks, open_connections
from smqrt.transport.listener import ACCEPTS_AT_ONCE, InheritedSockets, Listener
from smqrt.transport.unix_sockets import UNIX_ADDRESS, SocketFile, listening_socket
from tests.support.waiting import wait_until


class Opened:
    """Listeners at one path, and what they have accepted: sockets with addresses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.accepted: list[tuple[Any, Any]] = []
        self.listeners: list[Listener] = []

    def listen(self, starts: bool = True, **more: Any) -> Listener:
        made = Listener(str(self.path), 0, lambda sock, address: self.accepted.append((sock, address)), **more)
        self.listeners.append(made)
        if starts:
            made.start()
        return made

    def client(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(10)
        made.connect(str(self.path))
        return made

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for sock, _ in self.accepted:
            sock.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    found = Opened(tmp_path / "mqtt.sock")
    yield found
    found.close()


def test_clients_have_one_address(opened: Opened) -> None:
    listener = opened.listen()
    assert listener.address == (str(opened.path), 0)
    with opened.client() as client:
        wait_until(lambda: opened.accepted)
        [(sock, address)] = opened.accepted
        assert address == sock.getpeername() == sock.getsockname() == UNIX_ADDRESS
        assert sock.peer_host == "unix"
        sock.send(b"hello")
        assert client.recv(10) == b"hello"
    opened.listeners[0].close()
    assert not opened.path.exists()


def test_a_burst_is_accepted(opened: Opened) -> None:
    opened.listen()
    clients = [opened.client() for _ in range(3 * ACCEPTS_AT_ONCE)]
    wait_until(lambda: len(opened.accepted) == len(clients))
    for client in clients:
        client.close()


@pytest.mark.parametrize(("words", "mode"), [({}, 0o660), ({"mode": "0600"}, 0o600), ({"mode": "666"}, 0o666)])
def test_permissions_do_not_depend_on_the_umask(opened: Opened, words: dict[str, str], mode: int) -> None:
    before = os.umask(0o077)
    try:
        opened.listen(**words)
    finally:
        os.umask(before)
    assert stat.S_IMODE(opened.path.stat().st_mode) == mode


def test_the_file_of_a_dead_server_is_replaced(opened: Opened) -> None:
    listening_socket(str(opened.path)).close()
    assert opened.path.exists()
    opened.listen()
    opened.client().close()


@pytest.mark.parametrize("backlog", [4096, 0])
def test_a_server_that_listens_is_not_replaced(opened: Opened, backlog: int) -> None:
    listener = opened.listen(starts=False, backlog=backlog)
    client = opened.client()  # fills the queue of the backlog 0
    with pytest.raises(StartError) as raised:
        listening_socket(str(opened.path))
    assert str(raised.value) == (
        f"cannot listen on unix:{opened.path}: another server listens there; stop it or set another path"
    )
    listener.start()
    wait_until(lambda: opened.accepted, "the server serves")
    client.close()


def test_one_sentence_when_it_cannot_listen(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    for path, words in (
        (file, "the file exists and is not a socket"),
        (tmp_path / "none" / "mqtt.sock", "its folder does not exist"),
        (file / "mqtt.sock", "Not a directory"),
        (tmp_path / ("x" * 108), "longer than 107 bytes"),
    ):
        with pytest.raises(StartError, match=words) as raised:
            listening_socket(str(path))
        assert str(raised.value).startswith(f"cannot listen on unix:{path}: ")
    assert file.read_text() == "kept"


def test_the_file_of_another_server_is_kept(opened: Opened) -> None:
    listener = opened.listen()
    opened.path.unlink()
    other = listening_socket(str(opened.path))
    listener.close()
    assert opened.path.exists()
    opened.client().close()
    other.close()


def test_a_new_process_gets_the_socket(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is connectable all the time, and the file is removed by the last process only."""
    sockets = InheritedSockets()
    monkeypatch.setattr(listener_module, "inherited", sockets)
    old = opened.listen()
    requested, [fd] = old.requested, old.filenos()
    sockets.add(requested, [os.dup(fd)])
    failed = opened.listen(starts=False)
    failed.close()  # before it has served
    assert opened.path.exists()
    sockets.add(requested, [os.dup(fd)])
    new = opened.listen(starts=False)
    sockets.close()
    old.stop()
    waiting = opened.client()
    old.keeps_file = True
    old.close()
    assert opened.path.exists()
    new.start()
    wait_until(lambda: opened.accepted, "the connection in the queue is accepted")
    waiting.close()
    new.close()
    assert not opened.path.exists()


def test_a_socket_that_no_listener_wants_is_removed(opened: Opened) -> None:
    sockets = InheritedSockets()
    sockets.add((str(opened.path), 0), [listening_socket(str(opened.path)).detach()])
    sockets.close()
    assert not opened.path.exists()


def test_a_worker_keeps_the_file(opened: Opened) -> None:
    sock = listening_socket(str(opened.path))
    file = SocketFile(str(opened.path))
    listener = opened.listen(given=[sock])
    opened.client().close()
    wait_until(lambda: opened.accepted)
    listener.close()
    assert opened.path.exists()
    file.remove()
    assert not opened.path.exists()


def test_queued_connections_get_503_when_the_server_stops(opened: Opened) -> None:
    listener = opened.listen(starts=False)
    with opened.client() as client:
        listener.reject_queued()
        assert client.recv(1000) == BUSY


def test_limits_of_addresses_do_not_apply(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.listen()
    monkeypatch.setattr(open_connections, "per_address", 1)
    clients = [opened.client() for _ in range(3)]
    wait_until(lambda: len(opened.accepted) == 3)
    assert ConnectionLimit().use_rate("unix")
    for client in clients:
        client.close()


def test_clients_can_be_trusted_proxies() -> None:
    trusted = TrustedNetworks(["unix", "10.0.0.0/8"])
    assert trusted.has("unix")
    assert trusted.has("10.1.2.3")
    assert not TrustedNetworks(["10.0.0.0/8"]).has("unix")
    assert TrustedNetworks(["unix"])
