"""Python half of `smq.hub` (spec: smq §2).

Lua refers to brokers and clients by integers. A client gets an integer at its first use in a callback or in `peers()`.
"""

from __future__ import annotations

import itertools
import json
import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

import gevent

from smqrt.apps.lua import bridge
from smqrt.apps.lua.activities import Outcome
from smqrt.apps.lua.api.exchange import Exchanges
from smqrt.apps.lua.api.mqtt import mqtt_properties
from smqrt.apps.lua.api.sockets import SocketBinding
from smqrt.apps.lua.bridge import Function, LuaError, LuaValue, LuaValues, from_utf8, methods
from smqrt.apps.lua.socket_handles import PeerHandle
from smqrt.apps.lua.vm import LuaFunction, Services, Vm
from smqrt.broker.broker import METHODS, REQUIRED, Kind, Method
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.application import MqttPayload, PublishOptions, attributes_of
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.state import AuthStep, BrokerClient, BrokerPeer, Hooks
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.cluster.remote_node import Phantom
from smqrt.errors import CloseReason
from smqrt.hub.callbacks import auth_step
from smqrt.hub.peer import peer_of, text_of
from smqrt.hub.smq import Smq
from smqrt.journal.writer import HubJournal, JournalWriter
from smqrt.loop.greenlets import ErrorLimit
from smqrt.loop.scheduling import Turn
from smqrt.process import current_process
from smqrt.settings.option_types import make, options_of
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.handshake import page_user
from smqrt.wire import smq as wire
from smqrt.wire.mqtt.fields import Reason

log = logging.getLogger("smqrt.lua")

_ID_AND_LENGTH = struct.Struct(">II")
_DISCONNECT_HOOKS = ("onclose", "onmoved", "onvanish")
"""The hooks that are called when a client has disconnected."""
_DENIED = (int(wire.ConnackCode.ACCESS_DENIED), b"")


def ask(vm: Vm, ref: int, name: str, default: LuaValues, *arguments: LuaValue) -> LuaValues | Outcome:
    """Call a Lua callback.

    Args:
        vm: the runtime.
        ref: reference of the callback.
        name: name of the callback in the log.
        default: the result after an error, which is logged.
        arguments: of the callback.

    Returns:
        The values of the callback, or a `Deferred` of them if it blocks.
    """
    try:
        answer = vm.call(ref, *arguments)
    except LuaError as error:
        _log_error(name, error)
        return default
    if not isinstance(answer, Deferred):
        return answer
    result: Outcome = Deferred()

    def settled(values: LuaValues | None, error: BaseException | None) -> None:
        if error is not None:
            _log_error(name, error)
        result.resolve(default if error is not None else values)

    answer.then(settled)
    return result


_limits: defaultdict[str, ErrorLimit] = defaultdict(ErrorLimit)
"""Limits of log lines by the names of the callback and its hub, so the table stays small."""


def _log_error(name: str, error: object) -> None:
    if (others := _limits[name].line_suffix()) is not None:
        log.error("error in %s%s: %s", name, others, error)


