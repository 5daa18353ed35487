"""A client by itself: limits, aliases, signs of life, and what a reconnect leaves of them."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.errors import MqttError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import MAX_WAITING_BYTES, ConnectionState, OutgoingMessage
from smqrt.wire.mqtt.fields import MAX_PROPERTIES, PacketType, Reason
from smqrt.wire.mqtt.packets import (
    PINGREQ,
    PINGRESP,
    Acknowledgement,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PacketSplitter,
    PublishPacket,
    SubscribeAnswer,
    Subscription,
    WillMessage,
    decode,
    encode,
)


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

    def on_answer(self, packet_identifier: int, codes: bytes, _properties: object) -> None:
        self.answers.append((packet_identifier, codes[0]))


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


@pytest.mark.parametrize(
    ("flags", "answers"),
    [(1, []), (3, [(PacketType.PUBACK, 7, 0x97)]), (4, [(PacketType.PUBREC, 7, 0x97)])],
)
def test_a_refused_message_is_answered_by_its_qos(flags: int, answers: list[tuple[int, int, int]]) -> None:
    client, events = client_of()
    open_client(client)
    refused: list[int] = []
    events.on_left_out = lambda: refused.append(1)  # type: ignore[attr-defined]
    give(client, PublishPacket("t", b"", flags, 7 if flags & 6 else 0, {"u": ["v"] * (MAX_PROPERTIES + 1)}))
    assert [(packet.type, packet.packet_identifier, packet.code) for packet in sent(client)] == answers
    assert refused == [1]


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
    number = client.subscribe([Subscription("a")], {})
    client.abort()
    open_client(client, is_present=True)
    assert not client.session.requests
    assert client.subscribe([Subscription("a")], {}) == number + 1
    assert not events.answers


def test_requests_above_the_broker_maximum_are_not_sent() -> None:
    client, _ = client_of()
    open_client(client, {"maximumpacketsize": 40})
    for ask in (lambda: client.subscribe([Subscription("t" * 40)], {}), lambda: client.unsubscribe(["t" * 40], {})):
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


# ---- limits and rules of one side


class Recorded(OutgoingMessage):
    """A message that remembers how it ended."""

    __slots__ = ("ends",)

    def __init__(self, payload: bytes = b"x", qos: int = 0, retain: bool = False, properties: bytes = b"") -> None:
        super().__init__(b"t", payload, qos, retain, properties)
        self.ends: list[str | int | None] = []

    def finish(self, error: str | int | None = None) -> None:
        self.ends.append(error)


def opened(connect: dict[str, Any] | None = None, version: int = 5) -> tuple[MqttClientEndpoint, Any]:
    """A client that is connected."""
    client, events = client_of(version)
    open_client(client, connect=connect, version=version)
    return client, events


def test_a_message_without_qos_ends_when_it_is_written() -> None:
    client, _ = client_of()
    open_client(client)
    item, later = Recorded(b"x", 0, True, b"\x01\1"), Recorded(b"y", 0)
    client.send(item)
    client.written()
    assert item.ends == []
    assert client.unconfirmed == 1
    client.forget_unconfirmed()
    assert client.unconfirmed == 0
    [packet] = sent(client)
    client.send(later)
    client.written()
    assert (item.ends, later.ends, client.has_unwritten) == ([None], [], True)
    client.abort()
    assert (item.ends, later.ends, client.has_unwritten) == ([None], ["lost"], False)
    assert (packet.retain, packet.properties) == (True, {"payloadformatindicator": 1})


def test_a_packet_of_exactly_the_limit_is_sent() -> None:
    size = len(encode(PublishPacket("t", b"x" * 50), 5))
    for limit, ends in ((size, [None]), (size - 1, ["toolarge"])):
        client, _ = client_of()
        open_client(client, {"maximumpacketsize": limit})
        item = Recorded(b"x" * 50)
        client.send(item)
        client.take(0.0)
        client.written()
        assert item.ends == ends


def test_the_window_is_the_smaller_of_both_limits() -> None:
    for version, inflight, connack, window in ((5, 3, {}, 3), (5, 9, {"receivemaximum": 2}, 2), (4, None, {}, 20)):
        client, _ = client_of(version, inflight=inflight)
        open_client(client, connack, version=version)
        while client.can_send(1):
            client.send(message(qos=1))
        assert len(client.session.in_flight) == window
        assert client.can_send(0)


def test_only_so_many_packets_wait_to_be_written() -> None:
    client, _ = client_of()
    open_client(client)
    count = 0
    while client.can_send(0):
        client.send(message())
        count += 1
    assert count == 500
    assert not client.can_ask
    client.take(0.0)
    assert client.can_ask
    size = len(encode(PublishPacket("t", b"x" * 1000), 5))
    while client.can_send(0):
        client.send(message(b"x" * 1000))
    assert MAX_WAITING_BYTES <= len(client.take(0.0)) < MAX_WAITING_BYTES + size
    assert MAX_WAITING_BYTES == 256 * 1024


def test_only_so_many_requests_are_unanswered() -> None:
    client, events = client_of()
    open_client(client)
    while client.can_ask:
        client.subscribe([Subscription("a")], {})
    assert len(client.session.requests) == 100
    client.take(0.0)
    give(client, SubscribeAnswer(PacketType.SUBACK, 1, b"\x87"))
    assert client.can_ask
    assert events.answers == [(1, 0x87)]


def test_an_answer_has_one_code() -> None:
    client, _ = client_of()
    open_client(client)
    client.subscribe([Subscription("a")], {})
    with pytest.raises(MqttError, match="number of codes") as failure:
        give(client, SubscribeAnswer(PacketType.SUBACK, 1, b"\0\0"))
    assert failure.value.code == Reason.MALFORMED_PACKET


def test_a_peer_that_takes_no_acknowledgements_is_not_read() -> None:
    client, _ = opened()
    for number in range(1, 1001):
        give(client, PublishPacket("a", b"x", 2, number))
    assert not client.is_congested
    give(client, PublishPacket("a", b"x", 2, 1001))
    assert client.is_congested
    client.take(0.0)
    assert not client.is_congested


def test_an_alias_above_the_maximum_is_refused() -> None:
    client, events = opened({"topicaliasmaximum": 2})
    give(client, PublishPacket("a", b"1", properties={"topicalias": 2}))
    give(client, PublishPacket("", b"2", properties={"topicalias": 2}))
    assert events.messages == [("a", b"1"), ("a", b"2")]
    with pytest.raises(MqttError, match="above the maximum") as failure:
        give(client, PublishPacket("a", b"1", properties={"topicalias": 3}))
    assert failure.value.code == Reason.TOPIC_ALIAS_INVALID
    with pytest.raises(MqttError, match="without a topic") as failure:
        give(client, PublishPacket("", b"1"))
    assert failure.value.code == Reason.PROTOCOL_ERROR


def test_a_topic_beyond_the_last_alias_is_sent_whole() -> None:
    client, _ = client_of(use_aliases=True)
    open_client(client, {"topicaliasmaximum": 1})
    for topic in (b"a", b"b", b"a", b"b"):
        client.send(message(topic=topic))
    packets = [(packet.topic, packet.properties) for packet in sent(client)]
    assert packets == [("a", {"topicalias": 1}), ("b", {}), ("", {"topicalias": 1}), ("b", {})]


def test_a_message_of_qos_2_is_delivered_once() -> None:
    client, events = opened()
    for _ in range(2):
        give(client, PublishPacket("a", b"x", 4, 7))
    assert events.messages == [("a", b"x")]
    assert [(one.type, one.code) for one in sent(client)] == [(PacketType.PUBREC, 0)] * 2
    for code in (0, Reason.PACKET_IDENTIFIER_NOT_FOUND):
        give(client, Acknowledgement(PacketType.PUBREL, 7))
        assert sent(client) == [Acknowledgement(PacketType.PUBCOMP, 7, code)]
    give(client, PublishPacket("a", b"y", 4, 7))
    assert events.messages[1:] == [("a", b"y")]


def test_a_refused_message_of_qos_2_is_complete() -> None:
    client, events = opened({"receivemaximum": 1})
    for number, code in ((1, Reason.UNSPECIFIED_ERROR), (2, Reason.NOT_AUTHORIZED)):
        events.on_message = lambda _message, code=code: code
        give(client, PublishPacket("a", b"x", 4, number))
        assert sent(client) == [Acknowledgement(PacketType.PUBREC, number, code)]
    events.on_message = lambda _message: 0x10
    give(client, PublishPacket("a", b"x", 4, 3))
    with pytest.raises(MqttError, match="receive maximum"):
        give(client, PublishPacket("a", b"x", 4, 4))


def test_pubrec_of_an_unknown_message_is_answered() -> None:
    client, _ = client_of()
    open_client(client)
    give(client, Acknowledgement(PacketType.PUBREC, 9))
    assert sent(client) == [Acknowledgement(PacketType.PUBREL, 9, Reason.PACKET_IDENTIFIER_NOT_FOUND)]


def test_disconnect_is_the_last_packet() -> None:
    client, events = opened()
    client.disconnect(Reason.SERVER_SHUTTING_DOWN, {"reasonstring": "bye"})
    assert client.state is ConnectionState.CLOSING
    give(client, PublishPacket("a", b"x"))
    assert not events.messages
    assert sent(client) == [DisconnectPacket(0x8B, {"reasonstring": "bye"})]
    assert client.state is ConnectionState.CLOSED
    client.disconnect()
    assert not client.has_output


@pytest.mark.parametrize("version", [4, 5])
def test_only_mqtt_5_sends_the_reason_of_a_failure(version: int) -> None:
    client, _ = opened(version=version)
    client.fail(MqttError(Reason.MALFORMED_PACKET, "x"))
    assert client.state is ConnectionState.CLOSED
    assert sent(client, version) == ([DisconnectPacket(0x81)] if version == 5 else [])


def test_a_client_asks_for_what_it_was_told() -> None:
    client, _ = client_of(limit_bytes=5000)
    client.username, client.password, client.will = "u", b"p", WillMessage("w", b"dead")
    client.connect(True, 30, {"receivemaximum": 5})
    [packet] = sent(client)
    assert packet == ConnectPacket(
        5, "c", True, 30, {"maximumpacketsize": 5000, "receivemaximum": 5}, client.will, "u", b"p"
    )
    with pytest.raises(MqttError, match="session is present"):
        give(client, ConnackPacket(True, 0))


def test_an_assigned_identifier_is_used_again() -> None:
    client, _ = client_of()
    open_client(client, {"assignedclientidentifier": "given"})
    client.abort()
    client.connect(False, 0, {})
    assert [packet.client_identifier for packet in sent(client)] == ["given"]


def test_a_silent_server_is_pinged_and_then_given_up() -> None:
    client, _ = client_of()
    open_client(client, keepalive_s=10)
    client.check_alive(4.5)
    assert client.take(4.5) == b""
    client.check_alive(5.0)
    assert client.take(5.0) == PINGREQ
    client.check_alive(9.5)
    assert client.take(9.5) == b""
    with pytest.raises(MqttError, match="did not answer"):
        client.check_alive(10.0)
    quiet, _ = client_of()
    open_client(quiet)
    quiet.check_alive(1e6)
    assert quiet.take(1e6) == b""


def test_a_second_connack_is_an_error() -> None:
    client, _ = opened()
    with pytest.raises(MqttError, match="second CONNACK"):
        give(client, ConnackPacket(False, 0))


def test_the_largest_receive_maximum_leaves_identifiers_free() -> None:
    client, _ = opened()
    while client.can_send(1):
        client.send(message(qos=1))
        client.take(0.0)
    assert 1000 < len(client.session.in_flight) <= 0x7FFF


def test_room_and_output_are_announced() -> None:
    client, events = client_of()
    calls: list[str] = []
    events.on_room = lambda: calls.append("room")  # type: ignore[attr-defined]
    events.on_wake = lambda: calls.append("wake")  # type: ignore[attr-defined]
    open_client(client)
    client.send(message(qos=1))
    client.send(message(qos=2))
    client.take(0.0)
    assert calls == ["wake", "wake"]
    calls.clear()
    give(client, Acknowledgement(PacketType.PUBACK, 1))
    give(client, Acknowledgement(PacketType.PUBREC, 2, 0x87))
    give(client, PINGRESP)
    give(client, Acknowledgement(PacketType.PUBCOMP, 5))
    assert calls == ["room"] * 4
