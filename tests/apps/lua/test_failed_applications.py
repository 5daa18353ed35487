"""Responses of an application that failed to start: 503, until it is loaded again."""

from __future__ import annotations

import pytest

from smqrt.http.access import Access
from smqrt.wire.websocket import new_key, request_headers
from tests.apps.lua.app_server import AppServer

BROKEN = [{".preload": "error('no luck')"}, {".preload.py": "1 / 0"}]


@pytest.mark.parametrize("files", BROKEN, ids=["lua", "python"])
@pytest.mark.parametrize("name", ["bad", ""])
def test_a_failed_application_answers_503(server: AppServer, name: str, files: dict[str, str]) -> None:
    server.app({"page.lsp": "fine"}, "good")
    application = server.app({**files, "a.txt": "never"}, name)
    assert application.error is not None
    at = application.uri
    for path in (at, f"{at}a.txt", f"{at}x/y.lsp"):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
            assert server.ask(path, method).status == 503, (method, path)
    assert server.ask(at, headers={"SimpleMQ": "1"}).status == 503
    assert server.ask(at, headers=dict(request_headers(new_key()))).status == 503
    assert server.ask("/good/page.lsp").text == "fine"
    assert "no luck" in server.ask(at).text or "ZeroDivisionError" in server.ask(at).text
    server.server.access = Access(debug=False)
    hidden = server.ask(at)
    assert hidden.status == 503
    assert "no luck" not in hidden.text
    assert "ZeroDivisionError" not in hidden.text
    for file in files:
        server.write(name, {file: ""})
    application.reload()
    assert application.error is None
    assert server.ask(f"{at}a.txt").text == "never"


def test_a_stopped_missing_or_duplicate_query(server: AppServer) -> None:
    missing = server.applications.load("gone", server.folder / "missing")
    assert server.ask("/gone/x.txt").status == 503
    missing.unload()
    assert server.ask("/gone/x.txt").status == 404
    server.app({".preload": "error('no luck')"}, "twice")
    namesake = server.folder / "other"
    namesake.mkdir()
    (namesake / "a.txt").write_text("mine")
    server.applications.load("twice", namesake)
    assert server.ask("/twice/a.txt").text == "mine"
    assert server.ask("/twice/b.txt").status == 404
