"""`require"smq.mtl"`, `require"smq.conn"` and `require"smq.cluster"`: hubs of several processes that work as one
(spec: smq §6). The other halves are lib/smq/mtl.lua, conn.lua and cluster.lua.

Lua knows links, the places where they come from, clusters and channels by integers. They live until the application
ends, channels until they are closed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from smqrt.apps.lua.api.smq_hub import HubBinding, ask
from smqrt.apps.lua.bridge import LuaResult, LuaValue, encoded, fail, from_utf8, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.broker.broker import Name
from smqrt.cluster.channel import AppChannel
from smqrt.cluster.engines.mesh import PORT
from smqrt.cluster.engines.mtl import Cluster, Conn, Links, Mtl, MtlOptions, nobody, own
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.errors import ClosedError, StartError
from smqrt.process import current_application

T = TypeVar("T")


class _Ending:
    """What ends with its application."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.close = end
        current_application.close_with_app(self)


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
            return nobody
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
        current_application.close_with_app(made)
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


_FUNCTIONS = {
    "smq.mtl": "mtl server commence open isopen close_named hascon mtl_shutdown"
    " forget send channel_nodes counts close_channel",
    "smq.conn": "conn setlist add status conn_shutdown",
    "smq.cluster": "cluster publish pubon nodes node shutdown close",
}


def install_smq_cluster(vm: Vm, services: Services, hubs: HubBinding) -> None:
    """Give Lua `smq.mtl`, `smq.conn` and `smq.cluster`."""
    binding = ClusterBinding(vm, services, hubs)
    for name, functions in _FUNCTIONS.items():
        vm.namespace(name, methods(binding, functions))
