"""The option `onmessage` of MQTT clients in Lua: a handler that gets messages as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.apps.lua.mqtt_languages import Case, LuaHalf
from tests.clients.mqtt.scripted import PUBACK, ScriptedBroker
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until

pytestmark = pytest.mark.servers
PUSHED = [("a/x", 1, b"first"), ("b/x", 0, b"second")]


@pytest.fixture
def lua(tmp_path: Path) -> Iterator[LuaHalf]:
    half = LuaHalf(tmp_path)
    yield half
    half.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    with Factory(ScriptedBroker) as start:
        yield start


def run(lua: LuaHalf, broker: ScriptedBroker, code: str) -> None:
    lua.run(Case(code, lambda _: None), int(broker.address.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("module", "recbta", "is_text"), [("mqttc", "", False), ("mqttc", "recbta = false,", True), ("mqtt3c", "", True)]
)
def test_a_client_passes_messages_as_objects(
    lua: LuaHalf, scripted: Callable[..., ScriptedBroker], module: str, recbta: str, is_text: bool
) -> None:
    run(
        lua,
        scripted(4 if module == "mqtt3c" else 5, push=PUSHED),
        f"""local function onmessage(message)
          local payload = message.payload
          put(message.topic, tostring(payload), message.qos, message.retain, message.dup, type(message.properties),
            type(payload) == "string")
        end
        local options = {{port = port, {recbta} onmessage = onmessage}}
        local mqtt = {module}.create("127.0.0.1", function() return true end, options)
        mqtt:subscribe("#")""",
    )
    wait_until(lambda: len(lua.told) == 2, lua.told)
    assert lua.told == [
        ("a/x", "first", 1, False, False, "table", is_text),
        ("b/x", "second", 0, False, False, "table", is_text),
    ]


def test_a_subscription_has_its_own_handler(lua: LuaHalf, scripted: Callable[..., ScriptedBroker]) -> None:
    run(
        lua,
        scripted(4, push=PUSHED),
        """local function onpub(topic) put("onpub", topic) end
        local mqtt = mqtt3c.create("127.0.0.1", function() return true end, onpub, {port = port})
        mqtt:subscribe("a/#", {qos = 1, onmessage = function(message) put("onmessage", message.topic) end})""",
    )
    wait_until(lambda: len(lua.told) == 2, lua.told)
    assert lua.told == [("onmessage", "a/x"), ("onpub", "b/x")]


def test_the_handler_acknowledges(lua: LuaHalf, scripted: Callable[..., ScriptedBroker]) -> None:
    broker = scripted(push=[("t", 1, b"1"), ("t", 1, b"2")])
    run(
        lua,
        broker,
        """local kept = {}
        local mqtt = mqttc.create("127.0.0.1", function() return true end, {port = port, manualack = true,
          onmessage = function(message)
            kept[#kept + 1] = message
            put(message.topic)
            if #kept == 2 then ack = function() kept[2]:ack() kept[1]:ack() kept[1]:ack() end end
          end})
        mqtt:subscribe("t", {qos = 1})""",
    )
    wait_until(lambda: len(lua.told) == 2, lua.told)
    let_others_run()
    assert broker.of_kind(PUBACK) == []
    run(lua, broker, "ack()")
    wait_until(lambda: len(broker.of_kind(PUBACK)) == 2)
    assert [int.from_bytes(body[:2]) for body in broker.of_kind(PUBACK)] == [1, 2]


def test_a_blocking_client_needs_no_onpub_then(lua: LuaHalf, scripted: Callable[..., ScriptedBroker]) -> None:
    run(
        lua,
        scripted(4, push=PUSHED),
        """ba.socket.event(function()
          local mqtt = mqtt3c.connect("127.0.0.1", nil, {port = port, onmessage = function(message)
            put(message.topic, message.payload, message.qos)
          end})
          mqtt:subscribe("#")
          mqtt:run()
        end)""",
    )
    wait_until(lambda: len(lua.told) == 2, lua.told)
    assert lua.told == [("a/x", "first", 1), ("b/x", "second", 0)]


def test_an_error_names_the_handler(
    lua: LuaHalf, scripted: Callable[..., ScriptedBroker], caplog: pytest.LogCaptureFixture
) -> None:
    run(
        lua,
        scripted(push=PUSHED[:1]),
        """local options = {port = port, onmessage = function() error "oops" end}
        local mqtt = mqttc.create("127.0.0.1", function() return true end, options)
        mqtt:subscribe("#")""",
    )
    wait_until(lambda: "the callback onmessage of an MQTT client failed" in caplog.text, "the log line")
    assert "oops" in caplog.text


def test_a_wrong_value_is_an_error(lua: LuaHalf) -> None:
    lua.run(
        Case("put(pcall(mqttc.create, '127.0.0.1', function() end, {port = port, onmessage = 5}))", lambda _: None), 1
    )
    wait_until(lambda: lua.told, "the answer")
    assert lua.told[0][0] is False
    assert "onmessage" in lua.told[0][1]
