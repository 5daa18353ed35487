"""The file of users, and checks of passwords."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import argon2
import gevent
import pytest

from smqrt.auth import users as module
from smqrt.auth.identity import MAX_GROUPS
from smqrt.auth.users import (
    MAX_PASSWORD_BYTES,
    MAX_WAITING_OF_ADDRESS,
    BusyError,
    Passwords,
    User,
    check_hash,
    groups_of,
    load,
    parse,
    read_file,
    with_user,
    write,
)
from smqrt.errors import ArgumentError

HASH = argon2.PasswordHasher(1, 8, 1).hash(b"right", salt=b"the same each time")
"""So cheap that it costs nothing, and the same in each process: it is in names of tests."""


# ---- the file


def test_lines_are_users_and_the_rest_is_ignored() -> None:
    found = parse(f"# people\n\n  \nalice:{HASH}\nbob:{HASH}:a,b,a,\r\n", "users")
    assert found == {"alice": User("alice", HASH), "bob": User("bob", HASH, ("a", "b"))}
    assert [parse(user.line, "users")[name] for name, user in found.items()] == list(found.values())


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("alice", "a line is 'name:hash' or 'name:hash:group,group'"),
        (f":{HASH}", "users:2: "),
        ("alice:secret", "the hash of alice is not an argon2id hash"),
        ("alice:", "the hash of alice is not an argon2id hash"),
        (f"alice:{HASH.replace('argon2id', 'argon2i')}", "the hash of alice is not an argon2id hash"),
        (f"alice:{HASH.replace('m=8', 'm=1048577')}", "takes more than 1024 MiB, 64 rounds or 16 lanes"),
        (f"alice:{HASH.replace('t=1', 't=65')}", "takes more than 1024 MiB, 64 rounds or 16 lanes"),
        (f"alice:{HASH.replace('p=1', 'p=17')}", "takes more than 1024 MiB, 64 rounds or 16 lanes"),
        (f"first:{HASH}", "the user first occurs twice"),
    ],
)
def test_a_wrong_line_is_named_without_its_hash(line: str, fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault) as error:
        parse(f"first:{HASH}\n{line}\n", "users")
    assert str(error.value).startswith("users:2: ")
    assert "$" not in str(error.value)
    assert "secret" not in str(error.value)


def test_the_largest_parameters_are_accepted() -> None:
    largest = HASH.replace("m=8", "m=1048576").replace("t=1", "t=64").replace("p=1", "p=16")
    assert check_hash("alice", largest).time_cost == 64


def test_groups_are_few_and_have_names() -> None:
    assert groups_of(",a,,b,a") == ("a", "b")
    groups_of(",".join(map(str, range(MAX_GROUPS))))
    with pytest.raises(ArgumentError, match=f"at most {MAX_GROUPS} groups, not {MAX_GROUPS + 1}"):
        groups_of(",".join(map(str, range(MAX_GROUPS + 1))))
    with pytest.raises(ArgumentError, match="the group name 'a b' must not have a space"):
        groups_of("a b")
    with pytest.raises(ArgumentError) as error:
        groups_of(HASH.rpartition(",")[2] + " ")
    assert HASH.split("$")[-2] not in str(error.value), "a part of a hash is not shown"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "users"
    path.write_text(f"alice:{HASH}\n")
    path.chmod(0o640)
    assert list(load(path)) == ["alice"], "its group may read it"
    path.chmod(mode)
    with pytest.raises(ArgumentError, match="other users may read or change it; run: chmod 600"):
        load(path)


def test_files_that_are_no_text_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "users"
    with pytest.raises(ArgumentError, match="can't be read: No such file"):
        read_file(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(ArgumentError, match="is not UTF-8 at byte 2"):
        read_file(path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2)
    with pytest.raises(ArgumentError, match="has more than 0 MiB"):
        read_file(path)


def test_a_written_file_keeps_its_mode_and_link(tmp_path: Path) -> None:
    path, link = tmp_path / "users", tmp_path / "link"
    link.symlink_to(path)
    write(link, "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for before, after in ((0o640, 0o640), (0o666, 0o640), (0o600, 0o600)):
        path.chmod(before)
        write(link, "second")
        assert stat.S_IMODE(path.stat().st_mode) == after
    assert link.is_symlink()
    assert path.read_text() == "second"
    assert sorted(os.listdir(tmp_path)) == ["link", "users"]
    with pytest.raises(ArgumentError, match="can't be written: No such file"):
        write(tmp_path / "no" / "users", "")


def test_a_failed_write_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "users"
    path.write_text("before")
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(ArgumentError, match="can't be written: No space left"):
        write(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["users"]


@pytest.mark.parametrize(
    ("user", "after"),
    [
        (User("bob", "new"), "# bob:x\nbob:new\nbobby:1\n"),
        (User("carol", "new", ("a",)), "# bob:x\nbob:0\nbobby:1\nbob:2\ncarol:new:a\n"),
        (None, "# bob:x\nbobby:1\n"),
    ],
)
def test_one_user_changes_and_other_lines_stay(user: User | None, after: str) -> None:
    name = user.name if user else "bob"
    assert with_user("# bob:x\nbob:0\nbobby:1\nbob:2", user, name) == after


# ---- passwords


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The passwords for which a hash was computed."""
    found: list[bytes] = []
    verify = module.verify_now

    def verify_now(password_hash: str, password: bytes) -> bool:
        found.append(password)
        return verify(password_hash, password)

    monkeypatch.setattr(module, "verify_now", verify_now)
    monkeypatch.setattr(module, "new_hash", lambda password: HASH)
    return found


