"""Hot restarts of a node of a cluster: its clients stay, also while other nodes write to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gevent
import pytest

from tests.conftest import free_port
from tests.restart.hot import HotServed, application
from tests.restart.test_hot_restart import heard

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]

PRELOAD = """
smq = require "smq.hub".create {name = "main", cluster = "chat"}
ba.sleep(600) -- the new process is a node before it takes the place of the old one
"""
EVERY_S = 0.005
MOST_LOST = 20
"""While the hub is on its way, a millisecond or two: 0.1 s of messages."""


@pytest.mark.parametrize("number", [0, 7], ids=["drawn", "fixed"])
def test_clients_of_a_node_stay_and_hear_those_of_others(serve_hot: Serve, tmp_path: Path, number: int) -> None:
    app = application(tmp_path / "app", PRELOAD)
    ports = [free_port() for _ in range(2)]
    words = ["--cluster-password", "s", "--cluster-nodes", ",".join(f"127.0.0.1:{port}" for port in ports)]
    moved = serve_hot(app, "--cluster-listen", f"127.0.0.1:{ports[0]}", "--cluster-node", number, *words)
    other = serve_hot(app, "--cluster-listen", f"127.0.0.1:{ports[1]}", *words)
    listener, speaker = moved.device(b"listener"), other.device(b"speaker")
    topic = listener.subscribe(b"news")
    sent = 0
    publishing = True

    def publish() -> None:
        nonlocal sent
        while publishing:
            speaker.publish(topic, b"%d" % sent)
            sent += 1
            gevent.sleep(EVERY_S)

    greenlet = gevent.spawn(publish)
    received = [int(heard(listener)[1])]
    for _ in range(2):
        moved.restart()
        seen = sent
        while received[-1] < seen:
            received.append(int(heard(listener)[1]))
    publishing = False
    greenlet.join()
    assert received == sorted(set(received)), "twice, or out of order"
    lost = received[-1] - received[0] + 1 - len(received)
    assert lost <= MOST_LOST
    speaker.publish(listener.etid, b"to you")
    while heard(listener) != (listener.etid, b"to you"):
        pass
    assert "Traceback" not in moved.output + other.output
    assert "WARNING" not in moved.output, moved.output
