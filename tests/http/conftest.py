"""Fixtures: a real HTTP server in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smqrt.http.limits import HttpLimits
from tests.http.http_bench import Bench


@pytest.fixture
def start() -> Iterator[Callable[..., Bench]]:
    """A factory of servers: `start(HttpLimits(...))`."""
    benches: list[Bench] = []

    def begin(limits: HttpLimits | None = None) -> Bench:
        benches.append(Bench(limits))
        return benches[-1]

    yield begin
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(start: Callable[..., Bench]) -> Bench:
    """A server with the usual limits."""
    return start()
