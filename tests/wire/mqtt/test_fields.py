"""Fields of MQTT: properties and topics are valid when paho says so, and long packets cost little."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.fields import (
    MAX_PROPERTIES,
    NAMES,
    NUMBERS,
    RETURN_CODES,
    TEXTS,
    PacketType,
    Reason,
    Routes,
    TooManyPropertiesError,
    check_filter,
    check_topic,
    cut_properties,
    decode_properties,
    encode_properties,
    find_alias,
    number_of,
    read_binary,
    read_text,
    read_varint,
    reason_words,
    unshared,
    varint,
)
from smqrt.wire.mqtt.filter_tree import FilterTree

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


@settings(max_examples=100)
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


@settings(max_examples=100)
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


@settings(max_examples=200)
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
    "of another packet": (PacketType.PUBLISH, b"\x21\0\1", 0x81),
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


# ---- the tables of the standard

TABLE: dict[str, tuple[int, PacketType, bytes, bytes, object]] = {
    "payloadformatindicator": (0x01, PacketType.WILL, b"\1", b"\2", 1),
    "messageexpiryinterval": (0x02, PacketType.PUBLISH, b"\xff" * 4, b"", 0xFFFFFFFF),
    "contenttype": (0x03, PacketType.PUBLISH, b"\0\1x", b"", "x"),
    "responsetopic": (0x08, PacketType.WILL, b"\0\1x", b"", "x"),
    "correlationdata": (0x09, PacketType.PUBLISH, b"\0\1\xff", b"", b"\xff"),
    "subscriptionidentifier": (0x0B, PacketType.SUBSCRIBE, b"\xff\xff\xff\x7f", b"\0", 268_435_455),
    "sessionexpiryinterval": (0x11, PacketType.DISCONNECT, b"\xff" * 4, b"", 0xFFFFFFFF),
    "assignedclientidentifier": (0x12, PacketType.CONNACK, b"\0\1x", b"", "x"),
    "serverkeepalive": (0x13, PacketType.CONNACK, b"\xff\xff", b"", 0xFFFF),
    "authenticationmethod": (0x15, PacketType.AUTH, b"\0\1x", b"", "x"),
    "authenticationdata": (0x16, PacketType.AUTH, b"\0\1\xff", b"", b"\xff"),
    "requestprobleminformation": (0x17, PacketType.CONNECT, b"\1", b"\2", 1),
    "willdelayinterval": (0x18, PacketType.WILL, b"\0\0\0\0", b"", 0),
    "requestresponseinformation": (0x19, PacketType.CONNECT, b"\0", b"\2", 0),
    "responseinformation": (0x1A, PacketType.CONNACK, b"\0\1x", b"", "x"),
    "serverreference": (0x1C, PacketType.DISCONNECT, b"\0\1x", b"", "x"),
    "reasonstring": (0x1F, PacketType.PUBCOMP, b"\0\1x", b"", "x"),
    "receivemaximum": (0x21, PacketType.CONNECT, b"\0\1", b"\0\0", 1),
    "topicaliasmaximum": (0x22, PacketType.CONNACK, b"\0\0", b"", 0),
    "topicalias": (0x23, PacketType.PUBLISH, b"\xff\xff", b"\0\0", 0xFFFF),
    "maximumqos": (0x24, PacketType.CONNACK, b"\0", b"\2", 0),
    "retainavailable": (0x25, PacketType.CONNACK, b"\0", b"\2", 0),
    "maximumpacketsize": (0x27, PacketType.CONNACK, b"\0\0\0\1", b"\0\0\0\0", 1),
    "wildcardsubscriptionavailable": (0x28, PacketType.CONNACK, b"\0", b"\2", 0),
    "subscriptionidentifieravailable": (0x29, PacketType.CONNACK, b"\0", b"\2", 0),
    "sharedsubscriptionavailable": (0x2A, PacketType.CONNACK, b"\0", b"\2", 0),
}
"""Name: number, a packet that has it, the bytes of a value, those of one out of range, and the value (table 2-4)."""


@pytest.mark.parametrize("name", TABLE)
def test_each_property_has_its_number_and_range(name: str) -> None:
    number, packet, encoded, wrong, value = TABLE[name]
    body = bytes((number,)) + encoded
    assert encode_properties({name: value}, packet) == bytes((len(body),)) + body
    assert decode_properties(bytes((len(body),)) + body, 0, packet) == ({name: value}, len(body) + 1)
    if wrong:
        with pytest.raises(MqttError, match=f"{name} can't be"):
            decode_properties(bytes((len(wrong) + 1, number)) + wrong, 0, packet)


@pytest.mark.parametrize("name", TABLE)
def test_a_number_out_of_range_is_not_sent(name: str) -> None:
    _, packet, encoded, wrong, value = TABLE[name]
    if name in NUMBERS:
        highest = (
            268_435_455 if name == "subscriptionidentifier" else (1 if b"\2" in wrong else 256 ** len(encoded) - 1)
        )
        lowest = 1 if wrong and not any(wrong) else 0
        for edge in (lowest, highest):
            assert decode_properties(encode_properties({name: edge}, packet), 0, packet)[0] == {name: edge}
        for beyond in (lowest - 1, highest + 1):
            with pytest.raises(ArgumentError, match=name):
                encode_properties({name: beyond}, packet)
    else:
        assert isinstance(value, str | bytes)


def test_properties_are_numbers_or_texts() -> None:
    assert tuple(TABLE) == NAMES
    assert {name for name, row in TABLE.items() if isinstance(row[4], int)} == NUMBERS
    assert set(NAMES) - NUMBERS == TEXTS


def test_reason_codes_keep_their_numbers() -> None:
    """MQTT 5 §2.4"""
    assert [code.value for code in Reason] == [0, 1, 2, 4, 0x10, 0x11, 0x18, 0x19, *range(0x80, 0xA3)]
    assert RETURN_CODES == {0x84: 1, 0x85: 2, 0x88: 3, 0x86: 4, 0x87: 5}
    assert [kind.value for kind in PacketType] == list(range(16))


def test_reasons_are_named_in_words() -> None:
    assert reason_words(0x87, 5) == reason_words(5, 4) == "not authorized"
    assert reason_words(5, 5) == "reason 5"
    assert reason_words(0x87, 4) == "reason 135"


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, b"\0"),
        (127, b"\x7f"),
        (128, b"\x80\1"),
        (16_383, b"\xff\x7f"),
        (16_384, b"\x80\x80\1"),
        (2_097_151, b"\xff\xff\x7f"),
        (268_435_455, b"\xff\xff\xff\x7f"),
    ],
)
def test_a_variable_byte_integer_has_the_fewest_bytes(number: int, encoded: bytes) -> None:
    """MQTT 5 §1.5.5"""
    assert varint(number) == encoded
    assert read_varint(b"x" + encoded + b"y", 1, len(encoded) + 1) == (number, len(encoded) + 1)
    for end in range(len(encoded)):
        with pytest.raises(MqttError, match="inside a field"):
            read_varint(encoded, 0, end)


def test_a_wrong_variable_byte_integer_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 268435455"):
        varint(268_435_456)
    for longer in (b"\x80\0", b"\xff\x80\0"):
        with pytest.raises(MqttError, match="than it needs"):
            read_varint(longer, 0, len(longer))
    with pytest.raises(MqttError, match="more than four"):
        read_varint(b"\xff\xff\xff\xff\1", 0, 5)


def test_a_text_ends_where_its_length_says() -> None:
    assert read_binary(b"x\0\2abc", 1, 5) == (b"ab", 5)
    assert read_text(b"x\0\2abc", 1, 5) == ("ab", 5)
    assert read_binary(b"\1\0" + b"a" * 256, 0, 258) == (b"a" * 256, 258)
    for end in range(4):
        with pytest.raises(MqttError, match="inside a field"):
            read_binary(b"\0\2abc", 0, end)


def test_the_longest_text_is_65535_bytes() -> None:
    text = "x" * 65535
    encoded = encode_properties({"contenttype": text}, PacketType.PUBLISH)
    assert decode_properties(encoded, 0, PacketType.PUBLISH)[0] == {"contenttype": text}
    with pytest.raises(ArgumentError, match="contenttype"):
        encode_properties({"contenttype": text + "x"}, PacketType.PUBLISH)


@pytest.mark.parametrize("name", ["contenttype", "messageexpiryinterval", "subscriptionidentifier", "x-own"])
def test_one_property_is_cut_out_of_a_block(name: str) -> None:
    found = {"contenttype": "t", "messageexpiryinterval": 7, "x-own": ["a", "b"], "subscriptionidentifier": [200, 3]}
    block = encode_properties(found, PacketType.PUBLISH)
    if name == "x-own":
        assert cut_properties(block, "topicalias") == block[1:]
        return
    kept = {other: value for other, value in found.items() if other != name}
    assert cut_properties(block, name) == encode_properties(kept, PacketType.PUBLISH)[1:]


def test_the_alias_is_found_among_many_user_properties() -> None:
    many = {"x" * 300: ["y" * 300] * 2000}
    for found, alias in (({"topicalias": 258} | many, 258), (many | {"topicalias": 258}, 258), (many, 0), ({}, 0)):
        assert find_alias(b"before" + encode_properties(found, PacketType.PUBLISH), 6) == alias


def test_the_search_for_an_alias_ends_at_the_limit() -> None:
    numbers = {"subscriptionidentifier": [1] * MAX_PROPERTIES}
    assert find_alias(encode_properties(numbers | {"topicalias": 5}, PacketType.PUBLISH), 0) == 5
    numbers["subscriptionidentifier"].append(1)
    with pytest.raises(TooManyPropertiesError):
        find_alias(encode_properties(numbers | {"topicalias": 5}, PacketType.PUBLISH), 0)


def test_a_cut_block_has_no_alias() -> None:
    block = encode_properties({"x-own": "abc", "y-own": "d"}, PacketType.PUBLISH)
    assert find_alias(block, 0) == 0
    for size in range(1, len(block) - 1):
        with pytest.raises(MqttError):
            find_alias(block[:size], 0)
    with pytest.raises(MqttError):
        find_alias(bytes((block[0] - 1,)) + block[1:], 0)


def test_more_properties_than_allowed_are_refused() -> None:
    body = b"\x26\0\1a\0\1b" * (MAX_PROPERTIES + 1)
    with pytest.raises(TooManyPropertiesError, match="more than 1000") as caught:
        decode_properties(varint(len(body)) + body, 0, PacketType.PUBLISH)
    assert caught.value.code == 0x97


def test_a_number_is_read_from_properties() -> None:
    assert number_of({"a": 5}, "a", 7) == 5
    assert number_of({"a": 5.9}, "a", 7) == 5
    assert number_of({"a": "5"}, "a", 7) == 7
    assert number_of({}, "a", 7) == 7


def test_lists_of_user_properties_become_several() -> None:
    for values in (["a", b"b", 3], ("a", b"b", 3)):
        assert encode_properties({"k": values}, PacketType.AUTH) == (
            b"\x15\x26\0\1k\0\1a\x26\0\1k\0\1b\x26\0\1k\0\x013"
        )
    assert encode_properties(None, PacketType.AUTH) == encode_properties({}, PacketType.AUTH) == b"\0"


def test_a_property_of_another_packet_becomes_a_user_property() -> None:
    encoded = encode_properties({"topicalias": 5}, PacketType.CONNECT)
    assert encoded == b"\x10\x26\0\x0atopicalias\0\x015"


# ---- topics: what is a name, what a filter, and which filters match

LEVEL = st.sampled_from(["a", "b", "", "$x"])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)
PATTERN = st.tuples(st.lists(LEVEL | st.just("+"), max_size=4), st.booleans()).map(
    lambda pair: "/".join(pair[0] + ["#"] * pair[1])
)


@given(st.lists(PATTERN.filter(bool), max_size=12), st.lists(PATTERN.filter(bool), max_size=6), TOPIC)
def test_matches_as_paho_does(filters: list[str], removed: list[str], topic: str) -> None:
    tree: FilterTree[str] = FilterTree()
    for one in filters:
        tree.set(one, one)
    for one in removed:
        tree.remove(one)
    kept = {one for one in filters if one not in removed}
    assert sorted(tree.match(topic)) == sorted(one for one in kept if topic_matches_sub(one, topic))


def test_nothing_is_left_of_what_was_removed() -> None:
    tree: FilterTree[int] = FilterTree()
    tree.set("a/+/c", 1)
    tree.set("a/#", 2)
    tree.remove("a/+/c")
    tree.remove("nothing/there")
    assert list(tree.match("a/b/c")) == [2]
    tree.remove("a/#")
    assert not tree._root


@pytest.mark.parametrize("wrong", ["", "a\0", "\ud800", "x" * 65536, 5, None, "a/+", "#"])
def test_no_topic(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="topic"):
        check_topic(wrong)


@pytest.mark.parametrize("wrong", ["", "a#", "a/#/b", "+a", "a/b+", "##"])
def test_no_filter(wrong: str) -> None:
    with pytest.raises(ArgumentError, match="topic"):
        check_filter(wrong)


def test_filters() -> None:
    assert check_filter("a/+/#") == "a/+/#"
    assert check_topic(b"a") == "a"
    assert unshared("$share/g/a/#") == "a/#"
    assert unshared("a/b") == "a/b"


def test_routes() -> None:
    routes = Routes()
    one, two = (lambda *_: 1), (lambda *_: 2)
    assert (routes.add("a/#", one), routes.add("$share/g/a/b", two), routes.add("a/#", one)) == (1, 2, 1)
    assert routes.find("a/b", {"subscriptionidentifier": [2, 1, 9]}) == [two, one]
    assert routes.find("a/b", {"subscriptionidentifier": 2}) == [two]
    assert routes.find("a/b", {}) == []
    routes.uses_identifiers = False
    assert routes.find("a/b", {}) == [one, two]
    routes.remove("a/#")
    routes.remove("a/#")
    assert routes.find("a/b", {}) == [two]


def test_repeated_subscription_identifiers_deliver_a_message_once() -> None:
    routes = Routes()
    one, other = (routes.add(topic, lambda *_: None) for topic in ("a", "b"))
    assert len(routes.find("a", {"subscriptionidentifier": [one] * 1000 + [other]})) == 2


def test_a_shared_filter_needs_a_group_and_a_filter() -> None:
    assert unshared("$share/g/") == ""
    assert unshared("$share/g") == "$share/g"
    assert unshared("$shared/g/a") == "$shared/g/a"


def test_a_topic_has_at_most_65535_bytes() -> None:
    for check in (check_topic, check_filter):
        assert check("x" * 65535) == "x" * 65535
        with pytest.raises(ArgumentError, match="65535 bytes"):
            check("x" * 65536)
        with pytest.raises(ArgumentError, match="65535 bytes"):
            check("ä" * 32768)
        with pytest.raises(ArgumentError, match="UTF-8"):
            check(b"\xff")


def test_identifiers_of_subscriptions_are_not_used_again() -> None:
    routes = Routes()
    assert routes.find("a", {"subscriptionidentifier": 1}) == []
    assert [routes.add(topic, lambda *_: None) for topic in ("a", "b")] == [1, 2]
    routes.remove("b")
    assert routes.add("b", lambda *_: None) == 3
    assert routes.find("b", {"subscriptionidentifier": 2}) == []
    assert routes.uses_identifiers
