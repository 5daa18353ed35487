"""Pages of other hosts that `origins` or an application welcomes: browsers let them read the answers, and learn before
they send what they may."""

from __future__ import annotations

import pytest

from smqrt.errors import ArgumentError
from smqrt.http.access import Access, Cors
from smqrt.manual.web import Manual
from smqrt.transport.origins import Origins
from smqrt.wire.websocket import new_key, request_headers
from tests.apps.lua.app_server import Answer, AppServer

FRIEND, OTHER = "https://friend.example", "https://other.example"
ALLOW, CREDENTIALS = "Access-Control-Allow-Origin", "Access-Control-Allow-Credentials"
PAGE = "<?lsp app.count = (app.count or 0) + 1 response:write(request:method(), app.count) ?>"
PYTHON = """
from smqrt.app import Directory, dir, io
from smqrt.http.dav import DavDirectory

def page(request, relpath):
    if relpath == "sub/broken":
        1 / 0
    if relpath != "sub/page":
        return False
    app.count = app.get("count", 0) + 1
    request.response.json([request.method, app.count])

def flask(environ, start):
    start("200 OK", [("Content-Type", "text/plain"), ("Vary", "Accept"), ("Vary", "Cookie")])
    return [environ["REQUEST_METHOD"].encode()]

dir.setfunc(page)
dir.mount(flask, "wsgi")
dir.insert(DavDirectory("fs", io=io, lockdir=".LOCK"))
"""


def names(field: str | None) -> set[str]:
    return {name.strip().lower() for name in (field or "").split(",")} - {""}


def varies(answer: Answer) -> set[str]:
    return {name for line in answer.headers.get_all("Vary") or [] for name in names(line)}


def preflight(server: AppServer, target: str, method: str = "PUT", headers: str = "", origin: str = FRIEND) -> Answer:
    fields = {"Origin": origin, "Access-Control-Request-Method": method}
    return server.ask(
        target, "OPTIONS", headers=fields | ({"Access-Control-Request-Headers": headers} if headers else {})
    )


@pytest.fixture
def opened(server: AppServer) -> AppServer:
    """A server whose setting `origins` names a friend, with an application in each language."""
    server.server.access = Access(Origins(FRIEND), debug=True)
    server.app({"page.lsp": PAGE, "a.txt": "text" * 1000, "b.lsp": "<?lsp error'x' ?>"}, "lua")
    assert server.app({".preload.py": PYTHON, "x.txt": "x"}, "py").error is None
    server.app({".preload": "error'no'"}, "bad")
    server.root.insert(Manual())
    return server


def test_a_preflight_is_answered_and_runs_nothing(opened: AppServer) -> None:
    for target in (
        "/lua/page.lsp",
        "/py/sub/page",
        "/py/wsgi/a",
        "/py/fs/x.txt",
        "/lua/a.txt",
        "/none",
        "/bad/",
        "/help/",
    ):
        for method in ("GET", "PUT", "DELETE", "PROPFIND"):
            answer = preflight(opened, target, method, "content-type, X-Token,authorization")
            assert (answer.status, answer.body) == (204, b""), target
            assert answer.headers[ALLOW] == FRIEND
            assert answer.headers[CREDENTIALS] == "true"
            assert method.lower() in names(answer.headers["Access-Control-Allow-Methods"])
            assert names(answer.headers["Access-Control-Allow-Headers"]) == {"content-type", "x-token", "authorization"}
            assert int(answer.headers["Access-Control-Max-Age"]) == 600
            assert varies(answer) >= {"origin", "access-control-request-method", "access-control-request-headers"}
    assert opened.ask("/lua/page.lsp").text == "GET1"
    assert opened.ask("/py/sub/page").text == '["GET",1]'
    refused = preflight(opened, "/lua/page.lsp", origin=OTHER)
    assert (refused.status, refused.headers[ALLOW]) == (403, None)
    assert preflight(opened, "/lua/page.lsp", "GET", origin=OTHER).status == 403
    assert opened.ask("/lua/page.lsp").text == "GET2"
    assert opened.ask("/lua/page.lsp", "OPTIONS", headers={"Origin": FRIEND}).text == "OPTIONS3"  # no preflight


TARGETS = [
    ("/lua/page.lsp", 200), ("/lua/a.txt", 200), ("/lua/b.lsp", 500), ("/lua/none.txt", 404), ("/lua", 302),
    ("/py/sub/page", 200), ("/py/sub/broken", 500), ("/py/wsgi/", 200), ("/py/fs/x.txt", 200), ("/bad/", 503),
    ("/help/", 200), ("/lua/.preload", 404),
]  # fmt: skip


