"""Logins from Lua: the protocols as clients speak them (spec: bas-api §5, §17 A1 to A5)."""

from __future__ import annotations

import gc
import json
from hashlib import md5, sha1
from urllib.parse import urlencode

import gevent
import pytest

from smqrt.http.logins import Acl, Authenticator, UserTable
from smqrt.http.logins.authenticator import AuthInfo, login_page
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.logins import APPLICATION, FORM_TYPE, basic, cookie, digest_of, sign_in
from tests.support.digest import authorization, challenges


@pytest.fixture
def app(server: AppServer) -> AppServer:
    """A server with a folder for each type of authenticator."""
    application = server.applications.load("", APPLICATION)
    assert application.error is None
    return server


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


def test_what_decides_logins_sees_the_application(server: AppServer):
    preload = """
        name = "shop"
        local users = ba.create.authuser(function(user, password, _ENV) return app.name end)
        local function page(_ENV, info) print(app.name, app.dir:baseuri()) end
        dir:setauth(ba.create.authenticator(users, {type = "form", response = page}))"""
    server.app({".preload": preload, "index.html": "open"}, "shop")
    assert server.ask("/shop/").text == "shop\t/shop/\n"
    assert sign_in(server, "/shop/", username="ann", password="shop").status == 302


def test_a_hashed_form_login(app: AppServer):
    ask = {"X-Requested-With": "XMLHttpRequest"}
    for name, secret in (("ann", "secret"), ("bob", md5(b"bob:Barracuda Server:pass").hexdigest())):
        info = json.loads(app.ask("/sform/", headers=ask).body)
        hashed = sha1((secret + info["seed"]).encode()).hexdigest()
        fields = {"username": name, "password": hashed, "seed": info["seed"], "seedkey": info["seedkey"]}
        assert sign_in(app, "/sform/", **{**fields, "seed": "1"}).text == f"form {name} nil 0 false", "not ours"
        assert sign_in(app, "/sform/", **fields).status == 302
        assert sign_in(app, "/sform/", **fields).status == 200, "a seed is good once"
    assert sign_in(app, "/sform/", username="ann", password="secret").status == 200, "clear text without TLS"


def test_login_page_variables(app: AppServer):
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


def test_a_right_password_that_is_refused_has_its_reason(app: AppServer):
    for _ in range(2):
        assert sign_in(app, "/form/", username="ann", password="secret").status == 302
    body = urlencode({"ba_username": "ann", "ba_password": "secret"}).encode()
    info = json.loads(app.ask("/form/", "POST", body, FORM_TYPE | {"X-Requested-With": "XMLHttpRequest"}).body)
    assert (info["reason"], info["maxusers"], info["loginattempts"]) == ("maxusers", 2, 0)
    told = AuthInfo("form", "realm", username="<ann>", reason="maxusers", maxusers=2)
    assert b"The password is correct, but &lt;ann&gt; has 2 sessions already" in login_page(told, hashes=False)


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


def test_the_page_of_a_401(app: AppServer):
    answer = app.ask("/shown/file.txt")
    assert (answer.status, answer.text) == (401, "login page /shown/file.txt")
    assert len(answer.headers.get_all("WWW-Authenticate") or []) == 2
    challenge = challenges(answer.headers.get_all("WWW-Authenticate") or [])["MD5"]
    for count, (user, status) in enumerate((("nobody", 401), ("broken", 500), ("ann", 200)), 1):
        field = authorization(challenge, user, "secret", "/shown/file.txt", count=count)
        assert app.ask("/shown/file.txt", headers={"Authorization": field}).status == status, user


def test_a_logout_from_digest(app: AppServer):
    """The browser, which sends what it knows with every request, has to ask its user again."""
    challenge = digest_of(app, "/digest/x")["MD5"]
    for count, (what, begin) in enumerate((("", "ann"), ("?do=logout", "true\nnil\n")), 1):
        target = "/digest/login.lsp" + what
        headers = {"Authorization": authorization(challenge, "ann", "secret", target, count=count)}
        assert app.ask(target, headers=headers).text.startswith(begin)
    headers = {"Authorization": authorization(challenge, "ann", "secret", "/digest/login.lsp", count=3)}
    after = app.ask("/digest/login.lsp", headers=headers)
    assert (after.status, "stale" in after.headers["WWW-Authenticate"]) == (401, False)


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


