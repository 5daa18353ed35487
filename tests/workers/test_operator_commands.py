"""The API, metrics and commands of a server with several workers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.conftest import Served
from tests.support.device import Device
from tests.support.waiting import wait_until
from tests.workers.served import asked, workers_of

pytestmark = pytest.mark.servers


@pytest.fixture
def served(serve: Callable[..., Served], app: Path) -> Served:
    """A server with two workers."""
    return serve(app, "--workers", "2", "--hosts", "*")


def test_workers_answer_as_one_server(served: Served) -> None:
    address = "127.0.0.1", served.port
    devices = [Device(address).start(target="/smq.lsp").connect(b"device%02d" % number) for number in range(20)]
    server = asked(served, "api/v1/server")
    assert server["peers"] == 20
    assert server["ready"]
    assert [one["worker"] for one in server["workers"]] == [0, 1]
    assert all(one["peers"] for one in server["workers"]), "both have some"
    assert len({one["pid"] for one in server["workers"]}) == 2
    (listener,) = asked(served, "api/v1/listeners")
    assert listener["open"] == 20

    hubs = {one["worker"]: one for one in asked(served, "api/v1/hubs")}
    assert [hubs[number]["id"] for number in (0, 1)] == [1, 1_000_001]
    assert asked(served, "api/v1/hubs/1000001")["peers"] == hubs[1]["peers"]

    found: list[Any] = []
    after = ""
    while not found or after:
        page = asked(served, f"api/v1/peers?limit=7{after}")
        found += page["items"]
        after = f"&after={page['after']}" if page["after"] else ""
        assert page["total"] == 20
    assert sorted(one["uid"] for one in found) == [f"device{number:02}" for number in range(20)]
    time.sleep(0.1)  # those may have come within one millisecond
    devices.append(Device(address).start(target="/smq.lsp").connect(b"the newest"))
    newest = asked(served, "api/v1/peers?sort=newest&limit=1")["items"][0]
    assert newest["uid"] == "the newest"
    devices.pop().disconnect()
    wait_until(lambda: asked(served, "api/v1/server")["peers"] == 20, "the newest left")

    of_one = asked(served, "api/v1/peers?hub=1000001")["items"]
    assert sorted(one["uid"] for one in of_one) == sorted(one["uid"] for one in found if one["worker"] == 1)

    far = next(one for one in found if one["worker"] == 1)
    assert asked(served, f"api/v1/peers/{far['id']}")["uid"] == far["uid"]
    assert asked(served, f"api/v1/peers/{far['id']}/disconnect", {})["disconnected"]
    wait_until(lambda: asked(served, "api/v1/server")["peers"] == 19, "one less")
    closed = asked(served, "api/v1/closed")["items"][0]
    assert closed["uid"] == far["uid"]
    assert len(asked(served, "api/v1/limits")) == len({one["name"] for one in asked(served, "api/v1/limits")})
    assert [one["state"] for one in asked(served, "api/v1/apps")] == ["running"]

    text = asked(served, "metrics")
    peers = dict(re.findall(r'^smqrt_hub_peers\{worker="(\d)",.*\} (\S+)$', text, re.M))
    assert sum(map(float, peers.values())) == 19
    assert re.search(r'^smqrt_ready\{worker="1"\} 1\.0$', text, re.M)
    assert text.count("# HELP smqrt_hub_peers ") == 1
    assert asked(served, "readyz") == "ready\n"

    # A trace follows clients of all workers.
    command = [sys.executable, "-m", "smqrt", "trace", "--url", served.admin_url, "--topic", "news"]
    others = [one for number, one in enumerate(devices) if f"device{number:02}" != far["uid"]]
    publishers: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace:
        assert trace.stderr
        assert trace.stdout
        output = trace.stdout
        assert "Tracing" in trace.stderr.readline()
        reader = Thread(target=lambda: publishers.extend(line.split()[2] for line in output if "publish" in line))
        reader.start()
        for one in others:
            one.publish(one.subscribe(b"news"), b"x")
        try:
            wait_until(lambda: len(publishers) >= len(others), f"a message of each, not only {publishers}")
        finally:
            trace.terminate()
            reader.join()
    assert {one["uid"] for one in found} - {far["uid"]} == set(publishers)

    # The application starts again in all workers.
    assert asked(served, "api/v1/apps/-/restart", {})["state"] == "running"
    for number in workers_of(served):
        served.wait_for(rf"^w{number}: app app at /: ok$")
