"""Messages, subscriptions and observations of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Self, TypeVar

from smqrt.clients.aio.inbox import Inbox, Receiver
from smqrt.smq.messages import Payload, ReceivedMessage

T = TypeVar("T")
Key = TypeVar("Key")

log = logging.getLogger("smqrt.client")


class Message(ReceivedMessage):
    """A received message. See `ReceivedMessage`."""

    __slots__ = ()

    async def reply(self, data: Payload) -> None:
        """Send `data` to the publisher, with the same sub-topic; this answers a `request`. Raises as `publish`."""
        sent = self._publish(data, self.etid, self.subtid)
        assert isinstance(sent, Awaitable)
        await sent


class Subscription(Receiver[Message]):
    """The messages of a topic: `async for message in subscription`.

    `await subscription` waits until the broker has accepted it, and returns it. `async with subscription` does the same
    and ends it after the block. A subscription also ends when the program has no reference to it any more.

    Args:
        inbox: the queue.
        stop: ends the subscription.
        wait: waits until the broker has accepted it.
    """

    def __init__(
        self,
        inbox: Inbox[Message],
        stop: Callable[[], None],
        wait: Callable[[], Awaitable[int]],
    ) -> None:
        super().__init__(inbox, stop)
        self._wait = wait

    async def _wait_accepted(self) -> Self:
        try:
            await self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_accepted().__await__()

    async def __aenter__(self) -> Self:
        return await self._wait_accepted()

    async def __aexit__(self, *_: object) -> None:
        self.stop()


class Observation(Receiver[int]):
    """The numbers of subscribers of a topic: `async for subscribers in observation`.

    For an ETID there is one item, 0, when its client disconnects. An observation also ends when the program has no
    reference to it any more.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()


def stop_unreferenced(receiver: Receiver[Any], stop: Callable[[], None]) -> None:
    """Call `stop` in the event loop when the program has no reference to `receiver` any more."""
    loop = asyncio.get_running_loop()

    def stop_later() -> None:  # the garbage collector may run in any thread
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(stop)

    weakref.finalize(receiver, stop_later).atexit = False


class Fanout(Generic[Key, T]):
    """The functions that receive the items of each key.

    The session of a client has one handler for each topic; several subscriptions of a program may have the same one.
    """

    def __init__(self) -> None:
        self._functions: dict[Key, list[Callable[[T], None]]] = {}

    def add(self, key: Key, function: Callable[[T], None]) -> Callable[[T], None]:
        """Add a function, and return the handler for all functions of `key`."""
        functions = self._functions.setdefault(key, [])
        functions.append(function)

        def handle(item: T) -> None:
            for one in tuple(functions):
                one(item)

        return handle

    def remove(self, key: Key, function: Callable[[T], None]) -> bool:
        """Remove a function; return whether it was the last one of `key`."""
        functions = self._functions.get(key, [])
        if function not in functions:
            return False
        functions.remove(function)
        if not functions:
            del self._functions[key]
        return not functions

    def drop(self, condition: Callable[[Key], bool]) -> None:
        """Remove all functions of the keys for which `condition` returns True."""
        for key in [one for one in self._functions if condition(one)]:
            del self._functions[key]
