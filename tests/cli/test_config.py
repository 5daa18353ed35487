"""`smqrt config`: the settings in use, where they come from, and what is wrong with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from smqrt.settings.option_types import schema
from smqrt.settings.server_settings import Settings
from smqrt.settings.sources import FORMER_NAMES
from tests.cli.commands import Command


def config(
    *words: object, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smqrt", "config", *map(str, words)]
    env = {**os.environ, **(environment or {})}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=30)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smqrt.toml").write_text('host = "::"\n[pages]\nmanual = false\n')
    shown = config("show", "--origin", folder=tmp_path, environment={"SMQRT_PORT": "1", "SMQRT_PROT": "2"})
    lines = dict(re.split(r" +# ", line, maxsplit=1) for line in shown.stdout.splitlines() if not line.startswith("#"))
    assert lines['host = "::"'] == "smqrt.toml, line 1"
    assert (lines["port = 1"], lines["pages.manual = false"]) == ("SMQRT_PORT", "smqrt.toml, line 3")
    assert lines["drain_s = 2.0"] == "default"
    assert shown.stderr == "SMQRT_PROT is not a setting; did you mean SMQRT_PORT?\n"
    assert tomllib.loads(shown.stdout)["pages"] == {"manual": False, "applications": True}
    monkeypatch.chdir(tmp_path)
    run = Command("config")
    assert run.done("check") == "smqrt.toml: 2 settings, all checks passed\n"
    other = tmp_path / "other.toml"
    other.write_text('port = "x"\nprot = 1\n')
    checked = run("check", other)
    assert checked.exit_code == 1
    assert f"{other}, line 1: port must be" in checked.stderr
    assert f"{other}, line 2: prot is not a setting; did you mean port?" in checked.stderr


def test_the_command_prints_former_names_in_the_schema() -> None:
    found = json.loads(Command("config").done("schema"))
    assert found == json.loads(json.dumps(schema(Settings, FORMER_NAMES)))
    assert found["properties"]["drain"]["properties"]["most_s"]["deprecated"] is True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`smqrt config` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return Command("config")


def test_secrets_are_masked_wherever_they_come_from(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("smqrt.toml").write_text('[tls]\nkey_password = "hush"\n')
    monkeypatch.setenv("SMQRT_CLUSTER__PASSWORD", "hush")
    for words in ((), ("--json",), ("--origin", "--changed")):
        shown = run.done("show", *words)
        assert shown.count("********") == 2
        assert "hush" not in shown


def test_only_changed_settings_are_listed_when_asked(run: Command) -> None:
    Path("smqrt.toml").write_text("port = 1\ndrain_s = 2.0\n")
    assert run.done("show", "--changed") == "port = 1\ndrain_s = 2.0\n"
    rows = [json.loads(line) for line in run.done("show", "--changed", "--json").splitlines()]
    assert rows[0] == {"setting": "port", "value": 1, "origin": "smqrt.toml, line 1"}
    unset = [line for line in run.done("show").splitlines() if line.startswith("#")]
    assert unset
    assert all(line.endswith(" is not set") for line in unset)


def test_a_folder_without_a_file_is_right(run: Command) -> None:
    assert run.done("check") == "no file: 0 settings, all checks passed\n"
    Path("smqrt.toml").write_text("port = 1\n")
    assert run.done("check") == "smqrt.toml: 1 setting, all checks passed\n"
