"""Python half of `mqttc` and `mqtt3c` (spec: smq §8, §9).

Lua refers to a client by an integer. The callbacks of a client that `create` makes run in the client's greenlet. Those
of a client that `connect` makes wait in a `LuaInbox` until the activity that calls `run` takes them.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import gevent
from gevent import get_hub
from gevent.event import AsyncResult

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaError, LuaResult, LuaValue, LuaValues, encoded, fail, methods
from smqrt.apps.lua.socket_handles import StreamHandle
from smqrt.apps.lua.sqlite import full_path
from smqrt.apps.lua.vm import LuaFunction, Services, Vm
from smqrt.broker.deferred import Deferred
from smqrt.clients.mqtt.addresses import open_unless_untrusted, parse_addresses
from smqrt.clients.mqtt.connect import MqttOptions, connect_error
from smqrt.clients.mqtt.documented import PROXY_OPTIONS, TIMEOUT_MS, Inbox, InboxCall, proxy_of, start
from smqrt.clients.mqtt.messages import MessageCallback
from smqrt.clients.mqtt.subscriptions import FilterOptions
from smqrt.errors import ArgumentError, ClosedError, DroppedError, NoAnswer, QueueFullError, StoreError, StreamError
from smqrt.mqtt import Delivery, Message, MqttClient
from smqrt.settings.option_types import make, options_of
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.fields import NUMBERS, TEXTS

log = logging.getLogger("smqrt.mqtt")

_NAMES = {"pub": "onpub", "message": "onmessage", "ack": "onsuback", "status": "onstatus", "auth": "onauth"}
_CALLS_PER_TAKE = 4  # six values each, since a call from Lua can't return an unlimited number of values

Properties = Mapping[str, object] | bytes | None
"""Properties of a message or an acknowledgement; those of a status are packed."""

MqttEvent = tuple[Any, ...]
"""Arguments of a callback: topic, payload, properties and flags of a message, or topic, code and properties of an
acknowledgement."""


class LuaCall(InboxCall):
    """A callback in Lua.

    Args:
        vm: the runtime.
        event_ref: reference of the Lua function that dispatches events.
        number: of the client.
        kind: a key of `_NAMES`.
        ref: reference of the application's function, owned by this object; None for the function of the client.
    """

    __slots__ = ("_event_ref", "_function", "_kind", "_number", "_ref", "_vm")

    def __init__(self, vm: Vm, event_ref: int, number: int, kind: str, ref: int | None) -> None:
        self._vm, self._event_ref, self._number = vm, event_ref, number
        self._kind, self._ref = kind.encode(), ref
        self._function = None if ref is None else LuaFunction(vm, ref)

    def __call__(self, *arguments: Any) -> object:
        """Run the callback in this greenlet; return its first value, or NotImplemented after a logged error."""
        try:
            values = self._vm.run(self._event_ref, self._number, *self.values(*arguments))
        except LuaError as error:
            log.error("the callback %s of an MQTT client failed: %s", _NAMES[self._kind.decode()], error)
            return NotImplemented
        return values[0] if values else None

    def values(
        self, first: Any, second: LuaValue = None, third: Properties = None, fourth: LuaValue = None
    ) -> LuaValues:
        """Return the kind, the reference and the four arguments of an event, with packed properties or None."""
        if isinstance(first, list):  # the answer to a list of topic filters
            packed = bridge.dump({"topics": first, "reasons": second})
            return b"acks", self._ref, packed, None, bridge.dump(third) if third else None, None
        if self._kind == b"status":
            return b"status", self._ref, encoded(first), second, cast(bytes, third), None
        return self._kind, self._ref, encoded(first), second, bridge.dump(third) if third else None, fourth

    def size_bytes(self, arguments: MqttEvent) -> int:
        """Return the size of the message's payload; 0 for other events."""
        return len(arguments[1]) if self._kind == b"pub" else 0


