"""A hub ends with the application that made it, in both languages: its clients are closed without a word, its journal
is let go, and a new one takes its place.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua.api import smq_hub
from smqrt.apps.lua.applications import Application
from smqrt.journal import writer
from tests.apps.lua.app_server import AppServer, Files
from tests.conftest import Served
from tests.support.device import RAW, RAW_HEADERS, Device, request
from tests.support.waiting import wait_until

CONNECT = """
def connect(request, relpath):
    return smq.connect(request) if relpath == "smq.lsp" else False

dir.setfunc(connect)
"""
PYTHON = "from smqrt import hub\nsmq = hub.create()\n" + CONNECT
LUA = "smq = require'smq.hub'.create()\n"
PAGE = "<?lsp app.smq:connect(request) ?>"
APPS: dict[str, Files] = {
    "Python": {".preload.py": PYTHON},
    "Lua": {".preload": LUA, "smq.lsp": PAGE},
    "Python, journal": {".preload.py": PYTHON.replace("create()", "create(journal=True)")},
    "Lua, journal": {".preload": LUA.replace("create()", "create{journal=true}"), "smq.lsp": PAGE},
    "Python, persist": {".preload.py": PYTHON.replace("create()", "create(persist=io.realpath('names'))")},
    "Lua, persist": {".preload": LUA.replace("create()", "create{persist=io:realpath'names'}"), "smq.lsp": PAGE},
    "Python, module": {
        ".preload.py": "import sys\nsys.path.append(io.realpath(''))\nfrom hub_of_this_test import smq\n" + CONNECT,
        "hub_of_this_test.py": "from smqrt import hub\nsmq = hub.create()\n",
    },
    "Lua, module": {".preload": "smq = appreq'broker'", ".lua/broker.lua": "return " + LUA[6:], "smq.lsp": PAGE},
    "Python, when asked": {
        ".preload.py": PYTHON.replace("smq = hub.create()\n", "").replace("return smq", "return made()")
        + "\ndef made():\n    if 'smq' not in app:\n        app['smq'] = hub.create()\n    return app.smq\n"
    },
    "Lua, when asked": {
        "smq.lsp": "<?lsp app.smq = app.smq or require'smq.hub'.create() app.smq:connect(request) ?>",
        ".preload": "kept = {} function keep(value) kept[1] = value end",
    },
}
KEPT = "local smq = smq; ba.timer(function() return smq ~= nil end):set(1000)"
"""Something that refers to the hub from outside of the application's table, so that Lua does not collect it."""


@pytest.fixture
def hubs(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppServer]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    yield server
    writer.close_all()


@pytest.fixture
def come(hubs: AppServer) -> Iterator[Callable[..., Device]]:
    devices: list[Device] = []

    def connect(kind: str = RAW, folder: str = "") -> Device:
        devices.append(Device(("127.0.0.1", hubs.port), kind))
        return devices[-1].start(target=f"{folder}/smq.lsp").connect(b"uid-a1")

    yield connect
    for device in devices:
        device.close()


@pytest.mark.parametrize("name", APPS)
def test_clients_of_a_restarted_application_reach_its_new_hub(
    hubs: AppServer, come: Callable[..., Device], name: str
) -> None:
    application = hubs.app(APPS[name])
    assert application.error is None, application.error
    device = come()
    device.subscribe(b"news")
    application.reload()
    assert application.error is None, application.error
    device.expect_end()
    again = come()
    again.publish(again.subscribe(b"news"), b"hello").receive()
    application.unload()
    again.expect_end()
    assert not writer.opened
    assert hubs.ask("/smq.lsp").status == 404


def test_also_when_something_else_refers_to_the_hub(hubs: AppServer, come: Callable[..., Device]) -> None:
    application = hubs.app({".preload": LUA + KEPT, "smq.lsp": PAGE})
    device = come()
    application.unload()
    device.expect_end()


@pytest.mark.parametrize("language", ["Python", "Lua", "Python, journal", "Lua, journal"])
def test_in_a_zip_file(
    hubs: AppServer, come: Callable[..., Device], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hubs.folder)  # where the journal of an application without a folder goes
    path = hubs.folder / "app.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in APPS[language].items():
            archive.writestr(file, text)
    application = hubs.applications.load("", path)
    assert application.error is None, application.error
    device = come()
    application.reload()
    device.expect_end()
    come().subscribe(b"news")


def test_a_failed_application_leaves_no_hub(hubs: AppServer) -> None:
    bad = hubs.app({".preload.py": PYTHON.replace("create()", "create(journal=True)") + "1 / 0"}, "bad")
    assert bad.error is not None
    assert not writer.opened


