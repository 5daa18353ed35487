"""The command `scripts/simulate`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing import Pool

import click

from tests.cluster import channel_simulation, simulation

BATCH = 500
OF = {"hubs": simulation, "channels": channel_simulation}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("first", type=int, default=0)
@click.argument("count", type=int, default=1)
@click.option("--of", type=click.Choice(list(OF)), default="hubs", help="What the schedules are about.")
def main(first: int, count: int, of: str) -> None:
    """Work off COUNT schedules of clusters from the seed FIRST on.

    Each is a cluster whose links delay, break and heal, whose nodes die and start again, and whose clients come, go and
    publish; then a ledger says whether everyone got what was promised. Of a schedule that fails you see the fewest
    actions that fail. A million take an hour and a half of one core: scripts/simulate 0 1000000
    """
    start_s, done, failed = time.monotonic(), 0, 0
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    with Pool(os.cpu_count()) as pool:
        for faults in pool.imap_unordered(partial(work, of), batches):
            done = min(done + BATCH, count)
            failed += len(faults)
            report(of, faults)
            if done % (BATCH * 20) == 0:
                click.echo(f"{done:,} of {count:,} in {time.monotonic() - start_s:,.0f} s, {failed} failed", err=True)
    click.echo(f"{count:,} schedules, {failed} failed")
    raise SystemExit(bool(failed))


def work(of: str, seeds: Iterable[int]) -> list[tuple[int, str]]:
    """The seeds that fail, and how."""
    found = ((seed, simulation.fails(seed, OF[of].schedule(seed), OF[of].run)) for seed in seeds)
    return [(seed, fault) for seed, fault in found if fault]


def report(of: str, faults: list[tuple[int, str]]) -> None:
    for seed, fault in faults:
        click.echo(f"{seed}: {fault}")
        for action in simulation.smallest(seed, OF[of].schedule(seed), OF[of].run):
            click.echo(f"    {' '.join(map(str, action))}")


if __name__ == "__main__":
    main()
