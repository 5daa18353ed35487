"""Reason codes, properties and topic names of MQTT."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.filter_tree import FilterTree


class Reason(IntEnum):
    """Reason codes; failures begin at 0x80. A code with several names in the standard has the first one."""

    SUCCESS = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL_MESSAGE = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_FOUND = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


FIRST_FAILURE = 0x80
RETURN_CODES: dict[int, int] = {
    Reason.UNSUPPORTED_PROTOCOL_VERSION: 1,
    Reason.CLIENT_IDENTIFIER_NOT_VALID: 2,
    Reason.SERVER_UNAVAILABLE: 3,
    Reason.BAD_USER_NAME_OR_PASSWORD: 4,
    Reason.NOT_AUTHORIZED: 5,
}
"""Return codes of MQTT 3.1.1 in CONNACK. For other reasons, the connection is closed without CONNACK."""

_WORDS = {reason.value: reason.name.replace("_", " ").lower() for reason in Reason}
_RETURN_CODE_WORDS = {code: _WORDS[reason] for reason, code in RETURN_CODES.items()}


def reason_words(code: int, version: int) -> str:
    """Return the words for a code of CONNACK or DISCONNECT, such as "not authorized"; version 4 is MQTT 3.1.1."""
    return (_WORDS if version == 5 else _RETURN_CODE_WORDS).get(code, f"reason {code}")


# ---- Properties of MQTT 5 (§2.2.2)
#
# Applications use one dict, with the names of the standard in lower case and without spaces:
# `{"contenttype": "text/plain", "messageexpiryinterval": 60, "colour": "red"}`. Other names are user properties.

Props = Mapping[str, object]
"""Properties from an application. Values of user properties may have any type: they are sent as `str`."""
PropertyValue = int | str | bytes | list[int] | list[str]
Properties = dict[str, PropertyValue]
"""Received properties."""

MAX_PROPERTIES = 1000
"""The maximum number in one packet. A property of five bytes takes 1 us, so 1 MiB of them would block the loop."""
MAX_TEXT_BYTES = 0xFFFF
MAX_VARINT = 268_435_455
_REASON = "$reason"  # the former documented name of the reason string
_USER = 0x26


def number_of(properties: Props, name: str, default: int) -> int:
    """Return the number of a property, `default` when it is missing or not a number."""
    value = properties.get(name, default)
    return value if isinstance(value, int) else int(value) if isinstance(value, float) else default


class PacketType(IntEnum):
    """Packet types (§2.1.2), and the will, which has separate properties in CONNECT."""

    WILL = 0
    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


class TooManyPropertiesError(MqttError):
    """A packet has more than MAX_PROPERTIES properties."""

    def __init__(self) -> None:
        super().__init__(Reason.QUOTA_EXCEEDED, f"a packet with more than {MAX_PROPERTIES} properties")


class TopicAliasZeroError(MqttError):
    """A message has the topic alias 0 [MQTT-3.3.2-8]."""


# ---- Value types (§1.5)


def _number(size: int) -> Callable[[bytes, int, int], tuple[int, int]]:
    def read(data: bytes, at: int, end: int) -> tuple[int, int]:
        if at + size > end:
            raise cut_off()
        return int.from_bytes(data[at : at + size]), at + size

    return read


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the variable byte integer at a position, and the position after it.

    Raises:
        MqttError: it ends after `end`, has more than four bytes, or more bytes than necessary [MQTT-1.5.5-1]. The
            latter is checked because properties are forwarded unchanged.
    """
    value = shift = 0
    for index in range(at, min(at + 4, end)):
        value |= (data[index] & 127) << shift
        if data[index] < 128:
            if shift and not data[index]:
                raise MqttError(Reason.MALFORMED_PACKET, "a variable byte integer with more bytes than it needs")
            return value, index + 1
        shift += 7
    raise (
        cut_off()
        if end < at + 4
        else MqttError(Reason.MALFORMED_PACKET, "a variable byte integer of more than four bytes")
    )


