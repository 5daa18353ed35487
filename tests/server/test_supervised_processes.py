"""Processes beside the server, real ones: small scripts of Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.server.applications import Pipelines, RestartDelays, SupervisedProcess
from tests.support.clock import undisturbed_s
from tests.support.waiting import wait_until

QUICK = RestartDelays(first_s=0.05, longest_s=0.2, steady_s=30, stop_s=0.5)
SLEEPER = "import time; print('ready'); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
WITH_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}])
print('child', child.pid)
time.sleep(60)
"""


class Run:
    """A supervised script and what was told about it."""

    def __init__(self, source: str, patience: RestartDelays = QUICK) -> None:
        self.lines: list[str] = []
        self.supervised = SupervisedProcess("p", [sys.executable, "-c", source], self.lines.append, patience)

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Waits until so many lines match; gives the first group of each."""
        found = lambda: re.findall(f"^{pattern}$", "\n".join(self.lines), re.MULTILINE)  # noqa: E731
        wait_until(lambda: len(found()) >= count, f"{count} times {pattern!r}")
        return found()


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """A factory: `start(source)` runs a script; it is stopped after the test."""
    runs: list[Run] = []

    def begin(source: str, patience: RestartDelays = QUICK) -> Run:
        runs.append(Run(source, patience))
        runs[-1].supervised.start()
        return runs[-1]

    yield begin
    for run in runs:
        run.supervised.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_its_lines_are_passed_on_with_its_name(start: Callable[..., Run]) -> None:
    run = start("import sys; print('one'); print('two \\u00fc', file=sys.stderr); sys.stdout.buffer.write(b'\\xff')")
    run.wait_for(r"p: started, process \d+")
    run.wait_for(r"p \| one")
    run.wait_for(r"p \| two ü")
    run.wait_for(r"p \| \ufffd")
    wait_until(lambda: run.supervised.state == "ended")
    assert not [line for line in run.lines if "again" in line]


def test_what_fails_starts_again_later_and_later(start: Callable[..., Run]) -> None:
    run = start("import sys; sys.exit(3)")
    waits = run.wait_for(r"p: ended with exit code 3; starting again in (\S+) s", 4)
    assert waits[:4] == ["0.05", "0.1", "0.2", "0.2"]
    assert run.supervised.state in ("running", "waiting")


def test_a_long_run_begins_with_the_short_wait_again(start: Callable[..., Run]) -> None:
    run = start("import sys; sys.exit(3)", RestartDelays(0.05, 1, steady_s=0))
    assert run.wait_for(r".*again in (\S+) s", 3)[2] == "0.05"


def test_a_killed_one_starts_again(start: Callable[..., Run]) -> None:
    run = start(SLEEPER)
    run.wait_for(r"p \| ready")
    os.kill(int(run.wait_for(r"p: started, process (\d+)")[0]), signal.SIGKILL)
    run.wait_for(r"p: ended by SIGKILL; starting again in 0.05 s")
    run.wait_for(r"p \| ready", 2)


def test_stop_ends_it_and_it_stays_so(start: Callable[..., Run]) -> None:
    run = start(SLEEPER, RestartDelays(stop_s=30))
    run.wait_for(r"p \| ready")
    began = time.monotonic()
    run.supervised.stop()
    assert time.monotonic() - began < 15
    assert run.supervised.state == "stopped"
    pid = int(run.wait_for(r"p: started, process (\d+)")[0])
    assert not alive(pid)
    gevent.sleep(0.2)  # it would be started again in 0.05 s
    assert len(run.wait_for(r"p: started, process (\d+)")) == 1


def test_processes_that_ignore_sigterm_are_killed(start: Callable[..., Run]) -> None:
    run = start(STUBBORN)
    run.wait_for(r"p \| ready")
    began = time.monotonic()
    run.supervised.stop()
    assert 0.4 < time.monotonic() - began < 15
    assert not alive(int(run.wait_for(r"p: started, process (\d+)")[0]))


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_what_it_started_ends_with_it(start: Callable[..., Run], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.server.applications._GROUP_EXIT_S", 0.2)
    run = start(WITH_CHILD)
    child = int(run.wait_for(r"p \| child (\d+)")[0])
    run.wait_for(r"p \| ready")
    if how == "stop":
        run.supervised.stop()
    else:
        os.kill(int(run.wait_for(r"p: started, process (\d+)")[0]), signal.SIGKILL)
        run.wait_for(r"p: started, process (\d+)", 2)
    assert not alive(child)


def test_stop_while_it_starts_or_waits(start: Callable[..., Run]) -> None:
    run = start(SLEEPER)
    run.supervised.stop()
    assert run.lines == []
    waiting = start("import sys; sys.exit(1)", RestartDelays(first_s=30))
    waiting.wait_for(".*again in 30 s")
    began = time.monotonic()
    waiting.supervised.stop()
    assert time.monotonic() - began < 15
    waiting.supervised.start()
    waiting.wait_for(".*again in 30 s", 2)


def test_restart_gives_another_process(start: Callable[..., Run]) -> None:
    run = start(SLEEPER)
    run.wait_for(r"p \| ready")
    run.supervised.restart()
    run.supervised.start()  # runs already
    first, second = run.wait_for(r"p: started, process (\d+)", 2)
    assert first != second
    assert not alive(int(first))


def test_a_command_that_is_not_there() -> None:
    lines: list[str] = []
    missing = SupervisedProcess("p", ["/no/such/program"], lines.append, QUICK)
    missing.start()
    wait_until(lambda: lines)
    missing.stop()
    assert lines[0] == "p: /no/such/program can't be started: No such file or directory; starting again in 0.05 s"


def test_the_loop_goes_on_meanwhile(start: Callable[..., Run]) -> None:
    gaps: list[float] = []
    run = start("print('x' * 100000); " + SLEEPER)
    with gevent.Timeout(20):
        while not any("ready" in line for line in run.lines):
            before_s = undisturbed_s()
            gevent.sleep(0.001)
            gaps.append(undisturbed_s() - before_s)
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.2
    assert sum(line.count("x") for line in run.lines) == 100000


def test_a_killed_server_leaves_no_processes() -> None:
    source = f"""
