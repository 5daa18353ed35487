"""Messages between MQTT clients and the topics of a hub.

A hub routes batches of SMQ Publish frames. What these can't carry (QoS, retain, properties, expiry) is added to the
batch as attributes (`MqttBatch`). For MQTT subscribers, a batch is encoded once for each form that they need (`Run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from math import ceil
from struct import Struct, iter_unpack
from typing import TYPE_CHECKING, Protocol

from smqrt.broker.mqtt.arrivals import CHOSEN
from smqrt.broker.outbox import Drop
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import varint

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device
    from smqrt.broker.mqtt.ledger import Body

_U16, _U32 = Struct(">H"), Struct(">I")
_EXPIRY = b"\x02"  # the property "message expiry interval"
DUP = 0x08
MAX_NUMBER = 0xFFFF
"""The largest packet identifier."""
_ALIAS = b"\x23"  # the property "topic alias"
_NO_NAME = b"\0\0"
MESSAGE_BYTES = 150
"""Memory of a waiting message beside name, payload and properties, approximately."""
LARGE_BYTES = 0xFFFF
"""Payloads above count for `MAX_LARGE_BYTES`; the window is enough for others."""
SHORT_BYTES = 1024
"""A message up to this size is copied for each of few subscribers: that takes less time than to share its bytes."""
_IDENTIFIER = b"\x0b"  # the property "subscription identifier"
NO_EXPIRY_S = float("inf")

Clock = Callable[[], float]


OTHER_GROUPS = "$others"
"""The group of messages that only shared subscriptions of other nodes get: they were published here, not by a client of
MQTT.
"""


class ArrivedBatch(bytes):
    """Publish frames that another node of a cluster has sent.

    Attributes:
        group: None for messages that were published here; otherwise the shared subscription that gets them,
            `$share/group/filter`, and empty for all other subscribers: the other node chooses a client of each group.
    """

    group: str | None = None

    @classmethod
    def of(cls, frames: bytes, group: str = "") -> ArrivedBatch:
        """Return frames with their shared subscription."""
        batch = cls(frames)
        batch.group = group
        return batch


class MqttBatch(ArrivedBatch):
    """Publish frames of one MQTT client to one topic, with equal attributes.

    Attributes:
        qos: the QoS of the publication.
        retain: whether the message replaces the retained one of its topic.
        properties: the properties to forward, packed, without their length and without the expiry.
        expires_s: when the message expires, on the clock of the broker.
        drops: why messages did not reach anybody; None when nobody asks for it.
        large: the payload of a message that does not fit a frame; None for others. The frame has no payload then.
        packets: the same messages as the client has sent them, PUBLISH packets with QoS 0; empty when they are unknown.
        version: the version of these packets: 5, or 4 for MQTT 3.1 and 3.1.1.
        messages: the number of messages; 0 when it is unknown.
        received: the session of the publisher and the packet identifiers, two bytes each, which are saved together with
            the messages; None when nothing is saved, and with QoS 0 and 1.
        on_accepted: called when `onpublish` has accepted the message; None for nothing to call.
        origin: the id of the first message in a cluster; the others have the next ids. 0 for none.
        arrived: the stream of another node and the number in it, which are saved together with the messages; None for
            messages that were published here.
        is_delivered: whether its delivery here has begun: the ledger has the changes that belong to it.
    """

    messages = origin = 0
    is_delivered = False
    arrived: tuple[int, int] | None = None
    on_accepted: Callable[[], object] | None = None
    drops: list[Drop] | None = None
    large: bytes | None = None
    packets: bytes = b""
    version = 0
    received: tuple[Device, bytes] | None = None
    qos: int
    retain: bool
    properties: bytes
    expires_s: float

    def like(self, frames: bytes) -> MqttBatch:
        """Return other frames with the attributes of these."""
        found = mqtt_batch(frames, self.qos, self.retain, self.properties, self.expires_s)
        found.drops, found.large, found.received, found.group = self.drops, self.large, self.received, self.group
        found.on_accepted, found.origin, found.arrived = self.on_accepted, self.origin, self.arrived
        return found

    def accepted(self) -> None:
        """Note that `onpublish` has accepted the message."""
        if self.on_accepted is not None:
            self.on_accepted()

    def dropped(self, reason: Drop) -> None:
        """Note that messages do not reach anybody."""
        if self.drops is not None:
            self.drops.append(reason)


class Mark(bytes):
    """A place among the batches that wait for delivery. It is empty, so that no topic has it."""

    is_reached = False

    def reached(self) -> None:
        """Note that all batches before it are delivered."""
        self.is_reached = True


def mqtt_batch(
    frames: bytes, qos: int, retain: bool = False, properties: bytes = b"", expires_s: float = NO_EXPIRY_S
) -> MqttBatch:
    """Return a batch; see `MqttBatch`."""
    batch = MqttBatch(frames)
    batch.qos, batch.retain, batch.properties, batch.expires_s = qos, retain, properties, expires_s
    return batch


class Message:
    """A message to MQTT subscribers with QoS 1 or 2; several sessions share it.

    Args:
        name: the topic name.
        payload: the payload.
        qos: 0, 1 or 2.
        retain: the retain flag that the subscriber gets.
        properties: packed, without their length, the expiry and the subscription identifiers.
        expires_s: when the message expires, on the clock of the broker.
        identifiers: the subscription identifiers, packed as properties.

    Attributes:
        body: its place in the `persist` file; None when it is not there.
        origin: its id in a cluster; 0 for none.
    """

    __slots__ = (
        "_parts",
        "body",
        "expires_s",
        "identifiers",
        "name",
        "origin",
        "payload",
        "properties",
        "qos",
        "retain",
    )

    def __init__(
        self,
        name: bytes,
        payload: bytes,
        qos: int,
        retain: bool = False,
        properties: bytes = b"",
        expires_s: float = NO_EXPIRY_S,
        identifiers: bytes = b"",
    ) -> None:
        self.name, self.payload, self.qos, self.retain = name, payload, qos, retain
        self.properties, self.expires_s, self.identifiers = properties, expires_s, identifiers
        self._parts: dict[int, tuple[bytes, bytes]] | None = None
        self.body: Body | None = None
        self.origin = 0

    @property
    def size_bytes(self) -> int:
        """The size of name, payload and properties."""
        return len(self.name) + len(self.payload) + len(self.properties)

    def packet(self, version: int, number: int, is_dup: bool, now_s: float, alias: int = 0) -> bytes:
        """Return the PUBLISH packet with the packet identifier `number`; see `parts`."""
        before, after = self.parts(version, now_s, alias)
        if is_dup:
            before = bytes((before[0] | DUP,)) + before[1:]
        return before + _U16.pack(number) + after if self.qos else before + after

    def parts(self, version: int, now_s: float, alias: int = 0) -> tuple[bytes, bytes]:
        """Return what is before the packet identifier, and what is after it.

        Args:
            version: the version of the subscriber.
            now_s: the time.
            alias: twice the topic alias, and 1 more if the packet has no name; 0 without an alias.
        """
        version = 5 if version == 5 else 4
        key = version | alias << 3
        known = self._parts.get(key) if self._parts is not None else None
        if known is not None:
            return known
        identifiers = self.identifiers + packed_alias(alias >> 1)
        block = property_block(self.properties, self.expires_s, identifiers, now_s) if version == 5 else b""
        name = _NO_NAME if alias & 1 else _U16.pack(len(self.name)) + self.name
        size = len(name) + 2 * bool(self.qos) + len(block) + len(self.payload)
        found = bytes((0x30 | self.qos << 1 | self.retain,)) + varint(size) + name, block + self.payload
        if self.expires_s == NO_EXPIRY_S:  # the time that is left changes
            if self._parts is None:
                self._parts = {key: found}
            else:
                self._parts[key] = found
        return found


def property_block(properties: bytes, expires_s: float, identifiers: bytes, now_s: float) -> bytes:
    """Return the properties of a message with their length; the expiry is the time that is left [MQTT-3.3.2-6]."""
    block = properties + identifiers
    if expires_s != NO_EXPIRY_S:
        block += _EXPIRY + _U32.pack(max(ceil(expires_s - now_s), 0))
    return varint(len(block)) + block


def packed_identifier(number: int) -> bytes:
    """Return a subscription identifier as a packed property; 0 means none."""
    return _IDENTIFIER + varint(number) if number else b""


def packed_alias(number: int) -> bytes:
    """Return a topic alias as a packed property; 0 means none."""
    return _ALIAS + _U16.pack(number) if number else b""


class Encoder(Protocol):
    """What encoding needs from the hub."""

    def properties_of(self, frame: bytes) -> bytes:
        """Return the packed properties of a message that no MQTT client has published."""

    @property
    def pack(self) -> Callable[[bytes, int, bytes], bytes]:
        """Returns PUBLISH packets for a batch, see `smqrt.wire.kernels.Kernels.packed`."""


class Run:
    """A batch for MQTT subscribers, encoded at the first use of each form.

    Args:
        name: the topic name.
        key: the key of the topic, for slow-consumer policies.
        batch: Publish frames to the topic.
        default_qos: the QoS of messages that MQTT clients have not published.
        encoder: see `Encoder`.
        now_s: the time.

    Attributes:
        name, key, batch, now_s: see above.
        is_large: whether it is a message that does not fit a frame.
        skips_numbers: whether subscribers leave packet identifiers out so that all get the same bytes, see `numbered`:
            only if there are many. Some programs expect identifiers without gaps.
    """

    __slots__ = (
        "_encoder",
        "_messages",
        "_numbered",
        "_numbers",
        "_origins",
        "_packets",
        "_payloads",
        "_properties",
        "_size_bytes",
        "batch",
        "expires_s",
        "is_large",
        "key",
        "name",
        "now_s",
        "publisher",
        "qos",
        "retain",
        "skips_numbers",
    )

    def __init__(
        self,
        name: bytes,
        key: bytes,
        batch: bytes,
        default_qos: int,
        encoder: Encoder,
        now_s: float,
    ) -> None:
        self.name, self.key, self.batch, self.now_s = name, key, batch, now_s
        self._encoder = encoder
        self.is_large = self.skips_numbers = False
        if isinstance(batch, MqttBatch):
            self.qos, self.retain, self.expires_s = batch.qos, batch.retain, batch.expires_s
            self.is_large = batch.large is not None
            self._properties: bytes | None = batch.properties
        else:
            self.qos, self.retain, self.expires_s = default_qos, False, NO_EXPIRY_S
            self._properties = None
        self.publisher = int.from_bytes(batch[smq.PTID], "big")
        # The dictionaries are created when they are needed: most runs need only one of them.
        self._packets: dict[tuple[int, bool, bytes], bytes] | None = None
        self._messages: dict[tuple[int, bool, bytes], list[Message]] | None = None
        self._numbered: dict[tuple[int, int, bool, bytes], tuple[dict[int, Message], bytes]] | None = None
        self._numbers: range | None = None
        self._origins: Iterable[int] | None = None
        self._payloads: list[tuple[bytes, bytes]] | None = None
        self._size_bytes = -1

    @property
    def payloads(self) -> list[tuple[bytes, bytes]]:
        """Payload and packed properties of each message."""
        if self._payloads is None:
            self._payloads = self._split()
        return self._payloads

    def _split(self) -> list[tuple[bytes, bytes]]:
        known = self._properties
        if isinstance(self.batch, MqttBatch) and self.batch.large is not None:
            return [(self.batch.large, self.batch.properties)]
        batch = self.batch
        size = batch[0] << 8 | batch[1]
        if size == len(batch):
            properties = known if known is not None else self._encoder.properties_of(batch)
            return [(batch[smq.PUBLISH_HEADER_BYTES :], properties)]
        frames, rest = divmod(len(batch), size)
        if (
            known is not None
            and not rest
            and batch[::size] == batch[:1] * frames
            and batch[1::size] == batch[1:2] * frames
        ):
            fields = iter_unpack(f"{smq.PUBLISH_HEADER_BYTES}x{size - smq.PUBLISH_HEADER_BYTES}s", batch)
            return [(payload, known) for (payload,) in fields]  # all frames have one length
        return [
            (frame[smq.PUBLISH_HEADER_BYTES :], known if known is not None else self._encoder.properties_of(frame))
            for frame in smq.frames(batch)
        ]

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.payloads)

    @property
    def size_bytes(self) -> int:
        """The sum of the `size_bytes` of the messages."""
        if self._size_bytes < 0:
            sizes = [len(payload) + len(properties) for payload, properties in self.payloads]
            self._size_bytes = sum(sizes) + len(sizes) * len(self.name)
        return self._size_bytes

    @property
    def is_short(self) -> bool:
        """Whether it is one short message to few subscribers: they do not share its bytes, see `numbered`."""
        return len(self.batch) <= SHORT_BYTES and not self.skips_numbers and self.is_single

    @property
    def frames(self) -> list[bytes]:
        """The Publish frames; the one of a message that does not fit a frame has no payload."""
        return list(smq.frames(self.batch))

    def part(self, frames: list[bytes], which: slice) -> Run:
        """Return some of the messages, which only one client of a shared subscription gets.

        Args:
            frames: the Publish frames of all messages.
            which: the messages.
        """
        some, batch = b"".join(frames[which]), self.batch
        if not isinstance(batch, MqttBatch):
            return Run(self.name, self.key, some, self.qos, self._encoder, self.now_s)
        part = batch.like(some)
        run = Run(self.name, self.key, part, self.qos, self._encoder, self.now_s)
        if batch.origin:
            origins = range(batch.origin, batch.origin + len(frames))[which]
            part.origin, run._origins = origins[0], [one | CHOSEN for one in origins]
        return run

    def singles(self) -> Iterator[Run]:
        """Return a run for each message; see `part`."""
        frames = self.frames
        for at in range(len(frames)):
            yield self.part(frames, slice(at, at + 1))

    @property
    def is_single(self) -> bool:
        """Whether it is one message that fits a frame."""
        batch = self.batch
        if len(batch) != batch[0] << 8 | batch[1]:
            return False
        return not isinstance(batch, MqttBatch) or batch.large is None

    def packets(self, version: int, retain: bool, identifiers: bytes) -> bytes:
        """Return the PUBLISH packets with QoS 0."""
        version = 5 if version == 5 else 4
        batch = self.batch
        if isinstance(batch, MqttBatch) and batch.version == version and not (retain or identifiers):
            return batch.packets
        if self._packets is None:
            self._packets = {}
        found = self._packets.get((version, retain, identifiers))
        if found is None:
            found = self._packets[version, retain, identifiers] = self._encoded(version, retain, identifiers)
        return found

    def aliased(self, alias: int, retain: bool, identifiers: bytes) -> bytes:
        """Return the packets of MQTT 5 with a topic alias instead of the name."""
        identifiers += packed_alias(alias)
        if self._packets is None:
            self._packets = {}
        found = self._packets.get((5, retain, identifiers))
        if found is None:
            found = self._packets[5, retain, identifiers] = self._encoded(5, retain, identifiers, _NO_NAME)
        return found

    def _encoded(self, version: int, retain: bool, identifiers: bytes, name: bytes = b"") -> bytes:
        first, name = 0x30 | retain, name or _U16.pack(len(self.name)) + self.name
        if isinstance(self.batch, MqttBatch) and self.batch.large is not None:
            (large,) = self.messages(0, retain, identifiers)
            return large.packet(version, 0, False, self.now_s)
        if version < 5:
            return self._encoder.pack(self.batch, first, name)
        properties = self._common_properties()
        if properties is not None:
            block = property_block(properties, self.expires_s, identifiers, self.now_s)
            return self._encoder.pack(self.batch, first, name + block)
        return b"".join(
            self._encoder.pack(
                frame, first, name + property_block(self._encoder.properties_of(frame), NO_EXPIRY_S, identifiers, 0)
            )
            for frame in smq.frames(self.batch)
        )

    def _common_properties(self) -> bytes | None:
        """Return the packed properties if all messages have the same; otherwise None."""
        if self._properties is not None:
            return self._properties
        batch = self.batch
        size = batch[0] << 8 | batch[1]
        frames, rest = divmod(len(batch), size)
        # Frames of the same length and sub-topic: a slice compares one byte of all frames at once.
        if rest or not all(batch[at::size] == batch[at : at + 1] * frames for at in (0, 1, 11, 12, 13, 14)):
            return None
        return self._encoder.properties_of(batch[:size])

    def numbered(
        self, version: int, qos: int, retain: bool, identifiers: bytes, number: int
    ) -> tuple[dict[int, Message], bytes] | None:
        """Return the messages with QoS 1 or 2 by packet identifiers, and their PUBLISH packets.

        All subscribers for which these packet identifiers are free get the same bytes.

        Args:
            version: the version of the subscriber.
            qos, retain, identifiers: see `Message`.
            number: the first packet identifier, unless another subscriber has chosen one before.

        Returns:
            None when the properties of the messages differ, or change with time, or for other packet identifiers.
        """
        key = version, qos, retain, identifiers
        if self._numbers is not None and number != self._numbers[0] and not self.skips_numbers:
            return None
        if self._numbered is None:
            self._numbered = {}
        found = self._numbered.get(key)
        if found is not None:
            return found
        name, block = _U16.pack(len(self.name)) + self.name, b""
        if version == 5:
            if self._properties is None or self.expires_s != NO_EXPIRY_S:
                return None
            block = property_block(self._properties, NO_EXPIRY_S, identifiers, 0)
        first, fixed_bytes = bytes((0x30 | qos << 1 | retain,)), len(name) + 2 + len(block)
        messages = self.messages(qos, retain, identifiers)
        if self._numbers is None:
            number = number if number + len(messages) <= MAX_NUMBER + 1 else 1
            self._numbers = range(number, number + len(messages))
        heads: dict[int, bytes] = {}  # by the length of the payload
        pieces: list[bytes] = []
        for number, message in zip(self._numbers, messages, strict=True):
            payload = message.payload
            size = len(payload)
            if size not in heads:
                heads[size] = first + varint(fixed_bytes + size) + name
            pieces += (heads[size], number.to_bytes(2), block, payload)
        found = self._numbered[key] = dict(zip(self._numbers, messages, strict=True)), b"".join(pieces)
        return found

    def messages(self, qos: int, retain: bool, identifiers: bytes) -> list[Message]:
        """Return the messages, each for itself."""
        if self._messages is None:
            self._messages = {}
        found = self._messages.get((qos, retain, identifiers))
        if found is None:
            found = self._messages[qos, retain, identifiers] = [
                Message(self.name, payload, qos, retain, properties, self.expires_s, identifiers)
                for payload, properties in self.payloads
            ]
            origin = self.batch.origin if isinstance(self.batch, MqttBatch) else 0
            for message, one in zip(found, self._origins or count(origin), strict=False) if origin else ():
                message.origin = one
        return found
