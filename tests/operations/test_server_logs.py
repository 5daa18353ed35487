"""The logs of a real server: JSON lines, close reasons, and the access log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import requests

from smqrt.client import SmqClient
from tests.conftest import Served
from tests.support.waiting import wait_until

PRELOAD = 'hub = require "smq.hub".create{authenticate = function(c) return c == "yes" and 0 or 3, "no, no" end}'


def test_json_log_and_access_log(serve: Callable[..., Served], tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / ".preload").write_text(PRELOAD)
    (app / "smq.lsp").write_text("<?lsp app.hub:connect(request) ?>")
    (app / "page.txt").write_text("hello")
    access = tmp_path / "access.log"
    served = serve(app, "--log-format", "json", "--log-access", access)
    url = served.wait_for(r'"message": "listening on (http://[^"]+)"')[1]
    assert requests.get(f"{url}/page.txt?user=ada&token=hush", timeout=5).text == "hello"
    assert requests.get(f"{url}/nothing.txt", timeout=5).status_code == 404
    with SmqClient(f"{url}/smq.lsp", uid="refused", onauth=lambda *_: b"hush") as client:
        wait_until(lambda: '"refused"' in served.output, patience_s=10)
        assert client.gettid() is None
    with SmqClient(f"{url}/smq.lsp", uid="welcome", onauth=lambda *_: b"yes") as client:
        wait_until(client.gettid)
    wait_until(lambda: '"client_disconnect"' in served.output)
    moved = tmp_path / "access.1"
    wait_until(lambda: access.exists() and "welcome" in access.read_text())
    access.rename(moved)
    served.process.send_signal(1)
    wait_until(access.exists)
    assert requests.get(f"{url}/page.txt", timeout=5).text == "hello"
    assert served.stop() == 0

    lines = [json.loads(line) for line in served.lines]  # every line is JSON
    ends = {line["reason"]: line for line in lines if line["event"] == "close"}
    assert ends["refused"]["level"] == "warning"
    assert ends["refused"]["detail"] == "bad credentials: no, no"
    assert (ends["client_disconnect"]["uid"], ends["client_disconnect"]["level"]) == ("welcome", "info")

    entries = [json.loads(line) for line in moved.read_text().splitlines()]
    page = next(one for one in entries if one["path"].startswith("/page"))
    assert (page["method"], page["path"], page["status"]) == ("GET", "/page.txt?user=ada&token=***", 200)
    assert (page["address"], page["bytes"]) == ("127.0.0.1", 5)
    assert page["ms"] >= 0
    assert {one["status"] for one in entries} >= {404, 101, "refused", "client_disconnect"}
    last = next(one for one in entries if one["method"] == "SMQ" and one["uid"] == "welcome")
    assert last["bytes_received"] > 0
    assert "hush" not in moved.read_text() + served.output
    assert "/page.txt" in access.read_text()


def test_unwritable_access_log_is_logged(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    served = serve(tmp_path, "--log-access", tmp_path / "no" / "access.log")
    served.wait_for("log.access: .* can't be written: No such file or directory")
    assert served.wait() == 1
