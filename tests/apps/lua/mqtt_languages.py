"""One piece of code with an MQTT client in Lua and in Python, and the broker that it talks to."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import gevent.ssl
import pytest

from smqrt import mqtt3c, mqttc
from smqrt.apps.lua import api
from smqrt.apps.lua.api import files
from smqrt.apps.lua.vm import Services, Vm
from smqrt.http.disk import DiskIo
from tests.clients.mqtt.scripted import (
    ScriptedBroker,
)
from tests.support.waiting import let_others_run, wait_until

LANGUAGES = ["Lua", "Python"]
HALF = b"""local core, py = ...
function put(...)
  local list = table.pack(...)
  for at = 1, list.n do
    if type(list[at]) == "userdata" then list[at] = tostring(list[at]) end
  end
  py.put(table.unpack(list, 1, list.n))
end"""


def plain(value: Any) -> Any:
    """The same value for both languages: bytes as text, a whole number as int."""
    if isinstance(value, bytes | bytearray):
        return value.decode("latin-1")
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Half:
    """A language: runs a piece of code with a port, and keeps what it `put`.

    Attributes:
        told: what came, each call a tuple.
    """

    def __init__(self, folder: Path) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.folder = folder

    def put(self, *values: Any) -> bool:
        self.told.append(tuple(map(plain, values)))
        return True


class LuaHalf(Half):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._services, self._vm = Services(ios={"disk": DiskIo(folder)}), Vm()
        api.install(self._vm, self._services)
        files.install(self._vm, self._services)
        put: Any = lambda *values: self.put(*values) and None  # noqa: E731
        self._vm.namespace("put", {"put": put}, source=HALF)

    def run(self, case: Case, port: int) -> None:
        source = f"local port, mqttc, mqtt3c = {port}, require 'mqttc', require 'mqtt3c'\n{case.lua}"
        self._vm.start(self._vm.compile(source, "@test.lua"))

    def close(self) -> None:
        self._services.mqtt.shutdown()
        self._vm.stop()
        gevent.sleep(0)


class PythonHalf(Half):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = 0
        self._made: list[Any] = []
        self.mqttc = SimpleNamespace(create=self._kept(mqttc.create), connect=self._kept(mqttc.connect))
        self.mqtt3c = SimpleNamespace(create=self._kept(mqtt3c.create), connect=self._kept(mqtt3c.connect))

    def _kept(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            mqtt, err = make(*arguments, **options)
            self._made.append(mqtt)
            return mqtt, err

        return made

    def run(self, case: Case, port: int) -> None:
        self.port = port
        gevent.spawn(case.python, self)

    def close(self) -> None:
        for mqtt in filter(None, self._made):
            mqtt.disconnect()
        gc.collect()


@dataclass
class Case:
    """What is done in each language, and what has to come of it.

    Attributes:
        lua, python: the code; Python's gets the `PythonHalf`.
        told: what it puts.
        has: by kind of packet, the pieces that the last one of that kind has, in any order.
        sent: by kind of packet, the beginning of the body of the last one.
        broker: arguments of `ScriptedBroker`.
    """

    lua: str
    python: Callable[[PythonHalf], object]
    told: list[tuple[Any, ...]] = field(default_factory=list)
    has: dict[int, list[bytes]] = field(default_factory=dict)
    sent: dict[int, bytes] = field(default_factory=dict)
    broker: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(params=LANGUAGES)
def half(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LuaHalf | PythonHalf]:
    made = LuaHalf(tmp_path) if request.param == "Lua" else PythonHalf(tmp_path)
    yield made
    made.close()


def keep(*_: object) -> bool:
    return True


HOST = "127.0.0.1"
ONCE = "local function keep() return true end "


def flags(body: bytes) -> int:
    return body[7]


def last(broker: ScriptedBroker, kind: int) -> bytes:
    wait_until(lambda: broker.of_kind(kind), "the packet")
    return broker.of_kind(kind)[-1]


@pytest.fixture
def run(half: LuaHalf | PythonHalf) -> Iterator[Callable[[Case], ScriptedBroker]]:
    """Runs a case, waits for what it has to tell and compares; gives the broker."""
    brokers: list[ScriptedBroker] = []

    def play(case: Case) -> ScriptedBroker:
        broker = ScriptedBroker(**case.broker)
        brokers.append(broker)
        half.run(case, int(broker.address.split(":")[1]))
        wait_until(lambda: len(half.told) >= len(case.told), half.told)
        for kind, body in case.sent.items():
            assert last(broker, kind).startswith(body)
        for kind, pieces in case.has.items():
            found = last(broker, kind)
            assert [piece for piece in pieces if found.count(piece) != 1] == [], found
        let_others_run()
        assert half.told == case.told
        return broker

    yield play
    for broker in brokers:
        broker.close()


def port_of(broker: ScriptedBroker) -> int:
    return int(broker.address.split(":")[1])


def play_against(
    half: LuaHalf | PythonHalf,
    port: int,
    lua: str,
    python: Callable[[PythonHalf], object],
    told: list[tuple[Any, ...]],
) -> None:
    """Runs a piece of code against a real broker, and compares what it puts."""
    half.run(Case(lua, python), port)
    wait_until(lambda: len(half.told) >= len(told), half.told)
    let_others_run()
    assert half.told == told
