"""Ports for links: `from smqrt.hub import conn; conn.create(links, 1900)` (spec: smq §6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ssl import SSLContext

from smqrt.cluster.engines import mtl
from smqrt.cluster.engines.mesh import PORT
from smqrt.errors import ArgumentError
from smqrt.hub.cluster import Cluster
from smqrt.hub.mtl import Mtl, in_new_greenlet
from smqrt.process import current_process
from smqrt.transport.tls_contexts import ClientTls


class Conn:
    """Accepts links at a port and connects to a list of nodes; see `create`.

    Attributes:
        port: the port it listens on.
    """

    def __init__(self, conn: mtl.Conn) -> None:
        self._conn, self.port = conn, conn.port
        current_process.close_with_app(self)

    def setlist(self, nodes: Iterable[str] | Mapping[str, int]) -> bool:
        """Connect to these nodes and close the links to others.

        Args:
            nodes: names or addresses, or a mapping of these to ports. This node may be among them.

        Raises:
            ArgumentError: invalid port.
            ClosedError: after `shutdown`.
        """
        self._conn.setlist(mtl.address_list(nodes))
        return True

    def add(self, name: str, port: int = 0) -> bool:
        """Connect to one more node, by default at the port of this node. Raises as `setlist`."""
        self._conn.add(name, port)
        return True

    def status(self) -> dict[str, bool]:
        """Return for each address whether there is a link."""
        return self._conn.status()

    def shutdown(self) -> None:
        """Stop accepting and making links; established links stay. A second call does nothing."""
        self._conn.shutdown()

    def close(self) -> None:
        """Do the same as `shutdown`."""
        self.shutdown()

    def __enter__(self) -> Conn:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def create(
    links: Mtl | Cluster,
    port: int = PORT,
    *,
    intf: str = "",
    ipv6: bool = False,
    shark: ClientTls | None = None,
    sshark: SSLContext | None = None,
    onstatus: Callable[[str, bool, str], object] | None = None,
) -> Conn:
    """Accept links at a port.

    Args:
        links: the links to add to, or a cluster, whose links are used.
        port: 0 picks a free one.
        intf: the address to listen on; by default all of IPv4, with `ipv6` all of IPv6.
        shark, sshark: TLS of outgoing and of incoming links; both or neither.
        onstatus: `f(address, up, why)`, called when the link to a node of the list opens or closes.

    Raises:
        ArgumentError: only one of the TLS contexts is given, or the links are those of the server.
        ClosedError: the links were shut down.
        StartError: the address can't be bound.
    """
    if isinstance(links, Cluster):
        if links.links is None:
            raise ArgumentError("links: this cluster uses the links of the server; create links with smqrt.hub.mtl")
        links = links.links
    host = intf or ("::" if ipv6 else "0.0.0.0")
    return Conn(mtl.Conn(mtl.own(links.links), port, host, shark, sshark, in_new_greenlet("onstatus", onstatus)))
