"""Fixtures: a real HTTP server in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.http_bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A server with an empty tree."""
    bench = Bench()
    yield bench
    bench.close()
