"""`MqttClient`: the application's side of an MQTT client, and the greenlet that keeps its connection (smq.md §8)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event

from smqrt.errors import ArgumentError, ClosedError, DeliveryError, StreamError
from smqrt.mqtt.connection import Connection
from smqrt.mqtt.decision import DEFAULT_DELAY_S, OnStatus, delay_of
from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.ending import End, refused
from smqrt.mqtt.opening import Opener
from smqrt.mqtt.options import MqttOptions, Will, check_qos, to_bytes
from smqrt.mqtt.protocol import FIRST_FAILURE, Engine
from smqrt.mqtt.queue import SendQueue
from smqrt.mqtt.subscriptions import Request, Requests, Routes
from smqrt.mqtt.topics import check_filter, check_topic
from smqrt.mqtt.url import parse_address
from smqrt.net.callbacks import Callbacks
from smqrt.net.stream import Stream
from smqrt.options import make
from smqrt.wire.mqtt_properties import MAX_PROPERTIES, Packet, Props, encode, encode_body

log = logging.getLogger("smqrt.mqtt")

SHORT_DELAY_S = 0.1
HEADER_BYTES = 10  # of PUBLISH besides topic, properties and payload, at most
LINGER_S = 1.0
"""What the end of a connection takes behind DISCONNECT, beyond the time-out of `close`."""

OnPub = Callable[[str, bytes, dict[str, Any], int], Any]
"""`f(topic, payload, properties, cpt)`; `cpt` is the first byte of the packet: DUP 8, QoS 6, retain 1."""


class MqttClient:
    """A client of an MQTT broker that connects at once, in the background, and comes back when the connection is lost.

    Everything may be called at any time: what needs a connection waits for one, in the order of the calls, in a queue
    with bounds. The callbacks run one after the other in a greenlet of their own; they may block and may call back.

    The end: `close()` and `with` deliver what was handed in, or raise DeliveryError; `disconnect()` does the same in
    the background. The broker is told (DISCONNECT), so it publishes no will.

    The session: without a `sessionexpiryinterval` among the properties every connection starts clean. With one the
    first connection does, and later ones resume what the broker kept. In flight QoS 1 and 2 messages are sent again.

    Args:
        address: a name, `host:port`, `mqtt(s)://user:password@host:port`, a connected `Stream`, or a function that
            returns one for every connection (or raises `StreamError`).
        onstatus: see `OnStatus`; without one, connections are kept, and made again after 5 seconds unless that is
            pointless.
        onpub: see `OnPub`, for messages of subscriptions without a callback of their own.
        properties: of CONNECT, names in lower case; `receivemaximum`, `topicaliasmaximum`, `maximumpacketsize`,
            `sessionexpiryinterval`, ...; others go as user properties.
        options: see `smqrt.mqtt.options.MqttOptions`.
        callbacks: runs the callbacks, if not this client shall.

    Raises:
        ArgumentError: a bad address, option or property.

    Attributes:
        end: why the last connection ended, an `End`; None before.
        left_out: how many messages of the broker were refused because they have too many properties.
    """

    def __init__(
        self,
        address: str | Stream | Callable[[], Stream],
        onstatus: OnStatus | None = None,
        onpub: OnPub | None = None,
        properties: Props | None = None,
        callbacks: Callbacks | None = None,
        **options: Any,
    ) -> None:
        self._options = opts = make(MqttOptions, options)
        self.onstatus, self.onpub = onstatus, onpub
        self.end: End | None = None
        self._properties = dict(properties or {})
        self.left_out = 0
        limits = (opts.inflight, opts.topicalias, opts.maxpacketsize)
        self._engine = Engine(self, opts.version, opts.clientidentifier, *limits)
        self._opener = self._make_opener(address)
        self._set_credentials()
        encode(properties, Packet.CONNECT)  # raises now what would fail later
        self._callbacks = callbacks or Callbacks(log)
        self._routes, self._requests = Routes(), Requests(opts.resubscribe)
        self._queue = SendQueue(opts, lambda: self._engine.flying_bytes)
        self._connection: Connection | None = None
        self._last_job: Callable[[], Any] | None = None
        self._flows = self._is_opening = self._has_session = self._has_ended = self._is_closing = False
        self._stopping, self._hurry, self._settled, self._quiet = Event(), Event(), Event(), Event()
        self._was_accepted = False
        self._farewell: End | None = None
        self._undelivered = 0
        self.setwill(opts.will)
        self._greenlet = gevent.spawn(self._run)

    def _make_opener(self, address: Any) -> Callable[[], Stream]:
        if isinstance(address, Stream):
            self._onestream: Stream | None = address
            return self._take_stream
        if callable(address):
            return address  # type: ignore[no-any-return]
        if not isinstance(address, str):
            raise ArgumentError(f"address must be a str, a Stream or a function, not {type(address).__name__}")
        where = parse_address(address)
        if self._options.username is None:
            self._options.username, self._options.password = where.username, where.password or self._options.password
        return Opener(where, self._options)

    def _take_stream(self) -> Stream:
        stream, self._onestream = self._onestream, None
        if stream is None:
            raise StreamError("socketclosed", "the connection that this client was given is used up")
        return stream

    def _set_credentials(self) -> None:
        opts = self._options
        if opts.username is not None or opts.password is not None:
            self._engine.username_pw_set(opts.username or "", opts.password)  # type: ignore[arg-type]

    # ---- messages

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 0,
        retain: bool = False,
        properties: Props | None = None,
    ) -> Delivery:
        """Send a message, or keep it until there is a connection.

        Args:
            payload: str is sent as UTF-8.
            properties: see `MqttClient`; `contenttype`, `responsetopic`, `correlationdata`, ...

        Returns:
            What becomes of it. Failed at once ("toolarge") when it is larger than `maxpacketsize`.

        Raises:
            ArgumentError: a bad argument.
            ClosedError: the client has ended, or was asked to.
            QueueFullError: too much waits to be sent; see the options `queuesize`, `queuebytes` and `queuefull`.
        """
        body = encode_body(properties, Packet.PUBLISH) if properties and self._options.version == 5 else b""
        item = Delivery(check_topic(topic).encode(), to_bytes(payload), check_qos(qos), bool(retain), body)
        self._check_open("publish")
        if item.size_bytes + HEADER_BYTES > self._options.maxpacketsize:
            item.finish("toolarge")
            return item
        if self._may_go_at_once(item):
            self._engine.send(item)
            return item
        self._queue.make_room(item.size_bytes)
        self._check_open("publish")  # it may have waited
        self._queue.put(item)
        self._pump()
        return item

    def _may_go_at_once(self, item: Delivery) -> bool:
        engine = self._engine
        if self._queue.items or not self._flows or not engine.has_room(item.qos):
            return False
        return not item.qos or engine.flying_bytes + item.size_bytes <= self._options.queuebytes

    def _check_open(self, what: str) -> None:
        if self._is_closing or self._has_ended:
            why = f": {self.end}" if self.end is not None and not self._is_closing else ""
            raise ClosedError(f"{what}: the client has ended{why}")

    def _pump(self) -> None:
        queue, engine = self._queue, self._engine
        if self._flows:
            engine.send_again()
        while queue.items and self._may_send(queue.items[0]):
            item = queue.take()
            if isinstance(item, Request):
                self._requests.sent(engine.ask(item), item)
            else:
                engine.send(item)
        queue.tell_waiters()
        if not queue.items and not self._quiet.is_set():
            self._quiet.set()

    def _may_send(self, item: Delivery | Request) -> bool:
        if isinstance(item, Request):
            return self._engine.may_ask
        return self._flows and self._engine.has_room(item.qos)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was published is sent, acknowledged if it has to be, and every subscription answered.

        Args:
            timeout: seconds; None waits as long as the client lives.
        """
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
            while not self._is_drained() and not self.closed:
                self._quiet.clear()
                self._quiet.wait()
        return self._is_drained()

    def _is_drained(self) -> bool:
        engine = self._engine
        return (
            self._requests.is_quiet
            and not (self._queue.items or engine.flying)
            and not (engine.is_open and engine.want_write())
        )

    @property
    def backlog(self) -> int:
        """How many messages wait to be sent or acknowledged."""
        return len(self._queue) + len(self._engine.flying)

    # ---- subscriptions

    def subscribe(
        self,
        topic: str,
        onpub: OnPub | None = None,
        onsuback: Callable[[str, int, dict[str, Any]], Any] | None = None,
        *,
        qos: int = 0,
        nolocal: bool = False,
        retainaspublished: bool = False,
        retainhandling: int = 0,
        properties: Props | None = None,
    ) -> bool:
        """Subscribe.

        Args:
            topic: `+` stands for one level, `#` at the end for all that follow.
            onpub: for the messages of this subscription alone.
            onsuback: `f(topic, reason, properties)`; the reason is the granted QoS, or at least 128: refused.
            nolocal: leave out what this client publishes (MQTT 5).
            retainaspublished: keep the retain flag as it was published (MQTT 5).
            retainhandling: retained messages come 0: always, 1: with a new subscription only, 2: never (MQTT 5).

        Returns:
            Whether connected; without a connection it waits for one.

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
        encode(props, Packet.SUBSCRIBE)
        self._take_in("subscribe")
        self._routes.remove(topic)
        if onpub is not None:
            number = self._routes.add(topic, onpub)
            if self._routes.uses_identifiers:
                props["subscriptionidentifier"] = number
        return self._request(Request(topic, options, props, onsuback))

    def unsubscribe(
        self,
        topic: str,
        onunsuback: Callable[[str, int, dict[str, Any]], Any] | None = None,
        properties: Props | None = None,
    ) -> bool:
        """End a subscription; `onunsuback(topic, reason, properties)` tells. Returns whether connected; raises as
        `publish`."""
        check_filter(topic)
        encode(properties, Packet.UNSUBSCRIBE)
        self._take_in("unsubscribe")
        return self._request(Request(topic, None, dict(properties or {}), onunsuback))

    def _take_in(self, what: str) -> None:
        self._check_open(what)
        self._queue.make_room(0)
        self._check_open(what)

    def _request(self, request: Request) -> bool:
        self._requests.add(request)
        self._queue.put(request)
        self._pump()
        return self.connected

    # ---- the connection

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted and the connection stands."""
        return self._engine.is_open

    @property
    def closed(self) -> bool:
        """Whether the client has ended for good."""
        return self._has_ended

    def status(self) -> tuple[int, bool, bool]:
        """How many messages and subscriptions are queued, whether connected, and whether it has ended for good."""
        return len(self._queue), self.connected, self._is_closing or self.closed

    @property
    def dropped(self) -> int:
        """How many messages were given up for newer ones (`queuefull="drop"`)."""
        return self._queue.dropped

    @property
    def refused(self) -> int:
        """How many times there was no room in the queue (QueueFullError)."""
        return self._queue.refused

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected."""
        self._settled.wait(timeout)
        return self.connected

    def setwill(self, will: Will | Mapping[str, Any] | None) -> None:
        """Have another will, or none, from the next connection on.

        Raises:
            ArgumentError: it is none.
        """
        self._engine.set_will(Will.make(will))

    def disconnect(self, reason: int = 0) -> bool:
        """End for good, without waiting. What was handed in is delivered before, in the background and at most within
        the option `timeout`, if need be over a connection that is made for it; what can't be fails with "closed". When
        there is nothing, DISCONNECT goes out at once. `onstatus` is not called.

        Args:
            reason: for the broker (MQTT 5); 4 has it publish the will.

        Returns:
            Whether connected before.

        Raises:
            ArgumentError: the reason is none.
        """
        if not isinstance(reason, int) or not 0 <= reason <= 0xFF:
            raise ArgumentError(f"reason must be a reason code from 0 to 255, not {reason!r}")
        was_connected = self.connected
        if self._begin_to_close():
            if self._is_drained():
                self._part(reason)
            else:
                gevent.spawn(self._deliver_and_part, reason, self._options.timeout)
        return was_connected

    def shutdown(self) -> None:
        """The process ends: as `disconnect`; `onstatus` is told ("sock", "sysshutdown") if there is a connection."""
        if self.connected and not self._is_closing:
            self._farewell = End("sock", "sysshutdown", detail="the process ends")
        self.disconnect()

    def close(self, timeout: float | None = 5.0) -> None:
        """End for good, and wait for it: what was handed in is delivered before, if need be over a connection that is
        made for it. DISCONNECT is sent. A second call does nothing but wait. A callback that calls it does not wait for
        the end, which comes behind all callbacks.

        Args:
            timeout: seconds for the delivery; then it is over. None waits as long as it takes.

        Raises:
            DeliveryError: something was not delivered, or nobody knows whether it was; it says why.
        """
        end_s = None if timeout is None else monotonic() + timeout
        if self._begin_to_close():
            self._deliver_and_part(0, timeout)
        if not self._callbacks.is_current:
            self._greenlet.join(None if end_s is None else max(end_s - monotonic(), 0.0))
            self._part()
            self._greenlet.join(2 * LINGER_S)
        lost, self._undelivered = self._undelivered, 0
        if lost:
            why = self.end or "there was no time left"
            raise DeliveryError(f"close: {lost} messages or subscriptions were not delivered: {why}")

    def _begin_to_close(self) -> bool:
        """Take in nothing more, and hurry to send what is there; false when that is under way, or done."""
        if self._is_closing or self._has_ended:
            return False
        self._is_closing = True
        self._hurry.set()
        self._queue.close()
        if self._connection is not None and self.connected:
            self._start_to_flow()  # onstatus may still think about it
            self._connection.write_now()
        else:
            self._engine.forget_unproven()  # of a connection that broke: QoS 0 promises no more
        return True

    def _deliver_and_part(self, reason: int, timeout_s: float | None) -> None:
        end_s = None if timeout_s is None else monotonic() + timeout_s
        if self.flush(timeout_s):
            self._make_sure(None if end_s is None else end_s - monotonic())
        self._part(reason)

    def _make_sure(self, timeout_s: float | None) -> None:
        """QoS 0 is acknowledged by nobody; but a broker answers a ping after what it got before."""
        engine = self._engine
        if engine.unproven and self.connected:
            engine.prove()
        with gevent.Timeout(timeout_s, False):  # type: ignore[arg-type]
            while engine.unproven and self.connected:
                self._quiet.clear()
                self._quiet.wait()
        if engine.unproven:
            self._undelivered += engine.unproven
            self.end = self.end or End("sock", "timeout", detail="the broker doesn't say that it got them")

    def _part(self, reason: int = 0) -> None:
        """End now."""
        if self._stopping.is_set():
            return
        self._is_closing = True
        self._stopping.set()
        self._hurry.set()
        self._flows = False
        if self._connection is not None and self.connected:
            self._engine.part(reason)
            self._connection.write_now()
            self._connection.abort_after(LINGER_S)
        elif self._connection is not None:
            self._connection.abort()
        elif self._is_opening:
            self._greenlet.kill(_Stopped, block=False)

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until it has ended for good; whether it has."""
        self._greenlet.join(timeout)
        return self.closed

    def __enter__(self) -> MqttClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeliveryError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # what the block raised goes first

    def on_ended(self, fn: Callable[[], Any]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._last_job = fn

    # ---- the greenlet behind it

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                end = self._one_connection()
                if end is None or self._stopping.is_set():
                    break
                self.end = end
                delay_s = self._delay_after(end)
                if delay_s is None:
                    break
                (self._stopping if self._is_closing else self._hurry).wait(delay_s)
        finally:
            self._finish()

    def _one_connection(self) -> End | None:
        opts = self._options
        try:
            stream = self._open()
        except StreamError as error:
            return End("sock", error.word, detail=str(error))
        except _Stopped:
            return None
        self._connection = Connection(self._engine, stream, self._callbacks, self._pump)
        try:
            return self._connection.run(self._is_clean(), opts.keepalive, self._properties, opts.timeout)
        finally:
            self._lost()

    def _open(self) -> Stream:
        self._is_opening, self._was_accepted = True, False
        try:
            return self._opener()
        finally:
            self._is_opening = False

    def _is_clean(self) -> bool:
        opts = self._options
        if opts.cleanstart is not None:
            return opts.cleanstart
        return opts.version == 4 or not self._properties.get("sessionexpiryinterval") or not self._has_session

    def _lost(self) -> None:
        self._connection, self._flows = None, False
        self._engine.stop()
        self._settled.clear()
        self._queue.put_back(self._requests.lost())

    def _delay_after(self, end: End) -> float | None:
        """Seconds until the next attempt, None to stay away."""
        log.info("%s", end)
        if self._is_closing:  # once more, if that connection was a good one; onstatus has no say any more
            return SHORT_DELAY_S if self._was_accepted else None
        default = DEFAULT_DELAY_S if end.can_reconnect else None
        if self.onstatus is None:
            return default
        decision: list[Any] = []
        self._callbacks.ask(lambda: decision.append(self.onstatus(end.type, end.code, end.status)))  # type: ignore[misc]
        if not decision:
            return default  # it raised, and the log tells
        return None if end.code == "sysshutdown" else delay_of(decision[0], default)

    def _finish(self) -> None:
        if self._farewell is not None:
            self.end = self._farewell
            if self.onstatus is not None:
                self._callbacks.post(self.onstatus, self.end.type, self.end.code, self.end.status)
        self._has_ended = True
        self._stopping.set()
        flying = list(self._engine.flying)
        for item in flying:
            item.finish("closed")
        self._undelivered += self._queue.give_up() + len(flying)
        if self._undelivered and self._is_closing:
            why = self.end or "no time was left"
            log.warning("%s messages or subscriptions were not delivered: %s", self._undelivered, why)
        self._queue.close()
        self._settled.set()
        self._quiet.set()
        if self._last_job is not None:
            self._callbacks.post(self._last_job)
        self._callbacks.finish()

    # ---- what the engine tells

    def on_wake(self) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        if self._connection is not None:
            self._connection.wake()

    def on_connack(self, code: int, present: bool, properties: dict[str, Any]) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        status = {"sessionpresent": present, "reasoncode": code, "properties": properties}
        connection = self._connection
        assert connection is not None
        if code:
            connection.end(refused(code, self._options.version, status))
            return
        connection.keep_alive()
        self._has_session = self._was_accepted = True
        has_identifiers = properties.get("subscriptionidentifieravailable", 1) != 0
        self._routes.uses_identifiers = has_identifiers and self._options.version == 5
        if not present:
            self._queue.put_back(self._requests.session_lost(self._queue.items))
        self._pump()
        self._settled.set()
        if self.onstatus is None or self._is_closing:
            self._start_to_flow()
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: Connection, status: Mapping[str, Any]) -> None:
        keep = True  # as without an onstatus, when it raises
        try:
            answer = True if self.onstatus is None else self.onstatus("mqtt", "connect", status)
            keep = answer is NotImplemented or bool(answer)
        finally:
            if connection is self._connection and not self._is_closing:
                if keep:
                    self._start_to_flow()
                else:
                    self._part()

    def _start_to_flow(self) -> None:
        if not self._flows:
            self._flows = True
            self._pump()

    def on_message(self, topic: str, payload: bytes, properties: dict[str, Any], cpt: int) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        handlers = self._routes.find(topic, properties)
        for handler in handlers:
            self._callbacks.post(handler, topic, payload, properties, cpt)
        if handlers:
            return
        if self.onpub is not None:
            self._callbacks.post(self.onpub, topic, payload, properties, cpt)
        else:
            log.debug("nobody takes a message to %r", topic)

    def on_left_out(self) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        self.left_out += 1
        if self.left_out == 1:
            log.warning("a message with more than %s properties was refused; more of them are counted", MAX_PROPERTIES)

    def on_answer(self, mid: int, reason: int, properties: dict[str, Any]) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        request = self._requests.answered(mid)
        if request is None:
            return
        if request.options is None or reason >= FIRST_FAILURE:
            self._forget(request)
        if request.callback is not None:
            self._callbacks.post(request.callback, request.topic, reason, properties)
        self._quiet.set()

    def _forget(self, request: Request) -> None:
        if self._requests.ended(request):
            self._routes.remove(request.topic)

    def on_room(self) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        self._pump()

    def on_end(self, end: End | None) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        if self._connection is not None:
            self._connection.end(end)


class _Stopped(Exception):
    """Ends the making of a connection."""
