"""`require"smq.hub"`, `smq.broker` and `smqbroker`: the broker as Lua applications use it (spec: smq §2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt.transport.listener import Listener
from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.apps.lua.lua_hub import LuaSite
from tests.conformance.mqtt_script import data_of
from tests.hub.recorded import NO_JSON, SCALARS
from tests.support.device import (
    KINDS,
    RAW,
    RAW_HEADERS,
    TLS,
    WS,
    WS_HEADERS,
    Authority,
    Device,
    client_context,
    connect_packet,
    masked,
    publish,
    request,
)
from tests.support.pki import server_context
from tests.support.waiting import wait_until

HOOKS = """
argument = {any = "thing"}
smq = require"smq.hub".create{
  authenticate = function(credentials, info)
    local about = info.header.SimpleMQ .. info.data.b .. info.url
    record("authenticate", credentials, info.uid, info.info, about, info.arg.any, info.session)
    if credentials == "bad" then return 3, "wrong" end
    if credentials == "nothing" then return end
    return 0
  end,
  permittop = function(topic, issub, peer) record("permittop", topic, issub, peer.uid) return topic ~= "no" end,
  permitsubtop = function(topic, peer) record("permitsubtop", topic, peer.uid) return topic ~= "no" end,
  onconnect = function(etid, info, peer)
    record("onconnect", etid, info.uid, peer.tid == etid, peer.sock == info.sock)
  end,
  onclose = function(etid, sock, peer, err) record("onclose", etid, peer.uid, err, sock == peer.sock) end,
  onpublish = function(data, ptid, tid, subtid, peer)
    record("onpublish", data, ptid, tid, subtid, peer.uid)
    return data ~= "no"
  end,
  ondrop = function(data, ptid, tid, subtid, peer) record("ondrop", data, ptid, tid, subtid, peer.uid) end,
  onmsg = function(data, ptid, tid, subtid) record("onmsg", data, ptid, tid, subtid) end,
  log = function(sock, text) record("log", sock and true, text) end,
}
"""


def test_every_callback(lua: Callable[[str], LuaSite]) -> None:
    site = lua(HOOKS)
    device = site.device(credentials=b"good", info=b"me")
    device.ask(Type.SUBSCRIBE, b"no")
    tid = device.subscribe(b"yes")
    device.ask(Type.CREATESUB, b"no")
    device.send(*(publish(tid, device.etid, data, 7) for data in (b"1", b"no", b"2"))).publish(4711, b"lost")
    assert [packet[13:] for packet in device.sync()] == [b"1", b"2"]
    device.publish(1, b"to the server").expect_nothing()
    device.disconnect()
    site.come(13)
    etid = device.etid
    assert [call for call in site.calls if call[0] != b"log"] == [
        (b"authenticate", b"good", b"uid-a1", b"me", b"1two/smq.lsp", b"thing", False),
        (b"onconnect", etid, b"uid-a1", True, True),
        (b"permittop", b"no", True, b"uid-a1"),
        (b"permittop", b"yes", True, b"uid-a1"),
        (b"permitsubtop", b"no", b"uid-a1"),
        (b"onpublish", b"1", etid, tid, 7, b"uid-a1"),
        (b"onpublish", b"no", etid, tid, 7, b"uid-a1"),
        (b"onpublish", b"2", etid, tid, 7, b"uid-a1"),
        (b"onpublish", b"lost", etid, 4711, 0, b"uid-a1"),
        (b"ondrop", b"lost", etid, 4711, 0, b"uid-a1"),
        (b"onpublish", b"to the server", etid, 1, 0, b"uid-a1"),
        (b"onmsg", b"to the server", etid, 1, 0),
        (b"onclose", etid, b"uid-a1", 0, True),
    ]


def test_refusals_and_take_over(lua: Callable[[str], LuaSite]) -> None:
    site = lua(HOOKS)
    site.open().send(connect_packet(b"uid-a1", b"bad")).expect_end(wire.connack(3, 0, b"wrong"))
    site.open(WS).send(connect_packet(b"uid-a1", b"nothing")).expect_end(wire.connack(6, 0))
    site.open().send(b"\x04first").expect_end(wire.connack(1, 0))
    old = site.device()
    site.calls.clear()
    new = site.device()
    assert new.etid == old.etid
    names = [call[0] for call in site.calls if call[0] != b"log"]
    assert names == [b"authenticate", b"onclose", b"onconnect"]
    assert (b"onclose", old.etid, b"uid-a1", b"reconnect", True) in site.calls
    old.expect_end(wire.disconnect(b"reconnect"))


ENDS: dict[str, tuple[str, Callable[[Device], object], Any, bytes]] = {
    "good-bye": (RAW, Device.disconnect, 0, b"disconnect"),
    "forged": (RAW, lambda device: device.send(publish(5, 5, b"")), 0, b"corrupt frame"),
    "unknown packet": (RAW, lambda device: device.send(b"\xff"), 0, b"unknown packet"),
    "no good-bye": (RAW, Device.close, b"socketreadfailed", b"connection ended"),
    "reset": (RAW, Device.reset, b"socketreadfailed", b"read failed"),
    "close frame": (WS, lambda device: device.send_bytes(masked(b"\x03\xe8", 8)), b"socketclosed", b"websocket closed"),
    "no WebSocket": (WS, lambda device: device.send_bytes(b"\xff\xff\xff"), 0, b"websocket protocol error"),
}


@pytest.mark.parametrize("name", ENDS)
def test_onclose_gets_the_finer_reason(lua: Callable[[str], LuaSite], name: str) -> None:
    kind, end, word, reason = ENDS[name]
    site = lua('smq = require"smq.hub".create{onclose = function(...) record(select("#", ...), select(4, ...)) end}')
    end(site.device(kind=kind))
    assert site.come(1) == [(5, word, reason)]


def test_onclose_distinguishes_takeover_and_shutdown(lua: Callable[[str], LuaSite]) -> None:
    site = lua('smq = require"smq.hub".create{onclose = function(...) record(select(4, ...)) end}')
    site.device()
    site.device()
    assert site.come(1) == [(b"reconnect", b"reconnect")]
    site.run('smq:shutdown("maintenance")')
    assert site.come(1) == [(b"sysshutdown", b"sysshutdown")]


def test_nothing_is_kept_of_clients_that_are_gone(lua: Callable[[str], LuaSite]) -> None:
    site = lua(HOOKS)
    for number in range(5):
        site.open().send(connect_packet(b"uid-a1", b"bad")).expect_end(wire.connack(3, 0, b"wrong"))
        site.open().send(b"\xff").expect_end(wire.connack(1, 0))
        site.device(b"uid-%03d" % number).disconnect()
        site.device(b"uid-a1").send(b"\xff").expect_end()
    wait_until(lambda: not site.broker.sessions, "the ends of all clients")
    wait_until(lambda: not [one for one in site.half.clients.sessions.values() if one is not site.broker.server])


CALLBACKS = ("authenticate", "permittop", "permitsubtop", "onconnect", "onclose", "onpublish", "ondrop", "log")


@pytest.mark.parametrize("name", [*CALLBACKS, "onmsg", "handler", "observe"])
@pytest.mark.parametrize("blocks", [False, True])
def test_callback_errors_are_traced_and_close_nothing(
    lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture, name: str, blocks: bool
) -> None:
    option = f"{name} = broken" if name in (*CALLBACKS, "onmsg") else ""
    site = lua(
        f"""local function broken() {"ba.sleep(5)" if blocks else ""}
  error("on purpose in {name}") end
