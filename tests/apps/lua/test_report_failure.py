"""Tracebacks are for the people who run the server; others get a number that stands in the log."""

from __future__ import annotations

import json
import re

import pytest

from smqrt.http.access import Access
from tests.apps.lua.app_server import AppServer

LUA = "<?lsp error('the secret of ' .. 'the page') ?>"
PYTHON = """
def fail(request, relpath):
    if relpath == "python":
        raise ValueError("the secret of the function")
    return False

dir.setfunc(fail)
"""
PATHS = ("/lua.lsp", "/broken.lsp", "/python", "/called/x")


@pytest.fixture
def app(server: AppServer) -> AppServer:
    called = "d = ba.create.dir'called' d:setfunc(function() error'the secret' end) dir:insert(d)"
    files = {"lua.lsp": LUA, "broken.lsp": "<?lsp the secret ?>", ".preload.py": PYTHON, ".preload": called}
    application = server.app(files)
    assert application.error is None, application.error
    return server


@pytest.mark.parametrize("path", PATHS)
def test_a_number_that_stands_in_the_log(app: AppServer, path: str, caplog: pytest.LogCaptureFixture) -> None:
    app.server.access = Access(debug=False)
    answer = app.ask(path)
    assert answer.status == 500
    match = re.fullmatch(r"(?:Lua|Python) error: number ([0-9a-f]{8}) in the server's log\n", answer.text)
    assert match, answer.text
    [line] = [message for message in caplog.messages if match[1] in message]
    assert line.startswith(f"error {match[1]} in {path}: ")
    assert "secret" in line


@pytest.mark.parametrize("path", PATHS)
def test_the_traceback_when_it_is_asked_for(app: AppServer, path: str) -> None:
    app.server.access = Access(debug=True)
    answer = app.ask(path)
    assert answer.status == 500
    assert "secret" in answer.text
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"


def test_scripts_get_json(app: AppServer) -> None:
    app.server.access = Access(debug=False)
    fields = json.loads(app.ask("/lua.lsp", headers={"X-Requested-With": "XMLHttpRequest"}).text)
    assert fields["error"] == "lua"
    assert re.fullmatch("number [0-9a-f]{8} in the server's log", fields["emsg"])


def test_behind_what_was_sent(server: AppServer) -> None:
    server.server.access = Access(debug=False)
    text = server.page("<?lsp response:write(('x'):rep(20000)) response:flush() error'the secret' ?>").text
    assert re.search(r"<pre>Lua error: number [0-9a-f]{8} in the server&#x27;s log</pre>\n$", text)
    assert "secret" not in text


def test_on_loopback_unless_a_proxy_is_in_front(app: AppServer) -> None:
    app.server.access = Access(debug=None, loopback=True)
    assert "secret" in app.ask("/lua.lsp").text
    assert "secret" not in app.ask("/lua.lsp", headers={"X-Forwarded-For": "192.0.2.1"}).text
