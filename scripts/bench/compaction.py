"""What compaction is worth: queries over many small Parquet files and over compacted ones, and how long those are.

The small files are what a Parquet folder looks like that is written live: 200 rows each, a folder an hour. Each engine
asks both the same, in turn, so that load from elsewhere meets both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from smqrt.journal.compact import Options, compact
from smqrt.journal.reader import Journal

SMALL_ROWS = 200
_ROUNDS = 3
COUNT = "select topic, {minute} as minute, count(*) as rows from {files} group by 1, 2"
ONE_TOPIC = "select count(*) as rows, max(seq) as last from {files} where topic = 'site1/d17'"

Ask = Callable[[str, Path], list[Any]]
"""Runs a query over the Parquet files of a folder; returns its rows."""


def compacted(journal: Path) -> tuple[float, float]:
    """Compacts a whole journal that no hub writes.

    Args:
        journal: its folder.

    Returns:
        (bytes of the files for each byte of payload, microseconds a row).
    """
    began = time.perf_counter()
    done = compact(journal, Options(grace_s=0, everything=True))
    return done.file_bytes / done.payload_bytes, (time.perf_counter() - began) / done.rows * 1e6


def fragment(journal: Path, folder: Path) -> int:
    """Writes the rows of a journal as small files.

    Args:
        journal: its folder.
        folder: where they go, `date=…/hour=…/….parquet`.

    Returns:
        How many files.
    """
    import pyarrow
    from pyarrow import parquet

    reader, files = Journal(journal), 0
    for chunks in reader.plan(reader.begin(), reader.end(), max_rows=SMALL_ROWS):
        table = pyarrow.Table.from_batches([batch for chunk in chunks for batch in reader.tables(chunk)])
        hour = time.strftime("date=%Y-%m-%d/hour=%H", time.gmtime(table["ts"][0].value // 1_000_000))
        (folder / hour).mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / hour / f"{files:06d}.parquet", compression="zstd")
        files += 1
    return files


def faster(ask: Ask, small: Path, large: Path, queries: Sequence[str] = (COUNT, ONE_TOPIC)) -> list[float]:
    """Returns, for each query, how many times faster the compacted files answer it: the median of three pairs.

    Args:
        ask: an engine, `duckdb()` or `spark(session)`.
        small: the folder of `fragment`.
        large: the folder `data` of the journal.
        queries: with the places `{files}` and `{minute}`.

    Raises:
        AssertionError: the answers differ.
    """
    return [_ratio(ask, query, small, large) for query in queries]


def _ratio(ask: Ask, query: str, small: Path, large: Path) -> float:
    assert sorted(ask(query, small)) == sorted(ask(query, large)), query  # and both are warm now
    pairs = [(_seconds(ask, query, small), _seconds(ask, query, large)) for _ in range(_ROUNDS)]
    return median(slow / fast for slow, fast in pairs)


def _seconds(ask: Ask, query: str, folder: Path) -> float:
    began = time.perf_counter()
    ask(query, folder)
    return time.perf_counter() - began


def duckdb() -> Ask:
    """Returns DuckDB with two threads."""
    import duckdb as engine

    connection = engine.connect(config={"threads": 2})

    def ask(query: str, folder: Path) -> list[Any]:
        files = f"read_parquet('{folder}/*/*/*.parquet')"
        found: list[Any] = connection.sql(query.format(files=files, minute="epoch_us(ts) // 60000000")).fetchall()
        return found

    return ask


def spark(session: Any) -> Ask:
    """Returns Spark; each query lists the files anew, as a job of its own does."""

    def ask(query: str, folder: Path) -> list[Any]:
        files = f"parquet.`{folder}`"
        minute = "cast(unix_micros(ts) div 60000000 as bigint)"
        return [tuple(row) for row in session.sql(query.format(files=files, minute=minute)).collect()]

    return ask
