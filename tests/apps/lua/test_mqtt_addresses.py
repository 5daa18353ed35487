"""Addresses of the MQTT clients in Lua and Python: WebSockets, proxies, lists, Server References, take-overs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smqrt.wire.mqtt.fields import Reason
from tests.apps.lua.mqtt_languages import LuaHalf, PythonHalf, port_of
from tests.clients.mqtt.mosquitto import Mosquitto, start_with_websockets, tls_listener
from tests.clients.mqtt.scripted import ScriptedBroker, packet, text
from tests.conftest import free_port
from tests.support.factory import Factory
from tests.support.pki import Authority
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

CREATE = """
local mqtt
mqtt = mqttc.create(%s, function(kind, code, status)
  put(kind, code, status and status.reasoncode)
  if code == "connect" and status.reasoncode == 0 then
    mqtt:subscribe("a", function(_, reason) put("subscribed", reason) end)
  end
  return true
end, function(topic, payload) put(topic, tostring(payload)) end, %s)
mqtt:publish("b", "c", {qos = 1})"""
CONNECT = """
local mqtt, err, kind = mqtt3c.connect(%s, print, %s)
if not mqtt then return put(err, kind) end
mqtt:subscribe("a", function(code) put("subscribed", code) mqtt:disconnect() end)
put(mqtt:run())"""


class Client:
    """Makes the same client in the language of `half`.

    Args:
        half: the language.
    """

    def __init__(self, half: LuaHalf | PythonHalf) -> None:
        self._half = half

    def create(self, address: Any, **options: Any) -> list[tuple[Any, ...]]:
        """Create a client that subscribes when it is connected, and return what its callbacks get."""
        if isinstance(self._half, LuaHalf):
            self._start(CREATE % (lua_of(address), lua_of(options)))
            return self._half.told

        def onstatus(kind: str, code: str, status: Any) -> bool:
            self._half.put(kind, code, status.get("reasoncode"))
            if code == "connect" and not status["reasoncode"]:
                made[0].subscribe("a", lambda _, reason, prop: self._half.put("subscribed", reason))
            return True

        made = self._half.mqttc.create(address, onstatus, lambda *message: self._half.put(*message[:2]), **options)
        made[0].publish("b", "c", {"qos": 1})
        return self._half.told

    def connect(self, address: Any, **options: Any) -> list[tuple[Any, ...]]:
        """Connect a blocking client that subscribes and disconnects, and return what it gets."""
        if isinstance(self._half, LuaHalf):
            self._start(CONNECT % (lua_of(address), lua_of(options)))
            return self._half.told
        mqtt, err = self._half.mqtt3c.connect(address, print, **options)
        if mqtt is None:
            self._half.put(err, True if isinstance(err, int) else "sock")
            return self._half.told

        def subscribed(code: int) -> None:
            self._half.put("subscribed", code)
            mqtt.disconnect()

        mqtt.subscribe("a", subscribed)
        self._half.put(*mqtt.run())
        return self._half.told

    def _start(self, code: str) -> None:
        half: Any = self._half
        source = f"local mqttc, mqtt3c = require 'mqttc', require 'mqtt3c'\n{code}"
        half._vm.start(half._vm.compile(source, "@test.lua"))


def lua_of(value: Any) -> str:
    """A Lua literal."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {lua_of(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(lua_of, value)) + "}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


@pytest.fixture
def client(half: LuaHalf | PythonHalf) -> Client:
    return Client(half)


