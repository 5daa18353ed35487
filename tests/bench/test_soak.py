"""The soak in its short form: half a minute, as often a look at the memory as in a minute, fewer clients and messages,
the same bars but that of pings, which others on the machine would break: pings, as fast as they go, are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
SHORT = ["--minutes", "0.5", "--slice-s", "5", "--idle", "1000", "--idle-tls", "200", "--rate", "1000"]
SHORT += ["--no-ping-bar", "--ping-s", "0.3"]

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]


def test_nothing_is_lost_and_memory_stays_flat() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "bench" / "soak.py"), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"over TLS": [\n   200,' in done.stdout
