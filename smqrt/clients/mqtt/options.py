"""Options of MQTT clients (spec: smq §8)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smqrt.errors import ArgumentError
from smqrt.settings.options import (
    NotThisError,
    Rule,
    choice,
    instance,
    number,
    option,
    optional,
    path,
    switch,
    text,
    whole,
)
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire.mqtt.packets import MAX_PACKET_BYTES, WillMessage
from smqrt.wire.mqtt.properties import PacketType, Props, encode_properties
from smqrt.wire.mqtt.topics import check_topic

_MAX_TEXT_BYTES = 0xFFFF
_MAX_S = 86_400.0
QUEUE_POLICIES = ("wait", "raise", "drop")


@dataclass(frozen=True)
class Will:
    """Message that the broker publishes when the connection is lost without DISCONNECT.

    Attributes:
        topic: without wildcards.
        payload: str is sent as UTF-8.
        properties: with MQTT 5, such as `{"willdelayinterval": 30}` (seconds).
    """

    topic: str
    payload: bytes | str = b""
    qos: int = 0
    retain: bool = False
    properties: Props | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_qos(self.qos)
        encode_properties(self.properties, PacketType.WILL)
        if len(to_bytes(self.payload)) > _MAX_TEXT_BYTES:
            raise ArgumentError(f"the payload of a will has at most {_MAX_TEXT_BYTES} bytes")

    def message(self) -> WillMessage:
        """Return the will for CONNECT."""
        return WillMessage(self.topic, to_bytes(self.payload), self.qos, self.retain, self.properties or {})

    @classmethod
    def make(cls, value: object) -> Will:
        """Return a will from a mapping with the names of the attributes; a `Will` as it is.

        Raises:
            NotThisError: an unknown name.
            ArgumentError: a wrong value.
        """
        if isinstance(value, Will):
            return value
        if not isinstance(value, Mapping):
            raise NotThisError
        try:
            return cls(**value)
        except TypeError:
            raise NotThisError from None


def _secure(value: object) -> bool | ClientTls:
    return value if isinstance(value, ClientTls) else switch().read(value)


def _alpn(value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise NotThisError
    return list(value)


_TEXT = optional(text())
_FILE = optional(path())
WILL = optional(Rule("a mapping with topic, and payload, qos, retain, properties if wanted", Will.make))
_SECURE = Rule("true, false or a ClientTls", _secure)
_PASSWORD = optional(instance("a text or bytes", str, bytes))
_WHOLE = 1 << 53
"""The largest number that Lua and JSON keep whole."""


@dataclass(kw_only=True)
class MqttOptions:
    """Options of a client. Times are seconds."""

    version: int = option(5, choice(5, 4), "4 is MQTT 3.1.1")
    port: int | None = option(None, optional(whole(1, 0xFFFF)), "", shown="1883, with TLS 8883")
    secure: bool | ClientTls = option(
        False,
        _SECURE,
        "true: TLS with the system's certificate authorities; or a `smqrt.transport.tls_contexts.ClientTls`",
    )
    nocheck: bool = option(False, switch(), "with TLS, accept any certificate")
    cafile: str | None = option(None, _FILE, "PEM file with certificates to trust instead of the system's")
    certfile: str | None = option(None, _FILE, "PEM file with the certificate of the client")
    keyfile: str | None = option(None, _FILE, "PEM file with its key")
    alpn: list[str] = option(list, Rule("a list of texts", _alpn), "protocols to offer in TLS, the preferred one first")
    timeout: float = option(
        5.0,
        number(0, _MAX_S, "seconds", above=True),
        "time limit of connecting, in seconds; also how long `publish` waits for room",
        shown="`5`",
    )
    source: str | None = option(None, _TEXT, "local address of the connection")
    ipv6: bool = option(False, switch(), "use IPv6 only")
    clientidentifier: str = option(
        lambda: f"smqrt-{secrets.token_hex(8)}", text(), "the same for all connections of the client", shown="random"
    )
    keepalive: int = option(
        60,
        whole(0, 0xFFFF, "seconds"),
        "seconds; the broker is pinged after half of it without a packet, and the connection is lost after the other "
        "half without an answer; 0: never. The broker may set another value",
    )
    username: str | None = option(None, _TEXT, "sent only to a broker with a trusted certificate")
    password: str | bytes | None = option(None, _PASSWORD, "the same")
    will: Will | None = option(
        None,
        WILL,
        'message that the broker publishes when the connection is lost: `{"topic", "payload", "qos", '
        '"retain", "properties"}`',
    )
    cleanstart: bool | None = option(
        None, optional(switch()), "drop the session of earlier connections", shown="as below"
    )
    queuesize: int = option(
        10_000,
        whole(1, _WHOLE, "messages"),
        "the most messages and subscriptions that wait to be sent, with and without a connection",
    )
    queuebytes: int = option(
        16 << 20,
        whole(1, _WHOLE, "bytes"),
        "the most bytes of messages that wait to be sent or acknowledged",
        shown="16 MiB",
    )
    queuefull: str = option(
        "wait",
        choice(*QUEUE_POLICIES),
        'what `publish` does with a full queue: `"wait"` for room, and raise `QueueFullError` after `timeout`; '
        '`"raise"` it at once; `"drop"` the oldest queued message',
    )
    inflight: int | None = option(
        None,
        optional(whole(1, 0x7FFF)),
        "the most QoS 1 and 2 messages without an acknowledgement; the broker may allow fewer",
        shown="MQTT 5: the broker's limit; 3.1.1: 20",  # brokers of 3.1.1 drop what is beyond, without an error
    )
    maxpacketsize: int = option(
        1 << 20,
        whole(64, MAX_PACKET_BYTES, "bytes"),
        "the largest packet in both directions, in bytes; sent to the broker (MQTT 5). A larger one closes "
        "the connection",
        shown="1 MiB",
    )
    topicalias: bool = option(False, switch(), "send topic aliases to brokers that accept them (MQTT 5)")
    resubscribe: bool = option(True, switch(), "subscribe again when the broker has lost the session")

    def __post_init__(self) -> None:
        if self.password is not None and self.username is None and self.version == 4:
            raise ArgumentError("password needs a username with MQTT 3.1.1")
        if self.cleanstart is False and not self.clientidentifier:
            raise ArgumentError("cleanstart=False needs a clientidentifier")


def check_qos(qos: object) -> int:
    """Return a quality of service.

    Raises:
        ArgumentError: not 0, 1 or 2.
    """
    if qos not in (0, 1, 2) or isinstance(qos, bool):
        raise ArgumentError(f"qos must be 0, 1 or 2, not {qos!r}")
    return int(qos)


def to_bytes(data: object) -> bytes:
    """Return a payload as bytes: str as UTF-8.

    Raises:
        ArgumentError: neither bytes nor str.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise ArgumentError(f"a payload must be bytes or str, not {type(data).__name__}")
