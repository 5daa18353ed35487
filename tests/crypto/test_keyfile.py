"""The key file: secrets that stay the same, private keys by name, and who may read it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from smqrt.crypto import keyfile as module
from smqrt.crypto.keyfile import MAX_DERIVED_BYTES, KeyFile, default_path
from smqrt.errors import ArgumentError, CryptoError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "tpm.key"


def test_the_file_is_made_for_its_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        KeyFile(path).load()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.with_name(".tpm.key.new").exists()


def test_derived_keys_depend_on_name_length_and_secret(path: Path) -> None:
    file = KeyFile(path)
    keys = [file.derive(b"a", 32), file.derive(b"b", 32), file.derive(b"a", 32, unique=False), file.derive(b"", 32)]
    assert len(set(keys)) == 4
    assert KeyFile(path).derive(b"a", 32) == keys[0], "after a restart, too"
    assert len(file.derive(b"a", MAX_DERIVED_BYTES)) == MAX_DERIVED_BYTES
    for size in (0, MAX_DERIVED_BYTES + 1):
        with pytest.raises(ArgumentError, match=f"a derived key must have 1 to 8160 bytes, not {size}"):
            file.derive(b"a", size)


def test_two_machines_may_share_one_secret(path: Path, tmp_path: Path) -> None:
    one, other = KeyFile(path), KeyFile(tmp_path / "other.key")
    one.load()
    other.load()
    found = json.loads(other.path.read_text())
    found["global"] = json.loads(path.read_text())["global"]
    other.path.write_text(json.dumps(found))
    other.load()
    assert one.derive(b"a", 16, unique=False) == other.derive(b"a", 16, unique=False)
    assert one.derive(b"a", 16) != other.derive(b"a", 16)


def test_private_keys_have_names_that_are_used_once(path: Path) -> None:
    file = KeyFile(path)
    assert not file.loaded
    with pytest.raises(CryptoError) as fault:
        file.pem("mine")
    assert fault.value.word == "notfound"
    assert file.loaded
    file.add("mine", b"PEM")
    assert file.has("mine")
    assert file.pem("mine") == KeyFile(path).pem("mine") == b"PEM"
    with pytest.raises(CryptoError) as fault:
        file.add("mine", b"another")
    assert fault.value.word == "exist"
    assert file.pem("mine") == b"PEM"


def test_another_process_may_have_added_a_key(path: Path) -> None:
    one, other = KeyFile(path), KeyFile(path)
    one.load()
    other.load()
    one.add("first", b"1")
    other.add("second", b"2")
    assert other.pem("first") == b"1"
    with pytest.raises(CryptoError):
        one.add("second", b"3")


@pytest.mark.parametrize("name", ["", "x" * 256, "ü" * 128])
def test_names_of_keys_have_a_size(path: Path, name: str) -> None:
    file = KeyFile(path)
    file.load()
    with pytest.raises(ArgumentError, match="the name of a key must have 1 to 255 bytes"):
        file.add(name, b"PEM")
    file.add("x" * 255, b"PEM")


def test_there_are_so_many_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 1)
    file = KeyFile(path)
    file.load()
    file.add("first", b"1")
    with pytest.raises(CryptoError) as fault:
        file.add("second", b"2")
    assert fault.value.word == "nospace"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    KeyFile(path).load()
    path.chmod(mode)
    with pytest.raises(CryptoError, match="run: chmod 600") as fault:
        KeyFile(path).load()
    assert fault.value.word == "noaccess"


GOOD = "A" * 43 + "="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        json.dumps({"unique": GOOD, "keys": {}}),
        json.dumps({"unique": GOOD, "global": "A?" * 22, "keys": {}}),
        json.dumps({"unique": GOOD, "global": GOOD, "keys": 7}),
        json.dumps({"unique": GOOD, "global": "A" * 40, "keys": {}}),
    ],
    ids=["empty", "list", "deep", "no secret", "no base64", "no keys", "short"],
)
def test_a_damaged_file_is_refused_and_kept(path: Path, text: str) -> None:
    KeyFile(path).load()
    path.write_text(text)
    for call in (KeyFile(path).load, lambda: KeyFile(path).add("mine", b"PEM")):
        with pytest.raises(CryptoError) as fault:
            call()
        assert fault.value.word == "ioerror"
    assert path.read_text() == text


def test_the_new_file_is_no_link_of_others(path: Path, tmp_path: Path) -> None:
    file = KeyFile(path)
    file.load()
    path.with_name(".tpm.key.new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CryptoError) as fault:
        file.add("mine", b"PEM")
    assert fault.value.word == "ioerror"
    assert not (tmp_path / "elsewhere").exists()


def test_the_default_is_in_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "smqrt" / "tpm.key"
    assert KeyFile().path == default_path()

    def no_home() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(module, "config_folder", no_home)
    with pytest.raises(CryptoError, match="this user has no home folder; set tpm_key_file"):
        default_path()
