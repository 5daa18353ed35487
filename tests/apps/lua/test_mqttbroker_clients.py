"""mqttbroker and the MQTT clients of this package, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gevent import socket

from smqrt.apps.lua.vm import Vm
from smqrt.mqtt import MqttClient
from tests.apps.lua.mqtt_packets import connect, publish, subscribe, text
from tests.apps.lua.versions import by_version
from tests.support.waiting import wait_until


@pytest.fixture
def address(vm: Vm) -> Iterator[str]:
    vm.eval("broker = assert(require 'mqttbroker'.create(0, {address = '127.0.0.1'}))")
    yield f"mqtt://127.0.0.1:{vm.eval('return broker:status().port')[0]}"
    vm.eval("broker:close()")


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def test_python_client(address: str, version: int) -> None:
    general: list[Any] = []
    own: list[Any] = []
    granted: list[int] = []

    def on_suback(_topic: str, reason: int, _properties: Any) -> None:
        granted.append(reason)

    with MqttClient(address, onpub=lambda *message: general.append(message[:2]), version=version) as ada:
        ada.subscribe("house/+/temperature", onsuback=on_suback)
        ada.subscribe("lamp", lambda *message: own.append(message[:2]), on_suback)
        wait_until(lambda: granted == [0, 0])
        with MqttClient(address, version=version) as bob:
            for number in range(1000):
                bob.publish("house/attic/temperature", str(number))
            assert bob.publish("lamp", b"on").wait(2)
            wait_until(lambda: own)
    assert general == [("house/attic/temperature", str(number).encode()) for number in range(1000)]
    assert own == [("lamp", b"on")]


def test_a_python_client_gets_unsupported_features(address: str) -> None:
    told: list[Any] = []
    with MqttClient(address, onstatus=lambda *what: told.append(what) or True) as ada:
        ada.subscribe("$share/group/topic", onsuback=lambda topic, reason, _: told.append((topic, reason)))
        wait_until(lambda: told[1:])
    assert told[0][2]["properties"]["maximumqos"] == 0
    assert told[1] == ("$share/group/topic", 0x9E)


LUA_CLIENTS = """
local port = broker:status().port
seen = {}
local function see(...)
  local words = {...}
  for i = 1, select("#", ...) do words[i] = tostring(words[i]) end
  seen[#seen + 1] = table.concat(words, " ")
end

ada = require "mqttc".create("127.0.0.1", function(kind, code, status)
  see("ada", kind, code, status.reasoncode)
  ada:subscribe("lamp", function(topic, reason) see("suback", topic, reason) end, {onpub = function(topic, payload)
    see("own", topic, payload)
  end})
  ada:subscribe("house/#", function() ready = true end)
  return true
end, function(topic, payload, properties)
  see("general", topic, payload, properties.contenttype, properties.k)
end, {port = port, recbta = false})

function talk()
  here = broker:createClient(nil, nil, {recbta = false})
  here:publish("house/attic", "warm", nil, {contenttype = "text", k = "v"})
  here:publish("lamp", "on")
end

function old_client()
  ba.socket.event(function()
    local function onpub(topic, payload) see("old", topic, payload) end
    local mqtt, fault = require "mqtt3c".connect("127.0.0.1", onpub, {port = port})
    if not mqtt then return see(fault) end
    mqtt:subscribe("house/#", function() here:publish("house/cellar", "cold") end)
    see("run", select(2, mqtt:run()))
  end)
end
"""


def seen(vm: Vm) -> list[str]:
    return vm.eval("return table.concat(seen, '\\n')")[0].decode().split("\n")


def test_lua_clients(vm: Vm, address: str) -> None:
    vm.eval(LUA_CLIENTS)
    wait_until(lambda: vm.eval("return ready") == (True,))
    vm.eval("talk()")
    wait_until(lambda: len(seen(vm)) == 4)
    expected = ["ada mqtt connect 0", "suback lamp 0", "general house/attic warm text v", "own lamp on"]
    assert seen(vm) == expected
    vm.eval("old_client()")
    wait_until(lambda: len(seen(vm)) == 6)
    assert sorted(seen(vm)[4:]) == ["general house/cellar cold nil nil", "old house/cellar cold"]
    vm.eval("ada:disconnect() broker:shutdown()")
    wait_until(lambda: len(seen(vm)) == 7)
    assert seen(vm)[6] == "run socketreadfailed"


def test_a_lua_client_gets_the_refusal_reason(vm: Vm) -> None:
    vm.eval(
        """
        broker = assert(require "mqttbroker".create(0, {auth = function() return false end}))
        refused = require "mqttc".create("127.0.0.1", function(kind, code, status)
          said = table.concat({kind, code, status.reasoncode}, " ")
        end, {port = broker:status().port, username = "eve", password = "x"})
        """
    )
    wait_until(lambda: vm.eval("return said") == (b"mqtt connect 134",))
    vm.eval("broker:close()")


def test_properties_of_a_lua_client_have_lua_names(vm: Vm, address: str) -> None:
    got: list[Any] = []
    with MqttClient(address, onpub=lambda topic, payload, properties, _: got.append(properties)) as ada:
        ada.subscribe("a", onsuback=lambda *_: got.append("subscribed"))
        wait_until(lambda: got)
        vm.eval("lua_client = broker:createClient()")
        values = "{yes = true, sum = 0.1 + 0.2, whole = 3, contenttype = 'text', messageexpiryinterval = 60}"
        vm.eval(f"lua_client:publish('a', 'x', nil, {values})")
        wait_until(lambda: len(got) == 2)
    total = by_version("0.3", "0.30000000000000004")
    assert got[1] == {"yes": "true", "sum": total, "whole": "3", "contenttype": "text", "messageexpiryinterval": 60}


def test_a_will_keeps_its_properties_as_they_came(vm: Vm, address: str) -> None:
    users = b"".join(b"\x26\0\1" + name + b"\0\1" + value for name, value in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")))
    kept = users + b"\x03\0\1t"
    properties = kept + b"\x18\0\0\0\5"
    will = bytes((len(properties),)) + properties + text("w") + text("dead")
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as reader, socket.create_connection(("127.0.0.1", port)) as ada:
        reader.sendall(connect(5, "reader") + subscribe(5, "w"))
        wait_until(lambda: vm.eval("return broker:status().clients") == (1,))
        ada.sendall(connect(5, "ada", flags=0x06, rest=will))
        wait_until(lambda: vm.eval("return broker:status().clients") == (2,))
        ada.close()
        expected, got = publish(5, "w", b"dead", properties=kept), b""
        while not got.endswith(expected):
            part = reader.recv(1000)
            assert part
            got += part
