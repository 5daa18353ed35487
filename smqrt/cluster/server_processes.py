"""The processes of one server, as links tell them to other nodes: who has found one of them knows all."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

from smqrt.wire.link_packets import ID_BYTES, Siblings

if TYPE_CHECKING:
    from smqrt.cluster.link import Link

NOBODY = bytes(ID_BYTES)
"""Instead of the id of a process that is not linked at the moment."""


class OwnServer:
    """The server that a node is a process of.

    Args:
        node_id: of the node.
        epoch: when it started, ns since 1970.

    Attributes:
        id: 16 bytes that its processes share; a node that was not told has them alone.
        own: which of them the node is, from 0.
        ports: at which each takes links; 0 for none, or when that is not known yet.
    """

    def __init__(self, node_id: bytes, epoch: int) -> None:
        self._node_id = node_id
        self.id = blake2b(node_id + epoch.to_bytes(8, "big"), digest_size=ID_BYTES, person=b"smqrt process").digest()
        self.own = 0
        self.ports = [0]

    def take_place(self, secret: bytes, own: int, ports: Iterable[int]) -> None:
        """Be one of several: they share the secret, and each has its number among them."""
        self.id = blake2b(secret, digest_size=ID_BYTES, person=b"smqrt server").digest()
        self.own, self.ports = own, list(ports)

    @property
    def port(self) -> int:
        """At which this process takes links; 0 for none."""
        return self.ports[self.own]

    @port.setter
    def port(self, port: int) -> None:
        self.ports[self.own] = port

    def has(self, link: Link) -> bool:
        """Whether a link goes to another process of this server."""
        return link.siblings is not None and link.siblings.server == self.id

    def siblings(self, links: Iterable[Link]) -> Siblings:
        """What other nodes are told; `links` are those that are up."""
        places = [(NOBODY, port) for port in self.ports]
        places[self.own] = self._node_id, self.port
        for index, place in merged([one for one in links if self.has(one)]).items():
            if index < len(places) and index != self.own:
                places[index] = place[0], place[1] or places[index][1]
        return Siblings(self.id, self.own, tuple(places))


def merged(links: Iterable[Link]) -> dict[int, tuple[bytes, int]]:
    """Ids and ports of the processes of one server by their numbers, as some of them say it: each knows itself best,
    and of two with one number the later is there.
    """
    known = [(one, one.siblings) for one in sorted(links, key=_epoch) if one.siblings is not None]
    found: dict[int, tuple[bytes, int]] = {}
    for _, siblings in known:
        found.update((index, place) for index, place in enumerate(siblings.places) if place[0] != NOBODY)
    for _, siblings in known:
        found[siblings.own] = siblings.places[siblings.own]
        for index, place in enumerate(siblings.places):
            found.setdefault(index, place)
    return found


def _epoch(link: Link) -> int:
    return link.peer.epoch if link.peer is not None else 0
