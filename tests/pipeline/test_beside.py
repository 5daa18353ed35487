"""`smqrt serve --pipelines` with the real thing: the telemetry application, its hub, its pipelines in Spark."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.journal.reader import Journal
from smqrt.journal.record import Flag, Row
from tests.conftest import REPOSITORY, Served
from tests.support.waiting import wait_until

START_S, STOP_S = 300, 40  # of Spark and a first micro-batch, when others compute too


def published(journal: Path, topic: str) -> list[Row]:
    """What pipelines have put into the journal."""
    reader = Journal(journal)
    rows = reader.rows(reader.begin(), reader.end(), [topic])
    return [row for row in rows if row.flags & Flag.PIPELINE]


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_statistics_come_back_and_everything_ends(serve: Callable[..., Served], tmp_path: Path) -> None:
    application = tmp_path / "telemetry"
    ignored = shutil.ignore_patterns(".journal", ".pipelines")
    shutil.copytree(REPOSITORY / "app_preload" / "telemetry", application, ignore=ignored)
    served = serve("--pipelines", application)
    served.stop_s = STOP_S
    pid = int(served.wait_for(r"^pipelines of telemetry: started, process (\d+)$")[1])
    rows = wait_until(lambda: published(application / ".journal", "stats/boiler"), served.lines, START_S)
    told = json.loads(rows[0].payload)
    assert told["device"] == "boiler"
    assert told["low"] <= told["avg"] <= told["high"]
    assert re.fullmatch(r"[\w-]+:\d+", rows[0].txn or "")
    assert served.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert "starting again" not in served.output
