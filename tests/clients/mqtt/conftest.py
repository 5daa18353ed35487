"""Fixtures of the MQTT tests: brokers, and clients that end with the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import DeliveryError
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import ScriptedBroker
from tests.support.factory import Factory
from tests.support.pki import Authority


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """A plain broker for the whole run."""
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.stop()


@pytest.fixture
def start_mosquitto(tmp_path: Path) -> Iterator[Callable[..., Mosquitto]]:
    """A factory of brokers with settings of their own."""
    with Factory(partial(Mosquitto, tmp_path), Mosquitto.stop) as start:
        yield start


@pytest.fixture
def certificates(tmp_path: Path) -> Authority:
    """A certificate authority."""
    return Authority(tmp_path)


@pytest.fixture
def connect() -> Iterator[Callable[..., MqttClient]]:
    """A factory of clients; connected, or ended with a failure, when it returns."""
    clients: list[MqttClient] = []

    def make(*arguments: Any, wait: bool = True, **options: Any) -> MqttClient:
        clients.append(MqttClient(*arguments, **options))
        if wait:
            clients[-1].wait_connected(30)  # on a machine that has much else to do
        return clients[-1]

    yield make
    for client in clients:
        with contextlib.suppress(DeliveryError):  # what a test left undelivered
            client.close(0)
        assert client.closed


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedBroker]]:
    """A factory of scripted brokers."""
    with Factory(ScriptedBroker) as start:
        yield start
