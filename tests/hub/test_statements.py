"""Statements of the documents about a hub (spec: smq §2, §12) that no other test of Python holds; tests/conformance
lists all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt import hub
from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.hub.recorded import Calls
from tests.support.device import Authority, Site, connect_packet, publish
from tests.support.waiting import wait_until

# ---- callbacks


def test_info_has_no_credentials(make_site: Callable[..., Site]) -> None:
    infos: list[hub.Info] = []
    site = make_site(authenticate=lambda credentials, info: infos.append(info) or 0)
    site.device(credentials=b"secret")
    assert not {b"secret", "secret"} & {value for value in infos[0].values() if isinstance(value, str | bytes)}


def test_onclose_runs_before_observers_are_notified(make_site: Callable[..., Site]) -> None:
    told: list[tuple[Any, ...]] = []
    site = make_site(
        onconnect=lambda etid, *_: site.smq.observe(etid, lambda *call: told.append(call)),
        onclose=lambda etid, *_: told.append(("onclose", etid)),
    )
    site.smq.observe("news", lambda *call: told.append(call))
    device = site.device()
    device.subscribe(b"news")
    device.disconnect()
    wait_until(lambda: len(told) == 4, told)
    assert told == [(1, "news"), ("onclose", device.etid), (0, "news"), (0, device.etid)]


def test_onpublish_gets_bytes_also_of_a_dict(make_site: Callable[..., Site]) -> None:
    asked = Calls(answer=True)
    site = make_site(onpublish=asked)
    site.smq.publish({"a": 1}, "news")
    site.smq.publish("text", "news")
    assert [call[0] for call in asked] == [b'{"a":1}', b"text"]


def test_onmsg_is_the_global_handler_and_is_replaceable(make_site: Callable[..., Site]) -> None:
    first, second = Calls(), Calls()
    site = make_site(onmsg=first)
    device = site.device()
    device.publish(1, b"1").expect_nothing()
    site.smq.onmsg(second)
    device.publish(1, b"2").expect_nothing()
    assert (first, second) == ([(b"1", device.etid, 1, 0)], [(b"2", device.etid, 1, 0)])


def test_log_gets_a_socket_and_a_text(make_site: Callable[..., Site]) -> None:
    logged: list[tuple[Any, str]] = []
    site = make_site(log=lambda sock, text: logged.append((sock, text)))
    device = site.device()
    peer = site.smq.etid2peer(device.etid)
    device.publish(1, b"x").expect_nothing()
    device.send(b"\xff").expect_end()
    wait_until(lambda: len(logged) == 2, logged)
    assert logged[0] == (None, f"no handler for a message to 1 from {device.etid}: dropping it")
    assert peer
    assert logged[1][0] is peer.sock
    assert logged[1][1].startswith("closed: ")


def test_without_log_it_is_hidden(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    site.device().publish(1, b"x").expect_nothing()
    (line,) = [one for one in caplog.records if "no handler for a message to 1 from" in one.getMessage()]
    assert line.levelname == "DEBUG"


# ---- options

KEEP_ALIVE: list[tuple[dict[str, int], tuple[int, int]]] = [
    ({}, (230, 23)),
    ({"keepidle": 100}, (100, 10)),
    ({"keepidle": 20}, (20, 3)),
    ({"keepidle": 50, "keepintv": 7}, (50, 7)),
]


@pytest.mark.parametrize(("options", "expected"), KEEP_ALIVE)
def test_keep_alive(make_site: Callable[..., Site], options: dict[str, int], expected: tuple[int, int]) -> None:
    site = make_site(**options)
    site.device(b"uid-a1")
    sock = site.state.uids[b"uid-a1"].outbox.sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
    assert tuple(sock.getsockopt(socket.IPPROTO_TCP, name) for name in names) == expected


def test_readtmo_by_default(site: Site) -> None:
    assert site.state._admission.readtmo_ms == 4000


# ---- connect


class WatchedSite(Site):
    """Records when `connect` has returned."""

    def _dispatch(self, incoming: Any) -> None:
        super()._dispatch(incoming)
        self.requests.append("returned")


@pytest.mark.parametrize("code", [0, 3])
def test_connect_returns_when_the_handshake_is_over(authority: Authority, code: int) -> None:
    asked = Calls(answer=code)
    site = WatchedSite(hub.create(authenticate=asked), authority)
    device = site.open().start()
    gevent.sleep(0.01)
    assert "returned" not in site.requests
    device.send(connect_packet())
    wait_until(lambda: "returned" in site.requests, "connect")
    assert asked.come()
    site.close()


# ---- methods


def test_wanted_sub_topic_numbers() -> None:
    smq = hub.create()
    assert [smq.createsub("a", 7), smq.createsub("a", 8)] == [7, 7]
    assert smq.createsub("b", 7) not in (0, 7)
    assert smq.createsub("c", 0) > 0


def test_numbers_of_sub_topics_are_random_and_stay() -> None:
    smq = hub.create()
    numbers = [smq.createsub(f"sub {number}") for number in range(50)]
    assert len(set(numbers)) == 50
    assert 0 not in numbers
    assert numbers == [smq.createsub(f"sub {number}") for number in range(50)]
    assert numbers != [hub.create().createsub(f"sub {number}") for number in range(50)]


def test_handlers_of_subtopic_numbers_and_the_latest_wins(site: Site) -> None:
    old, new, number = Calls(), Calls(), Calls()
    site.smq.subscribe("news", old, subtopic="sub")
    tid = site.smq.subscribe("news", new, subtopic="sub")
    site.smq.subscribe("news", number, subtopic=9)
    device, stid = site.device(), site.smq.createsub("sub")
    device.publish(tid, b"1", stid).publish(tid, b"2", 9).expect_nothing()
    assert (old, new, number) == ([], [(b"1", device.etid, tid, stid)], [(b"2", device.etid, tid, 9)])


def test_the_server_counts_as_subscriber_for_observers(site: Site) -> None:
    tid = site.smq.subscribe("news")
    device = site.device()
    device.send(wire.with_id(Type.OBSERVE, tid)).expect(wire.change(tid, 1))
    site.smq.unsubscribe("news")
    device.expect(wire.change(tid, 0))


def test_unobserve_leaves_the_subscribers_alone(site: Site) -> None:
    """Also when it was the only observer."""
    device = site.device()
    tid = device.subscribe(b"news")
    site.smq.observe("news", Calls())
    site.smq.unobserve("news")
    site.smq.publish("still", "news")
    device.expect(publish(tid, 1, b"still"))


def test_observe_creates_the_topic() -> None:
    smq = hub.create()
    assert smq.observe("new", print) is True
    assert smq.topic2tid("new")


def test_methods_need_no_self() -> None:
    """As with the deprecated modules, whose methods are called with a dot, and whose hubs have a random ETID."""
    smq = hub.create(rndtid=True)
    create, gettid = smq.create, smq.gettid
    assert create("news") == smq.topic2tid("news")
    assert gettid() > 1
