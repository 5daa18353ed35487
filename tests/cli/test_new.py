"""`smqrt new`: what it makes works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smqrt.apps.lua.check import check_application, read_table
from smqrt.apps.lua.signatures import stubs
from smqrt.cli import cli
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
        ".luals",
        ".luarc.json",
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


def test_annotations_are_written_for_new_and_old_applications(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["new", str(tmp_path / "app")]).exit_code == 0
    written = {str(file.relative_to(tmp_path / "app/.luals")) for file in (tmp_path / "app/.luals").rglob("*.lua")}
    assert written == set(stubs())
    settings = json.loads((tmp_path / "app/.luarc.json").read_text())
    assert settings["workspace.library"] == [".luals"]
    assert (tmp_path / "app" / settings["runtime.plugin"]).is_file()
    assert settings["files.associations"][".preload"] == settings["files.associations"]["*.lsp"] == "lua"
    assert check_application(tmp_path / "app", read_table()).findings == []  # the annotations are not checked
    (tmp_path / "old").mkdir()
    (tmp_path / "old/.preload").write_text("")
    for message in (f"Wrote {tmp_path / 'old/.luarc.json'}.\n", ""):  # an existing file stays
        done = CliRunner().invoke(cli, ["lua-stubs", str(tmp_path / "old/stubs")])
        assert done.output == f"Wrote {len(stubs())} annotation files to {tmp_path / 'old/stubs'}.\n{message}"
    assert json.loads((tmp_path / "old/.luarc.json").read_text())["workspace.library"] == ["stubs"]
    assert CliRunner().invoke(cli, ["lua-stubs", str(tmp_path / "apart")]).exit_code == 0
    assert not (tmp_path / ".luarc.json").exists()
    failed = CliRunner().invoke(cli, ["lua-stubs", str(tmp_path / "old/.preload/x")])
    assert (failed.exit_code, "Cannot write" in failed.output) == (1, True)


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
