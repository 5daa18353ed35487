"""`SmqClient`: the application's side of a `Session`, and the greenlet that keeps a `Link` (smq.md §7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult
from gevent.event import Event as Signal

from smqrt.client.callbacks import credentials_of, delay_of
from smqrt.client.close_reason import ConnectionEnd
from smqrt.client.connection import Backoff, ClientConnection, SmqConnector, broker_url
from smqrt.client.options import SmqClientOptions, SubscriptionOptions, message_handler, to_bytes
from smqrt.client.protocol import Accepted, Ack, Change, Event, Init, Pong, Published
from smqrt.client.session import ClientSession
from smqrt.client.topics import Handler, subtopic_key, to_text, topic_key
from smqrt.errors import ArgumentError, ClosedError, DeliveryError, NoAnswer
from smqrt.message import Message, Payload, Requests, json_bytes, payload
from smqrt.net.callbacks import ROOM_JOBS, Callbacks
from smqrt.net.stream import Stream
from smqrt.options import make

log = logging.getLogger("smqrt.client")

_MOST_JOBS, _MOST_READS = 10 * ROOM_JOBS, 1000
"""So far the broker is read on, 16 KiB a time, while a callback itself waits for it, or while the client ends."""

F = TypeVar("F", bound=Callable[[Message], Any])

Name = str | bytes | int
"""A topic: a name, or an id as `int`. `"self"` means one's own ETID."""


