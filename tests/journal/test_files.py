"""Modes of files: what was said to a hub is for the eyes of the server's user, folders 0700, files 0600."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt import hub
from smqrt.errors import JournalError
from smqrt.journal import manifest, readers, recovery, segment
from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.files import make_folder
from smqrt.journal.inspection import export
from smqrt.journal.reader import Journal


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The widest there is: what is not asked for is seen."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(top: Path) -> dict[str, str]:
    """What others than the owner may do with anything there."""
    found = {}
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found[str(path.relative_to(top))] = oct(mode)
    return found


def test_a_hub_and_what_is_made_of_its_journal(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deep" / "journal"
    (tmp_path / "new").mkdir(0o700)
    smq = hub.create(journal={"path": str(folder), "node": "n1"}, persist=str(tmp_path / "new" / "names"))
    try:
        smq.publish("secret", "topic")
    finally:
        smq.journal.close()
        smq.close()
    readers.save_report(folder, {"query": "q", "name": "q", "offset": {"n1": 1}, "time_us": 0})
    assert modes(tmp_path / "new") == {}
    assert {path.suffix for path in folder.rglob("*.*")} >= {".arrows", ".idx", ".json"}
    compact(folder, CompactOptions(after_s=0, grace_s=0, everything=True))
    assert [*folder.rglob("*.parquet")]
    with manifest.edit(folder):
        pass
    assert modes(tmp_path / "new") == {}


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
def test_exports(tmp_path: Path, ending: str) -> None:
    smq = hub.create(journal={"path": str(tmp_path / "journal"), "node": "n1"})
    smq.publish("secret", "topic")
    smq.journal.close()
    smq.close()
    journal = Journal(tmp_path / "journal")
    export(journal, journal.begin(), journal.end(), tmp_path / f"out.{ending}")
    assert stat.S_IMODE((tmp_path / f"out.{ending}").stat().st_mode) == 0o600


def test_an_index_that_is_made_again(tmp_path: Path) -> None:
    smq = hub.create(journal={"path": str(tmp_path / "journal"), "node": "n1"})
    smq.publish("secret", "topic")
    smq.journal.close()
    smq.close()
    [index] = (tmp_path / "journal").rglob("*.idx")
    index.unlink()
    recovery.recover(index.parent)
    assert index.stat().st_size
    assert modes(tmp_path / "journal") == {}


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o775)
    make_folder(shared / "a" / "b")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o775
    assert modes(shared / "a") == {}


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="can't be used"):
        segment.lock(tmp_path / "file")