smq = require"smq.hub".create{{{option}}}
smq:subscribe("handled", {{onmsg = {"broken" if name == "handler" else "print"}}})
smq:subscribe("server's")
smq:observe("watched", {"broken" if name == "observe" else "function() end"})"""
    )
    if name == "authenticate":
        site.open().send(connect_packet(b"uid-a1")).expect_end(wire.connack(6, 0))
    else:
        device, other = site.device(), site.device(b"other-1")
        assert device.ask(Type.SUBSCRIBE, b"watched").denied == (name == "permittop")
        assert device.ask(Type.CREATESUB, b"sub").denied == (name == "permitsubtop")
        for topic in ("handled", "server's"):
            device.publish(site.broker.create(topic.encode()), b"x")
        device.publish(device.etid, b"1").publish(4711, b"2")
        assert [packet[13:] for packet in device.sync()] == ([] if name == "onpublish" else [b"1"])
        other.send(b"\xff").expect_end()
        device.expect_nothing()
    wait_until(lambda: f".preload:2: on purpose in {name}" in caplog.text, "the trace with file and line")
    assert "stack traceback" in caplog.text


def test_an_error_in_onpublish_costs_that_message_only(lua: Callable[[str], LuaSite]) -> None:
    """Also in a run, which is asked about as a whole."""
    site = lua("""smq = require"smq.hub".create{onpublish = function(data)
      if data == "?" then error "on purpose" end
      return data ~= "no"
    end}""")
    device = site.device()
    payloads = [b"%d" % number if number % 3 else (b"?", b"no")[number % 2] for number in range(60)]
    device.send(*(publish(device.etid, device.etid, payload) for payload in payloads))
    assert [packet[13:] for packet in device.sync()] == [payload for payload in payloads if payload.isdigit()]


def test_what_onpublish_publishes_comes_behind_its_own_message(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      smq = require"smq.hub".create{onpublish = function(data, ptid, tid)
        if data == "first" then record(smq:publish("second", tid)) end
        ba.sleep(1)
        return true
      end}
      function go(etid) smq:publish("first", etid) end
    """)
    device = site.device()
    assert site.run(f"app.go({device.etid})") == (1,)
    device.expect(publish(device.etid, 1, b"first"), publish(device.etid, 1, b"second"))
    assert site.run("record(smq:queuesize())") == (200, 0)


