"""Bounded queues of received messages, for `async for`, and the queue of callbacks."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from smqrt.errors import ArgumentError
from smqrt.printable import place_of

T = TypeVar("T")

MAX_MESSAGES = 1000
POLICIES = ("wait", "oldest", "newest")
"""What a full queue does: stop reading from the broker, drop its oldest item, or drop the new one."""
_OVERFULL = 10  # times the limit of a queue
ITEMS_PER_TURN = 64
"""Number of messages that are received or sent without a pause; then other tasks run."""

log = logging.getLogger("smqrt.client")


class Room:
    """The queues of a client that are full. The client does not read while there is one.

    Attributes:
        changed: set when a queue has room again; the reader clears it.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._full: set[Inbox[Any]] = set()

    def mark_full(self, inbox: Inbox[Any]) -> None:
        """Stop reading until `inbox` is half empty."""
        self._full.add(inbox)

    def mark_free(self, inbox: Inbox[Any]) -> None:
        """Continue reading, unless another queue is full. An inbox that was not full is ignored."""
        self._full.discard(inbox)
        self.changed.set()

    @property
    def is_full(self) -> bool:
        """Whether a queue is full."""
        return bool(self._full)

    @property
    def is_overfull(self) -> bool:
        """Whether a queue has reached the limit up to which the client reads while a call waits for the broker."""
        return any(inbox.waiting >= max(_OVERFULL * inbox.max_items, MAX_MESSAGES) for inbox in self._full)


class Inbox(Generic[T]):
    """A bounded queue.

    Args:
        name: for the log, such as "the subscription to 'say'".
        room: the full queues of the client.
        max_items: the limit.
        slow: one of `POLICIES`.

    Attributes:
        dropped: number of dropped items.
    """

    def __init__(self, name: str, room: Room, max_items: int = MAX_MESSAGES, slow: str = "wait") -> None:
        if slow not in POLICIES:
            raise ArgumentError(f"slow must be one of {', '.join(POLICIES)}, not {slow!r}")
        if isinstance(max_items, bool) or not isinstance(max_items, int) or max_items < 1:
            raise ArgumentError(f"max_messages must be a whole number from 1, not {max_items!r}")
        self.max_items, self.dropped = max_items, 0
        self._name, self._room, self._slow = name, room, slow
        self._items: deque[T] = deque()
        self._arrived = asyncio.Event()
        self._ended = self._is_reported = False
        self._error: Exception | None = None
        self._taken = 0

    @property
    def waiting(self) -> int:
        """The number of items in the queue."""
        return len(self._items)

    @property
    def ended(self) -> bool:
        """Whether no further items will be added."""
        return self._ended

    def put(self, item: T) -> None:
        """Add an item, by the policy of the queue. With "wait" the queue may exceed its limit."""
        if self._ended:
            return
        if len(self._items) >= self.max_items and self._slow != "wait":
            self.dropped += 1
            self._report(f"drops messages (slow={self._slow!r})")
            if self._slow == "newest":
                return
            self._items.popleft()
        self._items.append(item)
        if len(self._items) >= self.max_items and self._slow == "wait":
            self._report("stops the reading of this client until half of them are processed")
            self._room.mark_full(self)
        self._arrived.set()

    def _report(self, effect: str) -> None:
        if not self._is_reported:  # once, because a slow program may fill its queue again and again
            self._is_reported = True
            log.warning("limit reached: max_messages (%d) of %s, which %s", self.max_items, self._name, effect)

    async def get(self) -> T:
        """Wait for the next item. A cancelled wait takes none.

        Raises:
            StopAsyncIteration: the queue has ended.
            Exception: the reason why it has ended.
        """
        self._taken += 1
        if self._taken % ITEMS_PER_TURN == 0:
            await asyncio.sleep(0)
        while not self._items:
            if self._ended:
                raise self._error or StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if len(self._items) <= self.max_items // 2:
            self._room.mark_free(self)
        return item

    def end(self, error: Exception | None = None) -> None:
        """Add no further items; `get` returns the queued ones, then raises `error` or StopAsyncIteration."""
        if not self._ended:
            self._ended, self._error = True, error
            self._room.mark_free(self)
            self._arrived.set()

    def discard(self) -> None:
        """End, and drop the queued items."""
        self.end()
        self._items.clear()


class Receiver(Generic[T]):
    """Base class of subscriptions and observations: an asynchronous iterator.

    Args:
        inbox: the queue.
        stop: ends the subscription or observation at the broker.
    """

    def __init__(self, inbox: Inbox[T], stop: Callable[[], None]) -> None:
        self._inbox, self._stop = inbox, stop

    @property
    def dropped(self) -> int:
        """The number of messages that were dropped because the queue was full."""
        return self._inbox.dropped

    @property
    def waiting(self) -> int:
        """The number of messages in the queue."""
        return self._inbox.waiting

    def stop(self) -> None:
        """End it, and drop the messages in its queue; loops over it end. A second call does nothing."""
        if not self._inbox.ended:
            self._stop()
        self._inbox.discard()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return await self._inbox.get()


class Callbacks:
    """Runs callbacks one after the other in a task. A callback may be a coroutine function.

    Args:
        room: the full queues of the client.
    """

    def __init__(self, room: Room) -> None:
        self._jobs: Inbox[tuple[Callable[..., Any], tuple[Any, ...]]] = Inbox("the callbacks", room)
        self._task: asyncio.Task[None] | None = None

    def post(self, fn: Callable[..., object], *args: object) -> None:
        """Run `fn(*args)` after all callbacks that were posted before; an exception is logged."""
        self._jobs.put((fn, args))
        if self._task is None and not self._jobs.ended:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="smqrt callbacks")

    async def _run(self) -> None:
        async for fn, args in Receiver(self._jobs, lambda: None):
            try:
                result = fn(*args)
                if inspect.isawaitable(result):
                    await result
            except Exception:
                log.exception("a callback failed: %s", place_of(fn))

    @property
    def is_current(self) -> bool:
        """Whether the caller is a callback."""
        return self._task is not None and asyncio.current_task() is self._task

    def finish(self) -> None:
        """End after the callbacks that are posted already."""
        self._jobs.end()

    async def wait_finished(self) -> None:
        """Wait until the last callback has returned, after `finish`."""
        if self._task is not None and not self.is_current:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Cancel the callback that runs, and drop the others."""
        self._jobs.discard()
        if self._task is not None:
            self._task.cancel()
