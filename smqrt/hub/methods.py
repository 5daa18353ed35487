"""The methods of a hub by chapter of its manual: names and numbers, messages (help: hub-api).

`Smq` inherits them. It makes the attributes that they use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from smqrt.broker.server_client import Handler
from smqrt.broker.topics import Topic as HubTopic
from smqrt.errors import NoAnswer
from smqrt.hub.callbacks import CallbackValue, Guard, OnMessage, calling_line, renamed
from smqrt.hub.conversions import (
    Name,
    Text,
    as_destination,
    as_function,
    as_number,
    as_text,
    name_or_none,
    text_names,
    text_of,
)
from smqrt.settings.limit_register import LineLimit
from smqrt.smq.gevent_broker import GeventBroker
from smqrt.smq.messages import Message, Payload, Requests, json_value, payload

log = logging.getLogger("smqrt.hub")

Topic = str | bytes | int
SUBSCRIBE_OPTIONS = ("onmsg", "subtopic", "json", "once")
OnMessageObject = TypeVar("OnMessageObject", bound=Callable[[Message], object])


class NameMethods:
    """Names and numbers of topics and sub-topics."""

    _broker: GeventBroker

    def create(self, topic: Text, tid: int = 0) -> int:
        """Return the id of a topic, which is created when missing; a new topic gets the id `tid` when it is free."""
        return self._broker.create(as_text("topic", topic), as_number("tid", tid))

    def createsub(self, subtopic: Text | None, stid: int = 0) -> int:
        """Return the id of a sub-topic, which is created when missing; 0 for None."""
        return self._broker.createsub(
            None if subtopic is None else as_text("subtopic", subtopic), as_number("stid", stid)
        )

    def gettid(self) -> int:
        """Return the ETID of the server."""
        return self._broker.gettid()

    def tid2topic(self, tid: int) -> Name | None:
        """Return the name of a topic id, or None."""
        return name_or_none(self._broker.tid2topic(as_number("tid", tid)))

    @renamed(name="topic")
    def topic2tid(self, topic: Text) -> int | None:
        """Return the id of a topic, or None."""
        return self._broker.topic2tid(as_text("topic", topic))

    @renamed(stid="tid")
    def tid2subtopic(self, tid: int) -> Name | None:
        """Return the name of a sub-topic id, or None."""
        return name_or_none(self._broker.tid2subtopic(as_number("tid", tid)))

    @renamed(name="subtopic")
    def subtopic2tid(self, subtopic: Text) -> int | None:
        """Return the id of a sub-topic, or None."""
        return self._broker.subtopic2tid(as_text("subtopic", subtopic))

    def topics(self) -> Iterator[tuple[int, Name]]:
        """Iterate over `(tid, name)` of all named topics."""
        return text_names(self._broker.topics())

    def subtopics(self) -> Iterator[tuple[int, Name]]:
        """Iterate over `(stid, name)` of all sub-topics."""
        return text_names(self._broker.subtopics())


class _DisconnectObserver:
    """Ends requests to a client when it disconnects."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def changed(self, topic: HubTopic, subscribers: int) -> None:
        """See `Observer`."""
        self._requests.give_up(f"no answer from {topic.id}: the client has disconnected", topic.id)


