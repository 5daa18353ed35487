"""Responses to programs at an address that a form protects: 401 and JSON, not the login page."""

from __future__ import annotations

import json

import pytest

from tests.apps.lua.app_server import AppServer

LUA = """
local users = ba.create.authuser(function(name) return name == "ann" and "secret" or nil end)
local function page(_ENV) response:write"<form>" end
dir:setauth(ba.create.authenticator(users, {type = "form", response = page}))
"""
PYTHON = """
from smqrt.app import Authenticator, dir
dir.setauth(Authenticator({"ann": {"pwd": "secret"}}, "form"))
"""
JSON = {"Accept": "application/json, text/plain, */*"}
SCRIPT = {"X-Requested-With": "XMLHttpRequest"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/json;q=0.9,*/*;q=0.8"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(params=[(".preload", LUA), (".preload.py", PYTHON)], ids=["lua", "python"])
def site(server: AppServer, request: pytest.FixtureRequest) -> AppServer:
    name, source = request.param
    application = server.app({name: source, "api.lsp": "<?lsp response:write'in' ?>"})
    assert application.error is None, application.error
    return server


def test_programs_get_401_and_json(site: AppServer) -> None:
    for headers, body in ((JSON, b""), ({"Content-Type": "application/json"}, b"{}")):
        answer = site.ask("/api.lsp", "POST" if body else "GET", body, headers)
        assert answer.status == 401
        assert answer.headers["Content-Type"] == "application/json"
        assert "error" in json.loads(answer.text)
    wrong = b"ba_username=ann&ba_password=wrong"
    assert site.ask("/api.lsp", "POST", wrong, FORM | JSON).status == 401


def test_a_script_gets_json_without_an_application_page(site: AppServer) -> None:
    has_page = (site.folder / "root" / ".preload").exists()  # the application in Lua
    answer = site.ask("/api.lsp", headers=SCRIPT)
    assert answer.status == (200 if has_page else 401)


def test_posting_the_form_returns_the_page(site: AppServer) -> None:
    wrong, right = (b"ba_username=ann&ba_password=" + word for word in (b"wrong", b"secret"))
    for answer in (site.ask("/api.lsp", "GET", b"", BROWSER), site.ask("/api.lsp", "POST", wrong, FORM | SCRIPT)):
        assert answer.status == 200
        assert "<form" in answer.text
    assert site.ask("/api.lsp", "POST", right, FORM | JSON).status == 302
