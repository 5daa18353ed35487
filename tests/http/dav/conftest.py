"""A file server of a small folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.http.dav.directory import DavDirectory
from smqrt.http.disk import DiskIo
from tests.http.dav.dav_client import Client
from tests.http.http_bench import Bench


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "share"
    for name, text in {"a.txt": "alpha", "sub/b.txt": "beta", "sub/deep/c.txt": "gamma"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def dav(bench: Bench, folder: Path) -> Client:
    bench.root.insert(DavDirectory("fs", io=DiskIo(folder), lockdir=".LOCK"))
    return Client(bench, folder)
