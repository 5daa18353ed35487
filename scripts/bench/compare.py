"""Compares CPU per delivered message with other brokers, in one interleaved run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import brokers
from load import Generator
from rich.console import Console
from rich.table import Table
from shapes import CONNECTS_BAR, IDLE_BYTES_BAR, SHAPES, Shape

Report = dict[str, Any]
FAULTS = ("lost", "gaps", "dup_or_disorder", "corrupt", "dead")
SLOWER = 1.03
"""Two runs of the same code can differ by as much."""
Results = dict[str, dict[str, list[Report]]]  # shape key → broker name → one report per round


def main() -> None:
    options = parse()
    chosen = [shape for shape in SHAPES if not options.only or shape.key in options.only]
    brokers.raise_file_limit()
    generator = Generator(options.python)
    console = Console()
    console.width = max(console.width, 160)
    names = [name for name in brokers.available() if name in (options.brokers or brokers.NAMES)]
    if options.against:
        names = ["smqrt", *(name for name in names if options.brokers and name != "smqrt"), options.against]
    console.print(
        f"load: {generator.name}; brokers: {', '.join(names)}; {options.rounds} rounds of {options.seconds} s"
    )
    results = measure(generator, chosen, names, options.rounds, options.seconds, console)
    console.print(messages_table(chosen, names, results))
    console.print(idle_table(names, results["idle"]) if "idle" in results else "")
    console.print(trouble(chosen, results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if slower := grown(chosen, results, options.against):
        sys.exit(f"more CPU than {options.against}: {', '.join(slower)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/compare", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often every shape runs (default 3)")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long one measurement lasts (default 1.5)")
    parser.add_argument(
        "--only", action="append", choices=[shape.key for shape in SHAPES], help="only this shape; repeatable"
    )
    parser.add_argument("--brokers", nargs="+", choices=brokers.NAMES, help="only these brokers")
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="compare with this commit of the repository, and with other brokers only if --brokers names them; "
        "fails when a shape costs more CPU than there in every round",
    )
    parser.add_argument(
        "--python", action="store_true", help="use the generator in Python, also where smqload is there"
    )
    parser.add_argument("--json", type=Path, help="also write every report to this file")
    return parser.parse_args()


def measure(
    generator: Generator, shapes: list[Shape], names: list[str], rounds: int, seconds: float, console: Console
) -> Results:
    """Runs every shape against every broker in turn, so that a change of the machine's mood meets all of them."""
    results: Results = defaultdict(lambda: defaultdict(list))
    with contextlib.ExitStack() as stack:
        running = {}
        for name in names:
            running[name] = brokers.start(name)
            stack.callback(running[name].stop)
        for number in range(rounds):
            for shape in shapes:
                console.print(f"round {number + 1}: {shape.title}", style="dim")
                for name in names:
                    if not carries(name, shape):
                        continue
                    if shape.is_idle:
                        report = _fresh(generator, shape, name)
                    else:
                        report = generator.run(shape, running[name], seconds)
                    results[shape.key][name].append(report)
    return results


def carries(name: str, shape: Shape) -> bool:
    """Whether a broker can take part in a shape."""
    is_ours = name not in brokers.NAMES or name == "smqrt"
    return is_ours or not (shape.websocket or (name == "floor" and not shape.has_floor))


def _fresh(generator: Generator, shape: Shape, name: str) -> Report:
    """Memory per connection means something only in a process that has not worked yet."""
    broker = brokers.start(name)
    try:
        return generator.run(shape, broker, 0.0)
    finally:
        broker.stop()


def middle(reports: list[Report], key: str) -> float:
    return median(float(report[key]) for report in reports)


def ratio_cell(peer: float, ours: float, bar: float | None) -> str:
    ratio = peer / ours if ours else 0.0
    if bar is None:
        return f"{peer:.3g} {ratio:.3g}x"
    colour = "green" if ratio >= bar else "red"
    return f"{peer:.3g} [{colour}]{ratio:.3g}x[/]/{bar:g}x"


def messages_table(shapes: list[Shape], names: list[str], results: Results) -> Table:
    peers = [name for name in names if name != "smqrt"]
    table = Table(title="CPU µs per delivered message, median (peer / ours, beside its bar)")
    for column in ["shape", "smqrt", *peers, "p50 / p99 µs", "msg/s"]:
        table.add_column(column, justify="left" if column == "shape" else "right", no_wrap=True)
    for shape in shapes:
        mine = results[shape.key].get("smqrt", [])
        if shape.is_idle:
            continue
        ours = middle(mine, "cpu_us_per_dlv") if mine else 0.0
        cells = [_peer_cell(results[shape.key].get(peer, []), ours, shape.bars.get(peer)) for peer in peers]
        table.add_row(shape.title, f"{ours:.3g}", *cells, *_own_cells(mine))
    return table


def _own_cells(mine: list[Report]) -> list[str]:
    if not mine:
        return []
    return [f"{middle(mine, 'p50_us'):.0f} / {middle(mine, 'p99_us'):.0f}", f"{middle(mine, 'dlv_per_s'):,.0f}"]


def _peer_cell(reports: list[Report], ours: float, bar: float | None) -> str:
    return ratio_cell(middle(reports, "cpu_us_per_dlv"), ours, bar) if reports else "–"


def idle_table(names: list[str], results: dict[str, list[Report]]) -> Table:
    table = Table(
        title=f"10,000 subscribed clients (bars: {IDLE_BYTES_BAR} bytes each, {CONNECTS_BAR:,} connects a second)"
    )
    for column in ["broker", "held", "bytes per client", "connects/s", "CPU µs per connect"]:
        table.add_column(column, justify="right")
    for name in (name for name in names if name in results):
        keys = ("ready", "bytes_per_conn", "conn_per_s", "cpu_us_per_conn")
        table.add_row(name, *(f"{middle(results[name], key):,.0f}" for key in keys))
    return table


def grown(shapes: list[Shape], results: Results, commit: str | None) -> list[str]:
    """Returns the shapes that cost more than at a commit: in each round, and by more than SLOWER in the median."""
    found = []
    for shape in shapes if commit else []:
        key = "cpu_us_per_conn" if shape.is_idle else "cpu_us_per_dlv"
        now, before = (sorted(float(one[key]) for one in results[shape.key][name]) for name in ("smqrt", str(commit)))
        if now[0] > before[-1] and median(now) > median(before) * SLOWER:
            found.append(f"{shape.title} ({median(now):.3g} µs, {median(before):.3g} before)")
    return found


def trouble(shapes: list[Shape], results: Results) -> str:
    """Returns one line per broker and shape that lost, doubled, reordered or corrupted something."""
    lines = []
    for shape in shapes:
        for name, reports in results[shape.key].items():
            sums = {key: sum(int(report.get(key, 0)) for report in reports) for key in FAULTS}
            if found := ", ".join(f"{key} {count}" for key, count in sums.items() if count):
                lines.append(f"{name}, {shape.title}: {found}")
    return "\n".join(lines) or "Nothing lost, doubled, reordered or corrupted in any run."


if __name__ == "__main__":
    main()