def mapped(answer: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function(answer)`, or a `Deferred` of it if the answer is a `Deferred`."""
    if not isinstance(answer, Deferred):
        return function(answer)
    result: Deferred[Any] = Deferred()
    answer.then(lambda value, error: result.resolve(function(value)))
    return result


class ClientTable:
    """Clients of Lua's brokers by integer.

    Args:
        vm: the runtime.
        sockets: assigns numbers to the sockets of clients.

    Attributes:
        numbers: the counter for the integers of clients and brokers.
        sessions: the sessions of the clients by their integers.
    """

    def __init__(self, vm: Vm, sockets: SocketBinding) -> None:
        self.numbers = itertools.count(1)
        self._vm, self._sockets = vm, sockets
        self.sessions: dict[int, Any] = {}
        self._forget_ref = 0

    def on_forget(self, ref: int) -> None:
        """Set the Lua function that removes a client from Lua's tables."""
        self._forget_ref = ref

    def handle(self, session: BrokerPeer) -> int:
        """Return the integer of a client; assign one at its first use."""
        number: int | None = session.extra
        if number is None:
            number = session.extra = self.draw(session)
        return number

    def draw(self, session: BrokerPeer) -> int:
        """Return a new integer for a client."""
        number = next(self.numbers)
        self.sessions[number] = session
        return number

    def forget(self, session: BrokerPeer) -> None:
        """Release the integer of a client that has disconnected."""
        number, session.extra = session.extra, None
        if number is not None:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Release an integer, here and in Lua."""
        self.sessions.pop(number, None)
        self._vm.start(self._forget_ref, number)

    def find(self, number: int) -> Any:
        """Return the session of a client; None after it has disconnected."""
        return self.sessions.get(number)

    def peer(self, number: int) -> LuaValues | None:
        """Return `(etid, uid, info)`, and for a client of another node also its number; None if disconnected."""
        session = self.sessions.get(number)
        if session is None:
            return None
        node = (session.node.number,) if isinstance(session, Phantom) else ()
        return session.etid, session.uid, session.info, *node

    def peer_topics(self, number: int) -> bytes:
        """Return the ids of the subscribed topics, four bytes each: as values, they could exceed Lua's stack."""
        session = self.sessions.get(number)
        ids = session.topic_ids if session else ()
        return struct.pack(f">{len(ids)}I", *ids)

    def peer_dropped(self, number: int) -> int | None:
        """Return the number of messages dropped because the client is a slow consumer."""
        session = self.sessions.get(number)
        return session.outbox.dropped if session else None

    def peer_user(self, number: int) -> LuaValues:
        """Return the user of a client and its groups, separated by commas; None for an anonymous client."""
        session = self.sessions.get(number)
        identity = session.identity if session else None
        if identity is None or not identity.user:
            return (None,)
        return bridge.utf8(identity.user), bridge.utf8(",".join(identity.groups))

    def origin(self, number: int) -> LuaValues:
        """Return the properties of the request that opened a connection.

        These are seed, argument, path, the user of the page, the length of the query, and the names and values of the
        query and the header fields.
        """
        session = self.sessions[number]
        request = session.origin.request if session.origin else None
        arg = session.origin.arg if session.origin else None
        if request is None:
            return session.seed, arg, b"", None, 0
        pairs = parse_qsl(request.query, keep_blank_values=True, errors="surrogateescape")
        query = [part.encode("utf-8", "surrogateescape") for pair in pairs for part in pair]
        head = [part.encode("latin-1", "replace") for pair in request.fields() for part in pair]
        user = page_user(request)
        facts = request.path.encode("utf-8", "surrogateescape"), None if user is None else bridge.utf8(user)
        return session.seed, arg, *facts, len(query), *query, *head

    def session(self, number: int) -> int | None:
        """Return the number of the HTTP session of the request that opened a connection; None if it has none."""
        origin = self.sessions[number].origin
        find = origin.request.env.get("find_session") if origin and origin.request else None
        session = find(origin.request) if find else None
        return session.number if session else None

    def socket(self, number: int) -> int:
        """Return the number of the socket of a client (`peer.sock`)."""
        return self._sockets.add(PeerHandle(self.find(number)))


class LuaBroker:
    """A broker with its Lua callbacks.

    Args:
        vm: the runtime.
        clients: assigns integers to clients.
        refs: references of the callbacks by name.
        options: the other options.
        journal: the option `journal`.
        label: suffix of callback names in the log, which names the hub.
    """

    def __init__(
        self, vm: Vm, clients: ClientTable, refs: dict[str, int], options: HubOptions, journal: object, label: str
    ) -> None:
        self._vm, self._clients, self._refs, self.label = vm, clients, refs, label
        # `onclose` is always set, to release the client's integer, and `log`, which has a default as in Python.
        adapters = {name: getattr(self, "_" + name) for name in {*refs, "onclose", "log"}}
        made_at = label.removeprefix(" of the hub made at ")
        self.broker = GeventBroker(Hooks(**adapters, onmoved=clients.forget, onvanish=clients.forget), options, made_at)
        try:
            cluster.join(self.broker, options)
            self._journal = HubJournal(self.broker, journal)
        except BaseException:
            self.broker.abandon()  # releases the `persist` file for the next hub
            raise

    def close(self) -> None:
        """Close the clients without a Disconnect packet, and close the journal; blocks."""
        self.broker.close()
        self._journal.close()

    def _end_with_app(self) -> None:
        """Close the hub at the end of its application; with `keep`, its clients stay connected during a reload."""
        self.broker.keep_clients()
        self.close()

    @property
    def journal(self) -> JournalWriter | None:
        """The writer of the journal; None without a journal or while another process writes it."""
        return self._journal.writer

    def handle(self, session: BrokerPeer) -> int:
        """Return the integer of a client."""
        return self._clients.handle(session)

    def _ask(self, name: str, default: LuaValues, *arguments: LuaValue) -> LuaValues | Outcome:
        return ask(self._vm, self._refs[name], name + self.label, default, *arguments)

    def _authenticate(self, credentials: bytes, session: BrokerClient) -> Any:
        def verdict(answer: Any) -> Any:
            if answer[0] != wire.ConnackCode.ACCEPTED or session.closed:
                self._clients.forget(session)
            return answer

        return mapped(self._ask("authenticate", _DENIED, credentials, self._clients.handle(session)), verdict)

    def _mqttauth(self, method: str, data: bytes, session: BrokerClient) -> Any:
        def step(values: LuaValues | None) -> AuthStep:
            return auth_step(*values) if values else AuthStep(Reason.NOT_AUTHORIZED)  # none: after an error

        answer = self._ask("mqttauth", (), bridge.utf8(method), data, self._clients.handle(session))
        return mapped(answer, step)

    def _permittop(self, topic: bytes, issub: bool, session: BrokerClient) -> Any:
        return mapped(self._ask("permittop", (), topic, issub, self._clients.handle(session)), any)

    def _permitfilter(self, topic_filter: bytes, session: BrokerClient) -> Any:
        return mapped(self._ask("permitfilter", (), topic_filter, self._clients.handle(session)), any)

    def _permitsubtop(self, subtopic: bytes, session: BrokerClient) -> Any:
        return mapped(self._ask("permitsubtop", (), subtopic, self._clients.handle(session)), any)

    def _onconnect(self, session: BrokerClient) -> None:
        self._ask("onconnect", (), session.etid, self._clients.handle(session))

    def _onclose(self, session: BrokerClient, reason: CloseReason) -> None:
        if "onclose" in self._refs:
            words = reason.word.encode() or None, reason.value.encode()
            answer = self._ask("onclose", (), session.etid, self._clients.handle(session), *words)
            if isinstance(answer, Deferred):
                return answer.then(lambda values, error: self._clients.forget(session))
        self._clients.forget(session)
        return None

    def _onpublish(self, batch: bytes, tid: int, ptid: int, session: BrokerPeer) -> Any:
        attributes = None
        if isinstance(batch, MqttBatch):
            attributes = bridge.dump(attributes_of(batch, self.broker.clock())._asdict())
        answer = self._ask("onpublish", (b"",), batch, tid, ptid, self._clients.handle(session), attributes)
        return mapped(answer, lambda values: batch if values[0] is True else values[0])

    def _ondrop(self, batch: bytes, tid: int, ptid: int, session: BrokerPeer) -> None:
        self._ask("ondrop", (), batch, tid, ptid, self._clients.handle(session))

    def _onnode(self, number: int, event: str, reason: str) -> Any:
        return self._ask("onnode", (), number, event.encode(), bridge.utf8(reason))

    def _onmqttgap(self, client_id: str | None, count: int, session: BrokerPeer | None, node: int | None) -> Any:
        number = None if session is None else self._clients.handle(session)
        return self._ask("onmqttgap", (), None if client_id is None else client_id.encode(), count, number, node)

    def _log(self, session: BrokerPeer | None, text: str) -> None:
        if "log" not in self._refs:
            log.debug("%s", text)
            return
        known = session if session is not None and (session.etid or session.extra is not None) else None
        self._ask("log", (), self._clients.handle(known) if known else None, text.encode())


class PythonHub:
    """A hub that the `.preload.py` of a folder has created, for the Lua applications there.

    The `extra` of its clients is a `Peer`, so their integers are stored here.

    Args:
        clients: assigns and releases the integers.
        smq: the hub.
        label: suffix of callback names in the log, which names the hub.

    Attributes:
        is_over: whether the application has ended, so that its callbacks are no longer called.
    """

    def __init__(self, clients: ClientTable, smq: Smq, label: str) -> None:
        self.broker, self.label, self._smq, self._clients = smq.broker, label, smq, clients
        self._numbers: dict[BrokerPeer, int] = {}
        self.is_over = False
        self._wrapped: dict[str, ForgettingHook] = {}
        hooks = self.broker.hooks
        for name in _DISCONNECT_HOOKS:
            self._wrapped[name] = ForgettingHook(getattr(hooks, name), self._forget)
            setattr(hooks, name, self._wrapped[name])

    @property
    def journal(self) -> JournalWriter | None:
        """The writer of the journal; None without a journal or while another process writes it."""
        return self._smq.journal

    def close(self) -> None:
        """Close the hub; blocks."""
        self._smq.close()

    def handle(self, session: BrokerPeer) -> int:
        """Return the integer of a client."""
        number = self._numbers.get(session)
        if number is None:
            peer_of(session)  # so that the broker also reports when a client of another node disconnects
            number = self._numbers[session] = self._clients.draw(session)
        return number

    def unload(self) -> None:
        """Disconnect the hub from the Lua application, which ends; the hub stays open.

        Restores the hooks, releases the integers and stops the callbacks. A second call does nothing.
        """
        self.is_over = True
        for name, wrapped in self._wrapped.items():
            wrapped.unwrap(self.broker.hooks, name)
        self._wrapped.clear()
        for number in self._numbers.values():
            self._clients.drop(number)
        self._numbers.clear()

    def _forget(self, session: BrokerPeer) -> None:
        if (number := self._numbers.pop(session, None)) is not None:
            self._clients.drop(number)


class ForgettingHook:
    """A hook that also releases the integer of the client.

    Applications that share a hub wrap its hooks one around the other, and may end in any order.

    Args:
        inner: the hook; None for none.
        forget: called with the client.
    """

    def __init__(self, inner: Callable[..., Any] | None, forget: Callable[[BrokerPeer], None]) -> None:
        self.inner, self._forget = inner, forget

    def __call__(self, session: BrokerPeer, *more: Any) -> Any:
        """Call the hook, then release the integer of the client."""
        answer = self.inner(session, *more) if self.inner else None
        self._forget(session)
        return answer

    def unwrap(self, hooks: Hooks, name: str) -> None:
        """Remove this object from the chain of hooks with that name."""
        outer = getattr(hooks, name)
        if outer is self:
            setattr(hooks, name, self.inner)
            return
        while isinstance(outer, ForgettingHook) and outer.inner is not self:
            outer = outer.inner
        if isinstance(outer, ForgettingHook):
            outer.inner = self.inner


class HubBinding:
    """Lua's brokers by integer.

    Args:
        vm: the runtime.
        exchanges: the requests of directory functions.
        clients: the clients of all brokers.
    """

    def __init__(self, vm: Vm, exchanges: Exchanges, clients: ClientTable) -> None:
        self._vm, self._exchanges, self.clients = vm, exchanges, clients
        self._brokers: dict[int, LuaBroker | PythonHub] = {}

    def new(self, shared: bool, label: bytes, *names_and_values: LuaValue) -> int:
        """Create a broker and return its integer.

        Args:
            shared: whether a module of all applications creates it; else it is closed with its application.
            label: see `LuaBroker`.
            names_and_values: alternating names and values: callbacks as references, options as values.
        """
        given = bridge.options_of(names_and_values)
        refs = {name[2:]: ref for name, ref in given.items() if name.startswith("f:")}
        values = {
            name: value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
            for name, value in given.items()
            if name in options_of(HubOptions)
        }
        journal = json.loads(given.get("journal", b"[false]"))[0]
        options = make(HubOptions, bridge.for_options(options_of(HubOptions), values), "bad argument #1.")
        broker = LuaBroker(self._vm, self.clients, refs, options, journal, label.decode("utf-8", "replace"))
        if not shared:
            current_process.close_with_app(broker)
        number = next(self.clients.numbers)
        self._brokers[number] = broker
        return number

    def release(self, number: int) -> None:
        """Close a broker whose Lua object was collected, in a new greenlet."""
        broker = self._brokers.pop(number, None)
        if isinstance(broker, PythonHub):
            broker.unload()
        elif broker:
            gevent.spawn(broker.close)

    def unload(self, number: int) -> None:
        """See `PythonHub.unload`; Lua may still have the object."""
        broker = self._brokers.get(number)
        if isinstance(broker, PythonHub):
            broker.unload()

    def share(self, smq: Smq, label: str) -> int:
        """Return an integer for a hub created in Python; see `PythonHub` for `label`."""
        number = next(self.clients.numbers)
        self._brokers[number] = PythonHub(self.clients, smq, label)
        return number

    def journal(self, number: int) -> LuaValues | None:
        """Return `name, value, ...` of the journal's counters; None without a journal."""
        journal = self._brokers[number].journal
        return _flat(journal.stats()) if journal else None

    def close(self, number: int) -> None:
        """Close a broker; blocks."""
        self._brokers[number].close()

    def of(self, number: int) -> GeventBroker:
        """Return the broker with this integer."""
        return self._brokers[number].broker

    def connect(self, number: int, exchange: int, arg: LuaValue) -> None:
        """Turn a request into an SMQ connection; blocks during the handshake.

        `arg` is a Lua reference, or for a hub created in Python a value.
        """
        if isinstance(arg, bytes):
            arg = text_of(arg)  # type: ignore[assignment]  # passed on to Python
        self.of(number).connect(self._exchanges.request(exchange), arg)

    def subscribe(
        self,
        number: int,
        topic: bytes | int | None,
        ref: int | None,
        subtopic: bytes | int | None,
        once: bool,
        topic_filter: bytes | None = None,
    ) -> int:
        """See `Broker.subscribe` and `Broker.subscribe_filter`; without a topic there is a filter."""
        broker, callback = self.of(number), self._callback(number, ref, "onmsg")
        if topic is None:
            text = (topic_filter or b"").decode("utf-8", "surrogateescape")
            broker.subscribe_filter(text, callback, subtopic, once)
            return 0
        return broker.subscribe(topic, callback, subtopic, once)

    def publish_mqtt(
        self,
        number: int,
        data: bytes,
        topic: bytes | int,
        subtopic: bytes | int | None,
        ptid: int | None,
        qos: int | None,
        retain: bool,
        expiry_s: float | None,
        properties: bytes | None,
    ) -> int:
        """See `Broker.publish_mqtt`; `properties` is a packed table."""
        loaded = None if properties is None else mqtt_properties(bridge.load(properties))
        options = PublishOptions(qos, retain, expiry_s, loaded)
        return self.of(number).publish_mqtt(data, topic, options, subtopic, ptid)

    def retained_names(self, number: int, topic_filter: bytes) -> bytes:
        """Return length and name of the topics with a retained message that match a filter, in one string; blocks."""
        turn, parts = Turn(), list[bytes]()
        for name in self.of(number).retained.names(topic_filter.decode("utf-8", "surrogateescape")):
            if name is not None:
                parts.append(len(name).to_bytes(4, "big") + name)
            turn.yield_if_due()
        return b"".join(parts)

    def retained_message(self, number: int, name: bytes) -> LuaValues | None:
        """Return payload and attributes of a retained message; None when it was deleted meanwhile."""
        broker = self.of(number)
        message = broker.retained.by_name.get(name)
        if message is None:
            return None
        return message.payload, bridge.dump(attributes_of(message, broker.clock())._asdict())

    def delete_retained(self, number: int, topic_filter: bytes) -> int:
        """Delete the retained messages that match a filter, and return their number; blocks."""
        turn, count = Turn(), 0
        for deleted in self.of(number).retained.delete(topic_filter.decode("utf-8", "surrogateescape")):
            count += deleted
            turn.yield_if_due()
        return count

    def accepts_mqtt(self, number: int) -> bool:
        """Return whether a broker accepts MQTT clients."""
        return self.of(number).devices is not None

    def _callback(self, number: int, ref: int | None, name: str) -> Callable[..., Any] | None:
        if not ref:
            return None
        owner = self._brokers[number]
        vm, function, logged_name = self._vm, LuaFunction(self._vm, ref), name + owner.label
        if name == "onmsg" and owner.broker.devices is not None:
            return self._mqtt_callback(owner, function, logged_name)
        if isinstance(owner, LuaBroker):
            return lambda *arguments: ask(vm, function.ref, logged_name, (), *arguments)
        hub = owner
        return lambda *arguments: () if hub.is_over else ask(vm, function.ref, logged_name, (), *arguments)

    def _mqtt_callback(
        self, owner: LuaBroker | PythonHub, function: LuaFunction, logged_name: str
    ) -> Callable[..., Any]:
        """Return a handler that gets the attributes of messages of MQTT clients as a packed table."""
        clock, vm = owner.broker.clock, self._vm

        def call(data: bytes, *numbers: int) -> Any:
            if isinstance(owner, PythonHub) and owner.is_over:
                return ()
            if not isinstance(data, MqttPayload):
                return ask(vm, function.ref, logged_name, (), data, *numbers)
            attributes = bridge.dump(data.attributes(clock())._asdict())
            return ask(vm, function.ref, logged_name, (), bytes(data), *numbers, attributes)

        return call

    def deliver_default(self, number: int, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Deliver a message to the global handler."""
        self.of(number).server.deliver_default(data, ptid, tid, stid)

    def belongs(self, number: int, client: int) -> bool:
        """Return whether a client belongs to a broker."""
        session = self.clients.find(client)
        return session is not None and session.broker is self.of(number)

    def bound(self, method: Method) -> Function:
        """Return the function of a broker's method: `f(broker's integer, arguments...)`."""
        call: Callable[..., Any] = getattr(GeventBroker, method.name)
        brokers, name = self._brokers, method.name
        convert = _RESULTS.get(method.returns)

        def plain(number: int, *arguments: Any) -> Any:
            return call(brokers[number].broker, *arguments)

        def with_function(number: int, *arguments: Any) -> Any:
            return call(brokers[number].broker, *arguments[:-1], self._callback(number, arguments[-1], name))

        def with_result(number: int, *arguments: Any) -> Any:
            owner = brokers[number]
            return convert(owner, call(owner.broker, *arguments))  # type: ignore[misc]  # used only if not None

        takes_function = any(one.kind is Kind.FUNCTION for one in method.arguments)
        made = with_function if takes_function else with_result if convert else plain
        made.__qualname__ = f"smq.{name}"
        return made


def _handles(owner: LuaBroker | PythonHub, sessions: Iterator[BrokerPeer]) -> bytes:
    """Return the integers of clients, eight bytes each: as values, they could exceed Lua's stack."""
    numbers = [owner.handle(session) for session in sessions]
    return struct.pack(f">{len(numbers)}Q", *numbers)


def _flat(counts: Mapping[str, int]) -> LuaValues:
    """Return `name, value, ...`."""
    return tuple(part for word, count in counts.items() for part in (word.encode(), count))


def _packed(names: Iterator[tuple[int, bytes]]) -> bytes:
    """Return the id, length and name of each topic in one string."""
    return b"".join(_ID_AND_LENGTH.pack(tid, len(name)) + name for tid, name in names)


_RESULTS: dict[Kind, Callable[[Any, Any], LuaValue | LuaValues]] = {
    Kind.COUNTS: lambda owner, counts: _flat(counts),
    Kind.NAMES: lambda owner, names: _packed(names),
    Kind.PEER: lambda owner, session: owner.handle(session) if session else None,
    Kind.PEERS: _handles,
}
"""Conversions of results that are not plain values: functions of the owner of the broker and the result."""
_CLIENT_FUNCTIONS = "on_forget peer peer_topics peer_dropped peer_user origin session socket"
_BROKER_FUNCTIONS = "journal new release subscribe deliver_default belongs publish_mqtt accepts_mqtt retained_message"
_IN_LUA = [method for method in METHODS.values() if method.name != "publish_threadsafe"]  # Lua code has no threads


def _declaration(name: bytes) -> tuple[Any, ...]:
    """Return `result, kind, optional, default, ...` of a method."""
    method = METHODS[name.decode()]
    words: list[Any] = [method.returns.value.encode()]
    for one in method.arguments:
        has_default = one.default is not REQUIRED
        words += (one.kind.value.encode(), one.optional or has_default, one.default if has_default else None)
    return tuple(words)


def install(vm: Vm, services: Services, exchanges: Exchanges) -> HubBinding:
    """Install `smq.hub`."""
    clients = ClientTable(vm, services.sockets)
    binding = HubBinding(vm, exchanges, clients)
    functions: dict[str, Function] = methods(clients, _CLIENT_FUNCTIONS) | methods(binding, _BROKER_FUNCTIONS)
    functions |= {method.name: binding.bound(method) for method in _IN_LUA}
    functions["methods"] = lambda: " ".join(method.name for method in _IN_LUA).encode()
    functions["method"] = _declaration
    functions["log_error"] = lambda name, message: _log_error(from_utf8(name), from_utf8(message))
    blocking: dict[str, Function] = {"connect": binding.connect, "close": binding.close}
    blocking |= {"retained_names": binding.retained_names, "delete_retained": binding.delete_retained}
    # Callbacks of a hub created in Python may block, so no Lua may be on the C stack when they are called.
    blocking |= {f"python_{method.name}": binding.bound(method) for method in _IN_LUA}
    blocking |= {"python_subscribe": binding.subscribe, "python_deliver_default": binding.deliver_default}
    blocking["python_publish_mqtt"] = binding.publish_mqtt
    vm.namespace("smq.hub", functions, blocking)
    services.hubs = binding
    return binding
