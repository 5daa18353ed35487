"""Clients that flood what an application handles itself: `subscribe` and `on` of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq
from tests.hostile.conftest import Besieged
from tests.support.device import RAW_HEADERS, Device, publish, request

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


LUA_WORK = "local t = os.clock() + 0.001 while os.clock() < t do end"
PYTHON_WORK = """import time
import gevent
from smqrt import hub

handled = []


def work(*arguments):
    until_s = time.thread_time() + 0.001
    while time.thread_time() < until_s:
        pass
    return True


def wait_once(data, ptid, *numbers):
    if not handled:
        gevent.sleep(0.5)
    handled.append(ptid)
    work()
    if len(handled) == 400:
        smq.publish("all", ptid)


%s


def connect(request, relpath):
    return smq.connect(request) if relpath == "smq.lsp" else False


dir.setfunc(connect)
"""
LUA_PAGE = "<?lsp app.smq:connect(request) ?>"
WORK = {
    "Lua": {".preload": LUA % LUA_WORK, "smq.lsp": LUA_PAGE},
    "Lua, onpublish": {
        ".preload": f'smq = require "smq.hub".create{{onpublish = function() {LUA_WORK} return true end}}',
        "smq.lsp": LUA_PAGE,
    },
    "Python": {".preload.py": PYTHON_WORK % 'smq = hub.create()\nsmq.subscribe("self", onmsg=work)'},
    "Python, after a wait": {".preload.py": PYTHON_WORK % 'smq = hub.create()\nsmq.subscribe("self", onmsg=wait_once)'},
    "Python, onpublish": {".preload.py": PYTHON_WORK % "smq = hub.create(onpublish=work)"},
}


def connected(besiege: Callable[..., Besieged], folder: Path, files: dict[str, str]) -> tuple[Besieged, Device]:
    """A server with an application of these files, and a client of its broker."""
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    besieged = besiege(folder)
    device = Device(("127.0.0.1", besieged.port))
    head = request(RAW_HEADERS, target=f"/{folder.name}/smq.lsp").replace(b"Host: test", b"Host: localhost")
    device.send_bytes(head).read_head().hello().connect(b"flood-1")
    return besieged, device


@pytest.mark.parametrize("name", WORK)
def test_a_flood_to_a_handler_that_takes_a_millisecond(
    besiege: Callable[..., Besieged], tmp_path: Path, name: str
) -> None:
    besieged, device = connected(besiege, tmp_path / "working", WORK[name])
    data = smq.frame(publish(1, device.etid, b"")) * 400
    with besieged.attack(f"SMQ: 400 messages that take a millisecond each ({name})") as attack:
        device.send_bytes(data).send(b"\x0c")
        attack.sent(len(data))
        device.sock.settimeout(60)
        device.expect(smq.PONG)
        if "wait" in name:  # the client is read meanwhile
            assert device.receive().endswith(b"all")
    device.close()


@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("size_bytes", [0, 1000])
def test_a_flood_to_a_handler(besiege: Callable[..., Besieged], tmp_path: Path, name: str, size_bytes: int) -> None:
    besieged, device = connected(besiege, tmp_path / "flooded", APPS[name])
    packet = smq.frame(publish(1, device.etid, b"x" * size_bytes))
    data = packet * ((30 << 20) // len(packet) if size_bytes else 50_000)
    with besieged.attack(f"SMQ: {len(packet)}-byte messages to a handler ({name})") as attack:
        device.send_bytes(data).send(b"\x0c")
        attack.sent(len(data))
        device.sock.settimeout(60)
        device.expect(smq.PONG)
    device.close()
