"""Clustered hubs: `cluster.create(smq, links, name="chat")` (spec: smq §6)."""

from __future__ import annotations

from smqrt.cluster.engines import mtl
from smqrt.hub import peer
from smqrt.hub.mtl import Mtl
from smqrt.hub.mtl import create as create_mtl
from smqrt.hub.smq import Smq
from smqrt.process import current_process
from smqrt.smq.messages import Payload, payload


class Cluster:
    """A hub in a cluster; see `create`.

    Attributes:
        links: the links to the other nodes; None for those of the server's settings.
    """

    def __init__(self, cluster: mtl.Cluster, links: Mtl | None) -> None:
        self._cluster, self.links = cluster, links
        current_process.close_with_app(self)

    @property
    def name(self) -> str:
        """The name of the cluster, the same at all nodes."""
        return self._cluster.name

    @property
    def number(self) -> int:
        """The number of this node, 1 to 1023."""
        return self._cluster.number

    def nodes(self) -> dict[int, int]:
        """Return the number of clients of each other node whose subscriptions have been received, by node number."""
        return self._cluster.nodes()

    def publish(self, data: Payload, subtopic: str | bytes | int | None = None, ptid: int | None = None) -> int:
        """Send a message to the servers of all other nodes, and return how many there are.

        Raises:
            ArgumentError: data over 0xFFF0 bytes.
        """
        sub = None if subtopic is None else peer.as_destination("subtopic", subtopic)
        return self._cluster.publish(payload(data), sub, ptid)

    def pubon(
        self, data: Payload, ptid: int, topic: str | bytes | int, subtopic: str | bytes | int | None = None
    ) -> bool:
        """Publish on behalf of a client of any node; return False when there is no such client. Raises as `publish`."""
        sub = None if subtopic is None else peer.as_destination("subtopic", subtopic)
        return self._cluster.pubon(payload(data), ptid, peer.as_destination("topic", topic), sub)

    def shutdown(self, msg: str | bytes | None = None) -> None:
        """Close the clients of all nodes; `msg` is sent in a Disconnect packet."""
        self._cluster.shutdown(None if msg is None else peer.as_text("msg", msg))

    def close(self, msg: str | bytes = b"") -> None:
        """Leave the cluster. The hub keeps its clients. A second call does nothing."""
        self._cluster.close(peer.as_text("msg", msg))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(smq: Smq, links: Mtl | str | bytes | None = None, *, name: str = "") -> Cluster:
    """Join a hub with the hubs of the same name at other nodes.

    Args:
        smq: the hub.
        links: links to other nodes, or a password to create them; None for those of the server's settings.
        name: the same at all nodes; by default SMQ-1, SMQ-2, … in order of the calls.

    Raises:
        ArgumentError: another hub of this process is in that cluster, the password is empty, or the name is invalid.
        ClosedError: the links were shut down.
    """
    if isinstance(links, str | bytes):
        links = create_mtl(links)
    return Cluster(mtl.Cluster(smq.broker, links.links if links is not None else None, name), links)
