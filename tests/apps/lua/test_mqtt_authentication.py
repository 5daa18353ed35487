"""Extended authentication of MQTT 5 in Lua and Python, against a scripted server with the codec of smqrt."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt.errors import ArgumentError, ClosedError, NoAnswer
from smqrt.mqtt import MqttClient
from smqrt.wire.mqtt.packets import (
    AuthPacket,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PacketSplitter,
    PublishPacket,
    decode,
    encode,
)
from tests.apps.lua.mqtt_languages import HOST, Case, LuaHalf, PythonHalf
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

KEY, METHOD = b"secret", "TEST-HMAC"
CONTINUE, AGAIN = 0x18, 0x19


def proof(data: bytes) -> bytes:
    return hmac.new(KEY, data, hashlib.sha256).hexdigest().encode()


class AuthServer:
    """Challenges its client with a number, and proves that it knows the key as well.

    Args:
        twist: `f(packet)` replaces a packet of the server, None leaves it out.

    Attributes:
        packets: what the client sent.
        wire: sends a packet on the last connection.
    """

    def __init__(self, twist: Callable[[Packet], Packet | None] = lambda packet: packet) -> None:
        self.packets: list[Packet] = []
        self.twist = twist
        self._server = StreamServer((HOST, 0), self._serve)
        self._server.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.stop(timeout=0)

    def _serve(self, sock: Any, _address: object) -> None:
        splitter = PacketSplitter()
        self.wire = lambda packet: sock.sendall(encode(packet, 5))
        is_accepted = False
        while data := sock.recv(4096):
            splitter.feed(data)
            while (found := splitter.next()) is not None:
                packet = decode(*found, 5, True)
                self.packets.append(packet)
                for answer in self._answers(packet, is_accepted):
                    is_accepted = is_accepted or isinstance(answer, ConnackPacket) and not answer.code
                    if (twisted := self.twist(answer)) is not None:
                        self.wire(twisted)

    def _answers(self, packet: Packet, is_accepted: bool) -> list[Packet]:
        name = {"authenticationmethod": METHOD}
        if isinstance(packet, ConnectPacket) or isinstance(packet, AuthPacket) and packet.code == AGAIN:
            assert packet.properties.items() >= {**name, "authenticationdata": b"anna"}.items()
            return [AuthPacket(CONTINUE, name | {"authenticationdata": b"nonce"})]
        if isinstance(packet, AuthPacket):
            right = packet.properties == name | {"authenticationdata": proof(b"nonce")}
            more = name | {"authenticationdata": proof(b"server")}
            if is_accepted:
                return [AuthPacket(0, more) if right else DisconnectPacket(0x87)]
            return [ConnackPacket(False, 0, more) if right else ConnackPacket(False, 0x87)]
        return []


@pytest.fixture
def serve() -> Iterator[Callable[..., AuthServer]]:
    with Factory(AuthServer) as start:
        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., MqttClient]]:
    with Factory(MqttClient, MqttClient.disconnect) as start:
        yield start


def onauth(data: bytes | None) -> bytes | None:
    if data is None:
        return b"anna"
    if data == b"nonce":
        return proof(data)
    if data != proof(b"server"):
        raise ValueError("not the server")
    return None


def of_kind(server: AuthServer, kind: type) -> list[Any]:
    return [packet for packet in server.packets if isinstance(packet, kind)]


LUA = f"""local proofs = {{nonce = '{proof(b"nonce").decode()}', server = '{proof(b"server").decode()}'}}
local wrong = false
local function onauth(data)
  put('onauth', data)
  if data == nil then return 'anna' end
  if data == 'nonce' then return wrong and 'guess' or proofs.nonce end
  if data ~= proofs.server then error 'not the server' end
