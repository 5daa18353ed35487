"""`smqrt pipeline reset`: a query forgets how far it is, so that its next run is its first."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from smqrt.errors import PipelineError
from smqrt.journal import uris
from smqrt.pipeline import process, resume, table_ranges, tables

_LETTERS = ".dead_letters"
_NAME = re.compile(r"[^./][^/]*")


def reset(state: Path, name: str, journal: str, table: str | None) -> Iterator[str]:
    """Removes what a query remembers.

    Args:
        state: folder of the state of queries.
        name: of the query.
        journal: path of the journal, which keeps rows that the query has not read; a URL is left alone.
        table: folder or URI of its table, which is removed too, backfills included; None keeps it or there is none.
            A run that follows goes on where a table ends that was kept.

    Yields:
        What was removed.

    Raises:
        PipelineError: it runs, never ran, or something can't be removed.
    """
    query = state / name
    if not _NAME.fullmatch(name) or not query.is_dir():
        raise PipelineError(f"{name} never ran with the state in {state}: there is nothing to reset.")
    if working := process.running(query) or process.elsewhere(query):
        where = f"as process {working}" if isinstance(working, int) else f"on {working}"
        raise PipelineError(f"{name} is running, {where}: end it first with smqrt pipeline stop {name}.")
    if table and uris.is_elsewhere(table):
        raise PipelineError(f"{table} is not on this machine: remove it there, then reset with --keep-output.")
    if not table:
        with suppress(PipelineError):  # nobody knows which rows its table has, or it has none
            resume.keep_range(query)
    # The checkpoint goes last: after a failure in between, the same command does the rest.
    for path in [*(tables.folders(Path(table)) if table else []), *_marks(journal, name), *_state(query, not table)]:
        if path.exists():
            _remove(path)
            yield str(path)


def _state(query: Path, keep: bool) -> list[Path]:
    """What a query remembers; `keep` leaves what is known of the table that is kept."""
    ranges = table_ranges.path(query)
    return sorted(set(query.iterdir()) - {ranges}) if keep and ranges.exists() else [query]


def _marks(journal: str, name: str) -> list[Path]:
    """What keeps the journal from removing rows that the query has not read."""
    if uris.is_address(journal):
        return []
    readers = uris.journal(journal) / "readers"
    others = f"{name}{_LETTERS}"
    found = [readers / f"{name}.json", *sorted(readers.glob(f"{name}.*.json"))]
    return [path for path in found if not path.name.startswith(others)]


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise PipelineError(f"{error.filename or path} can't be removed: {error.strerror}.") from None
