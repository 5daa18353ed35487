"""Subscriptions: which are wanted, which the broker was asked for, and which callback a message is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from smqrt.wire.mqtt.properties import Props
from smqrt.wire.mqtt.reasons import FIRST_FAILURE
from smqrt.wire.mqtt.topics import FilterTree, unshared

OnPub = Callable[[str, bytes, Props, int], object]
"""`f(topic, payload, properties, cpt)`; `cpt` is the first byte of the packet: DUP 8, QoS 6, retain 1."""

OnSuback = Callable[[str, int, Props], object]
"""`f(topic, reason, properties)`; the reason is the granted QoS, or at least 128: refused."""


class SubscribeRequest(NamedTuple):
    """SUBSCRIBE (options is an int) or UNSUBSCRIBE (options is None), and who waits for the answer."""

    topic: str
    options: int | None
    properties: Props
    callback: OnSuback | None = None


class Routes:
    """The callbacks of single subscriptions.

    With MQTT 5 the broker tells by an identifier which subscription a message is for. Where it doesn't, topics are
    compared.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._callbacks: dict[int, OnPub] = {}
        self._by_topic: FilterTree[OnPub] = FilterTree()
        self._last = 0
        self.uses_identifiers = True

    def add(self, topic: str, onpub: OnPub) -> int:
        """Have `onpub` called for what comes by this subscription; returns its identifier."""
        number = self._numbers.get(topic)
        if number is None:
            self._last = number = self._last + 1
        self._numbers[topic] = number
        self._callbacks[number] = onpub
        self._by_topic.set(unshared(topic), onpub)
        return number

    def remove(self, topic: str) -> None:
        """Forget a subscription's callback, if it has one."""
        number = self._numbers.pop(topic, None)
        if number is not None:
            del self._callbacks[number]
            self._by_topic.remove(unshared(topic))

    def find(self, topic: str, properties: Props) -> list[OnPub]:
        """The callbacks for a message."""
        if not self._callbacks:
            return []
        if not self.uses_identifiers:
            return list(self._by_topic.match(topic))
        numbers = properties.get("subscriptionidentifier", ())
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return [self._callbacks[number] for number in numbers if number in self._callbacks]


class Subscriptions:
    """What is wanted of the broker, what it has been asked, and what it has granted. What it is still to be asked waits
    among the messages, in the order in which the application called.

    Args:
        keeps: ask again on the next connection what was not answered, and what was granted when the session is lost.

    Attributes:
        routes: the callbacks of single subscriptions.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._wanted: dict[str, SubscribeRequest] = {}
        self._asked: dict[int, SubscribeRequest] = {}
        self.routes = Routes()

    def add(self, request: SubscribeRequest) -> None:
        """The application asks for it."""
        self._wanted.pop(request.topic, None)
        if request.options is not None:
            self._wanted[request.topic] = request

    def sent(self, packet_identifier: int, request: SubscribeRequest) -> None:
        """The broker has been asked."""
        self._asked[packet_identifier] = request

    def answered(self, packet_identifier: int, reason: int) -> SubscribeRequest | None:
        """The broker answered; what that was the answer to. A subscription that it refused or ended is forgotten,
        unless the application has asked for it anew."""
        request = self._asked.pop(packet_identifier, None)
        if request is None or request.options is not None and reason < FIRST_FAILURE:
            return request
        if self._wanted.get(request.topic) in (None, request):
            was_wanted = self._wanted.pop(request.topic, None) is request
            if was_wanted or request.options is None:
                self.routes.remove(request.topic)
        return request

    @property
    def is_quiet(self) -> bool:
        """Whether the broker has answered all that it was asked."""
        return not self._asked

    def lost(self) -> list[SubscribeRequest]:
        """The connection is gone; returns what is to be asked again, before all that waits."""
        again = list(self._asked.values()) if self._keeps else []
        self._asked.clear()
        return again

    def session_lost(self, waiting: Iterable[object]) -> list[SubscribeRequest]:
        """A connection stands, and the broker knows nothing of earlier ones; returns what is to be asked again, before
        all that waits.

        Args:
            waiting: what is to be sent anyway; requests among it are not repeated.
        """
        if not self._keeps:
            return []
        open_topics = {item.topic for item in waiting if isinstance(item, SubscribeRequest)}
        return [item._replace(callback=None) for topic, item in self._wanted.items() if topic not in open_topics]
