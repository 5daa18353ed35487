"""MQTT messages as objects in Lua and Python, against a real mosquitto: iteration, and acknowledgement by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.mqtt import Message, MqttClient
from tests.apps.lua.mqtt_languages import HOST, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import PUBACK, PUBREC, ScriptedBroker, publish
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until

pytestmark = pytest.mark.servers

Half = LuaHalf | PythonHalf


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path)
    yield broker
    broker.stop()


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    with Factory(ScriptedBroker) as start:
        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., MqttClient]]:
    with Factory(MqttClient, partial(MqttClient.close, timeout=0)) as start:
        yield start


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_an_iteration_ends_with_the_client(half: Half, mosquitto: Mosquitto, module: str) -> None:
    lua = f"""local mqtt = {module}.create('127.0.0.1', function() return true end, {{port = port}})
    local messages = mqtt:messages()
    mqtt:subscribe('m/#', {{qos = 2}})
    for qos = 0, 2 do mqtt:publish('m/' .. qos, 'x' .. qos, {{qos = qos, wait = 20000}}) end
    for message in messages do
      put(message.topic, message.payload, message.qos, message.retain, message.dup, type(message))
      if message.qos == 2 then mqtt:disconnect() end
    end
    put('end')"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = getattr(it, module).create(HOST, keep, port=it.port)
        messages = mqtt.messages()
        mqtt.subscribe("m/#", qos=2)
        for qos in range(3):
            mqtt.publish(f"m/{qos}", f"x{qos}", qos=qos, wait=20_000)
        for message in messages:
            it.put(message.topic, message.payload, message.qos, message.retain, message.dup, "userdata")
            if message.qos == 2:
                mqtt.disconnect()
        it.put("end")

    told = [(f"m/{qos}", f"x{qos}", qos, False, False, "userdata") for qos in range(3)]
    play_against(half, mosquitto.port, lua, python, [*told, ("end",)])


@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_not_acknowledged_comes_again(half: Half, mosquitto: Mosquitto, qos: int) -> None:
    """mosquitto sends again what no client of the session has acknowledged."""
    lua = f"""local function client(cleanstart)
      return mqttc.create('127.0.0.1', function() return true end,
        {{port = port, manualack = true, clientidentifier = 'hand', recbta = false, cleanstart = cleanstart}},
        {{sessionexpiryinterval = 60}})
    end
    local mqtt = client()
    local messages = mqtt:messages()
    mqtt:subscribe('hand', {{qos = {qos}}})
    for number = 1, 3 do mqtt:publish('hand', number, {{qos = 1, wait = 20000}}) end
    local found = {{messages(), messages(), messages()}}
    found[1]:ack()
    found[1]:ack()
    found[3]:ack() -- is sent after the second one, which never comes
    mqtt:publish('other', 'x', {{qos = 1, wait = 20000}})
    mqtt:disconnect()
    put(messages())
    local later = client(false)
    for message in later:messages() do
      put(message.payload, message.dup)
      message:ack()
      if message.payload == '3' then later:disconnect() end
    end"""

    def python(it: PythonHalf) -> None:
        options: dict[str, Any] = {"port": it.port, "manualack": True, "clientidentifier": "hand"}
        mqtt, _ = it.mqttc.create(HOST, keep, options, {"sessionexpiryinterval": 60})
        messages = mqtt.messages()
        mqtt.subscribe("hand", qos=qos)
        for number in range(1, 4):
            mqtt.publish("hand", number, qos=1, wait=20_000)
        found = [next(messages) for _ in range(3)]
        found[0].ack()
        found[0].ack()
        found[2].ack()
        mqtt.publish("other", "x", qos=1, wait=20_000)
        mqtt.disconnect()
        it.put(next(messages, None))
        later, _ = it.mqttc.create(HOST, keep, options | {"cleanstart": False}, {"sessionexpiryinterval": 60})
        for message in later:
            it.put(message.payload, message.dup)
            message.ack()
            if message.payload == b"3":
                later.disconnect()

    play_against(half, mosquitto.port, lua, python, [(None,), ("2", True), ("3", True)])


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
def test_acknowledgements_are_sent_in_the_order_of_receipt(
    scripted: Callable[..., ScriptedBroker], connect: Callable[..., MqttClient], qos: int, kind: int
) -> None:
    pushed = [("t", qos, b"%d" % number) for number in range(5)]
    broker = scripted(push=pushed)
    got: list[Message] = []
    client = connect(broker.address, onmessage=got.append, manualack=True)
    client.subscribe("t", qos=qos)
    wait_until(lambda: len(got) == 5)
    for number in (4, 2, 1):
        got[number].ack()
    let_others_run()
    assert broker.of_kind(kind) == []
    got[0].ack()
    wait_until(lambda: len(broker.of_kind(kind)) == 3)
    got[3].ack()
    wait_until(lambda: len(broker.of_kind(kind)) == 5)
    assert [int.from_bytes(body[:2]) for body in broker.of_kind(kind)] == [1, 2, 3, 4, 5]
    assert not any(message.needs_ack for message in got)


def test_a_message_of_qos_2_may_be_acknowledged_on_the_next_connection(
    scripted: Callable[..., ScriptedBroker], connect: Callable[..., MqttClient]
) -> None:
    broker = scripted(push=[("t", 2, b"x")])
    got: list[Message] = []
    client = connect(
        broker.address, lambda *_: 0.01, onmessage=got.append, manualack=True, properties={"sessionexpiryinterval": 60}
    )
    client.subscribe("t", qos=2)
    wait_until(lambda: got)
    broker.wire.sock.close()
    wait_until(lambda: broker.connections == 2 and client.connected)
    let_others_run()
    assert len(got) == 1, "the application has it already"
    got[0].ack()
    wait_until(lambda: broker.is_quiet)


def test_a_slow_iteration_pauses_the_connection_and_none_drops_the_oldest(
    scripted: Callable[..., ScriptedBroker], connect: Callable[..., MqttClient]
) -> None:
    many = b"".join(publish("t", b"%d" % number, properties=b"") for number in range(3000))
    idle = connect(scripted(on_open=lambda wire: wire.send(many)).address)
    wait_until(lambda: idle.unread > 2000)
    assert idle.unread == 2001
    slow = connect(scripted(on_open=lambda wire: gevent.spawn_later(0.1, wire.send, many)).address)
    taken = iter(slow)
    assert next(taken).payload == b"0"
    let_others_run()
    assert [next(taken).payload for _ in range(2999)] == [b"%d" % number for number in range(1, 3000)]
    assert slow.unread == 0


def test_more_messages_than_the_receive_maximum_end_the_connection(
    scripted: Callable[..., ScriptedBroker], connect: Callable[..., MqttClient]
) -> None:
    many = b"".join(publish("t", b"x", 1, number + 1, properties=b"") for number in range(6))
    ended: list[Any] = []
    connect(
        scripted(on_open=lambda wire: wire.send(many)).address,
        lambda kind, code, status: ended.append((code, status.get("reasoncode"))) or True,
        manualack=True,
        properties={"receivemaximum": 5},
    )
    wait_until(lambda: ("protocolerror", 0x93) in ended, ended)
