"""`SmqClient`: the SMQ client for applications (spec: smq §7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, overload

from smqrt.clients.smq.connection import SmqConnector, broker_url
from smqrt.clients.smq.options import SmqClientOptions, SubscriptionOptions, message_handler, to_bytes
from smqrt.clients.smq.reconnect import ReconnectingSmqClient
from smqrt.clients.smq.session import subtopic_key, to_text, topic_key
from smqrt.errors import ArgumentError, NoAnswer
from smqrt.settings.options import make
from smqrt.smq.messages import Message, Payload, json_bytes, payload
from smqrt.transport.stream import Stream

F = TypeVar("F", bound=Callable[[Message], object])

Name = str | bytes | int
"""A topic: a name, or an id as `int`. `"self"` means the client's own ETID."""
OnAck = Callable[..., object]
"""Receives `(accepted, name, number)`: whether the broker accepted, the name as it was given, and its number."""


class _Create:
    """`create`: on the class it makes a client, on a client it requests the number of a topic."""

    @overload
    def __get__(self, instance: None, owner: type[SmqClient]) -> type[SmqClient]: ...
    @overload
    def __get__(self, instance: SmqClient, owner: type[SmqClient]) -> Callable[..., None]: ...
    def __get__(self, instance: SmqClient | None, owner: type[SmqClient]) -> object:
        return owner if instance is None else instance._create


