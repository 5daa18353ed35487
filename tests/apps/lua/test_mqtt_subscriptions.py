"""Several MQTT topic filters in one SUBSCRIBE, in Lua and Python, against a real mosquitto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.mqtt import MqttClient
from tests.apps.lua.mqtt_languages import HOST, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import SUBACK, SUBSCRIBE, UNSUBSCRIBE, ScriptedBroker, packet
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Connect = Callable[..., MqttClient]
Scripted = Callable[..., ScriptedBroker]


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path)
    yield broker
    broker.stop()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Factory(ScriptedBroker) as start:
        yield start


@pytest.fixture
def connect() -> Iterator[Connect]:
    with Factory(MqttClient, MqttClient.disconnect) as start:
        yield start


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_each_filter_has_an_answer(half: LuaHalf | PythonHalf, mosquitto: Mosquitto, module: str) -> None:
    is_text = module == "mqtt3c"
    lua = f"""local mqtt
    mqtt = {module}.create('127.0.0.1', function() return true end,
      function(topic, payload) put(topic, payload) end, {{port = port}})
    local function flat(values) return type(values) == 'table' and table.concat(values, ' ') or nil end
    mqtt:subscribe({{{{'a/+', 1}}, 'b', {{'d', {{qos = 2}}}}, {{'c', {{qos = 2}}}}}}, function(topics, reasons)
      put(flat(topics), flat(reasons))
      mqtt:publish('a/1', 'x', {{qos = 2}})
      mqtt:publish('c', 'y', {{qos = 2, wait = true}})
      mqtt:unsubscribe({{'a/+', 'c'}}, function(topics, reasons)
        put(flat(topics), flat(reasons))
        mqtt:publish('c', 'z', {{qos = 1}})
        mqtt:publish('b', 'z', {{qos = 1}})
      end)
    end, {{qos = 0}})"""

    def python(it: PythonHalf) -> None:
        def flat(values: Any) -> Any:
            return " ".join(map(str, values)) if isinstance(values, list) else None

        def onsuback(*answer: Any) -> None:
            it.put(flat(answer[0]), flat(answer[1]) if len(answer) > 1 else None)
            mqtt.publish("a/1", "x", qos=2)
            mqtt.publish("c", "y", qos=2, wait=True)
            mqtt.unsubscribe(["a/+", "c"], onunsuback)

        def onunsuback(*answer: Any) -> None:
            it.put(*map(flat, answer[:2] or (None, None)))
            mqtt.publish("c", "z", qos=1)
            mqtt.publish("b", "z", qos=1)

        mqtt, _ = getattr(it, module).create(
            HOST, keep, lambda topic, payload, *_: it.put(topic, payload), port=it.port
        )
        mqtt.subscribe([("a/+", 1), "b", ("d", {"qos": 2}), ("c", {"qos": 2})], onsuback, qos=0)

    granted = "1 0 2 2"
    told = [
        (granted, None) if is_text else ("a/+ b d c", granted),
        ("a/1", "x"),
        ("c", "y"),
        (None, None) if is_text else ("a/+ c", "0 0"),
        ("b", "z"),
    ]
    play_against(half, mosquitto.port, lua, python, told)


@pytest.mark.parametrize("version", [5, 4])
def test_a_common_callback_and_its_end(mosquitto: Mosquitto, connect: Connect, version: int) -> None:
    got: list[Any] = []
    rest: list[Any] = []
    client = connect(mosquitto.address, None, lambda *message: rest.append(message[0]), version=version)
    client.subscribe(
        ["one", ("two/#", 2), "three"], lambda *message: got.append((message[0], message[3] >> 1 & 3)), qos=1
    )
    for topic in ("one", "two/2", "three"):
        client.publish(topic, b"", 2, wait=True)
    wait_until(lambda: len(got) == 3)
    assert got == [("one", 1), ("two/2", 2), ("three", 1)]
    client.unsubscribe("one")
    client.subscribe("three", qos=1)
    for topic in ("one", "three", "two/2"):
        client.publish(topic, b"", 1, wait=True)
    wait_until(lambda: len(got) == 4 and rest)
    assert (got[3:], rest) == ([("two/2", 1)], ["three"])


def test_one_packet_and_single_ones_after_a_lost_session(scripted: Scripted, connect: Connect) -> None:
    def answer(wire: Any, first: int, body: bytes) -> bool:
        if first & 0xF0 != SUBSCRIBE:
            return False
        count = body[3:].count(b"t/")
        wire.send(packet(SUBACK, body[:2] + b"\0" + b"\1\x87\2"[:count]))
        return True

    broker = scripted(on_packet=answer)
    client = connect(broker.address, lambda *_: 0.01)
    answers: list[Any] = []
    client.subscribe(["t/1", "t/2", "t/3"], None, lambda *found: answers.append(found), qos=2)
    wait_until(lambda: answers)
    assert answers == [(["t/1", "t/2", "t/3"], [1, 0x87, 2], {})]
    assert broker.of_kind(SUBSCRIBE)[0][3:] == b"\0\3t/1\2\0\3t/2\2\0\3t/3\2"
    broker.wire.sock.close()
    wait_until(lambda: len(broker.of_kind(SUBSCRIBE)) == 3)
    assert [body[3:] for body in broker.of_kind(SUBSCRIBE)[1:]] == [b"\0\3t/1\2", b"\0\3t/3\2"]
    client.unsubscribe(["t/1", "t/3"])
    wait_until(lambda: broker.of_kind(UNSUBSCRIBE))
    assert broker.of_kind(UNSUBSCRIBE)[0][3:] == b"\0\3t/1\0\3t/3"


def test_a_wrong_number_of_answers_ends_the_connection(scripted: Scripted, connect: Connect) -> None:
    def answer(wire: Any, first: int, body: bytes) -> bool:
        if first & 0xF0 == SUBSCRIBE:
            wire.send(packet(SUBACK, body[:2] + b"\0\1"))
        return first & 0xF0 == SUBSCRIBE

    ended: list[Any] = []
    client = connect(scripted(on_packet=answer).address, lambda kind, code, status: ended.append(code) or 60)
    client.subscribe(["t/1", "t/2"])
    wait_until(lambda: "protocolerror" in ended)


@pytest.mark.parametrize(
    "topics", [[], ["a"] * 1001, ["a", "a"], ["a", ("b/#/c", 1)], [("a", 3)], [("a", {"colour": 1})], [("a", None, 1)]]
)
def test_wrong_lists_are_named(connect: Connect, topics: Any) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60)
    with pytest.raises(ArgumentError):
        client.subscribe(topics)
    assert client.status()[0] == 0
