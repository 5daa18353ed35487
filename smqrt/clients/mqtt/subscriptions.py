"""Subscriptions of an MQTT client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from smqrt.wire.mqtt.fields import FIRST_FAILURE, Props, Routes

OnSuback = Callable[[str, int, Props], object]
"""`f(topic, reason, properties)`; the reason is the granted QoS, or an error of 128 or more."""


class SubscribeRequest(NamedTuple):
    """SUBSCRIBE (options is an int) or UNSUBSCRIBE (options is None), and the callback for its acknowledgement."""

    topic: str
    options: int | None
    properties: Props
    callback: OnSuback | None = None


class MqttSubscriptions:
    """Subscriptions of the application, and sent requests that the broker has not acknowledged.

    Unsent requests are in the send queue, in the order of the calls.

    Args:
        resubscribes: send unacknowledged requests again on the next connection, and all subscriptions after a loss of
            the session.

    Attributes:
        routes: the callbacks of single subscriptions.
    """

    def __init__(self, resubscribes: bool) -> None:
        self._resubscribes = resubscribes
        self._wanted: dict[str, SubscribeRequest] = {}
        self._unanswered: dict[int, SubscribeRequest] = {}  # by packet identifier
        self.routes = Routes()

    def add(self, request: SubscribeRequest) -> None:
        """Add a request of the application."""
        self._wanted.pop(request.topic, None)
        if request.options is not None:
            self._wanted[request.topic] = request

    def sent(self, packet_identifier: int, request: SubscribeRequest) -> None:
        """Record a sent request."""
        self._unanswered[packet_identifier] = request

    def answered(self, packet_identifier: int, reason: int) -> SubscribeRequest | None:
        """Return the request that the broker has acknowledged.

        A rejected or ended subscription is removed, unless the application has requested it again.
        """
        request = self._unanswered.pop(packet_identifier, None)
        if request is None or request.options is not None and reason < FIRST_FAILURE:
            return request
        if self._wanted.get(request.topic) in (None, request):
            was_wanted = self._wanted.pop(request.topic, None) is request
            if was_wanted or request.options is None:
                self.routes.remove(request.topic)
        return request

    @property
    def is_answered(self) -> bool:
        """Whether the broker has acknowledged all sent requests."""
        return not self._unanswered

    def lost(self) -> list[SubscribeRequest]:
        """Handle a lost connection; return the requests to send again, before the queue."""
        again = list(self._unanswered.values()) if self._resubscribes else []
        self._unanswered.clear()
        return again

    def session_lost(self, queued: Iterable[object]) -> list[SubscribeRequest]:
        """Handle a connection without a session; return the requests to send before the queue.

        Args:
            queued: the queue; requests in it are not repeated.
        """
        if not self._resubscribes:
            return []
        open_topics = {item.topic for item in queued if isinstance(item, SubscribeRequest)}
        return [item._replace(callback=None) for topic, item in self._wanted.items() if topic not in open_topics]
