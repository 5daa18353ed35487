"""Fixtures of the NATS tests: servers, and clients that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smqrt.cluster.nats import NatsClient, connect
from tests.cluster.nats.server import NatsServer, cluster
from tests.support.factory import Factory
from tests.support.pki import Authority


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A plain server for the whole run."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture
def start_nats(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """A factory of servers with settings of their own."""
    with Factory(partial(NatsServer, tmp_path), NatsServer.stop) as start:
        yield start


@pytest.fixture
def start_cluster(start_nats: object, tmp_path: Path) -> Iterator[Callable[..., list[NatsServer]]]:
    """A factory of clusters."""

    def stop(servers: list[NatsServer]) -> None:
        for server in servers:
            server.stop()

    with Factory(partial(cluster, tmp_path), stop) as start:
        yield start


@pytest.fixture
def certificates(tmp_path: Path) -> Authority:
    """A certificate authority."""
    return Authority(tmp_path)


@pytest.fixture
def client() -> Iterator[Callable[..., NatsClient]]:
    """A factory of clients; with `wait=False` they need not be connected when it returns."""
    made: list[NatsClient] = []

    def make(*arguments: Any, wait: bool = True, **options: Any) -> NatsClient:
        made.append(connect(*arguments, **options))
        if wait:
            assert made[-1].wait_connected(20), made[-1].reason
        return made[-1]

    yield make
    for one in made:
        one.close(1)
