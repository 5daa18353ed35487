"""`require"smq.client"`: an application in Lua as a client of a real broker."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import gevent
import pytest

from smqrt.apps.lua.api import smq_client
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from smqrt.client import SmqClient
from smqrt.clients.backoff import Backoff
from smqrt.transport.tls_contexts import self_signed_pair
from smqrt.wire import smq as wire
from tests.apps.lua.recorder import Recorder
from tests.conftest import free_port
from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker
from tests.support.pki import server_context
from tests.support.scripted_broker import ScriptedBroker
from tests.support.waiting import let_others_run, wait_until

PRELUDE = """
local create = require "smq.client".create
clients = {}
function connect(op, setup)
  local smq = create(url, op)
  clients[#clients + 1] = smq
  if setup then setup(smq) end
  return smq
end
function note(name)
  return function(...) test.record(name, ...) end
end
"""


@pytest.fixture
def start_broker() -> Iterator[Callable[..., LocalBroker]]:
    with Factory(LocalBroker) as start:
        yield start


@pytest.fixture
def lua(vm: Vm, recorder: Recorder) -> Iterator[Callable[..., None]]:
    """Run Lua with `connect`, `note` and `url`; the clients are closed after the test."""
    smq_client.install_smq_client(vm, Services())

    def run(source: str, url: str) -> None:
        vm.eval(f"url = {url!r}\n" + PRELUDE + source, "@app/.preload")

    yield run
    vm.eval("for _, smq in ipairs(clients or {}) do smq:close() end")
    let_others_run()


def seen(recorder, name):
    return [entry[1:] for entry in recorder.seen if isinstance(entry, tuple) and entry[0] == name]


def test_connect_subscribe_publish(lua, start_broker, recorder):
    broker = start_broker()
    lua(
        """
        local smq = connect({uid = "lua-client-1", info = "me"})
        smq.onconnect = function(etid, rnd, ip)
          test.record("connect", etid == smq:gettid(), rnd > 0, ip)
          smq:subscribe("topic", "sub", {
            onack = function(accepted, topic, tid, subtopic, stid)
              test.record("ack", accepted, topic, tid == smq:topic2tid("topic"), subtopic, smq:tid2subtopic(stid))
              smq:publish({a = 1}, "topic", "sub")
            end,
            onmsg = function(data, ptid, tid, subtid)
              test.record("msg", data.a, ptid == smq:gettid(), smq:tid2topic(tid), subtid == smq:subtopic2tid("sub"))
            end,
            datatype = "json"})
        end
        test.record("type", type(smq), smq:gettid())
        """,
        broker.url,
    )
    wait_until(lambda: seen(recorder, b"msg"))
    assert recorder.seen == [
        (b"type", b"userdata", None),
        (b"connect", True, True, b"127.0.0.1"),
        (b"ack", True, b"topic", True, b"sub", b"sub"),
        (b"msg", 1, True, b"topic", True),
    ]
    peers = {peer.uid: peer.info for _, peer in broker.smq.peers()}
    assert b"lua-client-1" in peers or "lua-client-1" in peers


def test_nothing_may_be_asked_before_the_connection(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        test.record("before", smq:create("a"), smq:createsub("s"), smq:publish("x", "a"), smq:subscribe("a"),
          smq:topic2tid("a"))
        """,
        start_broker().url,
    )
    assert seen(recorder, b"before") == [(False, False, False, False, None)]


def test_credentials_and_refusal(lua, start_broker, recorder):
    broker = start_broker(authenticate=lambda credentials, info: 0 if credentials == b"42-127.0.0.1" else 3)
    lua(
        """
        local good, bad = connect(), connect()
        good.onauth = function(rnd, ip) return 42 .. "-" .. ip end
        good.onconnect = note "good"
        bad.onclose = note "bad"
        """,
        broker.url,
    )
    wait_until(lambda: seen(recorder, b"good") and seen(recorder, b"bad"))
    assert seen(recorder, b"bad") == [(b"incorrect credentials", False, None)]


