"""Fixtures around `tests.support.device`, for the conftest files that want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smqrt import hub
from tests.support.device import Authority, Site, bounded
from tests.support.factory import Factory

__all__ = ["authority", "make_site", "patience", "site"]


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """No test hangs."""
    with bounded():
        yield


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def make_site(authority: Authority) -> Iterator[Callable[..., Site]]:
    """A factory: `make_site(onpublish=f)` gives a broker with these options behind a server."""
    with Factory(lambda **options: Site(hub.create(**options), authority)) as make:
        yield make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    """A broker without hooks."""
    return make_site()
