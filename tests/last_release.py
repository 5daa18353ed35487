"""The last release, unpacked, so that a test can run it beside the tree.

Its source comes from the history of the repository. Where there is none, as in a clone of the newest commit only, a
copy of the tree stands for it that knows nothing of its abilities on links.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY, made_once

COMMIT = "24df59f1bf97ba9d1eddbd6233840d5f775ebf42"
"""Stands for the last release as long as no tag does: its links have no abilities, its last values no times, and in a
hot restart it passes nothing on to clients that stay.
"""
ABILITIES = "self.abilities: tuple[bytes, ...] = (PRESSURE, STAMPS, SIBLINGS)"
WITHOUT = "self.abilities: tuple[bytes, ...] = ()"


class Release(NamedTuple):
    """Another version.

    Attributes:
        folder: has the package.
        name: a tag, a commit, or what stands for it.
    """

    folder: Path
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """Of a process of this version; its working folder is `folder`."""
        return {"PYTHONPATH": str(self.folder), "PWD": str(self.folder)}


def last_tag() -> str:
    """The newest version that was released before this commit; empty when there is none."""
    command = ["git", "-c", "versionsort.suffix=rc", "tag", "--list", "v*", "--no-contains", "HEAD"]
    try:
        ran = subprocess.run(
            [*command, "--sort=-version:refname"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return ran.stdout.partition("\n")[0]


def archive(name: str) -> bytes:
    """A tar file with the package as it was then; empty when the repository does not have that."""
    try:
        ran = subprocess.run(["git", "archive", name, "smqrt"], cwd=REPOSITORY, capture_output=True, check=False)
    except OSError:
        return b""
    return b"" if ran.returncode else ran.stdout


def unpack(folder: Path, name: str) -> None:
    """Put the package of a version into a folder, and its name beside it."""
    if packed := archive(name):
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")
    else:
        ignored = shutil.ignore_patterns("__pycache__", ".journal", ".pipelines")
        shutil.copytree(REPOSITORY / "smqrt", folder / "smqrt", ignore=ignored)
        node = folder / "smqrt/cluster/node.py"
        text = node.read_text()
        assert ABILITIES in text, "smqrt/cluster/node.py says otherwise what a node can do; say so here, too"
        node.write_text(text.replace(ABILITIES, WITHOUT))
        name = "this tree without the abilities of its links"
    (folder / "name").write_text(name)


def found(folder: Path) -> Release:
    """What `unpack` has put there, once it is sure that Python takes it."""
    release = Release(folder, (folder / "name").read_text())
    if release.name.startswith("this tree"):
        warnings.warn(f"no history, so {release.name} stands for the last release", stacklevel=2)
    script = "import smqrt, smqrt.cluster; print(smqrt.__file__); print(smqrt.cluster.__file__)"
    environment = os.environ | release.environment
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert all(Path(line).is_relative_to(folder) for line in ran.stdout.splitlines()), ran.stdout
    return release


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The last release."""
    return found(made_once("release", lambda folder: unpack(folder, last_tag() or COMMIT), tmp_path_factory))
