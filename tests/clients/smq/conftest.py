"""Brokers and clients, ended after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from smqrt.client import SmqClient
from smqrt.errors import DeliveryError
from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker


@pytest.fixture
def start_broker() -> Iterator[Callable[..., LocalBroker]]:
    """A factory: `start_broker(port=0, authenticate=f, ...)`."""
    with Factory(LocalBroker) as start:
        yield start


@pytest.fixture
def broker(start_broker: Callable[..., LocalBroker]) -> LocalBroker:
    """A broker without options."""
    return start_broker()


@pytest.fixture
def make_client() -> Iterator[Callable[..., SmqClient]]:
    """A factory of clients that are closed after the test; reconnecting is quick."""
    clients: list[SmqClient] = []

    def make(url: str, **options: Any) -> SmqClient:
        clients.append(SmqClient(url, {"reconnect_delay": 0.05, **options}))
        return clients[-1]

    yield make
    for client in clients:
        with suppress(DeliveryError):
            client.close(1)
