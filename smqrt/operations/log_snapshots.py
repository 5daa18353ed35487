"""Snapshots of the end of the log, and of what applications traced last."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from smqrt.operations.context import Parts
from smqrt.operations.log_tail import Entry
from smqrt.operations.paging import LIMIT, check_limit
from smqrt.operations.snapshots import Snapshot, iso

ORDERED = "microseconds"
"""Times of lines are so exact, since those of several workers are put in their order."""


def log(parts: Parts, limit: int = LIMIT) -> Snapshot:
    """Returns the last errors and warnings of the log, the newest first, as a page that has none behind it.

    Args:
        parts: the server.
        limit: items, 1 to 1000; the last 200 are kept.

    Raises:
        ArgumentError: the limit is none.
    """
    check_limit(limit)
    items = [_entry(one) for one in islice(parts.log.newest_first(), limit)]
    return {"items": items, "after": None, "total": parts.log.errors + parts.log.warnings}


def _entry(one: Entry) -> Snapshot:
    return {
        "number": one.number,
        "at": iso(one.at_s, ORDERED),
        "level": one.level,
        "logger": one.logger,
        "text": one.text,
    }


def traces(parts: Parts, limit: int = LIMIT) -> list[Snapshot]:
    """Returns what each application traced last: `app`, its name, and `lines`. Behind them, with None for a name, what
    belongs to none: timers, events, greenlets.

    Args:
        parts: the server.
        limit: lines of each, 1 to 1000; the last 200 are kept.

    Raises:
        ArgumentError: the limit is none.
    """
    check_limit(limit)
    places: list[tuple[str | None, Path | None]] = [(one.name, one.path.resolve()) for one in parts.applications]
    return [{"app": name, "lines": _lines(parts, folder, limit)} for name, folder in [*places, (None, None)]]


def _lines(parts: Parts, folder: Path | None, limit: int) -> list[Snapshot]:
    return [{"at": iso(one.at_s, ORDERED), "text": one.text} for one in parts.log.traces(folder)[-limit:]]
