"""`require"smq.client"`: what the documents say of each option, callback and method (spec: smq §3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from smqrt.apps.lua.api import smq_client
from smqrt.apps.lua.vm import Services, Vm
from smqrt.clients.backoff import Backoff
from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.apps.lua.recorder import Recorder
from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker
from tests.support.scripted_broker import Conversation, ScriptedBroker
from tests.support.waiting import let_others_run, wait_until

PRELUDE = """
clients = {}
function connect(op)
  local smq = require "smq.client".create(url, op)
  clients[#clients + 1] = smq
  return smq
end
function note(name)
  return function(...) test.record(name, ...) end
end
"""
Start = Callable[..., LocalBroker]


class Client:
    """Runs Lua with `connect`, `note` and `url`.

    Attributes:
        services: of the runtime.
    """

    def __init__(self, vm: Vm, recorder: Recorder) -> None:
        self._vm, self._recorder, self.services = vm, recorder, Services()
        smq_client.install_smq_client(vm, self.services)

    def run(self, url: str, source: str) -> None:
        self._vm.eval(f"url = {url!r}\n{PRELUDE}{source}", "@app/.preload")

    def told(self, name: str, count: int = 1) -> list[tuple[Any, ...]]:
        """What Lua has recorded under a name; waits for so many."""
        wait_until(lambda: len(self._of(name)) >= count, (name, self._recorder.seen))
        return self._of(name)

    def _of(self, name: str) -> list[tuple[Any, ...]]:
        seen = [one if isinstance(one, tuple) else (one,) for one in self._recorder.seen]
        return [one[1:] for one in seen if one[0] == name.encode()]

    def now(self, name: str) -> list[tuple[Any, ...]]:
        """What has come until now, and what is on its way in this process."""
        let_others_run()
        return self._of(name)


@pytest.fixture
def lua(vm: Vm, recorder: Recorder) -> Iterator[Client]:
    yield Client(vm, recorder)
    vm.eval("for _, smq in ipairs(clients or {}) do smq:close() end")
    let_others_run()


@pytest.fixture
def start_broker() -> Iterator[Start]:
    with Factory(LocalBroker) as start:
        yield start


# ---- create: the request, Connect, and the times


def test_the_request_and_the_first_packet(lua: Client) -> None:
    heads: list[str] = []

    def script(conversation: Conversation) -> bytes:
        heads.append(conversation.read_head())
        conversation.raw(b"HTTP/1.1 200 OK\r\nSmqBroker: true\r\n\r\n")
        conversation.send(wire.init(77, "127.0.0.1"))
        return conversation.receive()

    with ScriptedBroker(script) as broker:
        lua.run(broker.url, "connect()")
        wait_until(lambda: broker.results)
        lua.run(broker.url, "connect{uid = 'the device', info = 'kitchen'}")
        wait_until(lambda: len(broker.results) > 1)
    assert all("\r\nSimpleMQ: 1\r\n" in head and "\r\nSendSmqHttpResponse: true" in head for head in heads)
    plain, chosen = (wire.parse_connect(packet) for packet in broker.results)
    assert len(plain[0]) >= 6
    assert plain[1:3] == (b"", b"127.0.0.1")
    assert chosen[:3] == (b"the device", b"", b"kitchen")


def test_times(lua: Client) -> None:
    with ScriptedBroker(lambda c: c.wait_closed()) as broker:
        lua.run(broker.url, "connect() connect{ping = 7, pong = 8, timeout = 900}")
        plain, chosen = (client._options for client in lua.services.smq_clients._clients.values())
        assert (plain.ping, plain.pong, plain.timeout, plain.reconnect_delay) == (120, 10, 5, 5)
        assert (chosen.ping, chosen.pong, chosen.timeout) == (7, 8, 0.9)
        lua.run(broker.url, "connect{timeout = 60}.onclose = note 'close'")
        assert lua.told("close") == [(b"timeout", True, None)]


def test_create_returns_before_it_is_connected(lua: Client, start_broker: Start) -> None:
    lua.run(start_broker().url, "local smq = connect() smq.onconnect = note 'up' test.record('now', smq:gettid())")
    assert lua.now("now") == [(None,)]
    assert lua.told("up")


# ---- callbacks


def test_callbacks_of_connections(lua: Client) -> None:
    """A reconnect has the arguments of the first connection."""
    with ScriptedBroker(lambda c: c.accept(11, 5), lambda c: (c.accept(12, 6), c.wait_closed())) as broker:
        lua.run(
            broker.url,
            """local smq = connect()
            smq.onauth, smq.onconnect, smq.onreconnect = note "auth", note "connect", note "reconnect"
            function smq.onclose() return 1 end""",
        )
        assert lua.told("reconnect") == [(12, 6, b"127.0.0.1")]
        assert lua.told("connect") == [(11, 5, b"127.0.0.1")]
        assert lua.told("auth") == [(5, b"127.0.0.1"), (6, b"127.0.0.1")]


@pytest.mark.parametrize(
    ("answer", "delay_s"), [("nil", None), ("false", None), ("true", "usual"), ("30", 0.03), ("0", 0)]
)
def test_decisions_of_onclose(
    lua: Client, monkeypatch: pytest.MonkeyPatch, answer: str, delay_s: float | str | None
) -> None:
    waited: list[float | str] = []
    monkeypatch.setattr(Backoff, "next_s", lambda self: waited.append("usual") or 0.01)
    waits = lambda self, delay_s: "usual" in waited or waited.append(delay_s)  # noqa: E731
    monkeypatch.setattr("smqrt.clients.smq.client.SmqClient._wait_before_retry", waits)
    with ScriptedBroker(lambda c: c.accept(), lambda c: (c.accept(), c.wait_closed())) as broker:
        lua.run(
            broker.url,
            f"local smq = connect() smq.onreconnect = note 'again'\n"
            f"function smq.onclose() test.record 'close' return {answer} end",
        )
        assert lua.told("close")
        if delay_s is None:
            gevent.sleep(0.05)
            assert (broker.connections, waited) == (1, [])
        else:
            assert lua.told("again")
            assert waited == [delay_s]


REFUSALS = {
    2: "server unavailable",
    3: "incorrect credentials",
    4: "client certificate required",
    5: "client certificate not accepted",
    6: "access denied",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_refusals_are_texts(lua: Client, code: int) -> None:
    def script(conversation: Conversation) -> None:
        conversation.bootstrap()
        conversation.send(wire.init(1, "127.0.0.1"))
        conversation.receive()
        conversation.send(wire.connack(code, 0, b"so it is"))

    with ScriptedBroker(script) as broker:
        lua.run(broker.url, "connect().onclose = note 'close'")
        assert lua.told("close") == [(REFUSALS[code].encode(), code == 2, None)]


def test_invalid_bytes_are_a_protocol_error(lua: Client) -> None:
    with ScriptedBroker(lambda c: (c.accept(), c.raw(b"\0\1"), c.wait_closed())) as broker:
        lua.run(broker.url, "connect().onclose = note 'close'")
        assert lua.told("close") == [(b"protocolerror", True, None)]


def test_no_broker_is_a_socket_error(lua: Client) -> None:
    lua.run("http://127.0.0.1:1/", "connect().onclose = note 'close'")
    assert lua.told("close") == [(b"cannotconnect", True, None)]


def test_a_connection_with_traffic_is_not_pinged(lua: Client) -> None:
    def script(conversation: Conversation) -> bytes:
        conversation.accept()
        for _ in range(15):
            conversation.send(wire.publish_frame(1, 2, 0, b"tick")[2:])
            time.sleep(0.02)
        conversation.sock.setblocking(False)
        try:
            return conversation.sock.recv(100)
        except BlockingIOError:
            return b"nothing"

    with ScriptedBroker(script) as broker:
        lua.run(broker.url, "connect{ping = 0.1, pong = 0.1}.onclose = note 'close'")
        wait_until(lambda: broker.results)
        assert broker.results == [b"nothing"]


# ---- methods, against a real broker

METHODS: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "create is false when not connected, else true": (
        """test.record("it", connect():create "a")
        function smq.onconnect() test.record("it", smq:create "a") end""",
        [(False,), (True,)],
    ),
    "createsub is false when not connected, else true": (
        """test.record("it", connect():createsub "a")
        function smq.onconnect() test.record("it", smq:createsub("a", note "it")) end""",
        [(False,), (True,), (True, b"a", "stid a")],
    ),
    "publish is false when not connected, else true": (
        """test.record("it", connect():publish("x", "a"))
        function smq.onconnect() test.record("it", smq:publish("x", "a")) end""",
        [(False,), (True,)],
    ),
    "subscribe": (
        """function smq.onconnect() smq:subscribe("a", {onack = note "it"}) end""",
        [(True, b"a", "tid a")],
    ),
    "subscribe with a sub-topic": (
        """function smq.onconnect() smq:subscribe("a", "s", {onack = note "it"}) end""",
        [(True, b"a", "tid a", b"s", "stid s")],
    ),
    "self with and without a sub-topic": (
        """function smq.onconnect()
          smq:subscribe("self", {onack = function(ok, topic, tid)
            test.record("it", ok, topic, tid == smq:gettid())
          end})
          smq:subscribe("self", "s", {onack = function(ok, topic, tid, subtopic, stid)
            test.record("it", ok, topic, tid == smq:gettid(), subtopic, stid)
          end})
        end""",
        [(True, b"self", True), (True, b"self", True, b"s", "stid s")],
    ),
    "a refused sub-topic": (
        """function smq.onconnect()
          smq:subscribe("a", "secret", {onack = note "it"})
          smq:createsub("secret", note "it")
        end""",
        [(False, b"a", 0, b"secret", 0), (False, b"secret", 0)],
    ),
    "a refused topic": (
        """function smq.onconnect() smq:subscribe("secret", {onack = note "it"}) smq:create("secret", note "it") end""",
        [(False, b"secret", 0), (False, b"secret", 0)],
    ),
    "publish resolves names and waits for both": (
        """function smq.onconnect()
          smq:subscribe("self", "s", {onmsg = function(data) test.record("it", data) end})
          smq:publish("1", smq:gettid(), "s") smq:publish("2", "b") smq:publish("3", "self", "s")
        end""",
        [(b"1",), (b"3",)],
    ),
    "without datatype it is a string": (
        """function smq.onconnect()
          smq:subscribe("a", {onmsg = function(data) test.record("it", data) end}) smq:publish({1}, "a")
        end""",
        [(b"[1]",)],
    ),
    "the sub-topic's onmsg, the topic's, and the client's": (
        """smq.onmsg = function(data) test.record("it", "client", data) end
        function smq.onconnect()
          smq:subscribe("a", {onmsg = function(data) test.record("it", "topic", data) end})
          smq:subscribe("a", "s", {onmsg = function(data) test.record("it", "sub", data) end})
          smq:subscribe("b", {onack = function()
            smq:publish("1", "a", "s") smq:publish("2", "a") smq:publish("3", "b")
          end})
        end""",
        [(b"sub", b"1"), (b"topic", b"2"), (b"client", b"3")],
    ),
    "unsubscribe": (
        """function smq.onconnect()
          local function it(data) test.record("it", data) end
          smq.onmsg = it
          smq:subscribe("a", {onmsg = function(data)
            it(data) smq:unsubscribe "a" smq:publish("2", "a") smq:subscribe("b", {onmsg = it}) smq:publish("3", "b")
          end})
          smq:publish("1", "a")
        end""",
        [(b"1",), (b"3",)],
    ),
    "unobserve": (
        """function smq.onconnect()
          smq:create("a", function()
            smq:observe("a", note "it")
            smq:subscribe("a", {onack = function()
              smq:unobserve "a" smq:unsubscribe "a"
              smq:create("last", note "it")
            end})
          end)
        end""",
        [(0, b"a"), (1, b"a"), (True, b"last", "tid last")],
    ),
    "the numbers and names of this client": (
        """test.record("it", connect():gettid())
        function smq.onconnect()
          smq:create("a", "s", function()
            test.record("it", smq:topic2tid "a", smq:subtopic2tid "s")
            test.record("it", smq:tid2topic(smq:topic2tid "a"), smq:tid2subtopic(smq:subtopic2tid "s"))
            test.record("it", smq:topic2tid "b", smq:subtopic2tid "b", smq:tid2topic(3), smq:tid2subtopic(3))
          end)
        end""",
        [(None,), ("tid a", "stid s"), (b"a", b"s"), (None, None, None, None)],
    ),
    "the last onack comes last": (
        """function smq.onconnect()
          local function ack(_, topic) test.record("it", topic) end
          smq:subscribe("a", "s", {onack = ack}) smq:createsub("t", ack) smq:create("b", ack)
          smq:subscribe("c", "t", {onack = ack})
        end""",
        [(b"a",), (b"t",), (b"b",), (b"c",)],
    ),
}


@pytest.mark.parametrize("what", METHODS)
def test_methods(lua: Client, start_broker: Start, what: str) -> None:
    """ "tid a" stands for the number of the topic a, "stid a" for that of a sub-topic."""
    broker = start_broker(
        permittop=lambda topic, issub, peer: topic != "secret", permitsubtop=lambda name, peer: name != "secret"
    )
    source, expected = METHODS[what]
    lua.run(broker.url, "local smq = connect() local connect = function() return smq end\n" + source)
    told = lua.told("it", len(expected))
    names = {"tid": broker.smq.topic2tid, "stid": broker.smq.subtopic2tid}

    def real(value: Any) -> Any:
        return names[value.split()[0]](value.split()[1]) if isinstance(value, str) else value

    assert [tuple(map(real, call)) for call in expected] == [
        call[: len(wanted)] for call, wanted in zip(told, expected, strict=True)
    ]


def test_messages_sent_in_onconnect_reach_the_client(lua: Client, start_broker: Start) -> None:
    """Before any subscription exists; the sub-topic makes no difference."""
    broker = start_broker(onconnect=lambda etid, info, peer: broker.smq.publish("welcome", etid, "greeting"))
    lua.run(broker.url, "connect().onmsg = note 'msg'")
    ((data, ptid, tid, stid),) = lua.told("msg")
    assert (data, ptid, stid) == (b"welcome", 1, broker.smq.subtopic2tid("greeting"))
    assert [peer.tid for _, peer in broker.smq.peers()][1:] == [tid]


@pytest.mark.parametrize("method", ["close", "disconnect"])
def test_close_is_sent_to_the_broker(lua: Client, method: str) -> None:
    def script(conversation: Conversation) -> list[int]:
        conversation.accept()
        packets = []
        while True:
            packets.append(conversation.receive()[0])
            if packets[-1] == Type.PING:
                conversation.send(wire.PONG)
            if packets[-1] == Type.DISCONNECT:
                return packets

    with ScriptedBroker(script) as broker:
        lua.run(
            broker.url,
            f"local smq = connect() smq.onclose = note 'close' function smq.onconnect() smq:{method}() end",
        )
        wait_until(lambda: broker.results)
        assert broker.results[0][-1] == Type.DISCONNECT
        assert lua.now("close") == []
        assert broker.connections == 1
