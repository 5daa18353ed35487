"""The last release, unpacked, so that a test can run it beside the tree.

Its source comes from the history of the repository. Where there is none, as in a clone of the newest commit only, a
copy of the tree stands for it without what the last release does not know on links.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY, made_once

COMMIT = "24df59f1bf97ba9d1eddbd6233840d5f775ebf42"
"""Stands for the last release as long as no tag does: its links have no abilities, its last values no times, and in a
hot restart it passes nothing on to clients that stay.
"""
LEFT_OUT = (
    (
        "cluster/node.py",
        "self.abilities: tuple[bytes, ...] = (PRESSURE, STAMPS, SIBLINGS, SUCCESSION)",
        "self.abilities = ()",
    ),
    ("wire/cluster_packets.py", "OLDEST_VERSION, VERSION = 1, 4", "OLDEST_VERSION, VERSION = 1, 1"),
    ("smq/persist_file.py", '(?, ?, ?, ?)", stamps)', '(?, ?, ?, ?)", [])'),
)
"""Of the tree where it stands for the last release: in which file what is replaced, and by what."""


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
    """A ZIP file with the package as it was then; empty when the repository does not have that."""
    try:
        ran = subprocess.run(
            ["git", "archive", "--format=zip", name, "smqrt"], cwd=REPOSITORY, capture_output=True, check=False
        )
    except OSError:
        return b""
    return b"" if ran.returncode else ran.stdout


def unpack(folder: Path, name: str) -> None:
    """Put the package of a version into a folder, and its name beside it."""
    if packed := archive(name):
        with zipfile.ZipFile(io.BytesIO(packed)) as zipped:
            zipped.extractall(folder)
    else:
        ignored = shutil.ignore_patterns("__pycache__", ".journal", ".pipelines")
        shutil.copytree(REPOSITORY / "smqrt", folder / "smqrt", ignore=ignored)
        for file, text, without in LEFT_OUT:
            path = folder / "smqrt" / file
            assert text in path.read_text(), f"smqrt/{file} says it otherwise now; say so here, too"
            path.write_text(path.read_text().replace(text, without))
        name = "this tree without what is new on links"
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
