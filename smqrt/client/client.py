"""`SmqClient`: the application's side of a `Session`, and the greenlet that keeps a `Link` (smq.md §7)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import gevent
from gevent.event import AsyncResult
from gevent.event import Event as Signal

from smqrt.client.arguments import FactoryOrMethod, make_payload, subtopic_key, to_text, topic_key
from smqrt.client.backoff import Backoff
from smqrt.client.ending import ConnectionEnd
from smqrt.client.events import Accepted, Ack, Change, Event, Init, Message, Pong
from smqrt.client.link import Link
from smqrt.client.opening import Opener
from smqrt.client.options import make_options, to_bytes
from smqrt.client.routes import Handler
from smqrt.client.session import Session
from smqrt.client.subscription import Settings, message_handler
from smqrt.client.url import parse_url
from smqrt.errors import ArgumentError
from smqrt.net.callbacks import Callbacks
from smqrt.net.stream import Stream

log = logging.getLogger("smqrt.client")

MAX_CREDENTIALS_BYTES = 255

Name = str | bytes | int
"""A topic: a name, or an id as `int`. `"self"` means one's own ETID."""


class SmqClient:
    """A client of an SMQ broker that connects at once, in the background, and comes back when the connection is lost.

    Everything may be called at any time: what needs a connection waits for one. After a reconnect topics are numbered
    and subscribed again before `onreconnect` comes (unless `cleanstart`). The callbacks `onauth`, `onconnect`,
    `onreconnect`, `onclose` and `onmsg` may be given as options or assigned later; they run one after the other in a
    greenlet of their own and may block and call back.

    Args:
        url: `http(s)://` for raw SMQ, `ws(s)://` for WebSocket. Or a function that gives, each time a connection is
            needed, a `Stream` over which the broker speaks SMQ already, or raises StreamError.
        options: a mapping of options; see `smqrt.client.options.Options`.
        more: the same as keyword arguments.

    Raises:
        ArgumentError: a bad URL or option.

    Attributes:
        end: the `ConnectionEnd` of the last connection that ended or failed, None before.
    """

    def __init__(self, url: str | Callable[[], Stream], options: Mapping[str, Any] | None = None, **more: Any) -> None:
        self._endpoint = None if callable(url) else parse_url(url)
        self._options = opts = make_options(options, more)
        self._opener = url if callable(url) else Opener(parse_url(url), opts)
        self.onauth, self.onconnect, self.onreconnect = opts.onauth, opts.onconnect, opts.onreconnect
        self.onclose, self.onmsg = opts.onclose, opts.onmsg
        self.end: ConnectionEnd | None = None
        self._session = Session(opts.queue_bytes, opts.cleanstart)
        self._callbacks = Callbacks(log)
        self._backoff = Backoff(opts.reconnect_delay, opts.reconnect_delay_max)
        self._link: Link | None = None
        self._hello: tuple[int, str] = (0, "")
        self._connections = 0
        self._flushes: set[AsyncResult[bool]] = set()
        self._last_job: Callable[[], Any] | None = None
        self._stopping = Signal()
        self._settled = Signal()
        self._greenlet = gevent.spawn(self._run)

    # ---- names

    def _create(self, topic: Name, onack: Callable[[bool, Any, int], Any] | None = None) -> None:
        """Have the broker number `topic`; `onack(accepted, topic, tid)` tells."""
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

    def publish(self, data: object, topic: Name, subtopic: Name | None = None) -> bool:
        """Send a message.

        Args:
            data: bytes; str is sent as UTF-8, anything else as JSON. At most 65520 bytes.
            topic: a name, an id, an ETID, or `"self"`.
            subtopic: a name or id.

        Returns:
            False when the send queue is full: the message is dropped and counted in `dropped`.

        Raises:
            ArgumentError: the message is too large, or a name is none.
        """
        return self._session.publish(make_payload(data), topic_key(topic), subtopic_key(subtopic))

    def pubjson(self, value: object, topic: Name, subtopic: Name | None = None) -> bool:
        """Send `value` as JSON, str included. See `publish`."""
        return self.publish(json.dumps(value, separators=(",", ":")), topic, subtopic)

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
        answer: AsyncResult[bool] = AsyncResult()
        self._flushes.add(answer)
        self._session.when_drained(lambda: self._ping(answer))
        if self.closed:
            self._fail_flushes()
        answer.wait(timeout)
        self._flushes.discard(answer)
        return bool(answer.value)

    def _ping(self, answer: AsyncResult[bool]) -> None:
        if self._link is not None:
            self._link.protocol.ping(answer)

    def _fail_flushes(self) -> None:
        while self._flushes:
            self._flushes.pop().set(False)

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
        chosen = Settings.make(settings, more)
        key, subkey = topic_key(topic), subtopic_key(subtopic)
        names = (topic,) if subtopic is None else (topic, subtopic)

        def done(tid: int, stid: int) -> None:
            if chosen.onack is not None:
                numbers = zip(names, (tid, stid), strict=False)
                self._callbacks.post(chosen.onack, bool(tid), *(item for pair in numbers for item in pair))

        self._session.subscribe(key, subkey, message_handler(chosen, self._general), done)

    def unsubscribe(self, topic: Name) -> None:
        """End a subscription and forget its handlers; an unknown topic is let be."""
        self._session.unsubscribe(topic_key(topic))

    def observe(self, topic: Name, onchange: Callable[[int, Any], Any]) -> None:
        """Watch how many subscribers a topic has, or whether an ETID is there.

        Args:
            onchange: `f(subscribers, topic)`; for an ETID once, with 0, when its client goes away.
        """
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
        return bool(self._greenlet.ready()) or (self._stopping.is_set() and self._link is None)

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected."""
        self._settled.wait(timeout)
        return self.connected

    def disconnect(self, text: str | bytes = "") -> None:
        """End the connection after what was published, and do not come back. `onclose` is not called."""
        self._stopping.set()
        if self._link is None:
            return
        if not self.connected:
            self._link.abort()
            return
        farewell = self._link.farewell
        self._link.abort_after(self._options.timeout)
        self._session.when_drained(lambda: farewell(to_bytes(text)))

    def close(self, timeout: float | None = 5.0) -> None:
        """`disconnect` and wait for the end, at most `timeout` seconds; then the socket is closed at once."""
        self.disconnect()
        self._greenlet.join(timeout)
        if self._link is not None:
            self._link.abort()

    def __enter__(self) -> SmqClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_end(self, fn: Callable[[], Any]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._last_job = fn

    # ---- the greenlet behind it

    def _run(self) -> None:
        while not self._stopping.is_set():
            end = self._one_connection()
            delay_s = None if self._stopping.is_set() else self._delay_after(end)
            if delay_s is None:
                break
            self._stopping.wait(delay_s)
        self._session.abandon()
        self._settled.set()
        self._fail_flushes()
        if self._last_job is not None:
            self._callbacks.post(self._last_job)
        self._callbacks.finish()

    def _one_connection(self) -> ConnectionEnd:
        link = self._link = Link(self._endpoint, self._options, self._opener)
        try:
            link.connect()
            end = link.run(self._handle, self._callbacks.wait_for_room)
        except ConnectionEnd as failure:
            end = failure
        self._link, self.end = None, end
        if self._session.etid:
            self._session.lost()
            self._settled.clear()
            self._fail_flushes()
        return end

    def _delay_after(self, end: ConnectionEnd) -> float | None:
        """Seconds until the next attempt, None to stay away. The application decides if it wants to."""
        log.info("%s", end)
        answer = self._callbacks.ask(self.onclose, end.word, end.can_reconnect) if self.onclose else None
        if answer is None:
            answer = self._options.reconnect and end.can_reconnect
        if isinstance(answer, bool):
            return self._backoff.next_s() if answer else None
        return float(answer)

    def _handle(self, event: Event) -> None:
        _HANDLERS[type(event)](self, event)

    def _on_init(self, event: Init) -> None:
        self._hello = (event.seed, event.address)
        link = self._link
        assert link is not None
        info = link.local_address if self._options.info is None else self._options.info
        link.protocol.connect(to_bytes(self._options.uid), self._credentials(event), to_bytes(info))

    def _credentials(self, event: Init) -> bytes:
        try:
            credentials = to_bytes((self.onauth and self.onauth(event.seed, event.address)) or b"")
        except Exception as error:
            log.exception("onauth failed")
            raise ConnectionEnd("onauth", f"onauth failed: {error}", can_reconnect=False) from None
        if len(credentials) > MAX_CREDENTIALS_BYTES:
            message = f"onauth returned {len(credentials)} bytes; at most {MAX_CREDENTIALS_BYTES} can be sent"
            raise ConnectionEnd("onauth", message, can_reconnect=False)
        return credentials

    def _on_accepted(self, event: Accepted) -> None:
        assert self._link is not None
        self._link.opened = True
        self._backoff.reset()
        self._connections += 1
        self._session.open(self._link.protocol, event.etid, self._announce)
        self._settled.set()

    def _announce(self) -> None:
        callback = self.onconnect
        if self._connections > 1:
            callback = self.onreconnect or (self.onconnect if self._options.cleanstart else None)
        if callback is not None:
            self._callbacks.post(callback, self._session.etid, *self._hello)

    def _on_ack(self, event: Ack) -> None:
        self._session.acked(event)

    def _on_message(self, event: Message) -> None:
        handler: Handler = self._session.route(event.tid, event.subtid) or self._general
        self._callbacks.post(handler, *event)

    def _general(self, data: bytes, ptid: int, tid: int, subtid: int) -> None:
        if self.onmsg is not None:
            self.onmsg(data, ptid, tid, subtid)

    def _on_change(self, event: Change) -> None:
        if observer := self._session.changed(event):
            observer(event.subscribers)

    def _on_pong(self, event: Pong) -> None:
        if isinstance(event.token, AsyncResult):
            self._flushes.discard(event.token)
            event.token.set(True)


_HANDLERS: dict[type[Event], Callable[[SmqClient, Any], None]] = {
    Init: SmqClient._on_init,
    Accepted: SmqClient._on_accepted,
    Ack: SmqClient._on_ack,
    Message: SmqClient._on_message,
    Change: SmqClient._on_change,
    Pong: SmqClient._on_pong,
}
