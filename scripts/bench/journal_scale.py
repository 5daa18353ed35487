"""Cost of a journal as the number of its files grows: plans, queries, merging, retention and the start of a hub.

Journals of all sizes are made and measured in turn, several times: see `journal_scale_data`. Ten billion messages of
300 bytes are 50,000 files of 200,000 rows. A figure is the median of what a process of its own needs, cold (nothing of
the journal is in its memory) and the second time; trust the ratios to the first column.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import duckdb
import pyarrow.parquet
from journal_scale_data import STEP_US, TOO_YOUNG, TOPICS, Shape, generate

from smqrt.journal import compact, retention
from smqrt.journal.announcer import JournalListing
from smqrt.journal.duckdb_views import DuckDB
from smqrt.journal.reader import Journal
from smqrt.journal.recovery import recover
from smqrt.journal.settings import JournalSettings

SHAPES = tuple(Shape(*counts) for counts in ((100, 3), (100, 300), (1_000, 300), (10_000, 300), (50_000, 300)))
RANGE_ROWS = 100_000
TOPIC = TOPICS[3]
COUNT = "select count(*) as n, max(octet_length(payload)) as longest from messages"
TEN_MINUTES_US = 600_000_000

LIBRARIES = duckdb, pyarrow.parquet
"""They are loaded before anything is measured."""

Figures = dict[str, tuple[float, float]]
"""By name what it costs, cold and the second time."""


def measures(journal: Path, shape: Shape) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields what is done with a journal: its name, and a function."""
    reader, node = Journal(journal), "n1"
    end = reader.end()
    some = {node: shape.middle}, {node: shape.middle + RANGE_ROWS}
    settings = JournalSettings(journal, retain_s=3650 * 86400.0, max_bytes=None, hard_bytes=None, min_free_bytes=0)
    times = (shape.middle_us, shape.middle_us + TEN_MINUTES_US)
    half_us = shape.segments_us + shape.segments // 2 * STEP_US + STEP_US // 2
    yield "where it ends", reader.end
    yield "where it begins", reader.begin
    yield "the first row of a minute", lambda: reader.offsets_at(shape.middle_us)
    yield "a plan of 100,000 rows", lambda: reader.plan(*some)
    yield "a plan of ten minutes", lambda: reader.plan({}, end, ts_us=times)
    yield "a plan of all segments", lambda: reader.plan({node: shape.behind}, end)
    yield "a plan of half of them, by time", lambda: reader.plan({}, end, ts_us=(half_us, 1 << 62))
    yield "SQL: a topic in 100,000 rows", lambda: _asked(reader, some)
    yield "retention", lambda: retention.expired(journal, settings, time.time_ns() // 1000)
    yield "start of a hub", lambda: recover(journal / "wal" / "empty")
    yield "listing for remote readers", lambda: JournalListing(journal).text()
    merging = replace(TOO_YOUNG, merge_bytes=128 << 20)
    yield "merging an hour of 12 files", lambda: compact.compact(journal, merging)  # the second time there is none


def _asked(reader: Journal, some: tuple[dict[str, int], dict[str, int]]) -> None:
    with DuckDB(reader, *some, [TOPIC]) as duckdb:
        ((found,),) = (batch.to_pylist() for batch in duckdb.run(COUNT)[1])
    assert found == {"n": RANGE_ROWS // len(TOPICS), "longest": 300}, found


def measured(journal: Path, shape: Shape) -> Figures:
    """Returns what all measures cost, milliseconds of CPU of all threads."""
    found = {}
    for name, work in measures(journal, shape):
        times_ms = []
        for _ in range(2):
            before_s = time.process_time()
            work()
            times_ms.append(1000 * (time.process_time() - before_s))
        found[name] = times_ms[0], times_ms[1]
    return found


def in_a_process_of_its_own(journal: Path, shape: Shape) -> Figures:
    """Returns the same, of a process that knows nothing of the journal yet."""
    command = [sys.executable, __file__, "--measure", str(journal), "--shapes", _text(shape)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def rounds(shapes: Sequence[Shape], count: int) -> list[Figures]:
    """Makes and measures journals in turn; returns the medians of each."""
    taken: list[list[Figures]] = [[] for _ in shapes]
    for turn in range(count):
        for shape, figures in zip(shapes, taken, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                began_s = time.monotonic()
                generate(Path(folder, "journal"), shape)
                made_s = time.monotonic() - began_s
                print(f"round {turn + 1}: {shape.files:,} files made in {made_s:.1f} s", file=sys.stderr, flush=True)
                figures.append(in_a_process_of_its_own(Path(folder, "journal"), shape))
    return [_medians(figures) for figures in taken]


def _medians(figures: Sequence[Figures]) -> Figures:
    return {name: tuple(median(one[name][at] for one in figures) for at in (0, 1)) for name in figures[0]}


def by_spark(shapes: Sequence[Shape], count: int) -> list[float]:
    """Returns the seconds by the clock that a warm Spark needs for the topic in 100,000 rows."""
    from pipeline_data import interleaved, spark

    from smqrt.pipeline import read_journal

    def ask(journal: Path, shape: Shape) -> None:
        ends = {"start": _offset(shape.middle), "end": _offset(shape.middle + RANGE_ROWS)}
        rows = read_journal(session, journal, topics=TOPIC, **ends).selectExpr("count(*)", "max(octet_length(payload))")
        assert rows.first() == (RANGE_ROWS // len(TOPICS), 300)

    with tempfile.TemporaryDirectory() as folder:
        session = spark(Path(folder, "state"))
        journals = {shape: Path(folder, _text(shape)) for shape in shapes}
        for shape, journal in journals.items():
            generate(journal, shape)
        took = interleaved({shape: partial(ask, journal, shape) for shape, journal in journals.items()}, count)
        session.stop()
    return [took[shape].seconds for shape in shapes]


def _offset(seq: int) -> str:
    return json.dumps({"n1": seq})


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split(":")))


def _text(shape: Shape) -> str:
    return f"{shape.files}:{shape.segments}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shape, nargs="+", default=SHAPES, help="like 100:3, files and segments")
    parser.add_argument("--rounds", type=int, default=3, help="how often all are measured")
    parser.add_argument("--spark", action="store_true", help="ask Spark too, which takes a minute")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure, options.shapes[0])))
        return
    table = rounds(options.shapes, options.rounds)
    titles = (f"{shape.files:,} files, {shape.segments} segments" for shape in options.shapes)
    print(f"| cold / warm, ms of CPU | {' | '.join(titles)} |\n{'|---' * (len(table) + 1)}|")
    for name in table[0]:
        print(f"| {name} | {' | '.join('{:.2f} / {:.2f}'.format(*figures[name]) for figures in table)} |")
    if options.spark:
        seconds = by_spark(options.shapes, options.rounds)
        print(f"| Spark: the same, s by the clock | {' | '.join(f'{one:.2f}' for one in seconds)} |")


if __name__ == "__main__":
    main()
