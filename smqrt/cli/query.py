"""`smqrt query`: SQL on what a hub has recorded, shown as a table, CSV, lines of JSON, or Parquet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from smqrt.cli.locations import (
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
from smqrt.journal import files

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

    from smqrt.journal.reader import Journal, Offsets


import csv
import os
import sys
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal
from io import TextIOWrapper
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import touch
from smqrt.printable import json_line, printable

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema


FORMATS = ("table", "csv", "json", "parquet")
TABLE_ROWS = 1000
"""A table has no more: it is as wide as its widest row, so all of it is in memory."""

_ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_CELL_CHARACTERS = 200
_GAP = 2
_GROUP_ROWS = 1 << 16
_GROUP_BYTES = 64 << 20
_WIDEST = 100_000


def format_of(chosen: str | None, to: Path | None) -> str:
    """Returns what is written: the ending of a file says it, unless it was said; a table without a file.

    Raises:
        ArgumentError: it isn't clear, or can't be.
    """
    found = chosen or (_ENDINGS.get(to.suffix.lower()) if to else "table")
    if found is None:
        raise ArgumentError(f"--to {to}: name a file that ends in {', '.join(_ENDINGS)}, or say --format")
    if found == "parquet" and to is None:
        raise ArgumentError("--format parquet is nothing for a terminal or a pipe: name a file with --to")
    return found


def to_file(kind: str, to: Path, schema: Schema, batches: Iterator[RecordBatch]) -> int:
    """Writes a file, which is there when it is complete, not earlier.

    Returns:
        How many rows it has.

    Raises:
        JournalError: it can't be written.
    """
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        touch(beside)
        rows = _parquet(beside, schema, batches) if kind == "parquet" else _text(kind, beside, schema, batches)
        os.replace(beside, to)
    except (OSError, NotImplementedError) as error:  # the second: Parquet has no such type
        raise JournalError(f"{to} can't be written: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        beside.unlink(missing_ok=True)
    return rows


def begun(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
    """Returns the same batches, when the first of them is there."""
    first = next(batches, None)
    return iter(()) if first is None else chain([first], batches)


def to_stdout(kind: str, schema: Schema, batches: Iterator[RecordBatch]) -> None:
    """Prints a result."""
    if kind == "table":
        _print_table(schema, batches)
    else:
        file = TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="")
        try:
            _WRITERS[kind](file, schema, batches, sys.stdout.isatty())
        finally:
            file.detach()


def _text(kind: str, path: Path, schema: Schema, batches: Iterator[RecordBatch]) -> int:
    with path.open("w", encoding="utf-8", newline="") as file:
        return _WRITERS[kind](file, schema, batches, False)


def _parquet(path: Path, schema: Schema, batches: Iterator[RecordBatch]) -> int:
    import pyarrow
    from pyarrow import parquet

    rows = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _grouped(batches):
            writer.write_table(pyarrow.Table.from_batches(group, schema).combine_chunks())
            rows += sum(batch.num_rows for batch in group)
    return rows


def _grouped(batches: Iterator[RecordBatch]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if sum(one.num_rows for one in group) >= _GROUP_ROWS or sum(one.nbytes for one in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


# ---- text


def _rows(batches: Iterator[RecordBatch]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _csv(file: TextIO, schema: Schema, batches: Iterator[RecordBatch], shown: bool) -> int:
    """`shown`: on a terminal, which what strangers have sent must not steer."""
    writer, rows = csv.writer(file, lineterminator="\n"), 0
    safe: Callable[[str], str] = printable if shown else str
    writer.writerow(map(safe, schema.names))
    for row in _rows(batches):
        writer.writerow([safe(_cell(value)) for value in row])
        rows += 1
    return rows


def _json(file: TextIO, schema: Schema, batches: Iterator[RecordBatch], shown: bool) -> int:
    rows = 0
    for row in _rows(batches):
        file.write(json_line(_fields(zip(schema.names, row, strict=True))) + "\n")
        rows += 1
    return rows


_WRITERS: dict[str, Callable[[TextIO, Schema, Iterator[RecordBatch], bool], int]] = {"csv": _csv, "json": _json}


def _fields(pairs: Any) -> dict[str, Any]:
    """An object of JSON: bytes that are no text stand under NAME_hex, as everywhere."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        try:
            found[name] = _json_value(value.decode() if isinstance(value, bytes) else value)
        except UnicodeDecodeError:
            found[f"{name}_hex"] = value.hex()
    return found


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _fields(value.items())
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if value is None or isinstance(value, bool | int | float | str) else _cell(value)


def _cell(value: Any) -> str:
    """A value as text; NULL is empty, bytes that are no text are hexadecimal behind 0x."""
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


# ---- table


def _print_table(schema: Schema, batches: Iterator[RecordBatch]) -> None:
    rows = list(islice(_rows(batches), TABLE_ROWS + 1))
    width = None if sys.stdout.isatty() else _WIDEST  # a pipe has room
    Console(width=width, highlight=False).print(_table(schema, rows[:TABLE_ROWS]), crop=False)
    if len(rows) > TABLE_ROWS:
        text = f"These are the first {TABLE_ROWS:,} rows; --to FILE, --format csv and --format json give all."
        Console(stderr=True).print(Text(text), soft_wrap=True)


def _table(schema: Schema, rows: Sequence[tuple[Any, ...]]) -> Table:
    from pyarrow import types

    shown = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for field in schema:
        is_number = types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
        shown.add_column(
            Text(printable(field.name)), justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        shown.add_row(*(Text(printable(_cell(value)[:_CELL_CHARACTERS])) for value in row))
    return shown


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
@click.option("--format", "chosen", type=click.Choice(FORMATS), help="A table, unless the file's ending says more.")
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
    file = None if to is None else files.local_folder(to, "--to", "write a file here, and copy it there")
    kind = format_of(chosen, file)
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
    from smqrt.pipeline.history import Spark

    location = path if files.is_address(path) else str(folder(Path(path)).absolute())
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
                    return to_file(kind, file, schema, batches)
                batches = begun(batches)
            to_stdout(kind, schema, batches)
            return 0

    def cancel() -> None:
        for engine in engines:
            engine.cancel()

    rows = interruptible(work, cancel)
    if file is not None:
        click.echo(f"{many(rows, 'row')} in {file} ({size(file.stat().st_size)})")
