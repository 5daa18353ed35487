"""Upkeep of Delta tables: few large files instead of many small ones, and an end for what nobody reads any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from smqrt.errors import PipelineError
from smqrt.journal.settings import parse_duration
from smqrt.pipeline import tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.delta import DeltaTable

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


def delta_tables(queries: Sequence[Declaration], app: Path, root: str | None) -> Iterator[tuple[str, DeltaTable]]:
    """Yields the Delta tables among queries, each with the name of its query.

    Args:
        queries: what was asked for.
        app, root: as for `tables.location`.

    Raises:
        PipelineError: there is none, or deltalake is missing.
    """
    chosen = [one for one in queries if one.kind == "table" and one.options["format"] == "delta"]
    if not chosen:
        raise PipelineError("None of these is a Delta table: that is a query with @table(…, format='delta').")
    for query in chosen:
        yield query.name, DeltaTable(tables.location(query, app, root), query.options["partition_by"])


def optimized(table: DeltaTable, condition: str | None, retain: timedelta | None) -> str:
    """Deletes rows, joins files and removes old ones, as far as it is wanted; returns what was done."""
    told = [f"rows deleted: {table.delete(condition):,}"] if condition else []
    figures = table.optimize()
    told.append(f"small files joined: {figures['numFilesRemoved']:,} to {figures['numFilesAdded']:,}")
    if retain is not None:
        told.append(f"old files removed: {table.vacuum(retain):,}")
    return "; ".join(told)
