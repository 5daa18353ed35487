"""The options of a client, with their defaults (smq.md §8)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from smqrt.errors import ArgumentError
from smqrt.mqtt.topics import check_topic
from smqrt.net.contexts import ClientTls
from smqrt.wire.mqtt_properties import Packet, Props, encode

_MAX_TEXT_BYTES = 0xFFFF
_LONGEST_S = 86_400.0
_LARGEST_PACKET_BYTES = 268_435_460
QUEUE_POLICIES = ("wait", "raise", "drop")


@dataclass(frozen=True)
class Will:
    """What the broker publishes when the connection is lost without a word.

    Attributes:
        topic: where.
        payload: what; str is sent as UTF-8.
        properties: with MQTT 5, for instance `{"willdelayinterval": 30}` (seconds).
    """

    topic: str
    payload: bytes | str = b""
    qos: int = 0
    retain: bool = False
    properties: Props | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_qos(self.qos)
        encode(self.properties, Packet.WILL)
        if len(to_bytes(self.payload)) > _MAX_TEXT_BYTES:
            raise ArgumentError(f"the payload of a will has at most {_MAX_TEXT_BYTES} bytes")

    @classmethod
    def make(cls, value: Will | Mapping[str, Any] | None) -> Will | None:
        """A will from a mapping with the names of the attributes.

        Raises:
            ArgumentError: an unknown name or a wrong value.
        """
        if value is None or isinstance(value, Will):
            return value
        try:
            return cls(**value)
        except TypeError:
            names = ", ".join(item.name for item in fields(cls))
            raise ArgumentError(f"a will has a topic and may have more of: {names}; not {dict(value)!r}") from None


@dataclass(kw_only=True)
class Options:
    """What a client can be told. Times are seconds.

    Attributes:
        version: 5, or 4 for MQTT 3.1.1.
        port: default 1883, with TLS 8883.
        secure: True for TLS with the system's authorities, or a `smqrt.net.contexts.ClientTls`.
        nocheck: with TLS, accept any certificate.
        cafile: PEM file with certificates to trust instead of the system's.
        certfile, keyfile: one's own certificate.
        alpn: protocol names to offer in TLS, the best first.
        timeout: for making a connection, until the broker's CONNACK.
        source: local address to connect from.
        ipv6: use IPv6 only.
        clientidentifier: default: random, kept over reconnects.
        keepalive: after half of it without a packet the broker is pinged, and after the other half without an answer
            the connection counts as lost; 0 never asks. The broker may say another value.
        username, password: sent only after the broker's certificate was found trustworthy, if it has one.
        will: a `Will`, or a mapping of its attributes.
        cleanstart: None: as the session expiry says, see `MqttClient`; True: always; False: also the first connection
            resumes a session. For MQTT 3.1.1 None is True.
        queuesize: how many messages and subscriptions may wait to be sent, with and without a connection.
        queuebytes: and how many bytes of messages, those included that wait for their acknowledgement.
        queuefull: what `publish` does where there is no room: "wait" for it, at most `timeout`, and then raise
            QueueFullError; "raise" that at once; "drop" the oldest message that waits.
        inflight: how many QoS 1 and 2 messages may wait for their acknowledgement. None: with MQTT 5 as many as the
            broker says (at most 32767), with 3.1.1 20, because brokers drop what is beyond.
        maxpacketsize: bytes of the largest packet, both ways. The broker is told (MQTT 5); one that sends a larger one
            nevertheless is left before the packet has arrived.
        topicalias: send aliases for topics to brokers that accept them (MQTT 5).
        resubscribe: subscribe again by itself when the broker has lost the session.
    """

    version: int = 5
    port: int | None = None
    secure: bool | ClientTls = False
    nocheck: bool = False
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    alpn: list[str] = field(default_factory=list)
    timeout: float = 5.0
    source: str | None = None
    ipv6: bool = False
    clientidentifier: str = field(default_factory=lambda: f"smqrt-{secrets.token_hex(8)}")
    keepalive: int = 60
    username: str | None = None
    password: str | bytes | None = None
    will: Will | Mapping[str, Any] | None = None
    cleanstart: bool | None = None
    queuesize: int = 10_000
    queuebytes: int = 16 << 20
    queuefull: str = "wait"
    inflight: int | None = None
    maxpacketsize: int = 1 << 20
    topicalias: bool = False
    resubscribe: bool = True

    def __post_init__(self) -> None:
        if self.version not in (4, 5):
            raise ArgumentError(f"version must be 5 or 4 (MQTT 3.1.1), not {self.version!r}")
        self.keepalive = _whole("keepalive", self.keepalive, 0, 0xFFFF, " seconds")
        self.queuesize = _whole("queuesize", self.queuesize, 1, 1 << 53, " messages")
        self.queuebytes = _whole("queuebytes", self.queuebytes, 1, 1 << 53, " bytes")
        self.maxpacketsize = _whole("maxpacketsize", self.maxpacketsize, 64, _LARGEST_PACKET_BYTES, " bytes")
        if self.inflight is not None:
            self.inflight = _whole("inflight", self.inflight, 1, 0x7FFF)
        if self.port is not None:
            self.port = _whole("port", self.port, 1, 0xFFFF)
        if not _is_number(self.timeout) or not 0 < self.timeout <= _LONGEST_S:
            rule = f"more than 0 and at most {_LONGEST_S:.0f} seconds"
            raise ArgumentError(f"timeout must be {rule}, not {self.timeout!r}")
        if self.queuefull not in QUEUE_POLICIES:
            raise ArgumentError(f"queuefull must be one of {', '.join(QUEUE_POLICIES)}, not {self.queuefull!r}")
        if self.password is not None and self.username is None and self.version == 4:
            raise ArgumentError("password needs a username with MQTT 3.1.1")
        if self.cleanstart is False and not self.clientidentifier:
            raise ArgumentError("cleanstart=False needs a clientidentifier")
        self.will = Will.make(self.will)


def make_options(options: Mapping[str, Any]) -> Options:
    """Options from keyword arguments.

    Raises:
        ArgumentError: an unknown name or a wrong value.
    """
    known = {option.name for option in fields(Options)}
    if unknown := sorted(set(options) - known):
        raise ArgumentError(f"unknown option {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    return Options(**options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int, most: int, unit: str = "") -> int:
    if not _is_number(value) or not least <= value <= most or value != int(value):
        raise ArgumentError(f"{name} must be a whole number from {least} to {most}{unit}, not {value!r}")
    return int(value)


def check_qos(qos: object) -> int:
    """A quality of service.

    Raises:
        ArgumentError: it is none.
    """
    if qos not in (0, 1, 2) or isinstance(qos, bool):
        raise ArgumentError(f"qos must be 0, 1 or 2, not {qos!r}")
    return int(qos)


def to_bytes(data: object) -> bytes:
    """A payload as bytes: str as UTF-8.

    Raises:
        ArgumentError: it is neither bytes nor str.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise ArgumentError(f"a payload must be bytes or str, not {type(data).__name__}")
