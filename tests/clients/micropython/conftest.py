"""A broker in the process of the test; the client runs in MicroPython, which `scripts/test` installs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker
from tests.support.micropython import Device


@pytest.fixture
def start_broker() -> Iterator[Callable[..., LocalBroker]]:
    """A factory: `start_broker(port=0, authenticate=f, ...)`."""
    with Factory(LocalBroker) as start:
        yield start


@pytest.fixture
def run() -> Iterator[Callable[..., Device]]:
    """A factory: `run(program, heap=None)` starts a program in MicroPython."""
    with Factory(Device) as start:
        yield start
