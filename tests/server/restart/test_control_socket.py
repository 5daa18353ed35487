"""The control socket of a server, and the messages of a hot restart over it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gevent import socket as gsocket

from smqrt.errors import StartError
from smqrt.server.restart import control_socket as module
from smqrt.server.restart.control_socket import (
    MAX_FIRST_MESSAGE_BYTES,
    MAX_WHY_CHARS,
    ControlSocket,
    Refused,
    check_socket_path,
    expect,
)
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.sock"


@pytest.fixture
def requests() -> list[Message]:
    return []


@pytest.fixture
def open_socket(path: Path, requests: list[Message]) -> Iterator[Callable[..., ControlSocket]]:
    """Listens at the path; each request is answered with "done"."""
    opened: list[ControlSocket] = []

    def answer(channel: FdChannel, message: Message) -> None:
        requests.append(message)
        channel.send({"do": "done"})
        channel.close()

    def make(at: str | None = None, is_successor: bool = False) -> ControlSocket:
        opened.append(ControlSocket(str(path) if at is None else at, answer))
        opened[-1].open(is_successor)
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def connected(path: Path) -> FdChannel:
    sock = gsocket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return FdChannel(sock)


# ---- the socket


def test_a_request_is_passed_on_with_its_channel(
    open_socket: Callable[..., ControlSocket], path: Path, requests: list[Message]
) -> None:
    open_socket()
    channel = connected(path)
    channel.send({"do": "restart"})
    assert channel.receive(5) == ({"do": "done"}, [])
    assert requests == [{"do": "restart"}]
    channel.close()


def test_only_its_user_reaches_the_socket(open_socket: Callable[..., ControlSocket], path: Path) -> None:
    before = os.umask(0)
    try:
        open_socket()
        assert os.umask(0) == 0, "the mask is that of before"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path], "the name under which it was made is gone"


def test_only_a_successor_takes_the_socket_of_another_server(
    open_socket: Callable[..., ControlSocket], path: Path, requests: list[Message]
) -> None:
    old = open_socket()
    with pytest.raises(StartError, match="another server listens at .*; start this one with --take-over"):
        open_socket()
    new = open_socket(is_successor=True)
    old.close(leaves_file=True)
    channel = connected(path)
    channel.send({"do": "hello"})
    channel.receive(5)
    channel.close()
    new.close()
    assert not path.exists()


def test_the_socket_of_a_dead_server_is_replaced(open_socket: Callable[..., ControlSocket], path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    open_socket()
    connected(path).close()


def test_a_file_that_is_no_socket_is_kept(open_socket: Callable[..., ControlSocket], path: Path) -> None:
    path.write_text("important")
    with pytest.raises(StartError, match="the file exists and is not a socket"):
        open_socket()
    assert path.read_text() == "important"


def test_without_a_path_nothing_listens(open_socket: Callable[..., ControlSocket], path: Path, tmp_path: Path) -> None:
    open_socket("").close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StartError, match="set a path in a separate folder"):
        open_socket(str(tmp_path / "no" / "r.sock"))


def test_paths_have_room_for_the_process_id(open_socket: Callable[..., ControlSocket]) -> None:
    check_socket_path("restart.socket", "/" + "x" * 98)
    for path in ("/" + "x" * 99, "/" + "ü" * 50):
        with pytest.raises(StartError, match="is longer than 99 bytes, the limit of a Unix socket"):
            open_socket(path)


def test_invalid_first_messages_are_refused_and_logged(
    open_socket: Callable[..., ControlSocket],
    path: Path,
    requests: list[Message],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HELLO_S", 0.01)
    open_socket()
    silent, large = connected(path), connected(path)
    large.send({"do": "restart", "more": "x" * MAX_FIRST_MESSAGE_BYTES})
    good = connected(path)
    good.send({"do": "restart"})
    assert good.receive(5) == ({"do": "done"}, []), "those before do not block it for long"
    for channel in (silent, large):
        with pytest.raises(ChannelError):
            channel.receive(5)
        channel.close()
    good.close()
    assert len(requests) == 1
    assert f"refused: process {os.getpid()} at restart.socket: the other process sent nothing for 0.01 s" in caplog.text


def test_processes_of_other_users_are_refused(
    open_socket: Callable[..., ControlSocket],
    path: Path,
    requests: list[Message],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FdChannel, "is_of_this_user", lambda self: False)
    open_socket()
    channel = connected(path)
    channel.send({"do": "restart"})
    with pytest.raises(ChannelError):
        channel.receive(5)
    channel.close()
    assert requests == []
    assert f"refused: a process of user {os.geteuid()} (pid {os.getpid()}) at restart.socket" in caplog.text


def test_descriptors_of_a_first_message_are_closed(open_socket: Callable[..., ControlSocket], path: Path) -> None:
    open_socket()
    reading, writing = os.pipe()
    channel = connected(path)
    channel.send({"do": "hello"}, [writing])
    os.close(writing)
    channel.receive(5)
    channel.close()
    assert os.read(reading, 1) == b"", "nobody has the other end open"
    os.close(reading)


# ---- messages


@pytest.fixture
def ends() -> Iterator[tuple[FdChannel, FdChannel]]:
    one, other = map(FdChannel, socket.socketpair(socket.AF_UNIX))
    yield one, other
    one.close()
    other.close()


def test_the_expected_message_is_returned(ends: tuple[FdChannel, FdChannel]) -> None:
    one, other = ends
    other.send({"do": "ready", "hubs": []})
    assert expect(one, "ready", 5) == {"do": "ready", "hubs": []}


@pytest.mark.parametrize("kind", ["failed", "abort"])
def test_the_end_of_the_other_process_is_a_refusal(ends: tuple[FdChannel, FdChannel], kind: str) -> None:
    one, other = ends
    for message, why in (({"why": "x" * 2000}, "x" * MAX_WHY_CHARS), ({}, "no reason was given")):
        other.send({"do": kind, **message})
        with pytest.raises(Refused) as refusal:
            expect(one, "ready", 5)
        assert str(refusal.value) == why


def test_another_message_is_an_error(ends: tuple[FdChannel, FdChannel]) -> None:
    one, other = ends
    reading, writing = os.pipe()
    other.send({"do": "have"}, [writing])
    os.close(writing)
    with pytest.raises(ChannelError, match="the other process sent 'have' instead of 'ready'") as error:
        expect(one, "ready", 5)
    assert not isinstance(error.value, Refused)
    assert os.read(reading, 1) == b"", "its descriptors are closed"
    os.close(reading)
    with pytest.raises(ChannelError, match="sent nothing for 0.001 s"):
        expect(one, "ready", 0.001)
