"""Python's `hub.mtl`, with `hub.conn` and `hub.cluster` (help: cluster). Nodes are sets of links in this process, with
real sockets between them.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.cluster.channel import WINDOW_BYTES
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.errors import ArgumentError, ClosedError, QueueFullError
from smqrt.hub import cluster, conn, mtl
from smqrt.hub.mtl import Channel
from smqrt.manual import pages
from smqrt.process.current_process import AppScope, running_app
from smqrt.transport.stream import Stream
from tests.support.waiting import wait_until

Called = list[tuple[Any, ...]]


def teller(said: Called) -> Any:
    """A function that notes what it is told."""
    return lambda *given: said.append(given)


class Node:
    """A node of the test.

    Attributes:
        said: what the status function of its channel was told; got: what came.
    """

    def __init__(self, **options: Any) -> None:
        self.links = mtl.create("the password", **{"ping_s": 0.1, "silence_s": 2} | options)
        self.conn = conn.create(self.links, 0, intf="127.0.0.1")
        self.said: Called = []
        self.got: Called = []

    def open(self, name: str = "chat") -> Channel:
        return self.links.open(name, teller(self.said), teller(self.got))


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    one, other = Node(), Node()
    other.conn.add("127.0.0.1", one.conn.port)
    yield one, other
    one.links.shutdown()
    other.links.shutdown()
    process_cluster.close()
    assert not open_meshes


def ends(nodes: tuple[Node, Node]) -> tuple[Channel, Channel]:
    made = nodes[0].open(), nodes[1].open()
    wait_until(lambda: nodes[0].said and nodes[1].said, "the channel is up")
    return made


def test_a_channel(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    here, there = ends(nodes)
    (number,) = here.nodes()
    assert one.said == [(number, True, "")]
    assert [here.send(b"bytes"), here.send("text"), here.send({"a": 1}, number), here.send("nobody", 1024)] == [
        1,
        1,
        1,
        0,
    ]
    wait_until(lambda: len(other.got) == 3, "three messages")
    assert [data for data, _ in other.got] == [b"bytes", b"text", b'{"a":1}']
    assert (here.name, one.links.isopen("chat"), one.links.isopen("game")) == ("chat", True, False)
    with here:
        pass
    wait_until(lambda: len(other.said) == 2, "the end")
    assert other.said[1][1:] == (False, "the other node has closed the channel")
    assert here.counts() == {"sent": 3, "received": 0, "refused": 0, "lost": 0, "dropped": 0}
    with pytest.raises(ClosedError, match="the channel 'chat' is closed; open it again"):
        here.send(b"after")
    there.close("twice")
    there.close("twice")


def test_a_blocking_function_fills_only_the_channel(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    go_on = gevent.event.Event()
    got: list[bytes] = []

    def on_data(data: bytes, node: int) -> None:
        go_on.wait()
        got.append(data)

    here = one.open()
    other.links.open("chat", teller(other.said), on_data)
    wait_until(lambda: one.said, "the channel is up")
    sent = WINDOW_BYTES // 10_015
    assert sum(here.send(bytes(10_000)) for _ in range(sent)) == sent
    with pytest.raises(QueueFullError, match="the channel 'chat' is full"):
        here.send(bytes(10_000))
    assert here.counts()["refused"] == 1
    go_on.set()
    wait_until(lambda: len(got) == sent, "all that was taken")
    assert here.send(b"again") == 1


def test_errors_in_functions_are_logged_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    said: Called = []

    def fails(*given: object) -> None:
        said.append(given)
        raise LookupError("of the test")

    one = Node(onstatus=fails, on_round_trip=fails, log=fails)
    other = Node()
    with one.links, other.links, caplog.at_level(logging.ERROR):
        one.conn.shutdown()
        one.conn = conn.create(one.links, 0, intf="127.0.0.1", onstatus=fails)
        one.conn.setlist({"127.0.0.1": other.conn.port})
        for node, functions in ((one, fails), (other, teller(other.said))):
            node.links.open("chat", functions, functions)
        wait_until(lambda: other.said and any(len(given) == 2 and isinstance(given[1], float) for given in said), said)
        assert one.conn.status() == {"127.0.0.1": True}
        for what in ("onstatus", "on_round_trip", "log", "on_status"):
            assert f"error in {what} of the " in caplog.text
        other.links.shutdown()
        wait_until(lambda: one.conn.status() == {"127.0.0.1": False}, "the end is noticed")
        again = mtl.create("the password")
        with conn.create(again, other.conn.port, intf="127.0.0.1"), again:
            wait_until(lambda: one.conn.status() == {"127.0.0.1": True}, "the list is still followed")


def test_urgent_progress_is_reported_once_a_second() -> None:
    logged: Called = []
    one, other = Node(log=teller(logged)), mtl.create("another password")
    with one.links, conn.create(other, 0, intf="127.0.0.1") as there:
        for _ in range(3):
            one.links.commence(Stream.connect("127.0.0.1", there.port, 5))
        wait_until(lambda: one.links.links.mesh.node.refused, "the refusal")
        wait_until(lambda: not one.links.links.mesh.node.all_links, "all of them")
        other.shutdown()
    ((text, is_urgent),) = logged
    assert "the passwords of the two nodes differ" in text
    assert is_urgent is True


def test_round_trips() -> None:
    trips: Called = []
    logged: Called = []
    one = Node(on_round_trip=teller(trips), log=teller(logged), silence_s=1.2)
    other = Node(silence_s=20)
    with one.links, other.links:
        one.conn.setlist({"localhost": other.conn.port})
        wait_until(lambda: len(trips) > 2, "round trips")
        assert {address for address, _ in trips} == {"localhost"}  # as the list has it
        assert all(0 < ms < 1200 for _, ms in trips)
        (link,) = one.links.links.mesh.node.links.values()
        assert link.round_trip_s is not None
        assert any(ms == link.round_trip_s * 1000 for _, ms in trips)
        assert any("is up" in text and not is_urgent for text, is_urgent in logged)
        (link,) = other.links.links.mesh.node.links.values()
        link.transport.pause()  # type: ignore[attr-defined]
        wait_until(lambda: trips[-1] == ("localhost", None), "no answer in time")
        link.transport.resume()  # type: ignore[attr-defined]
        wait_until(lambda: trips[-1][1] is not None, "answers in time again")
        assert one.links.links.mesh.node.links_lost == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ping_s": 0}, "ping_s: 0; it must be 0.05 to 3600"),
        ({"ping_s": float("nan")}, "ping_s: nan; it must be"),
        ({"ping_s": 2, "silence_s": 2}, "silence_s: 2; it must be more than ping_s and at most 3600"),
        ({"silence_s": float("inf")}, "silence_s: inf; it must be"),
        ({"node": 2000}, "node: 2000"),
        ({"onstatus": 1}, "onstatus: a function is needed, not int"),
        ({"on_round_trip": 1}, "on_round_trip: a function is needed, not int"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mtl.create("x", **options)
    assert not open_meshes


def test_wrong_calls(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    here = one.open()
    wrong: dict[str, Any] = {
        "name: the channel 'chat' is open already": lambda: one.open(),
        "name: 0 bytes": lambda: one.open(""),
        "name: a str or bytes is needed, not int": lambda: one.links.open(1, print, print),  # type: ignore[arg-type]
        "on_status: a function is needed": lambda: one.links.open("x", None, print),  # type: ignore[arg-type]
        "on_data: a function is needed": lambda: one.links.open("x", print, "f"),  # type: ignore[arg-type]
        "data: 65521 bytes; a message carries at most 65520": lambda: here.send(bytes(65521)),
        "node: a number is needed, not str": lambda: here.send(b"", "1"),  # type: ignore[arg-type]
        "msg: 1001 bytes": lambda: here.close(b"x" * 1001),
        "port: 70000; a port is 1 to 65535": lambda: one.conn.add("127.0.0.1", 70_000),
        "shark, sshark: links over TLS need both": lambda: conn.create(one.links, 0, sshark=1),  # type: ignore[arg-type]
        "name: 1001 bytes; the name of a cluster": lambda: cluster.create(hub.create(), one.links, name="x" * 1001),
        "is not text": lambda: cluster.create(hub.create(), one.links, name="\udcff"),
        "these are the links of the server": lambda: conn.create(mtl.server(), 0),
    }
    for message, call in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            call()


def test_after_shutdown(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.links.shutdown()
    one.links.close()
    late: dict[str, Any] = {
        "the links to other nodes were shut down": one.open,
        "links to other nodes": lambda: cluster.create(hub.create(), one.links, name="x"),
        "were shut down; make": lambda: conn.create(one.links, 0),
        "conn: it was shut down; make a new one": lambda: one.conn.add("127.0.0.1"),
        "conn: it was shut": lambda: one.conn.setlist([]),
    }
    for message, call in late.items():
        with pytest.raises(ClosedError, match=message):
            call()
    assert not one.links.isopen("chat")
    assert not one.links.hascon("127.0.0.1")


def test_unreferenced_objects_of_an_application_close_with_it(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    scope = AppScope(None)
    said: Called = []
    with running_app(scope):
        links = mtl.create("the password", ping_s=0.1)
        conn.create(links, 0, intf="127.0.0.1").add("127.0.0.1", one.conn.port)
        links.open("chat", teller(said), print)
        mtl.server().open("chat", print, print)
        del links
    one.open()
    gc.collect()
    wait_until(lambda: said and one.said, "the channel is up")
    server = process_cluster.opened()
    assert server.node.channels
    scope.close()
    wait_until(lambda: len(one.said) == 2, "its end")
    assert one.said[1][1] is False
    assert len(said) == 1
    assert not server.node.channels
    assert not server.node.closed
    assert len(open_meshes) == 3


def test_hubs_over_the_same_links(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    ends(nodes)
    with hub.create() as here, hub.create() as there:
        with cluster.create(here, one.links, name="chat") as first, cluster.create(there, other.links, name="chat"):
            got: Called = []
            there.subscribe("self", teller(got))
            wait_until(first.nodes, "the hubs are joined")
            assert first.publish("hello", "greeting") == 1
            wait_until(lambda: got, "the message")
            assert one.links.isopen("chat")
        assert first.nodes() == {}
        first.close()
        assert first.publish("nobody", "greeting") == 0


def test_the_example_of_the_manual() -> None:
    found = re.findall(r"^```python\n(.*?)^```$", pages.pages()["cluster"], re.MULTILINE | re.DOTALL)
    (example,) = [one for one in found if "mtl" in one]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["nodes"] == 0
    names["links"].shutdown()


def test_commence(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    taken = {mesh.node.number for mesh in open_meshes}
    third = Node(node=min({1, 2, 3} - taken))  # a number that is taken would end the link, once in 500 runs
    said: Called = []
    with third.links:
        assert third.links.commence(Stream.connect("127.0.0.1", one.conn.port, 5), teller(said))
        wait_until(lambda: said, "the link")
        assert said[0][1:] == (True, "")
        assert third.links.hascon("127.0.0.1")
    wait_until(lambda: len(said) == 2, "its end")
    assert third.links.commence(Stream.connect("127.0.0.1", other.conn.port, 5)) is False