@pytest.mark.parametrize(("target", "status"), TARGETS)
def test_every_response_names_the_allowed_origin(opened: AppServer, target: str, status: int) -> None:
    for origin, allowed in ((FRIEND, FRIEND), (OTHER, None), ("null", None), (None, None)):
        for method in ("GET", "HEAD"):
            answer = opened.ask(target, method, headers={"Origin": origin} if origin else {})
            assert answer.status == status
            assert answer.headers.get_all(ALLOW) == ([allowed] if allowed else None)
            assert answer.headers[CREDENTIALS] == ("true" if allowed else None)
            assert "origin" in varies(answer)
            assert len(answer.headers.get_all("Vary")) == (2 if target == "/py/wsgi/" else 1)


def test_conditions_parts_and_compressed_files(opened: AppServer) -> None:
    tag = opened.ask("/lua/a.txt").headers["ETag"]
    for fields, status in (
        ({"Accept-Encoding": "gzip"}, 200), ({"Range": "bytes=0-3"}, 206), ({"If-None-Match": tag}, 304),
        ({"If-Match": '"x"'}, 412), ({"Range": "bytes=99999-"}, 416),
    ):  # fmt: skip
        answer = opened.ask("/lua/a.txt", headers={"Origin": FRIEND, **fields})
        assert (answer.status, answer.headers[ALLOW]) == (status, FRIEND)
        assert "origin" in varies(answer)


def test_logins_apply_to_requests_and_not_to_preflights(opened: AppServer) -> None:
    opened.app(
        {".preload": "dir:setauth(ba.create.authenticator(ba.create.authuser(function() end), {type='basic'}))"}, "in"
    )
    assert preflight(opened, "/in/x", "PUT").status == 204
    for method in ("GET", "PUT"):
        answer = opened.ask("/in/x.txt", method, headers={"Origin": FRIEND})
        assert (answer.status, answer.headers[ALLOW], answer.headers[CREDENTIALS]) == (401, FRIEND, "true")


LISTS = [
    ("*", FRIEND, "*", None, False),
    ("*", None, "*", None, False),
    ("*", "null", "*", None, False),
    ("null", "null", "null", None, True),
    ("null", FRIEND, None, None, True),
    ("https://*.example", FRIEND, FRIEND, "true", True),
    ("HTTPS://FRIEND.example:443/", "https://Friend.EXAMPLE", "https://Friend.EXAMPLE", "true", True),
    (f"*, {FRIEND}", FRIEND, FRIEND, "true", True),
    (f"*, {FRIEND}", OTHER, "*", None, True),
    (FRIEND, "http://friend.example", None, None, True),
    (FRIEND, f"{FRIEND}:8443", None, None, True),
    ("", FRIEND, None, None, False),
]


@pytest.mark.parametrize(("listed", "origin", "allowed", "credentials", "differs"), LISTS)
def test_lists(
    server: AppServer, listed: str, origin: str | None, allowed: str | None, credentials: str | None, differs: bool
) -> None:
    server.server.access = Access(Origins(listed))
    server.app({"page.lsp": PAGE, "a.txt": "x"})
    for target in ("/page.lsp", "/a.txt"):
        answer = server.ask(target, headers={"Origin": origin} if origin else {})
        assert (answer.headers[ALLOW], answer.headers[CREDENTIALS]) == (allowed, credentials)
        assert ("origin" in varies(answer)) == differs
    if origin and allowed:
        answer = preflight(server, "/page.lsp", origin=origin)
        assert (answer.status, answer.headers[ALLOW], answer.headers[CREDENTIALS]) == (204, allowed, credentials)


RULES = {
    "lua": (
        ".preload",
        "dir:setcors{{origins={{'{0}', 'https://*.lan'}}, methods='GET, PUT', headers={{'X-A'}}, expose='X-B',"
        " credentials=false, maxage=5}} d = ba.create.dir('in') d:setcors{{origins=''}} dir:insert(d)",
    ),
    "python": (
        ".preload.py",
        "from smqrt.app import Directory, dir\n"
        "dir.setcors(['{0}', 'https://*.lan'], methods='GET, PUT', headers=['X-A'], expose='X-B', credentials=False,"
        " max_age_s=5)\nd = Directory('in')\nd.setcors('')\ndir.insert(d)",
    ),
}


