"""Subscribers that may read a topic, for the setting `mqtt.acl = "deliver"`.

The access control list is asked once for each subscriber and topic, not for each message.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING
from weakref import ref

from smqrt.broker.mqtt.filters import Deliveries, Delivery

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device

CHECKS_PER_STEP = 20
"""Questions to the access control list at once; each takes some microseconds."""
MAX_REMEMBERED = 1_000_000
"""Readers of all topics that are remembered; those of other topics are computed for each batch."""
MAX_MEMBERS = 1000
"""Members of shared subscriptions that are remembered for a topic."""


class Readers:
    """The subscribers that may read one topic.

    Args:
        name: the name of the topic.
        source: its subscribers.
        version: the version of the rights, see `ReaderTable`.

    Attributes:
        chosen: those of `source` that may read it; None for all of them, which most topics have in common.
        version: see above.
    """

    __slots__ = ("_members", "_name", "_source", "chosen", "version")

    def __init__(self, name: bytes, source: Deliveries, version: int) -> None:
        self._name, self.version = name, version
        self._source = ref(source)  # so that they are freed when too many are kept, see `FilterTable.remembered`
        self.chosen: list[Delivery] | None = []
        self._members: dict[Device, bool] = {}

    @property
    def size(self) -> int:
        """The number of readers that no other topic has in common, and one for the topic."""
        return 1 + len(self.chosen or ())

    def is_of(self, source: Deliveries) -> bool:
        """Return whether these are the readers among certain subscribers."""
        return self._source() is source

    def has(self, device: Device) -> bool:
        """Return whether a member of a shared subscription may read the topic."""
        known = self._members.get(device)
        if known is None:
            if len(self._members) >= MAX_MEMBERS:
                self._members.clear()
            known = self._members[device] = device.may_read(self._name)
        return known


class ReaderTable:
    """The readers of all topics of a hub.

    Attributes:
        is_used: whether there is a subscriber whose messages have to be checked.
        version: grows when rights change; what was found before is computed again then.
    """

    __slots__ = ("_by_name", "_size", "is_used", "version")

    def __init__(self) -> None:
        self.is_used = False
        self.version = self._size = 0
        self._by_name: dict[bytes, Readers] = {}

    def of(self, name: bytes, source: Deliveries) -> Generator[None, None, Readers]:
        """Return the readers of a topic; compute them in portions, if subscribers or rights have changed.

        Args:
            name: the name of the topic.
            source: its subscribers.
        """
        version, known = self.version, self._by_name.get(name)
        if known is not None and known.is_of(source) and known.version == version:
            return known
        readers, chosen = Readers(name, source, version), list[Delivery]()
        for count, one in enumerate(source, 1):
            if one.device.may_read(name):
                chosen.append(one)
            if not count % CHECKS_PER_STEP:
                yield
        readers.chosen = None if len(chosen) == len(source) else chosen
        self._remember(name, readers)
        return readers

    def _remember(self, name: bytes, readers: Readers) -> None:
        self.forget(name)
        self._by_name[name] = readers
        self._size += readers.size
        while self._size > MAX_REMEMBERED and len(self._by_name) > 1:
            self.forget(next(iter(self._by_name)))

    def forget(self, name: bytes) -> None:
        """Forget a topic that has no subscribers any more."""
        known = self._by_name.pop(name, None)
        if known is not None:
            self._size -= known.size
