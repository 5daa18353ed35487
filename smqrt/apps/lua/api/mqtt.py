"""`require"mqttc"` and `require"mqtt3c"`: MQTT for Lua applications (spec: smq §8, §9).

Lua knows a client by an integer; the other half is lib/ba/mqtt.lua. Callbacks run either in the greenlet of the client
(`create`), or in the activity that calls `run` (`connect`), which takes them from a `LuaInbox`.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import gevent
from gevent import get_hub
from gevent.event import AsyncResult

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import Function, LuaError, LuaResult, LuaValue, LuaValues, encoded, fail, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.broker.deferred import Deferred
from smqrt.clients.mqtt import sparkplug
from smqrt.clients.mqtt.connect import MqttOptions, connect_error, parse_address
from smqrt.clients.mqtt.documented import TIMEOUT_MS, Inbox, InboxCall, start
from smqrt.clients.mqtt.sparkplug import TYPES, payload_class
from smqrt.errors import ArgumentError, ClosedError, QueueFullError, StreamError
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread
from smqrt.mqtt import MqttClient
from smqrt.settings.option_types import make, options_of
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.fields import NUMBERS, TEXTS

log = logging.getLogger("smqrt.mqtt")

_NAMES = {"pub": "onpub", "ack": "onsuback", "status": "onstatus"}
_JOBS_PER_TAKE = 4  # six values each; what crosses to Lua at once is limited

Properties = Mapping[str, object] | bytes | None
"""Of a message or an acknowledgement; a status has them encoded."""

MqttEvent = tuple[Any, ...]
"""The arguments of a callback: topic, payload, properties and flags of a message; topic, code and properties of an
acknowledgement."""


class LuaCall(InboxCall):
    """A callback in Lua.

    Args:
        event_ref: the Lua function for all that happens.
        number: of the client.
        kind: "pub", "ack" or "status".
        ref: of the application's function, None for that of the client; given back when this is unused.
    """

    __slots__ = ("_event_ref", "_function", "_kind", "_number", "_ref", "_vm")

    def __init__(self, vm: Vm, event_ref: int, number: int, kind: str, ref: int | None) -> None:
        self._vm, self._event_ref, self._number = vm, event_ref, number
        self._kind, self._ref = kind.encode(), ref
        self._function = None if ref is None else LuaFunction(vm, ref)

    def __call__(self, first: str | bytes, second: LuaValue, third: Properties, fourth: LuaValue = None) -> object:
        """Call it in this greenlet; the first value it returns, NotImplemented after an error, which is logged."""
        try:
            values = self._vm.run(self._event_ref, self._number, *self.values(first, second, third, fourth))
        except LuaError as error:
            log.error("the callback %s of an MQTT client failed: %s", _NAMES[self._kind.decode()], error)
            return NotImplemented
        return values[0] if values else None

    def values(self, first: str | bytes, second: LuaValue, third: Properties, fourth: LuaValue = None) -> LuaValues:
        """Kind and reference, then the four arguments of an event: properties are encoded, None when there are none."""
        if self._kind == b"status":
            return b"status", self._ref, encoded(first), second, cast(bytes, third), None
        return self._kind, self._ref, encoded(first), second, bridge.dump(third) if third else None, fourth

    def size_bytes(self, arguments: MqttEvent) -> int:
        """Of the message among the arguments."""
        return len(arguments[1]) if self._kind == b"pub" else 0


class LuaInbox(Inbox):
    """An inbox whose calls an activity takes."""

    def __init__(self) -> None:
        super().__init__()
        self._taking: Deferred[LuaValues] | None = None

    def take(self) -> LuaResult:
        """Up to four calls, six values each; nil and a word when nothing more will come. Parks until there is one."""
        if self.has_something:
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
        for _ in range(_JOBS_PER_TAKE):
            waiting = self.pop()
            if waiting is None:
                break
            call, arguments = waiting
            found += cast(LuaCall, call).values(*arguments)
        return found or fail(self.word or "socketclosed")


class MqttBinding:
    """MQTT clients by their integers."""

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm, self._services = vm, services
        self._next = itertools.count(1).__next__
        self._clients: dict[int, MqttClient] = {}
        self._inboxes: dict[int, LuaInbox] = {}
        self._openings: dict[int, AsyncResult[Stream]] = {}
        self._event_ref = 0

    def on_event(self, ref: int) -> None:
        """Set the Lua function that gets what happens: `f(number, kind, ref, ...)`."""
        self._event_ref = ref

    def _call(self, number: int, kind: str, ref: int | None = None) -> LuaCall:
        return LuaCall(self._vm, self._event_ref, number, kind, ref)

    def _optional(self, number: int, kind: str, ref: int | None) -> LuaCall | None:
        return None if ref is None else self._call(number, kind, ref)

    # ---- clients that connect by themselves

    def create(self, address: bytes | None, socket: int | None, options: bytes) -> int:
        """Make a client that connects in the background.

        Args:
            address: None: to the `socket`, or, without one, by the application's function.
            options: a flat table; see `_options`.
        """
        number = self._next()
        where: Any = partial(self._open, number)
        if address is not None:
            where = _reachable(address.decode("utf-8", "replace"))
        elif socket is not None:
            where = self._stream(socket)
        status = self._call(number, "status")
        chosen = self._options(options)
        client = MqttClient(
            where,
            lambda kind, code, more: _decision(status(kind.encode(), code.encode(), bridge.dump(more))),
            self._call(number, "pub"),
            resubscribe=False,
            **chosen,
        )
        self._keep(number, client)
        return number

    def _keep(self, number: int, client: MqttClient) -> None:
        self._clients[number] = client
        client.on_end(lambda: self._forget(number))

    def _forget(self, number: int) -> None:
        self._clients.pop(number, None)
        self._vm.start(self._event_ref, number, b"end")

    def _options(self, packed: bytes) -> dict[str, Any]:
        """Keyword arguments of `MqttClient`: times are milliseconds in Lua, and TLS objects are numbers."""
        chosen: dict[str, Any] = {key.decode(): value for key, value in bridge.load(packed).items()}
        for name, value in chosen.items():
            if isinstance(value, bytes) and name != "password":
                chosen[name] = value.decode("utf-8", "replace")
        chosen = bridge.for_options(options_of(MqttOptions), chosen)
        chosen.setdefault("queuefull", "raise")
        if chosen["queuefull"] == "wait":
            raise ArgumentError("queuefull must be 'raise' (publish returns nil, \"full\") or 'drop', not 'wait'")
        if "timeout" in chosen:
            chosen["timeout"] = TIMEOUT_MS.check("timeout", bridge.as_number(chosen["timeout"])) / 1000
        if "tls" in chosen:
            chosen["secure"] = self._services.tls[chosen.pop("tls")]
        chosen["alpn"] = [word.decode("ascii", "replace") for word in chosen.pop("alpn", {}).values()]
        chosen["properties"] = _properties(chosen.pop("properties", {}))
        if "will" in chosen:
            chosen["will"] = _will(chosen["will"])
        return chosen

    def _stream(self, socket: int) -> Stream:
        stream: Stream = self._services.sockets.stream(socket)
        return stream

    # ---- connections that the application makes

    def _open(self, number: int) -> Stream:
        """Have Lua make a connection in a cosocket, and wait for it."""
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
        """Lua has made the connection, or not. Parks until it is over."""
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

    def connect(self, socket: int, options: bytes) -> LuaResult:
        """Talk MQTT over a connected socket; blocks until the broker has accepted. What comes waits for `take`."""
        number, inbox = self._next(), LuaInbox()
        client, is_accepted = start(
            self._stream(socket), self._call(number, "pub"), inbox, self._options_of_connect(options)
        )
        if not is_accepted:
            error, kind = connect_error(client.end)
            return fail(error, str(kind)) if isinstance(error, str) else (None, error, True)
        self._clients[number], self._inboxes[number] = client, inbox
        return number

    def check(self, options: bytes) -> None:
        """Raise ArgumentError for options that `connect` would refuse, before it connects."""
        make(MqttOptions, self._options_of_connect(options))

    def _options_of_connect(self, packed: bytes) -> dict[str, Any]:
        chosen = self._options(packed) | {"resubscribe": False}
        del chosen["properties"]
        return chosen

    def take(self, number: int) -> LuaResult:
        """What has come, see `Inbox.take`; parks."""
        inbox = self._inboxes.get(number)
        return fail("socketclosed") if inbox is None else inbox.take()

    def dropped(self, number: int) -> None:
        """Lua's object is gone, or `run` has returned."""
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
        """`mqtt:publish`: whether connected; nil, "full" when the queue has no room; nil, "toolarge"."""
        client = self._clients.get(number)
        if client is None:
            return False
        props = _properties(bridge.load(properties)) if properties else None
        try:
            item = client.publish(topic.decode("utf-8", "surrogateescape"), payload, qos, retain, props)
        except QueueFullError:
            return fail("full")
        except ClosedError:
            return False
        return fail("toolarge") if item.error == "toolarge" else client.connected

    def subscribe(
        self,
        number: int,
        topic: bytes,
        onpub: int | None,
        onsuback: int | None,
        qos: int,
        nolocal: bool,
        retainaspublished: bool,
        retainhandling: int,
        properties: bytes | None,
    ) -> LuaResult:
        """`mqtt:subscribe`: whether connected; nil, "full" when the queue has no room."""
        return self._ask(
            number,
            MqttClient.subscribe,
            topic.decode("utf-8", "surrogateescape"),
            self._optional(number, "pub", onpub),
            self._optional(number, "ack", onsuback),
            qos=qos,
            nolocal=nolocal,
            retainaspublished=retainaspublished,
            retainhandling=retainhandling,
            properties=_properties(bridge.load(properties)) if properties else None,
        )

    def _ask(self, number: int, method: Callable[..., bool], *arguments: object, **options: object) -> LuaResult:
        client = self._clients.get(number)
        try:
            return client is not None and method(client, *arguments, **options)
        except QueueFullError:
            return fail("full")
        except ClosedError:
            return False

    def unsubscribe(self, number: int, topic: bytes, onunsuback: int | None, properties: bytes | None) -> LuaResult:
        """`mqtt:unsubscribe`: whether connected; nil, "full" when the queue has no room."""
        return self._ask(
            number,
            MqttClient.unsubscribe,
            topic.decode("utf-8", "surrogateescape"),
            self._optional(number, "ack", onunsuback),
            _properties(bridge.load(properties)) if properties else None,
        )

    def setwill(self, number: int, will: bytes | None) -> None:
        """`mqtt:setwill`."""
        if client := self._clients.get(number):
            client.setwill(_will(bridge.load(will)) if will else None)

    def discard(self, number: int) -> None:
        """Forget what waits to be sent."""
        if client := self._clients.get(number):
            client.discard()

    def end_with_app(self, number: int, reason: int, application: int | None) -> None:
        """Have a client end with its application, and say this reason to the broker then, or when the server stops.

        application: see `Services.scope_of`.
        """
        client = self._clients[number]
        client.last_reason = reason
        if scope := self._services.scope_of(application):
            scope.add(client)

    def disconnect(self, number: int, reason: int) -> bool:
        """`mqtt:disconnect`: whether it was connected."""
        client = self._clients.get(number)
        return client is not None and client.disconnect(reason)

    def status(self, number: int) -> tuple[int, bool, bool, int, int]:
        """`mqtt:status`: queued, connected, disconnected, dropped, refused."""
        client = self._clients.get(number)
        return (0, False, True, 0, 0) if client is None else (*client.status(), client.dropped, client.refused)

    def shutdown(self) -> None:
        """The server stops: whoever has a connection is told "sysshutdown"."""
        for client in list(self._clients.values()):
            client.shutdown()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until all have said what they had to say, at most so long."""
        with suppress(gevent.Timeout), gevent.Timeout(timeout_s):
            for client in list(self._clients.values()):
                client.wait_closed()


def _decision(answer: Any) -> Any:
    """Lua's answer, where nothing but nil and false is false; NotImplemented when there is none."""
    if answer is NotImplemented or answer is None or isinstance(answer, bool):
        return answer
    return answer or _SOON_S


