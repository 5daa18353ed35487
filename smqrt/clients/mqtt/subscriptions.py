"""Subscriptions of an MQTT client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from smqrt.clients.mqtt.connect import check_qos
from smqrt.errors import ArgumentError
from smqrt.wire.mqtt.fields import FIRST_FAILURE, Props, Routes, check_filter
from smqrt.wire.mqtt.packets import MAX_FILTERS, Subscription

OnSuback = Callable[[Any, Any, Props], object]
"""`f(topic, reason, properties)`; the reason is the granted QoS, or an error of 128 or more. After a list of topic
filters, both are lists."""

FilterOptions = str | tuple[str, int | Mapping[str, object]]
"""A topic filter of a list: alone, with its QoS, or with a mapping of its options."""


class SubscribeRequest(NamedTuple):
    """SUBSCRIBE (options are numbers) or UNSUBSCRIBE (options is None), and the callback for its acknowledgement."""

    topics: tuple[str, ...]
    options: tuple[int, ...] | None
    properties: Props
    callback: OnSuback | None = None
    is_list: bool = False
    """Whether the callback receives lists."""

    @property
    def subscriptions(self) -> list[Subscription]:
        """The topic filters of SUBSCRIBE with their options."""
        return list(map(Subscription, self.topics, self.options or ()))


def option_bits(
    version: int, qos: object, nolocal: object = False, retainaspublished: object = False, retainhandling: object = 0
) -> int:
    """Return the options of a topic filter as their byte in SUBSCRIBE; MQTT 3.1.1 has only the QoS.

    Raises:
        ArgumentError: an invalid value.
    """
    if retainhandling not in (0, 1, 2) or not isinstance(retainhandling, int):
        raise ArgumentError(f"retainhandling must be 0, 1 or 2, not {retainhandling!r}")
    bits = check_qos(qos)
    if version == 5:
        bits |= bool(nolocal) << 2 | bool(retainaspublished) << 3 | retainhandling << 4
    return bits


def check_filters(topic: object) -> tuple[tuple[str, Any], ...]:
    """Return topic filters with their own options: a number or a mapping; None without.

    Args:
        topic: a topic filter, or a list of `FilterOptions`.

    Raises:
        ArgumentError: an invalid topic filter, an empty list, or one of more than 1000.
    """
    if not isinstance(topic, list):
        return ((check_filter(topic), None),)
    if not 1 <= len(topic) <= MAX_FILTERS:
        raise ArgumentError(f"a list of topic filters must have 1 to {MAX_FILTERS} of them, not {len(topic)}")
    found: list[tuple[str, Any]] = []
    for item in topic:
        name, options = item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)
        found.append((check_filter(name), options))
    if len({name for name, _ in found}) < len(found):
        raise ArgumentError("a list of topic filters must not have the same one twice")
    return tuple(found)


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
        for topic in request.topics:
            self._wanted.pop(topic, None)
            if request.options is not None:
                self._wanted[topic] = request

    def sent(self, packet_identifier: int, request: SubscribeRequest) -> None:
        """Record a sent request."""
        self._unanswered[packet_identifier] = request

    def answered(self, packet_identifier: int, reasons: bytes) -> SubscribeRequest | None:
        """Return the request that the broker has acknowledged, with a reason code for each topic filter.

        A rejected or ended subscription is removed, unless the application has requested it again.
        """
        request = self._unanswered.pop(packet_identifier, None)
        if request is None:
            return None
        for topic, reason in zip(request.topics, reasons, strict=False):
            is_over = request.options is None or reason >= FIRST_FAILURE
            if is_over and self._wanted.get(topic, request) is request:
                was_wanted = self._wanted.pop(topic, None) is request
                if was_wanted or request.options is None:
                    self.routes.remove(topic)
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
        queued_topics = {topic for item in queued if isinstance(item, SubscribeRequest) for topic in item.topics}
        again: list[SubscribeRequest] = []
        for topic, request in self._wanted.items():
            if topic not in queued_topics and request.options is not None:
                bits = request.options[request.topics.index(topic)]
                again.append(SubscribeRequest((topic,), (bits,), request.properties))
        self._wanted |= {request.topics[0]: request for request in again}
        return again
