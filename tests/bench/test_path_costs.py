"""With nothing enabled, a message, turn, connect and page make no more calls and allocations than they did."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"

pytestmark = pytest.mark.servers

LIMITS = {
    "message": {"python": 0, "builtin": 0, "system": 4, "allocations": 0},
    "fan-out": {"python": 6, "builtin": 21, "system": 5, "allocations": 18},
    "turn": {"python": 10, "builtin": 11, "system": 107, "allocations": 16},
    "connect": {"python": 186, "builtin": 173, "system": 21, "allocations": 210},
    "page": {"python": 62, "builtin": 52, "system": 5, "allocations": 98},
}
"""What `scripts/bench/path_costs` printed; lower a limit when the code costs less. `--list` names the calls."""
TOLERANCES = {"python": 0.02, "builtin": 0.02, "system": 0.02, "allocations": 0.1}
"""On a busy machine a path takes longer, and timers of the server, which allocate much, run meanwhile."""
OTHERS = {"message": 0.8, "fan-out": 0.7, "turn": 5, "connect": 0.7, "page": 0.7}
"""What the server's timers add meanwhile. Less than 1, the cost of one more step; such a step adds 50 to a turn."""


@pytest.mark.timeout(300)
def test_the_paths_cost_no_more_than_they_did(tmp_path: Path) -> None:
    report = tmp_path / "costs.json"
    command = [sys.executable, str(BENCH / "path_costs.py"), "--json", str(report)]
    lowest: dict[str, dict[str, float]] = {path: dict.fromkeys(limits, inf) for path, limits in LIMITS.items()}
    for _ in range(3):  # on a busy machine more timers run in the time of one message
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(report.read_text())
        lowest = {
            path: {kind: min(low, found[path][kind]) for kind, low in lows.items()} for path, lows in lowest.items()
        }
        over = {
            f"{path}: {kind}": (lowest[path][kind], limit)
            for path, limits in LIMITS.items()
            for kind, limit in limits.items()
            if lowest[path][kind] > limit * (1 + TOLERANCES[kind]) + OTHERS[path]
        }
        if not over:
            return
    raise AssertionError(f"{over}\n{done.stdout}")
