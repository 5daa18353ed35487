"""Whoever finds one process of a server finds all; and which links are missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.cluster.engines import mesh, process_cluster
from smqrt.cluster.engines.mesh import Mesh
from smqrt.cluster.engines.process_cluster import ClusterPlan, ProcessCluster
from smqrt.errors import ArgumentError
from smqrt.wire import cluster_packets as wire
from smqrt.workers.worker_rpc import WorkerPlace
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY
from tests.conftest import free_port
from tests.support.waiting import wait_until


class Machine:
    """Workers of a server that would run on a machine of their own.

    Attributes:
        workers: those that run, by number.
    """

    def __init__(self, path: Path, port: int, nodes: tuple[str, ...], count: int, patch: pytest.MonkeyPatch) -> None:
        path.mkdir(mode=0o700)
        self._path, self._port, self._nodes, self.count, self._patch = path, port, nodes, count, patch
        self._secret = path.name.encode().ljust(32)
        self.workers: dict[int, ProcessCluster] = {}

    def start(self, number: int) -> ProcessCluster:
        place = WorkerPlace(number, self.count, self._secret, self._path) if self.count > 1 else WorkerPlace()
        self._patch.setattr(process_cluster, "worker_place", lambda: place)
        one = self.workers[number] = ProcessCluster()
        listen = f"127.0.0.1:{self._port}"
        one.set_plan(ClusterPlan(listen=listen, nodes=self._nodes, password="of the test", ping_s=0.2))
        one.opened()
        return one

    def stop(self, number: int) -> None:
        self.workers.pop(number).close()


Start = Callable[..., list[Machine]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts machines with so many workers each; their lists name one port of each, or what `nodes` makes of these."""
    started: list[Machine] = []

    def start_all(*counts: int, nodes: Callable[[list[int]], list[tuple[str, ...]]] | None = None) -> list[Machine]:
        ports = [free_ports(count) for count in counts]
        everywhere = tuple(f"127.0.0.1:{port}" for port in ports)
        lists = nodes(ports) if nodes else [everywhere] * len(counts)
        for count, port, listed in zip(counts, ports, lists, strict=True):
            started.append(Machine(tmp_path / f"m{len(started)}", port, listed, count, monkeypatch))
            for number in range(count):
                started[-1].start(number)
        return started

    yield start_all
    for machine in started:
        for number in list(machine.workers):
            machine.stop(number)


_next_port = 0


def free_ports(count: int) -> int:
    """The first of so many that follow each other."""
    global _next_port
    while True:
        first = max(free_port(), _next_port)
        if all(_is_free(first + number) for number in range(count)):
            _next_port = first + count
            return first


def _is_free(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def meshes(machines: list[Machine]) -> list[Mesh]:
    return [one.opened() for machine in machines for one in machine.workers.values()]


def is_whole(machines: list[Machine]) -> bool:
    found = meshes(machines)
    return all(len(one.node.links) == len(found) - 1 and not one.expected.missing() for one in found)


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 2, 1)])
def test_one_port_of_each_machine_joins_all_workers(start: Start, counts: tuple[int, ...]) -> None:
    machines = start(*counts)
    wait_until(lambda: is_whole(machines), "all are linked")


def test_one_list_suffices_and_lists_may_name_all(start: Start) -> None:
    machines = start(2, 2, nodes=lambda ports: [(), tuple(f"localhost:{ports[0] + number}" for number in range(2))])
    wait_until(lambda: is_whole(machines), "all are linked")
    assert [len(one.dialers) for one in meshes(machines)] == [0, 0, 2, 2]


def test_a_restarted_worker_is_found_and_replaces_the_old(start: Start) -> None:
    machines = start(2, 2)
    wait_until(lambda: is_whole(machines), "all are linked")
    for number in (1, 0):
        machines[0].stop(number)
        wait_until(lambda: all(one.expected.missing() for one in meshes(machines[1:])), "its link is missing")
        machines[0].start(number)
        wait_until(lambda: is_whole(machines), "all are linked again")


