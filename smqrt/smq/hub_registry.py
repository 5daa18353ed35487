"""Registry of this process's hubs by key, even across a hot restart.

A key consists of the names of the application and of the hub. A hub without a name has its number in order of creation.
The hub with the same key in the next process, or after a restart of the application, gets the clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from weakref import WeakValueDictionary

from gevent.event import Event

from smqrt.auth.service import IdentityService
from smqrt.broker.broker import Broker
from smqrt.broker.sessions import Record
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process import current_process

log = logging.getLogger("smqrt")


class HubFile(Protocol):
    """A file of a hub that only one process may open at a time: its `persist` file, its journal."""

    def open(self) -> None:
        """Open the file. Raises SmqrtError when that fails."""

    def close(self) -> None:
        """Write the last changes and close the file; blocks."""


class RegisteredBroker(Broker):
    """A broker with a key and files.

    Attributes:
        key: see `HubRegistry.key_of`.
        identities: checks clients by the server's users and rules; None if the hub does not use them.
    """

    key: str
    identities: IdentityService | None

    def open_files(self) -> None:
        """Open the files of the hub."""

    def close_files(self) -> None:
        """Close the files of the hub; blocks."""


class HubRegistry:
    """The hubs of this process; in a hot restart, also data about the hubs of the old process.

    Attributes:
        is_waiting: whether the old process still has the files of the hubs open.
        predecessors: the ids and epochs of the old process in clusters; this process opens no links to it.
        has_left: whether the old process, if there is one, has left its clusters.
        old_process_ended: set unless there is an old process that has not ended.
        names: the topic names of hubs of the old process, by key; a new hub needs them before it creates topics.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.predecessors: frozenset[tuple[bytes, int]] = frozenset()
        self.has_left = True
        self.old_process_ended = Event()
        self.old_process_ended.set()
        self._when_left: list[Callable[[], object]] = []
        self._hubs: WeakValueDictionary[str, RegisteredBroker] = WeakValueDictionary()
        self.names: dict[str, Record] = {}
        self._without_application = 0

    def hubs(self) -> Iterator[RegisteredBroker]:
        """Return an iterator over the open hubs, in order of creation."""
        return iter(list(self._hubs.values()))

    def find(self, key: str) -> RegisteredBroker | None:
        """Return the open hub with that key."""
        return self._hubs.get(key)

    def key_of(self, name: str | None) -> str:
        """Return the key of a hub that is being created.

        Raises:
            ArgumentError: another hub of this application has the `name`.
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
            if key not in self._hubs:  # a hub may have such a number as its name
                return key

    def free_key(self, key: str) -> None:
        """Free the number of the last hub, whose creation failed.

        In another process it may succeed, and later hubs must have the same keys there.
        """
        app = current_process.current_app.get()
        if app and key.endswith(f"/{app.hubs_made}"):
            app.hubs_made -= 1

    def names_for(self, key: str) -> Record | None:
        """Return the topic names of the old process's hub with that key; None without such a hub."""
        return self.names.get(key)

    def add(self, broker: RegisteredBroker) -> None:
        """Register a hub."""
        self._hubs[broker.key] = broker

    def remove(self, broker: RegisteredBroker) -> None:
        """Remove a closed hub."""
        if self._hubs.get(broker.key) is broker:  # the key may belong to a newer hub
            del self._hubs[broker.key]

    # ---- in the new process of a hot restart

    def expect(self, names: dict[str, Record], nodes: Iterable[tuple[bytes, int]]) -> None:
        """Start a hot restart: until `end`, the old process has the files of its hubs open.

        Args:
            names: topic names by key, see the class.
            nodes: see `predecessors`.
        """
        self.names, self.predecessors = names, frozenset(nodes)
        self.is_waiting, self.has_left = True, False
        self.old_process_ended.clear()

    def when_left(self, call: Callable[[], object]) -> None:
        """Register a function to call when the old process has left its clusters."""
        self._when_left.append(call)

    def left(self) -> None:
        """Record that the old process has left its clusters or has ended. A second call does nothing."""
        self.has_left = True
        calls, self._when_left = self._when_left, []
        for call in calls:
            try:
                call()
            except Exception:  # the other clusters must start
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
