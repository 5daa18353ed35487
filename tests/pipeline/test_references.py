"""References: small files as tables, read again when they change, with one sentence for whatever is wrong with them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from smqrt.errors import PipelineError
from smqrt.pipeline import discover, reference
from smqrt.pipeline.api import Declaration, declaration_of


def declared(path: str, schema: str | None = None) -> Declaration:
    @reference(path, schema=schema)
    def devices(df: Any) -> Any:
        return df

    found = declaration_of(devices)
    assert found
    return found


def rows(spark: Any, folder: Path, path: str, schema: str | None = None) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in discover.table(spark, declared(path, schema), folder).collect()]


CSV = "device,place,floor\nd1,hall,1\nd2,,2\n"


def test_columns_of_csv_files_have_inferred_types(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(CSV)
    assert rows(spark, tmp_path, "devices.csv") == [("d1", "hall", 1), ("d2", None, 2)]


def test_a_schema_picks_columns_and_says_their_types(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text("since,device,floor\n2026-11-21 12:00:00Z,NA,1\n")
    found = rows(spark, tmp_path, "devices.csv", "device string, floor double, since timestamp")
    assert [(device, floor, since.replace(tzinfo=UTC)) for device, floor, since in found] == [
        ("NA", 1.0, datetime(2026, 11, 21, 12, tzinfo=UTC))
    ]


@pytest.mark.parametrize(
    "text", ['{"device": "d1", "floor": 1}\n{"device": "d2"}\n', '[{"device": "d1", "floor": 1}, {"device": "d2"}]']
)
def test_json_is_one_object_a_line_or_a_list(spark: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "devices.json").write_text(text)
    assert rows(spark, tmp_path, "devices.json", "device string, floor int") == [("d1", 1), ("d2", None)]


def test_a_folder_is_all_its_files(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    for number in (1, 2):
        parquet.write_table(pyarrow.table({"device": [f"d{number}"]}), tmp_path / "devices" / f"{number}.parquet")
    assert rows(spark, tmp_path, "devices") == [("d1",), ("d2",)]


@pytest.mark.parametrize(
    ("name", "text", "schema", "said"),
    [
        ("other.csv", CSV, None, r"/devices\.csv does not exist; a path is relative to the folder of pipelines\."),
        ("devices.csv", CSV, "device string, plce string", "has no column 'plce'; it has device, place, floor"),
        ("devices.csv", CSV + "d3,roof,top\n", "device string, floor int", r"Row #4: .*invalid value 'top'\."),
        ("devices.csv", "", None, "can't be read: Empty CSV file"),
        ("devices.csv", CSV, "device strin", "schema='device strin' can't be read: "),
    ],
)
def test_what_is_wrong_is_one_sentence(
    spark: Any, tmp_path: Path, name: str, text: str, schema: str | None, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PipelineError, match=rf"test_references\.py:\d+: @reference devices.*{said}") as caught:
        discover.table(spark, declared("devices.csv", schema), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_one_sentence(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "devices.xlsx").write_text("PK")
    with pytest.raises(
        PipelineError, match=r"the name of .*devices\.xlsx must end with \.csv, \.json, \.jsonl, \.ndjson, \.parquet\."
    ):
        discover.table(spark, declared("devices.xlsx"), tmp_path)


class Looking:
    """A watch over one reference; a second passes between two looks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.said = 0.0, list[str]()
        monkeypatch.setattr(discover.time, "monotonic", lambda: self.now_s)
        self.watch = discover.ReferenceWatch([declared("devices.csv")], folder, self.said.append)

    def look(self, times: int) -> list[int]:
        found = []
        for _ in range(times):
            self.now_s += discover.CHECK_INTERVAL_S
            found += self.watch.versions(["devices"])
        return found


def test_a_change_counts_once_after_the_file_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "devices.csv"
    file.write_text(CSV)
    looking = Looking(tmp_path, monkeypatch)
    assert looking.look(2) == [0, 0]
    file.write_text(CSV + "d3,roof,3\n")
    assert looking.watch.versions(["devices"]) == [0]
    assert looking.look(3) == [0, 1, 1]
    os.utime(file, (1, 1))
    assert looking.look(3) == [1, 2, 2]
    assert looking.watch.versions(["another"]) == []
    assert looking.said == []


def test_an_unreadable_file_is_reported_once_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "devices.csv"
    file.write_text(CSV)
    looking = Looking(tmp_path, monkeypatch)
    file.unlink()
    assert looking.look(4) == [0] * 4
    file.write_text("a,b\n1\n")
    assert looking.look(4) == [0] * 4
    assert [sentence.endswith("The previous rows stay in use.") for sentence in looking.said] == [True, True]
    file.write_text(CSV)
    assert looking.look(3) == [0, 1, 1]
