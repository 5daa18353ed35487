"""MQTT packets: what is encoded is decoded, any bytes end in a packet or one error, and long packets cost little."""

from __future__ import annotations

import contextlib
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError, MqttError
from smqrt.settings.limits import MqttSettings
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState
from smqrt.wire.mqtt.fields import MAX_PROPERTIES, PacketType, varint
from smqrt.wire.mqtt.packets import (
    MAX_FILTERS,
    Acknowledgement,
    AuthPacket,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PacketSplitter,
    PingPacket,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    WillMessage,
    connect_version,
    decode,
    encode,
    encode_acknowledgement,
    encode_publish,
    publish_alias,
    publish_identifier,
)
from tests.broker.mqtt.memory_devices import DeviceHub

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
NAME = st.text(st.characters(exclude_characters="\0+#", exclude_categories=["Cs"]), min_size=1, max_size=20)
BYTES = st.binary(max_size=50)
IDENTIFIER, U16, CODE = st.integers(1, 0xFFFF), st.integers(0, 0xFFFF), st.integers(0, 0xFF)
USER = st.dictionaries(TEXT.map("x-".__add__), TEXT | st.lists(TEXT, min_size=2, max_size=3), max_size=3)
MESSAGE = USER | st.fixed_dictionaries(
    {}, optional={"contenttype": TEXT, "correlationdata": BYTES, "messageexpiryinterval": st.integers(0, 0xFFFFFFFF)}
)
WILL = st.builds(WillMessage, NAME, BYTES, st.integers(0, 2), st.booleans(), MESSAGE, st.just(b""))
GRANTED = st.lists(st.integers(0, 2), min_size=1).map(bytes)
ANSWERED = (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
CONNECTS = st.builds(
    ConnectPacket,
    st.sampled_from([4, 5]),
    TEXT,
    st.booleans(),
    U16,
    USER,
    st.none() | WILL,
    st.none() | TEXT,
    st.none() | BYTES,
    st.just(False),
)
FROM_CLIENT = st.one_of(
    CONNECTS,
    st.builds(
        SubscribePacket,
        IDENTIFIER,
        st.lists(st.builds(Subscription, NAME, st.integers(0, 2)), min_size=1, max_size=5),
        USER,
    ),
    st.builds(UnsubscribePacket, IDENTIFIER, st.lists(NAME, min_size=1, max_size=5), USER),
    st.just(PingPacket(PacketType.PINGREQ)),
    st.builds(DisconnectPacket, CODE, USER),
)
FROM_SERVER = st.one_of(
    st.builds(ConnackPacket, st.just(False), CODE, USER),
    st.builds(
        SubscribeAnswer,
        st.just(PacketType.SUBACK),
        IDENTIFIER,
        st.lists(st.integers(0, 2), min_size=1).map(bytes),
        USER,
    ),
    st.builds(SubscribeAnswer, st.just(PacketType.UNSUBACK), IDENTIFIER, st.just(b"\0"), USER),
    st.just(PingPacket(PacketType.PINGRESP)),
    st.builds(DisconnectPacket, CODE, USER),
)
FROM_BOTH = st.one_of(
    st.builds(PublishPacket, NAME, BYTES, st.sampled_from([0, 1]), st.just(0), MESSAGE, st.just(b"")),
    st.builds(PublishPacket, NAME, BYTES, st.sampled_from([2, 3, 4, 5, 10, 13]), IDENTIFIER, MESSAGE, st.just(b"")),
    st.builds(Acknowledgement, st.sampled_from(ANSWERED), IDENTIFIER, CODE, USER),
    st.builds(AuthPacket, CODE, USER),
)


def cut(data: bytes, size: int = 1 << 20) -> list[tuple[int, bytes]]:
    splitter, found = PacketSplitter(), []
    for at in range(0, len(data), size):
        splitter.feed(data[at : at + size])
        while packet := splitter.next():
            found.append(packet)
    return found


def for_version(packet: Any, version: int) -> Any:
    """What of a packet MQTT 3.1.1 can carry."""
    if isinstance(packet, ConnectPacket):
        if packet.version == 5:
            return packet
        will = packet.will and packet.will._replace(properties={})
        username = "u" if packet.password is not None and packet.username is None else packet.username
        return packet._replace(properties={}, will=will, username=username)
    if version == 5 or isinstance(packet, PingPacket):
        return packet
    packet = packet._replace(properties={})
    if isinstance(packet, Acknowledgement | DisconnectPacket):
        return packet._replace(code=0)
    if isinstance(packet, SubscribeAnswer) and packet.type is PacketType.UNSUBACK:
        return packet._replace(codes=b"")
    return packet


def without_bytes(packet: Any) -> Any:
    """Without what is only there when a packet was decoded."""
    if isinstance(packet, PublishPacket):
        return packet._replace(property_bytes=b"")
    if isinstance(packet, ConnectPacket) and packet.will is not None:
        return packet._replace(will=packet.will._replace(property_bytes=b""))
    return packet


@settings(max_examples=200)
@given(st.data(), st.sampled_from([4, 5]), st.booleans())
def test_what_is_encoded_is_decoded(data: st.DataObject, version: int, is_client: bool) -> None:
    packet = data.draw(FROM_BOTH | (FROM_CLIENT if is_client else FROM_SERVER))
    if isinstance(packet, AuthPacket):
        version = 5
    if isinstance(packet, DisconnectPacket) and not is_client:
        version = 5
    packet = for_version(packet, version)
    [(first, body)] = cut(encode(packet, version), data.draw(st.integers(1, 20)))
    assert without_bytes(decode(first, body, version, is_client)) == packet


@settings(max_examples=400)
@given(st.binary(max_size=100), st.integers(0, 255), st.sampled_from([4, 5]), st.booleans())
def test_any_body_is_decoded_or_refused(body: bytes, first: int, version: int, is_client: bool) -> None:
    code = 0x80
    try:
        decode(first, body, version, is_client)
    except MqttError as error:
        code = error.code
    assert code >= 0x80
    assert connect_version(body) in (0, 4, 5)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Packets of both sides with some wrong bytes, or any bytes."""
    version = draw(st.sampled_from([4, 5]))
    packets = draw(st.lists(FROM_BOTH | FROM_CLIENT | FROM_SERVER, max_size=5))
    hello = draw(st.sampled_from([b"", b"\x20\2\0\0", b"\x20\3\0\0\0", encode(ConnectPacket(version, "c"), version)]))
    stream = bytearray(hello + b"".join(encode(for_version(one, version), version) for one in packets))
    for _ in range(draw(st.integers(0, 3))):
        if stream:
            stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    return bytes(stream) + draw(BYTES)


class Deaf:
    """Takes whatever happens."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@settings(max_examples=150)
@given(streams(), st.integers(1, 30), st.sampled_from([4, 5]))
def test_any_stream_ends_in_a_state_with_a_reason(stream: bytes, size: int, version: int) -> None:
    endpoint: Any = MqttClientEndpoint(Deaf(), version, "c")
    endpoint.connect(True, 0, {})
    for at in range(0, len(stream), size):
        endpoint.feed(stream[at : at + size], 0.0)
        try:
            handle_all(endpoint)
        except MqttError as error:
            endpoint.fail(error)
            assert endpoint.state is ConnectionState.CLOSED
            break
    cut(endpoint.take(0.0))


@settings(max_examples=150)
@given(streams(), st.integers(1, 30))
def test_any_stream_ends_at_a_hub_with_packets(stream: bytes, size: int) -> None:
    hub = DeviceHub()
    device = hub.device()
    for at in range(0, len(stream), size):
        device.feed(stream[at : at + size])
    cut(device.take())
    device.lost()
    assert not hub.broker.uids


def handle_all(endpoint: Any) -> None:
    while endpoint.next():
        pass


def seconds(stream: bytes, code: int = 0x97) -> float:
    """What it costs to refuse a packet with a reason code: the least of three, as others use the machine too."""
    return min(_seconds(stream, code) for _ in range(3))


def _seconds(stream: bytes, code: int) -> float:
    device = DeviceHub(limits=MqttSettings(packet_bytes=1 << 21)).device()
    device.feed(encode(ConnectPacket(5, "c"), 5))
    device.take()
    begin_s = process_time()
    device.feed(stream)
    cost_s = process_time() - begin_s
    answer = device.take()
    assert (answer[0], answer[2]) == (0xE0, code)
    return cost_s


@pytest.mark.parametrize("pair", [b"\x26\0\0\0\0", b"\x26\0\1a\0\1b"])
@pytest.mark.parametrize("head", [b"\x30\0\1t", b"\x82\0\1"])
def test_a_mebibyte_of_properties_costs_little(pair: bytes, head: bytes) -> None:
    block = pair * ((1 << 20) // len(pair))
    body = head[1:] + varint(len(block)) + block
    assert seconds(head[:1] + varint(len(body)) + body) < 0.05


def test_a_mebibyte_of_filters_costs_little() -> None:
    body = b"\0\1\0" + b"\0\1t\0" * (1 << 18)
    assert seconds(b"\x82" + varint(len(body)) + body) < 0.05


def test_a_large_packet_in_small_pieces_is_linear() -> None:
    splitter = PacketSplitter()
    stream = encode(PublishPacket("t", bytes(1 << 20)), 5)
    begin_s = process_time()
    for at in range(0, len(stream), 100):
        splitter.feed(stream[at : at + 100])
        packet = splitter.next()
    assert packet is not None
    assert process_time() - begin_s < 0.2


def test_limits() -> None:
    many = [Subscription("t")] * (MAX_FILTERS + 1)
    [(first, body)] = cut(encode(SubscribePacket(1, many), 5))
    with pytest.raises(MqttError) as caught:
        decode(first, body, 5, True)
    assert caught.value.code == 0x97
    [(first, body)] = cut(encode(PublishPacket("t", b"", 0, 0, {"a": ["b"] * (MAX_PROPERTIES + 1)}), 5))
    with pytest.raises(MqttError) as caught:
        decode(first, body, 5, True)
    assert caught.value.code == 0x97


@pytest.mark.parametrize(
    "packet", [ConnectPacket(5, "x" * 65536), ConnectPacket(5, "\ud800"), UnsubscribePacket(1, ["x" * 65536])]
)
def test_what_mqtt_cannot_carry_is_named(packet: Packet) -> None:
    with pytest.raises(ArgumentError, match=r"identifier|filter"):
        encode(packet, 5)


def _subscribe(topic: bytes, options: int, version: int) -> Any:
    properties = b"\0" if version == 5 else b""
    body = b"\0\x01" + properties + len(topic).to_bytes(2, "big") + topic + bytes((options,))
    return decode(0x82, body, version, True)


@pytest.mark.parametrize("version", [4, 5])
def test_only_known_options_of_a_subscription_pass(version: int) -> None:
    for options in range(256):
        known = options < (0x40 if version == 5 else 4)
        allowed = known and options & 3 != 3 and options & 0x30 != 0x30
        for topic, may in ((b"a/b", allowed), (b"$share/g/a", allowed and not options & 4)):
            if may:
                assert _subscribe(topic, options, version).subscriptions[0].options == options
            else:
                with pytest.raises(MqttError):
                    _subscribe(topic, options, version)


# ---- bytes of the standard

USER_X = {"x": "y"}
USER_BYTES = b"\x07\x26\0\1x\0\1y"
FULL_CONNECT = ConnectPacket(
    5, "c", True, 258, USER_X, WillMessage("w", b"dead", 1, True, USER_X, USER_BYTES), "u", b"p"
)
BYTES_OF: dict[str, tuple[Packet, int, bool, bytes]] = {
    "CONNECT": (
        FULL_CONNECT,
        5,
        True,
        b"\x10\x2c\0\4MQTT\5\xee\1\2" + USER_BYTES + b"\0\1c" + USER_BYTES + b"\0\1w\0\4dead\0\1u\0\1p",
    ),
    "CONNECT 3.1.1": (ConnectPacket(4, "c", False), 4, True, b"\x10\x0d\0\4MQTT\4\0\0\0\0\1c"),
    "CONNACK": (ConnackPacket(True, 0, USER_X), 5, False, b"\x20\x0a\1\0" + USER_BYTES),
    "CONNACK 3.1.1": (ConnackPacket(False, 5), 4, False, b"\x20\2\0\5"),
    "PUBLISH": (
        PublishPacket("t", b"p", 3, 258, USER_X, USER_BYTES),
        5,
        True,
        b"\x33\x0e\0\1t\1\2" + USER_BYTES + b"p",
    ),
    "PUBLISH 3.1.1": (PublishPacket("t", b"p"), 4, True, b"\x30\4\0\1tp"),
    "PUBACK": (Acknowledgement(PacketType.PUBACK, 258), 5, True, b"\x40\2\1\2"),
    "PUBREC with a code": (Acknowledgement(PacketType.PUBREC, 258, 0x80), 5, True, b"\x50\3\1\2\x80"),
    "PUBREL": (Acknowledgement(PacketType.PUBREL, 1, 0, USER_X), 5, True, b"\x62\x0b\0\1\0" + USER_BYTES),
    "PUBCOMP 3.1.1": (Acknowledgement(PacketType.PUBCOMP, 1), 4, False, b"\x70\2\0\1"),
    "SUBSCRIBE": (
        SubscribePacket(258, [Subscription("a", 0x2E), Subscription("b", 1)], USER_X),
        5,
        True,
        b"\x82\x12\1\2" + USER_BYTES + b"\0\1a\x2e\0\1b\1",
    ),
    "SUBSCRIBE 3.1.1": (SubscribePacket(1, [Subscription("a", 2)]), 4, True, b"\x82\6\0\1\0\1a\2"),
    "SUBACK": (SubscribeAnswer(PacketType.SUBACK, 258, b"\2\x87"), 5, False, b"\x90\5\1\2\0\2\x87"),
    "SUBACK 3.1.1": (SubscribeAnswer(PacketType.SUBACK, 1, b"\2\x80"), 4, False, b"\x90\4\0\1\2\x80"),
    "UNSUBSCRIBE": (UnsubscribePacket(258, ["a", "b"]), 5, True, b"\xa2\x09\1\2\0\0\1a\0\1b"),
    "UNSUBACK": (
        SubscribeAnswer(PacketType.UNSUBACK, 1, b"\x11", USER_X),
        5,
        False,
        b"\xb0\x0b\0\1" + USER_BYTES + b"\x11",
    ),
    "UNSUBACK 3.1.1": (SubscribeAnswer(PacketType.UNSUBACK, 1, b""), 4, False, b"\xb0\2\0\1"),
    "PINGREQ": (PingPacket(PacketType.PINGREQ), 5, True, b"\xc0\0"),
    "PINGRESP": (PingPacket(PacketType.PINGRESP), 4, False, b"\xd0\0"),
    "DISCONNECT": (DisconnectPacket(), 5, True, b"\xe0\0"),
    "DISCONNECT with a code": (DisconnectPacket(0x8E), 5, False, b"\xe0\1\x8e"),
    "DISCONNECT with properties": (DisconnectPacket(0, USER_X), 5, False, b"\xe0\x09\0" + USER_BYTES),
    "DISCONNECT 3.1.1": (DisconnectPacket(), 4, True, b"\xe0\0"),
    "AUTH": (AuthPacket(0x18, USER_X), 5, True, b"\xf0\x09\x18" + USER_BYTES),
}


@pytest.mark.parametrize("what", BYTES_OF)
def test_packets_have_the_bytes_of_the_standard(what: str) -> None:
    packet, version, is_from_client, data = BYTES_OF[what]
    assert encode(packet, version) == data
    assert decode(data[0], data[2:], version, is_from_client) == packet
    for end in range(2, len(data)):
        with contextlib.suppress(MqttError):  # an end that may be left out, or a payload
            assert decode(data[0], data[2:end], version, is_from_client) != packet


WRONG_BYTES = {
    "a reserved flag of CONNECT": (b"\x10\0\4MQTT\5\1\0\0\0\0\0", 5, True, 0x81),
    "a will with QoS 3": (b"\x10\0\4MQTT\5\x1c\0\0\0\0\1c\0\0\1w\0\0", 5, True, 0x81),
    "the QoS of no will": (b"\x10\0\4MQTT\5\x08\0\0\0\0\0", 5, True, 0x81),
    "the retain flag of no will": (b"\x10\0\4MQTT\5\x20\0\0\0\0\0", 5, True, 0x81),
    "a will to a wildcard": (b"\x10\0\4MQTT\5\4\0\0\0\0\1c\0\0\1#\0\0", 5, True, 0x90),
    "a password without a user": (b"\x10\0\4MQTT\4\x40\0\0\0\0\0\1p", 4, True, 0x81),
    "another protocol": (b"\x10\0\4MQTX\5\0\0\0\0\0\0", 5, True, 0x84),
    "version 3": (b"\x10\0\4MQTT\3\0\0\0\0\0", 5, True, 0x84),
    "version 6": (b"\x10\0\4MQTT\6\0\0\0\0\0\0", 5, True, 0x84),
    "data of no method": (b"\x10\0\4MQTT\5\0\0\0\4\x16\0\1x\0\0", 5, True, 0x82),
    "bytes after CONNECT": (b"\x10\0\4MQTT\5\0\0\0\0\0\0x", 5, True, 0x81),
    "a reserved flag of CONNACK": (b"\x20\2\0\0", 5, False, 0x81),
    "a CONNACK of one byte": (b"\x20\0", 4, False, 0x81),
    "properties in 3.1.1": (b"\x20\0\0\0", 4, False, 0x81),
    "a PUBLISH with QoS 3": (b"\x36\0\1t\0\1\0", 5, True, 0x81),
    "a repeated QoS 0": (b"\x38\0\1t\0", 5, True, 0x81),
    "identifier 0": (b"\x32\0\1t\0\0\0", 5, True, 0x81),
    "a topic with +": (b"\x30\0\1+\0", 5, True, 0x90),
    "a topic with #": (b"\x30\0\1#\0", 5, True, 0x90),
    "a PUBACK with flags": (b"\x41\0\1", 5, True, 0x81),
    "a PUBREL without flags": (b"\x60\0\1", 5, True, 0x81),
    "an acknowledgement of 0": (b"\x40\0\0", 5, True, 0x82),
    "a code in 3.1.1": (b"\x40\0\1\0", 4, True, 0x81),
    "bytes after an acknowledgement": (b"\x40\0\1\0\0x", 5, True, 0x81),
    "SUBSCRIBE without flags": (b"\x80\0\1\0\0\1a\0", 5, True, 0x81),
    "SUBSCRIBE without a filter": (b"\x82\0\1\0", 5, True, 0x82),
    "UNSUBSCRIBE without a filter": (b"\xa2\0\1\0", 5, True, 0x82),
    "a filter without options": (b"\x82\0\1\0\0\1a", 5, True, 0x81),
    "SUBACK without codes": (b"\x90\0\1\0", 5, False, 0x81),
    "UNSUBACK of 3.1.1 with codes": (b"\xb0\0\1\0", 4, False, 0x81),
    "PINGREQ with a body": (b"\xc0x", 5, True, 0x81),
    "DISCONNECT of 3.1.1 with a body": (b"\xe0\0", 4, True, 0x81),
    "DISCONNECT of a server of 3.1.1": (b"\xe0", 4, False, 0x82),
    "AUTH of 3.1.1": (b"\xf0", 4, True, 0x82),
    "bytes after DISCONNECT": (b"\xe0\0\0x", 5, True, 0x81),
    "CONNACK of a client": (b"\x20\0\0\0", 5, True, 0x82),
    "CONNECT of a server": (b"\x10\0\4MQTT\5\0\0\0\0\0\0", 5, False, 0x82),
    "PINGREQ of a server": (b"\xc0", 5, False, 0x82),
    "packet type 0": (b"\0", 5, True, 0x82),
}


@pytest.mark.parametrize("what", WRONG_BYTES)
def test_a_wrong_packet_is_refused_with_its_code(what: str) -> None:
    data, version, is_from_client, code = WRONG_BYTES[what]
    with pytest.raises(MqttError) as caught:
        decode(data[0], data[1:], version, is_from_client)
    assert caught.value.code == code


def test_answers_omit_what_3_1_1_lacks() -> None:
    codes = bytes((0, 2, 0x7F, 0x80, 0x87))
    suback = encode(SubscribeAnswer(PacketType.SUBACK, 1, codes, USER_X), 4)
    assert suback == b"\x90\7\0\1\0\2\x7f\x80\x80"
    assert encode(SubscribeAnswer(PacketType.UNSUBACK, 1, codes), 4) == b"\xb0\2\0\1"
    assert encode(Acknowledgement(PacketType.PUBACK, 1, 0x87, USER_X), 4) == b"\x40\2\0\1"
    assert encode(SubscribePacket(1, [Subscription("a", 0x2E)]), 4) == b"\x82\6\0\1\0\1a\2"
    assert encode(DisconnectPacket(0x8E), 4) == b"\xe0\0"


def test_an_acknowledgement_without_properties_is_short() -> None:
    assert encode_acknowledgement(PacketType.PUBREL, 258, 5) == b"\x62\2\1\2"
    assert encode_acknowledgement(PacketType.PUBREC, 258, 5, 0x91) == b"\x50\3\1\2\x91"
    assert encode_acknowledgement(PacketType.PUBREC, 258, 4, 0x91) == b"\x50\2\1\2"


def test_refusals_without_properties_are_accepted() -> None:
    assert decode(0x20, b"\0\x87", 5, False) == ConnackPacket(False, 0x87)
    assert decode(0xE0, b"\x8e", 5, False) == DisconnectPacket(0x8E)
    assert decode(0x40, b"\0\1\x10", 5, False) == Acknowledgement(PacketType.PUBACK, 1, 0x10)


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 70_000])
def test_a_stream_is_split_at_every_size(size: int) -> None:
    stream = b"\x30" + varint(size) + b"b" * size
    splitter = PacketSplitter(len(stream))
    splitter.feed(stream[:-1])
    assert splitter.next() is None or not size
    splitter.feed(stream[-1:] + stream)
    assert [splitter.next(), splitter.next(), splitter.next()] == [(0x30, b"b" * size)] * 2 + [None]


