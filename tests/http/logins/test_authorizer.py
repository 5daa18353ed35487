"""Lists of patterns: the most specific one decides alone (spec: bas-api §5, §17 A5)."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.http.logins import Acl, Login, UserTable

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
        ({"a": {"urls": "/*"}}, "rule 'a': 'urls' must be a list of texts"),
        ({"a": {"urls": ["/*"], "roles": [5]}}, "rule 'a': 'roles' must be a list of texts"),
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
        ({}, "'pwd' must be a text"),
        ({"pwd": ["short"]}, "'pwd' must be a text, or a list with an HA1"),
        ({"pwd": "x", "roles": "admin"}, "'roles' must be a list of texts"),
        ({"pwd": "x", "maxusers": 0}, "'maxusers' must be a number of at least 1"),
        ({"pwd": "x", "inactive": "long"}, "'inactive' must be a number"),
    ],
)
def test_a_wrong_user_is_named_and_changes_nothing(entry: object, message: str):
    users = UserTable({"bob": "x"})
    with pytest.raises(ArgumentError, match=f"user 'ann': {message}"):
        users.set({"ann": entry})
    assert users.names() == ["bob"]
