"""The application in examples/notes: a writer in a thread, and pages that open the database for each request."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gevent
import pytest

from smqrt.apps.lua.sqlite import Database
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

APP = Path(__file__).parent.parent / "examples" / "notes"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def notes(server: AppServer) -> Any:
    return json.loads(server.ask("/").body)


def add(server: AppServer, **fields: str) -> int:
    return server.ask("/", "POST", urlencode(fields).encode(), FORM).status


def test_notes_are_written_and_read(server: AppServer) -> None:
    application = server.applications.load("", APP)
    assert application.error is None, application.error
    assert notes(server) == {"notes": {}, "authors": "0", "last": "nobody", "logged": "0"}
    assert add(server, author="Ann O'Neil", text="first", stars="3") == 302
    wait_until(lambda: notes(server)["notes"])
    jobs = [gevent.spawn(add, server, author=f"author {number}") for number in range(20)]
    gevent.joinall(jobs, raise_error=True)
    wait_until(lambda: len(notes(server)["notes"]) == 21)
    shown = notes(server)
    assert shown["notes"][0] == {"id": "1", "author": "Ann O'Neil", "text": "first", "stars": "3.0"}
    assert shown["notes"][1]["text"] == shown["notes"][1]["stars"] == "none"
    assert (shown["authors"], shown["logged"]) == ("21", "21")
    application.reload()
    assert application.error is None, application.error
    assert len(notes(server)["notes"]) == 21
    application.unload()
    file = server.folder / "data" / "notes.sqlite.db"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    with sqlite3.connect(file, timeout=0) as other:  # nobody holds it any more
        other.execute("BEGIN EXCLUSIVE")


@pytest.mark.parametrize(
    "where", ["ba.thread.run(work)", "ba.timer(work):set(1, true)", "ba.socket.event(work)", "page"]
)
def test_objects_of_threads_timers_cosockets_close_with_the_application(server: AppServer, where: str) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    work = f"""
        function work()
           local c = luasql.sqlite():connect "own.db"
           c:execute "BEGIN IMMEDIATE"
           begun = true
           ended = select(2, c:execute "{endless}")
        end"""
    page = f"<?lsp local app = app {work.replace('function work', 'local function work')} ba.thread.run(work) ?>"
    page = page.replace("begun", "app.begun")
    preload = work if where == "page" else f"{work}\n{where}"
    application = server.app({".preload": preload, "page.lsp": page, "begun.lsp": "<?lsp print(app.begun) ?>"})
    if where == "page":
        server.ask("/page.lsp")
    wait_until(lambda: server.ask("/begun.lsp").text == "true\n")
    application.unload()
    with sqlite3.connect(server.folder / "own.db", timeout=0) as other:
        other.execute("BEGIN EXCLUSIVE")


def test_an_application_that_ends_during_a_statement(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is free, the lock is gone, and the page is told."""
    calls: list[object] = []
    interrupt = Database.interrupt

    def lost_once(database: Database) -> None:  # as one that comes before the statement has begun
        calls.append(database)
        if len(calls) > 1:
            interrupt(database)

    monkeypatch.setattr(Database, "interrupt", lost_once)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    preload = 'env = luasql.sqlite() conn = env:connect "own.db" conn:execute "CREATE TABLE t(a)" begun = true'
    page = f"""<?lsp
        local c = app.env:connect "own.db"
        c:execute "BEGIN IMMEDIATE"
        app.waits = true
        print(select(2, c:execute "{endless}")) ?>"""
    application = server.app({".preload": preload, "endless.lsp": page, "waits.lsp": "<?lsp print(app.waits) ?>"})
    job = gevent.spawn(server.ask, "/endless.lsp")
    wait_until(lambda: server.ask("/waits.lsp").text == "true\n")
    application.unload()
    assert job.get(timeout=10).text.startswith("INTERRUPT")
    with sqlite3.connect(server.folder / "own.db", timeout=0) as other:
        other.execute("BEGIN EXCLUSIVE")
