"""Type checkers find smqrt after an editable install, and accept the examples of the manual."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smqrt.clients.smq.keywords import SmqClientKeywords, SubscriptionKeywords
from smqrt.clients.smq.options import SmqClientOptions, SubscriptionOptions
from smqrt.settings.option_types import options_of
from tests.conftest import REPOSITORY
from tests.support.type_checker import check
from tests.support.typed_examples import EXCLUDED, HELP, PARAMETERS, examples

PYRIGHT = REPOSITORY / ".venv/npm/node_modules/pyright/index.js"


def mypy(folder: Path, python: str) -> str:
    """Return what `mypy --strict` prints about the files in a folder, with the packages of another Python."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--python-executable={python}"]
    done = subprocess.run([*command, "--cache-dir=/dev/null", "."], cwd=folder, capture_output=True, text=True, env={})
    assert not done.stderr, done.stderr
    return done.stdout


def pyright(folder: Path, python: str = sys.executable, **options: object) -> str:
    """Return what pyright prints about the files in a folder."""
    assert PYRIGHT.exists(), "pyright is missing: run scripts/test once, which installs it"
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    command = ["node", str(PYRIGHT), "--project", str(folder), "--pythonpath", python]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would come first
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.stderr, done.stderr
    return done.stdout.replace(f"{folder}/", "")


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """A folder with all examples that are not excluded."""
    for example in examples():
        assert not (tmp_path / example.module).exists(), f"two modules are named {example.module}"
        (tmp_path / example.module).write_text(f"# {example.name}\n{example.source}")
    return tmp_path


@pytest.mark.timeout(400)
def test_mypy_accepts_the_examples(checked: Path) -> None:
    output = check(checked)
    count = len(list(checked.glob("*.py")))
    assert output == f"Success: no issues found in {count} source files\n", output
    assert count > 60


@pytest.mark.servers
@pytest.mark.timeout(400)
def test_pyright_accepts_the_examples(checked: Path) -> None:
    output = pyright(checked, extraPaths=[str(REPOSITORY)])
    assert output == "0 errors, 0 warnings, 0 informations\n", output


def test_excluded_examples_exist() -> None:
    text = "".join(page.read_text("utf-8") for page in HELP.rglob("*.md"))
    pieces = [name for name in EXCLUDED if name.endswith("/pieces")]
    assert all("```python\n" in (HELP / f"{name.partition(chr(47))[0]}.md").read_text("utf-8") for name in pieces)
    assert [name for name in EXCLUDED if name not in pieces and f"# {name.partition('/')[2]}\n" not in text] == []


def test_the_manual_has_the_types_of_parameters() -> None:
    page = (HELP / "python-api.md").read_text("utf-8").partition("## Type checkers")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page.replace("\\|", "|"), re.MULTILINE))
    expected = {name: re.sub(r"\b_\w+\.", "", kind) for name, kind in PARAMETERS.items()}
    assert {name: rows.get(name) for name in expected} == expected


WRONG = {
    'SmqClient("http://localhost/", cafil="ca.pem")': "cafil",
    'SmqClient("http://localhost/").subscribe("t", onmsg=lambda text: None)': "onmsg",
    'hub.create().subscribe("t", onmesg=print)': "onmesg",
}
"""Mistakes that a type checker finds, with the name in its line."""


@pytest.mark.timeout(400)
def test_mypy_finds_mistakes_of_users(tmp_path: Path) -> None:
    imports = "from smqrt import hub\nfrom smqrt.client import SmqClient\n"
    (tmp_path / "wrong.py").write_text(imports + "\n".join(WRONG))
    lines = check(tmp_path)
    for number, name in enumerate(WRONG.values(), 3):
        assert re.search(rf'^wrong.py:{number}: error: .*"{name}"|^wrong.py:{number}: error: .*lambda', lines, re.M), (
            lines
        )


@pytest.mark.parametrize(
    ("keywords", "options"), [(SmqClientKeywords, SmqClientOptions), (SubscriptionKeywords, SubscriptionOptions)]
)
def test_keywords_of_clients_are_their_options(keywords: type, options: type) -> None:
    assert list(keywords.__annotations__) == list(options_of(options))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A small checkout with an environment that `python_env` of scripts/setup.sh has made, without what pip does."""
    for file in ("scripts/setup.sh", "setup.cfg", "pyproject.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / file, tmp_path / file)
    (tmp_path / "smqrt").mkdir()
    (tmp_path / "smqrt/py.typed").touch()
    (tmp_path / "smqrt/__init__.py").write_text("answer: int = 42\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    pip = next(tmp_path.glob(".venv/lib/python3*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__main__.py").touch()
    command = ["bash", "-ec", ". scripts/setup.sh; python_env"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "user").mkdir()
    (tmp_path / "user/program.py").write_text("import smqrt\n\ntext: str = smqrt.answer\n")
    return tmp_path


def test_mypy_follows_an_editable_install(installed: Path) -> None:
    output = mypy(installed / "user", str(installed / ".venv/bin/python"))
    assert 'expression has type "int", variable has type "str"' in output


@pytest.mark.servers
def test_pyright_follows_an_editable_install(installed: Path) -> None:
    output = pyright(installed / "user", str(installed / ".venv/bin/python"))
    assert 'Type "int" is not assignable to declared type "str"' in output
    assert "1 error" in output
