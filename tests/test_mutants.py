"""scripts/mutants: it finds the change that tests notice, and the one that they do not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parent.parent / "scripts" / "mutants.py"
SOURCE = """\
LIMIT = 7


def is_small(number):
    return number < LIMIT


def never_called():
    return 1
"""
TESTS = """\
from sample import is_small


def test_a_small_number_is_small():
    assert is_small(6)


def test_a_large_number_is_not():
    assert not is_small(8)
"""


def loaded() -> Any:
    """Return the tool as a module."""
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = loaded()


def mutants(folder: Path) -> list[str]:
    """Run the tool on the sample; return its lines."""
    (folder / "sample.py").write_text(SOURCE, "utf-8")
    (folder / "test_sample.py").write_text(TESTS, "utf-8")
    command = [sys.executable, str(TOOL), "sample.py", "--tests", "test_sample.py", "--verbose"]
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def outcomes(lines: list[str]) -> dict[str, bool]:
    """Whether each mutant survived."""
    found = [line.partition("sample.py:")[2].partition(": ")[2] for line in lines if "sample.py:" in line]
    return {line.partition(": ")[0]: "SURVIVED" in line for line in found}


def test_survivors_are_listed_and_the_share_is_printed(tmp_path: Path) -> None:
    lines = mutants(tmp_path)
    assert outcomes(lines) == {
        "7 -> 8": True,
        "7 -> 6": False,
        "number < LIMIT -> number <= LIMIT": True,
        "number < LIMIT -> number >= LIMIT": False,
        "return number < LIMIT -> return None": False,
        "1 -> 2": True,
        "1 -> 0": True,
    }
    assert lines[-1] == "killed: 3 of 7, 43 %"


def test_functions_are_found_after_a_freeze(tmp_path: Path) -> None:
    freezes = "import gc\n\n\ndef pytest_collection_finish():\n    gc.freeze()\n"
    (tmp_path / "conftest.py").write_text(freezes, "utf-8")
    assert mutants(tmp_path)[-1] == "killed: 3 of 7, 43 %"


def test_a_seed_draws_the_same_sample_again() -> None:
    everything = tool.all_mutants([str(TOOL)])
    first, again, other = (tool.drawn(everything, 20, seed) for seed in (1, 1, 2))
    assert len(set(first)) == 20
    assert first == again != other
    assert len(tool.drawn(everything, 10**6, 1)) == len(everything)


@pytest.mark.parametrize("name", ["broker", "wire", "journal"])
def test_equivalent_mutants_are_lines_of_the_source(name: str) -> None:
    """A line that has changed since is no longer known to be equivalent."""
    lines = TOOL.with_suffix(".equivalent").read_text("utf-8").splitlines()
    entries = [line.split(" || ") for line in lines if line.startswith(f"smqrt/{name}")]
    for path, source, _ in entries:
        text = (TOOL.parent.parent / path).read_text("utf-8")
        assert source in [line.strip() for line in text.splitlines()], f"{path}: {source}"
