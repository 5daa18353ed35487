"""Clients that flood what an application handles itself: `subscribe` and `on` of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq
from tests.device import RAW_HEADERS, Device, publish, request
from tests.hostile.conftest import Besieged

LUA = """
smq = require "smq.hub".create()
smq:subscribe("self", {onmsg = function() %s end})
"""
PYTHON = """
import gevent
from smqrt import hub

smq = hub.create()


@smq.on("self")
def on_message(message):
    %s


def connect(request, relpath):
    return smq.connect(request) if relpath == "smq.lsp" else False


dir.setfunc(connect)
"""
APPS = {
    "Lua": {".preload": LUA % "", "smq.lsp": "<?lsp app.smq:connect(request) ?>"},
    "Lua, never returns": {".preload": LUA % "ba.sleep(1000000)", "smq.lsp": "<?lsp app.smq:connect(request) ?>"},
    "Python": {".preload.py": PYTHON % "pass"},
    "Python, never returns": {".preload.py": PYTHON % "gevent.sleep(1000)"},
}


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("size_bytes", [0, 1000])
def test_a_flood_to_a_handler(besiege: Callable[..., Besieged], tmp_path: Path, name: str, size_bytes: int) -> None:
    for file, text in APPS[name].items():
        (tmp_path / "flooded").mkdir(exist_ok=True)
        (tmp_path / "flooded" / file).write_text(text)
    besieged = besiege(tmp_path / "flooded")
    device = Device(("127.0.0.1", besieged.port))
    head = request(RAW_HEADERS, target="/flooded/smq.lsp").replace(b"Host: test", b"Host: localhost")
    device.send_bytes(head).read_head().hello().connect(b"flood-1")
    packet = smq.frame(publish(1, device.etid, b"x" * size_bytes))
    data = packet * ((50 << 20) // len(packet) if size_bytes else 100_000)
    with besieged.attack(f"SMQ: {len(packet)}-byte messages to a handler ({name})") as attack:
        device.send_bytes(data).send(b"\x0c")
        attack.sent(len(data))
        device.sock.settimeout(60)
        device.expect(smq.PONG)
    device.close()
