"""Compacted journals copied into Delta tables elsewhere, read by name there."""

from __future__ import annotations

import shutil
from pathlib import Path

import deltalake
import duckdb
import polars
import pytest

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import compact, delta_table
from tests.journal.sensor_rows import NOON_US, readings, row, write
from tests.pipeline import lakes

HOUR_US = 3_600_000_000


def record(journal: Path, first: int, count: int, start_us: int = NOON_US, merge_bytes: int = 0) -> None:
    times = [start_us + at * HOUR_US // 10 for at in range(count)]
    rows = [row(first + at, ts_us, f"t{at % 2}", b"%d" % at) for at, ts_us in enumerate(times)]
    write(journal, rows, segment_rows=10)
    compact.compact(journal, compact.CompactOptions(everything=True, merge_bytes=merge_bytes, grace_s=0))


def numbers(place: Path | str) -> list[int]:
    return polars.read_delta(str(place))["seq"].sort().to_list()


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """polars and deltalake read it by name, DuckDB the dataset that deltalake gives."""
    with lakes.bucket(monkeypatch) as bucket:
        place = f"{bucket}/messages"
        record(tmp_path, 0, 20)
        assert delta_table.update_copy(tmp_path, place) == (place, 2, 0, 2)
        assert delta_table.update_copy(tmp_path, place) == (place, 0, 0, 2)
        record(tmp_path, 20, 10, NOON_US + 26 * HOUR_US, merge_bytes=1 << 20)
        done = delta_table.update_copy(tmp_path, place)
        assert (done.removed, done.files) == (2, 2)
        assert numbers(place) == list(range(30))
        assert polars.scan_delta(place).filter(polars.col("seq") > 27).select("payload").collect().height == 2
        with duckdb.connect() as connection:
            connection.register("messages", deltalake.DeltaTable(place).to_pyarrow_dataset())
            assert connection.sql("select count(*), max(seq) from messages").fetchall() == [(30, 29)]


def test_removed_rows_stay_and_merged_rows_appear_once(tmp_path: Path) -> None:
    journal, place = tmp_path / "journal", tmp_path / "lake" / "messages"
    record(journal, 0, 20)
    delta_table.update_copy(journal, str(place))
    shutil.rmtree(journal)  # as retention does in the end
    record(journal, 20, 20, NOON_US + 30 * HOUR_US)
    assert delta_table.update_copy(journal, str(place)).files == 4
    compact.compact(journal, compact.CompactOptions(everything=True, grace_s=0))
    assert delta_table.update_copy(journal, str(place)).removed == 2
    assert numbers(place) == list(range(40))


def test_an_end_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed isn't copied again; what was copied only comes once."""
    journal, place = tmp_path / "journal", tmp_path / "lake"
    record(journal, 0, 40)

    def full(path: Path, system: object, to: str, makes_folders: bool) -> None:
        copied.append(to)
        if len(copied) > 2:
            raise OSError(28, "No space left on device")
        copy(path, system, to, makes_folders)

    copied: list[str] = []
    copy = delta_table._copy
    with monkeypatch.context() as patched:
        patched.setattr(delta_table, "_copy", full)
        patched.setattr(delta_table, "_FILES_PER_COMMIT", 1)
        with pytest.raises(JournalError, match=r"The Delta table in .* can't be written: .*No space left on device"):
            delta_table.update_copy(journal, str(place))
    assert numbers(place) == list(range(20))
    assert delta_table.update_copy(journal, str(place)).added == 2
    assert numbers(place) == list(range(40))


def test_a_table_of_something_else(tmp_path: Path) -> None:
    journal, other, place = tmp_path / "journal", tmp_path / "other", tmp_path / "lake"
    record(journal, 0, 20)
    delta_table.update_copy(journal, str(place))
    record(other, 0, 15, NOON_US + 50 * HOUR_US)
    with pytest.raises(JournalError, match="has rows of another journal with the same numbers"):
        delta_table.update_copy(other, str(place))
    deltalake.write_deltalake(tmp_path / "table", polars.DataFrame({"seq": [1]}))
    with pytest.raises(JournalError, match="was not created from a journal: choose another location"):
        delta_table.update_copy(journal, str(tmp_path / "table"))
    with pytest.raises(ArgumentError, match="nor a URI that pyarrow can write to"):
        delta_table.update_copy(journal, "ftp://host/x")
    assert numbers(place) == list(range(20))


def test_typed_columns(tmp_path: Path) -> None:
    """Of a table that was made with them; another type is refused rather than read wrong."""
    journal, place = tmp_path / "journal", str(tmp_path / "lake")
    for first, ddl in ((0, "temp double"), (100, None), (200, "temp string")):
        write(journal, readings(100, first=first))
        schemas = {"#": ddl} if ddl else {}
        compact.compact(journal, compact.CompactOptions(everything=True, schemas=schemas, merge_bytes=0))
        if first < 200:
            delta_table.update_copy(journal, place)
    assert polars.read_delta(place)["json"].struct.field("temp").count() == 100
    with pytest.raises(JournalError, match=r"typed column json as .* compact with the same --schema"):
        delta_table.update_copy(journal, place)
    assert numbers(place) == list(range(200))


def test_an_empty_journal(tmp_path: Path) -> None:
    write(tmp_path / "journal", readings(10))
    assert delta_table.update_copy(tmp_path / "journal", str(tmp_path / "lake")).files == 0
    assert numbers(tmp_path / "lake") == []
    assert delta_table.update_table(tmp_path / "journal").files == 0
