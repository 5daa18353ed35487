"""The place to go on for a query whose checkpoint is gone, or was reset: nothing is left out, nothing comes twice."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError
from smqrt.pipeline import checkpoint, status, table_ranges, tables
from smqrt.pipeline.checkpoint import Commit, Offsets, Start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from smqrt.pipeline.lake_tables import LakeTable
    from smqrt.pipeline.sinks import Hub

_REMOVED = " Rows behind it that retention has removed are missing."
_REMEMBERED = (
    " What windows and joins remembered is gone: smqrt pipeline reset {} and run --from earliest compute all anew."
)


def table(query: Path, location: str, spark: SparkSession, journal: Any) -> tuple[str, Offsets | None, str]:
    """Finds the folder that the stream of a table writes to.

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
    folder, told = table_ranges.stream(query) or location, ""
    if not checkpoint.exists(query):
        if tables.is_streamed(spark, folder):
            told = _left(query, location, folder)
            checkpoint.begin_anew(query, None)
            folder = f"{location}{tables.BACKFILL}{secrets.token_hex(6)}"
        table_ranges.keep_stream(query, folder)
        end = table_ranges.end(query)
        begin = _most(end, dict(journal.begin())) if end else None
        missing = _REMOVED if told and begin != end else ""
        return folder, begin, told + missing
    table_ranges.keep_stream(query, folder)
    return folder, None, ""


def lake_table(query: Path, table: LakeTable, journal: Any) -> tuple[Offsets | None, str]:
    """Finds where the stream of a table with commits begins: they say which rows it has.

    Args:
        query: `<state>/<name>`.
        table: the table.
        journal: the journal, opened.

    Returns:
        As `table`, without the folder.
    """
    if checkpoint.exists(query) or not table.exists():
        return None, ""
    end, lost = table.end(query.name), checkpoint.kept(query) is not None
    checkpoint.begin_anew(query, None)
    if end is None:
        return None, (
            f"adds to the table in {table.location}, whose commits don't say which rows of the journal it has; "
            "rows that it has come again where --from is before its end."
        )
    begin = _most(end, dict(journal.begin()))
    told = f"goes on where its table in {table.location} ends, at {table_ranges.shown(end)}."
    told = f"the checkpoint in {query} is gone. It {told}{_REMEMBERED.format(query.name)}" if lost else told
    return begin, told + (_REMOVED if begin != end else "")


def _left(query: Path, location: str, folder: str) -> str:
    """Says what there is of a table that is to be gone on with, and notes its rows."""
    if folder in table_ranges.load(query):
        return f"goes on where its table in {location} ends{_at(query)}; what comes now is in a folder beside it."
    if checkpoint.began(query) is None:
        return (
            f"adds to the table in {location} of an earlier run, whose state is gone; rows that it has come again "
            "where --from is before its end."
        )
    again = keep_range(query)
    return (
        f"the checkpoint in {query} is gone. It goes on where its table ends{_at(query)}{again}; what windows and "
        f"joins remembered is gone too: smqrt pipeline reset {query.name} and run --from earliest compute all anew."
    )


def _at(query: Path) -> str:
    end = table_ranges.end(query)
    return f", at {table_ranges.shown(end)}" if end else ""


def keep_range(query: Path) -> str:
    """Notes which rows the stream of a table has written, before its checkpoint is forgotten.

    Args:
        query: `<state>/<name>`.

    Returns:
        What is to be said about it, or nothing.

    Raises:
        PipelineError: nobody knows.
    """
    folder, start, last = table_ranges.stream(query), checkpoint.began(query), status.read(query)
    batch = tables.last_batch(folder) if folder else -1
    end = checkpoint.reached(query, batch if batch >= 0 else None) or (last.offset if last else None)
    if not folder or start is None or not end:
        raise PipelineError(
            f"The checkpoint in {query} is gone, and nobody knows which rows its table has: smqrt pipeline reset "
            f"{query.name} forgets both; with --keep-output the table stays, and rows come again from --from on."
        )
    table_ranges.add(query, folder, start, end)
    certain = checkpoint.exists(query) or (last and batch <= last.batch)
    return "" if certain else "; its last micro-batch may be in it twice"


def published(query: Path, journal: Any, hub: Hub) -> str:
    """Decides where a query that publishes goes on when its checkpoint is gone: after what the hub has of it.

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
    before, commit = checkpoint.kept(query), checkpoint.last_commit(query)
    if checkpoint.exists(query) or before is None:
        return ""
    if commit is None:
        last = status.read(query)
        unknown = last is not None and last.batch >= 0 and before.split is None
        return f"the checkpoint in {query} is gone; it begins anew, and results may come again." if unknown else ""
    is_there = hub.has(commit.query_id, commit.batch)
    begun, ended = (commit.start, commit.end) if is_there else (commit.before, commit.start)
    done = _most(before.split or {}, ended)
    starting = _most(before.starting, dict(journal.begin())) if commit.stateful else done
    pending = _most(before.split or {}, begun) if commit.stateful and begun else None
    checkpoint.begin_anew(query, Start(starting, None if starting == done else done, pending))
    return f"the checkpoint in {query} is gone. {_goes_on(commit, done)}"


def _goes_on(commit: Commit, done: Offsets) -> str:
    anew = "What it remembered is computed anew from what the journal has, and it" if commit.stateful else "It"
    return f"{anew} publishes what comes after {table_ranges.shown(done)}, where the hub's list of commits ends."


def _most(one: Offsets, other: Offsets) -> Offsets:
    return {node: max(one.get(node, 0), other.get(node, 0)) for node in {*one, *other}}
