"""`smqrt new`: what it makes works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served


def new(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smqrt", "new", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.servers
def test_every_file_is_made_and_used_folders_stay(tmp_path: Path) -> None:
    made = new(tmp_path / "app")
    assert made.returncode == 0
    assert "smqrt serve --reload" in made.stdout
    assert sorted(file.name for file in (tmp_path / "app").iterdir()) == [
        ".preload",
        "README.md",
        "index.lsp",
        "smq.lsp",
    ]
    assert new(tmp_path / "py", "--python").returncode == 0
    assert sorted(file.name for file in (tmp_path / "py").iterdir()) == [".preload.py", "README.md", "index.html"]
    again = new(tmp_path / "app")
    assert again.returncode == 1
    assert again.stderr == f"Error: {tmp_path / 'app'} is not empty. Choose a new folder.\n"


@pytest.mark.parametrize("options", [[], ["--python"]], ids=["Lua", "Python"])
def test_a_click_in_one_window_counts_in_both(
    options: list[str], serve: Callable[..., Served], new_page: Callable[..., Any], tmp_path: Path
) -> None:
    new(tmp_path / "app", *options)
    served = serve(tmp_path / "app")
    one, two = new_page(served.url), new_page(served.url, phone=True)
    one.click("button")
    for page in (one, two):
        page.wait_for_function("document.querySelector('output').textContent === '1'")
    new_page(served.url).wait_for_function("document.querySelector('output').textContent === '1'")
