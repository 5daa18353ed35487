"""SIGTERM while the disk is full: the server ends in its time, and counts what it could not write."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import publish
from tests.restart.hot import HotServed, application

pytestmark = pytest.mark.servers

DISK_BYTES = 2 << 20
MESSAGES = 300
APPLICATION = 'smq = require "smq.hub".create {lastvalue = "#", persist = "%s/names", journal = "%s/journal"}'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two mebibytes."""
    at = tmp_path / "disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "smqrt", str(at)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert mounted.returncode == 0, f"to mount a disk takes root: {mounted.stderr}"
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def fill(disk: Path) -> None:
    """Leaves no byte of it."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (65536, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_the_server_ends_on_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    app = application(tmp_path / "app", APPLICATION % (small_disk, small_disk))
    served = HotServed(app, "--drain-window-s", "0.2")
    device = served.device()
    topic = device.create(b"news")
    device.publish(topic, b"before").sync()
    time.sleep(1.5)  # it is on the disk, and its last value
    fill(small_disk)
    for number in range(MESSAGES):
        device.send_bytes(device.framed(publish(topic, device.etid, b"%d" % number + b"x" * 1000)))
    served.wait_for("can't be written .No space left on device")
    began_s = time.monotonic()
    os.kill(served.pid, signal.SIGTERM)
    assert served.process.wait(40) == 0
    assert time.monotonic() - began_s < 25
    served.end()
    lost = re.search(r"journal ends with (\d+) messages that the disk did not take", served.output)
    assert re.search(r"names: closed with [1-9]\d* last values that the disk did not take", served.output), (
        served.output
    )
    assert lost, served.output
    assert "Traceback" not in served.output

    device.until_end(torn=True)  # what was not read of it is its own to send again
    command = [sys.executable, "-m", "smqrt", "journal", "stats", "--json", str(small_disk / "journal")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert '"news": 1' in ran.stdout, ran.stdout
    assert 0 < int(lost[1]) <= MESSAGES
