"""Python half of `smq.client` and of `smq.mtl`, `smq.conn` and `smq.cluster` (spec: smq §3, §6).

Lua refers to a client by an integer. The callbacks of a client run one at a time in its dispatcher greenlet, so they
may block. `create` and all methods return immediately.
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
from smqrt.apps.lua.vm import LuaFunction, Services, Vm
from smqrt.broker.broker import Name
from smqrt.client import ConnectionEnd, SmqClient
from smqrt.clients.smq.options import SmqClientOptions
from smqrt.cluster.channel import AppChannel
from smqrt.cluster.engines.mesh import PORT
from smqrt.cluster.engines.mtl import Cluster, Conn, Links, Mtl, MtlOptions, ignore_event, own
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.errors import ClosedError, NoAnswer, StartError, StreamError
from smqrt.process import current_process
from smqrt.transport.stream import Stream

log = logging.getLogger("smqrt.lua")

_HEADER = "header:"
_PROXY = ("proxy", "proxyport", "socks", "proxyuser", "proxypass")


class EndHint:
    """Log, once per client, why a connection was closed, which `onclose` gets as one word.

    For a broker with an untrusted certificate, the line says how to connect to it.
    """

    def __init__(self) -> None:
        self._is_logged = False

    def check(self, end: ConnectionEnd | None) -> None:
        """Log the reason of a closed connection, if it is the first one that the broker did not close."""
        if end is None or end.by_broker or self._is_logged:
            return
        self._is_logged = True
        if end.word == "sslnottrusted":
            log.error("SMQ client: %s; to connect without this check: create(url, {trusted = false})", end)
        else:
            log.warning("SMQ client: %s", end)


class SmqClientBinding:
    """SMQ clients by number."""

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm = vm
        self._services = services
        services.smq_clients = self
        self._openings: dict[int, AsyncResult[Stream]] = {}
        self._clients: dict[int, SmqClient] = {}
        self._last = 0
        self._on_event: LuaFunction | None = None

    def on_event(self, ref: int) -> None:
        """Set the Lua function that runs the callbacks of clients: `f(number, event, ...)`."""
        self._on_event = LuaFunction(self._vm, ref)

    def _event(self, number: int, event: str, *arguments: LuaValue | str) -> LuaValue:
        assert self._on_event  # the Lua half sets it before it makes clients
        return self._on_event.run(f"on{event} of an SMQ client", number, event, *arguments)

    def create(self, url: bytes | None, *options: LuaValue) -> int:
        """Create a client that connects in the background, and return its number.

        Args:
            url: None if the application makes the connections; see `opened`.
            options: alternating keys and values; `header:NAME` is a header field, times are in seconds, `shark` is the
                number of a TLS client. The options of the proxy have the same names as in httpc.
        """
        chosen = options_of(options)
        fields = [key for key in chosen if key.startswith(_HEADER)]
        headers = {key.removeprefix(_HEADER): from_latin1(chosen.pop(key)) for key in fields}
        timeout_s = chosen.get("timeout", SmqClientOptions.timeout)
        proxy = proxy_of({key: chosen.pop(key) for key in _PROXY if key in chosen})
        tls = self._services.tls[chosen.pop("shark")] if "shark" in chosen else None
        self._last = number = self._last + 1
        event, hint = partial(partial, self._event, number), EndHint()
        # A mapping: type checkers know neither that the Lua half passes a ClientTls nor what it returns for `onauth`.
        more = {
            "cleanstart": True,
            "headers": headers,
            "proxy": proxy,
            "tls": tls,
            "onauth": event("auth"),
            "onconnect": event("connect"),
            "onreconnect": event("reconnect"),
            "onclose": lambda word, can_reconnect: self._on_close(number, word, can_reconnect, hint),
            "onmsg": event("msg"),
        }
        address = url.decode("utf-8", "replace") if url is not None else lambda: self._open(number, timeout_s)
        client = SmqClient(address, {**chosen, **more})
        client.on_end(lambda: self._forget(number))
        self._clients[number] = client
        return number

    def _open(self, number: int, timeout_s: float) -> Stream:
        """Run the application's connect function, and return the connection that it passes to `opened`; blocks."""
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
        """Continue the client's connection attempt with a socket or an error; False if the attempt was abandoned.

        Args:
            socket: the number of a socket without TLS or WebSocket; None after a failure.
            word: the error word; with a socket, the bytes that were already received from it.
            detail: the details of the error.
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

    def _on_close(self, number: int, word: str | None, can_reconnect: bool, hint: EndHint) -> bool | float | None:
        """Call Lua's onclose, and return the seconds until the next attempt, True for the default delays or False for
        no attempt. None after an error in onclose, so that the client reconnects nevertheless.
        """
        end = self._clients[number].end
        hint.check(end)
        by_broker = end is not None and end.by_broker
        answer = self._event(number, "close", None if by_broker else word, can_reconnect, word if by_broker else None)
        assert not isinstance(answer, bytes)
        return answer if isinstance(answer, bool) or answer is None else answer / 1000

    def _forget(self, number: int) -> None:
        self._clients.pop(number, None)
        self._event(number, "end")

    def _of(self, number: int) -> SmqClient | None:
        """Return the client; None if it is closed or not connected."""
        client = self._clients.get(number)
        return client if client is not None and client.connected and not client.closing else None

    def _function(self, ref: int | None, name: str) -> LuaFunction | None:
        return None if ref is None else LuaFunction(self._vm, ref, f"{name} of an SMQ client")

    def number_topic(self, number: int, topic: bytes | int, onack_ref: int | None) -> bool:
        """See `smq:create`; return whether the client is connected."""
        onack = self._function(onack_ref, "onack of create")
        if (client := self._of(number)) is None:
            return False
        client.create(topic, onack)
        return True

    def number_subtopic(self, number: int, subtopic: bytes, onack_ref: int | None) -> bool:
        """See `smq:createsub`; return whether the client is connected."""
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
        """See `smq:subscribe`; return whether the client is connected."""
        settings = {
            "onmsg": self._function(onmsg_ref, "onmsg of subscribe"),
            "onack": self._function(onack_ref, "onack of subscribe"),
        }
        if (client := self._of(number)) is None:
            return False
        client.subscribe(topic, subtopic, settings)
        return True

    def publish(self, number: int, data: bytes, topic: bytes | int, subtopic: bytes | int | None) -> bool:
        """See `smq:publish`; return False if the client is not connected or its send queue is full."""
        client = self._of(number)
        return client is not None and client.publish(data, topic, subtopic)

    def request(self, number: int, etid: int, data: bytes, timeout_s: float) -> LuaResult:
        """See `smq:request`; block until the answer, and return it, or None and the error."""
        client = self._of(number)
        if client is None:
            return fail("the client is not connected")
        try:
            return client.request(etid, data, timeout_s).data
        except (ClosedError, NoAnswer) as error:
            return fail(str(error))

    def unsubscribe(self, number: int, topic: bytes | int) -> None:
        """See `smq:unsubscribe`."""
        if client := self._of(number):
            client.unsubscribe(topic)

    def observe(self, number: int, topic: bytes | int, ref: int) -> None:
        """See `smq:observe`."""
        onchange = LuaFunction(self._vm, ref, "the function of observe of an SMQ client")
        if client := self._of(number):
            client.observe(topic, onchange)

    def unobserve(self, number: int, topic: bytes | int) -> None:
        """See `smq:unobserve`."""
        if client := self._of(number):
            client.unobserve(topic)

    def gettid(self, number: int) -> int | None:
        """Return the client's own ETID; None if it is not connected."""
        client = self._of(number)
        return client.gettid() if client else None

    def topic2tid(self, number: int, topic: bytes) -> int | None:
        """Return the number of a topic; None if the client has not registered the topic or is not connected."""
        client = self._of(number)
        return client.topic2tid(topic) if client else None

    def tid2topic(self, number: int, tid: int) -> LuaValue:
        """Return the name of a topic; None if unknown."""
        client = self._of(number)
        return encoded(client.tid2topic(tid)) if client else None

    def subtopic2tid(self, number: int, subtopic: bytes) -> int | None:
        """Return the number of a sub-topic; None if unknown."""
        client = self._of(number)
        return client.subtopic2tid(subtopic) if client else None

    def tid2subtopic(self, number: int, stid: int) -> LuaValue:
        """Return the name of a sub-topic; None if unknown."""
        client = self._of(number)
        return encoded(client.tid2subtopic(stid)) if client else None

    def close(self, number: int) -> None:
        """See `smq:close`: send the queued messages, then close the connection permanently."""
        if client := self._clients.get(number):
            client.disconnect()

    def end(self, timeout_s: float) -> None:
        """Close every client on shutdown; block until the queued messages are sent, at most `timeout_s`."""
        clients = list(self._clients.values())
        for client in clients:
            client.disconnect()
        with gevent.Timeout(timeout_s, False):  # type: ignore[arg-type]  # False: no exception at the timeout
            for client in clients:
                client.wait_closed()


