"""Fixtures: a real HTTP server in this process, and the manual as a static site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt.manual import pages as manual
from smqrt.manual.render import write_site
from tests.http.http_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A server with an empty tree."""
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole manual as files, in a folder that no test changes."""
    folder: Path = tmp_path_factory.mktemp("site") / "a b"
    assert write_site(folder) == len(manual.pages())
    return folder
