"""A journal's folder that is moved while somebody looks into it: it does not look empty, and the log stays short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import JournalError
from smqrt.journal import announcer, commit, files, manifest, readers, retention
from smqrt.journal.files import Unreachable
from smqrt.journal.manifest import Manifest
from smqrt.journal.reader import Journal
from smqrt.journal.settings import JournalSettings
from tests.journal.sensor_rows import readings, write
from tests.journal.shelf import Shelf

MOVED = "was moved, removed or unmounted; restore it"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "journal", readings(10))
    return tmp_path / "journal"


def test_it_does_not_look_empty_to_readers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline was told that retention had removed what it had yet to read."""
    away, load = path.with_name("away"), manifest.load

    def moved(journal: Path) -> Manifest:
        path.rename(away)
        return load(journal)

    journal = Journal(path)
    for question in (journal.begin, journal.end, lambda: announcer.listing(path)):
        with monkeypatch.context() as moving:
            moving.setattr(manifest, "load", moved)
            with pytest.raises(JournalError, match=MOVED):
                question()
        away.rename(path)
    assert journal.end() == {"n1": 10}


def test_it_is_not_one_without_commits(tmp_path: Path) -> None:
    """A micro-batch would be published again."""
    with pytest.raises(Unreachable, match=MOVED):
        commit.last_batch(files.HubAddress.of(tmp_path / "journal"), "q")


def test_it_is_not_one_without_readers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows would be removed that a pipeline has yet to read."""
    away, load = path.with_name("away"), readers.load
    path.rename(away)

    def back(journal: Path) -> list[readers.Reader]:
        found = list(load(journal))
        away.rename(path)
        return found

    monkeypatch.setattr(readers, "load", back)
    with pytest.raises(JournalError, match="can't be read"):
        retention.expired(path, JournalSettings(path, retain_s=0.001), 1 << 60)


def test_what_was_planned_is_there_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline was told that its rows had expired."""
    journal, away = Journal(path), path.with_name("away")
    [[chunk]], plan = journal.plan({}, {"n1": 10}), journal.plan
    path.rename(away)

    def back(*args: Any, **options: Any) -> Any:
        away.rename(path)
        return plan(*args, **options)

    monkeypatch.setattr(journal, "plan", back)
    assert [row.seq for row in journal.rows_of(chunk)] == list(range(10))


def test_what_is_missing_fills_no_log(shelf: Shelf, capfd: pytest.CaptureFixture[str]) -> None:
    shelf.refused(404, f"main/wal/n2/{9:020d}.arrows")
    away = shelf.writer.path.with_name("away")
    shelf.writer.path.rename(away)
    for what in ("manifest", f"wal/n2/{0:020d}.arrows"):
        assert "restore it" in shelf.refused(503, f"main/{what}")
    assert "can't be written" in shelf.refused(503, "main/progress", "POST", data='{"query": "q", "offset": {"n1": 0}}')
    away.rename(shelf.writer.path)
    assert "Traceback" not in capfd.readouterr().err