def test_a_server_with_fewer_workers_leaves_no_fault(start: Start, tmp_path: Path) -> None:
    machines = start(1, 3)
    wait_until(lambda: is_whole(machines), "all are linked")
    for number in range(3):
        machines[1].stop(number)
    machines[1].count = 1
    machines[1].start(0)
    wait_until(lambda: is_whole(machines), "all are linked")
    assert len(meshes(machines)[0].dialers) == 2


def test_a_node_of_an_older_release_is_linked(start: Start) -> None:
    older = Mesh(KEY)
    older.node.abilities = ()
    newer = Mesh(KEY)
    try:
        port = older.listen("127.0.0.1", 0).address[1]
        newer.dial("127.0.0.1", port)
        wait_until(lambda: newer.node.links and older.node.links)
        assert next(iter(newer.node.links.values())).siblings is None
        wait_until(lambda: not newer.expected.missing() and not older.expected.missing(), "nothing is missing")
    finally:
        older.close()
        newer.close()


def test_a_missing_link_and_its_return_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "smqrt")
    monkeypatch.setattr(mesh, "MISSING_S", 0.5)

    def lines(words: str) -> list[int]:
        return [one.levelno for one in caplog.records if words in one.message]

    one, other = Mesh(KEY, 1), Mesh(KEY, 2)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        one.dial("127.0.0.1", cable.port)
        wait_until(lambda: one.node.links and not one.expected.missing())
        cable.cut()
        wait_until(lambda: lines(f"no link to 127.0.0.1:{cable.port} for ") == [logging.WARNING])
        (missing,) = one.expected.missing()
        assert missing.to == f"127.0.0.1:{cable.port}"
        assert missing.why
        cable.mend()
        wait_until(lambda: lines("is no longer missing") == [logging.INFO])
        assert len(lines("no link to ")) == 1
    finally:
        cable.close()
        one.close()
        other.close()


def test_unreachable_processes_that_others_know_are_missing(start: Start) -> None:
    """Nobody here looks for it, and it can't come."""
    machines = start(1, 2, nodes=lambda ports: [(), (f"127.0.0.1:{ports[0]}",)])
    wait_until(lambda: is_whole(machines), "all are linked")
    here, there = meshes(machines)[0], meshes(machines)[2]
    there.dialers[0].close()
    here.node.links[there.node.id].lose("the test cuts it")
    wait_until(lambda: here.expected.missing(), "it is missing")
    assert "process 1 of the server of node" in here.expected.missing()[0].to


@pytest.mark.parametrize("port", [65_535, 65_534])
def test_each_worker_has_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    machine = Machine(tmp_path / "m", port, (), 3, monkeypatch)
    with pytest.raises(ArgumentError, match=f"port {port}; with 3 workers it is 65533 at most"):
        machine.start(0)


def test_port_0_is_another_one_for_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "m", 0, (), 2, monkeypatch)
    other = Mesh(process_cluster.key_of(b"of the test"))
    try:
        first, second = (machine.start(number).opened() for number in range(2))
        other.dial("127.0.0.1", first.node.server.port)
        wait_until(lambda: second.node.id in other.node.links, "the other worker is found")
        assert 0 != first.node.server.port != second.node.server.port
    finally:
        other.close()
        for number in list(machine.workers):
            machine.stop(number)


def malformed() -> list[Any]:
    good = wire.siblings(wire.Siblings(b"s" * 16, 1, ((b"a" * 16, 1), (b"b" * 16, 2))))
    many = wire.siblings(wire.Siblings(b"s" * 16, 0, ((b"a" * 16, 1),) * (wire.MAX_SIBLINGS + 1)))
    nobody = wire.siblings(wire.Siblings(b"s" * 16, 2, ((b"a" * 16, 1), (b"b" * 16, 2))))
    return [good[:-1], good[:10], good[:1], many, nobody]


@pytest.mark.parametrize("packet", malformed())
def test_what_is_no_list_of_processes_is_refused(packet: bytes) -> None:
    with pytest.raises(wire.ProtocolError):
        wire.parse_siblings(packet)