def test_forward_goes_around_and_redirect_does_not(app: AppServer):
    """A1: a login page is a hidden file that the form's own function forwards to."""
    assert app.ask("/form/file.txt", headers={"X-Forward": "1"}).text == "login page /form/file.txt"
    closed = """
      local function page(_ENV, info) response:write "login" end
      local inner = ba.create.resrdr("inner", io)
      inner:setauth(ba.create.authenticator(ba.create.jsonuser(), {type = "form", response = page}))
      dir:insert(inner, true)
    """
    go = "<?lsp response[request:data'how'](response, request:data'to') ?>"
    app.app({".preload": closed, "go.lsp": go, "file.txt": "open"}, "go")
    assert app.ask("/go/inner/file.txt").text == "login"
    for target in ("inner/file.txt", "/go/inner/file.txt"):
        assert app.ask(f"/go/go.lsp?how=forward&to={target}").text == "open"
        assert app.ask(f"/go/go.lsp?how=include&to={target}").text == "open"
        assert app.ask(f"/go/go.lsp?how=redirect&to={target}").text == "login"


def test_a_directory_that_has_nothing_itself(server: AppServer):
    """A2: it lets the search go on, at the front of an application and beside it; and it comes and goes at run time."""
    code = """
      local users = ba.create.jsonuser()
      users:set{ann = {pwd = "secret"}}
      local basic = ba.create.authenticator(users, {type = "basic"})
      local prologue, sibling = ba.create.dir"closed", ba.create.dir(10)
      prologue:setauth(basic)
      dir:insertprolog(prologue, true)
      sibling:setauth(basic)
      local function act(_ENV, relpath)
        local done = ({
          insert = function() sibling:insert() end,
          unlink = function() return sibling:unlink() end,
          open = function() sibling:setauth() end,
          close = function() ({dir = sibling}).dir.setauth({dir = sibling}, basic) end,
        })[relpath]
        if not done then return false end
        done()
      end
      local acts = ba.create.dir("act", 20)
      acts:setfunc(act)
      acts:insert()
    """
    files = {".preload": code, "file.txt": "open", "closed/file.txt": "closed"}
    assert server.app(files).error is None

    def answers() -> list[int]:
        ann = basic("ann", "secret")
        return [
            server.ask(path, headers=headers).status
            for path in ("/file.txt", "/closed/file.txt")
            for headers in ({}, ann)
        ]

    assert answers() == [200, 200, 401, 200]
    for act, expected in (
        ("insert", [401, 200, 401, 200]),
        ("open", [200, 200, 401, 200]),
        ("close", [401, 200, 401, 200]),
        ("unlink", [200, 200, 401, 200]),
        ("insert", [401, 200, 401, 200]),
    ):
        assert server.ask(f"/act/{act}").status == 200
        assert answers() == expected, act


def test_an_authorizer(app: AppServer):
    """A5: the most specific pattern decides alone."""

    def statuses(target: str, method: str = "GET") -> list[int]:
        users = ("ann", "secret"), ("bob", "pass")
        return [app.ask(f"/acl/{target}", method, headers=basic(*user)).status for user in users]

    assert statuses("file.txt") == [200, 200]
    assert statuses("folder/nothing.txt") == [404, 403]
    assert statuses("folder/file.txt") == [403, 403], "it allows POST only, though patterns around it allow GET"
    assert statuses("folder/file.txt", "POST") == [405, 403]
    assert statuses("folder//nothing.txt") == [404, 403], "a name has one spelling"
    assert app.ask("/acl/file.txt").status == 401


def test_an_authorizer_that_is_a_function(app: AppServer):
    assert app.ask("/decided/file.txt", headers=basic("ann", "secret")).status == 403
    assert app.ask("/decided/folder/file.txt", headers=basic("ann", "secret")).status == 200
    assert words_of(app, "table.concat(app.decided, ' ')") == "ann GET folder/file.txt ann secret basic"


def test_a_page_that_asks_by_itself(app: AppServer):
    """`authenticate` gives the user, or nil when the client has got the login page."""
    assert app.ask("/manual.lsp").text == "form nil nil 0 false"
    right = sign_in(app, "/manual.lsp", username="ann", password="secret")
    assert (right.status, right.text) == (302, "")
    assert app.ask("/manual.lsp", headers=cookie(right)).text == "ann\tsecret\tform\ntrue\ttrue\tfalse\n"
    assert app.ask("/manual.lsp", headers={"X-Forward": "1"}).text == "login page /manual.lsp"


