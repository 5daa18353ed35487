"""Clients of MQTT 3.1 in Lua and Python, against a real mosquitto."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.mqtt import MqttClient
from smqrt.wire.mqtt.packets import ConnectPacket, WillMessage, decode_connect, encode
from tests.apps.lua.mqtt_languages import HOST, LuaHalf, PythonHalf, keep, play_against
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Connect = Callable[..., MqttClient]


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Mosquitto]:
    """A broker that writes which protocol its clients have."""
    broker = Mosquitto(
        tmp_path, common=f"allow_anonymous true\nuser root\nlog_dest file {tmp_path}/log\nlog_type all\n"
    )
    yield broker
    broker.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    with Factory(MqttClient, MqttClient.disconnect) as start:
        yield start


def test_every_quality_over_mqtt_3_1(half: LuaHalf | PythonHalf, mosquitto: Mosquitto, tmp_path: Path) -> None:
    lua = """local mqtt
    mqtt = mqtt3c.create('127.0.0.1', function() return true end, put, {port = port, version = '3.1', id = 'old'})
    mqtt:subscribe({{'a', 1}, {'b', 2}}, function(codes)
      put(table.concat(codes, ' '))
      for qos = 0, 2 do mqtt:publish('b', qos, {qos = qos}) end
    end)
    local _, text = pcall(mqtt3c.create, '127.0.0.1', function() end, {port = port, version = '3.0'})
    put(text:match('version.*'))"""

    def python(it: PythonHalf) -> None:
        mqtt, _ = it.mqtt3c.create(HOST, keep, it.put, port=it.port, version="3.1", id="old")

        def onsuback(codes: list[int]) -> None:
            it.put(" ".join(map(str, codes)))
            for qos in range(3):
                mqtt.publish("b", qos, qos=qos)

        mqtt.subscribe([("a", 1), ("b", 2)], onsuback)
        with pytest.raises(ArgumentError, match="version must be one of 4, '3.1', not '3.0'"):
            it.mqtt3c.create(HOST, keep, port=it.port, version="3.0")
        it.put("version must be one of 4, '3.1', not '3.0'")

    error = ("version must be one of 4, '3.1', not '3.0'",)
    play_against(half, mosquitto.port, lua, python, [error, ("1 2",), ("b", "0"), ("b", "1"), ("b", "2")])
    log = (tmp_path / "log").read_text("utf-8", "replace")
    assert "as old (p1," in log, "mosquitto calls MQTT 3.1 p1"


def test_a_session_of_mqtt_3_1(mosquitto: Mosquitto, connect: Connect) -> None:
    got: list[Any] = []
    options = {"version": "3.1", "clientidentifier": "sleeper", "cleanstart": False}
    first = connect(mosquitto.address, **options)
    first.subscribe("s", qos=2)
    assert first.flush(20)
    first.disconnect()
    assert first.wait_closed(20)
    command = ["mosquitto_pub", "-p", str(mosquitto.port), "-q", "2", "-t", "s", "-m", "kept"]
    subprocess.run(command, check=True, timeout=20)
    connect(mosquitto.address, None, lambda *message: got.append(message[1]), **options)
    wait_until(lambda: got)
    assert got == [b"kept"]


def test_connect_of_mqtt_3_1() -> None:
    packet = ConnectPacket(3, "c", False, 7, will=WillMessage("w", b"x", 1), username="u", password=b"p")
    data = encode(packet, 3)
    assert data[2:12] == b"\0\6MQIsdp\3\xcc"
    assert decode_connect(data[0], data[2:], takes_level_3=True) == packet


@pytest.mark.parametrize("identifier", ["", "x" * 24])
def test_identifiers_have_1_to_23_characters(identifier: str) -> None:
    with pytest.raises(ArgumentError, match="1 to 23 characters"):
        MqttClient("127.0.0.1:1", version="3.1", clientidentifier=identifier)
