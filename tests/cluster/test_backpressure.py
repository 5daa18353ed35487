"""Publishers wait for clients of other nodes as for those of their own, and for links before these are full."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gevent
import pytest

from smqrt.broker.outbox import Drop, Pressure
from smqrt.cluster.engines.mesh import Mesh
from smqrt.smq import data_path
from smqrt.wire.connection_state import Life
from tests.cluster.cut import Cable
from tests.smq.slow import BUDGET_BYTES, flood, numbered, numbers, stalled
from tests.support.device import KINDS, Device, Site, bounded, publish
from tests.support.sites import authority, make_site
from tests.support.waiting import wait_until

__all__ = ["authority", "make_site"]

KEY = b"k" * 32
QUEUE_BYTES = 1 << 20
COUNT = 12_000
DROPS = (Drop.LINK_SLOW, Drop.LINK_LOST, Drop.OVER_BUDGET)


class Nodes:
    """Two hubs behind servers of their own, joined over TCP.

    Attributes:
        here, there: the sites; meshes: of both; cable: what is between them.
    """

    def __init__(self, make_site: Callable[..., Site]) -> None:
        self._make_site = make_site
        self.meshes: list[Mesh] = []
        self.cable: Cable | None = None

    def join(self, queue_bytes: int = QUEUE_BYTES, **options: object) -> tuple[Site, Site]:
        self.here, self.there = (self._make_site(**{"budget": BUDGET_BYTES, **options}) for _ in range(2))
        self.meshes = [Mesh(KEY, ping_s=0.1, silence_s=10.0, queue_bytes=queue_bytes) for _ in range(2)]
        self.members = [
            mesh.join(site.state, "hub") for mesh, site in zip(self.meshes, (self.here, self.there), strict=True)
        ]
        self.cable = Cable(self.meshes[1].listen("127.0.0.1", 0).address[1])
        self.meshes[0].dial("127.0.0.1", self.cable.port)
        wait_until(lambda: all(one.remotes and one.remotes[0].synced for one in self.members), "they join")
        return self.here, self.there

    def wanted(self, name: bytes) -> bool:
        """Whether the publisher's node knows that the other one wants a topic."""
        numbers = self.here.state.topic_table.numbers
        return bool(self.members[0].interest.nodes(numbers.topic(name)))

    def subscribed(self, device: Device, name: bytes) -> int:
        tid = device.subscribe(name)
        wait_until(lambda: self.wanted(name), "interest")
        return tid

    def lost(self) -> dict[Drop, int]:
        """What was dropped at either node."""
        stats = [site.state.stats.drops for site in (self.here, self.there)]
        return {reason: sum(one[reason] for one in stats) for reason in DROPS if any(one[reason] for one in stats)}

    def close(self) -> None:
        for mesh in self.meshes:
            mesh.close()
        if self.cable:
            self.cable.close()


@pytest.fixture
def nodes(make_site: Callable[..., Site]) -> Iterator[Nodes]:
    found = Nodes(make_site)
    yield found
    found.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["topic", "client"])
def test_publishers_of_other_nodes_wait_for_slow_clients(nodes: Nodes, kind: str, to: str) -> None:
    here, there = nodes.join(slow="wait")
    lazy, publisher = stalled(there, b"lazy-1", kind), here.device(b"publisher", kind)
    other, reader = here.device(b"another"), there.device(b"reader")
    tid = publisher.create(b"news") if to == "topic" else lazy.etid
    wait_until(lambda: nodes.wanted(b"news"), "interest")
    quiet = nodes.subscribed(reader, b"quiet")
    connection = there.state.uids[b"lazy-1"].outbox
    sending = gevent.spawn(flood, publisher, tid, COUNT)
    with bounded():
        wait_until(lambda: connection.life is Life.BLOCKED, "the queue fills up")
        wait_until(lambda: here.state.uids[b"publisher"].outbox.paused, "the publisher is not read")
        other.publish(quiet, b"uninvolved")
        reader.expect(publish(quiet, other.etid, b"uninvolved"))
        assert connection.queued_bytes < 30 * BUDGET_BYTES, "what was on its way, and no more"
        got: list[int] = []
        while got[-1:] != [COUNT - 1]:
            got += numbers([lazy.receive()])
        sending.join()
    assert got == list(range(COUNT))
    assert not nodes.lost()
    wait_until(lambda: not here.state.slow.pressure.topics and not nodes.members[0].remotes[0].pressing, "nobody waits")
    publisher.expect_nothing()