@pytest.fixture
def passwords(computed: list[bytes]) -> Iterator[Passwords]:
    made = Passwords(max_parallel=1, max_waiting=40)
    yield made
    made.close()


def test_only_correct_passwords_are_cached(passwords: Passwords, computed: list[bytes]) -> None:
    for _ in range(2):
        assert passwords.verify("alice", HASH, b"right")
        assert not passwords.verify("alice", HASH, b"wrong")
    assert computed == [b"right", b"wrong", b"wrong"]
    assert passwords.is_cached("alice", HASH, b"right")
    assert not passwords.is_cached("bob", HASH, b"right")
    other = argon2.PasswordHasher(1, 8, 1).hash(b"another")
    assert not passwords.verify("alice", other, b"right"), "the password was changed"


def test_an_unknown_user_is_computed_too(passwords: Passwords, computed: list[bytes]) -> None:
    assert not passwords.verify("nobody", None, b"right"), "even when it is that of the decoy"
    assert computed == [b"right"]


def test_the_least_used_password_leaves_the_cache(passwords: Passwords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for name in ("a", "b", "a", "c"):
        assert passwords.verify(name, HASH, b"right")
    assert [passwords.is_cached(name, HASH, b"right") for name in "abc"] == [True, False, True]


def test_too_long_passwords_are_wrong_at_once(passwords: Passwords, computed: list[bytes]) -> None:
    assert not passwords.verify("alice", HASH, b"x" * (MAX_PASSWORD_BYTES + 1))
    assert computed == []
    assert not passwords.verify("alice", HASH, b"x" * MAX_PASSWORD_BYTES)
    assert len(computed) == 1


def test_a_hash_that_cannot_be_computed_is_no_match(passwords: Passwords) -> None:
    assert not passwords.verify("alice", HASH.replace("m=8", "m=1"), b"right")


def test_one_check_serves_all_clients_of_a_password(passwords: Passwords, computed: list[bytes]) -> None:
    first = [gevent.spawn(passwords.verify, "alice", HASH, b"right") for _ in range(3)]
    gevent.sleep(0)
    assert passwords.waiting == 1
    assert passwords.is_pending("alice", HASH, b"right")
    assert [one.get(timeout=5) for one in first] == [True] * 3
    assert computed == [b"right"]
    assert passwords.waiting == 0


def test_waiting_checks_are_limited_for_each_address(passwords: Passwords, computed: list[bytes]) -> None:
    running = [
        gevent.spawn(passwords.verify, "alice", HASH, b"%d" % number, "192.0.2.1")
        for number in range(MAX_WAITING_OF_ADDRESS)
    ]
    gevent.sleep(0)
    with pytest.raises(BusyError):
        passwords.verify("alice", HASH, b"more", "192.0.2.1")
    others = [gevent.spawn(passwords.verify, "alice", HASH, b"%d" % number, "192.0.2.2") for number in range(50, 58)]
    gevent.sleep(0)
    with pytest.raises(BusyError):
        passwords.verify("alice", HASH, b"more", "192.0.2.3")
    gevent.joinall([*running, *others], timeout=10)
    assert not passwords.verify("alice", HASH, b"more", "192.0.2.1")
    assert b"more" in computed


def test_checks_of_clients_that_have_gone_are_skipped(passwords: Passwords, computed: list[bytes]) -> None:
    connected = {"gone": True, "stays": True}
    first = gevent.spawn(passwords.verify, "alice", HASH, b"first")
    gevent.sleep(0)
    waiting = {
        name: gevent.spawn(passwords.verify, name, HASH, b"right", "", lambda name=name: connected[name])
        for name in connected
    }
    gevent.sleep(0)
    connected["gone"] = False
    gevent.joinall([first, *waiting.values()], timeout=5)
    assert (waiting["gone"].value, waiting["stays"].value) == (False, True)
    assert computed == [b"first", b"right"]
    assert not passwords.is_cached("gone", HASH, b"right")


def test_unknown_users_take_the_parameters_of_others(passwords: Passwords, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(module, "verify_now", lambda password_hash, password: compared.append(password_hash))
    passwords.set_typical(HASH)
    passwords.verify("nobody", None, b"x")
    assert check_hash("nobody", compared[0]) == check_hash("alice", HASH)
