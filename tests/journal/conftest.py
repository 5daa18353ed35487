"""Fixtures of the journal tests: brokers, a served journal, a segment to damage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journal import written
from tests.journal.shelf import shelf
from tests.support.sites import authority, make_site, patience, site

__all__ = ["authority", "make_site", "patience", "shelf", "site"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A segment and its index."""
    journal = tmp_path_factory.mktemp("whole")
    written.write(journal, [written.BATCHES])
    path = journal / "wal/n1" / f"{0:020d}.arrows"
    return path.read_bytes(), path.with_suffix(".idx").read_bytes()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where syncing takes no time."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)