def test_a_slow_client_elsewhere_holds_no_publisher_for_ever(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path.limits, "backpressure_s", 0.3)
    here, there = nodes.join(slow="wait")
    stalled(there, b"lazy-1")
    publisher, reader = here.device(b"publisher"), there.device(b"reader")
    tid = nodes.subscribed(reader, b"news")
    reading = gevent.spawn(lambda: [reader.receive() for _ in range(COUNT)])
    with bounded():
        flood(publisher, tid, COUNT)
        assert numbers(reading.get()) == list(range(COUNT)), "who reads gets everything"
        publisher.expect_nothing()
    assert there.state.stats.drops[Drop.OVER_BUDGET] == there.state.uids[b"lazy-1"].outbox.dropped > 0


@pytest.mark.parametrize("end", ["silent", "cut", "gone"])
def test_a_lost_node_blocks_publishers_for_bounded_time(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    here, there = nodes.join(slow="wait")
    monkeypatch.setattr(Pressure, "max_wait_s", 0.5)
    lazy, publisher, reader = stalled(there, b"lazy-1"), here.device(b"publisher"), here.device(b"reader")
    wait_until(lambda: nodes.wanted(b"news"), "interest")
    tid = reader.subscribe(b"news")
    reading = gevent.spawn(lambda: [reader.receive() for _ in range(COUNT)])
    sending = gevent.spawn(flood, publisher, tid, COUNT)
    assert nodes.cable
    with bounded():
        wait_until(
            lambda: here.state.uids[b"publisher"].outbox.paused and nodes.members[0].remotes[0].pressing, "it waits"
        )
        {"silent": nodes.cable.hold, "cut": nodes.cable.cut, "gone": lazy.close}[end]()
        sending.join()
        assert numbers(reading.get()) == list(range(COUNT)), "who reads gets everything"


def test_a_new_link_gets_the_slow_clients(nodes: Nodes) -> None:
    here, there = nodes.join(slow="wait")
    lazy, publisher = stalled(there, b"lazy-1"), there.device(b"publisher")
    tid = publisher.create(b"news")
    flood(publisher, tid, 1)
    sending = gevent.spawn(flood, publisher, tid, COUNT)
    assert nodes.cable
    with bounded():
        wait_until(lambda: here.state.slow.pressure.topics, "the other node is told")
        nodes.cable.cut()
        wait_until(lambda: not here.state.slow.pressure.topics, "nobody waits for a lost node")
        nodes.cable.mend()
        wait_until(lambda: here.state.slow.pressure.topics, "it is told anew")
    sending.kill()
    lazy.close()


def test_a_burst_waits_for_the_link_and_breaks_none(nodes: Nodes) -> None:
    here, there = nodes.join(budget=64 << 20)
    reader, watcher = there.device(b"reader"), here.device(b"watcher")
    tid = nodes.subscribed(reader, b"news")
    watcher.send(b"\x0e" + reader.etid.to_bytes(4, "big"))
    publishers = [here.device(b"publisher-%d" % number) for number in range(4)]
    for one in publishers:
        assert one.create(b"news") == tid
    each = 300
    with bounded(40.0):
        sending = [gevent.spawn(flood, one, tid, each, 0, 20_000) for one in publishers]  # 24 MB over a link of 1 MiB
        link = next(iter(nodes.meshes[0].node.links.values()))
        wait_until(lambda: link.is_full, "the link is full")
        got: list[bytes] = [reader.receive() for _ in range(4 * each)]
        gevent.joinall(sending)
    by_publisher = {
        one.etid: numbers([packet for packet in got if packet[5:9] == one.etid.to_bytes(4, "big")])
        for one in publishers
    }
    assert all(found == list(range(each)) for found in by_publisher.values())
    assert not nodes.lost()
    assert nodes.meshes[0].node.links_lost == nodes.meshes[1].node.links_lost == 0
    watcher.expect_nothing()


def test_what_the_server_publishes_breaks_no_link(nodes: Nodes) -> None:
    """It never waits: what is too much is left out and counted, and nobody is told that clients are gone."""
    here, there = nodes.join(budget=64 << 20)
    reader, watcher = there.device(b"reader"), here.device(b"watcher")
    tid = nodes.subscribed(reader, b"news")
    watcher.send(b"\x0e" + reader.etid.to_bytes(4, "big"))
    count = 100
    for number in range(count):
        here.smq.publish(numbered(number, 40_000), "news")
    newcomer = here.device(b"newcomer")
    with bounded():
        wait_until(lambda: newcomer.etid in nodes.members[1].phantoms, "who comes meanwhile is told of")
        here.smq.publish(b"the last", "news")
        packets = [reader.receive()]
        while packets[-1][13:] != b"the last":
            packets.append(reader.receive())
    got = numbers(packets[:-1])
    assert got == sorted(set(got))
    assert len(got) + sum(nodes.lost().values()) == count
    assert nodes.meshes[0].node.links_lost == 0
    watcher.expect_nothing()
    assert tid
