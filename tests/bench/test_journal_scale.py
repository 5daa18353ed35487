"""The bench of large journals runs, with Spark too, and what it reads is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"

pytestmark = pytest.mark.cluster  # Spark in a process of its own


def test_every_measure_runs_on_a_small_journal() -> None:
    command = [sys.executable, str(BENCH / "journal_scale.py"), "--rounds", "1", "--shapes", "3:2", "--spark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    figures = {name.strip(): [float(figure) for figure in cell.split("/")] for name, cell in rows[1:]}
    assert {"a plan of all segments", "merging an hour of 12 files", "Spark: the same, s by the clock"} <= set(figures)
    assert all(figure >= 0 for cell in figures.values() for figure in cell)
    cold_ms, warm_ms = figures["merging an hour of 12 files"]
    assert warm_ms < cold_ms, "the second time there is nothing to merge"
