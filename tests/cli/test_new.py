"""`smqrt new`: what it makes works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served


def new(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "smqrt", "new", str(folder)], capture_output=True, text=True)


@pytest.mark.servers
def test_it_makes_every_file_and_touches_no_folder_in_use(tmp_path: Path) -> None:
    made = new(tmp_path / "app")
    assert made.returncode == 0
    assert "smqrt serve --reload" in made.stdout
    assert sorted(file.name for file in (tmp_path / "app").iterdir()) == [
        ".preload",
        "README.md",
        "index.lsp",
        "smq.lsp",
    ]
    again = new(tmp_path / "app")
    assert again.returncode == 1
    assert again.stderr == f"Error: {tmp_path / 'app'} is not empty; name a new folder.\n"


def test_a_click_in_one_window_counts_in_both(
    serve: Callable[..., Served], new_page: Callable[..., Any], tmp_path: Path
) -> None:
    new(tmp_path / "app")
    served = serve(tmp_path / "app")
    one, two = new_page(served.url), new_page(served.url, phone=True)
    one.click("button")
    for page in (one, two):
        page.wait_for_function("document.querySelector('output').textContent === '1'")
    assert new_page(served.url).inner_text("output") == "1"
