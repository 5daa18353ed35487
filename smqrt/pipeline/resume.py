"""Resumption of a query without its checkpoint, and its reset: no result is lost or duplicated."""

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
from smqrt.pipeline import checkpoint, status, tables
from smqrt.pipeline.checkpoint import Offsets, QueryStart

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal
    from smqrt.pipeline.sinks import CommitClient
    from smqrt.pipeline.tables import LakeTable


_REMOVED = " Later rows that retention has removed are missing."
_STATE_LOST = (
    " The state of windows and joins is lost: smqrt pipeline reset {} and run --from earliest compute everything again."
)


def resume_table(
    query: Path, location: str, spark: SparkSession, journal: Journal | RemoteJournal
) -> tuple[str, Offsets | None, str]:
    """Find the folder that the stream of a table writes to.

    Spark's file sink skips micro-batches whose numbers its folder already has. A stream without a checkpoint therefore
    gets its own folder beside the table's; `tables.files` and `tables.frame` read both.

    Args:
        query: `<state>/<name>`.
        location: folder or URI of the table.
        spark: the session.
        journal: the journal, opened.

    Returns:
        The folder or URI; the offsets where a new stream begins, if they are known; and a sentence for the user, which
        may be empty.

    Raises:
        PipelineError: the checkpoint is missing, and the rows of the table are unknown.
    """
    folder, notice = checkpoint.table_folder(query) or location, ""
    if checkpoint.exists(query):
        checkpoint.save_table_folder(query, folder)
        return folder, None, ""
    if tables.is_streamed(spark, folder):
        notice = _describe_table(query, location, folder)
        checkpoint.replace_start(query, None)
        folder = f"{location}{tables.BACKFILL}{secrets.token_hex(6)}"
    checkpoint.save_table_folder(query, folder)
    # After a reset that keeps the table, or a lost checkpoint, the recorded ranges have the position.
    end = checkpoint.table_end(query)
    begin = _later(end, journal.begin(end)) if end else None
    return folder, begin, notice + (_REMOVED if notice and begin != end else "")


def resume_lake_table(query: Path, table: LakeTable, journal: Journal | RemoteJournal) -> tuple[Offsets | None, str]:
    """Find where the stream of a table with commits begins: the commits record which rows the table has.

    Args:
        query: `<state>/<name>`.
        table: the table.
        journal: the journal, opened.

    Returns:
        As `resume_table`, without the folder.
    """
    if checkpoint.exists(query) or not table.exists():
        return None, ""
    end, is_lost = table.end(query.name), checkpoint.saved_start(query) is not None
    checkpoint.replace_start(query, None)
    if end is None:
        return None, (
            f"appends to the table in {table.location}, whose commits don't record which rows of the journal it has; "
            "rows are written twice if --from is before its end."
        )
    begin = _later(end, journal.begin(end))
    notice = f"continues where its table in {table.location} ends, at {checkpoint.offset_text(end)}."
    if is_lost:
        notice = f"the checkpoint in {query} is missing. It {notice}{_STATE_LOST.format(query.name)}"
    return begin, notice + (_REMOVED if begin != end else "")


def _describe_table(query: Path, location: str, folder: str) -> str:
    """Describe an existing table that is continued; record its rows."""

    # Called after `save_written_range` where that changes the end.
    def position() -> str:
        end = checkpoint.table_end(query)
        return f", at {checkpoint.offset_text(end)}" if end else ""

    if folder in checkpoint.table_ranges(query):
        return f"continues where its table in {location} ends{position()}; new rows are in a folder beside it."
    if checkpoint.start_offsets(query) is None:
        return (
            f"appends to the table in {location} of an earlier run, whose state is lost; rows are written twice "
            "if --from is before its end."
        )
    repetition = save_written_range(query)
    return (
        f"the checkpoint in {query} is missing. It continues where its table ends{position()}{repetition}; the "
        f"state of windows and joins is lost too: smqrt pipeline reset {query.name} and run --from earliest compute "
        "everything again."
    )


def save_written_range(query: Path) -> str:
    """Record which rows the stream of a table has written, before its checkpoint is removed.

    Args:
        query: `<state>/<name>`.

    Returns:
        A part of a sentence for the user, which may be empty.

    Raises:
        PipelineError: the rows are unknown.
    """
    folder, start, last = checkpoint.table_folder(query), checkpoint.start_offsets(query), status.read(query)
    batch = tables.last_batch(folder) if folder else -1
    end = checkpoint.committed_offsets(query, batch if batch >= 0 else None) or (last.offset if last else None)
    if not folder or start is None or not end:
        raise PipelineError(
            f"The checkpoint in {query} is missing, and the rows of its table are unknown: smqrt pipeline reset "
            f"{query.name} removes both; with --keep-output the table stays, and rows from --from on are written again."
        )
    checkpoint.add_table_range(query, folder, start, end)
    is_certain = checkpoint.exists(query) or (last and batch <= last.batch)
    return "" if is_certain else "; the table may have its last micro-batch twice"


