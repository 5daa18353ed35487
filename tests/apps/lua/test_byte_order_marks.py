"""The mark of UTF-8 and a first line for the shell (`#!`), which editors put before a text, are no part of it."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from smqrt.settings.sources import from_file
from tests.apps.lua.app_server import AppServer

PRELOAD = b"mako.createloader(io) own = appreq'own' shared = require'shared' done = io:dofile'done.lua'"
MARKS = [codecs.BOM_UTF8, b"#!/usr/bin/lua\n", codecs.BOM_UTF8 + b"#!/usr/bin/lua\n"]


@pytest.mark.parametrize("mark", MARKS)
def test_files_of_an_application(tmp_path: Path, mark: bytes) -> None:
    server = AppServer(tmp_path)
    files = {
        ".preload": mark + PRELOAD,
        ".lua/own.lua": mark + b"return 1",
        ".lua/shared.lua": mark + b"return 2",
        "done.lua": mark + b"return 3",
        "page.lsp": (codecs.BOM_UTF8 if mark.startswith(codecs.BOM_UTF8) else b"")
        + b"<?lsp print(app.own, app.shared, app.done, loadfile(app.io:realpath'done.lua')()) ?>",
    }
    application = server.app(files)  # type: ignore[arg-type]
    assert application.error is None
    assert server.ask("/page.lsp").body == b"1\t2\t3\t3\n"
    server.write("", {"wrong.lua": mark + b"\nlocal = 2", "wrong.lsp": "<?lsp print(app.io:loadfile'wrong.lua') ?>"})
    line = 2 + mark.count(b"\n")
    assert f"wrong.lua:{line}:" in server.ask("/wrong.lsp").text


def test_settings(tmp_path: Path) -> None:
    path = tmp_path / "smqrt.toml"
    path.write_bytes(codecs.BOM_UTF8 + b"port = 1\n")
    assert [(one.path, one.value) for one in from_file(path)] == [(("port",), 1)]
