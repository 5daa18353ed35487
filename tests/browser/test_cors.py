"""A page of another host uses an interface that `origins` opens: Chromium lets its script send and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served

CALL = """async ([url, method, options]) => {
    try {
        const answer = await fetch(url, {method, ...options});
        return [answer.status, await answer.text()];
    } catch (error) { return [0, String(error)]; }
}"""
JSON = {"headers": {"Content-Type": "application/json", "X-Token": "t"}}
PRELOAD = """
open = ba.create.dir "open"
open:setcors {origins = "*"}
open:setfunc(function(_ENV) response:write(request:method(), " ", tostring(request:header "cookie")) end)
dir:insert(open)
inside = ba.create.dir "inside"
inside:setauth(ba.create.authenticator(ba.create.authuser(function() end), {type = "basic"}))
dir:insert(inside)
"""
PAGE = """<?lsp local session = request:session(true) session.count = (session.count or 0) + 1
response:write(request:method(), session.count) ?>"""


@pytest.fixture
def call(chromium: Any, serve: Callable[..., Served], served_demos: Served, tmp_path: Path) -> Any:
    """`call("page.lsp", "PUT", {…})` gives status and text that a page of another server gets; 0 when it may not."""
    for name, text in {".preload": PRELOAD, "page.lsp": PAGE, "a.txt": "file"}.items():
        (tmp_path / name).write_text(text)
    api = serve(tmp_path, "--origins", served_demos.url)
    context = chromium.new_context()
    page = context.new_page()
    page.goto(served_demos.url + "/led/")
    yield lambda path, method="GET", options=None: page.evaluate(CALL, [f"{api.url}/{path}", method, options or {}])
    context.close()


def test_a_page_of_another_host_sends_and_reads(call: Any) -> None:
    with_cookies = {**JSON, "credentials": "include"}
    assert call("page.lsp") == [200, "GET1"]
    assert call("page.lsp", "PUT", with_cookies | {"body": "{}"}) == [200, "PUT1"]  # no preflight has counted
    assert call("page.lsp", "DELETE", with_cookies) == [200, "DELETE2"]
    assert call("a.txt") == [200, "file"]
    assert call("none.txt", "PUT", JSON)[0] == 404
    assert call("inside/x", "PATCH", JSON)[0] == 401
    assert call("open/x", "PUT", JSON) == [200, "PUT nil"]
    assert call("open/x", "GET", {"credentials": "include"})[0] == 0  # never for pages of every origin
