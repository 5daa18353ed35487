"""Documented cluster API: links (`Mtl`), their addresses (`Conn`) and clustered hubs (`Cluster`) (spec: smq §6)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ssl import SSLContext

from smqrt.broker.broker import Name, check_size
from smqrt.cluster import channel
from smqrt.cluster.channel import AppChannel
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines.mesh import PORT, Dialer, Mesh
from smqrt.cluster.engines.process_cluster import cluster as process_cluster
from smqrt.cluster.link import Link
from smqrt.cluster.node import PING_S, SILENCE_S
from smqrt.errors import ArgumentError, ClosedError
from smqrt.smq.gevent_broker import GeventBroker
from smqrt.transport.listener import Listener
from smqrt.transport.tls import Transport
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire import cluster_packets as wire

log = logging.getLogger("smqrt")

OnStatus = Callable[[str, bool, str], object]
"""`f(address, up, why)`, called when a link to another node comes up or ends."""
OnRoundTrip = Callable[[str, float | None], object]
"""`f(address, ms)`, called for each ping; `ms` is None when it was not answered in time."""
OnLog = Callable[[str, bool], object]
"""`f(text, is_urgent)`, called with a sentence about a link."""
MIN_PING_S, MAX_S = 0.05, 3600.0
"""Limits of `ping_s`, and of both times."""
_names = itertools.count(1)


def ignore_event(*_: object) -> None:
    """Do nothing; the default callback."""


@dataclass
class MtlOptions:
    """The options of `Mtl`.

    Attributes:
        ping_s: seconds between pings, 0.05 to 3600.
        silence_s: a node is lost after this time without data; more than `ping_s`, at most 3600.
        node: a fixed number for this node; 0 to draw one.
        onstatus: called for every link.
        on_round_trip: called for each ping.
        log: called with events of links.

    Raises:
        ArgumentError: a time is out of range.
    """

    ping_s: float = PING_S
    silence_s: float = SILENCE_S
    node: int = 0
    onstatus: OnStatus = ignore_event
    on_round_trip: OnRoundTrip = ignore_event
    log: OnLog = ignore_event

    def __post_init__(self) -> None:
        if not MIN_PING_S <= self.ping_s <= MAX_S:
            raise ArgumentError(f"ping_s: {self.ping_s}; it must be {MIN_PING_S} to {MAX_S:g}")
        if not self.ping_s < self.silence_s <= MAX_S:
            raise ArgumentError(f"silence_s: {self.silence_s}; it must be more than ping_s and at most {MAX_S:g}")


class Links:
    """Links of the server to other nodes, with the channels of one application.

    Args:
        mesh: the mesh of the links.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._channels: dict[bytes, AppChannel] = {}

    def open(self, name: bytes, on_status: channel.OnStatus, on_data: channel.OnData) -> AppChannel:
        """Open an application channel; see `AppChannel`. Raises as `Node.open`."""
        made = self.mesh.node.open(name, on_status, on_data)
        self._channels = {key: one for key, one in self._channels.items() if not one.closed}
        self._channels[name] = made
        return made

    def isopen(self, name: bytes) -> bool:
        """Return whether there is an application channel, or a hub in a cluster, with this name."""
        node = self.mesh.node
        return name in node.channels or name.decode("utf-8", "surrogateescape") in node.members

    def close_named(self, name: bytes, text: bytes = b"") -> bool:
        """Close a channel that was opened by this object. Raises as `AppChannel.close`.

        Returns:
            False when there is no such channel.
        """
        found = self._channels.get(name)
        if found is None or found.closed:
            return False
        found.close(text)
        return True

    def hascon(self, host: str) -> bool:
        """Return whether there is a link to a node at this address."""
        return any(_host_of(link) == host for link in self.mesh.node.links.values())

    def shutdown(self) -> None:
        """Close the channels that were opened by this object. A second call does nothing."""
        for one in self._channels.values():
            one.close()

    def close(self) -> None:
        """Do the same as `shutdown`; called when the application ends."""
        self.shutdown()


