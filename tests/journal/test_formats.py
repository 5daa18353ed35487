"""Files that a newer version wrote are refused with a sentence, and stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smqrt import hub
from smqrt.errors import JournalError
from smqrt.journal import arrow, manifest
from smqrt.journal.record import SEGMENT_COLUMNS


def newer_schema(node: str, broker: str, format_: int = 1) -> bytes:
    words = (("node", node), ("broker", broker), ("format", "3"))
    pairs = [arrow._table(arrow._string(key), arrow._string(value)) for key, value in words]
    fields = arrow._vector(*map(arrow._field, SEGMENT_COLUMNS))
    return arrow._message(arrow._SCHEMA, arrow._table(("h", 0), fields, arrow._vector(*pairs)))


def test_a_segment_of_a_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(arrow, "schema_message", newer_schema)
        with hub.create(journal={"path": str(tmp_path)}) as smq:
            smq.publish(b"1", "news")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")}
    assert len(before) == 1
    with pytest.raises(JournalError, match="A segment of 'n1' has format 3, written by a newer smqrt"):
        hub.create(journal={"path": str(tmp_path)})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")} == before


def test_a_manifest_of_a_newer_version(tmp_path: Path) -> None:
    (tmp_path / manifest.FILE).write_text(json.dumps({"version": 3, "segments": []}))
    with pytest.raises(JournalError, match="it has format 3, written by a newer smqrt; this one reads up to 2"):
        manifest.load(tmp_path)
