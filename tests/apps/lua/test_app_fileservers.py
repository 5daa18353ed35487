"""File servers in an application: ba.create.wfs, ba.create.dav (spec: bas-api §4, §17)."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from pathlib import Path

import pytest

from tests.apps.lua.app_server import Answer, AppServer
from tests.conftest import REPOSITORY

FOLDER = Path(__file__).parent.parent / "examples" / "fileservers"
LOCK = (
    b"<D:lockinfo xmlns:D='DAV:'><D:lockscope><D:exclusive/></D:lockscope><D:locktype><D:write/></D:locktype>"
    b"<D:owner>me</D:owner></D:lockinfo>"
)


@pytest.fixture
def running(server: AppServer) -> AppServer:
    shutil.copytree(FOLDER, server.folder / "app")
    application = server.applications.load("app", server.folder / "app")
    assert application.error is None, application.error
    return server


def test_a_file_manager_as_applications_use_it(running: AppServer) -> None:
    ask = running.ask
    facts = json.loads(ask("/app/api/facts").body)
    assert facts == {
        "kind": "table",
        "real": "userdata",
        "name": "fs",
        "baseuri": "/app/fs/",
        "noio": "io expected, got no value",
        "badlocks": "a number above 0 expected, got 0",
        "badpriority": "priority must be an integer from -127 to 127",
        "badtmo": "number expected, got string",
        "badconfigure": "table expected, got no value",
        "lockmgr": True,
        "twice": facts["twice"],
    }
    assert "alreadyinserted" in facts["twice"]

    page = ask("/app/fs/").text
    for part in ('data-name="a.txt"', 'href="./sub/"', 'href="help.html"', 'href="logout.lsp"'):
        assert part in page
    assert ".LOCK" not in page
    assert ask("/app/fs/sub").headers["Location"].endswith("/app/fs/sub/")
    assert 'href="../"' in ask("/app/fs/sub/").text
    assert ask("/app/fs/a.txt").text == "alpha"
    assert ask("/app/fs/none.txt").status == 404
    assert ask("/app/fs/secret.txt").status == 410
    assert json.loads(ask("/app/fs/sub/?cmd=zip").body) == {"cmd": "zip", "path": "sub/"}
    assert 'data-name="b.txt"' in ask("/app/fs/sub/?cmd=other").text
    assert ask("/app/again/").status == 200
    assert ask("/app/again/filtered").text == "filtered"

    options = ask("/app/fs/", "OPTIONS")
    assert (options.headers["DAV"], options.headers["MS-Author-Via"]) == ("1,2", "DAV")
    assert ask("/app/fs/new.txt", "PUT", b"new").status == 201
    assert ask("/app/dav/new.txt").text == "new"
    assert ask("/app/dav/").status == 404
    listed = ask("/app/dav/", "PROPFIND", headers={"Depth": "1"})
    assert listed.status == 207
    assert "/app/dav/new.txt" in listed.text
    assert ask("/app/dav/new.txt", "LOCK", LOCK).status == 403

    assert ask("/app/fs/a.txt", "LOCK", LOCK).status == 200
    assert ask("/app/fs/a.txt", "PUT", b"x").status == 423
    locks = json.loads(ask("/app/api/locks").body)
    assert (locks["count"], locks["locked"], locks["first"]["path"], locks["first"]["owner"]) == (
        1,
        True,
        "a.txt",
        "me",
    )
    assert json.loads(ask("/app/api/unlock").body) == [True, False]
    assert ask("/app/fs/a.txt", "PUT", b"x").status == 204

    assert ask("/app/api/service").text == "x"
    assert json.loads(ask("/app/api/facts").body)["handled"] is True
    assert json.loads(ask("/app/api/unlink").body) == [True, False, True]
    assert ask("/app/fs/a.txt").text == "x"


def test_files_in_lua(running: AppServer) -> None:
    ask = running.ask
    assert ask("/app/lua/hello.txt").text == "hello from Lua"
    assert 'data-name="hello.txt"' in ask("/app/lua/").text
    assert ask("/app/lua/new.txt", "PUT", b"one" * 100_000).status == 201
    assert ask("/app/lua/new.txt").body == b"one" * 100_000
    listed = ask("/app/lua/", "PROPFIND", headers={"Depth": "1"}).text
    assert "<D:getcontentlength>300000<" in listed
    assert ask("/app/lua/new.txt", "MOVE", headers={"Destination": "/app/lua/b.txt"}).status == 201
    assert ask("/app/lua/b.txt", "COPY", headers={"Destination": "/app/lua/c.txt"}).status == 201
    assert ask("/app/lua/b.txt", "DELETE").status == 204
    assert ask("/app/lua/b.txt").status == 404
    assert ask("/app/lua/folder", "MKCOL").status == 403, "the io has no mkdir"
    assert ask("/app/lua/c.txt", "LOCK", LOCK).status == 200, "in memory, since there can be no folder"
    assert ask("/app/lua/c.txt", "PUT", b"x").status == 423


def test_a_login_before_a_file_manager(running: AppServer) -> None:
    def ask(who: str, path: str = "", method: str = "GET", **headers: str) -> Answer:
        headers |= {"Authorization": "Basic " + b64encode(f"{who}:secret".encode()).decode()} if who else {}
        return running.ask(f"/app/closed/{path}", method, b"x" if method == "PUT" else None, headers)

    assert ask("").status == 401
    assert ask("ann", "new.lsp", "PUT").status == 201
    assert 'data-name="new.lsp"' in ask("ann").text
    assert ask("ann", "new.lsp").text == "x"
    refused = ask("bob", "new.lsp")
    assert (refused.status, refused.text) == (403, "403 Forbidden\n")
    assert "<h1>403" in ask("bob", Accept="text/html").text
    assert running.ask("/app/fs/new.lsp").status == 404, "who has not logged in does not see it"


def test_the_example_of_the_manual_in_python(server: AppServer) -> None:
    page = (REPOSITORY / "smqrt/help/file-servers.md").read_text("utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    application = server.app({".preload.py": code, "shared/a.txt": "alpha", "docs/b.txt": "beta"}, "app")
    assert application.error is None, application.error
    ann = {"Authorization": "Basic " + b64encode(b"ann:secret").decode()}
    assert server.ask("/app/fs/").status == 401
    assert 'data-name="a.txt"' in server.ask("/app/fs/", headers=ann).text
    assert server.ask("/app/fs/n.txt", "PUT", b"x", ann).status == 201
    assert server.ask("/app/readme/b.txt").text == "beta"


def test_require_adds_the_file_manager(server: AppServer) -> None:
    answer = server.page("""<?lsp
        local before = ba.create.wfs
        local made = require "wfs"
        print(before, type(ba.create.wfs), made == ba.create.wfs, type(ba.create.dav))
    ?>""")
    assert answer.text.strip() == "nil\tfunction\ttrue\tfunction"


def test_directory_methods_accept_a_file_manager_table(server: AppServer) -> None:
    answer = server.page("""<?lsp
        require "wfs"
        local wfs, child = ba.create.wfs("fs", app.io), ba.create.dir "child"
        print(app.dir.name(wfs), app.dir.insert(wfs, child, true), app.dir.unlink(child), pcall(app.dir.name, {}))
    ?>""")
    wrong = "page.lsp:4: bad argument #1 to 'name' (directory expected, got table)"
    assert answer.text.strip() == f"fs\ttrue\ttrue\tfalse\t{wrong}"
