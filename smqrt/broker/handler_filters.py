"""Subscriptions of the application to topic filters: the server subscribes to each topic that a filter matches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from smqrt.broker.outbox import run_at_once
from smqrt.broker.topics import Topic
from smqrt.wire.mqtt.fields import check_filter
from smqrt.wire.mqtt.filter_tree import FilterTree

if TYPE_CHECKING:
    from smqrt.broker.broker import Broker
    from smqrt.broker.server_client import Handler


class FilterHandler(NamedTuple):
    """A handler for the topics that a filter matches.

    Attributes:
        text: the filter.
        handler: called with each message; None for the default handler.
        stid: a sub-topic id, or `CATCH_ALL`.
        once: whether only one server of a cluster handles each message.
    """

    text: str
    handler: Handler | None
    stid: int
    once: bool


class HandlerFilters:
    """The filters of one hub's application.

    Topics are subscribed to when they or the filter appear. A subscription to a topic by its name takes precedence. Of
    several filters that match a topic, the first one gets its messages.

    Args:
        broker: the hub.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tree: FilterTree[FilterHandler] = FilterTree()
        self._handlers: dict[str, FilterHandler] = {}
        self._topics: dict[Topic, FilterHandler] = {}

    def add(self, text: str, handler: Handler | None, stid: int, once: bool) -> None:
        """Subscribe to all topics that a filter matches, present and later ones; replaces the handler of this filter.

        Raises:
            ArgumentError: `text` is not a filter.
        """
        check_filter(text)
        self.remove(text)
        self._handlers[text] = entry = FilterHandler(text, handler, stid, once)
        self._tree.set(text, entry)
        if self.on_topic not in self._broker.topic_table.on_named:
            self._broker.topic_table.on_named += (self.on_topic,)
        if self._broker.cluster is not None:
            self._broker.cluster.mqtt.filter_changed(text)
        run_at_once(self._match_topics(), self._broker.clock)

    def get(self, text: str) -> FilterHandler | None:
        """Return the handler of a filter."""
        return self._handlers.get(text)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def _match_topics(self) -> Iterator[None]:
        for topic in list(self._broker.topic_table.by_name.values()):
            self.on_topic(topic)
            yield

    def on_topic(self, topic: Topic) -> None:
        """Subscribe to a topic that a filter matches, unless the application has subscribed to it by name."""
        if topic.id in self._broker.server.topics or self._broker.closed:
            return
        entry = self._first(topic.name or b"")
        if entry is not None:
            self._topics[topic] = entry
            self._broker.server.subscribe(topic, entry.handler, entry.stid, entry.once)

    def _first(self, name: bytes) -> FilterHandler | None:
        found = list(self._tree.match(name.decode("utf-8", "surrogateescape")))
        order = list(self._handlers)
        return min(found, key=lambda entry: order.index(entry.text)) if found else None

    def remove(self, text: str) -> bool:
        """End the subscription to a filter; return whether there was one. Other filters get its topics."""
        entry = self._handlers.pop(text, None)
        if entry is None:
            return False
        self._tree.remove(text)
        if self._broker.cluster is not None:
            self._broker.cluster.mqtt.filter_changed(text)
        for topic in [topic for topic, known in self._topics.items() if known is entry]:
            self.release(topic)
            self.on_topic(topic)
        return True

    def wants(self, name: bytes) -> bool:
        """Return whether a topic that does not exist would be subscribed to."""
        return bool(self._handlers) and self._first(name) is not None

    def has(self, topic: Topic) -> bool:
        """Return whether the server has subscribed to a topic because of a filter only."""
        return topic in self._topics

    def release(self, topic: Topic) -> None:
        """End the subscription to one topic, if it is because of a filter."""
        if self._topics.pop(topic, None) is not None:
            self._broker.server.unsubscribe(topic)

    def taken_over(self, topic: Topic) -> None:
        """Note that the application has subscribed to a topic by name."""
        self._topics.pop(topic, None)
