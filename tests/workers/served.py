"""The application, the processes and the clients of a server with several workers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from smqrt.wire import smq as wire
from tests.conftest import Served
from tests.support.applications import application
from tests.support.device import Device

PRELOAD = """
smq = require "smq.hub".create {
   name = "main",
   onconnect = function(etid, info) smq:publish(tostring(info.restored), "met", etid) end,
}
if io:stat "wrong" and mako.worker == 1 then error "no luck" end
if io:stat "slow" then ba.sleep(400) end
"""

PAGES = {
    "who": "<?lsp response:write(tostring(mako.worker)) ?>",
    "smq": "<?lsp app.smq:connect(request) ?>",
    "exit": "<?lsp mako.exit(7) ?>",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application with a hub at `/smq.lsp`, and `/who.lsp` that says which worker answers."""
    return application(tmp_path / "app", PRELOAD, **PAGES)


def workers_of(served: Served) -> dict[int, int]:
    """The process of each worker that is known at the moment, by number."""
    first = served.wait_for(r"workers: processes (.*)$")[1].split(", ")
    found = {number: int(pid) for number, pid in enumerate(first)}
    return found | {int(n): int(pid) for n, pid in re.findall(r"^w(\d): process (\d+) serves$", served.output, re.M)}


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "smqrt", *map(str, words)], capture_output=True, text=True, timeout=30)


def they_hear_each_other(devices: list[Device], topic: int) -> None:
    """The first one reaches the others: by the topic, and by the ETIDs that they have had from the start."""
    for _ in range(50):  # the links between the workers may be younger than these words
        devices[0].publish(topic, b"to all")
        time.sleep(0.02)
    for one in devices[1:]:
        devices[0].publish(one.etid, b"to you")
        received = [payload(one)]
        while received[-1] != b"to you":
            received.append(payload(one))
        assert b"to all" in received


def payload(device: Device) -> bytes:
    return wire.unpack_publish(wire.frame(device.receive()))[3]


def asked(served: Served, path: str, body: object = None) -> Any:
    """What the admin listener answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{served.admin_url}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        text = answer.read().decode()
    return json.loads(text) if path.startswith("api") else text
