"""Topic filters of MQTT clients, and the deliveries of a topic.

Filters are looked up when a topic or a filter appears, not for each message. Topics with the same matching filters
share one `FilterSet`, so that memory does not grow with topics × subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from smqrt.broker.mqtt.messages import packed_identifier
from smqrt.wire.mqtt.filter_tree import FilterTree

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device

MAX_NAME_BYTES = 0xFFFF


class Options(NamedTuple):
    """Options of one subscription (MQTT 5 §3.8.3.1).

    Attributes:
        qos: the maximum QoS.
        no_local: whether the client's own messages are left out.
        retain_as_published: whether the retain flag is kept.
        retain_handling: 0 to send retained messages, 1 for a new subscription only, 2 never.
        identifier: the subscription identifier; 0 for none.
    """

    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


@lru_cache(maxsize=1024)
def shared_options(options: Options) -> Options:
    """Return an object for all equal options: there are millions of subscriptions with few different ones."""
    return options


class Delivery(NamedTuple):
    """The overlapping subscriptions of one client to a topic, as one.

    Attributes:
        device: the client.
        qos: the highest QoS.
        no_local: whether the client's own messages are left out.
        retain_as_published: whether the retain flag is kept.
        identifiers: the subscription identifiers, packed as properties.
    """

    device: Device
    qos: int
    no_local: bool
    retain_as_published: bool
    identifiers: bytes


class Group:
    """The members of a shared subscription; each message goes to one of them, in turn.

    Args:
        text: `$share/group/filter`.
    """

    __slots__ = ("_next", "members", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.members: dict[Device, Options] = {}
        self._next = 0

    @property
    def is_connected(self) -> bool:
        """Whether one of the members is connected."""
        return any(device.client is not None for device in self.members)

    def choose(self, may_read: Callable[[Device], bool] = lambda device: True) -> Delivery | None:
        """Return the next member that is connected; without one, the next member whose session is kept.

        Args:
            may_read: returns whether a member may get the message.
        """
        members = list(self.members)
        for is_connected in (True, False):
            for at in range(len(members)):
                device = members[(self._next + at) % len(members)]
                if (device.client is not None) is is_connected and may_read(device):
                    self._next = (self._next + at + 1) % len(members)
                    return delivery(device, [self.members[device]])
        return None


def delivery(device: Device, options: list[Options]) -> Delivery:
    """Return the overlapping subscriptions of one client as one [MQTT-3.3.4-2]."""
    return Delivery(
        device,
        max(one.qos for one in options),
        all(one.no_local for one in options),
        any(one.retain_as_published for one in options),
        b"".join(packed_identifier(number) for number in sorted(one.identifier for one in options)),
    )


_Members = dict["Device", Options] | tuple["Device", Options] | tuple[()]
_NO_GROUPS: dict[str, Group] = {}
"""Shared by filters without shared subscriptions, which most are; never written to."""


class Filter:
    """A topic filter and the clients that have subscribed to it.

    Attributes:
        text: the filter, without `$share` and the group.
        groups: shared subscriptions by name.
        alone: the set of this filter only; None until a topic has it.
        others: the sets with other filters; None until there is one.
    """

    __slots__ = ("_members", "alone", "groups", "others", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._members: _Members = ()  # a tuple while there is only one, since most filters belong to one client
        self.groups: dict[str, Group] = _NO_GROUPS
        self.alone: FilterSet | None = None
        self.others: WeakSet[FilterSet] | None = None

    @property
    def members(self) -> Iterable[tuple[Device, Options]]:
        """The clients, without those of shared subscriptions, and their options."""
        members = self._members
        if isinstance(members, dict):
            return members.items()
        return (members,) if members else ()

    def has(self, device: Device) -> bool:
        """Return whether a client is one of the members."""
        members = self._members
        return device in members if isinstance(members, dict) else len(members) == 2 and members[0] is device

    def add(self, device: Device, options: Options) -> None:
        """Add a member, or replace its options."""
        members = self._members
        if not isinstance(members, dict):
            if len(members) == 0 or members[0] is device:
                self._members = (device, options)
                return
            self._members = members = dict((members,))
        members[device] = options

    def discard(self, device: Device) -> None:
        """Remove a member."""
        members = self._members
        if isinstance(members, dict):
            del members[device]
        else:
            self._members = ()

    @property
    def sets(self) -> Iterator[FilterSet]:
        """The sets that have this filter."""
        if self.alone is not None:
            yield self.alone
        yield from self.others or ()

    def group(self, name: str) -> Group:
        """Return the shared subscription with this name; create it if needed."""
        if self.groups is _NO_GROUPS:
            self.groups = {}
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(f"$share/{name}/{self.text}")
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nobody has subscribed."""
        return not self._members and not self.groups

    @property
    def has_wildcard(self) -> bool:
        """Whether several topics can match."""
        return "+" in self.text or "#" in self.text

    def forget_deliveries(self) -> None:
        """Compute the deliveries again, since the subscribers have changed."""
        for one in self.sets:
            one.forget_deliveries()


