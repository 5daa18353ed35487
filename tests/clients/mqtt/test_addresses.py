"""Addresses of brokers: WebSockets, proxies, lists, Server References, and passwords in messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt import mqtt3c
from smqrt.clients.mqtt.addresses import MqttAddress, parse_address, parse_addresses
from smqrt.errors import ArgumentError, ClosedError
from smqrt.mqtt import MqttClient, MqttOptions
from smqrt.smq.hub_registry import hub_registry
from smqrt.transport.outgoing_proxy import Proxy
from smqrt.wire import websocket
from smqrt.wire.mqtt.fields import Reason
from tests.clients.mqtt.mosquitto import Mosquitto, start_with_websockets, tls_listener
from tests.clients.mqtt.scripted import ScriptedBroker, Wire, packet, text
from tests.conftest import free_port
from tests.support.pki import Authority
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy
from tests.support.waiting import let_others_run, wait_until

pytestmark = pytest.mark.servers

Connect = Callable[..., MqttClient]
Start = Callable[..., Mosquitto]
Scripted = Callable[..., ScriptedBroker]


# ---- forms of addresses


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("ws://h", MqttAddress("h", None, False, target="/mqtt")),
        ("ws://h:8080/", MqttAddress("h", 8080, False, target="/")),
        ("wss://a:b%40@h/x/y?token=1", MqttAddress("h", None, True, "a", "b@", "/x/y?token=1")),
        ("mqtts://h:1", MqttAddress("h", 1, True)),
        ("::1", MqttAddress("::1")),
    ],
)
def test_forms(address: str, parsed: MqttAddress) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "mqtt://anna:secret@h/path",
        "mqtt://anna:secret@h:99999",
        "mqtt://anna:sec/secret@h",
        "http://anna:secret@h",
        "ws://anna:secret@/x",
        "anna:secret@h:port",
    ],
)
def test_errors_do_not_contain_the_password(address: str) -> None:
    with pytest.raises(ArgumentError, match="anna") as caught:
        parse_address(address)
    assert "sec" not in str(caught.value)
    with pytest.raises(ArgumentError) as caught:
        MqttClient([address])
    assert "sec" not in str(caught.value)
    assert mqtt3c.connect(address, print) == (None, "cannotresolve")


def test_representations_do_not_contain_the_password() -> None:
    assert "secret" not in repr(parse_address("mqtt://anna:secret@h")) + repr(
        MqttOptions(username="a", password="secret")
    )


@pytest.mark.parametrize("addresses", [[], ["h"] * 17, [5], ["mqtt://a:b@h", "mqtt://c:d@h"], None])
def test_wrong_lists(addresses: Any) -> None:
    with pytest.raises(ArgumentError, match="address"):
        parse_addresses(addresses)


# ---- WebSockets


@pytest.fixture
def websockets(start_mosquitto: Start) -> tuple[str, Mosquitto]:
    """The address of a mosquitto that accepts WebSockets, and the broker."""
    port, broker = start_with_websockets(start_mosquitto)
    return f"ws://127.0.0.1:{port}", broker


@pytest.mark.parametrize("version", [4, 5])
def test_messages_over_a_websocket(websockets: tuple[str, Mosquitto], connect: Connect, version: int) -> None:
    address, broker = websockets
    got: list[Any] = []
    received: list[Any] = []
    client = connect(address, None, lambda *message: got.append(message), version=version, reconnectdelay=0.05)
    client.subscribe("small/#", qos=2)
    plain = connect(broker.address, None, lambda *message: received.append(message))
    plain.subscribe("large/#", qos=2)
    assert client.flush(10)
    assert plain.flush(10)
    small, large = [0, 1, 125, 126, 3000], [65_535, 65_536, 300_000]  # mosquitto sends 40 kB/s over a WebSocket
    for number, size in enumerate(small):
        client.publish(f"small/{size}", bytes([number]) * size, number % 3)
    for number, size in enumerate(large):
        client.publish(f"large/{size}", bytes([number]) * size, number % 3)
    for sizes, messages, name in ((small, got, "small"), (large, received, "large")):
        wait_until(lambda sizes=sizes, messages=messages: len(messages) == len(sizes))
        assert sorted((topic, payload) for topic, payload, _, _ in messages) == sorted(
            (f"{name}/{size}", bytes([number]) * size) for number, size in enumerate(sizes)
        )


def test_a_websocket_over_tls_checks_the_certificate_first(
    start_mosquitto: Start, certificates: Authority, connect: Connect, tmp_path: Path
) -> None:
    port, _ = start_with_websockets(start_mosquitto, tls_listener(certificates, "server", "localhost"))
    address = f"wss://anna:secret@localhost:{port}/any/path"
    client = connect(address, cafile=str(certificates.path), reconnectdelay=0.05)
    assert client.connected
    assert client.publish("a", b"b" * 200_000, 1).wait(10)
    refused = connect(address)
    assert refused.wait_closed(10)
    assert (refused.end.type, refused.end.code) == ("sock", "cn")


def test_another_server_than_a_websocket_server(mosquitto: Mosquitto, connect: Connect) -> None:
    client = connect(f"ws://anna:secret@{mosquitto.address}/x?token=t0", wait=False)
    end = wait_until(lambda: client.end)
    assert end.code in ("invalidresponse", "socketreadfailed")
    assert "secret" not in str(end)
    assert "t0" not in str(end)


class WebSocketServer:
    """A WebSocket server that answers CONNECT by what a test sends.

    Args:
        answer: bytes behind the head of the response.
        fields: more lines of the response.
    """

    def __init__(self, answer: bytes, fields: bytes = b"") -> None:
        self.answer, self.fields = answer, fields
        self.head = self.data = b""
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()

    @property
    def address(self) -> str:
        return f"ws://127.0.0.1:{self._server.server_port}"

    def _serve(self, sock: Any, _address: object) -> None:
        while b"\r\n\r\n" not in self.head:
            self.head += sock.recv(65536)
        key = self.head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
        sock.sendall(websocket.switching_protocols(key, self.fields) + self.answer)
        while data := sock.recv(65536):
            self.data += data

    def close(self) -> None:
        self._server.stop(0)


@pytest.fixture
def websocket_server() -> Iterator[Callable[..., WebSocketServer]]:
    made: list[WebSocketServer] = []

    def start(*arguments: Any) -> WebSocketServer:
        made.append(WebSocketServer(*arguments))
        return made[-1]

    yield start
    for server in made:
        server.close()


CONNACK = packet(0x20, b"\0\0\0")


def test_packets_in_fragments_and_pings(websocket_server: Callable[..., WebSocketServer], connect: Connect) -> None:
    first = bytes((websocket.BINARY, 2)) + CONNACK[:2]
    rest = bytes((0x80 | websocket.CONTINUATION, 3)) + CONNACK[2:]
    server = websocket_server(first + websocket.encode(websocket.PING, b"are you there") + rest)
    client = connect(server.address)
    assert client.connected
    assert b"Sec-WebSocket-Protocol: mqtt\r\n" in server.head
    assert server.head.startswith(b"GET /mqtt HTTP/1.1\r\n")
    wait_until(lambda: 0x80 | websocket.PONG in server.data)
    client.close()

    def close_code() -> int | None:
        codec = websocket.WebSocketCodec()
        codec.feed(server.data)
        while codec.next():
            pass
        return codec.close_code

    wait_until(lambda: close_code() == websocket.CLOSE_NORMAL)


@pytest.mark.parametrize(
    ("answer", "fields", "code"),
    [
        (websocket.encode(websocket.TEXT, CONNACK), b"", "socketreadfailed"),
        (b"\xff\xff", b"", "socketreadfailed"),
        (websocket.encode(websocket.CLOSE, b""), b"", "socketreadfailed"),
        (b"", b"Sec-WebSocket-Protocol: other\r\n", "invalidresponse"),
    ],
    ids=["text", "rubbish", "close", "another sub-protocol"],
)
def test_faulty_websocket_servers(
    websocket_server: Callable[..., WebSocketServer], connect: Connect, answer: bytes, fields: bytes, code: str
) -> None:
    client = connect(websocket_server(answer, fields).address, wait=False)
    assert wait_until(lambda: client.end).code == code


# ---- proxies


@pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])
@pytest.mark.parametrize("scheme", ["mqtt", "ws"])
def test_through_a_proxy(
    websockets: tuple[str, Mosquitto], connect: Connect, kind: type[TestProxy], scheme: str
) -> None:
    address = websockets[0] if scheme == "ws" else f"mqtt://{websockets[1].address}"
    with kind("me", "secret") as proxy:
        spec = partial(Proxy, "127.0.0.1", proxy.port, kind is SocksProxy, "me")
        client = connect(address, proxy=spec("secret"), reconnectdelay=0.05)
        assert client.publish("a", b"b", 1).wait(10)
        assert proxy.seen[-1] == address.partition("://")[2]
        refused = connect(address, proxy=spec("wrong"), wait=False)
        end = wait_until(lambda: refused.end)
        assert (end.code, "wrong" in str(end)) == ("proxyauth", False)


# ---- several addresses


def test_the_next_address_is_tried_at_once(mosquitto: Mosquitto, connect: Connect, scripted: Scripted) -> None:
    busy = scripted(code=Reason.SERVER_BUSY)
    addresses = [f"127.0.0.1:{free_port()}", busy.address, mosquitto.address]
    client = connect(addresses, wait=False, reconnectdelay=0.01)
    wait_until(lambda: client.connected)
    assert busy.connections == 1
    assert client.publish("a", b"b", 1).wait(10)


def test_a_lost_connection_continues_at_the_next_broker(start_mosquitto: Start, connect: Connect) -> None:
    first, second = start_mosquitto(), start_mosquitto()
    client = connect([first.address, second.address], reconnectdelay=0.01)
    client.subscribe("a")
    assert client.flush(10)
    first.stop()
    wait_until(lambda: client.end and client.connected)
    assert client.publish("a", b"b", 1).wait(10)


def test_a_resumed_session_waits_for_the_old_process_of_a_hot_restart(mosquitto: Mosquitto, connect: Connect) -> None:
    hub_registry.old_process_ended.clear()
    try:
        waiting = connect(mosquitto.address, wait=False, clientidentifier="resumed", cleanstart=False)
        assert connect(mosquitto.address).connected
        assert not waiting.connected
        hub_registry.old_process_ended.set()
        assert waiting.wait_connected(20)
    finally:
        hub_registry.old_process_ended.set()


# ---- Server Reference


def reference(address: str) -> bytes:
    return b"\x1c" + text(address)


def refer(address: str, code: int) -> Callable[[Wire], object]:
    """Sends DISCONNECT with a Server Reference."""
    properties = reference(address)
    return lambda wire: wire.send(packet(0xE0, bytes((code, len(properties))) + properties))


@pytest.mark.parametrize("code", [Reason.USE_ANOTHER_SERVER, Reason.SERVER_MOVED])
@pytest.mark.parametrize("where", ["CONNACK", "DISCONNECT"])
def test_a_server_reference_is_followed(
    mosquitto: Mosquitto, connect: Connect, scripted: Scripted, code: int, where: str
) -> None:
    if where == "CONNACK":
        old = scripted(code=code, properties=reference(mosquitto.address))
    else:
        old = scripted(on_open=refer(mosquitto.address, code))
    seen: list[Any] = []
    client = connect(old.address, lambda *event: seen.append(event) or NotImplemented, wait=False, reconnectdelay=60.0)
    assert wait_until(lambda: client.end).status["properties"]["serverreference"] == mosquitto.address
    wait_until(lambda: client.connected)
    assert client.publish("a", b"b", 1).wait(10)
    assert old.connections == 1


def test_at_most_three_references_in_a_row(
    connect: Connect, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    circle = scripted(code=Reason.USE_ANOTHER_SERVER, properties=reference(f"127.0.0.1:{port}"))
    gate = StreamServer(("127.0.0.1", port), circle._serve)
    gate.start()
    connect(circle.address, lambda *_: True, wait=False, reconnectdelay=60.0)
    wait_until(lambda: "have referred to another one" in caplog.text, circle.packets)
    let_others_run()
    assert circle.connections == 4
    gate.stop(0)


@pytest.mark.parametrize("target", ["mqtt://127.0.0.1:1", "anna:secret@h", "", "[::"])
def test_references_that_are_not_followed(connect: Connect, scripted: Scripted, target: str) -> None:
    broker = scripted(code=Reason.SERVER_MOVED, properties=reference(target))
    client = connect(broker.address, wait=False)
    assert client.wait_closed(10)
    assert "server moved" in str(client.end)


# ---- reasons that end the client, and take-overs


@pytest.mark.parametrize(
    "code",
    [
        Reason.MALFORMED_PACKET,
        Reason.PROTOCOL_ERROR,
        Reason.UNSUPPORTED_PROTOCOL_VERSION,
        Reason.CLIENT_IDENTIFIER_NOT_VALID,
        Reason.BAD_USER_NAME_OR_PASSWORD,
        Reason.NOT_AUTHORIZED,
        Reason.BANNED,
        Reason.BAD_AUTHENTICATION_METHOD,
        Reason.PACKET_TOO_LARGE,
    ],
)
def test_reasons_that_end_the_client(
    connect: Connect, scripted: Scripted, caplog: pytest.LogCaptureFixture, code: Reason
) -> None:
    broker = scripted(code=code)
    client = connect(f"mqtt://anna:secret@{broker.address}", wait=False, clientidentifier="pump-1")
    assert client.wait_closed(10)
    words = code.name.replace("_", " ").lower()
    with pytest.raises(ClosedError, match=words):
        client.publish("a")
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "pump-1" in line.getMessage()
    assert words in line.getMessage()
    assert "secret" not in caplog.text
    assert broker.connections == 1


@pytest.mark.parametrize("code", [Reason.SERVER_BUSY, Reason.QUOTA_EXCEEDED, Reason.UNSPECIFIED_ERROR])
def test_reasons_for_another_attempt(connect: Connect, scripted: Scripted, code: Reason) -> None:
    broker = scripted(code=code)
    connect(broker.address, wait=False, reconnectdelay=0.001)
    wait_until(lambda: broker.connections > 2)


def test_repeated_take_overs_pause(connect: Connect, scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    # mosquitto closes the older connection without a DISCONNECT
    broker = scripted(on_open=lambda wire: wire.send(packet(0xE0, bytes((Reason.SESSION_TAKEN_OVER, 0)))))
    decisions = {"connect": True, "disconnect": 0.01}  # the pause overrides a shorter delay
    connect(broker.address, lambda kind, code, status: decisions[code], clientidentifier="twin")
    wait_until(lambda: "MQTT client twin: another client has taken over" in caplog.text)
    gevent.sleep(0.1)  # time for ten reconnects
    assert broker.connections == 2
