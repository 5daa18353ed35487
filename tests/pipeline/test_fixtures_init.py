"""`smqrt pipeline init` makes what `smqrt pipeline test` finds right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smqrt.pipeline import testing


def test_what_init_makes_passes_its_test(tmp_path: Path, spark: Any) -> None:
    testing.make_pipeline(tmp_path, "per_minute")
    said: list[str] = []
    assert testing.run(tmp_path, say=said.append, spark=spark) == 0, said
    assert said == ["ok       per_minute: 3 rows"]
    golden = tmp_path / "tests" / "per_minute.json"
    before = golden.read_text()
    assert testing.run(tmp_path, update=True, say=said.append, spark=spark) == 0
    assert golden.read_text() == before
