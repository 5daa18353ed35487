"""`require"smq.hub"`: brokers for Lua applications (spec: smq §2). The other half is lib/smq/hub.lua.

Lua knows a broker and a client by integers. A client gets one the first time a callback or `peers()` shows it.
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
from smqrt.apps.lua.activity import Outcome
from smqrt.apps.lua.api.exchange import Exchanges
from smqrt.apps.lua.api.sockets import SocketBinding
from smqrt.apps.lua.bridge import Function, LuaError, LuaValue, LuaValues, from_utf8, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.socket_handles import PeerHandle
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.broker.broker import METHODS, REQUIRED, Kind, Method
from smqrt.broker.deferred import Deferred
from smqrt.broker.state import BrokerClient, BrokerPeer, Hooks
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.cluster.remote_node import Phantom
from smqrt.errors import CloseReason
from smqrt.hub.conversions import text_of
from smqrt.hub.peer import peer_of
from smqrt.hub.smq import Smq
from smqrt.journal.writer import HubJournal, JournalWriter
from smqrt.loop.log_limits import ErrorLimit
from smqrt.process import current_application
from smqrt.settings.options import make, options_of
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.handshake import page_user
from smqrt.wire import smq as wire

log = logging.getLogger("smqrt.lua")

_ID_AND_LENGTH = struct.Struct(">II")
_ENDS = ("onclose", "onmoved", "onvanish")
"""The hooks that say that a client is gone."""
_DENIED = (int(wire.ConnackCode.ACCESS_DENIED), b"")


def ask(vm: Vm, ref: int, what: str, otherwise: LuaValues, *arguments: LuaValue) -> LuaValues | Outcome:
    """The values of the Lua callback `what`, or `Deferred`; after an error, which is logged, `otherwise`."""
    try:
        answer = vm.call(ref, *arguments)
    except LuaError as error:
        _log_error(what, error)
        return otherwise
    if not isinstance(answer, Deferred):
        return answer
    later: Outcome = Deferred()

    def settled(values: LuaValues | None, error: BaseException | None) -> None:
        if error is not None:
            _log_error(what, error)
        later.resolve(otherwise if error is not None else values)

    answer.then(settled)
    return later


_limits: defaultdict[str, ErrorLimit] = defaultdict(ErrorLimit)
"""By the name of the callback and of its hub; applications have a few of them."""


def _log_error(what: str, error: object) -> None:
    if (others := _limits[what].others()) is not None:
        log.error("error in %s%s: %s", what, others, error)


def _mapped(answer: Any, function: Callable[[Any], Any]) -> Any:
    """`function(answer)`, now or when it comes."""
    if not isinstance(answer, Deferred):
        return function(answer)
    later: Deferred[Any] = Deferred()
    answer.then(lambda value, error: later.resolve(function(value)))
    return later


class LuaBroker:
    """A broker with its Lua callbacks.

    Args:
        vm: the runtime.
        binding: gives clients their integers.
        refs: callback name to Lua reference.
        options: the other options.
        journal: the option `journal`.
        label: says in the log whose a callback is.
    """

    def __init__(
        self, vm: Vm, binding: HubBinding, refs: dict[str, int], options: HubOptions, journal: object, label: str
    ) -> None:
        self._vm, self._binding, self._refs, self.label = vm, binding, refs, label
        # onclose is always ours: it is where Lua forgets the client. So is log, as in Python.
        adapters = {name: getattr(self, "_" + name) for name in {*refs, "onclose", "log"}}
        made_at = label.removeprefix(" of the hub made at ")
        self.broker = GeventBroker(Hooks(**adapters, onmoved=binding.forget, onvanish=binding.forget), options, made_at)
        try:
            cluster.join(self.broker, options)
            self._journal = HubJournal(self.broker, journal)
        except BaseException:
            self.broker.abandon()  # its `persist` file may be wanted by the next
            raise

    def close(self) -> None:
        """End the clients without a word, and write the journal to its end; blocks."""
        self.broker.close()
        self._journal.close()

    def _end_with_app(self) -> None:
        """The same, because the application ends; with `keep` its clients wait for it to start again."""
        self.broker.keep_clients()
        self.close()

    @property
    def journal(self) -> JournalWriter | None:
        """What writes the journal; None without one, and while another process has it."""
        return self._journal.writer

    def handle(self, session: BrokerPeer) -> int:
        """The integer by which Lua knows a client."""
        return self._binding.handle(session)

    def _ask(self, name: str, otherwise: LuaValues, *arguments: LuaValue) -> LuaValues | Outcome:
        return ask(self._vm, self._refs[name], name + self.label, otherwise, *arguments)

    def _authenticate(self, credentials: bytes, session: BrokerClient) -> Any:
        answer = self._ask("authenticate", _DENIED, credentials, self._binding.handle(session))
        return _mapped(answer, self._verdict(session))

    def _verdict(self, session: BrokerClient) -> Callable[[Any], Any]:
        def verdict(answer: Any) -> Any:
            if answer[0] != wire.ConnackCode.ACCEPTED or session.closed:
                self._binding.forget(session)
            return answer

        return verdict

    def _permittop(self, topic: bytes, issub: bool, session: BrokerClient) -> Any:
        return _mapped(self._ask("permittop", (), topic, issub, self._binding.handle(session)), any)

    def _permitsubtop(self, subtopic: bytes, session: BrokerClient) -> Any:
        return _mapped(self._ask("permitsubtop", (), subtopic, self._binding.handle(session)), any)

    def _onconnect(self, session: BrokerClient) -> None:
        self._ask("onconnect", (), session.etid, self._binding.handle(session))

    def _onclose(self, session: BrokerClient, reason: CloseReason) -> None:
        if "onclose" in self._refs:
            words = reason.word.encode() or None, reason.value.encode()
            answer = self._ask("onclose", (), session.etid, self._binding.handle(session), *words)
            if isinstance(answer, Deferred):
                return answer.then(lambda values, error: self._binding.forget(session))
        self._binding.forget(session)
        return None

    def _onpublish(self, run: bytes, tid: int, ptid: int, session: BrokerPeer) -> Any:
        answer = self._ask("onpublish", (b"",), run, tid, ptid, self._binding.handle(session))
        return _mapped(answer, lambda values: run if values[0] is True else values[0])

    def _ondrop(self, run: bytes, tid: int, ptid: int, session: BrokerPeer) -> None:
        self._ask("ondrop", (), run, tid, ptid, self._binding.handle(session))

    def _onnode(self, number: int, event: str, why: str) -> Any:
        return self._ask("onnode", (), number, event.encode(), bridge.utf8(why))

    def _log(self, session: BrokerPeer | None, text: str) -> None:
        if "log" not in self._refs:
            log.debug("%s", text)
            return
        known = session if session is not None and (session.etid or session.extra is not None) else None
        self._ask("log", (), self._binding.handle(known) if known else None, text.encode())


class PythonHub:
    """A hub that the `.preload.py` of a folder has made, as Lua applications see it.

    Its clients have a `Peer` in `extra`, so their integers are kept here.

    Args:
        binding: draws the integers, and forgets them.
        smq: the hub.
        label: says in the log whose a Lua callback is.

    Attributes:
        is_over: the application has ended, so that its callbacks are not called any more.
    """

    def __init__(self, binding: HubBinding, smq: Smq, label: str) -> None:
        self.broker, self.label, self._smq, self._binding = smq.broker, label, smq, binding
        self._numbers: dict[BrokerPeer, int] = {}
        self.is_over = False
        self._wrapped: dict[str, ForgettingHook] = {}
        hooks = self.broker.hooks
        for name in _ENDS:
            self._wrapped[name] = ForgettingHook(getattr(hooks, name), self._forget)
            setattr(hooks, name, self._wrapped[name])

    @property
    def journal(self) -> JournalWriter | None:
        """What writes the journal; None without one, and while another process has it."""
        return self._smq.journal

    def close(self) -> None:
        """End the hub; blocks."""
        self._smq.close()

    def handle(self, session: BrokerPeer) -> int:
        """The integer by which Lua knows a client."""
        number = self._numbers.get(session)
        if number is None:
            peer_of(session)  # a phantom's end is reported only when something knows it
            number = self._numbers[session] = self._binding.draw(session)
        return number

    def unload(self) -> None:
        """The Lua application has ended: take back the hooks, call its callbacks no more and forget the integers. The
        hub stays. A second call does nothing.
        """
        self.is_over = True
        for name, wrapped in self._wrapped.items():
            wrapped.take_out(self.broker.hooks, name)
        self._wrapped.clear()
        for number in self._numbers.values():
            self._binding.drop(number)
        self._numbers.clear()

    def _forget(self, session: BrokerPeer) -> None:
        if (number := self._numbers.pop(session, None)) is not None:
            self._binding.drop(number)


class ForgettingHook:
    """A hook behind which Lua forgets the client.

    Applications that share a hub wrap its hooks one around the other, and end in any order.

    Args:
        inner: the hook, None for none.
        forget: is called with the client.
    """

    def __init__(self, inner: Callable[..., Any] | None, forget: Callable[[BrokerPeer], None]) -> None:
        self.inner, self._forget = inner, forget

    def __call__(self, session: BrokerPeer, *more: Any) -> Any:
        """Call the hook, and let Lua forget the client."""
        answer = self.inner(session, *more) if self.inner else None
        self._forget(session)
        return answer

    def take_out(self, hooks: Hooks, name: str) -> None:
        """Remove this from the hook of that name, wherever it is in it."""
        outer = getattr(hooks, name)
        if outer is self:
            setattr(hooks, name, self.inner)
            return
        while isinstance(outer, ForgettingHook) and outer.inner is not self:
            outer = outer.inner
        if isinstance(outer, ForgettingHook):
            outer.inner = self.inner


class HubBinding:
    """The Python half of `smq.hub`: functions over broker and client integers."""

    def __init__(self, vm: Vm, exchanges: Exchanges, sockets: SocketBinding) -> None:
        self._vm, self._exchanges, self._sockets = vm, exchanges, sockets
        self._numbers = itertools.count(1)
        self._brokers: dict[int, LuaBroker | PythonHub] = {}
        self._sessions: dict[int, Any] = {}
        self._forget_ref = 0

    # ---- clients

    def on_forget(self, ref: int) -> None:
        """Take the Lua function that drops what Lua keeps of a client."""
        self._forget_ref = ref

    def handle(self, session: BrokerPeer) -> int:
        """The integer by which Lua knows a client."""
        number: int | None = session.extra
        if number is None:
            number = session.extra = self.draw(session)
        return number

    def draw(self, session: BrokerPeer) -> int:
        """Return a new integer for a client."""
        number = next(self._numbers)
        self._sessions[number] = session
        return number

    def forget(self, session: BrokerPeer) -> None:
        """A client is gone."""
        number, session.extra = session.extra, None
        if number is not None:
            self.drop(number)

    def drop(self, number: int) -> None:
        """The client with this integer is gone."""
        self._sessions.pop(number, None)
        self._vm.start(self._forget_ref, number)

    def _session(self, number: int) -> Any:
        return self._sessions.get(number)

    def peer(self, number: int) -> LuaValues | None:
        """`(etid, uid, info)` of a client, and the number of its node when it is another one; None when it is gone."""
        session = self._session(number)
        if session is None:
            return None
        node = (session.node.number,) if isinstance(session, Phantom) else ()
        return session.etid, session.uid, session.info, *node

    def peer_topics(self, number: int) -> bytes:
        """The ids of the topics a client subscribes to, four bytes each: values of their own, a client could bring
        more of them than fit on Lua's stack.
        """
        session = self._session(number)
        topics = session.topics if session and session.topics else ()
        return struct.pack(f">{len(topics)}I", *topics)

    def peer_dropped(self, number: int) -> int | None:
        """How many messages a client missed because it did not read."""
        session = self._session(number)
        return session.outbox.dropped if session else None

    def peer_user(self, number: int) -> LuaValues:
        """The user of a client and its groups, with commas between; None when nobody asked who it is, and when it did
        not say.
        """
        session = self._session(number)
        identity = session.identity if session else None
        if identity is None or not identity.user:
            return (None,)
        return bridge.utf8(identity.user), bridge.utf8(",".join(identity.groups))

    def origin(self, number: int) -> LuaValues:
        """What is known of the request that opened a connection: seed, argument, path, the user of the page, and the
        name/value pairs of the query and head.
        """
        session = self._sessions[number]
        request = session.origin.request if session.origin else None
        arg = session.origin.arg if session.origin else None
        if request is None:
            return session.seed, arg, b"", None, 0
        query = [part.encode("utf-8", "surrogateescape") for pair in _query(request) for part in pair]
        head = [part.encode("latin-1", "replace") for pair in request.fields() for part in pair]
        user = page_user(request)
        facts = request.path.encode("utf-8", "surrogateescape"), None if user is None else bridge.utf8(user)
        return session.seed, arg, *facts, len(query), *query, *head

    def session(self, number: int) -> int | None:
        """The number of the session of the browser that opened a connection."""
        origin = self._sessions[number].origin
        find = origin.request.env.get("find_session") if origin and origin.request else None
        session = find(origin.request) if find else None
        return session.number if session else None

    def socket(self, number: int) -> int:
        """The number of the socket that a client is to Lua (`peer.sock`)."""
        return self._sockets.add(PeerHandle(self._session(number)))

    # ---- brokers

    def new(self, shared: bool, label: bytes, *names_and_values: LuaValue) -> int:
        """Create a broker of names and values in turn: callbacks as references, options as values. `shared`: by a
        module that all applications share, so that it ends with none of them. `label`: see `LuaBroker`.
        """
        given = bridge.options_of(names_and_values)
        refs = {name[2:]: ref for name, ref in given.items() if name.startswith("f:")}
        values = {name: _text(value) for name, value in given.items() if name in options_of(HubOptions)}
        journal = json.loads(given.get("journal", b"[false]"))[0]
        options = make(HubOptions, bridge.for_options(options_of(HubOptions), values), "bad argument #1.")
        broker = LuaBroker(self._vm, self, refs, options, journal, label.decode("utf-8", "replace"))
        if not shared:
            current_application.close_with_app(broker)
        number = next(self._numbers)
        self._brokers[number] = broker
        return number

    def release(self, number: int) -> None:
        """The Lua object was collected: end the broker, in a turn of its own."""
        broker = self._brokers.pop(number, None)
        if isinstance(broker, PythonHub):
            broker.unload()
        elif broker:
            gevent.spawn(broker.close)

    def unload(self, number: int) -> None:
        """The application that had a hub of Python's has ended; Lua may still have the object."""
        broker = self._brokers.get(number)
        if isinstance(broker, PythonHub):
            broker.unload()

    def share(self, smq: Smq, label: str) -> int:
        """Return an integer for a hub that Python has made; `label`: see `PythonHub`."""
        number = next(self._numbers)
        self._brokers[number] = PythonHub(self, smq, label)
        return number

    def journal(self, number: int) -> LuaValues | None:
        """`counter, value, ...` of the journal; None without one."""
        journal = self._brokers[number].journal
        return _flat(journal.stats()) if journal else None

    def close(self, number: int) -> None:
        """End a broker; blocks."""
        self._brokers[number].close()

    def of(self, number: int) -> GeventBroker:
        """The broker of an integer."""
        return self._brokers[number].broker

    def connect(self, number: int, exchange: int, arg: LuaValue) -> None:
        """Turn a request into an SMQ connection; blocks until the handshake ended. `arg`: a Lua reference, or for a hub
        that Python has made the value.
        """
        if isinstance(arg, bytes):
            arg = text_of(arg)  # type: ignore[assignment]  # it goes on to Python
        self.of(number).connect(self._exchanges.request(exchange), arg)

    def subscribe(
        self, number: int, topic: bytes | int, ref: int | None, subtopic: bytes | int | None, once: bool
    ) -> int:
        """See `Broker.subscribe`."""
        return self.of(number).subscribe(topic, self._callback(number, ref, "onmsg"), subtopic, once)

    def _callback(self, number: int, ref: int | None, name: str) -> Callable[..., Any] | None:
        if not ref:
            return None
        owner = self._brokers[number]
        vm, function, what = self._vm, LuaFunction(self._vm, ref), name + owner.label
        if isinstance(owner, LuaBroker):
            return lambda *arguments: ask(vm, function.ref, what, (), *arguments)
        hub = owner
        return lambda *arguments: () if hub.is_over else ask(vm, function.ref, what, (), *arguments)

    def deliver_default(self, number: int, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Give a message to the global handler."""
        self.of(number).server.deliver_default(data, ptid, tid, stid)

    def belongs(self, number: int, client: int) -> bool:
        """Whether a client is one of this broker's."""
        session = self._session(client)
        return session is not None and session.broker is self.of(number)

    # ---- the methods of the table

    def bound(self, method: Method) -> Function:
        """The function behind a method of a broker: `f(broker's integer, arguments...)`."""
        call: Callable[..., Any] = getattr(GeventBroker, method.name)
        brokers, results, name, kind = self._brokers, self._results, method.name, method.returns

        def plain(number: int, *arguments: Any) -> Any:
            return call(brokers[number].broker, *arguments)

        def with_function(number: int, *arguments: Any) -> Any:
            return call(brokers[number].broker, *arguments[:-1], self._callback(number, arguments[-1], name))

        def with_result(number: int, *arguments: Any) -> Any:
            owner = brokers[number]
            return results[kind](owner, call(owner.broker, *arguments))

        takes_function = any(one.kind is Kind.FUNCTION for one in method.arguments)
        made = with_function if takes_function else with_result if kind in results else plain
        made.__qualname__ = f"smq.{name}"
        return made

    @property
    def _results(self) -> dict[Kind, Callable[[Any, Any], Any]]:
        """What Lua gets of results that are no plain values: functions of the owner of the broker and the result."""
        return {
            Kind.COUNTS: lambda owner, counts: _flat(counts),
            Kind.NAMES: lambda owner, names: _packed(names),
            Kind.PEER: lambda owner, session: owner.handle(session) if session else None,
            Kind.PEERS: _handles,
        }


def _handles(owner: LuaBroker | PythonHub, sessions: Iterator[BrokerPeer]) -> bytes:
    """Eight bytes each: values of their own could be more than fit on Lua's stack."""
    numbers = [owner.handle(session) for session in sessions]
    return struct.pack(f">{len(numbers)}Q", *numbers)


def _flat(counts: Mapping[str, int]) -> LuaValues:
    return tuple(part for word, count in counts.items() for part in (word.encode(), count))


def _packed(names: Iterator[tuple[int, bytes]]) -> bytes:
    """Id, length and name of each."""
    return b"".join(_ID_AND_LENGTH.pack(tid, len(name)) + name for tid, name in names)


def _text(value: object) -> object:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _query(request: Any) -> list[tuple[str, str]]:
    return parse_qsl(request.query, keep_blank_values=True, errors="surrogateescape")


_OWN = (
    "on_forget peer peer_topics peer_dropped peer_user journal origin session socket new release subscribe "
    "deliver_default belongs"
)
_IN_LUA = [method for method in METHODS.values() if method.name != "publish_threadsafe"]  # Lua has one thread


def _declaration(name: bytes) -> tuple[Any, ...]:
    """`result, kind, optional, default, ...` of a method."""
    method = METHODS[name.decode()]
    words: list[Any] = [method.returns.value.encode()]
    for one in method.arguments:
        has_default = one.default is not REQUIRED
        words += (one.kind.value.encode(), one.optional or has_default, one.default if has_default else None)
    return tuple(words)


def install(vm: Vm, services: Services, exchanges: Exchanges) -> HubBinding:
    """Give Lua `smq.hub`."""
    binding = HubBinding(vm, exchanges, services.sockets)
    functions: dict[str, Function] = methods(binding, _OWN)
    functions |= {method.name: binding.bound(method) for method in _IN_LUA}
    functions["methods"] = lambda: " ".join(method.name for method in _IN_LUA).encode()
    functions["method"] = _declaration
    functions["log_error"] = lambda what, message: _log_error(from_utf8(what), from_utf8(message))
    blocking: dict[str, Function] = {"connect": binding.connect, "close": binding.close}
    # The callbacks of a hub that Python has made may block, so no Lua may be on the C stack when one is called.
    blocking |= {f"python_{method.name}": binding.bound(method) for method in _IN_LUA}
    blocking |= {"python_subscribe": binding.subscribe, "python_deliver_default": binding.deliver_default}
    vm.namespace("smq.hub", functions, blocking)
    services.hubs = binding
    return binding
