"""How long the oldest row waits that a query has not read yet."""

from __future__ import annotations

import time
from typing import Any

from smqrt.errors import SmqrtError
from smqrt.journal.remote import open_journal
from smqrt.pipeline.status import Age


def age(place: str, token: str | None = None, cafile: str | None = None) -> Age:
    """Returns what tells a `Board` how far a query is behind, in seconds.

    Args:
        place: path or URL of the journal, of which for each question the next row of each node is read.
        token: what its hub wants to see; cafile: as for `open_journal`.

    Raises:
        JournalError: there is no such journal.
    """
    journal = open_journal(place, token, cafile=cafile, retry_s=0)

    def seconds(name: str, ends: dict[str, int]) -> float | None:
        try:
            times_us = [_time_us(journal, node, seq) for node, seq in ends.items()]
        except (SmqrtError, OSError):
            return None  # a hub that is away, a segment that was just removed: the next question is soon
        waiting_us = [time_us for time_us in times_us if time_us is not None]
        return max(0.0, time.time() - min(waiting_us) / 1e6) if waiting_us else 0.0

    return seconds


def _time_us(journal: Any, node: str, seq: int) -> int | None:
    """The time of arrival of the row `seq`; None when it isn't there yet."""
    return next((row.ts_us for row in journal.rows({node: seq}, {node: seq + 1})), None)
