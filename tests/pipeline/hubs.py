"""A real hub with a journal, for pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smqrt.journal import commit, files
from smqrt.journal.reader import Journal
from tests.conftest import Served
from tests.support.waiting import wait_until

APPLICATION = "from smqrt import hub\n\nsmq = hub.create(journal=True)\n"
READY_S = 10


class JournalingHub:
    """`smqrt serve` with an application whose broker keeps a journal.

    Args:
        folder: of the application; made here.

    Attributes:
        journal: the journal's folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / ".preload.py").write_text(APPLICATION)
        self._folder, self.journal = folder, folder / ".journal"
        self._start()

    def _start(self, port: int = 0) -> None:
        self.served = Served(self._folder, "--port", str(port))
        self.port = self.served.port

    def restart(self) -> None:
        """Stop the hub and starts it where it was."""
        self.stop()
        self._start(self.port)

    def stop(self) -> None:
        self.served.stop()

    @property
    def announced(self) -> dict[str, str]:
        """Address and token, as the hub leaves them for pipelines."""
        found: dict[str, str] = json.loads((self.journal / "hub.json").read_text())
        return found

    def publish(self, topic: str, first: int, count: int) -> None:
        """Publish messages whose payloads are the numbers from `first` on; returns when the journal has them."""
        rows = [(topic.encode(), None, str(number).encode()) for number in range(first, first + count)]
        commit.publish(files.HubAddress.of(self.journal), rows)
        wait_until(lambda: (first + count - 1) in self.numbers(topic), "what was published is in the journal")

    def rows(self, *topics: str) -> list[Any]:
        """Return what the journal has, or what it has of some topics."""
        journal = Journal(self.journal)
        return list(journal.rows(journal.begin(), journal.end(), topics or None))

    def numbers(self, topic: str) -> list[int]:
        """Return the payloads of a topic as numbers, sorted."""
        return sorted(int(row.payload) for row in self.rows(topic))