def test_messages_without_a_handler_and_data_of_any_kind(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        smq.onmsg = function(data) test.record("msg", data) end
        function smq.onconnect()
          smq:subscribe("self")
          smq:subscribe("json", {datatype = "json", onmsg = function(data) test.record("json", data) end})
          smq:publish(1.5, "self") smq:publish(true, smq:gettid())
          smq:publish("\\0\\255", "self") smq:publish({1, 2}, "self")
          smq:publish("{broken", "json")
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: seen(recorder, b"json"))
    assert seen(recorder, b"msg") == [(b"1.5",), (b"true",), (b"\0\xff",), (b"[1,2]",)]
    assert seen(recorder, b"json") == [(b"{broken",)]


def test_create_in_its_forms(lua, start_broker, recorder):
    broker = start_broker(permittop=lambda topic, issub, peer: topic != "secret")
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          test.record("now", smq:create("a", note "a"), smq:createsub("s", note "s"))
          smq:create("b", "t", note "both")
          smq:create("secret", note "secret")
          smq:create("secret", "t", note "denied")
        end
        """,
        broker.url,
    )
    wait_until(lambda: seen(recorder, b"denied"))
    ids = broker.smq
    assert seen(recorder, b"now") == [(True, True)]
    assert seen(recorder, b"a") == [(True, b"a", ids.topic2tid("a"))]
    assert seen(recorder, b"s") == [(True, b"s", ids.subtopic2tid("s"))]
    assert seen(recorder, b"both") == [(True, b"b", ids.topic2tid("b"), b"t", ids.subtopic2tid("t"))]
    assert seen(recorder, b"secret") == [(False, b"secret", 0)]
    assert seen(recorder, b"denied") == [(False, b"secret", 0, b"t", ids.subtopic2tid("t"))]


def test_names_resolved_earlier_are_still_subscribed_at_the_broker(lua, start_broker, recorder):
    broker = start_broker()
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:publish("lost", "b")
          smq:create("a", function()
            local op = {onmsg = note "msg", onack = note "ack"}
            smq:subscribe("a", op) smq:subscribe("b", op)
          end)
        end
        """,
        broker.url,
    )
    wait_until(lambda: len(seen(recorder, b"ack")) == 2)
    broker.smq.publish("1", "a")
    broker.smq.publish("2", "b")
    wait_until(lambda: len(seen(recorder, b"msg")) == 2)


def test_request_waits_for_the_answer(lua, start_broker, recorder):
    broker = start_broker(onmsg=lambda data, ptid, tid, subtid: broker.smq.publish(b"re:" + data, ptid, subtid))
    lua(
        """
        local smq = connect()
        test.record("before", smq:request(1, "x"))
        local _, message = pcall(smq.request, smq, 1, "x", 0)
        test.record("bad", message, select(2, pcall(smq.request, smq, "name", "x")))
        smq.onconnect = function(etid)
          local answer = smq:request(1, {a = 1}) -- also in a callback
          test.record("answer", answer)
          test.record("none", smq:request(12345, "x", 50))
          smq:close()
          test.record("closed", smq:request(1, "x"))
        end
        smq.onmsg = note "message"
        """,
        broker.url,
    )
    wait_until(lambda: seen(recorder, b"closed"))
    not_connected = (None, b"the client is not connected")
    assert (seen(recorder, b"before"), seen(recorder, b"closed")) == ([not_connected], [not_connected])
    assert seen(recorder, b"answer") == [(b're:{"a":1}',)]
    assert seen(recorder, b"none") == [(None, b"no answer from 12345 in 0.05 s")]
    assert seen(recorder, b"message") == []
    [bad] = seen(recorder, b"bad")
    assert b"3600000 ms at most, and more than 0" in bad[0]
    assert b"bad argument #1 to 'request'" in bad[1]


