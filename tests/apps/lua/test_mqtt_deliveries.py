"""Deliveries of MQTT messages in Lua and Python: delivered, late, closed, dropped, refused by a real mosquitto."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.errors import ClosedError, DroppedError, NoAnswer
from tests.apps.lua.mqtt_languages import HOST, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.mosquitto import COMMON, Mosquitto
from tests.support.factory import Factory

pytestmark = pytest.mark.servers

Half = LuaHalf | PythonHalf
Start = Callable[..., Mosquitto]
LARGE_BYTES = 32 << 20  # more than the sockets of both sides take


@pytest.fixture
def start_mosquitto(tmp_path: Path) -> Iterator[Start]:
    with Factory(partial(Mosquitto, tmp_path), Mosquitto.stop) as start:
        yield start


def words(wait: Callable[[], Any]) -> tuple[Any, ...]:
    """The result of a wait, or what Lua returns in the place of its exception."""
    try:
        return (wait(),)
    except NoAnswer:
        return None, "timeout"
    except ClosedError:
        return None, "closed"
    except DroppedError as error:
        return (None, error.reason) if isinstance(error.reason, str) else (None, "refused", error.reason)


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_publish_waits_until_the_message_is_delivered(
    half: Half, start_mosquitto: Start, qos: int, module: str
) -> None:
    lua = f"""local mqtt = {module}.create('127.0.0.1', function() return true end, {{port = port}})
    put(mqtt:publish('t', 'x', {{qos = {qos}, wait = 20000}}))
    local connected, delivery = mqtt:publish('t', 'x', {{qos = {qos}, delivery = true}})
    put(connected)
    put(delivery:wait(20000))
    put(delivery:status())"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = getattr(it, module).create(HOST, keep, port=it.port)
        it.put(mqtt.publish("t", "x", qos=qos, wait=20_000))
        connected, delivery = mqtt.publish("t", "x", qos=qos, delivery=True)
        it.put(connected)
        it.put(delivery.wait(20))
        it.put(delivery.done, delivery.error)

    play_against(half, start_mosquitto().port, lua, python, [(True,), (True,), (True,), (True, None)])


@pytest.mark.parametrize(("qos", "size", "end"), [(0, LARGE_BYTES, "lost"), (1, 1, "closed"), (2, 1, "closed")])
def test_a_broker_that_does_not_read(half: Half, start_mosquitto: Start, qos: int, size: int, end: str) -> None:
    lua = f"""local mqtt = mqttc.create('127.0.0.1', function() return true end,
      {{port = port, maxpacketsize = {2 * LARGE_BYTES}, queuebytes = {2 * LARGE_BYTES}, timeout = 1000}})
    put(mqtt:publish('t', 'x', {{qos = 1, wait = 20000}}))
    local _, delivery = mqtt:publish('t', string.rep('x', {size}), {{qos = {qos}, delivery = true}})
    put(delivery:wait(300))
    put(delivery:status())
    mqtt:disconnect()
    put(delivery:wait(20000))
    put(mqtt:publish('t', 'x', {{qos = {qos}, wait = true}}))"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqttc.create(
            HOST, keep, port=it.port, maxpacketsize=2 * LARGE_BYTES, queuebytes=2 * LARGE_BYTES, timeout=1000
        )
        it.put(mqtt.publish("t", "x", qos=1, wait=20_000))
        _, delivery = mqtt.publish("t", b"x" * size, qos=qos, delivery=True)
        it.put(*words(lambda: delivery.wait(0.3)))
        it.put(delivery.done, delivery.error)
        mqtt.disconnect()
        it.put(*words(lambda: delivery.wait(20)))
        it.put(*words(lambda: mqtt.publish("t", "x", qos=qos, wait=True)))

    broker = start_mosquitto()
    heard = half.put

    def put(*values: Any) -> bool:
        if len(half.told) == 0:  # the first message is delivered
            os.kill(broker.process.pid, signal.SIGSTOP)
        return heard(*values)

    half.put = put  # type: ignore[method-assign]
    try:
        told = [(True,), (None, "timeout"), (False, None), (None, end), (None, "closed")]
        play_against(half, broker.port, lua, python, told)
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)


def test_dropped_messages_are_named(half: Half) -> None:
    lua = """local mqtt = mqttc.create('127.0.0.1', function() return 60 end,
      {port = port, queuesize = 1, queuefull = 'drop'})
    local _, delivery = mqtt:publish('t', '1', {qos = 1, delivery = true})
    mqtt:publish('t', '2', {qos = 1})
    put(delivery:wait(20000))
    put(delivery:status())"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqttc.create(HOST, lambda *_: 60, port=it.port, queuesize=1, queuefull="drop")
        _, delivery = mqtt.publish("t", "1", qos=1, delivery=True)
        mqtt.publish("t", "2", qos=1)
        it.put(*words(lambda: delivery.wait(20)))
        it.put(delivery.done, delivery.error)

    play_against(half, 1, lua, python, [(None, "dropped"), (True, "dropped")])


def test_refused_messages_have_the_reason_of_the_broker(half: Half, start_mosquitto: Start, tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("topic read #\n")
    (tmp_path / "acl").chmod(0o700)
    broker = start_mosquitto(common=f"{COMMON}acl_file {tmp_path}/acl\n")
    lua = """local mqtt = mqttc.create('127.0.0.1', function() return true end, {port = port})
    put(mqtt:publish('t', 'x', {qos = 1, wait = true}))
    local _, delivery = mqtt:publish('t', 'x', {qos = 2, delivery = true})
    put(delivery:wait(20000))
    put(delivery:status())"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqttc.create(HOST, keep, port=it.port)
        it.put(*words(lambda: mqtt.publish("t", "x", qos=1, wait=True)))
        _, delivery = mqtt.publish("t", "x", qos=2, delivery=True)
        it.put(*words(lambda: delivery.wait(20)))
        it.put(delivery.done, "refused", delivery.error)

    play_against(half, broker.port, lua, python, [(None, "refused", 0x87)] * 2 + [(True, "refused", 0x87)])


@pytest.mark.parametrize("half", ["Lua"], indirect=True)
def test_deliveries_that_the_application_forgets_are_forgotten(half: Half, start_mosquitto: Start) -> None:
    """Only Lua has numbers of deliveries."""
    lua = """local mqtt = mqttc.create('127.0.0.1', function() return true end, {port = port})
    for _ = 1, 100 do mqtt:publish('t', 'x', {delivery = true}) end
    collectgarbage() collectgarbage()
    put('done')"""
    play_against(half, start_mosquitto().port, lua, lambda _: None, [("done",)])
    gevent.sleep(0)
    assert len(half._services.mqtt._deliveries) < 5
