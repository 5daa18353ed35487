"""Resumption of a query whose checkpoint is gone or was reset: nothing is left out, nothing comes twice."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError
from smqrt.journal import files
from smqrt.pipeline import checkpoint, process, status, tables
from smqrt.pipeline.checkpoint import Offsets, PublishCommit, QueryStart

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal
    from smqrt.pipeline.sinks import CommitClient
    from smqrt.pipeline.tables import LakeTable


_REMOVED = " Rows behind it that retention has removed are missing."
_REMEMBERED = (
    " What windows and joins remembered is gone: smqrt pipeline reset {} and run --from earliest compute all anew."
)


def resume_table(
    query: Path, location: str, spark: SparkSession, journal: Journal | RemoteJournal
) -> tuple[str, Offsets | None, str]:
    """Find the folder that the stream of a table writes to.

    Spark's file sink leaves out micro-batches whose numbers its folder has. So a stream that begins anew gets a folder
    of its own beside the table's, which `tables.files` and `tables.frame` read with it.

    Args:
        query: `<state>/<name>`.
        location: folder or URI of the table.
        spark: the session.
        journal: the journal, opened.

    Returns:
        The folder or URI; where the stream begins, if it is a new one and what there is tells it; and a sentence for
        the user, or nothing.

    Raises:
        PipelineError: the checkpoint is gone, and nobody knows which rows the table has.
    """
    folder, told = checkpoint.table_folder(query) or location, ""
    if not checkpoint.exists(query):
        if tables.is_streamed(spark, folder):
            told = _left(query, location, folder)
            checkpoint.replace_start(query, None)
            folder = f"{location}{tables.BACKFILL}{secrets.token_hex(6)}"
        checkpoint.save_table_folder(query, folder)
        end = checkpoint.table_end(query)
        begin = _most(end, journal.begin(end)) if end else None
        missing = _REMOVED if told and begin != end else ""
        return folder, begin, told + missing
    checkpoint.save_table_folder(query, folder)
    return folder, None, ""


def resume_lake_table(query: Path, table: LakeTable, journal: Journal | RemoteJournal) -> tuple[Offsets | None, str]:
    """Find where the stream of a table with commits begins: they say which rows it has.

    Args:
        query: `<state>/<name>`.
        table: the table.
        journal: the journal, opened.

    Returns:
        As `resume_table`, without the folder.
    """
    if checkpoint.exists(query) or not table.exists():
        return None, ""
    end, lost = table.end(query.name), checkpoint.saved_start(query) is not None
    checkpoint.replace_start(query, None)
    if end is None:
        return None, (
            f"adds to the table in {table.location}, whose commits don't say which rows of the journal it has; "
            "rows that it has come again where --from is before its end."
        )
    begin = _most(end, journal.begin(end))
    told = f"goes on where its table in {table.location} ends, at {checkpoint.offset_text(end)}."
    told = f"the checkpoint in {query} is gone. It {told}{_REMEMBERED.format(query.name)}" if lost else told
    return begin, told + (_REMOVED if begin != end else "")


def _left(query: Path, location: str, folder: str) -> str:
    """Say what there is of a table that is to be gone on with, and notes its rows."""
    if folder in checkpoint.table_ranges(query):
        return f"goes on where its table in {location} ends{_at(query)}; what comes now is in a folder beside it."
    if checkpoint.start_offsets(query) is None:
        return (
            f"adds to the table in {location} of an earlier run, whose state is gone; rows that it has come again "
            "where --from is before its end."
        )
    again = save_written_range(query)
    return (
        f"the checkpoint in {query} is gone. It goes on where its table ends{_at(query)}{again}; what windows and "
        f"joins remembered is gone too: smqrt pipeline reset {query.name} and run --from earliest compute all anew."
    )


def _at(query: Path) -> str:
    end = checkpoint.table_end(query)
    return f", at {checkpoint.offset_text(end)}" if end else ""


def save_written_range(query: Path) -> str:
    """Note which rows the stream of a table has written, before its checkpoint is forgotten.

    Args:
        query: `<state>/<name>`.

    Returns:
        What is to be said about it, or nothing.

    Raises:
        PipelineError: nobody knows.
    """
    folder, start, last = checkpoint.table_folder(query), checkpoint.start_offsets(query), status.read(query)
    batch = tables.last_batch(folder) if folder else -1
    end = checkpoint.committed_offsets(query, batch if batch >= 0 else None) or (last.offset if last else None)
    if not folder or start is None or not end:
        raise PipelineError(
            f"The checkpoint in {query} is gone, and nobody knows which rows its table has: smqrt pipeline reset "
            f"{query.name} forgets both; with --keep-output the table stays, and rows come again from --from on."
        )
    checkpoint.add_table_range(query, folder, start, end)
    certain = checkpoint.exists(query) or (last and batch <= last.batch)
    return "" if certain else "; its last micro-batch may be in it twice"


def resume_published(query: Path, journal: Journal | RemoteJournal, hub: CommitClient) -> str:
    """Decide where a query that publishes goes on when its checkpoint is gone: after what the hub has of it.

    What it remembered (windows, joins, alarms) is computed anew, without publishing anything, from where it began.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        hub: knows what was published.

    Returns:
        A sentence for the user; nothing when all is well.

    Raises:
        Unreachable: the hub is away.
        JournalError: it can't tell.
    """
    before, commit = checkpoint.saved_start(query), checkpoint.last_commit(query)
    if checkpoint.exists(query) or before is None:
        return ""
    if commit is None:
        last = status.read(query)
        unknown = last is not None and last.batch >= 0 and before.split is None
        return f"the checkpoint in {query} is gone; it begins anew, and results may come again." if unknown else ""
    is_there = hub.has(commit.query_id, commit.batch)
    begun, ended = (commit.start, commit.end) if is_there else (commit.before, commit.start)
    done = _most(before.split or {}, ended)
    starting = _most(before.starting, journal.begin(before.starting)) if commit.stateful else done
    pending = _most(before.split or {}, begun) if commit.stateful and begun else None
    checkpoint.replace_start(query, QueryStart(starting, None if starting == done else done, pending))
    return f"the checkpoint in {query} is gone. {_goes_on(commit, done)}"


def _goes_on(commit: PublishCommit, done: Offsets) -> str:
    anew = "What it remembered is computed anew from what the journal has, and it" if commit.stateful else "It"
    return f"{anew} publishes what comes after {checkpoint.offset_text(done)}, where the hub's list of commits ends."


def _most(one: Mapping[str, int], other: Mapping[str, int]) -> Offsets:
    return {node: max(one.get(node, 0), other.get(node, 0)) for node in {*one, *other}}


# ---- `smqrt pipeline reset`: a query forgets how far it is, so that its next run is its first

_LETTERS = ".dead_letters"
_NAME = re.compile(r"[^./][^/]*")


def reset(state: Path, name: str, journal: str, table: str | None) -> Iterator[str]:
    """Remove what a query remembers.

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
    if table and files.is_elsewhere(table):
        raise PipelineError(f"{table} is not on this machine: remove it there, then reset with --keep-output.")
    if not table:
        with suppress(PipelineError):  # nobody knows which rows its table has, or it has none
            save_written_range(query)
    # The checkpoint goes last: after a failure in between, the same command does the rest.
    for path in [
        *([*tables.folders(Path(table)), tables.versions_file(Path(table))] if table else []),
        *_marks(journal, name),
        *_state_files(query, not table),
    ]:
        if path.exists():
            _remove(path)
            yield str(path)


def _state_files(query: Path, keep: bool) -> list[Path]:
    """What a query remembers; `keep` leaves what is known of the table that is kept."""
    ranges = checkpoint.ranges_file(query)
    return sorted(set(query.iterdir()) - {ranges}) if keep and ranges.exists() else [query]


def _marks(journal: str, name: str) -> list[Path]:
    """What keeps the journal from removing rows that the query has not read."""
    if files.is_address(journal):
        return []
    readers = files.journal_folder(journal) / "readers"
    others = f"{name}{_LETTERS}"
    found = [readers / f"{name}.json", *sorted(readers.glob(f"{name}.*.json"))]
    return [path for path in found if not path.name.startswith(others)]


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise PipelineError(f"{error.filename or path} can't be removed: {error.strerror}.") from None
