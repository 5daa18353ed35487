"""The journal that the measures read, and a Spark for them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from smqrt.journal import arrow, segment
from smqrt.journal.record import Row
from smqrt.pipeline import session

K = TypeVar("K", bound=Hashable)

START_US = 1_795_273_200_000_000
TOPICS = 1000
FLUSH_ROWS, BUSY_ROWS = 64, 1024
"""Rows of a flush when a hub takes 6,400 messages a second, and when it takes 100,000."""
SEGMENT_ROWS = 200_000
WARM_UPS = 2
"""The JVM compiles what it does again and again."""


@dataclass
class Measure:
    """One line of the table.

    Attributes:
        title: what is compared.
        value: the ratio, or the figure that `unit` names.
        bar: what it must reach; `most` says whether from below.
        detail: the figures behind it.
    """

    title: str
    value: float
    bar: float
    most: bool = False
    unit: str = "x"
    detail: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bar if self.most else self.value >= self.bar


def payload(seq: int, chance: random.Random) -> bytes:
    """Returns a device's report of 64 to 512 bytes, about 290 in the mean; no two are equal."""
    head = f'{{"device":"d{seq % TOPICS}","seq":{seq},"temp":{chance.uniform(-20, 90):.2f},"status":"ok","values":['
    values = [f"{chance.randrange(100000)}" for _ in range(chance.randrange(0, 77))]
    return f"{head}{','.join(values)}]}}".encode()


def made_rows(first: int, count: int) -> list[Row]:
    """Returns rows of a thousand topics, two thousand a second."""
    chance = random.Random(first)
    return [
        Row(
            seq, START_US + seq * 500, f"site1/d{seq % TOPICS}", 5000 + seq % TOPICS, None, None, 77, "u", 0, body, None
        )
        for seq in range(first, first + count)
        for body in (payload(seq, chance),)
    ]


def make_journals(rows: int, folders: dict[Path, int]) -> int:
    """Writes the same rows as hubs do; returns the bytes of all payloads.

    Args:
        rows: how many.
        folders: of each journal, and the rows of its flushes.
    """
    size_bytes = 0
    for first in range(0, rows, SEGMENT_ROWS):
        made = made_rows(first, min(SEGMENT_ROWS, rows - first))
        size_bytes += sum(len(row.payload) for row in made)
        for folder, flush_rows in folders.items():
            write_segment(folder / "wal" / "n1", made, flush_rows)
    return size_bytes


def write_segment(folder: Path, rows: list[Row], flush_rows: int) -> None:
    file = segment.SegmentFile.open(folder, rows[0].seq, "n1", "bench")
    for batch in pieces(rows, flush_rows):
        file.append(arrow.encode(batch), batch[0].seq, len(batch), batch[0].ts_us, batch[-1].ts_us, 0)
    file.close()


def pieces(rows: list[Row], size: int) -> Iterator[list[Row]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def spark(state: Path) -> Any:
    """Starts Spark with the settings that pipelines have on one machine."""
    return session.start_spark("local[2]", "smqrt bench", state, {"spark.driver.memory": "3g"})


@dataclass(frozen=True)
class Took:
    """Medians of one contestant.

    Attributes:
        seconds: by the clock.
        cpu_s: of this process and all below it.
    """

    seconds: float
    cpu_s: float


def interleaved(contestants: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, Took]:
    """Runs all in turn, `rounds` times after warming up; returns the medians of each."""
    taken: dict[K, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(WARM_UPS + rounds):
        for name, run in contestants.items():
            started, cpu = time.perf_counter(), cpu_s(os.getpid())
            run()
            if turn >= WARM_UPS:
                taken[name].append((time.perf_counter() - started, cpu_s(os.getpid()) - cpu))
    return {name: Took(*map(median, zip(*runs, strict=True))) for name, runs in taken.items()}


def compared(title: str, slow: Took, fast: Took, bar: float, detail: str) -> Measure:
    """Returns how many times longer one takes than the other. The CPU's ratio is what a busy machine doesn't change."""
    return Measure(title, slow.seconds / fast.seconds, bar, detail=f"{detail}; by CPU {slow.cpu_s / fast.cpu_s:.2g} x")


def cpu_s(process: int) -> float:
    """Returns the CPU seconds of a process and of those below it, with what has ended there."""
    below: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(path.name))
            ticks[int(path.name)] = sum(map(int, fields[11:15]))
    found, total = [process], 0
    while found:
        one = found.pop()
        total += ticks.get(one, 0)
        found += below.get(one, [])
    return total / os.sysconf("SC_CLK_TCK")
