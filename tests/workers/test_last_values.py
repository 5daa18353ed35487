"""Last values of several processes: what was published while one of them was away is what it has when it is back."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire.smq import Type
from tests.conftest import Served, free_port
from tests.support.applications import application
from tests.support.device import RAW, Device
from tests.support.waiting import wait_until
from tests.workers.served import PAGES, workers_of

pytestmark = pytest.mark.servers
Serve = Callable[..., Served]
NAME = b"state/a"
LATER = pytest.mark.parametrize("later", [b"new", b""], ids=["value", "deletion"])
ANY_HOST = ("--hosts", "*")
BACK_S = 60.0
"""Until a process that starts anew is there, on a machine with other things to do."""


def preload(options: str) -> str:
    """A hub that tells each client which worker it is at."""
    return f"""
smq = require "smq.hub".create {{
   name = "main", lastvalue = "state/#", {options},
   onconnect = function(etid) smq:publish(tostring(mako.worker), etid) end,
}}
"""


def device_and_worker(served: Served, uid: bytes) -> tuple[Device, int]:
    """A new client, and the number of its worker."""
    device = Device(("127.0.0.1", served.port), RAW).start(target="/smq.lsp").connect(uid)
    return device, int(device.receive()[13:])


def given(served: Served, count: int = 1) -> list[tuple[int, list[bytes]]]:
    """At which worker each of so many new subscribers is, which are there together, and what it gets."""
    devices = [device_and_worker(served, b"late-%04d" % number) for number in range(count)]
    found = []
    for device, worker in devices:
        device.subscribe(NAME)
        found.append((worker, [packet[13:] for packet in device.sync() if packet[0] == Type.PUBLISH]))
    for device, _ in devices:
        device.close()
    return found


def all_give(served: Served, due: bytes, workers: set[int]) -> None:
    """Wait until new subscribers at all of these workers get this, or nothing where it is empty."""
    found: list[tuple[int, list[bytes]]] = []

    def are_right() -> bool:
        found[:] = given(served, 8)
        return {one for one, _ in found} == workers and all(got == [due] * bool(due) for _, got in found)

    wait_until(are_right, found, BACK_S)


def publisher_at(served: Served, worker: int) -> Device:
    """A client of this worker."""
    for number in range(50):
        device, found = device_and_worker(served, b"publisher-%d" % number)
        if found == worker:
            return device
        device.close()
    raise AssertionError(f"nobody comes to worker {worker}")


def held(file: Path) -> bytes:
    """What lies in a database and the files beside it."""
    return b"".join(one.read_bytes() for one in file.parent.glob(file.name + "*") if one.is_file())


@pytest.mark.parametrize(("killed", "later"), [(0, b"new"), (1, b"")], ids=["value", "deletion"])
def test_a_killed_worker_keeps_no_values_of_its_file(serve: Serve, tmp_path: Path, killed: int, later: bytes) -> None:
    app = application(tmp_path / "app", preload(f'persist = "{tmp_path}/names.db"'), **PAGES)
    served = serve(app, *ANY_HOST, "--workers", "2")
    pids = workers_of(served)
    publisher = publisher_at(served, 1 - killed)
    topic = publisher.create(NAME)
    publisher.publish(topic, b"old").sync()
    all_give(served, b"old", {0, 1})
    files = [tmp_path / "names.db", tmp_path / "names.db.w1"]
    wait_until(lambda: all(b"old" in held(one) for one in files), "the files have it")

    os.kill(pids[killed], signal.SIGKILL)
    publisher.publish(topic, later).sync()
    wait_until(lambda: workers_of(served)[killed] != pids[killed], served.lines, BACK_S)
    all_give(served, later, {0, 1})


@LATER
def test_a_worker_absent_for_long_restores_no_values(serve: Serve, tmp_path: Path, later: bytes) -> None:
    app = application(tmp_path / "app", preload(f'persist = "{tmp_path}/names.db"'), **PAGES)
    files = [tmp_path / "names.db", tmp_path / "names.db.w1"]
    for workers, published in ((2, b"old"), (1, later)):
        served = serve(app, *ANY_HOST, "--workers", workers)
        publisher, _ = device_and_worker(served, b"publisher")
        publisher.publish(publisher.create(NAME), published).sync()
        for file in files if workers == 2 else ():
            wait_until(lambda file=file: b"old" in held(file), f"{file} has it")
        assert served.stop() == 0
    assert b"old" in held(files[1])
    all_give(serve(app, *ANY_HOST, "--workers", "2"), later, {0, 1})


@LATER
def test_a_stopped_node_gets_what_was_published_meanwhile(serve: Serve, tmp_path: Path, later: bytes) -> None:
    app = application(tmp_path / "app", preload('cluster = "chat"'), **PAGES)
    ports = [free_port() for _ in range(2)]
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    soon = ("--cluster-silence-s", "1", "--cluster-ping-s", "0.2")
    joined = (*ANY_HOST, "--cluster-password", "s", "--cluster-nodes", nodes, *soon)
    one, other = (serve(app, *joined, "--cluster-listen", f"127.0.0.1:{port}") for port in ports)
    publisher, _ = device_and_worker(one, b"publisher")
    topic = publisher.create(NAME)

    def both_have(due: bytes) -> bool:
        return all(given(served) == [(0, [due] * bool(due))] for served in (one, other))

    wait_until(lambda: publisher.publish(topic, b"old").sync() is not None and both_have(b"old"), "both have it")
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        publisher.publish(topic, b"in the socket of who stands still").sync()
        wait_until(lambda: joined_nodes(one) == 0, "the link is given up", BACK_S)
        publisher.publish(topic, later).sync()
    finally:
        os.kill(other.process.pid, signal.SIGCONT)
    wait_until(lambda: joined_nodes(one) == joined_nodes(other) == 1, "they are linked again", BACK_S)
    wait_until(lambda: both_have(later), "the newest is everywhere")


def joined_nodes(served: Served) -> int:
    """With how many other nodes its hub works."""
    with urllib.request.urlopen(f"{served.admin_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(int(float(value)) for value in re.findall(r"^smqrt_cluster_nodes\{.*\} (\S+)$", text, re.M))
