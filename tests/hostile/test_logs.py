"""Log lines that strangers can cause: a line now and then, whatever they send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq
from tests.hostile import strangers
from tests.hostile.conftest import Besieged
from tests.support.device import Device, publish

IN_PYTHON = """
import gevent

from smqrt import hub

smq = hub.create()


def fails(data):
    raise ValueError("this is not JSON: " + data)


smq.subscribe("spawned", onmsg=lambda data, *more: gevent.spawn(fails, data.decode()))


@smq.on("asked")
def asked(message):
    message.reply(message.json)


smq.subscribe("decoded", json=True, onmsg=lambda *message: None)


def answer(request, relpath):
    smq.connect(request)


dir.setfunc(answer)
"""
IN_LUA = """
smq = require "smq.hub".create()
smq:subscribe("decoded", {json = true, onmsg = function() end})
smq:subscribe("spawned", {onmsg = function(data)
  ba.thread.run(function() error("this is not JSON: " .. data) end)
end})
smq:subscribe("asked", {onmsg = function(data) error("this is not JSON: " .. data) end})
"""
MESSAGES = 1500


@pytest.fixture
def apps(tmp_path: Path) -> list[Path]:
    for name, file, text in (("py", ".preload.py", IN_PYTHON), ("lua", ".preload", IN_LUA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    (tmp_path / "lua/smq.lsp").write_text("<?lsp app.smq:connect(request) ?>")
    return [tmp_path / "py", tmp_path / "lua"]


@pytest.mark.parametrize(
    ("path", "topic"),
    [(path, topic) for path in ("/py/", "/lua/smq.lsp") for topic in ("asked", "decoded", "spawned")],
)
def test_messages_that_a_handler_fails_at(
    besiege: Callable[..., Besieged], apps: list[Path], monkeypatch: pytest.MonkeyPatch, path: str, topic: str
) -> None:
    besieged = besiege(*apps)
    monkeypatch.setattr(strangers, "PATH", path)
    device: Device = strangers.Stranger(besieged, b"writes-logs")
    tid = device.create(topic.encode())
    frame = smq.frame(publish(tid, device.etid, b"no JSON", 7))
    with besieged.attack(f"SMQ: {MESSAGES:,} messages that are not JSON to a handler of {path}{topic}") as attack:
        for _ in range(MESSAGES // 100):
            device.send_bytes(frame * 100)
            attack.sent(len(frame) * 100)
        device.send(smq.PING).expect(smq.PONG)
    device.close()
    besieged.served.wait_for("JSON|Traceback")
    lines = [line for line in besieged.served.lines if "JSON" in line or "Traceback" in line]
    assert 1 <= len(lines) < MESSAGES / 10
