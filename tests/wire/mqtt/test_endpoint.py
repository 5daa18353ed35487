"""Both sides of a connection by themselves: limits, aliases, signs of life, and what a reconnect leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.errors import MqttError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState, MqttSession, OutgoingMessage
from smqrt.wire.mqtt.fields import MAX_PROPERTIES, PacketType, Reason
from smqrt.wire.mqtt.packets import (
    PINGREQ,
    PINGRESP,
    Acknowledgement,
    ConnackPacket,
    ConnectPacket,
    Packet,
    PacketSplitter,
    PublishPacket,
    WillMessage,
    decode,
    encode,
)
from smqrt.wire.mqtt.server import MqttServerEndpoint


class Events:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.answers: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def on_message(self, message: PublishPacket) -> int:
        self.messages.append((message.topic, message.payload))
        return 0

    def on_answer(self, packet_identifier: int, code: int, _properties: object) -> None:
        self.answers.append((packet_identifier, code))


def client_of(version: int = 5, **options: Any) -> tuple[MqttClientEndpoint, Events]:
    events = Events()
    return MqttClientEndpoint(events, version, "c", **options), events


def open_client(
    client: MqttClientEndpoint,
    connack: dict[str, Any] | None = None,
    connect: dict[str, Any] | None = None,
    *,
    is_present: bool = False,
    version: int = 5,
    keepalive_s: int = 0,
) -> None:
    client.connect(not is_present, keepalive_s, connect or {})
    client.take(0.0)
    give(client, ConnackPacket(is_present, 0, connack or {}), version)
    assert client.is_open


def give(endpoint: Any, packet: Packet | bytes, version: int = 5, now_s: float = 0.0) -> None:
    endpoint.feed(packet if isinstance(packet, bytes) else encode(packet, version), now_s)
    while endpoint.next():
        pass


def sent(endpoint: Any, version: int = 5, is_client: bool = True) -> list[Any]:
    splitter = PacketSplitter()
    splitter.feed(endpoint.take(0.0))
    found = []
    while packet := splitter.next():
        found.append(decode(*packet, version, is_client))
    return found


def message(payload: bytes = b"x", qos: int = 0, topic: bytes = b"t") -> OutgoingMessage:
    return OutgoingMessage(topic, payload, qos, False, b"")


# ---- aliases


def test_a_too_large_message_sets_no_topic_alias() -> None:
    client, _ = client_of(use_aliases=True)
    open_client(client, {"topicaliasmaximum": 2, "maximumpacketsize": 40})
    client.send(message(b"x" * 100))
    client.send(message(b"y"))
    client.send(message(b"z"))
    assert [(packet.topic, packet.payload) for packet in sent(client)] == [("t", b"y"), ("", b"z")]


def test_aliases_end_with_their_connection() -> None:
    client, _ = client_of(use_aliases=True)
    for _ in range(2):
        open_client(client, {"topicaliasmaximum": 1}, {"topicaliasmaximum": 1})
        client.send(message())
        assert [packet.topic for packet in sent(client)] == ["t"]
        give(client, PublishPacket("in", b"1", properties={"topicalias": 1}))
        client.abort()
    open_client(client, {}, {"topicaliasmaximum": 1})
    client.send(message())
    assert [packet.properties for packet in sent(client)] == [{}]
    with pytest.raises(MqttError, match="alias . is unknown"):
        give(client, PublishPacket("", b"1", properties={"topicalias": 1}))


@pytest.mark.parametrize("before", [True, False])
def test_aliases_of_messages_refused_for_properties_count(before: bool) -> None:
    client, events = client_of()
    open_client(client, connect={"topicaliasmaximum": 2})
    give(client, PublishPacket("old", b"1", properties={"topicalias": 1}))
    users = {"u": ["v"] * (MAX_PROPERTIES + 10)}
    alias = {"topicalias": 1}
    give(client, PublishPacket("new", b"2", properties=alias | users if before else users | alias))
    give(client, PublishPacket("", b"3", properties={"topicalias": 1}))
    assert events.messages == [("old", b"1"), ("new", b"3")]


def test_messages_without_alias_are_refused_for_properties_too() -> None:
    client, events = client_of()
    open_client(client, connect={"topicaliasmaximum": 2})
    give(client, PublishPacket("new", b"2", 2, 7, {"u": ["v"] * (MAX_PROPERTIES + 10)}))
    assert [(packet.packet_identifier, packet.code) for packet in sent(client)] == [(7, Reason.QUOTA_EXCEEDED)]
    assert client.is_open
    assert not events.messages


# ---- signs of life


def test_read_pauses_do_not_lose_ping_confirmations() -> None:
    client, _ = client_of()
    open_client(client, keepalive_s=10)
    client.send(message())
    client.take(1.0)
    client.ping(1.0)
    client.check_alive(2.0, is_reading=False)
    client.send(message())
    client.take(2.0)
    client.check_alive(7.5, is_reading=False)
    assert client.take(7.5) == PINGREQ, "the broker wants to hear of us"
    give(client, PINGRESP, now_s=7.5)
    assert client.unconfirmed == 1, "the answer to the first ping says nothing of what came behind it"
    give(client, PINGRESP, now_s=8.0)
    assert client.unconfirmed == 0


def test_data_of_a_broker_replaces_a_late_ping_response() -> None:
    client, _ = client_of()
    open_client(client, keepalive_s=10)
    client.ping(10.0)
    give(client, PublishPacket("a", b"x"), now_s=14.0)
    client.check_alive(15.5)
    with pytest.raises(MqttError, match="ping") as failure:
        client.check_alive(19.0)
    assert failure.value.code == Reason.KEEP_ALIVE_TIMEOUT


def test_server_keep_alive_ends_with_its_connection() -> None:
    client, _ = client_of()
    open_client(client, {"serverkeepalive": 4}, keepalive_s=60)
    assert client.ping_s == 2
    open_client(client, keepalive_s=60)
    assert client.ping_s == 30


def test_an_unanswered_ping_ends_with_its_connection() -> None:
    client, _ = client_of()
    open_client(client, keepalive_s=10)
    client.ping(1.0)
    client.abort()
    client.connect(True, 10, {})
    client.take(20.0)
    give(client, ConnackPacket(False, 0), now_s=20.0)
    client.check_alive(20.0)
    assert client.take(20.0) == b""
    client.check_alive(26.0)
    assert client.take(26.0) == PINGREQ


# ---- sessions


def test_an_earlier_connections_limits_are_gone() -> None:
    client, _ = client_of()
    open_client(client, {"receivemaximum": 1, "maximumqos": 0, "retainavailable": 0, "maximumpacketsize": 50})
    client.abort()
    open_client(client)
    for _ in range(3):
        assert client.can_send(2)
        client.send(message(b"x" * 100, 2))
    assert [packet.qos for packet in sent(client)] == [2, 2, 2]


def test_a_request_of_an_earlier_connection_holds_no_identifier() -> None:
    client, events = client_of()
    open_client(client)
    number = client.subscribe("a", 0, {})
    client.abort()
    open_client(client, is_present=True)
    assert not client.session.requests
    assert client.subscribe("a", 0, {}) == number + 1
    assert not events.answers


def test_requests_above_the_broker_maximum_are_not_sent() -> None:
    client, _ = client_of()
    open_client(client, {"maximumpacketsize": 40})
    for ask in (lambda: client.subscribe("t" * 40, 0, {}), lambda: client.unsubscribe("t" * 40, {})):
        assert ask() == 0
    assert not client.session.requests
    assert client.take(0.0) == b""


def test_qos_2_over_a_reconnect() -> None:
    client, _ = client_of()
    open_client(client)
    for payload in (b"1", b"2"):
        client.send(message(payload, 2))
    client.take(0.0)
    give(client, Acknowledgement(PacketType.PUBREC, 1))
    client.abort()
    open_client(client, is_present=True)
    assert not client.can_send(0)
    client.send_again()
    release, again = sent(client)
    assert (release.type, release.packet_identifier) == (PacketType.PUBREL, 1)
    assert (again.payload, again.packet_identifier, again.flags & 8) == (b"2", 2, 8)
    assert client.can_send(0)


def test_an_unsent_receive_maximum_does_not_count() -> None:
    client, events = client_of(4)
    open_client(client, connect={"receivemaximum": 1}, version=4)
    for number in (1, 2):
        give(client, PublishPacket("a", b"x", 4, number), 4)
    assert len(events.messages) == 2


def test_messages_awaiting_pubrel_keep_the_new_receive_maximum() -> None:
    client, events = client_of()
    open_client(client, connect={"receivemaximum": 1})
    give(client, PublishPacket("a", b"1", 4, 1))
    client.abort()
    open_client(client, connect={"receivemaximum": 1}, is_present=True)
    give(client, PublishPacket("a", b"2", 4, 2))
    assert [payload for _, payload in events.messages] == [b"1", b"2"]
    with pytest.raises(MqttError, match="receive maximum"):
        give(client, PublishPacket("a", b"3", 4, 3))


def test_a_new_session_on_a_limited_broker_is_limited() -> None:
    client, _ = client_of()
    open_client(client)
    items = [OutgoingMessage(b"t", b"x", qos, True, b"") for qos in (2, 1)]
    for item in items:
        client.send(item)
    client.abort()
    open_client(client, {"maximumqos": 0, "retainavailable": 0})
    client.send_again()
    assert [packet.flags for packet in sent(client)] == [0, 0]
    assert not client.session.in_flight
    assert client.session.in_flight_bytes == 0


@pytest.mark.parametrize("version", [4, 5])
def test_a_refusal_with_session_flag_is_reported(version: int) -> None:
    client, events = client_of(version)
    told: list[int] = []
    events.on_connack = lambda code, *_: told.append(code)  # type: ignore[attr-defined]
    client.connect(True, 0, {})
    give(client, b"\x20\x03\x01\x87\x00" if version == 5 else b"\x20\x02\x01\x05")
    assert told == [0x87 if version == 5 else 5]
    assert not client.is_open


# ---- servers


class ServerEvents(Events):
    """A server that refuses, accepts, or decides later."""

    def __init__(self, decide: str) -> None:
        super().__init__()
        self.endpoint = MqttServerEndpoint(self)
        self.decide = decide

    def on_connect(self, _packet: ConnectPacket) -> None:
        if self.decide == "accept":
            self.endpoint.accept(MqttSession(), False)
        elif self.decide == "refuse":
            self.endpoint.refuse(Reason.NOT_AUTHORIZED)


CONNECT = ConnectPacket(5, "c", keepalive_s=10, will=WillMessage("w", b"dead"))


@pytest.mark.parametrize("decide", ["refuse", "later"])
def test_a_rejected_client_has_no_will(decide: str) -> None:
    server = ServerEvents(decide).endpoint
    give(server, CONNECT)
    server.abort()
    assert server.will is None


def test_an_accepted_client_has_a_will_until_it_disconnects() -> None:
    server = ServerEvents("accept").endpoint
    give(server, CONNECT)
    assert server.will == WillMessage("w", b"dead")
    give(server, b"\xe0\x00")
    assert server.will is None


def test_a_decision_that_comes_after_the_end_changes_nothing() -> None:
    server = ServerEvents("later").endpoint
    give(server, CONNECT)
    server.abort()
    server.accept(MqttSession(), False)
    assert server.state is ConnectionState.CLOSED
    assert server.take(0.0) == b""
    assert server.will is None


def test_a_client_is_not_read_while_the_server_decides() -> None:
    server = ServerEvents("later").endpoint
    assert not server.is_congested
    give(server, CONNECT)
    assert server.is_congested
    server.accept(MqttSession(), False)
    assert not server.is_congested


def test_the_largest_receive_maximum_leaves_identifiers_free() -> None:
    server = ServerEvents("accept").endpoint
    give(server, CONNECT)
    while server.can_send(1):
        server.send(message(qos=1))
        server.take(0.0)
    assert 1000 < len(server.session.in_flight) <= 0x7FFF
