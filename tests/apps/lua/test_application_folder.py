"""An application's own code knows its folder, in Python and in Lua, also behind something that blocks."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from smqrt.process import current_process
from tests.apps.lua.app_server import AppServer

PYTHON = """
import gevent
from smqrt.process import current_process
seen = [current_process.base_folder()]
gevent.sleep(0.01)
seen.append(current_process.base_folder())
other = gevent.spawn(current_process.application_folder).get()

def onunload():
    open(io.realpath("gone"), "w").write(str(current_process.base_folder()))
"""
LUA = "test.note() ba.sleep(5) test.note() function onunload() test.note() end"


@pytest.fixture
def noted(server: AppServer) -> list[Path | None]:
    """What `test.note()` of Lua saw."""
    seen: list[Path | None] = []
    note = {"note": lambda: seen.append(current_process.application_folder())}
    server.vm.namespace("test", note, source=b"local core, py = ... test = py")
    return seen


def test_python_and_its_onunload(server: AppServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe: list[object] = []
    monkeypatch.setattr(current_process, "probe", probe, raising=False)
    application = server.app({".preload.py": PYTHON + "current_process.probe += [*seen, other]"}, "py")
    assert application.error is None
    assert probe == [tmp_path / "py", tmp_path / "py", None]
    application.unload()
    assert (tmp_path / "py" / "gone").read_text() == str(tmp_path / "py")
    assert current_process.application_folder() is None
    assert current_process.base_folder() == Path.cwd()


def test_lua_and_its_onunload(server: AppServer, noted: list[Path | None], tmp_path: Path) -> None:
    application = server.app({".preload": LUA}, "lua")
    assert application.error is None
    application.unload()
    assert noted == [tmp_path / "lua"] * 3


def test_two_applications_do_not_mix(server: AppServer, noted: list[Path | None], tmp_path: Path) -> None:
    server.app({".preload": "test.note()"}, "one")
    server.app({".preload": "test.note() error'x'"}, "two")
    server.app({".preload": "test.note()"}, "three")
    assert noted == [tmp_path / name for name in ("one", "two", "three")]


def test_a_zip_file_has_no_folder(server: AppServer, noted: list[Path | None], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr(".preload", "test.note()")
    assert server.applications.load("", tmp_path / "app.zip").error is None
    assert noted == [None]


def test_whatever_answers_a_request(server: AppServer, noted: list[Path | None], tmp_path: Path) -> None:
    code = """
        local function note() test.note() return false end
        local child, prologue = ba.create.dir"child", ba.create.dir()
        dir:setfunc(note) child:setfunc(note) prologue:setfunc(note)
        dir:insert(child, true) dir:insertprolog(prologue)
    """
    server.app({".preload": code, "page.lsp": "<?lsp test.note() ba.sleep(5) test.note() ?>", "file.txt": "x"}, "app")
    expected = {"page.lsp": (200, 4), "file.txt": (200, 2), "child/": (404, 3)}
    for name, (status, count) in expected.items():
        noted.clear()
        assert server.ask(f"/app/{name}").status == status
        assert noted == [tmp_path / "app"] * count
        assert current_process.application_folder() is None
