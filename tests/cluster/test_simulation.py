"""Seeded schedules of clusters and of channels, and those that have once found a bug.

They take 6 ms of CPU each. SIMULATED_SCHEDULES=10000 runs more of them, `scripts/simulate` any.
"""

import os

import pytest

from tests.cluster import channel_simulation
from tests.cluster.simulation import run

SCHEDULES = int(os.environ.get("SIMULATED_SCHEDULES", "400"))
OF_CHANNELS = SCHEDULES // 2
PARTS = 4
KEPT = {
    2191: "a channel that was opened and closed again before the link was up stayed in the list of those to open",
    2422: "a channel that was joined anew went on where the one before had been with its interest",
    242: "what was in flight to a hub that left was not counted as lost",
    400: "who observed a topic before its hub joined was not told of subscribers at other nodes",
    27697: "what a hub had in flight was counted only while its channel was open",
}
"""The first seed that fails when the mend is taken out, and the bug."""


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    for seed in range(part, SCHEDULES, PARTS):
        try:
            run(seed)
        except Exception as error:
            error.add_note(f"scripts/simulate {seed} shows the actions that are needed for it")
            raise


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules_of_channels(part: int) -> None:
    for seed in range(part, OF_CHANNELS, PARTS):
        try:
            channel_simulation.run(seed)
        except Exception as error:
            error.add_note(f"scripts/simulate {seed} --of channels shows the actions that are needed for it")
            raise


@pytest.mark.parametrize("seed", KEPT, ids=str)
def test_kept(seed: int) -> None:
    run(seed)


def test_the_same_seed_is_the_same_schedule() -> None:
    assert ledger(7) == ledger(7)


def ledger(seed: int) -> list[tuple[bytes, list[int]]]:
    return [(client.uid, client.got) for machine in run(seed).machines for client in machine.clients]
