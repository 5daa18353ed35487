"""Delivery of a published MQTT message."""

from __future__ import annotations

from typing import Literal

from gevent.event import Event

from smqrt.errors import ClosedError, DroppedError, NoAnswer
from smqrt.wire.mqtt.endpoint import OutgoingMessage
from smqrt.wire.mqtt.fields import reason_words

_REASONS = {
    "dropped": "a newer message replaced it in the full queue; raise queuesize or queuebytes, or publish more slowly",
    "lost": "the connection ended before the system had the message; publish it again, or use QoS 1",
    "toolarge": "it is larger than maxpacketsize, or than the broker accepts",
}


class Delivery(OutgoingMessage):
    """Delivery of a published message.

    Attributes:
        done: whether the delivery is complete or has failed. QoS 0 is complete when the operating system has the
            message, QoS 1 when PUBACK was received, and QoS 2 when PUBCOMP was received.
        error: why the delivery failed: "dropped" (a newer message replaced it in the full queue), "lost" (QoS 0: the
            connection ended first), "closed" (the client ended first), "toolarge" (for this client or for the broker),
            or the reason code of the broker as an int; otherwise None.
        size_bytes: size of topic, payload and properties.
    """

    __slots__ = ("_event", "done", "error")

    def __init__(self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes) -> None:
        super().__init__(topic, payload, qos, retain, properties)
        self.done = False
        self.error: str | int | None = None
        self._event: Event | None = None

    def wait(self, timeout: float | None = None) -> Literal[True]:
        """Wait until the delivery is complete, at most `timeout` seconds; return True.

        Raises:
            NoAnswer: the time is over, and the delivery continues (also a TimeoutError).
            ClosedError: the client was closed for good before the delivery was complete.
            DroppedError: the message was dropped from the full queue, is too large, or the broker refused it.
        """
        if not self.done:
            if self._event is None:
                self._event = Event()
            self._event.wait(timeout)
        if not self.done:
            raise NoAnswer(f"a message to {self._topic_text} was not delivered within {timeout} s; it is still queued")
        if self.error is None:
            return True
        if self.error == "closed":
            raise ClosedError(f"the client was closed before a message to {self._topic_text} was delivered")
        if isinstance(self.error, int):
            why = f"the broker refused it: {reason_words(self.error, 5)}"
        else:
            why = _REASONS[self.error]
        raise DroppedError(self.error, f"a message to {self._topic_text} was dropped: {why}")

    @property
    def _topic_text(self) -> str:
        return repr(self.topic[:80].decode("utf-8", "replace"))

    def finish(self, error: str | int | None = None) -> None:
        """Complete the delivery, or let it fail with `error`; called by the session."""
        self.done, self.error = True, error
        if self._event is not None:
            self._event.set()
