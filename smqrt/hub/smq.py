"""The hub of the Python API: `create`, `Smq` and its methods."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from smqrt.broker.mqtt.application import MqttAttributes, MqttPayload, PublishOptions, attributes_of
from smqrt.broker.server_client import Handler
from smqrt.broker.topics import Topic as HubTopic
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.errors import ArgumentError, NoAnswer
from smqrt.hub.callbacks import (
    Authenticate,
    CallbackHooks,
    CallbackValue,
    Guard,
    Log,
    MqttAuth,
    OnClose,
    OnCloseWithReason,
    OnConnect,
    OnMessage,
    OnMessageWithAttributes,
    OnMqttGap,
    OnMqttGapWithNode,
    OnNode,
    OnPublish,
    OnPublishWithAttributes,
    PermitSubtop,
    PermitTop,
    calling_line,
    renamed,
    suggesting,
    takes_attributes,
)
from smqrt.hub.peer import (
    Name,
    Peer,
    PeerSocket,
    Text,
    as_destination,
    as_function,
    as_number,
    as_text,
    name_or_none,
    peer_of,
    text_names,
    text_of,
)
from smqrt.journal.writer import HubJournal, JournalWriter
from smqrt.loop.scheduling import Turn
from smqrt.process import current_process
from smqrt.settings.limits import LineLimit
from smqrt.settings.option_types import function as function_rule
from smqrt.settings.option_types import make, nearest
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.handshake import NOT_SMQ, is_smq
from smqrt.smq.messages import Message, Payload, json_value, payload
from smqrt.smq.requests import Requests

# ---- Methods of a hub (help: hub-api), in base classes of `Smq`, which sets the attributes that they use

log = logging.getLogger("smqrt.hub")

Topic = str | bytes | int
SUBSCRIBE_OPTIONS = ("onmsg", "subtopic", "json", "once", "filter")
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


def _filter_of(filter: object) -> str:
    return as_text("filter", filter).decode("utf-8", "surrogateescape")


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

    def publish(
        self,
        data: Payload,
        topic: Topic,
        subtopic: Topic | None = None,
        ptid: int | None = None,
        qos: int | None = None,
        retain: bool = False,
        expiry: float | None = None,
        properties: Mapping[str, object] | None = None,
    ) -> int:
        """Publish to a topic name, an id, an ETID or `"self"`, and return the length of the server's publish queue.

        The last four arguments are for MQTT clients (help: mqtt-hub).

        Args:
            data, topic, subtopic, ptid: the message, its topic and sub-topic, and a publisher other than the server.
            qos: 0, 1 or 2; None for the setting `mqtt.smq_qos`.
            retain: whether later subscribers get the message too.
            expiry: seconds until the message expires; None for never.
            properties: properties of MQTT 5 by their names in lower case, such as "contenttype"; other names are user
                properties.

        Raises:
            ArgumentError: data over 0xFFF0 bytes, an argument of the wrong type, or arguments for MQTT clients at a hub
                that accepts none.
        """
        if qos is not None or retain or expiry is not None or properties is not None:
            return self._broker.publish_mqtt(
                payload(data),
                as_destination("topic", topic),
                PublishOptions(qos, bool(retain), expiry, properties),
                None if subtopic is None else as_destination("subtopic", subtopic),
                None if ptid is None else as_number("ptid", ptid),
            )
        # Values that need no conversion are passed on without a call, because this runs for every message. The
        # arguments for MQTT are not keyword-only, because Python looks up the defaults of such in a dict.
        return self._broker.publish(
            data if data.__class__ is bytes else payload(data),
            topic if topic.__class__ is int else as_destination("topic", topic),
            None if subtopic is None else as_destination("subtopic", subtopic),
            None if ptid is None else as_number("ptid", ptid),
        )

    def retained(self, filter: str = "") -> Iterator[tuple[Name, bytes, MqttAttributes]]:
        """Iterate over topic, payload and attributes of the retained messages. Yields to the event loop.

        Args:
            filter: a topic filter, such as "house/+/temp"; an empty one matches all messages.

        Raises:
            ArgumentError: this hub accepts no MQTT clients, or `filter` is not a filter.
            ClosedError: the hub is closed.
        """
        kept, turn = self._broker.retained, Turn()
        for name in kept.names(_filter_of(filter)):
            turn.yield_if_due()
            message = kept.by_name.get(name) if name is not None else None
            if message is not None:  # another greenlet may have deleted it
                yield text_of(message.name), message.payload, attributes_of(message, self._broker.clock())

    def deleteretained(self, filter: str) -> int:
        """Delete the retained messages that match a filter, and return their number. Yields to the event loop.

        Raises as `retained`.
        """
        count, turn = 0, Turn()
        for number in self._broker.retained.delete(_filter_of(filter)):
            count += number
            turn.yield_if_due()
        return count

    def publish_threadsafe(
        self,
        data: Payload,
        topic: Topic,
        subtopic: Topic | None = None,
        ptid: int | None = None,
        qos: int | None = None,
        retain: bool = False,
        expiry: float | None = None,
        properties: Mapping[str, object] | None = None,
    ) -> bool:
        """Publish from any thread. No other method of a hub may be called from other threads.

        The loop publishes in the order of the calls, at the latest in `close`.

        Args:
            data, topic, subtopic, ptid, qos, retain, expiry, properties: see `publish`. The expiry begins with the
                call.

        Returns:
            False when the message was rejected because 10,000 messages, or 16 MiB, are waiting for the loop.

        Raises:
            ArgumentError: as `publish`; errors found later by the loop are logged.
            ClosedError: the hub is closed.
        """
        data, topic = payload(data), as_destination("topic", topic)
        subtopic = None if subtopic is None else as_destination("subtopic", subtopic)
        ptid = None if ptid is None else as_number("ptid", ptid)
        if qos is not None or retain or expiry is not None or properties is not None:
            options = PublishOptions(qos, bool(retain), expiry, properties)
            return self._broker.publish_mqtt_threadsafe(data, topic, options, subtopic, ptid)
        return self._broker.publish_threadsafe(data, topic, subtopic, ptid)

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

    @suggesting
    def subscribe(
        self,
        topic: Topic | None = None,
        onmsg: OnMessage | OnMessageWithAttributes | Mapping[str, Any] | None = None,
        subtopic: Topic | None = None,
        json: bool = False,
        once: bool = False,
        filter: str | None = None,
    ) -> int:
        """Subscribe to a topic and return its id, or to all topics that a filter matches and return 0 (spec: smq §2.4).

        Args:
            topic: name, id, or `"self"` for the ETID of the server; None with `filter`.
            onmsg: `f(data, ptid, tid, subtid)`; by default the global handler gets the messages. A function with five
                arguments also gets `MqttAttributes`, or None for a message of SMQ. Or a dict of this and the following
                arguments, like Lua's option table: `{"onmsg": f, "json": True}`. Other arguments replace its entries.
                Unknown entries are logged.
            subtopic: only messages with this sub-topic; by default those without a handler for their sub-topic.
            json: decode the payload. Invalid JSON goes to the global handler, as bytes.
            once: of several workers or nodes that subscribe with `once`, one handles each message.
            filter: `"house/+/temp"`: `+` stands for one level of the name, `#` for the rest. A subscription
                to a topic by name takes precedence.

        Raises:
            ArgumentError: an argument of the wrong type, or an unknown topic id.
            ClosedError: the hub is closed.
        """
        if isinstance(onmsg, Mapping):
            options = onmsg
            for name in [name for name in options if name not in SUBSCRIBE_OPTIONS]:
                near = nearest(str(name), SUBSCRIBE_OPTIONS)
                hint = f"; did you mean {near!r}?" if near else ""
                log.warning("%s: smq.subscribe has no option %r; it is ignored%s", calling_line(), name, hint)
            onmsg = options.get("onmsg")
            subtopic = options.get("subtopic") if subtopic is None else subtopic
            json, once = json or bool(options.get("json")), once or bool(options.get("once"))
            filter = options.get("filter") if filter is None else filter
        sub = None if subtopic is None else as_destination("subtopic", subtopic)
        handler = None if onmsg is None else self._handler(as_function("onmsg", onmsg), json)
        if filter is not None:
            if topic is not None:
                raise ArgumentError("topic: subscribe to a topic or to a filter, not to both")
            self._broker.subscribe_filter(_filter_of(filter), handler, sub, bool(once))
            return 0
        return self._broker.subscribe(as_destination("topic", topic), handler, sub, bool(once))

    def _handler(self, function: Callable[..., object], json: bool = False) -> Handler:
        json_errors = LineLimit()  # clients can send invalid JSON at any rate
        takes_fifth, clock = takes_attributes(function, 4), self._broker.clock

        def handle(data: bytes, ptid: int, tid: int, stid: int) -> object:
            value: object = data
            if data.__class__ is not bytes:  # `MqttPayload`; the global handler below needs it
                value = bytes(data)
            if json:
                try:
                    value = json_value(data)
                except (ValueError, RecursionError):  # RecursionError: nested too deeply
                    json_errors.warn(f"a message to {tid} is not JSON; it is delivered to the global onmsg")
                    self._broker.server.deliver_default(data, ptid, tid, stid)
                    return None
            if takes_fifth:
                attributes = data.attributes(clock()) if isinstance(data, MqttPayload) else None
                return self._guard.call("onmsg", function, value, ptid, tid, stid, attributes)
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
            def onmsg(data: bytes, ptid: int, tid: int, subtid: int, mqtt: MqttAttributes | None) -> object:
                return function(Message(data, ptid, tid, subtid, topic, self._reply, mqtt))

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
    def onmsg(self, onmsg: OnMessage | OnMessageWithAttributes | None) -> None:
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


JournalOption = bool | str | os.PathLike[str] | Mapping[str, object] | None
"""True, a folder or settings (help: journal)."""


def isSMQ(request: object) -> bool:
    """Return whether `request` (of smqrt, or a WSGI environ) is for SMQ or a WebSocket (spec: smq §2.1)."""
    return is_smq(request)


@suggesting
def create(
    options: Mapping[str, Any] | None = None,
    /,
    *,
    authenticate: Authenticate | None = None,
    mqttauth: MqttAuth | None = None,
    permittop: PermitTop | None = None,
    permitfilter: PermitSubtop | None = None,
    permitsubtop: PermitSubtop | None = None,
    onconnect: OnConnect | None = None,
    onclose: OnClose | OnCloseWithReason | None = None,
    onpublish: OnPublish | OnPublishWithAttributes | None = None,
    ondrop: OnPublish | None = None,
    onmsg: OnMessage | OnMessageWithAttributes | None = None,
    onnode: OnNode | None = None,
    onmqttgap: OnMqttGap | OnMqttGapWithNode | None = None,
    log: Log | None = None,
    keepidle: int | None = None,
    keepintv: int | None = None,
    readtmo: int | None = None,
    queuesize: int | None = None,
    budget: int | None = None,
    maxnames: int | None = None,
    clientnames: int | None = None,
    auth: bool | None = None,
    name: str | None = None,
    keep: bool | None = None,
    rndtid: bool | None = None,
    persist: str | bytes | os.PathLike[str] | None = None,
    slow: str | None = None,
    lastvalue: str | Iterable[str] | None = None,
    origins: str | Iterable[str] | None = None,
    cluster: str | None = None,
    observe: str | None = None,
    mqtt: bool | None = None,
    journal: JournalOption = None,
) -> Smq:
    """Create a broker (spec: smq §2.2).

    Args:
        options: a dict of the options below, like Lua's option table. A keyword argument that is not None replaces the
            entry of the same name.
        authenticate: `f(credentials: bytes, info: Info) -> code | (code, reason)`; 0 accepts, 1 to 6 reject, None means
            6. It may raise `Refused(code, reason)` instead.
        mqttauth: `f(method: str, data: bytes, peer)`, for MQTT 5 clients with an authentication method (help:
            mqtt-hub).
        permittop: `f(topic, issub: bool, peer) -> bool`.
        permitfilter: `f(filter, peer) -> bool`, for filters with wildcards of MQTT clients.
        permitsubtop: `f(subtopic, peer) -> bool`.
        onconnect: `f(etid, info, peer)`; `info` is the object that `authenticate` got.
        onclose: `f(etid, sock, peer, err[, reason])`; `err` is a word, `"reconnect"` after a take-over, or 0; `reason`
            is the close reason.
        onpublish: `f(data, ptid, tid, subtid, peer) -> bool`, before each message is routed. A sixth argument gets the
            `MqttAttributes` of a message of an MQTT client, and None for others.
        ondrop: `f(data, ptid, tid, subtid, peer)` for messages without a receiver.
        onmsg: `f(data, ptid, tid, subtid)`, the first global message handler.
        onnode: `f(node, event, why)`; another node of the cluster has "joined", is "lost", is "back", or has "left".
        onmqttgap: `f(client_id, lost, peer[, node])`; so many messages of an MQTT session were lost because too many
            waited; `peer` is None while the client is not connected. Or messages that were kept for the node with this
            number; `client_id` is None then.
        log: `f(sock, text)`; `sock` may be None.
        keepidle, keepintv, readtmo, queuesize, budget, maxnames, clientnames, auth, name, keep, rndtid: see
            `smqrt.smq.gevent_broker.HubOptions` (help: hub-api).
        slow, lastvalue, persist, origins: see `HubOptions`.
        cluster: name of the cluster that the hub joins (help: cluster).
        observe: "node" or "cluster": whose subscribers `observe` counts.
        mqtt: whether MQTT clients are accepted too (help: mqtt-hub).
        journal: True, a folder or a dict of settings: published messages are recorded (help: journal).

    Raises:
        ArgumentError: a callback is not callable, a number is out of range, the `persist` file can't be used, or
            `options` is not a dict.
        JournalError: the journal can't be used, or another process writes to it.
        TypeError: unknown option.
    """
    callbacks = {
        "authenticate": authenticate, "mqttauth": mqttauth, "permittop": permittop, "permitfilter": permitfilter,
        "permitsubtop": permitsubtop, "onconnect": onconnect, "onclose": onclose, "onpublish": onpublish,
        "ondrop": ondrop, "onmsg": onmsg, "onnode": onnode, "onmqttgap": onmqttgap, "log": log,
    }  # fmt: skip
    settings = {
        "keepidle": keepidle, "keepintv": keepintv, "readtmo": readtmo, "queuesize": queuesize, "budget": budget,
        "maxnames": maxnames, "clientnames": clientnames, "auth": auth, "name": name, "keep": keep, "rndtid": rndtid,
        "persist": persist, "slow": slow, "lastvalue": lastvalue, "origins": origins, "cluster": cluster,
        "observe": observe, "mqtt": mqtt,
    }  # fmt: skip
    # None means "not given": only given options override those of the dict and the defaults of `HubOptions`.
    if options is not None:
        if not isinstance(options, Mapping):
            raise ArgumentError(f"options: a dict is needed, not {type(options).__name__}")
        keywords = {**callbacks, **settings, "journal": journal}
        return create(**{**options, **{name: value for name, value in keywords.items() if value is not None}})
    rule = function_rule()
    checked = {name: rule.check(name, value) for name, value in callbacks.items() if value is not None}
    given = {name: value for name, value in settings.items() if value is not None}
    return Smq(checked, make(HubOptions, given), journal)


class Smq(MessageMethods):
    """A hub; see `create`. Its methods have the names and meanings of the Lua object.

    This class has the methods of connections and of the hub as a whole; the base classes have the others.
    """

    def __init__(
        self, callbacks: Mapping[str, Callable[..., Any]], options: HubOptions, journal: JournalOption = None
    ) -> None:
        made_at = calling_line()
        self._guard = Guard(f"the hub made at {made_at}")
        self._requests = Requests()
        self._broker = GeventBroker(CallbackHooks(callbacks, self._guard).hooks(), options, made_at)
        try:
            cluster.join(self._broker, options)
            self._journal = HubJournal(self._broker, journal)
        except BaseException:
            self._broker.abandon()  # releases the `persist` file for the next hub
            raise
        self._broker.server.answers = self._requests.take  # before the handlers of the application
        if "onmsg" in callbacks:
            self.onmsg(callbacks["onmsg"])
        current_process.close_with_app(self)

    @property
    def journal(self) -> JournalWriter | None:
        """The writer of the journal; None without a journal, and while another process writes it."""
        return self._journal.writer

    @property
    def broker(self) -> GeventBroker:
        """The broker of the hub."""
        return self._broker

    @renamed(request="cmd")
    def connect(self, cmd: object, arg: object = None) -> bool:
        """Turn an HTTP request into an SMQ connection (spec: smq §2.3).

        Args:
            cmd: the request of a directory function, or a WSGI environ (help: wsgi).
            arg: available as `info["arg"]` in `authenticate` and `onconnect`.

        Blocks until the handshake has ended (under gevent-websocket, until the connection is closed). A request that is
        not SMQ gets 404.

        Returns:
            False when the WSGI server can't hand connections over, and nothing was sent; see `wsgi` and `smqrt.wsgi`.
        """
        return self._broker.connect(cmd, arg)

    def wsgi(self, environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        """Run `connect` as a WSGI application, mounted or returned by a view.

        A request that is not SMQ gets 404. An SMQ client gets 501 when the WSGI server can't hand connections over.
        """
        status, text = "200 OK", ""  # ignored: `connect` has sent the response
        if not self._broker.connect(environ):
            status, text = "404 Not Found", NOT_SMQ
            if is_smq(environ):
                status, text = "501 Not Implemented", "This WSGI server needs the handler of smqrt.wsgi to serve SMQ."
        body = f"{text}\n".encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]

    def peers(self, phantoms: bool = False) -> Iterator[tuple[PeerSocket, Peer]]:
        """Iterate over `(sock, peer)` of all clients and of the server's own client.

        Args:
            phantoms: also include the clients of other nodes of the cluster; the methods of their sockets return None.
        """
        for session in self._broker.peers(phantoms):
            peer = peer_of(session)
            yield peer.sock, peer

    def sock2peer(self, sock: object) -> Peer | None:
        """Return the peer with this socket, or None."""
        peer = self.etid2peer(sock.etid) if isinstance(sock, PeerSocket) else None
        return peer if peer and peer.sock is sock else None

    def etid2peer(self, etid: int) -> Peer | None:
        """Return the peer with this ETID, or None."""
        session = self._broker.etid2peer(as_number("etid", etid))
        return peer_of(session) if session else None

    def drops(self) -> dict[str, int]:
        """Return the numbers of undelivered copies of messages, by reason (help: data-path)."""
        return self._broker.drops()

    def refused(self) -> dict[str, int]:
        """Return how often each limit was reached (help: limits)."""
        return self._broker.refused()

    @renamed(idle="time")
    def setkeepalive(self, time: int, intv: int = 0) -> None:
        """Set TCP keep-alive of new connections, in seconds; the interval is `time` by default."""
        self._broker.setkeepalive(as_number("time", time), as_number("intv", intv))

    def shutdown(self, msg: Text | None = None, etid: int | None = None, everywhere: bool = True) -> None:
        """Close clients, with a Disconnect packet when `msg` is given.

        Args:
            msg: text of the Disconnect packet.
            etid: close this client only; by default all clients, of all workers and nodes of the cluster.
            everywhere: False closes the clients of this hub only, as while the application is being unloaded.
        """
        self._broker.shutdown(
            None if msg is None else as_text("msg", msg),
            None if etid is None else as_number("etid", etid),
            bool(everywhere),
        )

    def close(self) -> None:
        """Close the hub. Blocks until the journal is written.

        Clients are closed without a Disconnect packet, so that they reconnect. `publish`, `subscribe` and the like
        raise ClosedError afterwards. A second call does nothing. A hub is closed when its application ends.
        """
        self._broker.close()
        # Greenlets that wait for answers would wait until their timeout.
        self._requests.give_up("no answer: the hub was closed")
        self._journal.close()

    def _end_with_app(self) -> None:
        """Close the hub at the end of its application; with `keep` its clients stay connected for a reload."""
        self._broker.keep_clients()
        self.close()

    def __enter__(self) -> Smq:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
