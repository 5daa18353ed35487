"""Links that an application makes (help: cluster): their options, lists of nodes, channels and ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from smqrt.broker.state import Hooks
from smqrt.cluster.engines.mtl import Cluster, Conn, Links, Mtl, MtlOptions, address_list, own
from smqrt.errors import ArgumentError, ClosedError
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire import cluster_packets as wire
from tests.cluster.engines import KEY
from tests.support.waiting import wait_until


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mtl]]:
    """Makes links with the same password, without the 50 ms that its key takes."""
    monkeypatch.setattr(wire, "key_of", lambda password: KEY)
    made: list[Mtl] = []

    def make(**options: object) -> Mtl:
        made.append(Mtl(b"of the test", MtlOptions(**options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def nothing(*_: object) -> None:
    """A function of a channel."""


@pytest.mark.parametrize(
    ("ping_s", "silence_s", "fault"),
    [
        (0.05, 0.06, ""),
        (0.049, 1, "ping_s: 0.049; it must be 0.05 to 3600"),
        (3599, 3600, ""),
        (1, 3601, "silence_s: 3601; it must be more than ping_s and at most 3600"),
        (1, 1, "silence_s: 1; it must be more than ping_s"),
    ],
)
def test_times_of_links_have_limits(ping_s: float, silence_s: float, fault: str) -> None:
    if fault:
        with pytest.raises(ArgumentError, match=fault):
            MtlOptions(ping_s, silence_s)
    else:
        assert MtlOptions(ping_s, silence_s).silence_s == silence_s


def test_links_need_a_password() -> None:
    with pytest.raises(ArgumentError, match="password: it is empty"):
        Mtl(b"")


def test_links_of_the_server_are_not_the_applications(start: Callable[..., Mtl]) -> None:
    mtl = start()
    assert own(mtl) is mtl
    with pytest.raises(ArgumentError, match="these are the links of the server"):
        own(Links(mtl.mesh))


def test_only_channels_of_the_same_object_are_closed(start: Callable[..., Mtl]) -> None:
    mesh = start().mesh
    one, other = Links(mesh), Links(mesh)
    channel = one.open(b"chat", nothing, nothing)
    assert one.isopen(b"chat")
    assert other.isopen(b"chat")
    assert not other.close_named(b"chat")
    other.shutdown()
    assert not channel.closed
    assert one.close_named(b"chat")
    assert not one.close_named(b"chat")
    later = other.open(b"chat", nothing, nothing)
    one.close()
    assert not later.closed, "the channel of the same name is another one"


def test_a_name_closes_a_channel_before_a_hub(start: Callable[..., Mtl]) -> None:
    mtl, hub = start(), GeventBroker(Hooks(), HubOptions())
    cluster = Cluster(hub, mtl, "chat")
    channel = mtl.open(b"chat", nothing, nothing)
    assert mtl.close_named(b"chat")
    assert channel.closed
    assert hub.cluster is not None
    with pytest.raises(ArgumentError, match="the text of close has at most 1000"):
        mtl.close_named(b"chat", bytes(1001))
    assert mtl.close_named(b"chat")
    assert hub.cluster is None
    assert not mtl.close_named(b"chat")
    cluster.close()
    hub.close()


def test_a_list_with_a_wrong_port_changes_nothing(start: Callable[..., Mtl]) -> None:
    mtl = start()
    conn = Conn(mtl, 0, "127.0.0.1")
    conn.setlist([("192.0.2.1", 1)])
    for port in (-1, 65536):
        with pytest.raises(ArgumentError, match=f"port: {port}; a port is 1 to 65535"):
            conn.setlist([("192.0.2.2", 1), ("192.0.2.3", port)])
    assert conn.status() == {"192.0.2.1": False}
    conn.setlist([("192.0.2.2", 0), ("192.0.2.2", conn.port)])
    assert conn.status() == {"192.0.2.2": False}
    (dialer,) = mtl.mesh.dialers
    assert dialer.address == f"192.0.2.2:{conn.port}", "0 is the port of the Conn"
    conn.setlist([("192.0.2.2", 0)])
    assert mtl.mesh.dialers == [dialer], "it is the same address as before"


def test_a_conn_that_was_shut_down_dials_no_more(start: Callable[..., Mtl]) -> None:
    mtl = start()
    conn = Conn(mtl, 0, "127.0.0.1")
    conn.add("192.0.2.1")
    for _ in range(2):
        conn.shutdown()
    assert mtl.mesh.dialers == []
    for call in (lambda: conn.add("192.0.2.1"), lambda: conn.setlist([])):
        with pytest.raises(ClosedError, match="conn: it was shut down; make a new one"):
            call()
    mtl.shutdown()
    with pytest.raises(ClosedError):
        Conn(mtl, 0, "127.0.0.1")


def test_links_over_tls_need_both_sides(start: Callable[..., Mtl]) -> None:
    tls = object.__new__(ClientTls)
    with pytest.raises(ArgumentError, match="links over TLS need both"):
        Conn(start(), 0, "127.0.0.1", tls)


def test_commence_reports_both_ends_of_a_link(start: Callable[..., Mtl]) -> None:
    told: dict[str, list[tuple[str, bool]]] = {"link": [], "all": []}
    one = start(onstatus=lambda address, up, why: told["all"].append((address, up)))
    other = start()
    socks = socket.socketpair()
    for mtl, sock in zip((one, other), socks, strict=True):
        sock.setblocking(False)
        status = lambda address, up, why: told["link"].append((address, up))  # noqa: E731
        assert mtl.commence(sock, b"", mtl is one, "there", status if mtl is one else nothing)  # type: ignore[arg-type]
    wait_until(lambda: told["link"])
    other.shutdown()
    wait_until(lambda: len(told["link"]) == 2)
    assert told["link"] == told["all"] == [("there", True), ("there", False)]


def test_commence_after_shutdown_closes_the_connection(start: Callable[..., Mtl]) -> None:
    mtl = start()
    mtl.shutdown()
    here, there = socket.socketpair()
    assert not mtl.commence(here, b"", True, "there", nothing)  # type: ignore[arg-type]
    assert there.recv(1) == b""
    there.close()


def test_a_connection_made_by_others_has_its_host(start: Callable[..., Mtl]) -> None:
    one, other = start(), start()
    Conn(other, 0, "127.0.0.1").add("127.0.0.1", Conn(one, 0, "127.0.0.1").port)
    assert not one.hascon("127.0.0.1")
    wait_until(lambda: one.hascon("127.0.0.1") and other.hascon("127.0.0.1"))
    assert not one.hascon("127.0.0.2")


def test_clusters_have_names_of_their_own(start: Callable[..., Mtl]) -> None:
    mtl = start()
    hubs = [GeventBroker(Hooks(), HubOptions()) for _ in range(2)]
    first, second = (Cluster(hub, mtl) for hub in hubs)
    number = int(first.name.removeprefix("SMQ-"))
    assert second.name == f"SMQ-{number + 1}"
    for hub in hubs:
        hub.close()


def test_lists_of_addresses_are_hosts_or_ports_by_host() -> None:
    assert address_list(["a", "b"]) == [("a", 0), ("b", 0)]
    assert address_list({"a": 1}) == [("a", 1)]
