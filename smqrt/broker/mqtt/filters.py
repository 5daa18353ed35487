"""Topic filters of MQTT clients, and the deliveries of a topic.

Filters are looked up when a topic or a filter appears, not for each message. Topics with the same matching filters
share one `FilterSet`, so that memory does not grow with topics × subscribers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary, ref

from smqrt.broker.mqtt.messages import packed_identifier
from smqrt.wire.mqtt.filter_tree import FilterTree, matches

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device

MAX_NAME_BYTES = 0xFFFF
MEMBERS_PER_STEP = 200
"""Subscribers that are looked at at once."""
MAX_FILTERS_AT_ONCE, MAX_PORTIONS_AT_ONCE = 16, 8
"""Filters of a topic that are kept, and portions of the search for them at once; beyond, see `WideSet`."""
SMALL_DELIVERIES = 8
"""Subscribers of a topic that do not count for `MAX_REMEMBERED`."""
MAX_LOOKED_AT = 1000
"""Subscribers that are looked at for each message, to find out whether one is saved."""
MAX_REMEMBERED = 200_000
"""Deliveries that are kept, of about 100 bytes; the oldest are forgotten, and found again for the next message."""


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

    def divide(self, messages: int) -> list[tuple[Device, slice]]:
        """Divide messages between the connected members, of which there is one at least, in turn as `choose` does.

        Args:
            messages: the number of messages.

        Returns:
            Members and their messages.
        """
        devices = list(self.connected)
        first, count = self._next % len(devices), len(devices)
        self._next = (first + messages - 1) % count + 1
        return [(devices[(first + at) % count], slice(at, None, count)) for at in range(min(count, messages))]

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
        changes: how often the members or groups have changed, see `FilterTable.changed`.
        is_removed: whether it was removed from the table.
    """

    __slots__ = ("_members", "alone", "changes", "groups", "is_removed", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._members: _Members = ()  # a tuple while there is only one, since most filters belong to one client
        self.groups: dict[str, Group] = _NO_GROUPS
        self.alone: FilterSet | None = None
        self.changes = 0
        self.is_removed = False

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


class Deliveries(list[Delivery]):
    """The clients that get the messages of a topic. A class of its own has weak references."""

    __slots__ = ("__weakref__",)


class FilterSet:
    """All filters that match one topic, or several topics.

    Attributes:
        filters: the filters.
        is_wide: whether there are too many filters to look for them at once, see `WideSet`.
    """

    __slots__ = ("__weakref__", "_changes", "_deliveries", "_table", "_version", "filters")
    is_wide = False

    def __init__(self, table: FilterTable, filters: Iterable[Filter] = ()) -> None:
        self._table, self.filters = table, tuple(filters)
        self._version = self._changes = -1
        self._deliveries: Deliveries | None = None

    @property
    def is_stale(self) -> bool:
        """Whether one of the filters was removed."""
        return any(one.is_removed for one in self.filters)

    @property
    def known_deliveries(self) -> Deliveries | None:
        """The result of `deliveries`; None when the subscribers have changed since then."""
        if self._version != self._table.version and not self._is_unchanged():
            self._deliveries = None
        return self._deliveries

    def _is_unchanged(self) -> bool:
        """Return whether the subscribers are the same as when `deliveries` has found them."""
        if sum([one.changes for one in self.filters]) != self._changes:
            return False
        self._version = self._table.version
        return True

    def deliveries(self) -> Generator[None, None, Deliveries]:
        """Return the clients that get each message, without shared subscriptions; find them in portions."""
        if (known := self.known_deliveries) is not None:
            return known
        changes = sum([one.changes for one in self.filters])
        found = yield from merged(member for one in self.filters for member in list(one.members))
        if changes == sum([one.changes for one in self.filters]):
            self._version, self._changes = self._table.version, changes
            self.remember(found)
        return found

    def remember(self, found: Deliveries, groups: int = 0) -> None:
        """Keep the result of `deliveries`, and this number of groups with it."""
        self._deliveries = found
        if len(found) + groups > SMALL_DELIVERIES:
            self._table.remembered(self, found, len(found) + groups)

    def checked(self) -> None:
        """Note that a removed filter was none of these, see `is_stale`."""

    def has_found(self, found: Deliveries | None) -> bool:
        """Return whether this is the last result of `deliveries`."""
        return found is not None and self._deliveries is found

    def forget(self) -> None:
        """Free the memory of the result of `deliveries`."""
        self._deliveries = None

    @property
    def is_saved(self) -> bool:
        """Whether a message with QoS 1 or 2 waits in a session that is saved; true if that takes long to find out."""
        known = self.known_deliveries
        qos_of = (
            ((one.device, one.qos) for one in known)
            if known is not None
            else ((device, options.qos) for one in self.filters for device, options in one.members)
        )
        members = ((device, 1) for group in self.groups for device in group.members)
        for count, (device, qos) in enumerate(chain(qos_of, members)):
            if (qos and device.rows is not None) or count >= MAX_LOOKED_AT:
                return True
        return False

    def has(self, device: Device) -> bool:
        """Return whether a client gets the messages, alone or in a group."""
        for one in self.filters:
            if one.has(device) or any(device in group.members for group in one.groups.values()):
                return True
        return False

    @property
    def groups(self) -> list[Group]:
        """The shared subscriptions; each message goes to one client of each."""
        found: list[Group] = []
        for one in self.filters:
            if one.groups:
                found += one.groups.values()
        return found

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
        known = self.known_deliveries
        clients = len(known) if known is not None else sum(one.member_count for one in self.filters)
        return clients + sum(len(one.groups) for one in self.filters)


class WideSet(FilterSet):
    """The filters that match one topic, when there are many.

    They are not kept, since each topic may have others. They are looked for when a message is delivered, in portions,
    and what was found is valid until a client subscribes or unsubscribes.

    Args:
        table: the filters of the hub.
        name: the name of the topic.
    """

    __slots__ = ("_groups", "_name", "_removals")
    is_wide = True

    def __init__(self, table: FilterTable, name: str) -> None:
        super().__init__(table)
        self._name, self._removals = name, table.removals
        self._groups: list[Group] | None = None

    @property
    def is_stale(self) -> bool:
        """Whether a filter was removed, perhaps one of these."""
        return self._removals != self._table.removals

    def checked(self) -> None:
        """See `FilterSet.checked`."""
        self._removals = self._table.removals

    def _is_unchanged(self) -> bool:
        self._groups = None
        return False

    def forget(self) -> None:
        """See `FilterSet.forget`."""
        self._deliveries = self._groups = None

    def deliveries(self) -> Generator[None, None, Deliveries]:
        """See `FilterSet.deliveries`."""
        if (known := self.known_deliveries) is not None:
            return known
        version, filters = self._table.version, list[Filter]()
        for one in self._table.search(self._name):
            if one is None:
                yield
            else:
                filters.append(one)
        found = yield from merged(member for one in filters for member in list(one.members))
        self._groups = [group for one in filters for group in one.groups.values()]
        self._version = self._table.version if version == self._table.version else -1
        self.remember(found, len(self._groups))
        return found

    @property
    def is_saved(self) -> bool:
        """See `FilterSet.is_saved`; true while that is unknown."""
        return self.known_deliveries is None or super().is_saved

    def has(self, device: Device) -> bool:
        """See `FilterSet.has`."""
        shared = (split_shared(text) for text in device.subscriptions)
        return any(found is not None and matches(found[1], self._name) for found in shared)

    @property
    def groups(self) -> list[Group]:
        """See `FilterSet.groups`: those that `deliveries` has found."""
        return self._groups or []

    @property
    def has_groups(self) -> bool:
        """See `FilterSet.has_groups`; true while that is unknown."""
        return self._groups is None or bool(self._groups)

    @property
    def is_shared_only(self) -> bool:
        """See `FilterSet.is_shared_only`; false while that is unknown."""
        known = self.known_deliveries
        return known is not None and not known and self.has_groups

    @property
    def subscribers(self) -> int:
        """See `FilterSet.subscribers`; 1 while the number is unknown."""
        known = self.known_deliveries
        return 1 if known is None else max(len(known) + len(self._groups or ()), 1)


def merged(members: Iterable[tuple[Device, Options]]) -> Generator[None, None, Deliveries]:
    """Return the subscriptions by client, in portions: a client may have many that overlap."""
    options: dict[Device, list[Options]] = {}
    for count, (device, chosen) in enumerate(members, 1):
        options.setdefault(device, []).append(chosen)
        if not count % MEMBERS_PER_STEP:
            yield
    found, work = Deliveries(), 0
    for device, several in options.items():
        found.append(delivery(device, several))
        work += len(several)
        if work >= MEMBERS_PER_STEP:
            work = 0
            yield
    return found


class FilterTable:
    """All filters of one hub.

    Attributes:
        by_text: the filters by text.
        version: grows when a client subscribes or unsubscribes.
        removals: the number of filters that were removed.
    """

    def __init__(self) -> None:
        self.by_text: dict[str, Filter] = {}
        self.version = self.removals = 0
        self._tree: FilterTree[Filter] = FilterTree()
        self._sets: WeakValueDictionary[frozenset[Filter], FilterSet] = WeakValueDictionary()
        self._remembered: deque[tuple[ref[FilterSet], ref[Deliveries], int]] = deque()
        self._remembered_count = 0

    def named(self, text: str) -> Filter:
        """Return the filter with this text; create it if needed."""
        found = self.by_text.get(text)
        if found is None:
            found = self.by_text[text] = Filter(text)
            self._tree.set(text, found)
            self.version += 1
        return found

    def remove(self, one: Filter) -> None:
        """Remove a filter without subscribers."""
        del self.by_text[one.text]
        self._tree.remove(one.text)
        one.is_removed = True
        self.removals += 1
        self.changed(one)

    def changed(self, one: Filter) -> None:
        """Find the deliveries of a filter again, since its subscribers have changed."""
        one.changes += 1
        self.version += 1
        if one.alone is not None:
            one.alone.forget()

    def remembered(self, one: FilterSet, found: Deliveries, count: int) -> None:
        """Limit the deliveries that are kept, without those of small sets: each topic may have others."""
        self._remembered.append((ref(one), ref(found), count))
        self._remembered_count += count
        while self._remembered_count > MAX_REMEMBERED and len(self._remembered) > 1:
            oldest_set, oldest, size = self._remembered.popleft()
            self._remembered_count -= size
            known = oldest_set()
            if known is not None and known.has_found(oldest()):
                known.forget()

    def group(self, text: str) -> Group | None:
        """Return the shared subscription with the text `$share/group/filter`, if there is one."""
        name, wanted = split_shared(text) or (None, "")
        found = self.by_text.get(wanted)
        return found.groups.get(name) if found is not None and name is not None else None

    def has_level(self, level: str) -> bool:
        """Return whether a filter begins with this level, which is no wildcard."""
        return self._tree.has_level(level)

    def search(self, name: str) -> Iterator[Filter | None]:
        """Yield the filters that match a topic, and None after each portion of the work."""
        return self._tree.search(name)

    def match(self, name: bytes) -> FilterSet | None:
        """Return the filters that match a topic; None for none, and for a name that MQTT does not have.

        When there are many filters, or many that begin like it, the result is a `WideSet`, perhaps an empty one.
        """
        text = mqtt_name(name)
        if text is None:
            return None
        found, portions = list[Filter](), 0
        for one in self._tree.search(text):
            if one is not None:
                found.append(one)
            else:
                portions += 1
            if portions > MAX_PORTIONS_AT_ONCE or len(found) > MAX_FILTERS_AT_ONCE:
                return WideSet(self, text)
        if len(found) == 1:
            (single,) = found
            if single.alone is None:
                single.alone = FilterSet(self, found)
            return single.alone
        return self._set_of(frozenset(found)) if found else None

    def _set_of(self, filters: frozenset[Filter]) -> FilterSet:
        found = self._sets.get(filters)
        if found is None:
            found = self._sets[filters] = FilterSet(self, filters)
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
