"""The end of a served journal, which its hub tells as it grows: a stream looks at it in each trigger without asking."""

from __future__ import annotations

import copy
import threading
from typing import Any

from smqrt.errors import JournalError
from smqrt.journal.remote import MOST_WAIT_S, RemoteJournal

PACE_S = 0.05
"""Between two requests while the journal grows: a fraction of the shortest useful trigger, and at most 20 requests a
second for the hub, of some 120 µs."""


class Follower:
    """Keeps one request open at the hub, on a connection and in a thread of its own.

    Copies that go to other processes ask for themselves.

    Args:
        journal: what is followed.
    """

    def __init__(self, journal: RemoteJournal) -> None:
        self._journal = journal
        self._thread: threading.Thread | None = None
        self._known: dict[str, int] = {}
        self._error: JournalError | None = None
        self._stopped = threading.Event()

    def __reduce__(self) -> Any:
        return Follower, (self._journal,)

    def end(self) -> dict[str, int]:
        """Returns, by node, the number of the next row, as the hub told it last; the first time it is asked.

        Raises:
            JournalError: the hub is away for too long, or refuses.
        """
        if self._thread is None:
            self._begin()
        elif error := self._error:
            self._thread = self._error = None  # who asks again begins again
            raise error
        return dict(self._known)

    def stop(self) -> None:
        """Ask no more. The request that is open ends by itself, within `MOST_WAIT_S`."""
        self._stopped.set()

    def _begin(self) -> None:
        self._known = self._journal.end()
        self._thread = threading.Thread(target=self._follow, args=(copy.copy(self._journal),), daemon=True)
        self._thread.start()

    def _follow(self, journal: RemoteJournal) -> None:
        while not self._stopped.is_set():
            try:
                self._known = journal.wait(self._known, MOST_WAIT_S)
            except JournalError as error:
                self._error = error
                break
            self._stopped.wait(PACE_S)
        journal.close()
