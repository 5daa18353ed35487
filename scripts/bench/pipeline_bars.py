"""Measures the bars of journal and pipelines: ratios of one interleaved run each; what slows all of them cancels."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import pipeline_live
import pipeline_queries
from pipeline_data import Measure, spark
from pipeline_encoder import encoder
from rich.console import Console
from rich.table import Table


class Bench:
    """What the measures share, made when first needed.

    Args:
        folder: for journals and checkpoints.
        options: of the command line.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.rounds = folder, options, options.rounds

    @cached_property
    def shelf(self) -> pipeline_queries.Shelf:
        return pipeline_queries.Shelf(self.folder / "shelf", self.options.rows)

    @cached_property
    def spark(self) -> Any:
        return spark(self.folder / "state")

    def stop(self) -> None:
        if "spark" in self.__dict__:
            self.spark.stop()
            del self.spark


def query(measure: Callable[[Any, pipeline_queries.Shelf, int], list[Measure]]) -> Callable[[Bench], list[Measure]]:
    return lambda bench: measure(bench.spark, bench.shelf, bench.rounds)


def live(measure: Callable[[Path, float, int], list[Measure]]) -> Callable[[Bench], list[Measure]]:
    """Those start pipelines in processes of their own: the Spark of the others must not be in their way."""

    def run(bench: Bench) -> list[Measure]:
        bench.stop()
        return measure(bench.folder, bench.options.seconds, bench.rounds)

    return run


MEASURES: dict[str, Callable[[Bench], list[Measure]]] = {
    "encoder": lambda bench: encoder(bench.rounds),
    "tuples": query(pipeline_queries.tuples),
    "native": query(pipeline_queries.native),
    "history": query(pipeline_queries.history),
    "duckdb": query(pipeline_queries.ducks),
    "stream": query(pipeline_queries.streams),
    "compaction": query(pipeline_queries.compaction),
    "latency": live(pipeline_live.latency),
    "idle": live(pipeline_live.idle),
}


def main() -> None:
    options = parse()
    console, found = Console(), dict[str, list[Measure]]()
    with benched(options) as bench:
        for name in options.only or MEASURES:
            with console.status(name):
                found[name] = MEASURES[name](bench)
    console.print(table(found))
    if options.json:
        options.json.write_text(json.dumps({name: list(map(asdict, ones)) for name, ones in found.items()}, indent=1))
    sys.exit(0 if all(one.met for ones in found.values() for one in ones) else 1)


@contextmanager
def benched(options: argparse.Namespace) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="smqrt-bench-") as folder:
        bench = Bench(Path(folder), options)
        try:
            yield bench
        finally:
            bench.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/pipeline", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the journal for queries (default 1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant runs (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a live pipeline is watched (default 20)")
    parser.add_argument("--only", action="append", choices=list(MEASURES), help="repeatable")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def table(found: dict[str, list[Measure]]) -> Table:
    shown = Table("measure", "value", "bar", "", "figures", title="Journal and pipelines")
    for one in (one for ones in found.values() for one in ones):
        bar = f"{'at most' if one.most else 'at least'} {one.bar:.3g} {one.unit}"
        verdict = "[green]met[/]" if one.met else "[red]not met[/]"
        shown.add_row(one.title, f"{one.value:.3g} {one.unit}", bar, verdict, one.detail)
    return shown


if __name__ == "__main__":
    main()
