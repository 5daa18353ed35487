"""MQTT topic names, topic filters and their matching (MQTT 5 §4.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from smqrt.errors import ArgumentError
from smqrt.wire.mqtt.properties import Props

_MAX_BYTES = 0xFFFF
Value = TypeVar("Value")

OnPub = Callable[[str, bytes, Props, int], object]
"""`f(topic, payload, properties, cpt)`; `cpt` is the first byte of the packet: DUP 8, QoS 6, retain 1."""


def is_topic_name(topic: str) -> bool:
    """Return whether a topic is a valid name: not empty, and without wildcards [MQTT-4.7.0-1]."""
    return topic != "" and "+" not in topic and "#" not in topic


def is_topic_filter(topic: str) -> bool:
    """Return whether wildcards are whole levels, and "#" is the last one [MQTT-4.7.1-1], [MQTT-4.7.1-2]."""
    levels = topic.split("/")
    if "#" in levels[:-1] or not topic:
        return False
    return not any(len(level) > 1 and ("+" in level or "#" in level) for level in levels)


def check_topic(topic: object) -> str:
    """Return a topic to publish to.

    Raises:
        ArgumentError: not a topic name.
    """
    name = _checked_text(topic)
    if not is_topic_name(name):
        raise ArgumentError(f"topic {name!r} can't have wildcards: they are for subscriptions")
    return name


def check_filter(topic: object) -> str:
    """Return a topic to subscribe to, which may have wildcards.

    Raises:
        ArgumentError: not a topic filter.
    """
    name = _checked_text(topic)
    if not is_topic_filter(name):
        raise ArgumentError(f"topic {name!r}: '+' must be a whole level, '#' the whole last level")
    return name


def _checked_text(topic: object) -> str:
    if isinstance(topic, bytes):
        topic = topic.decode("utf-8", "surrogateescape")
    if not isinstance(topic, str):
        raise ArgumentError(f"topic must be a str, not {type(topic).__name__}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"topic {topic!r} must be UTF-8") from None
    if not 0 < size <= _MAX_BYTES or "\0" in topic:
        raise ArgumentError(f"topic {topic[:50]!r} must have 1 to {_MAX_BYTES} bytes and no NUL")
    return topic


def unshared(topic: str) -> str:
    """Return the filter of a shared subscription, `$share/group/filter`; others as they are (§4.8.2)."""
    return topic.split("/", 2)[2] if topic.startswith("$share/") and topic.count("/") >= 2 else topic


class _Node(Generic[Value]):
    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[str, _Node[Value]] = {}
        self.values: list[Value] = []


class FilterTree(Generic[Value]):
    """Values by topic filter, one for each filter."""

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node()

    def set(self, topic_filter: str, value: Value) -> None:
        """Set the value of a filter."""
        node = self._root
        for level in topic_filter.split("/"):
            node = node.children.setdefault(level, _Node())
        node.values = [value]

    def remove(self, topic_filter: str) -> None:
        """Remove a filter, if it is there."""
        path = [self._root]
        levels = topic_filter.split("/")
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return
            path.append(child)
        path[-1].values = []
        for parent, level in zip(reversed(path[:-1]), reversed(levels), strict=True):
            node = parent.children[level]
            if node.values or node.children:
                return
            del parent.children[level]

    def match(self, topic: str) -> Iterator[Value]:
        """Yield the values of the filters that match a topic name.

        A wildcard at the first level matches no name that begins with "$" [MQTT-4.7.2-1].
        """
        levels = topic.split("/")
        nodes = [self._root]
        for depth, level in enumerate(levels):
            wild = depth or not topic.startswith("$")
            following = []
            for node in nodes:
                children = node.children
                if wild and "#" in children:
                    yield from children["#"].values
                following += [children[name] for name in ((level, "+") if wild else (level,)) if name in children]
            nodes = following
        for node in nodes:
            yield from node.values
            if "#" in node.children:  # "a/#" matches "a" as well
                yield from node.children["#"].values


class Routes:
    """Callbacks of single subscriptions.

    A broker of MQTT 5 adds the subscription identifiers to a message. Without them the topic is matched.

    Attributes:
        uses_identifiers: whether the broker adds subscription identifiers.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._callbacks: dict[int, OnPub] = {}
        self._by_topic: FilterTree[OnPub] = FilterTree()
        self._last = 0
        self.uses_identifiers = True

    def add(self, topic: str, onpub: OnPub) -> int:
        """Set the callback of a subscription; return its identifier."""
        number = self._numbers.get(topic)
        if number is None:
            self._last = number = self._last + 1
        self._numbers[topic] = number
        self._callbacks[number] = onpub
        self._by_topic.set(unshared(topic), onpub)
        return number

    def remove(self, topic: str) -> None:
        """Remove the callback of a subscription, if it has one."""
        number = self._numbers.pop(topic, None)
        if number is not None:
            del self._callbacks[number]
            self._by_topic.remove(unshared(topic))

    def find(self, topic: str, properties: Props) -> list[OnPub]:
        """Return the callbacks for a message."""
        if not self._callbacks:
            return []
        if not self.uses_identifiers:
            return list(self._by_topic.match(topic))
        numbers = properties.get("subscriptionidentifier", ())
        numbers = numbers if isinstance(numbers, list) else [numbers]
        return [self._callbacks[number] for number in dict.fromkeys(numbers) if number in self._callbacks]
