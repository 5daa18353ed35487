"""A message on its way out."""

from __future__ import annotations

from gevent.event import Event


class Delivery:
    """What became of a published message.

    Attributes:
        done: QoS 0: it is with the system's network; QoS 1 and 2: the broker has acknowledged it; or it failed.
        error: why it failed: "dropped" (the queue was full, and a newer message took its place), "closed" (the client
            ended first), "toolarge" (for this client or for the broker), or the broker's reason code as an int; None
            when it did not.
        size_bytes: topic, payload and properties.
    """

    __slots__ = (
        "_event",
        "done",
        "dup",
        "error",
        "mid",
        "payload",
        "properties",
        "qos",
        "released",
        "retain",
        "size_bytes",
        "topic",
    )

    def __init__(self, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes) -> None:
        self.topic, self.payload, self.qos, self.retain = topic, payload, qos, retain
        self.properties = properties
        self.size_bytes = len(topic) + len(payload) + len(properties)
        self.done = False
        self.error: str | int | None = None
        self.dup = False
        self.mid = 0
        self.released = False
        self._event: Event | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most `timeout` seconds.

        Returns:
            True when it was delivered, False when it failed or time ran out.
        """
        if not self.done:
            if self._event is None:
                self._event = Event()
            self._event.wait(timeout)
        return self.done and self.error is None

    def finish(self, error: str | int | None = None) -> None:
        """Settle it; called by the engine."""
        self.done, self.error = True, error
        if self._event is not None:
            self._event.set()
