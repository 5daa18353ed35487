"""Reconnecting clients: the common part of SMQ and MQTT clients.

One greenlet opens the connections of a client, one after the other:

    connect ──▶ run the connection ──▶ call onclose or onstatus ──▶ wait ──▶ connect again
                                                       └──▶ the client has ended

All public methods may be called from any greenlet. The callbacks of the application run in the greenlet of `Callbacks`.
A callback may therefore call the client, and may wait for it.
"""

from __future__ import annotations

import logging
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

_STOP_S = 2.0  # how long `close` waits for the end of a connection after `_stop`; a blocking callback may take longer


class ReconnectingClient(ABC, Generic[Reason]):
    """A client that connects in the background and reconnects after a lost connection.

    A subclass runs one connection, decides about the next one, and counts undelivered messages. It calls
    `super().__init__` last: the greenlet starts there.

    Args:
        callbacks: runs the callbacks of the application.
        log: receives the warnings.

    Attributes:
        end: the close reason of the last connection or failed attempt; None before the first one.
    """

    _items = ("message", "messages")  # singular and plural, for the text of `DeliveryError`

    def __init__(self, callbacks: Callbacks, log: logging.Logger) -> None:
        self.end: Reason | None = None
        self._callbacks, self._log = callbacks, log
        self._undelivered = 0
        self._on_end: Callable[[], object] | None = None
        self._settled = Event()  # connected, or ended permanently
        self._closing = Event()  # closed by the application, or ended; queued messages may still be sent
        self._stopping = Event()  # sending has stopped
        self._closed = Event()  # ended permanently
        self._deciding = Event()  # a callback that decides about the next connection is queued or running
        self._greenlet = gevent.Greenlet(self._run)
        # A link, not the last line of `_run`: a greenlet that is killed before it starts never runs.
        self._greenlet.rawlink(lambda _: self._finish())
        self._greenlet.start()

    # ---- state

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether the connection is open and accepted by the broker."""

    @property
    def closed(self) -> bool:
        """Whether the client has ended permanently."""
        return bool(self._closed.is_set())

    @property
    def closing(self) -> bool:
        """Whether the client was closed or has ended; it then rejects messages."""
        return bool(self._closing.is_set())

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until the client has ended permanently, at most `timeout` seconds; return whether it has."""
        return bool(self._closed.wait(timeout))

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the client is connected or has ended (see `end`), at most `timeout` seconds.

        In a callback, it does not wait for `onclose` or `onstatus`, which run after this callback.

        Returns:
            Whether the client is connected.
        """
        settled = [self._settled, self._deciding] if self._callbacks.is_current else [self._settled]
        gevent.wait(settled, timeout, count=1)
        return self.connected

    @property
    def _decision_waits_for_caller(self) -> bool:
        """Whether the caller is a callback, and `onclose` or `onstatus` can only run after it."""
        return self._deciding.is_set() and self._callbacks.is_current

    # ---- closing

    def close(self, timeout: float | None = 5.0) -> None:
        """Deliver the queued messages, send DISCONNECT, and wait until the connection has ended.

        Without a connection, the client connects to deliver the messages. A second call only waits. A call in a
        callback of this client does not wait, because the client ends after all callbacks.

        Args:
            timeout: seconds for the delivery, including connecting; None for no limit.

        Raises:
            DeliveryError: the client has ended, and the delivery of some messages failed or is uncertain. Only the
                first call raises it.
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
            if kind is None:  # an exception of the block takes precedence; the loss is in the log
                raise

    def on_end(self, fn: Callable[[], object]) -> None:
        """Call `fn()` when the client has ended permanently, after all other callbacks."""
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
                self._log.exception(
                    "a function of the application did not cancel its gevent.Timeout; use it in a with statement"
                )

    def _wait_before_retry(self, delay_s: float) -> None:
        # `close` ends the delay. A delay that begins later is not shortened: a failed broker needs time.
        (self._stopping if self._closing.is_set() else self._closing).wait(delay_s)

    def _decision(self, fn: Callable[..., Decision], *args: object, until: Event | None = None) -> Decision | None:
        """Queue a callback and return its result; None when it failed, or `until` was set first."""
        self._deciding.set()
        result = self._callbacks.ask_later(fn, *args)
        try:
            gevent.wait([result] if until is None else [result, until], count=1)
        finally:
            self._deciding.clear()
        return result.value

    def _finish(self) -> None:
        """End the client permanently. Runs once, in the event loop, however the greenlet ended."""
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

    # ---- implemented by each protocol

    @property
    @abstractmethod
    def _needs_connection(self) -> bool:
        """Whether to open another connection."""

    @abstractmethod
    def _run_connection(self) -> Reason | None:
        """Open a connection, run it until it ends, set `end` and return it; None to open no further connection."""

    @abstractmethod
    def _delay_after(self, reason: Reason) -> float | None:
        """Return the seconds until the next attempt, None for no further attempt."""

    @abstractmethod
    def _begin_close(self, timeout_s: float | None) -> None:
        """Reject further messages and start to send the queued ones; a second call does nothing."""

    @abstractmethod
    def _stop(self) -> None:
        """Close the connection now."""

    @abstractmethod
    def _abandon(self) -> int:
        """Fail the undelivered messages and return their number."""
