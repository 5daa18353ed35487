"""Authenticators, login pages, guards and lists of patterns, of which the most specific one decides alone."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.http.logins import Acl, Authenticator, Login, UserTable
from smqrt.http.logins.authenticator import AuthInfo, LoginGuard, login_page
from smqrt.http.message import Request
from smqrt.http.tree import Directory
from tests.http.http_bench import Bench

USERS = UserTable({"ann": {"pwd": "x", "roles": ["admin"]}, "bob": {"pwd": "x", "roles": ["reader"]}, "eve": "x"})
REQUEST: Any = None
SESSION: Any = None


def allowed(acl: Acl, name: str, method: str, path: str) -> bool:
    return acl.allows(REQUEST, Login(name, None, "form", "127.0.0.1", SESSION), method, path)


def test_the_most_specific_pattern_decides():
    acl = Acl(
        USERS,
        {
            "all": {"urls": ["/*"], "roles": ["admin", "reader"]},
            "docs": {"urls": ["/docs/*", "/more/docs/*"], "methods": ["GET"], "roles": ["admin"]},
            "one": {"urls": ["/docs/one"], "methods": ["POST"], "roles": ["reader"]},
        },
    )
    for name, method, path, expected in (
        ("ann", "DELETE", "x", True),
        ("bob", "GET", "/", True),
        ("bob", "GET", "", True),
        ("eve", "GET", "x", False),
        ("nobody", "GET", "x", False),
        ("ann", "GET", "docs/two", True),
        ("ann", "PUT", "docs/two", False),
        ("bob", "GET", "/docs/two", False),
        ("bob", "GET", "/more/docs/two", False),
        ("ann", "GET", "docs", True),
        ("ann", "GET", "docs/one", False),
        ("bob", "POST", "docs/one", True),
        ("bob", "POST", "docs/one/", False),
    ):
        assert allowed(acl, name, method, path) is expected, (name, method, path)


def test_what_no_pattern_fits_is_refused():
    acl = Acl(USERS, {"docs": {"urls": ["docs/*"], "roles": ["admin"]}})
    assert allowed(acl, "ann", "GET", "docs/x")
    assert not allowed(acl, "ann", "GET", "other")
    assert not allowed(Acl(USERS), "ann", "GET", "")


def test_entries_with_the_same_pattern_add_up():
    readers = {"urls": ["/*", "/b/*"], "methods": ["get"], "roles": ["reader"]}
    acl = Acl(USERS, {"read": readers, "write": {"urls": ["/*", "/a/*"], "roles": ["admin"]}})
    assert allowed(acl, "bob", "GET", "x")
    assert allowed(acl, "ann", "PUT", "x")
    assert not allowed(acl, "bob", "PUT", "x")


def test_letters_differ_by_case_when_asked_to():
    acl = Acl(USERS, {"all": {"urls": ["/*"], "roles": ["reader"]}, "docs": {"urls": ["/Docs/*"], "roles": ["admin"]}})
    assert not allowed(acl, "bob", "GET", "dOCS/x")
    acl.is_case_sensitive = True
    assert allowed(acl, "bob", "GET", "dOCS/x")
    assert not allowed(acl, "bob", "GET", "Docs/x")


def test_roles_follow_the_users():
    users = UserTable({"ann": {"pwd": "x", "roles": ["admin"]}})
    acl = Acl(users, {"all": {"urls": ["/*"], "roles": ["admin"]}})
    assert allowed(acl, "ann", "GET", "x")
    users.set({"ann": {"pwd": "x"}})
    assert not allowed(acl, "ann", "GET", "x")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"a": 5}, "rule 'a': must be a table"),
        ({"a": {"roles": ["x"]}}, "rule 'a': 'urls' must be a list of patterns"),
        ({"a": {"urls": "/*"}}, "rule 'a': 'urls' must be a list of strings"),
        ({"a": {"urls": ["/*"], "roles": [5]}}, "rule 'a': 'roles' must be a list of strings"),
    ],
)
def test_a_wrong_rule_is_named_and_changes_nothing(rules: dict[str, Any], message: str):
    acl = Acl(USERS, {"all": {"urls": ["/*"], "roles": ["admin"]}})
    with pytest.raises(ArgumentError, match=message):
        acl.set(rules)
    assert allowed(acl, "ann", "GET", "x")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, "must be a table with a field 'pwd'"),
        ({}, "'pwd' must be a string"),
        ({"pwd": ["short"]}, "'pwd' must be a string, or a list with an HA1"),
        ({"pwd": "x", "roles": "admin"}, "'roles' must be a list of strings"),
        ({"pwd": "x", "maxusers": 0}, "'maxusers' must be a number of at least 1"),
        ({"pwd": "x", "inactive": "long"}, "'inactive' must be a number"),
    ],
)
def test_a_wrong_user_is_named_and_changes_nothing(entry: object, message: str):
    users = UserTable({"bob": "x"})
    with pytest.raises(ArgumentError, match=f"user 'ann': {message}"):
        users.set({"ann": entry})
    assert users.names() == ["bob"]


@pytest.mark.parametrize(
    ("kind", "realm", "message"),
    [
        ("oauth", "here", "unknown type of authenticator 'oauth'; use one of auth, digest"),
        ("form", 'a "b"', "realm: must not contain"),
        ("form", "a\\b", "realm: must not contain"),
        ("form", "a\r\nX: y", "realm: must not contain"),
    ],
)
def test_a_wrong_authenticator_is_named(kind: str, realm: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Authenticator({"ann": "secret"}, kind, realm=realm)


def test_the_login_page_escapes_what_it_shows() -> None:
    info = AuthInfo("form", "<b>&", username='"ann"', reason="maxusers", maxusers=2, seed="1", seedkey="k")
    page = login_page(info, hashes=True).decode()
    assert "<b>" not in page
    assert 'value="&lt;b&gt;&amp;"' in page
    assert "&quot;ann&quot; has 2 sessions already" in page
    assert 'name="ba_seed" value="1"' in page
    assert "ba_seed" not in login_page(info, hashes=False).decode()


def test_the_login_page_says_why_a_login_failed() -> None:
    assert b"is wrong" not in login_page(AuthInfo("form", "r"), hashes=False)
    assert b"is wrong" in login_page(AuthInfo("form", "r", username=""), hashes=False)
    assert b"Too many attempts" in login_page(AuthInfo("form", "r", username="ann", denied=True), hashes=False)


def basic(name: str, password: str) -> str:
    return "Authorization: Basic " + b64encode(f"{name}:{password}".encode()).decode() + "\r\n"


def test_too_many_guesses_are_429_without_a_lookup(bench: Bench) -> None:
    """A client that is logged in still gets in: guesses of others cannot lock it out."""
    looked_up: list[str] = []

    def find(name: str, password: str | None, request: Request) -> str:
        looked_up.append(name)
        return "secret"

    directory = bench.handle(lambda request, relpath: False)
    inner = Directory(None)
    inner.func = lambda request, relpath: request.response.write(b"in")
    directory.insert(inner)
    directory.setauth(Authenticator(find, "basic", tracker=True))
    inside = bench.connect().ask("/", headers=basic("ann", "secret"))
    assert inside.body == b"in", inside
    cookie = f"Cookie: {inside.fields['set-cookie'].partition(';')[0]}\r\n"
    assert [bench.connect().ask("/", headers=basic("ann", "wrong")).status for _ in range(4)] == [401] * 4
    looked_up.clear()
    denied = bench.connect().ask("/", headers=basic("ann", "secret"))
    assert (denied.status, looked_up) == (429, [])
    assert 0 < int(denied.fields["retry-after"]) <= 600
    assert bench.connect().ask("/", headers=cookie + basic("ann", "secret")).body == b"in"


def test_basic_is_offered_over_tls_only(bench: Bench) -> None:
    secure = False
    offered: list[str] = []

    def behind_a_proxy(request: Request, relpath: str) -> object:
        request.secure = secure
        authenticator.authenticate(request, "x")
        offered.append(" ".join(v.split()[0] for n, v in request.response.headers if n == "WWW-Authenticate"))

    authenticator = Authenticator({"ann": "secret"}, "dav")
    bench.handle(behind_a_proxy)
    bench.connect().ask("/")
    secure = True
    bench.connect().ask("/")
    assert offered == ["Digest Digest", "Digest Digest Basic"]


def test_a_guard_decides_about_other_paths_as_well(bench: Bench) -> None:
    """A page behind a login by a cookie is private; one that sends its password each time need not be."""
    seen: list[bool] = []
    users = UserTable({"ann": {"pwd": "secret", "roles": ["admin"]}})
    acl = Acl(users, {"one": {"urls": ["/open"], "roles": ["admin"]}})
    directory = bench.handle(lambda request, relpath: False, name="dir")
    guard = LoginGuard(Authenticator(users, "basic"), acl, directory)

    def check(request: Request, relpath: str) -> None:
        if not guard.stops(request, relpath):
            seen.append("cache-control" in request.response.headers)
            seen.extend(guard.allows_also(request, "PUT", path) for path in ("/dir/open", "/dir/closed"))
            request.response.write(b"in")

    directory.func = check
    assert bench.connect().ask("/dir/open").status == 401
    assert bench.connect().ask("/dir/closed", headers=basic("ann", "secret")).status == 403
    assert bench.connect().ask("/dir/open", headers=basic("ann", "secret")).body == b"in"
    assert seen == [False, True, False]
