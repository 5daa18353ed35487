"""The console of a server with several workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.wire import smq as wire
from smqrt.wire import websocket
from tests.conftest import Served
from tests.support.applications import application
from tests.support.clock import undisturbed_s
from tests.support.device import WS, Device
from tests.support.waiting import wait_until
from tests.workers.served import asked, workers_of
from tests.workers.visit import Visit

pytestmark = pytest.mark.servers

PRELOAD = """
smq = require "smq.hub".create{name = "main"}
if mako.worker == 1 then own = require "smq.hub".create{name = "own"} end
"""
PAGES = {
    "who": "<?lsp response:write(tostring(mako.worker)) ?>",
    "smq": "<?lsp app.smq:connect(request) ?>",
    "say": "<?lsp trace(request:data'text') ?>",
    "fail": "<?lsp error(request:data'text') ?>",
    "publish": """<?lsp app.smq:publish(request:data'text', 'lamp')
        if app.own then app.own:publish('mine', 'lamp') end ?>""",
}


@pytest.fixture
def served(serve: Callable[..., Served], tmp_path: Path) -> Served:
    """A server with two workers, of which one has a hub of its own."""
    return serve(application(tmp_path / "app", PRELOAD, **PAGES), "--workers", "2", "--hosts", "*")


class Page:
    """A page of the console."""

    def __init__(self, served: Served) -> None:
        port = int(served.admin_url.rpartition(":")[2])
        self._device = Device(("127.0.0.1", port), WS)
        fields = websocket.request_headers(websocket.new_key())
        head = ["GET /console/smq HTTP/1.1", "Host: 127.0.0.1", *(": ".join(one) for one in fields), "", ""]
        self._device.send_bytes("\r\n".join(head).encode()).read_head().hello().connect(b"console page")
        self._device.subscribe(b"pulse")
        self._serial = 0
        self.pulse: Any = None

    def look(self, view: str, **options: Any) -> None:
        """Looks at a view from now on."""
        self._serial += 1
        question = {"view": view, "options": options, "serial": self._serial}
        self._device.publish(1, json.dumps(question).encode())

    def answers(self) -> Iterator[Any]:
        """What the view shows in the next 20 s, as far as it is something else than before."""
        pieces: list[str] = []
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            tid, _, _, payload = wire.unpack_publish(wire.frame(self._device.receive()))
            if tid != self._device.etid:
                self.pulse = json.loads(payload)
                continue
            head, _, piece = payload.decode().partition("\n")
            serial, part, parts = map(int, head.split())
            pieces.append(piece)
            if part == parts:
                answer = json.loads("".join(pieces))
                pieces = []
                if serial == self._serial:
                    yield answer

    def until(self, condition: Callable[[Any], object]) -> Any:
        """The first answer for which a condition holds."""
        seen: list[Any] = []
        for answer in self.answers():
            seen.append(answer)
            if "data" in answer and condition(answer["data"]):
                return answer["data"]
        raise AssertionError(seen[-3:])


def test_the_log_and_what_applications_trace(served: Served) -> None:
    visits = [Visit(served, number) for number in (0, 1)]
    for number in range(4):
        visits[number % 2].ask(f"/fail.lsp?text=oh{number}")
        visits[number % 2].ask(f"/say.lsp?text=hello{number}")
    page = Page(served)
    page.look("log")
    found = page.until(lambda data: len(data["rows"]) == 4)
    assert [row["worker"] for row in found["rows"]] == [1, 0, 1, 0], "the newest first"
    assert all(f"oh{3 - at}" in row["text"] for at, row in enumerate(found["rows"]))
    assert found["errors"] == 4
    visits[1].ask("/fail.lsp?text=again")
    page.until(lambda data: "again" in data["rows"][0]["text"] and data["errors"] == 5)
    assert page.pulse["counts"]["errors"] == 5
    assert asked(served, "api/v1/server")["log_errors_lately"] == 5
    newest = asked(served, "api/v1/log?limit=1")["items"]
    assert [("again" in one["text"], one["worker"], one["level"]) for one in newest] == [(True, 1, "ERROR")]

    page.look("applications")
    (row,) = page.until(lambda data: data["rows"])["rows"]
    assert [line for line in row["traces"] if "hello" in line] == [
        f"w{number % 2}: say.lsp 1: hello{number}" for number in range(4)
    ]
    # What a worker has said goes with it; another one begins anew.
    os.kill(workers_of(served)[1], signal.SIGKILL)
    served.wait_for(r"^w1: process \d+ serves$")
    wait_until(lambda: asked(served, "api/v1/server")["log_errors"] == 2)


def test_messages_and_topics(served: Served) -> None:
    visits = [Visit(served, number) for number in (0, 1)]
    address = "127.0.0.1", served.port
    devices = [Device(address).start(target="/smq.lsp").connect(b"device%02d" % number) for number in range(8)]
    for one in devices:
        one.subscribe(b"lamp")
    assert len({one.etid >> 21 for one in devices}) == 2, "all clients are at one worker"
    page = Page(served)
    page.look("topics")
    found = page.until(lambda data: [row["subscribers"] for row in data["rows"]] == [8])
    assert (found["rows"][0]["name"], found["total"], found["matching"]) == ("lamp", 1, 1), "both workers have it"
    assert page.pulse["counts"]["topics"] == found["everywhere"]
    for hub in (1, 1_000_001):
        listing = asked(served, f"api/v1/topics?hub={hub}&sort=subscribers")
        assert [(one["name"], one["subscribers"]) for one in listing["items"]] == [("lamp", 8)]
        assert listing["total"] == 1
    assert len(found["hubs"]) == 2, "main, which both have, and own"

    page.look("messages", topics=["lamp"])
    shared = page.until(lambda data: "hub" in data)["hub"]
    texts: list[str] = []
    for number in (0, 1):
        visits[number].ask(f"/publish.lsp?text=from{number}")
    while len(texts) < 2:
        texts += [one["text"] for one in page.until(lambda data: data["messages"])["messages"]]
    assert sorted(texts) == ["from0", "from1"], "each once, of all workers"

    # A hub that only another worker has, by its number.
    (own,) = (one["id"] for one in asked(served, "api/v1/hubs") if one["id"] not in (shared, shared + 1_000_000))
    assert own > 1_000_000
    page.look("messages", topics=["lamp"], hub=own)
    page.until(lambda data: data.get("hub") == own)
    wait_until(lambda: subscribers(served, own) == 1)
    visits[1].ask("/publish.lsp?text=x")
    (message,) = page.until(lambda data: data["messages"])["messages"]
    assert (message["text"], message["topic"], message["number"]) == ("mine", "lamp", 1)
    page.look("messages", topics=[17], hub=own)
    assert any(
        "there is no topic 17" in str(one.get("error")) for one, _ in zip(page.answers(), range(5), strict=False)
    )
    wait_until(lambda: subscribers(served, own) == 0, "it listens no more")


def subscribers(served: Served, hub: int) -> int:
    rows = asked(served, f"api/v1/topics?hub={hub}")["items"]
    return sum(one["subscribers"] for one in rows if one["name"] == "lamp")


def test_trace_of_a_hub_covers_all_workers(served: Served) -> None:
    address = "127.0.0.1", served.port
    devices = [Device(address).start(target="/smq.lsp").connect(b"device%02d" % number) for number in range(8)]
    assert len({one.etid >> 21 for one in devices}) == 2, "all clients are at one worker"
    topics = [one.subscribe(b"news") for one in devices]
    for hub in ("1", "1000001"):
        command = [sys.executable, "-m", "smqrt", "trace", "--url", served.admin_url, "--topic", "news", "--hub", hub]
        with subprocess.Popen(
            [*command, "--count", "8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as trace:
            patience = threading.Timer(20, trace.kill)
            patience.start()
            assert trace.stderr
            assert trace.stdout
            assert "Tracing" in trace.stderr.readline()
            time.sleep(0.5)  # it has begun at the other worker
            for one, topic in zip(devices, topics, strict=True):
                one.publish(topic, b"x")
            seen = {line.split()[2] for line in trace.stdout if "publish" in line}
            patience.cancel()
        assert seen == {f"device{number:02}" for number in range(8)}


def test_blocked_worker_does_not_block_the_console(served: Served) -> None:
    page, pids = Page(served), workers_of(served)
    page.look("overview")
    found = page.until(lambda data: data["server"]["workers"] == 2)
    assert len({one["name"] for one in found["hubs"]}) == len(found["hubs"]), "a hub of two workers is one row"
    os.kill(pids[1], signal.SIGSTOP)
    page.until(lambda data: data["server"]["workers"] == 1)
    # It is not asked again for 10 s: the console, the API and metrics answer at once, with what there is.
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        begun_s = undisturbed_s(pids[0])
        assert [one["worker"] for one in asked(served, "api/v1/server")["workers"]] == [0]
        assert 'worker="0"' in asked(served, "metrics")
        assert undisturbed_s(pids[0]) - begun_s < 2
        time.sleep(0.2)
    os.kill(pids[1], signal.SIGCONT)
    page.until(lambda data: data["server"]["workers"] == 2)
    assert page.pulse["counts"]["alerts"] >= 0
