"""Links whose bytes travel in messages of NATS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.cluster.engines.mesh import Mesh
from smqrt.cluster.engines.nats_connections import portions
from smqrt.cluster.nats.client import LASTED_S
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY, NatsEngine
from tests.cluster.nats.server import NatsServer
from tests.support.waiting import wait_until


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[NatsEngine]:
    made = NatsEngine(tmp_path, "max_payload: 4KB\n")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.servers
def test_messages_that_are_larger_than_nats_takes(engine: NatsEngine) -> None:
    one, other = engine.place("one"), engine.place("other")
    engine.joined(one, other)
    publisher, subscriber = one.client(), other.client()
    subscriber.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    sent = [bytes((65 + count % 26,)) * size for count, size in enumerate((1, 4000, 60_000, 300, 9000) * 20)]
    for data in sent:
        publisher.publish(b"topic", data)
    engine.until(lambda: len(subscriber.data) == len(sent), "all messages")
    assert subscriber.data == sent
    assert not any(one.hub.drops().values())


@pytest.mark.servers
@pytest.mark.parametrize("flapping", [0, 1], ids=["first", "second"])
def test_a_node_relinks_at_once_after_losing_nats(tmp_path: Path, flapping: int) -> None:
    server = NatsServer(tmp_path)
    meshes, cables = [Mesh(KEY), Mesh(KEY)], [Cable(server.port), Cable(server.port)]
    nodes = [mesh.node for mesh in meshes]
    try:
        urls = [f"nats://127.0.0.1:{cable.port}" for cable in cables]
        backplanes = [mesh.link_through_nats(url, hello_s=60.0) for mesh, url in zip(meshes, urls, strict=True)]
        assert all(one.client.wait_connected(20) for one in backplanes)
        wait_until(lambda: [one.send_hello() for one in backplanes] and all(node.links for node in nodes))
        for _ in range(3):
            wait_until(lambda: all(node.links for node in nodes), "a link, without another word that they are there")
            gevent.sleep(2 * LASTED_S)
            (before,) = nodes[flapping].links.values()
            cables[flapping].mend()  # which ends the connections from before
            wait_until(lambda before=before: before not in nodes[flapping].links.values())
    finally:
        for each in (*meshes, *cables):
            each.close()
        server.stop()


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_portions_hold_the_same_bytes(runs: list[bytes], portion_bytes: int) -> None:
    made = [b"".join(pieces) for pieces in portions(runs, portion_bytes)]
    assert b"".join(made) == b"".join(runs)
    assert all(len(one) == portion_bytes for one in made[:-1])
    assert all(0 < len(one) <= portion_bytes for one in made[-1:])
