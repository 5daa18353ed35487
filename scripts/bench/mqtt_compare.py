"""MQTT messages a second from Python and from Lua, beside paho's own threaded loop, in one interleaved run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tests.clients.mqtt.mosquitto import Mosquitto

CONTESTANTS = ("paho", "python", "lua")
SHARE_BAR = 0.8
RATE_BARS = {0: 15_000, 1: 4_000}
WAIT_BAR_MS = 50.0

Run = tuple[float, float, float]  # messages a second; the longest wait of others, and what of it was computing, in ms
Measured = dict[tuple[str, int], list[Run]]  # by contestant and QoS


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        broker = Mosquitto(Path(folder))
        try:
            measured = measure(broker.port, options.rounds, options.seconds)
        finally:
            broker.stop()
    good = show(measured)
    sys.exit(0 if good else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench/mqtt", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant runs (default 3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each run lasts (default 2)")
    return parser.parse_args()


def measure(port: int, rounds: int, seconds: float) -> Measured:
    """All contestants in turn, so that a change of the machine's mood meets all of them."""
    measured: Measured = {}
    for _ in range(rounds):
        for qos in RATE_BARS:
            for name in CONTESTANTS:
                measured.setdefault((name, qos), []).append(run(name, port, qos, seconds))
    return measured


def run(name: str, port: int, qos: int, seconds: float) -> Run:
    script = Path(__file__).with_name("mqtt_load.py")
    command = [sys.executable, str(script), name, str(port), str(qos), str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds + 30).stdout
    time.sleep(0.2)  # the broker forgets the last one
    rate, wait_ms, held_ms = map(float, output.split())
    return rate, wait_ms, held_ms


def show(measured: Measured) -> bool:
    """Prints the table; whether all bars are met. Waiting is judged by what the process computed meanwhile: on a busy
    machine the clock tells about the other processes as well."""
    title = "There and back, 64 bytes, MQTT 5"
    table = Table("QoS", "client", "messages/s", "of paho", "bar", "others waited", "for computing", title=title)
    good = True
    for (name, qos), runs in sorted(measured.items(), key=lambda item: (item[0][1], CONTESTANTS.index(item[0][0]))):
        rate, wait_ms, held_ms = (
            median(run[0] for run in runs),
            max(run[1] for run in runs),
            max(run[2] for run in runs),
        )
        share = rate / median(run[0] for run in measured["paho", qos])
        ours = name != "paho"
        met = not ours or (share >= SHARE_BAR and rate >= RATE_BARS[qos] and held_ms <= WAIT_BAR_MS)
        good = good and met
        bar = f"{RATE_BARS[qos]:,}, {SHARE_BAR} of paho, {WAIT_BAR_MS:.0f} ms" if ours else ""
        waits = (f"{wait_ms:.0f} ms", f"{held_ms:.0f} ms") if ours else ("", "")
        table.add_row(str(qos), name, f"{rate:,.0f}", f"{share:.2f}", bar + ("" if met else " missed"), *waits)
    Console(width=120).print(table)
    return good


if __name__ == "__main__":
    main()