@pytest.fixture
def start_mosquitto(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    with Factory(partial(Mosquitto, tmp_path), Mosquitto.stop) as start:
        yield start


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    with Factory(ScriptedBroker) as start:
        yield start


Start = Callable[..., Mosquitto]
Scripted = Callable[..., ScriptedBroker]
SUBSCRIBED = ("subscribed", 0)


def test_websockets(client: Client, start_mosquitto: Start) -> None:
    port, _ = start_with_websockets(start_mosquitto)
    told = client.create(f"ws://127.0.0.1:{port}/mqtt", reconnectdelay=0.05)
    wait_until(lambda: SUBSCRIBED in told, told)
    del told[:]
    client.connect(f"ws://127.0.0.1:{port}")
    wait_until(lambda: len(told) == 2, told)
    assert told == [SUBSCRIBED, (None, "disconnect")]


def test_websockets_over_tls(client: Client, start_mosquitto: Start, tmp_path: Path) -> None:
    port, _ = start_with_websockets(start_mosquitto, tls_listener(Authority(tmp_path), "server", "localhost"))
    address = f"wss://anna:secret@localhost:{port}"
    told = client.create(address, reconnectdelay=60)
    wait_until(lambda: told, told)
    assert told == [("sock", "cn", None)]
    told = client.create(address, nocheck=True, reconnectdelay=0.05)
    wait_until(lambda: SUBSCRIBED in told, told)
    del told[:]
    client.connect(address)
    wait_until(lambda: told, told)
    assert told == [("cn", "sock")]


@pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])
def test_proxies(client: Client, start_mosquitto: Start, kind: type[TestProxy]) -> None:
    broker = start_mosquitto()
    with kind("me", "secret") as proxy:
        options = {"proxy": "127.0.0.1", "proxyport": proxy.port, "socks": kind is SocksProxy, "proxyuser": "me"}
        told = client.create(broker.address, **options, proxypass="secret")
        wait_until(lambda: SUBSCRIBED in told, told)
        del told[:]
        client.connect("127.0.0.1", port=broker.port, **options, proxypass="secret")
        wait_until(lambda: len(told) == 2, told)
        assert told == [SUBSCRIBED, (None, "disconnect")]
        assert proxy.seen == [broker.address] * 2
        del told[:]
        client.connect(broker.address, **options, proxypass="wrong")
        wait_until(lambda: told, told)
        assert told == [("proxyauth", "sock")]


def test_several_addresses(client: Client, start_mosquitto: Start, scripted: Scripted) -> None:
    busy, broker = scripted(code=Reason.SERVER_BUSY), start_mosquitto()
    told = client.create([f"127.0.0.1:{free_port()}", busy.address, broker.address], reconnectdelay=0.01)
    wait_until(lambda: SUBSCRIBED in told, told)
    assert told == [("mqtt", "connect", Reason.SERVER_BUSY), ("mqtt", "connect", 0), SUBSCRIBED]
    del told[:]
    client.connect([f"127.0.0.1:{free_port()}", broker.address])
    wait_until(lambda: len(told) == 2, told)
    assert told == [SUBSCRIBED, (None, "disconnect")]


def test_a_server_reference(client: Client, start_mosquitto: Start, scripted: Scripted) -> None:
    broker = start_mosquitto()
    old = scripted(code=Reason.SERVER_MOVED, properties=b"\x1c" + text(broker.address))
    told = client.create("127.0.0.1", port=port_of(old), reconnectdelay=60)
    wait_until(lambda: SUBSCRIBED in told, told)
    assert told == [("mqtt", "connect", Reason.SERVER_MOVED), ("mqtt", "connect", 0), SUBSCRIBED]


def test_take_overs(client: Client, scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    broker = scripted(on_open=lambda wire: wire.send(packet(0xE0, bytes((Reason.SESSION_TAKEN_OVER, 0)))))
    client.create(broker.address, reconnectdelay=0.001, clientidentifier="twin")
    wait_until(lambda: "MQTT client twin: another client has taken over" in caplog.text)


@pytest.mark.parametrize("address", ["mqtt://anna:secret@h:x", ["mqtt://anna:secret@h", "http://anna:secret@h"]])
def test_errors_do_not_contain_the_password(client: Client, address: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    told = client.create(address, reconnectdelay=60)
    wait_until(lambda: told, told)
    assert told == [("sock", "cannotresolve", None)]
    del told[:]
    client.connect(address)
    wait_until(lambda: told, told)
    assert told == [("cannotresolve", "sock")]
    assert "cannotresolve" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("options", [{"proxy": "h", "proxyport": 0}, {"reconnectdelay": 0}, {"reconnectmax": "x"}])
def test_wrong_options(half: LuaHalf | PythonHalf, client: Client, options: dict[str, Any], caplog: Any) -> None:
    if isinstance(half, PythonHalf):
        with pytest.raises(ValueError, match=list(options)[-1]):
            client.create("h", **options)
        return
    client.create("h", **options)
    wait_until(lambda: f"{list(options)[-1]} must be" in caplog.text)
