"""A server with users and rules, as its operator has it: one identity for pages, hubs and the admin listener."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.client import SmqClient
from smqrt.errors import StartError
from smqrt.server.runtime import Server
from smqrt.settings.server_settings import AuthSettings, Settings
from tests.auth.conftest import USERS, user_line

PRELOAD = """\
local users = ba.create.serverusers()
local page = ba.create.dir("form")
local inner = ba.create.dir("in")
inner:setfunc(function(_ENV) response:write "in" return true end)
page:insert(inner, true)
local roles = users:authorizer()
roles:set {all = {urls = {"/*"}, roles = {"operators"}}}
page:setauth(ba.create.authenticator(users, {type = "form", response = function(_ENV, info)
  response:write("who? ", tostring(info.username))
end}), roles)
dir:insert(page, true)
smq = require "smq.hub".create {onconnect = function(etid, info, peer)
  trace("came", peer.user, table.concat(peer.groups or {}, " "), info.uname)
end}
open = require "smq.hub".create {auth = false}
"""


@pytest.fixture
def operated(tmp_path: Path, serve: Callable[..., Any]) -> Any:
    app = tmp_path / "app"
    app.mkdir()
    (app / ".preload").write_text(PRELOAD)
    (app / "smq.lsp").write_text("<?lsp app.smq:connect(request) ?>")
    (app / "open.lsp").write_text("<?lsp app.open:connect(request) ?>")
    (app / "who.lsp").write_text("<?lsp response:write(tostring(request:user())) ?>")
    users = tmp_path / "users.txt"
    users.write_text(USERS + user_line("chief", "boss", "admin"))
    users.chmod(0o600)
    (tmp_path / "acl.txt").write_text("allow ann * #\nallow bob read news\n")
    (tmp_path / "smqrt.toml").write_text('[auth]\nusers = "users.txt"\nacl = "acl.txt"\n[admin]\nhost = "0.0.0.0"\n')
    return serve("app", cwd=tmp_path)


def connected(url: str, credentials: str = "", **options: Any) -> SmqClient:
    client = SmqClient(url, options, reconnect=False, onauth=lambda rnd, ip: credentials)
    client.wait_connected()
    return client


def test_one_identity_everywhere(operated: Any, tmp_path: Path) -> None:
    url = operated.url
    smq, users = f"{url}/smq.lsp", tmp_path / "users.txt"

    with connected(smq, "ann:secret") as ann:
        operated.wait_for("came\tann\toperators\tann")
        assert ann.gettid()
    for wrong in ("ann:wrong", ""):
        client = connected(smq, wrong)
        assert client.end is not None
        assert client.end.code == 3
    with connected(f"{url}/open.lsp") as anybody:
        assert anybody.gettid()

    browser = requests.Session()
    form = {"ba_username": "ann", "ba_password": "wrong"}
    assert browser.post(f"{url}/form/in/", data=form, timeout=10).text == "who? ann"
    form["ba_password"] = "secret"
    assert browser.post(f"{url}/form/in/", data=form, timeout=10, allow_redirects=False).status_code == 302
    assert browser.get(f"{url}/who.lsp", timeout=10).text == "ann"
    cookie = {"Cookie": "; ".join(f"{one.name}={one.value}" for one in browser.cookies)}
    with connected(smq, headers=cookie) as page:  # a page's client need not give the password again
        assert page.gettid()
    other = {"ba_username": "bob", "ba_password": "hunter2"}
    login = requests.post(f"{url}/form/in/", data=other, timeout=10, allow_redirects=False)
    assert requests.get(f"{url}/form/in/", cookies=login.cookies, timeout=10).status_code == 403, "bob has no role"

    port = re.search(r"admin at http://\S+:(\d+)/", operated.output)
    assert port
    admin = f"http://127.0.0.1:{port[1]}"
    assert requests.get(f"{admin}/healthz", timeout=10).status_code == 200
    answers = [
        requests.get(f"{admin}/metrics", auth=auth, timeout=10).status_code
        for auth in (None, ("chief", "wrong"), ("ann", "secret"), ("chief", "boss"))
    ]
    assert answers == [401, 401, 403, 200]

    with connected(smq, "ann:secret") as ann:
        users.write_text(USERS.replace(user_line("ann", "secret", "operators"), ""))
        assert ann.wait_closed(20)
        assert ann.end is not None
        assert "the user was removed" in str(ann.end)
    assert browser.get(f"{url}/who.lsp", timeout=10).text == "nil", "the page's login has ended as well"

    users.write_text("ann")
    operated.wait_for(r"users and rules not reloaded: users.txt:1: a line is 'name:hash'")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"users": "gone.txt"}, "gone.txt can't be read: No such file or directory."),
        ({"acl": "acl.txt"}, "auth.acl is set, but no login is possible; set auth.users, or auth.anonymous = true."),
        ({"users": "users.txt"}, "users.txt: other users may read or change it; run: chmod 600 users.txt."),
    ],
)
def test_a_server_with_ambiguous_identities_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users.txt").write_text(USERS)
    (tmp_path / "users.txt").chmod(0o644)
    with pytest.raises(StartError) as caught:
        Server(Settings(port=0, auth=AuthSettings(**settings)))
    assert str(caught.value) == sentence
