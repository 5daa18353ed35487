"""Work of a single worker: starters, the login of `app_preload/auth`, and takeover by another worker."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from tests.conftest import Served
from tests.support.device import Device
from tests.support.waiting import wait_until
from tests.workers.served import asked, workers_of

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
Serve = Callable[..., Served]
QUIET_S = 0.3


def clients(served: Served, target: str, login: Callable[[Device], dict[str, bytes]], prefix: str) -> list[Device]:
    """A client at each of two workers."""
    found: dict[int, Device] = {}
    for number in range(40):
        device = Device(("127.0.0.1", served.port)).start(target=target)
        uid = f"{prefix}-{number:02d}"
        device.connect(uid.encode(), **login(device))
        items = asked(served, "api/v1/peers?limit=100")["items"]
        found.setdefault(next(one["worker"] for one in items if one["uid"] == uid), device)
        if len(found) == 2:
            return [found[0], found[1]]
    raise AssertionError("no client came to the other worker")


def news(device: Device) -> list[object]:
    """What a client has got, when nothing more comes."""
    got: list[bytes] = []
    while True:
        with gevent.Timeout(QUIET_S if got else 10, False):
            got.append(device.receive())
            continue
        return [json.loads(one[13:]) for one in got if one[0] == 8]


def kill(served: Served, worker: int) -> None:
    before = workers_of(served)[worker]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: workers_of(served)[worker] != before, served.lines)


@pytest.mark.parametrize(("template", "target"), [("template", "/smq.lsp"), ("template_python", "/smq")])
def test_a_starter_counts_each_click_once(serve: Serve, tmp_path: Path, template: str, target: str) -> None:
    shutil.copytree(ROOT / "smqrt/cli" / template, tmp_path / "app")
    served = serve(tmp_path / "app", "--workers", "2", "--hosts", "*")
    devices = clients(served, target, lambda device: {}, "first")
    tids = [(one.subscribe(b"clicks"), one.create(b"click"))[1] for one in devices]
    for count, (device, tid) in enumerate(zip(devices, tids, strict=True), 1):
        device.publish(tid, b"")
        assert [news(one) for one in devices] == [[{"clicks": count}]] * 2
    kill(served, 0)
    other = devices[1]
    other.publish(tids[1], b"")
    assert news(other) == [{"clicks": 3}], "another worker has taken over, with the count"


def test_the_door_is_moved_once(serve: Serve) -> None:
    served = serve(ROOT / "app_preload/auth", "--workers", "2", "--hosts", "*")

    def login(device: Device) -> dict[str, bytes]:
        digest = hashlib.sha1(f"sesame{device.seed}".encode()).hexdigest()
        return {"info": b"keeper", "credentials": digest.encode()}

    devices = clients(served, "/smq.lsp", login, "keeper")
    tids = [(one.subscribe(b"door"), one.create(b"move"))[1] for one in devices]
    for is_open, (device, tid) in zip((True, False), zip(devices, tids, strict=True), strict=True):
        device.publish(tid, b"")
        assert [news(one) for one in devices] == [[{"open": is_open, "by": "keeper"}]] * 2
    devices[1].publish(devices[1].create(b"ask"), b"")
    assert news(devices[1]) == [{"open": False, "by": "keeper"}], "one answer"
