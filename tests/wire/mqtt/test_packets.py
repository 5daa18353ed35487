"""MQTT packets: what is encoded is decoded, any bytes end in a packet or one error, and long packets cost little."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState, MqttSession
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
)
from smqrt.wire.mqtt.server import MqttServerEndpoint

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
)
FROM_CLIENT = st.one_of(
    CONNECTS,
    st.builds(
        SubscribePacket,
        IDENTIFIER,
        st.lists(st.builds(Subscription, NAME, st.integers(0, 2)), min_size=1, max_size=5),
        USER,
    ),
    st.builds(UnsubscribePacket, IDENTIFIER, st.lists(TEXT, min_size=1, max_size=5), USER),
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


@settings(max_examples=600)
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


@settings(max_examples=1000)
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
    """Takes whatever happens; a server that lets all in."""

    endpoint: Any

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def on_connect(self, packet: ConnectPacket) -> None:
        self.endpoint.accept(MqttSession(), False)


@settings(max_examples=500)
@given(streams(), st.integers(1, 30), st.booleans(), st.sampled_from([4, 5]))
def test_any_stream_ends_in_a_state_with_a_reason(stream: bytes, size: int, is_client: bool, version: int) -> None:
    events = Deaf()
    if is_client:
        endpoint: Any = MqttClientEndpoint(events, version, "c")
        endpoint.connect(True, 0, {})
    else:
        endpoint = events.endpoint = MqttServerEndpoint(events, 10_000)
    for at in range(0, len(stream), size):
        endpoint.feed(stream[at : at + size], 0.0)
        try:
            handle_all(endpoint)
        except MqttError as error:
            endpoint.fail(error)
            assert endpoint.state is ConnectionState.CLOSED
            break
    cut(endpoint.take(0.0))


def handle_all(endpoint: Any) -> None:
    while endpoint.next():
        pass


def seconds(stream: bytes, code: int = 0x97) -> float:
    """What it costs to refuse a packet with a reason code: the least of three, as others use the machine too."""
    return min(_seconds(stream, code) for _ in range(3))


def _seconds(stream: bytes, code: int) -> float:
    begin_s = process_time()
    endpoint: Any = Deaf()
    endpoint.endpoint = server = MqttServerEndpoint(endpoint, 1 << 21)
    server.feed(encode(ConnectPacket(5, "c"), 5) + stream, 0.0)
    with pytest.raises(MqttError) as caught:
        handle_all(server)
    assert caught.value.code == code
    return process_time() - begin_s


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
