"""Python's `hub.mtl`, `hub.conn` and `hub.cluster`: documented options and methods (spec: smq §6)."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from smqrt import hub
from smqrt.cluster.engines.mesh import open_meshes
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.errors import ArgumentError, StartError
from smqrt.hub import cluster, conn, mtl
from smqrt.hub.mtl import Mtl
from smqrt.journal.reader import Journal
from smqrt.transport.stream import Stream
from tests.cluster.engines import Client
from tests.conftest import free_port
from tests.support.pki import client_of, server_of
from tests.support.waiting import wait_until

Called = list[tuple[Any, ...]]


def teller(said: Called) -> Any:
    return lambda *given: said.append(given)


@pytest.fixture
def links() -> Iterator[Callable[..., Mtl]]:
    """A factory of links that end with the test."""
    with ExitStack() as made:
        yield lambda **options: made.enter_context(mtl.create("the password", **options))
    assert not open_meshes


@pytest.fixture
def pair(links: Callable[..., Mtl]) -> tuple[Mtl, Mtl]:
    """Two nodes with a link."""
    one, other = links(), links()
    there = conn.create(other, 0, intf="127.0.0.1")
    here = conn.create(one, 0, intf="127.0.0.1")
    here.add("127.0.0.1", there.port)
    wait_until(lambda: one.hascon("127.0.0.1") and other.hascon("127.0.0.1"), "the link")
    return one, other


class Joined:
    """Two hubs that are joined over links.

    Attributes:
        here, there: the hubs; one, other: their parts of the cluster; events: what `onnode` of the other one was told.
    """

    def __init__(self, pair: tuple[Mtl, Mtl], name: str, **options: Any) -> None:
        self.events: Called = []
        self.here, self.there = hub.create(**options), hub.create(onnode=teller(self.events))
        self.one = cluster.create(self.here, pair[0], name=name)
        self.other = cluster.create(self.there, pair[1], name=name)
        wait_until(lambda: self.one.nodes() and self.other.nodes(), "the hubs are joined")


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, (1, 5)),
        ({"ping": {}}, (8, 10)),
        ({"ping": {"timespan": 12, "timeout": 3}}, (12, 15)),
        ({"keepintv": 3}, (3, 20)),
        ({"keepalive": 9}, (2, 9)),
        ({"ping": {"timeout": 2}, "keepalive": 9}, (8, 10)),
    ],
)
def test_times(links: Callable[..., Mtl], options: dict[str, Any], times: tuple[float, float]) -> None:
    mesh = links(**options).links.mesh
    assert (mesh._ping_s, mesh._silence_s) == times


PING = "ping: timespan .* timeout is at least 2 s, timespan at least four times as long"
KEEP = "keepalive: .*keepintv is at least 0.05 s"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ping": {"timeout": 1.9}}, PING),
    ({"ping": {"timespan": 7.9}}, PING),
    ({"ping": {"timespan": 3600}}, PING),
    ({"ping": {"timespan": "8"}}, "timespan must be a number"),
    ({"ping": {"silly": 2}}, "silly"),
    ({"ping": {"roundtripCB": 1}}, "roundtripCB must be a function"),
    ({"password": ""}, "password: it is empty"),
    ({"keepintv": 0.01}, KEEP),
    ({"keepalive": 2}, KEEP),
    ({"keepalive": 4000}, "keepalive must be a number"),
    ({"keepintv": float("nan")}, "keepintv must be a number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_times_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mtl.create(**{"password": "x"} | options)
    assert not open_meshes


def test_roundtrip_callback(links: Callable[..., Mtl]) -> None:
    trips: Called = []
    one, other = links(ping={"roundtripCB": teller(trips)}), links()
    one.links.mesh._ping_s = 0.1  # the least is a ping each 8 s
    there = conn.create(other, 0, intf="127.0.0.1")
    conn.create(one, 0, intf="127.0.0.1").add("127.0.0.1", there.port)
    wait_until(lambda: len(trips) > 1, "round trips")
    assert all(address == "127.0.0.1" and ms > 0 for address, ms in trips)


def test_status_of_links(links: Callable[..., Mtl]) -> None:
    said: dict[str, Called] = {"mtl": [], "conn": []}
    one, other = links(onstatus=teller(said["mtl"])), links()
    there = conn.create(other, 0, intf="127.0.0.1")
    conn.create(one, 0, intf="127.0.0.1", onstatus=teller(said["conn"])).add("127.0.0.1", there.port)
    wait_until(lambda: all(said.values()), "the link")
    other.shutdown()
    wait_until(lambda: all(len(calls) > 1 for calls in said.values()), "its end")
    for calls in said.values():
        assert calls[0] == ("127.0.0.1", True, "")
        assert calls[1][:2] == ("127.0.0.1", False)
        assert calls[1][2]


def test_a_connection_to_itself_is_refused(links: Callable[..., Mtl]) -> None:
    one, said = links(), list[tuple[Any, ...]]()
    own = conn.create(one, 0, intf="127.0.0.1")
    assert one.commence(Stream.connect("127.0.0.1", own.port, 5), teller(said))
    wait_until(lambda: said, "the refusal")
    assert said[0][1] is False
    assert "this node itself" in said[0][2]


def test_close_by_name(pair: tuple[Mtl, Mtl]) -> None:
    one, other = pair
    said: Called = []
    one.open("chat", lambda *_: None, lambda *_: None)
    other.open("chat", teller(said), lambda *_: None)
    joined = Joined(pair, "chat")
    wait_until(lambda: said, "the channel is up")
    assert one.close("chat", "good night") is True
    wait_until(lambda: len(said) == 2, "its end")
    assert said[1][1:] == (False, "good night")
    assert (one.isopen("chat"), len(joined.one.nodes())) == (True, 1)
    assert one.close("chat", "by name") is True
    assert (one.isopen("chat"), joined.one.nodes()) == (False, {})
    assert one.close("chat") is False


def test_lists_of_nodes(links: Callable[..., Mtl]) -> None:
    one, other, port = links(), links(), free_port()
    here, there = (conn.create(each, 0, intf="127.0.0.1") for each in (one, other))
    assert here.setlist({"127.0.0.1": there.port, "127.0.0.2": port}) is True
    wait_until(lambda: here.status() == {"127.0.0.1": True, "127.0.0.2": False}, here.status())
    assert here.setlist([]) is True
    wait_until(lambda: (here.status(), one.hascon("127.0.0.1")) == ({}, False), "nobody")
    assert here.setlist(["127.0.0.1"]) is True, "its own address and port"
    assert here.add("127.0.0.2", port) is True
    wait_until(lambda: here.status() == {"127.0.0.2": False}, here.status())


def test_missing_nodes_are_dialed_again(links: Callable[..., Mtl]) -> None:
    one, other, port = links(), links(), free_port()
    here = conn.create(one, 0, intf="127.0.0.1")
    here.add("127.0.0.1", port)
    assert here.status() == {"127.0.0.1": False}
    conn.create(other, port, intf="127.0.0.1")
    wait_until(lambda: here.status() == {"127.0.0.1": True}, "the link")


def test_the_end_of_a_conn_ends_no_link(pair: tuple[Mtl, Mtl]) -> None:
    one, other = pair
    third = conn.create(one, 0, intf="127.0.0.1")
    third.shutdown()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", third.port))
    for each in open_meshes:
        assert each.node.links
    assert other.hascon("127.0.0.1")


def test_a_port_that_is_taken(links: Callable[..., Mtl]) -> None:
    one = links()
    port = conn.create(one, 0, intf="127.0.0.1").port
    with pytest.raises(StartError, match=str(port)):
        conn.create(one, port, intf="127.0.0.1")


@pytest.mark.parametrize("options", [{"intf": "::1"}, {"ipv6": True}, {"ipv6": True, "intf": "::1"}])
def test_ipv6(links: Callable[..., Mtl], options: dict[str, Any]) -> None:
    there = conn.create(links(), 0, **options)
    here = conn.create(links(), 0, intf="127.0.0.1")
    here.add("::1", there.port)
    wait_until(lambda: here.status() == {"::1": True}, "the link")


def test_intf_is_the_address_to_listen_at(links: Callable[..., Mtl]) -> None:
    ports = [conn.create(links(), 0, intf="127.0.0.2").port for _ in range(3)]

    def connect_all(address: str) -> None:
        for port in ports:
            socket.create_connection((address, port)).close()

    connect_all("127.0.0.2")
    # Other processes may have one of these ports at 127.0.0.1, but hardly all of them.
    with pytest.raises(OSError, match="refused"):
        connect_all("127.0.0.1")


@pytest.mark.parametrize("name", ["127.0.0.1", "elsewhere.example"])
def test_with_tls_the_name_must_be_trusted(links: Callable[..., Mtl], name: str) -> None:
    ca, said = trustme.CA(), list[tuple[Any, ...]]()
    context, shark = server_of(ca.issue_cert(name)).context(), client_of(ca)
    there = conn.create(links(), 0, intf="127.0.0.1", shark=shark, sshark=context)
    here = conn.create(links(), 0, intf="127.0.0.1", shark=shark, sshark=context, onstatus=teller(said))
    here.add("127.0.0.1", there.port)
    wait_until(lambda: said, "a link, or none")
    assert said[0][:2] == ("127.0.0.1", name == "127.0.0.1")


# ---- clusters


def test_publish_to_other_servers(pair: tuple[Mtl, Mtl]) -> None:
    joined, got = Joined(pair, "chat"), list[tuple[Any, ...]]()
    joined.there.subscribe("self", teller(got), json=True)
    joined.here.subscribe("self", lambda *_: pytest.fail("not to its own server"))
    client = Client(joined.here.broker)
    wait_until(lambda: joined.there.etid2peer(client.etid), "the phantom")
    assert joined.one.publish({"a": 1}, "greeting") == 1
    assert joined.one.publish("2", ptid=client.etid, subtopic="greeting") == 1
    wait_until(lambda: len(got) == 2, got)
    stid = joined.there.subtopic2tid("greeting")
    assert [(data, subtid) for data, _, _, subtid in got] == [({"a": 1}, stid), (2, stid)]
    assert [ptid >> 21 for _, ptid, _, _ in got] == [joined.one.number] * 2
    assert got[1][1] == client.etid


def test_publish_on_behalf(pair: tuple[Mtl, Mtl]) -> None:
    joined, got = Joined(pair, "chat"), list[tuple[Any, ...]]()
    client = Client(joined.there.broker)
    joined.here.subscribe("news", teller(got))
    wait_until(lambda: joined.here.etid2peer(client.etid), "the phantom")
    assert joined.one.pubon("x", client.etid, "news", "sub") is True
    assert joined.one.pubon("x", 77, "news") is False
    wait_until(lambda: got, "the message")
    assert got == [(b"x", client.etid, joined.here.topic2tid("news"), joined.here.subtopic2tid("sub"))]


def test_one_mtl_carries_several_clusters(pair: tuple[Mtl, Mtl]) -> None:
    red, blue = Joined(pair, "red"), Joined(pair, "blue")
    got: Called = []
    for name, joined in (("red", red), ("blue", blue)):
        joined.there.subscribe("self", lambda data, *_, name=name: got.append((name, data)))
    assert (red.one.publish("1", "s"), blue.one.publish("2", "s")) == (1, 1)
    wait_until(lambda: len(got) == 2, got)
    assert sorted(got) == [("blue", b"2"), ("red", b"1")]


def test_leaving(pair: tuple[Mtl, Mtl]) -> None:
    joined = Joined(pair, "chat")
    client = Client(joined.here.broker)
    joined.one.close("for a while")
    wait_until(lambda: len(joined.events) == 2, joined.events)
    assert [event[1:] for event in joined.events] == [("joined", ""), ("left", "for a while")]
    assert (joined.one.publish("x", "s"), joined.other.nodes()) == (0, {})
    assert not client.session.closed


def test_names() -> None:
    """Without one it is a number; a text for the links is their password."""
    one, other = (cluster.create(hub.create(), "a password") for _ in range(2))
    names = [re.fullmatch(r"SMQ-(\d+)", each.name) for each in (one, other)]
    first, second = (int(found[1]) for found in names if found)
    assert second == first + 1
    there = conn.create(other, 0, intf="127.0.0.1")
    here = conn.create(one, 0, intf="127.0.0.1")
    here.add("127.0.0.1", there.port)
    wait_until(lambda: here.status() == {"127.0.0.1": True}, "a cluster stands for its links")
    with pytest.raises(ArgumentError, match="this cluster uses the links of the server"):
        conn.create(cluster.create(hub.create(), name="x"), 0)
    process_cluster.close()
    for each in (one, other):
        assert each.links
        each.links.shutdown()


@pytest.mark.parametrize(("option", "count"), [({}, 1), ({"observe": "cluster"}, 2)], ids=["node", "cluster"])
def test_subscribers_are_counted_per_node_or_over_all(
    pair: tuple[Mtl, Mtl], option: dict[str, Any], count: int
) -> None:
    joined, counts, got = Joined(pair, "chat", **option), list[int](), list[tuple[Any, ...]]()
    joined.here.observe("news", lambda subscribers, topic: counts.append(subscribers))
    joined.here.subscribe("self", teller(got))
    for smq in (joined.here, joined.there):
        Client(smq.broker).subscribe(b"news")
    joined.other.publish("behind", "s")
    wait_until(lambda: got and counts[-1:] == [count], counts)


def test_nodes_are_those_with_known_subscriptions(pair: tuple[Mtl, Mtl]) -> None:
    here, there = hub.create(), hub.create(maxnames=50_000)
    got: Called = []
    for number in range(20_000):
        there.subscribe(f"topic {number}", teller(got))
    one = cluster.create(here, pair[0], name="chat")
    cluster.create(there, pair[1], name="chat")
    wait_until(one.nodes, "the hubs are joined")
    here.publish("hello", "topic 19999")
    wait_until(lambda: got, "the message")


def test_a_message_is_recorded_at_its_origin_only(pair: tuple[Mtl, Mtl], tmp_path: Path) -> None:
    with ExitStack() as ending:
        hubs = [hub.create(journal={"path": str(tmp_path / node), "node": node, "name": node}) for node in ("n1", "n2")]
        for smq in hubs:
            ending.callback(smq.close)
            ending.callback(smq.journal.close)
        clusters = [cluster.create(smq, links, name="chat") for smq, links in zip(hubs, pair, strict=True)]
        got: Called = []
        hubs[1].subscribe("news", teller(got))
        wait_until(clusters[0].nodes, "the hubs are joined")
        hubs[0].publish("hello", "news")
        wait_until(lambda: got, "the message")
    here, there = Journal(tmp_path / "n1"), Journal(tmp_path / "n2")
    assert here.end()["n1"] > 0
    assert {row.payload for row in here.rows(here.begin(), here.end())} == {b"hello"}
    assert there.end().get("n2", 0) == 0
