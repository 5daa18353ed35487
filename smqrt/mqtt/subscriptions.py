"""Subscriptions: which are wanted, which the broker was asked for, and which callback a message is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paho.mqtt.matcher import MQTTMatcher

from smqrt.mqtt.topics import unshared

OnPub = Callable[..., Any]


class Request(NamedTuple):
    """SUBSCRIBE (options is an int) or UNSUBSCRIBE (options is None), and who waits for the answer."""

    topic: str
    options: int | None
    properties: dict[str, Any]
    callback: Callable[..., Any] | None = None


class Routes:
    """The callbacks of single subscriptions.

    With MQTT 5 the broker tells by an identifier which subscription a message is for. Where it doesn't, topics are
    compared.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._callbacks: dict[int, OnPub] = {}
        self._by_topic = MQTTMatcher()
        self._last = 0
        self.uses_identifiers = True

    def add(self, topic: str, onpub: OnPub) -> int:
        """Have `onpub` called for what comes by this subscription; returns its identifier."""
        number = self._numbers.get(topic)
        if number is None:
            self._last = number = self._last + 1
        self._numbers[topic] = number
        self._callbacks[number] = onpub
        self._by_topic[unshared(topic)] = onpub
        return number

    def remove(self, topic: str) -> None:
        """Forget a subscription's callback, if it has one."""
        number = self._numbers.pop(topic, None)
        if number is not None:
            del self._callbacks[number]
            del self._by_topic[unshared(topic)]

    def find(self, topic: str, properties: dict[str, Any]) -> list[OnPub]:
        """The callbacks for a message."""
        if not self._callbacks:
            return []
        if not self.uses_identifiers:
            return list(self._by_topic.iter_match(topic))
        numbers = properties.get("subscriptionidentifier", ())
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return [self._callbacks[number] for number in numbers if number in self._callbacks]


class Requests:
    """What is wanted of the broker, what it has been asked, and what it has granted. What it is still to be asked waits
    among the messages, in the order in which the application called.

    Args:
        keeps: ask again on the next connection what was not answered, and what was granted when the session is lost.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._wanted: dict[str, Request] = {}
        self._asked: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """A new wish."""
        self._wanted.pop(request.topic, None)
        if request.options is not None:
            self._wanted[request.topic] = request

    def sent(self, mid: int, request: Request) -> None:
        """The broker has been asked."""
        self._asked[mid] = request

    def answered(self, mid: int) -> Request | None:
        """What the broker answers."""
        return self._asked.pop(mid, None)

    def ended(self, request: Request) -> bool:
        """The broker refused a subscription, or ended one; whether nobody has asked for it anew meanwhile."""
        if self._wanted.get(request.topic) not in (None, request):
            return False
        return self._wanted.pop(request.topic, None) is request or request.options is None

    @property
    def is_quiet(self) -> bool:
        """Whether the broker has answered all that it was asked."""
        return not self._asked

    def lost(self) -> list[Request]:
        """The connection is gone; returns what is to be asked again, before all that waits."""
        again = list(self._asked.values()) if self._keeps else []
        self._asked.clear()
        return again

    def session_lost(self, waiting: Iterable[object]) -> list[Request]:
        """A connection stands, and the broker knows nothing of earlier ones; returns what is to be asked again, before
        all that waits.

        Args:
            waiting: what is to be sent anyway; requests among it are not repeated.
        """
        if not self._keeps:
            return []
        open_topics = {item.topic for item in waiting if isinstance(item, Request)}
        return [item._replace(callback=None) for topic, item in self._wanted.items() if topic not in open_topics]
