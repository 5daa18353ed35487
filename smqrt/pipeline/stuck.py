"""Queries that make no progress: their status says so, since when, and why.

Spark tells of a micro-batch when it is done, and every ten seconds that there is nothing to do. When it tells nothing,
the journal and the checkpoint do, which are looked at here; Spark isn't asked, which may have no memory to answer with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smqrt.errors import SmqrtError
from smqrt.pipeline import checkpoint, jvm
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.status import Board, Status

LEAST_S = 60.0
TIMES = 10
"""A query is stuck when nothing is heard of it for so many times the usual micro-batch, `LEAST_S` at least."""
MOST_GARBAGE = 0.5
"""A Java that spends more of its time on it has too little memory."""
_LOOK_S = 1.0
_QUIET_S = 2.0

End = Callable[[], Offsets]
"""Gives the end of the journal."""


class Watchdog:
    """Looks after the queries of one process.

    Args:
        board: where their status is kept.
        state: folder with one folder for each query.
        end: of the journal.
        least_s: see `LEAST_S`.
        java: what watches Spark's Java; found when it is not given.
    """

    def __init__(
        self,
        board: Board,
        state: Path,
        end: End,
        least_s: float = LEAST_S,
        java: jvm.GarbageTime | None = None,
    ) -> None:
        self._board, self._state, self._end, self._least_s = board, state, end, least_s
        self._java = java or jvm.find_garbage_time()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks every second while inside."""
        over = threading.Event()
        thread = threading.Thread(target=self._until, args=(over,), name="stuck", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _until(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Brings the status of queries up to date of which nothing has been heard for a while."""
        share = (self._java.share() if self._java else None) or 0.0
        for status, quiet_s in self._board.quiet(_QUIET_S):
            lag_rows = self._lag_rows(status)
            if lag_rows:
                usual_s = status.batch_ms / 1000
                late = quiet_s > max(self._least_s, TIMES * usual_s)
                self._board.under_way(status.name, lag_rows, self._why(status, quiet_s, usual_s, share) if late else "")

    def _lag_rows(self, status: Status) -> int:
        try:
            folder = self._state / status.name
            done = checkpoint.reached(folder) or checkpoint.began(folder)
            return sum(max(0, seq - done.get(node, 0)) for node, seq in self._end().items()) if done else 0
        except (SmqrtError, OSError, ValueError):  # a hub that is away, a file that was just removed
            return status.lag_rows or 1

    @staticmethod
    def _why(status: Status, quiet_s: float, usual_s: float, garbage_share: float) -> str:
        if status.trouble:
            return status.trouble
        before = f"micro-batches took {usual_s:.1f} s before" if usual_s else "it is the first one"
        why = "Its rows may be too many"
        if garbage_share > MOST_GARBAGE:
            why = f"The JVM collects garbage, {garbage_share:.0%} of the time: its memory is too small for these rows"
        return (
            f"micro-batch {status.batch + 1} has been under way for {quiet_s:.0f} s; {before}. {why}: "
            "a smaller max_bytes on @source, or --driver-memory, helps, also with this one."
        )