def test_a_packet_above_the_limit_is_refused_early() -> None:
    whole = encode_publish(0, b"t", 0, b"", bytes(200))
    accepting, refusing = PacketSplitter(len(whole)), PacketSplitter(len(whole) - 1)
    accepting.feed(whole)
    assert accepting.next() == (0x30, whole[3:])
    refusing.feed(whole[:3])
    with pytest.raises(MqttError, match=f"a packet of {len(whole)} bytes") as caught:
        refusing.next()
    assert caught.value.code == 0x95


def test_a_length_has_at_most_four_bytes() -> None:
    splitter = PacketSplitter()
    splitter.feed(b"\x30\xff\xff\xff")
    assert splitter.next() is None
    splitter.feed(b"\xff")
    with pytest.raises(MqttError, match="more than four bytes") as caught:
        splitter.next()
    assert caught.value.code == 0x81
    largest = PacketSplitter()
    largest.feed(b"\x30\xff\xff\xff\x7f")
    assert largest.next() is None


def test_another_first_packet_is_refused_by_its_type() -> None:
    splitter = PacketSplitter()
    splitter.only = 0x10
    assert splitter.next() is None
    splitter.feed(b"\x10")
    assert splitter.next() is None
    splitter.feed(b"\0\x20")
    assert splitter.next() == (0x10, b"")
    with pytest.raises(MqttError, match="unexpected packet 0x20"):
        splitter.next()


