"""A journal that the first version has written, as it is in `journal_of_version_1.zip`, needs no step by its user."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import pytest

from smqrt.journal import committed, compact, manifest, recovery, retention
from smqrt.journal.compact import CompactOptions
from smqrt.journal.reader import Journal
from smqrt.journal.settings import JournalSettings
from smqrt.journal.verification import verify
from tests.journal.sensor_rows import readings

ROWS = list(readings(60))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Sixty rows: forty of them in two compacted files, twenty in two segments."""
    with zipfile.ZipFile(Path(__file__).parent / "journal_of_version_1.zip") as archive:
        archive.extractall(tmp_path)
    assert json.loads((tmp_path / manifest.FILE).read_text())["version"] == 1
    return tmp_path


def test_it_is_read(journal: Path) -> None:
    reader = Journal(journal)
    assert (reader.begin(), reader.end()) == ({"n1": 0}, {"n1": 60})
    assert list(reader.rows({}, reader.end())) == ROWS
    assert reader.offsets_at(ROWS[50].ts_us) == {"n1": 50}
    report = verify(journal)
    assert (report.faults, report.rows, report.file_rows, report.unchecked) == ([], 20, 40, 2)


def test_a_hub_goes_on_with_it(journal: Path) -> None:
    recovered = recovery.recover(journal / "wal/n1")
    assert (recovered.next_seq, recovered.removed_bytes, recovered.txns) == (60, 0, {"q": 3})
    settings = JournalSettings(journal, retain_s=1.0, max_bytes=None)
    retention.remove(journal, retention.expired(journal, settings, time.time_ns() // 1000))
    assert Journal(journal).begin() == {"n1": 20}, "a pipeline has read up to 30"
    assert list(Journal(journal).rows({}, {"n1": 60})) == ROWS[20:]


def test_it_is_compacted_and_joined(journal: Path) -> None:
    compact.compact(journal, CompactOptions(grace_s=0, everything=True))
    (file,) = manifest.load(journal).all_files()
    assert (file.first, file.last) == (0, 59)
    assert file.crc32 is not None
    assert list(Journal(journal).rows({}, {"n1": 60})) == ROWS
    report = verify(journal)
    assert (report.faults, report.unchecked) == ([], 0)
    assert committed.last_batches(journal) == {"q": 3}
