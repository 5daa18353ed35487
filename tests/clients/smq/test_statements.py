"""`SMQClient` under its documented names: each option, callback and method does what it says (spec: smq §3, §7)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent.queue import Queue

from smqrt.client import SMQClient
from smqrt.clients.backoff import Backoff
from smqrt.clients.smq.options import SmqClientOptions
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.support.local_broker import LocalBroker
from tests.support.scripted_broker import Conversation, ScriptedBroker
from tests.support.waiting import wait_until

Make = Callable[..., SMQClient]
Start = Callable[..., LocalBroker]
Got = Queue[Any]


def collect(queue: Got) -> Callable[..., None]:
    return lambda *arguments: queue.put(arguments)


def taken(queue: Got, count: int) -> list[Any]:
    return [queue.get(timeout=5) for _ in range(count)]


# ---- create(url, options)

DOCUMENTED = {
    "uid": "sensor-1",
    "info": "kitchen",
    "timeout": 4.0,
    "ping": 60,
    "pong": 5,
    "reconnect": True,
    "reconnect_delay": 3,
    "headers": {"X-Key": "abc"},
    **dict.fromkeys(("onauth", "onconnect", "onreconnect", "onclose", "onmsg"), lambda *_: None),
}
METHODS = ["create", "createsub", "publish", "pubjson", "subscribe", "unsubscribe", "observe", "unobserve", "gettid"]
METHODS += ["topic2tid", "tid2topic", "subtopic2tid", "tid2subtopic", "wait_connected", "disconnect", "close"]


def test_all_documented_names(broker: LocalBroker) -> None:
    client = SMQClient.create(broker.url, DOCUMENTED)
    assert client.wait_connected(5)
    assert [name for name in METHODS if not inspect.ismethod(getattr(client, name))] == []
    chosen = client._options
    assert {name: getattr(chosen, name) for name in DOCUMENTED} == DOCUMENTED
    assert [peer.uid for _, peer in broker.smq.peers()][1:] == ["sensor-1"]
    client.close()


def test_defaults() -> None:
    given = SmqClientOptions(uid="123456")
    assert (given.timeout, given.ping, given.pong, given.reconnect, given.reconnect_delay) == (5, 120, 10, True, 5)


def test_the_request_and_the_first_packet(make_client: Make) -> None:
    heads: list[str] = []

    def script(conversation: Conversation) -> bytes:
        heads.append(conversation.read_head())
        conversation.raw(b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n")
        conversation.send(smq.init(77, "127.0.0.1"))
        return conversation.receive()

    with ScriptedBroker(script) as broker:
        make_client(broker.url, reconnect=False).wait_closed(5)
        make_client(broker.url, reconnect=False, uid="the device", info="kitchen", headers={"X-Key": "1"}).wait_closed(
            5
        )
        plain, chosen = (smq.parse_connect(packet) for packet in broker.wait_results(2))
    assert all("\r\nSimpleMQ: 1\r\n" in head and "\r\nSendSmqHttpResponse: true" in head for head in heads)
    assert ["X-Key: 1" in head for head in heads] == [False, True]
    assert len(plain[0]) >= 6
    assert plain[1:3] == (b"", b"127.0.0.1")
    assert chosen[:3] == (b"the device", b"", b"kitchen")


def test_create_returns_before_it_is_connected(broker: LocalBroker, make_client: Make) -> None:
    client = make_client(broker.url)
    assert (client.connected, client.gettid()) == (False, None)
    assert client.wait_connected(5)
    assert client.gettid()


# ---- callbacks


def test_callbacks_of_connections(make_client: Make) -> None:
    """They may be assigned as well; a reconnect has the arguments of the first connection."""
    auths, connects, again = Queue[Any](), Queue[Any](), Queue[Any]()
    with ScriptedBroker(lambda c: c.accept(11, 5), lambda c: (c.accept(12, 6), c.wait_closed())) as broker:
        client = make_client(broker.url)
        client.onauth, client.onconnect, client.onreconnect = collect(auths), collect(connects), collect(again)
        client.onauth = lambda *given: auths.put(given) or ""
        assert again.get(timeout=5) == (12, 6, "127.0.0.1")
        assert taken(connects, 1) == [(11, 5, "127.0.0.1")]
        assert taken(auths, 2) == [(5, "127.0.0.1"), (6, "127.0.0.1")]
        client.disconnect()


@pytest.mark.parametrize(("answer", "delay_s"), [(False, None), (True, "usual"), (0.03, 0.03), (0, 0)])
def test_decisions_of_onclose(
    make_client: Make, monkeypatch: pytest.MonkeyPatch, answer: Any, delay_s: float | str | None
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(Backoff, "next_s", lambda self: waited.append("usual") or 0.01)
    waits = lambda self, delay_s: "usual" in waited or waited.append(delay_s)  # noqa: E731
    monkeypatch.setattr("smqrt.clients.smq.client.SmqClient._wait_before_retry", waits)
    closes, again = Queue[Any](), Queue[Any]()
    with ScriptedBroker(lambda c: c.accept(), lambda c: (c.accept(), c.wait_closed())) as broker:
        make_client(broker.url, onreconnect=collect(again), onclose=lambda *why: closes.put(why) or answer)
        assert closes.get(timeout=5) == ("socketclosed", True)
        if delay_s is None:
            gevent.sleep(0.05)
            assert (broker.connections, waited) == (1, [])
        else:
            assert again.get(timeout=5)
            assert waited == [delay_s]


REFUSALS = {
    2: "server unavailable",
    3: "incorrect credentials",
    4: "client certificate required",
    5: "client certificate not accepted",
    6: "access denied",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_refusals_are_texts(make_client: Make, code: int) -> None:
    def script(conversation: Conversation) -> None:
        conversation.bootstrap()
        conversation.send(smq.init(1, "127.0.0.1"))
        conversation.receive()
        conversation.send(smq.connack(code, 0, b"so it is"))

    closes = Queue[Any]()
    with ScriptedBroker(script) as broker:
        make_client(broker.url, reconnect=False, onclose=collect(closes))
        assert closes.get(timeout=5) == (REFUSALS[code], code == 2)


# ---- methods, against a real broker


def createsub(client: SMQClient, it: Callable[..., None]) -> None:
    client.createsub("a", it)


def with_subtopic(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("a", "s", onack=it)


def of_self(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("self", {"onack": it})
    client.subscribe("self", "s", {"onack": it})


def refused_subtopic(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("a", "secret", {"onack": it})
    client.createsub("secret", it)


def refused_topic(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("secret", {"onack": it})
    client.create("secret", it)


def resolves(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("self", "s", onmsg=lambda data, *_: it(data))
    for data, topic, subtopic in (("1", client.gettid(), "s"), ("2", "b", None), ("3", "self", "s")):
        client.publish(data, topic or 0, subtopic)


def payloads(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("a", onmsg=lambda data, *_: it(data))
    client.subscribe("j", onmsg=lambda data, *_: it(data), datatype="json")
    for data in (b"\xff", "text", {"a": 1}, 1.5):
        client.publish(data, "a")
    client.publish({"a": 1}, "j")
    client.pubjson("text", "j")


def handlers(client: SMQClient, it: Callable[..., None]) -> None:
    client.onmsg = lambda data, *_: it("client", data)
    client.subscribe("a", onmsg=lambda data, *_: it("topic", data))
    client.subscribe("a", "s", onmsg=lambda data, *_: it("sub", data))
    client.subscribe("b")
    for data, topic, subtopic in (("1", "a", "s"), ("2", "a", None), ("3", "b", None)):
        client.publish(data, topic, subtopic)


def unsubscribed(client: SMQClient, it: Callable[..., None]) -> None:
    def onmsg(data: bytes, *_: Any) -> None:
        it(data)
        client.unsubscribe("a")
        client.publish("2", "a")
        client.subscribe("b", onmsg=lambda data, *_: it(data))
        client.publish("3", "b")

    client.onmsg = lambda data, *_: it(data)
    client.subscribe("a", onmsg=onmsg)
    client.publish("1", "a")


def unobserved(client: SMQClient, it: Callable[..., None]) -> None:
    def subscribed(*_: Any) -> None:
        client.unobserve("a")
        client.unsubscribe("a")
        client.create("last", it)

    client.create("a", lambda *_: (client.observe("a", it), client.subscribe("a", onack=subscribed)))


def names(client: SMQClient, it: Callable[..., None]) -> None:
    def numbered(*_: Any) -> None:
        a, s = client.topic2tid("a"), client.subtopic2tid("s")
        it(a, s)
        it(client.tid2topic(a or 0), client.tid2subtopic(s or 0))
        it(client.topic2tid("b"), client.subtopic2tid("b"), client.tid2topic(3), client.tid2subtopic(3))

    client.create("a")
    client.createsub("s", numbered)


def in_order(client: SMQClient, it: Callable[..., None]) -> None:
    client.subscribe("a", "s", onack=lambda _, topic, *more: it(topic))
    client.createsub("t", lambda _, topic, *more: it(topic))
    client.create("b", lambda _, topic, *more: it(topic))
    client.subscribe("c", "t", onack=lambda _, topic, *more: it(topic))


CASES: dict[Callable[..., None], list[tuple[Any, ...]]] = {
    createsub: [(True, "a", "stid a")],
    with_subtopic: [(True, "a", "tid a", "s", "stid s")],
    of_self: [(True, "self", "own"), (True, "self", "own", "s", "stid s")],
    refused_subtopic: [(False, "a", 0, "secret", 0), (False, "secret", 0)],
    refused_topic: [(False, "secret", 0), (False, "secret", 0)],
    resolves: [(b"1",), (b"3",)],
    payloads: [(b"\xff",), (b"text",), (b'{"a":1}',), (b"1.5",), ({"a": 1},), ("text",)],
    handlers: [("sub", b"1"), ("topic", b"2"), ("client", b"3")],
    unsubscribed: [(b"1",), (b"3",)],
    unobserved: [(0, "a"), (1, "a"), (True, "last", "tid last")],
    names: [("tid a", "stid s"), ("a", "s"), (None, None, None, None)],
    in_order: [("a",), ("t",), ("b",), ("c",)],
}


@pytest.mark.parametrize("what", CASES, ids=lambda what: what.__name__)
def test_methods(start_broker: Start, make_client: Make, what: Callable[..., None]) -> None:
    """ "tid a" stands for the number of the topic a, "stid a" for that of a sub-topic, "own" for one's own."""
    broker = start_broker(
        permittop=lambda topic, issub, peer: topic != "secret", permitsubtop=lambda name, peer: name != "secret"
    )
    client, got = make_client(broker.url), Queue[Any]()
    assert client.wait_connected(5)
    what(client, collect(got))
    told = taken(got, len(CASES[what]))
    numbers = {"own": client.gettid()}
    for name in "as":
        numbers[f"stid {name}"] = broker.smq.subtopic2tid(name)
    numbers |= {f"tid {name}": broker.smq.topic2tid(name) for name in ("a", "last")}
    assert told == [tuple(numbers.get(value, value) if isinstance(value, str) else value for value in call)
                    for call in CASES[what]]  # fmt: skip


