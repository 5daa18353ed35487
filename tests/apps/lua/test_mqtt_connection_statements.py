"""`mqttc` and `mqtt3c`: sessions, ways to a broker, and ends as the documents state them (spec: smq §8, §9)."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import gevent.ssl
import pytest
from gevent.server import StreamServer

from smqrt.clients.mqtt.connect import MqttOptions
from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls
from tests.apps.lua.mqtt_languages import (
    HOST,
    ONCE,
    Case,
    LuaHalf,
    PythonHalf,
    flags,
    keep,
    port_of,
)
from tests.clients.mqtt.scripted import (
    CONNECT,
    PUBLISH,
    SUBSCRIBE,
    ScriptedBroker,
    publish,
)
from tests.support.pki import Authority
from tests.support.waiting import wait_until

# ---- sessions


AGAIN = "mqttc.create('127.0.0.1', function(kind, code, status) put(code, status and status.sessionpresent)"
AGAIN += " return code == 'connect' or 0.001 end, nil, {port = port}, {sessionexpiryinterval = %d})"


def again(it: PythonHalf, expiry_s: int) -> None:
    def onstatus(kind: str, code: str, status: Any) -> Any:
        it.put(code, status.get("sessionpresent"))
        return code == "connect" or 0.001

    it.mqttc.create(HOST, onstatus, None, {"port": it.port}, {"sessionexpiryinterval": expiry_s})


@pytest.mark.parametrize("expiry_s", [0, 30])
def test_clean_starts(half: LuaHalf | PythonHalf, expiry_s: int) -> None:
    """The first connection always is one; a later one too, unless the session outlives the connection."""
    broker = ScriptedBroker(on_open=lambda wire: wire.sock.shutdown(2) if broker.connections == 1 else None)
    half.run(Case(AGAIN % expiry_s, lambda it: again(it, expiry_s)), port_of(broker))
    wait_until(lambda: len(half.told) == 3, half.told)
    assert [flags(body) & 2 for body in broker.of_kind(CONNECT)] == ([2, 0] if expiry_s else [2, 2])
    assert half.told == [("connect", False), ("socketreadfailed", None), ("connect", bool(expiry_s))]
    broker.close()


def test_what_is_sent_again_and_what_not(half: LuaHalf | PythonHalf) -> None:
    """A message that was not acknowledged, as a duplicate, in the same session; no subscription."""

    def swallow(wire: Any, first: int, body: bytes) -> bool:
        if broker.connections == 1 and first & 0xF0 == PUBLISH:
            wire.sock.shutdown(2)
            return True
        return False

    def act(it: PythonHalf) -> None:
        mqtt, _ = it.mqttc.create(HOST, lambda *_: 0.001, None, {"port": it.port}, {"sessionexpiryinterval": 30})
        mqtt.subscribe("t")
        mqtt.publish("t", "hello", {"qos": 1})

    broker = ScriptedBroker(on_packet=swallow)
    code = """local mqtt = mqttc.create('127.0.0.1', function() return 0.001 end, nil, {port = port},
      {sessionexpiryinterval = 30}) mqtt:subscribe 't' mqtt:publish('t', 'hello', {qos = 1})"""
    half.run(Case(code, act), port_of(broker))
    wait_until(lambda: broker.received, "the second attempt")
    assert [first for first, _ in broker.packets if first & 0xF0 == PUBLISH] == [0x32, 0x3A]
    assert len(broker.of_kind(SUBSCRIBE)) == 1
    broker.close()


def test_the_will_of_the_next_connection(half: LuaHalf | PythonHalf) -> None:
    def act(it: PythonHalf) -> None:
        def onstatus(*_: Any) -> float:
            mqtt.setwill({"topic": "last", "payload": "word"})
            return 0.001

        mqtt, _ = it.mqttc.create(HOST, onstatus, port=it.port)
        with pytest.raises(ArgumentError):
            mqtt.setwill({"payload": "without a topic"})
        it.put("refused")

    broker = ScriptedBroker(on_open=lambda wire: wire.sock.shutdown(2) if broker.connections == 1 else None)
    code = """local mqtt mqtt = mqttc.create('127.0.0.1', function()
      mqtt:setwill{topic = 'last', payload = 'word'} return 0.001 end, {port = port})
    if not pcall(mqtt.setwill, mqtt, {payload = 'without a topic'}) then put 'refused' end"""
    half.run(Case(code, act), port_of(broker))
    wait_until(lambda: len(broker.of_kind(CONNECT)) == 2, "another connection")
    assert [b"\0\x04last\0\x04word" in body for body in broker.of_kind(CONNECT)] == [False, True]
    assert half.told == [("refused",)]
    broker.close()


def test_without_onpub_messages_are_logged(half: LuaHalf | PythonHalf, caplog: pytest.LogCaptureFixture) -> None:
    broker = ScriptedBroker(on_open=lambda wire: wire.send(publish("t/1", b"x", properties=b"")))
    code = "mqttc.create('127.0.0.1', function() return true end, {port = port})"
    with caplog.at_level("INFO"):
        half.run(Case(code, lambda it: it.mqttc.create(HOST, keep, port=it.port)), port_of(broker))
        wait_until(lambda: "MQTT message without a callback:" in caplog.text, caplog.text)
    assert "t/1" in caplog.text
    broker.close()


# ---- ways to a broker

WAYS: dict[str, tuple[str, Callable[[PythonHalf], object], list[tuple[str, int]]]] = {
    "create": (
        ONCE + "for _, m in ipairs{mqttc, mqtt3c} do m.create('127.0.0.1', put, {}) end",
        lambda it: [made.create(HOST, it.put) for made in (it.mqttc, it.mqtt3c)],
        [(HOST, 1883)] * 2,
    ),
    "create, TLS": (
        ONCE + "for _, m in ipairs{mqttc, mqtt3c} do m.create('127.0.0.1', put, {secure = true}) end",
        lambda it: [made.create(HOST, it.put, secure=True) for made in (it.mqttc, it.mqtt3c)],
        [(HOST, 8883)] * 2,
    ),
    "create, shark": (
        "mqttc.create('127.0.0.1', put, {shark = ba.sharkclient()})",
        lambda it: it.mqttc.create(HOST, it.put, shark=ClientTls()),
        [(HOST, 8883)],
    ),
    "connect": (
        "for _, m in ipairs{mqttc, mqtt3c} do m.connect('127.0.0.1', put) end",
        lambda it: [made.connect(HOST, it.put) for made in (it.mqttc, it.mqtt3c)],
        [(HOST, 1883)] * 2,
    ),
    "connect, TLS": (
        "for _, m in ipairs{mqttc, mqtt3c} do m.connect('127.0.0.1', put, {secure = true}) end",
        lambda it: [made.connect(HOST, it.put, secure=True) for made in (it.mqttc, it.mqtt3c)],
        [(HOST, 8883)] * 2,
    ),
}


@pytest.mark.parametrize("what", WAYS)
def test_ports(half: LuaHalf | PythonHalf, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    tried: list[tuple[str, int]] = []

    def connect(host: str, port: int, *_: object, **__: object) -> Stream:
        tried.append((host, port))
        raise StreamError("cannotconnect", "of the test")

    monkeypatch.setattr(Stream, "connect", connect)
    lua, python, expected = WAYS[what]
    half.run(Case(lua, python), 0)
    wait_until(lambda: len(tried) >= len(expected), tried)
    assert tried == expected


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_the_local_address(half: LuaHalf | PythonHalf, module: str) -> None:
    peers: list[str] = []
    broker = ScriptedBroker(
        5 if module == "mqttc" else 4, on_open=lambda wire: peers.append(wire.sock.getpeername()[0])
    )
    code = ONCE + f"{module}.create('127.0.0.1', keep, {{port = port, intf = '127.0.0.7'}})"
    half.run(
        Case(code, lambda it: getattr(it, module).create(HOST, keep, port=it.port, intf="127.0.0.7")), port_of(broker)
    )
    wait_until(lambda: peers, "a connection")
    assert peers == ["127.0.0.7"]
    broker.close()


def test_ipv6(half: LuaHalf | PythonHalf) -> None:
    """Only addresses of IPv6 are tried."""
    came: list[Any] = []
    server = StreamServer(("::1", 0), lambda sock, address: came.append(address))
    server.start()
    other = ScriptedBroker()
    code = "mqttc.create('%s', function(_, code) put(code) end, {port = port, ipv6 = true})"

    def case(host: str) -> Case:
        told = lambda it: lambda kind, code, status: it.put(code) and False  # noqa: E731
        return Case(code % host, lambda it: it.mqttc.create(host, told(it), port=it.port, ipv6=True))

    half.run(case("[::1]"), server.server_port)
    wait_until(lambda: came, "a connection")
    half.told.clear()
    half.run(case("127.0.0.1"), port_of(other))
    wait_until(lambda: half.told and half.told[-1][0].startswith("cannot"), half.told)
    assert other.connections == 0
    server.stop()
    other.close()


@pytest.mark.parametrize("how", ["create", "connect"])
def test_alpn(half: LuaHalf | PythonHalf, tmp_path: Path, how: str) -> None:
    selected: list[str | None] = []
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path).pair("server", "localhost"))
    context.set_alpn_protocols(["x-amzn-mqtt-ca"])

    def serve(sock: Any, _address: object) -> None:
        try:
            with context.wrap_socket(sock, server_side=True) as secured:
                selected.append(secured.selected_alpn_protocol())
        except OSError:
            pass

    server = StreamServer(("127.0.0.1", 0), serve)
    server.start()
    op = "{port = port, secure = true, nocheck = true, alpn = 'x-amzn-mqtt-ca'}"
    code = f"mqttc.{how}('localhost', function() end, {op})"

    def act(it: PythonHalf) -> None:
        getattr(it.mqttc, how)(
            "localhost", lambda *_: False, port=it.port, secure=True, nocheck=True, alpn="x-amzn-mqtt-ca"
        )

    half.run(Case(code, act), server.server_port)
    wait_until(lambda: selected, "a handshake")
    assert selected == ["x-amzn-mqtt-ca"]
    server.stop()


FAILURES: dict[str, dict[str, Any]] = {
    "timeout": {"on_packet": lambda *_: True},
    "invalidresp": {"on_packet": lambda wire, *_: wire.send(b"\x20\x02\x09\x09") or True},
    **{str(code): {"code": code} for code in range(1, 6)},
}


@pytest.mark.parametrize("word", FAILURES)
def test_errors_of_connect(half: LuaHalf | PythonHalf, word: str) -> None:
    broker = ScriptedBroker(4, **FAILURES[word])
    code = "local mqtt, err = mqtt3c.connect('127.0.0.1', put, {port = port, timeout = 300}) put(mqtt, err)"
    half.run(
        Case(code, lambda it: it.put(*it.mqtt3c.connect(HOST, it.put, port=it.port, timeout=300))), port_of(broker)
    )
    wait_until(lambda: half.told)
    assert half.told == [(None, int(word) if word.isdigit() else word)]
    broker.close()


@pytest.mark.parametrize("module", ["mqttc", "mqtt3c"])
def test_the_timeout_of_create(half: LuaHalf | PythonHalf, module: str) -> None:
    broker = ScriptedBroker(on_packet=lambda *_: True)
    code = f"{module}.create('127.0.0.1', function(a, b) put(a, b) end, {{port = port, timeout = 100}})"

    def act(it: PythonHalf) -> None:
        getattr(it, module).create(
            HOST, lambda kind, code, status: it.put(kind, code) and False, port=it.port, timeout=100
        )

    half.run(Case(code, act), port_of(broker))
    wait_until(lambda: half.told)
    assert half.told == [("sock", "timeout")]
    broker.close()


def test_the_default_timeout_is_five_seconds() -> None:
    assert MqttOptions.timeout == 5


def test_the_end_reported_by_run(half: LuaHalf | PythonHalf) -> None:
    """`disconnect` is true when it was connected; `run` gives nil and the word."""

    def act(it: PythonHalf) -> None:
        mqtt, _ = it.mqtt3c.connect(HOST, lambda *message: it.put(*message, mqtt.disconnect()), port=it.port)
        mqtt.subscribe("t")
        it.put(*mqtt.run())
        it.put(mqtt.disconnect())

    broker = ScriptedBroker(4, push=[("t", 0, b"x")])
    code = """local mqtt
    mqtt = mqtt3c.connect('127.0.0.1', function(topic, msg) put(topic, msg, mqtt:disconnect()) end, {port = port})
    mqtt:subscribe 't' put(mqtt:run()) put(mqtt:disconnect())"""
    half.run(Case(code, act), port_of(broker))
    wait_until(lambda: len(half.told) == 3, half.told)
    assert half.told == [("t", "x", True), (None, "disconnect"), (False,)]
    broker.close()