def read_binary(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    """Return the bytes after a two-byte length at a position, and the position after them; raises as `read_varint`."""
    start = at + 2
    if start > end:
        raise cut_off()
    stop = start + (data[at] << 8 | data[at + 1])
    if stop > end:
        raise cut_off()
    return data[start:stop], stop


def read_text(data: bytes, at: int, end: int) -> tuple[str, int]:
    """Return the text after a two-byte length at a position, and the position after it.

    Raises:
        MqttError: it ends after `end`, is not UTF-8, or has the character NUL (§1.5.4).
    """
    raw, at = read_binary(data, at, end)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise MqttError(Reason.MALFORMED_PACKET, "a string that is not UTF-8") from None
    if "\0" in text:
        raise MqttError(Reason.MALFORMED_PACKET, "a string with the character NUL")
    return text, at


def cut_off() -> MqttError:
    """Return the error for a packet that ends inside a field."""
    return MqttError(Reason.MALFORMED_PACKET, "a packet that ends inside a field")


def varint(number: int) -> bytes:
    """Return the variable byte integer of a number.

    Raises:
        ValueError: the number has more than 28 bits.
    """
    if number < 128:
        return bytes((number,))
    if number > MAX_VARINT:
        raise ValueError(f"{number} is more than {MAX_VARINT}")
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _write_binary(value: Any) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"at most {MAX_TEXT_BYTES} bytes")
    return len(data).to_bytes(2) + data


def _write_text(value: Any) -> bytes:
    text = value.decode() if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise TypeError(f"a string, not {type(value).__name__}")
    if "\0" in text:
        raise ValueError("a string must not have the character NUL")
    return _write_binary(text)


class _Kind(NamedTuple):
    """Reader, writer and number range of one type of values."""

    read: Callable[[bytes, int, int], tuple[Any, int]]
    write: Callable[[Any], bytes]
    lowest: int = 0
    highest: int = -1  # -1: not a number


_FLAG = _Kind(_number(1), lambda value: value.to_bytes(1), 0, 1)
_TWO = _Kind(_number(2), lambda value: value.to_bytes(2), 0, 0xFFFF)
_TWO_POSITIVE = _TWO._replace(lowest=1)
_FOUR = _Kind(_number(4), lambda value: value.to_bytes(4), 0, 0xFFFFFFFF)
_FOUR_POSITIVE = _FOUR._replace(lowest=1)
_VARINT = _Kind(read_varint, varint, 1, MAX_VARINT)
_TEXT = _Kind(read_text, _write_text)
_BINARY = _Kind(read_binary, _write_binary)


class _Property:
    """One property of the standard, and the packets that may have it."""

    __slots__ = ("kind", "name", "number", "packets")

    def __init__(self, number: int, name: str, kind: _Kind, *packets: PacketType) -> None:
        self.number, self.name, self.kind = number, name, kind
        self.packets: frozenset[int] = frozenset(packets)


_MESSAGE = (PacketType.PUBLISH, PacketType.WILL)
_ANSWERS = (
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
    PacketType.SUBACK,
    PacketType.UNSUBACK,
)

_TABLE = (  # §2.2.2.2, table 2-4
    _Property(0x01, "payloadformatindicator", _FLAG, *_MESSAGE),
    _Property(0x02, "messageexpiryinterval", _FOUR, *_MESSAGE),
    _Property(0x03, "contenttype", _TEXT, *_MESSAGE),
    _Property(0x08, "responsetopic", _TEXT, *_MESSAGE),
    _Property(0x09, "correlationdata", _BINARY, *_MESSAGE),
    _Property(0x0B, "subscriptionidentifier", _VARINT, PacketType.PUBLISH, PacketType.SUBSCRIBE),
    _Property(0x11, "sessionexpiryinterval", _FOUR, PacketType.CONNECT, PacketType.CONNACK, PacketType.DISCONNECT),
    _Property(0x12, "assignedclientidentifier", _TEXT, PacketType.CONNACK),
    _Property(0x13, "serverkeepalive", _TWO, PacketType.CONNACK),
    _Property(0x15, "authenticationmethod", _TEXT, PacketType.CONNECT, PacketType.CONNACK, PacketType.AUTH),
    _Property(0x16, "authenticationdata", _BINARY, PacketType.CONNECT, PacketType.CONNACK, PacketType.AUTH),
    _Property(0x17, "requestprobleminformation", _FLAG, PacketType.CONNECT),
    _Property(0x18, "willdelayinterval", _FOUR, PacketType.WILL),
    _Property(0x19, "requestresponseinformation", _FLAG, PacketType.CONNECT),
    _Property(0x1A, "responseinformation", _TEXT, PacketType.CONNACK),
    _Property(0x1C, "serverreference", _TEXT, PacketType.CONNACK, PacketType.DISCONNECT),
    _Property(0x1F, "reasonstring", _TEXT, PacketType.CONNACK, *_ANSWERS, PacketType.DISCONNECT, PacketType.AUTH),
    _Property(0x21, "receivemaximum", _TWO_POSITIVE, PacketType.CONNECT, PacketType.CONNACK),
    _Property(0x22, "topicaliasmaximum", _TWO, PacketType.CONNECT, PacketType.CONNACK),
    _Property(0x23, "topicalias", _TWO_POSITIVE, PacketType.PUBLISH),
    _Property(0x24, "maximumqos", _FLAG, PacketType.CONNACK),
    _Property(0x25, "retainavailable", _FLAG, PacketType.CONNACK),
    _Property(0x27, "maximumpacketsize", _FOUR_POSITIVE, PacketType.CONNECT, PacketType.CONNACK),
    _Property(0x28, "wildcardsubscriptionavailable", _FLAG, PacketType.CONNACK),
    _Property(0x29, "subscriptionidentifieravailable", _FLAG, PacketType.CONNACK),
    _Property(0x2A, "sharedsubscriptionavailable", _FLAG, PacketType.CONNACK),
)
_BY_NUMBER = {item.number: item for item in _TABLE}
_BY_NAME = {item.name: item for item in _TABLE}
NAMES = tuple(item.name for item in _TABLE)
"""Names of the properties of the standard, in the order of their numbers."""
NUMBERS = frozenset(item.name for item in _TABLE if item.kind.highest >= 0)
"""Names of the properties whose values are numbers."""
TEXTS = frozenset(item.name for item in _TABLE if item.kind in (_TEXT, _BINARY))
"""Names of the properties whose values are strings or bytes."""
_SUBSCRIPTION, _ALIAS = _BY_NAME["subscriptionidentifier"], _BY_NAME["topicalias"]

