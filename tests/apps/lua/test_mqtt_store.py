"""The store of MQTT clients in Lua and Python, against a real mosquitto."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.clients.mqtt import store as store_module
from smqrt.errors import StoreError
from tests.apps.lua.mqtt_languages import HOST, Case, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Half = LuaHalf | PythonHalf
PROPERTIES = {"sessionexpiryinterval": 60}


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path)
    yield broker
    broker.stop()


def test_messages_outlive_their_client(half: Half, mosquitto: Mosquitto, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    lua = f"""local props = {{sessionexpiryinterval = 60}}
    local observer = mqttc.create('127.0.0.1', function() return true end,
      function(topic, payload, prop) put(topic, payload, prop.contenttype) end, {{port = port}})
    local subscribed
    observer:subscribe('t', function() subscribed = true end, {{qos = 2}})
    local first = mqttc.create('127.0.0.1', function() return 60 end,
      {{port = 1, store = '{path}', timeout = 100}}, props)
    first:publish('t', 'one', {{qos = 1}}, {{contenttype = 'x'}})
    local _, delivery = first:publish('t', 'two', {{qos = 1, delivery = true}})
    first:disconnect()
    put(delivery:wait(20000))
    while not subscribed do ba.sleep(5) end
    local second
    repeat
      local ok
      ok, second = pcall(mqttc.create, '127.0.0.1', function() return true end, {{port = port, store = '{path}'}},
        props)
      if not ok then ba.sleep(5) end
    until ok
    put(second:publish('t', 'three', {{qos = 1, wait = 20000}}))"""

    def python(it: PythonHalf) -> None:
        observer, _ = it.mqttc.create(
            HOST, keep, lambda topic, payload, prop, _: it.put(topic, payload, prop.get("contenttype")), port=it.port
        )
        subscribed: list[Any] = []
        observer.subscribe("t", lambda *_: subscribed.append(1), qos=2)
        first, _ = it.mqttc.create(HOST, lambda *_: 60, {"port": 1, "store": path, "timeout": 100}, PROPERTIES)
        first.publish("t", "one", {"qos": 1}, {"contenttype": "x"})
        _, delivery = first.publish("t", "two", qos=1, delivery=True)
        first.disconnect()
        it.put(None, "closed" if first._client.wait_closed(20) and delivery.error else None)
        observer._client.flush(20)
        second, _ = it.mqttc.create(HOST, keep, {"port": it.port, "store": path}, PROPERTIES)
        it.put(second.publish("t", "three", qos=1, wait=20_000))

    told = [(None, "closed"), ("t", "one", "x"), ("t", "two", None), ("t", "three", None), (True,)]
    half.run(Case(lua, python), mosquitto.port)
    wait_until(lambda: len(half.told) >= len(told), half.told)
    # PUBACK may come before the last message.
    assert half.told[:3] == told[:3]
    assert sorted(map(repr, half.told[3:])) == sorted(map(repr, told[3:]))


def test_a_full_disk(half: Half, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_changes(database: sqlite3.Connection, changes: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store_module, "write_changes", write_changes)
    path = str(tmp_path / "store")
    lua = f"""local mqtt = mqttc.create('127.0.0.1', function() return 60 end, {{port = 1, store = '{path}'}},
      {{sessionexpiryinterval = 60}})
    for _, op in ipairs {{{{qos = 1}}, {{qos = 2, wait = true}}, {{qos = 1, delivery = true}}}} do
      local ok, word, text = mqtt:publish('t', 'x', op)
      put(ok, word, text:match 'disk is full')
    end
    put(mqtt:publish('t', 'x'), mqtt:status())"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqttc.create(HOST, lambda *_: 60, {"port": 1, "store": path}, PROPERTIES)
        options: list[dict[str, Any]] = [{"qos": 1}, {"qos": 2, "wait": True}, {"qos": 1, "delivery": True}]
        for op in options:
            with pytest.raises(StoreError, match="disk is full"):
                mqtt.publish("t", "x", op)
            it.put(None, "storefailed", "disk is full")
        it.put(mqtt.publish("t", "x"), *mqtt.status(), 0, 0)

    play_against(half, 1, lua, python, [(None, "storefailed", "disk is full")] * 3 + [(False, 1, False, False, 0, 0)])
