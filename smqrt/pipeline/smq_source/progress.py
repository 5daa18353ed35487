"""What a stream has committed, told to the journal: retention keeps what comes after it."""

from __future__ import annotations

import logging
import time

from smqrt.errors import JournalError
from smqrt.journal import commit
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
        self._hub = commit.HubAddress.of(options.journal, options.token, options.cafile)
        self._query = options.query or ""
        self._waiting: Offsets | None = None
        self._last_s = -INTERVAL_S

    def committed(self, end: Offsets) -> None:
        """Takes note that everything before `end` is done with."""
        if not self._query:
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
            commit.report_progress(self._hub, self._query, self._query, offset)
        except JournalError as error:
            LOG.warning("progress can't be reported, retention doesn't know of it: %s", error)