# ---- Decoding of properties


def decode_properties(data: bytes, at: int, packet: PacketType) -> tuple[Properties, int]:
    """Return the properties at a position of the body of a packet, and the position after them; their length is first.

    Several user properties with one name, and several subscription identifiers, become a list. User properties with the
    name of a standard property are ignored, so that they cannot replace it.

    Args:
        data: the body.
        packet: the packet type.

    Raises:
        TooManyPropertiesError: more than MAX_PROPERTIES.
        MqttError: a malformed or forbidden property.
    """
    size, at = read_varint(data, at, len(data))
    if at + size > len(data):
        raise cut_off()
    return unpack_properties(data, at, at + size, packet), at + size


def unpack_properties(data: bytes, at: int, end: int, packet: PacketType) -> Properties:
    """Return the properties between two positions, without a length; see `decode_properties`."""
    found: Properties = {}
    for _ in range(MAX_PROPERTIES):
        if at == end:
            return found
        if data[at] == _USER:
            name, at = read_text(data, at + 1, end)
            value, at = read_text(data, at, end)
            if name not in _BY_NAME:
                _add(found, name, value)
        else:
            at = _read_one(found, data, at, end, packet)
    if at == end:
        return found
    raise TooManyPropertiesError


def find_alias(data: bytes, at: int) -> int:
    """Return the topic alias of PUBLISH; 0 for none. The number of user properties is not limited.

    Args:
        data: the body.
        at: the position of the properties, their length first.

    Raises:
        TooManyPropertiesError: more than MAX_PROPERTIES other properties.
        MqttError: a malformed or forbidden property.
    """
    size, at = read_varint(data, at, len(data))
    end, user, others = at + size, _USER, 0
    try:
        while at < end:
            if data[at] == user:  # skip both texts by their lengths: 1 MiB may have 200,000 user properties
                at += 3 + (data[at + 1] << 8 | data[at + 2])
                at += 2 + (data[at] << 8 | data[at + 1])
                continue
            found: Properties = {}
            at = _read_one(found, data, at, end, PacketType.PUBLISH)
            if _ALIAS.name in found:
                return number_of(found, _ALIAS.name, 0)
            others += 1
            if others > MAX_PROPERTIES:
                raise TooManyPropertiesError
    except IndexError:
        raise cut_off() from None
    if at != end:
        raise cut_off()
    return 0


def cut_properties(block: bytes, *names: str) -> bytes:
    """Return packed properties without their length and without some of them.

    Args:
        block: properties that were decoded before, their length first.
        names: the properties to leave out.
    """
    size, at = read_varint(block, 0, len(block))
    left_out, end, kept = [_BY_NAME[name].number for name in names], at + size, bytearray()
    while at < end:
        start = at
        if block[at] == _USER:
            _, at = read_binary(block, at + 1, end)
            _, at = read_binary(block, at, end)
        else:
            _, at = _BY_NUMBER[block[at]].kind.read(block, at + 1, end)
        if block[start] not in left_out:
            kept += block[start:at]
    return bytes(kept)


