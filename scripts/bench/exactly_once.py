"""Kills pipelines and their hub with kill -9, lets disks and clocks fail, and counts what became of the messages.

scripts/bench/exactly_once --drivers 20 --hubs 20 --rate 400 --seed 1
"""

from __future__ import annotations

import argparse
import errno
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.pipeline.survival import PLAIN, Trial

FAULTS = ("after_commit", "before_commit", "")
"""The last one is a kill from outside at any moment."""
TROUBLES = (
    "disk full",
    "disk slow",
    "folder moved",
    "clock forward",
    "clock back",
    "clock far ahead",
    "hub in the future",
    "compactor killed",
)
"""What happens under living pipelines, each in turn."""
FORGOTTEN = ("sums", "echo", "kept")
"""Queries whose checkpoint is removed, each in turn."""


@dataclass(frozen=True)
class Life:
    """What happens between the start of a driver and its end.

    Attributes:
        plain, http: see `Trial.start_driver`; fault: how it dies, "" for from outside.
        steps: what happens under it, in order: "hub" for kill -9 of the hub, or one of `TROUBLES`.
        forgotten: the query whose checkpoint is removed before; the driver before was stopped, not killed, then.
        batches, pause_s: how many micro-batches pass besides, and how long it lives after that.
    """

    plain: bool
    http: bool
    fault: str
    steps: tuple[str, ...]
    forgotten: str
    batches: int
    pause_s: float


def plan(drivers: int, hubs: int, seed: int) -> list[Life]:
    """Returns the lives of a trial, each of which ends with kill -9; the same seed gives the same."""
    chance, lives = random.Random(seed), []
    troubles = [TROUBLES[number % len(TROUBLES)] for number in range(max(len(TROUBLES), drivers))]
    for number in range(drivers):
        plain, fault = number % 4 == 3, FAULTS[number % len(FAULTS)]
        due = hubs * (number + 1) // drivers - hubs * number // drivers
        steps = ["hub"] * due + [troubles[number]]
        chance.shuffle(steps)
        forgotten = FORGOTTEN[number // 4 % len(FORGOTTEN)] if number % 4 == 2 else ""
        lives.append(
            Life(plain, chance.random() < 0.5, fault, tuple(steps), forgotten, chance.randint(1, 4), chance.random())
        )
    return lives


class Course:
    """A trial on its way.

    Args:
        trial: the processes.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial, self._began_s = trial, time.monotonic()

    def run(self, lives: list[Life], minutes: float) -> int:
        """Lives all lives, but begins none after some minutes, and prints the figures; returns the exit code."""
        trial = self._trial
        trial.start_hub()
        trial.start_compactor()
        for number, life in enumerate(lives, 1):
            if time.monotonic() - self._began_s > 60 * minutes:
                self.say(f"{len(lives) - number + 1} lives are left out: the time is over")
                break
            self._live(life)
            self.say(
                f"life {number}: {life}; kills: driver {trial.driver_kills}, of these {trial.inside} inside a commit, "
                f"hub {trial.hub_kills}, compactor {trial.compactor_kills}"
            )
            if number == 2:
                trial.join_late()
        trial.start_driver()
        trial.wait_for_batches(2)
        trial.finish()
        if trial.batch(PLAIN) >= 0:
            trial.start_driver(plain=True)
            trial.catch_up(PLAIN)
        figures = trial.figures()
        self.say(f"{asdict(replace(figures, deliveries={}))}, {trial.uncertain} uncertain")
        for name, delivery in figures.deliveries.items():
            self.say(f"  {name}: {delivery}")
        self.say("exactly once" if figures.exact else "NOT exactly once")
        return int(not figures.exact)

    def _live(self, life: Life) -> None:
        trial = self._trial
        if life.forgotten and trial.batch(life.forgotten) >= 0:
            trial.start_driver(http=life.http)
            trial.wait_for_batches(1)
            trial.stop_driver()
            trial.forget_checkpoint(life.forgotten)
        fault = f"{life.fault}:{trial.batch(PLAIN if life.plain else 'echo') + life.batches + len(life.steps)}"
        trial.start_driver(fault if life.fault else "", life.http, life.plain)
        for step in life.steps:
            trial.wait_for_batches(1, or_its_end=bool(life.fault))
            self.say(f"  {step}")
            self._step(step)
        if life.fault:
            trial.wait_for_the_fault()
            return
        trial.wait_for_batches(life.batches)
        time.sleep(life.pause_s)
        trial.kill_driver()

    def _step(self, step: str) -> None:
        trial = self._trial
        assert trial.shims
        if step == "hub":
            self._kill_hub()
        elif step == "disk full":
            with trial.shims.disk("write", errno.ENOSPC):
                time.sleep(5)
        elif step == "disk slow":
            with trial.shims.disk("sync", delay_ms=3000):
                time.sleep(6)
        elif step == "folder moved":
            with trial.moved():
                time.sleep(4)
        elif step == "compactor killed":
            trial.kill_compactor()
        elif step == "hub in the future":
            with trial.shims.clock(3600):
                self._kill_hub()
                time.sleep(5)
            self._kill_hub()  # else its messages are left out for another minute
        else:
            ahead_s = {"clock forward": 3600, "clock back": -7200, "clock far ahead": 30 * 86400}[step]
            with trial.shims.clock(ahead_s):
                time.sleep(8)

    def _kill_hub(self) -> None:
        self._trial.kill_hub()
        time.sleep(1)
        self._trial.start_hub()

    def say(self, text: str) -> None:
        """Prints a line."""
        print(f"{time.monotonic() - self._began_s:6.1f} s  {text}", flush=True)


def main() -> int:
    """Runs one trial; the exit code is 0 when everything was done exactly once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drivers", type=int, default=20, help="kills of the pipelines (default 20)")
    parser.add_argument("--hubs", type=int, default=20, help="kills of the hub (default 20), besides those of a fault")
    parser.add_argument("--rate", type=int, default=400, help="messages a second (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan (default 0)")
    parser.add_argument("--minutes", type=float, default=30, help="begin nothing new after so long (default 30)")
    parser.add_argument("--keep", type=Path, help="a folder for everything, which stays; it must not be there")
    parser.add_argument("--plan", action="store_true", help="only print the plan")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    lives = plan(given.drivers, given.hubs, given.seed)
    if given.plan:
        print(*lives, sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial((given.keep or Path(folder)) / "app", given.rate, full=True)
        try:
            return Course(trial).run(lives, given.minutes)
        finally:
            trial.close()


if __name__ == "__main__":
    sys.exit(main())
