"""Where links come from: `from smqrt.hub import conn; conn.create(links, 1900)` (spec: smq §6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ssl import SSLContext

from smqrt.cluster.engines import mtl
from smqrt.cluster.engines.mesh import PORT
from smqrt.errors import ArgumentError
from smqrt.hub.cluster import Cluster
from smqrt.hub.mtl import Mtl, later
from smqrt.process import current_application
from smqrt.transport.tls_contexts import ClientTls


class Conn:
    """Takes links at a port and makes them to a list of nodes; see `create`.

    Attributes:
        port: where it listens.
    """

    def __init__(self, made: mtl.Conn) -> None:
        self._conn, self.port = made, made.port
        current_application.close_with_app(self)

    def setlist(self, nodes: Iterable[str] | Mapping[str, int]) -> bool:
        """Connect to these nodes, and no others: names or addresses, or their ports by name. One may be this node
        itself.

        Raises:
            ArgumentError: a port is none.
            ClosedError: after `shutdown`.
        """
        self._conn.setlist(mtl.address_list(nodes))
        return True

    def add(self, name: str, port: int = 0) -> bool:
        """Connect to one node more; at this one's own port when none is given. Raises as `setlist`."""
        self._conn.add(name, port)
        return True

    def status(self) -> dict[str, bool]:
        """By address, whether there is a link."""
        return self._conn.status()

    def shutdown(self) -> None:
        """Take and make no more links; those that are up stay. A second call does nothing."""
        self._conn.shutdown()

    def close(self) -> None:
        """As `shutdown`."""
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
    """Take links at a port.

    Args:
        links: which get them; a cluster stands for its links.
        port: 0 picks a free one.
        intf: the address to listen at; all when not given, with `ipv6` those of IPv6.
        shark, sshark: TLS of links that this side makes, and of those that come; both or none.
        onstatus: told of every node of the list.

    Raises:
        ArgumentError: only one of the TLS contexts is given, or these are the server's links.
        ClosedError: the links were shut down.
        StartError: the address can't be bound.
    """
    if isinstance(links, Cluster):
        if links.links is None:
            raise ArgumentError("links: this cluster uses the server's, whose settings say where they go")
        links = links.links
    host = intf or ("::" if ipv6 else "0.0.0.0")
    return Conn(mtl.Conn(mtl.own(links.links), port, host, shark, sshark, later("onstatus", onstatus)))
