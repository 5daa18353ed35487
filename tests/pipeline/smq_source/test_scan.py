"""Plans of scans: sizes in memory, limits of bytes, and the columns that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import ArrayType, DoubleType, StringType, StructType

from smqrt.errors import ArgumentError
from smqrt.journal.planning import Chunk
from smqrt.pipeline.smq_source import scan
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions
from smqrt.pipeline.smq_source.scan import Scan
from tests.pipeline.recorded import Recorded, schema


def segment(rows: int, length: int, skip: int = 0) -> Chunk:
    return Chunk("s", "wal", 0, length, skip, rows, "n1", 0)


# ---- offsets


def test_rows_between_offsets_are_counted_by_node() -> None:
    start, end = {"n1": 5, "n2": 9}, {"n1": 7, "n2": 9, "n3": 4}
    assert scan.spans(start, end) == {"n1": (5, 7), "n3": (0, 4)}
    assert scan.distance(start, end) == 6
    assert scan.distance({"n1": 7}, {"n1": 5}) == 0


def test_rows_that_are_not_wanted_may_be_gone() -> None:
    assert scan.removed({"n1": 3}, {"n1": 3}, {"n1": 7}) is None
    assert scan.removed({"n1": 7}, {"n1": 9}, {"n1": 7}) is None
    assert scan.removed({"n1": 3}, {"n1": 5}, {"n1": 7}) == (
        "Rows 3 to 4 of node n1 are gone (retention has removed them)"
    )
    assert scan.ahead({"n1": 7}, {"n1": 7}) is None
    assert scan.ahead({"n2": 1}, {"n1": 7}) == (
        "Node n2 ends at row 0, but had rows up to 1: the journal was replaced or truncated"
    )


def test_a_split_after_the_first_row_ends_a_batch() -> None:
    assert scan.before_split({}, {"n1": 5, "n2": 3}, {"n1": 1}) == {"n1": 1, "n2": 0}
    assert scan.before_split({"n1": 1}, {"n1": 5, "n2": 3}, {"n1": 1}) == {"n1": 5, "n2": 3}


# ---- sizes


def test_rows_of_compacted_files_take_three_times_their_bytes() -> None:
    compacted = Chunk("p", "parquet", 0, 5000, 0, 10, "n1", 0, None, 400)
    assert scan.memory_bytes([compacted]) == 1200
    assert scan.memory_bytes([segment(10, 1000)]) == 1000
    assert scan.memory_bytes([segment(10, 1000, skip=30), compacted]) == 250 + 1200
    assert scan.memory_bytes([segment(0, 0)]) == 0


def test_a_limit_of_bytes_cuts_the_range_until_it_fits() -> None:
    """The first rows are larger than the rest, so that the first guess is too many."""
    planned: list[int] = []

    def plan(start: Offsets, end: Offsets) -> list[Chunk]:
        rows = end["n1"] - start["n1"]
        planned.append(rows)
        return [segment(rows, sum(1000 if seq < 20 else 10 for seq in range(start["n1"], end["n1"])))]

    end, chunks = scan.limited_to_bytes(plan, {"n1": 0}, {"n1": 1000}, 10_000)
    assert (end, scan.memory_bytes(chunks)) == ({"n1": planned[-1]}, 1000 * planned[-1])
    assert 1 <= planned[-1] <= 10
    assert planned == sorted(planned, reverse=True)
    assert scan.limited_to_bytes(plan, {"n1": 0}, {"n1": 5}, 5000)[0] == {"n1": 5}
    assert scan.limited_to_bytes(plan, {"n1": 0}, {"n1": 5}, 1)[0] == {"n1": 1}, "one row, of any size"


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, 100_000),
        ({"parallelism": 4}, 33_334),
        ({"parallelism": 4, "rows_per_partition": 7}, 7),
        ({"bytes_per_partition": 1 << 20}, 10_000),
        ({"max_bytes": 2 << 20}, 20_000),
        ({"max_bytes": 4 << 20, "parallelism": 4}, 10_000),
        ({"max_bytes": 1, "parallelism": 4}, 10_000),
        ({"min_partitions": 1_000_000}, 1),
    ],
)
def test_tasks_are_small_enough(options: dict[str, Any], rows: int) -> None:
    """100,000 rows of 10 MiB; tasks at the same time share the memory of a micro-batch, and have at least 1 MiB."""
    given = ReadOptions(
        "/j", **{"parallelism": 1, "rows_per_partition": 1 << 20, "bytes_per_partition": 1 << 30, **options}
    )
    assert scan.rows_per_task(given, [segment(100_000, 10 << 20)]) == rows


# ---- columns


def json_column(kind: Any) -> StructType:
    return StructType().add("seq", "long", False).add("json", kind)


def test_the_column_json_is_a_struct_of_fields() -> None:
    inner = StructType().add("lat", DoubleType()).add("tags", ArrayType(StringType()))
    whole = json_column(StructType().add("temp", "double").add("place", inner))
    assert scan.check_schema(whole) == ["seq", "json"]
    assert scan.json_ddl(whole) == "temp double, place struct<lat: double, tags: array<string>>"
    assert scan.json_ddl(schema("seq", "topic")) is None


def test_another_column_json_is_refused() -> None:
    for kind, told in (
        (StringType(), "The column json is string; it must be a struct such as"),
        (ArrayType(DoubleType()), "The column json is array<double>"),
        (StructType().add("x", "binary"), "'binary' is not a type"),
    ):
        with pytest.raises(ArgumentError, match=told):
            scan.check_schema(json_column(kind))


def test_needed_columns_have_the_order_of_the_journal() -> None:
    assert scan.needed_columns(["payload", "seq"], "ts", "seq") == ["seq", "ts", "payload"]
    assert scan.needed_columns([]) == []


def test_a_batch_gets_the_columns_and_types_of_spark() -> None:
    batch = pa.record_batch({"a": pa.array([1, 2], pa.int64()), "b": pa.array(["x", "y"])})
    shaped = scan.shaped(batch, pa.schema([("b", pa.string()), ("a", pa.int32())]))
    assert (shaped.schema.names, shaped.column("a").type) == (["b", "a"], pa.int32())
    assert scan.shaped(batch, pa.schema([])).num_rows == 2, "a count needs no column"


# ---- scans


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "journal").add(100).seal()


def scanned(one: Scan, end: int = 100) -> list[int]:
    parts = one.parts(one.plan({"n1": 0}, {"n1": end}))
    return [seq for part in parts for batch in one.read(part) for seq in batch.column("seq").to_pylist()]


def test_a_filter_without_names_selects_nothing(recorded: Recorded) -> None:
    options = ReadOptions(str(recorded.path))
    assert Scan(options, schema("seq"), frozenset()).plan({}, {"n1": 100}) == []
    assert scanned(Scan(options, schema("seq"), frozenset(["site1/d3", "site1/+"]))) == [*range(3, 100, 10)]


def test_times_of_a_filter_are_inclusive(recorded: Recorded) -> None:
    first_us, last_us = (recorded.rows[seq].ts_us for seq in (10, 20))
    assert scanned(Scan(ReadOptions(str(recorded.path)), schema("seq"), None, (first_us, last_us))) == [*range(10, 21)]


def test_another_kind_of_task_has_no_rows(recorded: Recorded) -> None:
    assert list(Scan(ReadOptions(str(recorded.path)), schema("seq")).read(InputPartition(None))) == []


def test_checksums_are_compared_when_all_columns_are_read(recorded: Recorded) -> None:
    options = ReadOptions(str(recorded.path))
    journals = [Scan(options, schema(*names)).journal for names in ((), ("seq",), ("payload",), ("topic",))]
    assert [journal.verify for journal in journals] == [True, False, True, False]
    assert journals[0] is journals[2]
    assert journals[1] is journals[3]
