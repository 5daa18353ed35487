"""Documented MQTT interface of `smqrt.mqttc` and `smqrt.mqtt3c` (spec: smq §8, §9).

It has the names, argument order, options and results of the Lua modules, and uses `MqttClient`. Unlike in Lua, a full
queue raises QueueFullError, an invalid argument raises ArgumentError, and `nil, error` is `(None, error)`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import gevent
from gevent.event import Event

from smqrt.clients.mqtt.addresses import open_unless_untrusted, parse_addresses
from smqrt.clients.mqtt.client import MqttClient
from smqrt.clients.mqtt.connect import (
    ADDRESS_KINDS,
    MqttOptions,
    connect_error,
    is_socket,
    run_word,
    stream_of,
)
from smqrt.clients.mqtt.delivery import Delivery
from smqrt.clients.mqtt.messages import Message, MessageCallback, OnMessage
from smqrt.clients.mqtt.subscriptions import FilterOptions
from smqrt.errors import ArgumentError, ClosedError, DeliveryError, StreamError
from smqrt.loop.greenlets import MAX_WAITING_JOBS, Callbacks
from smqrt.loop.scheduling import Turn
from smqrt.settings.option_types import choice, function, instance, make, nearest, number, optional, switch, text, whole
from smqrt.transport.outgoing_proxy import HTTP_PORT, SOCKS_PORT, Proxy
from smqrt.transport.stream import Stream
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire.mqtt.fields import Props

log = logging.getLogger("smqrt.mqtt")

# ---- Callbacks that are queued until the application calls `run` (spec: smq §9).

_MAX_BYTES = 4 << 20  # of queued messages; reading from the connection pauses above this limit


class InboxCall:
    """A callback of the application that an `Inbox` holds."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, *arguments: Any) -> object:
        """Call the callback."""

    @abstractmethod
    def size_bytes(self, arguments: tuple[Any, ...]) -> int:
        """Return the size of the message in the arguments."""


class Inbox(Callbacks):
    """Callbacks that are queued until the application takes them. Functions other than an `InboxCall` run at once.

    Attributes:
        word: the close reason for `run`; None while the connection is open.
    """

    def __init__(self) -> None:
        super().__init__(log)
        self._calls: deque[tuple[InboxCall, tuple[Any, ...]]] = deque()
        self._bytes = 0
        self._is_discarding = False
        self.word: str | None = None

    def post(self, fn: Callable[..., object], *args: object) -> None:
        """See `Callbacks`."""
        if not isinstance(fn, InboxCall):
            fn(*args)
        elif not self._is_discarding:
            self._calls.append((fn, args))
            self._bytes += fn.size_bytes(args)
            if len(self._calls) == MAX_WAITING_JOBS or self._bytes > _MAX_BYTES:
                self._room.clear()
            self.arrived()

    def end(self, word: str) -> None:
        """Record the end of the connection; `word` is the close reason."""
        self.word = word
        self.arrived()

    def arrived(self) -> None:
        """Notify the subclass that a call was queued, or that the connection has ended."""

    @property
    def is_ready(self) -> bool:
        """Whether a call is queued, or the connection has ended."""
        return bool(self._calls) or self.word is not None

    def pop(self) -> tuple[InboxCall, tuple[Any, ...]] | None:
        """Remove and return the next call with its arguments; None when the queue is empty."""
        if not self._calls:
            return None
        call, arguments = self._calls.popleft()
        self._bytes -= call.size_bytes(arguments)
        # Half of the limits, so that reading does not stop and resume for each message.
        if len(self._calls) < MAX_WAITING_JOBS // 2 and self._bytes <= _MAX_BYTES // 2:
            self._room.set()
        return call, arguments

    def discard(self) -> None:
        """Drop the queued calls and all further ones, so that the connection does not wait for room."""
        self._is_discarding = True
        self._calls.clear()
        self._bytes = 0
        self._room.set()


