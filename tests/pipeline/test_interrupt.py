"""Ctrl-C, as a terminal sends it: SIGINT to the driver, the JVM and the helpers at once. And SIGTERM of an operator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.journal.sensor_rows import readings, write
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.terminal import START_S, STOP_S, Terminal, alive
from tests.support.waiting import wait_until

KEPT = """
@table("kept")
def kept(rows): return rows.select(waits("n").alias("n"))
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    hub = JournalingHub(tmp_path / "app")
    opened = Terminal(tmp_path / "app", hub.journal)
    yield opened
    opened.close()
    hub.stop()


def finishes_its_micro_batch(terminal: Terminal, everybody: dict[int, str]) -> None:
    terminal.go.touch()
    assert terminal.wait() == 0, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle"), terminal.results) == ("stopped", "stopped", [b'{"n":1}'])
    assert not terminal.traces, terminal.printed
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_what_was_submitted_finishes_its_micro_batch(terminal: Terminal) -> None:
    """The process that was started is spark-submit's; the driver is its child. It is told twice, as a service manager
    and `smqrt serve` do, and again until it has ended.
    """
    terminal.submit("--master", "local[2]", "--from", "earliest", "--republish")
    terminal.wait_inside()
    everybody = terminal.everybody()
    assert terminal.process
    for _ in range(2):
        terminal.process.terminate()
        wait_until(lambda: "Ctrl-C again" in terminal.printed or terminal.ended, "it says what it does", STOP_S)
    terminal.go.touch()
    while not terminal.ended:
        terminal.process.terminate()
        time.sleep(0.05)
    finishes_its_micro_batch(terminal, everybody)


@pytest.mark.cluster
def test_signals_to_all_processes_finish_the_micro_batch(terminal: Terminal) -> None:
    """Ctrl-C, then SIGTERM as systemd sends it by default: also to helpers of Spark that have process groups."""
    terminal.start()
    terminal.wait_inside()
    everybody = terminal.everybody()
    assert {"java", "python"} <= {name.rstrip(".0123456789") for name in everybody.values()}
    terminal.send(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in terminal.printed or terminal.ended, "it says what it does", STOP_S)
    for pid in everybody:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert set(terminal.everybody()) >= set(everybody), terminal.printed
    finishes_its_micro_batch(terminal, everybody)
    assert (terminal.app / ".pipelines/echo/checkpoint/commits/0").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_a_signal_to_all_processes_while_spark_starts(terminal: Terminal, number: int) -> None:
    """SIGHUP is what a terminal that is closed sends. Signals without a meaning here change nothing."""
    terminal.start()
    wait_until(lambda: "java" in terminal.everybody().values() or terminal.ended, "the JVM starts", START_S)
    everybody = terminal.everybody()
    assert terminal.process
    driver = terminal.process.pid
    for other in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(driver, other)
    # The driver last, and late, as on a busy machine: Java is gone by then.
    for pid in sorted(everybody, key=lambda pid: pid == driver):
        if pid == driver:
            wait_until(lambda: not any(alive(pid) for pid in everybody if pid != driver), "the JVM ends", STOP_S)
            time.sleep(1)
        with suppress(ProcessLookupError):  # a helper that has only begun ends by itself
            os.kill(pid, number)
    assert terminal.wait() == 0, terminal.printed
    assert not terminal.traces, terminal.printed
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_a_jvm_that_crashes(terminal: Terminal) -> None:
    terminal.start()
    terminal.wait_inside()
    [jvm] = [pid for pid, name in terminal.everybody().items() if name == "java"]
    os.kill(jvm, signal.SIGKILL)
    assert terminal.wait() == 1, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle"), terminal.results) == ("failed", "failed", [])
    assert not terminal.traces, terminal.printed
    told = [line for line in terminal.printed.splitlines() if "Spark has ended" in line and "batch" not in line]
    assert len(told) == 2, terminal.printed


@pytest.mark.cluster
def test_a_second_ctrl_c_stops_immediately(terminal: Terminal) -> None:
    terminal.start("run", "echo", "--from", "earliest", "--republish")
    terminal.wait_inside()
    terminal.send(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in terminal.printed, "it says what it does", STOP_S)
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 128 + signal.SIGINT, terminal.printed
    assert terminal.results == []
    assert not terminal.traces, terminal.printed


OTHERS = {
    "backfill": ("backfill", "kept", "--from", "earliest"),
    "test": ("test", "--journal", "{app}/.journal", "--update"),
}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "number", "code"), [("backfill", signal.SIGINT, 130), ("test", signal.SIGTERM, 143)]
)
def test_other_commands_leave_nothing_half_done(terminal: Terminal, command: str, number: int, code: int) -> None:
    words = [word.format(app=terminal.app) for word in OTHERS[command]]
    terminal.write(KEPT)
    terminal.start(*words)
    terminal.wait_inside()
    everybody = terminal.everybody()
    terminal.send(number)
    assert terminal.wait() == code, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces, terminal.printed
    assert terminal.written == []
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)
    assert list((terminal.app / "tmp").glob("smqrt-test-*")) == []


@pytest.mark.cluster
def test_doctor_while_spark_starts(terminal: Terminal) -> None:
    terminal.begin("pipeline", "doctor", "--app", str(terminal.app))
    wait_until(lambda: "java" in terminal.everybody().values() or terminal.ended, "the JVM starts", START_S)
    everybody = terminal.everybody()
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 130, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces, terminal.printed
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_compacting_with_spark(terminal: Terminal, tmp_path: Path) -> None:
    journal = tmp_path / "recorded"
    write(journal, readings(200), segment_rows=100)
    terminal.begin("journal", "compact", str(journal), "--json", "variant")
    wait_until(lambda: (journal / ".variant/rows.parquet").exists() or terminal.ended, "Spark is to write", START_S)
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 130, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces, terminal.printed
    assert (list(journal.glob("data/*/*/*.parquet")), (journal / ".variant").exists()) == ([], False)