class Mtl(Links):
    """Links of this process to other nodes with the same password, which its hubs share.

    Args:
        password: the password of all nodes.
        options: see `MtlOptions`; None for the defaults.

    Raises:
        ArgumentError: the password is empty.
    """

    def __init__(self, password: bytes, options: MtlOptions | None = None) -> None:
        if not password:
            raise ArgumentError("password: it is empty; without one, any client of the port could join")
        options = options or MtlOptions()
        # Not in a thread, since a call from Lua cannot block here.
        key = wire.key_of(password)
        super().__init__(Mesh(key, options.node, ping_s=options.ping_s, silence_s=options.silence_s))
        self.onstatus = options.onstatus
        self._on_round_trip = options.on_round_trip
        self.mesh.node.on_round_trip, self.mesh.node.on_log = self._report_round_trip, options.log
        self.mesh.on_accepted = self._watch_accepted
        self._conns: list[Conn] = []

    def _watch_accepted(self, link: Link) -> None:
        """Report a link that another node makes. If its address is in a list, the dialer reports it instead."""

        def report(link: Link) -> None:
            host = _host_of(link)
            if not any(conn.name_of(link) or conn.has_host(host) for conn in self._conns):
                link.on_end = lambda link, why: self.onstatus(host, False, why)
                self.onstatus(host, True, "")

        link.on_up = report

    def _report_round_trip(self, link: Link, seconds: float | None) -> None:
        named = (conn.name_of(link) for conn in self._conns)
        address = next(filter(None, named), None) or _host_of(link)
        self._on_round_trip(address, None if seconds is None else seconds * 1000)

    def commence(self, sock: Transport, data: bytes, connects: bool, address: str, status: OnStatus) -> bool:
        """Make a link from a connection of the application.

        Args:
            sock: a connected, non-blocking socket.
            data: data that was received already.
            connects: whether this side has connected.
            address: the address for `status`.
            status: called when the link comes up, and when it ends.

        Returns:
            False when these links are closed, or the old process of a hot restart still uses their node number.
        """
        if self.mesh.node.closed or not self.mesh.has_begun:
            sock.close()
            return False
        link = self.mesh.commence(sock, data, connects)

        def report(up: bool, why: str) -> None:
            status(address, up, why)
            self.onstatus(address, up, why)

        link.on_up = lambda link: report(True, "")
        link.on_end = lambda link, why: report(False, why)
        return True

    def close_named(self, name: bytes, text: bytes = b"") -> bool:
        """Close the channel with this name; if there is none, take the hub out of the cluster with this name.

        Returns:
            False when there is neither a channel nor a hub.

        Raises:
            ArgumentError: `text` has more than 1000 bytes.
        """
        if super().close_named(name, text):
            return True
        member = self.mesh.node.members.get(name.decode("utf-8", "surrogateescape"))
        if member is None:
            return False
        channel.check_text(text)
        self.mesh.node.leave(member, text)
        return True

    def hascon(self, host: str) -> bool:
        """Return whether there is a link to a node at this address."""
        return any(conn.status().get(host) for conn in self._conns) or super().hascon(host)

    def attach(self, conn: Conn) -> None:
        """Add a source of links, which `shutdown` ends, too."""
        self._conns.append(conn)

    def shutdown(self) -> None:
        """Leave all clusters, close all channels and end all links. A second call does nothing."""
        for conn in self._conns:
            conn.shutdown()
        self.mesh.close()


def own(links: Links) -> Mtl:
    """Return `links` if they were made by the application.

    Raises:
        ArgumentError: they are those of the server.
    """
    if not isinstance(links, Mtl):
        raise ArgumentError("these are the links of the server, with its settings; make other links with smq.mtl")
    return links


def _host_of(link: Link) -> str:
    try:
        host: str = link.transport.transport.getpeername()[0]  # type: ignore[attr-defined]
    except (OSError, AttributeError, IndexError):
        return ""
    return host.removeprefix("::ffff:")  # IPv4 over a socket for both