def test_observe_and_unsubscribe_need_known_names(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          test.record("error", pcall(smq.observe, smq, "unknown", print))
          test.record("error", pcall(smq.unsubscribe, smq, "unknown"))
          smq:observe(smq:gettid(), note "own")
          smq:create("room", function()
            smq:observe("room", note "room")
            smq:subscribe("room", {onack = function() smq:unsubscribe("room") end})
          end)
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: len(seen(recorder, b"room")) == 3)
    assert seen(recorder, b"room") == [(0, b"room"), (1, b"room"), (0, b"room")]
    for (ok, message), name in zip(seen(recorder, b"error"), (b"observe", b"unsubscribe"), strict=True):
        assert not ok
        assert b"unknown topic 'unknown'" in message
        assert name in message
    assert seen(recorder, b"own") == []


def test_reconnect_as_onclose_says_with_a_clean_start(lua, start_broker, recorder):
    broker = start_broker()
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          test.record("connect", smq:topic2tid("t"))
          smq:subscribe("t", {onmsg = note "msg", onack = note "ack"})
        end
        function smq.onclose(...) test.record("close", ...) return 20 end
        """,
        broker.url,
    )
    wait_until(lambda: len(seen(recorder, b"ack")) == 1)
    port = broker.port
    broker.close()
    broker = start_broker(port=port)
    wait_until(lambda: len(seen(recorder, b"ack")) == 2)
    broker.smq.publish("hello", "t")
    wait_until(lambda: len(seen(recorder, b"msg")) == 1)
    assert seen(recorder, b"connect") == [(None,), (None,)]
    assert seen(recorder, b"close")[0] == (b"socketclosed", True, None)


def test_onreconnect_is_preferred_and_a_disconnect_has_no_error(lua, start_broker, recorder):
    def script(conversation):
        conversation.accept()
        conversation.send(wire.disconnect(b"go"))
        conversation.wait_closed()

    with ScriptedBroker(script, lambda c: (c.accept(), c.acks())) as broker:
        lua(
            """
            local smq = connect()
            smq.onconnect, smq.onreconnect = note "connect", note "reconnect"
            function smq.onclose(...) test.record("close", ...) return 1 end
            """,
            broker.url,
        )
        wait_until(lambda: seen(recorder, b"reconnect"))
        assert seen(recorder, b"close") == [(None, False, b"go")]
        assert len(seen(recorder, b"connect")) == 1


def test_without_onclose_a_client_stays_away(lua, recorder):
    with ScriptedBroker(lambda c: c.accept()) as broker:
        lua("connect().onconnect = note 'connect'", broker.url)
        wait_until(lambda: broker.results)
        gevent.sleep(0.1)  # it would be back in that time
        assert broker.connections == 1


def test_ping_and_pong(lua, recorder):
    with ScriptedBroker(lambda c: (c.accept(), c.wait_closed())) as broker:
        lua("connect({ping = 0.05, pong = 0.05}).onclose = note 'close'", broker.url)
        wait_until(lambda: seen(recorder, b"close"))
        assert seen(recorder, b"close") == [(b"pong", True, None)]


def test_headers_and_what_is_no_broker(lua, recorder):
    heads = []

    def script(conversation):
        heads.append(conversation.read_head())
        conversation.raw(b"HTTP/1.1 404 Not Found\r\n\r\n")

    with ScriptedBroker(script) as broker:
        lua(
            "local op = {header = {['X-Key'] = 'abc'}, user = 'joe', password = 'secret', timeout = 500}\n"
            "connect(op).onclose = note 'close'",
            broker.url,
        )
        wait_until(lambda: seen(recorder, b"close"))
    assert seen(recorder, b"close") == [(b"nonsmq", False, None)]
    assert "\r\nX-Key: abc" in heads[0]
    assert "\r\nAuthorization: Basic am9lOnNlY3JldA==" in heads[0]


def test_a_callback_may_block_and_the_order_stays(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:subscribe("self", {onmsg = function(data)
            if data == "1" then test.sleep(0.03) end
            test.record("msg", data)
          end})
          for n = 1, 3 do smq:publish(tostring(n), "self") end
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: len(seen(recorder, b"msg")) == 3)
    assert seen(recorder, b"msg") == [(b"1",), (b"2",), (b"3",)]


def test_callback_errors_are_traced_with_file_and_line(lua, start_broker, recorder, caplog):
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:subscribe("self", {onmsg = function(data)
            if data == "bad" then error "oops" end
            test.record("msg", data)
          end})
          smq:publish("bad", "self") smq:publish("good", "self")
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: seen(recorder, b"msg"))
    assert "app/.preload:" in caplog.text
    assert "oops" in caplog.text
    assert "stack traceback" in caplog.text


def test_close_is_quiet_and_after_what_was_published(lua, start_broker, recorder):
    broker, got = start_broker(), []
    broker.smq.subscribe("last words", onmsg=lambda data, *_: got.append(data))
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:publish("good bye", "last words")
          smq:close()
        end
        smq.onclose = note "close"
        """,
        broker.url,
    )
    wait_until(lambda: got == [b"good bye"])
    let_others_run()
    assert seen(recorder, b"close") == []


