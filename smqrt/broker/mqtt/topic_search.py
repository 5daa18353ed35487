"""Passes through the topics of a hub, for filters that are new or were removed.

All filters that are added while a pass runs share the next one: thousands of clients may subscribe at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.filters import Filter, mqtt_name
from smqrt.broker.outbox import run_in_background
from smqrt.wire.mqtt.filter_tree import FilterTree

if TYPE_CHECKING:
    from smqrt.broker.mqtt.devices import Devices


class TopicSearch:
    """Finds the topics that new filters match, and those that removed filters have matched.

    Args:
        devices: the MQTT clients of the hub.
    """

    __slots__ = ("_begun", "_devices", "_ended", "_is_sweeping", "_new", "_steps")

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._new: list[Filter] = []
        self._begun = self._ended = 0  # passes for new filters
        self._steps: Iterator[None] = iter(())
        self._is_sweeping = False

    # ---- new filters

    def add(self, one: Filter) -> None:
        """Subscribe to the topics that a new filter with wildcards matches; `finish` does it."""
        self._new.append(one)

    def finish(self) -> Iterator[None]:
        """Search, in portions, until the topics of all filters are found that were added before this call."""
        last = self._begun + bool(self._new)
        while self._ended < last:
            if self._ended == self._begun:
                self._begun += 1
                self._steps = self._match_all()
            next(self._steps, None)
            yield

    def finish_now(self) -> None:
        """Finish in one step, when sessions are restored: they may have a filter each, and there may be many topics."""
        for _ in self.finish():
            pass

    def _match_all(self) -> Iterator[None]:
        try:
            filters, self._new = self._new, []
            tree: FilterTree[Filter] = FilterTree()
            for one in filters:
                tree.set(one.text, one)
            fixed = (
                filters[0].text.partition("+")[0].partition("#")[0].rstrip("/").encode() if len(filters) == 1 else b""
            )
            by_name = self._devices.broker.topic_table.by_name
            for name in list(by_name):
                if name.startswith(fixed) and (text := mqtt_name(name)) is not None:
                    for found in tree.search(text):
                        if found is not None:
                            self._matched(name)
                            break
                        yield
                yield
        finally:  # also after an error: nothing must wait for this pass
            self._ended += 1

    def _matched(self, name: bytes) -> None:
        devices, topic = self._devices, self._devices.broker.topic_table.by_name.get(name)
        if topic is not None:
            known = devices.by_topic.get(topic)
            if known is None or not known.is_wide:
                devices.set_filters(topic, devices.filters.match(name))

    # ---- removed filters

    def removed(self) -> None:
        """Find the filters of topics again that have matched a removed filter."""
        if not self._is_sweeping:
            self._is_sweeping = True
            run_in_background(self._sweep())

    def _sweep(self) -> Iterator[None]:
        self._is_sweeping = False  # filters that are removed from now on start another one
        devices = self._devices
        for topic, known in list(devices.by_topic.items()):
            if known.is_stale and devices.by_topic.get(topic) is known and topic.name is not None:
                found = devices.filters.match(topic.name)
                if found is not None and found.is_wide and known.is_wide:
                    known.checked()
                else:
                    devices.set_filters(topic, found)
            yield
