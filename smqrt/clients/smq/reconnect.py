"""The greenlet that keeps a client's connection: it connects, hands on what the broker sends, comes back when the
connection is lost, and ends (spec: smq §7). What `onauth` and `onclose` answer is checked here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import gevent
from gevent.event import AsyncResult
from gevent.event import Event as Signal

from smqrt.clients.smq.connection import Backoff, ClientConnection
from smqrt.clients.smq.options import Callback, SmqClientOptions, to_bytes
from smqrt.clients.smq.protocol import Accepted, Ack, Change, ConnectionEnd, Event, Init, Pong, Published
from smqrt.clients.smq.session import ClientSession, Handler
from smqrt.errors import ClosedError, DeliveryError
from smqrt.loop.callback_queue import ROOM_JOBS, Callbacks
from smqrt.smq.messages import Requests
from smqrt.transport.stream import Stream
from smqrt.wire.url import Url

log = logging.getLogger("smqrt.client")

MAX_CREDENTIALS_BYTES = 255
_MAX_JOBS, _MAX_READS = 10 * ROOM_JOBS, 1000
"""So far the broker is read on, 16 KiB a time, while a callback itself waits for it, or while the client ends."""


class ReconnectingConnection:
    """The greenlet that makes the connections of one client, makes them again, and ends them.

    Args:
        url: the broker; None when `connect` gives a connection over which it speaks SMQ already.
        connect: makes the TCP (and TLS) connection; may raise StreamError.
        options: those of the client.

    Attributes:
        end: the `ConnectionEnd` of the last connection that ended or failed, None before.
    """

    def __init__(self, url: Url | None, connect: Callable[[], Stream], options: SmqClientOptions) -> None:
        self._url, self._connect, self._options = url, connect, options
        self.onauth, self.onconnect, self.onreconnect = options.onauth, options.onconnect, options.onreconnect
        self.onclose, self.onmsg = options.onclose, options.onmsg
        self.end: ConnectionEnd | None = None
        self._session = ClientSession(options.queue_bytes, options.cleanstart)
        self._callbacks = Callbacks(log)
        self._backoff = Backoff(options.reconnect_delay, options.reconnect_delay_max)
        self._connection: ClientConnection | None = None
        self._hello: tuple[int, str] = (0, "")
        self._connections = self._reads_ahead = 0
        self._flushes: set[AsyncResult[bool]] = set()
        self._answers = Requests()
        self._on_end: Callable[[], object] | None = None
        self._undelivered = 0
        self._disconnect_text = b""
        self._deadline: gevent.Greenlet[..., Any] | None = None
        self._closing, self._settled, self._closed = Signal(), Signal(), Signal()
        self._asks_onclose = Signal()  # onclose is asked: it comes after the callback that runs now
        self._reads_on = Signal()  # a callback waits for the broker, or the client ends: reading must go on
        self._greenlet = gevent.Greenlet(self._run)
        self._greenlet.rawlink(self._finish)  # not at the end of _run: who is killed early never runs
        self._greenlet.start()

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted and the connection stands."""
        return self._session.etid != 0

    @property
    def closed(self) -> bool:
        """Whether the client has ended for good."""
        return bool(self._closed.is_set())

    @property
    def closing(self) -> bool:
        """Whether it was closed, or has ended by itself: nothing can be sent any more."""
        return bool(self._closing.is_set())

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the client has ended for good. True when it has."""
        return bool(self._closed.wait(timeout))

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected.

        Called from a callback it does not wait for an `onclose` that is due: that comes after this callback.
        """
        settled = [self._settled, self._asks_onclose] if self._callbacks.is_current else [self._settled]
        gevent.wait(settled, timeout, count=1)
        return self.connected

    def disconnect(self, text: str | bytes = "") -> None:
        """End after what was published, and do not come back. Returns at once; `onclose` is not called.

        What waits is sent first, if need be over a connection that is made for it, within the option `timeout`. What
        the broker does not have by then is lost, and logged; `close` tells.

        Args:
            text: for the broker, why.
        """
        if self._closing.is_set():
            return
        self._disconnect_text = to_bytes(text)
        self._deadline = gevent.spawn_later(self._options.timeout, self._greenlet.kill, block=False)
        self._begin_close()

    def close(self, timeout: float | None = 5.0) -> None:
        """`disconnect`, and wait until the broker has everything and the connection has ended.

        Called from a callback of this client, which could not end meanwhile, it does not wait.

        Args:
            timeout: seconds for all of it, connecting included; None waits as long as it takes.

        Raises:
            DeliveryError: the client has ended, and messages did not reach the broker, or nobody knows whether they
                did. Only the first call tells.
        """
        self._begin_close()
        if self._callbacks.is_current:
            return
        if not self._closed.wait(timeout):
            self._greenlet.kill(block=False)
            self._closed.wait()
        count, self._undelivered = self._undelivered, 0
        if count:
            raise DeliveryError(self._undelivered_text(count))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeliveryError:
            if kind is None:  # otherwise what the block raised is the news; this is in the log
                raise

    def _begin_close(self) -> None:
        """Begin to end: with a connection after what waits, without one when there is nothing to send."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._reads_on.set()
        if self.connected:
            self._session.when_drained(self._send_disconnect)
        elif self._connection is not None and not self._session.has_held:
            self._greenlet.kill(block=False)

    def _send_disconnect(self) -> None:
        connection, session = self._connection, self._session
        assert connection is not None
        if session.confirmed < session.sent:
            self._confirm(lambda: connection.disconnect(self._disconnect_text))
        else:
            connection.disconnect(self._disconnect_text)

    def _undelivered_text(self, count: int) -> str:
        messages = "a message" if count == 1 else f"{count} messages"
        why = f": {self.end}" if self.end else ""
        return f"the client ended before the broker confirmed {messages}{why}"

    def on_end(self, fn: Callable[[], object]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._on_end = fn

    # ---- waiting

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the broker has handled everything sent so far.

        Args:
            timeout: seconds; None waits as long as the client lives.

        Returns:
            False when time ran out, the connection was lost meanwhile, or the client has ended.
        """
        if self.closed or self._delays_onclose:
            return False
        answer: AsyncResult[bool] = AsyncResult()

        def drained() -> None:
            self._confirm(lambda: answer.set(True))

        self._flushes.add(answer)
        with self._waiting_inside():
            self._session.when_drained(drained)
            answer.wait(timeout)
        self._flushes.discard(answer)
        self._session.forget_drained(drained)
        return bool(answer.value)

    def _confirm(self, then: Callable[[], object]) -> None:
        """Have `then()` called when the broker has handled what was sent so far: it answers in order."""
        session, sent = self._session, self._session.sent

        def confirmed() -> None:
            session.confirmed = sent
            then()

        if self._connection is not None:
            self._connection.protocol.ping(confirmed)

    def _fail_waiting(self, why: str) -> None:
        self._answers.give_up(why)
        while self._flushes:
            self._flushes.pop().set(False)

    @property
    def _delays_onclose(self) -> bool:
        """Whether onclose, which decides about the next connection, waits for the callback that asks."""
        return self._asks_onclose.is_set() and self._callbacks.is_current

    @contextmanager
    def _waiting_inside(self) -> Iterator[None]:
        """Around the waiting of a callback: reading goes on, though callbacks behind it pile up."""
        if not self._callbacks.is_current:
            yield
            return
        self._reads_on.set()
        try:
            yield
        finally:
            if not self._closing.is_set():
                self._reads_on.clear()

    def _check_alive(self) -> None:
        if self._closing.is_set():
            raise ClosedError(f"the client has ended{f': {self.end}' if self.end else ''}; make a new one")

    # ---- the greenlet

    def _run(self) -> None:
        while not self._closing.is_set() or self._session.has_held:
            try:
                delay_s = self._delay_after(self._run_connection())
                if delay_s is None:
                    return
                self._wait_before_the_next(delay_s)
            except gevent.Timeout:
                log.exception("a Timeout that a function of the application left behind")

    def _finish(self, _: object) -> None:
        """The greenlet is over, whatever ended it."""
        self._closing.set()
        self._session.abandon()
        self._settled.set()
        self._fail_waiting("the client has ended")
        self._undelivered = self._session.in_doubt
        if self._undelivered:
            log.warning("%s", self._undelivered_text(self._undelivered))
        if self._deadline is not None:
            self._deadline.kill(block=False)
        if self._on_end is not None:
            self._callbacks.post(self._on_end)
        self._callbacks.finish()
        self._closed.set()

    def _run_connection(self) -> ConnectionEnd:
        connection = self._connection = ClientConnection(self._url, self._options, self._connect)
        end = ConnectionEnd("closed", "there was no time for more")
        try:
            connection.connect()
            end = connection.run(self._handle, self._wait_for_room)
        except ConnectionEnd as failure:
            end = failure
        except (Exception, gevent.Timeout) as error:  # a Timeout that a function of the application left behind
            log.exception("the connection failed")
            end = ConnectionEnd("failed", f"{type(error).__name__}: {error}")
        finally:
            self._connection, self.end = None, end
            if self._session.etid:
                self._session.lost()
                self._settled.clear()
                self._fail_waiting(f"the connection is lost: {end}")
        return end

    def _delay_after(self, end: ConnectionEnd) -> float | None:
        """Seconds until the next attempt, None to stay away. The application decides if it wants to."""
        log.info("%s", end)
        answer = self._ask_onclose(end)
        if self._closing.is_set() and not self._session.has_held:
            return None
        if answer is None or self._closing.is_set():
            answer = self._options.reconnect and end.can_reconnect
        if isinstance(answer, bool):
            return self._backoff.next_s() if answer else None
        return answer

    def _ask_onclose(self, end: ConnectionEnd) -> bool | float | None:
        if self.onclose is None or self._closing.is_set():
            return None
        self._asks_onclose.set()
        self._fail_waiting(f"the connection is lost: {end}")
        answer = self._callbacks.ask_later(self.onclose, end.word, end.can_reconnect)
        try:
            gevent.wait([answer, self._closing], count=1)
        finally:
            self._asks_onclose.clear()
        return delay_of(answer.value)

    def _wait_before_the_next(self, delay_s: float) -> None:
        if self._closing.is_set():
            gevent.sleep(delay_s)  # what waits has no better chance at once; `close` sets an end to it
        else:
            self._closing.wait(delay_s)

    def _wait_for_room(self) -> None:
        """Let the application catch up, unless it waits for what comes next itself."""
        if self._callbacks.has_room:
            self._reads_ahead = 0
            return
        gevent.wait([self._callbacks.room, self._reads_on], count=1)
        self._reads_ahead += 1
        if self._callbacks.waiting >= _MAX_JOBS or self._reads_ahead >= _MAX_READS:
            self._fail_waiting("the application is too far behind")
            self._callbacks.wait_for_room()

    def _handle(self, event: Event) -> None:
        _HANDLERS[type(event)](self, event)

    def _on_init(self, event: Init) -> None:
        self._hello = (event.seed, event.address)
        connection = self._connection
        assert connection is not None
        info = connection.local_address if self._options.info is None else self._options.info
        credentials = credentials_of(self.onauth, event, self._options.timeout)
        connection.protocol.connect(to_bytes(self._options.uid), credentials, to_bytes(info))

    def _on_accepted(self, event: Accepted) -> None:
        assert self._connection is not None
        self._connection.accepted = True
        self._backoff.reset()
        self._connections += 1
        self._session.open(self._connection.protocol, event.etid, self._announce)
        self._settled.set()
        if self._closing.is_set():
            self._session.when_drained(self._send_disconnect)

    def _announce(self) -> None:
        callback = self.onconnect
        if self._connections > 1:
            callback = self.onreconnect or (self.onconnect if self._options.cleanstart else None)
        if callback is not None and not self._closing.is_set():
            self._callbacks.post(callback, self._session.etid, *self._hello)

    def _on_ack(self, event: Ack) -> None:
        self._session.acked(event)

    def _on_message(self, event: Published) -> None:
        data, ptid, tid, subtid = event
        if subtid and tid == self._session.etid and self._answers.take(data, ptid, subtid):
            return
        handler: Handler = self._session.route(tid, subtid) or self._general
        self._callbacks.post(handler, data, ptid, tid, subtid)

    def _general(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        if self.onmsg is not None:
            self.onmsg(data, ptid, tid, subtid)

    def _on_change(self, event: Change) -> None:
        if observer := self._session.changed(event):
            observer(event.subscribers)

    def _on_pong(self, event: Pong) -> None:
        if callable(event.token):
            event.token()


_HANDLERS: dict[type[Event], Callable[[ReconnectingConnection, Any], None]] = {
    Init: ReconnectingConnection._on_init,
    Accepted: ReconnectingConnection._on_accepted,
    Ack: ReconnectingConnection._on_ack,
    Published: ReconnectingConnection._on_message,
    Change: ReconnectingConnection._on_change,
    Pong: ReconnectingConnection._on_pong,
}


def credentials_of(onauth: Callback, hello: Init, timeout_s: float) -> bytes:
    """What `onauth(seed, address)` returns. It runs in a greenlet of its own, since one of the other callbacks may wait
    for this connection.

    Raises:
        ConnectionEnd: it failed, took too long, or returned what can't be sent.
    """
    if onauth is None:
        return b""
    failures: list[Exception] = []

    def asked() -> object:
        try:
            return onauth(hello.seed, hello.address)
        except Exception as error:
            log.exception("onauth failed")
            failures.append(error)
            return None

    greenlet = gevent.spawn(asked)
    greenlet.join(timeout_s)
    if failures:
        raise _final(f"onauth failed: {failures[0]}")
    if not greenlet.ready():
        raise ConnectionEnd("timeout", f"onauth gave no answer within {timeout_s:g} s")
    return _sendable(greenlet.value or b"")


def _sendable(credentials: object) -> bytes:
    if isinstance(credentials, str):
        credentials = credentials.encode()
    if not isinstance(credentials, bytes | bytearray):
        raise _final(f"onauth returned {type(credentials).__name__}; credentials are str or bytes")
    if len(credentials) > MAX_CREDENTIALS_BYTES:
        raise _final(f"onauth returned {len(credentials)} bytes; at most {MAX_CREDENTIALS_BYTES} can be sent")
    return bytes(credentials)


def _final(message: str) -> ConnectionEnd:
    return ConnectionEnd("onauth", message, can_reconnect=False)


def delay_of(decision: object) -> bool | float | None:
    """What `onclose` decided: a bool, None, or seconds, at least 0; anything else is logged and taken as None."""
    if decision is None or isinstance(decision, bool):
        return decision
    if isinstance(decision, int | float) and not math.isnan(decision):
        return max(float(decision), 0.0)
    log.error("onclose returned %r: it may be None, False, True or a number of seconds; taken as None", decision)
    return None
