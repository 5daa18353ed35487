"""Connections of links over sockets: what ends them, and what their ends do to the link."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import gevent
import pytest

from smqrt.broker.outbox import Drop
from smqrt.broker.state import Hooks
from smqrt.cluster.engines.connections import MAX_UNAUTHENTICATED_BYTES, LinkConnection, LinkSession
from smqrt.cluster.engines.mesh import Mesh
from smqrt.cluster.link import Link, LinkState
from smqrt.errors import CloseReason
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType, Packet
from smqrt.wire.connection_state import Life
from tests.cluster.engines import KEY, Client
from tests.support.waiting import let_others_run, wait_until


class Ends:
    """Two nodes over a pair of sockets.

    Attributes:
        link, other: both sides of the link.
        hubs: of both, once they have joined.
    """

    def __init__(self) -> None:
        self.meshes = [Mesh(KEY), Mesh(KEY)]
        self.hubs = [GeventBroker(Hooks(), HubOptions()) for _ in range(2)]
        self.members = [mesh.join(hub, "hub") for mesh, hub in zip(self.meshes, self.hubs, strict=True)]
        socks = socket.socketpair()
        self.link, self.other = (
            self.made(mesh, sock, connects)
            for mesh, sock, connects in zip(self.meshes, socks, (True, False), strict=True)
        )
        wait_until(lambda: all(one.remotes and one.remotes[0].synced for one in self.members), "they join")

    @staticmethod
    def made(mesh: Mesh, sock: Any, connects: bool = False, data: bytes = b"") -> Link:
        sock.setblocking(False)
        return mesh.commence(sock, data, connects)

    def says(self, frame: bytes) -> str:
        """One side sends a frame, whatever it is; gives why the other one ends the link."""
        self.link.transport.outbox.put(frame)
        wait_until(lambda: self.other.state is LinkState.CLOSED)
        return self.other.why

    def close(self) -> None:
        for mesh, hub in zip(self.meshes, self.hubs, strict=True):
            mesh.close()
            hub.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    found = Mesh(KEY)
    yield found
    found.close()


@pytest.mark.parametrize("is_early", [False, True])
def test_bytes_before_the_proof_are_limited(mesh: Mesh, is_early: bool) -> None:
    frame = smq.frame(bytes((Packet.PING,)) + bytes(MAX_UNAUTHENTICATED_BYTES))
    here, there = socket.socketpair()
    there.setblocking(False)
    link = Ends.made(mesh, here, data=frame[:MAX_UNAUTHENTICATED_BYTES] if is_early else b"")
    let_others_run(5)
    assert link.state is LinkState.GREETING, "the frame is not complete"
    there.send(frame[MAX_UNAUTHENTICATED_BYTES:] if is_early else frame)
    wait_until(lambda: link.state is LinkState.CLOSED)
    assert link.why == "peer sent more than 8 KiB before authenticating; it is not an smqrt node"
    there.close()


def test_too_much_data_of_an_application_ends_the_link(mesh: Mesh) -> None:
    here, there = socket.socketpair()
    link = Ends.made(mesh, here, data=bytes(MAX_UNAUTHENTICATED_BYTES + 1))
    assert link.state is LinkState.CLOSED
    there.close()


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"\0\x02", CloseReason.SHORT_PACKET.value),
        (smq.frame(b"\x08" + bytes(5)), CloseReason.SHORT_PACKET.value),
        (smq.frame(b"\x6e"), "type 6e of another node"),
    ],
)
def test_a_violation_of_the_protocol_is_the_reason(ends: Ends, frame: bytes, why: str) -> None:
    assert why in ends.says(frame)
    wait_until(lambda: ends.link.state is LinkState.CLOSED)
    assert ends.link.why == CloseReason.PEER_CLOSED.value


def test_an_error_while_processing_ends_the_link(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    def fail(packet: bytes) -> None:
        raise RuntimeError("of the test")

    ends.members[1].remotes[0].control = fail
    assert ends.says(smq.frame(bytes((LinkType.SYNCED,)))) == CloseReason.HOOK_FAILED.value
    assert "error while a message of another node was delivered; the link is closed" in caplog.text


@pytest.mark.parametrize(
    ("reason", "why", "counted"),
    [
        (CloseReason.SLOW_CONSUMER, "the other node has stopped reading", Drop.LINK_SLOW),
        (CloseReason.READ_FAILED, CloseReason.READ_FAILED.value, Drop.LINK_LOST),
    ],
)
def test_the_end_of_a_connection_counts_its_messages(ends: Ends, reason: CloseReason, why: str, counted: Drop) -> None:
    Client(ends.hubs[1]).subscribe(b"news")
    wait_until(lambda: ends.members[0].interest)
    ends.hubs[0].publish(b"hello", b"news")
    ends.members[0].remotes[0].send_queue.flush()
    LinkSession(ends.link).disconnect(reason)
    let_others_run(5)
    assert ends.link.why == why
    assert ends.hubs[0].stats.drops[counted] == 1


def test_a_queue_over_its_limit_ends_the_link_later(ends: Ends) -> None:
    connection, frame = ends.link.transport.outbox, smq.frame(b"\x40" + bytes(60_000))
    assert isinstance(connection, LinkConnection)
    ends.other.transport.pause()  # type: ignore[attr-defined]
    while connection.life is not Life.BLOCKED:
        connection.put(frame)
        connection.flush()
    connection.budget_bytes = connection.queued_bytes
    connection.put(frame)
    assert ends.link.state is LinkState.UP, "whoever puts has more to put"
    connection.budget_bytes += len(frame)
    gevent.sleep(0)
    assert ends.link.state is LinkState.UP, "there is room meanwhile"
    connection.put(frame)
    wait_until(lambda: ends.link.state is LinkState.CLOSED)
    assert ends.link.why.startswith("the other node is too slow: ")


@pytest.mark.parametrize("in_order", [False, True])
def test_an_end_in_order_sends_the_queue(ends: Ends, in_order: bool) -> None:
    got: list[bytes] = []
    ends.hubs[1].subscribe(b"news", lambda data, *_: got.append(data))
    wait_until(lambda: ends.members[0].interest)
    ends.hubs[0].publish(b"hello", b"news")
    ends.members[0].remotes[0].send_queue.flush()
    ends.link.lose("the test", in_order=in_order)
    wait_until(lambda: ends.other.state is LinkState.CLOSED)
    let_others_run(5)
    assert got == ([b"hello"] if in_order else [])


def test_the_other_end_is_shown_as_text(mesh: Mesh) -> None:
    shown = []
    for address in ("127.0.0.1", "::1"):
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            port = server.getsockname()[1]
            link = Ends.made(mesh, socket.create_connection((address, port)))
            shown.append(link.transport.via.removesuffix(str(port)))
    here, there = socket.socketpair()
    link = Ends.made(mesh, here)
    shown.append(link.transport.via)
    link.lose("the test")
    shown.append(link.transport.via)
    there.close()
    assert shown == ["127.0.0.1:", "[::1]:", "unix", "closed"]