_FUNCTIONS = (
    "on_event create opened number_topic number_subtopic subscribe publish unsubscribe observe unobserve gettid "
    "topic2tid tid2topic subtopic2tid tid2subtopic close"
)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def install_smq_client(vm: Vm, services: Services) -> None:
    """Install `smq.client`."""
    binding = SmqClientBinding(vm, services)
    vm.namespace("smq.client", methods(binding, _FUNCTIONS), blocking={"request": binding.request})


# ---- `smq.mtl`, `smq.conn` and `smq.cluster`: hubs of several processes that work as one.
#
# Lua refers to links, their listeners, clusters and channels by integers. They exist until the application ends,
# channels until they are closed.

T = TypeVar("T")


class _CloseWithApp:
    """Calls a function when the application ends."""

    def __init__(self, close: Callable[[], object]) -> None:
        self.close = close
        current_process.close_with_app(self)


class ClusterBinding:
    """Links, listeners, clusters and channels by number."""

    def __init__(self, vm: Vm, services: Services, hubs: HubBinding) -> None:
        self._vm, self._services, self._hubs = vm, services, hubs
        self._numbers = itertools.count(1)
        self._mtls: dict[int, Links] = {}
        self._conns: dict[int, Conn] = {}
        self._clusters: dict[int, Cluster] = {}
        self._channels: dict[int, AppChannel] = {}
        self._with_app: list[_CloseWithApp] = []  # the application's scope has weak references to them

    def _function(self, ref: int | None, name: str) -> Callable[..., object]:
        """Return a function that calls a Lua function of the application, with nil for empty texts."""
        if not ref:
            return ignore_event
        vm, function = self._vm, LuaFunction(self._vm, ref)

        def call(*given: LuaValue | str) -> object:
            return ask(vm, function.ref, name, (), *(None if one == "" else encoded(one) for one in given))

        return call

    def _keep(self, kind: dict[int, Any], made: Any, end: Callable[[], object]) -> int:
        number = next(self._numbers)
        kind[number] = made

        def close() -> None:
            kind.pop(number, None)
            end()

        self._with_app.append(_CloseWithApp(close))
        return number

    # ---- mtl

    def mtl(self, password: bytes, ping_s: float, silence_s: float, node: int, *refs: int | None) -> int:
        """Create links; see `Mtl`. `refs` are the functions onstatus, roundtripCB and log."""
        names = ("onstatus of smq.mtl", "roundtripCB of smq.mtl", "log of smq.mtl")
        functions = [self._function(ref, name) for ref, name in zip(refs, names, strict=True)]
        mtl = Mtl(password, MtlOptions(ping_s, silence_s, node, *functions))
        return self._keep(self._mtls, mtl, mtl.shutdown)

    def server(self) -> int:
        """Return the number of the server's own links; see `Links`."""
        links = Links(process_cluster.opened())
        return self._keep(self._mtls, links, links.shutdown)

    def commence(self, number: int, socket: int, ref: int | None) -> bool:
        """Turn a socket that the application has connected into a link; see `Mtl.commence`."""
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
        channel = _of(self._mtls, number).open(name, status, data)
        current_process.close_with_app(channel)
        number = next(self._numbers)
        self._channels[number] = channel
        return number

    def forget(self, number: int) -> None:
        """Forget a channel whose Lua object was collected; it may still be open."""
        self._channels.pop(number, None)

    def send(self, number: int, data: bytes, node: int | None) -> LuaResult:
        """See `AppChannel.send`."""
        return self._channels[number].send(data, node)

    def channel_nodes(self, number: int) -> LuaResult:
        """Return `number, address, ...`: the nodes and the addresses of their links."""
        nodes = self._channels[number].nodes()
        return tuple(part for node, via in nodes.items() for part in (node, via.encode()))

    def counts(self, number: int) -> LuaResult:
        """Return `name, value, ...` of the channel's counters."""
        counts = self._channels[number].counts()
        return tuple(part for name, count in counts.items() for part in (name.encode(), count))

    def close_channel(self, number: int, text: bytes) -> None:
        """See `AppChannel.close`."""
        self._channels[number].close(text)

    # ---- conn

    def conn(
        self, mtl: int, port: int | None, host: bytes, shark: int | None, sshark: int | None, ref: int | None
    ) -> LuaResult:
        """Listen for links; return the number of the listener and its port, or nil and the error."""
        tls = self._services.tls
        client, server = tls[shark] if shark else None, tls[sshark] if sshark else None
        status = self._function(ref, "onstatus of smq.conn")
        links = own(_of(self._mtls, mtl))
        try:
            conn = Conn(
                links,
                PORT if port is None else port,
                from_utf8(host),
                client,  # type: ignore[arg-type]
                server.context() if server else None,
                status,
            )
        except StartError as error:
            return fail(str(error))
        return self._keep(self._conns, conn, conn.shutdown), conn.port

    def setlist(self, number: int, *names_and_ports: bytes | int) -> bool:
        """See `Conn.setlist`; alternating names and ports, 0 for the port of the Conn."""
        pairs = zip(names_and_ports[::2], names_and_ports[1::2], strict=True)
        _of(self._conns, number).setlist([(from_utf8(bytes(name)), int(port)) for name, port in pairs])
        return True

    def add(self, number: int, name: bytes, port: int) -> bool:
        """See `Conn.add`."""
        _of(self._conns, number).add(from_utf8(name), port)
        return True

    def status(self, number: int) -> LuaResult:
        """Return `name, is_linked, ...` of the nodes."""
        status = _of(self._conns, number).status()
        return tuple(part for name, up in status.items() for part in (name.encode(), up))

    def conn_shutdown(self, number: int) -> None:
        """See `Conn.shutdown`."""
        if number in self._conns:
            self._conns[number].shutdown()

    # ---- cluster

    def cluster(self, hub: int, mtl: int | None, name: bytes) -> int:
        """Add a hub to a cluster; see `Cluster`."""
        cluster = Cluster(self._hubs.of(hub), _of(self._mtls, mtl) if mtl else None, from_utf8(name))
        return self._keep(self._clusters, cluster, cluster.close)

    def publish(self, number: int, data: bytes, subtopic: Name | None, ptid: int | None) -> int:
        """See `Cluster.publish`."""
        return _of(self._clusters, number).publish(data, subtopic, ptid)

    def pubon(self, number: int, data: bytes, ptid: int, topic: Name, subtopic: Name | None) -> bool:
        """See `Cluster.pubon`."""
        return _of(self._clusters, number).pubon(data, ptid, topic, subtopic)

    def nodes(self, number: int) -> LuaResult:
        """Return `number, clients, ...`: the nodes and the counts of their clients."""
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
    """Install `smq.mtl`, `smq.conn` and `smq.cluster`."""
    binding = ClusterBinding(vm, services, hubs)
    for name, functions in _FUNCTIONS_SMQ_CLUSTER.items():
        vm.namespace(name, methods(binding, functions))
