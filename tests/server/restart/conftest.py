"""Fixtures of the tests of hot restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.restart.hot import HotServed
from tests.support.factory import Factory
from tests.support.sites import authority, make_site


@pytest.fixture
def serve_hot() -> Iterator[Callable[..., HotServed]]:
    """A factory: `serve_hot(APP)` starts a server that can be restarted; its last process is stopped after the test."""
    with Factory(HotServed, HotServed.end) as start:
        yield start


__all__ = ["authority", "make_site", "serve_hot"]
