"""Somebody with rights to the subjects of a site, who does not know the password."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.broker.state import Hooks
from smqrt.cluster import nats
from smqrt.cluster.engines.mesh import Mesh
from smqrt.cluster.engines.nats_connections import _HEAD, _HELLO, FORGED, GONE, SIGNATURE_BYTES, NatsBackplane
from smqrt.cluster.link import MAX_UNAUTHENTICATED, UNAUTHENTICATED
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Hello, Refusal
from smqrt.wire.smq import MAX_NODE
from tests.cluster.engines import KEY, Client
from tests.cluster.nats.server import NatsServer
from tests.support.waiting import let_others_run, wait_until

HELLO_S = 0.2
NOTHING = bytes(SIGNATURE_BYTES)


class Node:
    """A node that meets others through NATS."""

    def __init__(self, url: str, key: bytes = KEY, number: int = 0) -> None:
        self.mesh = Mesh(key, number, ping_s=0.1, silence_s=1.0)
        self.hub = GeventBroker(Hooks(), HubOptions())
        self.member = self.mesh.join(self.hub, "hub")
        self.backplane: NatsBackplane = self.mesh.link_through_nats(url, hello_s=HELLO_S)

    @property
    def link(self) -> Any:
        (found,) = self.mesh.node.links.values()
        return found

    def close(self) -> None:
        self.mesh.close()
        self.hub.close()


class Eavesdropper:
    """Hears everything, and says anything.

    Attributes:
        heard: subject and payload of all messages.
    """

    def __init__(self, url: str) -> None:
        self.client = nats.connect(url)
        self.heard: list[tuple[str, bytes]] = []
        self.client.subscribe("smqrt.>", lambda subject, payload, *_: self.heard.append((subject.decode(), payload)))
        assert self.client.wait_connected(10)

    def say(self, subject: str, payload: bytes) -> None:
        assert self.client.publish(subject, payload)

    def arrived(self) -> None:
        """All that was said is there, and worked off."""
        assert self.client.flush(10)
        let_others_run(50)

    def hello_of(self, node: Node) -> bytes:
        """The newest."""
        hellos = [said for subject, said in self.heard if subject.endswith(".hello") and said[:16] == node.mesh.node.id]
        return hellos[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    found = NatsServer(tmp_path)
    yield found
    found.stop()


@pytest.fixture
def nodes(server: NatsServer) -> Iterator[tuple[Node, Node, Eavesdropper]]:
    one, other, stranger = Node(server.url), Node(server.url), Eavesdropper(server.url)
    wait_until(lambda: one.member.remotes and other.member.remotes and one.member.remotes[0].synced)
    wait_until(lambda: len({said[:16] for subject, said in stranger.heard if subject.endswith(".hello")}) == 2)
    yield one, other, stranger
    stranger.client.close()
    one.close()
    other.close()


def goes_on(one: Node, other: Node, links: list[Any]) -> bool:
    """Whether the links are those of before, and carry messages."""
    subscriber = Client(other.hub)
    subscriber.subscribe(b"topic %d" % subscriber.etid)
    name = b"topic %d" % subscriber.etid
    tid = one.hub.create(name)
    wait_until(lambda: one.member.interest.nodes(one.hub.topic_table.numbers.topic(name)))  # type: ignore[union-attr]
    one.hub.publish(b"hello", tid)
    wait_until(lambda: subscriber.data == [b"hello"])
    assert [one.link, other.link] == links
    return one.mesh.node.links_lost == other.mesh.node.links_lost == 0


def test_forged_messages_close_no_link_and_are_dropped(nodes: tuple[Node, Node, Eavesdropper]) -> None:
    one, other, stranger = nodes
    links = [one.link, other.link]
    got: list[bytes] = []
    one.hub.subscribe(b"self", lambda data, *_: got.append(data))
    inbox = one.backplane.inbox(one.mesh.node.id)
    wait_until(lambda: any(subject == inbox for subject, _ in stranger.heard))
    recorded = [payload for subject, payload in stranger.heard if subject == inbox]
    node_id, link_id, _ = _HEAD.unpack_from(recorded[-1])
    here = one.link.transport.received
    message = smq.publish_frame(1, 5, 0, b"forged")
    signed = recorded[-1][_HEAD.size : _HEAD.size + SIGNATURE_BYTES]
    for place in (0, 1, here - 1, here, here + 1, here + 5, 1 << 40, GONE):
        for signature in (NOTHING, signed, os.urandom(SIGNATURE_BYTES)):
            stranger.say(inbox, _HEAD.pack(node_id, link_id, place) + signature + message)
            stranger.say(inbox, _HEAD.pack(node_id, link_id, place) + signature)
    true = other.link.transport.signature(other.link.connects, here, message)
    stranger.say(inbox, _HEAD.pack(node_id, link_id, here) + true + message[:-1] + b"!")  # a message that was lost
    own = one.link.transport.signature(one.link.connects, here, message)
    stranger.say(inbox, _HEAD.pack(node_id, link_id, here) + own + message)
    for payload in recorded:  # played back
        stranger.say(inbox, payload)
    stranger.say(one.backplane.inbox(other.mesh.node.id), recorded[-1])  # to who has said it
    stranger.arrived()
    gevent.sleep(3 * HELLO_S)
    assert got == []
    assert goes_on(one, other, links)
    assert FORGED.count >= 30


def test_hellos_in_the_name_of_a_node(nodes: tuple[Node, Node, Eavesdropper]) -> None:
    one, other, stranger = nodes
    links = [one.link, other.link]
    subject = "smqrt.smqrt.hello"
    for node in (one, other):
        epoch = node.mesh.node.epoch
        for epoch_said in (epoch - 1, epoch, epoch + 1, (1 << 64) - 1):
            stranger.say(subject, _HELLO.pack(node.mesh.node.id, epoch_said, 1 << 40) + os.urandom(SIGNATURE_BYTES))
    stranger.arrived()
    gevent.sleep(3 * HELLO_S)
    assert goes_on(one, other, links)


def test_a_replayed_hello_keeps_no_lost_node(nodes: tuple[Node, Node, Eavesdropper]) -> None:
    one, other, stranger = nodes
    hello = stranger.hello_of(other)
    other.mesh._timer.stop()  # it looks after its links no more,
    other.backplane._timer.stop()  # says nothing,
    other.backplane.client._connection._watcher.stop()  # type: ignore[union-attr]  # and hears nothing
    end_s = time.monotonic() + 10
    while one.member.remotes and time.monotonic() < end_s:
        stranger.say("smqrt.smqrt.hello", hello)
        gevent.sleep(0.05)
    assert one.member.remotes == []


def test_a_flood_of_first_messages_keeps_no_node_out(server: NatsServer) -> None:
    one, stranger = Node(server.url), Eavesdropper(server.url)
    wait_until(lambda: stranger.heard)
    inbox = one.backplane.inbox(one.mesh.node.id)
    other: Node | None = None
    try:
        flood = gevent.spawn(_flood, stranger, inbox)
        wait_until(lambda: UNAUTHENTICATED.count > 1000)
        assert len(one.mesh.node.all_links) <= MAX_UNAUTHENTICATED
        other = Node(server.url)
        wait_until(lambda: one.mesh.node.links and other.mesh.node.links, "the real node is linked")
        assert len(one.backplane._connections) <= MAX_UNAUTHENTICATED + 1
        flood.kill()
        links = [one.link, other.link]
        assert goes_on(one, other, links)
    finally:
        stranger.client.close()
        one.close()
        if other is not None:
            other.close()


def _flood(stranger: Eavesdropper, inbox: str) -> None:
    """First messages, hellos, and messages of links that are not there, in the names of nodes that are not there."""
    begun = UNAUTHENTICATED.count
    while True:
        for _ in range(20):
            node_id = os.urandom(16)
            hello = wire.hello(Hello(1, 1, node_id, time.time_ns(), os.urandom(32)))
            stranger.say(inbox, _HEAD.pack(node_id, os.urandom(8), 0) + NOTHING + smq.frame(hello))
            stranger.say(inbox, _HEAD.pack(node_id, os.urandom(8), 0) + NOTHING)
            stranger.say(inbox, _HEAD.pack(node_id, os.urandom(8), 7) + NOTHING)
            stranger.say("smqrt.smqrt.hello", _HELLO.pack(b"\xff" + os.urandom(15), 7, 7) + NOTHING)
        # Each first message ends the oldest of 100 handshakes: on a busy machine the real one would never be in time.
        gevent.sleep(0.01 if UNAUTHENTICATED.count - begun <= 1000 else 0.1)


def _stays(stranger: Eavesdropper, inbox: str, node_id: bytes) -> None:
    """Always has a link under way, in the name of a node, and says nothing."""
    while True:
        stranger.say(inbox, _HEAD.pack(node_id, os.urandom(8), 0) + NOTHING)
        gevent.sleep(0.3)


def test_a_failed_impostor_does_not_block_the_node(server: NatsServer) -> None:
    """The refusal of a wrong password is remembered for 10 s: for the one who did not know it."""
    nodes = [Node(server.url, number=number) for number in (7, 8)]
    ids = sorted(node.mesh.node.id for node in nodes)
    for node in nodes:
        node.close()
    smaller = next(node for node in nodes if node.mesh.node.id == ids[0]).mesh.node.number
    one, stranger = Node(server.url, number=smaller), Eavesdropper(server.url)
    wait_until(lambda: stranger.heard)
    inbox = one.backplane.inbox(one.mesh.node.id)
    other: Node | None = None
    try:
        hello = wire.hello(Hello(1, 1, ids[1], time.time_ns(), os.urandom(32)))
        packets = smq.frame(hello) + smq.frame(wire.proof(b"another key", True, hello * 2))
        stranger.say(inbox, _HEAD.pack(ids[1], os.urandom(8), 0) + NOTHING + packets)
        wait_until(lambda: one.mesh.node.refused[Refusal.PASSWORD] == 1)
        silent = gevent.spawn(_stays, stranger, inbox, ids[1])
        began_s = time.monotonic()
        other = Node(server.url, number=15 - smaller)
        wait_until(lambda: one.mesh.node.links and other.mesh.node.links, "the real node is linked")
        assert time.monotonic() - began_s < 4
        silent.kill()
    finally:
        stranger.client.close()
        one.close()
        if other is not None:
            other.close()


def test_claims_of_thousands_of_nodes_are_not_kept(server: NatsServer) -> None:
    one, stranger = Node(server.url), Eavesdropper(server.url)
    wait_until(lambda: stranger.heard)
    inbox = one.backplane.inbox(one.mesh.node.id)
    try:
        for _ in range(2 * MAX_NODE):
            node_id = os.urandom(16)
            hello = wire.hello(Hello(1, 1, node_id, time.time_ns(), os.urandom(32)))
            packets = smq.frame(hello) + smq.frame(wire.proof(b"another key", True, hello * 2))
            stranger.say(inbox, _HEAD.pack(node_id, os.urandom(8), 0) + NOTHING + packets)
        stranger.arrived()
        wait_until(lambda: one.mesh.node.refused[Refusal.PASSWORD] == 2 * MAX_NODE)
        assert len(one.backplane._refused_until_s) <= MAX_NODE
        assert not one.backplane._connections
    finally:
        stranger.client.close()
        one.close()


def test_notices_of_lost_links_are_bounded_by_node_limit(
    nodes: tuple[Node, Node, Eavesdropper], caplog: pytest.LogCaptureFixture
) -> None:
    one, other, stranger = nodes
    links = [one.link, other.link]
    inbox = one.backplane.inbox(one.mesh.node.id)
    caplog.set_level(logging.INFO)
    for _ in range(3 * MAX_NODE):
        stranger.say(inbox, _HEAD.pack(other.mesh.node.id, os.urandom(8), 7) + NOTHING)
    stranger.arrived()
    assert len(one.backplane._announced_gone) <= MAX_NODE
    assert goes_on(one, other, links)
    assert len(caplog.records) < 10
