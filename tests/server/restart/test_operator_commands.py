"""Commands for operators: `smqrt restart`, systemd, and one server at a socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.restart.hot import HotServed, application
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]


def smqrt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smqrt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_says_how_it_went_and_systemd_follows(serve_hot: Serve, tmp_path: Path) -> None:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "notify"))
    notify.setblocking(False)
    told: list[tuple[str, str]] = []

    def hear(word: str) -> bool:
        try:
            while True:
                told.extend(tuple(line.partition("=")[::2]) for line in notify.recv(4096).decode().split("\n"))  # type: ignore[misc]
        except BlockingIOError:
            return any(name == word for name, _ in told)

    app, path = application(tmp_path / "app"), tmp_path / "r.sock"
    served = serve_hot(app, "--restart-socket", path, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    device = served.device()
    wait_until(lambda: hear("READY"), told)

    second = smqrt("serve", "--port", "0", app, "--restart-socket", path)
    assert second.returncode == 1
    assert "another server listens at" in second.stderr + second.stdout

    (app / ".preload").write_text("no Lua")
    ran = smqrt("restart", "--socket", path)
    assert (ran.returncode, "Restart failed; the old process continues: application app" in ran.stderr) == (1, True)
    application(app)
    ran = smqrt("restart", "--socket", path)
    served.next_process()
    assert (ran.returncode, ran.stdout) == (0, f"restarted: new process {served.pid}, 1 clients kept\n")
    wait_until(lambda: hear("MAINPID"), told)
    assert ("MAINPID", str(served.pid)) in told
    assert not hear("STOPPING")  # the service goes on
    device.sync()

    ran = smqrt("restart", "--pid", str(served.pid))
    served.next_process()
    assert ran.returncode == 0, ran.stderr
    device.sync()
    assert path.is_socket()
    served.end()
    assert not path.exists()
    assert hear("STOPPING")
    ran = smqrt("restart", "--socket", path)
    assert (ran.returncode, "No server at" in ran.stderr) == (1, True)
    assert "No server selected" in smqrt("restart").stderr


def test_a_zombie_server_has_ended() -> None:
    """A supervisor that is slow, or a container whose first process asks for none: the server is a zombie then."""
    server = subprocess.Popen(["sleep", "60"])  # the signal ends it
    ran = smqrt("restart", "--pid", str(server.pid), "--wait-s", "20")
    assert (ran.returncode, ran.stdout) == (0, f"process {server.pid} has exited; a new process has taken over\n")
    ran = smqrt("restart", "--pid", str(server.pid))
    assert (ran.returncode, f"Process {server.pid} has exited already" in ran.stderr) == (1, True)
    server.wait()
