"""The ends of the nodes of a served journal: the question that readers ask all the time, answered from memory.

The hub knows its own node. Other hubs of the folder are looked at in a thread, at most a few times a second for all who
ask. Who waits for more rows costs a comparison in a tick that all share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import gevent
from gevent.event import AsyncResult, Event

from smqrt.errors import JournalError
from smqrt.journal import standing
from smqrt.net.workers import in_thread

OTHERS_S = 0.2
"""So old may be what is known of other hubs' nodes, seconds."""
TICK_S = 0.02
"""How often it is looked whether there is more for those who wait, seconds."""
MOST_WAITING = 1000
"""Who would be one more is answered at once."""


class Written(Protocol):
    """A journal that a hub writes, or only serves."""

    @property
    def path(self) -> Path:
        """Its folder."""

    def end(self) -> Mapping[str, int]:
        """Where the nodes end that this hub writes."""


class Ends:
    """Where each node of a journal ends.

    Args:
        journal: the journal.
        is_open: whether it is served; when it is no more, nobody waits for it.
    """

    def __init__(self, journal: Written, is_open: Callable[[], bool]) -> None:
        self._journal, self._is_open = journal, is_open
        self._others: Mapping[str, int] = {}
        self._looked_s = float("-inf")
        self._looking: AsyncResult[None] | None = None
        self._more = Event()
        self._waiting, self._watching = 0, False

    def now(self) -> dict[str, int]:
        """Returns, by node, the number of the next row.

        Raises:
            JournalError: the journal can't be read.
        """
        own = self._journal.end()
        if not own or time.monotonic() - self._looked_s > OTHERS_S:
            self._look(own)
        return {**self._others, **self._journal.end()}

    def _look(self, own: Mapping[str, int]) -> None:
        """Looks at the disk, or waits for who does so already."""
        if self._looking is None:
            looking = self._looking = AsyncResult()
            try:
                self._others = in_thread(_looked, self._journal.path, dict(own))
                self._looked_s = time.monotonic()
                looking.set()
            except BaseException as error:
                looking.set_exception(error if isinstance(error, Exception) else JournalError("the hub ends."))
                raise
            finally:
                self._looking = None
        else:
            self._looking.get()
            if not own:  # its answer may be older than the question
                self._look(own)

    def after(self, known: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        """Returns as `now`, when there are more rows than `known` says, the time is over, or the journal is closed."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.now()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._waiting >= MOST_WAITING or not self._is_open() or _is_more(found, known):
                return found
            self._wait(found, left_s)

    def _wait(self, seen: Mapping[str, int], timeout_s: float) -> None:
        self._waiting += 1
        if not self._watching:
            self._watching = True
            gevent.spawn(self._watch, seen)
        try:
            self._more.wait(timeout_s)
        finally:
            self._waiting -= 1

    def _watch(self, seen: Mapping[str, int]) -> None:
        """Wakes those who wait when there is more; ends with the last of them."""
        while self._waiting:
            gevent.sleep(TICK_S)
            try:
                is_more = not self._is_open() or _is_more(self.now(), seen)
            except Exception:
                is_more = True  # each gets the error by itself
            if is_more:
                break
        woken, self._more, self._watching = self._more, Event(), False
        woken.set()


def _is_more(found: Mapping[str, int], known: Mapping[str, int]) -> bool:
    return any(seq > known.get(node, -1) for node, seq in found.items())


def _looked(journal: Path, known: dict[str, int]) -> dict[str, int]:
    return standing.ends(journal, known)
