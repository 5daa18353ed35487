"""`MqttClient`: the MQTT client for applications (spec: smq §8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from smqrt.clients.mqtt.connect import OnStatus, connector
from smqrt.clients.mqtt.options import WILL, MqttOptions, Will, check_qos, to_bytes
from smqrt.clients.mqtt.queue import HEADER_BYTES, Delivery, OnSuback, SubscribeRequest
from smqrt.clients.mqtt.reconnect import ReconnectingMqttClient
from smqrt.errors import ArgumentError, ClosedError
from smqrt.loop.callback_queue import Callbacks
from smqrt.settings.options import make
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.packets import PublishPacket
from smqrt.wire.mqtt.properties import MAX_PROPERTIES, PacketType, Props, encode_properties, pack_properties
from smqrt.wire.mqtt.topics import OnPub, check_filter, check_topic

log = logging.getLogger("smqrt.mqtt")

_PUBLISH = 0x30  # the packet type in the first byte


class MqttClient(ReconnectingMqttClient):
    """A client of an MQTT broker that connects in the background, and again when the connection is lost.

    Every method may be called at any time: what needs a connection waits for one, in a limited queue in the order of
    the calls. The callbacks run one after the other in one greenlet; they may block and call the client.

    `close()` and `with` deliver what is queued, or raise DeliveryError; `disconnect()` does the same in the background.
    They send DISCONNECT, so the broker publishes no will.

    Without a `sessionexpiryinterval` among the properties every connection starts a new session. With one the first
    connection does, and later ones resume it. QoS 1 and 2 messages in flight are sent again.

    Args:
        address: a name, `host:port`, `mqtt(s)://user:password@host:port`, a connected `Stream`, or a function that
            returns one for every connection (or raises `StreamError`).
        onstatus: see `OnStatus`; without one, connections are kept, and made again after 5 seconds unless another
            attempt can't succeed.
        onpub: see `OnPub`, for messages of subscriptions without a callback of their own.
        properties: of CONNECT, names in lower case: `receivemaximum`, `topicaliasmaximum`, `maximumpacketsize`,
            `sessionexpiryinterval`, ...; others are sent as user properties.
        options: see `smqrt.clients.mqtt.options.MqttOptions`.
        callbacks: runs the callbacks instead of the client.

    Raises:
        ArgumentError: an invalid address, option or property.

    Attributes:
        end: the `MqttCloseReason` of the last connection that ended or failed, None before.
        left_out: how many messages of the broker were refused because they have too many properties.
    """

    def __init__(
        self,
        address: str | Stream | Callable[[], Stream],
        onstatus: OnStatus | None = None,
        onpub: OnPub | None = None,
        properties: Props | None = None,
        callbacks: Callbacks | None = None,
        **options: object,
    ) -> None:
        opts = make(MqttOptions, options)
        connect = connector(address, opts)  # before the credentials are read: the address may have them
        endpoint = MqttClientEndpoint(
            self, opts.version, opts.clientidentifier, opts.inflight, opts.topicalias, opts.maxpacketsize
        )
        if opts.username is not None or opts.password is not None:
            endpoint.username = opts.username or ""
            endpoint.password = None if opts.password is None else to_bytes(opts.password)
        endpoint.will = None if opts.will is None else opts.will.message()
        self.onpub = onpub
        self.left_out = 0
        super().__init__(connect, endpoint, opts, dict(properties or {}), onstatus, callbacks or Callbacks(log))

    # ---- messages

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        properties: Props | None = None,
    ) -> Delivery:
        """Send a message, or queue it until there is a connection.

        Args:
            payload: str is sent as UTF-8.
            properties: see `MqttClient`; `contenttype`, `responsetopic`, `correlationdata`, ...

        Returns:
            Its delivery, which fails at once ("toolarge") when the message is larger than `maxpacketsize`.

        Raises:
            ArgumentError: an invalid argument.
            ClosedError: the client was closed, or has ended.
            QueueFullError: no room in the queue; see the options `queuesize`, `queuebytes` and `queuefull`.
        """
        body = pack_properties(properties, PacketType.PUBLISH) if properties and self._options.version == 5 else b""
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
        """The number of messages that wait to be sent or acknowledged."""
        return len(self._queue) + len(self._endpoint.session.in_flight)

    # ---- subscriptions

    def subscribe(
        self,
        topic: str,
        onpub: OnPub | None = None,
        onsuback: OnSuback | None = None,
        *,
        qos: int = 0,
        nolocal: bool = False,
        retainaspublished: bool = False,
        retainhandling: int = 0,
        properties: Props | None = None,
    ) -> bool:
        """Subscribe.

        Args:
            topic: `+` matches one level, `#` at the end all that follow.
            onpub: for the messages of this subscription alone.
            onsuback: see `OnSuback`.
            nolocal: do not receive messages that this client publishes (MQTT 5).
            retainaspublished: keep the retain flag as it was published (MQTT 5).
            retainhandling: send retained messages 0: always, 1: with a new subscription only, 2: never (MQTT 5).

        Returns:
            Whether connected; without a connection the subscription waits for one.

        Raises:
            As `publish`.
        """
        check_filter(topic)
        if retainhandling not in (0, 1, 2):
            raise ArgumentError(f"retainhandling must be 0, 1 or 2, not {retainhandling!r}")
        options = check_qos(qos)
        if self._options.version == 5:
            options |= bool(nolocal) << 2 | bool(retainaspublished) << 3 | retainhandling << 4
        props = dict(properties or {})
        encode_properties(props, PacketType.SUBSCRIBE)
        self._make_room("subscribe")
        routes = self._subscriptions.routes
        routes.remove(topic)
        if onpub is not None:
            number = routes.add(topic, onpub)
            if routes.uses_identifiers:
                props["subscriptionidentifier"] = number
        return self._request(SubscribeRequest(topic, options, props, onsuback))

    def unsubscribe(
        self,
        topic: str,
        onunsuback: OnSuback | None = None,
        properties: Props | None = None,
    ) -> bool:
        """End a subscription; `onunsuback(topic, reason, properties)` receives the answer.

        Returns whether connected; raises as `publish`.
        """
        check_filter(topic)
        encode_properties(properties, PacketType.UNSUBSCRIBE)
        self._make_room("unsubscribe")
        return self._request(SubscribeRequest(topic, None, dict(properties or {}), onunsuback))

    def _make_room(self, what: str) -> None:
        self._check_open(what)
        self._queue.make_room(0)
        self._check_open(what)

    def _request(self, request: SubscribeRequest) -> bool:
        self._subscriptions.add(request)
        self._queue.put(request)
        return self.connected

    # ---- the connection

    def setwill(self, will: Will | Mapping[str, object] | None) -> None:
        """Set the will of the next connections, None for no will.

        Raises:
            ArgumentError: not a will.
        """
        made = WILL.check("will", will)
        self._endpoint.will = None if made is None else made.message()

    def status(self) -> tuple[int, bool, bool]:
        """Return how many messages and subscriptions are queued, whether connected, and whether closed or ended."""
        return len(self._queue), self.connected, self.closing

    @property
    def dropped(self) -> int:
        """The number of messages that were dropped for newer ones (`queuefull="drop"`)."""
        return self._queue.dropped

    @property
    def refused(self) -> int:
        """The number of times there was no room in the queue (QueueFullError)."""
        return self._queue.refused

    # ---- messages and answers of the broker: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_message(self, message: PublishPacket) -> int:
        """Pass a message to the callbacks of its subscriptions."""
        topic, payload, flags, _, properties, _ = message
        handlers = self._subscriptions.routes.find(topic, properties)
        if not handlers:
            if self.onpub is None:
                log.debug("no callback for a message to %r", topic)
                return 0
            handlers = [self.onpub]
        for handler in handlers:
            self._callbacks.post(handler, topic, payload, properties, _PUBLISH | flags)
        return 0

    def on_left_out(self) -> None:
        """Count a message that was refused because it has too many properties."""
        self.left_out += 1
        if self.left_out == 1:
            log.warning(
                "a message with more than %s properties was refused; further ones are only counted", MAX_PROPERTIES
            )

    def on_answer(self, packet_identifier: int, code: int, properties: Props) -> None:
        """Pass the broker's answer to the callback of a subscription."""
        request = self._subscriptions.answered(packet_identifier, code)
        if request is not None:
            if request.callback is not None:
                self._callbacks.post(request.callback, request.topic, code, properties)
            self._queue.notify_progress()