class FilterSet:
    """All filters that match one topic, or several topics.

    Attributes:
        filters: the filters.
        is_stale: whether one of the filters was removed, or another one matches now.
    """

    __slots__ = ("__weakref__", "_deliveries", "filters", "is_stale")

    def __init__(self, filters: frozenset[Filter]) -> None:
        self.filters = tuple(filters)
        self.is_stale = False
        self._deliveries: list[Delivery] | None = None
        for one in filters:
            if len(filters) == 1:
                one.alone = self
            elif one.others is None:
                one.others = WeakSet((self,))
            else:
                one.others.add(self)

    def forget_deliveries(self) -> None:
        """See `Filter.forget_deliveries`."""
        self._deliveries = None

    @property
    def deliveries(self) -> list[Delivery]:
        """The clients that get each message, without shared subscriptions."""
        if self._deliveries is None:
            options: dict[Device, list[Options]] = {}
            for one in self.filters:
                for device, chosen in one.members:
                    options.setdefault(device, []).append(chosen)
            self._deliveries = [delivery(device, chosen) for device, chosen in options.items()]
        return self._deliveries

    @property
    def is_saved(self) -> bool:
        """Whether a message with QoS 1 or 2 waits in a session that is saved."""
        if any(one.qos and one.device.rows is not None for one in self.deliveries):
            return True
        return any(device.rows is not None for group in self.groups for device in group.members)

    def has(self, device: Device) -> bool:
        """Return whether a client gets the messages, alone or in a group."""
        for one in self.filters:
            if one.has(device) or any(device in group.members for group in one.groups.values()):
                return True
        return False

    @property
    def groups(self) -> Iterator[Group]:
        """The shared subscriptions; each message goes to one client of each."""
        for one in self.filters:
            yield from one.groups.values()

    @property
    def has_groups(self) -> bool:
        """Whether there are shared subscriptions."""
        for one in self.filters:  # noqa: SIM110  # asked for each batch, and `any` takes three times as long
            if one.groups:
                return True
        return False

    @property
    def is_shared_only(self) -> bool:
        """Whether there are only shared subscriptions."""
        return self.has_groups and not any(one.members for one in self.filters)

    @property
    def subscribers(self) -> int:
        """The number of clients and groups."""
        return len(self.deliveries) + sum(len(one.groups) for one in self.filters)


class FilterTable:
    """All filters of one hub."""

    def __init__(self) -> None:
        self.by_text: dict[str, Filter] = {}
        self._tree: FilterTree[Filter] = FilterTree()
        self._sets: WeakValueDictionary[frozenset[Filter], FilterSet] = WeakValueDictionary()

    def named(self, text: str) -> Filter:
        """Return the filter with this text; create it if needed."""
        found = self.by_text.get(text)
        if found is None:
            found = self.by_text[text] = Filter(text)
            self._tree.set(text, found)
        return found

    def remove(self, one: Filter) -> None:
        """Remove a filter without subscribers."""
        del self.by_text[one.text]
        self._tree.remove(one.text)
        for found in one.sets:
            found.is_stale = True

    def has_level(self, level: str) -> bool:
        """Return whether a filter begins with this level, which is no wildcard."""
        return self._tree.has_level(level)

    def match(self, name: bytes) -> FilterSet | None:
        """Return the filters that match a topic; None for none, and for a name that MQTT does not have."""
        text = mqtt_name(name)
        filters = frozenset(self._tree.match(text)) if text is not None else None
        if not filters:
            return None
        if len(filters) == 1:
            (one,) = filters
            return one.alone if one.alone is not None else FilterSet(filters)
        found = self._sets.get(filters)
        if found is None:
            found = self._sets[filters] = FilterSet(filters)
        return found


def mqtt_name(name: bytes) -> str | None:
    """Return the name of a topic as text; None when MQTT can't name it (MQTT 5 §4.7)."""
    if not name or len(name) > MAX_NAME_BYTES or b"+" in name or b"#" in name or b"\0" in name:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def split_shared(text: str) -> tuple[str | None, str] | None:
    """Split `$share/group/filter` into group and filter.

    Returns:
        The group is None for a filter that is not shared; the whole result for a malformed one.
    """
    if not text.startswith("$share/"):
        return (None, text) if text != "$share" else None
    _, _, rest = text.partition("/")
    group, slash, wanted = rest.partition("/")
    if not group or not slash or not wanted or "+" in group or "#" in group:
        return None
    return group, wanted
