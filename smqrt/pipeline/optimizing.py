"""Upkeep of Delta and Iceberg tables: few large files for many small ones, and an end for what nobody reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.deltalog import one_line
from smqrt.options import parse_duration
from smqrt.pipeline import lake_tables, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.lake_tables import LakeTable

LEAST = timedelta(hours=1)
"""Of what a vacuum leaves alone: a micro-batch under way has written files that no commit names yet."""


def retention(text: str) -> timedelta:
    """Returns the time that files are kept after they have been replaced.

    Raises:
        ArgumentError: it is no duration.
        PipelineError: it is shorter than `LEAST`.
    """
    found = timedelta(seconds=parse_duration(text))
    if found < LEAST:
        raise PipelineError(f"--vacuum {text}: give 1h or more, since a query may be writing files that are newer.")
    return found


def lake(queries: Sequence[Declaration], app: Path, root: str | None) -> Iterator[tuple[str, LakeTable]]:
    """Yields the Delta and Iceberg tables among queries, each with the name of its query.

    Args:
        queries: what was asked for.
        app, root: as for `tables.location`.

    Raises:
        PipelineError: there is none, or a library is missing.
    """
    chosen = [one for one in queries if one.kind == "table" and one.options["format"] in lake_tables.KINDS]
    if not chosen:
        raise PipelineError(
            "None of these is a Delta or Iceberg table: that is a query with @table(…, format='delta' or 'iceberg')."
        )
    for query in chosen:
        location = tables.location(query, app, root)
        with _one_sentence(location):
            found = lake_tables.opened(query, location)
        if found is not None:
            yield query.name, found


def optimized(table: LakeTable, condition: str | None, retain: timedelta | None) -> str:
    """Deletes rows, joins files and removes old ones, as far as it is wanted; returns what was done.

    Raises:
        PipelineError: something can't be done.
    """
    with _one_sentence(table.location):
        return _optimized(table, condition, retain)


@contextmanager
def _one_sentence(location: str) -> Iterator[None]:
    """The libraries raise errors of many classes: of their own, of the system, of object stores."""
    try:
        yield
    except SmqrtError:
        raise
    except Exception as error:
        why = one_line(error)
        raise PipelineError(f"The table in {location} can't be opened or written: {why}. It stays as it was.") from None


def _optimized(table: LakeTable, condition: str | None, retain: timedelta | None) -> str:
    told = [f"rows deleted: {table.delete(condition):,}"] if condition else []
    joined = table.optimize()
    told.append(f"small files joined: {joined.small:,} to {joined.large:,}")
    if retain is not None:
        told.append(f"old files removed: {table.vacuum(retain):,}")
    return "; ".join(told)
