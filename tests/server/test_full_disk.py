"""SIGTERM while the disk is full: the server ends in its time, and counts what it could not write."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.conftest import Served
from tests.server.restart.hot import HotServed, application
from tests.support.device import publish
from tests.support.waiting import wait_until

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
    lost = re.search(r"journal was closed with (\d+) messages that could not be written", served.output)
    assert re.search(r"names: closed with [1-9]\d* unsaved last values", served.output), served.output
    assert lost, served.output
    assert "Traceback" not in served.output

    device.until_end(torn=True)  # what was not read of it is its own to send again
    command = [sys.executable, "-m", "smqrt", "journal", "stats", "--json", str(small_disk / "journal")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert '"news": 1' in ran.stdout, ran.stdout
    assert 0 < int(lost[1]) <= MESSAGES


def test_the_access_log_goes_on_with_a_new_line(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "page.txt").write_text("hello")
    log = small_disk / "access.log"
    log.write_text('{"of a server that was killed in the mid')
    served = Served(tmp_path / "app", "--log-format", "json", "--log-access", log)
    url = served.wait_for(r'"message": "listening on (http://[^"]+)"')[1]
    ask(url, "before", 1)
    wait_until(lambda: "before" in log.read_text(), served.lines)
    fill(small_disk)
    asked = 0
    while "can't be written: [Errno 28]" not in served.output:
        ask(url, "full", 20)
        asked += 20
    is_half = not log.read_text().endswith("\n")  # unless a page of the disk ends with a line
    (small_disk / "filler").unlink()
    ask(url, "after", 1)
    wait_until(lambda: "discarded" in log.read_text(), served.lines)
    assert served.stop() == 0
    lines = log.read_text().splitlines()
    whole, halves = [], []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except ValueError:
            halves.append(line)
    assert halves[0] == lines[0]
    assert len(halves) == 1 + is_half, "of the server that was killed, and where the disk was full"
    written = sum("full" in line.get("path", "") for line in whole)
    [discarded] = [int(line["detail"].split()[0]) for line in whole if "were discarded" in line.get("detail", "")]
    assert written + discarded == asked
    assert any("after" in line.get("path", "") for line in whole[-2:])


def ask(url: str, what: str, count: int) -> None:
    with requests.Session() as session:
        for _ in range(count):
            assert session.get(f"{url}/page.txt?{what}", timeout=5).text == "hello"