class SmqClient(ReconnectingSmqClient):
    """A client of an SMQ broker that connects in the background, and again when the connection is lost.

    Every method may be called at any time: what needs a connection waits for one. After a reconnect topics are numbered
    and subscribed again before `onreconnect` is called (unless `cleanstart`).

    The callbacks `onauth`, `onconnect`, `onreconnect`, `onclose` and `onmsg` are options, and may be assigned later.
    They may block and call the client. They run one after the other in one greenlet, except `onauth`, which has to
    return within the `timeout`. An exception in a callback is logged, and the client continues.

    Methods that send raise ClosedError after `close`, or when the client has ended.

    Args:
        url: `http(s)://` for raw SMQ, `ws(s)://` for WebSocket. Or a function that returns a `Stream` each time a
            connection is needed, on which SMQ begins without an HTTP request, or raises StreamError.
        options: a mapping of options; see `smqrt.clients.smq.options.SmqClientOptions`.
        more: the same as keyword arguments.

    Raises:
        ArgumentError: an invalid URL or option.

    Attributes:
        end: the `ConnectionEnd` of the last connection that ended or failed, None before.
    """

    def __init__(
        self, url: str | Callable[[], Stream], options: Mapping[str, object] | None = None, **more: object
    ) -> None:
        chosen = make(SmqClientOptions, {**(options or {}), **more})
        if callable(url):
            super().__init__(None, url, chosen)
        else:
            endpoint = broker_url(url)
            super().__init__(endpoint, SmqConnector(endpoint, chosen), chosen)

    # ---- names

    def _create(self, topic: Name, onack: OnAck | None = None) -> None:
        """Request the number of `topic`; `onack(accepted, topic, tid)` receives it."""
        self._check_alive()
        key = topic_key(topic)
        done = self._onack(onack, topic)
        if isinstance(key, int):
            done(key)
        else:
            self._session.create(key, done)

    create = _Create()
    """On the class, `SmqClient.create(url, options)` makes a client. On a client, see `create(topic, onack)`."""

    def createsub(self, subtopic: str | bytes, onack: OnAck | None = None) -> None:
        """Request the number of `subtopic`; `onack(accepted, subtopic, stid)` receives it."""
        self._check_alive()
        key = subtopic_key(subtopic)
        if not isinstance(key, bytes):
            raise ArgumentError(f"subtopic must be a name, not {subtopic!r}")
        self._session.createsub(key, self._onack(onack, subtopic))

    def _onack(self, onack: OnAck | None, name: object) -> Callable[[int], None]:
        def done(number: int) -> None:
            if onack is not None:
                self._callbacks.post(onack, bool(number), name, number)

        return done

    def gettid(self) -> int | None:
        """Return the client's own ETID, None while not connected."""
        return self._session.etid or None

    def topic2tid(self, topic: str | bytes) -> int | None:
        """Return the id of a topic, None when this client does not know it."""
        return self._session.topics.number(to_bytes(topic))

    def tid2topic(self, tid: int) -> str | bytes | None:
        """Return the name of a topic (bytes when it is not UTF-8), None when this client does not know it."""
        return to_text(self._session.topics.name(tid))

    def subtopic2tid(self, subtopic: str | bytes) -> int | None:
        """Return the id of a sub-topic, None when this client does not know it."""
        return self._session.subtopics.number(to_bytes(subtopic))

    def tid2subtopic(self, stid: int) -> str | bytes | None:
        """Return the name of a sub-topic, None when this client does not know it."""
        return to_text(self._session.subtopics.name(stid))

    # ---- messages

    def publish(self, data: Payload, topic: Name, subtopic: Name | None = None) -> bool:
        """Send a message.

        Args:
            data: bytes, text, or a value that is sent as JSON; see `smqrt.smq.messages.payload`. At most 65520 bytes.
            topic: a name, an id, an ETID, or `"self"`.
            subtopic: a name or id.

        Returns:
            False when the send queue is full: the message is dropped and counted in `dropped`.

        Raises:
            ArgumentError: the message is too large, or a name is not valid.
            ClosedError: the client was closed, or has ended.
        """
        self._check_alive()
        return self._session.publish(payload(data), topic_key(topic), subtopic_key(subtopic))

    def pubjson(self, value: object, topic: Name, subtopic: Name | None = None) -> bool:
        """Send `value` as JSON, str included. See `publish`."""
        return self.publish(json_bytes(value), topic, subtopic)

    def request(self, etid: int, data: Payload, timeout_s: float = 10.0) -> Message:
        """Send `data` to the client `etid` (1: the server) and wait for its answer, sent with `reply`.

        Returns:
            The answer.

        Raises:
            NoAnswer: no answer within `timeout_s` seconds, or the connection was lost.
            ArgumentError, ClosedError: as `publish`.
        """

        def send(number: int) -> None:
            if not self.publish(data, etid, number):
                raise NoAnswer(f"the request to {etid} was not sent: the send queue is full")

        if self._decision_waits_for_caller:
            raise NoAnswer("the connection is lost, and onclose runs after this callback")
        with self._waiting_inside():
            answer, number = self._answers.ask(etid, send, timeout_s)
        return Message(answer, etid, self._session.etid, number, etid, self.publish)

    @property
    def backlog_bytes(self) -> int:
        """The size of all that waits to be sent."""
        return self._session.waiting_bytes

    @property
    def dropped(self) -> int:
        """The number of messages that were not sent: queue full, topic denied, or connection lost before."""
        return self._session.dropped

    # ---- subscriptions

    def subscribe(
        self,
        topic: Name,
        subtopic: Name | Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
        **more: object,
    ) -> None:
        """Send Subscribe, also for a topic that is subscribed already.

        Args:
            topic: a name, or `"self"` for messages to the client's own ETID.
            subtopic: handle only messages with this sub-topic. A topic may have a handler for each; the last one wins.
            settings: a mapping with `onmsg(data, ptid, tid, subtid)` (default: the client's onmsg), `onack(accepted,
                topic, tid)` (with a subtopic also `subtopic, stid`), `datatype`: None for bytes, `"text"`, `"json"`.
                Messages that can't be decoded go to the client's onmsg as bytes.
            more: the same as keyword arguments.
        """
        if isinstance(subtopic, Mapping):
            subtopic, settings = None, subtopic
        self._check_alive()
        chosen = make(SubscriptionOptions, {**(settings or {}), **more})
        key, subkey = topic_key(topic), subtopic_key(subtopic)

        def done(tid: int, stid: int) -> None:
            if chosen.onack is not None:
                numbered = (topic, tid) if subtopic is None else (topic, tid, subtopic, stid)
                self._callbacks.post(chosen.onack, bool(tid), *numbered)

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

    def observe(self, topic: Name, onchange: Callable[..., object]) -> None:
        """Observe the subscriber count of a topic, or the end of an ETID.

        Args:
            onchange: `f(subscribers, topic)`; for an ETID called once, with 0, when its client disconnects.
        """
        self._check_alive()
        self._session.observe(topic_key(topic), lambda count: self._callbacks.post(onchange, count, topic))

    def unobserve(self, topic: Name) -> None:
        """Stop observing."""
        self._session.unobserve(topic_key(topic))