class FactoryOrMethod:
    """A name with two meanings, as documented: on the class it makes an instance, on an instance it is `method`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object | None, owner: type) -> Callable[..., Any]:
        return owner if instance is None else MethodType(self._method, instance)


class SmqClient:
    """A client of an SMQ broker that connects at once, in the background, and comes back when the connection is lost.

    Everything may be called at any time: what needs a connection waits for one. After a reconnect topics are numbered
    and subscribed again before `onreconnect` comes (unless `cleanstart`). The callbacks `onauth`, `onconnect`,
    `onreconnect`, `onclose` and `onmsg` may be given as options or assigned later; they may block and call back, and
    run one after the other in a greenlet of their own, but for `onauth`, which has to answer within the `timeout`.

    A callback that raises is logged, and the client goes on. After `close`, or when it has ended by itself, whatever
    would send raises ClosedError.

    Args:
        url: `http(s)://` for raw SMQ, `ws(s)://` for WebSocket. Or a function that gives, each time a connection is
            needed, a `Stream` over which the broker speaks SMQ already, or raises StreamError.
        options: a mapping of options; see `smqrt.client.options.SmqClientOptions`.
        more: the same as keyword arguments.

    Raises:
        ArgumentError: a bad URL or option.

    Attributes:
        end: the `ConnectionEnd` of the last connection that ended or failed, None before.
    """

    def __init__(self, url: str | Callable[[], Stream], options: Mapping[str, Any] | None = None, **more: Any) -> None:
        self._url = None if callable(url) else broker_url(url)
        self._options = opts = make(SmqClientOptions, {**(options or {}), **more})
        self._connect = url if callable(url) else SmqConnector(broker_url(url), opts)
        self.onauth, self.onconnect, self.onreconnect = opts.onauth, opts.onconnect, opts.onreconnect
        self.onclose, self.onmsg = opts.onclose, opts.onmsg
        self.end: ConnectionEnd | None = None
        self._session = ClientSession(opts.queue_bytes, opts.cleanstart)
        self._callbacks = Callbacks(log)
        self._backoff = Backoff(opts.reconnect_delay, opts.reconnect_delay_max)
        self._link: ClientConnection | None = None
        self._hello: tuple[int, str] = (0, "")
        self._connections = self._reads_ahead = 0
        self._flushes: set[AsyncResult[bool]] = set()
        self._answers = Requests()
        self._last_job: Callable[[], Any] | None = None
        self._undelivered = 0
        self._parting_text = b""
        self._deadline: gevent.Greenlet[..., Any] | None = None
        self._stopping, self._settled, self._over = Signal(), Signal(), Signal()
        self._asking = Signal()  # onclose is asked: it comes after the callback that runs now
        self._eager = Signal()  # a callback waits for the broker, or the client ends: reading must go on
        self._greenlet = gevent.Greenlet(self._run)
        self._greenlet.rawlink(self._ended)  # not at the end of _run: who is killed early never runs
        self._greenlet.start()

    # ---- names

    def _create(self, topic: Name, onack: Callable[[bool, Any, int], Any] | None = None) -> None:
        """Have the broker number `topic`; `onack(accepted, topic, tid)` tells."""
        self._check_alive()
        key = topic_key(topic)
        done = self._onack(onack, topic)
        if isinstance(key, int):
            done(key)
        else:
            self._session.create(key, done)

    create = FactoryOrMethod(_create)
    """On the class: `SmqClient.create(url, options)` makes a client. On a client: `create(topic, onack)`."""

    def createsub(self, subtopic: str | bytes, onack: Callable[[bool, Any, int], Any] | None = None) -> None:
        """Have the broker number `subtopic`; `onack(accepted, subtopic, stid)` tells."""
        self._check_alive()
        key = subtopic_key(subtopic)
        if not isinstance(key, bytes):
            raise ArgumentError(f"subtopic must be a name, not {subtopic!r}")
        self._session.createsub(key, self._onack(onack, subtopic))

    def _onack(self, onack: Callable[..., Any] | None, name: object) -> Callable[[int], None]:
        def done(number: int) -> None:
            if onack is not None:
                self._callbacks.post(onack, bool(number), name, number)

        return done

    def gettid(self) -> int | None:
        """One's own ETID, None while not connected."""
        return self._session.etid or None

    def topic2tid(self, topic: str | bytes) -> int | None:
        """The id of a topic, None when this client does not know it."""
        return self._session.topics.number(to_bytes(topic))

    def tid2topic(self, tid: int) -> str | bytes | None:
        """The name of a topic this client knows (bytes when it is not UTF-8), else None."""
        return to_text(self._session.topics.name(tid))

    def subtopic2tid(self, subtopic: str | bytes) -> int | None:
        """The id of a sub-topic, None when this client does not know it."""
        return self._session.subtopics.number(to_bytes(subtopic))

    def tid2subtopic(self, stid: int) -> str | bytes | None:
        """The name of a sub-topic this client knows, else None."""
        return to_text(self._session.subtopics.name(stid))

    # ---- messages

    def publish(self, data: Payload, topic: Name, subtopic: Name | None = None) -> bool:
        """Send a message.

        Args:
            data: see `smqrt.message.payload`: bytes, text, or what becomes JSON. At most 65520 bytes.
            topic: a name, an id, an ETID, or `"self"`.
            subtopic: a name or id.

        Returns:
            False when the send queue is full: the message is dropped and counted in `dropped`.

        Raises:
            ArgumentError: the message is too large, or a name is none.
            ClosedError: the client was closed, or has ended.
        """
        self._check_alive()
        return self._session.publish(payload(data), topic_key(topic), subtopic_key(subtopic))

    def pubjson(self, value: object, topic: Name, subtopic: Name | None = None) -> bool:
        """Send `value` as JSON, str included. See `publish`."""
        return self.publish(json_bytes(value), topic, subtopic)

    def request(self, etid: int, data: Payload, timeout_s: float = 10.0) -> Message:
        """Send `data` to the client `etid` (1: the server) and wait for the answer, which it gives with `reply`.

        Returns:
            The answer.

        Raises:
            NoAnswer: none came within `timeout_s` seconds, or the connection was lost meanwhile.
            ArgumentError, ClosedError: as `publish`.
        """

        def send(number: int) -> None:
            if not self.publish(data, etid, number):
                raise NoAnswer(f"the request to {etid} was not sent: the send queue is full")

        if self._is_in_the_way:
            raise NoAnswer("the connection is lost, and onclose waits for this callback")
        with self._waiting_inside():
            answer, number = self._answers.ask(etid, send, timeout_s)
        return Message(answer, etid, self._session.etid, number, etid, self.publish)

    @property
    def backlog_bytes(self) -> int:
        """How much waits to be sent."""
        return self._session.waiting_bytes

    @property
    def dropped(self) -> int:
        """Messages that were not sent: queue full, topic refused, or the connection lost before they left."""
        return self._session.dropped

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the broker has handled everything sent so far.

        Args:
            timeout: seconds; None waits as long as the client lives.

        Returns:
            False when time ran out, the connection was lost meanwhile, or the client has ended.
        """
        if self.closed or self._is_in_the_way:
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

        if self._link is not None:
            self._link.protocol.ping(confirmed)

    def _fail_waiting(self, why: str) -> None:
        self._answers.give_up(why)
        while self._flushes:
            self._flushes.pop().set(False)

    @property
    def _is_in_the_way(self) -> bool:
        """Whether onclose, which decides about the next connection, waits for the callback that asks."""
        return self._asking.is_set() and self._callbacks.is_current

    @contextmanager
    def _waiting_inside(self) -> Iterator[None]:
        """Around the waiting of a callback: reading goes on, though callbacks behind it pile up."""
        if not self._callbacks.is_current:
            yield
            return
        self._eager.set()
        try:
            yield
        finally:
            if not self._stopping.is_set():
                self._eager.clear()

    def _check_alive(self) -> None:
        if self._stopping.is_set():
            raise ClosedError(f"the client has ended{f': {self.end}' if self.end else ''}; make a new one")

    # ---- subscriptions

    def subscribe(
        self,
        topic: Name,
        subtopic: Name | Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Subscribe; the broker is always told.

        Args:
            topic: a name, or `"self"` for messages to one's own ETID.
            subtopic: handle only messages with this sub-topic; several may coexist, the last registration wins.
            settings: a mapping with `onmsg(data, ptid, tid, subtid)` (default: the client's onmsg), `onack(accepted,
                topic, tid)` (with a subtopic also `subtopic, stid`), `datatype`: None for bytes, `"text"`, `"json"`.
                What can't be decoded goes to the client's onmsg as bytes.
            more: the same as keyword arguments.
        """
        if isinstance(subtopic, Mapping):
            subtopic, settings = None, subtopic
        self._check_alive()
        chosen = make(SubscriptionOptions, {**(settings or {}), **more})
        key, subkey = topic_key(topic), subtopic_key(subtopic)
        names = (topic,) if subtopic is None else (topic, subtopic)

        def done(tid: int, stid: int) -> None:
            if chosen.onack is not None:
                numbers = zip(names, (tid, stid), strict=False)
                self._callbacks.post(chosen.onack, bool(tid), *(item for pair in numbers for item in pair))

        self._session.subscribe(key, subkey, message_handler(chosen, self._general), done)

    def on(self, topic: Name, subtopic: Name | None = None) -> Callable[[F], F]:
        """Decorator: subscribe the function, which gets each message as a `smqrt.message.Message`. See `subscribe`."""

        def subscribed(fn: F) -> F:
            def onmsg(data: bytes, ptid: int, tid: int, subtid: int) -> None:
                fn(Message(data, ptid, tid, subtid, topic, self.publish))

            self.subscribe(topic, subtopic, onmsg=onmsg)
            return fn

        return subscribed

    def unsubscribe(self, topic: Name) -> None:
        """End a subscription and forget its handlers; an unknown topic is let be."""
        self._session.unsubscribe(topic_key(topic))

    def observe(self, topic: Name, onchange: Callable[[int, Any], Any]) -> None:
        """Watch how many subscribers a topic has, or whether an ETID is there.

        Args:
            onchange: `f(subscribers, topic)`; for an ETID once, with 0, when its client goes away.
        """
        self._check_alive()
        self._session.observe(topic_key(topic), lambda count: self._callbacks.post(onchange, count, topic))

    def unobserve(self, topic: Name) -> None:
        """Stop watching."""
        self._session.unobserve(topic_key(topic))

    # ---- the connection

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted and the connection stands."""
        return self._session.etid != 0

    @property
    def closed(self) -> bool:
        """Whether the client has ended for good."""
        return bool(self._over.is_set())

    @property
    def closing(self) -> bool:
        """Whether it was closed, or has ended by itself: nothing can be sent any more."""
        return bool(self._stopping.is_set())

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the client has ended for good. True when it has."""
        return bool(self._over.wait(timeout))

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected.

        Called from a callback it does not wait for an `onclose` that is due: that comes after this callback.
        """
        settled = [self._settled, self._asking] if self._callbacks.is_current else [self._settled]
        gevent.wait(settled, timeout, count=1)
        return self.connected

    def disconnect(self, text: str | bytes = "") -> None:
        """End after what was published, and do not come back. Returns at once; `onclose` is not called.

        What waits is sent first, if need be over a connection that is made for it, within the option `timeout`. What
        the broker does not have by then is lost, and logged; `close` tells.

        Args:
            text: for the broker, why.
        """
        if self._stopping.is_set():
            return
        self._parting_text = to_bytes(text)
        self._deadline = gevent.spawn_later(self._options.timeout, self._greenlet.kill, block=False)
        self._part()

    def close(self, timeout: float | None = 5.0) -> None:
        """`disconnect`, and wait until the broker has everything and the connection has ended.

        Called from a callback of this client, which could not end meanwhile, it does not wait.

        Args:
            timeout: seconds for all of it, connecting included; None waits as long as it takes.

        Raises:
            DeliveryError: the client has ended, and messages did not reach the broker, or nobody knows whether they
                did. Only the first call tells.
        """
        self._part()
        if self._callbacks.is_current:
            return
        if not self._over.wait(timeout):
            self._greenlet.kill(block=False)
            self._over.wait()
        count, self._undelivered = self._undelivered, 0
        if count:
            raise DeliveryError(self._undelivered_text(count))

    def __enter__(self) -> SmqClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeliveryError:
            if kind is None:  # otherwise what the block raised is the news; this is in the log
                raise

    def _part(self) -> None:
        """Begin to end: with a connection after what waits, without one when there is nothing to send."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._eager.set()
        if self.connected:
            self._session.when_drained(self._say_goodbye)
        elif self._link is not None and not self._session.has_held:
            self._greenlet.kill(block=False)

    def _say_goodbye(self) -> None:
        link, session = self._link, self._session
        assert link is not None
        if session.confirmed < session.sent:
            self._confirm(lambda: link.farewell(self._parting_text))
        else:
            link.farewell(self._parting_text)

    def _undelivered_text(self, count: int) -> str:
        messages = "a message" if count == 1 else f"{count} messages"
        why = f": {self.end}" if self.end else ""
        return f"the client ended before the broker confirmed {messages}{why}"

    def on_end(self, fn: Callable[[], Any]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._last_job = fn

    # ---- the greenlet behind it

    def _run(self) -> None:
        while not self._stopping.is_set() or self._session.has_held:
            try:
                delay_s = self._delay_after(self._one_connection())
                if delay_s is None:
                    return
                self._wait_before_the_next(delay_s)
            except gevent.Timeout:
                log.exception("a Timeout that a function of the application left behind")

    def _ended(self, _: object) -> None:
        """The greenlet is over, whatever ended it."""
        self._stopping.set()
        self._session.abandon()
        self._settled.set()
        self._fail_waiting("the client has ended")
        self._undelivered = self._session.in_doubt
        if self._undelivered:
            log.warning("%s", self._undelivered_text(self._undelivered))
        if self._deadline is not None:
            self._deadline.kill(block=False)
        if self._last_job is not None:
            self._callbacks.post(self._last_job)
        self._callbacks.finish()
        self._over.set()

    def _one_connection(self) -> ConnectionEnd:
        link = self._link = ClientConnection(self._url, self._options, self._connect)
        end = ConnectionEnd("closed", "there was no time for more")
        try:
            link.connect()
            end = link.run(self._handle, self._wait_for_room)
        except ConnectionEnd as failure:
            end = failure
        except (Exception, gevent.Timeout) as error:  # a Timeout that a function of the application left behind
            log.exception("the connection failed")
            end = ConnectionEnd("failed", f"{type(error).__name__}: {error}")
        finally:
            self._link, self.end = None, end
            if self._session.etid:
                self._session.lost()
                self._settled.clear()
                self._fail_waiting(f"the connection is lost: {end}")
        return end

    def _delay_after(self, end: ConnectionEnd) -> float | None:
        """Seconds until the next attempt, None to stay away. The application decides if it wants to."""
        log.info("%s", end)
        answer = self._ask_onclose(end)
        if self._stopping.is_set() and not self._session.has_held:
            return None
        if answer is None or self._stopping.is_set():
            answer = self._options.reconnect and end.can_reconnect
        if isinstance(answer, bool):
            return self._backoff.next_s() if answer else None
        return answer

    def _ask_onclose(self, end: ConnectionEnd) -> bool | float | None:
        if self.onclose is None or self._stopping.is_set():
            return None
        self._asking.set()
        self._fail_waiting(f"the connection is lost: {end}")
        answer = self._callbacks.ask_later(self.onclose, end.word, end.can_reconnect)
        try:
            gevent.wait([answer, self._stopping], count=1)
        finally:
            self._asking.clear()
        return delay_of(answer.value)

    def _wait_before_the_next(self, delay_s: float) -> None:
        if self._stopping.is_set():
            gevent.sleep(delay_s)  # what waits has no better chance at once; `close` sets an end to it
        else:
            self._stopping.wait(delay_s)

    def _wait_for_room(self) -> None:
        """Let the application catch up, unless it waits for what comes next itself."""
        if self._callbacks.has_room:
            self._reads_ahead = 0
            return
        gevent.wait([self._callbacks.room, self._eager], count=1)
        self._reads_ahead += 1
        if self._callbacks.waiting >= _MOST_JOBS or self._reads_ahead >= _MOST_READS:
            self._fail_waiting("the application is too far behind")
            self._callbacks.wait_for_room()

    def _handle(self, event: Event) -> None:
        _HANDLERS[type(event)](self, event)

    def _on_init(self, event: Init) -> None:
        self._hello = (event.seed, event.address)
        link = self._link
        assert link is not None
        info = link.local_address if self._options.info is None else self._options.info
        credentials = credentials_of(self.onauth, event, self._options.timeout)
        link.protocol.connect(to_bytes(self._options.uid), credentials, to_bytes(info))

    def _on_accepted(self, event: Accepted) -> None:
        assert self._link is not None
        self._link.opened = True
        self._backoff.reset()
        self._connections += 1
        self._session.open(self._link.protocol, event.etid, self._announce)
        self._settled.set()
        if self._stopping.is_set():
            self._session.when_drained(self._say_goodbye)

    def _announce(self) -> None:
        callback = self.onconnect
        if self._connections > 1:
            callback = self.onreconnect or (self.onconnect if self._options.cleanstart else None)
        if callback is not None and not self._stopping.is_set():
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


_HANDLERS: dict[type[Event], Callable[[SmqClient, Any], None]] = {
    Init: SmqClient._on_init,
    Accepted: SmqClient._on_accepted,
    Ack: SmqClient._on_ack,
    Published: SmqClient._on_message,
    Change: SmqClient._on_change,
    Pong: SmqClient._on_pong,
}
