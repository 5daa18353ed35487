"""`mqttc` and `mqtt3c` against a real mosquitto: by themselves, blocking, as cosockets, through a proxy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.lua import api
from smqrt.apps.lua.api import files
from smqrt.apps.lua.vm import Services, Vm
from smqrt.http.disk import DiskIo
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import DISCONNECT, PINGREQ, ScriptedBroker, packet, publish, stall
from tests.conftest import Served
from tests.support.proxies import SocksProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Lua = Callable[..., list[str]]


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """A plain broker for this module."""
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.stop()


@pytest.fixture
def lua(tmp_path: Path) -> Iterator[Lua]:
    """Runs Lua with `port`, and gives what it `put` until it put "end"."""
    services = Services(ios={"disk": DiskIo(tmp_path)})
    machine = Vm()
    lines: list[str] = []
    api.install(machine, services)
    files.install(machine, services)
    put = (
        b"local core, py = ... function put(...) local t = {...} "
        b"for i = 1, select('#', ...) do t[i] = tostring(t[i]) end py.put(table.concat(t, ' ')) end "
        b"shutdown = py.shutdown"
    )
    functions = {"put": lambda text: lines.append(text.decode()), "shutdown": services.mqtt.shutdown}
    machine.namespace("put", functions, source=put)

    def run(code: str, port: int = 0, **values: object) -> list[str]:
        header = "".join(f"local {name} = {value!r} " for name, value in {"port": port, **values}.items())
        machine.start(machine.compile(header + code, "@test.lua"))
        wait_until(lambda: "end" in lines, lines)
        return [line for line in lines if line != "end"]

    yield run
    services.mqtt.shutdown()  # else clients of brokers that are gone try again for ever, beside the tests that follow
    machine.stop()
    gevent.sleep(0)


def test_publish_and_subscribe_by_itself(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local mqtt
    mqtt = require"mqttc".create("127.0.0.1", function(kind, code, status)
      put(kind, code, status.reasoncode, status.sessionpresent, status.properties.receivemaximum)
      mqtt:subscribe("own/#", function(topic, reason, prop)
        put(topic, reason, type(prop))
        local prop = {contenttype = "x", colour = "red", correlationdata = "\\0\\1"}
        put(mqtt:publish("own/a", "text", {qos = 1, retain = false}, prop))
      end, {qos = 2})
      mqtt:subscribe("single", {onpub = function(topic, payload)
        put("single", tostring(payload)) mqtt:disconnect() put"end"
      end})
      return true
    end, function(topic, payload, prop, cpt)
      put(topic, tostring(payload), type(payload), #payload, payload[1], prop.contenttype, prop.colour,
        #prop.correlationdata, cpt)
      mqtt:publish("single", ba.bytearray.create("bytes"))
    end, {port = port})
    put(mqtt:status())
    put(type(mqtt), mqtt:publish("early", "x"))
    """
    assert lua(code, mosquitto.port) == [
        "0 false false 0 0",
        "userdata false",
        "mqtt connect 0 false 20",
        "own/# 2 table",
        "true",
        "own/a text userdata 4 116 x red 2 50",
        "single bytes",
    ]


