"""The demonstrations, which people copy: calls that take their time, and calls that are none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire import smq
from tests.conftest import REPOSITORY
from tests.hostile import strangers
from tests.hostile.conftest import Besieged
from tests.support.device import Device, publish
from tests.support.waiting import wait_until

CALLS = {
    "slow": b'{"id": 1, "name": "slow", "arguments": [1e9]}',
    "a number": b"99",
    "a text": b'"text"',
    "no name": b"{}",
    "a list for a name": b'{"name": []}',
    "arguments that are none": b'{"name": "add", "arguments": 5}',
    "a huge answer": b'{"name": "reverse", "arguments": ["' + b"\\u0001" * 10_000 + b'"]}',
}


@pytest.mark.parametrize("path", ["/python/smq", "/rpc/smq.lsp"])
def test_calls(besiege: Callable[..., Besieged], monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    besieged = besiege(*(REPOSITORY / "app_preload" / name for name in ("python", "rpc")))
    monkeypatch.setattr(strangers, "PATH", path)
    for name, call in CALLS.items():
        device: Device = strangers.Stranger(besieged, b"calls-1")
        frame = smq.frame(publish(1, device.etid, call))
        count = 10_000 if len(call) < 100 else 100
        with besieged.attack(f"{path}: {count:,} calls: {name}", grows_bytes=32 << 20) as attack:
            device.flood(frame * count, attack)
    assert len(besieged.served.lines) < 1000
    asks = strangers.Stranger(besieged, b"asks-11")
    asks.sock.settimeout(20)
    answers: list[dict[str, object]] = []

    def is_let_in() -> bool:
        answers.append(ask(asks))
        return "too many calls at once" not in answers[-1].values()

    wait_until(is_let_in, "the calls that are slow have ended", 60)
    assert answers[-1] == {"id": 7, "value": 42}


NONSENSE = [
    b'{"temp": "%b"}' % (b"x" * 60_000),
    b'{"minute": 5, "device": [], "avg": 1, "low": 1, "high": 1, "readings": 1}',
    b'{"minute": null, "device": "%b", "avg": 1, "low": 1, "high": 1, "readings": 1}' % (b"x" * 60_000),
    b'{"minute": []}',
    b'{"minute": "later", "device": 1, "avg": 1, "low": 1, "high": 1, "readings": 1}',
    b'{"ts": "later", "device": 1, "rule": 1, "state": 1}',
    b'{"rule": "%b", "device": 1, "state": {}, "ts": 5}' % (b"x" * 60_000),
    b"[]",
]


def test_foreign_readings_do_not_change_pages_of_others(
    besiege: Callable[..., Besieged], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "app_preload/telemetry", tmp_path / "telemetry")
    besieged = besiege(tmp_path / "telemetry")
    monkeypatch.setattr(strangers, "PATH", "/telemetry/smq")
    device = strangers.Stranger(besieged, b"stranger")
    frames = [
        smq.frame(publish(device.create(topic), device.etid, text))
        for topic in (b"telemetry/boiler", b"stats/boiler", b"alerts/boiler")
        for text in NONSENSE
    ]
    with besieged.attack("/telemetry/smq: 3,600 readings, minutes and alerts that are none") as attack:
        device.flood(b"".join(frames) * 150, attack)
    asks = strangers.Stranger(besieged, b"asks-11")
    asks.sock.settimeout(20)
    asks.publish(asks.create(b"telemetry-ask"), b"{}")
    answers = {told["device"]: told for told in (json.loads(asks.receive()[13:]) for _ in range(4))}
    assert set(answers) == {"boiler", "server room", "cellar", "roof"}
    assert answers["boiler"]["minutes"] == answers["boiler"]["alerts"] == []


def ask(device: Device) -> dict[str, object]:
    device.publish(1, b'{"id": 7, "name": "add", "arguments": [2, 40]}')
    answer: dict[str, object] = json.loads(device.receive()[13:])
    return answer
