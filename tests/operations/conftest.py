"""A hub in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smqrt import hub
from smqrt.smq.gevent_broker import GeventBroker
from tests.support.sites import authority, make_site

__all__ = ["authority", "make_site"]


@pytest.fixture
def smq() -> Iterator[Any]:
    with hub.create() as made:
        yield made


@pytest.fixture
def broker(smq: Any) -> GeventBroker:
    found: GeventBroker = smq.broker
    return found
