"""Logins from Lua: the protocols as clients speak them (spec: bas-api §5, §17 A1 to A5)."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import md5, sha1
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.digest import authorization, challenges
from tests.lua.app_server import Answer, AppServer

FORM_TYPE = {"Content-Type": "application/x-www-form-urlencoded"}
APPLICATION = Path(__file__).parent.parent / "apps" / "logins"


@pytest.fixture
def app(server: AppServer) -> AppServer:
    """A server with a folder for each type of authenticator."""
    application = server.applications.load("", APPLICATION)
    assert application.error is None
    return server


def sign_in(server: AppServer, path: str, **fields: str) -> Answer:
    body = urlencode({f"ba_{name}": value for name, value in fields.items()}).encode()
    return server.ask(path, "POST", body, FORM_TYPE)


def cookie(answer: Answer) -> dict[str, str]:
    return {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


def digest_of(server: AppServer, path: str) -> dict[str, dict[str, str]]:
    return challenges(server.ask(path, headers={"PrefAuth": "digest"}).headers.get_all("WWW-Authenticate") or [])


def test_a_form_login_and_its_end(app: AppServer):
    first = app.ask("/form/who.lsp?a=1")
    assert (first.status, first.text) == (200, "form nil nil 0 false")
    wrong = sign_in(app, "/form/who.lsp?a=1", username="ann", password="wrong")
    assert (wrong.status, wrong.text) == (200, "form ann secret 1 false")
    assert "Set-Cookie" not in wrong.headers
    right = sign_in(app, "/form/who.lsp?a=1", username="ann", password="secret")
    assert (right.status, right.headers["Location"]) == (302, f"http://127.0.0.1:{app.port}/form/who.lsp?a=1")
    assert right.headers["Set-Cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
    assert app.ask("/form/who.lsp", headers=cookie(right)).text.startswith("ann\tsecret\tform\n" * 2)
    assert app.ask("/form/file.txt", headers=cookie(right)).text == "open"
    assert app.ask("/nobody/file.txt", headers=cookie(right)).text == "open", "A3"
    assert app.ask("/digest/file.txt", headers=cookie(right)).text == "open", "A3"


def test_a_hashed_form_login(app: AppServer):
    ask = {"X-Requested-With": "XMLHttpRequest"}
    for name, secret in (("ann", "secret"), ("bob", md5(b"bob:Barracuda Server:pass").hexdigest())):
        info = json.loads(app.ask("/sform/", headers=ask).body)
        hashed = sha1((secret + info["seed"]).encode()).hexdigest()
        fields = {"username": name, "password": hashed, "seed": info["seed"], "seedkey": info["seedkey"]}
        assert sign_in(app, "/sform/", **{**fields, "seed": "1"}).text.startswith("form nil"), "not one of ours"
        assert sign_in(app, "/sform/", **fields).status == 302
        assert sign_in(app, "/sform/", **fields).status == 200, "a seed is good once"
    assert sign_in(app, "/sform/", username="ann", password="secret").status == 200, "clear text without TLS"


def test_what_a_login_page_is_told(app: AppServer):
    body = urlencode({"ba_username": "ann", "ba_password": "wrong"}).encode()
    ask = FORM_TYPE | {"X-Requested-With": "XMLHttpRequest"}
    info = json.loads(app.ask("/form/", "POST", body, ask).body)
    assert int(info.pop("seed")) is not None
    assert info.pop("seedkey")
    assert info == {
        "type": "form",
        "loginattempts": 1,
        "denied": False,
        "username": "ann",
        "password": "wrong",
        "maxusers": 2,
        "recycle": False,
    }, "the stored password is not given away"


@pytest.mark.parametrize("algorithm", ["MD5", "SHA-256"])
def test_digest(app: AppServer, algorithm: str):
    offered = digest_of(app, "/auth/x")
    assert list(offered) == ["SHA-256", "MD5"]
    challenge = offered[algorithm]
    headers = {"Authorization": authorization(challenge, "ann", "secret", "/auth/who.lsp")}
    answer = app.ask("/auth/who.lsp", headers=headers)
    assert answer.text.startswith("ann\tsecret\tdigest\n" * 2)
    replayed = app.ask("/auth/who.lsp", headers=headers)
    assert replayed.status == 401
    assert "stale=true" in replayed.headers["WWW-Authenticate"]
    again = {"Authorization": authorization(challenge, "ann", "secret", "/auth/who.lsp", count=2)}
    assert app.ask("/auth/who.lsp", headers=again | cookie(answer)).status == 200
    wrong = app.ask(
        "/auth/who.lsp", headers={"Authorization": authorization(challenge, "ann", "x", "/auth/who.lsp", count=3)}
    )
    assert (wrong.status, wrong.text) == (401, "digest ann secret 1 false")
    assert "stale" not in wrong.headers["WWW-Authenticate"]


def test_digest_with_a_stored_ha1_leads_to_md5(app: AppServer):
    """Who chose SHA-256 can't be compared with it: the next challenge is for MD5 only."""
    challenge = digest_of(app, "/digest/x")["SHA-256"]
    headers = {"Authorization": authorization(challenge, "bob", "pass", "/digest/who.lsp")}
    answer = app.ask("/digest/who.lsp", headers=headers)
    offered = challenges(answer.headers.get_all("WWW-Authenticate"))
    assert (answer.status, list(offered)) == (401, ["MD5"])
    headers = {"Authorization": authorization(offered["MD5"], "bob", "pass", "/digest/who.lsp")}
    assert app.ask("/digest/who.lsp", headers=headers).text.startswith("bob\t")


def test_basic(app: AppServer):
    assert app.ask("/basic/").headers["WWW-Authenticate"] == 'Basic realm="here", charset="UTF-8"'
    answer = app.ask("/basic/who.lsp", headers=basic("ann", "secret"))
    assert answer.text.startswith("ann\tsecret\tbasic\n" * 2)
    assert app.ask("/basic/who.lsp", headers=cookie(answer)).status == 401, "a cookie alone proves nothing"
    assert app.ask("/who.lsp", headers=cookie(answer)).text.startswith("ann\tsecret\tbasic\n" * 2)
    for _ in range(5):  # without cookies it is one login still
        assert app.ask("/basic/who.lsp", headers=basic("ann", "secret")).status == 200
    assert app.ask("/basic/who.lsp", headers=basic("ann", "wrong")).status == 401


def test_public_and_hidden_names(app: AppServer):
    assert app.ask("/form/public/file.txt").text == "public"
    assert app.ask("/form/.preload").text == "form nil nil 0 false", "A4"
    assert (
        app.ask("/form/.preload", headers=cookie(sign_in(app, "/form/", username="ann", password="secret"))).status
        == 404
    )
    assert app.ask("/.preload").status == 404
    assert app.ask("//form//file.txt").text == "form nil nil 0 false"
