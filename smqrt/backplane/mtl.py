"""The documented cluster API: links to other nodes (`Mtl`), where they come from (`Conn`), and a hub that uses them
(`Cluster`). Specification: smq.md §6.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ssl import SSLContext

from smqrt.backplane.mesh import PORT, Dialer, Mesh
from smqrt.backplane.process import cluster as process_cluster
from smqrt.broker.broker import Broker, Name, check_size
from smqrt.cluster.link import Link
from smqrt.cluster.member import Member
from smqrt.errors import ArgumentError, ClosedError
from smqrt.net.contexts import ClientTls
from smqrt.net.listener import Listener
from smqrt.net.tls import Transport
from smqrt.wire import link as wire

log = logging.getLogger("smqrt")

OnStatus = Callable[[str, bool, str], object]
"""`f(address, up, why)`: a link to another node came up, or has ended."""
_names = itertools.count(1)


def nobody(address: str, up: bool, why: str) -> None:
    """Nobody wants to know."""


@dataclass
class MtlOptions:
    """The options of `Mtl`.

    Attributes:
        ping_s: how often a node is asked whether it is there.
        silence_s: after so long without a word it is lost.
        node: a fixed number of this node; 0 draws one.
        onstatus: told of every link.
    """

    ping_s: float = 1.0
    silence_s: float = 5.0
    node: int = 0
    onstatus: OnStatus = nobody


class Mtl:
    """Links of this process to other nodes with the same password; hubs share them.

    Args:
        password: the same at all nodes.

    Raises:
        ArgumentError: the password is empty.
    """

    def __init__(self, password: bytes, options: MtlOptions | None = None) -> None:
        if not password:
            raise ArgumentError("password: it is empty; without one, whoever finds the port is a node")
        options = options or MtlOptions()
        # Here, not in a thread: an application may be waiting inside Lua, and that is done once for each password.
        key = wire.key_of(password)
        self.mesh = Mesh(key, options.node, ping_s=options.ping_s, silence_s=options.silence_s)
        self.onstatus = options.onstatus
        self._conns: list[Conn] = []

    def commence(self, sock: Transport, data: bytes, connects: bool, address: str, status: OnStatus) -> bool:
        """Make a link of a connection that somebody else has made.

        Args:
            sock: connected and non-blocking.
            data: what has come already.
            connects: whether this side has connected.
            status: told when the link is up, and when it ends.

        Returns:
            False when that can't be: it is closed.
        """
        if self.mesh.node.closed:
            sock.close()
            return False
        link = self.mesh.commence(sock, data, connects)
        link.on_up = lambda link: self._told(address, True, "", status)
        link.on_end = lambda link, why: self._told(address, False, why, status)
        return True

    def _told(self, address: str, up: bool, why: str, status: OnStatus) -> None:
        status(address, up, why)
        self.onstatus(address, up, why)

    def isopen(self, name: str) -> bool:
        """Whether a hub of this process is in the cluster `name`."""
        return name in self.mesh.node.members

    def leave(self, name: str, text: bytes = b"") -> bool:
        """Take the hub of a cluster out of it: it goes on alone; false when there is none."""
        member = self.mesh.node.members.get(name)
        if member is None:
            return False
        self.mesh.node.leave(member, text)
        return True

    def hascon(self, host: str) -> bool:
        """Whether there is a link to a node at that address."""
        return any(conn.status().get(host) for conn in self._conns) or any(
            _host_of(link) == host for link in self.mesh.node.links.values()
        )

    def attach(self, conn: Conn) -> None:
        """Links come from `conn`, too; it ends with this."""
        self._conns.append(conn)

    def shutdown(self) -> None:
        """Leave all clusters and end all links. A second call does nothing."""
        for conn in self._conns:
            conn.shutdown()
        self.mesh.close()


def _host_of(link: Link) -> str:
    try:
        host: str = link.transport.transport.getpeername()[0]  # type: ignore[attr-defined]
    except (OSError, AttributeError, IndexError):
        return ""
    return host


class Conn:
    """Takes links at a port, and makes them to a list of nodes, again and again while they are missing.

    Args:
        mtl: whose links.
        port: to listen at; 0 picks a free one.
        host: the address to listen at.
        client_tls, server_tls: TLS of links that are made, whose names have to be trusted, and that come; both or none.
        onstatus: told of every address of the list.

    Raises:
        ArgumentError: only one of the contexts is given.
        StartError: the address can't be bound.
    """

    def __init__(
        self,
        mtl: Mtl,
        port: int = PORT,
        host: str = "0.0.0.0",
        client_tls: ClientTls | None = None,
        server_tls: SSLContext | None = None,
        onstatus: OnStatus = nobody,
    ) -> None:
        if (client_tls is None) != (server_tls is None):
            raise ArgumentError("shark, sshark: links over TLS need both, for those that are made and those that come")
        self._mtl, self._onstatus, self._tls = mtl, onstatus, client_tls
        self._listener: Listener | None = mtl.mesh.listen(host, port, server_tls)
        self.port = self._listener.address[1]
        self._dialers: dict[tuple[str, int], Dialer] = {}
        mtl.attach(self)

    def setlist(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Connect to these and no others. One of them may be this node itself."""
        wanted = {(host, port or self.port) for host, port in nodes}
        for address in self._dialers.keys() - wanted:
            self._dialers.pop(address).disconnect()
        for host, port in wanted - self._dialers.keys():
            self.add(host, port)

    def add(self, host: str, port: int = 0) -> None:
        """Connect to one more.

        Raises:
            ClosedError: after `shutdown`.
            ArgumentError: the port is none.
        """
        if self._listener is None:
            raise ClosedError("conn: it was shut down")
        if not 0 <= port <= 0xFFFF:
            raise ArgumentError(f"port: {port}; a port is 1 to 65535")
        address = host, port or self.port
        if address in self._dialers:
            return
        dialer = self._mtl.mesh.dial(*address, self._tls)
        dialer.on_status = lambda up, why: self._told(host, up, why)
        self._dialers[address] = dialer

    def _told(self, host: str, up: bool, why: str) -> None:
        self._onstatus(host, up, why)
        self._mtl.onstatus(host, up, why)

    def status(self) -> dict[str, bool]:
        """By address, whether there is a link; without this node itself."""
        found: dict[str, bool] = {}
        for (host, _), dialer in self._dialers.items():
            if not dialer.is_self:
                found[host] = found.get(host, False) or dialer.up
        return found

    def shutdown(self) -> None:
        """Take and make no more links; those that are up stay. A second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            for dialer in self._dialers.values():
                dialer.close()


class Cluster:
    """A hub that works as one with those of the same name at other nodes.

    Args:
        broker: the hub.
        mtl: its links; None for those of the process, which the settings of the server make.
        name: the same at all nodes.

    Raises:
        ArgumentError: another hub of this process is in it.
    """

    def __init__(self, broker: Broker, mtl: Mtl | None = None, name: str = "") -> None:
        mesh = mtl.mesh if mtl is not None else process_cluster.opened()
        self.name = name or f"SMQ-{next(_names)}"
        self._broker = broker
        self._member: Member = mesh.join(broker, self.name)
        self._node = mesh.node

    def publish(self, data: bytes, subtopic: Name | None = None, ptid: int | None = None) -> int:
        """Send a message to the servers of all other nodes; gives how many there are.

        Raises:
            ArgumentError: `data` is too long.
        """
        check_size(data)
        stid = subtopic if isinstance(subtopic, int) else self._broker.createsub(subtopic)
        sender = self._broker.server.etid if ptid is None else ptid
        return self._member.to_servers(data, sender, stid)

    def pubon(self, data: bytes, ptid: int, topic: Name, subtopic: Name | None = None) -> bool:
        """Publish on behalf of a client of any node; false when there is no such client."""
        if self._broker.etid2peer(ptid) is None:
            return False
        self._broker.publish(data, topic, subtopic, ptid)
        return True

    def nodes(self) -> dict[int, int]:
        """The numbers of the other nodes, and how many clients each has."""
        return {node.number: len(node.phantoms) for node in self._member.remotes}

    @property
    def number(self) -> int:
        """This node's number."""
        return self._member.number

    def shutdown(self, text: bytes | None = None) -> None:
        """End the clients of all nodes."""
        self._member.end_all(text)

    def close(self, text: bytes = b"") -> None:
        """Take the hub out of the cluster: it goes on alone, with its clients. A second call does nothing."""
        if self._broker.cluster is self._member:
            self._node.leave(self._member, text)


def address_list(given: Iterable[str] | Mapping[str, int]) -> list[tuple[str, int]]:
    """Addresses as `Conn.setlist` takes them: names with the port of the Conn, or by name their ports."""
    return list(given.items()) if isinstance(given, Mapping) else [(one, 0) for one in given]
