"""Modules beside `.preload.py`: an application's own, found and forgotten with it."""

from __future__ import annotations

import logging
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import smqrt.app
from smqrt.apps.lua.applications import Application
from tests.apps.lua.app_server import AppServer

PRELOAD = """
import store
from smqrt.app import dir

def answer(request, relpath):
    if relpath == "late":
        import tools.late
        request.response.write(tools.late.name)
    elif relpath == "word":
        request.response.write(store.word)
    else:
        return False

dir.setfunc(answer)
"""
STORE = "word = %r\n"
PACKAGE = {"tools/__init__.py": "", "tools/late.py": "from store import word\nname = f'late {word} {__name__}'\n"}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    yield
    left = {name for name in set(sys.modules) - before if name.startswith(("smqrt_app", "store", "tools"))}
    assert left == set()
    assert sys.path == path


def loaded(server: AppServer, name: str, files: dict[str, str]) -> Application:
    application = server.app({".preload.py": PRELOAD, **files}, name)
    assert application.error is None, application.error
    return application


def test_two_applications_do_not_mix(server: AppServer) -> None:
    one = loaded(server, "one", {"store.py": STORE % "first", **PACKAGE})
    two = loaded(server, "two", {"store.py": STORE % "second", **PACKAGE})
    assert [server.ask(f"/{name}/word").text for name in ("one", "two")] == ["first", "second"]
    assert re.fullmatch(r"late first smqrt_app_one(_\d+)?\.tools\.late", server.ask("/one/late").text)
    assert server.ask("/two/late").text == "late second smqrt_app_two.tools.late"
    server.write("one", {"store.py": STORE % "third"})
    one.reload()
    assert server.ask("/one/word").text == "third"
    assert re.fullmatch(r"late third smqrt_app_one(_\d+)?\.tools\.late", server.ask("/one/late").text)
    assert server.ask("/two/word").text == "second"
    one.unload()
    assert server.ask("/two/word").text == "second"
    two.unload()


def test_in_a_zip_file(server: AppServer, tmp_path: Path) -> None:
    files = {".preload.py": PRELOAD, "store.py": STORE % "packed", **PACKAGE}
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    application = server.applications.load("zipped", tmp_path / "zipped.zip")
    assert application.error is None, application.error
    assert server.ask("/zipped/late").text == "late packed smqrt_app_zipped.tools.late"
    application.unload()


def test_errors_name_the_module(server: AppServer) -> None:
    def error(store: str) -> str:
        application = server.app({".preload.py": PRELOAD, "store.py": store}, "bad")
        assert application.error is not None
        return application.error

    assert "here = 1 / 0" in error("x = 1\nhere = 1 / 0\n")
    assert "there = 1 / 0" in error("x = 1\nthere = 1 / 0\n"), "the line as it is now"
    assert error("x = 1\n1 / 0\n").startswith("bad/store.py:2: ZeroDivisionError: division by zero\n")
    assert error("x = 1\nif x\n").startswith("bad/store.py:2: SyntaxError: expected ':'\n")
    assert error("import nowhere.at_all\n").startswith("bad/store.py:1: ModuleNotFoundError: No module named 'nowhere'")
    assert error("import store.x\n").startswith(
        "bad/store.py:1: ModuleNotFoundError: the application has no module 'store.x'"
    )
    assert error("from store import word\n").startswith("bad/store.py:1: ImportError: cannot import name 'word'")
    assert "bad/.preload.py" in error("1 / 0\n")


ALONE = """
import dataclasses, logging, pickle, pathlib, sys
from . import store, tools
import tools.late as late
from folder.inner import value

@dataclasses.dataclass
class Thing:
    word: str

assert pickle.loads(pickle.dumps(Thing("x"))) == Thing("x")
assert pickle.loads(pickle.dumps(store.Kept())).__class__ is store.Kept
assert pathlib.Path(__file__).parent == pathlib.Path(io.realpath(""))
assert pathlib.Path(store.__file__).parent == pathlib.Path(io.realpath(""))
assert (value, late.name) == ("inner", "late x smqrt_app_root_folder.tools.late"), late.name
assert "store" not in sys.modules and json.which == "own"
logging.getLogger(store.__name__).warning("it is me")
""".replace("import dataclasses", "import json, dataclasses")


def test_a_module_is_a_module_to_others_too(server: AppServer, caplog: pytest.LogCaptureFixture) -> None:
    store = STORE % "x" + "class Kept:\n    pass\n"
    files = {"store.py": store, "folder/inner.py": "value = 'inner'", "json.py": "which = 'own'", **PACKAGE}
    folder = server.write("root folder", {".preload.py": ALONE, **files})
    with caplog.at_level(logging.WARNING):
        application = server.applications.load("", folder)
    assert application.error is None, application.error
    assert [record.name for record in caplog.records] == ["smqrt_app_root_folder.store"]
    application.unload()


LATER = """
import gevent

def later():
    from smqrt.app import io as same
    return same is io

assert gevent.spawn(later).get()
"""
PROCESS_WIDE = "import sys\nsys.path.insert(0, io.realpath(''))\n" + PRELOAD + "assert 'store' in sys.modules\n" + LATER


def test_modules_on_sys_path_belong_to_the_process(server: AppServer) -> None:
    application = loaded(server, "wide", {".preload.py": PROCESS_WIDE, "store.py": STORE % "wide", **PACKAGE})
    assert server.ask("/wide/late").text == "late wide tools.late"
    application.unload()


GREENLETS = """
import gevent
from gevent.event import Event
import smqrt.app

found, go = [], Event()

def later():
    go.wait()
    from smqrt.app import app, dir, io
    import store
    found.extend([app["found"] is found, dir.name, io is store.io])

greenlet = gevent.spawn(later)
dir.setfunc(lambda request, relpath: (go.set(), greenlet.join(), request.response.json(found)) and None)
try:
    smqrt.app.nothing
except AttributeError:
    pass
"""


def test_the_three_names_are_there_in_every_greenlet(server: AppServer) -> None:
    files = {".preload.py": GREENLETS, "store.py": "from smqrt.app import io, Directory\n"}
    application = server.app(files, "green")
    assert application.error is None, application.error
    assert server.ask("/green/").text == '[true,"green",true]'
    application.unload()


def test_the_three_names_are_nowhere_else() -> None:
    with pytest.raises(ImportError, match="only in an application"):
        smqrt.app.app  # noqa: B018
    with pytest.raises(AttributeError):
        smqrt.app.nonsense  # type: ignore[attr-defined]  # noqa: B018
