"""The part of a process in a cluster, as settings and hubs give it: mutual TLS of links, NATS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import gevent
import pytest

from smqrt.broker.state import Hooks
from smqrt.cluster.engines import mesh
from smqrt.cluster.engines.process_cluster import ClusterPlan, ProcessCluster
from smqrt.errors import ArgumentError
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.transport.tls_contexts import ClientTls
from tests.cluster.cut import Cable
from tests.cluster.engines import Client
from tests.cluster.nats.server import NatsServer
from tests.cluster.nats.server import cluster as nats_cluster
from tests.conftest import free_port
from tests.support.pki import Authority
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers
Start = Callable[..., ProcessCluster]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process's part in a cluster with a plan."""
    started: list[ProcessCluster] = []

    def start_one(**plan: Any) -> ProcessCluster:
        one = ProcessCluster()
        started.append(one)
        one.set_plan(ClusterPlan(password="of the test", **plan))
        one.opened()
        return one

    yield start_one
    for one in started:
        one.close()


def files(authority: Authority, name: str, **arguments: Any) -> dict[str, str]:
    cert, key = authority.pair(name, **arguments)
    return {"ca": str(authority.path), "cert": str(cert), "key": str(key)}


def links(one: ProcessCluster) -> int:
    return len(one.opened().node.links)


def why(one: ProcessCluster) -> str:
    (dialer,) = one.opened().dialers
    return dialer.why


def test_processes_sharing_a_directory_keep_the_later_link(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "SCAN_S", 0.05)
    for number in range(6):  # which of two links is kept is by the random ids
        folder = tmp_path / f"n{number}"
        folder.mkdir(mode=0o700)
        both = [start(directory=folder)]
        gevent.sleep(0.1)
        both.append(start(directory=folder))
        # On a busy machine each has connected to the other one: until one of the two links has ended.
        wait_until(lambda both=both: all(links(one) == len(one.opened().node.all_links) == 1 for one in both))
        made = [next(iter(one.opened().node.links.values())) for one in both]
        gevent.sleep(0.3)
        assert [next(iter(one.opened().node.links.values()), None) for one in both] == made
        # And another one when it breaks, whoever made it.
        made[0].lose("the test cuts it")
        wait_until(lambda both=both, made=made: all(links(one) == 1 for one in both) and made[1] is not link(both[1]))


def link(one: ProcessCluster) -> object:
    return next(iter(one.opened().node.links.values()), None)


def test_hubs_are_joined_when_it_is_waited_for(start: Start) -> None:
    """What a worker does before it takes clients."""
    address = f"127.0.0.1:{free_port()}"
    first = start(listen=address)
    cable = Cable(int(address.partition(":")[2]))
    cable.delay_s = 0.1
    second = start(nodes=(f"127.0.0.1:{cable.port}",))
    hubs = [GeventBroker(Hooks(), HubOptions()) for _ in range(2)]
    try:
        listener = Client(hubs[0])
        for number in range(9000):  # the first half second of what there is to say
            listener.subscribe(b"topic%05d" % number)
        listener.subscribe(b"news")
        for one, broker in zip((first, second), hubs, strict=True):
            one.join(broker, HubOptions(cluster="chat"))
        second.wait_until_joined(20)
        hubs[1].publish(b"hello", b"news")
        wait_until(lambda: listener.data == [b"hello"])
        # Where there is nobody, nobody waits for ever.
        first.close()
        wait_until(lambda: links(second) == 0)
        begun_s = monotonic()
        second.wait_until_joined(0.2)
        assert 0.2 <= monotonic() - begun_s < 5
    finally:
        cable.close()
        for broker in hubs:
            broker.close()


def test_both_sides_show_a_certificate_of_the_authority(start: Start, tmp_path: Path) -> None:
    authority, address = Authority(tmp_path), f"127.0.0.1:{free_port()}"
    first = start(listen=address, **files(authority, "first", host="first.example"))
    second = start(nodes=(address,), **files(authority, "second", host="second.example"))
    wait_until(lambda: links(first) == links(second) == 1)
    plain, nameless = start(nodes=(address,)), start(nodes=("127.0.0.1:1",))
    host, port = address.split(":")
    dialer = nameless.opened().dial(host, int(port), ClientTls.from_files(str(authority.path)), any_name=True)
    for one in (plain.opened().dialers[0], dialer):
        wait_until(lambda one=one: one.why not in ("", "not connected yet"))
    assert links(first) == 1


def test_a_certificate_of_another_authority_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other, address = Authority(tmp_path), Authority(tmp_path / "other"), f"127.0.0.1:{free_port()}"
    first = start(listen=address, **files(authority, "first"))
    stranger = start(nodes=(address,), **files(other, "stranger"))
    wait_until(lambda: "not trusted" in why(stranger))
    # It trusts that authority, and shows its own certificate all the same.
    intruder = start(nodes=(address,), **{**files(other, "intruder"), "ca": str(authority.path)})
    wait_until(lambda: why(intruder) not in ("", "not connected yet"))
    assert links(first) == links(stranger) == links(intruder) == 0


def test_nodes_link_through_three_nats_servers_with_tls(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.pair("nats")
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.path}", verify: true }}'
    servers = nats_cluster(tmp_path, 3, f'{tls}\nauthorization {{ user: "node", password: "secret" }}')
    try:
        urls = [f"nats://node:secret@127.0.0.1:{server.port}" for server in servers]
        first = start(nodes=(urls[0],), **files(authority, "first"))
        second = start(nodes=(urls[1],), **files(authority, "second"))
        wait_until(lambda: links(first) == links(second) == 1)
        servers[0].kill()
        wait_until(lambda: first.opened().node.links_lost == 1)
        wait_until(lambda: links(first) == links(second) == 1)
    finally:
        for server in servers:
            server.stop()


def test_a_hub_may_name_the_servers_of_nats_itself(start: Start, tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    hubs = [GeventBroker(Hooks(), HubOptions(cluster=f"nats://127.0.0.1:{server.port}/chat")) for _ in range(2)]
    try:
        with pytest.raises(ArgumentError, match="needs a password"):
            ProcessCluster().join(hubs[0], HubOptions(cluster="nats://127.0.0.1/chat"))
        for one in hubs:
            start().join(one, HubOptions(cluster=f"nats://127.0.0.1:{server.port}/chat"))
        assert {one.cluster.name for one in hubs} == {"chat"}
        wait_until(lambda: all(len(one.cluster.remotes) == 1 for one in hubs))
    finally:
        server.stop()
        for one in hubs:
            one.close()


def test_a_certificate_without_an_authority_is_a_mistake(start: Start, tmp_path: Path) -> None:
    given = files(Authority(tmp_path), "first")
    with pytest.raises(ArgumentError, match=r"need both cluster\.ca and cluster\.cert"):
        start(listen="127.0.0.1:0", cert=given["cert"], key=given["key"])
    with pytest.raises(ArgumentError, match="certfile: cannot read"):
        start(listen="127.0.0.1:0", ca=given["ca"], cert=str(tmp_path / "missing.pem"))