class PythonCall(InboxCall):
    """A Python function.

    Args:
        function: of the application.
        has_payload: whether its second argument is a payload.
    """

    __slots__ = ("_function", "_has_payload")

    def __init__(self, function: Callable[..., object], has_payload: bool) -> None:
        self._function, self._has_payload = function, has_payload

    def __call__(self, *arguments: Any) -> object:
        """Call the function."""
        return self._function(*arguments)

    def size_bytes(self, arguments: tuple[Any, ...]) -> int:
        """See `InboxCall`."""
        return len(arguments[1]) if self._has_payload else 0


class PythonMessageCall(InboxCall):
    """A Python function that gets messages as objects."""

    __slots__ = ("_function",)

    def __init__(self, function: OnMessage) -> None:
        self._function = function

    def __call__(self, message: Message) -> object:
        """Call the function."""
        return self._function(message)

    def size_bytes(self, arguments: tuple[Message]) -> int:
        """See `InboxCall`."""
        return len(arguments[0].payload)


class PythonInbox(Inbox):
    """An inbox whose calls run in the greenlet that calls `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._arrival = Event()
        self._runner: object = None

    def arrived(self) -> None:
        """See `Inbox`."""
        self._arrival.set()

    @property
    def is_running(self) -> bool:
        """Whether a greenlet is in `run`."""
        return self._runner is not None

    @property
    def is_current(self) -> bool:
        """See `Callbacks`."""
        return self._runner is not None and self._runner is gevent.getcurrent()

    def run(self) -> str:
        """Run the calls until the connection ends, and return the close reason. Raises the exception of a call."""
        self._runner, turn = gevent.getcurrent(), Turn()
        try:
            while True:
                self._arrival.clear()
                while (waiting := self.pop()) is not None:
                    call, arguments = waiting
                    call(*arguments)
                    turn.yield_if_due()
                if self.word is not None and not self._calls:
                    return self.word
                self._arrival.wait()
        finally:
            self._runner = None


Options = Mapping[str, object]
"""Options by their documented names; an option with the value None is ignored."""
Connect = Callable[..., object]
"""`f(mqtt, op) -> socket` or `(None, error)`: opens a connection."""

DEFAULT_KEEPALIVE_S, MIN_KEEPALIVE_S = 600, 60  # of `mqtt3c.connect`
MAX_PACKET_BYTES = 65535 + 3  # of `mqtt3c.connect`; a larger packet ends `run` with "overflow"
TIMEOUT_MS = number(0, 86_400_000, "milliseconds", above=True)

_STRING_OR_BYTES = instance("a string or bytes", str, bytes)

# Options by their treatment in `client_options`: another name, unchanged, unchanged (Python only), converted.
_RENAMED = {"id": "clientidentifier", "uname": "username", "passwd": "password", "intf": "source"}
_QUEUE = ("queuesize", "queuebytes", "queuefull", "maxpacketsize", "inflight", "topicalias", "manualack")
_SESSION = (
    "version",
    "clientidentifier",
    "cleanstart",
    "keepalive",
    "authenticationmethod",
    "reconnectdelay",
    "reconnectmax",
)
_SAME = ("port", "nocheck", "ipv6", "username", "password", *_SESSION, *_QUEUE)
_FILES = ("cafile", "certfile", "keyfile", "store")
_CHANGED = ("secure", "shark", "timeout", "will", "alpn", "recbta", "onauth", "onmessage")
PROXY_OPTIONS = ("proxy", "proxyport", "socks", "proxyuser", "proxypass")
OPTIONS = (*_RENAMED, *_SAME, *_FILES, *_CHANGED, *PROXY_OPTIONS)
"""The names of all options of `create` and `connect`."""
_PUBLISH_OPTIONS = ("qos", "retain", "wait", "delivery")
_SUBSCRIBE_OPTIONS = ("qos", "onpub", "onmessage", "nolocal", "retainaspublished", "retainhandling")


# ---- options


def merged(op: object, more: Options, known: Iterable[str], fname: str) -> dict[str, Any]:
    """Return the options of a call, from the dict `op` and the keywords. Unknown options are logged.

    Args:
        known: the names of all options.
        fname: the name of the function, for errors.

    Raises:
        ArgumentError: `op` is not a mapping.
    """
    if op is not None and not isinstance(op, Mapping):
        raise ArgumentError(f"op must be a dict of the options of {fname}, or nothing, not {op!r:.80}")
    found = {name: value for name, value in {**(op or {}), **more}.items() if value is not None}
    known = list(known)
    for name in found.keys() - set(known):
        near = nearest(name, known, 0.75)
        hint = f"; did you mean {near!r}?" if near else ""
        log.warning("%s: unknown option %r is ignored%s", fname, name, hint)
    return found


def client_options(given: Options, version: int) -> dict[str, Any]:
    """Return the arguments of `MqttClient` for documented options.

    This function checks renamed and converted options, so that errors have the documented name; `MqttClient` checks the
    others.

    Args:
        version: 5, or 4 for MQTT 3.1.1.

    Raises:
        ArgumentError: an invalid value.
    """
    chosen: dict[str, Any] = {"version": version, "resubscribe": False, "queuefull": "raise"}
    for name in _RENAMED.keys() & given.keys():
        chosen[_RENAMED[name]] = (_STRING_OR_BYTES if name == "passwd" else text()).check(name, given[name])
    chosen |= {name: given[name] for name in (*_SAME, *_FILES) if name in given}
    rule = choice(5) if version == 5 else choice(4, "3.1")
    chosen["version"] = rule.check("version", given.get("version", version))
    secure, shark = given.get("secure"), given.get("shark")
    chosen["secure"] = shark if isinstance(shark, ClientTls) and not isinstance(secure, ClientTls) else secure or shark
    if chosen["secure"] is None:
        del chosen["secure"]
    if "timeout" in given:
        chosen["timeout"] = TIMEOUT_MS.check("timeout", given["timeout"]) / 1000
    if "will" in given:
        chosen["will"] = client_will(given["will"])
    if "onauth" in given:
        chosen["onauth"] = function().check("onauth", given["onauth"])
    if "alpn" in given:
        chosen["alpn"] = [given["alpn"]] if isinstance(given["alpn"], str) else given["alpn"]
    if "proxy" in given:
        chosen["proxy"] = proxy_of(given)
    return chosen


def proxy_of(given: Options) -> Proxy:
    """Return the proxy of the options `proxy`, `proxyport`, `socks`, `proxyuser` and `proxypass`.

    Raises:
        ArgumentError: an invalid value.
    """
    host = given["proxy"]
    if isinstance(host, Proxy):
        return host
    is_socks = switch().check("socks", given.get("socks", False))
    return Proxy(
        text().check("proxy", host),
        whole(1, 0xFFFF).check("proxyport", given.get("proxyport", SOCKS_PORT if is_socks else HTTP_PORT)),
        is_socks,
        optional(text()).check("proxyuser", given.get("proxyuser")),
        optional(text()).check("proxypass", given.get("proxypass")),
    )


def wait_of(value: object) -> bool | float:
    """Return the option `wait` of `publish`: seconds, True for the option `timeout`, False not to wait.

    Raises:
        ArgumentError: neither true, false nor a number of milliseconds.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    return TIMEOUT_MS.check("wait", value) / 1000


