"""The process that runs a query, as other processes see it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from smqrt.pipeline import status


def test_a_claim_holds_until_it_is_released(tmp_path: Path) -> None:
    query = tmp_path / "state" / "hot"
    assert status.running(query) is None
    status.claim(query)
    assert status.running(query) == os.getpid()
    status.release(query)
    assert status.running(query) is None
    assert list(query.iterdir()) == []


def test_a_process_that_ended_runs_nothing(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from smqrt.pipeline import status; status.claim(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "pid").exists()
    assert status.running(tmp_path) is None


def test_a_zombie_process_runs_nothing(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from smqrt.pipeline import status; status.claim(Path({str(tmp_path)!r}))"
    child = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert status.running(tmp_path) is None
    child.wait()


def test_a_reused_process_number_is_not_a_pipeline(tmp_path: Path) -> None:
    status.claim(tmp_path)
    pid, started, host = (tmp_path / "pid").read_text().split()
    (tmp_path / "pid").write_text(f"{pid} {int(started) - 1} {host}")
    assert status.running(tmp_path) is None
    assert status.elsewhere(tmp_path) is None


def test_a_process_of_another_machine_is_left_to_it(tmp_path: Path) -> None:
    status.claim(tmp_path)
    pid, started, _ = (tmp_path / "pid").read_text().split()
    (tmp_path / "pid").write_text(f"{pid} {started} other.example")
    assert status.running(tmp_path) is None
    assert status.elsewhere(tmp_path) == "other.example"
    status.release(tmp_path)
    assert (tmp_path / "pid").exists()


@pytest.mark.parametrize("text", ["", "nonsense", "12", "12 13", "-1 5 HOST", "99999999 5 HOST"])
def test_a_damaged_file_has_no_users(tmp_path: Path, text: str) -> None:
    (tmp_path / "pid").write_text(text.replace("HOST", platform.node()))
    assert status.running(tmp_path) is None


def test_only_the_owner_releases(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(f"1 5 {platform.node()}\n")
    status.release(tmp_path)
    assert (tmp_path / "pid").exists()


def test_a_stop_is_asked_for_once(tmp_path: Path) -> None:
    status.claim(tmp_path)
    assert not status.stop_requested(tmp_path)
    status.request_stop(tmp_path)
    assert status.stop_requested(tmp_path)
    status.claim(tmp_path)
    assert not status.stop_requested(tmp_path), "a request is for the process that ran then"
