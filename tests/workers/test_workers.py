"""A server with several workers: real processes, real sockets, real signals."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.support.clock import undisturbed_s
from tests.support.device import RAW, WS, Device
from tests.support.waiting import wait_until
from tests.workers.served import command, they_hear_each_other, workers_of

pytestmark = pytest.mark.servers

Serve = Callable[..., Served]


def who(served: Served, page: str = "/who.lsp") -> str:
    """Which worker takes the next connection."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", page)
    answer = connection.getresponse().read().decode()
    connection.close()
    return answer


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name: paths of Unix sockets are bounded."""
    with tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as folder:
        yield Path(folder)


def test_workers_sharing_a_port_all_link(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2")
    found = Counter(who(served) for _ in range(600))
    assert set(found) == {"0", "1"}
    assert min(found.values()) >= 240, f"spread within 20 %: {found}"
    assert served.output.count("app app at /: ok") == 1, "said once"
    pids = workers_of(served)

    # A worker that is killed: nobody waits long, nobody is refused, and another one comes.
    os.kill(pids[1], signal.SIGKILL)
    longest_s = 0.0
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s and not ("0" in found and workers_of(served)[1] != pids[1]):
        began_s = undisturbed_s(pids[0])
        found[who(served)] += 1
        longest_s = max(longest_s, undisturbed_s(pids[0]) - began_s)
    assert longest_s < 0.5
    served.wait_for(rf"w1 \(process {pids[1]}\) ended by SIGKILL; a new one starts in 0.25 s$")
    served.wait_for(r"^w1: process \d+ serves$")
    wait_until(lambda: who(served) == "1", served.lines)
    assert workers_of(served)[0] == pids[0]

    # A worker that is held: the others accept its connections.
    held = workers_of(served)[0]
    os.kill(held, signal.SIGSTOP)
    served.wait_for(rf"w0 \(process {held}\) is unresponsive; other workers accept its connections")
    assert {who(served) for _ in range(20)} == {"1"}
    os.kill(held, signal.SIGCONT)
    wait_until(lambda: who(served) == "0", served.lines)

    served.process.send_signal(signal.SIGHUP)
    for number in (0, 1):
        served.wait_for(rf"^w{number}: settings reloaded$")
    assert served.stop(signal.SIGINT) == 0
    assert "Traceback" not in served.output


def connected(served: Served, number: int) -> Device:
    """A client of the hub."""
    return Device(("127.0.0.1", served.port), RAW).start(target="/smq.lsp").connect(b"client%d" % number)


def connections(served: Served) -> list[int]:
    """How many clients of hubs each worker has."""
    with urllib.request.urlopen(f"{served.admin_url}/api/v1/server", timeout=10) as answer:
        return [one["peers"] for one in json.load(answer)["workers"]]


def test_connections_are_spread_evenly_after_a_worker_ended(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2", "--hosts", "test")
    pids = workers_of(served)
    clients = [connected(served, number) for number in range(100)]
    wait_until(lambda: sum(connections(served)) == 100, "all clients")
    assert min(connections(served)) >= 50 - 4, "4 more than half may be at one of them"

    os.kill(pids[1], signal.SIGKILL)
    served.wait_for(r"^w1: process \d+ serves$")
    wait_until(lambda: connections(served)[1] == 0 and len(connections(served)) == 2, "the new worker")
    (kept, _) = connections(served)
    clients += [connected(served, 100 + number) for number in range(kept)]
    wait_until(lambda: min(connections(served)) >= kept - 4, "who comes back is at the worker that has nobody")
    assert served.stop() == 0


def held_with_requests(served: Served, count: int) -> tuple[int, list[socket.socket]]:
    """Holds worker 1 and asks so many times; gives its process, and the connections half a second later."""
    held = workers_of(served)[1]
    os.kill(held, signal.SIGSTOP)
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(count)]
    for one in clients:
        one.sendall(b"GET /who.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    time.sleep(0.5)
    return held, clients


def test_a_stopped_worker_soon_gets_no_connections(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2")
    held, clients = held_with_requests(served, 200)
    served_at_once = len(select.select(clients, [], [], 0)[0])
    assert served_at_once >= 200 / 2 - 40, "16 are on their way to it, half of the others are in its own queue"
    served.wait_for(rf"w1 \(process {held}\) is unresponsive; other workers accept its connections")
    answers = {one.recv(1000).partition(b" ")[2][:3] for one in clients}
    assert answers == {b"200"}, "also those that were on their way to it"
    os.kill(held, signal.SIGCONT)
    wait_until(lambda: who(served) == "1", served.lines)


def test_connections_in_transfer_at_shutdown_are_closed_properly(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2")
    held, clients = held_with_requests(served, 100)
    served.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    os.kill(held, signal.SIGCONT)
    answers = Counter(one.recv(1000).partition(b" ")[2][:3] for one in clients)
    assert answers.keys() <= {b"200", b"503"}, answers
    assert served.process.wait(20) == 0


def test_rolling_restart(serve: Serve, app: Path, tmp_path: Path) -> None:
    door = tmp_path / "restart.sock"
    served = serve(app, "--workers", "2", "--hosts", "*", "--restart-socket", door)
    pids = workers_of(served)
    devices = [
        Device(("127.0.0.1", served.port), kind).start(target="/smq.lsp").connect(b"device%d" % number)
        for number, kind in enumerate([RAW, WS] * 6)
    ]
    topics = [one.subscribe(b"news") for one in devices]
    (app / "slow").touch()  # so that a new process meets all others before it takes clients
    done = command("restart", "--pid", served.process.pid)
    replaced = ", ".join(str(pids[number]) for number in range(2))
    assert done.stdout == f"processes {replaced}: replaced\n", done.stderr
    moved = served.wait_for(r"^restart: 2 new workers serve, with (\d+) clients$", 30)[1]
    assert int(moved) == len(devices)
    assert set(workers_of(served).values()).isdisjoint(pids.values())
    they_hear_each_other(devices, topics[0])
    assert {who(served) for _ in range(20)} == {"0", "1"}

    (app / "slow").unlink()

    # An application that fails in a new worker: the old one goes on, and the command says why.
    (app / "wrong").touch()
    failed = command("restart", "--socket", door)
    assert (failed.returncode, failed.stderr.count("Restart failed")) == (1, 1)
    assert "no luck" in failed.stderr
    served.wait_for(r"^restart: stopped, the other workers continue: w1: .*no luck", 30)
    assert {who(served) for _ in range(20)} == {"0", "1"}
    assert served.stop() == 0
    assert "Traceback" not in served.output


def test_clients_of_all_workers_stay_during_a_reload(serve: Serve, app: Path) -> None:
    preload = app / ".preload"
    kept = preload.read_text().replace("create {", "create {keep = true,")
    assert "keep" in kept
    preload.write_text(kept)
    served = serve(app, "--workers", "2", "--hosts", "*", "--reload")
    devices = [
        Device(("127.0.0.1", served.port), kind).start(target="/smq.lsp").connect(b"device%d" % number)
        for number, kind in enumerate([RAW, WS] * 4)
    ]
    assert len({one.etid >> 21 for one in devices}) == 2, "all clients are at one worker"
    topic = [one.subscribe(b"news") for one in devices][0]
    preload.write_text(kept + "\ntrace('edited')\n")
    for number in range(2):
        served.wait_for(rf"w{number}: .*edited", 30)
    they_hear_each_other(devices, topic)


def test_an_application_ends_all_workers(serve: Serve, app: Path, temporary: Path) -> None:
    served = serve(app, "--workers", "2", env={"TMPDIR": str(temporary)})
    pids = workers_of(served)
    (made,) = temporary.glob("smqrt-workers-*")
    assert made.stat().st_mode & 0o777 == 0o700
    for pid in pids.values():
        secret = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert str(made).encode() not in secret
    who(served, "/exit.lsp")
    assert served.wait() == 7
    assert not made.exists()


def test_what_is_wrong_is_said_once(serve: Serve, app: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = serve(app, "--workers", "2", "--port", str(taken.getsockname()[1]))
        assert served.wait() == 1
    assert served.output.count("the port is in use") == 1
    served = serve(app, "--workers", "2", "--auth-users", "/nowhere/users")
    assert served.wait() == 1
    assert served.output.count("Error:") == 1, served.output
    served = serve(app, "--workers", "auto", "--take-over", "--restart-socket", "/tmp/none")
    assert served.wait() == 1


def test_a_killed_supervisor_leaves_no_processes(serve: Serve, app: Path, temporary: Path) -> None:
    served = serve(app, "--workers", "2", env={"TMPDIR": str(temporary)})
    pids = workers_of(served)
    served.process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), "the workers end")
    assert not list(temporary.glob("smqrt-workers-*/*"))
    assert not list(temporary.glob("smqrt-workers-*"))


class Demonstrations(Served):
    """All demonstrations, with two workers."""

    word = "demo"


def test_all_demonstrations_run_in_workers(temporary: Path) -> None:
    served = Demonstrations("--workers", "2", "--keep", temporary / "demo")
    try:
        names = re.findall(r"^app \S+ at (/\S+/): ok$", served.wait_for(r"(?s)\A.*^listening")[0], re.M)
        assert len(names) >= 7
        assert "failed" not in served.output
        for name in names:
            assert [status(served, name) for _ in range(6)] == [200] * 6, name
    finally:
        assert served.stop() == 0
    assert "Traceback" not in served.output


def status(served: Served, path: str) -> int:
    with urllib.request.urlopen(f"{served.url}{path}", timeout=10) as answer:
        return int(answer.status)
