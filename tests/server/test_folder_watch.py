"""Watching the code of an application."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.server.applications import FolderWatch
from tests.conftest import Served


def test_a_change_counts_once_and_when_it_has_settled(tmp_path: Path) -> None:
    preload, module = tmp_path / ".preload", tmp_path / ".lua" / "a.lua"
    preload.write_text("x = 1")
    watch = FolderWatch(tmp_path)
    assert watch.poll() == []
    preload.write_text("x = 22")
    assert watch.poll() == []
    module.parent.mkdir()
    module.write_text("return 1")
    assert watch.poll() == []
    assert watch.poll() == sorted([str(preload), str(module)])
    assert watch.poll() == []


def test_a_removed_module_is_a_change(tmp_path: Path) -> None:
    module = tmp_path / "a.lua"
    module.write_text("")
    watch = FolderWatch(tmp_path)
    module.unlink()
    watch.poll()
    assert watch.poll() == [str(module)]


def test_pages_and_caches_are_no_code(tmp_path: Path) -> None:
    watch = FolderWatch(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.py").write_text("")
    (tmp_path / "index.lsp").write_text("")
    watch.poll()
    assert watch.poll() == []


def test_a_zip_file_is_one_piece(tmp_path: Path) -> None:
    archive = tmp_path / "app.zip"
    archive.write_bytes(b"one")
    watch = FolderWatch(archive)
    archive.write_bytes(b"another")
    watch.poll()
    assert watch.poll() == [str(archive)]


@pytest.mark.servers
def test_saving_while_an_application_loads_is_a_change(tmp_path: Path) -> None:
    module = tmp_path / "app" / "words.py"
    module.parent.mkdir()
    module.write_text("first")
    (module.parent / ".preload.py").write_text(f"from pathlib import Path; Path({str(module)!r}).write_text('x = 1')\n")
    served = Served(module.parent, "--reload")
    served.wait_for(r"^app app at /: ok(.|\n)*^app app at /: ok$")
    assert served.stop() == 0
