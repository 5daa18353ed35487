"""Compacted journals as Delta tables, read by name with what reads Delta."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import duckdb
import polars
import pytest

from smqrt.errors import JournalError
from smqrt.journal import compact, delta_table
from tests.journal.sensor_rows import NOON_US, readings, row, write

HOUR_US = 3_600_000_000


def numbers(place: Path) -> list[int]:
    return polars.read_delta(str(place))["seq"].sort().to_list()


def test_the_rows_of_all_files_once(tmp_path: Path) -> None:
    """Two hours in files of their own, then of a day; and rows of another topic behind."""
    rows = [row(seq, NOON_US + seq * HOUR_US // 10, f"t{seq % 2}", b"%d" % seq) for seq in range(20)]
    write(tmp_path, rows, segment_rows=10)
    compact.compact(tmp_path, compact.CompactOptions(everything=True, merge_bytes=0))
    done = delta_table.update_table(tmp_path)
    assert (done.added, done.removed, done.files) == (2, 0, 2)
    assert numbers(done.table) == list(range(20))
    assert delta_table.update_table(tmp_path) == done._replace(added=0)
    write(tmp_path, [row(seq, NOON_US + 26 * HOUR_US, "t0") for seq in range(20, 30)])
    compact.compact(tmp_path, compact.CompactOptions(everything=True, grace_s=0))
    again = delta_table.update_table(tmp_path)
    assert again.files < 3
    assert again.removed == 2, "the two hours were joined"
    assert numbers(done.table) == list(range(30))


def test_names_filters_and_folders(tmp_path: Path) -> None:
    write(tmp_path, readings(3000), segment_rows=1000)
    compact.compact(tmp_path, compact.CompactOptions(everything=True, schemas={"#": "device string, temp double"}))
    place = delta_table.update_table(tmp_path).table
    lazy = polars.scan_delta(str(place))
    noon = datetime.fromtimestamp(NOON_US / 1e6, UTC)
    assert lazy.filter(polars.col("ts") == noon).select("seq").collect()["seq"].to_list() == [0]
    assert lazy.filter(polars.col("seq") >= 2998).select(polars.len()).collect().item() == 2
    assert lazy.select("date").unique().collect()["date"].to_list() == [noon.date()]
    assert lazy.select(polars.col("json").struct.field("temp").count()).collect().item() == 3000
    with duckdb.connect() as connection:
        connection.register("messages", deltalake.DeltaTable(place).to_pyarrow_dataset())
        assert connection.sql("select count(*), max(seq) from messages").fetchall() == [(3000, 2999)]


def test_typed_columns_that_change(tmp_path: Path) -> None:
    """A column of another type is left out, rather than read wrong."""
    for at, ddl in ((0, "temp double"), (100, "temp string")):
        write(tmp_path, readings(100, first=at))
        compact.compact(tmp_path, compact.CompactOptions(everything=True, schemas={"#": ddl}, merge_bytes=0))
        place = delta_table.update_table(tmp_path).table
        assert ("json" in polars.scan_delta(str(place)).collect_schema()) == (at == 0)
        assert numbers(place) == list(range(at + 100))


def test_an_empty_journal(tmp_path: Path) -> None:
    write(tmp_path, readings(10))
    assert delta_table.update_table(tmp_path).files == 0
    assert numbers(tmp_path / "data") == []


def test_compaction_leaves_the_log_alone(tmp_path: Path) -> None:
    """Also the tidying after a run that was killed."""
    write(tmp_path, readings(10))
    compact.compact(tmp_path, compact.CompactOptions(everything=True))
    delta_table.update_table(tmp_path)
    (tmp_path / "compact.lock").write_text("killed")
    compact.compact(tmp_path)
    assert numbers(tmp_path / "data") == list(range(10))


def test_without_deltalake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(JournalError, match=r"pip install 'smqrt\[delta\]'"):
        delta_table.update_table(tmp_path)
