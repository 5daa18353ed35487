"""Statements of the documents about a hub (spec: smq §2, §12) that no other test of Lua holds; tests/conformance lists
all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.apps.lua.lua_hub import LuaSite
from tests.support.device import RAW_HEADERS, WS_HEADERS, Ack, Device, connect_packet, publish, request
from tests.support.waiting import wait_until

CREATE = 'smq = require"smq.hub".create'

# ---- without clients

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a wanted tid": (
        "record(smq:create('a', 7), smq:create('a', 8), smq:create('b', 7) == 7, smq:create('c', 0) > 1)",
        (7, 7, False, True)),
    "the server's ETID is not a topic's": ("record(smq:create('a', 1) > 1, smq:tid2topic(1))", (True, None)),
    "a wanted stid": (
        "record(smq:createsub('a', 7), smq:createsub('a', 8), smq:createsub('b', 7) == 7, smq:createsub('c', 0) > 0)",
        (7, 7, False, True)),
    "two number spaces": ("record(smq:create('a', 7), smq:createsub('b', 7))", (7, 7)),
    "random numbers": (
        "local other = require'smq.hub'.create() "
        "record(smq:create 'x' ~= other:create 'x', smq:createsub 'x' ~= other:createsub 'x', "
        "smq:create 'x' == smq:create 'x', smq:createsub 'x' == smq:createsub 'x')", (True, True, True, True)),
    "look-ups create nothing": (
        "record(smq:topic2tid 'x', smq:subtopic2tid 'x', smq:tid2topic(5), smq:tid2subtopic(5), "
        "(smq:topics()()), (smq:subtopics()()))", (None,) * 6),
    "subtopics": ("smq:createsub('s', 9) record(smq:subtopics()())", (9, b"s")),
    "topics": ("smq:create('t', 9) smq:createsub 's' record(smq:topics()())", (9, b"t")),
    "publish creates names": (
        "smq:publish('x', 'new', 'sub') record(smq:topic2tid 'new' ~= nil, smq:subtopic2tid 'sub' ~= nil)",
        (True, True)),
    "the largest payload": (
        "record((pcall(smq.publish, smq, ('x'):rep(65520), 'a')), (pcall(smq.publish, smq, ('x'):rep(65521), 'a')))",
        (True, False)),
    "a sub-topic of pubon is a number": (
        "record((pcall(smq.pubon, smq, 'x', 5, 6, 0)), (pcall(smq.pubon, smq, 'x', 5, 6, 'sub')))", (True, False)),
    "pubon to or from nobody": ("record(smq:pubon('x', 5, 1, 0), smq:pubon('x', 1, 5, 0))", (False, False)),
    "subscribe gives the tid": ("record(smq:subscribe 'a' == smq:topic2tid 'a', smq:subscribe 'self')", (True, 1)),
    "unsubscribe creates nothing": ("smq:unsubscribe 'a' smq:unsubscribe(5) record((smq:topics()()))", (None,)),
    "observe creates": ("record(smq:observe('a', print), smq:topic2tid 'a' ~= nil)", (True, True)),
    "unobserve creates nothing": ("smq:unobserve 'a' smq:unobserve(5) record((smq:topics()()))", (None,)),
    "queuesize": ("record(require'smq.hub'.create{queuesize = 3}:queuesize())", (3, 0)),
    "rndtid": (
        "local function etid() return require'smq.hub'.create{rndtid = true}:gettid() end "
        "record(etid() > 1, etid() ~= etid())", (True, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(lua: Callable[[], LuaSite], name: str) -> None:
    source, expected = CALLS[name]
    assert lua().run(source) == expected


@pytest.mark.parametrize(("headers", "expected"), [(RAW_HEADERS, True), (WS_HEADERS, True), ("", False)])
def test_isSMQ(lua: Callable[[], LuaSite], headers: str, expected: bool) -> None:
    site = lua()
    site.server.write("", {"is.lsp": "<?lsp record(require'smq.hub'.isSMQ(request)) ?>"})
    device = Device(("127.0.0.1", site.server.port)).send_bytes(request(headers, target="/is.lsp")).read_head()
    device.close()
    assert site.calls == [(expected,)]


# ---- callbacks


@pytest.mark.parametrize("code", range(1, 7))
def test_authenticate_refuses(lua: Callable[[str], LuaSite], code: int) -> None:
    site = lua(CREATE + f'{{authenticate = function() return {code}, "because {code}" end}}')
    site.open().send(connect_packet()).expect_end(wire.connack(code, 0, b"because %d" % code))


def test_authenticate_accepts_without_a_text(lua: Callable[[str], LuaSite]) -> None:
    lua(CREATE + '{authenticate = function() return 0, "welcome" end}').device()


def test_a_refused_newcomer_leaves_the_old_session_alone(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """{
      authenticate = function(credentials) return credentials == "" and 0 or 3 end,
      onclose = function() record "onclose" end,
    }"""
    )
    old = site.device()
    tid = old.subscribe(b"news")
    site.open().send(connect_packet(b"uid-a1", b"wrong")).expect_end(wire.connack(3, 0))
    old.publish(tid, b"still").expect(publish(tid, old.etid, b"still"))
    assert site.calls == []


def test_what_info_has(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        "argument = 5 "
        + CREATE
        + """{authenticate = function(credentials, info)
      for key, value in pairs(info) do if value == credentials then record(key) end end
      record(info.seed, info.arg, info.url, info.uid, info.info, info.data.b, info.header.SimpleMQ,
        info.sock:peername())
      return 0
    end}"""
    )
    device = site.device(credentials=b"secret", info=b"a device")
    address = device.sock.getsockname()
    facts = (device.seed, 5, b"/smq.lsp", b"uid-a1", b"a device", b"two", b"1", address[0].encode(), address[1], False)
    assert site.calls == [facts]


def test_permittop(lua: Callable[[str], LuaSite]) -> None:
    """Not for the server, and not for a repeated Subscribe."""
    site = lua(
        CREATE
        + """{permittop = function(topic, issub, peer)
      record(topic, issub, peer.uid)
      return topic ~= "no"
    end}
    smq:create "no" smq:subscribe "no" smq:publish("x", "no") smq:observe("no", print)"""
    )
    assert site.calls == []
    device = site.device()
    for kind, ack in ((Type.SUBSCRIBE, Type.SUBACK), (Type.CREATE, Type.CREATEACK)):
        assert device.ask(kind, b"no") == Ack(ack, True, 0, b"no")
        assert not device.ask(kind, b"news").denied
        assert not device.ask(kind, b"news").denied
    asked = [(b"no", True), (b"news", True), (b"no", False), (b"news", False), (b"news", False)]
    assert site.calls == [(*one, b"uid-a1") for one in asked]


def test_permitsubtop(lua: Callable[[str], LuaSite]) -> None:
    """Asked while the name is unknown; what is denied is not created."""
    site = lua(
        CREATE
        + """{permitsubtop = function(subtopic, peer)
      record(subtopic, peer.uid)
      return subtopic ~= "no" or nil
    end}
    smq:createsub "known" """
    )
    device = site.device()
    for name in (b"known", b"new", b"new"):
        device.createsub(name)
    assert device.ask(Type.CREATESUB, b"no") == Ack(Type.CREATESUBACK, True, 0, b"no")
    assert site.calls == [(b"new", b"uid-a1"), (b"no", b"uid-a1")]
    assert site.run("record(smq:subtopic2tid 'no')") == (None,)


def test_a_denied_topic_is_not_created(lua: Callable[[str], LuaSite]) -> None:
    site = lua(CREATE + "{permittop = function() end}")
    device = site.device()
    for kind in (Type.SUBSCRIBE, Type.CREATE):
        assert device.ask(kind, b"no").denied
    assert site.run("record((smq:topics()()))") == (None,)


def test_onconnect_comes_behind_connack(lua: Callable[[str], LuaSite]) -> None:
    """A message that it sends to the client arrives."""
    site = lua(CREATE + '{onconnect = function(etid) smq:publish("welcome", etid) end}')
    device = site.device()
    device.expect(publish(device.etid, 1, b"welcome"))


def test_onclose_runs_before_observers_are_notified(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """{
      onconnect = function(etid) smq:observe(etid, function(...) record(...) end) end,
      onclose = function(etid) record("onclose", etid) end,
    }
    smq:observe("news", function(...) record(...) end)"""
    )
    device = site.device()
    device.subscribe(b"news")
    device.disconnect()
    assert site.come(4) == [(1, b"news"), (b"onclose", device.etid), (0, b"news"), (0, device.etid)]


def test_onclose_is_for_accepted_clients(lua: Callable[[str], LuaSite]) -> None:
    site = lua(CREATE + "{authenticate = function() return 3 end, onclose = function() record 'onclose' end}")
    site.open().send(connect_packet()).expect_end(wire.connack(3, 0))
    site.open().close()
    wait_until(lambda: not site.broker.sessions)
    assert site.calls == []


def test_onpublish_and_ondrop_see_what_the_server_publishes(lua: Callable[[str], LuaSite]) -> None:
    """As text, also a table; what is swallowed is not dropped."""
    site = lua(
        CREATE
        + """{
      onpublish = function(data, ptid, tid, subtid, peer)
        record("onpublish", type(data), data, ptid, tid, subtid, peer.uid)
        return data ~= "no"
      end,
      ondrop = function(data, ptid, tid, subtid, peer) record("ondrop", data, ptid, tid, subtid, peer.uid) end,
    }
    smq:create("nobody", 77)"""
    )
    site.run("smq:publish({a = 1}, 'nobody', 5) smq:publish('no', 'nobody') smq:publish('lost', 4711)")
    server = b"SMQ server client"
    assert site.calls == [
        (b"onpublish", b"string", b'{"a":1}', 1, 77, 5, server), (b"ondrop", b'{"a":1}', 1, 77, 5, server),
        (b"onpublish", b"string", b"no", 1, 77, 0, server),
        (b"onpublish", b"string", b"lost", 1, 4711, 0, server), (b"ondrop", b"lost", 1, 4711, 0, server),
    ]  # fmt: skip


def test_ondrop_when_the_only_receiver_left_before(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """{
      onpublish = function() record "onpublish" ba.sleep(50) return true end,
      ondrop = function(data) record("ondrop", data) end,
    }"""
    )
    publisher, reader = site.device(b"publisher"), site.device(b"reader")
    tid = reader.subscribe(b"news")
    publisher.publish(tid, b"x")
    site.come(1)
    reader.disconnect()
    assert site.come(2) == [(b"onpublish",), (b"ondrop", b"x")]


def test_onpublish_is_called_once_for_an_assembled_message(lua: Callable[[str], LuaSite]) -> None:
    site = lua(CREATE + "{onpublish = function(data) record(data) return true end}")
    device = site.device()
    parts = [(0, b"a, "), (device.etid, b"b")]
    device.send(*(publish(tid, device.etid, data, kind=Type.PUBFRAG) for tid, data in parts))
    device.expect(publish(device.etid, device.etid, b"a, b"))
    assert site.calls == [(b"a, b",)]


def test_log_gets_a_socket_and_a_text(lua: Callable[[str], LuaSite]) -> None:
    site = lua(CREATE + "{log = function(sock, text) record(sock and sock:owner(), text) end}")
    device = site.device()
    device.publish(1, b"x").expect_nothing()
    device.send(b"\xff").expect_end()
    (nobody, client) = site.come(2)
    assert nobody == (None, b"no handler for a message to 1 from %d: dropping it" % device.etid)
    assert client[0] is not None
    assert client[1].startswith(b"closed: ")


def test_without_log_it_is_hidden(lua: Callable[[], LuaSite], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    lua().device().publish(1, b"x").expect_nothing()
    (line,) = [one for one in caplog.records if "no handler for a message to 1 from" in one.getMessage()]
    assert line.levelname == "DEBUG"


# ---- options

KEEP_ALIVE = {
    "": (230, 23),
    "keepidle = 100": (100, 10),
    "keepidle = 20": (20, 3),
    "keepidle = 50, keepintv = 7": (50, 7),
}


def keep_alive(site: LuaSite, uid: bytes) -> tuple[int, ...]:
    sock = (site.device(uid), site.broker.uids[uid].outbox.sock)[1]
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return tuple(sock.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL))


@pytest.mark.parametrize("options", KEEP_ALIVE)
def test_keep_alive(lua: Callable[[str], LuaSite], options: str) -> None:
    assert keep_alive(lua(CREATE + f"{{{options}}}"), b"uid-a1") == KEEP_ALIVE[options]


def test_setkeepalive(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    for arguments, expected in (("20", (20, 20)), ("50, 7", (50, 7))):
        site.run(f"smq:setkeepalive({arguments})")
        assert keep_alive(site, b"uid-%s" % arguments.encode()) == expected


def test_readtmo(lua: Callable[[str], LuaSite]) -> None:
    site = lua(CREATE + "{readtmo = 50}")
    site.open().expect_end(wire.connack(2, 0))


def test_readtmo_by_default(lua: Callable[[], LuaSite]) -> None:
    assert lua().broker._admission.readtmo_ms == 4000


def test_messages_beyond_the_publish_queue_are_dropped_and_logged(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """{
      queuesize = 3, log = function(sock, text) record(text) end,
      onpublish = function() ba.sleep(1) return true end,
    }
    function go(etid) for number = 0, 5 do record(smq:publish(tostring(number), etid)) end end"""
    )
    device = site.device()
    site.run(f"app.go({device.etid}) record(smq:queuesize())")
    full = b"publish queue full (3): a message to %d was dropped" % device.etid
    assert site.come(9) == [(0,), (1,), (2,), (3,), (full,), (3,), (full,), (3,), (0, 3)]
    device.expect(*(publish(device.etid, 1, b"%d" % number) for number in range(4)))
    wait_until(lambda: site.broker.queuesize() == (3, 0), "room in the queue")


# ---- connect


@pytest.mark.parametrize("code", [0, 3])
def test_connect_returns_nothing_when_the_handshake_is_over(lua: Callable[[str], LuaSite], code: int) -> None:
    site = lua(CREATE + f"{{authenticate = function() record 'asked' return {code} end}}")
    site.server.write("", {"smq.lsp": "<?lsp record(select('#', app.smq:connect(request))) ?>"})
    device = site.open()
    gevent.sleep(0.01)
    assert site.calls == []
    device.send(connect_packet())
    assert site.come(2) == [(b"asked",), (0,)]


# ---- the server's own client


def test_publish(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    device, other = site.device(), site.device(b"other-1")
    tid = device.subscribe(b"news")
    site.run(f"""local stid = smq:createsub("sub", 9)
      smq:publish("1", "news") smq:publish("2", {tid}) smq:publish("3", {device.etid}) smq:publish({{a = 1}}, "news")
      smq:publish("4", "news", "sub") smq:publish("5", "news", 8) smq:publish("6", "news", nil, 4711)""")
    device.expect(
        publish(tid, 1, b"1"), publish(tid, 1, b"2"), publish(device.etid, 1, b"3"), publish(tid, 1, b'{"a":1}'),
        publish(tid, 1, b"4", 9), publish(tid, 1, b"5", 8), publish(tid, 4711, b"6"),
    )  # fmt: skip
    other.expect_nothing()


def test_the_order_of_handlers(lua: Callable[[str], LuaSite]) -> None:
    """Sub-topic handler, then the topic's catch-all, then the global one; of two of a kind the last."""
    site = lua(
        CREATE
        + """()
      local function to(name) return function(...) record(name, ...) end end
      smq:onmsg(to "replaced") smq:onmsg(to "global")
      smq:subscribe("news", {onmsg = to "all"})
      smq:subscribe("news", {onmsg = to "replaced", subtopic = "sub"})
      smq:subscribe(smq:topic2tid "news", {onmsg = to "sub", subtopic = "sub"})
      smq:subscribe("news", {onmsg = to "number", subtopic = 9})
      smq:subscribe "other"
      smq:subscribe("self", {onmsg = to "self", subtopic = "mine"})
    """
    )
    sub, mine = (site.broker.subtopic2tid(name) for name in (b"sub", b"mine"))
    news, other = (site.broker.topic2tid(name) for name in (b"news", b"other"))
    device = site.device()
    device.publish(news, b"1", sub).publish(news, b"2", 9).publish(news, b"3").publish(news, b"4", 99)
    device.publish(other, b"5", sub).publish(1, b"6", mine).publish(1, b"7").expect_nothing()
    etid = device.etid
    assert site.come(7) == [
        (b"sub", b"1", etid, news, sub), (b"number", b"2", etid, news, 9), (b"all", b"3", etid, news, 0),
        (b"all", b"4", etid, news, 99), (b"global", b"5", etid, other, sub), (b"self", b"6", etid, 1, mine),
        (b"global", b"7", etid, 1, 0),
    ]  # fmt: skip


