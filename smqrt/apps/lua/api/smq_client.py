"""`require"smq.client"`: SMQ clients for Lua applications (spec: smq §3). The other half is
lib/smq/client.lua.

Lua knows a client by an integer. Its callbacks run one after the other in the greenlet of the client's dispatcher, so
they may block; `create` and all methods return at once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult

from smqrt.apps.lua.api.httpc import proxy_of
from smqrt.apps.lua.api.smq_hub import HubBinding, ask
from smqrt.apps.lua.bridge import LuaResult, LuaValue, encoded, fail, from_latin1, from_utf8, methods, options_of
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.broker.broker import Name
from smqrt.client import ConnectionEnd, SmqClient
from smqrt.clients.smq.connection import SmqClientOptions
from smqrt.cluster.channel import AppChannel
from smqrt.cluster.engines.mesh import PORT
from smqrt.cluster.engines.mtl import Cluster, Conn, Links, Mtl, MtlOptions, ignore_event, own
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.errors import ClosedError, StartError, StreamError
from smqrt.process import current_process
from smqrt.transport.stream import Stream

log = logging.getLogger("smqrt.lua")

_HEADER = "header:"
_PROXY = ("proxy", "proxyport", "socks", "proxyuser", "proxypass")


class UntrustedHint:
    """Tells once how to reach a broker whose certificate nobody vouches for."""

    def __init__(self) -> None:
        self._was_told = False

    def tell(self, end: ConnectionEnd | None) -> None:
        """A connection has ended."""
        if end is None or end.word != "sslnottrusted" or self._was_told:
            return
        self._was_told = True
        log.error("SMQ client: %s; to connect nevertheless: create(url, {trusted = false})", end)


class SmqClientBinding:
    """The Python binding: clients by their integers."""

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm = vm
        self._services = services
        services.smq_clients = self
        self._openings: dict[int, AsyncResult[Stream]] = {}
        self._clients: dict[int, SmqClient] = {}
        self._last = 0
        self._on_event: LuaFunction | None = None

    def on_event(self, ref: int) -> None:
        """Set the Lua function that gets what concerns a client as a whole: `f(number, event, ...)`."""
        self._on_event = LuaFunction(self._vm, ref)

    def _event(self, number: int, event: str, *arguments: LuaValue | str) -> LuaValue:
        assert self._on_event  # the Lua half sets it before it makes clients
        return self._on_event.run(f"on{event} of an SMQ client", number, event, *arguments)

    def create(self, url: bytes | None, *options: LuaValue) -> int:
        """Make a client that connects in the background.

        Args:
            url: None when the application makes the connections, see `opened`.
            options: keys and values in turn; `header:NAME` is a header field, times are seconds, `shark` is the number
                of a TLS client, and the proxy has the names of httpc.
        """
        chosen = options_of(options)
        fields = [key for key in chosen if key.startswith(_HEADER)]
        headers = {key.removeprefix(_HEADER): from_latin1(chosen.pop(key)) for key in fields}
        timeout_s = chosen.get("timeout", SmqClientOptions.timeout)
        proxy = proxy_of({key: chosen.pop(key) for key in _PROXY if key in chosen})
        tls = self._services.tls[chosen.pop("shark")] if "shark" in chosen else None
        self._last = number = self._last + 1
        event, hint = partial(partial, self._event, number), UntrustedHint()
        client = SmqClient(
            url.decode("utf-8", "replace") if url is not None else lambda: self._open(number, timeout_s),
            chosen,
            cleanstart=True,
            headers=headers,
            proxy=proxy,
            tls=tls,
            onauth=event("auth"),
            onconnect=event("connect"),
            onreconnect=event("reconnect"),
            onclose=lambda word, can_reconnect: self._on_close(number, word, can_reconnect, hint),
            onmsg=event("msg"),
        )
        client.on_end(lambda: self._forget(number))
        self._clients[number] = client
        return number

    def _open(self, number: int, timeout_s: float) -> Stream:
        """Have Lua make a connection."""
        opening: AsyncResult[Stream] = AsyncResult()
        self._openings[number] = opening
        try:
            with gevent.Timeout(timeout_s, StreamError("timeout", "the application made no connection in time")):
                self._event(number, "open")
                stream = opening.get()
        finally:
            self._openings.pop(number, None)
        assert stream is not None
        return stream

    def opened(self, number: int, socket: int | None, word: bytes | None, detail: bytes | None) -> bool:
        """Lua has made a connection, or not. False: nobody waits for it any more.

        Args:
            socket: the number of a bare socket; None when there is none.
            word: what went wrong; with a socket, what was received from it already.
        """
        opening = self._openings.pop(number, None)
        if opening is None:
            return False
        if socket is None:
            opening.set_exception(StreamError(_text(word) or "cannotconnect", _text(detail)))
            return True
        try:
            stream: Stream = self._services.sockets.stream(socket)
            stream.unread(word or b"")
            opening.set(stream)
        except StreamError as error:
            opening.set_exception(error)
        return True

    def _on_close(self, number: int, word: str | None, can_reconnect: bool, hint: UntrustedHint) -> bool | float | None:
        """What Lua's onclose decides: seconds until the next attempt, True for the usual delays, False to stay away;
        None when it failed: an error must not lose the client.
        """
        end = self._clients[number].end
        hint.tell(end)
        by_broker = end is not None and end.by_broker
        answer = self._event(number, "close", None if by_broker else word, can_reconnect, word if by_broker else None)
        assert not isinstance(answer, bytes)
        return answer if isinstance(answer, bool) or answer is None else answer / 1000

    def _forget(self, number: int) -> None:
        self._clients.pop(number, None)
        self._event(number, "end")

    def _of(self, number: int) -> SmqClient | None:
        """The client, None when it is not connected, or has been closed."""
        client = self._clients.get(number)
        return client if client is not None and client.connected and not client.closing else None

    def _function(self, ref: int | None, name: str) -> LuaFunction | None:
        return None if ref is None else LuaFunction(self._vm, ref, f"{name} of an SMQ client")

    def number_topic(self, number: int, topic: bytes | int, onack_ref: int | None) -> bool:
        """`smq:create`: whether there is a connection."""
        onack = self._function(onack_ref, "onack of create")
        if (client := self._of(number)) is None:
            return False
        client.create(topic, onack)
        return True

    def number_subtopic(self, number: int, subtopic: bytes, onack_ref: int | None) -> bool:
        """`smq:createsub`: whether there is a connection."""
        onack = self._function(onack_ref, "onack of createsub")
        if (client := self._of(number)) is None:
            return False
        client.createsub(subtopic, onack)
        return True

    def subscribe(
        self,
        number: int,
        topic: bytes | int,
        subtopic: bytes | int | None,
        onmsg_ref: int | None,
        onack_ref: int | None,
    ) -> bool:
        """`smq:subscribe`: whether there is a connection."""
        settings = {
            "onmsg": self._function(onmsg_ref, "onmsg of subscribe"),
            "onack": self._function(onack_ref, "onack of subscribe"),
        }
        if (client := self._of(number)) is None:
            return False
        client.subscribe(topic, subtopic, settings)
        return True

    def publish(self, number: int, data: bytes, topic: bytes | int, subtopic: bytes | int | None) -> bool:
        """`smq:publish`: False without a connection, or when the send queue is full."""
        client = self._of(number)
        return client is not None and client.publish(data, topic, subtopic)

    def unsubscribe(self, number: int, topic: bytes | int) -> None:
        """`smq:unsubscribe`."""
        if client := self._of(number):
            client.unsubscribe(topic)

    def observe(self, number: int, topic: bytes | int, ref: int) -> None:
        """`smq:observe`."""
        onchange = LuaFunction(self._vm, ref, "the function of observe of an SMQ client")
        if client := self._of(number):
            client.observe(topic, onchange)

    def unobserve(self, number: int, topic: bytes | int) -> None:
        """`smq:unobserve`."""
        if client := self._of(number):
            client.unobserve(topic)

    def gettid(self, number: int) -> int | None:
        """One's own ETID, None while not connected."""
        client = self._of(number)
        return client.gettid() if client else None

    def topic2tid(self, number: int, topic: bytes) -> int | None:
        """The number of a topic this client knows."""
        client = self._of(number)
        return client.topic2tid(topic) if client else None

    def tid2topic(self, number: int, tid: int) -> LuaValue:
        """The name of a topic this client knows."""
        client = self._of(number)
        return encoded(client.tid2topic(tid)) if client else None

    def subtopic2tid(self, number: int, subtopic: bytes) -> int | None:
        """The number of a sub-topic this client knows."""
        client = self._of(number)
        return client.subtopic2tid(subtopic) if client else None

    def tid2subtopic(self, number: int, stid: int) -> LuaValue:
        """The name of a sub-topic this client knows."""
        client = self._of(number)
        return encoded(client.tid2subtopic(stid)) if client else None

    def close(self, number: int) -> None:
        """`smq:close`: after what was published; the client does not come back."""
        if client := self._clients.get(number):
            client.disconnect()

    def end(self, most_s: float) -> None:
        """The server stops: close every client, and wait until the brokers have what was published."""
        clients = list(self._clients.values())
        for client in clients:
            client.disconnect()
        with gevent.Timeout(most_s, False):  # type: ignore[arg-type]  # False: leave the block quietly
            for client in clients:
                client.wait_closed()