def test_strings_instead_of_byte_arrays(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local mqtt
    mqtt = require"mqttc".create("127.0.0.1", function() return true end,
      function(topic, payload) put(type(payload), payload) mqtt:disconnect() put"end" end,
      {port = port, recbta = false})
    mqtt:subscribe("string")
    mqtt:publish("string", 42)
    """
    assert lua(code, mosquitto.port) == ["string 42"]


def test_decisions_of_onstatus(lua: Lua) -> None:
    broker = ScriptedBroker(on_open=lambda wire: wire.send(packet(DISCONNECT, b"\x8b\0")))
    code = """
    local times = 0
    require"mqttc".create("127.0.0.1", function(kind, code, status)
      put(kind, code, status and status.reasoncode)
      if code == "connect" then return true end
      times = times + 1
      if times == 2 then put"end" return nil end
      return 0
    end, {port = port})
    """
    assert lua(code, int(broker.address.split(":")[1])) == ["mqtt connect 0", "mqtt disconnect 139"] * 2
    gevent.sleep(0.05)
    assert broker.connections == 2
    broker.close()


def test_a_function_makes_the_connection(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local times = 0
    local function connect(mqtt, op)
      times = times + 1
      put(op.port, ba.socket.getsock() ~= nil)
      if times == 1 then return nil, "notyet" end
      if times == 2 then error"oh no" end
      return ba.socket.connect("127.0.0.1", op.port)
    end
    local mqtt
    mqtt = require"mqttc".create(connect, function(kind, code)
      put(kind, code)
      if code == "connect" then mqtt:subscribe("made") mqtt:publish("made", "hi") end
      return 0
    end, function(topic) put(topic) mqtt:disconnect() ba.sleep(50) put(ba.socket.stat()) put"end" end, {port = port})
    """
    port = mosquitto.port
    again = f"{port} true"
    assert lua(code, port) == [again, "sock notyet", again, "sock failed", again, "mqtt connect", "made", "0 0"]


def test_untrusted_and_trusted_brokers(lua: Lua, secure: Mosquitto) -> None:
    code = """
    local io, store = ba.openio"disk", ba.create.certstore()
    store:addcert(io, "ca.pem")
    local function try(tls, op)
      op = op or {}
      op.port, op.secure = port, tls
      local told
      local mqtt = require"mqttc".create("localhost", function(...) told = {...} return told[2] == "connect" end, op)
      while not told do ba.sleep(5) end
      put(told[1], told[2])
      mqtt:disconnect()
    end
    try(true)
    try(ba.create.sharkssl(store))
    try(true, {nocheck = true})
    put(require"mqtt3c".connect("localhost", put, {port = port, secure = true, uname = "anna"}))
    local mqtt, err = require"mqtt3c".connect("localhost", put, {port = port, shark = ba.create.sharkssl(store)})
    put(type(mqtt), err)
    put"end"
    """
    assert lua(code, secure.port) == ["sock cn", "mqtt connect", "mqtt connect", "nil cn sock", "userdata nil"]


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_connect_to_an_untrusted_broker(
    lua: Lua, secure: Mosquitto, module: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"""
    local connect = require"{module}".connect
    local function ready()
      local sock = ba.socket.connect("localhost", port)
      sock:upgrade(ba.sharkclient())
      return sock
    end
    put(connect("localhost", put, {{port = port, secure = true, passwd = "x", username = "anna"}}))
    put(connect(ready(), put, {{uname = "anna"}}))
    for _, addr in ipairs{{"localhost", ready()}} do
      local mqtt, err = connect(addr, put, {{port = port, secure = true, id = "me"}})
      put(type(mqtt), err)
      mqtt:disconnect()
    end
    put"end"
    """
    with caplog.at_level(logging.INFO):
        assert lua(code, secure.port) == ["nil cn sock", "nil cn sock", "userdata nil", "userdata nil"]
    warnings = [line for line in caplog.messages if "is not trusted (cn)" in line]
    assert len(warnings) == 2
    assert "test.lua" in warnings[0]


RUNNING = {
    "blocking": "put(mqtt:run())",
    "a cosocket": 'mqtt.sock:event(function() put(mqtt:run()) end, "s") while not done do ba.sleep(5) end',
    "a thread": "ba.thread.run(function() put(mqtt:run()) done = true end) while not done do ba.sleep(5) end",
}


@pytest.mark.parametrize("how", RUNNING)
def test_the_older_form(lua: Lua, mosquitto: Mosquitto, how: str) -> None:
    code = f"""
    local mqtt, done
    local function onpub(topic, payload)
      put(topic, payload, type(payload))
      ba.sleep(5)
      mqtt:unsubscribe("old/#", function() put"unsubscribed" done = true mqtt:disconnect() end)
    end
    mqtt = require"mqttc".connect("127.0.0.1", onpub, {{port = port, keepalive = 5}})
    mqtt:subscribe("old/single", {{onpub = function(...) put("single", ...) end}})
    mqtt:subscribe("old/#", function(code)
      put("suback", code) mqtt:publish("old/single", "1") mqtt:publish("old/x", "2")
    end)
    {RUNNING[how]}
    ba.sleep(50)
    put(ba.socket.stat())
    put"end"
    """
    lines = lua(code, mosquitto.port)
    assert lines[0] == "suback 0"
    assert lines[1].startswith("single old/single 1")
    assert "old/x 2 string" in lines
    assert lines[-3:] == ["unsubscribed", "nil disconnect", "0 0"]


def test_a_second_run_is_refused(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local mqtt = require"mqtt3c".connect("127.0.0.1", put, {port = port})
    ba.thread.run(function() put(mqtt:run()) put(mqtt:run()) put"end" end)
    ba.sleep(20)
    put(pcall(mqtt.run, mqtt))
    mqtt:disconnect()
    """
    refused = "another run of this client is active; a client has one run at a time"
    lines = lua(code, mosquitto.port)
    assert lines[0].startswith("false test.lua:")
    assert lines[0].endswith(refused)
    assert lines[1:] == ["nil disconnect", "nil socketclosed"]


def test_a_dropped_client_does_not_wait_for_room(lua: Lua, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MqttClient] = []

    def make(*arguments: Any, **options: Any) -> MqttClient:
        made.append(MqttClient(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("smqrt.clients.mqtt.documented.MqttClient", make)
    broker = ScriptedBroker(4, on_open=lambda wire: wire.send(publish("t", b"x" * 50) * 5000))
    code = """
    do
      local mqtt = require"mqtt3c".connect("127.0.0.1", put, {port = port})
      ba.sleep(100)
    end
    for _ = 1, 3 do collectgarbage() ba.sleep(20) end
    put(ba.socket.stat())
    put"end"
    """
    assert lua(code, int(broker.address.split(":")[1])) == ["0 0"]
    wait_until(lambda: [client.closed for client in made] == [True])
    broker.close()


def test_unknown_options_are_one_warning(lua: Lua, mosquitto: Mosquitto, caplog: pytest.LogCaptureFixture) -> None:
    code = """
    local op = {port = port, colour = "red", id = "me", uname = "anna", recbta = false, clientidentifier = 42}
    for _, name in ipairs{"mqttc", "mqtt3c"} do
      require(name).connect("127.0.0.1", put, op):disconnect()
      require(name).create("127.0.0.1", function() return true end, op):disconnect()
    end
    put"end"
    """
    with caplog.at_level(logging.INFO):
        lua(code, mosquitto.port)
    told = [line.partition(": ")[2] for line in caplog.messages if "unknown option" in line]
    ignored = "unknown option 'colour' is ignored"
    assert told == [
        f"{name}: {ignored}" for name in ("mqtt3c.connect", "mqttc.create", "mqtt3c.connect", "mqtt3c.create")
    ]


def test_create_takes_the_older_names(lua: Lua) -> None:
    broker = ScriptedBroker(4)
    code = """
    require"mqtt3c".create("127.0.0.1", function() put"end" end, {port = port, id = "x", uname = "y", passwd = "z"})
    """
    lua(code, int(broker.address.split(":")[1]))
    assert broker.packets[0][1][10:] == b"\0\x01x\0\x01y\0\x01z"
    broker.close()


def test_in_a_cosocket(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    ba.socket.event(function(cosock)
      local mqtt
      mqtt = require"mqtt3c".connect("127.0.0.1", function(...) put(...) mqtt:disconnect() end, {port = port})
      put(mqtt.sock == cosock, ba.socket.getsock() == cosock)
      mqtt:subscribe("co")
      mqtt:publish("co", "hi")
      put(mqtt:run())
      put"end"
    end)
    """
    assert lua(code, mosquitto.port) == ["true true", "co hi", "nil disconnect"]


ENDS = {
    "invalidresp": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, b"\x30\x02\0\x09")},
    "unknowncp": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, b"\x00\x00")},
    "overflow": {"on_open": lambda wire: gevent.spawn_later(0.05, wire.send, publish("t", b"x" * 66000))},
    "socketreadfailed": {"on_open": lambda wire: wire.sock.close()},
    "pingresp": {"on_packet": lambda wire, first, body: first == PINGREQ and (stall(), True)[1]},
}


