"""Private files, which no reader that Lua makes shows: code, and those that a running hub writes beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.apps.lua.api import smq_hub
from smqrt.http.access import Private
from tests.apps.lua.app_server import AppServer

HUB = """
smq = require "smq.hub".create{persist = io:realpath "names", journal = {path = io:realpath "records", node = "n1"}}
smq:publish("secret", "topic")
"""
READERS = """
reader = ba.create.resrdr("home", 0, ba.openio "home") reader:insert()
below = ba.create.resrdr("below", 0, ba.mkio(ba.openio "disk", ba.openio "home":realpath "")) below:insert()
"""


@pytest.fixture
def app(server: AppServer) -> AppServer:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    return server


def test_what_a_hub_writes(app: AppServer, tmp_path: Path) -> None:
    application = app.app({".preload": HUB, "index.html": "x"}, "app")
    assert application.error is None, application.error
    folder = tmp_path / "app"
    written = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    shown = [name for name in written if app.ask(f"/app/{name}").status not in (302, 404)]
    application.unload()
    assert {"names", "names-wal", "records/wal/n1/lock"} <= set(written)
    assert shown == ["index.html"]


def test_readers_that_lua_makes(app: AppServer, tmp_path: Path) -> None:
    app.write("files", {"a.lua": "secret", "a.txt": "open", "smqrt.toml": "secret", "a.lsp~": "secret"})
    assert app.app({".preload": READERS}, "app").error is None
    for place in ("home", "below"):
        assert app.ask(f"/{place}/files/a.txt").text == "open"
        for name in ("a.lua", "A.LUA", "%61.lua", "smqrt.toml", "a.lsp~", "../app/.preload"):
            assert app.ask(f"/{place}/files/{name}").status in (302, 404), name
    for io in app.services.ios.values():
        io.private = Private("*.lua")
    assert app.ask("/home/files/a.lua").text == "secret"
