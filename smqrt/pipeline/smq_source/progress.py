"""What a stream has committed, told to the journal: retention keeps what comes after it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from smqrt.errors import JournalError
from smqrt.journal import progress
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

LOG = logging.getLogger("smqrt.pipeline")
INTERVAL_S = 1.0
"""Retention thinks in hours, micro-batches end several times a second."""


class Progress:
    """Reports of one stream, at most one a second.

    Args:
        options: of the stream; one without a query name reports nothing.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._waiting: Offsets | None = None
        self._last_s = -INTERVAL_S

    def committed(self, end: Offsets) -> None:
        """Takes note that everything before `end` is done with."""
        if self._options.query is None:
            return
        self._waiting = end
        if time.monotonic() - self._last_s >= INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Reports what hasn't been reported. A report that fails is only logged: the next one says more."""
        if self._waiting is None:
            return
        offset, self._waiting, self._last_s = self._waiting, None, time.monotonic()
        try:
            self._report(self._options.query or "", offset)
        except JournalError as error:
            LOG.warning("progress can't be reported, retention doesn't know of it: %s", error)

    def _report(self, query: str, offset: Offsets) -> None:
        options = self._options
        if options.journal.startswith("http"):
            from smqrt.journal import commit

            commit.report_progress(commit.HubAddress.of(options.journal, options.token), query, query, offset)
        else:
            values = {"query": query, "name": query, "offset": offset, "time_us": time.time_ns() // 1000}
            progress.save(Path(options.journal), values)
