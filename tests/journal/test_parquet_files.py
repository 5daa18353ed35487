"""Compacted files: their row groups and checksums, which of them are merged, and what a merge reads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smqrt.errors import JournalError
from smqrt.journal import arrow, parquet_files, tables
from smqrt.journal.manifest import MAX_TOPICS, DataFile
from smqrt.journal.parquet_files import FinishedFile, HourFile, merge_files
from smqrt.journal.payload_schema import TypedColumn
from smqrt.journal.planning import WantedTopics
from smqrt.journal.record import SEGMENT_COLUMNS, Row
from tests.journal.sensor_rows import NOON_US, row

HOUR_US = 3_600_000_000
NOON = NOON_US // HOUR_US


# ---- one file


def rows(first: int, end: int, **values: Any) -> list[Row]:
    return [row(seq, NOON_US + seq, **values) for seq in range(first, end)]


def batch_of(some: Sequence[Row]) -> Any:
    """The rows as a segment has them."""
    stream = arrow.schema_message("n1", "hub", 2) + b"".join(arrow.encode(some, arrow.WITH_MQTT))
    [batch] = pa.ipc.open_stream(stream).read_all().to_batches()
    return batch


def many(count: int) -> Any:
    """Rows that differ in their numbers only."""
    numbers = pa.array(range(count), pa.int64())
    constant = {"topic": "t", "flags": 0, "payload": b"x"}
    schema = tables.schema([column.name for column in SEGMENT_COLUMNS])
    columns = [
        numbers.cast(field.type)
        if field.name in ("seq", "ts")
        else pa.repeat(pa.scalar(constant.get(field.name), field.type), count)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def hour_file(journal: Path, *batches: tuple[str, Any], typed: TypedColumn | None = None) -> HourFile:
    """A file of an hour, to be closed: rows of brokers."""
    opened = HourFile(journal, "n1", NOON, batches[0][1].column("seq")[0].as_py(), typed)
    for broker, batch in batches:
        opened.add(batch, broker)
    return opened


def named(journal: Path, written: FinishedFile) -> DataFile:
    written.path.rename(journal / written.file.path)
    return written.file


def group_rows(path: Path) -> list[int]:
    metadata = pq.ParquetFile(path).metadata
    return [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]


def test_a_group_has_at_most_64_ki_rows(tmp_path: Path) -> None:
    opened = hour_file(tmp_path, ("hub", many(65_000)), ("hub", many(1000)))
    assert opened.next_seq == 66_000
    assert group_rows(opened.close().path) == [65_536, 66_000 - 65_536]


def test_a_group_has_rows_of_one_broker(tmp_path: Path) -> None:
    batches = [("old", batch_of(rows(0, 2))), ("old", batch_of(rows(2, 5))), ("new", batch_of(rows(5, 6)))]
    path = hour_file(tmp_path, *batches).close().path
    assert group_rows(path) == [5, 1]
    assert pq.ParquetFile(path).read(["broker"]).column("broker").to_pylist() == ["old"] * 5 + ["new"]


def test_the_entry_describes_the_rows(tmp_path: Path) -> None:
    first, second = rows(7, 9, topic="b", payload=b"12345"), rows(9, 12, topic="a", payload=b"")
    unordered = [first[1]._replace(seq=7), first[0]._replace(seq=8), *second, row(12, NOON_US, None, b"")]
    written = hour_file(tmp_path, ("hub", batch_of(unordered))).close()
    file = written.file
    assert written.path.parent == tmp_path / "data/date=2026-11-20/hour=12"
    assert written.path.name == ".n1-00000000000000000007.tmp"
    assert Path(file.path).name == "n1-00000000000000000007-00000000000000000012.parquet"
    assert (file.node, file.first, file.last, file.rows, file.topics) == ("n1", 7, 12, 6, ("a", "b"))
    assert (file.ts_min_us, file.ts_max_us, written.payload_bytes) == (NOON_US, NOON_US + 11, 10)
    assert (file.topic_filter, file.schemas, file.variant) == (None, (), False)


@pytest.mark.parametrize("topics", [MAX_TOPICS, MAX_TOPICS + 1])
def test_many_topics_become_a_bloom_filter(tmp_path: Path, topics: int) -> None:
    some = [row(seq, topic=f"t/{seq}") for seq in range(topics)]
    file = hour_file(tmp_path, ("hub", batch_of(some))).close().file
    wanted = [WantedTopics((f"t/{number}",)) for number in range(topics)]
    if topics == MAX_TOPICS:
        assert (len(file.topics or ()), file.topic_filter) == (topics, None)
    else:
        assert file.topics is None
        assert file.topic_filter
        assert all(one.may_be_in(file.topic_filter) for one in wanted)


def test_readers_can_skip_pages_of_all_columns_but_payloads(tmp_path: Path) -> None:
    path = hour_file(tmp_path, ("hub", batch_of(rows(0, 9)))).close().path
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    assert all(column.has_offset_index for column in columns)
    assert [column.path_in_schema for column in columns if not column.has_column_index] == ["payload"]
    assert {column.compression for column in columns} == {"ZSTD"}


def test_a_changed_page_is_an_error(tmp_path: Path) -> None:
    payload = os.urandom(3000)
    path = hour_file(tmp_path, ("hub", batch_of([row(0, payload=payload)]))).close().path
    data = path.read_bytes()
    at = data.index(payload) + 1000
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(path, page_checksum_verification=True).read(["payload"])


def test_a_file_that_was_written_again_replaces_the_first(tmp_path: Path) -> None:
    def again(source: Path, target: Path) -> None:
        pq.write_table(pq.ParquetFile(source).read(["seq"]), target)

    written = hour_file(tmp_path, ("hub", batch_of(rows(3, 9)))).close(again)
    assert pq.read_schema(written.path).names == ["seq"]
    assert (written.file.variant, written.file.bytes) == (True, written.path.stat().st_size)


@pytest.mark.parametrize("wrong", [[3, 4], [3, 5, 4], [4, 5, 6]])
def test_a_file_with_other_rows_is_refused(tmp_path: Path, wrong: list[int]) -> None:
    opened = hour_file(tmp_path, ("hub", batch_of(rows(3, 6))))
    with pytest.raises(JournalError, match="doesn't have the rows of its source; nothing is changed"):
        opened.close(lambda source, target: pq.write_table(pa.table({"seq": wrong}), target))


# ---- merging files


def test_a_merge_reads_every_row(tmp_path: Path) -> None:
    """Also of a group of one row, which a start behind it would leave out."""
    some = rows(0, 9)
    batches = [("old", batch_of(some[:1])), ("new", batch_of(some[1:4]))]
    one = named(tmp_path, hour_file(tmp_path, *batches).close())
    other = named(tmp_path, hour_file(tmp_path, ("new", batch_of(some[4:]))).close())
    merged = merge_files(tmp_path, [one, other], None)
    assert (merged.file.first, merged.file.last, merged.file.rows) == (0, 8, 9)
    table = pq.ParquetFile(merged.path).read()
    assert table.column("seq").to_pylist() == [*range(9)]
    assert table.column("broker").to_pylist() == ["old"] + ["new"] * 8


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_merged_group_is_sorted_by_topic(tmp_path: Path, is_written_again: bool) -> None:
    """Unless Spark writes it again: its groups would have gaps."""
    some = [row(seq, NOON_US + seq, topic) for seq, topic in enumerate(["b", "a", "b", "a"])]
    files = [named(tmp_path, hour_file(tmp_path, ("hub", batch_of(part))).close()) for part in (some[:2], some[2:])]
    copied = (lambda source, target: target.write_bytes(source.read_bytes())) if is_written_again else None
    numbers = pq.ParquetFile(merge_files(tmp_path, files, copied).path).read(["seq"]).column("seq").to_pylist()
    assert numbers == ([0, 1, 2, 3] if is_written_again else [1, 3, 0, 2])


def test_the_folder_of_a_merged_file_has_its_hours(tmp_path: Path) -> None:
    hours = [HourFile(tmp_path, "n1", NOON + hour, hour, None) for hour in (0, 1)]
    for hour, opened in enumerate(hours):
        opened.add(batch_of([row(hour, NOON_US + hour * HOUR_US)]), "hub")
    one, other = (named(tmp_path, opened.close()) for opened in hours)
    assert Path(merge_files(tmp_path, [one], None).file.path).parent.name == "hour=12"
    assert Path(merge_files(tmp_path, [one, other], None).file.path).parent.name == "hour=__HIVE_DEFAULT_PARTITION__"


def test_schemas_of_other_topics_are_not_those_of_the_merged_file(tmp_path: Path) -> None:
    typed = [TypedColumn({topics: "temp double"}) for topics in ("a/#", "a/#", "b/#")]
    files = [
        named(tmp_path, hour_file(tmp_path, ("hub", batch_of(rows(seq, seq + 1))), typed=one).close())
        for seq, one in enumerate(typed)
    ]
    assert merge_files(tmp_path, files[:2], None).file.schemas == (("a/#", "temp double"),)
    assert merge_files(tmp_path, files, None).file.schemas == ()


def test_a_merge_that_fails_leaves_no_file(tmp_path: Path) -> None:
    one = named(tmp_path, hour_file(tmp_path, ("hub", batch_of(rows(0, 3)))).close())
    other = named(tmp_path, hour_file(tmp_path, ("hub", batch_of(rows(3, 6)))).close())
    damaged = tmp_path / other.path
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    with pytest.raises(JournalError, match=r"can't be merged: .*journal verify"):
        merge_files(tmp_path, [one, other], None)
    damaged.unlink()
    with pytest.raises(FileNotFoundError):
        merge_files(tmp_path, [one, other], None)
    assert [path.name for path in (tmp_path / one.path).parent.iterdir()] == [Path(one.path).name]


# ---- which files are merged


def data_file(first: int, start_us: int, end_us: int | None = None, size: int = 10) -> DataFile:
    return DataFile(f"{first}", "n1", first, first + 9, 10, start_us, end_us or start_us, size)


def hours_of(*hours: int, size: int = 10) -> list[DataFile]:
    return [data_file(at * 10, hour * HOUR_US, size=size) for at, hour in enumerate(hours)]


def merged_numbers(files: list[DataFile], now_hour: int, max_bytes: int = 1000) -> list[list[int]]:
    found = parquet_files.merge_groups(files, now_hour * HOUR_US, max_bytes, lambda one, other: True)
    return [[file.first // 10 for file in group] for group in found]


def test_an_hour_is_merged_when_it_is_closed() -> None:
    files = hours_of(30, 30)
    assert merged_numbers(files, 31) == []
    assert merged_numbers(files, 32) == [[0, 1]]
    assert merged_numbers([*files, data_file(20, 31 * HOUR_US)], 31) == [[0, 1]], "rows of a later hour"


def test_a_day_is_merged_after_its_last_hour() -> None:
    files = hours_of(24, 24, 30, 47)
    assert merged_numbers(files, 48) == [[0, 1]]
    assert merged_numbers(files, 49) == [[0, 1, 2, 3]]
    assert merged_numbers(hours_of(23, 24, 24), 60) == [[1, 2]]
    assert merged_numbers([data_file(0, 23 * HOUR_US, 24 * HOUR_US), *hours_of(24)], 60) == []


def test_files_of_several_hours_wait_for_their_day() -> None:
    files = [data_file(0, 24 * HOUR_US, 25 * HOUR_US), data_file(10, 25 * HOUR_US)]
    assert merged_numbers(files, 40) == []
    assert merged_numbers(files, 60) == [[0, 1]]


def test_only_consecutive_files_are_merged() -> None:
    files = [*hours_of(1, 1), data_file(30, HOUR_US), data_file(40, HOUR_US)]
    assert merged_numbers(files, 60) == [[0, 1], [3, 4]]


def test_a_group_has_at_most_the_largest_size() -> None:
    assert merged_numbers(hours_of(1, 1, 1, size=10), 60, 30) == [[0, 1, 2]]
    assert merged_numbers(hours_of(1, 1, 1, size=10), 60, 29) == [[0, 1]]
    assert merged_numbers(hours_of(1, 1, size=10), 60, 20) == [[0, 1]]
    assert merged_numbers(hours_of(1, 1, size=10), 60, 19) == []


def test_files_that_do_not_fit_are_apart() -> None:
    asked: list[tuple[int, int]] = []

    def fits(one: DataFile, other: DataFile) -> bool:
        asked.append((one.first, other.first))
        return other.first != 20

    found = list(parquet_files.merge_groups(hours_of(1, 1, 1, 1), 60 * HOUR_US, 1000, fits))
    assert [[file.first for file in group] for group in found] == [[0, 10], [20, 30]]
    assert asked == [(0, 10), (10, 20), (20, 30)]


def test_files_below_a_complete_day_are_settled() -> None:
    files = hours_of(1, 24, 47)
    assert parquet_files.settled_below(files, 60 * HOUR_US) == 30
    assert parquet_files.settled_below(files, 48 * HOUR_US) == 10
    assert parquet_files.settled_below([], 60 * HOUR_US) is None
    crossing = [data_file(0, 23 * HOUR_US, 24 * HOUR_US), *hours_of(60)]
    assert parquet_files.settled_below(crossing, 90 * HOUR_US) == 0


def test_folders_are_named_by_hour_and_day() -> None:
    hour = parquet_files.hour_of(NOON_US + HOUR_US - 1)
    assert parquet_files.hour_of(NOON_US) == hour == parquet_files.hour_of(NOON_US + HOUR_US) - 1
    assert parquet_files.folder_of(hour) == "data/date=2026-11-20/hour=12"
    assert parquet_files.day_folder_of(hour) == "data/date=2026-11-20/hour=__HIVE_DEFAULT_PARTITION__"


def test_a_retired_file_stays_for_the_grace(tmp_path: Path) -> None:
    file = tmp_path / "data" / "x.parquet"
    file.parent.mkdir()
    file.write_bytes(b"x")
    assert parquet_files.compacted_path(tmp_path, "data/x.parquet") == file
    parquet_files.retire_files(tmp_path, [file, tmp_path / "data" / "gone.parquet"])
    retired = tmp_path / "retired" / "x.parquet"
    assert parquet_files.compacted_path(tmp_path, "data/x.parquet") == retired
    parquet_files.remove_retired(tmp_path, 60)
    assert retired.exists()
    os.utime(retired, (0, time.time() - 61))
    parquet_files.remove_retired(tmp_path, 60)
    assert not retired.exists()
