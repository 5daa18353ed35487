"""A hub and mosquitto with the same MQTT clients, in turn: CPU time of the broker for each delivered message."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tests.clients.mqtt.mosquitto import Mosquitto
from tests.conftest import Served

SHAPES = {
    "QoS 0": "--qos 0",
    "QoS 0, WebSocket": "--qos 0 --websocket",
    "QoS 0, 1 to 50": "--qos 0 --subs 50",
    "QoS 1": "--qos 1",
    "QoS 1, one in flight": "--qos 1 --inflight 1",
    "QoS 1, 1 to 50": "--qos 1 --subs 50",
    "QoS 1, filter #": "--qos 1 --filter #",
    "QoS 1, shared by 4": "--qos 1 --subs 4 --share",
    "QoS 2": "--qos 2",
    "20,000 retained": "--qos 0 --retained 20000",
}
BROKERS = ("hub", "mosquitto")


def main() -> None:
    options = parse()
    shapes = {name: words for name, words in SHAPES.items() if options.shapes.lower() in name.lower()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".preload").write_text('smq = require "smq.hub".create {mqtt = true}\n')
        # 8 MiB and no limit of messages, so that mosquitto drops nothing.
        mosquitto, hub = Mosquitto(Path(folder), "set_tcp_nodelay true\n"), Served(folder)
        try:
            ports = {"hub": (hub.port, hub.process.pid), "mosquitto": (mosquitto.port, mosquitto.process.pid)}
            measured = measure(shapes, ports, options)
        finally:
            mosquitto.stop()
            hub.stop()
    show(measured)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/mqtt_hub", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each shape runs at each broker (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each run lasts (default 2)")
    parser.add_argument("--shapes", default="", help="only those whose name contains this")
    return parser.parse_args()


def measure(shapes: dict[str, str], ports: dict[str, tuple[int, int]], options: argparse.Namespace) -> dict:
    """All brokers in turn, so that a change of the machine's load meets both."""
    measured: dict[tuple[str, str], list[dict]] = {}
    for _ in range(options.rounds):
        for name, words in shapes.items():
            for broker, (port, pid) in ports.items():
                if "websocket" in words and broker == "mosquitto":
                    continue  # it needs a listener of its own
                script = [sys.executable, str(Path(__file__).with_name("mqtt_hub_load.py")), str(port), str(pid)]
                command = [*script, *words.split(), "--seconds", str(options.seconds)]
                output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
                measured.setdefault((name, broker), []).append(json.loads(output))
    return measured


def show(measured: dict[tuple[str, str], list[dict]]) -> None:
    """Prints medians, and what was lost and doubled in all runs."""
    table = Table("shape", *(f"{one}, µs CPU" for one in BROKERS), "ratio", "lost", "doubled", title="MQTT brokers")

    def cpu_us(name: str, broker: str) -> float | None:
        runs = measured.get((name, broker))
        return median(run["cpu_us"] for run in runs) if runs else None

    for name in dict.fromkeys(name for name, _ in measured):
        ours, theirs = (cpu_us(name, broker) for broker in BROKERS)
        count: Callable[[str], str] = lambda key, name=name: " ".join(  # noqa: E731
            str(sum(run[key] for run in measured.get((name, broker), ()))) for broker in BROKERS
        )
        ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
        cells = (f"{ours:.2f}" if ours is not None else "", f"{theirs:.2f}" if theirs is not None else "")
        table.add_row(name, *cells, ratio, count("lost"), count("doubled"))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