_SOON_S = 0.0001


def _properties(table: dict[bytes, Any]) -> dict[str, Any]:
    """Properties as Python knows them; the values of a list in their order."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        found[name] = list(value.values()) if isinstance(value, dict) else _property(name, value)
    return found


def _property(name: str, value: Any) -> Any:
    if name in NUMBERS and isinstance(value, bytes):
        return bridge.as_number(value.decode("latin-1"))
    return bridge.as_text(value) if name in TEXTS else value


def _will(table: dict[bytes, Any]) -> dict[str, Any]:
    will: dict[str, Any] = {key.decode("utf-8", "replace"): value for key, value in table.items()}
    if "topic" in will:
        will["topic"] = will["topic"].decode("utf-8", "surrogateescape")
    if "properties" in will:
        will["properties"] = _properties(will["properties"])
    return will


_DIRECT = "on_event check create publish subscribe unsubscribe setwill discard end_with_app disconnect status dropped"
_BLOCKING = "connect"
_PARKING = "opened take"


def _reachable(address: str) -> str | Callable[[], Stream]:
    """The address of a broker, or, when it can't be one, a function that fails as a connection to it does."""
    try:
        parse_address(address)
    except ArgumentError as error:
        sentence = str(error)
    else:
        return address

    def fail_to_connect() -> Stream:
        raise StreamError("cannotresolve", sentence)

    return fail_to_connect


