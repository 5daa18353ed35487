"""The access control list: which line decides, and what is wrong with a line."""

from __future__ import annotations

import pytest

from smqrt.auth.identity import SERVER, Acl, Action, Identity, name_fault, parse
from smqrt.errors import ArgumentError

ANN = Identity("ann", ("operators", "night"), client_id=b"panel-1")
BOB = Identity("bob", client_id=b"phone")
NOBODY = Identity("")


def says(text: str, identity: Identity, action: str, name: str) -> tuple[bool, int | None]:
    decision = parse(text, "acl.txt").decide(identity, Action(action), name.encode())
    return decision.allowed, decision.line.number if decision.line else None


EXAMPLE = """\
# who            what        where
deny  *          write       firmware/+/version
allow ann,bob    read,write  house/+/lamp

allow @operators *           #
allow *          read        public/#
allow *          *           users/%u/#
allow *          read        clients/%c
allow *          read        teams/%g/plan
allow *          onetoone    $server
allow anonymous  read        hall
deny  *          create      teams/#
"""


@pytest.mark.parametrize(
    ("identity", "action", "name", "allowed", "line"),
    [
        (ANN, "write", "firmware/3/version", False, 2),
        (ANN, "write", "firmware/3/version/x", True, 5),
        (BOB, "read", "house/kitchen/lamp", True, 3),
        (BOB, "read", "house/kitchen/old/lamp", False, None),
        (BOB, "observe", "house/kitchen/lamp", False, None),
        (BOB, "read", "public", True, 6),
        (BOB, "read", "public/a/b/c", True, 6),
        (BOB, "read", "publics", False, None),
        (BOB, "observe", "users/bob/x", True, 7),
        (BOB, "read", "users/ann/x", False, None),
        (BOB, "read", "clients/phone", True, 8),
        (BOB, "read", "clients/panel-1", False, None),
        (ANN, "read", "teams/night/plan", True, 5),
        (BOB, "read", "teams/night/plan", False, None),
        (Identity("eve", ("night",)), "read", "teams/night/plan", True, 9),
        (BOB, "onetoone", "$server", True, 10),
        (BOB, "onetoone", "ann", False, None),
        (ANN, "onetoone", "$server", True, 5),
        (NOBODY, "read", "hall", True, 11),
        (BOB, "read", "hall", False, None),
        (NOBODY, "read", "users//x", False, None),
        (ANN, "read", "$SYS/uptime", False, None),
        (BOB, "create", "public/new", True, None),
        (ANN, "create", "teams/new", False, 12),
    ],
)
def test_the_first_line_that_fits_decides(
    identity: Identity, action: str, name: str, allowed: bool, line: int | None
) -> None:
    assert says(EXAMPLE, identity, action, name) == (allowed, line)


def test_an_empty_list_denies_everything() -> None:
    """CVE-2018-12550: an empty file once meant that all may do all."""
    assert not Acl().decide(ANN, Action.READ, b"x").allowed
    assert says("# nothing\n\n", ANN, "write", "x") == (False, None)


@pytest.mark.parametrize("name", ["#", "+", "a/b", "+/x", "%u", "", "a b", "a:b", "anonymous", "*", "@ops", "x\n"])
def test_names_that_would_act_as_patterns_are_none(name: str) -> None:
    """CVE-2017-7650."""
    assert (name_fault(name) is None) == (name == "%u")


@pytest.mark.parametrize("client_id", [b"#", b"+", b"a/b", b""])
def test_what_a_client_calls_itself_is_no_pattern(client_id: bytes) -> None:
    acl = parse("allow * * devices/%c\nallow * * of/%u/%c", "acl.txt")
    client = Identity("%c", client_id=client_id)
    for name in (b"devices/x", b"devices/" + client_id, b"devices/#", b"of/" + client_id + b"/" + client_id):
        assert not acl.decide(client, Action.READ, name).allowed


def test_a_variable_is_not_put_in_twice() -> None:
    acl = parse("allow * read of-%u-%c/x", "acl.txt")
    client = Identity("%c", client_id=b"id")
    assert acl.decide(client, Action.READ, b"of-%c-id/x").allowed
    assert not acl.decide(client, Action.READ, b"of-id-id/x").allowed


@pytest.mark.parametrize(
    ("topic_filter", "allowed"),
    [("a/+", True), ("a/#", False), ("a/b", True), ("#", False), ("a/secret/#", False), ("+/b", False), ("p/#", True),
     ("p/+/x", True), ("$SYS/#", False), ("a/+/b", False)],
)  # fmt: skip
def test_a_filter_is_allowed_when_all_its_topics_are(topic_filter: str, allowed: bool) -> None:
    acl = parse("deny * read a/secret/#\nallow * read a/b\nallow bob read a/+\nallow * read p/#", "acl.txt")
    if topic_filter == "a/+":
        acl = parse("allow bob read a/+\ndeny * read a/secret/#", "acl.txt")
    assert acl.decide_filter(BOB, Action.READ, topic_filter.encode()).allowed == allowed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("permit * read x", "acl.txt:2: a line must begin with allow or deny, not 'permit'"),
        ("allow * raed x", "acl.txt:2: 'raed' is not an action. Did you mean read? Use "),
        ("allow * read", "acl.txt:2: a line is 'allow WHO ACTIONS PATTERN'"),
        ("allow * read a/#/b", "'a/#/b': # must be the whole last level"),
        ("allow * read a#", "'a#': # must be"),
        ("allow * read a/b+", "'a/b+': + must be a whole level"),
        ("allow * read a/%x", "% must be followed by u (user), c (client id), g (group), or % for itself"),
        ("allow * read a/%", "% must be followed by"),
        ("allow ann,, read x", "'ann,,' must be users, groups (@name), anonymous or *"),
    ],
)
def test_errors_name_the_line(line: str, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(f"allow * read fine\n{line}\n", "acl.txt")
    assert message in str(caught.value)


def test_topics_may_have_spaces_and_any_bytes() -> None:
    assert says("allow * read my lamp/ä/#", BOB, "read", "my lamp/ä/x") == (True, 1)
    assert not parse("allow * read x", "f").decide(BOB, Action.READ, b"\xff\0").allowed


def test_decisions_are_quick_in_long_lists() -> None:
    """A client that asks for much holds nobody: what is compared is what can fit, not the whole list."""
    lines = [f"allow user{i} read,write sites/{i}/+/#" for i in range(20_000)]
    acl = parse("\n".join(lines), "acl.txt")
    last = Identity("user19999", tuple(f"g{i}" for i in range(64)))
    looked = list(acl._matching(last, b"sites/19999/" + b"a/" * 500, True))
    assert acl.decide(last, Action.READ, b"sites/19999/x/y").line == acl.lines[-1]
    assert len(looked) < 10
    assert acl.decide(BOB, Action.ONETOONE, SERVER).allowed is False