def test_wrong_arguments_are_errors_at_the_caller_line(lua, vm, recorder):
    for source, word in [
        ("create(5.5, 5)", "create"),
        ("create('ftp://x/')", "ftp://x/"),
        ("create('http://x/', {uid = 'short'})", "uid"),
        ("create('http://x/', {ping = 'a'})", "ping"),
        ("create('http://x/', {header = {['A\\n'] = 'b'}})", "headers"),
        ("connect().publish('x', 'y')", "called with|bad self|its methods"),
        ("connect():subscribe(nil)", "subscribe"),
        ("connect():subscribe('t', {onmsg = 5})", "onmsg"),
        ("connect():create({})", "create"),
    ]:
        with pytest.raises(LuaError, match=word) as caught:
            lua(source, "http://127.0.0.1:1/")
        assert "app/.preload:" in caught.value.message


def test_references_are_given_back(lua, vm, start_broker, recorder):
    lua(
        """
        smq = connect()
        function smq.onconnect()
          for n = 1, 200 do smq:subscribe("t" .. n % 4, {onmsg = function() end, onack = function() end}) end
          smq:create("end", note "end")
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: seen(recorder, b"end"))
    vm.eval("weak = setmetatable({function() end}, {__mode = 'v'}) smq:observe('t1', weak[1]) smq:unobserve('t1')")

    def is_given_back() -> bool:
        gc.collect()
        return vm.eval("collectgarbage() return weak[1] == nil") == (True,)

    wait_until(is_given_back)


APPLICATION = """
local smq = require "smq.client".create(os.getenv "BROKER", {uid = "lua-application"})
function smq.onconnect()
  smq:subscribe("question", {datatype = "json", onmsg = function(question, ptid)
    smq:publish({sum = question.a + question.b}, ptid)
  end, onack = function() print "ready" end})
end
function smq.onclose(err, canreconnect) return canreconnect end
function onunload() smq:close() end
"""


def test_an_application_is_a_client_of_another_server(serve, start_broker, tmp_path):
    broker = start_broker()
    (tmp_path / ".preload").write_text(APPLICATION)
    served = serve(tmp_path, env={"BROKER": broker.ws_url})
    wait_until(lambda: "ready" in served.output)
    answers = []
    with SmqClient(broker.url) as client:
        client.subscribe("self", onmsg=lambda data, *_: answers.append(data), datatype="json")
        client.publish({"a": 40, "b": 2}, "question")
        wait_until(lambda: answers)
    assert answers == [{"sum": 42}]
    served.stop()
    wait_until(lambda: not [peer.uid for _, peer in broker.smq.peers() if "lua" in str(peer.uid)])


FAREWELL = """
local smq = require "smq.client".create(os.getenv "BROKER")
function smq.onconnect() print "ready" end
function onunload()
  for n = 1, 500 do smq:publish(tostring(n), "last words") end
  if CLOSES then smq:close() end
end
"""


@pytest.mark.parametrize("closes", ["true", "false"])
def test_what_an_application_publishes_at_its_end_arrives(serve, start_broker, tmp_path, closes):
    broker, got = start_broker(), []
    broker.smq.subscribe("last words", lambda data, *_: got.append(int(data)))
    (tmp_path / ".preload").write_text(FAREWELL.replace("CLOSES", closes))
    served = serve(tmp_path, env={"BROKER": broker.url})
    wait_until(lambda: "ready" in served.output)
    assert gevent.get_hub().threadpool.apply(served.stop) == 0
    assert got == list(range(1, 501))


def test_after_close_nothing_is_taken(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:publish("x", "t")
          smq:close()
          smq:close()
          test.record("after", smq:publish("y", "t"), smq:create("t"), smq:subscribe("t"), smq:gettid())
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: seen(recorder, b"after"))
    assert seen(recorder, b"after") == [(False, False, False, None)]


def test_an_onclose_that_raises_does_not_lose_the_client(lua, recorder, caplog, monkeypatch):
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.01)
    with ScriptedBroker(lambda c: c.accept(), lambda c: (c.accept(), c.acks())) as broker:
        lua(
            """
            local smq = connect()
            smq.onreconnect = note "again"
            function smq.onclose() error "mine" end
            """,
            broker.url,
        )
        wait_until(lambda: seen(recorder, b"again"))
    assert "onclose of an SMQ client failed" in caplog.text
    assert "mine" in caplog.text


def test_errors_name_the_callback(lua, start_broker, recorder, caplog):
    lua(
        """
        local smq = connect()
        function smq.onconnect()
          smq:subscribe("t", {onack = function() error "a" end, onmsg = function() error "b" end})
          smq:publish("x", "t")
          smq:create("u", function() error "c" end)
          smq:createsub("v", function() error "d" end)
          error "e"
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: "onmsg of subscribe" in caplog.text and "onack of createsub" in caplog.text)
    for name in ("onconnect", "onack of subscribe", "onmsg of subscribe", "onack of create", "onack of createsub"):
        assert f"{name} of an SMQ client failed" in caplog.text