def install_mqtt(vm: Vm, services: Services) -> None:
    """Give Lua what `mqttc` and `mqtt3c` are made of."""
    services.mqtt = binding = MqttBinding(vm, services)
    parking = methods(binding, _PARKING)
    vm.namespace("ba.mqtt", methods(binding, _DIRECT), methods(binding, _BLOCKING), parking=parking)


# ---- Sparkplug B for Lua: `require "SparkplugB"` (spec: bas-api §12).

SHORT_BYTES = 4096  # worked off at once; longer ones let others run in between


def encode(fields: bytes, breathe: Callable[[], object] = bool) -> bytes:
    """A payload of a packed table. Raises ArgumentError."""
    return sparkplug.encode(_named(bridge.load(fields)), breathe)


def decode(data: bytes, breathe: Callable[[], object] = bool) -> LuaValues:
    """The packed table of a payload; None and a sentence when it is none."""
    try:
        payload = sparkplug.decode(data, breathe)
    except ArgumentError as error:
        return fail(str(error))
    metrics = bridge.dump_list(map(_signed, payload.pop("metrics")), breathe)
    packed = {name: bridge.dump(_signed(value)) for name, value in payload.items()}
    return (bridge.dump_packed(packed | {"metrics": metrics}),)


def _named(value: Any) -> Any:
    """Tables with names as text; values stay bytes."""
    if not isinstance(value, dict):
        return value
    items = value.items()
    fields = {key.decode("utf-8", "replace") if isinstance(key, bytes) else key: _named(item) for key, item in items}
    for name in _NUMBERS & fields.keys():
        fields[name] = _number(fields[name])
    for name in _TEXTS & fields.keys():
        fields[name] = bridge.as_text(fields[name])
    if "value" in fields:
        fields["value"] = _of_type(fields.get("datatype", fields.get("type")), fields["value"])
    return fields


