"""Results that wait for their commit: `staged/<query>/<batch>/` in a journal's folder, whichever hub took them.

The tasks of a stream stage their rows in parts, each under a name of its own. When all are done the parts of the
micro-batch are sealed: from then on these are its results, whatever a repetition of it stages, and each part is
committed by its name. So the results of a micro-batch are never in one place in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import age_s, is_journal, make_folder, sync_folder, write_beside, write_whole

FOLDER = "staged"
MOST_BYTES = 2 << 30
"""Of all parts that wait in a journal."""
LEAST_BYTES = 16 << 10
"""A part counts as so long at least: a file of one row isn't free either."""
STALE_S = 86400.0
"""Parts that nobody has sealed are in nobody's results after so long."""
MOST_PARTS = 10_000
"""Of a micro-batch."""
_SEALED = "sealed.json"
_PART = re.compile(r"[0-9a-f]{16}\.[0-9]{1,6}")


def checked_part(name: object) -> str:
    """Returns the name of a part; raises ArgumentError when it is none."""
    if isinstance(name, str) and _PART.fullmatch(name):
        return name
    raise ArgumentError(f"part: {str(name)[:100]!r} is no name of a part, such as 0123456789abcdef.0.")


class Staged:
    """The staged results of a journal. All methods wait for the disk.

    Args:
        journal: its folder.
        committed: gives the number of a query's last micro-batch that is stored.
    """

    def __init__(self, journal: Path, committed: Callable[[str], int]) -> None:
        self._journal, self._folder, self._committed = journal, journal / FOLDER, committed
        self._waiting_bytes = -1

    def put(self, query: str, batch: int, part: str, rows: bytes) -> None:
        """Keeps a part.

        Args:
            query, batch, part: whose it is, and its name.
            rows: as in the body of a commit.

        Raises:
            JournalError: too much waits, or it can't be written.
        """
        self._make_room(len(rows))
        folder = self._of(query, batch)
        try:
            if is_journal(self._journal):  # and is not made anew
                make_folder(folder)
            write_whole(folder / part, rows)
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None
        if self._waiting_bytes >= 0:  # else another thread has forgotten something: it is counted anew
            self._waiting_bytes += max(len(rows), LEAST_BYTES)

    def seal(self, query: str, batch: int, parts: Sequence[str]) -> list[str]:
        """Decides, for good, which parts are the results of a micro-batch.

        Args:
            query, batch: whose they are.
            parts: their names.

        Returns:
            What was decided, by this call or an earlier one.

        Raises:
            ArgumentError: there is no such part.
            JournalError: it can't be kept.
        """
        folder = self._of(query, batch)
        try:
            if not (folder / _SEALED).exists():
                self._decide(folder, parts)
            return [checked_part(name) for name in json.loads((folder / _SEALED).read_bytes())]
        except OSError as error:
            raise JournalError(f"{folder} can't be written: {error.strerror}; make room on the disk.") from None

    def _decide(self, folder: Path, parts: Sequence[str]) -> None:
        for part in parts:
            if not (folder / part).exists():
                raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.")
        beside = write_beside(folder / _SEALED, json.dumps(list(parts)).encode())
        with suppress(FileExistsError):
            os.link(beside, folder / _SEALED)  # and not rename: of two that decide at once, the first one does
        beside.unlink()
        sync_folder(folder)

    def open(self, query: str, batch: int, part: str) -> IO[bytes]:
        """Opens the rows of a part.

        Raises:
            ArgumentError: there is no such part.
        """
        try:
            return (self._of(query, batch) / part).open("rb")
        except OSError:
            raise ArgumentError(f"part: {part} is not staged; stage the micro-batch again.") from None

    def forget(self, query: str, batch: int) -> None:
        """Removes what was staged for a micro-batch, and for those before it."""
        for folder in self._batches(self._folder / query):
            if int(folder.name) <= batch:
                shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # which has a later one
            (self._folder / query).rmdir()
        self._waiting_bytes = -1

    # ---- how much there is

    def _make_room(self, more_bytes: int) -> None:
        if self._waiting_bytes < 0:
            self._waiting_bytes = sum(self._sizes())
        if self._waiting_bytes + more_bytes <= MOST_BYTES:
            return
        self._remove_stale()
        self._waiting_bytes = sum(self._sizes())
        if self._waiting_bytes + more_bytes > MOST_BYTES:
            raise JournalError(
                f"{self._folder} has {self._waiting_bytes >> 20} MiB of results that nobody has committed yet; let "
                "their streams go on, or give this one a smaller maxBytesPerTrigger."
            )

    def _remove_stale(self) -> None:
        for query in self._queries():
            for folder in self._batches(query):
                old = not (folder / _SEALED).exists() and age_s(folder) > STALE_S
                if old or int(folder.name) <= self._committed(query.name):
                    shutil.rmtree(folder, ignore_errors=True)

    def _sizes(self) -> Iterator[int]:
        for query in self._queries():
            for folder in self._batches(query):
                with suppress(FileNotFoundError), os.scandir(folder) as files:
                    yield from (max(file.stat().st_size, LEAST_BYTES) for file in files)

    def _queries(self) -> list[Path]:
        return list(self._folder.iterdir()) if self._folder.is_dir() else []

    @staticmethod
    def _batches(query: Path) -> list[Path]:
        return [path for path in query.iterdir() if path.name.isdecimal()] if query.is_dir() else []

    def _of(self, query: str, batch: int) -> Path:
        return self._folder / query / str(batch)
