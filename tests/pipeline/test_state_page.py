"""The example of help/pipeline-state.md runs, and what the page types shows what queries remember."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import stateful
from tests.conftest import REPOSITORY
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

PAGE = (REPOSITORY / "smqrt/help/pipeline-state.md").read_text("utf-8")
EXAMPLE, *LOOKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COUNTS = "@publish(to='OUT/n', mode='update')\ndef counts(readings): return readings.groupBy('device').count()\n"
DEFAULT = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


@pytest.fixture
def app(tmp_path: Path, spark: Any) -> Iterator[Application]:
    hub = JournalingHub(tmp_path / "hub")
    (tmp_path / "plant").mkdir()
    yield Application(tmp_path / "plant", hub, spark)
    hub.stop()


def test_the_example_runs_and_its_state_is_shown(
    app: Application, spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    app.write(EXAMPLE.replace('topics="site1/#"', app.source) + COUNTS)
    app.send({"device": "d1"}, {"device": "d2"}, {"device": "d1"})
    assert app.run(republish=True) == 0, app.told
    plain = spark.newSession()  # as the reader's own: it knows nothing of how pipelines keep state
    plain.conf.set("spark.sql.streaming.stateStore.providerClass", DEFAULT)
    capfd.readouterr()
    for code in LOOKS:
        exec(code.replace('"plant/', f'"{app.folder}/'), {"spark": plain})
    shown = capfd.readouterr().out
    assert {tuple(row) for row in re.findall(r"\|(d\d)\s*\|(\d)\s*\|", shown)} == {("d1", "2"), ("d2", "1")}
    assert sorted(re.findall(r"\|(d\d)\s*\|\d{13}\|(\w+)\s*\|", shown)) == [("d1", "false"), ("d2", "false")]
    assert sorted(re.findall(r"\|\s*(d\d)\s*\|\s*20\d\d-\d\d-\d\d [\d:.]+\s*\|", shown)) == ["d1", "d2"]
    assert re.search(r"\|0\s*\|transformWithState\w*\s*\|\w+\s*\|\d+\s*\|\d+\s*\|\d+\s*\|", shown), shown


def test_every_option_is_described() -> None:
    options = set(inspect.signature(stateful).parameters) - {"unknown"}
    assert [option for option in sorted(options) if f"| `{option}` |" not in PAGE] == []
