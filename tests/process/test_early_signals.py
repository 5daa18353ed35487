"""Signals that arrive while a server loads: it does not end, and handles them when it is ready."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.server.restart.hot import HotServed
from tests.support.applications import application
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

# Sends signals to itself when the command line loads its first library, long before a port is open. The processes that
# this one starts do not.
SENDS_SIGNALS = """
import os, runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            for number in os.environ.pop("SEND", "").split():
                os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Finder())
runpy.run_module("smqrt", run_name="__main__", alter_sys=True)
"""


class SignalledServed(HotServed):
    """A server that gets signals while it loads."""

    program = ("-c", SENDS_SIGNALS)


def page(served: Served) -> bytes:
    with urllib.request.urlopen(served.url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=["one", "workers"])
def test_signals_while_the_program_loads(workers: list[str], tmp_path: Path) -> None:
    app = application(tmp_path / "app", index="page")
    numbers = " ".join(str(int(number)) for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2))
    served = SignalledServed(app, *workers, env={"SEND": numbers})
    try:
        if workers:
            served.wait_for("^restart: 2 new workers serve")
        else:
            served.wait_for("state of the server")
            served.next_process()
        assert page(served) == b"page"
        assert served.output.count("listening on http://") == 1 + (not workers), served.output
    finally:
        served.end()


def test_signals_while_applications_load(serve: Callable[..., Served], tmp_path: Path) -> None:
    """The state is printed at once: it shows what a .preload waits for. What needs a running server is done later."""
    app = application(tmp_path / "app", 'io:open("begun", "w"):close() while not io:stat"go" do ba.sleep(20) end')
    served = serve(app)
    wait_until((app / "begun").exists, served.lines)
    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1):
        served.process.send_signal(number)
    served.wait_for("state of the server")
    assert "restart:" not in served.output
    (app / "go").touch()
    try:
        served.wait_for(r"^restart: process \d+ serves")
    finally:
        pids = [int(line.split()[2]) for line in served.lines if line.startswith("restart: process")]
        for pid in set(pids):
            os.kill(pid, signal.SIGTERM)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


def test_forwarded_signals_do_not_end_loading_workers(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve(application(tmp_path / "app", index="page"), "--workers", "2")
    wait_until(lambda: catches(served.process.pid, signal.SIGUSR1), served.lines)
    while "workers: processes" not in served.output:
        served.process.send_signal(signal.SIGUSR1)  # the supervisor passes it on to workers that have just begun
        time.sleep(0.02)
        assert served.process.poll() is None, served.output
    assert page(served) == b"page"
    assert "ended by SIG" not in served.output
    assert served.stop() == 0
