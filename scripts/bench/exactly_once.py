"""Kills pipelines and their hub with kill -9, and counts what became of the messages.

scripts/bench/exactly_once --drivers 6 --hubs 2 --rate 1000
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.pipeline.survival import Trial

FAULTS = ("after_commit", "before_commit", "")
"""The last one is a kill from outside at any moment."""


def main() -> int:
    """Runs one trial; the exit code is 0 when everything was done exactly once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drivers", type=int, default=6, help="kills of the pipelines (default 6)")
    parser.add_argument("--hubs", type=int, default=2, help="kills of the hub (default 2)")
    parser.add_argument("--rate", type=int, default=1000, help="messages a second (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder) / "app", given.rate)
        try:
            return run(trial, given.drivers, given.hubs, random.Random(given.seed))
        finally:
            trial.close()


def run(trial: Trial, drivers: int, hubs: int, chance: random.Random) -> int:
    """Does the kills, with the hub's evenly among them, and prints the figures."""
    began = time.monotonic()
    trial.start_hub()
    for number in range(drivers):
        fault = FAULTS[number % len(FAULTS)]
        due = hubs * (number + 1) // drivers - trial.hub_kills if not fault or number == drivers - 1 else 0
        live_and_die(trial, fault if not due else "", due, chance)
        say(
            began,
            f"driver kill {trial.driver_kills}, {trial.inside} of them inside a commit; hub kills: {trial.hub_kills}",
        )
    trial.start_driver()
    trial.wait_for_batches(2)
    trial.finish()
    figures = trial.figures()
    say(began, f"{asdict(figures)}")
    say(began, "exactly once" if figures.exact else "NOT exactly once")
    return int(not figures.exact)


def live_and_die(trial: Trial, fault: str, hubs: int, chance: random.Random) -> None:
    """One life of the pipelines: a few micro-batches, under which the hub may die and come back, then the end."""
    if fault:
        trial.start_driver(f"{fault}:{trial.batch() + chance.randint(2, 5)}")
        trial.wait_for_the_fault()
        return
    trial.start_driver()
    for _ in range(hubs):
        trial.wait_for_batches(1)
        time.sleep(chance.random())
        trial.kill_hub()
        time.sleep(1)
        trial.start_hub()
    trial.wait_for_batches(chance.randint(1, 4))
    time.sleep(chance.random())
    trial.kill_driver()


def say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