class Conn:
    """Accepts links at a port, and keeps links to a list of nodes.

    Args:
        mtl: the links.
        port: the port to listen at; 0 picks a free one.
        host: the address to listen at.
        client_tls: TLS configuration of links to the list; host names are checked.
        server_tls: TLS configuration of accepted links. Give both or neither.
        onstatus: called for every address of the list.

    Raises:
        ArgumentError: only one of the contexts is given.
        ClosedError: the links were shut down.
        StartError: the address cannot be bound.
    """

    def __init__(
        self,
        mtl: Mtl,
        port: int = PORT,
        host: str = "0.0.0.0",
        client_tls: ClientTls | None = None,
        server_tls: SSLContext | None = None,
        onstatus: OnStatus = ignore_event,
    ) -> None:
        if (client_tls is None) != (server_tls is None):
            raise ArgumentError("shark, sshark: links over TLS need both: one to connect, one to accept")
        mtl.mesh.node.must_be_open()
        self._mtl, self._onstatus, self._tls = mtl, onstatus, client_tls
        self._listener: Listener | None = mtl.mesh.listen(host, port, server_tls)
        self.port = self._listener.address[1]
        self._dialers: dict[tuple[str, int], Dialer] = {}
        mtl.attach(self)

    def setlist(self, nodes: Sequence[tuple[str, int]]) -> None:
        """Replace the list of nodes to connect to. It may contain this node itself. Raises as `add`."""
        self._must_be_open()
        for _, port in nodes:
            _check_port(port)
        wanted = {(host, port or self.port) for host, port in nodes}
        for address in self._dialers.keys() - wanted:
            self._dialers.pop(address).disconnect()
        for host, port in wanted - self._dialers.keys():
            self.add(host, port)

    def add(self, host: str, port: int = 0) -> None:
        """Connect to one more node.

        Raises:
            ClosedError: after `shutdown`.
            ArgumentError: the port is out of range.
        """
        self._must_be_open()
        _check_port(port)
        address = host, port or self.port
        if address in self._dialers:
            return
        dialer = self._mtl.mesh.dial(*address, self._tls)

        def report(up: bool, why: str) -> None:
            self._onstatus(host, up, why)
            self._mtl.onstatus(host, up, why)

        dialer.on_status = report
        self._dialers[address] = dialer

    def _must_be_open(self) -> None:
        if self._listener is None:
            raise ClosedError("conn: it was shut down; make a new one")

    def name_of(self, link: Link) -> str | None:
        """Return the listed host to which a link leads; None when it is not in the list."""
        return next((host for (host, _), dialer in self._dialers.items() if dialer.leads_to(link)), None)

    def has_host(self, host: str) -> bool:
        """Return whether this host is in the list."""
        return any(host == listed for listed, _ in self._dialers)

    def status(self) -> dict[str, bool]:
        """Return whether there is a link, by host; this node itself is left out."""
        found: dict[str, bool] = {}
        for (host, _), dialer in self._dialers.items():
            if not dialer.is_self:
                found[host] = found.get(host, False) or dialer.up
        return found

    def shutdown(self) -> None:
        """Stop accepting and making links; links that are up remain. A second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            for dialer in self._dialers.values():
                dialer.forget()


class Cluster:
    """A hub that forms one cluster with hubs at other nodes.

    Args:
        broker: the hub.
        mtl: its links; None for the links from the settings of the server.
        name: the name of the cluster, the same at all nodes; by default "SMQ-1", "SMQ-2" and so on.

    Raises:
        ArgumentError: another hub of this process is in the cluster.
        ClosedError: the links were shut down.
    """

    def __init__(self, broker: GeventBroker, mtl: Links | None = None, name: str = "") -> None:
        mesh = mtl.mesh if mtl is not None else process_cluster.opened()
        self.name = name or f"SMQ-{next(_names)}"
        self._broker = broker
        self._clustered: ClusteredBroker = mesh.join(broker, self.name)
        self._node = mesh.node
        if (broker.counts_of or (process_cluster.observes() if mtl is None else None)) == "cluster":
            self._clustered.counts.count_all()

    def publish(self, data: bytes, subtopic: Name | None = None, ptid: int | None = None) -> int:
        """Send a message to the servers of all other nodes; return the number of nodes.

        Raises:
            ArgumentError: `data` is too long.
        """
        check_size(data)
        stid = subtopic if isinstance(subtopic, int) else self._broker.createsub(subtopic)
        sender = self._broker.server.etid if ptid is None else ptid
        return self._clustered.routing.to_servers(data, sender, stid)

    def pubon(self, data: bytes, ptid: int, topic: Name, subtopic: Name | None = None) -> bool:
        """Publish as a client of any node; return false when there is no such client."""
        if self._broker.etid2peer(ptid) is None:
            return False
        self._broker.publish(data, topic, subtopic, ptid)
        return True

    def nodes(self) -> dict[int, int]:
        """Return the number of clients of each other node, by node number.

        A node is listed when its snapshot has arrived. From then on, published messages reach its subscribers.
        """
        return {node.number: len(node.phantoms) for node in self._clustered.remotes if node.synced}

    @property
    def number(self) -> int:
        """This node's number."""
        return self._clustered.number

    def shutdown(self, text: bytes | None = None) -> None:
        """Close the clients of all nodes."""
        self._clustered.end_all(text)

    def close(self, text: bytes = b"") -> None:
        """Take the hub out of the cluster; it continues alone, with its clients. A second call does nothing.

        Raises as `Mtl.close_named`.
        """
        channel.check_text(text)
        if self._broker.cluster is self._clustered:
            self._node.leave(self._clustered, text)


def _check_port(port: int) -> None:
    if not 0 <= port <= 0xFFFF:
        raise ArgumentError(f"port: {port}; a port is 1 to 65535")


def address_list(given: Iterable[str] | Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the addresses for `Conn.setlist`, from hosts or from ports by host; 0 is the port of the Conn."""
    return list(given.items()) if isinstance(given, Mapping) else [(one, 0) for one in given]
