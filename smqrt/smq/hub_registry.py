"""Succession of hubs: hubs by their keys, and what waits for the hub of a key.

A key is the name of the application and the hub's own name, or its number in the order in which the application makes
its hubs. So the hub that an application makes in the next process, or when it starts again in this one, is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from weakref import WeakValueDictionary

from smqrt.auth.service import IdentityService
from smqrt.broker.broker import Broker
from smqrt.broker.snapshot import Record
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process import current_application

log = logging.getLogger("smqrt")


class HubFile(Protocol):
    """A file of a hub that one process only may have open: the names it keeps, its journal."""

    def open(self) -> None:
        """Open it. Raises SmqrtError when that can't be."""

    def close(self) -> None:
        """Write it to its end and let go of it; blocks."""


class SucceedingBroker(Broker):
    """A broker with a key and files.

    Attributes:
        key: see above.
        identities: who may come in; None for whoever comes.
    """

    key: str
    identities: IdentityService | None

    def open_files(self) -> None:
        """Open its files."""

    def close_files(self) -> None:
        """Close its files; blocks."""


class Succession:
    """The hubs of this process, and those of the process before that they go on for.

    Attributes:
        is_waiting: another process has the files of the hubs still.
        predecessors: the ids and epochs of that process in clusters: this one is to have no links to it.
        has_left: whether that process, if there is one, has left its clusters.
    """

    def __init__(self) -> None:
        # By key: what the hub that goes on for another one has to know before its application makes a topic.
        self.is_waiting = False
        self.predecessors: frozenset[tuple[bytes, int]] = frozenset()
        self.has_left = True
        self._when_left: list[Callable[[], object]] = []
        self._hubs: WeakValueDictionary[str, SucceedingBroker] = WeakValueDictionary()
        self.names: dict[str, Record] = {}
        self._without_application = 0

    def hubs(self) -> Iterator[SucceedingBroker]:
        """Every hub that is open, in the order they were made."""
        return iter(list(self._hubs.values()))

    def find(self, key: str) -> SucceedingBroker | None:
        """The open hub with that key."""
        return self._hubs.get(key)

    def key_of(self, name: str | None) -> str:
        """The key of a hub that is being made.

        Raises:
            ArgumentError: `name` is the name of another one of this application.
        """
        app = current_application.current_app.get()
        prefix = f"{app.name}{'!' if app.is_internal else ''}/" if app else "-/"
        if name is not None:
            if prefix + name in self._hubs:
                raise ArgumentError(f"name: {name!r} is the name of another hub of this application; choose another")
            return prefix + name
        while True:
            if app:
                app.hubs_made += 1
            else:
                self._without_application += 1
            key = f"{prefix}{app.hubs_made if app else self._without_application}"
            if key not in self._hubs:
                return key

    def give_back(self, key: str) -> None:
        """The hub with that key, the last one, could not be made: its number is the next one's. In another process it
        could perhaps be made, and the hubs behind it are to have the same keys there.
        """
        app = current_application.current_app.get()
        if app and key.endswith(f"/{app.hubs_made}"):
            app.hubs_made -= 1

    def names_for(self, key: str) -> Record | None:
        """The names of the hub that this one goes on for; None for a new one."""
        return self.names.get(key)

    def add(self, broker: SucceedingBroker) -> None:
        """List a hub."""
        self._hubs[broker.key] = broker

    def remove(self, broker: SucceedingBroker) -> None:
        """A hub is closed."""
        if self._hubs.get(broker.key) is broker:
            del self._hubs[broker.key]

    # ---- in the process that takes over

    def expect(self, names: dict[str, Record], nodes: Iterable[tuple[bytes, int]]) -> None:
        """Hubs with these keys will be taken over; their files are another process's until then."""
        self.names, self.predecessors = names, frozenset(nodes)
        self.is_waiting, self.has_left = True, False

    def when_left(self, call: Callable[[], object]) -> None:
        """Call when the other process has left its clusters."""
        self._when_left.append(call)

    def left(self) -> None:
        """The other process has left its clusters, or is gone. A second call does nothing."""
        self.has_left = True
        calls, self._when_left = self._when_left, []
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("a part of a cluster could not begin")

    def end(self) -> None:
        """Nothing is waited for any more; hubs that go on for none open their files."""
        taken, self.names, self.is_waiting = self.names, {}, False
        for broker in self.hubs():
            if broker.key not in taken:
                try:
                    broker.open_files()
                except SmqrtError as error:
                    log.error("a hub goes on without its file: %s", error)


succession = Succession()
"""Of this process."""
