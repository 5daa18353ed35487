"""The list of compacted files: read again when it has changed, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import manifest
from smqrt.journal.manifest import DataFile, Manifest

FILE = DataFile("data/date=2026-11-21/hour=05/n1-0-9.parquet", "n1", 0, 9, 10, 1, 2, 100, ("t",))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert manifest.load(tmp_path) == Manifest()
    for number in range(20):
        with manifest.edit(tmp_path) as known:
            known.nodes["n1"] = number
            known.files.append(FILE)
        assert manifest.load(tmp_path) == Manifest({"n1": number}, [FILE] * (number + 1))


def test_it_belongs_to_who_has_loaded_it(tmp_path: Path) -> None:
    manifest.save(tmp_path, Manifest({"n1": 1}, [FILE]))
    mine = manifest.load(tmp_path)
    mine.files.clear()
    mine.nodes.clear()
    assert manifest.load(tmp_path) == Manifest({"n1": 1}, [FILE])


def test_it_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), whole(path))[1])
    manifest.save(tmp_path, Manifest({"n1": 1}))
    for _ in range(3):
        manifest.load(tmp_path)
    assert read == [tmp_path / manifest.FILE]
    manifest.save(tmp_path, Manifest({"n1": 22}))
    assert manifest.load(tmp_path).nodes == {"n1": 22}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', "[" * 100_000])
def test_damage_is_told_each_time(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.FILE).write_text(text)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"manifest\.json can't be read"):
            manifest.load(tmp_path)


def test_the_text_of_none(tmp_path: Path) -> None:
    assert manifest.text(tmp_path) == b'{"version": 1, "nodes": {}, "files": []}'
