"""Limits of a running server: from smqrt.toml, changed at SIGHUP for the clients that are connected."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import requests

from smqrt.wire import smq
from tests.conftest import Served
from tests.support.device import KINDS, WS, Device, bounded, publish
from tests.support.waiting import wait_until

APP = """
from smqrt import hub
from smqrt.app import dir

smq = hub.create()


@dir.setfunc
def connect(request, path):
    if path == "drops":
        request.response.json(smq.drops())
    else:
        smq.connect(request)
    return True
"""


BASE = 'tls_port = 0\nhosts = "*"\n'


def test_limits_change_at_sighup(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / ".preload.py").write_text(APP)
    file = tmp_path / "smqrt.toml"
    file.write_text(BASE)
    served = serve("--config", file, tmp_path / "app")
    devices = []
    for number, kind in enumerate(KINDS):
        port = served.port if kind in ("raw", WS) else served.tls_port
        devices.append(Device(("127.0.0.1", port), kind).start(target="/").connect(b"uid-%02d" % number))

    def change(text: str) -> None:
        before = served.output.count("settings changed")
        file.write_text(BASE + text)
        served.process.send_signal(signal.SIGHUP)
        wait_until(lambda: served.output.count("settings changed") > before, "the settings are read again")

    change('[limits]\npublish_rate = 1\npublish_burst_s = 5\npublish_policy = "drop"\nmessage_bytes = 100\n')
    for device in devices:
        tid = device.subscribe(b"news of %d" % device.etid)
        device.send(*(publish(tid, device.etid, b"%d" % number) for number in range(20)))
        assert 4 <= len(device.sync()) <= 8
    dropped = requests.get(f"{served.url}/drops", timeout=20).json()["over_rate"]
    assert 48 <= dropped <= 64
    change('[limits]\npublish_rate = "unlimited"\nmessage_bytes = 100\n[topics."state/#"]\nslow = "latest"\n')
    with bounded():
        for device in devices:
            packets = [publish(device.etid, device.etid, b"%d" % number) for number in range(20)]
            device.send(*packets).expect(*packets)
            device.publish(device.etid, bytes(101))
            assert smq.disconnect(b"message too large") in device.until_end()
    served.wait_for(r"refused: a message of the client 'uid-\d\d': .*; see the setting limits.message_bytes")
    file.write_text(BASE + '[limits]\npublish_rate = "fast"\n')
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("limits.publish_rate must be a number greater than 0, or 'unlimited', not 'fast'")