def count_user_properties(properties: Props) -> int:
    """Return the number of user properties among decoded ones."""
    found = [value for name, value in properties.items() if name not in _BY_NAME]
    return sum(len(value) if isinstance(value, list) else 1 for value in found)


def user_properties_in(block: bytes) -> int:
    """Return the number of user properties among packed ones that were decoded before, their length first."""
    size, at = read_varint(block, 0, len(block))
    end, count = at + size, 0
    while at < end:
        if block[at] == _USER:
            _, at = read_binary(block, at + 1, end)
            _, at = read_binary(block, at, end)
            count += 1
        else:
            _, at = _BY_NUMBER[block[at]].kind.read(block, at + 1, end)
    return count


def _read_one(found: Properties, data: bytes, at: int, end: int, packet: PacketType) -> int:
    item = _BY_NUMBER.get(data[at])  # a variable byte integer; those of the standard have one byte
    if item is None:
        raise MqttError(Reason.MALFORMED_PACKET, f"an unknown property {data[at]:#x}")
    if packet not in item.packets:
        raise MqttError(Reason.MALFORMED_PACKET, f"the property {item.name} is not allowed in this packet")
    value, at = item.kind.read(data, at + 1, end)
    if item.kind.highest >= 0 and not item.kind.lowest <= value <= item.kind.highest:
        error = TopicAliasZeroError if item is _ALIAS else MqttError
        raise error(Reason.PROTOCOL_ERROR, f"the property {item.name} can't be {value}")
    if item.name in found and (item is not _SUBSCRIPTION or packet is not PacketType.PUBLISH):
        raise MqttError(Reason.PROTOCOL_ERROR, f"the property {item.name} occurs twice")
    _add(found, item.name, value)
    return at


def _add(found: Properties, name: str, value: Any) -> None:
    known = found.get(name)
    if known is None:
        found[name] = value
    elif isinstance(known, list):
        known.append(value)
    else:
        found[name] = [known, value]  # two numbers, or two texts


# ---- Encoding of properties


def encode_properties(properties: Props | None, packet: PacketType) -> bytes:
    """Return the encoded properties of a packet, their length first.

    Args:
        properties: properties that are not allowed in this packet become user properties; a list becomes several
            with one name.

    Raises:
        ArgumentError: a value is out of range or has a wrong type; the message names the property.
    """
    body = pack_properties(properties, packet)
    return varint(len(body)) + body


def pack_properties(properties: Props | None, packet: PacketType) -> bytes:
    """Return the encoded properties of a packet without their length; see `encode_properties`."""
    if not properties:
        return b""
    body = b"".join([_encode_one(name, value, packet) for name, value in properties.items()])
    if len(body) > MAX_VARINT:
        raise ArgumentError(f"properties: {len(body)} bytes; a packet has at most {MAX_VARINT}")
    return body


def _encode_one(name: str, value: Any, packet: PacketType) -> bytes:
    item = _BY_NAME.get("reasonstring" if name == _REASON else name)
    try:
        if item is None or packet not in item.packets:
            head = bytes((_USER,)) + _write_text(name)
            values = value if isinstance(value, list | tuple) else [value]
            return b"".join([head + _write_text(one if isinstance(one, bytes) else str(one)) for one in values])
        if item is _SUBSCRIPTION and packet is PacketType.PUBLISH and isinstance(value, list | tuple):
            return b"".join(
                [_encode_one(name, one, packet) for one in value]
            )  # one for each matching subscription (§3.3.2.3.8)
        if item.kind.highest >= 0:
            if isinstance(value, float) and not value.is_integer() or not isinstance(value, int | float):
                raise TypeError("a whole number is expected")
            if not item.kind.lowest <= value <= item.kind.highest:
                raise ValueError(f"it must be from {item.kind.lowest} to {item.kind.highest}")
            value = int(value)
        return bytes((item.number,)) + item.kind.write(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"property {name!r} can't be {value!r}: {error}") from None


# ---- Topic names and topic filters (MQTT 5 §4.7)

_NO_CHARACTERS = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_DISCOURAGED = re.compile(f"[\x01-\x1f\x7f-\x9f\ufdd0-\ufdef{_NO_CHARACTERS}]")

_WRONG_WILDCARD = re.compile(r"[^/][+#]|\+[^/]|#.", re.DOTALL)

Value = TypeVar("Value")