def test_the_session_of_a_login(app: AppServer):
    """It gets another id (nobody who planted one knows it), keeps what it had, and ends with the login."""
    planted = cookie(app.ask("/login.lsp?do=session"))
    right = app.ask("/form/", "POST", b"ba_username=ann&ba_password=secret", FORM_TYPE | planted)
    assert right.headers.get_all("Set-Cookie") is not None
    assert cookie(right) != planted
    assert app.ask("/login.lsp", headers=planted).text == "nil\nann\n1\n"
    assert app.ask("/login.lsp", headers=cookie(right)).text == "ann\tsecret\tform\napples\t1200\nann\n1\n"
    assert app.ask("/login.lsp?do=logout", headers=cookie(right)).text == "true\nnil\n\n0\n"
    assert app.ask("/login.lsp?do=logout", headers=cookie(right)).text == "false\nnil\n\n0\n"
    assert app.ask("/form/file.txt", headers=cookie(right)).text == "form nil nil 0 false"


def test_a_session_without_a_login_ends_with_logout_too(app: AppServer):
    plain = cookie(app.ask("/login.lsp?do=session"))
    assert app.ask("/login.lsp", headers=plain).text.startswith("nil\napples\t")
    assert app.ask("/login.lsp?do=logout", headers=plain).text == "false\nnil\n\n0\n"


def test_what_outlives_its_request(app: AppServer):
    """Everything of a request raises then; a session that has ended has no user."""
    code = (
        "_G.kept = kept or {request, request:session(true)} "
        "for _, name in ipairs{'user', 'login', 'logout'} do print(pcall(kept[1][name], kept[1])) end "
        "print(kept[2]:user()) kept[2]:terminate() print(kept[2]:user())"
    )
    app.app({"keep.lsp": f"<?lsp {code} ?>"}, "keep")
    app.ask("/keep/keep.lsp")
    lines = app.ask("/keep/keep.lsp").text.split("\n")
    assert all("expired" in line for line in lines[:3])
    assert lines[3:] == ["nil", "nil", ""]


def test_an_application_that_ends_leaves_nothing(server: AppServer):
    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, Authenticator | UserTable | Acl) for one in gc.get_objects())

    before = kept()
    for _ in range(3):
        application = server.applications.load("", APPLICATION)
        assert server.ask("/form/file.txt").text.startswith("form")
        application.unload()
    server.vm.eval("collectgarbage() collectgarbage()")
    server.ask("/")
    assert kept() == before


def test_another_user_gets_nothing_of_the_last_one(app: AppServer):
    first = app.ask("/form/", "POST", b"ba_username=ann&ba_password=secret", FORM_TYPE)
    app.ask("/login.lsp?do=session", headers=cookie(first))
    second = app.ask("/form/", "POST", b"ba_username=bob&ba_password=pass", FORM_TYPE | cookie(first))
    assert app.ask("/login.lsp", headers=cookie(second)).text.startswith("bob\tpass\tform\nnil\t1200\nbob\n")
    assert app.ask("/form/file.txt", headers=cookie(first)).text == "form nil nil 0 false"


def test_a_repeated_login_continues_the_session(app: AppServer):
    """Nobody in particular becomes somebody, and somebody is so twice: what the session has stays."""
    old = cookie(app.ask("/login.lsp?do=login"))
    app.ask("/login.lsp?do=session", headers=old)
    for _ in range(2):
        again = app.ask("/form/", "POST", b"ba_username=ann&ba_password=secret", FORM_TYPE | old)
        assert app.ask("/form/file.txt", headers=old).text.startswith("form"), "the id of before"
        old = cookie(again)
        assert app.ask("/login.lsp", headers=old).text == "ann\tsecret\tform\napples\t1200\nann\n1\n"


def test_a_stolen_cookie_ends_nobodys_session(app: AppServer):
    here = cookie(sign_in(app, "/form/", username="ann", password="secret"))
    body = b"ba_username=bob&ba_password=pass"
    there = app.ask("/form/", "POST", body, FORM_TYPE | here, source="127.0.0.2")
    assert there.status == 302
    assert cookie(there) != here
    assert app.ask("/form/file.txt", headers=here).text == "open"