@pytest.mark.parametrize("kind", KINDS[::2])
def test_callbacks_that_block_keep_the_order(lua: Callable[[str], LuaSite], kind: str) -> None:
    site = lua("""
      local function slowly() ba.sleep(10) return true end
      smq = require"smq.hub".create{
        authenticate = function() ba.sleep(10) return 0 end,
        permittop = slowly, permitsubtop = slowly,
        onpublish = function(data) if data:find "0" then ba.sleep(5) end return data ~= "5" end,
      }
      smq:subscribe("ask", {onmsg = function(data) if data:find "0" then ba.sleep(5) end record(tonumber(data)) end})
    """)
    device, other = site.device(kind=kind), site.device(b"other-1")
    ask = site.broker.create(b"ask")
    packets = [publish(device.etid, device.etid, b"%d" % number) for number in range(30)]
    device.send(b"\x04news", *packets[:15], b"\x11sub", *packets[15:], b"\x06more")
    other.expect_nothing()
    got = device.sync()
    assert [packet[13:] for packet in got if packet[0] == 8] == [b"%d" % number for number in range(30) if number != 5]
    assert [packet[0] for packet in got].index(Type.CREATESUBACK) == 15
    assert (got[0][0], got[-1][0]) == (Type.SUBACK, Type.CREATEACK)
    device.send(*(publish(ask, device.etid, b"%d" % number) for number in range(30)))
    assert site.come(29) == [(number,) for number in range(30) if number != 5]


