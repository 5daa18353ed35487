"""The end of `smqrt serve`: who is told what, in which order, and what happens when it takes too long."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Command
from tests.conftest import Served
from tests.support.applications import SMQ_PAGE, application, packet, smq_client

Serve = Callable[..., Served]

health = Command("health")

pytestmark = pytest.mark.servers

BYE = """
smq = require"smq.hub".create()
function onunload()
   trace"onunload"
   smq:publish("back at noon", "news")
end
"""


def subscriber(port: int, uid: bytes) -> socket.socket:
    sock = smq_client(port, uid)
    sock.sendall(b"\0\7\4news")
    assert packet(sock)[:2] == b"\5\0"
    return sock


def ends_s(clients: list[socket.socket]) -> list[float]:
    """When each connection ended; what came before is read."""
    when = {}
    poll = {client.fileno(): client for client in clients}
    while poll:
        for fd in select.select(list(poll), [], [], 10)[0]:
            if not poll[fd].recv(4096):
                when[fd] = time.monotonic()
                del poll[fd]
    return [when[client.fileno()] for client in clients]


def get(sock: socket.socket) -> bytes:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return sock.recv(4096)


def test_a_server_ends_in_order(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", BYE, smq=SMQ_PAGE, index="<?lsp= 'page' ?>")
    served = serve(app, "--drain-delay-s", "1", "--drain-window-s", "0.6")
    admin = served.wait_for(r"^admin at (\S+?)/?$")[1]
    assert health("--ready", "--url", admin).exit_code == 0
    clients = [subscriber(served.port, b"client%d" % at) for at in range(12)]
    kept = socket.create_connection(("127.0.0.1", served.port), 5)
    assert b" 200 " in get(kept)
    served.process.terminate()
    began_s = time.monotonic()
    served.process.send_signal(signal.SIGHUP)
    assert b" 200 " in get(kept), "in the delay all goes on as before"
    assert health("--url", admin).exit_code == 0
    unready = health("--ready", "--url", admin)
    assert (unready.exit_code, "shutting down" in unready.output) == (1, True)
    late = socket.create_connection(("127.0.0.1", served.port), 5)
    assert b" 200 " in get(late)
    for client in clients:
        assert packet(client)[13:] == b"back at noon", "onunload runs while they are there"
    ended_s = ends_s(clients)
    assert all(0.3 < one - began_s < 5 for one in ended_s)
    assert max(ended_s) - min(ended_s) > 0.3, "one after the other"
    assert kept.recv(1) == late.recv(1) == b""
    for _ in range(20):
        served.process.send_signal(signal.SIGHUP)
    assert served.wait() == 0
    assert served.output.count("onunload") == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), 1)


def test_a_slow_shutdown_reports_what_was_open(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", BYE.replace("trace", "ba.sleep(60000) trace"), smq=SMQ_PAGE)
    served = serve(app, "--drain-timeout-s", "0.4")
    client = smq_client(served.port)
    assert served.stop() == 1
    served.wait_for(
        "^stopped after 0.4 s, at onunload of the applications, with 1 SMQ clients, 1 running applications still "
        "open; see the setting drain.timeout_s$"
    )
    client.close()


@pytest.mark.parametrize("twice", [False, True], ids=["deadline", "second signal"])
def test_a_busy_application_does_not_delay_shutdown(serve: Serve, tmp_path: Path, twice: bool) -> None:
    app = application(tmp_path / "app", smq=SMQ_PAGE)
    (app / ".preload.py").write_text("def onunload():\n    print('for ever', flush=True)\n    while True: pass\n")
    served = serve(app, "--drain-timeout-s", "60" if twice else "0.4")
    assert served.port
    served.process.terminate()
    served.wait_for("for ever")
    assert (served.stop(signal.SIGINT) if twice else served.wait()) == 1
    assert ("drain.timeout_s" in served.output) is not twice


def test_connections_in_the_accept_queue_are_asked_to_retry(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    (app / ".preload.py").write_text(
        "import gevent, signal, time\n"
        "def hold():\n    print('held', flush=True)\n    end = time.monotonic() + 1\n"
        "    while time.monotonic() < end: pass\n"
        "gevent.signal_handler(signal.SIGWINCH, hold)\n"
    )
    served = serve(app)
    assert served.port
    served.process.send_signal(signal.SIGWINCH)
    served.wait_for("held")
    served.process.terminate()
    clients = [socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(5)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert served.wait() == 0
    for client in clients:
        assert client.recv(100)[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 503"), "it is not just reset"


def test_the_health_of_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMQRT_ADMIN__PORT", "1")
    gone = health()
    assert gone.exit_code == 1
    assert gone.output.startswith("http://127.0.0.1:1 does not respond: ")
    assert health.refused("--url", "9356") == (
        1,
        "--url '9356': not an HTTP URL. Example: http://127.0.0.1:9356",
    )
    monkeypatch.setenv("SMQRT_ADMIN__ENABLED", "false")
    assert health.refused()[1] == (
        "the admin listener is disabled: set admin.enabled = true, or name another server with --url."
    )


def open_in_terminal(*words: str | Path) -> tuple[subprocess.Popen[bytes], int]:
    """A server in the foreground of a terminal of its own; the descriptor is the terminal's other end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "smqrt", "serve", "--port", "0", "--admin-port", "0", *map(str, words)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    return process, master


@pytest.mark.parametrize("options", [[], ["--log-format", "json"], ["--workers", "2"]], ids=["text", "json", "workers"])
def test_a_closed_terminal_ends_the_server_in_order(options: list[str], tmp_path: Path) -> None:
    application(tmp_path / "app", 'function onunload() io:open("unloaded", "w"):close() end', index="page")
    process, terminal = open_in_terminal(tmp_path / "app", *options)
    try:
        printed = b""
        while b"listening on" not in printed:
            printed += os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(60) == 0
        assert (tmp_path / "app/unloaded").exists()
    finally:
        process.kill()


def test_a_lost_standard_error_does_not_end_the_server(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", index="<?lsp trace 'said' print 'here' ?>page")
    script = f"'{sys.executable}' -m smqrt serve --port 0 --admin-port 0 '{app}' 2> >(exec true)"
    with subprocess.Popen(["bash", "-c", f"exec {script}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = next(int(line.rsplit(":", 1)[1]) for line in process.stdout if line.startswith("listening on http:"))
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), 20) as sock:
                assert b"200 OK" in get(sock)
        process.terminate()
        assert process.wait(20) == 0
