"""Topic filters of MQTT clients, and the deliveries of a topic.

Filters are looked up when a topic or a filter appears, not for each message. Topics with the same matching filters
share one `FilterSet`, so that memory does not grow with topics × subscribers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from smqrt.broker.mqtt.messages import packed_identifier
from smqrt.wire.mqtt.filter_tree import FilterTree

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device

MAX_NAME_BYTES = 0xFFFF
MEMBERS_PER_STEP = 200
"""Subscribers that are looked at at once."""


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
        no_local: whether a subscription leaves out the client's own messages.
        retain_as_published: whether the retain flag is kept.
        identifiers: the subscription identifiers, packed as properties.
        own: with `no_local`, the other subscriptions, which the client's own messages are for; None for none.
    """

    device: Device
    qos: int
    no_local: bool
    retain_as_published: bool
    identifiers: bytes
    own: Delivery | None = None


class Group:
    """The members of a shared subscription; each message goes to one of them, in turn.

    Args:
        text: `$share/group/filter`.

    Attributes:
        members: the options of each member.
        connected: the members that are connected.
    """

    __slots__ = ("_next", "connected", "members", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.members: dict[Device, Options] = {}
        self.connected: dict[Device, None] = {}
        self._next = 0

    @property
    def is_connected(self) -> bool:
        """Whether one of the members is connected."""
        return bool(self.connected)

    def note(self, device: Device) -> None:
        """Note whether a device is a member, and connected."""
        if device in self.members and device.client is not None:
            self.connected[device] = None
        else:
            self.connected.pop(device, None)

    def divide(self, frames: list[bytes]) -> list[tuple[Device, bytes]]:
        """Divide messages between the connected members, of which there is one at least, in turn as `choose` does.

        Args:
            frames: the messages.

        Returns:
            Members and their messages.
        """
        devices = list(self.connected)
        first, count = self._next % len(devices), len(devices)
        self._next = (first + len(frames) - 1) % count + 1
        parts = min(count, len(frames))
        return [(devices[(first + at) % count], b"".join(frames[at::count])) for at in range(parts)]

    def choose(self, may_read: Callable[[Device], bool]) -> Generator[None, None, Delivery | None]:
        """Return the next member that is connected; without one, the next member whose session is kept. In portions.

        Args:
            may_read: returns whether a member may get the message.
        """
        for candidates in (self.connected, self.members):
            devices = list(candidates)
            for at in range(len(devices)):
                index = (self._next + at) % len(devices)
                device = devices[index]
                options = self.members.get(device)  # None when it has left meanwhile
                if options is not None and may_read(device):
                    self._next = index + 1
                    return delivery(device, [options])
                if not (at + 1) % MEMBERS_PER_STEP:
                    yield
        return None


def delivery(device: Device, options: list[Options]) -> Delivery:
    """Return the overlapping subscriptions of one client as one [MQTT-3.3.4-2]."""
    others = [one for one in options if not one.no_local]
    has_no_local = len(others) < len(options)
    return Delivery(
        device,
        max(one.qos for one in options),
        has_no_local,
        any(one.retain_as_published for one in options),
        b"".join(packed_identifier(number) for number in sorted(one.identifier for one in options)),
        delivery(device, others) if has_no_local and others else None,
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

    @property
    def member_count(self) -> int:
        """The number of `members`."""
        members = self._members
        return len(members) if isinstance(members, dict) else bool(members)

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

    __slots__ = ("__weakref__", "_changes", "_deliveries", "filters", "is_stale")

    def __init__(self, filters: frozenset[Filter]) -> None:
        self.filters = tuple(filters)
        self.is_stale = False
        self._changes = 0
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
        self._changes += 1

    @property
    def known_deliveries(self) -> list[Delivery] | None:
        """The result of `deliveries`; None when the subscribers have changed since then."""
        return self._deliveries

    def deliveries(self) -> Generator[None, None, list[Delivery]]:
        """Return the clients that get each message, without shared subscriptions; compute them in portions."""
        if self._deliveries is not None:
            return self._deliveries
        changes = self._changes
        options: dict[Device, list[Options]] = {}
        found: list[Delivery] = []
        members = [member for one in self.filters for member in one.members]
        for count, (device, chosen) in enumerate(members, 1):
            options.setdefault(device, []).append(chosen)
            if not count % MEMBERS_PER_STEP:
                yield
        for count, (device, several) in enumerate(options.items(), 1):
            found.append(delivery(device, several))
            if not count % MEMBERS_PER_STEP:
                yield
        if changes == self._changes:
            self._deliveries = found
        return found

    @property
    def is_saved(self) -> bool:
        """Whether a message with QoS 1 or 2 waits in a session that is saved."""
        if self._deliveries is not None:
            if any(one.qos and one.device.rows is not None for one in self._deliveries):
                return True
        elif any(options.qos and device.rows is not None for one in self.filters for device, options in one.members):
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
        """The number of clients and groups; a client with several filters may count more than once for a moment."""
        known = self._deliveries
        clients = len(known) if known is not None else sum(one.member_count for one in self.filters)
        return clients + sum(len(one.groups) for one in self.filters)


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
