"""Compares the broker's CPU per message with the journal on and off, in one interleaved run."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import brokers
from load import Generator
from rich.console import Console
from rich.table import Table
from shapes import Shape

BAR = 1.35
"""On the shapes where every message is an event of its own."""
_PAIRS = "--size 128 --pubs 100 --topics 100 --subs 100 --batch 1 --window 1"
SHAPES = [
    Shape("single", "1 to 1, 128 B, one write per message", "--size 128 --batch 1", {"off": BAR}),
    Shape("pairs", "100 pairs, 128 B, one write", _PAIRS, {"off": BAR}),
    Shape("ping", "ping by ETID", "--mode ping", {"off": BAR}),
    Shape("open", "20k msg/s open loop, 128 B", "--size 128 --rate 20000 --batch 1 --window 0", {"off": BAR}),
    Shape("bulk", "1 to 1, 128 B, bulk", "--size 128 --batch 64"),
    Shape("mixed", "16 rotating topics, mixed sizes", "--topics 16 --subs 16 --rotate 16 --vary --size 256"),
]


def main() -> None:
    options = parse()
    generator, console = Generator(), Console()
    with tempfile.TemporaryDirectory(prefix="smqrt-journal-") as folder:
        running = {"off": brokers.start("smqrt"), "on": brokers.start("smqrt", journaling_app(Path(folder)))}
        try:
            results = [(shape, measure(generator, shape, running, options)) for shape in chosen(options.only)]
        finally:
            for broker in running.values():
                broker.stop()
        disk_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.arrows"))
    console.print(table(results))
    console.print(f"{disk_bytes / 1e6:,.0f} MB were written to the journal.")
    if options.json:
        rows = [{"shape": shape.key, **reports} for shape, reports in results]
        options.json.write_text(json.dumps(rows, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/journal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often every shape runs (default 5)")
    parser.add_argument("--seconds", type=float, default=1, help="how long one measurement lasts (default 1)")
    parser.add_argument("--only", action="append", choices=[shape.key for shape in SHAPES], help="repeatable")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def chosen(only: list[str] | None) -> list[Shape]:
    return [shape for shape in SHAPES if not only or shape.key in only]


def journaling_app(folder: Path) -> Path:
    """The application of the comparison, with a hub that keeps a journal."""
    app = Path(shutil.copytree(brokers.APP, folder / "app"))
    preload = (app / ".preload").read_text("utf-8")
    plain, recording = ".create()", ".create{journal = true}"
    assert plain in preload, f"{brokers.APP}/.preload makes its hub in another way now"
    (app / ".preload").write_text(preload.replace(plain, recording), "utf-8")
    return app


def measure(generator: Generator, shape: Shape, running: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Medians by "off" and "on" of CPU us per message and of messages per second; the runs alternate."""
    reports: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for _ in range(options.rounds):
        for name, broker in running.items():
            reports[name].append(generator.run(shape, broker, options.seconds))
    keys = ("cpu_us_per_dlv", "dlv_per_s")
    return {name: {key: median(float(one[key]) for one in of) for key in keys} for name, of in reports.items()}


def table(results: list[tuple[Shape, dict[str, Any]]]) -> Table:
    made = Table(title=f"CPU us per message (bar {BAR}: where every message is an event of its own)")
    for column in ("shape", "off", "on", "on / off", "msg/s off", "msg/s on"):
        made.add_column(column, justify="left" if column == "shape" else "right")
    for shape, reports in results:
        off, on = reports["off"], reports["on"]
        ratio = on["cpu_us_per_dlv"] / off["cpu_us_per_dlv"]
        colour = "default" if not shape.bars else "green" if ratio <= BAR else "red"
        cpu = f"{off['cpu_us_per_dlv']:.3g}", f"{on['cpu_us_per_dlv']:.3g}", f"[{colour}]{ratio:.2f}[/]"
        made.add_row(shape.title, *cpu, f"{off['dlv_per_s']:,.0f}", f"{on['dlv_per_s']:,.0f}")
    return made


if __name__ == "__main__":
    main()
