"""Filters of other nodes: those of their MQTT clients and of their applications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator

from smqrt.broker.mqtt.filters import mqtt_name, split_shared
from smqrt.wire.cluster_mqtt import Wanted
from smqrt.wire.mqtt.filter_tree import FilterTree

MAX_PORTIONS = 100
"""The maximum length of a search, in portions of `FilterTree.search`: about 5 ms."""


MAX_KNOWN_GROUPS = 200_000
"""Shared subscriptions of topics that are remembered; the name of a topic counts as one for each `NAME_BYTES`."""
NAME_BYTES = 50


class RemoteGroup:
    """A shared subscription that other nodes have.

    Attributes:
        text: `$share/group/filter`.
        connected: the bits of the nodes to which a client of the group is connected.
        offline: the bits of the nodes that have sessions of the group, but no connected client of it.
        turn: counts the messages, so that the nodes are chosen in turn.
    """

    __slots__ = ("connected", "offline", "text", "turn")

    def __init__(self, text: str) -> None:
        self.text = text
        self.connected = self.offline = self.turn = 0


class RemoteFilter:
    """A topic filter that other nodes have.

    Attributes:
        messages: the bits of the nodes that want the messages.
        once: the bits of the nodes whose application handles them with `once`.
        groups: the shared subscriptions with this filter, by their text.
    """

    __slots__ = ("groups", "messages", "once")

    def __init__(self) -> None:
        self.messages = self.once = 0
        self.groups: dict[str, RemoteGroup] = {}


class RemoteFilters:
    """The filters of all other nodes. A set of nodes is an integer with one bit for each."""

    def __init__(self) -> None:
        self._by_filter: dict[str, RemoteFilter] = {}
        self._tree: FilterTree[RemoteFilter] = FilterTree()
        self._shared: FilterTree[RemoteFilter] = FilterTree()
        """Those with shared subscriptions: a search for these passes no other filters."""
        self._known: dict[bytes, list[RemoteGroup]] = {}
        """Results of `groups`, until a shared subscription begins or ends."""
        self._known_count = self._changes = self._group_count = 0
        self._counts: Counter[int] = Counter()
        """The number of filters of each node, by its bit, without those of shared subscriptions."""

    def __len__(self) -> int:
        return len(self._by_filter)

    def set(self, text: str, wanted: int, bit: int) -> None:
        """Record what a node does with the messages that a filter matches; with 0, nothing more.

        Args:
            text: a valid filter, perhaps of a shared subscription.
            wanted: a `Wanted`.
            bit: the bit of the node.
        """
        group, wanted_filter = split_shared(text) or (None, text)
        found = self._by_filter.get(wanted_filter)
        if found is None:
            if not wanted:
                return
            found = self._by_filter[wanted_filter] = RemoteFilter()
            self._tree.set(wanted_filter, found)
        if group is None:
            self._counts[bit] += bool(wanted & Wanted.MESSAGES) - bool(found.messages & bit)
            found.messages = _with(found.messages, bit, wanted & Wanted.MESSAGES)
            found.once = _with(found.once, bit, wanted & Wanted.ONCE)
        else:
            shared = found.groups.get(text)
            if shared is None:
                shared = found.groups[text] = RemoteGroup(text)
                self._group_count += 1
                self._changed()
                self._shared.set(wanted_filter, found)
            shared.connected = _with(shared.connected, bit, wanted & Wanted.CONNECTED)
            shared.offline = _with(shared.offline, bit, wanted & Wanted.OFFLINE)
            if not shared.connected | shared.offline:
                del found.groups[text]
                self._group_count -= 1
                self._changed()
                if not found.groups:
                    self._shared.remove(wanted_filter)
        if not found.messages | found.once and not found.groups:
            del self._by_filter[wanted_filter]
            self._tree.remove(wanted_filter)

    def match(self, name: bytes) -> Iterator[RemoteFilter]:
        """Yield the filters that match a topic name."""
        text = mqtt_name(name) if self._by_filter else None
        if text is not None:
            yield from self._tree.match(text)

    def nodes(self, name: bytes) -> int:
        """Return the bits of the nodes that want the messages to a topic.

        After `MAX_PORTIONS`, these are all nodes that have filters: a node drops messages that it does not want.
        """
        text = mqtt_name(name) if self._by_filter else None
        every = sum(bit for bit, count in self._counts.items() if count)
        bits = portions = 0
        for one in self._tree.search(text) if text is not None else ():
            if one is not None:
                bits |= one.messages
            else:
                portions += 1
            if bits == every or portions >= MAX_PORTIONS:
                return every
        return bits

    def once(self, name: bytes) -> int:
        """Return the bits of the nodes whose application handles the messages to a topic with `once`."""
        bits = 0
        for one in self.match(name):
            bits |= one.once
        return bits

    def groups(self, name: bytes) -> Generator[None, None, list[RemoteGroup]]:
        """Return the shared subscriptions that match a topic, found in portions."""
        if name in self._known or not self._group_count:
            return self._known.get(name, [])
        found, changes = list[RemoteGroup](), self._changes
        for one in self._search(name):
            if one is None:
                yield
            else:
                found += one.groups.values()
        if changes == self._changes:
            self._remember(name, found)
        return found

    def has_groups(self, name: bytes) -> bool:
        """Return whether shared subscriptions match a topic; true if that takes long to find out."""
        if not self._group_count:
            return False
        if name in self._known:
            return bool(self._known[name])
        for count, one in enumerate(self._search(name)):
            if one is not None or count >= MAX_PORTIONS:
                return True
        self._remember(name, [])
        return False

    def _search(self, name: bytes) -> Iterator[RemoteFilter | None]:
        """Yield the filters with shared subscriptions that match a topic, and None after each portion of the search."""
        text = mqtt_name(name)
        if text is not None:
            yield from self._shared.search(text)

    def _remember(self, name: bytes, found: list[RemoteGroup]) -> None:
        if self._known_count > MAX_KNOWN_GROUPS:
            self._forget()
        self._known[name] = found
        self._known_count += len(found) + 1 + len(name) // NAME_BYTES

    def _forget(self) -> None:
        self._known.clear()
        self._known_count = 0

    def _changed(self) -> None:
        self._changes += 1
        self._forget()

    def group(self, text: str) -> RemoteGroup | None:
        """Return the shared subscription with this text, if another node has it."""
        _, wanted_filter = split_shared(text) or (None, text)
        found = self._by_filter.get(wanted_filter)
        return None if found is None else found.groups.get(text)


def _with(bits: int, bit: int, is_set: int) -> int:
    return bits | bit if is_set else bits & ~bit
