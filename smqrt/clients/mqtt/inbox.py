"""Callbacks of a client that its application runs: they wait until `run` takes them (spec: smq §9)."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from smqrt.loop.callback_queue import ROOM_JOBS, Callbacks
from smqrt.loop.scheduling import Turn

log = logging.getLogger("smqrt.mqtt")

_MAX_BYTES = 4 << 20  # of messages that wait; then the connection is not read


class InboxCall:
    """A callback of the application, which an `Inbox` keeps."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, *arguments: Any) -> object:
        """Call it."""

    @abstractmethod
    def size_bytes(self, arguments: tuple[Any, ...]) -> int:
        """Return the size of the message among the arguments."""


class Inbox(Callbacks):
    """Callbacks that wait until the application takes them. Anything that is no `InboxCall` runs at once.

    Attributes:
        word: how `run` ends, None before.
    """

    def __init__(self) -> None:
        super().__init__(log)
        self._calls: deque[tuple[InboxCall, tuple[Any, ...]]] = deque()
        self._bytes = 0
        self._is_discarding = False
        self.word: str | None = None

    def post(self, fn: Callable[..., object], *args: object) -> None:
        """See `Callbacks`."""
        if not isinstance(fn, InboxCall):
            fn(*args)
        elif not self._is_discarding:
            self._calls.append((fn, args))
            self._bytes += fn.size_bytes(args)
            if len(self._calls) == ROOM_JOBS or self._bytes > _MAX_BYTES:
                self._room.clear()
            self.arrived()

    def end(self, word: str) -> None:
        """Nothing more comes; `word` says why."""
        self.word = word
        self.arrived()

    def arrived(self) -> None:
        """A call has come, or the end."""

    @property
    def has_something(self) -> bool:
        """Whether a call waits, or the end is known."""
        return bool(self._calls) or self.word is not None

    def pop(self) -> tuple[InboxCall, tuple[Any, ...]] | None:
        """Take the next call with its arguments; None when there is none."""
        if not self._calls:
            return None
        call, arguments = self._calls.popleft()
        self._bytes -= call.size_bytes(arguments)
        if len(self._calls) < ROOM_JOBS // 2 and self._bytes <= _MAX_BYTES // 2:
            self._room.set()
        return call, arguments

    def discard(self) -> None:
        """Drop what waits and what still comes: nothing takes it, and the connection must not wait for room."""
        self._is_discarding = True
        self._calls.clear()
        self._bytes = 0
        self._room.set()


class PythonCall(InboxCall):
    """A Python function.

    Args:
        function: of the application.
        has_payload: whether its second argument is a payload.
    """

    __slots__ = ("_function", "_has_payload")

    def __init__(self, function: Callable[..., object], has_payload: bool) -> None:
        self._function, self._has_payload = function, has_payload

    def __call__(self, *arguments: Any) -> object:
        """Call it."""
        return self._function(*arguments)

    def size_bytes(self, arguments: tuple[Any, ...]) -> int:
        """See `InboxCall`."""
        return len(arguments[1]) if self._has_payload else 0


class PythonInbox(Inbox):
    """An inbox whose calls run in the greenlet that calls `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._arrival = Event()
        self._runner: object = None

    def arrived(self) -> None:
        """See `Inbox`."""
        self._arrival.set()

    @property
    def is_running(self) -> bool:
        """Whether a greenlet is in `run`."""
        return self._runner is not None

    @property
    def is_current(self) -> bool:
        """See `Callbacks`."""
        return self._runner is not None and self._runner is gevent.getcurrent()

    def run(self) -> str:
        """Run the calls until the end, whose word is returned. What a call raises is raised."""
        self._runner, turn = gevent.getcurrent(), Turn()
        try:
            while True:
                self._arrival.clear()
                while (waiting := self.pop()) is not None:
                    call, arguments = waiting
                    call(*arguments)
                    turn.breathe()
                if self.word is not None and not self._calls:
                    return self.word
                self._arrival.wait()
        finally:
            self._runner = None
