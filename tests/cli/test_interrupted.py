"""Ctrl-C and SIGTERM in the middle of `smqrt journal`: one line, the exit code of a shell, and nothing half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from gevent import subprocess as green
from gevent.queue import Queue

from tests.cli.commands import Command
from tests.journal.sensor_rows import NOON_US, readings, row, write
from tests.support.local_broker import LocalBroker

ROWS = 120_000
SIGNALS = [pytest.param(signal.SIGINT, 130, id="Ctrl-C"), pytest.param(signal.SIGTERM, 143, id="SIGTERM")]
STOP_S = 60


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal that takes some seconds to be read."""
    folder, some = tmp_path_factory.mktemp("recorded") / "journal", [*readings(10_000)]
    times = ((seq, NOON_US + seq * 1_000_000) for seq in range(ROWS))
    rows = (some[seq % len(some)]._replace(seq=seq, ts_us=ts_us) for seq, ts_us in times)
    write(folder, rows, batch=1000, segment_rows=ROWS // 4)
    write(folder, [row(ROWS, NOON_US + ROWS * 1_000_000)])
    return folder


@pytest.fixture
def journal(tmp_path: Path, recorded: Path) -> Path:
    subprocess.run(["cp", "-r", recorded, tmp_path], check=True)
    return tmp_path / "journal"


def started(*words: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "smqrt", "journal", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + STOP_S
    while not condition():
        assert process.poll() is None, "it ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("ending", "number", "code"), [("jsonl", signal.SIGINT, 130), ("parquet", signal.SIGTERM, 143)]
)
def test_export(journal: Path, ending: str, number: int, code: int) -> None:
    target = journal.parent / "out"
    target.mkdir()
    words = ("export", journal, "--to", target / f"all.{ending}")
    process = started(*words)
    until(lambda: any(target.iterdir()), process)
    process.send_signal(number)
    assert (process.communicate(timeout=STOP_S), process.returncode) == (("", "Interrupted.\n"), code)
    assert files(target) == set()
    assert Command("journal").done(*words, "--until", "1000").startswith("1,000 messages in ")
    assert files(target) == {target / f"all.{ending}"}


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_compact(journal: Path, number: int, code: int) -> None:
    before = files(journal / "wal")
    process = started("compact", journal, "--grace", "0s")
    until(lambda: (journal / "data").exists() and bool(files(journal / "data")), process)
    process.send_signal(number)
    assert (process.communicate(timeout=STOP_S), process.returncode) == (("", "Interrupted.\n"), code)
    assert files(journal / "wal") == before
    again = Command("journal").done
    assert again("compact", journal).startswith(f"4 segments with {ROWS:,} messages: ")
    assert {path.suffix for path in files(journal / "data")} == {".parquet"}
    assert "no faults\n" in again("verify", journal)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_verify(journal: Path, number: int, code: int) -> None:
    index = sorted(journal.rglob("*.idx"))[1]
    index.unlink()
    os.mkfifo(index)  # the command waits for its content: reading a whole journal of this size takes 20 ms
    process = started("verify", journal)
    opened: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):
            opened.append(os.open(index, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    until(is_read, process)
    process.send_signal(number)
    os.close(opened[0])  # after the signal: Python handles it when the read ends, if it arrived just before the read
    assert (process.communicate(timeout=STOP_S), process.returncode) == (("", "Interrupted.\n"), code)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_replay_says_where_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    """Those that were due have arrived; the one that it waited for is the first of the second run."""
    times_us = [NOON_US, NOON_US + 1, NOON_US + 3_600_000_000]
    write(tmp_path, [row(seq, ts_us, "t", b"%d" % seq) for seq, ts_us in enumerate(times_us)])
    broker = LocalBroker()
    try:
        got: Queue[bytes] = Queue()
        broker.smq.subscribe("t", lambda data, *_: got.put(bytes(data)))
        address = f"smq://127.0.0.1:{broker.port}/smq.lsp"
        command = [sys.executable, "-m", "smqrt", "journal", "replay", str(tmp_path), address]
        process = green.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert [got.get(timeout=STOP_S), got.get(timeout=STOP_S)] == [b"0", b"1"]
        process.send_signal(number)
        told = process.communicate(timeout=STOP_S)[1].decode()
        assert (told, process.returncode) == ("Interrupted. Continue with --from 2026-11-20T13:00:00.000000Z\n", code)
        again = green.Popen([*command, *told.split()[3:5]], stdout=subprocess.PIPE)
        assert again.communicate(timeout=STOP_S)[0] == b"1 message published\n"
        assert [got.get(timeout=STOP_S), got.empty()] == [b"2", True]
    finally:
        broker.close()
