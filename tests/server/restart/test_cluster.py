"""Hot restarts of a node of a cluster: its clients stay, also while other nodes write to them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from smqrt.smq.session_migration import KEEP_S
from tests.cluster.nats.server import NatsServer
from tests.conftest import free_port
from tests.server.restart.hot import HotServed, application, heard
from tests.server.restart.publisher import Publisher
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]

PRELOAD = """
smq = require "smq.hub".create {name = "main", cluster = "chat", FILES}
ba.sleep(400) -- the new process is a node before it takes the place of the old one
"""
SLOW = "<?lsp ba.sleep(700) ?>"
"""A request under way holds the old process."""


@pytest.mark.parametrize(
    ("met", "number"),
    [("in both lists", 0), ("in both lists", 7), ("in the other's list", 7), ("through NATS", 7), ("through NATS", 0)],
)
def test_clients_of_a_node_stay_and_receive_from_others(
    serve_hot: Serve, tmp_path: Path, met: str, number: int
) -> None:
    """Both ways, every message once and in order, with files that change hands. Two restarts."""
    files = f'journal = "{tmp_path}/journal", persist = "{tmp_path}/names"'
    app = application(tmp_path / "app", PRELOAD.replace("FILES", files), slow=SLOW)
    plain = application(tmp_path / "plain", PRELOAD.replace("FILES", ""), slow=SLOW)
    with ExitStack() as ending:
        words = how_to_meet(met, tmp_path, ending)
        folders = zip((app, plain), words(number), strict=True)
        moved, other = (serve_hot(folder, "--cluster-password", "s", *one) for folder, one in folders)
        listener, speaker = moved.device(b"listener"), other.device(b"speaker")
        topic = listener.subscribe(b"news")
        publisher = Publisher(speaker, topic)
        back = Back(moved, other)
        received = [int(heard(listener)[1])]
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", moved.port)) as asking:
                asking.sendall(b"GET /slow.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                moved.restart()
            seen = publisher.sent
            while received[-1] < seen:
                received.append(int(heard(listener)[1]))
        publisher.stop()
        assert received == sorted(set(received)), "twice, or out of order"
        assert len(received) == received[-1] - received[0] + 1, "some are lost"
        back.check()
        speaker.publish(listener.etid, b"to you")
        while heard(listener) != (listener.etid, b"to you"):
            pass
        assert "Traceback" not in moved.output + other.output, moved.output + other.output
        assert "fixed number" not in moved.output + other.output


KEEPING = """
-- %d
smq = require "smq.hub".create {name = "main", cluster = "chat", keep = true}
"""


@pytest.mark.parametrize("met", ["in both lists", "through NATS"])
def test_kept_clients_receive_messages_of_others(serve_hot: Serve, tmp_path: Path, met: str) -> None:
    """The application of one node starts again three times: every message once and in order, both ways."""
    app, plain = (application(tmp_path / name, KEEPING % 0) for name in ("app", "plain"))
    with ExitStack() as ending:
        folders = zip((app, plain), how_to_meet(met, tmp_path, ending)(0), strict=True)
        edited, other = (serve_hot(folder, "--reload", "--cluster-password", "s", *one) for folder, one in folders)
        listener, speaker = edited.device(b"listener"), other.device(b"speaker")
        publisher = Publisher(speaker, listener.subscribe(b"news"))
        back = Back(edited, other)
        received = [int(heard(listener)[1])]
        for version in range(1, 4):
            seen = edited.output.count("app app at /: ok")
            (app / ".preload").write_text(KEEPING % version)
            wait_until(lambda seen=seen: edited.output.count("app app at /: ok") > seen, edited.lines)
            sent = publisher.sent
            while received[-1] < sent:
                received.append(int(heard(listener)[1]))
        publisher.stop()
        assert received == list(range(received[0], received[-1] + 1)), "lost, twice, or out of order"
        back.check()
        assert "Traceback" not in edited.output + other.output, edited.output + other.output


def test_a_hub_whose_kept_clients_expired_joins_its_cluster(serve_hot: Serve, tmp_path: Path) -> None:
    app, plain = (application(tmp_path / name, KEEPING % 0) for name in ("app", "plain"))
    with ExitStack() as ending:
        folders = zip((app, plain), how_to_meet("in both lists", tmp_path, ending)(0), strict=True)
        edited, other = (serve_hot(folder, "--reload", "--cluster-password", "s", *one) for folder, one in folders)
        kept, speaker = edited.device(b"kept-1"), other.device(b"speaker")
        (app / ".preload").write_text(KEEPING % 1 + f"ba.sleep({(KEEP_S + 0.5) * 1000:.0f})")
        assert kept.until_end() == []
        wait_until(lambda: edited.output.count("app app at /: ok") > 1, edited.lines)
        listener = edited.device(b"listener")
        topic = listener.subscribe(b"news")
        publisher = Publisher(speaker, topic)
        assert heard(listener)
        publisher.stop()


Words = Callable[[int], list[list[object]]]


def how_to_meet(met: str, tmp_path: Path, ending: ExitStack) -> Words:
    """Gives the options of two nodes, the first of which has a number."""
    if met == "through NATS":
        server = NatsServer(tmp_path)
        ending.callback(server.stop)
        nodes = ["--cluster-nodes", f"nats://127.0.0.1:{server.port}"]
        return lambda number: [[*nodes, "--cluster-node", number], nodes]
    ports = [free_port() for _ in range(2)]
    listen = [["--cluster-listen", f"127.0.0.1:{port}"] for port in ports]
    both = ["--cluster-nodes", ",".join(f"127.0.0.1:{port}" for port in ports)]
    first = both if met == "in both lists" else []
    return lambda number: [[*listen[0], *first, "--cluster-node", number], [*listen[1], *both]]


class Back:
    """A client of the node that is restarted publishes, one of the other node receives."""

    def __init__(self, moved: HotServed, other: HotServed) -> None:
        self._listener, speaker = other.device(b"listener there"), moved.device(b"speaker here")
        topic = self._listener.subscribe(b"back")
        self._publisher = Publisher(speaker, topic)
        self._first = int(heard(self._listener)[1])

    def check(self) -> None:
        """All have come, once and in order."""
        self._publisher.stop()
        for number in range(self._first + 1, self._publisher.sent):
            assert int(heard(self._listener)[1]) == number
