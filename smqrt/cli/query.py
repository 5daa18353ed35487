"""`smqrt query`: SQL on what a hub has recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from smqrt.cli import query_output
from smqrt.cli.journal_locations import (
    JournalCommand,
    cafile_option,
    chosen_range,
    folder,
    from_option,
    journal_place,
    many,
    opened_journal,
    size,
    token_option,
    topics_option,
    until_option,
)
from smqrt.cli.terminal import polled_progress
from smqrt.journal import locations

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

    from smqrt.journal.reader import Journal, Offsets


class _Engine(Protocol):
    """What answers SQL; see `duckdb_views.DuckDB`."""

    def __enter__(self) -> _Engine: ...
    def __exit__(self, *exception: object) -> None: ...
    def run(self, sql: str) -> tuple[Schema, Iterator[RecordBatch]]: ...
    def cancel(self) -> None: ...
    def share(self) -> float: ...


@click.command(cls=JournalCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sql")
@journal_place
@click.option("--spark", "on_spark", is_flag=True, help="Ask Spark, which takes seconds to start, instead of DuckDB.")
@click.option(
    "--format", "chosen", type=click.Choice(query_output.FORMATS), help="A table, unless the file's ending says more."
)
@click.option("--to", "to", type=click.Path(dir_okay=False), help="A file: .csv, .json, .jsonl or .parquet.")
@topics_option
@from_option
@until_option
@token_option
@cafile_option
def query(
    sql: str,
    path: str,
    on_spark: bool,
    chosen: str | None,
    to: str | None,
    topics: tuple[str, ...],
    start: str | None,
    end: str | None,
    token: str | None,
    cafile: str | None,
) -> None:
    """Answer SQL about the messages of a journal. PATH is its folder, or that of an application that has one.

    The view `messages` has a row for each, with the columns of the journal, `text` and `json`; `compacted` has what
    compacted files hold, as it is. --topic, --from and --until leave out files unseen.

    \b
    smqrt query "select topic, count(*) from messages group by topic" plant
    smqrt query "select ts, json->>'temp' as temp from messages" plant --topic 'site1/#' --from 2h --to temp.csv
    """
    file = None if to is None else locations.local_folder(to, "--to", "write a file here, and copy it there")
    kind = query_output.format_of(chosen, file)
    opened = opened_journal(path, token, cafile)
    first, last = chosen_range(opened, start, end)
    chosen_topics = topics or None
    given = {"token": token, "cafile": cafile}
    make = _spark(path, given, first, last, chosen_topics) if on_spark else _duckdb(opened, first, last, chosen_topics)
    _answer(make, sql, kind, file)


def _duckdb(opened: Journal, first: Offsets, last: Offsets, topics: tuple[str, ...] | None) -> Callable[[], _Engine]:
    from smqrt.journal.duckdb_views import DuckDB

    return partial(DuckDB, opened, first, last, topics)


def _spark(
    path: str, given: dict[str, str | None], first: Offsets, last: Offsets, topics: tuple[str, ...] | None
) -> Callable[[], _Engine]:
    from smqrt.pipeline.journal_spark import Spark

    location = path if locations.is_address(path) else str(folder(Path(path)).absolute())
    return partial(Spark, location, given, first, last, topics)


def _answer(make: Callable[[], _Engine], sql: str, kind: str, file: Path | None) -> None:
    """Runs the engine in a thread, so that Ctrl-C ends also what is busy in C or Java."""
    from smqrt.pipeline.session import interruptible

    engines: list[_Engine] = []

    def work(_stopping: threading.Event) -> int:
        with make() as engine:
            engines.append(engine)
            with polled_progress("query", engine.share):
                schema, batches = engine.run(sql)
                if file is not None:
                    return query_output.to_file(kind, file, schema, batches)
                batches = query_output.begun(batches)
            query_output.to_stdout(kind, schema, batches)
            return 0

    def cancel() -> None:
        for engine in engines:
            engine.cancel()

    rows = interruptible(work, cancel)
    if file is not None:
        click.echo(f"{many(rows, 'row')} in {file} ({size(file.stat().st_size)})")