import gevent, sys
from smqrt.server.applications import SupervisedProcess
SupervisedProcess("p", [sys.executable, "-c", {SLEEPER!r}], lambda line: print(line, flush=True)).start()
gevent.sleep(60)
"""
    server = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    pid = int(server.stdout.readline().rpartition(" ")[2])
    assert server.stdout.readline() == "p | ready\n"
    server.kill()
    server.wait()
    wait_until(lambda: not alive(pid))


def test_pipelines_are_those_of_applications_that_have_a_folder(tmp_path: Path) -> None:
    (tmp_path / "with" / "pipelines").mkdir(parents=True)
    (tmp_path / "without").mkdir()
    lines: list[str] = []
    pipelines = Pipelines([sys.executable, "-c", "import sys, time; print(sys.argv[1]); time.sleep(60)"], lines.append)
    for name in ("with", "without", "with"):
        pipelines.start(name, tmp_path / name)
    assert pipelines.states() == [(tmp_path / "with", "running")]
    wait_until(lambda: len(lines) >= 2)
    assert lines[1] == f"pipelines of with | {tmp_path / 'with'}"
    pipelines.restart(tmp_path / "without")
    pipelines.stop()
    assert pipelines.states() == [(tmp_path / "with", "stopped")]


@pytest.mark.servers
def test_a_hub_journal_is_compacted_beside_the_server(tmp_path: Path, serve: Any) -> None:
    settings = '{"compact": {"after": "0s", "schema": {"#": "n int"}}}'
    (tmp_path / ".preload.py").write_text(
        f"from smqrt import hub\nsmq = hub.create(journal={settings})\nsmq.publish({{'n': 1}}, 'a')\n"
    )
    first = serve(tmp_path)
    assert first.port
    name = re.escape(tmp_path.name)
    first.wait_for(f"^compaction of {name}: started, process")
    assert first.stop() == 0
    second = serve(tmp_path)
    second.wait_for(rf"^compaction of {name} \| 1 segment with 1 message: 1 file")
    assert second.stop() == 0
    assert "ended with" not in first.output + second.output
    assert len(list(tmp_path.glob(".journal/data/*/*/*.parquet"))) == 1
