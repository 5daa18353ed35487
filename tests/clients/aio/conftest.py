"""A broker in the gevent loop of the test; the programs with asyncio run in a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import gevent
import pytest

from smqrt.aio import SmqClient
from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker
from tests.support.waiting import PATIENCE_S

T = TypeVar("T")
Run = Callable[[Callable[[], Coroutine[Any, Any, T]]], T]
InBroker = Callable[..., Awaitable[Any]]


@pytest.fixture
def start_broker() -> Iterator[Callable[..., LocalBroker]]:
    """A factory: `start_broker(port=0, authenticate=f, ...)`."""
    with Factory(LocalBroker) as start:
        yield start


@pytest.fixture
def broker(start_broker: Callable[..., LocalBroker]) -> LocalBroker:
    """A broker without options."""
    return start_broker()


@pytest.fixture(params=["raw", "websocket"])
def url(request: pytest.FixtureRequest, broker: LocalBroker) -> str:
    """The broker's address for each transport."""
    return broker.url if request.param == "raw" else broker.ws_url


@pytest.fixture
def run() -> Run[Any]:
    """Runs a coroutine function in a new event loop, in a thread, while the broker runs here.

    At its end no task is left.
    """

    async def limited(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            result = await program()
        await asyncio.sleep(0)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []
        return result

    return lambda program: gevent.get_hub().threadpool.apply(lambda: asyncio.run(limited(program)))


@pytest.fixture
def in_broker() -> InBroker:
    """Runs a function in the thread of the broker and returns its result: `await in_broker(f, argument)`."""
    loop_of_broker = gevent.get_hub().loop

    async def call(function: Callable[..., Any], *arguments: Any) -> Any:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def here() -> None:
            try:
                loop.call_soon_threadsafe(future.set_result, function(*arguments))
            except Exception as error:
                loop.call_soon_threadsafe(future.set_exception, error)

        loop_of_broker.run_callback_threadsafe(gevent.spawn, here)
        return await future

    return call


def client(url: str, **options: Any) -> SmqClient:
    """A client that reconnects quickly."""
    return SmqClient(url, {"reconnect_delay": 0.05, **options})
