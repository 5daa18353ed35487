"""Registry of this process's hubs by key, also across a hot restart.

A key is the name of the application and the hub's own name, or its number in the order in which the application makes
its hubs. The hub with the same key in the next process, or after a restart of the application, gets the clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from weakref import WeakValueDictionary

from smqrt.auth.service import IdentityService
from smqrt.broker.broker import Broker
from smqrt.broker.sessions import Record
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process import current_process

log = logging.getLogger("smqrt")


class HubFile(Protocol):
    """A file of a hub that only one process may have open: its `persist` file, its journal."""

    def open(self) -> None:
        """Open it. Raises SmqrtError when that fails."""

    def close(self) -> None:
        """Write the last changes and close it; blocks."""


class RegisteredBroker(Broker):
    """A broker with a key and files.

    Attributes:
        key: see above.
        identities: checks clients by the server's users and rules; None if the hub does not use these.
    """

    key: str
    identities: IdentityService | None

    def open_files(self) -> None:
        """Open its files."""

    def close_files(self) -> None:
        """Close its files; blocks."""


class HubRegistry:
    """The hubs of this process, and what a new process of a hot restart knows about those of the old one.

    Attributes:
        is_waiting: whether the old process still has the files of the hubs.
        predecessors: the ids and epochs of the old process in clusters: this one opens no links to it.
        has_left: whether the old process, if there is one, has left its clusters.
        names: the topic names of hubs of the old process, by key; a new hub needs them before it creates topics.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.predecessors: frozenset[tuple[bytes, int]] = frozenset()
        self.has_left = True
        self._when_left: list[Callable[[], object]] = []
        self._hubs: WeakValueDictionary[str, RegisteredBroker] = WeakValueDictionary()
        self.names: dict[str, Record] = {}
        self._without_application = 0

    def hubs(self) -> Iterator[RegisteredBroker]:
        """Return an iterator over the open hubs, in the order they were made."""
        return iter(list(self._hubs.values()))

    def find(self, key: str) -> RegisteredBroker | None:
        """Return the open hub with that key."""
        return self._hubs.get(key)

    def key_of(self, name: str | None) -> str:
        """Return the key of a hub that is being made.

        Raises:
            ArgumentError: `name` is the name of another one of this application.
        """
        app = current_process.current_app.get()
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
        """Free the number of the last hub, which could not be made.

        In another process it may succeed, and later hubs need the same keys there.
        """
        app = current_process.current_app.get()
        if app and key.endswith(f"/{app.hubs_made}"):
            app.hubs_made -= 1

    def names_for(self, key: str) -> Record | None:
        """Return the names of the old process's hub with that key; None without one."""
        return self.names.get(key)

    def add(self, broker: RegisteredBroker) -> None:
        """Register a hub."""
        self._hubs[broker.key] = broker

    def remove(self, broker: RegisteredBroker) -> None:
        """Remove a closed hub."""
        if self._hubs.get(broker.key) is broker:
            del self._hubs[broker.key]

    # ---- in the new process of a hot restart

    def expect(self, names: dict[str, Record], nodes: Iterable[tuple[bytes, int]]) -> None:
        """Expect the hubs of the old process; until `end`, it has their files open.

        Args:
            names: by key, see the class.
            nodes: see `predecessors`.
        """
        self.names, self.predecessors = names, frozenset(nodes)
        self.is_waiting, self.has_left = True, False

    def when_left(self, call: Callable[[], object]) -> None:
        """Have `call` called when the old process has left its clusters."""
        self._when_left.append(call)

    def left(self) -> None:
        """Note that the old process has left its clusters, or is gone. A second call does nothing."""
        self.has_left = True
        calls, self._when_left = self._when_left, []
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("a part of a cluster could not start")

    def end(self) -> None:
        """End the restart; hubs without a counterpart in the old process open their files."""
        taken, self.names, self.is_waiting = self.names, {}, False
        for broker in self.hubs():
            if broker.key not in taken:
                try:
                    broker.open_files()
                except SmqrtError as error:
                    log.error("a hub continues without its file: %s", error)


hub_registry = HubRegistry()
"""The registry of this process."""
