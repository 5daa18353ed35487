"""`smqrt query`: SQL on recorded messages; results as table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smqrt.cli.locations import (
    JournalCommand,
    cafile_option,
    chosen_range,
    folder,
    from_option,
    journal_location,
    opened_journal,
    plural,
    size,
    token_option,
    topics_option,
    until_option,
)
from smqrt.cli.terminal import polled_progress
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import files
from smqrt.printable import json_line, printable

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

FORMATS = ("table", "csv", "json", "parquet")
MAX_TABLE_ROWS = 1000
"""Maximum rows of a table on standard output; all of them are in memory to compute the column widths."""

_SUFFIXES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_MAX_CELL_CHARACTERS = 200
_COLUMN_GAP = 2
_GROUP_ROWS = 1 << 16  # of a Parquet row group; small groups compress badly
_GROUP_BYTES = 64 << 20
_PIPE_WIDTH = 100_000  # characters: in effect no limit


def format_of(chosen: str | None, to: Path | None) -> str:
    """Return the output format: the chosen one, else that of the file's suffix, else "table".

    Raises:
        ArgumentError: the suffix is unknown, or the format needs a file.
    """
    chosen_format = chosen or (_SUFFIXES.get(to.suffix.lower()) if to else "table")
    if chosen_format is None:
        raise ArgumentError(f"--to {to}: use a file name that ends in {', '.join(_SUFFIXES)}, or pass --format")
    if chosen_format == "parquet" and to is None:
        raise ArgumentError("--format parquet needs a file: pass --to")
    return chosen_format


def to_file(kind: str, to: Path, schema: Schema, batches: Iterator[RecordBatch]) -> int:
    """Write a file and return its number of rows; the file appears under its name when it is complete.

    Raises:
        JournalError: the file can't be written.
    """
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        files.touch(temporary)
        if kind == "parquet":
            import pyarrow
            from pyarrow import parquet

            rows = 0
            with parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
                for group in _grouped(batches):
                    writer.write_table(pyarrow.Table.from_batches(group, schema).combine_chunks())
                    rows += sum(batch.num_rows for batch in group)
        else:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                rows = _WRITERS[kind](file, schema, batches, False)
        os.replace(temporary, to)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a type that Parquet does not have
        raise JournalError(f"Cannot write {to}: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def to_stdout(kind: str, schema: Schema, batches: Iterator[RecordBatch]) -> None:
    """Print a result."""
    if kind != "table":
        file = TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="")
        try:
            _WRITERS[kind](file, schema, batches, sys.stdout.isatty())
        finally:
            file.detach()  # otherwise the wrapper would close standard output
        return
    from pyarrow import types

    rows = list(islice(_rows(batches), MAX_TABLE_ROWS + 1))  # one more than shown, to detect omitted rows
    table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), pad_edge=False, header_style="bold")
    for field in schema:
        is_number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(Text(printable(field.name)), justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows[:MAX_TABLE_ROWS]:
        table.add_row(*(Text(printable(_cell(value)[:_MAX_CELL_CHARACTERS])) for value in row))
    width = None if sys.stdout.isatty() else _PIPE_WIDTH  # in a pipe, do not truncate cells
    Console(width=width, highlight=False).print(table, crop=False)
    if len(rows) > MAX_TABLE_ROWS:
        text = f"Only the first {MAX_TABLE_ROWS:,} rows. For all rows use --to FILE, --format csv or --format json."
        Console(stderr=True).print(Text(text), soft_wrap=True)


def _grouped(batches: Iterator[RecordBatch]) -> Iterator[list[Any]]:
    """Yield lists of consecutive batches, each large enough for a row group."""
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(one.num_rows for one in group) >= _GROUP_ROWS or sum(one.nbytes for one in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _rows(batches: Iterator[RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _write_csv(file: TextIO, schema: Schema, batches: Iterator[RecordBatch], is_terminal: bool) -> int:
    writer, rows = csv.writer(file, lineterminator="\n"), 0
    escape: Callable[[str], str] = printable if is_terminal else str  # messages may contain control sequences
    writer.writerow(map(escape, schema.names))
    for row in _rows(batches):
        writer.writerow([escape(_cell(value)) for value in row])
        rows += 1
    return rows


def _write_json(file: TextIO, schema: Schema, batches: Iterator[RecordBatch], is_terminal: bool) -> int:
    rows = 0
    for row in _rows(batches):
        file.write(json_line(_json_fields(zip(schema.names, row, strict=True))) + "\n")
        rows += 1
    return rows


_WRITERS: dict[str, Callable[[TextIO, Schema, Iterator[RecordBatch], bool], int]] = {
    "csv": _write_csv,
    "json": _write_json,
}


def _json_fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; bytes that are not UTF-8 become NAME_hex, as in every `--json`."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        try:
            fields[name] = _json_value(value.decode() if isinstance(value, bytes) else value)
        except UnicodeDecodeError:
            fields[f"{name}_hex"] = value.hex()
    return fields


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _json_fields(value.items())
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)  # JSON has no decimals
    return value if value is None or isinstance(value, bool | int | float | str) else _cell(value)


def _cell(value: Any) -> str:
    """Return a value as text: NULL as "", bytes that are not UTF-8 as 0x and hexadecimal digits."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "0x" + value.hex()
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict | list | tuple):
        return json_line(_json_value(value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class _Engine(Protocol):
    """A SQL engine; see `duckdb_views.DuckDB`."""

    def __enter__(self) -> _Engine: ...
    def __exit__(self, *exception: object) -> None: ...
    def run(self, sql: str) -> tuple[Schema, Iterator[RecordBatch]]: ...
    def cancel(self) -> None: ...
    def share(self) -> float: ...


@click.command(cls=JournalCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sql")
@journal_location
@click.option("--spark", "on_spark", is_flag=True, help="Use Spark, which takes seconds to start, instead of DuckDB.")
@click.option(
    "--format", "chosen", type=click.Choice(FORMATS), help="Output format.  [default: by suffix of --to, else table]"
)
@click.option("--to", type=click.Path(dir_okay=False), help="File for the result: .csv, .json, .jsonl or .parquet.")
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
    """Run a SQL query on the messages of a journal.

    PATH is the folder of a journal, or of an application that has one. The view `messages` has a row for each message,
    with the columns of the journal, `text` and `json`. The view `compacted` has the rows of the compacted files.
    --topic, --from and --until select a range; the query does not read files outside it.

    \b
    Examples:
      smqrt query "select topic, count(*) from messages group by topic" plant
      smqrt query "select ts, json->>'temp' as temp from messages" plant --topic 'site1/#' --from 2h --to temp.csv
    """
    file = None if to is None else files.local_folder(to, "--to", "write a file here, and copy it there")
    kind = format_of(chosen, file)
    opened = opened_journal(path, token, cafile)
    first, last = chosen_range(opened, start, end)
    make: Callable[[], _Engine]
    if on_spark:
        from smqrt.pipeline.history import Spark

        location = path if files.is_address(path) else str(folder(Path(path)).absolute())
        make = partial(Spark, location, {"token": token, "cafile": cafile}, first, last, topics or None)
    else:
        from smqrt.journal.duckdb_views import DuckDB

        make = partial(DuckDB, opened, first, last, topics or None)
    _run(make, sql, kind, file)


def _run(make: Callable[[], _Engine], sql: str, kind: str, file: Path | None) -> None:
    """Run a query in a thread, so that Ctrl-C can cancel it while the engine is busy in C or Java."""
    from smqrt.pipeline.session import interruptible

    engines: list[_Engine] = []

    def work(_stopping: threading.Event) -> int:
        with make() as engine:
            engines.append(engine)
            with polled_progress("query", engine.share):
                schema, batches = engine.run(sql)
                if file is not None:
                    return to_file(kind, file, schema, batches)
                # Wait for the first batch: the progress bar must disappear before the first line is printed.
                batches = chain(list(islice(batches, 1)), batches)
            to_stdout(kind, schema, batches)
            return 0

    def cancel() -> None:
        for engine in engines:
            engine.cancel()

    rows = interruptible(work, cancel)
    if file is not None:
        click.echo(f"{plural(rows, 'row')} in {file} ({size(file.stat().st_size)})")