class LuaMessageCall(LuaCall):
    """A callback in Lua that gets a message as an object.

    Args:
        vm, event_ref, number, kind, ref: see `LuaCall`.
        number_of: returns the number by which Lua acknowledges a message; 0 for one that needs no acknowledgement.
    """

    __slots__ = ("_number_of",)

    def __init__(
        self, vm: Vm, event_ref: int, number: int, kind: str, ref: int | None, number_of: Callable[[Message], int]
    ) -> None:
        super().__init__(vm, event_ref, number, kind, ref)
        self._number_of = number_of

    def values(self, first: Message, *_: object) -> LuaValues:
        """Return the values of an event: as those of `LuaCall`, and 256 times the number for `ack` in the last one."""
        properties = bridge.dump(first.properties) if first.properties else None
        flags = first.cpt | self._number_of(first) << 8
        return self._kind, self._ref, encoded(first.topic), first.payload, properties, flags

    def size_bytes(self, arguments: MqttEvent) -> int:
        """Return the size of the message's payload."""
        return len(arguments[0].payload)


class LuaInbox(Inbox):
    """An inbox from which an activity takes the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._taking: Deferred[LuaValues] | None = None

    def take(self) -> LuaResult:
        """Return up to four calls of six values each, or nil and an error word at the end; parks until then."""
        if self.is_ready:
            return self._values()
        self._taking = Deferred()
        return self._taking

    def arrived(self) -> None:
        """See `Inbox`."""
        if self._taking is not None:
            get_hub().loop.run_callback(self._hand_over, self._taking)
            self._taking = None

    def _hand_over(self, taking: Deferred[LuaValues]) -> None:
        if not taking.done:
            taking.resolve(self._values())

    def _values(self) -> LuaValues:
        found: LuaValues = ()
        for _ in range(_CALLS_PER_TAKE):
            waiting = self.pop()
            if waiting is None:
                break
            call, arguments = waiting
            found += cast(LuaCall, call).values(*arguments)
        return found or fail(self.word or "socketclosed")


class MqttBinding:
    """MQTT clients by number."""

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm, self._services = vm, services
        self._next = itertools.count(1).__next__
        self._clients: dict[int, MqttClient] = {}
        self._inboxes: dict[int, LuaInbox] = {}
        self._deliveries: dict[int, Delivery] = {}  # those that have a Lua object
        self._iterations: dict[int, Iterator[Message]] = {}
        self._unacknowledged: dict[int, Message] = {}  # with `manualack`, those that have a Lua object
        self._openings: dict[int, AsyncResult[Stream]] = {}
        self._event_ref = 0

    def on_event(self, ref: int) -> None:
        """Set the Lua function that dispatches events: `f(number, kind, ref, ...)`."""
        self._event_ref = ref

    def _call(self, number: int, kind: str, ref: int | None = None) -> LuaCall:
        return LuaCall(self._vm, self._event_ref, number, kind, ref)

    def _optional(self, number: int, kind: str, ref: int | None) -> LuaCall | None:
        return None if ref is None else self._call(number, kind, ref)

    def _on_messages(self, number: int, ref: int | None = None) -> MessageCallback:
        call = LuaMessageCall(self._vm, self._event_ref, number, "message", ref, self._ack_number)
        return MessageCallback(call)

    def _ack_number(self, message: Message) -> int:
        """Return a number for `ack`; 0 for a message that needs no acknowledgement."""
        if not message.needs_ack:
            return 0
        key = self._next()
        self._unacknowledged[key] = message
        return key

    # ---- clients that connect and reconnect automatically

    def create(self, addresses: bytes | None, socket: int | None, options: bytes) -> int:
        """Create a client that connects in the background, and return its number.

        Args:
            addresses: a packed list of addresses of the broker; None to use `socket`.
            socket: number of a connected socket; None if the application's function makes the connections.
            options: a packed table; see `_options`.
        """
        number = self._next()
        target: Any = partial(self._open, number)
        if addresses is not None:
            target = _checked_target(_texts(addresses))
        elif socket is not None:
            target = self._stream(socket)
        call_status = self._call(number, "status")

        def status(kind: str, code: str, more: Mapping[str, object]) -> object:
            answer: Any = call_status(kind.encode(), code.encode(), bridge.dump(more))
            if answer is NotImplemented or answer is None or isinstance(answer, bool):
                return answer
            return answer or _SOON_S  # a number, which is true in Lua even when it is 0

        chosen = self._options(options)
        if "authenticationmethod" in chosen:
            call_auth = self._call(number, "auth")
            chosen["onauth"] = lambda data: call_auth(data or b"", data is not None, None)
        onpub = self._on_messages(number) if chosen.pop("onmessage", False) else self._call(number, "pub")
        client = MqttClient(target, status, onpub, resubscribe=False, **chosen)
        self._clients[number] = client
        client.on_end(lambda: self._forget(number))
        return number

    def _forget(self, number: int) -> None:
        self._clients.pop(number, None)
        self._vm.start(self._event_ref, number, b"end")

    def _options(self, packed: bytes) -> dict[str, Any]:
        """Return the keyword arguments of `MqttClient`; in Lua, times are in milliseconds and TLS objects numbers."""
        chosen: dict[str, Any] = {key.decode(): value for key, value in bridge.load(packed).items()}
        for name, value in chosen.items():
            if isinstance(value, bytes) and name != "password":
                chosen[name] = value.decode("utf-8", "replace")
        chosen = bridge.for_options(options_of(MqttOptions), chosen)
        if chosen["version"] == 3.1:  # as other options that may be numbers, the text has become one
            chosen["version"] = "3.1"
        # `publish` is called with Lua on the C stack, so it can't wait.
        chosen.setdefault("queuefull", "raise")
        if chosen["queuefull"] == "wait":
            raise ArgumentError("queuefull must be 'raise' (publish returns nil, \"full\") or 'drop', not 'wait'")
        if "store" in chosen:
            io = self._services.ios.get("home")
            chosen["store"] = full_path(chosen["store"], io.realpath() if io else os.getcwd())
        if "timeout" in chosen:
            chosen["timeout"] = TIMEOUT_MS.check("timeout", bridge.as_number(chosen["timeout"])) / 1000
        proxy = {name: chosen.pop(name) for name in PROXY_OPTIONS if name in chosen}
        if "proxy" in proxy:
            if "proxyport" in proxy:
                proxy["proxyport"] = bridge.as_number(proxy["proxyport"])
            chosen["proxy"] = proxy_of(proxy)
        if "tls" in chosen:
            chosen["secure"] = self._services.tls[chosen.pop("tls")]
        chosen["alpn"] = [word.decode("ascii", "replace") for word in chosen.pop("alpn", {}).values()]
        chosen["properties"] = mqtt_properties(chosen.pop("properties", {}))
        if "will" in chosen:
            chosen["will"] = _will(chosen["will"])
        return chosen

    def _stream(self, socket: int) -> Stream:
        stream: Stream = self._services.sockets.stream(socket)
        return stream

    # ---- connections that the application makes

    def _open(self, number: int) -> Stream:
        """Run the application's connect function in a cosocket, and wait for its connection."""
        opening: AsyncResult[Stream] = AsyncResult()
        self._openings[number] = opening
        self._vm.start(self._event_ref, number, b"open")
        try:
            stream = opening.get()
            assert stream is not None
            return stream
        finally:
            self._openings.pop(number, None)

    def opened(self, number: int, socket: int | None, word: bytes | None) -> LuaResult:
        """Continue the client's connection attempt with a socket or an error; parks until the connection is closed."""
        opening = self._openings.pop(number, None)
        if socket is None or opening is None:
            if opening is not None:
                opening.set_exception(StreamError((word or b"failed").decode("utf-8", "replace")))
            return None
        try:
            stream = self._stream(socket)
        except StreamError as error:
            opening.set_exception(error)
            return None
        over: Deferred[None] = Deferred()
        stream.on_close = lambda: None if over.done else over.resolve(None)
        opening.set(stream)
        return over

    # ---- connections that the application runs

    def connect(self, socket: int | None, addresses: bytes | None, options: bytes) -> LuaResult:
        """Create a client on a connected socket; blocks until Connack. Its calls wait for `take`.

        Args:
            socket: number of the socket; None to connect to `addresses`.
            addresses: a packed list of addresses.
            options: a packed table; see `_options`.

        Returns:
            The numbers of the client and of its socket; nil, the error and a text; or nil, a reason code and true.
        """
        chosen = self._options_of_connect(options)
        takes_messages = chosen.pop("onmessage", False)
        if socket is None:
            try:
                settings = make(MqttOptions, chosen)
                stream = open_unless_untrusted(_checked(_texts(addresses or b"")), settings)
            except StreamError as error:
                return fail(error.word, "sock")
            # The addresses may contain credentials, which were copied to the settings.
            chosen |= {"username": settings.username, "password": settings.password}
            socket = self._services.sockets.add(StreamHandle(stream))
        number, inbox = self._next(), LuaInbox()
        onpub = self._on_messages(number) if takes_messages else self._call(number, "pub")
        client, is_accepted = start(self._stream(socket), onpub, inbox, chosen)
        if not is_accepted:
            self._services.sockets.close(socket)
            word, kind = connect_error(client.end)
            return fail(word, str(kind)) if isinstance(word, str) else (None, word, True)
        self._clients[number], self._inboxes[number] = client, inbox
        return number, socket

    def check(self, options: bytes) -> None:
        """Raise ArgumentError for options that `connect` would reject; called before the socket is connected."""
        chosen = self._options_of_connect(options)
        chosen.pop("onmessage", None)
        make(MqttOptions, chosen)

    def _options_of_connect(self, packed: bytes) -> dict[str, Any]:
        chosen = self._options(packed) | {"resubscribe": False}
        del chosen["properties"]  # `start` sets its own
        return chosen

    def take(self, number: int) -> LuaResult:
        """Return the next calls; see `LuaInbox.take`."""
        inbox = self._inboxes.get(number)
        return fail("socketclosed") if inbox is None else inbox.take()

    def dropped(self, number: int) -> None:
        """Disconnect a client whose `run` has returned or whose Lua object was collected."""
        inbox = self._inboxes.pop(number, None)
        if inbox is not None:
            inbox.discard()
        client = self._clients.pop(number, None)
        if client is not None:
            client.disconnect()

    # ---- methods

    def publish(
        self, number: int, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes | None
    ) -> LuaResult:
        """See `mqtt:publish`; return whether the client is connected, or nil and "full" or "toolarge"."""
        item = self._published(number, topic, payload, qos, retain, properties)
        return self._clients[number].connected if isinstance(item, Delivery) else item

    def _published(
        self, number: int, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes | None
    ) -> Delivery | LuaResult:
        """Publish a message; return its delivery, or the values for Lua of a message that was not accepted."""
        client = self._clients.get(number)
        if client is None:
            return False
        props = mqtt_properties(bridge.load(properties)) if properties else None
        try:
            item = client.publish(topic.decode("utf-8", "surrogateescape"), payload, qos, retain, props)
        except QueueFullError:
            return fail("full")
        except StoreError as error:
            return fail("storefailed", str(error))
        except ClosedError:
            return False
        return fail("toolarge") if item.error == "toolarge" else item

    def publish_delivery(
        self, number: int, topic: bytes, payload: bytes, qos: int, retain: bool, properties: bytes | None
    ) -> LuaResult:
        """Publish as `publish` does; return whether the client is connected, and the number of the delivery."""
        item = self._published(number, topic, payload, qos, retain, properties)
        if not isinstance(item, Delivery):
            return item
        key = self._next()
        self._deliveries[key] = item
        return self._clients[number].connected, key

    # Clients with a store wait for the disk: the same methods without Lua on the C stack.
    create_stored, publish_stored, publish_delivery_stored = create, publish, publish_delivery

    def publish_wait(
        self,
        number: int,
        topic: bytes,
        payload: bytes,
        qos: int,
        retain: bool,
        properties: bytes | None,
        timeout_ms: float | None,
    ) -> LuaResult:
        """Publish as `publish` does, and block until the message is delivered; see `delivery_wait`.

        Args:
            timeout_ms: None for the option `timeout` of the client.
        """
        client = self._clients.get(number)
        item = self._published(number, topic, payload, qos, retain, properties)
        if client is None or item is False:
            return fail("closed")
        if not isinstance(item, Delivery):
            return item
        return _delivered(item, client.timeout_s if timeout_ms is None else timeout_ms / 1000)

    def delivery_wait(self, key: int, timeout_ms: float | None) -> LuaResult:
        """Block until a message is delivered.

        Returns:
            True; or nil and "timeout", "closed", "dropped", "lost", "toolarge", or "refused" and the reason code.
        """
        return _delivered(self._deliveries[key], None if timeout_ms is None else timeout_ms / 1000)

    def delivery_status(self, key: int) -> LuaResult:
        """Return whether the delivery is complete or has failed, and its error: nil, a word, or "refused", code."""
        item = self._deliveries[key]
        if isinstance(item.error, int):
            return item.done, b"refused", item.error
        return item.done, None if item.error is None else item.error.encode()

    def delivery_dropped(self, key: int) -> None:
        """Forget a delivery whose Lua object was collected."""
        self._deliveries.pop(key, None)

    # ---- iterations over messages

    def messages(self, number: int) -> int | None:
        """Begin an iteration over the messages without a callback; return its number, or None for an ended client."""
        client = self._clients.get(number)
        if client is None:
            return None
        client.onpub = None
        key = self._next()
        self._iterations[key] = iter(client)
        return key

    def next_message(self, key: int) -> LuaResult:
        """Return topic, payload, properties, the first byte, and a number for `ack` or None; blocks. None at the end.

        Only a message that must be acknowledged has a number.
        """
        message = next(self._iterations[key], None)
        if message is None:
            del self._iterations[key]
            return None
        properties = bridge.dump(message.properties) if message.properties else None
        return encoded(message.topic), message.payload, properties, message.cpt, self._ack_number(message) or None

    def ack(self, key: int) -> None:
        """Acknowledge a message; only the first call has an effect."""
        message = self._unacknowledged.pop(key, None)
        if message is not None:
            message.ack()

    def message_dropped(self, key: int) -> None:
        """Forget a message whose Lua object was collected."""
        self._unacknowledged.pop(key, None)

    def messages_dropped(self, key: int) -> None:
        """End an iteration whose Lua object was collected."""
        self._iterations.pop(key, None)

    # ---- subscriptions

    def subscribe(
        self,
        number: int,
        topic: bytes,
        is_list: bool,
        onpub: int | None,
        onsuback: int | None,
        qos: int,
        nolocal: bool,
        retainaspublished: bool,
        retainhandling: int,
        properties: bytes | None,
        takes_messages: bool,
    ) -> LuaResult:
        """See `mqtt:subscribe`; return whether the client is connected, or nil and "full".

        Args:
            is_list: whether `topic` is a packed list; see `_filters`.
            takes_messages: whether `onpub` is the function `onmessage`, which gets messages as objects.
        """
        return self._ask(
            number,
            MqttClient.subscribe,
            _filters(topic, is_list),
            self._on_messages(number, onpub) if takes_messages else self._optional(number, "pub", onpub),
            self._optional(number, "ack", onsuback),
            qos=qos,
            nolocal=nolocal,
            retainaspublished=retainaspublished,
            retainhandling=retainhandling,
            properties=mqtt_properties(bridge.load(properties)) if properties else None,
        )

    def _ask(self, number: int, method: Callable[..., bool], *arguments: object, **options: object) -> LuaResult:
        client = self._clients.get(number)
        try:
            return client is not None and method(client, *arguments, **options)
        except QueueFullError:
            return fail("full")
        except ClosedError:
            return False

    def unsubscribe(
        self, number: int, topic: bytes, is_list: bool, onunsuback: int | None, properties: bytes | None
    ) -> LuaResult:
        """See `mqtt:unsubscribe`; return whether the client is connected, or nil and "full"."""
        return self._ask(
            number,
            MqttClient.unsubscribe,
            _filters(topic, is_list),
            self._optional(number, "ack", onunsuback),
            mqtt_properties(bridge.load(properties)) if properties else None,
        )

    def setwill(self, number: int, will: bytes | None) -> None:
        """See `mqtt:setwill`."""
        if client := self._clients.get(number):
            client.setwill(_will(bridge.load(will)) if will else None)

    def discard(self, number: int) -> None:
        """Discard the queued messages."""
        if client := self._clients.get(number):
            client.discard()

    def end_with_app(self, number: int, reason: int, application: int | None) -> None:
        """Disconnect a client when its application ends or the server stops.

        Args:
            number: of the client.
            reason: the reason code of Disconnect.
            application: see `Services.scope_of`.
        """
        client = self._clients[number]
        client.last_reason = reason
        if scope := self._services.scope_of(application):
            scope.add(client)

    def disconnect(self, number: int, reason: int) -> bool:
        """See `mqtt:disconnect`; return whether the client was connected."""
        client = self._clients.get(number)
        return client is not None and client.disconnect(reason)

    def authenticate(self, number: int, timeout_ms: float | None) -> LuaResult:
        """See `mqtt:authenticate`; return true, or nil and "timeout" or "closed"."""
        client = self._clients.get(number)
        if client is None:
            return fail("closed")
        try:
            return client.authenticate(None if timeout_ms is None else timeout_ms / 1000)
        except NoAnswer:
            return fail("timeout")
        except ClosedError:
            return fail("closed")

    def status(self, number: int) -> tuple[int, bool, bool, int, int]:
        """Return the values of `mqtt:status`: queued, connected, disconnected, dropped, refused."""
        client = self._clients.get(number)
        return (0, False, True, 0, 0) if client is None else (*client.status(), client.dropped, client.refused)

    def shutdown(self) -> None:
        """Disconnect all clients when the server stops; their status callbacks get "sysshutdown"."""
        for client in list(self._clients.values()):
            client.shutdown()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until all connections are closed, at most `timeout_s`."""
        with suppress(gevent.Timeout), gevent.Timeout(timeout_s):
            for client in list(self._clients.values()):
                client.wait_closed()


def _delivered(item: Delivery, timeout_s: float | None) -> LuaResult:
    try:
        return item.wait(timeout_s)
    except NoAnswer:
        return fail("timeout")
    except ClosedError:
        return fail("closed")
    except DroppedError as error:
        return fail("refused", error.reason) if isinstance(error.reason, int) else fail(error.reason)


def _filters(topic: bytes, is_list: bool) -> str | list[FilterOptions]:
    """Return a topic filter, or a list of them from a packed list of tables `{filter, qos or options}`."""
    if not is_list:
        return topic.decode("utf-8", "surrogateescape")
    found: list[FilterOptions] = []
    for item in bridge.load(topic).values():
        name, *options = item.values()
        text = bridge.as_text(name)
        own = options[0] if options else None
        if isinstance(own, dict):
            own = {key.decode("utf-8", "replace"): value for key, value in own.items()}
        found.append(text if own is None else (text, own))
    return found


_SOON_S = 0.0001  # replaces a delay of 0 seconds, which Python would take for False: no reconnect


def mqtt_properties(table: dict[bytes, Any]) -> dict[str, Any]:
    """Return the properties of a table that was unpacked; lists keep their order."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        if isinstance(value, dict):
            found[name] = list(value.values())
        elif name in NUMBERS and isinstance(value, bytes):
            found[name] = bridge.as_number(value.decode("latin-1"))
        else:
            found[name] = bridge.as_text(value) if name in TEXTS else value
    return found