class MessageMethods(NameMethods):
    """Messages: publish, subscribe, request, observe."""

    _guard: Guard
    _requests: Requests

    def publish(self, data: Payload, topic: Topic, subtopic: Topic | None = None, ptid: int | None = None) -> int:
        """Publish to a topic name, an id, an ETID or `"self"`, and return the length of the server's publish queue.

        Raises:
            ArgumentError: data over 0xFFF0 bytes, or an argument of the wrong type.
        """
        # What needs no conversion costs no call: this is on the path of every message.
        return self._broker.publish(
            data if data.__class__ is bytes else payload(data),
            topic if topic.__class__ is int else as_destination("topic", topic),
            None if subtopic is None else as_destination("subtopic", subtopic),
            None if ptid is None else as_number("ptid", ptid),
        )

    def publish_threadsafe(
        self, data: Payload, topic: Topic, subtopic: Topic | None = None, ptid: int | None = None
    ) -> bool:
        """Publish from any thread. No other method of a hub may be called from other threads.

        The loop publishes in the order of the calls, at the latest in `close`.

        Returns:
            False when the message was rejected because 10,000 messages, or 16 MiB, are waiting for the loop.

        Raises:
            ArgumentError: as `publish`; errors found later by the loop are logged.
            ClosedError: the hub is closed.
        """
        return self._broker.publish_threadsafe(
            payload(data),
            as_destination("topic", topic),
            None if subtopic is None else as_destination("subtopic", subtopic),
            None if ptid is None else as_number("ptid", ptid),
        )

    @renamed(subtid="subtopic")
    def pubon(self, data: Payload, totid: int, fromtid: int, subtopic: int = 0) -> bool:
        """Send to one client on behalf of another (spec: smq §2.4).

        Args:
            data: the message.
            totid: ETID of the receiver.
            fromtid: ETID of the publisher, as the receiver sees it.
            subtopic: the id of a sub-topic, see `createsub`; 0 for none.

        Returns:
            False unless both are connected clients or the server.

        Raises:
            ArgumentError: data over 0xFFF0 bytes, or an argument of the wrong type.
            ClosedError: the hub is closed.
        """
        return self._broker.pubon(
            payload(data), as_number("totid", totid), as_number("fromtid", fromtid), as_number("subtopic", subtopic)
        )

    def subscribe(
        self,
        topic: Topic,
        onmsg: OnMessage | Mapping[str, Any] | None = None,
        subtopic: Topic | None = None,
        json: bool = False,
        once: bool = False,
    ) -> int:
        """Subscribe to a topic and return its id (spec: smq §2.4).

        Args:
            topic: name, id, or `"self"` for the ETID of the server.
            onmsg: `f(data, ptid, tid, subtid)`; by default the global handler gets the messages. Or a dict of this and
                the following arguments, like Lua's option table: `{"onmsg": f, "json": True}`. Other arguments replace
                its entries. Unknown entries are logged.
            subtopic: only messages with this sub-topic; by default those without a handler for their sub-topic.
            json: decode the payload. Invalid JSON goes to the global handler, as bytes.
            once: of several workers or nodes that subscribe with `once`, one handles each message.

        Raises:
            ArgumentError: an argument of the wrong type, or an unknown topic id.
            ClosedError: the hub is closed.
        """
        if isinstance(onmsg, Mapping):
            options = onmsg
            for name in [name for name in options if name not in SUBSCRIBE_OPTIONS]:
                log.warning("%s: smq.subscribe has no option %r; it is ignored", calling_line(), name)
            onmsg = options.get("onmsg")
            subtopic = options.get("subtopic") if subtopic is None else subtopic
            json, once = json or bool(options.get("json")), once or bool(options.get("once"))
        sub = None if subtopic is None else as_destination("subtopic", subtopic)
        handler = None if onmsg is None else self._handler(as_function("onmsg", onmsg), json)
        return self._broker.subscribe(as_destination("topic", topic), handler, sub, bool(once))

    def _handler(self, function: Callable[..., object], json: bool = False) -> Handler:
        json_errors = LineLimit()  # clients can send invalid JSON at any rate

        def handle(data: bytes, ptid: int, tid: int, stid: int) -> object:
            value: object = data
            if json:
                try:
                    value = json_value(data)
                except (ValueError, RecursionError):  # RecursionError: nested too deeply
                    json_errors.warn(f"a message to {tid} is not JSON; it is delivered to the global onmsg")
                    self._broker.server.deliver_default(data, ptid, tid, stid)
                    return None
            return self._guard.call("onmsg", function, value, ptid, tid, stid)

        return handle

    def on(
        self, topic: Topic, subtopic: Topic | None = None, once: bool = False
    ) -> Callable[[OnMessageObject], OnMessageObject]:
        """Decorate a function that is called with each message to a topic, as a `Message`; see `subscribe`.

            @smq.on("lamp")
            def switched(message):
                print(message.etid, message.json)
                message.reply({"done": True})

        Args:
            topic: name, id, or `"self"` for the ETID of the server.
            subtopic: only messages with this sub-topic.
            once: see `subscribe`.
        """

        def register(function: OnMessageObject) -> OnMessageObject:
            def onmsg(data: bytes, ptid: int, tid: int, subtid: int) -> object:
                return function(Message(data, ptid, tid, subtid, topic, self._reply))

            as_function("function", function)
            self.subscribe(topic, onmsg, subtopic, once=once)
            return function

        return register

    def _reply(self, data: Payload, etid: int, subtid: int) -> None:
        self.publish(data, etid, subtid or None)

    def request(self, etid: int, data: Payload, timeout_s: float = 10.0) -> Message:
        """Send a message to a client and return its answer. Blocks.

        The answer is a message to the ETID of the server with the same sub-topic id, as sent by `Message.reply`, or in
        Lua by `smq:publish(answer, ptid, subtid)`.

        Args:
            etid: ETID of the client.
            timeout_s: maximum time to wait.

        Raises:
            NoAnswer: no answer in time, or the client is not connected.
            ArgumentError: as `publish`.
        """
        body = payload(data)
        topic = self._broker.topic_table.get(as_number("etid", etid))
        if topic is None or topic.name is not None:  # the topic of an ETID has no name
            raise NoAnswer(f"no answer from {etid}: there is no such client")
        disconnect = _DisconnectObserver(self._requests)
        topic.observe(disconnect)
        try:
            answer, number = self._requests.ask(etid, lambda subtid: self.publish(body, etid, subtid), timeout_s)
        finally:
            topic.unobserve(disconnect)
        return Message(answer, etid, self.gettid(), number, etid, self._reply)

    def unsubscribe(self, topic: Topic) -> None:
        """Unsubscribe from a topic and remove its handlers. Do nothing for an unknown topic."""
        self._broker.unsubscribe(as_destination("topic", topic))

    @renamed(function="onmsg")
    def onmsg(self, onmsg: OnMessage | None) -> None:
        """Set the global message handler `f(data, ptid, tid, subtid)`; None removes it."""
        self._broker.onmsg(None if onmsg is None else self._handler(as_function("onmsg", onmsg)))

    @renamed(function="onchange")
    def observe(self, topic: Topic, onchange: Callable[[int, CallbackValue], object]) -> bool | None:
        """Call `onchange(subscribers, topic)` when the number of subscribers of a topic changes (spec: smq §2.4).

        For an ETID it is called once, with 0, when the client disconnects.

        Returns:
            None for the ETID of the server and for unknown ids, else True.
        """
        as_function("onchange", onchange)

        def changed(count: int, name: bytes | int) -> object:
            return self._guard.call("observe", onchange, count, name if isinstance(name, int) else text_of(name))

        return self._broker.observe(as_destination("topic", topic), changed)

    def unobserve(self, topic: Topic) -> None:
        """Stop observing a topic."""
        self._broker.unobserve(as_destination("topic", topic))

    def queuesize(self) -> tuple[int, int]:
        """Return the numbers of free and used places of the publish queue."""
        return self._broker.queuesize()
