"""The examples of help/format-smq.md, in their order, with a real hub; its tables name every option and column."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal.record import COLUMNS
from smqrt.pipeline.smq_source.options import BATCH_ROWS, KAFKA_NAMES, READ_OPTIONS, ROWS_PER_PARTITION, WRITE_OPTIONS
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until

PAGE = Path(__file__).parent.parent.parent / "smqrt" / "help" / "format-smq.md"
TEXT = PAGE.read_text("utf-8")
MESSAGE = "topic string, payload string"


def test_the_examples(spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub, names = JournalingHub(tmp_path / "app"), {"spark": spark}
    try:
        reading = spark.createDataFrame([("site1/d1", '{"device": "d1", "temp": 85.5}')], MESSAGE)
        reading.write.format("smq").mode("append").save(str(hub.journal))
        wait_until(lambda: hub.rows("site1/d1"), "the reading is in the journal")
        for example in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
            exec(re.sub('"(app|checkpoints)/', rf'"{tmp_path}/\1/', example), names)
        wait_until(lambda: len(hub.rows("alerts/d1")) == 2, "both messages are in the journal", 60)
    finally:
        if "query" in names:
            names["query"].stop()
        hub.stop()
    assert {row.payload for row in hub.rows("alerts/d1")} == {b'{"device":"d1","temp":85.5}', b"too hot"}
    assert "site1/d1" in capfd.readouterr().out


def rows_of(table: str) -> list[list[str]]:
    """Return the names in the first column of a section's table, one list per row."""
    section = TEXT.partition(f"## {table}\n")[2].partition("\n## ")[0]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]


def test_every_option_is_described() -> None:
    assert sorted(sum(rows_of("Options of reads"), [])) == sorted([*READ_OPTIONS, *KAFKA_NAMES])
    assert sorted(sum(rows_of("Writing"), [])) == sorted(WRITE_OPTIONS)
    assert f"| {ROWS_PER_PARTITION} |" in TEXT
    assert f"| {BATCH_ROWS} |" in TEXT


def test_every_column_is_described() -> None:
    assert sorted(sum(rows_of("Columns"), [])) == sorted(column.name for column in COLUMNS)
