"""The option `onmessage` of MQTT clients in Lua and Python: a handler that gets messages as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from tests.apps.lua.mqtt_languages import HOST, Case, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.scripted import PUBACK, ScriptedBroker
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers
PUSHED = [("a/x", 1, b"first"), ("b/x", 0, b"second")]
Half = LuaHalf | PythonHalf


@pytest.fixture
def lua(tmp_path: Path) -> Iterator[LuaHalf]:
    half = LuaHalf(tmp_path)
    yield half
    half.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    with Factory(ScriptedBroker) as start:
        yield start


def port_of(broker: ScriptedBroker) -> int:
    return int(broker.address.rpartition(":")[2])


def run(lua: LuaHalf, broker: ScriptedBroker, code: str) -> None:
    lua.run(Case(code, lambda _: None), port_of(broker))


@pytest.mark.parametrize(
    ("module", "recbta", "is_text"), [("mqttc", "", False), ("mqttc", "recbta = false,", True), ("mqtt3c", "", True)]
)
def test_a_client_passes_messages_as_objects(
    half: Half, scripted: Callable[..., ScriptedBroker], module: str, recbta: str, is_text: bool
) -> None:
    lua = f"""local function onmessage(message)
          local payload = message.payload
          put(message.topic, tostring(payload), message.qos, message.retain, message.dup, type(message.properties),
            type(payload) == "string")
        end
        local options = {{port = port, {recbta} onmessage = onmessage}}
        local mqtt = {module}.create("127.0.0.1", function() return true end, options)
        mqtt:subscribe("#")"""

    def python(it: PythonHalf) -> None:
        def onmessage(message: Any) -> None:
            assert (type(message.payload), message.properties) == (bytes, {})  # as in an iteration, also with recbta
            it.put(message.topic, message.payload, message.qos, message.retain, message.dup, "table", is_text)

        options: dict[str, Any] = {"recbta": False} if recbta else {}
        mqtt, _ = getattr(it, module).create(HOST, keep, port=it.port, onmessage=onmessage, **options)
        mqtt.subscribe("#")

    told = [
        ("a/x", "first", 1, False, False, "table", is_text),
        ("b/x", "second", 0, False, False, "table", is_text),
    ]
    play_against(half, port_of(scripted(4 if module == "mqtt3c" else 5, push=PUSHED)), lua, python, told)


def test_a_subscription_has_its_own_handler(half: Half, scripted: Callable[..., ScriptedBroker]) -> None:
    lua = """local function onpub(topic) put("onpub", topic) end
        local mqtt = mqtt3c.create("127.0.0.1", function() return true end, onpub, {port = port})
        mqtt:subscribe("a/#", {qos = 1, onmessage = function(message) put("onmessage", message.topic) end})"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqtt3c.create(HOST, keep, lambda topic, _: it.put("onpub", topic), {"port": it.port})
        mqtt.subscribe("a/#", {"qos": 1, "onmessage": lambda message: it.put("onmessage", message.topic)})

    told = [("onmessage", "a/x"), ("onpub", "b/x")]
    play_against(half, port_of(scripted(4, push=PUSHED)), lua, python, told)


def test_onmessage_replaces_onpub(half: Half, scripted: Callable[..., ScriptedBroker]) -> None:
    lua = """local function onpub(topic) put("onpub", topic) end
        local function onmessage(message) put(message.topic) end
        local mqtt = mqtt3c.create("127.0.0.1", function() return true end, onpub, {port = port, onmessage = onmessage})
        mqtt:subscribe("a/#", {onpub = onpub, onmessage = function(message) put("own", message.topic) end})"""

    def python(it: PythonHalf) -> None:
        def onpub(topic: str, *_: object) -> None:
            it.put("onpub", topic)

        mqtt, _ = it.mqtt3c.create(HOST, keep, onpub, port=it.port, onmessage=lambda message: it.put(message.topic))
        mqtt.subscribe("a/#", onpub=onpub, onmessage=lambda message: it.put("own", message.topic))

    play_against(half, port_of(scripted(4, push=PUSHED)), lua, python, [("own", "a/x"), ("b/x",)])


def test_the_handler_acknowledges(half: Half, scripted: Callable[..., ScriptedBroker]) -> None:
    broker = scripted(push=[("t", 1, b"1"), ("t", 1, b"2")])
    lua = """local kept = {}
        local mqtt = mqttc.create("127.0.0.1", function() return true end, {port = port, manualack = true,
          onmessage = function(message)
            kept[#kept + 1] = message
            put(message.topic)
            if #kept == 2 then ack = function() kept[2]:ack() kept[1]:ack() kept[1]:ack() end end
          end})
        mqtt:subscribe("t", {qos = 1})"""
    kept: list[Any] = []

    def python(it: PythonHalf) -> None:
        def onmessage(message: Any) -> None:
            kept.append(message)
            it.put(message.topic)

        mqtt, _ = it.mqttc.create(HOST, keep, port=it.port, manualack=True, onmessage=onmessage)
        mqtt.subscribe("t", {"qos": 1})

    def ack(_: PythonHalf) -> None:
        for message in (kept[1], kept[0], kept[0]):
            message.ack()

    play_against(half, port_of(broker), lua, python, [("t",), ("t",)])
    assert broker.of_kind(PUBACK) == []
    half.run(Case("ack()", ack), port_of(broker))
    wait_until(lambda: len(broker.of_kind(PUBACK)) == 2)
    assert [int.from_bytes(body[:2]) for body in broker.of_kind(PUBACK)] == [1, 2]


def test_a_blocking_client_needs_no_onpub_then(half: Half, scripted: Callable[..., ScriptedBroker]) -> None:
    lua = """ba.socket.event(function()
          local mqtt = mqtt3c.connect("127.0.0.1", nil, {port = port, onmessage = function(message)
            put(message.topic, message.payload, message.qos)
          end})
          mqtt:subscribe("#")
          mqtt:run()
        end)"""

    def python(it: PythonHalf) -> None:
        here = gevent.getcurrent()

        def onmessage(message: Any) -> None:
            assert gevent.getcurrent() is here
            it.put(message.topic, message.payload, message.qos)

        mqtt, err = it.mqtt3c.connect(HOST, None, port=it.port, onmessage=onmessage)
        assert mqtt, err
        mqtt.subscribe("#")
        mqtt.run()

    play_against(half, port_of(scripted(4, push=PUSHED)), lua, python, [("a/x", "first", 1), ("b/x", "second", 0)])


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
