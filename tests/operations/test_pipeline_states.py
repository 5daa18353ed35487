"""States of pipelines, read from the status files of their processes."""

from __future__ import annotations

import json
from pathlib import Path

from smqrt.operations import snapshots


def test_invalid_status_files_are_left_out(tmp_path: Path) -> None:
    for name, content in {
        "good": json.dumps({"name": "good", "state": "running", "lag_s": 2, "lag_rows": 7, "other": "x"}),
        "torn": '{"name": "torn", "sta',
        "list": "[1, 2]",
        "deep": "[" * 100_000,
        "wrong": json.dumps({"name": "wrong", "lag_s": "soon"}),
    }.items():
        (tmp_path / ".pipelines" / name).mkdir(parents=True)
        (tmp_path / ".pipelines" / name / "status.json").write_text(content)
    found = snapshots.queries([tmp_path, tmp_path / "none"])
    assert found == {
        tmp_path: [{"name": "good", "state": "running", "lag_s": 2.0, "lag_rows": 7}],
        tmp_path / "none": [],
    }
    assert snapshots.queries([]) == {}