def client_will(will: object) -> object:
    """Return a will with the names of `MqttClient`; `message` is the older name of `payload`."""
    if not isinstance(will, Mapping) or "message" not in will:
        return will
    rest = {name: value for name, value in will.items() if name != "message"}
    return rest if "payload" in rest else rest | {"payload": will["message"]}


# ---- clients


class Mqtt:
    """A client of `mqttc.create` (MQTT 5), and the base class of MQTT 3.1.1 clients.

    Args:
        inbox: queue of callbacks, if the application calls `run`; else None.
        payload_type: type of the payloads for `onpub`.

    Attributes:
        sock: the connection (`smqrt.transport.stream.Stream`) of `connect`, or the socket passed to `create`; else
            None.
    """

    version = 5

    def __init__(self, inbox: PythonInbox | None = None, payload_type: type[bytes] | type[bytearray] = bytes) -> None:
        self._inbox, self._payload_type = inbox, payload_type
        self._client: MqttClient
        self.sock: Stream | None = None

    # ---- messages

    def publish(
        self, topic: str, msg: object, op: Options | None = None, prop: Props | None = None, **options: object
    ) -> bool | tuple[bool, Delivery | None]:
        """Publish a message; without a connection it is queued.

        Args:
            topic: without wildcards.
            msg: bytes, a bytearray, a str (sent as UTF-8), or a number (sent as text).
            op: `qos` 0, 1 or 2; `retain`; `wait`: wait until the message is delivered, at most this many milliseconds,
                with True the option `timeout`; `delivery`: return the delivery too. Also as keywords.
            prop: MQTT 5: properties of the message, such as `{"contenttype": "text/plain"}`.

        Returns:
            Whether the client is connected; False also when the client has ended and the message was not sent. With
            `wait`, True: the message is delivered. With `delivery`, that value and the
            `smqrt.clients.mqtt.delivery.Delivery`, or None when the client has ended.

        Raises:
            ArgumentError: an invalid argument, or a message larger than `maxpacketsize`.
            QueueFullError: no room in the queue (`queuesize`, `queuebytes`).
            NoAnswer: with `wait`, the time is over.
            ClosedError: with `wait`, the client has ended.
            DroppedError: with `wait`, the message was dropped, or the broker refused it.
        """
        chosen = merged(op, options, _PUBLISH_OPTIONS, "publish")
        wait_s, is_delivery_wanted = wait_of(chosen.get("wait")), bool(chosen.get("delivery"))
        is_number = isinstance(msg, int | float) and not isinstance(msg, bool)
        try:
            item = self._client.publish(
                topic,
                str(msg) if is_number else msg,  # type: ignore[arg-type]  # checked there
                chosen.get("qos", 0),
                chosen.get("retain", False),
                prop,
            )
        except ClosedError:
            if wait_s:
                raise
            return (False, None) if is_delivery_wanted else False
        if item.error == "toolarge":
            raise ArgumentError(f"msg must fit into maxpacketsize; this one has {item.size_bytes} bytes with its topic")
        is_delivered = bool(wait_s) and item.wait(self._client.timeout_s if wait_s is True else wait_s)
        is_connected = is_delivered or self._client.connected
        return (is_connected, item) if is_delivery_wanted else is_connected

    def subscribe(
        self,
        topic: str | list[FilterOptions],
        callback: Callable[..., object] | Options | None = None,
        op: Options | Props | None = None,
        prop: Props | None = None,
        **options: object,
    ) -> bool:
        """Subscribe; without a connection the subscription is queued.

        Args:
            topic: `+` matches one level, `#` at the end all further levels. A list subscribes to several filters in one
                packet; each item is a filter, `(filter, qos)` or `(filter, {"qos": 1, "nolocal": True})`. The callback
                then receives a list of topics and a list of reasons.
            callback: receives the broker's response: MQTT 5 `(topic, reason, prop)`, MQTT 3.1.1 `(returncode)`: the
                granted QoS, or an error of 128 or more. May be omitted: a dict in its place is `op`.
            op: `qos`; `onpub`, a function for the messages of this subscription; `onmessage`, a function that gets them
                as objects, in the place of `onpub`; and with MQTT 5 `nolocal`, `retainaspublished`, `retainhandling`.
                Also as keywords.
            prop: MQTT 5: properties of SUBSCRIBE.

        Returns:
            Whether the client is connected; False also when the client has ended.

        Raises:
            ArgumentError: an invalid argument.
            QueueFullError: no room in the queue.
        """
        if isinstance(callback, Mapping):
            callback, op, prop = None, callback, op if prop is None else prop
        chosen = merged(op, options, _SUBSCRIBE_OPTIONS, "subscribe")
        handler = self._message_handler(chosen.get("onpub"), chosen.get("onmessage"))
        callback = optional(function()).check("callback", callback)
        try:
            return self._client.subscribe(
                topic,
                handler,
                None if callback is None else self._for_inbox(self._on_suback(callback), False),
                qos=chosen.get("qos", 0),
                nolocal=chosen.get("nolocal", False),
                retainaspublished=chosen.get("retainaspublished", False),
                retainhandling=chosen.get("retainhandling", 0),
                properties=prop,
            )
        except ClosedError:
            return False

    def unsubscribe(
        self, topic: str | list[str], callback: Callable[..., object] | Props | None = None, prop: Props | None = None
    ) -> bool:
        """End a subscription.

        Args:
            topic: the subscribed topic, or a list of them.
            callback: receives the broker's response: MQTT 5 `(topic, reason, prop)`, MQTT 3.1.1 `()`. May be omitted:
                a dict in its place is `prop`.
            prop: MQTT 5: properties of UNSUBSCRIBE.

        Returns, raises:
            As `subscribe`.
        """
        if isinstance(callback, Mapping):
            callback, prop = None, callback
        callback = optional(function()).check("callback", callback)
        onunsuback = None if callback is None else self._for_inbox(self._on_unsuback(callback), False)
        try:
            return self._client.unsubscribe(topic, onunsuback, prop)
        except ClosedError:
            return False

    def messages(self) -> Iterator[Message]:
        """Iterate over the messages of subscriptions without `onpub`, until the client has ended.

        From this call on, the `onpub` and `onmessage` of the client are not called any more. `for message in mqtt` does
        the same. With the option `manualack`, `message.ack()` acknowledges a message of QoS 1 or 2. The payloads are
        bytes.
        """
        self._client.onpub = None
        return iter(self._client)

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    # ---- callbacks: the arguments of the application's functions

    def _message_handler(self, onpub: object, onmessage: object) -> Callable[..., object] | None:
        """Return the callback of a client or subscription for `MqttClient`; None without both functions.

        Raises:
            ArgumentError: a value is not a function.
        """
        called = optional(function()).check("onpub", onpub)
        called_with_object = optional(function()).check("onmessage", onmessage)
        if called_with_object is not None:
            is_queued = self._inbox is not None
            return MessageCallback(PythonMessageCall(called_with_object) if is_queued else called_with_object)
        return None if called is None else self._for_inbox(self._on_message(called), True)

    def _on_message(self, onpub: Callable[..., object]) -> Callable[..., object]:
        payload_type = self._payload_type
        if payload_type is bytes:
            return onpub
        return lambda topic, payload, prop, cpt: onpub(topic, payload_type(payload), prop, cpt)

    def _on_suback(self, callback: Callable[..., object]) -> Callable[..., object]:
        return callback

    def _on_unsuback(self, callback: Callable[..., object]) -> Callable[..., object]:
        return callback

    def _for_inbox(self, fn: Callable[..., object], has_payload: bool) -> Callable[..., object]:
        return fn if self._inbox is None else PythonCall(fn, has_payload)

    # ---- the connection

    def setwill(self, w: Options | None) -> None:
        """Set the will of the next connection: `{"topic", "payload" (or "message"), "qos", "retain", "properties"}`;
        None for no will.

        Raises:
            ArgumentError: an invalid will.
        """
        self._client.setwill(client_will(w))  # type: ignore[arg-type]  # checked there

    def authenticate(self, timeout: float | None = None) -> bool:
        """Authenticate again on the open connection (MQTT 5), and wait for the broker.

        Args:
            timeout: milliseconds; None for the option `timeout`.

        Returns, raises:
            As `smqrt.mqtt.MqttClient.authenticate`.
        """
        return self._client.authenticate(None if timeout is None else TIMEOUT_MS.check("timeout", timeout) / 1000)

    def disconnect(self, reason: int = 0) -> bool:
        """Close the client in the background, after sending the queued messages.

        Args:
            reason: MQTT 5: the reason code for the broker. With 4 the broker publishes the will.

        Returns:
            Whether the client was connected.

        Raises:
            ArgumentError: not a number from 0 to 255.
        """
        return self._client.disconnect(reason)

    def close(self) -> None:
        """Close the client, and wait at most 5 seconds until the queued messages are delivered.

        The number of undelivered messages is logged. In a callback of `run`, `close` is the same as `disconnect`.
        """
        inbox = self._inbox
        if inbox is not None and inbox.is_current:
            self._client.disconnect()
            return
        if inbox is not None and not inbox.is_running:
            inbox.discard()
        try:
            self._client.close()
        except DeliveryError as error:
            log.warning("%s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> tuple[int, bool, bool]:
        """Return the number of queued messages and subscriptions, whether connected, and whether closed or ended."""
        return self._client.status()

    def run(self) -> tuple[None, str]:
        """Receive messages until the connection ends, and run the callbacks in this greenlet. For clients of `connect`.

        Returns:
            None and the close reason: "disconnect" (of this client), "pingresp" (no response to a ping), "overflow" (a
            packet of more than 65535 bytes), "unknowncp", "invalidresp", or a socket error such as "socketreadfailed".
            "socketclosed" after an earlier `run`.

        Raises:
            ArgumentError: a client of `create`, or another `run` of the client is active.
            An exception of a callback, which also closes the connection.
        """
        inbox = self._inbox
        if inbox is None:
            raise ArgumentError("run: only for clients of connect; clients of create run their callbacks themselves")
        if inbox.is_running:
            raise ArgumentError("run: another run of this client is active; a client has one run at a time")
        if self.sock is None:
            return None, "socketclosed"
        try:
            return None, inbox.run()
        finally:
            self._client.disconnect()
            inbox.discard()
            self.sock = None


class Mqtt3(Mqtt):
    """A client of `mqtt3c`, and of `mqttc.connect`: MQTT 3.1.1. Payloads are bytes."""

    version = 4

    def _on_message(self, onpub: Callable[..., object]) -> Callable[..., object]:
        return lambda topic, payload, *_: onpub(topic, payload)

    def _on_suback(self, callback: Callable[..., object]) -> Callable[..., object]:
        return lambda topic, code, prop: callback(code)

    def _on_unsuback(self, callback: Callable[..., object]) -> Callable[..., object]:
        return lambda *_: callback()


# ---- connecting


M = TypeVar("M", bound=Mqtt)


def create(
    mqtt: M, addr: object, onstatus: object, onpub: object, given: Options, prop: Props | None = None
) -> tuple[M, None]:
    """Start the client of `mqtt`, which connects in the background. As in Lua, `onstatus` reports an invalid `addr`.

    Args:
        given: options, see `merged`.
        prop: MQTT 5: the properties of CONNECT.
    """
    status = function().check("onstatus", onstatus)
    handler = mqtt._message_handler(onpub, given.get("onmessage")) or _log_message
    address: str | list[str] | Stream | Callable[[], Stream]
    try:
        if isinstance(addr, str | list):
            parse_addresses(addr)
            address = addr
        elif is_socket(addr):
            address = mqtt.sock = stream_of(addr)
        elif callable(addr):
            address = partial(_stream_from, addr, mqtt, given)
        else:
            raise StreamError("cannotresolve", f"addr must be {ADDRESS_KINDS}, or a function, not {addr!r:.80}")
    except ArgumentError as error:
        address = partial(_fail_to_connect, StreamError("cannotresolve", str(error)))
    except StreamError as error:
        address = partial(_fail_to_connect, error)
    arguments = client_options(given, mqtt.version)
    mqtt._client = MqttClient(address, status, handler, prop, **arguments)
    return mqtt, None


def _fail_to_connect(error: StreamError) -> Stream:
    """Connect function for an invalid address."""
    raise error


def _log_message(topic: str, *_: object) -> None:
    log.info("MQTT message without a callback: %s", topic)


def _stream_from(connect: Connect, mqtt: Mqtt, given: Options) -> Stream:
    """Open a connection with the function of the application."""
    try:
        returned = connect(mqtt, dict(given))
        sock, word = returned if isinstance(returned, tuple) else (returned, None)
        if not sock:
            raise StreamError(str(word or "failed"), "the connect function returned no connection")
        return stream_of(sock)
    except StreamError:
        raise
    except TimeoutError as error:
        raise StreamError("timeout", str(error)) from None
    except OSError as error:
        raise StreamError("cannotconnect", str(error)) from None
    except Exception as error:
        log.exception("the connect function of an MQTT client failed")
        raise StreamError("failed", str(error)) from None


def connect(addr: object, onpub: object, given: Options) -> tuple[Mqtt3, None] | tuple[None, str | int]:
    """Connect a client whose application calls `run`; see `smqrt.mqtt3c.connect`.

    Args:
        given: options, see `merged`.
    """
    inbox = PythonInbox()
    mqtt = Mqtt3(inbox)
    if given.get("onmessage") is None:
        function().check("onpub", onpub)
    handler = mqtt._message_handler(onpub, given.get("onmessage"))
    if not isinstance(addr, str | list) and not is_socket(addr):
        raise ArgumentError(f"addr must be {ADDRESS_KINDS}, not {addr!r:.80}")
    chosen = client_options({"keepalive": DEFAULT_KEEPALIVE_S, **given}, Mqtt3.version)
    settings = make(MqttOptions, chosen)
    if isinstance(addr, str | list):
        try:
            parse_addresses(addr)
        except ArgumentError:
            return None, "cannotresolve"
    try:
        stream = open_unless_untrusted(addr, settings)
    except StreamError as error:
        return None, error.word
    # `open_unless_untrusted` has copied the credentials of the address to the settings.
    chosen |= {"username": settings.username, "password": settings.password}
    chosen["keepalive"] = max(settings.keepalive, MIN_KEEPALIVE_S)
    mqtt.sock = stream
    mqtt._client, is_accepted = start(stream, handler, inbox, chosen)
    return (mqtt, None) if is_accepted else (None, connect_error(mqtt._client.end)[0])


def start(
    stream: Stream, onpub: Callable[..., object] | None, inbox: Inbox, options: Mapping[str, Any]
) -> tuple[MqttClient, bool]:
    """Start a client for `run` over a connected stream, and wait until it is connected or has ended.

    Args:
        inbox: receives the callbacks and the close reason.
        options: options of `MqttClient`.

    Returns:
        The client, and whether it is connected; if not, `connect_error(client.end)` has the error.
    """
    properties = {"maximumpacketsize": MAX_PACKET_BYTES}
    client = MqttClient(stream, _keep_one_connection, onpub, properties, inbox, **options)

    def end() -> None:
        inbox.end(run_word(client.end))

    try:
        is_accepted = client.wait_connected()
    except BaseException:  # also when the waiting greenlet is killed
        client.disconnect()
        raise
    client.on_end(end)
    if client.closed:  # the client has ended before `on_end`
        end()
    return client, is_accepted


def _keep_one_connection(kind: str, code: str, status: Mapping[str, Any]) -> bool:
    return (kind, code) == ("mqtt", "connect") and status["reasoncode"] == 0
