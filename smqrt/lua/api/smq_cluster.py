"""`require"smq.mtl"`, `require"smq.conn"` and `require"smq.cluster"`: hubs of several processes that work as one
(specification: smq.md §6). The other halves are lib/smq/mtl.lua, conn.lua and cluster.lua.

Lua knows links, the places where they come from, and clusters by integers. They live until the application ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from smqrt import app_folder
from smqrt.backplane.mesh import PORT
from smqrt.backplane.mtl import Cluster, Conn, Mtl, MtlOptions, nobody
from smqrt.broker.broker import Name
from smqrt.errors import SmqrtError
from smqrt.lua.api.smq_hub import HubBinding, ask
from smqrt.lua.bridge import LuaResult, from_utf8, methods
from smqrt.lua.services import Services
from smqrt.lua.vm import LuaFunction, Vm


class _Ending:
    """What ends with its application."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.close = end
        app_folder.close_with_app(self)


class ClusterBinding:
    """The Python half: functions over integers."""

    def __init__(self, vm: Vm, services: Services, hubs: HubBinding) -> None:
        self._vm, self._services, self._hubs = vm, services, hubs
        self._numbers = itertools.count(1)
        self._mtls: dict[int, Mtl] = {}
        self._conns: dict[int, Conn] = {}
        self._clusters: dict[int, Cluster] = {}
        self._endings: list[_Ending] = []

    def _status(self, ref: int | None, what: str) -> Callable[[str, bool, str], object]:
        """A function of the application, `f(address, up, why)`."""
        if not ref:
            return nobody
        vm, function = self._vm, LuaFunction(self._vm, ref)

        def tell(address: str, up: bool, why: str) -> None:
            ask(vm, function.ref, what, (), address.encode(), up, why.encode() or None)

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

    def mtl(self, password: bytes, ping_s: float, silence_s: float, node: int, ref: int | None) -> int:
        """Make links; see `Mtl`."""
        options = MtlOptions(ping_s, silence_s, node, self._status(ref, "onstatus of smq.mtl"))
        made = Mtl(password, options)
        return self._keep(self._mtls, made, made.shutdown)

    def commence(self, number: int, socket: int, ref: int | None) -> bool:
        """Make a link of a socket that the application has connected; see `Mtl.commence`."""
        stream = self._services.sockets.stream(socket)
        host, port = stream.peername()
        transport, data = stream.release()
        status = self._status(ref, "the status function of commence")
        return self._mtls[number].commence(transport, data, True, f"{host}:{port}", status)

    def isopen(self, number: int, name: bytes) -> bool:
        """See `Mtl.isopen`."""
        return self._mtls[number].isopen(from_utf8(name))

    def leave(self, number: int, name: bytes, text: bytes) -> bool:
        """Take the hub of a cluster out of it; false when there is none."""
        return self._mtls[number].leave(from_utf8(name), text)

    def hascon(self, number: int, host: bytes) -> bool:
        """See `Mtl.hascon`."""
        return self._mtls[number].hascon(from_utf8(host))

    def mtl_shutdown(self, number: int) -> None:
        """See `Mtl.shutdown`."""
        self._mtls[number].shutdown()

    # ---- conn

    def conn(
        self, mtl: int, port: int | None, host: bytes, shark: int | None, sshark: int | None, ref: int | None
    ) -> LuaResult:
        """Take links at a port: its number and the port, or nil and the reason."""
        tls = self._services.tls
        client, server = tls[shark] if shark else None, tls[sshark] if sshark else None
        status = self._status(ref, "onstatus of smq.conn")
        try:
            made = Conn(
                self._mtls[mtl],
                PORT if port is None else port,
                from_utf8(host),
                client,  # type: ignore[arg-type]
                server.context() if server else None,
                status,
            )
        except SmqrtError as error:
            return None, str(error).encode()
        return self._keep(self._conns, made, made.shutdown), made.port

    def setlist(self, number: int, *names_and_ports: bytes | int) -> bool:
        """See `Conn.setlist`; names and ports in turn, 0 for the port of the Conn."""
        pairs = zip(names_and_ports[::2], names_and_ports[1::2], strict=True)
        self._conns[number].setlist([(from_utf8(bytes(name)), int(port)) for name, port in pairs])
        return True

    def add(self, number: int, name: bytes, port: int) -> bool:
        """See `Conn.add`."""
        self._conns[number].add(from_utf8(name), port)
        return True

    def status(self, number: int) -> LuaResult:
        """Names and whether each is linked, in turn."""
        return tuple(part for name, up in self._conns[number].status().items() for part in (name.encode(), up))

    def conn_shutdown(self, number: int) -> None:
        """See `Conn.shutdown`."""
        self._conns[number].shutdown()

    # ---- cluster

    def cluster(self, hub: int, mtl: int | None, name: bytes) -> int:
        """Take a hub into a cluster; see `Cluster`."""
        made = Cluster(self._hubs.of(hub), self._mtls[mtl] if mtl else None, from_utf8(name))
        return self._keep(self._clusters, made, made.close)

    def publish(self, number: int, data: bytes, subtopic: Name | None, ptid: int | None) -> int:
        """See `Cluster.publish`."""
        return self._clusters[number].publish(data, subtopic, ptid)

    def pubon(self, number: int, data: bytes, ptid: int, topic: Name, subtopic: Name | None) -> bool:
        """See `Cluster.pubon`."""
        return self._clusters[number].pubon(data, ptid, topic, subtopic)

    def nodes(self, number: int) -> LuaResult:
        """Numbers of nodes and of their clients, in turn."""
        return tuple(part for pair in self._clusters[number].nodes().items() for part in pair)

    def node(self, number: int) -> int:
        """See `Cluster.number`."""
        return self._clusters[number].number

    def shutdown(self, number: int, text: bytes | None) -> None:
        """See `Cluster.shutdown`."""
        self._clusters[number].shutdown(text)

    def close(self, number: int, text: bytes) -> None:
        """See `Cluster.close`."""
        self._clusters[number].close(text)


_OWN = {
    "smq.mtl": "mtl commence isopen leave hascon mtl_shutdown",
    "smq.conn": "conn setlist add status conn_shutdown",
    "smq.cluster": "cluster publish pubon nodes node shutdown close",
}


def install(vm: Vm, services: Services, hubs: HubBinding) -> None:
    """Give Lua `smq.mtl`, `smq.conn` and `smq.cluster`."""
    binding = ClusterBinding(vm, services, hubs)
    for name, own in _OWN.items():
        vm.namespace(name, methods(binding, own))
