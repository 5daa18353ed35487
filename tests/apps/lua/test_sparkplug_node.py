"""`SparkplugB.create`: an edge node against a real mosquitto, seen by a host application."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.lua import api
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from smqrt.clients.mqtt import sparkplug
from smqrt.mqtt import MqttClient
from tests.apps.lua.app_server import AppServer
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers  # mosquitto

NODE = """
metrics = {
  {name = "temperature", datatype = "Float", value = 21.5}, {name = "count", datatype = "Int32", value = 1, alias = 7},
}
commands, states = {}, {}
node = require "SparkplugB".create("127.0.0.1", "plant", "press", {
  port = port,
  onstatus = function(kind, code) states[#states + 1] = kind .. " " .. code return 0.05 end,
  onncmd = function(metrics, payload) commands[#commands + 1] = {nil, metrics, payload} end,
  ondcmd = function(device, metrics, payload) commands[#commands + 1] = {device, metrics, payload} end,
})
"""


class Host:
    """A host application: what it hears, as `kind[/device]`, payload."""

    def __init__(self, port: int) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self._client = MqttClient(f"127.0.0.1:{port}", onpub=self._hear)
        self._client.subscribe("spBv1.0/plant/#", qos=1)
        assert self._client.wait_connected(5)
        assert self._client.flush(5)

    def _hear(self, topic: str, payload: bytes, *_: object) -> None:
        _, _, kind, *names = topic.split("/")
        if not kind.endswith("CMD"):
            self.heard.append(("/".join([kind, *names[1:]]), sparkplug.decode(payload)))

    def command(self, topic: str, *metrics: dict[str, Any]) -> None:
        self._client.publish(f"spBv1.0/plant/{topic}", sparkplug.encode({"metrics": list(metrics)}), 0)

    def send(self, topic: str, data: bytes) -> None:
        self._client.publish(f"spBv1.0/plant/{topic}", data, 0)

    def wait(self, count: int) -> list[tuple[str, Any]]:
        """The first so many that were heard: kind and seq, for a death the bdSeq."""
        wait_until(lambda: len(self.heard) >= count, self.heard)
        return [(kind, payload.get("seq", bdseq(payload))) for kind, payload in self.heard]

    def close(self) -> None:
        self._client.close()


def values(payload: dict[str, Any]) -> dict[Any, Any]:
    return {one.get("name", one.get("alias")): one.get("value") for one in payload["metrics"]}


def bdseq(payload: dict[str, Any]) -> Any:
    return values(payload).get("bdSeq")


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    running: list[Mosquitto] = []

    def start(port: int = 0) -> Mosquitto:
        running.append(Mosquitto(tmp_path, port=port))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.stop()


@pytest.fixture
def host(mosquitto: Mosquitto) -> Iterator[Host]:
    host = Host(mosquitto.port)
    yield host
    host.close()


@pytest.fixture
def lua() -> Iterator[Callable[..., Any]]:
    """Runs Lua with `port`, in one runtime."""
    services, vm = Services(), Vm()
    api.install(vm, services)

    def run(source: str, port: int = 0) -> Any:
        return vm.eval(f"port = {port}\n{source}" if port else source)

    yield run
    services.mqtt.shutdown()
    services.mqtt.wait_ended(5)
    vm.stop()
    gevent.sleep(0)


def test_births_data_and_deaths(lua: Callable[..., Any], mosquitto: Mosquitto, host: Host) -> None:
    lua(NODE, mosquitto.port)
    lua("assert(node:nbirth(metrics) == false)")  # the connection is still to come
    host.wait(1)
    lua(
        """
    assert(node:dbirth("pump", {{name = "on", value = true}, {name = "rpm", value = 100, alias = 8}}) == true)
    assert(node:ndata{{name = "temperature", value = 22}, {name = "count", value = 2}} == true)
    assert(node:ddata("pump", {{alias = 8, value = 200}, {name = "on", value = false}}) == true)
    assert(node:ddata("pump", {{name = "rpm"}}) == true)
    assert(node:ddeath "pump" == true)
    local status = node:status()
    assert(status.connected and status.online and status.seq == 6 and status.bdseq == 0)
    assert(node:close() == true and node:close() == false and node:ndata{} == false)"""
    )
    assert host.wait(7) == [
        ("NBIRTH", 0),
        ("DBIRTH/pump", 1),
        ("NDATA", 2),
        ("DDATA/pump", 3),
        ("DDATA/pump", 4),
        ("DDEATH/pump", 5),
        ("NDEATH", 0),
    ]
    payloads = [payload for _, payload in host.heard]
    assert values(payloads[0]) == {"bdSeq": 0, "Node Control/Rebirth": False, "temperature": 21.5, "count": 1}
    assert all("timestamp" in one and "datatype" in one for one in payloads[0]["metrics"])
    assert payloads[0]["metrics"][3]["alias"] == 7
    assert [one["datatype"] for one in payloads[1]["metrics"]] == ["Boolean", "Int64"]
    assert values(payloads[2]) == {"temperature": 22.0, 7: 2}
    assert values(payloads[3]) == {8: 200, "on": False}
    assert payloads[4]["metrics"][0]["is_null"]
    assert values(payloads[6]) == {"bdSeq": 0}
    assert "seq" not in payloads[6]
    assert all(payload["timestamp"] > 1_700_000_000_000 for payload in payloads)


def test_seq_goes_round(lua: Callable[..., Any], mosquitto: Mosquitto, host: Host) -> None:
    lua(NODE + "node:nbirth(metrics)", mosquitto.port)
    host.wait(1)
    lua("for at = 1, 300 do assert(node:ndata{{name = 'count', value = at}}) end node:close()")
    heard = host.wait(302)
    assert [seq for kind, seq in heard if kind != "NDEATH"] == [at % 256 for at in range(301)]
    assert values(host.heard[300][1]) == {7: 300}


def test_commands_and_rebirth(lua: Callable[..., Any], mosquitto: Mosquitto, host: Host) -> None:
    lua(NODE + "node:nbirth(metrics)", mosquitto.port)
    host.wait(1)
    lua('node:dbirth("pump", {{name = "on", value = true, alias = 9}}) node:ndata{{name = "temperature", value = 30}}')
    host.wait(3)
    host.command("NCMD/press", {"alias": 7, "datatype": "Int32", "value": 5})
    host.command("DCMD/press/pump", {"alias": 9, "datatype": "Boolean", "value": False})
    host.command("DCMD/press/none", {"name": "x", "datatype": "Boolean", "value": False})
    host.command("NCMD/other", {"name": "Node Control/Rebirth", "datatype": "Boolean", "value": True})
    host.command("NCMD/press", {"name": "Node Control/Rebirth", "datatype": "Boolean", "value": False})
    host.send("NCMD/press", b"\xff\xff")
    host.command("NCMD/press", {"name": "Node Control/Rebirth", "datatype": "Boolean", "value": True})
    assert host.wait(5)[3:] == [("NBIRTH", 0), ("DBIRTH/pump", 1)]
    assert values(host.heard[3][1]) == {"bdSeq": 0, "Node Control/Rebirth": False, "temperature": 30.0, "count": 1}
    lua("while #commands < 3 do ba.sleep(1) end assert(node:ndata{{name = 'count', value = 9}})")
    assert host.wait(6)[5] == ("NDATA", 2)
    lua(
        """
    assert(commands[1][1] == nil and commands[1][2][1].name == "count" and commands[1][2][1].value == 5)
    assert(commands[2][1] == "pump" and commands[2][2][1].name == "on" and commands[2][2][1].value == false)
    assert(commands[3][1] == "none" and commands[3][3].metrics[1].name == "x" and #commands == 3)"""
    )


def test_a_lost_connection_begins_a_new_session(
    lua: Callable[..., Any], start_broker: Callable[..., Mosquitto]
) -> None:
    broker = start_broker()
    first = Host(broker.port)
    lua(NODE + "node:nbirth(metrics)", broker.port)
    first.wait(1)
    lua("node:dbirth('pump', {{name = 'on', value = true}})")
    first.wait(2)
    first.close()
    broker.stop()
    lua("while node:status().connected do ba.sleep(1) end")
    lua(
        "assert(node:ndata{{name = 'count', value = 77}} == false) assert(node:ddata('pump', {{name = 'on'}}) == false)"
    )
    again = start_broker(broker.port)
    second = Host(again.port)
    second.wait(0)
    wait_until(lambda: lua("return node:status().online")[0])
    lua("while node:status().seq < 2 do ba.sleep(1) end assert(node:ndata{{name = 'count', value = 78}}) node:close()")
    # It hears the births too when it was there before them.
    wait_until(lambda: [kind for kind, _ in second.heard][-1:] == ["NDEATH"], second.heard)
    heard = second.wait(2)
    second.close()
    assert heard[-2:] == [("NDATA", 2), ("NDEATH", 1)]
    assert not {kind for kind, _ in heard} - {"NBIRTH", "DBIRTH/pump", "NDATA", "NDEATH"}
    assert lua("return node:status().bdseq") == (1,)


def test_the_broker_publishes_death_of_a_cut_node(lua: Callable[..., Any], mosquitto: Mosquitto, host: Host) -> None:
    source = """
    local sock
    node = require "SparkplugB".create(function() sock = ba.socket.connect("127.0.0.1", port) return sock end,
      "plant", "press", {metrics = {{name = "a", value = 1}}, onstatus = function() return 0.05 end})
    function cut() sock:close() end"""
    lua(source, mosquitto.port)
    host.wait(1)
    lua("cut()")
    heard = host.wait(3)
    assert sorted(heard) == [("NBIRTH", 0), ("NBIRTH", 0), ("NDEATH", 0)]
    births = [payload for kind, payload in host.heard if kind == "NBIRTH"]
    assert list(map(bdseq, births)) == [0, 1]


def test_a_large_birth_keeps_the_order(lua: Callable[..., Any], mosquitto: Mosquitto, host: Host) -> None:
    lua(NODE, mosquitto.port)
    lua(
        """
    while not node:status().connected do ba.sleep(1) end
    many = {}
    for at = 1, 2000 do many[at] = {name = "metric " .. at, value = at} end
    assert(node:nbirth(many))
    for at = 1, 5 do ba.thread.run(function() node:ndata{{name = "metric " .. at, value = -at}} end) end
    ba.thread.run(function() node:nbirth() end)
    for at = 6, 9 do ba.thread.run(function() node:ndata{{name = "metric " .. at, value = -at}} end) end"""
    )
    heard = host.wait(11)
    again = [at for at, (kind, _) in enumerate(heard) if kind == "NBIRTH"][1]
    assert heard[:again] == [("NBIRTH", 0), *(("NDATA", at) for at in range(1, again))]
    assert heard[again:] == [("NBIRTH", 0), *(("NDATA", at) for at in range(1, 11 - again))]
    known: dict[Any, Any] = {}
    for _, payload in host.heard:
        known |= values(payload)
    assert [known[f"metric {at}"] for at in range(1, 11)] == [-1, -2, -3, -4, -5, -6, -7, -8, -9, 10]


def test_a_node_ends_with_its_application(
    server: AppServer, mosquitto: Mosquitto, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    preload = f"""node = require "SparkplugB".create("127.0.0.1", "plant", "press",
      {{port = {mosquitto.port}, metrics = {{{{name = "a", value = 1}}}}}})"""
    caplog.set_level(logging.WARNING)
    assert server.app({".preload": preload}, "app").error is None
    assert host.wait(1) == [("NBIRTH", 0)]
    assert server.page("<?lsp print(mako.stopapp'app') ?>").text == "true\n"
    assert host.wait(2)[1] == ("NDEATH", 0)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("SP.create('x', 'a/b', 'n')", "bad argument #2 to 'create' (an id without / + # expected, got 'a/b')"),
        ("SP.create('x', 'a', '')", "bad argument #3 to 'create' (an id"),
        ("SP.create('x', 'a', 'n', {onncmd = 1})", "bad argument #onncmd to 'create' (function expected, got number)"),
        ("SP.create('x', 'a', 'n', {metrics = {{value = 1}}})", "bad argument #name to 'create'"),
        ("node:ndata{}", "call nbirth first"),
        ("node:ddata('d', {})", "there is no device 'd'; call dbirth first"),
        ("node:ddeath 'd'", "there is no device 'd'"),
        ("node:dbirth('+', {})", "an id without / + # expected, got '+'"),
        ("node:nbirth{{name = 'a'}}", "nbirth: the metric 'a' needs a datatype"),
        ("node:nbirth{{name = 'a', value = {}}}", "nbirth: the metric 'a' needs a datatype"),
        ("node:nbirth{{name = 'a', value = 1}, {name = 'a', value = 1}}", "there are two metrics 'a'"),
        ("node:nbirth{{name = 'a', value = 1, alias = 1}, {name = 'b', value = 1, alias = 1}}", "with the alias 1"),
        ("node:nbirth{{name = 'a', datatype = 'Int8', value = 300}}", "from -128 to 127 for Int8, not 300"),
        ("node:nbirth{} node:ndata{{name = 'b', value = 1}}", "ndata: the metric 'b' is not in the birth"),
        ("node.ndata(1, {})", "sparkplug expected"),
    ],
)
def test_wrong_arguments(lua: Callable[..., Any], call: str, message: str) -> None:
    source = f"""SP = require "SparkplugB" local node = SP.create("127.0.0.1", "g", "n", {{port = 1}})
    local ok, text = pcall(function() {call} end) node:close() assert(not ok, "no error") return text"""
    (text,) = lua(source)
    assert message in text.decode()
    assert text.startswith(b"eval:"), LuaError