def test_a_cookie_from_another_address_is_no_login(app: AppServer):
    here = cookie(sign_in(app, "/form/", username="ann", password="secret"))
    assert app.ask("/form/file.txt", headers=here, source="127.0.0.2").text == "form nil nil 0 false"
    assert app.ask("/login.lsp", headers=here, source="127.0.0.2").text.startswith("nil\n")
    assert app.ask("/form/file.txt", headers=here).text == "open", "whose it is stays in"


def test_how_many_sessions_a_user_may_have(app: AppServer):
    """ann has two and a third is refused; bob has one, and the newest stays."""
    first, second = (cookie(sign_in(app, "/form/", username="ann", password="secret")) for _ in range(2))
    refused = sign_in(app, "/form/", username="ann", password="secret")
    assert (refused.status, refused.text) == (200, "form ann secret 0 false")
    assert app.ask("/login.lsp?do=logout", headers=first).text.startswith("true")
    assert sign_in(app, "/form/", username="ann", password="secret").status == 302
    assert app.ask("/login.lsp?do=everywhere", headers=second).text == "true\nnil\n\n0\n"
    older, newer = (cookie(sign_in(app, "/form/", username="bob", password="pass")) for _ in range(2))
    assert app.ask("/form/file.txt", headers=older).text.startswith("form")
    assert app.ask("/form/file.txt", headers=newer).text == "open"


def test_a_login_by_program(app: AppServer):
    """A3: it passes every authenticator; a name may have one session, unless the page says otherwise."""
    login = app.ask("/login.lsp?do=login&name=eve")
    assert login.text == "true\neve\tnil\t?\nnil\t1200\neve\n1\n"
    assert app.ask("/nobody/file.txt", headers=cookie(login)).text == "open"
    assert app.ask("/digest/file.txt", headers=cookie(login)).text == "open"
    assert app.ask("/acl/file.txt", headers=cookie(login)).status == 403, "the authorizer is still asked"
    assert app.ask("/login.lsp?do=login&name=eve", headers=cookie(login)).text.startswith("eve\n")
    assert app.ask("/login.lsp?do=full&name=eve").text.startswith("false\nnil\n")
    assert app.ask("/login.lsp?do=login&name=eve").text.startswith("true\neve")
    assert app.ask("/nobody/file.txt", headers=cookie(login)).text.startswith("form"), "recycled"
    nameless = app.ask("/login.lsp?do=login")
    assert nameless.text.startswith("true\nanonymous\tnil\t?\n")
    assert app.ask("/form/file.txt", headers=cookie(nameless)).text == "open"
    app.ask("/login.lsp?do=login")
    app.ask("/login.lsp?do=everywhere", headers=cookie(app.ask("/login.lsp?do=login&name=")))
    assert app.ask("/form/file.txt", headers=cookie(nameless)).text == "open", "they have nothing to do with each other"


def test_a_user_database_that_is_slow(app: AppServer):
    """A4: who waits for it waits alone; it alone can tell whether the password is right."""
    login = gevent.spawn(sign_in, app, "/radius/", username="slow", password="radius")
    gevent.sleep(0.05)
    assert app.ask("/file.txt").text == "open"
    assert not login.ready()
    assert login.get(timeout=5).status == 302
    assert app.ask("/login.lsp?name=slow", headers=cookie(login.value)).text == "slow\tradius\tform\nnil\t60\nslow\n1\n"
    assert sign_in(app, "/radius/", username="slow", password="wrong").status == 200
    assert words_of(app, "app.asked.slow.password .. app.asked.slow.uri") == "wrong/radius/"


def test_what_a_user_database_may_answer(app: AppServer):
    challenge = digest_of(app, "/auth/x")["MD5"]
    for count, (user, status) in enumerate((("ha1", 200), ("ann", 401), ("slow", 401), ("nobody", 401)), 1):
        headers = {"Authorization": authorization(challenge, user, "pass", "/auth/file.txt", count=count)}
        assert app.ask("/auth/file.txt", headers=headers).status == status, user
    assert words_of(app, "tostring(app.asked.ann.password)") == "nil", "of a hash nobody knows it"
    broken = sign_in(app, "/radius/", username="broken", password="x")
    assert (broken.status, "the database is away" in broken.text) == (500, True)
    moved = sign_in(app, "/radius/", username="moved", password="x")
    assert (moved.status, moved.headers["Location"]) == (302, f"http://127.0.0.1:{app.port}/elsewhere")


