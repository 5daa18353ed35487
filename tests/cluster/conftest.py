"""The engines, for the suites that run on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.lua.lua_hub import lua
from tests.cluster.engines import ENGINES, Engine, opened

__all__ = ["engine", "lua"]


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.servers if one == "nats" else ()) for one in ENGINES])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with opened(request.param, tmp_path) as found:
        yield found
