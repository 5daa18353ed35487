"""The numbers of rows that were given: after a power failure none is given a second time.

Readers see rows before the disk has them, and remember how far they are. When the rows are lost, the numbers must not
come again: readers would take them for rows they have read. So numbers are reserved ahead, many at once, and the disk
has the reservation before the first of them is used:

    wal/<node>/numbers.json      {"below": N}: no row has this number or a higher one
                                 "gaps": [[E, N], …]: no row has, or had, a number from E up to, without, N

A hub that ends in order leaves there the number of the next row. One that was killed leaves the reservation, and the
next one goes on behind it, with a multiple of `STEP`: so a gap in the numbers is told from rows that are missing. It
notes the gap, too: when the rows before it have expired, nothing else says whether rows in it have.
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
"""After an end without order the numbers go on with a multiple of this."""
FAR = 1 << 32
"""More numbers than are ever given to rows that the disk doesn't have."""
MOST_GAPS = 256
"""So many gaps of a node are remembered, the newest."""
_MOST_STEPS = 64
_SOON_S = 10.0
"""Reservations that last less than this become larger."""


def reserved(folder: Path) -> int:
    """Returns the number below which all that were given are; 0 when nothing says so.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: the file that says so is damaged.
        OSError: it can't be read.
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
            f"{path} is damaged ({error!r}): nobody knows which numbers were given; a hub that starts goes on with a "
            "much higher one, and writes it anew."
        ) from None
    return below


def gaps(folder: Path) -> list[tuple[int, int]]:
    """Returns the newest gaps in the numbers of a node: (first number that no row has, number of the next row).

    Args:
        folder: `<journal>/wal/<node>`; one without the file, or with a damaged one, has none that are known.
    """
    try:
        return parse_gaps(json.loads((folder / FILE).read_bytes()).get("gaps", ()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def parse_gaps(values: Any) -> list[tuple[int, int]]:
    """Returns gaps out of their JSON value. Raises ValueError or TypeError: it is none."""
    return [(int(first), int(end)) for first, end in values]


def past(seq: int, known: Iterable[tuple[int, int]]) -> int:
    """Returns the number of the next row from `seq` on as far as it lies in a gap, else `seq`."""
    return next((end for first, end in known if first <= seq < end), seq)


def behind(seq: int) -> int:
    """Returns the first number, not below `seq`, with which numbering may go on after a gap."""
    return -(-seq // STEP) * STEP


def is_gap(end: int, first: int) -> bool:
    """Says whether rows may go on with `first` though the ones before end at `end`: no row is missing for it."""
    return end < first and first % STEP == 0


def may_have_gap(start: int, end: int) -> bool:
    """Says whether there may be numbers without a row from `start` up to, without, `end`."""
    return end // STEP > start // STEP


class NumberReserve:
    """The numbers that a hub may give to rows.

    Args:
        folder: `<journal>/wal/<node>`, which is there.
        next_seq: the number of the next row.
        gap_begins: the number behind the last row, when no row has a number from there up to `next_seq`.

    Raises:
        OSError: the disk is full or broken.

    Attributes:
        below: what may be given is below; the disk knows.
    """

    def __init__(self, folder: Path, next_seq: int, gap_begins: int | None = None) -> None:
        self._folder, self._steps = folder, 1
        self._gaps = gaps(folder)
        if gap_begins is not None and gap_begins < next_seq:
            if self._gaps and self._gaps[-1][1] == gap_begins:  # no row was written between
                gap_begins = self._gaps.pop()[0]
            self._gaps = [*self._gaps, (gap_begins, next_seq)][-MOST_GAPS:]
        self._extended_s = time.monotonic()
        self.below = 0
        self.extend(next_seq)
        for above in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
            with suppress(PermissionError):  # not ours: then it was there before
                sync_folder(above)

    def is_short(self, seq: int) -> bool:
        """Says whether it is time to reserve more; `seq` is the number of the next row."""
        return self.below - seq < self._steps * STEP // 2

    def extend(self, seq: int) -> None:
        """Reserves more numbers, the more the faster they are used. Blocks until the disk has it.

        Args:
            seq: the number of the next row.

        Raises:
            OSError: the disk is full or broken; what was reserved before stays so.
        """
        soon = time.monotonic() - self._extended_s < _SOON_S and self.below
        steps = min(_MOST_STEPS, self._steps * 2) if soon else self._steps
        below = max(self.below, behind(seq) + steps * STEP)
        self._write(below)
        self.below, self._steps, self._extended_s = below, steps, time.monotonic()

    def repeat(self) -> None:
        """Writes the reservation again, where a copy of the folder may have an earlier one. Blocks; errors as above."""
        self._write(self.below)

    def settle(self, seq: int) -> None:
        """Says that `seq` is the number of the next row: the disk has all rows before. Blocks; errors as above."""
        self._write(seq)

    def _write(self, below: int) -> None:
        values = {"below": below} | ({"gaps": self._gaps} if self._gaps else {})
        write_whole(self._folder / FILE, json.dumps(values).encode() + b"\n")
        sync_folder(self._folder)