_NUMBERS = {"timestamp", "seq", "alias", "size"}
_TEXTS = {"name", "uuid"}
_OF_TEXT = (b"String", b"Text", b"UUID")
_OF_NUMBER = re.compile(rb"U?Int\d+|Float|Double|DateTime")


def _number(value: Any) -> Any:
    """The number that a text is; a float without a fraction is an integer."""
    found = bridge.as_number(value.decode("latin-1")) if isinstance(value, bytes) else value
    if isinstance(found, bytes | str):
        return value
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _of_type(kind: Any, value: Any) -> Any:
    if kind in _OF_TEXT:
        return bridge.as_text(value)
    return _number(value) if isinstance(kind, bytes) and _OF_NUMBER.fullmatch(kind) else value


def _signed(value: Any) -> Any:
    """Integers of 64 bits as Lua has them: from 2^63 on they are negative."""
    if isinstance(value, dict):
        return {key: _signed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_signed(item) for item in value]
    return value - (1 << 64) if type(value) is int and value >> 63 == 1 else value


def install_sparkplug(vm: Vm, services: Services) -> None:
    """Give Lua the encoder and the decoder."""

    def encode_long(fields: bytes) -> LuaValue:
        return encode(fields, Turn().yield_if_due)

    def decode_long(data: bytes) -> LuaValues:
        return decode(data, Turn().yield_if_due)

    names = tuple(map(utf8, TYPES))
    direct: dict[str, Function] = {
        "encode": encode,
        "decode": decode,
        "types": lambda: names,
        "short": lambda: SHORT_BYTES,
    }
    blocking: dict[str, Function] = {"encode_long": encode_long, "decode_long": decode_long, "prepare": _prepare}
    vm.namespace("ba.sparkplug", direct, blocking)


def _prepare() -> None:
    """Load protobuf, in a thread: it takes some 40 ms."""
    in_thread(payload_class)
