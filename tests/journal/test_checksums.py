"""Bits that flip in compacted files: readers get the rows that were written or an error, and verify names the file."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from smqrt.cli.journal import journal as commands
from smqrt.errors import JournalError
from smqrt.journal import compact, manifest
from smqrt.journal.compact import CompactOptions
from smqrt.journal.files import crc32
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from smqrt.journal.verification import verify
from tests.journal import written
from tests.journal.flips import flipped
from tests.journal.sensor_rows import readings, write

FLIPS = 100


@pytest.fixture(params=["an hour's file", "a merged file"])
def recorded(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, list[Row]]:
    rows = write(tmp_path, readings(1000), segment_rows=500)
    apart = CompactOptions(grace_s=0, everything=True, max_group_bytes=1, merge_bytes=0)
    compact.compact(tmp_path, apart if "merged" in request.param else CompactOptions(grace_s=0, everything=True))
    if "merged" in request.param:
        compact.compact(tmp_path, CompactOptions(grace_s=0))
    return tmp_path, rows


def file_of(journal: Path) -> Path:
    (file,) = manifest.load(journal).all_files()
    return journal / file.path


def test_flipped_bits_are_reported(recorded: tuple[Path, list[Row]]) -> None:
    journal, rows = recorded
    path = file_of(journal)
    refused = 0
    for _ in flipped(path, FLIPS, seed=5):
        report = verify(journal)
        assert [fault.path for fault in report.faults] == [path]
        try:
            read = list(Journal(journal).rows({}, {"n1": 1000}))
        except JournalError:
            refused += 1
        else:
            assert read == rows
    assert refused > FLIPS * 0.9
    assert not verify(journal).faults


def test_every_reader_reports_flipped_bits_of_a_footer(recorded: tuple[Path, list[Row]]) -> None:
    journal, _ = recorded
    path = file_of(journal)
    footer = int.from_bytes(path.read_bytes()[-8:-4], "little")
    for _ in flipped(path, FLIPS, seed=6, start=path.stat().st_size - footer - 8):
        with pytest.raises(JournalError, match=str(path)):
            list(Journal(journal).rows({}, {"n1": 1000}))


def test_pages_have_checksums_for_other_readers_too(recorded: tuple[Path, list[Row]]) -> None:
    path = file_of(recorded[0])
    refused = 0
    for _ in flipped(path, 20, seed=7, start=path.stat().st_size // 3, end=path.stat().st_size // 2):
        try:
            pq.ParquetFile(path, page_checksum_verification=True).read()
        except OSError:
            refused += 1
    assert refused >= 18


def test_files_of_older_versions_are_reported_without_checksums(tmp_path: Path) -> None:
    write(tmp_path, readings(100))
    compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True))
    values = written.as_version_1(tmp_path)
    for file in values["files"]:
        file |= {"crc32": None, "footer_crc32": None}
    manifest.write_json(tmp_path / manifest.FILE, values)
    report = verify(tmp_path)
    assert (report.faults, report.files, report.unchecked) == ([], 1, 1)
    result = CliRunner().invoke(commands, ["verify", str(tmp_path)])
    assert "1 compacted file of an older version without checksums" in result.output
    assert result.exit_code == 0


# ---- CRC-32

DATA = bytes(range(256)) * 999


def test_they_are_those_of_zlib() -> None:
    begun = crc32(memoryview(DATA)[:1000])
    assert crc32(DATA[1000:], begun) == crc32(bytearray(DATA)) == zlib.crc32(DATA)


@pytest.mark.parametrize("missing", ["", "zlib_ng"])
def test_a_fast_package_is_used_where_it_is_installed(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from smqrt.journal import files"
    code += "; print(files.crc32.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("zlib" if missing else "zlib_ng.zlib_ng")
