"""What a journal costs as the number of its files grows: plans, ends, retention and the start of a hub.

A generator writes a journal of any size in seconds to minutes: a real manifest and real indexes, and sparse files in
the place of rows. Ten billion messages of 300 bytes are 50,000 files of 200,000 rows. Each figure is CPU time in a
process of its own, cold (nothing of the journal is in its memory) and the second time; trust the ratios to the first
column.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from smqrt.journal import arrow, committed, index, manifest, retention, summary
from smqrt.journal.index import DATA, INDEX, INDEXED
from smqrt.journal.pages import DataFile
from smqrt.journal.reader import Journal
from smqrt.journal.recovery import recover
from smqrt.journal.settings import JournalSettings
from smqrt.journal.standing import Listing

ROWS = 200_000
FILE_BYTES = 60_000_000
START_US = 1_763_683_200_000_000
STEP_US = 100_000_000  # a file: 200,000 rows in 100 s are 2,000 a second
SEGMENTS, BATCHES, BATCH_ROWS, BATCH_BYTES = 300, 10_000, 20, 6400
TOPICS = tuple(f"site{at}/machine/temp" for at in range(20))
COUNTS = (100, 1_000, 10_000, 50_000)


# ---- the generator


def data_file(at: int) -> DataFile:
    """Returns what the manifest says of a file."""
    first, last, ts_us = at * ROWS, (at + 1) * ROWS - 1, START_US + at * STEP_US
    hour = time.strftime("date=%Y-%m-%d/hour=%H", time.gmtime(ts_us // 1_000_000))
    path = f"data/{hour}/n1-{first:020d}-{last:020d}.parquet"
    return DataFile(path, "n1", first, last, ROWS, ts_us, ts_us + STEP_US - 1, FILE_BYTES, TOPICS, None, 1, 1)


def generate(journal: Path, files: int, segments: int = SEGMENTS, on_disk: bool = True) -> None:
    """Writes a journal of `files` compacted files and `segments` segments behind them.

    Args:
        journal: its folder.
        files: compacted ones, with 200,000 rows each.
        segments: with 10,000 batches of 20 rows each.
        on_disk: make the files, sparse, not only what the manifest says of them.
    """
    with manifest.edit(journal) as changes:
        changes.add(map(data_file, range(files)))
        changes.nodes["n1"] = changes.settled["n1"] = files * ROWS
    for at in range(files) if on_disk else ():
        path = journal / data_file(at).path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, FILE_BYTES)
    for at in range(segments):
        write_segment(
            journal / "wal" / "n1", files * ROWS + at * BATCHES * BATCH_ROWS, START_US + (files + at) * STEP_US
        )
    committed.save(journal / "wal" / "n1", {"q": 1}, files * ROWS + segments * BATCHES * BATCH_ROWS)


def write_segment(folder: Path, first: int, ts_us: int) -> None:
    """Writes a segment's index, and a sparse file in the place of its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    schema, path, step_us = arrow.schema_message("n1", "hub"), folder / index.name(first), STEP_US // BATCHES
    with path.with_suffix(INDEXED).open("wb") as file:
        for at in range(BATCHES):
            begin_us, offset = ts_us + at * step_us, len(schema) + at * BATCH_BYTES
            numbers = (first + at * BATCH_ROWS, BATCH_ROWS, offset, BATCH_BYTES, begin_us, begin_us + step_us - 1)
            file.write(INDEX.pack(*numbers, 0, 0, 0))
    path.with_suffix(DATA).write_bytes(schema)
    os.truncate(path.with_suffix(DATA), len(schema) + BATCHES * BATCH_BYTES)
    summary.of(path.with_suffix(DATA))


# ---- what is measured


def measures(journal: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields what is done with a journal: its name, and a function."""
    reader = Journal(journal)
    end = max(manifest.load(journal).nodes.values())
    settings = JournalSettings(journal, retain_s=3650 * 86400.0, max_bytes=None)
    middle_us = START_US + end // ROWS // 2 * STEP_US
    yield "end", reader.end
    yield "begin", reader.begin
    yield "plan of 100,000 rows", lambda: reader.plan({"n1": end // 2}, {"n1": end // 2 + 100_000})
    yield "plan of the newest rows", lambda: reader.plan({"n1": end + 100}, reader.end())
    yield "plan of ten minutes", lambda: reader.plan({}, reader.end(), ts_us=(middle_us, middle_us + 600_000_000))
    yield "retention", lambda: retention.expired(journal, settings, time.time_ns() // 1000)
    yield "start of a hub", lambda: recover(journal / "wal" / "empty")
    yield "listing for remote readers", lambda: Listing(journal).text()


def measured(journal: Path) -> list[str]:
    """Returns lines `name cold_ms warm_ms` of CPU."""
    found = []
    for name, work in measures(journal):
        times_ms = []
        for _ in range(2):
            before_s = time.thread_time()
            work()
            times_ms.append(1000 * (time.thread_time() - before_s))
        found.append(f"{name}\t{times_ms[0]:.3f}\t{times_ms[1]:.3f}")
    return found


def in_a_process_of_its_own(journal: Path) -> dict[str, tuple[float, float]]:
    """Returns by name the milliseconds, cold and warm."""
    command = [sys.executable, __file__, "--measure", str(journal)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    fields = (line.split("\t") for line in lines)
    return {name: (float(cold), float(warm)) for name, cold, warm in fields}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="how many compacted files")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print("\n".join(measured(options.measure)))
        return
    columns: list[dict[str, tuple[float, float]]] = []
    for count in options.counts:
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            generate(Path(folder), count)
            print(f"{count} files: generated in {time.monotonic() - began_s:.1f} s", flush=True)
            columns.append(in_a_process_of_its_own(Path(folder)))
    print("| cold / warm, ms of CPU | " + " | ".join(f"{count:,} files" for count in options.counts) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in columns[0]:
        cells = (f"{column[name][0]:.2f} / {column[name][1]:.2f}" for column in columns)
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