def test_the_type_that_suits_the_client(app: AppServer):
    def offered(path: str, **headers: str) -> str:
        answer = app.ask(f"/auth/{path}", headers={name.replace("_", "-"): value for name, value in headers.items()})
        return (answer.headers["WWW-Authenticate"] or "form").partition(" ")[0]

    assert [offered(path) for path in ("", "a/", "a.htm", "a.html", "a.lsp")] == ["form"] * 5
    assert [offered(path) for path in ("a", "a.txt", "a.js")] == ["Digest"] * 3
    assert offered("", PrefAuth="basic") == "Basic"
    assert offered("", PrefAuth="digest") == "Digest"
    assert offered("", X_Requested_With="XMLHttpRequest") == "Digest"
    assert offered("", Authorization="Basic !!!") == "Basic"
    for method in ("PROPFIND", "OPTIONS", "PUT"):
        assert app.ask("/auth/", method).headers["WWW-Authenticate"].startswith("Digest"), "a program has no form"
    assert app.ask("/auth/file.txt", headers=basic("ann", "secret")).text == "open"
    assert sign_in(app, "/auth/file.txt", username="ann", password="secret").status == 302, "wherever it is sent to"
    assert app.ask("/dav/").headers["WWW-Authenticate"].startswith("Digest")
    assert app.ask("/dav/file.txt", headers=basic("ann", "secret")).text == "open"


def test_wrong_arguments(app: AppServer):
    """Each a Lua error, or nil and a word, as documented."""
    for code, message in WRONG.items():
        answer = app.vm.eval(f"return select(2, pcall(function() {code} end))", "=x")
        assert message in str(answer[0]), code
    assert app.vm.eval("return ba.create.jsonuser():set'{'")[0] is None
    assert app.vm.eval("return ba.create.jsonuser():set{ann = true}") == (
        None,
        b"user 'ann': must be a table with a field 'pwd'",
    )
    assert app.vm.eval("return ba.create.jsonuser():getpwd'ann'") == (None,)
    null = """return ba.create.jsonuser():set'{"ann": {"pwd": "x", "inactive": null}}'"""
    assert app.vm.eval(null) == (True,)
    assert app.vm.eval("local u = ba.create.jsonuser() u:set{ann={pwd='x', inactive=9}} return u:getpwd'ann'") == (
        b"x",
        5,
        False,
        9,
    )
    assert app.vm.eval("local u = ba.create.jsonuser() return type(u), u:authorizer():casesensitive()") == (
        b"userdata",
        False,
    )


def test_tables_from_json(app: AppServer):
    """Users and rules come as JSON text, or as what was decoded from it."""
    users = """ba.json.decode'{"ann": {"pwd": "x", "roles": ["r"], "inactive": null}, "bob": null}'"""
    known = f"(function(u) u:set({users}) return u:getpwd'ann' .. tostring(u:getpwd'bob') end)(ba.create.jsonuser())"
    assert words_of(app, known) == "xnil"
    rules = """'{"all": {"urls": ["/*"], "roles": ["r"]}} // all'"""
    assert words_of(app, f"ba.create.jsonuser():authorizer():set({rules})") == "true"


WRONG = {
    "ba.create.authuser()": "bad argument #1 to 'authuser' (function expected",
    "ba.create.authorizer{}": "bad argument #1 to 'authorizer' (function expected",
    "ba.create.authenticator()": "bad argument #1 to 'authenticator' (authuser or jsonuser expected, got no value)",
    "ba.create.authenticator(ba.create.jsonuser(), {type='x'})": "unknown type 'x'",
    "ba.create.authenticator(ba.create.jsonuser(), {type='form'})": "needs op.response",
    "ba.create.authenticator(ba.create.jsonuser(), {realm='\"'})": "realm: must not contain a quote",
    "ba.create.jsonuser():set(5)": "bad argument #1 to 'set' (table expected, got number)",
    "ba.create.jsonuser():authorizer():set{a={roles={}}}": "rule 'a': 'urls' must be a list",
    "ba.create.jsonuser():authorizer():set'x'": "set: parse",
    "ba.create.dir():setauth{}": "bad argument #1 to 'setauth' (authenticator expected, got table)",
    "ba.create.dir():setauth(nil, {})": "bad argument #2 to 'setauth'",
    "ba.create.jsonuser():authorizer():authorize()": "bad argument #1 to 'authorize' (request expected",
}


def words_of(app: AppServer, expression: str) -> str:
    """What an expression of Lua is worth in the application."""
    return app.ask("/value.lsp?" + urlencode({"of": expression})).text