end
local mqtt
mqtt = mqttc.create('127.0.0.1', function(kind, code, status)
  put(kind, code, status and status.reasoncode)
  return code == 'connect'
end, {{port = port, authenticationmethod = 'TEST-HMAC', onauth = onauth}})
mqtt:publish('t', 'x', {{wait = 20000}})
put(mqtt:authenticate(20000))
wrong = true
put(mqtt:authenticate(20000))
put(mqtt:authenticate(20000))"""


def in_python(it: PythonHalf) -> None:
    is_wrong = False

    def answer(data: bytes | None) -> bytes | None:
        it.put("onauth", data)
        return b"guess" if is_wrong and data == b"nonce" else onauth(data)

    def onstatus(kind: str, code: str, status: Any) -> bool:
        it.put(kind, code, status.get("reasoncode"))
        return code == "connect"

    def again() -> tuple[Any, ...]:
        try:
            return (mqtt.authenticate(20_000),)
        except ClosedError:
            return None, "closed"

    mqtt, _ = it.mqttc.create(HOST, onstatus, port=it.port, authenticationmethod=METHOD, onauth=answer)
    mqtt.publish("t", "x", wait=20_000)
    it.put(*again())
    is_wrong = True
    it.put(*again())
    it.put(*again())


def test_challenges_and_authentication_again(half: LuaHalf | PythonHalf, serve: Callable[..., AuthServer]) -> None:
    server = serve()
    first, nonce, end = ("onauth", None), ("onauth", "nonce"), ("onauth", proof(b"server").decode())
    told = [
        first,
        nonce,
        end,
        ("mqtt", "connect", 0),
        first,
        nonce,
        end,
        (True,),
        first,
        nonce,
        (None, "closed"),
        ("mqtt", "disconnect", 0x87),
        (None, "closed"),
    ]

    half.run(Case(LUA, in_python), server.port)
    wait_until(lambda: len(half.told) >= len(told), half.told)
    assert half.told[:10] == told[:10]
    assert sorted(map(repr, half.told[10:])) == sorted(map(repr, told[10:])), "the loop and the callback take turns"
    kinds = [type(packet) for packet in server.packets]
    assert kinds[:5] == [ConnectPacket, AuthPacket, PublishPacket, AuthPacket, AuthPacket]
    assert of_kind(server, AuthPacket)[1].code == AGAIN


def test_a_wrong_answer_is_refused(serve: Callable[..., AuthServer], connect: Callable[..., MqttClient]) -> None:
    client = connect(
        f"127.0.0.1:{serve().port}", authenticationmethod=METHOD, onauth=lambda data: b"guess" if data else b"anna"
    )
    assert not client.wait_connected(20)
    assert client.end is not None
    assert client.end.status["reasoncode"] == 0x87


def test_a_server_without_the_key_gets_no_message(
    serve: Callable[..., AuthServer], connect: Callable[..., MqttClient]
) -> None:
    def lie(packet: Packet) -> Packet:
        return packet._replace(properties={"authenticationdata": b"lie"}) if type(packet) is ConnackPacket else packet

    server = serve(twist=lie)
    ended: list[str] = []
    client = connect(
        f"127.0.0.1:{server.port}",
        lambda kind, code, status: ended.append(code) or code == "connect",
        authenticationmethod=METHOD,
        onauth=onauth,
    )
    client.publish("t", "x")
    wait_until(lambda: "autherror" in ended, ended)
    assert of_kind(server, PublishPacket) == []
    wait_until(lambda: of_kind(server, DisconnectPacket))
    assert of_kind(server, DisconnectPacket)[0].code == 0x87


TWISTED: dict[str, Callable[[Packet], Packet | None]] = {
    "another method": lambda packet: AuthPacket(CONTINUE, {"authenticationmethod": "OTHER"}),
    "no method": lambda packet: AuthPacket(CONTINUE),
    "a success instead of CONNACK": lambda packet: AuthPacket(0, {"authenticationmethod": METHOD}),
    "a code of clients": lambda packet: AuthPacket(AGAIN, {"authenticationmethod": METHOD}),
    "a message before CONNACK": lambda packet: PublishPacket("t", b"x"),
}


@pytest.mark.parametrize("what", TWISTED)
def test_wrong_packets_end_the_connection(
    serve: Callable[..., AuthServer], connect: Callable[..., MqttClient], what: str
) -> None:
    ended: list[str] = []
    connect(
        f"127.0.0.1:{serve(twist=TWISTED[what]).port}",
        lambda kind, code, status: ended.append(code),
        authenticationmethod=METHOD,
        onauth=onauth,
    )
    wait_until(lambda: ended)
    assert ended == ["protocolerror"]


def test_auth_that_nobody_asked_for_ends_the_connection(
    serve: Callable[..., AuthServer], connect: Callable[..., MqttClient]
) -> None:
    server = serve()
    ended: list[str] = []
    client = connect(
        f"127.0.0.1:{server.port}",
        lambda kind, code, status: ended.append(code) or code == "connect",
        authenticationmethod=METHOD,
        onauth=onauth,
    )
    assert client.wait_connected(20)
    server.wire(AuthPacket(CONTINUE, {"authenticationmethod": METHOD}))
    wait_until(lambda: "protocolerror" in ended)


def test_a_server_that_does_not_answer(serve: Callable[..., AuthServer], connect: Callable[..., MqttClient]) -> None:
    server = serve()
    client = connect(f"127.0.0.1:{server.port}", authenticationmethod=METHOD, onauth=onauth)
    assert client.wait_connected(20)
    server.twist = lambda packet: None
    waiting = gevent.spawn(client.authenticate, 20)
    with pytest.raises(NoAnswer):
        client.authenticate(0.1)
    client.disconnect()
    with pytest.raises(ClosedError):
        waiting.get(timeout=20)
    with pytest.raises(ClosedError, match="not connected"):
        client.authenticate()


@pytest.mark.parametrize(
    "options",
    [
        {"authenticationmethod": METHOD},
        {"onauth": onauth},
        {"version": 4, "authenticationmethod": METHOD, "onauth": onauth},
    ],
)
def test_method_and_callback_need_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="authenticationmethod"):
        MqttClient("127.0.0.1:1", **options)


def test_a_client_without_a_method(connect: Callable[..., MqttClient]) -> None:
    with pytest.raises(ArgumentError, match="authenticationmethod"):
        connect("127.0.0.1:1", lambda *_: 60).authenticate()
