"""kill -9 of the pipelines between the hub's commit and Spark's own, and of the hub: nothing is lost, nothing doubled.

The long version, with more kills, is scripts/bench/exactly_once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.survival import Trial

RATE = 100


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    trial = Trial(tmp_path / "app", RATE)
    yield trial
    trial.close()


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_kill_of_driver_and_hub(trial: Trial) -> None:
    trial.start_hub()
    trial.start_driver(fault="after_commit:1")
    trial.wait_for_the_fault()
    assert trial.inside == 1
    trial.start_driver(http=True)
    trial.wait_for_batches(2)
    trial.join_late()
    trial.kill_hub()
    trial.start_hub()
    trial.wait_for_batches(2)
    printed = trial.finish()
    figures = trial.figures()
    assert figures.exact, figures
    assert "Traceback" not in printed, printed[printed.index("Traceback") :][:5000]
    assert "Exception" not in printed