def test_the_server_gets_what_it_publishes_itself(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """()
      smq:subscribe("news", {onmsg = function(...) record(...) end})
      smq:subscribe("self", {onmsg = function(...) record(...) end})"""
    )
    device = site.device()
    tid = device.subscribe(b"news")
    site.run("smq:publish('x', 'news') smq:publish('y', 'self')")
    device.expect(publish(tid, 1, b"x")).expect_nothing()
    assert site.come(2) == [(b"x", 1, tid, 0), (b"y", 1, 1, 0)]


def test_what_is_no_json_is_logged(lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    site = lua(CREATE + "() smq:subscribe('news', {json = true, onmsg = print})")
    site.run("smq:publish('no json', 'news')")
    wait_until(lambda: "is not JSON; it is delivered to the global onmsg" in caplog.text, caplog.text)


def test_unsubscribe_forgets_the_handlers(lua: Callable[[str], LuaSite]) -> None:
    site = lua(
        CREATE
        + """{onmsg = function(data) record("global", data) end}
      local function old() record "old" end
      smq:subscribe("news", {onmsg = old, subtopic = 1})
      smq:subscribe("news", {onmsg = old})
      smq:unsubscribe "news" """
    )
    site.run("smq:publish('1', 'news') smq:subscribe 'news' smq:publish('2', 'news', 1) smq:publish('3', 'news')")
    assert site.come(2) == [(b"global", b"2"), (b"global", b"3")]


def test_observe(lua: Callable[[str], LuaSite]) -> None:
    """No first call; each change, with the name; the server counts; the newest function; until unobserve."""
    site = lua(
        CREATE
        + """()
      smq:observe("news", function() record "replaced" end)
      smq:observe("news", function(...) record(...) end)"""
    )
    site.run("smq:subscribe 'news'")
    device = site.device()
    tid = device.subscribe(b"news")
    assert site.come(2) == [(1, b"news"), (2, b"news")]
    device.send(wire.with_id(Type.OBSERVE, tid)).expect(wire.change(tid, 2))
    site.run("smq:unsubscribe 'news'")
    device.expect(wire.change(tid, 1))
    assert site.come(1) == [(1, b"news")]
    site.run("smq:unobserve 'news' smq:subscribe 'news'")
    device.expect(wire.change(tid, 2))
    site.run("smq:publish('still', 'news')")
    device.expect(publish(tid, 1, b"still")).expect_nothing()
    assert site.calls == []


def test_observe_an_etid(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    device = site.device()
    assert site.run(f"record(smq:observe({device.etid}, function(...) record(...) end))") == (True,)
    device.disconnect()
    assert site.come(2)[1:] == [(0, device.etid)]
    assert not site.broker._observers
    assert site.run(f"record(smq:observe({device.etid}, print))") == (None,)


# ---- management


def test_peers(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    devices = [site.device(uid) for uid in (b"uid-a1", b"uid-b1")]
    site.run("""for sock, peer in smq:peers() do
      record(peer.uid, peer.tid, peer.sock == sock, smq:sock2peer(sock) == peer)
    end""")
    expected = [(b"SMQ server client", 1), (b"uid-a1", devices[0].etid), (b"uid-b1", devices[1].etid)]
    assert sorted(site.calls) == [(*one, True, True) for one in expected]


SHUTDOWNS: dict[str, tuple[list[bytes] | None, list[bytes] | None]] = {
    "": ([], []),
    "'bye'": ([wire.disconnect(b"bye")], [wire.disconnect(b"bye")]),
    "'bye', ETID": ([wire.disconnect(b"bye")], None),
    "nil, ETID": ([], None),
    "'bye', 4711": (None, None),
}
"""What the client with the ETID and another one get before their connections end; None: they stay."""


@pytest.mark.parametrize("arguments", SHUTDOWNS)
def test_shutdown(lua: Callable[[], LuaSite], arguments: str) -> None:
    site = lua()
    devices = site.device(), site.device(b"other-1")
    site.run(f"smq:shutdown({arguments.replace('ETID', str(devices[0].etid))})")
    for device, packets in zip(devices, SHUTDOWNS[arguments], strict=True):
        device.expect_nothing() if packets is None else device.expect_end(*packets)


@pytest.mark.parametrize("module", ["smq.broker", "smqbroker"])
def test_a_deprecated_module_says_so(
    lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture, module: str
) -> None:
    caplog.set_level("DEBUG")
    lua(f'smq = require"{module}".create()')
    assert 'require "smq.broker" is deprecated: use require "smq.hub"' in caplog.text