def resume_published(query: Path, journal: Journal | RemoteJournal, hub: CommitClient) -> str:
    """Decide where a publishing query without a checkpoint continues: after the results that the hub has stored.

    Its state (windows, joins, alarms) is computed again from its first row, without publishing.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        hub: the client that reads the hub's list of commits.

    Returns:
        A sentence for the user, which may be empty.

    Raises:
        Unreachable: the hub is unreachable.
        JournalError: the hub's list of commits can't be read.
    """
    before, commit = checkpoint.saved_start(query), checkpoint.last_commit(query)
    if checkpoint.exists(query) or before is None:
        return ""
    if commit is None:
        last = status.read(query)
        is_unknown = last is not None and last.batch >= 0 and before.split is None
        return (
            f"the checkpoint in {query} is missing; it starts again, and may publish results twice."
            if is_unknown
            else ""
        )
    # The last micro-batch was recorded before it was published, so that only the hub knows whether it was.
    is_published = hub.has(commit.query_id, commit.batch)
    begun, ended = (commit.start, commit.end) if is_published else (commit.before, commit.start)
    # Results before the split are never published, even if the last commit is older.
    done = _later(before.split or {}, ended)
    starting = _later(before.starting, journal.begin(before.starting)) if commit.stateful else done
    pending = _later(before.split or {}, begun) if commit.stateful and begun else None
    checkpoint.replace_start(query, QueryStart(starting, None if starting == done else done, pending))
    subject = "Its state is computed again from the rows in the journal, and it" if commit.stateful else "It"
    return (
        f"the checkpoint in {query} is missing. {subject} publishes the results after {checkpoint.offset_text(done)}, "
        "where the hub's list of commits ends."
    )


def _later(one: Mapping[str, int], other: Mapping[str, int]) -> Offsets:
    return {node: max(one.get(node, 0), other.get(node, 0)) for node in {*one, *other}}


# ---- `smqrt pipeline reset`: the next run of the query starts like a first run

_DEAD_LETTERS = ".dead_letters"
_NAME = re.compile(r"[^./][^/]*")


def reset(state: Path, name: str, journal: str, table: str | None) -> Iterator[str]:
    """Remove the state of a query.

    Args:
        state: folder of the state of queries.
        name: the name of the query.
        journal: path of the journal, which keeps rows that the query has not read; a URL is left alone.
        table: folder or URI of its table, which is removed too, backfills included; None keeps it. The next run
            continues where a kept table ends.

    Yields:
        The paths that were removed.

    Raises:
        PipelineError: the query is running, never ran, or a file can't be removed.
    """
    query = state / name
    if not _NAME.fullmatch(name) or not query.is_dir():
        raise PipelineError(f"{name} never ran with the state in {state}: nothing to reset.")
    if working := status.running(query) or status.elsewhere(query):
        where = f"as process {working}" if isinstance(working, int) else f"on {working}"
        raise PipelineError(f"{name} is running {where}: stop it first with smqrt pipeline stop {name}.")
    if table and files.is_elsewhere(table):
        raise PipelineError(f"{table} is not on this machine: remove it there, then reset with --keep-output.")
    if not table:
        with suppress(PipelineError):  # the rows of its table are unknown, or it has no table
            save_written_range(query)
    ranges = checkpoint.ranges_file(query)
    is_kept = not table and ranges.exists()
    readers: list[Path] = []
    if not files.is_address(journal):
        # These files keep the journal from removing rows that the query has not read.
        folder = files.journal_folder(journal) / "readers"
        readers = [folder / f"{name}.json", *sorted(folder.glob(f"{name}.*.json"))]
    # The checkpoint is removed last: after a failure in between, the same command removes the rest.
    for path in [
        *([*tables.folders(Path(table)), tables.versions_file(Path(table))] if table else []),
        *(path for path in readers if not path.name.startswith(f"{name}{_DEAD_LETTERS}")),
        *(sorted(set(query.iterdir()) - {ranges}) if is_kept else [query]),
    ]:
        if path.exists():
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise PipelineError(f"{error.filename or path} can't be removed: {error.strerror}.") from None
            yield str(path)