def test_a_subscription_to_a_filter(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      smq = require"smq.hub".create()
      local function heard(data, ptid, tid) record(smq:tid2topic(tid), tonumber(data)) end
      smq:create "house/kitchen/temp"
      assert(smq:subscribe {filter = "house/+/temp", onmsg = heard} == 0)
      smq:subscribe(nil, {filter = "json/#", json = true, onmsg = function(data) record(data.a) end})
    """)
    device = site.device()
    for name, data in ((b"house/kitchen/temp", b"21"), (b"house/temp", b"x"), (b"house/bath/temp", b"22")):
        device.publish(device.create(name), data)
    device.publish(device.create(b"json/a/b"), b'{"a": 5}')
    assert site.come(3) == [(b"house/kitchen/temp", 21), (b"house/bath/temp", 22), (5,)]
    site.run("smq:unsubscribe 'house/+/temp'")
    device.publish(device.create(b"house/bath/temp"), b"23")
    device.sync()
    assert not site.calls


# ---- the methods

METHODS = {
    "names": ("""
      local tid, stid = smq:create("a", 77), smq:createsub("s", 78)
      local name, other = smq:topics()()
      record(tid, stid, smq:create "a", smq:createsub(nil), smq:topic2tid "a", smq:tid2topic(77), smq:subtopic2tid "s",
        smq:tid2subtopic(78), smq:topic2tid "x", smq:tid2topic(5), name, other, smq:gettid())""",
        (77, 78, 77, 0, 77, b"a", 78, b"s", None, None, 77, b"a", 1)),
    "a name with NUL": ("""record(smq:tid2topic(smq:create "a\\0\\xff"))""", (b"a\0\xff",)),
    "publish": ("record(smq:publish('x', 'nobody'), smq:publish({1}, 5, 's', 7), smq:publish('x', 'self'))", (0, 0, 0)),
    "pubon without clients": ("""record(smq:pubon("x", 5, 6, 0))""", (False,)),
    "queuesize": ("record(smq:queuesize())", (200, 0)),
    "drops": ('smq:publish("a", "nobody") record(smq:drops().unrouted, smq:drops().over_budget)', (1, 0)),
    "unsubscribe": ("smq:unsubscribe 'a' smq:unobserve 'a' record(smq:topic2tid 'a')", (None,)),
    "observe": ("record(smq:observe('a', print), smq:observe(4711, print), smq:observe('self', print))",
        (True, None, None)),
    "peers": ("for sock, peer in smq:peers() do record(peer.uid, peer.tid, sock:peername(), type(sock)) end",
        (b"SMQ server client", 1, None, b"userdata")),
    "peer of nobody": ("record(smq:etid2peer(5), smq:sock2peer({}), smq:etid2peer(1).uid)",
        (None, None, b"SMQ server client")),
    "type": ("record(type(smq))", (b"userdata",)),
    "isSMQ": ("record(require'smq.hub'.isSMQ(request))", (False,)),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_methods(lua: Callable[[], LuaSite], name: str) -> None:
    source, expected = METHODS[name]
    assert lua().run(source) == expected


WRONG = {
    "smq:create()": "bad argument #1 to 'create'",
    "smq:create('a', 'b')": "bad argument #2 to 'create'",
    "smq:create('a', -1)": "tid: ",
    "smq:create(('n'):rep(65528))": "topic: ",
    "smq:createsub({})": "bad argument #1 to 'createsub'",
    "smq:publish()": "bad argument #2 to 'publish'",
    "smq:publish(print, 'a')": "bad argument #1 to 'publish'",
    "smq:publish('x')": "bad argument #2 to 'publish'",
    "smq:publish('x', 'a', print)": "bad argument #3 to 'publish'",
    "smq:publish('x', 'a', {qos = 'x'})": "bad argument #3.qos to 'publish'",
    "smq:publish('x', 'a', {properties = 5})": "bad argument #3.properties to 'publish'",
    "smq:publish('x', 'a', {retain = true})": "retain: this hub accepts no MQTT clients",
    "smq:publish('x', 'a', nil, 'b')": "bad argument #4 to 'publish'",
    "smq:publish(('x'):rep(65521), 'a')": "data: ",
    "smq:pubon(print, 1, 2)": "bad argument #1 to 'pubon'",
    "smq:pubon('x', 'a', 2)": "bad argument #2 to 'pubon'",
    "smq:subscribe()": "bad argument #1 to 'subscribe'",
    "smq:subscribe(4711)": "topic: ",
    "smq:subscribe('a', 5)": "bad argument #2 to 'subscribe'",
    "smq:subscribe('a', {onmsg = 5})": "2.onmsg",
    "smq:subscribe{filter = {}}": "2.filter",
    "smq:subscribe('a', {filter = 'b'})": "bad argument #1 to 'subscribe' (subscribe to a topic or to a filter",
    "smq:subscribe{filter = 'a/#/b'}": "topic 'a/#/b': ",
    "smq:observe('a')": "bad argument #2 to 'observe'",
    "smq:onmsg(5)": "bad argument #1 to 'onmsg'",
    "smq:tid2topic('a')": "bad argument #1 to 'tid2topic'",
    "smq:shutdown({})": "bad argument #1 to 'shutdown'",
    "smq:setkeepalive()": "bad argument #1 to 'setkeepalive'",
    "smq.create('a')": "bad self",
    "smq:connect('a')": "bad argument #1 to 'connect'",
    "require'smq.hub'.create(5)": "bad argument #1 to 'create'",
    "require'smq.hub'.create{onpublish = 5}": "1.onpublish",
    "require'smq.hub'.create{ondrop = 'x'}": "1.ondrop",
    "require'smq.hub'.create{onnode = 5}": "1.onnode",
    "require'smq.hub'.create{onmqttgap = 5}": "1.onmqttgap",
    "require'smq.hub'.create{log = 5}": "1.log",
    "require'smq.hub'.create{readtmo = 'x'}": "1.readtmo",
    "require'smq.hub'.create{readtmo = 0}": "readtmo",
    "require'smq.hub'.create{persist = '/nowhere/file'}": "persist: /nowhere/file: ",
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_are_named(lua: Callable[[], LuaSite], call: str) -> None:
    """The error is raised at the line of the application."""
    (message,) = lua().run(f"local ok, message = pcall(function()\n{call}\nend) record(ok or message)")
    assert message is not True
    assert WRONG[call].encode() in message, message
    assert b"run.lsp:3:" in message, message


@pytest.mark.parametrize("kind", [RAW, WS])
def test_talking_to_clients(lua: Callable[[], LuaSite], kind: str) -> None:
    site = lua()
    device, other = site.device(kind=kind), site.device(b"other-1")
    tid = device.subscribe(b"news")
    site.run(f"smq:publish({{a = 1}}, 'news') smq:publish('x', {device.etid}, 'sub', 77)")
    sub = site.broker.subtopic2tid(b"sub")
    device.expect(publish(tid, 1, b'{"a":1}'), publish(device.etid, 77, b"x", sub))
    assert site.run(f"record(smq:pubon('y', {device.etid}, {other.etid}, 5))") == (True,)
    device.expect(publish(device.etid, other.etid, b"y", 5))
    found = site.run(f"""local peer = smq:etid2peer({device.etid})
      peer.mine = 1
      local ip, port, v6 = peer.sock:peername()
      record(peer.uid, peer.info, peer.phantom, peer.topics[{tid}] == peer.sock,
        ip, port, v6, smq:sock2peer(peer.sock) == peer,
        smq:etid2peer({device.etid}).mine)""")
    assert found == (b"uid-a1", b"", None, True, b"127.0.0.1", device.sock.getsockname()[1], False, True, 1)
    device.send(wire.with_id(Type.UNSUBSCRIBE, tid)).expect_nothing()
    assert site.run(f"record(smq:etid2peer({device.etid}).topics)") == (None,)
    site.run(f"smq:shutdown('bye', {device.etid})")
    device.expect_end(wire.disconnect(b"bye"))
    site.run("smq:shutdown()")
    other.expect_end()


def test_any_number_of_topics_can_be_listed(lua: Callable[[], LuaSite]) -> None:
    """More than Lua's stack holds."""
    site = lua()
    device = site.device()
    session = site.broker.sessions[device.etid]
    topic = site.broker.topic_table.named(b"t")
    # One topic with all names: to create as many takes two seconds.
    site.broker.topic_table.by_name.update(dict.fromkeys((b"t%d" % number for number in range(1, 300_000)), topic))
    session.topics = tuple(SimpleNamespace(id=number) for number in range(300_000))
    count = "local n = 0 for _ in %s do n = n + 1 end record(n)"
    assert site.run(count % "smq:topics()") == (300_000,)
    assert site.run(count % f"pairs(smq:etid2peer({device.etid}).topics)") == (300_000,)
    session.topics = ()


def test_the_socket_of_a_peer_is_a_socket(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""smq = require"smq.hub".create{}""")
    device = site.device()
    found = site.run(
        f"local sock = smq:etid2peer({device.etid}).sock\n"
        "record(sock:state(), sock:setoption('keepalive', true), sock:owner(), select(2, sock:write('x')),"
        " select(2, sock:read()), select(2, sock:cipher()), sock:websocket(), sock:close(), (sock:state()))"
    )
    words = (b"incorrectuse", b"incorrectuse", b"sslnotenabled")
    assert found == (b"connected", True, False, *words, False, True, b"closed")
    device.expect_end()


def test_what_is_left_of_a_peer_that_is_gone(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        """smq = require"smq.hub".create{onclose = function(etid, sock, peer) kept, keptsock = peer, sock end}"""
    )
    device = site.device()
    device.subscribe(b"news")
    device.disconnect()
    wait_until(lambda: not site.broker.sessions, "the end of the client")
    found = site.run(
        "local peer, sock = app.kept, app.keptsock\n"
        "record(peer.uid, peer.topics, sock:peername(), sock:close(), smq:sock2peer(sock))"
    )
    assert found == (b"uid-a1", None, None, False, None)


def test_peers_may_go_while_they_are_listed(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    devices = [site.device(b"uid-%03d" % number) for number in range(3)]
    gevent.spawn_later(0.01, devices[2].disconnect)
    seen = site.run("local n = 0 for sock, peer in smq:peers() do n = n + 1 ba.sleep(20) end record(n)")
    assert seen in ((3,), (4,))


def test_subscribe_observe_and_json(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      smq = require"smq.hub".create()
      smq:onmsg(function(data) record("global", data) end)
      smq:subscribe("news", {onmsg = function(value, ptid, tid, subtid) record("json", value.a) end, json = true})
      smq:subscribe("news", {subtopic = "sub", onmsg = function(data, _, _, subtid) record("sub", data, subtid) end})
      smq:subscribe "other"
      smq:observe("news", function(count, topic) record("observe", count, topic) end)
    """)
    device = site.device()
    tid, other, sub = device.create(b"news"), device.create(b"other"), device.createsub(b"sub")
    device.publish(tid, b'{"a":5}').publish(tid, b"no json").publish(tid, b"x", sub).publish(
        other, b"y"
    ).expect_nothing()
    device.subscribe(b"news")
    device.close()
    assert site.come(6) == [
        (b"json", 5), (b"global", b"no json"), (b"sub", b"x", sub), (b"global", b"y"),
        (b"observe", 2, b"news"), (b"observe", 1, b"news"),
    ]  # fmt: skip
    site.run("smq:unsubscribe 'news' smq:unobserve 'news' smq:onmsg(nil)")
    site.calls.clear()
    site.device().publish(tid, b"x").publish(other, b"y").expect_nothing()
    assert site.calls == []


def test_json_of_every_kind_is_decoded(lua: Callable[[str], LuaSite]) -> None:
    """As in Python; two documents are one too many for both."""
    site = lua("""
      smq = require"smq.hub".create()
      smq:onmsg(function(data) record("global", data) end)
      smq:subscribe("news", {onmsg = function(value) record(value) end, json = true})
    """)
    device = site.device()
    tid = device.create(b"news")
    for payload, _ in SCALARS:
        device.publish(tid, payload)
    values = [(value.encode() if isinstance(value, str) else value,) for _, value in SCALARS]
    assert repr(site.come(len(values))) == repr(values)
    site.calls.clear()
    for payload in NO_JSON:
        device.publish(tid, payload)
    assert site.come(len(NO_JSON)) == [(b"global", payload) for payload in NO_JSON]


def test_scalars_are_received_as_published(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      smq = require"smq.hub".create()
      smq:subscribe("news", {onmsg = function(value) record(value) end, json = true})
    """)
    site.run("for _, value in ipairs {42, true, 0.5} do smq:publish(value, 'news') end smq:publish(nil, 'news')")
    assert site.come(4) == [(42,), (True,), (0.5,), (None,)]


def test_pubon_accepts_the_server(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      smq = require"smq.hub".create()
      smq:subscribe("self", {onmsg = function(data, ptid) record(data, ptid) end})
    """)
    device = site.device()
    site.run(f"record(smq:pubon('to it', 1, {device.etid}), smq:pubon('from it', {device.etid}, 1))")
    wait_until(lambda: {(True, True), (b"to it", device.etid)} <= set(site.calls), site.calls)
    device.expect(publish(device.etid, 1, b"from it"))


def test_a_request_connects_once(lua: Callable[[str], LuaSite]) -> None:
    site = lua('smq = require"smq.hub".create()')
    pages = {
        "twice.lsp": "<?lsp app.smq:connect(request) record(pcall(app.smq.connect, app.smq, request)) ?>",
        "late.lsp": "<?lsp response:write 'x' response:flush() record(pcall(app.smq.connect, app.smq, request)) ?>",
    }
    site.server.write("", pages)
    device = Device(("127.0.0.1", site.server.port), RAW).start(target="/twice.lsp").connect(b"uid-a1")
    device.close()
    [(done, error)] = site.come(1)
    assert not done
    assert b"it is already answered; call connect once per request" in error, error
    site.calls.clear()
    with gevent.Timeout(10):
        late = Device(("127.0.0.1", site.server.port), RAW)
        late.send_bytes(b"GET /late.lsp HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\n\r\n")
        [(done, error)] = site.come(1)
    late.close()
    assert not done
    assert b"it is already answered" in error, error


@pytest.mark.parametrize("value", ["nil", "5", "'x'", "{}", "ba.socket.bind(0)", "app.smq"])
def test_what_is_no_request_is_named(lua: Callable[[], LuaSite], value: str) -> None:
    site = lua()
    for call, name in (("require'smq.hub'.isSMQ", "isSMQ"), ("app.smq.connect, app.smq", "connect")):
        site.server.write("", {"wrong.lsp": f"<?lsp record(pcall({call}, {value})) ?>"})
        site.calls.clear()
        site.server.ask("/wrong.lsp")
        [(done, error)] = site.calls
        assert not done
        assert f"bad argument #1 to '{name}' (request expected".encode() in error, error


@pytest.mark.parametrize("answer", ["true", "7", "'0'", "0.5", "-1", "{}"])
def test_nonsense_of_authenticate_is_logged(
    lua: Callable[[str], LuaSite], answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    site = lua(f'smq = require"smq.hub".create{{authenticate = function() return {answer} end}}')
    device = site.open().send(connect_packet(b"uid-a1"))
    assert device.receive()[:2] == b"\x03\x06"
    assert "authenticate of the hub made at" in caplog.text
    assert "a code from 0 to 6 is needed, not" in caplog.text
    wait_until(lambda: ": refused (" in caplog.text, caplog.text)
    assert "auth.users" not in caplog.text


def test_the_user_of_the_page_is_known(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""smq = require"smq.hub".create{onconnect = function(etid, info) record(info.uname) end}""")
    site.server.write("", {"login.lsp": "<?lsp request:login 'ada' ?>"})
    cookie = site.server.ask("/login.lsp").headers["Set-Cookie"].partition(";")[0]
    for headers, user in ((f"Cookie: {cookie}\r\n", b"ada"), ("", None)):
        site.devices.append(Device(("127.0.0.1", site.server.port), RAW))
        site.devices[-1].start(target="/smq.lsp", headers=RAW_HEADERS + headers).connect(b"uid-a1")
        assert site.come(1) == [(user,)]
        site.calls.clear()


def test_names_are_kept_in_a_file(lua: Callable[[str], LuaSite], tmp_path: Path) -> None:
    site = lua(f'smq = require"smq.hub".create{{persist = "{tmp_path}/names.db"}}')
    tid = site.device().create(b"news")
    site.run("smq:close()")
    (again,) = site.run(f'record(require"smq.hub".create{{persist = "{tmp_path}/names.db"}}:topic2tid "news")')
    assert again == tid


def test_last_values(lua: Callable[[str], LuaSite]) -> None:
    site = lua('smq = require"smq.hub".create{lastvalue = {"site1/#", "news"}}')
    site.run('smq:publish("1", "site1/a") smq:publish("2", "news") smq:publish("3", "other")')
    device = site.device()
    for name, payloads in ((b"site1/a", [b"1"]), (b"news", [b"2"]), (b"other", [])):
        device.subscribe(name)
        assert [packet[13:] for packet in device.sync()] == payloads
    site.run('smq:subscribe("news", {onmsg = function(data) record(data) end})')
    wait_until(lambda: site.calls, "the handler was called")
    assert site.calls == [(b"2",)]


def test_client_certificates(lua: Callable[[str], LuaSite], tmp_path: Path) -> None:
    site = lua("""smq = require"smq.hub".create{authenticate = function(credentials, info)
      local certificate = info.sock:certificate()
      if not certificate then record(info.sock:trusted()) return 4 end
      record(info.sock:trusted(), certificate.commonname)
      return certificate.commonname == "alice" and 0 or 5
    end}""")
    authority = Authority(tmp_path)
    context = server_context(*authority.pair("server"), authority.path)
    listener = Listener("127.0.0.1", 0, site.server.server.accepted_secure, context)
    listener.start()
    for name, code in (("alice", 0), ("mallory", 5), (None, 4)):
        own = client_context(*authority.pair(name)) if name else client_context()
        device = Device(listener.address, TLS, own).start(target="/smq.lsp").send(connect_packet(b"uid-a1"))
        assert device.receive()[1] == code
        device.close()
    listener.close()
    assert site.calls == [(True, b"alice"), (True, b"mallory"), (None, b"none")]


def test_info_is_one_table_for_both_with_the_session(lua: Callable[[str], LuaSite]) -> None:
    site = lua("""
      local seen
      smq = require"smq.hub".create{
        authenticate = function(credentials, info) seen = info return 0 end,
        onconnect = function(etid, info, peer)
          local user = info.session and info.session.who
          record(info == seen, info.sock == peer.sock, user, info.uname, info.url, info.data.b)
        end,
      }
      ba.session(1)
    """)
    site.server.write("", {"login.lsp": "<?lsp request:session(true).who = 'ada' ?>"})
    cookie = site.server.ask("/login.lsp").headers["Set-Cookie"].partition(";")[0]
    for headers, user in ((f"Cookie: {cookie}\r\n", b"ada"), ("", False)):
        site.devices.append(Device(("127.0.0.1", site.server.port), RAW))
        site.devices[-1].start(target="/smq.lsp?a=1&b=two", headers=RAW_HEADERS + headers).connect(b"uid-a1")
        assert site.come(1) == [(True, True, user, None, b"/smq.lsp", b"two")]
        site.calls.clear()


PAYLOADS = {
    "'text'": b"text",
    "'\\255'": b"\xff",
    "ba.bytearray.create('ab')": b"ab",
    "{a = 1}": b'{"a":1}',
    "{1, 2.5, true, 'x'}": b'[1,2.5,true,"x"]',
    "5": b"5",
    "-0.5": b"-0.5",
    "true": b"true",
    "nil": b"null",
    "ba.json.null": b"null",
    "0/0": b"null",
    "{0/0, 1/0}": b"[null,null]",
}


@pytest.mark.parametrize("data", PAYLOADS)
def test_payloads_follow_the_same_rules_as_in_python(lua: Callable[[], LuaSite], data: str) -> None:
    site = lua()
    device, other = site.device(), site.device(b"other-1")
    site.run(f"smq:publish({data}, {device.etid}) smq:pubon({data}, {device.etid}, {other.etid})")
    device.expect(publish(device.etid, 1, PAYLOADS[data]), publish(device.etid, other.etid, PAYLOADS[data]))


@pytest.mark.parametrize("data", ["print", "request", "smq", "coroutine.create(print)"])
def test_what_is_no_payload_is_named(lua: Callable[[], LuaSite], data: str) -> None:
    (message,) = lua().run(f"record(select(2, pcall(smq.publish, smq, {data}, 'news')))")
    assert b"bad argument #1 to 'publish' (string, table, number, boolean or nil expected, got " in message


def test_an_unknown_option_is_named_in_the_trace(
    lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    lua("\nsmq = require'smq.hub'.create{onpubish = print, [5] = 6, keepidle = 60}")
    for option in ("onpubish", "5"):
        assert f"root/.preload:2: smq.hub has no option '{option}'; it is ignored" in caplog.text
    assert "keepidle" not in caplog.text


def test_an_unknown_subscribe_option_is_traced(lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    lua("\nsmq = require'smq.hub'.create()\nsmq:subscribe('x', {onmsg = print, typo = 1, json = true})")
    assert "root/.preload:3: smq.subscribe has no option 'typo'; it is ignored" in caplog.text
    assert "json" not in caplog.text


@pytest.mark.parametrize(
    "callback", ["authenticate", "permittop", "onconnect", "onpublish", "ondrop", "onmsg", "onclose"]
)
def test_the_log_names_the_callback_and_the_hub(
    lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture, callback: str
) -> None:
    site = lua(f"\nsmq = require'smq.hub'.create{{{callback} = function() error 'on purpose' end}}")
    device = site.open().send(connect_packet(b"uid-a1"))
    if callback == "authenticate":
        device.expect_end(wire.connack(6, 0))
    else:
        device.accepted()
        device.send(b"\x04news", publish(4711, device.etid, b"x"), publish(1, device.etid, b"x")).receive()
        device.expect_nothing()
        device.close()
    wait_until(lambda: "on purpose" in caplog.text, "the log")
    assert f"error in {callback} of the hub made at root/.preload:2: root/.preload:2: on purpose" in caplog.text
    assert "'f'" not in caplog.text


def test_close_ends_clients_without_a_word(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    device = site.device()
    site.run("smq:close() smq:close()")
    device.expect_end()
    (message,) = site.run("record(select(2, pcall(smq.publish, smq, 'x', 'news')))")
    assert b"this hub has been closed" in message


@pytest.mark.parametrize("module", ["smq.broker", "smqbroker"])
def test_the_deprecated_modules(lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture, module: str) -> None:
    """Methods by dot, a random ETID, `getbroker`, `isSMQ`."""
    site = lua(f"""
      local broker = require"{module}".create{{onmsg = function(data) record(data) end}}
      smq = {{connect = function(self, ...) return broker.connect(...) end, old = broker}}
      smq.isSMQ = require"{module}".isSMQ
      broker.subscribe "news"
    """)
    device = site.device()
    device.publish(device.create(b"news"), b"hello").expect_nothing()
    assert site.calls[-1] == (b"hello",)
    etid, same, is_smq = site.run(
        "record(smq.old.gettid(), smq.old.getbroker():gettid() == smq.old.gettid(), smq.isSMQ(request))"
    )
    assert etid > 1
    assert same is True
    assert is_smq is False
    site.run(f"smq.old.publish('x', {device.etid})")
    device.expect(publish(device.etid, etid, b"x"))


def test_an_unreferenced_broker_is_collected(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    device = site.device()
    site.run("app.smq = nil smq = nil collectgarbage() collectgarbage()")
    device.expect_end()


def test_an_authentication_method(lua: Callable[[str], LuaSite]) -> None:
    """`mqttauth` asks for more, accepts and rejects; the peer table is the same one until the client is gone."""
    site = lua(
        """
smq = require"smq.hub".create{
  mqtt = true,
  authenticate = function() return 3 end,
  mqttauth = function(method, data, peer)
    record(method, data, peer.sum)
    if method ~= "sum" then return end
    if data == "" then peer.sum = "5" return "2+3" end
    if data == "error" then error "on purpose" end
    if data == "number" then return 5 end
    if data == peer.sum then return true, "right", "ada" end
    return false, "wrong"
  end,
}
"""
    )

    def got(*packets: str) -> bytes:
        """The body of what comes after packets of a new client."""
        device = Device(("127.0.0.1", site.server.port), WS)
        site.devices.append(device)
        headers = f"{WS_HEADERS}Sec-WebSocket-Protocol: mqtt\r\n"
        device.send_bytes(request(headers, target="/smq.lsp?b=two")).read_head()
        for packet in packets:
            device.send_bytes(masked(data_of(packet, 5)))
            answer = device.receive()
        return answer

    first = "10: M V 02 00 00 { 15 'sum' } 'a'"
    assert got(first) == data_of("f0: 18 { 15 'sum' 16 '2+3' }", 5)
    assert b"right" in got(first, "f0: 18 { 15 'sum' 16 '5' }")
    assert got(first, "f0: 18 { 15 'sum' 16 '6' }") == data_of("20: 00 87 { 1f 'wrong' }", 5)
    assert got(first, "f0: 18 { 15 'sum' 16 'error' }") == data_of("20: 00 87 P", 5)
    assert got(first, "f0: 18 { 15 'sum' 16 'number' }") == data_of("20: 00 87 P", 5)
    assert got("10: M V 02 00 00 { 15 'other' } 'a'")[2:4] == b"\0\x8c"
    assert site.calls[1:3] == [(b"sum", b"", None), (b"sum", b"5", b"5")]
    for device in site.devices:
        device.close()
    wait_until(lambda: not [one for one in site.half.clients.sessions.values() if one is not site.broker.server])
