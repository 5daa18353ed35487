"""Lua applications and MQTT clients: options of publish, and what handlers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt.server.mqtt import take_mqtt
from smqrt.settings.limits import MqttSettings, apply_mqtt, current_mqtt
from tests.apps.lua.lua_hub import LuaSite
from tests.smq.test_mqtt_clients import PahoClient
from tests.support.waiting import wait_until


class MqttLua(NamedTuple):
    """A Lua application with a hub `smq` that accepts MQTT clients."""

    site: LuaSite

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.site.server.port


@pytest.fixture
def mqtt_lua(lua: Callable[[str], LuaSite]) -> Callable[[str], MqttLua]:
    def load(source: str = "") -> MqttLua:
        site = lua("smq = require'smq.hub'.create {mqtt = true}\n" + source)
        site.server.server.take_mqtt = take_mqtt
        return MqttLua(site)

    return load


@pytest.fixture
def client() -> Iterator[Callable[[MqttLua], PahoClient]]:
    clients: list[PahoClient] = []

    def connect(site: Any) -> PahoClient:
        clients.append(PahoClient(site, f"client-{len(clients)}"))
        return clients[-1]

    yield connect
    for one in clients:
        one.close()


def test_publish_with_options(mqtt_lua: Callable[..., MqttLua], client: Callable[[MqttLua], PahoClient]) -> None:
    lua = mqtt_lua()
    listener, got = client(lua), list[Any]()
    listener.client.on_message = lambda _client, _data, message: got.append(message)
    listener.subscribe("house/#", 2)
    lua.site.run("""
      local properties = {contenttype = "text/plain", correlationdata = "\\0id", payloadformatindicator = 1,
        colour = {"red", "blue"}, count = 5}
      record(smq:publish({1}, "house/a", {qos = 2, retain = true, expiry = 60, properties = properties}),
        smq:publish("21", smq:create "house/b", {qos = 0, subtopic = "s"}))""")
    assert lua.site.calls == [(0, 0)]
    wait_until(lambda: len(got) == 2, "the messages")
    got.sort(key=lambda message: str(message.topic))  # a message with QoS 2 arrives later
    message, found = got[0], got[0].properties
    assert (message.payload, message.qos, found.ContentType, found.CorrelationData) == (
        b"[1]",
        2,
        "text/plain",
        b"\0id",
    )
    assert sorted(found.UserProperty) == [("colour", "blue"), ("colour", "red"), ("count", "5")]
    assert 50 < found.MessageExpiryInterval <= 60
    assert (got[1].payload, got[1].qos) == (b"21", 0)
    assert list(lua.site.broker.devices.retained.by_name) == [b"house/a"]


def test_options_without_those_of_mqtt(lua: Callable[[], LuaSite]) -> None:
    site = lua()
    assert site.run("""
      smq:subscribe("t", {onmsg = function(data, ptid, tid, subtid) record(data, ptid, smq:tid2subtopic(subtid)) end})
      smq:publish("x", "t", {subtopic = "s", ptid = 5}) ba.sleep(1)""") == (b"x", 5, b"s")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("qos = 3", "qos: '3' is not a QoS"),
        ("expiry = -1", "expiry: '-1'"),
        ("properties = {topicalias = 1}", "properties: the hub sets topicalias"),
    ],
)
def test_invalid_options(mqtt_lua: Callable[..., MqttLua], options: str, error: str) -> None:
    answer = mqtt_lua().site.run(f"record(pcall(smq.publish, smq, 'x', 't', {{{options}}}))")
    assert answer[0] is False
    assert error in answer[1].decode()


def test_unknown_options_are_named(mqtt_lua: Callable[..., MqttLua], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    mqtt_lua().site.run("smq:publish('x', 't', {qso = 1})")
    assert "smq.publish has no option 'qso'; it is ignored" in caplog.text


def test_handlers_get_the_attributes(mqtt_lua: Callable[..., MqttLua], client: Callable[[MqttLua], PahoClient]) -> None:
    lua = mqtt_lua("""
      local function heard(data, ptid, tid, subtid, mqtt)
        local p = mqtt and mqtt.properties
        record(smq:tid2topic(tid), type(data), mqtt and mqtt.qos, mqtt and mqtt.retain,
          p and p.contenttype, p and table.concat(p.colour, "+"), mqtt and mqtt.expiry > 50)
      end
      smq:subscribe("named", {onmsg = heard})
      smq:subscribe {filter = "house/+", onmsg = heard, json = true}
      smq:subscribe("default")
      smq:onmsg(heard)
      smq:subscribe("count", {onmsg = function(...) record("count", select("#", ...)) end})
    """)
    sensor, calls = client(lua), lua.site.calls
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType, properties.MessageExpiryInterval = "text/plain", 60
    properties.UserProperty = [("colour", "red"), ("colour", "blue")]
    for topic, qos, retain in (("named", 2, False), ("house/a", 0, True), ("default", 1, False), ("count", 1, False)):
        sent = sensor.client.publish(topic, "21", qos, retain, properties)
        wait_until(sent.is_published, topic)
    wait_until(lambda: len(calls) == 4, calls)
    seen = (b"text/plain", b"red+blue", True)
    assert sorted(calls, key=str) == [
        (b"count", 5),
        (b"default", b"string", 1, False, *seen),
        (b"house/a", b"number", 0, True, *seen),
        (b"named", b"string", 2, False, *seen),
    ]
    calls.clear()
    lua.site.broker.publish(b"x", b"named")
    lua.site.broker.publish(b"x", b"count")
    wait_until(lambda: len(calls) == 2, calls)
    assert calls == [(b"named", b"string", None, None, None, None, None), (b"count", 4)]


def test_onpublish_gets_the_attributes(lua: Callable[[str], LuaSite], client: Callable[[MqttLua], PahoClient]) -> None:
    site = MqttLua(
        lua("""
    local function onpublish(data, ptid, tid, subtid, peer, mqtt)
      record(data, mqtt and mqtt.qos, mqtt and mqtt.properties.contenttype, mqtt and mqtt.expiry > 50)
      return true
    end
    smq = require"smq.hub".create {mqtt = true, onpublish = onpublish}""")
    )
    site.site.server.server.take_mqtt = take_mqtt
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType, properties.MessageExpiryInterval = "text/plain", 60
    client(site).client.publish("house", "21", 2, False, properties)
    wait_until(lambda: site.site.calls, "the message of the MQTT client")
    site.site.broker.publish(b"x", b"house")
    wait_until(lambda: len(site.site.calls) == 2, "the message of SMQ")
    assert site.site.calls == [(b"21", 2, b"text/plain", True), (b"x", None, None, None)]


def test_a_hub_of_python_in_lua(tmp_path: Path, lua: Callable[[str], LuaSite]) -> None:
    """Handlers of Lua at a hub that Python has created get the same."""
    from smqrt import hub

    site = lua("")
    with hub.create(mqtt=True) as smq:
        number = site.half.share(smq, " of a test")
        binding = site.half
        got: list[Any] = []
        smq.subscribe("t", lambda data, ptid, tid, subtid, mqtt: got.append((data, mqtt.qos)))
        assert binding.publish_mqtt(number, b"x", b"t", None, None, 2, False, None, None) == 0
        wait_until(lambda: got, "the message")
        assert got == [(b"x", 2)]
        assert binding.accepts_mqtt(number)


def test_onmqttgap(lua: Callable[[str], LuaSite], client: Callable[[MqttLua], PahoClient]) -> None:
    before = current_mqtt()
    apply_mqtt(MqttSettings(queued_messages=2))
    try:
        site = MqttLua(
            lua("""smq = require'smq.hub'.create {mqtt = true, onmqttgap = function(id, lost, peer, node)
          record(id, lost, peer and peer.uid, peer and peer.sock ~= nil, node)
        end}""")
        )
        site.site.server.server.take_mqtt = take_mqtt
        client(site).subscribe("news", 1)
        device = site.site.broker.devices.sessions["client-0"]
        for number in range(5):
            device.client.window = 0  # as if the client had not acknowledged anything
            site.site.broker.publish(b"%d" % number, b"news")
        wait_until(lambda: site.site.calls, "the report")
        site.site.broker.devices.gaps.lost(2, 5)
        wait_until(lambda: len(site.site.calls) == 2, "the report of a node")
        assert site.site.calls == [(b"client-0", 3, b"mqtt:client-0", True, None), (None, 5, None, None, 2)]
    finally:
        apply_mqtt(before)


def test_retained_messages_of_lua(mqtt_lua: Callable[..., MqttLua]) -> None:
    lua = mqtt_lua()
    lua.site.run("""
      for _, topic in ipairs {"house/a", "house/b", "garden"} do
        smq:publish(topic, topic, {retain = true, qos = 2, properties = {colour = {"red", "blue"}}})
      end
      for topic, data, mqtt in smq:retained "house/+" do
        if topic == "house/a" then smq:publish("", "house/b", {retain = true}) end -- deleted while they are listed
        record(topic, data, mqtt.qos, mqtt.retain, mqtt.properties.colour[2])
      end
      local count = 0
      for _ in smq:retained() do count = count + 1 end
      record(count, smq:deleteretained "house/#", smq:deleteretained "house/#", pcall(smq.deleteretained, smq, ""))""")
    first, (count, deleted, again, is_right, error) = lua.site.calls
    assert first == (b"house/a", b"house/a", 2, True, b"blue")
    assert (count, deleted, again, is_right) == (2, 1, 0, False)
    assert b"topic" in error


def test_retained_messages_need_mqtt(lua: Callable[[], LuaSite]) -> None:
    answer = lua().run("record(pcall(smq.retained, smq))")
    assert b"this hub accepts no MQTT clients; create it with the option mqtt" in answer[1]