@pytest.mark.parametrize("language", RULES)
@pytest.mark.parametrize("name", ["api", ""])
def test_an_application_has_rules_of_its_own(server: AppServer, language: str, name: str) -> None:
    server.server.access = Access(Origins(OTHER), debug=True)
    file, text = RULES[language]
    application = server.app({file: text.format(FRIEND), "page.lsp": PAGE}, name)
    assert application.error is None
    server.app({"page.lsp": PAGE}, "closed")
    at = application.uri
    answer = preflight(server, f"{at}page.lsp", "DELETE", "x-a, x-c")
    assert (answer.status, answer.headers[ALLOW], answer.headers[CREDENTIALS]) == (204, FRIEND, None)
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, PUT"
    assert answer.headers["Access-Control-Allow-Headers"] == "X-A"
    assert answer.headers["Access-Control-Max-Age"] == "5"
    answer = server.ask(f"{at}page.lsp", "PUT", headers={"Origin": "https://a.lan"})
    assert (answer.text, answer.headers[ALLOW]) == ("PUT1", "https://a.lan")
    assert answer.headers["Access-Control-Expose-Headers"] == "X-B"
    answer = server.ask(f"{at}page.lsp", "POST", headers={"Origin": FRIEND})  # what a form sends has no preflight
    assert (answer.status, answer.headers[ALLOW]) == (403, FRIEND)
    refused = server.ask(f"{at}page.lsp", "PUT", headers={"Origin": OTHER})  # the setting does not count here
    assert refused.status == 403
    assert "setcors" in refused.text
    assert server.ask(f"{at}in/x", "POST", headers={"Origin": FRIEND}).status == 403  # the inner one is closed
    assert (
        server.ask("//closed/page.lsp", "POST", headers={"Origin": FRIEND}).status == 403
    )  # what is open at / opens no other
    assert server.ask("/closed/page.lsp", "POST", headers={"Origin": OTHER}).headers[ALLOW] == OTHER
    server.write(name, {file: ""})
    application.reload()
    assert server.ask(f"{at}page.lsp", "POST", headers={"Origin": FRIEND}).status == 403


def test_rules_are_taken_back(server: AppServer) -> None:
    preload = "dir:setcors{origins='*'} d = ba.create.dir 'in' d:setcors{origins=''} dir:insert(d)"
    server.app(
        {".preload": preload, "back.lsp": "<?lsp app.d:setcors() ?>", "all.lsp": "<?lsp app.dir:setcors() ?>"}, "a"
    )
    fields = {"Origin": FRIEND}
    assert server.ask("/a/in/", "POST", headers=fields).status == 403
    server.ask("/a/back.lsp")
    assert server.ask("/a/in/", "POST", headers=fields).status == 404  # as the directory around it
    server.ask("/a/all.lsp")
    assert server.ask("/a/in/", "POST", headers=fields).status == 403


def test_what_an_application_says_itself_stays(server: AppServer) -> None:
    source = "<?lsp response:setheader('access-control-allow-origin', '*') response:setheader('Vary', 'Accept') ?>"
    server.app(
        {"own.lsp": source, "vary.lsp": "<?lsp response:setheader('VARY', 'Accept, ORIGIN') ?>", "page.lsp": PAGE}
    )
    assert preflight(server, "/page.lsp", "GET", "x-a").text == "OPTIONS1"  # nobody is welcome: its own affair
    assert preflight(server, "/page.lsp", "POST").status == 403
    server.server.access = Access(Origins(FRIEND))
    answer = server.ask("/own.lsp", headers={"Origin": FRIEND})
    assert answer.headers.get_all(ALLOW) == ["*"]
    assert answer.headers[CREDENTIALS] is None
    half = "<?lsp response:setheader('Access-Control-Allow-Credentials', 'false') ?>"
    server.write("", {"half.lsp": half})
    answer = server.ask("/half.lsp", headers={"Origin": FRIEND})
    assert (answer.headers[ALLOW], answer.headers.get_all(CREDENTIALS)) == (FRIEND, ["false"])
    assert server.ask("/vary.lsp", headers={"Origin": FRIEND}).headers.get_all("Vary") == ["Accept, ORIGIN"]


def test_the_origins_of_a_hub(server: AppServer) -> None:
    source = f"""
from smqrt import hub
from smqrt.app import dir
smq = hub.create(origins="{FRIEND}")
smq.close()
dir.setfunc(lambda request, relpath: smq.connect(request))
"""
    assert server.app({".preload.py": source}).error is None
    asked = dict(request_headers(new_key()))
    answer = server.ask("/smq.lsp", headers={"Origin": FRIEND, **asked})
    assert (answer.status, answer.headers[ALLOW]) == (503, FRIEND)
    answer = server.ask("/smq.lsp", headers={"Origin": OTHER, **asked})
    assert (answer.status, answer.headers[ALLOW]) == (403, None)
    server.server.access = Access(Origins(FRIEND))
    answer = server.ask("/smq.lsp", headers={"Origin": FRIEND})
    assert (answer.status, answer.headers[ALLOW]) == (404, FRIEND)


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ("{origins='friend.example'}", "not an origin"),
        ("{origins='*', credentials=true}", "credentials"),
        ("{methods='GET, a b'}", "methods: invalid name ' a b'"),
        ("{headers={'X:'}}", "headers"),
        ("{expose={1, 'a\\r\\nb'}}", "expose"),
        ("{maxage=-1}", "max_age"),
        ("{maxage='x'}", "maxage"),
        ("{orgins='x'}", "orgins"),
    ],
)
def test_wrong_rules_are_named(server: AppServer, rules: str, fault: str) -> None:
    assert fault in str(server.app({".preload": f"dir:setcors{rules}"}).error)


def test_wrong_rules_in_python() -> None:
    for wrong in ({"max_age_s": True}, {"methods": [1]}, {"origins": [1]}, {"origins": ["*"], "credentials": True}):
        with pytest.raises(ArgumentError):
            Cors(**wrong)  # type: ignore[arg-type]
