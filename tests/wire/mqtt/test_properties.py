"""MQTT properties: paho agrees on what is valid, nothing else gets through, and long packets cost little."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.fields import (
    MAX_PROPERTIES,
    PacketType,
    TooManyPropertiesError,
    decode_properties,
    encode_properties,
    varint,
)

TEXT = st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), max_size=30)  # paho: no U+FEFF
TWO, FOUR, FLAG = st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF), st.integers(0, 1)
POSITIVE = st.integers(1, 0xFFFF)
LARGE = st.integers(1, 268_435_455)
BINARY = st.binary(max_size=300)
MESSAGE = {
    "PayloadFormatIndicator": FLAG,
    "MessageExpiryInterval": FOUR,
    "ContentType": TEXT,
    "ResponseTopic": TEXT,
    "CorrelationData": BINARY,
}
VALUES: dict[PacketType, dict[str, st.SearchStrategy[Any]]] = {
    PacketType.PUBLISH: MESSAGE
    | {"TopicAlias": POSITIVE, "SubscriptionIdentifier": st.lists(LARGE, min_size=1, max_size=5)},
    PacketType.WILL: MESSAGE | {"WillDelayInterval": FOUR},
    PacketType.CONNECT: {
        "SessionExpiryInterval": FOUR,
        "ReceiveMaximum": POSITIVE,
        "MaximumPacketSize": LARGE,
        "TopicAliasMaximum": TWO,
        "RequestResponseInformation": FLAG,
        "RequestProblemInformation": FLAG,
        "AuthenticationMethod": TEXT,
        "AuthenticationData": BINARY,
    },
    PacketType.CONNACK: {
        "SessionExpiryInterval": FOUR,
        "ReceiveMaximum": POSITIVE,
        "MaximumQoS": FLAG,
        "RetainAvailable": FLAG,
        "MaximumPacketSize": LARGE,
        "AssignedClientIdentifier": TEXT,
        "TopicAliasMaximum": TWO,
        "ReasonString": TEXT,
        "WildcardSubscriptionAvailable": FLAG,
        "SubscriptionIdentifierAvailable": FLAG,
        "SharedSubscriptionAvailable": FLAG,
        "ServerKeepAlive": TWO,
        "ResponseInformation": TEXT,
        "ServerReference": TEXT,
    },
    PacketType.DISCONNECT: {"SessionExpiryInterval": FOUR, "ReasonString": TEXT, "ServerReference": TEXT},
    PacketType.SUBACK: {"ReasonString": TEXT},
}
PAHO = {packet: getattr(PacketTypes, "WILLMESSAGE" if packet is PacketType.WILL else packet.name) for packet in VALUES}


def plain(found: Any) -> Any:
    return found[0] if isinstance(found, list) and len(found) == 1 else found


@settings(max_examples=300)
@given(st.data())
def test_what_paho_encodes_is_decoded_as_paho_does(data: st.DataObject) -> None:
    packet = data.draw(st.sampled_from(sorted(VALUES)))
    chosen = data.draw(st.fixed_dictionaries({}, optional=VALUES[packet]))
    users = data.draw(st.lists(st.tuples(TEXT.map("x-".__add__), TEXT), max_size=6))
    paho = Properties(PAHO[packet])
    for name, value in chosen.items():
        setattr(paho, name, value)
    for user in users:
        paho.UserProperty = user
    wanted = {name.lower(): plain(value) for name, value in chosen.items()}
    for name, _ in users:
        wanted[name] = plain([value for key, value in users if key == name])
    encoded = paho.pack()
    assert decode_properties(b"before" + encoded + b"behind", 6, packet) == (wanted, 6 + len(encoded))


@settings(max_examples=300)
@given(st.data())
def test_what_we_encode_paho_decodes(data: st.DataObject) -> None:
    packet = data.draw(st.sampled_from(sorted(VALUES)))
    values = {name: value for name, value in VALUES[packet].items() if name != "SubscriptionIdentifier"}
    chosen = data.draw(st.fixed_dictionaries({}, optional=values))
    users = data.draw(st.dictionaries(TEXT.map("x-".__add__), st.lists(TEXT, min_size=1, max_size=3), max_size=4))
    encoded = encode_properties({name.lower(): value for name, value in chosen.items()} | users, packet)
    paho, size = Properties(PAHO[packet]).unpack(encoded)
    assert size == len(encoded)
    assert {name: getattr(paho, name) for name in chosen} == chosen
    assert getattr(paho, "UserProperty", []) == [(name, item) for name, items in users.items() for item in items]
    assert decode_properties(encoded, 0, packet)[0] == {key.lower(): value for key, value in chosen.items()} | {
        name: plain(items) for name, items in users.items()
    }


@settings(max_examples=500)
@given(st.binary(max_size=80), st.sampled_from(PacketType))
def test_any_bytes_are_decoded_or_refused(data: bytes, packet: PacketType) -> None:
    for body in (data, varint(len(data)) + data):
        try:
            found, end = decode_properties(body, 0, packet)
        except MqttError as error:
            code = error.code
        else:
            code = 0x81 if end <= len(body) and isinstance(found, dict) else 0
        assert code in (0x81, 0x82)


@given(st.data())
def test_every_cut_is_refused(data: st.DataObject) -> None:
    chosen = data.draw(st.fixed_dictionaries(VALUES[PacketType.CONNACK]))
    encoded = encode_properties({name.lower(): value for name, value in chosen.items()}, PacketType.CONNACK)
    at = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(MqttError):
        decode_properties(encoded[:at], 0, PacketType.CONNACK)


REFUSED = {
    "unknown": (PacketType.PUBLISH, b"\x7f\0", 0x81),
    "of another packet": (PacketType.PUBLISH, b"\x21\0\1", 0x82),
    "twice": (PacketType.PUBLISH, b"\x01\0\x01\0", 0x82),
    "two subscription identifiers to a broker": (PacketType.SUBSCRIBE, b"\x0b\1\x0b\2", 0x82),
    "a flag of 2": (PacketType.PUBLISH, b"\x01\2", 0x82),
    "alias 0": (PacketType.PUBLISH, b"\x23\0\0", 0x82),
    "receive maximum 0": (PacketType.CONNACK, b"\x21\0\0", 0x82),
    "subscription identifier 0": (PacketType.PUBLISH, b"\x0b\0", 0x82),
    "a long number": (PacketType.PUBLISH, b"\x0b\xff\xff\xff\xff\1", 0x81),
    "no UTF-8": (PacketType.PUBLISH, b"\x03\0\1\xff", 0x81),
    "a surrogate": (PacketType.PUBLISH, b"\x03\0\3\xed\xa0\x80", 0x81),
    "NUL": (PacketType.PUBLISH, b"\x26\0\1\0\0\0", 0x81),
    "longer than the properties": (PacketType.PUBLISH, b"\x03\0\x09abc", 0x81),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    packet, body, code = REFUSED[what]
    with pytest.raises(MqttError) as caught:
        decode_properties(bytes((len(body),)) + body + b"more than enough", 0, packet)
    assert caught.value.code == code


def test_user_properties_do_not_pass_for_others() -> None:
    body = b"\x26\0\x0atopicalias\0\1x"
    assert decode_properties(bytes((len(body),)) + body, 0, PacketType.PUBLISH)[0] == {}


@pytest.mark.parametrize("pair", [b"\x26\0\0\0\0", b"\x26\0\1a\0\1b"])
def test_a_mebibyte_of_properties_is_refused_at_once(pair: bytes) -> None:
    body = pair * ((1 << 20) // len(pair))
    data = varint(len(body)) + body
    begin_s = process_time()
    with pytest.raises(TooManyPropertiesError):
        decode_properties(data, 0, PacketType.PUBLISH)
    assert process_time() - begin_s < 0.025


def test_as_many_as_are_allowed() -> None:
    body = b"\x26\0\1a\0\1b" * MAX_PROPERTIES
    assert decode_properties(varint(len(body)) + body, 0, PacketType.PUBLISH)[0] == {"a": ["b"] * MAX_PROPERTIES}


WRONG = {
    "receivemaximum": 0,
    "sessionexpiryinterval": 1 << 32,
    "topicaliasmaximum": "many",
    "requestprobleminformation": 2,
    "authenticationmethod": 5,
    "authenticationdata": b"x" * 65536,
    "own": "a\0b",
    "maximumpacketsize": 1.5,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        encode_properties({name: WRONG[name]}, PacketType.CONNECT)


def test_values_of_lua() -> None:
    found = {"receivemaximum": 7.0, "authenticationmethod": b"plain", "authenticationdata": "x", "$reason": "no"}
    assert decode_properties(encode_properties(found, PacketType.CONNECT), 0, PacketType.CONNECT)[0] == {
        "receivemaximum": 7,
        "authenticationmethod": "plain",
        "authenticationdata": b"x",
        "$reason": "no",
    }
    assert decode_properties(encode_properties({"$reason": "late"}, PacketType.DISCONNECT), 0, PacketType.DISCONNECT)[
        0
    ] == {"reasonstring": "late"}
