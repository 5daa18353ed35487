"""Messages for shared subscriptions that only other nodes have, in portions when these are many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.leaving_nodes import AbsentNodes
from smqrt.cluster.mqtt_filters import RemoteFilters, RemoteGroup
from smqrt.cluster.mqtt_streams import MqttStreams
from smqrt.cluster.state import ClusterState
from smqrt.wire import smq

GROUPS_AT_ONCE, PORTIONS_AT_ONCE = 64, 8
"""Shared subscriptions of a topic that get a message at once, and portions of the search for them at once: 0.8 ms."""
MAX_REMEMBERED = 200_000
"""Shared subscriptions of topics with more that are remembered."""
MAX_WAITING_BYTES, BATCH_BYTES = 64 << 20, 300
"""Memory of the batches that wait, when publishers are faster; further ones are lost and counted."""


class WantedGroup(NamedTuple):
    """A shared subscription that gets the messages to a topic.

    Attributes:
        group: the shared subscription.
        is_lost: whether only lost nodes have it.
    """

    group: RemoteGroup
    is_lost: bool


class GroupQueue:
    """Sends batches to shared subscriptions of other nodes: to a few at once, to many in portions and in order.

    Publishers with QoS 1 and 2 wait meanwhile, as for a link that is full; see `MqttStreams.must_wait`.

    Args:
        state: the state that the parts of the cluster share.
        filters: the filters of the connected nodes.
        lost: the lost nodes.
        streams: numbered messages.
        send: `(group, topic name, batch)` sends a batch to one shared subscription.
    """

    def __init__(
        self,
        state: ClusterState,
        filters: RemoteFilters,
        lost: AbsentNodes,
        streams: MqttStreams,
        send: Callable[[WantedGroup, bytes, bytes], object],
    ) -> None:
        self._state, self._filters, self._lost, self._streams, self._send = state, filters, lost, streams, send
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_sending = False
        self._known: dict[bytes, list[WantedGroup]] = {}
        self._known_count = self._known_version = 0

    @property
    def is_delayed(self) -> bool:
        """Whether batches wait."""
        return self._is_sending

    # ---- shared subscriptions of a topic

    @property
    def _version(self) -> int:
        return self._filters.group_changes + self._lost.filters.group_changes

    def find(self, name: bytes) -> list[WantedGroup] | None:
        """Return the shared subscriptions of a topic; None if there are many, or if it takes long to find them."""
        known = self._remembered(name)
        if known is not None:
            return known if len(known) <= GROUPS_AT_ONCE else None
        found, portions = list[WantedGroup](), 0
        for one in self._search(name):
            if one is not None:
                found.append(one)
            else:
                portions += 1
            if portions > PORTIONS_AT_ONCE or len(found) > GROUPS_AT_ONCE:
                return None
        return found

    def _search(self, name: bytes) -> Iterator[WantedGroup | None]:
        """Yield the shared subscriptions of a topic, and None after each portion of the work."""
        for group in self._filters.groups(name):
            yield None if group is None else WantedGroup(group, False)
        for group in self._lost.filters.groups(name):
            if group is None:
                yield None
            elif self._filters.group(group.text) is None:
                yield WantedGroup(group, True)

    def _remembered(self, name: bytes) -> list[WantedGroup] | None:
        """Return the last result of `_find_all`; None when shared subscriptions have changed since then."""
        if self._known_version != self._version:
            self._known.clear()
            self._known_version, self._known_count = self._version, 0
        return self._known.get(name)

    def _find_all(self, name: bytes) -> Generator[None, None, list[WantedGroup]]:
        """Return the shared subscriptions of a topic, found in portions, and remember them."""
        known = self._remembered(name)
        if known is not None:
            return known
        found, version = list[WantedGroup](), self._version
        for count, one in enumerate(self._search(name), 1):
            if one is not None:
                found.append(one)
            if one is None or not count % GROUPS_AT_ONCE:
                yield
        if version == self._known_version == self._version:
            if self._known_count > MAX_REMEMBERED:
                self._known.clear()
                self._known_count = 0
            self._known[name] = found
            self._known_count += len(found) + 1
        return found

    # ---- messages

    def put(self, found: list[WantedGroup] | None, name: bytes, batch: bytes) -> None:
        """Send a batch, or let it wait.

        Args:
            found: the result of `find`.
            name: the name of the topic.
            batch: the messages.
        """
        if found is None:
            found = self.find(name) if name in self._known else None
        if found is not None and not self._is_sending:
            for one in found:
                self._send(one, name, batch)
            return
        devices = self._state.broker.devices
        ledger = devices.ledger if devices is not None else None
        if isinstance(batch, MqttBatch) and batch.qos == 2 and ledger is not None and ledger.waits:
            mqtt_batch = batch
            self._streams.origin_of(mqtt_batch)

            def forward() -> None:
                mqtt_batch.received = None  # it is saved
                self._wait(name, mqtt_batch)

            ledger.forward(mqtt_batch, forward)
        else:
            self._wait(name, batch)

    def _wait(self, name: bytes, batch: bytes) -> None:
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._state.broker.stats.drop(Drop.OVER_GLOBAL_BUDGET, smq.count_frames(batch))
            return
        self._waiting.append((name, batch))
        self._waiting_bytes += _memory_of(batch)
        if not self._is_sending:
            self._is_sending = True
            run_in_background(self._send_first())
        if isinstance(batch, MqttBatch) and batch.qos:
            self._streams.delay(self)

    def _send_first(self) -> Iterator[None]:
        """Send the batch that has waited longest; the next one follows other work."""
        name, batch = self._waiting.popleft()
        self._waiting_bytes -= _memory_of(batch)
        try:
            for one in (yield from self._find_all(name)):
                self._send(one, name, batch)
                yield
        finally:  # also after an error
            self._is_sending = bool(self._waiting)
            if self._waiting:
                run_in_background(self._send_first())
            else:
                self._streams.relieve()


def _memory_of(batch: bytes) -> int:
    """Return the memory of a batch, approximately; the frame of a large message does not have the payload."""
    large = batch.large if isinstance(batch, MqttBatch) else None
    return len(batch) + len(large or b"") + BATCH_BYTES