def test_the_version_for_an_answer_is_known_early() -> None:
    versions = {
        b"\0\4MQTT\5": 5,
        b"\0\4MQTT\6": 4,
        b"\0\4MQTT\4": 4,
        b"\0\6MQIsdp\3": 4,
        b"\0\4MQTT": 0,
        b"\0\4MQTX\5": 0,
        b"": 0,
    }
    assert {body: connect_version(body) for body in versions} == versions


@pytest.mark.parametrize("first", [0x30, 0x32])
def test_topic_and_alias_of_a_refused_message_are_known(first: int) -> None:
    whole = encode_publish(first & 6, b"t" * 300, 258, b"\3\x23\1\2", b"p")[3:]
    packet = publish_alias(first, whole)
    assert (packet.topic, packet.properties) == ("t" * 300, {"topicalias": 258})
    assert publish_alias(first, encode_publish(first & 6, b"t", 1, b"\0", b"p")[2:]).properties == {}
    if first & 6:
        assert publish_identifier(whole) == 258


def test_packets_with_the_most_filters_pass() -> None:
    subscribe = encode(SubscribePacket(1, [Subscription("t")] * MAX_FILTERS), 5)
    assert len(decode(subscribe[0], subscribe[3:], 5, True).subscriptions) == 1000  # type: ignore[union-attr]
    for count in (1000, 1001):
        unsubscribe = encode(UnsubscribePacket(1, ["t"] * count), 5)
        if count == 1000:
            assert len(decode(unsubscribe[0], unsubscribe[3:], 5, True).topics) == 1000  # type: ignore[union-attr]
        else:
            with pytest.raises(MqttError, match="more than 1000"):
                decode(unsubscribe[0], unsubscribe[3:], 5, True)


def test_quality_and_retain_are_flags_of_a_message() -> None:
    found = [(PublishPacket("t", b"", flags).qos, PublishPacket("t", b"", flags).retain) for flags in (0, 3, 12, 8)]
    assert found == [(0, False), (1, True), (2, False), (0, False)]
