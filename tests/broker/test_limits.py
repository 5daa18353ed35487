"""Limits on what one client, and all together, make a hub keep; the answer at the limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError, CloseReason
from smqrt.smq import data_path, handshake
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.device import KINDS, RAW_HEADERS, WS_HEADERS, Ack, Site, bounded, leftovers, publish, request
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_brings_in_so_many_names(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(clientnames=3)
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1", kind)
    device.create(b"1")
    device.createsub(b"2")
    device.subscribe(b"3")
    for asked, answer in (
        (Type.CREATE, Type.CREATEACK),
        (Type.SUBSCRIBE, Type.SUBACK),
        (Type.CREATESUB, Type.CREATESUBACK),
    ):
        assert device.ask(asked, b"4") == Ack(answer, True, 0, b"4")
    assert device.create(b"1") == site.smq.topic2tid("1")
    tid = other.create(b"4")
    assert device.create(b"4") == tid
    assert site.smq.refused()["client_names"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_has_so_many_subscriptions(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(clientnames=2)
    for name in ("a", "b", "c"):
        site.smq.create(name)
    device = site.device(b"uid-a1", kind)
    tid = device.subscribe(b"a")
    device.subscribe(b"b")
    assert device.ask(Type.SUBSCRIBE, b"c").denied
    device.subscribe(b"a")
    device.send(smq.with_id(Type.UNSUBSCRIBE, tid))
    device.subscribe(b"c")
    assert site.smq.refused()["client_subscriptions"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_above_the_observe_limit_gets_current_counts(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site(clientnames=2)
    tids = [site.smq.create(name) for name in ("a", "b", "c")]
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1", kind)
    for tid in tids:
        device.send(smq.with_id(Type.OBSERVE, tid)).expect(smq.change(tid, 0))
    device.send(smq.with_id(Type.OBSERVE, tids[0])).expect(smq.change(tids[0], 0))
    other.subscribe(b"a")
    other.send(smq.with_name(Type.SUBSCRIBE, b"c"))
    device.expect(smq.change(tids[0], 1)).expect_nothing()
    assert site.smq.refused()["client_observes"] == 1


def test_all_together_bring_in_so_many_names(make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture) -> None:
    logged: list[str] = []
    site = make_site(maxnames=5, log=lambda sock, text: logged.append(text))
    for number in range(5):
        site.device(b"uid-%d-" % number).create(b"%d" % number)
    device = site.device(b"late-1")
    for number in range(50):
        assert device.ask(Type.CREATE, b"late-%d" % number).denied
    device.createsub(b"sub-topics have a table of their own")
    with pytest.raises(
        ArgumentError,
        match="^topic: the hub's limit of names is reached, see maxnames .* 5 exist",
    ):
        site.smq.publish("x", "from the server")
    assert site.smq.refused()["names"] == 51
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == len(logged) == 1
    assert "limits.names" in lines[0]


def test_names_have_so_many_bytes(site: Site) -> None:
    site.state.limits.client_names_bytes, site.state.limits.names_bytes = 100, 150
    device, other = site.device(b"uid-a1"), site.device(b"other-1")
    device.create(b"x" * 100)
    assert device.ask(Type.CREATE, b"y").denied
    other.create(b"y" * 50)
    assert other.ask(Type.CREATE, b"z").denied
    assert (site.smq.refused()["client_name_bytes"], site.smq.refused()["name_bytes"]) == (1, 1)


@pytest.mark.parametrize("option", ["maxnames", "clientnames"])
def test_a_limit_is_a_positive_number(option: str) -> None:
    with pytest.raises(ArgumentError, match=option):
        hub.create(**{option: 0})


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_has_so_many_unfinished_handshakes(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(data_path.limits, "handshakes_per_address", 3)
    monkeypatch.setattr(handshake, "is_local_client", lambda address: False)
    site = make_site()
    shy = [site.open(kind).start() for _ in range(3)]
    fourth = site.open(kind)
    fourth.send_bytes(request(WS_HEADERS if fourth.on_websocket else RAW_HEADERS)).read_head()
    assert fourth.head.startswith(b"HTTP/1.1 503 ")
    shy[0].connect(b"uid-a1")
    site.device(b"uid-b1", kind)
    assert site.smq.refused()["handshakes"] == 1
    for device in shy:
        device.close()
    wait_until(lambda: not data_path.unfinished, "the handshakes are over")


# ---- what never answers


@pytest.mark.parametrize("kind", KINDS)
def test_authenticate_that_never_answers_is_a_refusal(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(data_path.limits, "authenticate_s", 0.1)
    never, closed = gevent.event.Event(), []
    site = make_site(authenticate=lambda *_: never.wait() and 0, onclose=lambda *call: closed.append(call), readtmo=50)
    device = site.open(kind).start().send(b"\x02\x01\x06uid-a1\x00")
    with bounded():
        device.expect_end(smq.connack(smq.ConnackCode.SERVER_UNAVAILABLE, 0))
    never.set()
    gevent.sleep(0)
    assert not closed
    assert not site.state.sessions
    assert not leftovers(site.state).get("handshakes")


def test_authenticate_that_takes_longer_than_readtmo_may_answer(make_site: Callable[..., Site]) -> None:
    site = make_site(authenticate=lambda *_: gevent.sleep(0.6) or 0, readtmo=50)
    site.device(b"uid-a1")


HOOKS: dict[str, Callable[[Any], Any]] = {
    "onpublish": lambda device: publish(device.etid, device.etid, b"x"),
    "permittop": lambda device: smq.with_name(Type.CREATE, b"n"),
    "permitsubtop": lambda device: smq.with_name(Type.CREATESUB, b"n"),
    "ondrop": lambda device: publish(4711, device.etid, b"x"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_an_exception_in_a_core_hook_closes_the_client(site: Site, kind: str, name: str, late: bool) -> None:
    """The bindings catch what an application raises; this is about whatever gets past them."""

    def fails(*arguments: Any) -> Any:
        raise gevent.Timeout(1) if late else RuntimeError("on purpose")

    device, other = site.device(b"uid-a1", kind), site.device(b"other-1", kind)
    setattr(site.state.hooks, name, fails)
    device.send(HOOKS[name](device))
    with bounded():
        device.until_end()
    other.expect_nothing()
    assert list(site.state.sessions) == [other.etid]


def test_a_failing_core_onclose_blocks_no_client(site: Site) -> None:
    def fails(session: Any, reason: CloseReason) -> None:
        raise RuntimeError("on purpose")

    device = site.device(b"uid-a1")
    site.state.hooks.onclose = fails
    device.disconnect()
    wait_until(lambda: not site.state.sessions, "the client is gone")
    site.state.hooks.onclose = None
    site.device(b"uid-a1").expect_nothing()


def test_what_an_application_denies_is_counted_and_logged(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(permittop=lambda topic, *_: topic != "secret", permitsubtop=lambda *_: False)
    device = site.device(b"curious")
    for kind, name in ((Type.SUBSCRIBE, b"secret"), (Type.CREATESUB, b"sub"), (Type.CREATE, b"secret")):
        assert device.ask(kind, name).denied
    assert site.state.stats.denied == 3
    assert "denied: the client 'curious' of 127.0.0.1 may not subscribe to the topic 'secret': permittop" in caplog.text