OnPub = Callable[[str, bytes, Props, int], object]
"""`f(topic, payload, properties, cpt)`; `cpt` is the first byte of the packet: DUP 8, QoS 6, retain 1."""


def is_topic_name(topic: str) -> bool:
    """Return whether a topic is a valid name: not empty, and without wildcards [MQTT-4.7.0-1]."""
    return topic != "" and "+" not in topic and "#" not in topic


def has_discouraged_characters(text: str) -> bool:
    """Return whether a text has control characters or code points that are no characters (§1.5.4).

    A receiver may reject them; clients of mosquitto close the connection on which they arrive.
    """
    return not text.isprintable() and _DISCOURAGED.search(text) is not None


def is_topic_filter(topic: str) -> bool:
    """Return whether wildcards are whole levels, and "#" is the last one [MQTT-4.7.1-1], [MQTT-4.7.1-2]."""
    return topic != "" and _WRONG_WILDCARD.search(topic) is None


def check_topic(topic: object) -> str:
    """Return a topic to publish to.

    Raises:
        ArgumentError: it is not a topic name.
    """
    name = _checked_text(topic)
    if not is_topic_name(name):
        raise ArgumentError(f"topic {name!r} can't have wildcards: they are for subscriptions")
    return name


def check_filter(topic: object) -> str:
    """Return a topic to subscribe to, which may have wildcards.

    Raises:
        ArgumentError: it is not a topic filter.
    """
    name = _checked_text(topic)
    if not is_topic_filter(name):
        raise ArgumentError(f"topic {name!r}: '+' must be a whole level, '#' the whole last level")
    return name


def _checked_text(topic: object) -> str:
    if isinstance(topic, bytes):
        topic = topic.decode("utf-8", "surrogateescape")
    if not isinstance(topic, str):
        raise ArgumentError(f"topic must be a str, not {type(topic).__name__}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"topic {topic!r} must be UTF-8") from None
    if not 0 < size <= MAX_TEXT_BYTES or "\0" in topic:
        raise ArgumentError(f"topic {topic[:50]!r} must have 1 to {MAX_TEXT_BYTES} bytes and no NUL")
    return topic


def unshared(topic: str) -> str:
    """Return the filter in `$share/group/filter` of a shared subscription; other filters unchanged (§4.8.2)."""
    return topic.split("/", 2)[2] if topic.startswith("$share/") and topic.count("/") >= 2 else topic


class Routes:
    """The callbacks of subscriptions.

    A broker of MQTT 5 adds the identifiers of matching subscriptions to a message. Without them, the topic is matched.

    Attributes:
        uses_identifiers: whether the broker adds subscription identifiers.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._callbacks: dict[int, OnPub] = {}
        self._shared: dict[int, int] = {}  # identifier -> number of its subscriptions, of those that `add_all` made
        self._by_topic: FilterTree[OnPub] = FilterTree()
        self._last = 0
        self.uses_identifiers = True

    def add(self, topic: str, onpub: OnPub) -> int:
        """Set the callback of a subscription; return its identifier."""
        number = self._numbers.get(topic)
        if number is None or number in self._shared:
            self.remove(topic)
            self._last = number = self._last + 1
        self._numbers[topic] = number
        self._callbacks[number] = onpub
        self._by_topic.set(unshared(topic), onpub)
        return number

    def add_all(self, topics: Sequence[str], onpub: OnPub) -> int:
        """Set the callback of several subscriptions, which one packet requests; return their common identifier."""
        for topic in topics:
            self.remove(topic)
            self._by_topic.set(unshared(topic), onpub)
        self._last = number = self._last + 1
        self._numbers.update(dict.fromkeys(topics, number))
        self._callbacks[number] = onpub
        self._shared[number] = len(set(topics))
        return number

    def remove(self, topic: str) -> None:
        """Remove the callback of a subscription, if it has one."""
        number = self._numbers.pop(topic, None)
        if number is None:
            return
        self._by_topic.remove(unshared(topic))
        left = self._shared.get(number, 1) - 1
        if left:
            self._shared[number] = left
        else:
            self._shared.pop(number, None)
            del self._callbacks[number]

    def find(self, topic: str, properties: Props) -> list[OnPub]:
        """Return the callbacks for a message."""
        if not self._callbacks:
            return []
        if not self.uses_identifiers:
            return list(self._by_topic.match(topic))
        numbers = properties.get("subscriptionidentifier", ())
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return [self._callbacks[number] for number in dict.fromkeys(numbers) if number in self._callbacks]
