"""`MqttClient`, the MQTT client for applications (spec: smq §8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import gevent

from smqrt.clients.mqtt.addresses import connector
from smqrt.clients.mqtt.authentication import Authentication, OnAuth
from smqrt.clients.mqtt.connect import (
    WILL,
    MqttOptions,
    OnStatus,
    Will,
    check_qos,
    to_bytes,
)
from smqrt.clients.mqtt.connection import HEADER_BYTES
from smqrt.clients.mqtt.delivery import Delivery
from smqrt.clients.mqtt.messages import Message, MessageCallback, MessageQueue, OnMessage
from smqrt.clients.mqtt.reconnecting import ReconnectingMqttClient
from smqrt.clients.mqtt.store import ClientStore, StoredSession
from smqrt.clients.mqtt.subscriptions import (
    FilterOptions,
    OnSuback,
    SubscribeRequest,
    check_filters,
    option_bits,
)
from smqrt.errors import ArgumentError, ClosedError, NoAnswer
from smqrt.loop.greenlets import Callbacks
from smqrt.settings.option_types import make
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import DeferringClientEndpoint, MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import PendingAcknowledgement
from smqrt.wire.mqtt.fields import (
    MAX_PROPERTIES,
    OnPub,
    PacketType,
    Props,
    Reason,
    check_topic,
    encode_properties,
    pack_properties,
)
from smqrt.wire.mqtt.packets import PublishPacket

log = logging.getLogger("smqrt.mqtt")

_PUBLISH = 0x30  # the packet type in the first byte


def _no_acknowledgement(pending: PendingAcknowledgement) -> None:
    """Do nothing: the client acknowledges messages by itself."""


class MqttClient(ReconnectingMqttClient):
    """A client of an MQTT broker that connects in the background and reconnects after a lost connection.

    All methods may be called at any time. Without a connection, messages and subscriptions are queued in the order of
    the calls; the queue has a limit. One greenlet runs the callbacks, one after the other; they may block and call the
    client.

    `close()` and `with` deliver queued messages, or raise DeliveryError; `disconnect()` delivers them in the
    background. All three send DISCONNECT, so the broker publishes no will.

    Without the property `sessionexpiryinterval` every connection starts a new session. With it, only the first
    connection starts a session, and later ones resume it. QoS 1 and 2 messages in flight are sent again.

    Args:
        address: a name, `host:port`, `mqtt(s)://user:password@host:port`, `ws(s)://host:port/path`, a list of these
            that are tried in turn, a connected `Stream`, or a function that returns one for each connection (or raises
            `StreamError`).
        onstatus: see `OnStatus`; by default, connections are kept, and the client reconnects after a random delay of up
            to 1 second, which grows to 60 seconds (`reconnectdelay`, `reconnectmax`), unless another attempt can't
            succeed.
        onpub: see `OnPub`; receives the messages of subscriptions without a callback.
        onmessage: see `OnMessage`; in the place of `onpub`. Without both, an iteration over the client receives the
            messages.
        onauth: see `OnAuth`; with the option `authenticationmethod`.
        properties: of CONNECT, names in lower case: `receivemaximum`, `topicaliasmaximum`, `maximumpacketsize`,
            `sessionexpiryinterval`, ...; others are sent as user properties.
        options: see `smqrt.clients.mqtt.connect.MqttOptions`.
        callbacks: runs the callbacks; by default a greenlet of the client does.

    Raises:
        ArgumentError: an invalid address, option or property.
        StoreError: the option `store`: the file can't be opened, or another client uses it.

    Attributes:
        end: the `MqttCloseReason` of the last connection or failed attempt; None before the first one.
        left_out: number of received messages that were rejected because they have too many properties.
        onpub: the callback; an iteration sets it to None.
    """

    def __init__(
        self,
        address: str | Sequence[str] | Stream | Callable[[], Stream],
        onstatus: OnStatus | None = None,
        onpub: OnPub | None = None,
        properties: Props | None = None,
        callbacks: Callbacks | None = None,
        onmessage: OnMessage | None = None,
        onauth: OnAuth | None = None,
        **options: object,
    ) -> None:
        opts = make(MqttOptions, options)
        connect = connector(address, opts)  # first: the address may contain credentials, which it adds to `opts`
        if (opts.authenticationmethod is None) != (onauth is None):
            raise ArgumentError("authenticationmethod and onauth need each other")
        given = dict(properties or {})
        store, session = None, None
        if opts.store is not None:
            if opts.level == 5 and not given.get("sessionexpiryinterval"):
                raise ArgumentError("store needs the property sessionexpiryinterval: the broker must keep the session")
            store = ClientStore(opts.store)
            opts.clientidentifier, session = store.load(opts.clientidentifier, "clientidentifier" in options)
        self._stored = session
        endpoint_class = DeferringClientEndpoint if opts.manualack else MqttClientEndpoint
        endpoint = endpoint_class(
            self, opts.level, opts.clientidentifier, opts.inflight, opts.topicalias, opts.maxpacketsize, session
        )
        self._acknowledge = (
            endpoint.acknowledge if isinstance(endpoint, DeferringClientEndpoint) else _no_acknowledgement
        )
        self._messages = MessageQueue(drops_oldest=not opts.manualack)
        if opts.username is not None or opts.password is not None:
            endpoint.username = opts.username or ""
            endpoint.password = None if opts.password is None else to_bytes(opts.password)
        endpoint.will = None if opts.will is None else opts.will.message()
        self.onpub = onpub if onmessage is None else MessageCallback(onmessage)
        self.left_out = 0
        self._held: list[PublishPacket] = []  # with a store: received messages, before their commit
        authentication = None
        if opts.authenticationmethod is not None and onauth is not None:
            authentication = Authentication(opts.authenticationmethod, onauth, endpoint)
        callbacks = callbacks or Callbacks(log)
        try:
            super().__init__(connect, endpoint, opts, given, onstatus, callbacks, authentication, store)
        except BaseException:
            if store is not None:
                store.close()
            raise

    # ---- messages

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        properties: Props | None = None,
        *,
        wait: bool | float = False,
    ) -> Delivery:
        """Send a message, or queue it until there is a connection.

        Args:
            payload: str is sent as UTF-8.
            properties: see `MqttClient`; `contenttype`, `responsetopic`, `correlationdata`, ...
            wait: wait until the message is delivered, see `Delivery.wait`: at most this many seconds, with True the
                option `timeout`.

        Returns:
            The delivery; it fails at once ("toolarge") when the message is larger than `maxpacketsize`.

        Raises:
            ArgumentError: an invalid argument.
            ClosedError: the client was closed, or has ended.
            QueueFullError: no room in the queue; see the options `queuesize`, `queuebytes` and `queuefull`.
            StoreError: with the option `store` and QoS 1 or 2, the disk is full or defective. Without this error, the
                message is on disk.
            NoAnswer, DroppedError: with `wait`, see `Delivery.wait`.
        """
        body = pack_properties(properties, PacketType.PUBLISH) if properties and self._options.level == 5 else b""
        item = Delivery(check_topic(topic).encode(), to_bytes(payload), check_qos(qos), bool(retain), body)
        self._check_open("publish")
        if item.size_bytes + HEADER_BYTES > self._options.maxpacketsize:
            item.finish("toolarge")
        elif self._stored is not None and item.qos:
            self._publish_stored(item, self._stored)
        elif not self._queue.send_at_once(item):
            self._queue.make_room(item.size_bytes)
            self._check_open("publish")  # the client may have been closed while `make_room` waited
            self._queue.put(item)
        if wait is not False:
            item.wait(self._options.timeout if wait is True else wait)
        return item

    def _publish_stored(self, item: Delivery, stored: StoredSession) -> None:
        self._queue.make_room(item.size_bytes)
        self._check_open("publish")
        stored.keep(item)
        if self.closed:  # meanwhile; the message is sent when a client with this store is started
            item.finish("closed")
        elif not self._queue.send_at_once(item):
            self._queue.put(item)

    def _check_open(self, what: str) -> None:
        if self._closing.is_set():
            why = f": {self.end}" if self.end is not None and self._has_ended_by_itself else ""
            raise ClosedError(f"{what}: the client has ended{why}")

    @property
    def backlog(self) -> int:
        """The number of unsent and unacknowledged messages."""
        return len(self._queue) + len(self._endpoint.session.in_flight)

    # ---- subscriptions

    def subscribe(
        self,
        topic: str | list[FilterOptions],
        onpub: OnPub | None = None,
        onsuback: OnSuback | None = None,
        *,
        qos: int = 0,
        nolocal: bool = False,
        retainaspublished: bool = False,
        retainhandling: int = 0,
        properties: Props | None = None,
        onmessage: OnMessage | None = None,
    ) -> bool:
        """Subscribe.

        Args:
            topic: `+` matches one level, `#` at the end all further levels. A list subscribes to several filters in one
                packet; each item is a filter, `(filter, qos)`, or `(filter, {"qos": 1, "nolocal": True, ...})`. Items
                without options have those of the call.
            onpub: receives the messages of this subscription.
            onsuback: see `OnSuback`.
            nolocal: do not receive messages that this client publishes (MQTT 5).
            retainaspublished: keep the published retain flag (MQTT 5).
            retainhandling: when the broker sends retained messages. 0: always, 1: for new subscriptions, 2: never (MQTT
                5).
            onmessage: see `OnMessage`; in the place of `onpub`.

        Returns:
            Whether connected; otherwise the subscription is queued.

        Raises:
            As `publish`.
        """
        defaults: dict[str, object] = {
            "qos": qos,
            "nolocal": nolocal,
            "retainaspublished": retainaspublished,
            "retainhandling": retainhandling,
        }
        filters = check_filters(topic)
        topics = tuple(name for name, _ in filters)
        bits = tuple(self._bits_of(own, defaults) for _, own in filters)
        props = dict(properties or {})
        encode_properties(props, PacketType.SUBSCRIBE)
        self._make_room("subscribe")
        routes = self._subscriptions.routes
        for name in topics:
            routes.remove(name)
        if onmessage is not None:
            onpub = MessageCallback(onmessage)
        if onpub is not None:
            number = routes.add(topics[0], onpub) if len(topics) == 1 else routes.add_all(topics, onpub)
            if routes.uses_identifiers:
                props["subscriptionidentifier"] = number
        return self._request(SubscribeRequest(topics, bits, props, onsuback, isinstance(topic, list)))

    def _bits_of(self, own: object, defaults: dict[str, object]) -> int:
        options = own if isinstance(own, Mapping) else {} if own is None else {"qos": own}
        if unknown := options.keys() - defaults.keys():
            raise ArgumentError(f"a topic filter has the unknown option {min(unknown)!r}; it may have {[*defaults]}")
        return option_bits(self._options.level, **defaults | dict(options))

    def unsubscribe(
        self, topic: str | list[str], onunsuback: OnSuback | None = None, properties: Props | None = None
    ) -> bool:
        """End a subscription, or with a list several ones in one packet.

        Args:
            topic: the subscribed filter, or a list.
            onunsuback: `f(topic, reason, properties)` is called with the broker's response; both are lists for a list.

        Returns whether connected; raises as `publish`.
        """
        topics = tuple(name for name, _ in check_filters(topic))
        encode_properties(properties, PacketType.UNSUBSCRIBE)
        self._make_room("unsubscribe")
        props = dict(properties or {})
        return self._request(SubscribeRequest(topics, None, props, onunsuback, isinstance(topic, list)))

    def _make_room(self, what: str) -> None:
        self._check_open(what)
        self._queue.make_room(0)
        self._check_open(what)

    def _request(self, request: SubscribeRequest) -> bool:
        self._subscriptions.add(request)
        self._queue.put(request)
        return self.connected

    # ---- iteration

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages that have no callback, until the client has ended.

        Messages that arrive before the iteration wait in a queue of 1000 messages and 4 MiB; `unread` counts those that
        newer ones replaced. During the iteration, and with the option `manualack`, the client pauses reading instead.
        """
        self._messages.readers += 1
        try:
            while (message := self._messages.take()) is not None:
                yield message
        finally:
            self._messages.end_reading()

    @property
    def unread(self) -> int:
        """The number of messages without a callback and an iteration that newer ones replaced in their queue."""
        return self._messages.dropped

    def _pause(self) -> None:
        if self._store is not None:
            self._pass_on_held(self._store)
        self._messages.wait_for_room(self._stopping)

    def _pass_on_held(self, store: ClientStore) -> None:
        """Pass on the received messages when their packet identifiers are on disk."""
        held, self._held = self._held, []
        if any(message.qos == 2 for message in held):
            try:
                store.commit()
            except BaseException:
                for message in held:  # the broker sends them again: PUBREC is not sent before a commit
                    if message.qos == 2:
                        self._endpoint.session.unreleased.discard(message.packet_identifier)
                raise
        for message in held:
            self._pass_on(message)
        store.commit_soon()  # acknowledged messages

    def _abandon(self) -> int:
        self._messages.close()
        return super()._abandon()

    # ---- the connection

    def authenticate(self, timeout: float | None = None) -> bool:
        """Authenticate again on the open connection (MQTT 5), and wait for the broker.

        Args:
            timeout: seconds; None for the option `timeout`.

        Returns:
            True: the broker has accepted the authentication. False in a callback of this client, which can't wait.

        Raises:
            ArgumentError: the client has no `authenticationmethod`.
            ClosedError: the client is not connected, or the broker has rejected the authentication.
            NoAnswer: the time is over.
        """
        authentication, connection = self._authentication, self._connection
        if authentication is None:
            raise ArgumentError("authenticate needs a client with the options authenticationmethod and onauth")
        if connection is None or not self.connected:
            raise ClosedError("authenticate: the client is not connected")
        result, is_new = authentication.again()
        if is_new:
            self._callbacks.post(authentication.respond, connection, Reason.REAUTHENTICATE, None)
        if self._callbacks.is_current:
            return False
        timeout_s = self._options.timeout if timeout is None else timeout
        try:
            is_accepted = result.get(timeout=timeout_s)
        except gevent.Timeout:
            raise NoAnswer(f"authenticate: the broker did not answer within {timeout_s} s") from None
        if not is_accepted:
            raise ClosedError(f"authenticate: the connection ended: {self.end or 'the client was closed'}")
        return True

    def setwill(self, will: Will | Mapping[str, object] | None) -> None:
        """Set the will of later connections, None for no will.

        Raises:
            ArgumentError: an invalid will.
        """
        made = WILL.check("will", will)
        self._endpoint.will = None if made is None else made.message()

    def status(self) -> tuple[int, bool, bool]:
        """Return the number of queued messages and subscriptions, whether connected, and whether closed or ended."""
        return len(self._queue), self.connected, self.closing

    @property
    def dropped(self) -> int:
        """The number of messages that newer ones replaced in the queue (`queuefull="drop"`)."""
        return self._queue.dropped

    @property
    def refused(self) -> int:
        """The number of messages and subscriptions that the full queue rejected (QueueFullError)."""
        return self._queue.refused

    # ---- messages and acknowledgements of the broker: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_message(self, message: PublishPacket) -> int:
        """Pass a message to the callbacks of its subscriptions."""
        if self._store is not None:
            self._held.append(message)
            return 0
        return self._pass_on(message)

    def _pass_on(self, message: PublishPacket) -> int:
        topic, payload, flags, _, properties, _ = message
        handlers = self._subscriptions.routes.find(topic, properties)
        if not handlers:
            if self.onpub is None:
                self._messages.put(Message(message, self._acknowledge, None))
                return 0
            handlers = [self.onpub]
        for handler in handlers:
            if isinstance(handler, MessageCallback):
                self._callbacks.post(handler.function, Message(message, self._acknowledge, None))
            else:
                self._callbacks.post(handler, topic, payload, properties, _PUBLISH | flags)
        return 0

    def on_deferred(self, message: PublishPacket, pending: PendingAcknowledgement) -> None:
        """Pass a message that the application acknowledges; callbacks with four arguments acknowledge it at once."""
        made, is_passed_on = Message(message, self._acknowledge, pending), False
        handlers: list[OnPub | None] = [*self._subscriptions.routes.find(message.topic, message.properties)]
        for handler in handlers or [self.onpub]:
            if isinstance(handler, MessageCallback):
                self._callbacks.post(handler.function, made)
            elif handler is None:
                self._messages.put(made)
            else:
                self._callbacks.post(handler, message.topic, message.payload, message.properties, made.cpt)
                continue
            is_passed_on = True
        if not is_passed_on:
            made.ack()

    def on_left_out(self) -> None:
        """Count a message that was rejected because it has too many properties."""
        self.left_out += 1
        if self.left_out == 1:
            log.warning(
                "a message with more than %s properties was rejected; further ones are only counted", MAX_PROPERTIES
            )

    def on_answer(self, packet_identifier: int, codes: bytes, properties: Props) -> None:
        """Pass SUBACK or UNSUBACK to the callback of its request."""
        request = self._subscriptions.answered(packet_identifier, codes)
        if request is not None:
            if request.callback is not None:
                found = (list(request.topics), list(codes)) if request.is_list else (request.topics[0], codes[0])
                self._callbacks.post(request.callback, *found, properties)
            self._queue.notify_progress()
