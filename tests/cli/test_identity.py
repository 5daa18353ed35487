"""`smqrt passwd` and `smqrt acl check`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smqrt.auth import users
from smqrt.cli import cli


def run(*words: str | Path, typed: str = "") -> Result:
    return CliRunner().invoke(cli, list(map(str, words)), input=typed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users.txt"


def passwd(file: Path, *words: str, typed: str = "") -> Result:
    return run("passwd", file, *words, "--memory-mib", "1", typed=typed)


def test_users_come_change_and_go(file: Path) -> None:
    assert (
        passwd(file, "ann", "--stdin", "--groups", "ops,night", typed="secret\nmore").output == f"{file}: ann added\n"
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("# people\n" + file.read_text())
    file.chmod(0o644)
    assert passwd(file, "bob", "--stdin", typed="hunter2\r\n").exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "others can't read it any more"
    found = users.load(file)
    assert (found["ann"].groups, found["bob"].groups) == (("ops", "night"), ())
    assert "secret" not in file.read_text()

    assert passwd(file, "ann", "--stdin", typed="another\n").output == f"{file}: ann changed\n"
    changed = users.load(file)
    assert changed["ann"].groups == ("ops", "night"), "a new password keeps the groups"
    assert changed["ann"].password_hash != found["ann"].password_hash
    passwd(file, "bob", "--groups", "night")
    again = users.load(file)
    assert (again["bob"].groups, again["bob"].password_hash) == (("night",), found["bob"].password_hash)
    assert file.read_text().startswith("# people\nann:")

    assert passwd(file, "bob", "--verify", "--stdin", typed="hunter2\n").exit_code == 0
    wrong = passwd(file, "bob", "--verify", "--stdin", typed="hunter3\n")
    assert (wrong.exit_code, wrong.output) == (1, "wrong user name or password\n")
    assert passwd(file, "bob", "--delete").output == f"{file}: bob removed\n"
    assert list(users.load(file)) == ["ann"]
    assert list(file.parent.iterdir()) == [file], "nothing is left of what was written"


@pytest.mark.parametrize(
    ("words", "typed", "sentence"),
    [
        (["a+b", "--stdin"], "x\n", "the user name must not have + # or /"),
        (["ann", "--stdin"], "\n", "a password must have 1 to 4096 bytes"),
        (["ann"], "", "no terminal to prompt for the password; pass --stdin"),
        (["ann", "--delete"], "", "has no user ann"),
        (["ann", "--stdin", "--groups", "a b"], "x\n", "the group name 'a b' must not have a space"),
    ],
)
def test_faults_are_reported(file: Path, words: list[str], typed: str, sentence: str) -> None:
    outcome = passwd(file, *words, typed=typed)
    assert outcome.exit_code != 0
    assert sentence in outcome.output
    assert not file.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    outcome = passwd(tmp_path / "gone" / "users.txt", "ann", "--stdin", typed="x\n")
    assert "users.txt: No such file or directory" in outcome.output


def test_a_broken_file_is_left_alone(file: Path) -> None:
    file.write_text("ann\n")
    outcome = passwd(file, "bob", "--stdin", typed="x\n")
    assert f"{file}:1: a line is 'name:hash'" in outcome.output
    assert file.read_text() == "ann\n"


def test_acl_check_says_which_line_decides(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passwd(file, "ann", "--stdin", "--groups", "ops", typed="x\n")
    (tmp_path / "acl.txt").write_text(
        "deny * write a/secret\nallow @ops * a/#\nallow * read c/%c\nallow * onetoone $server\n"
    )
    (tmp_path / "smqrt.toml").write_text('[auth]\nusers = "users.txt"\nacl = "acl.txt"\n')
    monkeypatch.chdir(tmp_path)
    lines = run("acl", "check", "ann", "a/secret").output.splitlines()
    assert lines[0] == "allowed read     acl.txt:2 allows it: allow @ops read,write,observe,onetoone a/#"
    assert lines[1] == "denied  write    acl.txt:1 denies it: deny * write a/secret"
    denied = run("acl", "check", "bob", "a/x", "--action", "read")
    assert (denied.exit_code, denied.stdout) == (3, "denied  read     no line of acl.txt allows it\n")
    assert "users.txt has no user bob" in denied.output
    for words in (
        ["ann", "c/lamp", "--client-id", "lamp"],
        ["eve", "a/b", "--group", "ops"],
        ["anonymous", "c/1", "--client-id", "1"],
    ):
        assert run("acl", "check", *words, "--action", "read").exit_code == 0
    assert run("acl", "check", "ann", "$server", "--action", "onetoone").exit_code == 0
