"""The Python API of the broker, method by method (spec: smq §2)."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.event import Event

from smqrt import hub
from smqrt.broker import server_client
from smqrt.broker.outbox import Drop
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process.current_process import AppScope, running_app
from smqrt.smq.persist_file import SqliteNames
from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.hub.recorded import NO_JSON, SCALARS, Calls
from tests.support.device import KINDS, RAW, WS, Site, connect_packet, expect_clean, masked, publish
from tests.support.waiting import wait_until

# ---- wrong options and arguments are named

WRONG_OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("authenticate", "permittop", "permitsubtop", "onconnect", "onclose", "onpublish"), 5),
    **dict.fromkeys(("ondrop", "onmsg", "onnode", "onmqttgap", "log"), "text"),
    **dict.fromkeys(("keepidle", "keepintv"), 0),
    **dict.fromkeys(("readtmo", "queuesize"), -1),
    "budget": 1.5,
    "persist": 5,
    **dict.fromkeys(("keepidle", "keepintv"), 32768),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_are_named(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be "):
        hub.create(**{name: WRONG_OPTIONS[name]})


@pytest.mark.parametrize("name", ["keepidle", "keepintv", "readtmo", "queuesize", "budget"])
def test_a_bool_or_text_is_no_number(name: str) -> None:
    for value in (True, "5", 1.5):
        with pytest.raises(ArgumentError, match=f"^{name} must be "):
            hub.create(**{name: value})


def f(*_: Any) -> None:
    pass


WRONG_ARGUMENTS: list[tuple[str, Callable[[hub.Smq], Any]]] = [
    ("topic", lambda smq: smq.create(5)),
    ("topic", lambda smq: smq.create("n" * 65528)),
    ("tid", lambda smq: smq.create("a", "b")),
    ("tid", lambda smq: smq.create("a", -1)),
    ("tid", lambda smq: smq.create("a", 1 << 32)),
    ("subtopic", lambda smq: smq.createsub(5)),
    ("stid", lambda smq: smq.createsub("a", "b")),
    ("stid", lambda smq: smq.createsub("a", 1 << 32)),
    ("tid", lambda smq: smq.tid2topic("a")),
    ("tid", lambda smq: smq.tid2subtopic(None)),
    ("topic", lambda smq: smq.topic2tid(1)),
    ("subtopic", lambda smq: smq.subtopic2tid(1)),
    ("data", lambda smq: smq.publish(object(), "a")),
    ("data", lambda smq: smq.publish({"a": object()}, "a")),
    ("data", lambda smq: smq.publish(b"x" * 65521, "a")),
    ("topic", lambda smq: smq.publish("x", None)),
    ("topic", lambda smq: smq.publish("x", 1 << 32)),
    ("topic", lambda smq: smq.publish("x", -1)),
    ("topic", lambda smq: smq.publish("x", True)),
    ("subtopic", lambda smq: smq.publish("x", "a", 1.5)),
    ("subtopic", lambda smq: smq.publish("x", "a", -1)),
    ("ptid", lambda smq: smq.publish("x", "a", None, "b")),
    ("ptid", lambda smq: smq.publish("x", "a", None, -1)),
    ("data", lambda smq: smq.pubon({1}, 1, 2)),
    ("totid", lambda smq: smq.pubon("x", "a", 2)),
    ("fromtid", lambda smq: smq.pubon("x", 1, None)),
    ("subtopic", lambda smq: smq.pubon("x", 1, 2, "a")),
    ("topic", lambda smq: smq.subscribe(None)),
    ("topic", lambda smq: smq.subscribe(12345)),
    ("onmsg", lambda smq: smq.subscribe("a", 5)),
    ("subtopic", lambda smq: smq.subscribe("a", f, [])),
    ("topic", lambda smq: smq.unsubscribe(None)),
    ("topic", lambda smq: smq.observe(None, f)),
    ("onchange", lambda smq: smq.observe("a", None)),
    ("topic", lambda smq: smq.unobserve(1.5)),
    ("onmsg", lambda smq: smq.onmsg(5)),
    ("etid", lambda smq: smq.etid2peer("a")),
    ("time", lambda smq: smq.setkeepalive("a")),
    ("time", lambda smq: smq.setkeepalive(0)),
    ("time", lambda smq: smq.setkeepalive(32768)),
    ("intv", lambda smq: smq.setkeepalive(10, -1)),
    ("intv", lambda smq: smq.setkeepalive(10, 32768)),
    ("etid", lambda smq: smq.request("a", "x")),
    ("data", lambda smq: smq.request(1, object())),
    ("function", lambda smq: smq.on("a")(5)),
    ("topic", lambda smq: smq.on(None)(f)),
    ("msg", lambda smq: smq.shutdown(5)),
    ("msg", lambda smq: smq.shutdown("x" * 65528)),
    ("etid", lambda smq: smq.shutdown("x", "a")),
    ("request", lambda smq: smq.connect("a")),
    ("environ", lambda smq: smq.connect({})),
]


@pytest.mark.parametrize(("name", "call"), WRONG_ARGUMENTS)
def test_weak_spot_wrong_arguments_are_named(name: str, call: Callable[[hub.Smq], Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}(:| must be) "):
        call(hub.create())


# ---- names and numbers


def test_create_gives_stable_random_numbers() -> None:
    smq = hub.create()
    tids = [smq.create(f"topic {number}") for number in range(200)]
    assert len(set(tids)) == 200
    assert all(1 < tid < 1 << 32 for tid in tids)
    assert tids == [smq.create(f"topic {number}") for number in range(200)]
    assert tids != [hub.create().create(f"topic {number}") for number in range(200)]
    assert dict(smq.topics()) == {tid: f"topic {number}" for number, tid in enumerate(tids)}


def test_fixed_numbers_as_the_c_examples_want_them() -> None:
    smq = hub.create()
    assert [smq.create(f"/cputemp/{tid}", tid) for tid in (2, 3, 4, 5)] == [2, 3, 4, 5]
    assert smq.create("/cputemp/2", 9) == 2, "a topic that exists keeps its number"
    taken = smq.create("another", 2)
    assert taken not in (0, 2), "a number that is taken is not given again"
    assert smq.create("zero", 0) > 1
    assert smq.create("server's", 1) > 1, "the server's own ETID is taken"
    assert smq.createsub("sub", 2) == 2, "sub-topics have numbers of their own"
    assert smq.createsub("sub", 7) == 2
    assert smq.createsub(None) == 0


def test_translations_never_create() -> None:
    smq = hub.create()
    assert smq.topic2tid("a") is smq.subtopic2tid("a") is None
    assert smq.tid2topic(77) is smq.tid2subtopic(77) is smq.tid2topic(1) is smq.tid2topic(1 << 40) is None
    assert list(smq.topics()) == list(smq.subtopics()) == []
    tid, stid = smq.create("ä"), smq.createsub(b"\xff")
    assert smq.topic2tid("ä") == smq.topic2tid("ä".encode()) == tid
    assert smq.tid2topic(tid) == "ä"
    assert smq.tid2subtopic(stid) == b"\xff", "what is not UTF-8 stays bytes"
    assert list(smq.subtopics()) == [(stid, b"\xff")]


def test_tid2topic_of_an_etid_is_none(site: Site) -> None:
    device = site.device(b"uid-a1")
    assert site.smq.tid2topic(device.etid) is None
    assert list(site.smq.topics()) == []


def test_gettid() -> None:
    assert hub.create().gettid() == 1
    assert len({hub.create(rndtid=True).gettid() for _ in range(5)}) == 5


def test_isSMQ() -> None:
    assert hub.isSMQ({"HTTP_SIMPLEMQ": ""})
    assert hub.isSMQ({"HTTP_SEC_WEBSOCKET_KEY": "x"})
    assert not hub.isSMQ({"HTTP_HOST": "x"})
    for wrong in (None, 5, "x", []):
        with pytest.raises(ArgumentError, match="request: not an HTTP request"):
            hub.isSMQ(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_connects_once(site: Site, kind: str) -> None:
    device = site.device(b"uid-a1", kind)
    with pytest.raises(ArgumentError, match="already answered; call connect once per request"):
        site.smq.connect(site.requests[0])
    tid = device.subscribe(b"news")
    device.publish(tid, b"it goes on").expect(publish(tid, device.etid, b"it goes on"))


# ---- publish and subscribe

PAYLOADS = [
    (b"\xff\0", b"\xff\0"), ("ä", "ä".encode()), ({"a": [1, None]}, b'{"a":[1,null]}'), ([1, 2], b"[1,2]"),
    (bytearray(b"x"), b"x"), (memoryview(b"y"), b"y"), ("", b""), (b"x" * 65520, b"x" * 65520),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_publish_to_clients(site: Site, kind: str) -> None:
    device = site.device(b"uid-a1", kind)
    tid, stid = device.subscribe(b"news"), site.smq.createsub("sub")
    for given, sent in PAYLOADS:
        assert site.smq.publish(given, "news") == 0
        device.expect(publish(tid, 1, sent))
    site.smq.publish("1", tid, "sub")
    site.smq.publish("2", b"news", stid)
    site.smq.publish("3", device.etid, 77)
    site.smq.publish("4", "news", None, 4711)
    site.smq.publish("5", "news", "new sub")
    created = site.smq.subtopic2tid("new sub")
    assert created
    device.expect(
        publish(tid, 1, b"1", stid), publish(tid, 1, b"2", stid), publish(device.etid, 1, b"3", 77),
        publish(tid, 4711, b"4"), publish(tid, 1, b"5", created),
    )  # fmt: skip
    device.expect_nothing()


def test_publish_creates_the_topic_and_counts_undelivered_messages(make_site: Callable[..., Site]) -> None:
    dropped = Calls()
    site = make_site(ondrop=dropped)
    site.smq.publish("x", "new")
    tid = site.smq.topic2tid("new")
    site.smq.publish("y", 4711, 5)
    (first, second) = dropped.come(2)
    assert first[:4] == (b"x", 1, tid, 0)
    assert second[:4] == (b"y", 1, 4711, 5)
    assert first[4].uid == "SMQ server client"
    assert site.state.stats.drops[Drop.UNROUTED] == 2


def test_pubon(site: Site) -> None:
    one, two = site.device(b"one-11"), site.device(b"two-22", WS)
    assert site.smq.pubon("x", two.etid, one.etid, 5) is True
    two.expect(publish(two.etid, one.etid, b"x", 5))
    assert site.smq.pubon("from the server", two.etid, 1) is True
    two.expect(publish(two.etid, 1, b"from the server"))
    heard = Calls()
    site.smq.subscribe("self", heard)
    assert site.smq.pubon("to it", 1, two.etid) is True
    assert heard.come(1) == [(b"to it", two.etid, 1, 0)]
    assert site.smq.pubon("x", site.smq.create("news"), one.etid) is False
    one.disconnect()
    wait_until(lambda: not site.smq.etid2peer(one.etid), "the end of one")
    assert site.smq.pubon("x", two.etid, one.etid) is False
    two.expect_nothing()


@pytest.mark.parametrize("kind", [RAW, WS])
def test_subscribe_and_the_order_of_handlers(site: Site, kind: str) -> None:
    """Sub-topic handler, then the topic's catch-all, then the global one."""
    smq = site.smq
    everything, catch_all, special, replaced = Calls(), Calls(), Calls(), Calls()
    smq.onmsg(everything)
    tid = smq.subscribe("news", onmsg=catch_all)
    assert smq.subscribe("news", onmsg=replaced, subtopic="sub") == tid
    assert smq.subscribe(tid, onmsg=special, subtopic="sub") == tid, "the last registration wins"
    other = smq.subscribe("other")
    stid = smq.subtopic2tid("sub")
    device = site.device(b"uid-a1", kind)
    device.publish(tid, b"1", stid or 0).publish(tid, b"2").publish(tid, b"3", 99).publish(other, b"4", stid or 0)
    device.publish(1, b"5")
    assert special.come() == [(b"1", device.etid, tid, stid)]
    assert catch_all.come(2) == [(b"2", device.etid, tid, 0), (b"3", device.etid, tid, 99)]
    assert everything.come(2) == [(b"4", device.etid, other, stid), (b"5", device.etid, 1, 0)]
    assert not replaced


