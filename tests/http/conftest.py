"""Fixtures: a real HTTP server in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.http.http_bench import Bench, Kept
from tests.support.factory import Factory


@pytest.fixture
def start() -> Iterator[Callable[..., Bench]]:
    """A factory of servers: `start(HttpLimits(...))`."""
    with Factory(Bench) as begin:
        yield begin


@pytest.fixture
def bench(start: Callable[..., Bench]) -> Bench:
    """A server with the usual limits."""
    return start()


@pytest.fixture
def kept(bench: Bench) -> Kept:
    kept = Kept()
    bench.handle(kept)
    return kept
