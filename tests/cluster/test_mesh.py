"""A process as a node of a mesh: its dialers, the links that it should have, and the directory of a machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt.cluster.engines import mesh as module
from smqrt.cluster.engines.mesh import Mesh
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY
from tests.support.waiting import let_others_run, wait_until


def _echo(sock: Any, address: object) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)


def test_an_echo_is_not_always_taken_for_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what this node has said, so that it seems to be found at its own address."""
    monkeypatch.setattr(module, "SELF_RETRY_S", 0.1)
    echo = StreamServer(("127.0.0.1", 0), _echo)
    echo.start()
    one, other = Mesh(KEY), Mesh(KEY)
    try:
        dialer = one.dial("127.0.0.1", echo.server_port)
        wait_until(lambda: dialer.is_self)
        assert not one.node.links
        echo.stop()
        other.listen("127.0.0.1", echo.server_port)
        wait_until(lambda: one.node.links, "the node that is there now is linked")
        wait_until(lambda: dialer.up)
        assert not dialer.is_self
    finally:
        echo.stop()
        one.close()
        other.close()


def test_equal_fixed_node_numbers_are_reported() -> None:
    one, other = Mesh(KEY, 7), Mesh(KEY, 7)
    try:
        dialer = one.dial("127.0.0.1", other.listen("127.0.0.1", 0).address[1])
        wait_until(lambda: "fixed number 7" in dialer.why)
        assert not dialer.is_self
    finally:
        one.close()
        other.close()


OUTAGE_S = 6.5
"""Who doubles what it waits would wait 6.4 s then."""
HEALS_S = 5.0


def test_nodes_link_within_five_seconds_after_long_outages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "uniform", lambda least, most: most)
    one, other = Mesh(KEY), Mesh(KEY)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        cable.cut()
        one.dial("127.0.0.1", cable.port)
        gevent.sleep(OUTAGE_S)
        cable.mend()
        began_s = time.monotonic()
        wait_until(lambda: one.node.links, "they are linked")
        assert time.monotonic() - began_s < HEALS_S
    finally:
        cable.close()
        one.close()
        other.close()


def test_a_link_that_breaks_is_made_anew_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKEN_PLACE_S", 60.0)
    one, other = Mesh(KEY), Mesh(KEY)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        one.dial("127.0.0.1", cable.port)
        for _ in range(3):
            wait_until(lambda: one.node.links and other.node.links)
            gevent.sleep(2 * module.LASTED_S)
            (before,) = one.node.links.values()
            cable.mend()  # which ends the connections from before
            wait_until(lambda before=before: before not in one.node.links.values())
    finally:
        cable.close()
        one.close()
        other.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Mesh]]:
    """Makes meshes, which are closed after the test."""
    made: list[Mesh] = []

    def make(number: int = 0) -> Mesh:
        made.append(Mesh(KEY, number))
        return made[-1]

    yield make
    for one in made:
        one.close()


def joined(one: Mesh, other: Mesh) -> None:
    """Two nodes with a link that no dialer has made."""
    here, there = socket.socketpair()
    for mesh, sock, connects in ((one, here, True), (other, there, False)):
        sock.setblocking(False)
        mesh.commence(sock, b"", connects)  # type: ignore[arg-type]
    wait_until(lambda: one.node.links and other.node.links, "they are linked")


def dead_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_addresses_are_shown_with_brackets_for_ipv6(start: Callable[..., Mesh]) -> None:
    mesh = start()
    port = dead_port()
    assert [mesh.dial(host, port).address for host in ("127.0.0.1", "::1")] == [f"127.0.0.1:{port}", f"[::1]:{port}"]


def test_an_address_is_missing_since_the_first_look(start: Callable[..., Mesh]) -> None:
    mesh = start()
    dialer = mesh.dial("127.0.0.1", dead_port())
    (first,) = mesh.expected.missing()
    assert (first.to, first.why) == (dialer.address, "not connected yet")
    wait_until(lambda: dialer.why != "not connected yet", "it was tried")
    (second,) = mesh.expected.missing()
    assert (second.why, second.since_s) == (dialer.why, first.since_s)
    dialer.forget()
    assert mesh.expected.missing() == []


def test_a_link_made_by_the_other_side_suffices(start: Callable[..., Mesh]) -> None:
    one, other = start(), start()
    dialer = one.dial("127.0.0.1", dead_port())
    joined(one, other)
    assert not dialer.up
    dialer.expects = other.node.id
    wait_until(lambda: dialer.up, "it is found there")
    assert one.expected.missing() == []


def test_a_removed_address_ends_its_link_in_order(start: Callable[..., Mesh]) -> None:
    one, other = start(), start()
    dialer = one.dial("127.0.0.1", other.listen("127.0.0.1", 0).address[1])
    sibling = one.dial("127.0.0.1", dead_port(), origin=dialer)
    wait_until(lambda: dialer.up and other.node.links)
    (link,) = other.node.links.values()
    dialer.disconnect()
    wait_until(lambda: not other.node.links)
    assert link.has_left
    assert link.why == "refused: that node was taken out of the list of nodes"
    assert sibling not in one.dialers, "the other processes of the server neither"


def test_a_closed_mesh_accepts_no_link(start: Callable[..., Mesh]) -> None:
    mesh = start()
    assert mesh in module.open_meshes
    for _ in range(2):
        mesh.close()
    assert mesh not in module.open_meshes
    here, there = socket.socketpair()
    mesh.accepted(here, ("127.0.0.1", 1))  # type: ignore[arg-type]
    there.setblocking(False)
    assert there.recv(1) == b""
    there.close()
    assert not mesh.node.all_links


def test_sockets_of_killed_processes_are_removed(start: Callable[..., Mesh], tmp_path: Path) -> None:
    killed = tmp_path / "1-00000000.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(killed))
    mesh = start()
    mesh.share_directory(tmp_path)
    wait_until(lambda: not killed.exists())
    (own,) = tmp_path.iterdir()
    mesh.close()
    assert not own.exists()


def test_linked_processes_of_a_machine_are_not_dialed(start: Callable[..., Mesh], tmp_path: Path) -> None:
    one, other = start(), start()
    joined(one, other)
    accepted: list[object] = []
    other.on_accepted = accepted.append
    other.share_directory(tmp_path)
    wait_until(lambda: list(tmp_path.iterdir()))
    one.share_directory(tmp_path)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    let_others_run(20)
    assert accepted == []
