"""Reconnecting clients, the part that SMQ and MQTT share.

One greenlet makes the connections of a client, one after the other:

    connect ──▶ run the connection ──▶ ask the application ──▶ wait ──▶ connect again
                                                  └──▶ the client has ended

Every other method may be called from any greenlet. The callbacks of the application run in the greenlet of `Callbacks`,
so a callback may call the client, and may even wait for it.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic
from typing import Generic, Self, TypeVar

import gevent
from gevent.event import Event

from smqrt.errors import DeliveryError
from smqrt.loop.greenlets import Callbacks

Reason = TypeVar("Reason")
Decision = TypeVar("Decision")

_STOP_S = 2.0
"""How long `close` waits for a connection to end after `_stop`. A callback that blocks may take longer."""


class Backoff:
    """Delays that double from `first_s` to `longest_s`, each shortened by up to a half at random.

    The jitter spreads the clients of a restarted broker over time.
    """

    __slots__ = ("_ceiling_s", "_first_s", "_longest_s", "_random")

    def __init__(self, first_s: float, longest_s: float, rnd: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._ceiling_s = first_s
        self._random = rnd

    def next_s(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        ceiling_s = self._ceiling_s
        self._ceiling_s = min(2 * ceiling_s, self._longest_s)
        return ceiling_s * (1 - 0.5 * self._random())

    def reset(self) -> None:
        """Start from the shortest delay again, after a successful attempt."""
        self._ceiling_s = self._first_s


class ReconnectingClient(ABC, Generic[Reason]):
    """A client that connects in the background, and again when the connection is lost.

    A subclass runs one connection, decides about the next one, and counts what is not delivered. It calls
    `super().__init__` last: the greenlet starts there.

    Args:
        callbacks: runs the callbacks of the application.
        log: receives the warnings.

    Attributes:
        end: the close reason of the last connection that ended or failed, None before.
    """

    _items = ("message", "messages")
    """One and several of what the client delivers, for `DeliveryError`."""

    def __init__(self, callbacks: Callbacks, log: logging.Logger) -> None:
        self.end: Reason | None = None
        self._callbacks, self._log = callbacks, log
        self._undelivered = 0
        self._on_end: Callable[[], object] | None = None
        self._settled = Event()  # connected, or ended for good
        self._closing = Event()  # closed by the application, or ended; what is queued may still be sent
        self._stopping = Event()  # nothing is sent any more
        self._closed = Event()
        self._deciding = Event()  # the application decides about the next connection, after the callbacks before it
        self._greenlet = gevent.Greenlet(self._run)
        # a link, not the end of `_run`: a greenlet that is killed before it starts never runs
        self._greenlet.rawlink(lambda _: self._finish())
        self._greenlet.start()

    # ---- state

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the broker has accepted the connection, and it is open."""

    @property
    def closed(self) -> bool:
        """Whether the client has ended for good."""
        return bool(self._closed.is_set())

    @property
    def closing(self) -> bool:
        """Whether the client was closed, or has ended: it takes no more messages."""
        return bool(self._closing.is_set())

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the client has ended for good. True when it has."""
        return bool(self._closed.wait(timeout))

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (see `end`). True when connected.

        Called from a callback, it does not wait for `onclose` or `onstatus`, which run after this callback.
        """
        settled = [self._settled, self._deciding] if self._callbacks.is_current else [self._settled]
        gevent.wait(settled, timeout, count=1)
        return self.connected

    @property
    def _decision_waits_for_caller(self) -> bool:
        """Whether this is a callback, and the decision about the next connection comes after it."""
        return self._deciding.is_set() and self._callbacks.is_current

    # ---- the end

    def close(self, timeout: float | None = 5.0) -> None:
        """Deliver what was handed in, send DISCONNECT, and wait until the connection has ended.

        Messages that wait for a connection are sent over one that is made for them. A second call only waits. Called
        from a callback of this client, it does not wait for the end, which comes after all callbacks.

        Args:
            timeout: seconds for the delivery, connecting included; None waits as long as it takes.

        Raises:
            DeliveryError: the client has ended, and something was not delivered, or may not have been. Only the first
                call raises it.
        """
        end_s = None if timeout is None else monotonic() + timeout
        self._begin_close(timeout)
        if self._callbacks.is_current:
            return
        if not self._closed.wait(None if end_s is None else max(end_s - monotonic(), 0.0)):
            self._stop()
            self._closed.wait(_STOP_S)
        count, self._undelivered = self._undelivered, 0
        if count:
            raise DeliveryError(self._undelivered_text(count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeliveryError:
            if kind is None:  # the exception of the block goes first; the loss is in the log
                raise

    def on_end(self, fn: Callable[[], object]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._on_end = fn

    def _undelivered_text(self, count: int) -> str:
        items = self._items[count > 1]
        return f"the broker did not confirm {count} {items}: {self.end or 'the time limit was reached'}"

    # ---- the greenlet

    def _run(self) -> None:
        while self._needs_connection:
            try:
                reason = self._run_connection()
                delay_s = None if reason is None else self._delay_after(reason)
                if delay_s is None:
                    return
                self._wait_before_retry(delay_s)
            except gevent.Timeout:
                self._log.exception("a function of the application left a gevent.Timeout running")

    def _wait_before_retry(self, delay_s: float) -> None:
        # `close` ends the delay; a client that is closing already keeps it, since a failed broker needs time
        (self._stopping if self._closing.is_set() else self._closing).wait(delay_s)

    def _ask(self, fn: Callable[..., Decision], *args: object, until: Event | None = None) -> Decision | None:
        """Return the answer of a callback, which runs in its turn; None when it failed, or `until` was set first."""
        self._deciding.set()
        answer = self._callbacks.ask_later(fn, *args)
        try:
            gevent.wait([answer] if until is None else [answer, until], count=1)
        finally:
            self._deciding.clear()
        return answer.value

    def _finish(self) -> None:
        """End for good. Runs once, in the event loop, however the greenlet ended."""
        self._stopping.set()
        self._undelivered += self._abandon()
        if self._undelivered:
            self._log.warning("%s", self._undelivered_text(self._undelivered))
        self._closing.set()
        self._closed.set()
        self._settled.set()
        if self._on_end is not None:
            self._callbacks.post(self._on_end)
        self._callbacks.finish()

    # ---- the protocol's part

    @property
    @abstractmethod
    def _needs_connection(self) -> bool:
        """Whether another connection is to be made."""

    @abstractmethod
    def _run_connection(self) -> Reason | None:
        """Make a connection, run it to its end, set `end` and return it; None when there is to be no other one."""

    @abstractmethod
    def _delay_after(self, reason: Reason) -> float | None:
        """Return the seconds until the next attempt, None for no further attempt."""

    @abstractmethod
    def _begin_close(self, timeout_s: float | None) -> None:
        """Take no more messages and begin to send what is queued; does nothing the second time."""

    @abstractmethod
    def _stop(self) -> None:
        """End the connection now."""

    @abstractmethod
    def _abandon(self) -> int:
        """Fail what was not delivered; return how much that is."""
