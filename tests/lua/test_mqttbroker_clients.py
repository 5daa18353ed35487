"""mqttbroker and the MQTT clients of this package, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smqrt.lua.vm import Vm
from smqrt.mqtt import MqttClient

Settled = Callable[[Callable[[], object]], None]


@pytest.fixture
def address(vm: Vm) -> Iterator[str]:
    vm.eval("broker = assert(require 'mqttbroker'.create(0, {address = '127.0.0.1'}))")
    yield f"mqtt://127.0.0.1:{vm.eval('return broker:status().port')[0]}"
    vm.eval("broker:close()")


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def test_python_client(address: str, settled: Settled, version: int) -> None:
    general: list[Any] = []
    own: list[Any] = []
    granted: list[int] = []

    def on_suback(_topic: str, reason: int, _properties: Any) -> None:
        granted.append(reason)

    with MqttClient(address, onpub=lambda *message: general.append(message[:2]), version=version) as ada:
        ada.subscribe("house/+/temperature", onsuback=on_suback)
        ada.subscribe("lamp", lambda *message: own.append(message[:2]), on_suback)
        settled(lambda: granted == [0, 0])
        with MqttClient(address, version=version) as bob:
            for number in range(1000):
                bob.publish("house/attic/temperature", str(number))
            assert bob.publish("lamp", b"on").wait(2)
            settled(lambda: own)
    assert general == [("house/attic/temperature", str(number).encode()) for number in range(1000)]
    assert own == [("lamp", b"on")]


def test_python_client_is_told_what_there_is_not(address: str, settled: Settled) -> None:
    told: list[Any] = []
    with MqttClient(address, onstatus=lambda *what: told.append(what) or True) as ada:
        ada.subscribe("$share/group/topic", onsuback=lambda topic, reason, _: told.append((topic, reason)))
        settled(lambda: told[1:])
    assert told[0][2]["properties"]["maximumqos"] == 0
    assert told[1] == ("$share/group/topic", 0x9E)