@pytest.mark.parametrize("word", ENDS)
def test_how_run_ends(lua: Lua, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if word == "pingresp":
        monkeypatch.setattr("smqrt.wire.mqtt.client.PINGS_PER_KEEPALIVE", 3000)
    broker = ScriptedBroker(4, **ENDS[word])  # type: ignore[arg-type]
    code = 'local mqtt = require"mqtt3c".connect("127.0.0.1", put, {port = port}) put(mqtt:run()) put"end"'
    assert lua(code, int(broker.address.split(":")[1])) == [f"nil {word}"]
    broker.close()


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5])
def test_refusals_of_the_older_form(lua: Lua, code: int) -> None:
    broker = ScriptedBroker(4, code=code)
    text = 'put(require"mqtt3c".connect("127.0.0.1", put, {port = port, id = "x", uname = "y", passwd = "z"})) put"end"'
    assert lua(text, int(broker.address.split(":")[1])) == [f"nil {code} true"]
    body = broker.packets[0][1]
    assert body[10:] == b"\0\x01x\0\x01y\0\x01z"
    assert body[8:10] == b"\x02\x58", "600 seconds"
    broker.close()


def test_create_of_the_older_module(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local mqtt
    mqtt = require"mqtt3c".create("127.0.0.1", function(kind, code, st) put(kind, code, st.reasoncode) return true end,
      function(topic, payload) put(topic, payload, type(payload)) mqtt:disconnect() put"end" end,
      {port = port, will = {topic = "t", payload = "w"}})
    mqtt:subscribe("older")
    mqtt:publish("older", "x")
    """
    assert lua(code, mosquitto.port) == ["mqtt connect 0", "older x string"]


def test_the_documented_proxy_example(lua: Lua, secure: Mosquitto) -> None:
    code = """
    local io, store, rounds = ba.openio"disk", ba.create.certstore(), 0
    store:addcert(io, "ca.pem")
    ba.sharkclient = function() return ba.create.sharkssl(store) end -- the authority of this test
    local function start()
      local http = require"httpc".create{proxy = "127.0.0.1", proxyport = proxy, socks = true, proxycon = true}
      local ok, err = http:request{url = "https://localhost:" .. port}
      put(ok, err)
      local s = ba.socket.http2sock(http)
      put(s:upgrade(ba.sharkclient()))
      local mqtt
      mqtt = require"mqttc".connect(s, function(topic, payload)
        put(topic, payload)
        mqtt:disconnect()
      end, {uname = "anna", passwd = "s3cret"})
      mqtt:subscribe("tunnel", function() mqtt:publish("tunnel", "through") end)
      s:event(function()
        put(mqtt:run())
        rounds = rounds + 1
        if rounds == 2 then put"end" else ba.thread.run(start) end
      end, "s")
    end
    ba.thread.run(start)
    """
    with SocksProxy() as proxy:
        lines = lua(code, secure.port, proxy=proxy.port)
        assert lines == ["nil prxready", "true", "tunnel through", "nil disconnect"] * 2
        assert proxy.seen == [f"localhost:{secure.port}"] * 2


WRONG = {
    'create("h")': "onstatus|function expected",
    'create("h", put, put, 5)': "table expected",
    'create("h", put, put, {will = {}})': "will.topic",
    'create("h", put, put, {version = 3, keepalive = -1})': "keepalive",
    'create("h", put, put, {}, {receivemaximum = 0})': "receivemaximum",
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments_raise(lua: Lua, call: str) -> None:
    (line,) = lua(f'put(select(2, pcall(function() require"mqttc".{call} end))) put"end"')
    assert any(word in line for word in WRONG[call].split("|"))
    assert line.startswith("test.lua:1:")


NO_ADDRESS = (
    "bad argument #1 to 'connect' (addr: a host name or URL, a list of them, or a connected socket expected, got"
)
WRONG_CONNECTS = {
    "connect(nil, put)": f"{NO_ADDRESS} no value)",
    "connect({}, put)": f"{NO_ADDRESS} table)",
    "connect(put, put)": f"{NO_ADDRESS} function)",
    'connect("h")': "bad argument #2 to 'connect' (function expected, got no value)",
    'connect("h", put, 5)': "bad argument #3 to 'connect' (table expected, got number)",
    'connect("h", put, {port = "x"})': "port must be a whole number from 1 to 65535, or nothing, not 'x'",
    'connect("h", put, {timeout = -1})': "timeout must be a number greater than 0, at most 86400000 (milliseconds)",
    'connect("h", put, {keepalive = "x"})': "bad argument #keepalive to 'connect' (number expected, got string)",
    'connect("h", put, {keepalive = 1e6})': "keepalive must be a whole number from 0 to 65535 (seconds), not 1000000",
    'connect("h", put, {secure = 5})': "bad argument #secure to 'connect' (sharkssl expected, got number)",
    'create("h", put, {alpn = {true}})': "bad argument #alpn to 'create' (string expected, got boolean)",
    'connect("h", put, {nocheck = 5})': "nocheck must be true or false, not 5",
    'connect("h", put, {intf = {}})': "bad argument #intf to 'connect' (string expected, got table)",
    'connect("h", put, {id = {}})': "bad argument #id to 'connect' (string expected, got table)",
    'connect("h", put, {will = {topic = "t", payload = put}})': "bad argument #will.payload to 'connect' (string",
    'create("h", put, {port = "x"})': "port must be a whole number from 1 to 65535, or nothing, not 'x'",
}


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
@pytest.mark.parametrize("call", WRONG_CONNECTS)
def test_errors_name_the_argument_that_is_wrong(lua: Lua, module: str, call: str) -> None:
    (line,) = lua(f'put(select(2, pcall(function() require"{module}".{call} end))) put"end"')
    assert line.startswith("test.lua:1: ")
    assert WRONG_CONNECTS[call] in line


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("'h:x'", "cannotresolve"),
        ("''", "cannotresolve"),
        ("nil", "cannotresolve"),
        ("{}", "cannotresolve"),
        ("'mqtt://[::1'", "cannotresolve"),
        ("'no.such.host.invalid'", "cannotresolve"),
        ("(function() local s = ba.socket.udpcon() s:close() return s end)()", "socketclosed"),
    ],
)
@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_a_bad_address_is_reported_to_onstatus(lua: Lua, module: str, address: str, word: str) -> None:
    code = f'require"{module}".create({address}, function(kind, code) put(kind, code, made) put"end" end) made = true'
    assert lua(code) == [f"sock {word} true"]


def test_an_error_in_a_callback_has_its_line(lua: Lua, mosquitto: Mosquitto, caplog: pytest.LogCaptureFixture) -> None:
    code = """
    local mqtt
    mqtt = require"mqttc".create("127.0.0.1", function() return true end, function(topic, payload)
      if tostring(payload) == "2" then mqtt:disconnect() put"end" return end
      error"oh no"
    end, {port = port})
    mqtt:subscribe("faulty", {qos = 1})
    mqtt:publish("faulty", "1", {qos = 1}) mqtt:publish("faulty", "2", {qos = 1})
    """
    with caplog.at_level(logging.ERROR):
        lua(code, mosquitto.port)
    assert "test.lua:5: oh no" in caplog.text


def test_with_a_broker_in_lua(lua: Lua) -> None:
    code = """
    local broker = assert(require"mqttbroker".create(0, {address = "127.0.0.1"}))
    local mqtt, older
    mqtt = require"mqttc".create("127.0.0.1", function(_, code) put(code) return code == "connect" end,
      function(topic, payload, prop) put(topic, tostring(payload), prop.colour) older:publish("back", "again") end,
      {port = broker:status().port})
    mqtt:subscribe("there", function()
      older = require"mqtt3c".connect("127.0.0.1", function(...) put(...) older:disconnect() end,
        {port = broker:status().port})
      older:subscribe("back", function() mqtt:publish("there", "x", {qos = 1}, {colour = "red"}) end)
      ba.thread.run(function() put(older:run()) mqtt:disconnect() broker:close() put"end" end)
    end)
    """
    assert lua(code) == ["connect", "there x red", "back again", "nil disconnect"]


def test_server_shutdown_is_reported(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    local mqtt = require"mqtt3c".connect("127.0.0.1", put, {port = port})
    require"mqttc".create("127.0.0.1", function(kind, code)
      put(kind, code)
      if code == "connect" then shutdown() end
      return 1
    end, {port = port})
    put(mqtt:run())
    ba.sleep(50)
    put"end"
    """
    assert sorted(lua(code, mosquitto.port)) == ["mqtt connect", "nil sysshutdown", "sock sysshutdown"]


def test_nothing_is_left(lua: Lua, mosquitto: Mosquitto) -> None:
    code = """
    for _ = 1, 5 do
      local mqtt = require"mqtt3c".connect("127.0.0.1", put, {port = port})
      mqtt:subscribe("left", {onpub = put})
    end
    for _ = 1, 3 do collectgarbage() ba.sleep(20) end
    put(ba.socket.stat())
    put"end"
    """
    assert lua(code, mosquitto.port) == ["0 0"]


def test_a_tls_object_counts_more_than_true(lua: Lua, secure: Mosquitto) -> None:
    code = """
    local io, store = ba.openio"disk", ba.create.certstore()
    store:addcert(io, "ca.pem")
    local shark = ba.create.sharkssl(store)
    put(type(require"mqtt3c".connect("localhost", put, {port = port, secure = true, shark = shark})))
    put(type(require"mqtt3c".connect("localhost", put, {port = port, secure = shark, shark = true})))
    local mqtt
    mqtt = require"mqttc".create("localhost", function(kind, code)
      put(kind, code) mqtt:disconnect() put"end" return true
    end, {port = port, secure = true, shark = shark})
    """
    assert lua(code, secure.port) == ["userdata", "userdata", "mqtt connect"]


def test_trace_lines_name_the_callback(lua: Lua, mosquitto: Mosquitto, caplog: pytest.LogCaptureFixture) -> None:
    code = """
    local mqtt
    mqtt = require"mqttc".create("127.0.0.1", function() error"status" end, function(topic, payload)
      error"pub"
    end, {port = port})
    mqtt:subscribe("named", function() error"ack" end)
    mqtt:subscribe("last", {onpub = function() put"end" end})
    mqtt:publish("named", "1", {qos = 1}) mqtt:publish("last", "2", {qos = 1})
    """
    with caplog.at_level(logging.ERROR):
        lua(code, mosquitto.port)
    for name in ("onpub", "onsuback", "onstatus"):
        assert f"the callback {name} of an MQTT client failed" in caplog.text
        assert f"'{name}'" in caplog.text, "in the trace"
    assert "'f'" not in caplog.text


ANSWERS = {"a word": "'soon'", "a table": "{}", "a function": "print", "a bad number": "-1", "ages": "math.huge"}


@pytest.mark.parametrize("what", ANSWERS)
def test_nonsensical_answers_of_onstatus(lua: Lua, caplog: pytest.LogCaptureFixture, what: str) -> None:
    code = f"""
    local mqtt, times = nil, 0
    mqtt = require"mqttc".create("127.0.0.1:1", function() return {ANSWERS[what]} end)
    ba.sleep(100)
    put(mqtt:status())
    put"end"
    """
    assert lua(code) == ["0 false false 0 0"]
    assert "onstatus returned" in caplog.text


def test_a_full_queue_is_reported(lua: Lua) -> None:
    code = """
    local mqtt = require"mqttc".create("127.0.0.1:1", function() return 60 end, {queuesize = 2, maxpacketsize = 1000})
    put(mqtt:publish("t", "1")) put(mqtt:subscribe("t")) put(mqtt:publish("t", "2")) put(mqtt:unsubscribe("t"))
    put(mqtt:publish("t", ("x"):rep(1000)))
    put(mqtt:status())
    local other = require"mqttc".create("127.0.0.1:1", function() return 60 end, {queuesize = 2, queuefull = "drop"})
    for i = 1, 5 do put(other:publish("t", i)) end
    put(other:status())
    put(pcall(require"mqttc".create, "127.0.0.1:1", put, {queuefull = "wait"}))
    put"end"
    """
    lines = lua(code)
    assert lines[:6] == ["false", "false", "nil full", "nil full", "nil toolarge", "2 false false 0 2"]
    assert lines[6:12] == ["false"] * 5 + ["2 false false 3 0"]
    assert "queuefull must be 'raise'" in lines[12]


@pytest.mark.parametrize("answer", ["5", "{}", "'text'", "put", "true"])
def test_a_connect_function_that_answers_nonsense(lua: Lua, answer: str, caplog: pytest.LogCaptureFixture) -> None:
    code = f"""
    require"mqttc".create(function() return {answer} end, function(...) put(...) put"end" end)
    """
    assert lua(code) == ["sock failed nil"]
    assert "MQTT connect function failed" in caplog.text


UNLOADS = {"nothing": "", "disconnect": "mqtt:disconnect()", "twice": "mqtt:disconnect() mqtt:close()"}


@pytest.mark.parametrize("how", UNLOADS)
def test_no_will_when_the_server_stops(
    serve: Callable[..., Served], tmp_path: Path, mosquitto: Mosquitto, how: str
) -> None:
    app = tmp_path / "willed"
    app.mkdir()
    (app / ".preload").write_text(
        f"""
        local mqtt
        mqtt = require"mqttc".create("127.0.0.1:{mosquitto.port}", function(kind, code)
          if code == "connect" then print "willing" end
          return true
        end, {{will = {{topic = "dead/{how}", payload = "dead"}}}})
        function onunload() mqtt:publish("dead/{how}", "bye", {{qos = 1}}) {UNLOADS[how]} end
        """
    )
    heard: list[bytes] = []
    with MqttClient(mosquitto.address, None, lambda topic, payload, *_: heard.append(payload)) as ear:
        ear.subscribe("dead/#", qos=1)
        assert ear.flush(5)
        served = serve(app)
        gevent.get_hub().threadpool.apply(served.wait_for, ("willing",))
        assert gevent.get_hub().threadpool.apply(served.stop) == 0
        ear.publish("dead/mark", "mark", 1)
        wait_until(lambda: b"mark" in heard)
    assert heard == [b"bye", b"mark"]


BEYOND = {
    "keepalive = 65536": "keepalive must be",
    "keepalive = -1": "keepalive must be",
    "timeout = 0": "timeout must be",
    "timeout = 1e300": "timeout must be",
    "timeout = 'long'": "timeout must be",
    "inflight = 0": "inflight must be",
    "queuesize = 0": "queuesize must be",
    "maxpacketsize = 1": "maxpacketsize must be",
}


@pytest.mark.parametrize("option", BEYOND)
def test_options_beyond_their_range(lua: Lua, option: str) -> None:
    (line,) = lua(f'put(pcall(require"mqttc".create, "127.0.0.1:1", put, {{{option}}})) put"end"')
    assert BEYOND[option] in line
