"""One of the processes is gone at any step of a hot restart, and strangers come to the socket."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from gevent import socket as gsocket

from smqrt.server.restart.control_socket import VERSION
from smqrt.smq.session_migration import FrozenHub, address_of
from smqrt.wire.smq import Type
from smqrt.workers.worker_rpc import FdChannel, Message
from tests.server.restart.hot import HotServed, application, heard
from tests.support.device import Device, Site
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]
KEY = "/main"
HELLO: Message = {"do": "hello", "version": VERSION, "pid": os.getpid()}


class FakeNew:
    """A new process that takes part as far as a test lets it."""

    def __init__(self, path: Path) -> None:
        sock = gsocket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        self.channel = FdChannel(sock)
        self.fds: list[int] = []

    def until(self, *kinds: str) -> FakeNew:
        """Says what is to be said until these messages of the old process have come."""
        self.channel.send(HELLO)
        for kind in kinds:
            message, fds = self.channel.receive(10)
            self.fds += fds
            assert message["do"] == kind, message
            if kind == "welcome":
                self.channel.send({"do": "ready", "hubs": [KEY]})
            elif kind == "end":
                self.channel.send({"do": "have"})
        return self

    def die(self) -> None:
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


HUB = ("welcome", "ahead", "hub", "end")


@pytest.fixture
def server(serve_hot: Serve, tmp_path: Path) -> HotServed:
    return serve_hot(application(tmp_path / "app"), "--restart-socket", tmp_path / "r.sock")


def echoes(device: Device, topic: int) -> None:
    """The client is connected, and the application answers it."""
    device.publish(topic, b"x")
    assert heard(device)[1] == b"echo:x"


def test_the_old_process_continues_whenever_the_new_one_fails(server: HotServed, tmp_path: Path) -> None:
    device = server.device()
    echo = device.create(b"echo")
    path = tmp_path / "r.sock"
    for number, steps in enumerate(((), ("welcome",), HUB[:2], HUB[:3], HUB[:4])):
        new = FakeNew(path).until(*steps) if steps else FakeNew(path)
        device.publish(echo, b"x")  # it waits in the kernel when the client stands still
        if steps == HUB[:4]:  # "have" has been said: the hub is the new one's
            assert new.channel.receive(5)[0]["do"] == "go"
        new.die()
        if number:
            wait_until(lambda number=number: server.output.count("this process continues") >= number, server.lines)
        if steps != HUB[:4]:
            assert heard(device)[1] == b"echo:x"
    device.until_end(torn=True)  # as when a server crashes: it comes back
    device = server.device()
    echoes(device, device.create(b"echo"))
    wait_until(lambda: not server.output.count("Traceback"), server.lines)


def test_a_new_process_that_fails_is_abandoned(server: HotServed, tmp_path: Path) -> None:
    device = server.device()
    echo = device.create(b"echo")
    path = tmp_path / "r.sock"
    refusing = FakeNew(path).until("welcome", "ahead", "hub")
    refusing.channel.send({"do": "failed", "why": "no journal\x1b[31m"})
    server.wait_for("this process continues: no journal")
    second = FakeNew(path)
    second.channel.send({**HELLO, "version": 99})
    assert second.channel.receive(5)[0]["why"].startswith("the new process uses version 99")
    hanging = FakeNew(path).until("welcome", "ahead", "hub")
    other = FakeNew(path)
    other.channel.send(HELLO)
    assert other.channel.receive(5)[0]["why"] == "another restart is under way"
    device.publish(echo, b"x")
    server.wait_for(
        r"this process continues: the other process sent nothing for 5 s", 30
    )  # it has the client's socket still
    assert heard(device)[1] == b"echo:x"
    assert hanging.channel.receive(5)[0]["do"] == "end"
    assert hanging.channel.receive(5)[0]["do"] == "abort"
    for each in (refusing, second, hanging, other):
        each.die()
    echoes(device, echo)
    assert "\x1b" not in server.output


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that others may enter; those of pytest are closed to them."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def test_foreign_connections_at_the_socket_are_refused(serve_hot: Serve, tmp_path: Path, reachable: Path) -> None:
    path = reachable / "r.sock"
    server = serve_hot(application(tmp_path / "app"), "--restart-socket", path)
    assert server.port
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if os.geteuid() == 0:
        path.chmod(0o666)
        path.parent.chmod(0o755)
        nobody = pwd.getpwnam("nobody").pw_uid
        code = (
            f"import os, socket; s = socket.socket(socket.AF_UNIX); os.setuid({nobody}); s.connect({str(path)!r}); "
            "print(s.recv(9))"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ran.stdout == "b''\n", ran.stderr
        server.wait_for(rf"refused: a process of user {nobody} ")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0\0\0\2" + bytes(8) + b"[]", b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(nonsense)
    server.wait_for(r"refused: process \d+ at restart.socket")
    device = server.device()
    echoes(device, device.create(b"echo"))


# ---- the old one dies


class FakeOld:
    """An old process: the hub of this test, and a listening socket."""

    def __init__(self, path: Path, site: Site) -> None:
        self.site = site
        self.port_socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.port_socket.getsockname()[1]
        self._listening = gsocket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(1)

    def greet(self) -> FdChannel:
        """Waits for a new process, and until it has loaded its applications."""
        sock, _ = self._listening.accept()
        channel = FdChannel(sock)
        assert channel.receive(60)[0]["do"] == "hello"
        from smqrt.broker.sessions import names_of

        welcome = {
            "do": "welcome",
            "version": VERSION,
            "pid": os.getpid(),
            "listeners": [["127.0.0.1", 0, 1]],
            "hubs": {KEY: names_of(self.site.state)},
            "failed": [],
        }
        channel.send(welcome, [self.port_socket.fileno()])
        flags = dict.fromkeys(("relays", "succeeds", "mqtt", "unpacks"), True)
        assert channel.receive(60)[0] == {"do": "ready", "hubs": [KEY], **flags}
        return channel

    def give(self, channel: FdChannel) -> FrozenHub:
        """Sends its clients; the new process says that it has them."""
        standing = FrozenHub(self.site.state)
        standing.settle()
        channel.send({"do": "hub", "key": KEY, "record": standing.take(), "unchanged": []})
        clients = [[one.record, address_of(one.connection)] for one in standing.clients]
        channel.send(
            {"do": "clients", "clients": clients}, [one.connection.transport.fileno() for one in standing.clients]
        )
        channel.send({"do": "end"})
        assert channel.receive(10)[0] == {"do": "have"}
        return standing

    def close(self) -> None:
        self._listening.close()
        self.port_socket.close()


@pytest.mark.parametrize("end", ["before the hub", "before the word", "changes its mind"])
def test_the_new_process_when_the_old_one_is_gone(serve_hot: Serve, make_site: Any, tmp_path: Path, end: str) -> None:
    site = make_site()
    old = FakeOld(tmp_path / "old.sock", site)
    device = site.device()
    topic = device.subscribe(b"news")
    new = serve_hot(application(tmp_path / "app"), "--restart-socket", tmp_path / "old.sock", "--take-over")
    channel = old.greet()
    if end != "before the hub":
        standing = old.give(channel)
    if end == "changes its mind":
        channel.send({"do": "abort", "why": "it was only a test"})
        assert new.wait() == 1
        assert "The other process continues: it was only a test." in new.output
        standing.roll_back()
        device.publish(topic, b"here")
        assert heard(device) == (topic, b"here")
    else:
        channel.close()
        if end == "before the word":
            standing.release(lambda run, tid, ptid: None)
            device.publish(topic, b"there")
            assert heard(device) == (topic, b"there")
            assert device.ask(Type.SUBSCRIBE, b"secret").denied  # says the application of the new process
        assert new.port == old.port
        again = new.device(b"another")
        assert again.subscribe(b"news") == topic  # the names came with the welcome
    old.close()


def test_take_over_needs_a_running_server(tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    command = [sys.executable, "-m", "smqrt", "serve", "--port", "0", str(app), "--take-over"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, "--take-over requires --restart-socket" in ran.stderr) == (1, True)
    command += ["--restart-socket", str(tmp_path / "none")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, "No server answers at" in ran.stderr) == (1, True)
