"""The commands of `smqrt cluster`."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import Served

SOON = {"reconnect_delay": 0.1, "reconnect_delay_max": 0.5}


def smqrt_cluster(served: Served, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "smqrt", "cluster", command, "--url", served.admin_url, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def status(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    return smqrt_cluster(served, "status", *words)