def test_other_applications_keep_theirs(hubs: AppServer, come: Callable[..., Device]) -> None:
    first, second = hubs.app(APPS["Python"], "one"), hubs.app(APPS["Lua"], "two")
    ends, stays = come(folder="/one"), come(folder="/two")
    first.reload()
    ends.expect_end()
    stays.publish(stays.subscribe(b"news"), b"hello").receive()
    assert second.error is None


def test_what_all_applications_share_outlives_each(hubs: AppServer, come: Callable[..., Device]) -> None:
    """A module of Lua that `require` loads, and one of Python that lies elsewhere."""
    hubs.write(
        "lib", {"shared_of_this_test.lua": "return " + LUA[6:], "shared_of_that_test.py": PYTHON[: PYTHON.index("def")]}
    )
    sys.path.append(str(hubs.folder / "lib"))
    lua = f"package.path = package.path .. ';{hubs.folder}/lib/?.lua' smq = require'shared_of_this_test'"
    python = "from shared_of_that_test import smq\n" + CONNECT
    applications: list[Application] = [
        hubs.app({".preload": lua, "smq.lsp": PAGE}, "lua"),
        hubs.app({".preload.py": python}, "python"),
    ]
    for application in applications:
        assert application.error is None, application.error
        device = come(folder=application.uri[:-1])
        tid = device.subscribe(b"news")
        application.reload()
        device.publish(tid, b"hello").receive()


WAITING = """
import gevent, pathlib
pathlib.Path(io.realpath("begun")).touch()
while not pathlib.Path(io.realpath("go")).exists():
    gevent.sleep(0.01)
"""


def test_early_clients_are_asked_to_retry(hubs: AppServer) -> None:
    application = hubs.app(APPS["Python"])
    hubs.write("", {".preload.py": WAITING})
    anew = gevent.spawn(application.reload)
    wait_until((hubs.folder / "root" / "begun").exists, "the new .preload.py")
    answer = hubs.ask("/smq.lsp", headers={"SimpleMQ": "1"})
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    hubs.write("", {"go": ""})
    anew.get(timeout=5)
    assert hubs.ask("/smq.lsp", headers={"SimpleMQ": "1"}).status == 404


HANGING: dict[str, Files] = {
    "Python, permittop": {".preload.py": PYTHON.replace("create()", "create(permittop=hang)")},
    "Python, onpublish": {".preload.py": PYTHON.replace("create()", "create(onpublish=hang)")},
    "Lua, permittop": {".preload": LUA.replace("create()", "create{permittop=hang}"), "smq.lsp": PAGE},
    "Lua, onpublish": {".preload": LUA.replace("create()", "create{onpublish=hang}"), "smq.lsp": PAGE},
}
HANG = {
    ".preload.py": "import gevent\ndef hang(*arguments):\n    gevent.sleep(1000)\n",
    ".preload": "local function hang() ba.sleep(1000000) end\n",
}


def hanging(name: str) -> Files:
    return {file: HANG.get(file, "") + str(text) for file, text in HANGING[name].items()}


def ask(device: Device, name: str) -> None:
    """Do what the hook is asked about."""
    if "permittop" in name:
        device.send(b"\x04news")
    else:
        device.publish(device.etid, b"x")


@pytest.mark.parametrize("name", HANGING)
def test_a_hook_that_never_answers_keeps_no_hub(hubs: AppServer, come: Callable[..., Device], name: str) -> None:
    """One client waits, the others do not; and the application can start anew."""
    application = hubs.app(hanging(name))
    assert application.error is None, application.error
    waits = come()
    ask(waits, name)
    other = Device(("127.0.0.1", hubs.port)).start(target="/smq.lsp").connect(b"uid-b1")
    other.send(b"\x0c").expect(b"\x0d")
    application.reload()
    assert application.error is None, application.error
    for device in (waits, other):
        device.expect_end()
    come().send(b"\x0c").expect(b"\x0d")
    other.close()


@pytest.mark.parametrize("name", HANGING)
def test_a_hook_that_never_returns_does_not_delay_shutdown(
    serve: Callable[..., Served], tmp_path: Path, name: str
) -> None:
    (tmp_path / "app").mkdir()
    for file, text in hanging(name).items():
        (tmp_path / "app" / file).write_text(str(text))
    served = serve(tmp_path / "app")
    device = Device(("127.0.0.1", served.port))
    head = request(RAW_HEADERS, target="/smq.lsp").replace(b"Host: test", b"Host: localhost")
    device.send_bytes(head).read_head().hello().connect(b"uid-a1")
    ask(device, name)
    assert served.stop() == 0
    device.close()
