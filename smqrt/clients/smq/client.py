"""`SmqClient`, the SMQ client for applications, and its reconnection (spec: smq §7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack, overload

import gevent
from gevent.event import AsyncResult
from gevent.event import Event as Signal

from smqrt.clients.backoff import Backoff
from smqrt.clients.reconnect import ReconnectingClient
from smqrt.clients.smq.asyncio_guard import called_by_asyncio
from smqrt.clients.smq.common import EndLog, KnownNames, checked_credentials, checked_decision
from smqrt.clients.smq.connection import ClientConnection, SmqConnector
from smqrt.clients.smq.keywords import SmqClientKeywords, SubscriptionKeywords
from smqrt.clients.smq.options import (
    Callback,
    SmqClientOptions,
    SubscriptionOptions,
    broker_url,
    message_handler,
    to_bytes,
)
from smqrt.clients.smq.protocol import Accepted, Ack, Change, ConnectionEnd, Event, Init, Pong, Published
from smqrt.clients.smq.session import ClientSession, Handler, subtopic_key, to_text, topic_key
from smqrt.errors import ArgumentError, ClosedError, EventLoopError, NoAnswer
from smqrt.loop.greenlets import MAX_WAITING_JOBS, Callbacks
from smqrt.settings.option_types import make
from smqrt.smq.messages import Message, Payload, json_bytes, payload
from smqrt.smq.requests import Requests
from smqrt.transport.stream import Stream
from smqrt.wire.url import Url

# ---- Reconnection: the handshake with `onauth`, the queue of callbacks, the decision of `onclose`

log = logging.getLogger("smqrt.client")

# Reading normally stops at MAX_WAITING_JOBS callbacks. It continues up to these limits while a callback itself waits
# for the broker, or while the client closes.
_MAX_JOBS = 10 * MAX_WAITING_JOBS
_MAX_READS = 1000  # of 16 KiB each


class ReconnectingSmqClient(ReconnectingClient[ConnectionEnd], KnownNames):
    """Base class of `SmqClient`: connections, reconnection and events, without the methods for applications.

    Args:
        url: the broker; None when `connect` returns a connection that needs no HTTP request.
        connect: opens the TCP (and TLS) connection; may raise StreamError.
        options: the options of the client.
    """

    def __init__(self, url: Url | None, connect: Callable[[], Stream], options: SmqClientOptions) -> None:
        self._url, self._connect, self._options = url, connect, options
        self.onauth, self.onconnect, self.onreconnect = options.onauth, options.onconnect, options.onreconnect
        self.onclose, self.onmsg = options.onclose, options.onmsg
        self._session = ClientSession(options.queue_bytes, options.cleanstart)
        self._backoff = Backoff(options.reconnect_delay, options.reconnect_delay_max)
        self._connection: ClientConnection | None = None
        self._seed_and_address: tuple[int, str] = (0, "")  # seed and address of Init, for onconnect
        self._connections = self._reads_ahead = 0
        self._end_log = EndLog()
        self._flushes: set[AsyncResult[bool]] = set()  # waiting calls of `flush`
        self._answers = Requests()
        self._disconnect_text = b""
        self._deadline: gevent.Greenlet[..., Any] | None = None
        self._keep_reading = Signal()  # reading continues although callbacks are queued; see `_MAX_JOBS`
        super().__init__(Callbacks(log), log)

    @property
    def connected(self) -> bool:
        """Whether the connection is open and accepted by the broker."""
        return self._session.etid != 0

    # ---- closing

    def disconnect(self, text: str | bytes = "") -> None:
        """Close the client in the background. Returns at once; `onclose` is not called.

        Queued messages are sent first, over a new connection if necessary, within the option `timeout`. Messages that
        the broker has not confirmed by then are lost and logged; `close` raises an error for them.

        Args:
            text: the reason, for the broker.
        """
        if self.closing:
            return
        self._disconnect_text = to_bytes(text)
        self._deadline = gevent.spawn_later(self._options.timeout, self._stop)
        self._begin_close(None)

    def _begin_close(self, _timeout_s: float | None) -> None:
        if self.closing:
            return
        self._closing.set()
        self._keep_reading.set()
        if self.connected:
            self._session.when_drained(self._send_disconnect)
        elif self._connection is not None and not self._session.has_held:  # a handshake without messages to send
            self._stop()

    def _stop(self) -> None:
        self._greenlet.kill(block=False)

    def _send_disconnect(self) -> None:
        connection, session = self._connection, self._session
        assert connection is not None
        if session.confirmed < session.sent:  # a closed connection could lose messages that the broker has not read
            self._confirm(lambda: connection.disconnect(self._disconnect_text))
        else:
            connection.disconnect(self._disconnect_text)

    def _abandon(self) -> int:
        self._session.abandon()
        self._fail_waiting("the client has ended")
        if self._deadline is not None:
            self._deadline.kill(block=False)
        return self._session.in_doubt

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError(f"the client has ended{f': {self.end}' if self.end else ''}; create a new one")

    # ---- waiting

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the broker has processed everything sent so far.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            False after the timeout, when the connection was lost meanwhile, or when the client has ended.
        """
        if self.closed or self._decision_waits_for_caller:
            return False
        answer: AsyncResult[bool] = AsyncResult()

        def drained() -> None:
            self._confirm(lambda: answer.set(True))

        self._flushes.add(answer)
        with self._reading_while_waiting():
            self._session.when_drained(drained)
            answer.wait(timeout)
        self._flushes.discard(answer)
        self._session.forget_drained(drained)
        return bool(answer.value)

    def _confirm(self, then: Callable[[], object]) -> None:
        """Call `then()` when the broker has processed everything sent so far.

        The broker processes packets in order, so its response to a Ping confirms all earlier packets.
        """
        session, sent = self._session, self._session.sent

        def confirmed() -> None:
            session.confirmed = sent
            then()

        if self._connection is not None:
            self._connection.protocol.ping(confirmed)

    def _fail_waiting(self, why: str) -> None:
        """Fail the waiting calls of `request` and `flush`."""
        self._answers.give_up(why)
        while self._flushes:
            self._flushes.pop().set(False)

    @contextmanager
    def _reading_while_waiting(self) -> Iterator[None]:
        """Context manager: continue reading while a callback waits for the broker, although callbacks queue up."""
        if not self._callbacks.is_current:
            yield
            return
        self._keep_reading.set()
        try:
            yield
        finally:
            if not self.closing:
                self._keep_reading.clear()

    # ---- connections

    @property
    def _needs_connection(self) -> bool:
        return not self._closing.is_set() or self._session.has_held

    def _run_connection(self) -> ConnectionEnd:
        connection = self._connection = ClientConnection(self._url, self._options, self._connect)
        end = ConnectionEnd("closed", "the time limit was reached")
        try:
            connection.connect()
            end = connection.run(lambda event: _HANDLERS[type(event)](self, event), self._wait_for_room)
        except ConnectionEnd as failure:
            end = failure
        except (Exception, gevent.Timeout) as error:  # a Timeout that a function of the application left running
            log.exception("the connection failed")
            end = ConnectionEnd("failed", f"{type(error).__name__}: {error}")
        finally:  # also when `_stop` kills the greenlet
            self._connection, self.end = None, end
            if self._session.etid:
                self._session.lost()
                self._settled.clear()
                self._fail_waiting(f"the connection is lost: {end}")
        return end

    def _delay_after(self, reason: ConnectionEnd) -> float | None:
        self._end_log.add(reason, self.onclose is not None or self._closing.is_set(), self._connections)
        answer: bool | float | None = None
        if self.onclose is not None and not self._closing.is_set():
            self._fail_waiting(f"the connection is lost: {reason}")
            returned = self._decision(self.onclose, reason.word, reason.can_reconnect, until=self._closing)
            answer = checked_decision(returned)
        if not self._needs_connection:
            return None
        if answer is None or self._closing.is_set():
            answer = self._options.reconnect and reason.can_reconnect
        if isinstance(answer, bool):
            return self._backoff.next_s() if answer else None
        return answer

    def _wait_for_room(self) -> None:
        """Wait until callbacks have run, unless a callback waits for the next packets of the broker."""
        if self._callbacks.has_room:
            self._reads_ahead = 0
            return
        gevent.wait([self._callbacks.room, self._keep_reading], count=1)
        self._reads_ahead += 1
        if self._callbacks.waiting >= _MAX_JOBS or self._reads_ahead >= _MAX_READS:
            # Resumes the callback, so that others can run.
            self._fail_waiting("the application processes messages too slowly")
            self._callbacks.wait_for_room()

    # ---- events of the connection

    def _on_init(self, event: Init) -> None:
        self._seed_and_address = (event.seed, event.address)
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
        self._session.open(self._connection.protocol, event.etid, self._call_onconnect)
        self._settled.set()
        if self._closing.is_set():
            self._session.when_drained(self._send_disconnect)

    def _call_onconnect(self) -> None:
        """Queue `onconnect` or `onreconnect`, after the names and subscriptions are restored."""
        callback = self.onconnect
        if self._connections > 1:
            callback = self.onreconnect or (self.onconnect if self._options.cleanstart else None)
        if callback is not None and not self._closing.is_set():
            self._callbacks.post(callback, self._session.etid, *self._seed_and_address)

    def _on_ack(self, event: Ack) -> None:
        self._session.acked(event)

    def _on_message(self, event: Published) -> None:
        data, ptid, tid, subtid = event
        if subtid and tid == self._session.etid and self._answers.take(data, ptid, subtid):  # a reply for `request`
            return
        handler: Handler = self._session.route(tid, subtid) or self._call_onmsg
        self._callbacks.post(handler, data, ptid, tid, subtid)

    def _call_onmsg(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        if self.onmsg is not None:
            self.onmsg(data, ptid, tid, subtid)

    def _on_change(self, event: Change) -> None:
        if observer := self._session.changed(event):
            observer(event.subscribers)

    def _on_pong(self, event: Pong) -> None:
        if callable(event.token):
            event.token()


_HANDLERS: dict[type[Event], Callable[[ReconnectingSmqClient, Any], None]] = {
    Init: ReconnectingSmqClient._on_init,
    Accepted: ReconnectingSmqClient._on_accepted,
    Ack: ReconnectingSmqClient._on_ack,
    Published: ReconnectingSmqClient._on_message,
    Change: ReconnectingSmqClient._on_change,
    Pong: ReconnectingSmqClient._on_pong,
}


def credentials_of(onauth: Callback, init: Init, timeout_s: float) -> bytes:
    """Return the credentials from `onauth(seed, address)`.

    `onauth` runs in a separate greenlet, because another callback may wait for this connection.

    Raises:
        ConnectionEnd: `onauth` failed, took too long, or returned an invalid value.
    """
    if onauth is None:
        return b""
    failures: list[Exception] = []

    def call() -> object:
        try:
            return onauth(init.seed, init.address)
        except Exception as error:
            log.exception("onauth failed")
            failures.append(error)
            return None

    greenlet = gevent.spawn(call)
    greenlet.join(timeout_s)
    if not greenlet.ready():
        raise ConnectionEnd("timeout", f"onauth did not return within {timeout_s:g} s")
    if failures:
        raise ConnectionEnd("onauth", f"onauth failed: {failures[0]}", can_reconnect=False)
    return checked_credentials(greenlet.value)


F = TypeVar("F", bound=Callable[[Message], object])

Name = str | bytes | int
"""A topic: a name, or an ID as `int`. `"self"` means the client's own ETID."""
OnAck = Callable[..., object]
"""Receives `(accepted, name, number)`: whether the broker accepted the request, the unchanged name, and its number."""


class _Create:
    """The attribute `create`: on the class it creates a client; on a client it requests the number of a topic."""

    @overload
    def __get__(self, instance: None, owner: type[SmqClient]) -> type[SmqClient]: ...
    @overload
    def __get__(self, instance: SmqClient, owner: type[SmqClient]) -> Callable[..., None]: ...
    def __get__(self, instance: SmqClient | None, owner: type[SmqClient]) -> object:
        return owner if instance is None else instance._create


class SmqClient(ReconnectingSmqClient):
    """A client of an SMQ broker that connects in the background and reconnects after a lost connection.

    All methods may be called at any time; messages and requests are queued while there is no connection. After a
    reconnect, topics are numbered and subscribed again before `onreconnect` is called (unless `cleanstart`).

    The callbacks `onauth`, `onconnect`, `onreconnect`, `onclose` and `onmsg` are options, and may be assigned later.
    They may block and call the client. One greenlet runs them, one after the other, except `onauth`, which must return
    within the `timeout`. An exception in a callback is logged, and the client continues.

    Methods that send raise ClosedError after `close`, or when the client has ended.

    Args:
        url: `http(s)://` for raw SMQ, `ws(s)://` for WebSocket. Or a function that is called for each connection: it
            returns a `Stream`, on which SMQ begins without an HTTP request, or raises StreamError.
        options: a mapping of options; see `smqrt.clients.smq.options.SmqClientOptions`.
        more: options as keyword arguments.

    Raises:
        ArgumentError: an invalid URL or option.
        EventLoopError: an asyncio loop runs this function; use `smqrt.aio`.

    Attributes:
        end: the `ConnectionEnd` of the last connection or failed attempt; None before the first one.
    """

    def __init__(
        self,
        url: str | Callable[[], Stream],
        options: Mapping[str, object] | None = None,
        **more: Unpack[SmqClientKeywords],
    ) -> None:
        if called_by_asyncio():
            raise EventLoopError(
                "smqrt.client.SmqClient would block the asyncio loop that runs; use smqrt.aio.SmqClient"
            )
        chosen = make(SmqClientOptions, {**(options or {}), **more})
        if callable(url):
            super().__init__(None, url, chosen)
        else:
            endpoint = broker_url(url)
            super().__init__(endpoint, SmqConnector(endpoint, chosen), chosen)

    # ---- names

    def _create(self, topic: Name, onack: OnAck | None = None) -> None:
        """Request the number of `topic`; `onack(accepted, topic, tid)` receives it."""
        self._check_open()
        key = topic_key(topic)
        done = self._onack(onack, topic)
        if isinstance(key, int):
            done(key)
        else:
            self._session.create(key, done)

    create = _Create()
    """`SmqClient.create(url, options)` creates a client; `client.create(topic, onack)` requests a topic number."""

    def createsub(self, subtopic: str | bytes, onack: OnAck | None = None) -> None:
        """Request the number of `subtopic`; `onack(accepted, subtopic, stid)` receives it."""
        self._check_open()
        key = subtopic_key(subtopic)
        if not isinstance(key, bytes):
            raise ArgumentError(f"subtopic must be a name, not {subtopic!r}")
        self._session.createsub(key, self._onack(onack, subtopic))

    def _onack(self, onack: OnAck | None, name: object) -> Callable[[int], None]:
        """Return a function that queues the callback `onack` with the number of a name."""

        def done(number: int) -> None:
            if onack is not None:
                self._callbacks.post(onack, bool(number), name, number)

        return done

    # ---- messages

    def publish(self, data: Payload, topic: Name, subtopic: Name | None = None) -> bool:
        """Send a message.

        Args:
            data: bytes, text, or a value that is sent as JSON; see `smqrt.smq.messages.payload`. At most 65520 bytes.
            topic: a name, an ID, an ETID, or `"self"`.
            subtopic: a name or ID.

        Returns:
            False when the send queue is full: the message is dropped and counted in `dropped`.

        Raises:
            ArgumentError: the message is too large, or a name is invalid.
            ClosedError: the client was closed, or has ended.
        """
        self._check_open()
        return self._session.publish(payload(data), topic_key(topic), subtopic_key(subtopic))

    def pubjson(self, value: object, topic: Name, subtopic: Name | None = None) -> bool:
        """Send `value` as JSON, also a str. See `publish`."""
        return self.publish(json_bytes(value), topic, subtopic)

    def request(self, etid: int, data: Payload, timeout_s: float = 10.0) -> Message:
        """Send `data` to the client `etid` (1: the server) and wait for its reply (`Message.reply`).

        Returns:
            The reply.

        Raises:
            NoAnswer: no reply within `timeout_s` seconds, or the connection was lost.
            ArgumentError, ClosedError: as `publish`.
        """

        def send(number: int) -> None:
            if not self.publish(data, etid, number):
                raise NoAnswer(f"the request to {etid} was not sent: the send queue is full")

        if self._decision_waits_for_caller:
            raise NoAnswer("the connection is lost, and onclose runs after this callback")
        with self._reading_while_waiting():
            answer, number = self._answers.ask(etid, send, timeout_s)
        return Message(answer, etid, self._session.etid, number, etid, self.publish)

    # ---- subscriptions

    def subscribe(
        self,
        topic: Name,
        subtopic: Name | Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
        **more: Unpack[SubscriptionKeywords],
    ) -> None:
        """Send Subscribe, also for a topic that is already subscribed.

        Args:
            topic: a name, or `"self"` for messages to the client's own ETID.
            subtopic: handle only messages with this sub-topic. Each sub-topic may have a handler; the last one wins.
            settings: a mapping with `onmsg(data, ptid, tid, subtid)` (default: the client's onmsg), `onack(accepted,
                topic, tid)` (with a subtopic also `subtopic, stid`), `datatype`: None for bytes, `"text"`, `"json"`.
                Undecodable messages go to the client's onmsg as bytes.
            more: settings as keyword arguments.
        """
        if isinstance(subtopic, Mapping):
            subtopic, settings = None, subtopic
        self._check_open()
        chosen = make(SubscriptionOptions, {**(settings or {}), **more})
        key, subkey = topic_key(topic), subtopic_key(subtopic)

        def done(tid: int, stid: int) -> None:
            if chosen.onack is not None:
                numbered = (topic, tid) if subtopic is None else (topic, tid, subtopic, stid)
                self._callbacks.post(chosen.onack, bool(tid), *numbered)
            elif not tid and self.connected:
                name = to_text(topic) if isinstance(topic, bytes) else topic
                log.error("the broker denied the subscription to %r", name)

        self._session.subscribe(key, subkey, message_handler(chosen, self._call_onmsg), done)

    def on(self, topic: Name, subtopic: Name | None = None) -> Callable[[F], F]:
        """Decorate a function that receives each message of a topic as a `Message`. See `subscribe`."""

        def subscribed(fn: F) -> F:
            def onmsg(data: bytes, ptid: int, tid: int, subtid: int) -> None:
                fn(Message(data, ptid, tid, subtid, topic, self.publish))

            self.subscribe(topic, subtopic, onmsg=onmsg)
            return fn

        return subscribed

    def unsubscribe(self, topic: Name) -> None:
        """End a subscription with all its handlers; unknown topics are ignored."""
        self._session.unsubscribe(topic_key(topic))

    def observe(self, topic: Name, onchange: Callable[[int, Any], object]) -> None:
        """Observe the subscriber count of a topic, or the disconnect of the client with an ETID.

        Args:
            onchange: `f(subscribers, topic)`; for an ETID called once, with 0, when its client disconnects.
        """
        self._check_open()
        self._session.observe(topic_key(topic), lambda count: self._callbacks.post(onchange, count, topic))

    def unobserve(self, topic: Name) -> None:
        """Stop observing."""
        self._session.unobserve(topic_key(topic))