def test_messages_sent_in_onconnect_reach_the_client(start_broker: Start, make_client: Make) -> None:
    """Before any subscription exists; the sub-topic makes no difference."""
    broker = start_broker(onconnect=lambda etid, info, peer: broker.smq.publish("welcome", etid, "greeting"))
    got = Queue[Any]()
    client = make_client(broker.url, onmsg=collect(got))
    data, ptid, tid, stid = got.get(timeout=5)
    assert (data, ptid, tid, stid) == (b"welcome", 1, client.gettid(), broker.smq.subtopic2tid("greeting"))


@pytest.mark.parametrize("end", [SMQClient.close, SMQClient.disconnect])
def test_close_is_sent_to_the_broker(make_client: Make, end: Callable[[SMQClient], None]) -> None:
    def script(conversation: Conversation) -> list[int]:
        conversation.accept()
        packets: list[int] = []
        while True:
            packets.append(conversation.receive()[0])
            if packets[-1] == Type.PING:
                conversation.send(smq.PONG)
            if packets[-1] == Type.DISCONNECT:
                return packets

    with ScriptedBroker(script) as broker:
        client = make_client(broker.url, onclose=lambda *_: pytest.fail("its own end is no news"))
        assert client.wait_connected(5)
        end(client)
        wait_until(lambda: broker.results and client.closed)
        assert broker.results[0][-1] == Type.DISCONNECT
        assert broker.connections == 1
