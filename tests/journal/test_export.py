"""A range of a journal as one file."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import compact, tables
from smqrt.journal.inspection import export
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from tests.journal.sensor_rows import NOON_US, readings, row, write


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Half of it is compacted."""
    written = write(tmp_path / "j", readings(3000), segment_rows=1500)
    written += write(tmp_path / "j", [row(3000, NOON_US, None, b"\xff", flags=1), row(3001, NOON_US, "ü", b'a,\n"b')])
    compact.compact(tmp_path / "j", compact.CompactOptions(grace_s=0))
    return written


def exported(folder: Path, suffix: str, start: int = 0, topics: list[str] | None = None) -> Path:
    journal = Journal(folder / "j")
    to = folder / f"out{suffix}"
    assert export(journal, {"n1": start}, journal.end(), to, topics) > 0
    assert [path.name for path in folder.iterdir()] == ["j", to.name] or {path.name for path in folder.iterdir()} == {
        "j",
        to.name,
    }
    return to


def read(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read() if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables(tmp_path: Path, rows: list[Row], suffix: str) -> None:
    table = read(exported(tmp_path, suffix))
    assert table.schema.equals(tables.schema())
    assert table["payload"].to_pylist() == [one.payload for one in rows]
    assert table["seq"].to_pylist() == list(range(3002))
    few = read(exported(tmp_path, suffix, 1000, ["site1/#"]))
    assert few["seq"].to_pylist() == [one.seq for one in rows[1000:] if (one.topic or "").startswith("site1/")]


def test_lines_of_json(tmp_path: Path, rows: list[Row]) -> None:
    read = [json.loads(line) for line in exported(tmp_path, ".jsonl").read_text("utf-8").splitlines()]
    assert [one["seq"] for one in read] == list(range(3002))
    by_seq = {one["seq"]: one for one in read}
    assert by_seq[5]["payload"] == rows[5].payload.decode()
    assert (by_seq[3000]["payload_hex"], by_seq[3000]["flags"], by_seq[3001]["payload"]) == ("ff", ["direct"], 'a,\n"b')


def test_csv(tmp_path: Path, rows: list[Row]) -> None:
    with exported(tmp_path, ".csv", 2990).open(encoding="utf-8", newline="") as file:
        read = {int(one["seq"]): one for one in csv.DictReader(file)}
    assert sorted(read) == list(range(2990, 3002))
    assert (read[3000]["topic"], read[3000]["payload_hex"], read[3000]["flags"]) == ("", "ff", "1")
    assert (read[3001]["topic"], read[3001]["payload"], read[3001]["ts"]) == (
        "ü",
        'a,\n"b',
        "2026-11-20T12:00:00.000000Z",
    )


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv", ".jsonl"])
def test_nothing_is_a_file_too(tmp_path: Path, rows: list[Row], suffix: str) -> None:
    journal = Journal(tmp_path / "j")
    assert export(journal, journal.end(), journal.end(), tmp_path / f"out{suffix}") == 0
    assert (tmp_path / f"out{suffix}").exists()


def test_what_can_not_be_written(tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(ArgumentError, match=r"must end in one of \.parquet, \.arrow, \.csv, \.jsonl"):
        export(journal, {}, journal.end(), tmp_path / "out.xlsx")
    with pytest.raises(JournalError, match="can't be written: No such file or directory"):
        export(journal, {}, journal.end(), tmp_path / "nowhere" / "out.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JournalError, match=r"needs pyarrow, which is not installed: pip install 'smqrt\[spark\]'"):
        export(journal, {}, journal.end(), tmp_path / "out.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