def test_subscribe_self(site: Site) -> None:
    mine, sub = Calls(), Calls()
    assert site.smq.subscribe("self", onmsg=mine) == 1
    assert site.smq.subscribe(1, onmsg=sub, subtopic="s") == 1
    site.smq.publish("a", "self")
    site.smq.publish("b", 1, "s")
    assert mine.come() == [(b"a", 1, 1, 0)]
    assert sub.come()[0][0] == b"b"


def test_subscribe_to_a_clients_etid_is_refused(site: Site) -> None:
    device = site.device(b"uid-a1")
    with pytest.raises(ArgumentError, match="^topic: "):
        site.smq.subscribe(device.etid, onmsg=f)


"""JSON values that are no table, and what they are."""


def test_subscribe_json(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    decoded, rest = Calls(), Calls()
    site.smq.onmsg(rest)
    tid = site.smq.subscribe("news", onmsg=decoded, json=True)
    device = site.device(b"uid-a1")
    for payload in (b'{"a":1}', b"[null]", *(payload for payload, _ in SCALARS), *NO_JSON):
        device.publish(tid, payload)
    found = [call[0] for call in decoded.come(2 + len(SCALARS))]
    assert repr(found) == repr([{"a": 1}, [None], *(value for _, value in SCALARS)])
    assert [call[0] for call in rest.come(len(NO_JSON))] == NO_JSON
    assert "is not JSON" in caplog.text  # once a second


def test_unsubscribe(site: Site) -> None:
    got, rest = Calls(), Calls()
    site.smq.onmsg(rest)
    tid = site.smq.subscribe("news", onmsg=got)
    device = site.device(b"uid-a1")
    site.smq.unsubscribe("news")
    site.smq.unsubscribe(tid)
    site.smq.unsubscribe("unknown")
    site.smq.unsubscribe(4711)
    assert site.smq.topic2tid("unknown") is None
    device.publish(tid, b"1").expect_nothing()
    site.smq.subscribe("news")
    device.publish(tid, b"2").expect_nothing()
    assert not got, "its handlers are forgotten"
    assert rest.come()[0][0] == b"2"


def test_a_message_to_oneself_while_subscribed(site: Site) -> None:
    got = Calls()
    site.smq.subscribe("news", onmsg=got)
    device = site.device(b"uid-a1")
    tid = device.subscribe(b"news")
    site.smq.publish("x", "news")
    device.expect(publish(tid, 1, b"x"))
    assert got.come()[0][:2] == (b"x", 1)


# ---- observe


def test_observe_a_topic(site: Site) -> None:
    seen = Calls()
    assert site.smq.observe("news", seen) is True
    assert not seen, "the server gets no first call"
    tid = site.smq.subscribe("news", onmsg=f)
    one, two = site.device(b"one-11"), site.device(b"two-22", WS)
    one.subscribe(b"news")
    two.subscribe(b"news")
    one.disconnect()
    two.send(wire.with_id(Type.UNSUBSCRIBE, tid)).expect_nothing()
    site.smq.unsubscribe("news")
    assert seen.come(6) == [(1, "news"), (2, "news"), (3, "news"), (2, "news"), (1, "news"), (0, "news")]
    site.smq.unobserve(tid)
    two.subscribe(b"news")
    assert len(seen) == 6


def test_observe_replaces(site: Site) -> None:
    first, second = Calls(), Calls()
    site.smq.observe("news", first)
    site.smq.observe("news", second)
    site.device(b"uid-a1").subscribe(b"news")
    assert second.come() == [(1, "news")]
    assert not first


def test_observe_an_etid(site: Site) -> None:
    seen = Calls()
    device = site.device(b"uid-a1")
    assert site.smq.observe(device.etid, seen) is True
    device.disconnect()
    assert seen.come() == [(0, device.etid)]
    assert not site.smq.broker._observers, "the observer went with the client"
    assert site.smq.observe(device.etid, seen) is None, "an unknown id"
    assert site.smq.observe("self", seen) is site.smq.observe(1, seen) is None, "one's own"
    site.smq.unobserve(device.etid)
    site.smq.unobserve("unknown")
    assert site.smq.topic2tid("unknown") is None


# ---- peers


def test_peers_and_their_tables(site: Site) -> None:
    device = site.device(b"uid-a1", info=b"a device")
    tid = device.subscribe(b"news")
    peers = {peer.uid: (sock, peer) for sock, peer in site.smq.peers()}
    assert set(peers) == {"SMQ server client", "uid-a1"}
    sock, peer = peers["uid-a1"]
    assert (peer.tid, peer.info, peer.sock) == (device.etid, "a device", sock)
    assert peer.topics == {tid: sock}
    assert {peer: 1}[peer] == 1
    assert peer.phantom is None
    assert sock.peername() == device.sock.getsockname()
    assert sock.sockname() == device.sock.getpeername()
    assert site.smq.etid2peer(device.etid) is site.smq.sock2peer(sock) is peer
    peer.data["mine"] = 1
    assert site.smq.etid2peer(device.etid).data == {"mine": 1}  # type: ignore[union-attr]
    assert site.smq.etid2peer(1).uid == "SMQ server client"  # type: ignore[union-attr]
    assert site.smq.etid2peer(4711) is site.smq.sock2peer(object()) is None
    device.send(wire.with_id(Type.UNSUBSCRIBE, tid)).expect_nothing()
    assert peer.topics is None


def test_keep_alive(make_site: Callable[..., Site]) -> None:
    site = make_site(keepidle=100)

    def settings(uid: bytes) -> tuple[int, ...]:
        sock = site.device(uid).sock
        assert sock
        ours = site.state.uids[uid].outbox.sock
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *(
            ours.getsockopt(socket.IPPROTO_TCP, name) for name in names
        )

    assert settings(b"first-1") == (1, 100, 10)
    site.smq.setkeepalive(20)
    assert settings(b"second") == (1, 20, 20)
    site.smq.setkeepalive(50, 7)
    assert settings(b"third-1") == (1, 50, 7)


# ---- shutdown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("msg", ["bye", b"\xff", "", None])
def test_shutdown_all(site: Site, kind: str, msg: Any) -> None:
    devices = [site.device(b"uid-a%d" % number, kind) for number in range(3)]
    site.smq.shutdown(msg)
    text = msg.encode() if isinstance(msg, str) else msg
    for device in devices:
        device.expect_end(*([] if msg is None else [wire.disconnect(text)]))
    expect_clean(site)


def test_weak_spot_shutdown_of_one_client(site: Site) -> None:
    first, second, third = (site.device(b"uid-a%d" % number) for number in range(3))
    site.smq.shutdown("you", first.etid)
    first.expect_end(wire.disconnect(b"you"))
    site.smq.shutdown(None, second.etid)
    second.expect_end()
    site.smq.shutdown("nobody", 4711)
    site.smq.shutdown(None, 1)
    third.expect_nothing()


# ---- hooks


def test_order_of_callbacks_at_take_over(make_site: Callable[..., Site]) -> None:
    events: list[Any] = []
    site = make_site(
        authenticate=lambda credentials, info: events.append(("authenticate", credentials)) or 0,
        onconnect=lambda etid, info, peer: events.append(("onconnect", etid, peer.uid)),
        onclose=lambda etid, sock, peer, err: events.append(("onclose", etid, peer.uid, err)),
    )
    old = site.device(b"uid-a1", credentials=b"1")
    new = site.device(b"uid-a1", credentials=b"2")
    assert old.etid == new.etid
    assert events == [
        ("authenticate", b"1"), ("onconnect", old.etid, "uid-a1"),
        ("authenticate", b"2"), ("onclose", old.etid, "uid-a1", "reconnect"), ("onconnect", new.etid, "uid-a1"),
    ]  # fmt: skip
    old.expect_end(wire.disconnect(b"reconnect"))
    new.expect_nothing()


def test_a_refused_newcomer_leaves_the_old_session_alone(make_site: Callable[..., Site]) -> None:
    closed = Calls()
    site = make_site(authenticate=lambda credentials, info: 3 if credentials else 0, onclose=closed)
    old = site.device(b"uid-a1")
    tid = old.subscribe(b"news")
    site.open().start().send(connect_packet(b"uid-a1", b"wrong")).expect_end(wire.connack(3, 0))
    old.publish(tid, b"still").expect(publish(tid, old.etid, b"still"))
    assert not closed


ENDINGS: dict[str, tuple[str, Callable[[Site, Any], Any], Any, str]] = {
    "disconnect": (RAW, lambda site, device: device.send(wire.disconnect()), 0, "disconnect"),
    "close": (RAW, lambda site, device: device.close(), "socketreadfailed", "connection ended"),
    "close of a WebSocket": (
        WS,
        lambda site, device: device.send_bytes(masked(b"\x03\xe8", 8)),
        "socketclosed",
        "websocket closed",
    ),
    "end of a WebSocket without a close": (
        WS,
        lambda site, device: device.close(),
        "socketreadfailed",
        "connection ended",
    ),
    "reset": (RAW, lambda site, device: device.reset(), "socketreadfailed", "read failed"),
    "forged": (RAW, lambda site, device: device.send(publish(5, 5, b"")), 0, "corrupt frame"),
    "unknown packet": (RAW, lambda site, device: device.send(b"\xff"), 0, "unknown packet"),
    "no WebSocket": (WS, lambda site, device: device.send_bytes(b"\xff\xff\xff"), 0, "websocket protocol error"),
    "shutdown": (RAW, lambda site, device: site.smq.shutdown("bye"), "sysshutdown", "sysshutdown"),
    "take-over": (RAW, lambda site, device: site.device(b"uid-a1"), "reconnect", "reconnect"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_onclose_gets_the_reason(make_site: Callable[..., Site], name: str) -> None:
    kind, end, word, finer = ENDINGS[name]
    closed = Calls()
    site = make_site(onclose=closed)
    device = site.device(b"uid-a1", kind)
    end(site, device)
    (etid, sock, peer, err, reason) = closed.come()[0]
    assert (etid, peer.uid, err, reason) == (device.etid, "uid-a1", word, finer)
    assert sock is peer.sock


def test_onclose_is_for_accepted_clients(make_site: Callable[..., Site]) -> None:
    closed = Calls()
    site = make_site(onclose=closed, authenticate=lambda credentials, info: 3)
    site.open().start().send(connect_packet(b"uid-a1")).expect_end(wire.connack(3, 0))
    site.open().start().close()
    expect_clean(site)
    assert not closed


def test_permittop(make_site: Callable[..., Site]) -> None:
    asked: list[tuple[Any, ...]] = []

    def permittop(topic: Any, issub: bool, peer: hub.Peer) -> bool:
        asked.append((topic, issub, peer.uid))
        return topic != "forbidden"

    site = make_site(permittop=permittop)
    site.smq.create("forbidden")
    site.smq.subscribe("forbidden", onmsg=f)
    assert asked == [], "not for the server"
    device = site.device(b"uid-a1")
    for kind in (Type.SUBSCRIBE, Type.CREATE):
        assert device.ask(kind, b"forbidden").denied
        assert not device.ask(kind, b"news").denied
        assert not device.ask(kind, b"news").denied
    assert asked == [
        ("forbidden", True, "uid-a1"), ("news", True, "uid-a1"),
        ("forbidden", False, "uid-a1"), ("news", False, "uid-a1"), ("news", False, "uid-a1"),
    ]  # fmt: skip  # a duplicate Subscribe is not asked about
    assert site.smq.topic2tid("never") is None
    device.ask(Type.CREATE, b"\xff")
    assert asked[-1][0] == b"\xff"


def test_a_denied_name_is_not_created(make_site: Callable[..., Site]) -> None:
    site = make_site(permittop=lambda *_: False, permitsubtop=lambda *_: None)
    device = site.device(b"uid-a1")
    for kind in (Type.SUBSCRIBE, Type.CREATE, Type.CREATESUB):
        ack = device.ask(kind, b"name")
        assert (ack.denied, ack.number, ack.name) == (True, 0, b"name")
    assert list(site.smq.topics()) == list(site.smq.subtopics()) == []


def test_permitsubtop_is_asked_while_the_name_is_unknown(make_site: Callable[..., Site]) -> None:
    asked = Calls(answer=True)
    site = make_site(permitsubtop=asked)
    site.smq.createsub("known")
    device = site.device(b"uid-a1")
    for name in (b"known", b"new", b"new"):
        assert not device.ask(Type.CREATESUB, name).denied
    assert [(name, peer.uid) for name, peer in asked] == [("new", "uid-a1")]


@pytest.mark.parametrize("kind", KINDS)
def test_onpublish_sees_every_message_and_decides(make_site: Callable[..., Site], kind: str) -> None:
    seen, dropped = [], Calls()

    def onpublish(data: bytes, ptid: int, tid: int, subtid: int, peer: hub.Peer) -> bool:
        seen.append((data, ptid, tid, subtid, peer.uid))
        return data != b"no"

    site = make_site(onpublish=onpublish, ondrop=dropped)
    device, got = site.device(b"uid-a1", kind), Calls()
    tid = device.subscribe(b"news")
    server = site.smq.subscribe("ask", onmsg=got)
    for payload in (b"yes", b"no", b"yes", b"yes", b"no"):
        device.publish(tid, payload, 5)
    assert [packet[13:] for packet in device.sync()] == [b"yes"] * 3
    assert seen == [(payload, device.etid, tid, 5, "uid-a1") for payload in (b"yes", b"no", b"yes", b"yes", b"no")]
    assert not dropped, "what onpublish swallows is not dropped"
    assert site.state.stats.drops[Drop.SWALLOWED] == 2
    site.smq.publish("no", "news")
    site.smq.publish("yes", "news")
    device.expect(publish(tid, 1, b"yes"))
    assert seen[-2:] == [(b"no", 1, tid, 0, "SMQ server client"), (b"yes", 1, tid, 0, "SMQ server client")]
    device.publish(4711, b"yes").publish(4711, b"no").publish(server, b"no").publish(server, b"yes").expect_nothing()
    assert [call[:3] for call in dropped] == [(b"yes", device.etid, 4711)], "ondrop comes after onpublish"
    assert [call[0] for call in got] == [b"yes"]


def test_the_recipe_against_messages_between_clients(make_site: Callable[..., Site]) -> None:
    """spec: smq §3: `1 ~= ptid and 1 ~= tid -> false`."""
    site = make_site(onpublish=lambda data, ptid, tid, subtid, peer: ptid == 1 or tid == 1)
    one, two, got = site.device(b"one-11"), site.device(b"two-22"), Calls()
    site.smq.subscribe("self", onmsg=got)
    one.publish(two.etid, b"x").publish(1, b"y").expect_nothing()
    two.expect_nothing()
    site.smq.publish("z", two.etid)
    two.expect(publish(two.etid, 1, b"z"))
    assert got.come()[0][0] == b"y"


def test_onpublish_is_called_once_for_an_assembled_message(make_site: Callable[..., Site]) -> None:
    seen = Calls(answer=True)
    site = make_site(onpublish=seen)
    device = site.device(b"uid-a1")
    device.send(
        publish(0, device.etid, b"a, ", kind=Type.PUBFRAG), publish(device.etid, device.etid, b"b", kind=Type.PUBFRAG)
    )
    device.expect(publish(device.etid, device.etid, b"a, b"))
    assert [call[0] for call in seen] == [b"a, b"]


@pytest.mark.parametrize(
    "hook", ["permittop", "permitsubtop", "onpublish", "ondrop", "onconnect", "onclose", "log", "onmsg", "observe"]
)
def test_hook_errors_are_logged_and_close_nothing(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    caplog.set_level(logging.DEBUG)

    def broken(*arguments: Any) -> Any:
        raise ValueError(f"on purpose in {hook}")

    site = make_site(**({} if hook == "observe" else {hook: broken}))
    if hook == "observe":
        site.smq.observe("news", broken)
    site.smq.subscribe("server's", onmsg=None)
    device, other = site.device(b"uid-a1"), site.device(b"other-1")
    assert device.ask(Type.SUBSCRIBE, b"news").denied == (hook == "permittop")
    assert device.ask(Type.CREATESUB, b"sub").denied == (hook == "permitsubtop")
    device.publish(device.etid, b"1").publish(4711, b"2").publish(site.smq.create("server's"), b"3")
    assert [packet[13:] for packet in device.sync()] == ([] if hook == "onpublish" else [b"1"])
    other.send(b"\xff").expect_end()
    device.expect_nothing()
    assert f"on purpose in {hook}" in caplog.text
    assert "Traceback" in caplog.text


def test_an_error_in_onpublish_costs_that_message_only(make_site: Callable[..., Site]) -> None:
    """Also in a run, which is asked about as a whole."""
    site = make_site(onpublish=lambda data, *_: data != b"no" and int(data) >= 0)
    device = site.device(b"uid-a1")
    payloads = [b"%d" % number if number % 3 else (b"?", b"no")[number % 2] for number in range(60)]
    device.send(*(publish(device.etid, device.etid, payload) for payload in payloads))
    assert [packet[13:] for packet in device.sync()] == [payload for payload in payloads if payload.isdigit()]


# ---- hooks that block in gevent's way


@pytest.mark.parametrize("kind", KINDS)
def test_blocking_permissions_keep_order_and_delay_no_others(make_site: Callable[..., Site], kind: str) -> None:
    def slowly(name: Any, *_: Any) -> bool:
        gevent.sleep(0.05 if name in ("slow", "news") else 0)
        return name != "slow"

    site = make_site(permittop=slowly, permitsubtop=slowly)
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1")
    device.send(b"\x04slow", b"\x06news", b"\x11slow", b"\x04quick", wire.PING)
    other.expect_nothing()
    assert [(ack.kind, ack.denied, ack.name) for ack in (device.ack() for _ in range(4))] == [
        (Type.SUBACK, True, b"slow"), (Type.CREATEACK, False, b"news"),
        (Type.CREATESUBACK, True, b"slow"), (Type.SUBACK, False, b"quick"),
    ]  # fmt: skip
    device.expect(wire.PONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_blocking_onpublish_keeps_the_order(make_site: Callable[..., Site], kind: str) -> None:
    def onpublish(data: bytes, *_: Any) -> bool:
        gevent.sleep(0.01 if data.endswith(b"0") else 0)
        return data != b"5"

    site = make_site(onpublish=onpublish)
    device, other = site.device(b"uid-a1", kind), site.device(b"other-1")
    tids = [device.subscribe(name) for name in (b"a", b"b")]
    device.send(*(publish(tids[number // 3 % 2], device.etid, b"%d" % number) for number in range(40)))
    other.expect_nothing()
    assert [packet[13:] for packet in device.sync()] == [b"%d" % number for number in range(40) if number != 5]


def test_the_servers_publishes_wait_in_its_queue(make_site: Callable[..., Site]) -> None:
    logged: list[str] = []

    def onpublish(data: bytes, *_: Any) -> bool:
        gevent.sleep(0.02)
        return True

    site = make_site(onpublish=onpublish, queuesize=3, log=lambda sock, text: logged.append(text))
    device = site.device(b"uid-a1")
    assert site.smq.queuesize() == (3, 0)

    def publisher() -> list[int]:
        return [site.smq.publish(str(number), device.etid) for number in range(6)]

    waiting: list[int] = []
    gevent.get_hub().loop.run_callback(lambda: waiting.extend(publisher()))
    wait_until(lambda: waiting, "the publisher")
    assert waiting == [0, 1, 2, 3, 3, 3]
    assert site.smq.queuesize() == (0, 3)
    device.expect(*(publish(device.etid, 1, b"%d" % number) for number in range(4)))
    wait_until(lambda: site.smq.queuesize() == (3, 0), "room in the queue")
    assert site.state.stats.drops[Drop.QUEUE_FULL] == 2
    assert any("queue full" in text for text in logged)


def test_what_onpublish_publishes_comes_behind_its_own_message(make_site: Callable[..., Site]) -> None:
    def onpublish(data: bytes, *_: Any) -> bool:
        if data == b"first":
            assert site.smq.publish("second", device.etid) == 1
        gevent.sleep(0.001)
        return True

    site = make_site(onpublish=onpublish)
    device = site.device(b"uid-a1")
    gevent.get_hub().loop.run_callback(lambda: site.smq.publish("first", device.etid))
    device.expect(publish(device.etid, 1, b"first"), publish(device.etid, 1, b"second"))
    assert site.smq.queuesize() == (200, 0)
    assert site.state.stats.drops[Drop.QUEUE_FULL] == 0


def test_a_recursive_onpublish_stops_no_publisher(make_site: Callable[..., Site]) -> None:
    seen: list[int] = []

    def onpublish(data: bytes, *_: Any) -> bool:
        if seen[-1:] != [20_000]:
            seen.append(int(data))
            site.smq.publish(str(int(data) + 1), "endless")
        return True

    site = make_site(onpublish=onpublish)
    turns: list[int] = []
    ticking = gevent.get_hub().loop.timer(0.001, 0.001)
    ticking.start(lambda: turns.append(len(seen)))
    site.smq.publish("1", "endless")
    wait_until(lambda: seen[-1] == 20_000, "the last message")
    ticking.stop()
    assert seen == list(range(1, 20_001))
    assert max(later - before for before, later in zip(turns, turns[1:], strict=False)) < 2000
    wait_until(lambda: site.smq.queuesize() == (200, 0), "an empty queue")


def test_more_than_the_queue_takes_is_counted(make_site: Callable[..., Site]) -> None:
    def onpublish(data: bytes, *_: Any) -> bool:
        if data == b"many":
            for number in range(5):
                site.smq.publish(str(number), device.etid)
        return True

    site = make_site(onpublish=onpublish, queuesize=3)
    device = site.device(b"uid-a1")
    site.smq.publish("many", device.etid)
    device.expect(*(publish(device.etid, 1, data) for data in (b"many", b"0", b"1", b"2"))).expect_nothing()
    assert site.state.stats.drops[Drop.QUEUE_FULL] == 2


def test_a_blocking_onmsg_gets_its_messages_in_order(site: Site) -> None:
    got = []

    def onmsg(data: bytes, *_: Any) -> None:
        if int(data) % 5 == 0:
            gevent.sleep(0.005)
        got.append(int(data))

    tid = site.smq.subscribe("ask", onmsg=onmsg)
    device = site.device(b"uid-a1")
    device.send(*(publish(tid, device.etid, b"%d" % number) for number in range(60)))
    device.expect_nothing()
    wait_until(lambda: len(got) == 60, "all messages")
    assert got == list(range(60))


def test_a_handler_that_never_returns_holds_a_bounded_backlog(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "HANDLER_BUDGET_BYTES", 100_000)
    logged, answer, got = [], Event(), []
    site = make_site(log=lambda sock, text: logged.append(text))
    tid = site.smq.subscribe("ask", onmsg=lambda data, *_: (answer.wait(), got.append(data)))
    device = site.device(b"uid-a1")
    device.send(*(publish(tid, device.etid, b"%d" % number + b"x" * 800) for number in range(300)))
    device.expect_nothing()
    answer.set()
    wait_until(lambda: len(got) == 101, "what was kept")
    assert [int(data.rstrip(b"x")) for data in got] == list(range(101))
    assert site.smq.drops()["over_budget"] == site.smq.etid2peer(1).dropped == 300 - 101
    assert len(logged) == 1


def test_a_flood_to_a_handler_is_portioned_and_complete(site: Site) -> None:
    """Publishers wait meanwhile, each for itself; what the server publishes itself does not."""
    got: dict[int, list[int]] = {}
    site.smq.subscribe("ask", lambda data, ptid, *_: got.setdefault(ptid, []).append(int(data)))
    tid = site.smq.create("ask")
    devices = [site.device(b"device-%d" % number) for number in range(3)]
    count = 20_000
    frames = {
        one.etid: b"".join(wire.frame(publish(tid, one.etid, b"%d" % at)) for at in range(count)) for one in devices
    }
    sending = [gevent.spawn(one.send_bytes, frames[one.etid]) for one in devices]
    for at in range(5000):
        site.smq.publish(str(at), "ask")
    gevent.joinall(sending, raise_error=True)
    wait_until(lambda: sum(map(len, got.values())) == 3 * count + 5000, "all messages", 20)
    assert got == {1: list(range(5000)), **{one.etid: list(range(count)) for one in devices}}
    assert not any(site.smq.drops().values())
    assert not site.state.server._held


def test_a_subscriber_leaving_during_onpublish_is_counted(make_site: Callable[..., Site]) -> None:
    dropped, begun = Calls(), Event()

    def onpublish(data: bytes, *_: Any) -> bool:
        begun.set()
        gevent.sleep(0.05)
        return True

    site = make_site(onpublish=onpublish, ondrop=dropped)
    publisher, reader = site.device(b"publisher"), site.device(b"reader")
    tid = reader.subscribe(b"news")
    publisher.publish(tid, b"x")
    assert begun.wait(5)
    reader.disconnect()
    assert dropped.come()[0][:3] == (b"x", publisher.etid, tid)
    assert site.state.stats.drops[Drop.UNROUTED] == 1


def test_a_hook_that_closes_its_client(make_site: Callable[..., Site]) -> None:
    def permittop(topic: Any, issub: bool, peer: hub.Peer) -> bool:
        if topic == "blocks":
            gevent.sleep(0.01)
        site.smq.shutdown("no", peer.tid)
        return True

    site = make_site(permittop=permittop)
    for name in (b"news", b"blocks"):
        device = site.device(b"uid-a1")
        device.send(b"\x04" + name).expect_end(wire.disconnect(b"no"))
    expect_clean(site)
    assert site.smq.publish("x", "news") == 0


def test_hooks_may_use_the_broker(make_site: Callable[..., Site]) -> None:
    """Publish from onconnect, onclose and onmsg; nested calls come out in order."""
    site = make_site(
        onconnect=lambda etid, info, peer: site.smq.publish({"joined": etid}, "room"),
        onclose=lambda etid, sock, peer, err: site.smq.publish({"left": etid}, "room"),
    )
    first = site.device(b"first-1")
    room = first.subscribe(b"room")
    second = site.device(b"second")
    first.expect(publish(room, 1, b'{"joined":%d}' % second.etid))
    second.close()
    first.expect(publish(room, 1, b'{"left":%d}' % second.etid))


# ---- persist


def test_names_keep_their_numbers_over_restarts(tmp_path: Path, make_site: Callable[..., Site]) -> None:
    file = tmp_path / "names.db"
    site = make_site(persist=file)
    device = site.device(b"uid-a1")
    names = {name: device.create(name) for name in (b"a", b"", b"\xff\0", b"self")}
    subs = {name: device.createsub(name) for name in (b"a", b"s")}
    fixed = site.smq.create("fixed", 5)
    site.smq.close()
    again = hub.create(persist=str(file))
    for name, tid in names.items():
        assert again.topic2tid(name) == again.create(name) == tid
    assert {name: again.createsub(name) for name in subs} == subs
    assert again.topic2tid("fixed") == fixed == 5
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert again.create("new") not in names.values()


def test_every_name_is_synced_to_the_disk(tmp_path: Path) -> None:
    """What a killed process can't show: the ack waits for the disk, not only for the operating system."""
    connection = SqliteNames(str(tmp_path / "names.db")).connection
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_persist_none_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub.create(persist=None).create("a")
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from smqrt import hub
from tests.support.device import Site, publish
site = Site(hub.create(persist=sys.argv[1]), None)
device = site.device(b"uid-a1")
for number in range(int(sys.argv[2])):
    print(device.create(b"topic %d" % number), device.createsub(b"sub %d" % number), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_name_is_safe_when_its_ack_is_sent(tmp_path: Path) -> None:
    """The process is killed right behind the ack."""
    file = tmp_path / "names.db"
    command = [sys.executable, "-c", KILLED, str(file), "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    smq = hub.create(persist=file)
    for number, line in enumerate(done.stdout.splitlines()):
        assert [smq.topic2tid(f"topic {number}"), smq.subtopic2tid(f"sub {number}")] == [
            int(word) for word in line.split()
        ]
    assert len(list(smq.topics())) == len(list(smq.subtopics())) == 7


def test_a_failed_create_frees_the_hub_number(tmp_path: Path) -> None:
    """Another process, of the same server, could perhaps make it: the hubs behind it are found by their numbers."""
    (tmp_path / "names.db").write_text("this is not a database" * 100)
    with running_app(AppScope(tmp_path, "shop")), hub.create() as first:
        for wrong in (
            {"persist": tmp_path / "names.db"},
            {"journal": tmp_path / "names.db"},
            {"cluster": "nats://x/y"},
        ):
            with pytest.raises(SmqrtError):
                hub.create(**wrong)
        with hub.create() as second, hub.create(name="2b") as named, hub.create() as third:
            keys = [one.broker.key for one in (first, second, named, third)]
    assert keys == ["shop/1", "shop/2", "shop/2b", "shop/3"]


def _garbage(file: Path) -> None:
    file.write_bytes(b"this is not a database, but it is long enough to look like a file of one" * 100)


def _half(file: Path) -> None:
    whole = file.with_suffix(".whole")
    with hub.create(persist=whole) as smq:
        for number in range(500):
            smq.create(f"topic {number}")
    sqlite3.connect(whole).execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])


def _changed(statement: str) -> Callable[[Path], None]:
    """One entry, changed by `statement`."""

    def change(file: Path) -> None:
        with hub.create(persist=file) as smq:
            smq.create("name", 7)
        with sqlite3.connect(file) as connection:
            connection.execute(statement)

    return change


def _entry(kind: str, name: Any, number: Any) -> Callable[[Path], None]:
    def add(file: Path) -> None:
        store = SqliteNames(str(file))
        store.add(kind, name, number)
        store.close()

    return add


CORRUPT: dict[str, Callable[[Path], None]] = {
    "garbage": _garbage,
    "half a file": _half,
    "a folder": lambda file: file.mkdir(),
    "another database": lambda file: sqlite3.connect(file).execute("CREATE TABLE names (x)"),  # type: ignore[dict-item]
    "a changed number": _changed("UPDATE names SET number = 8"),
    "a changed name": _changed("UPDATE names SET name = x'6e616d66'"),
    "a changed kind": _changed("UPDATE names SET kind = 'subtopic'"),
    "a number that is text": _changed("UPDATE names SET number = 'seven'"),
    "a name that is text": _changed("UPDATE names SET name = 'name'"),
    "number 0": _entry("topic", b"a", 0),
    "a number too large": _entry("subtopic", b"a", 1 << 32),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "names.db"
    CORRUPT[name](file)
    with pytest.raises(ArgumentError, match="^persist: .*names.db: "):
        hub.create(persist=file)


def test_drops_counts_undelivered_messages() -> None:
    smq = hub.create(onpublish=lambda data, *_: data != b"no")
    smq.publish("a", "nobody")
    smq.publish("no", "nobody")
    drops = smq.drops()
    assert (drops["unrouted"], drops["swallowed"], drops["over_budget"]) == (1, 1, 0)
    assert [peer.dropped for _, peer in smq.peers()] == [0]
