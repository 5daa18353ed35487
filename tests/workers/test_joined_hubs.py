"""Hubs of workers are one: a worker takes clients once its hubs are joined with those of the others, and observers are
told the subscribers of all.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.wire.smq import Type, with_id
from tests.conftest import Served, free_port
from tests.support.device import Device
from tests.support.waiting import wait_until
from tests.workers.served import asked, payload, they_hear_each_other, workers_of

pytestmark = pytest.mark.servers

Serve = Callable[..., Served]
UIDS = [b"device%02d" % number for number in range(10)]
FIXED = 5
ANSWERS = 1000


def connected(served: Served, *uids: bytes) -> list[tuple[Device, int]]:
    """Clients, and which worker each is at."""
    address = "127.0.0.1", served.port
    devices = [Device(address).start(target="/smq.lsp").connect(uid) for uid in uids]
    workers = {one["uid"]: one["worker"] for one in asked(served, "api/v1/peers?limit=100")["items"]}
    return [(one, workers[uid.decode()]) for one, uid in zip(devices, uids, strict=True)]


def test_a_worker_takes_clients_when_its_hubs_are_joined(serve: Serve, app: Path) -> None:
    preload = app / ".preload"
    preload.write_text(preload.read_text() + "trace('loaded')\n")
    served = serve(app, "--workers", "2", "--hosts", "*")
    pids = workers_of(served)
    listener = next(one for one, worker in connected(served, *UIDS) if worker == 0)
    topic = listener.subscribe(b"news")
    begun = served.output.count("loaded")

    os.kill(pids[0], signal.SIGSTOP)  # it can't say what it has
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: served.output.count("loaded") > begun)
    time.sleep(0.4)
    assert "w1: process" not in served.output, "it waits"
    os.kill(pids[0], signal.SIGCONT)
    served.wait_for(r"^w1: process \d+ serves$")

    def publishes() -> bool:
        ((device, worker),) = connected(served, b"the first one")
        device.publish(topic, b"from worker %d" % worker)
        return worker == 1

    wait_until(publishes)
    while payload(listener) != b"from worker 1":
        pass


WITH_NODES = ("--cluster-password", "of the test", "--cluster-listen")


@pytest.mark.parametrize(
    ("has_nodes", "option", "counts"),
    [(False, "", "all"), (True, "", "own"), (True, "cluster", "all"), (False, "node", "own")],
    ids=["workers alone", "with nodes", "with nodes, of the cluster", "workers alone, of the node"],
)
def test_scope_of_observed_subscribers(serve: Serve, app: Path, has_nodes: bool, option: str, counts: str) -> None:
    preload = app / ".preload"
    if option:
        preload.write_text(preload.read_text().replace("create {", f'create {{observe = "{option}",'))
    served = serve(
        app, "--workers", "2", "--hosts", "*", *([*WITH_NODES, f"127.0.0.1:{free_port()}"] if has_nodes else [])
    )
    clients = connected(served, *UIDS)
    topics = [one.subscribe(b"news") for one, _ in clients]
    at = [worker for _, worker in clients]
    assert set(at) == {0, 1}, "all clients are at one worker"
    for (device, worker), topic in zip(clients, topics, strict=True):
        device.send(with_id(Type.OBSERVE, topic))
        expected = len(clients) if counts == "all" else at.count(worker)
        seen: list[int] = []
        while expected not in seen:
            packet = device.receive()
            assert packet[0] == Type.CHANGE, packet
            seen.append(int.from_bytes(packet[5:9], "big"))
            assert max(seen) <= expected, f"more than there are: {seen}"
    # And nothing else comes behind it.
    time.sleep(0.3)
    for device, _ in clients:
        device.expect_nothing()


def test_workers_of_a_numbered_node_have_subsequent_numbers(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2", "--hosts", "*", "--cluster-node", FIXED)
    found = connected(served, *UIDS)
    assert {(worker, one.etid >> 21) for one, worker in found} == {(0, FIXED), (1, FIXED + 1)}
    devices = [one for one, _ in found]
    topic = [one.subscribe(b"news") for one in devices][0]
    they_hear_each_other(devices, topic)
    served.process.send_signal(signal.SIGUSR2)
    served.wait_for(r"^restart: 2 new workers serve, with 10 clients$", 30)
    they_hear_each_other(devices, topic)
    later = connected(served, *[b"later%d" % number for number in range(6)])
    assert {(worker, one.etid >> 21) for one, worker in later} == {(0, FIXED), (1, FIXED + 1)}
    assert "fixed number" not in served.output


def test_acknowledged_subscriptions_are_known_to_all_workers(serve: Serve, app: Path) -> None:
    """Messages arrive that a client of another worker publishes as soon as the subscriber has its answer."""
    served = serve(app, "--workers", "2", "--hosts", "*")
    found = connected(served, *UIDS)
    speaker, listener = (next(one for one, worker in found if worker == number) for number in range(2))
    lost = 0
    for number in range(ANSWERS):
        speaker.publish(listener.subscribe(b"topic%d" % number), b"%d" % number)
        with gevent.Timeout(1, False):
            assert payload(listener) == b"%d" % number
            continue
        lost += 1
    # Not always none: a worker that has found its clients' words, and is held then, reads what came later with them.
    assert lost <= ANSWERS / 200, "without the order it is one of 30, and more beside a load"


def test_missed_messages_of_a_killed_worker_are_counted(serve: Serve, app: Path) -> None:
    preload = app / ".preload"
    hook = 'create {onnode = function(node, event) trace("worker", mako.worker, "is told", event) end,'
    preload.write_text(preload.read_text().replace("create {", hook))
    served = serve(app, "--workers", "2", "--hosts", "*")
    found = connected(served, *UIDS)
    speaker, listener = (next(one for one, worker in found if worker == number) for number in range(2))
    topic = listener.subscribe(b"news")
    speaker.publish(topic, b"before")
    while payload(listener) != b"before":
        pass

    def count(reason: str) -> int:
        text = asked(served, "metrics")
        found = re.findall(rf'^smqrt_hub_dropped_messages_total{{.*reason="{reason}".*}} (\d+)', text, re.M)
        return sum(map(int, found))

    def is_back() -> bool:
        speaker.publish(topic, b"meanwhile")
        time.sleep(0.01)
        return "w1: process" in served.output

    os.kill(workers_of(served)[1], signal.SIGKILL)
    wait_until(is_back)
    wait_until(lambda: count("link_lost") > 0)
    wait_until(lambda: all(len(one["nodes"]) == 1 and not one["joining"] for one in hubs(served)))
    lost, unrouted = count("link_lost"), count("unrouted")
    for _ in range(20):
        speaker.publish(topic, b"nobody has subscribed")
    wait_until(lambda: count("unrouted") >= unrouted + 20)
    assert count("link_lost") == lost
    wait_until(lambda: re.findall(r"worker\W+0\W+is told\W+(\w+)", served.output) == ["joined", "lost", "back"])


def hubs(served: Served) -> list[dict[str, Any]]:
    """What the workers say of their hubs in clusters."""
    return [hub for row in asked(served, "api/v1/clusters") for hub in row["hubs"]]
