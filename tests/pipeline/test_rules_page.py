"""Every example of help/pipeline-rules.md is a file that can be loaded, and whose queries Spark can plan as streams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import discover, testing
from smqrt.pipeline.checkpoint import QueryStart
from smqrt.pipeline.discover import Catalog, load
from smqrt.pipeline.graph import Graph, JournalSource, plans
from smqrt.pipeline.sinks import as_messages
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "smqrt/help/pipeline-rules.md").read_text("utf-8")
FILES = re.findall(r"^```\w+\n# pipelines/(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROWS = re.findall(r'^\{"topic".*\}$', PAGE, re.MULTILINE)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    (tmp_path / "messages.jsonl").write_text("\n".join(ROWS))
    return load(tmp_path)


def test_the_examples_are_planned(spark: Any, catalog: Catalog) -> None:
    testing.write_journal(catalog.folder / "messages.jsonl", catalog.folder / "journal")
    rows = JournalSource(str(catalog.folder / "journal"))
    graph = Graph(
        catalog,
        lambda source: rows.stream(spark, source, QueryStart({}, None), "page"),
        lambda reference: discover.table(spark, reference, catalog.folder),
    )
    planned = plans(catalog, catalog.queries())
    assert sorted(plan.name for plan in planned) == [
        "by_place",
        "clean",
        "hot",
        "kwh",
        "meters.dead_letters",
        "once",
        "readings.dead_letters",
        "stroke",
        "visits",
    ]
    assert all(as_messages(plan.make(graph), plan.declaration).isStreaming for plan in planned)


def test_every_option_of_an_alert_is_documented() -> None:
    import inspect

    from smqrt.pipeline import alert

    options = set(inspect.signature(alert).parameters) - {"to", "unknown"}
    assert [option for option in sorted(options) if f"| `{option}` |" not in PAGE] == []