def _will(table: dict[bytes, Any]) -> dict[str, Any]:
    will: dict[str, Any] = {key.decode("utf-8", "replace"): value for key, value in table.items()}
    if "topic" in will:
        will["topic"] = will["topic"].decode("utf-8", "surrogateescape")
    if "properties" in will:
        will["properties"] = mqtt_properties(will["properties"])
    return will


_DIRECT = (
    "on_event check create publish publish_delivery delivery_status delivery_dropped subscribe unsubscribe setwill "
    "messages messages_dropped ack message_dropped discard end_with_app disconnect status dropped"
)
_BLOCKING = (
    "connect publish_wait delivery_wait next_message authenticate create_stored publish_stored publish_delivery_stored"
)
_PARKING = "opened take"


def _texts(packed: bytes) -> list[str]:
    """Return a packed list of strings."""
    return [value.decode("utf-8", "replace") for value in bridge.load(packed).values()]


def _checked(addresses: list[str]) -> list[str]:
    """Return valid addresses.

    Raises:
        StreamError: "cannotresolve", as for an unknown host.
    """
    try:
        parse_addresses(addresses)
    except ArgumentError as error:
        raise StreamError("cannotresolve", str(error)) from None
    return addresses


def _checked_target(addresses: list[str]) -> list[str] | Callable[[], Stream]:
    """Return valid addresses; for invalid ones, a function that fails like a connection to an unknown host."""
    try:
        return _checked(addresses)
    except StreamError as error:
        failure = error

    def fail_to_connect() -> Stream:
        raise failure

    return fail_to_connect


def install_mqtt(vm: Vm, services: Services) -> None:
    """Install the module `ba.mqtt`, which `mqttc` and `mqtt3c` use."""
    services.mqtt = binding = MqttBinding(vm, services)
    parking = methods(binding, _PARKING)
    vm.namespace("ba.mqtt", methods(binding, _DIRECT), methods(binding, _BLOCKING), parking=parking)
