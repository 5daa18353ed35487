"""What `scripts/test` runs in which part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def test_files_of_the_last_part_are_written(tmp_path: Path) -> None:
    files = ["tests/bench/test_path_costs.py", "tests/broker/test_topics.py", "tests/pipeline/test_packaging.py"]
    command = [sys.executable, "-m", "pytest", "-m", "unit", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    written = tmp_path / "files"
    added = {"OTHER_TEST_FILES": str(written)}
    subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **added}, check=True, timeout=60, capture_output=True)
    assert written.read_text() == "tests/bench/test_path_costs.py"
    again = [*command[: -len(files)], "tests/bench/test_compare.py"]  # as failed tests are run again
    subprocess.run(again, cwd=REPOSITORY, env={**os.environ, **added}, timeout=60, capture_output=True)
    assert written.read_text() == "tests/bench/test_path_costs.py"
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
