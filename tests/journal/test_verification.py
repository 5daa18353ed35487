"""Every damage of a journal is found and said in one sentence; a torn end, and nothing else, can be repaired."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smqrt.errors import JournalError
from smqrt.journal import committed, compact, manifest, readers, segment
from smqrt.journal.reader import Journal
from smqrt.journal.verification import VerifyReport, count_files, repair, verify
from tests.journal import written
from tests.journal.sensor_rows import readings, row, write


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """1000 rows in one compacted file, 2000 in two segments of 20 batches each."""
    write(tmp_path, readings(3000), batch=50)
    compact.compact(tmp_path, compact.CompactOptions(grace_s=0, max_group_bytes=1, merge_bytes=0))
    return tmp_path


@pytest.fixture
def segments(tmp_path: Path) -> list[Path]:
    write(tmp_path, readings(3000), batch=50)
    return segment.paths(tmp_path / "wal" / "n1")


def faults(journal: Path) -> list[str]:
    found = [str(fault) for fault in verify(journal).faults]
    assert all(one.count("\n") == 0 and one.endswith(".") for one in found)
    return found


def test_a_whole_journal(journal: Path) -> None:
    write(journal, readings(500, first=3000), batch=50)
    readers.save_report(journal, {"query": "q", "name": "q", "offset": {"n1": 1}, "time_us": 0})
    manifest.write_json(journal / "wal/n1" / committed.COMMITS_FILE, {"q": 3})
    assert verify(journal) == VerifyReport([], 2, 30, 1500, 2, 2000)


def test_an_empty_one_and_none(tmp_path: Path) -> None:
    assert verify(tmp_path) == VerifyReport()
    with pytest.raises(JournalError, match="is not a folder"):
        verify(tmp_path / "nowhere")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def test_a_flipped_byte_anywhere_in_a_segment_is_found(segments: list[Path], tmp_path: Path) -> None:
    chance = random.Random(3)
    size, whole = segments[0].stat().st_size, segments[0].read_bytes()
    for _ in range(30):
        flip(segments[0], at := chance.randrange(size))
        found = verify(tmp_path)
        segments[0].write_bytes(whole)
        assert not any(fault.torn for fault in found.faults)
        if at >= segment.read_index(segments[0])[0].offset:
            assert [fault.path for fault in found.faults] == [segments[0]]
            assert "its checksum is wrong" in str(found.faults[0])
            assert "restore it from a backup, or continue after it" in str(found.faults[0])
    assert faults(tmp_path) == []


def test_a_flipped_byte_in_an_index_is_found(segments: list[Path], tmp_path: Path) -> None:
    path = segments[0].with_suffix(".idx")
    whole = path.read_bytes()
    for at in range(64 * 3, 64 * 4 - 12):  # flags and the reserved number mean nothing here
        flip(path, at)
        assert faults(tmp_path), f"byte {at}"
        path.write_bytes(whole)


def test_what_is_said_of_a_segment(segments: list[Path], tmp_path: Path) -> None:
    flip(segments[1], segment.read_index(segments[1])[3].offset + 900)
    (found,) = faults(tmp_path)
    assert found.startswith(f"{segments[1]}: the batch with rows 1150 to 1199 at offset ")


def test_a_segment_that_is_missing(segments: list[Path], tmp_path: Path) -> None:
    segments[1].unlink()
    assert [one.partition(": ")[2] for one in faults(tmp_path)] == [
        "begins with 2000, but 00000000000000000000.arrows ends at 1000: rows are missing; "
        "restore it from a backup, or continue after it (--from, startingOffsets).",
        "is the index of a segment that is missing; "
        "restore it from a backup, or continue after it (--from, startingOffsets).",
    ]


def test_a_sealed_segment_that_is_cut(segments: list[Path], tmp_path: Path) -> None:
    os.truncate(segments[0], segments[0].stat().st_size - 10)
    report = verify(tmp_path)
    assert len(report.faults) == 1
    assert not report.faults[0].torn
    assert repair(tmp_path, report) == 0


def test_a_segment_of_another_node(segments: list[Path], tmp_path: Path) -> None:
    (tmp_path / "wal" / "n1").rename(tmp_path / "wal" / "n2")
    assert "it was written by node 'n1', not 'n2'" in faults(tmp_path)[0]


# ---- torn ends


@pytest.mark.parametrize("seed", range(25))
def test_a_torn_end_is_repaired(tmp_path: Path, seed: int) -> None:
    """Cut data, index or both anywhere: what was whole stays, the rest goes, and the journal is whole again."""
    rows = write(tmp_path, readings(400), batch=50)
    chance = random.Random(seed)
    (path,) = segment.paths(tmp_path / "wal" / "n1")
    if seed % 3 != 1:
        os.truncate(path, chance.randrange(path.stat().st_size))
    if seed % 3 != 0:
        os.truncate(path.with_suffix(".idx"), chance.randrange(64 * 8))
    report = verify(tmp_path)
    assert report.faults
    assert all(fault.torn for fault in report.faults)
    removed_bytes = repair(tmp_path, report)
    assert verify(tmp_path).faults == []
    reader = Journal(tmp_path)
    kept = list(reader.rows({"n1": 0}, reader.end()))
    assert removed_bytes > 0 or kept == rows, "only a lost index is made again without loss"
    assert kept == rows[: len(kept)]
    assert len(kept) % 50 == 0


def test_what_a_hub_is_writing_is_no_fault(segments: list[Path], tmp_path: Path) -> None:
    with segments[-1].open("ab") as file:
        file.write(b"half a batch")
    assert "12 bytes after its last batch" in faults(tmp_path)[0]
    held = segment.lock(tmp_path / "wal" / "n1")
    report = verify(tmp_path)
    assert report.faults == []
    os.close(held)
    report = verify(tmp_path)
    held = segment.lock(tmp_path / "wal" / "n1")
    with pytest.raises(JournalError, match="is written by process"):
        repair(tmp_path, report)
    os.close(held)


# ---- compacted files


@pytest.fixture
def file(journal: Path) -> Path:
    return journal / next(manifest.load(journal).all_files()).path


def test_a_file_that_is_missing(journal: Path, file: Path) -> None:
    file.unlink()
    assert faults(journal) == [f"{file}: is missing; restore it from a backup."]


def test_a_file_of_another_length(journal: Path, file: Path) -> None:
    os.truncate(file, 100)
    assert "has 100 bytes" in faults(journal)[0]


def test_a_file_that_is_no_parquet(journal: Path, file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))
    assert "is not a Parquet file" in faults(journal)[0]


def test_a_damaged_footer(journal: Path, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-100] + b"\xff" * 92 + data[-8:])
    assert "was changed after it was written: its checksum is wrong" in faults(journal)[0]


def test_other_rows_than_the_manifest_says(journal: Path, file: Path) -> None:
    table = pq.ParquetFile(file).read()
    pq.write_table(table.slice(1), file)
    text = written.as_version_1(journal)
    text["files"][0] |= {"bytes": file.stat().st_size, "crc32": None}
    (journal / "manifest.json").write_text(json.dumps(text))
    assert "has 999 rows, but 1000 from 0 to 999 in the manifest" in faults(journal)[0]
    shifted = table.set_column(1, table.schema.field("seq"), pa.array(range(1, 1001), pa.int64()))
    pq.write_table(shifted, file)
    text["files"][0] |= {"bytes": file.stat().st_size, "crc32": None}
    (journal / "manifest.json").write_text(json.dumps(text))
    assert "has rows 1 to 1000, but 0 to 999 in the manifest" in faults(journal)[0]


def test_gaps_between_files(journal: Path) -> None:
    text = written.as_version_1(journal)
    del text["files"][0]
    (journal / "manifest.json").write_text(json.dumps(text))
    found = faults(journal)
    assert any("is left over from an interrupted compaction" in one for one in found)
    text["nodes"]["n1"]["compacted_through"] = 1900
    (journal / "manifest.json").write_text(json.dumps(text))
    assert any("lists the rows below 1900 as compacted" in one for one in faults(journal))


def test_rows_between_files_and_segments(journal: Path) -> None:
    text = written.as_version_1(journal)
    last = text["files"].pop()
    text["nodes"]["n1"]["compacted_through"] = last["first"]
    (journal / "manifest.json").write_text(json.dumps(text))
    assert any(f"but only rows below {last['first']} are compacted" in one for one in faults(journal))


def test_small_files(journal: Path) -> None:
    (journal / "manifest.json").write_text("{")
    (journal / "txn.json").write_text("[]")
    (journal / "readers").mkdir()
    (journal / "readers" / "q.json").write_text("no")
    names = [Path(one.partition(": ")[0]).name for one in faults(journal)]
    assert sorted(names) == ["manifest.json", "q.json", "txn.json"]


def test_one_row_is_enough(tmp_path: Path) -> None:
    write(tmp_path, [row(0)])
    assert verify(tmp_path) == VerifyReport([], 1, 1, 1)


def test_an_index_that_is_lost(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(400), batch=50)
    (path,) = segment.paths(tmp_path / "wal" / "n1")
    path.with_suffix(".idx").unlink()
    report = verify(tmp_path)
    (fault,) = report.faults
    assert fault.torn
    assert fault.what.startswith("its index is empty or missing; the hub rebuilds it")
    repair(tmp_path, report)
    assert not verify(tmp_path).faults
    assert list(Journal(tmp_path).rows({}, {"n1": 400})) == rows


# ---- counts, gaps and single faults


def test_files_and_progress_are_counted(journal: Path) -> None:
    write(journal, readings(100, first=3000), batch=50)
    told: list[int] = []
    report = verify(journal, lambda: told.append(1))
    assert (report.segments, report.batches, report.rows) == (2, 22, 1100)
    assert (report.files, report.file_rows, report.unchecked) == (2, 2000, 0)
    assert len(told) == count_files(journal) == 4


def test_a_gap_after_a_crash_is_no_fault(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    written.write(tmp_path, [[segment.STEP + 3]], first=segment.STEP)
    report = verify(tmp_path)
    assert (report.faults, report.gaps) == ([], {"n1": [(5, segment.STEP)]})
    assert report.rows == 8


@pytest.mark.parametrize("missing", [1, 2, segment.STEP])
def test_a_gap_after_compacted_files_is_no_fault(tmp_path: Path, missing: int) -> None:
    end = 2 * segment.STEP
    write(tmp_path, [row(end - missing - 2), row(end - missing - 1)])
    write(tmp_path, [row(end)])
    compact.compact(tmp_path, compact.CompactOptions(grace_s=0))
    assert manifest.load(tmp_path).nodes == {"n1": end}
    assert faults(tmp_path) == []
    with manifest.edit(tmp_path) as state:
        state.nodes["n1"] = end + 1
    assert any(f"lists the rows below {end + 1} as compacted" in one for one in faults(tmp_path))


def test_a_batch_that_is_not_whole_is_described(segments: list[Path], tmp_path: Path) -> None:
    entries = segment.read_index(segments[0])
    os.truncate(segments[0], entries[-1].end - 10)
    (fault,) = faults(tmp_path)
    assert f"rows {entries[-1].first_seq} to 999 at offset {entries[-1].offset}" in fault
    assert f"(the file has {entries[-1].length - 10} of its {entries[-1].length} bytes)" in fault


def test_bytes_after_the_last_batch_are_counted(segments: list[Path], tmp_path: Path) -> None:
    with segments[0].open("ab") as file:
        file.write(b"x" * 7)
    (fault,) = verify(tmp_path).faults
    assert "7 bytes after its last batch belong to no batch" in fault.what
    assert not fault.torn


def test_a_torn_record_is_counted(segments: list[Path], tmp_path: Path) -> None:
    for path, is_torn in ((segments[0], False), (segments[-1], True)):
        index = path.with_suffix(".idx")
        whole = index.read_bytes()
        index.write_bytes(whole + bytes(13))
        (fault,) = verify(tmp_path).faults
        assert "13 bytes of a torn record are at its end" in fault.what
        assert (fault.path, fault.torn) == (index, is_torn)
        index.write_bytes(whole)


def test_a_file_in_two_places_is_a_fault(journal: Path) -> None:
    text = written.as_version_1(journal)
    text["files"][1]["first"] -= 1
    (journal / "manifest.json").write_text(json.dumps(text))
    assert any("rows are in two files" in one for one in faults(journal))
    text["files"][1]["first"] += 2
    (journal / "manifest.json").write_text(json.dumps(text))
    assert any("rows are in no file" in one for one in faults(journal))


def test_a_damaged_reservation_is_a_fault(segments: list[Path], tmp_path: Path) -> None:
    (segments[0].parent / segment.NUMBERS_FILE).write_text("x")
    (fault,) = faults(tmp_path)
    assert fault.startswith(f"{segments[0].parent / segment.NUMBERS_FILE}: is damaged")


def test_a_damaged_manifest_is_told_with_its_remedy(journal: Path) -> None:
    (journal / "manifest.json").write_text("{")
    (fault,) = faults(journal)
    assert fault.startswith(f"{journal / 'manifest.json'}: can't be read ({journal / 'manifest.json'} can't be read: ")
    assert fault.endswith("); restore it from a backup: it lists the compacted files.")
    assert "journal verify" not in fault


def test_pages_of_older_versions_are_read(journal: Path, file: Path) -> None:
    text = written.as_version_1(journal)
    for values in text["files"]:
        values |= {"crc32": None, "footer_crc32": None}
    (journal / "manifest.json").write_text(json.dumps(text))
    assert faults(journal) == []
    flip(file, file.stat().st_size // 3)
    (fault,) = faults(journal)
    assert fault.startswith(f"{file}: is damaged (")


def test_a_segment_that_is_removed_meanwhile_is_not_counted(segments: list[Path], tmp_path: Path) -> None:
    def remove_the_last() -> None:
        segments[-1].unlink(missing_ok=True)
        segments[-1].with_suffix(".idx").unlink(missing_ok=True)

    report = verify(tmp_path, remove_the_last)
    assert (report.faults, report.segments) == ([], len(segments) - 1)
