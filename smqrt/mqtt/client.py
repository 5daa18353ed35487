"""`MqttClient`: the application's side of an MQTT client, and the greenlet that keeps its connection (smq.md §8)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import gevent
from gevent.event import Event

from smqrt.errors import ArgumentError, StreamError
from smqrt.mqtt.connection import Connection
from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.ending import End, refused
from smqrt.mqtt.opening import Opener
from smqrt.mqtt.options import Will, check_qos, make_options, to_bytes
from smqrt.mqtt.properties import PacketTypes, Props, as_paho, packed
from smqrt.mqtt.protocol import FIRST_FAILURE, Engine
from smqrt.mqtt.subscriptions import Request, Requests, Routes
from smqrt.mqtt.topics import check_filter, check_topic
from smqrt.mqtt.url import parse_address
from smqrt.net.callbacks import Callbacks
from smqrt.net.stream import Stream

log = logging.getLogger("smqrt.mqtt")

DEFAULT_DELAY_S = 5.0

OnStatus = Callable[[str, str, Mapping[str, Any]], Any]
"""`f(type, code, status)`, called when a connection stands, was refused, or ended; see `End` for the words.

On `("mqtt", "connect", {"sessionpresent", "reasoncode": 0, "properties"})`: a true value keeps the connection.
Otherwise: None or False gives up, True tries again after 5 seconds, a number after so many seconds."""

OnPub = Callable[[str, bytes, dict[str, Any], int], Any]
"""`f(topic, payload, properties, cpt)`; `cpt` is the first byte of the packet: DUP 8, QoS 6, retain 1."""


class MqttClient:
    """A client of an MQTT broker that connects at once, in the background, and comes back when the connection is lost.

    Everything may be called at any time: what needs a connection waits for one. The callbacks run one after the other
    in a greenlet of their own; they may block and may call back.

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
        options: see `smqrt.mqtt.options.Options`.
        callbacks: runs the callbacks, if not this client shall.

    Raises:
        ArgumentError: a bad address, option or property.

    Attributes:
        end: why the last connection ended, an `End`; None before.
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
        self._options = opts = make_options(options)
        self.onstatus, self.onpub = onstatus, onpub
        self.end: End | None = None
        self._properties = dict(properties or {})
        self._engine = Engine(self, opts.version, opts.clientidentifier, opts.inflight, opts.topicalias)
        self._opener = self._make_opener(address)
        self._set_credentials()
        self._engine._connect_properties = as_paho(properties, PacketTypes.CONNECT) if opts.version == 5 else None
        self._callbacks = callbacks or Callbacks(log)
        self._routes, self._requests = Routes(), Requests(opts.resubscribe)
        self._queue: deque[Delivery] = deque()
        self._connection: Connection | None = None
        self._last_job: Callable[[], Any] | None = None
        self._flows = self._is_opening = self._has_session = self._has_ended = False
        self._stopping, self._settled, self._quiet = Event(), Event(), Event()
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
            What becomes of it. Failed at once ("full", "closed") when the queue has no room, or the client has ended.

        Raises:
            ArgumentError: a bad argument.
        """
        body = packed(properties, PacketTypes.PUBLISH) if properties and self._options.version == 5 else b""
        item = Delivery(check_topic(topic).encode(), to_bytes(payload), check_qos(qos), bool(retain), body)
        limit = self._options.queuesize
        if self._stopping.is_set():
            item.finish("closed")
        elif limit is not None and not self._flows and len(self._queue) >= limit:
            item.finish("full")
        else:
            self._queue.append(item)
            self._pump()
        return item

    def _pump(self) -> None:
        queue, engine = self._queue, self._engine
        while queue and self._flows and engine.has_room(queue[0].qos):
            engine.send(queue.popleft())
        if not queue and not self._quiet.is_set():
            self._quiet.set()

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
            and not (self._queue or engine.flying)
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
            ArgumentError: a bad argument.
        """
        check_filter(topic)
        if retainhandling not in (0, 1, 2):
            raise ArgumentError(f"retainhandling must be 0, 1 or 2, not {retainhandling!r}")
        options = check_qos(qos)
        if self._options.version == 5:
            options |= bool(nolocal) << 2 | bool(retainaspublished) << 3 | retainhandling << 4
        props = dict(properties or {})
        as_paho(props, PacketTypes.SUBSCRIBE)
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
        """End a subscription; `onunsuback(topic, reason, properties)` tells. Returns whether connected.

        Raises:
            ArgumentError: a bad argument.
        """
        check_filter(topic)
        as_paho(properties, PacketTypes.UNSUBSCRIBE)
        return self._request(Request(topic, None, dict(properties or {}), onunsuback))

    def _request(self, request: Request) -> bool:
        self._requests.add(request)
        self._ask()
        return self.connected

    def _ask(self) -> None:
        while self._requests.waiting and self._engine.is_open:
            request = self._requests.waiting.popleft()
            self._requests.sent(self._engine.ask(request), request)

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
        """How many messages are queued, whether connected, and whether it has ended for good."""
        return len(self._queue), self.connected, self._stopping.is_set() or self.closed

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected."""
        self._settled.wait(timeout)
        return self.connected

    def setwill(self, will: Will | Mapping[str, Any] | None) -> None:
        """Have another will, or none, from the next connection on.

        Raises:
            ArgumentError: it is none.
        """
        will, engine = Will.make(will), self._engine
        if will is None:
            engine.will_clear()
            return
        properties = as_paho(will.properties, PacketTypes.WILLMESSAGE) if self._options.version == 5 else None
        engine.will_set(will.topic, to_bytes(will.payload), will.qos, will.retain, properties)

    def disconnect(self, reason: int = 0) -> bool:
        """End the connection and do not come back. `onstatus` is not called; what is queued is dropped.

        Args:
            reason: for the broker (MQTT 5); 4 has it publish the will.

        Returns:
            Whether connected before.
        """
        was_connected = self.connected
        self._stopping.set()
        self._flows = False
        if self._connection is not None and was_connected:
            self._connection.abort_after(self._options.timeout)
            self._engine.part(reason)
        elif self._connection is not None:
            self._connection.abort()
        elif self._is_opening:
            self._greenlet.kill(_Stopped, block=False)
        return was_connected

    def shutdown(self) -> None:
        """The process ends: disconnect, tell `onstatus` ("sock", "sysshutdown"), and do not come back."""
        if self._connection is None or not self.connected:
            self.disconnect()
            return
        self._connection.end(End("sock", "sysshutdown", detail="the process ends"))
        self._engine.part()

    def close(self, timeout: float | None = 5.0) -> None:
        """Disconnect after all that was published, and wait for the end; at most `timeout` seconds."""
        if self.connected and not self._stopping.is_set():
            self.flush(timeout)
        self.disconnect()
        self._greenlet.join(timeout)

    def __enter__(self) -> MqttClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                self._stopping.wait(delay_s)
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
        self._is_opening = True
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
        self._requests.lost()

    def _delay_after(self, end: End) -> float | None:
        """Seconds until the next attempt, None to stay away."""
        log.info("%s", end)
        answer: Any = end.can_reconnect
        if self.onstatus is not None:
            answer = self._callbacks.ask(self.onstatus, end.type, end.code, end.status)
        if answer is None or answer is False or end.code == "sysshutdown":
            return None
        return DEFAULT_DELAY_S if answer is True else max(float(answer), 0.0)

    def _finish(self) -> None:
        self._has_ended = True
        self._stopping.set()
        for item in (*self._queue, *self._engine.flying):
            item.finish("closed")
        self._queue.clear()
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
        self._has_session = True
        has_identifiers = properties.get("subscriptionidentifieravailable", 1) != 0
        self._routes.uses_identifiers = has_identifiers and self._options.version == 5
        if not present:
            self._requests.session_lost()
        self._ask()
        self._settled.set()
        if self.onstatus is None:
            self._go_on(connection, True)
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: Connection, status: Mapping[str, Any]) -> None:
        keep = False
        try:
            keep = self.onstatus is None or bool(self.onstatus("mqtt", "connect", status))
        finally:
            self._go_on(connection, keep)

    def _go_on(self, connection: Connection, keep: bool) -> None:
        if connection is not self._connection or self._stopping.is_set():
            return
        if keep:
            self._flows = True
            self._engine.resume()
            self._pump()
        else:
            self.disconnect()

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

    def on_answer(self, mid: int, codes: list[int], properties: dict[str, Any]) -> None:
        """See `smqrt.mqtt.protocol.Events`."""
        request = self._requests.answered(mid)
        if request is None:
            return
        reason = codes[0] if codes else 0
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
