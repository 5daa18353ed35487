"""The wheel: it has every file of the package, and the demonstrations run from it in a clean environment."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

import smqrt
from tests.conftest import REPOSITORY, Served, install_wheel

INSTALL_S = 300
START_S = 60
REFERENCE = re.compile(r"""(?:src|href)=["']([^"'#?]+\.(?:js|css|html|lsp))["']""")


def files_of_the_package() -> set[str]:
    """Every file, as the wheel names it."""
    files = (path for path in (REPOSITORY / "smqrt").rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    own = {str(path.relative_to(REPOSITORY)).removeprefix("smqrt/pipeline/entry/") for path in files}
    demonstrations = subprocess.run(
        ["git", "ls-files", "."], cwd=REPOSITORY / "app_preload", capture_output=True, text=True, check=True
    ).stdout.split()
    return own | {f"smqrt/demonstrations/{name}" for name in demonstrations}


def test_a_wheel_has_every_file(wheel_path: Path) -> None:
    assert len(files_of_the_package()) > 300
    assert files_of_the_package() - set(zipfile.ZipFile(wheel_path).namelist()) == set(), "setup.cfg lists them"


def test_the_source_archive_has_what_the_top_level_has(tmp_path: Path) -> None:
    """Also the changelog, which is a link in the repository, as a file."""
    names = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md")
    for name in names:
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "CHANGELOG.md").symlink_to((REPOSITORY / "CHANGELOG.md").readlink())
    for folder in ("smqrt", "app_preload"):
        ignored = shutil.ignore_patterns("__pycache__", ".journal", ".pipelines")
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=ignored)
    build = "from setuptools.build_meta import build_sdist; print(build_sdist('.'))"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=INSTALL_S)
    with tarfile.open(next(tmp_path.glob("smqrt-*.tar.gz"))) as archive:
        found = {member.name.partition("/")[2]: member for member in archive}
        changes = archive.extractfile(found["CHANGELOG.md"])
        assert changes
        assert changes.read() == (REPOSITORY / "smqrt/help/changelog.md").read_bytes()
    assert found["CHANGELOG.md"].isfile()
    assert {*names, "app_preload/chat/.preload", "smqrt/apps/lua/lib/smq/hub.lua"} <= found.keys()


def test_the_changelog_has_this_version() -> None:
    heading = re.search(r"^## (\S+),", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heading
    assert heading[1] == smqrt.__version__


def test_what_a_wheel_says_about_itself(wheel_path: Path) -> None:
    with zipfile.ZipFile(wheel_path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(wheel.read(name).decode())
    classifiers = set(said.get_all("Classifier") or ())
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= classifiers
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= classifiers
    assert said["Requires-Python"] == ">=3.11"


def pythons() -> list[str]:
    """This Python, and 3.13 where the machine has one that runs."""
    found = [shutil.which("python3.13"), *map(str, Path.home().glob(".pyenv/versions/3.13*/bin/python3.13"))]
    usable = (path for path in found if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0)
    return list(dict.fromkeys([sys.executable, *list(usable)[:1]]))


class Installed(Served):
    """`smqrt demo` from the clean environment."""

    word = "demo"
    stop_s = 20.0

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.program = python, ("-I", "-m", "smqrt")
        super().__init__(cwd=folder, env={"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)})
        self.wait_for(r"^listening on http://.*:(\d+)$", START_S)


@pytest.fixture(scope="module", params=pythons(), ids=lambda path: Path(path).name)
def installed(request: pytest.FixtureRequest, wheel_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The demonstration applications, served by the wheel; nothing of this tree is on the path."""
    folder = tmp_path_factory.mktemp("demonstrations")
    own = request.param == sys.executable
    python = request.getfixturevalue("clean_python") if own else install_wheel(request.param, wheel_path, folder)
    served = Installed(python, folder)
    yield served
    assert served.stop() == 0
    assert not list(folder.glob("smqrt-demo-*")), "the copy of the demonstrations goes with the server"


def fetch(url: str) -> str:
    with urlopen(url, timeout=20) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


@pytest.mark.servers
@pytest.mark.timeout(2 * INSTALL_S)
def test_the_demonstrations_run_from_a_wheel(installed: Installed) -> None:
    """Every application is ok, every page loads, and so does each script, style and page that it names."""
    outcomes = dict(re.findall(r"^app (\S+) at \S+: (.*)$", installed.output, re.MULTILINE))
    assert outcomes == dict.fromkeys(sorted(outcomes), "ok"), installed.output
    assert len(outcomes) >= 7
    seen: set[str] = set()
    wanted = [f"{installed.url}/", *(f"{installed.url}/{name}/" for name in outcomes)]
    while wanted:
        if (url := wanted.pop()) not in seen and url.startswith(installed.url):
            seen.add(url)
            body = fetch(url)
            wanted += [urljoin(url, found) for found in REFERENCE.findall(body) if not url.endswith((".js", ".css"))]
    assert {f"{installed.url}/rtl/page.css", f"{installed.url}/rtl/smq.js"} <= seen
    assert "Traceback" not in installed.output


@pytest.mark.servers
@pytest.mark.timeout(2 * INSTALL_S)
def test_the_manual_is_in_the_wheel(installed: Installed) -> None:
    command = [installed.python, "-I", "-m", "smqrt", "help", "quick-start"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.startswith("# ")
