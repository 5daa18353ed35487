"""The latency harness: strangers do their worst, and a healthy client must not notice.

A test attacks the server of `besieged` inside `with besieged.attack("name of the case") as attack:` and tells with
`attack.sent(count)` how many bytes it sent. At the end of the block the harness checks that

* no turn of the event loop took more than HELD_MS of CPU (and with `wall=True`, of wall time: for disks and locks),
* the server's memory grew by no more than `grows_bytes`,
* the healthy client, a process of its own, got every message back, within HEALTHY_MS.

None of it depends on who else uses the machine: turns are measured in CPU time, and from wall time and from what the
healthy client waits is taken off when somebody else had the cores. With $SMQRT_HOSTILE_TABLE the figures are appended
to that file, a Markdown row per case.

A case whose figures are over a limit is measured twice more, and fails when they are so each time: what shares the
processor with a virtual machine makes the same work cost four times the CPU time at moments. Another failure counts at
once. Each measurement that was not the last is in the list of warnings.

The server runs the applications in `tests/hostile/apps`: `lua` (pages that read bodies, a broker at /lua/smq.lsp) and
`watch` (the meter, a broker at /watch/smq). A test that needs another application or settings makes its own with
`besiege(folder, "--setting", ...)`; the meter's application is added by itself.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.conftest import REPOSITORY, Served
from tests.support.factory import Factory

HELD_MS = 50.0
HEALTHY_MS = 1000.0
GROWS_BYTES = 64 << 20
MEASURED_TIMES = 3
OVER_LIMIT = pytest.StashKey[str]()
RESTS_S = 0.1  # of CPU in a second, when all attacks are over; the meter itself takes some 10 ms
BACKLOG_S = 20  # until then a server may process what floods have left in the buffers of sockets
HERE = Path(__file__).parent
APPS = HERE / "apps"


class Measured(AssertionError):
    """A figure is over its limit."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Remember which figure was over its limit."""
    if call.excinfo is not None and isinstance(call.excinfo.value, Measured):
        item.stash[OVER_LIMIT] = str(call.excinfo.value)
    return (yield)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again while a figure is over its limit: see above."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(MEASURED_TIMES):
        item.stash[OVER_LIMIT] = ""
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        others = [report for report in reports if report.failed and report.when != "call"]
        if not item.stash[OVER_LIMIT] or others or attempt == MEASURED_TIMES - 1:
            break
        item.warn(pytest.PytestWarning(f"measured again: {item.stash[OVER_LIMIT]}"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def check(value: float, limit: float, what: str) -> None:
    if value > limit:
        raise Measured(f"{what}; the limit is {limit:,.0f}")


class Attack:
    """What one case did, and what it cost the others.

    Attributes:
        stopped_ms: for how long the test itself has held the server's process, at most.
    """

    stopped_ms = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent_bytes = 0
        self.cpu_ms = self.wall_ms = self.healthy_ms = float("inf")
        self.grown_bytes = 0

    def sent(self, count: int) -> None:
        """Counts bytes that the stranger sent."""
        self.sent_bytes += count

    def row(self) -> str:
        """Returns the Markdown row: case, bytes sent, longest turn (CPU), healthy client's worst, memory."""
        held, waited, mib = f"{self.cpu_ms:.0f} ms", f"{self.healthy_ms:.0f} ms", self.grown_bytes / (1 << 20)
        return f"| {self.name} | {self.sent_bytes:,} | {held} | {waited} | {mib:+.0f} MiB |"


class Besieged:
    """A server under attack, and its healthy client.

    Args:
        arguments: of `smqrt serve`.
        served_by: what starts the server.

    Attributes:
        served: the process; port: where it listens on 127.0.0.1.
    """

    def __init__(self, *arguments: str | Path, served_by: type[Served] = Served) -> None:
        self.served = served_by(APPS / "watch", *arguments)
        self.port = self.served.port
        command = [sys.executable, "-m", "tests.hostile.healthy", str(self.port), str(self.served.process.pid)]
        pipe = subprocess.PIPE
        self._healthy = subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True)
        assert self._answer() == "ready"

    def _tell(self, command: str) -> None:
        assert self._healthy.stdin
        self._healthy.stdin.write(command + "\n")
        self._healthy.stdin.flush()

    def _answer(self) -> str:
        assert self._healthy.stdout
        return self._healthy.stdout.readline().strip()

    @property
    def alive(self) -> bool:
        """Whether server and healthy client can go on."""
        return self.served.process.poll() is None and self._healthy.poll() is None

    @contextmanager
    def attack(
        self, name: str, *, wall: bool = False, grows_bytes: int = GROWS_BYTES, held_ms: float = HELD_MS
    ) -> Iterator[Attack]:
        """Measures what happens inside the block, and checks it at the end."""
        attack, before = Attack(name), self._held()
        self._tell("begin")
        yield attack
        self._tell("end")
        attack.healthy_ms = float(self._answer() or "inf")
        self._read_meter(attack, before["resident_bytes"])
        self._report(attack)
        check(attack.cpu_ms, held_ms, f"a turn of the loop took {attack.cpu_ms:.0f} ms of CPU")
        if wall:
            check(attack.wall_ms, held_ms, f"a turn of the loop took {attack.wall_ms:.0f} ms")
        check(attack.grown_bytes, grows_bytes, f"the server grew by {attack.grown_bytes:,} bytes")
        limit_ms = HEALTHY_MS + attack.stopped_ms
        check(attack.healthy_ms, limit_ms, f"the healthy client waited {attack.healthy_ms:.0f} ms")

    @contextmanager
    def stopped(self, attack: Attack) -> Iterator[None]:
        """Holds the server's process inside the block, so that it finds at once what comes meanwhile."""
        began_s = time.monotonic()
        self.served.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.served.process.send_signal(signal.SIGCONT)
            attack.stopped_ms = max(attack.stopped_ms, 1000 * (time.monotonic() - began_s))

    def _read_meter(self, attack: Attack, before_bytes: float) -> None:
        try:
            held = self._held()
        except OSError:
            return  # it hangs: everything stays infinite
        attack.cpu_ms, attack.wall_ms = held["cpu_ms"], held["wall_ms"]
        attack.grown_bytes = int(held["resident_bytes"] - before_bytes)

    def _report(self, attack: Attack) -> None:
        if table := os.environ.get("SMQRT_HOSTILE_TABLE"):
            with open(table, "a", encoding="utf-8") as file:
                file.write(attack.row() + "\n")

    def _held(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/watch/held")
        held: dict[str, float] = json.loads(connection.getresponse().read())
        connection.close()
        return held

    def open(self, timeout_s: float = 20.0) -> socket.socket:
        """Returns a plain connection to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def post(self, path: str, body: bytes, content_type: str, attack: Attack) -> bytes:
        """Sends a POST on a connection of its own and returns the raw answer, empty when there was none in time."""
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n"
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        return self.exchange(head.encode() + body, attack)

    def exchange(self, data: bytes, attack: Attack, timeout_s: float = 20.0) -> bytes:
        """Sends bytes and returns what came until the end of the connection, or until `timeout_s` of silence."""
        answer = bytearray()  # of bytes, each piece would copy all before it
        with self.open(timeout_s) as sock:
            try:
                sock.sendall(data)
                while more := sock.recv(65536):
                    answer += more
            except OSError:
                pass  # a refusal may come as a reset; what came before counts
        attack.sent(len(data))
        return bytes(answer)

    def cpu_s(self, during_s: float) -> float:
        """Returns how many seconds of CPU the server uses in that time."""
        began_s = self._used_s()
        time.sleep(during_s)
        return self._used_s() - began_s

    def _used_s(self) -> float:
        fields = Path(f"/proc/{self.served.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc(5)

    def stop(self) -> None:
        self._healthy.kill()
        self._healthy.wait()
        self.served.process.kill()
        self.served.wait()


@pytest.fixture(scope="session")
def _besieged_once() -> Iterator[list[Besieged]]:
    running: list[Besieged] = []
    yield running
    for one in running:
        end_s = time.monotonic() + BACKLOG_S
        while (busy_s := one.cpu_s(during_s=1.0) if one.alive else 0.0) >= RESTS_S and time.monotonic() < end_s:
            pass
        one.stop()
        assert busy_s < RESTS_S, f"nobody asks anything, and the server used {busy_s:.2f} s of CPU in a second"


@pytest.fixture
def besieged(_besieged_once: list[Besieged]) -> Besieged:
    """The server that the cases share; a new one when a case stopped it."""
    if _besieged_once and not _besieged_once[-1].alive:
        _besieged_once.pop().stop()
    if not _besieged_once:
        _besieged_once.append(Besieged(APPS / "lua"))
    return _besieged_once[-1]


@pytest.fixture
def besiege() -> Iterator[Callable[..., Besieged]]:
    """A factory: `besiege(folder, "--setting", "value")` gives a server of its own, stopped after the test."""
    with Factory(Besieged, Besieged.stop) as start:
        yield start
