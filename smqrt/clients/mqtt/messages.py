"""Received MQTT messages as objects, and the queue of an iteration over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import gevent
from gevent.event import Event

from smqrt.loop.greenlets import MAX_WAITING_JOBS
from smqrt.wire.mqtt.endpoint import PendingAcknowledgement
from smqrt.wire.mqtt.fields import Props
from smqrt.wire.mqtt.packets import DUP, RETAIN, PublishPacket

MAX_BYTES = 4 << 20  # of the payloads in the queue of an iteration
_PUBLISH = 0x30  # the packet type in the first byte


class Message:
    """A received message.

    Attributes:
        topic: the topic.
        payload: bytes.
        qos: 0, 1 or 2.
        retain: whether the broker had stored the message before the subscription.
        dup: whether the broker may have sent the message before.
        properties: with MQTT 5, names in lower case.
    """

    __slots__ = ("_acknowledge", "_pending", "dup", "payload", "properties", "qos", "retain", "topic")

    def __init__(
        self,
        packet: PublishPacket,
        acknowledge: Callable[[PendingAcknowledgement], None],
        pending: PendingAcknowledgement | None,
    ) -> None:
        self.topic, self.payload, flags, _, properties, _ = packet
        self.properties: Props = properties
        self.qos, self.retain, self.dup = flags >> 1 & 3, bool(flags & RETAIN), bool(flags & DUP)
        self._acknowledge, self._pending = acknowledge, pending

    def __repr__(self) -> str:
        return f"<Message {self.topic!r} qos={self.qos} {len(self.payload)} bytes>"

    @property
    def cpt(self) -> int:
        """The first byte of PUBLISH, as callbacks receive it (DUP 8, QoS 6, retain 1)."""
        return _PUBLISH | self.dup << 3 | self.qos << 1 | self.retain

    @property
    def needs_ack(self) -> bool:
        """Whether the broker waits for `ack` (option `manualack`, QoS 1 or 2)."""
        return self._pending is not None and self._pending.code is None

    def ack(self) -> None:
        """Acknowledge the message; only with the option `manualack`, and once.

        The acknowledgement is sent after those of all messages that were received before. After a reconnect, a message
        of QoS 1 that was not acknowledged arrives again; a message of QoS 2 does not, and may be acknowledged still.
        """
        if self._pending is not None:
            self._acknowledge(self._pending)


OnMessage = Callable[[Message], object]
"""`f(message)`, called for each message."""


class MessageCallback:
    """A callback that receives a `Message` instead of the four arguments of `OnPub`."""

    __slots__ = ("function",)

    def __init__(self, function: OnMessage) -> None:
        self.function = function

    def __call__(self, topic: str, payload: bytes, properties: Props, cpt: int) -> object:
        """Call the function with a message that needs no acknowledgement."""
        packet = PublishPacket(topic, payload, cpt & 0x0F, 0, properties)
        return self.function(Message(packet, lambda _: None, None))


class MessageQueue:
    """Messages without a callback, until an iteration takes them: at most 1000, and 4 MiB.

    Args:
        drops_oldest: without an iteration, drop the oldest message of the full queue. Otherwise, and during an
            iteration, the client pauses reading.

    Attributes:
        readers: number of iterations.
        dropped: number of dropped messages.
    """

    def __init__(self, drops_oldest: bool) -> None:
        self._drops_oldest = drops_oldest
        self._messages: deque[Message] = deque()
        self._bytes = 0
        self._is_closed = False
        self._arrival, self.room = Event(), Event()
        self.room.set()
        self.readers = self.dropped = 0

    @property
    def _is_full(self) -> bool:
        return len(self._messages) >= MAX_WAITING_JOBS or self._bytes > MAX_BYTES

    def put(self, message: Message) -> None:
        """Append a message."""
        self._messages.append(message)
        self._bytes += len(message.payload)
        self._arrival.set()
        while self._is_full and self._drops_oldest and not self.readers and len(self._messages) > 1:
            self._pop()
            self.dropped += 1
        if self._is_full and (self.readers or not self._drops_oldest):
            self.room.clear()

    def take(self) -> Message | None:
        """Remove and return the next message; block until there is one. None after `close`, when none is left."""
        while not self._messages:
            if self._is_closed:
                return None
            self._arrival.clear()
            self._arrival.wait()
        return self._pop()

    def _pop(self) -> Message:
        message = self._messages.popleft()
        self._bytes -= len(message.payload)
        # Half of the limits, so that reading does not stop and resume for each message.
        if len(self._messages) < MAX_WAITING_JOBS // 2 and self._bytes <= MAX_BYTES // 2:
            self.room.set()
        return message

    def wait_for_room(self, stopping: Event) -> None:
        """Block until the application has caught up, or `stopping` is set."""
        if not self.room.is_set():
            gevent.wait([self.room, stopping], count=1)

    def end_reading(self) -> None:
        """End an iteration; without another one, reading continues."""
        self.readers -= 1
        if not self.readers and self._drops_oldest:
            self.room.set()

    def close(self) -> None:
        """End the iterations after the messages in the queue."""
        self._is_closed = True
        self._arrival.set()
