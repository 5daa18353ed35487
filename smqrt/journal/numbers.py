"""Reserved sequence numbers: no number is used twice, even after a power failure.

Readers see rows before the disk has them, and remember their position. When such rows are lost, their numbers must not
be used again: readers would take the new rows for rows they have read. Therefore numbers are reserved in advance, many
at once, and the disk has the reservation before the first of them is used:

    wal/<node>/numbers.json      {"below": N}: no row has this number or a higher one
                                 "gaps": [[E, N], …]: no row has, or had, a number from E up to but not including N

On an orderly shutdown a hub writes the number of its next row. After a crash the reservation is still there, and the
next hub continues after it, with a multiple of `STEP`. This distinguishes a gap in the numbers from missing rows. The
hub also stores the gap: once the rows before it have expired, nothing else shows whether the gap ever had rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from smqrt.errors import JournalError
from smqrt.journal.files import sync_folder, write_whole

FILE = "numbers.json"
STEP = 1 << 20
"""After a crash the numbers continue with a multiple of this."""
FAR = 1 << 32
"""More numbers than can be in use for rows that the disk doesn't have."""
MAX_GAPS = 256
"""How many gaps of a node are stored: the newest ones."""
_MAX_STEPS = 64
_SHORT_RESERVATION_S = 10.0
"""Reservations that last less than this are doubled."""


def reserved(folder: Path) -> int:
    """Return the number below which all used numbers are; 0 without a reservation.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: the reservation file is damaged.
        OSError: the file can't be read.
    """
    path = folder / FILE
    try:
        below = json.loads(path.read_bytes())["below"]
        if type(below) is not int or not 0 <= below < 1 << 62:
            raise ValueError(f"below is {below!r}")
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(
            f"{path} is damaged ({error!r}): which numbers are used is not known. The hub continues with a much higher "
            "number when it starts, and writes the file again."
        ) from None
    return below


def gaps(folder: Path) -> list[tuple[int, int]]:
    """Return the newest gaps in the numbers of a node: (first number without a row, number of the next row).

    Args:
        folder: `<journal>/wal/<node>`. A missing or damaged file means no known gaps.
    """
    try:
        return parse_gaps(json.loads((folder / FILE).read_bytes()).get("gaps", ()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def parse_gaps(values: Any) -> list[tuple[int, int]]:
    """Return gaps from their JSON value. Raises ValueError or TypeError for an invalid value."""
    return [(int(first), int(end)) for first, end in values]


def skip_gap(seq: int, known: Iterable[tuple[int, int]]) -> int:
    """Return the number of the next row when `seq` lies in a gap, else `seq`."""
    return next((end for first, end in known if first <= seq < end), seq)


def next_step(seq: int) -> int:
    """Return the first number, not below `seq`, with which numbers may continue after a gap."""
    return -(-seq // STEP) * STEP


def is_gap(end: int, first: int) -> bool:
    """Return whether rows may continue with `first` after rows that end at `end` without a missing row."""
    return end < first and first % STEP == 0


def may_have_gap(start: int, end: int) -> bool:
    """Return whether there may be numbers without a row from `start` up to but not including `end`."""
    return end // STEP > start // STEP


class NumberReserve:
    """The numbers that a hub may use for rows.

    Args:
        folder: `<journal>/wal/<node>`, which exists.
        next_seq: the number of the next row.
        gap_begins: the number after the last row, when no row has a number from there up to `next_seq`.

    Raises:
        OSError: the disk is full or broken.

    Attributes:
        below: numbers below this one may be used; the disk has that.
    """

    def __init__(self, folder: Path, next_seq: int, gap_begins: int | None = None) -> None:
        self._folder, self._steps = folder, 1
        self._gaps = gaps(folder)
        if gap_begins is not None and gap_begins < next_seq:
            if self._gaps and self._gaps[-1][1] == gap_begins:  # no row was written between both gaps: they are one
                gap_begins = self._gaps.pop()[0]
            self._gaps = [*self._gaps, (gap_begins, next_seq)][-MAX_GAPS:]
        self._extended_s = time.monotonic()
        self.below = 0
        self.extend(next_seq)
        for above in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
            with suppress(PermissionError):  # a folder of another user existed before: it is on the disk
                sync_folder(above)

    def is_short(self, seq: int) -> bool:
        """Return whether it is time to reserve more numbers; `seq` is the number of the next row."""
        return self.below - seq < self._steps * STEP // 2

    def extend(self, seq: int) -> None:
        """Reserve more numbers; the faster they are used, the more. Blocks until the disk has the reservation.

        Args:
            seq: the number of the next row.

        Raises:
            OSError: the disk is full or broken; the earlier reservation stays.
        """
        is_short_lived = time.monotonic() - self._extended_s < _SHORT_RESERVATION_S and self.below
        steps = min(_MAX_STEPS, self._steps * 2) if is_short_lived else self._steps
        below = max(self.below, next_step(seq) + steps * STEP)
        self._write(below)
        self.below, self._steps, self._extended_s = below, steps, time.monotonic()

    def repeat(self) -> None:
        """Write the reservation again: a copy of the folder may have an earlier one. Blocks; raises as `extend`."""
        self._write(self.below)

    def settle(self, seq: int) -> None:
        """Write the number of the next row; the disk has all rows before it. Blocks; raises as `extend`."""
        self._write(seq)

    def _write(self, below: int) -> None:
        values = {"below": below} | ({"gaps": self._gaps} if self._gaps else {})
        write_whole(self._folder / FILE, json.dumps(values).encode() + b"\n")
        sync_folder(self._folder)