def test_what_json_has_no_number_for_is_null(lua, start_broker, recorder):
    lua(
        """
        local smq = connect()
        smq.onmsg = function(data) test.record("msg", data) end
        function smq.onconnect()
          for _, value in ipairs {0/0, math.huge, -math.huge, {0/0, 1}, false} do smq:publish(value, "self") end
          smq:publish(nil, "self")
        end
        """,
        start_broker().url,
    )
    wait_until(lambda: len(seen(recorder, b"msg")) == 6)
    assert seen(recorder, b"msg") == [(b"null",), (b"null",), (b"null",), (b"[null,1]",), (b"false",), (b"null",)]


def test_the_hint_for_self_signed_brokers_is_printed_once(lua, start_broker, recorder, caplog, tmp_path):
    broker = start_broker(context=server_context(*self_signed_pair("127.0.0.1", tmp_path)))
    lua(
        """
        local smq, trusting = connect(), connect({trusted = false})
        function smq.onclose(err, canreconnect) test.record("close", err, canreconnect) return 1 end
        trusting.onconnect = note "trusting"
        """,
        broker.url,
    )
    wait_until(lambda: len(seen(recorder, b"close")) >= 3 and seen(recorder, b"trusting"))
    assert seen(recorder, b"close")[0] == (b"sslnottrusted", False)
    assert caplog.text.count("{trusted = false}") == 1


def test_the_reason_of_a_failed_connection_is_logged_once(lua, recorder, caplog):
    url = f"http://127.0.0.1:{free_port()}/"
    lua(
        """
        connect() -- without onclose
        connect({}, function(smq) smq.onclose = function(err) test.record("close", err) return 10 end end)
        """,
        url,
    )
    wait_until(lambda: len(seen(recorder, b"close")) >= 3)
    reason = f"SMQ client: {url}: connection refused; is the server running there?"
    assert caplog.messages == [reason, reason]


def test_an_unknown_option_is_traced_with_the_nearest_one(lua, caplog) -> None:
    caplog.set_level("DEBUG")
    lua("connect {timout = 5, onconnect = print, uid = 'device-1'}", "http://127.0.0.1:1/")
    assert "smq.client has no option 'timout'; it is ignored; did you mean 'timeout'?" in caplog.text
    assert "smq.client has no option 'onconnect'; it is ignored" in caplog.text
    assert "'uid'" not in caplog.text
