"""`MqttClient`, the MQTT client for applications, and its reconnection (spec: smq §8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from time import monotonic

import gevent

from smqrt.clients.mqtt.authentication import FAILED, Authentication, OnAuth
from smqrt.clients.mqtt.connect import (
    DEFAULT_DELAY_S,
    WILL,
    MqttCloseReason,
    MqttOptions,
    OnStatus,
    Will,
    check_qos,
    connector,
    delay_of,
    disconnected,
    refused,
    to_bytes,
)
from smqrt.clients.mqtt.connection import HEADER_BYTES, LINGER_S, MqttConnection, SendQueue
from smqrt.clients.mqtt.delivery import Delivery
from smqrt.clients.mqtt.messages import Message, MessageCallback, MessageQueue, OnMessage
from smqrt.clients.mqtt.subscriptions import (
    FilterOptions,
    MqttSubscriptions,
    OnSuback,
    SubscribeRequest,
    check_filters,
    option_bits,
)
from smqrt.clients.reconnect import ReconnectingClient
from smqrt.errors import ArgumentError, ClosedError, NoAnswer, StreamError
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

# ---- Reconnection: CONNECT, the decision of `onstatus`, and the delivery of queued messages before DISCONNECT

log = logging.getLogger("smqrt.mqtt")

SHORT_DELAY_S = 0.1  # after a connection loss, a closing client reconnects after this time


class _Stopped(gevent.GreenletExit):
    """Ends a connection attempt. A GreenletExit, so that a connect function does not catch it as an error."""


class ReconnectingMqttClient(ReconnectingClient[MqttCloseReason]):
    """Base class of `MqttClient`: connections and reconnection, without the methods for applications.

    It implements `ClientEvents`, except messages and acknowledgements of subscriptions.

    Args:
        connect: opens a stream.
        endpoint: the protocol state.
        options: the options of the client.
        properties: the properties of CONNECT.
        onstatus: see `OnStatus`.
        callbacks: runs the callbacks of the application.
        authentication: of MQTT 5; None without.

    Attributes:
        last_reason: the reason code of DISCONNECT when the application or the process ends (MQTT 5). With 4 the broker
            publishes the will.
    """

    _items = ("message or subscription", "messages or subscriptions")

    def __init__(
        self,
        connect: Callable[[], Stream],
        endpoint: MqttClientEndpoint,
        options: MqttOptions,
        properties: Props,
        onstatus: OnStatus | None,
        callbacks: Callbacks,
        authentication: Authentication | None = None,
    ) -> None:
        encode_properties(properties, PacketType.CONNECT)  # raises ArgumentError here, not in the greenlet
        endpoint.connect_packet(True, options.keepalive, properties)
        self._connect, self._endpoint, self._options, self._properties = connect, endpoint, options, properties
        self.onstatus = onstatus
        self.last_reason = 0
        self._subscriptions = MqttSubscriptions(options.resubscribe)
        self._queue = SendQueue(options, endpoint, self._subscriptions)
        self._connection: MqttConnection | None = None
        self._is_connecting = self._was_accepted = False  # the current attempt
        self._has_session = self._has_ended_by_itself = False
        self._shutdown_reason: MqttCloseReason | None = None
        self._authentication = authentication
        super().__init__(callbacks, log)

    @property
    def connected(self) -> bool:
        """Whether the connection is open and accepted by the broker."""
        return self._endpoint.is_open

    @property
    def timeout_s(self) -> float:
        """The option `timeout`, in seconds."""
        return self._options.timeout

    # ---- closing

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all messages are sent, acknowledged if QoS 1 or 2, and all subscriptions are acknowledged.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            Whether everything is sent and acknowledged.
        """
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: end the block without an exception
            while not self._queue.is_drained and not self.closed:
                self._queue.wait_progress()
        return self._queue.is_drained

    def disconnect(self, reason: int = 0) -> bool:
        """Close the client in the background. Returns at once; `onstatus` is not called.

        Queued messages are delivered first, over a new connection if necessary, within the option `timeout`.
        Undelivered messages then fail with "closed". With an empty queue DISCONNECT is sent at once.

        Args:
            reason: the reason code for the broker (MQTT 5). With 4 the broker publishes the will.

        Returns:
            Whether the client was connected.

        Raises:
            ArgumentError: an invalid reason code.
        """
        if not isinstance(reason, int) or not 0 <= reason <= 0xFF:
            raise ArgumentError(f"reason must be a reason code from 0 to 255, not {reason!r}")
        was_connected = self.connected
        if self._stop_intake():
            if self._queue.is_drained:
                self._stop(reason)
            else:
                gevent.spawn(self._deliver, reason, self._options.timeout)
        return was_connected

    def discard(self) -> int:
        """Drop the queued messages and subscriptions, which fail with "closed", and return their number."""
        return self._queue.abandon()

    def shutdown(self) -> None:
        """Close the client at the end of the process; a connected one calls `onstatus("sock", "sysshutdown", {})`."""
        if self.connected and not self._closing.is_set():
            self._shutdown_reason = MqttCloseReason("sock", "sysshutdown", detail="the process ends")
        self.disconnect(self.last_reason)

    def _begin_close(self, timeout_s: float | None) -> None:
        if self._stop_intake():
            self._deliver(self.last_reason, timeout_s)

    def _stop_intake(self) -> bool:
        """Reject further messages, and send the queued ones as soon as possible; return False on a second call."""
        if self.closing:
            return False
        self._closing.set()
        self._queue.close()
        if self._connection is not None and self.connected:
            self._start_sending()  # without waiting for the decision of onstatus
            self._connection.write_now()
        else:
            self._endpoint.forget_unconfirmed()  # QoS 0 messages are not resent after a connection loss
        return True

    def _deliver(self, reason: int, timeout_s: float | None) -> None:
        """Wait until all messages are delivered, at most `timeout_s`, and stop."""
        endpoint = self._endpoint
        end_s = None if timeout_s is None else monotonic() + timeout_s
        if self.flush(timeout_s):
            # QoS 0 has no acknowledgement, but brokers respond to a ping after all packets received before it.
            if endpoint.unconfirmed and self.connected:
                endpoint.ping(monotonic())
            left_s = None if end_s is None else end_s - monotonic()
            with gevent.Timeout(left_s, False):  # type: ignore[arg-type]
                while endpoint.unconfirmed and self.connected:
                    self._queue.wait_progress()
            if endpoint.unconfirmed:
                self._undelivered += endpoint.unconfirmed
                self.end = self.end or MqttCloseReason("sock", "timeout", detail="no answer to a ping")
        self._stop(reason)

    def _stop(self, reason: int = 0) -> None:
        """Send DISCONNECT if connected, and end the connection or the connection attempt."""
        if self._stopping.is_set():
            return
        self._closing.set()
        self._stopping.set()
        self._queue.is_sending = False
        if self._connection is not None and self.connected:
            self._endpoint.disconnect(reason)
            self._connection.write_now()
            self._connection.abort_after(LINGER_S)
        elif self._connection is not None:
            self._connection.abort()
        elif self._is_connecting:
            self._greenlet.kill(_Stopped, block=False)

    def _abandon(self) -> int:
        self._has_ended_by_itself = not self._closing.is_set()
        if self._shutdown_reason is not None:
            self.end = self._shutdown_reason
            if self.onstatus is not None:
                self._callbacks.post(self.onstatus, self.end.type, self.end.code, self.end.status)
        in_flight = list(self._endpoint.session.in_flight.values())
        for item in in_flight:
            item.finish("closed")
        lost = self._queue.abandon() + len(in_flight)
        self._queue.close()
        self._queue.notify_progress()
        return lost

    # ---- connections

    @property
    def _needs_connection(self) -> bool:
        return not self._stopping.is_set()

    def _run_connection(self) -> MqttCloseReason | None:
        options, has_session = self._options, bool(self._properties.get("sessionexpiryinterval")) and self._has_session
        self._is_connecting, self._was_accepted = True, False
        properties = self._properties
        if (authentication := self._authentication) is not None:
            more = self._decision(authentication.connect_properties, until=self._stopping)
            if more is None:
                self._is_connecting = False
                self.end = None if self._stopping.is_set() else FAILED
                return self.end
            properties = {**properties, **more}
        try:
            try:
                stream = self._connect()
            finally:
                self._is_connecting = False
            connection = self._connection = MqttConnection(
                self._endpoint, stream, self._callbacks, self._queue.pump, self._pause
            )
            is_clean = options.cleanstart
            if is_clean is None:  # MQTT 3.1.1 has no expiry: sessions are kept only with cleanstart=False
                is_clean = options.level < 5 or not has_session
            try:
                end = connection.run(is_clean, options.keepalive, properties, options.timeout)
            finally:
                self._connection, self._queue.is_sending = None, False
                self._endpoint.abort()
                self._settled.clear()
                if authentication is not None:
                    authentication.finish(False)
                self._queue.put_back(self._subscriptions.lost())
        except StreamError as error:
            end = MqttCloseReason("sock", error.word, detail=str(error))
        except _Stopped:
            return None
        if end is None or self._stopping.is_set():
            return None
        self.end = end
        return end

    def _delay_after(self, reason: MqttCloseReason) -> float | None:
        log.info("%s", reason)
        if self._closing.is_set():  # one more attempt if the last one was accepted; onstatus no longer decides
            return SHORT_DELAY_S if self._was_accepted else None
        default_s = DEFAULT_DELAY_S if reason.can_reconnect else None
        onstatus = self.onstatus
        if onstatus is None:
            return default_s
        # A tuple, because None is a decision of onstatus, and also the result of a callback that failed.
        decision = self._decision(lambda: (onstatus(reason.type, reason.code, reason.status),))
        if decision is None:
            return default_s  # onstatus raised an exception, which is in the log
        return None if reason.code == "sysshutdown" else delay_of(decision[0], default_s)

    def _pause(self) -> None:
        """Block while the application is slow; implemented by `MqttClient`."""

    # ---- events of the endpoint: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_wake(self) -> None:
        """Write the packets that the endpoint has queued."""
        if self._connection is not None:
            self._connection.wake()

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        """Process CONNACK."""
        status = {"sessionpresent": is_session_present, "reasoncode": code, "properties": properties}
        connection = self._connection
        assert connection is not None
        if code:
            connection.end(refused(code, self._options.level, status))
            return
        connection.keep_alive()
        self._has_session = self._was_accepted = True
        has_identifiers = properties.get("subscriptionidentifieravailable", 1) != 0
        self._subscriptions.routes.uses_identifiers = has_identifiers and self._options.level == 5
        if not is_session_present:
            self._queue.put_back(self._subscriptions.session_lost(self._queue.items))
        self._queue.pump()
        self._settled.set()
        data = properties.get("authenticationdata")
        if self._authentication is not None and data is not None:  # before any message is sent
            self._callbacks.post(self._authentication.respond, connection, 0, data)
        if self._closing.is_set() or self.onstatus is None and (self._authentication is None or data is None):
            self._start_sending()
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: MqttConnection, status: Mapping[str, object]) -> None:
        """Call onstatus, which decides whether to keep an accepted connection; sending starts afterwards."""
        is_kept = True  # without onstatus, and when it raises an exception
        try:
            decision = True if self.onstatus is None else self.onstatus("mqtt", "connect", status)
            is_kept = decision is NotImplemented or bool(decision)
        finally:
            if connection is self._connection and not self._closing.is_set():
                if is_kept:
                    self._start_sending()
                else:
                    self._stop()

    def _start_sending(self) -> None:
        if not self._queue.is_sending:
            self._queue.is_sending = True
            self._queue.pump()

    def on_auth(self, code: int, properties: Props) -> None:
        """Answer AUTH of the broker."""
        authentication, connection = self._authentication, self._connection
        assert authentication is not None
        data = properties.get("authenticationdata")
        if code or data is not None:
            self._callbacks.post(authentication.respond, connection, code, data)
        if not code:
            self._callbacks.post(authentication.finish, True)

    def on_room(self) -> None:
        """Send queued messages: the broker has acknowledged some."""
        self._queue.pump()

    def on_disconnect(self, code: int, properties: Props) -> None:
        """End the connection: the broker sent DISCONNECT."""
        if self._connection is not None:
            self._connection.end(disconnected(code, properties))


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
        address: a name, `host:port`, `mqtt(s)://user:password@host:port`, a connected `Stream`, or a function that
            returns one for each connection (or raises `StreamError`).
        onstatus: see `OnStatus`; by default, connections are kept, and the client reconnects after 5 seconds unless
            another attempt can't succeed.
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

    Attributes:
        end: the `MqttCloseReason` of the last connection or failed attempt; None before the first one.
        left_out: number of received messages that were rejected because they have too many properties.
        onpub: the callback; an iteration sets it to None.
    """

    def __init__(
        self,
        address: str | Stream | Callable[[], Stream],
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
        endpoint_class = DeferringClientEndpoint if opts.manualack else MqttClientEndpoint
        endpoint = endpoint_class(
            self, opts.level, opts.clientidentifier, opts.inflight, opts.topicalias, opts.maxpacketsize
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
        if (opts.authenticationmethod is None) != (onauth is None):
            raise ArgumentError("authenticationmethod and onauth need each other")
        authentication = None
        if opts.authenticationmethod is not None and onauth is not None:
            authentication = Authentication(opts.authenticationmethod, onauth, endpoint)
        given = dict(properties or {})
        super().__init__(connect, endpoint, opts, given, onstatus, callbacks or Callbacks(log), authentication)

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
            NoAnswer, DroppedError: with `wait`, see `Delivery.wait`.
        """
        item = self._publish(topic, payload, qos, retain, properties)
        if wait is not False:
            item.wait(self._options.timeout if wait is True else wait)
        return item

    def _publish(self, topic: str, payload: bytes | str, qos: int, retain: bool, properties: Props | None) -> Delivery:
        body = pack_properties(properties, PacketType.PUBLISH) if properties and self._options.level == 5 else b""
        item = Delivery(check_topic(topic).encode(), to_bytes(payload), check_qos(qos), bool(retain), body)
        self._check_open("publish")
        if item.size_bytes + HEADER_BYTES > self._options.maxpacketsize:
            item.finish("toolarge")
            return item
        if self._queue.send_at_once(item):
            return item
        self._queue.make_room(item.size_bytes)
        self._check_open("publish")  # the client may have been closed while `make_room` waited
        self._queue.put(item)
        return item

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
        self._messages.wait_for_room(self._stopping)

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
        topic, payload, flags, _, properties, _ = message
        handlers = self._subscriptions.routes.find(topic, properties)
        if not handlers:
            if self.onpub is None:
                self._messages.put(Message(message, self._acknowledge, None))
                return 0
            handlers = [self.onpub]
        for handler in handlers:
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