_FUNCTIONS = (
    "on_event create opened number_topic number_subtopic subscribe publish unsubscribe observe unobserve gettid "
    "topic2tid tid2topic subtopic2tid tid2subtopic close"
)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def install_smq_client(vm: Vm, services: Services) -> None:
    """Give Lua `smq.client`."""
    binding = SmqClientBinding(vm, services)
    vm.namespace("smq.client", methods(binding, _FUNCTIONS))


# ---- `require"smq.mtl"`, `require"smq.conn"` and `require"smq.cluster"`: hubs of several processes that work as one
# (spec: smq §6). The other halves are lib/smq/mtl.lua, conn.lua and cluster.lua.
#
# Lua knows links, the places where they come from, clusters and channels by integers. They live until the application
# ends, channels until they are closed.

T = TypeVar("T")


class _Ending:
    """What ends with its application."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.close = end
        current_process.close_with_app(self)


class ClusterBinding:
    """The Python half: functions over integers."""

    def __init__(self, vm: Vm, services: Services, hubs: HubBinding) -> None:
        self._vm, self._services, self._hubs = vm, services, hubs
        self._numbers = itertools.count(1)
        self._mtls: dict[int, Links] = {}
        self._conns: dict[int, Conn] = {}
        self._clusters: dict[int, Cluster] = {}
        self._channels: dict[int, AppChannel] = {}
        self._endings: list[_Ending] = []

    def _function(self, ref: int | None, what: str) -> Callable[..., object]:
        """A function of the application. Empty texts are nil there."""
        if not ref:
            return ignore_event
        vm, function = self._vm, LuaFunction(self._vm, ref)

        def tell(*given: LuaValue | str) -> object:
            return ask(vm, function.ref, what, (), *(None if one == "" else encoded(one) for one in given))

        return tell

    def _keep(self, kind: dict[int, Any], made: Any, end: Callable[[], object]) -> int:
        number = next(self._numbers)
        kind[number] = made

        def close() -> None:
            kind.pop(number, None)
            end()

        self._endings.append(_Ending(close))
        return number

    # ---- mtl

    def mtl(self, password: bytes, ping_s: float, silence_s: float, node: int, *refs: int | None) -> int:
        """Make links; see `Mtl`. The functions are onstatus, roundtripCB and log."""
        names = ("onstatus of smq.mtl", "roundtripCB of smq.mtl", "log of smq.mtl")
        functions = [self._function(ref, name) for ref, name in zip(refs, names, strict=True)]
        made = Mtl(password, MtlOptions(ping_s, silence_s, node, *functions))
        return self._keep(self._mtls, made, made.shutdown)

    def server(self) -> int:
        """The links of the server; see `Links`."""
        made = Links(process_cluster.opened())
        return self._keep(self._mtls, made, made.shutdown)

    def commence(self, number: int, socket: int, ref: int | None) -> bool:
        """Make a link of a socket that the application has connected; see `Mtl.commence`."""
        links = own(_of(self._mtls, number))
        stream = self._services.sockets.stream(socket)
        host, port = stream.peername()
        transport, data = stream.release()
        status = self._function(ref, "the status function of commence")
        return links.commence(transport, data, True, f"{host}:{port}", status)

    def isopen(self, number: int, name: bytes) -> bool:
        """See `Links.isopen`."""
        return _of(self._mtls, number).isopen(name)

    def close_named(self, number: int, name: bytes, text: bytes) -> bool:
        """See `Mtl.close_named`."""
        return _of(self._mtls, number).close_named(name, text)

    def hascon(self, number: int, host: bytes) -> bool:
        """See `Mtl.hascon`."""
        return _of(self._mtls, number).hascon(from_utf8(host))

    def mtl_shutdown(self, number: int) -> None:
        """See `Mtl.shutdown`."""
        if number in self._mtls:
            self._mtls[number].shutdown()

    # ---- channels

    def open(self, number: int, name: bytes, status_ref: int, data_ref: int) -> int:
        """Open a channel; see `Links.open`."""
        status = self._function(status_ref, "the status function of a channel")
        data = self._function(data_ref, "the data function of a channel")
        made = _of(self._mtls, number).open(name, status, data)
        current_process.close_with_app(made)
        number = next(self._numbers)
        self._channels[number] = made
        return number

    def forget(self, number: int) -> None:
        """Lua has no object for a channel any more, which may still be open."""
        self._channels.pop(number, None)

    def send(self, number: int, data: bytes, node: int | None) -> LuaResult:
        """See `AppChannel.send`."""
        return self._channels[number].send(data, node)

    def channel_nodes(self, number: int) -> LuaResult:
        """Numbers of nodes and where their links go, in turn."""
        nodes = self._channels[number].nodes()
        return tuple(part for node, via in nodes.items() for part in (node, via.encode()))

    def counts(self, number: int) -> LuaResult:
        """Names and figures in turn."""
        counts = self._channels[number].counts()
        return tuple(part for name, count in counts.items() for part in (name.encode(), count))

    def close_channel(self, number: int, text: bytes) -> None:
        """See `AppChannel.close`."""
        self._channels[number].close(text)

    # ---- conn

    def conn(
        self, mtl: int, port: int | None, host: bytes, shark: int | None, sshark: int | None, ref: int | None
    ) -> LuaResult:
        """Take links at a port: its number and the port, or nil and the reason."""
        tls = self._services.tls
        client, server = tls[shark] if shark else None, tls[sshark] if sshark else None
        status = self._function(ref, "onstatus of smq.conn")
        links = own(_of(self._mtls, mtl))
        try:
            made = Conn(
                links,
                PORT if port is None else port,
                from_utf8(host),
                client,  # type: ignore[arg-type]
                server.context() if server else None,
                status,
            )
        except StartError as error:
            return fail(str(error))
        return self._keep(self._conns, made, made.shutdown), made.port

    def setlist(self, number: int, *names_and_ports: bytes | int) -> bool:
        """See `Conn.setlist`; names and ports in turn, 0 for the port of the Conn."""
        pairs = zip(names_and_ports[::2], names_and_ports[1::2], strict=True)
        _of(self._conns, number).setlist([(from_utf8(bytes(name)), int(port)) for name, port in pairs])
        return True

    def add(self, number: int, name: bytes, port: int) -> bool:
        """See `Conn.add`."""
        _of(self._conns, number).add(from_utf8(name), port)
        return True

    def status(self, number: int) -> LuaResult:
        """Names and whether each is linked, in turn."""
        status = _of(self._conns, number).status()
        return tuple(part for name, up in status.items() for part in (name.encode(), up))

    def conn_shutdown(self, number: int) -> None:
        """See `Conn.shutdown`."""
        if number in self._conns:
            self._conns[number].shutdown()

    # ---- cluster

    def cluster(self, hub: int, mtl: int | None, name: bytes) -> int:
        """Take a hub into a cluster; see `Cluster`."""
        made = Cluster(self._hubs.of(hub), _of(self._mtls, mtl) if mtl else None, from_utf8(name))
        return self._keep(self._clusters, made, made.close)

    def publish(self, number: int, data: bytes, subtopic: Name | None, ptid: int | None) -> int:
        """See `Cluster.publish`."""
        return _of(self._clusters, number).publish(data, subtopic, ptid)

    def pubon(self, number: int, data: bytes, ptid: int, topic: Name, subtopic: Name | None) -> bool:
        """See `Cluster.pubon`."""
        return _of(self._clusters, number).pubon(data, ptid, topic, subtopic)

    def nodes(self, number: int) -> LuaResult:
        """Numbers of nodes and of their clients, in turn."""
        return tuple(part for pair in _of(self._clusters, number).nodes().items() for part in pair)

    def node(self, number: int) -> int:
        """See `Cluster.number`."""
        return _of(self._clusters, number).number

    def shutdown(self, number: int, text: bytes | None) -> None:
        """See `Cluster.shutdown`."""
        _of(self._clusters, number).shutdown(text)

    def close(self, number: int, text: bytes) -> None:
        """See `Cluster.close`."""
        if number in self._clusters:
            self._clusters[number].close(text)


def _of(kind: dict[int, T], number: int) -> T:
    found = kind.get(number)
    if found is None:
        raise ClosedError("the application that made it has ended; make a new one")
    return found


_FUNCTIONS_SMQ_CLUSTER = {
    "smq.mtl": "mtl server commence open isopen close_named hascon mtl_shutdown"
    " forget send channel_nodes counts close_channel",
    "smq.conn": "conn setlist add status conn_shutdown",
    "smq.cluster": "cluster publish pubon nodes node shutdown close",
}


def install_smq_cluster(vm: Vm, services: Services, hubs: HubBinding) -> None:
    """Give Lua `smq.mtl`, `smq.conn` and `smq.cluster`."""
    binding = ClusterBinding(vm, services, hubs)
    for name, functions in _FUNCTIONS_SMQ_CLUSTER.items():
        vm.namespace(name, methods(binding, functions))
