"""The links that a process is to have: to the nodes at the addresses of its list, and to all processes of the servers
that it has found. Whoever has found one process of a server is told of the others, and looks for them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from smqrt.cluster.link import Link
from smqrt.cluster.server_processes import NOBODY, merged
from smqrt.wire.ids import MAX_NODE

if TYPE_CHECKING:
    from smqrt.cluster.engines.mesh import Dialer, Mesh

log = logging.getLogger("smqrt")

MISSING_S = 10.0
"""A link that is missing for so long is in the log: links that heal do so sooner."""
SILENT_S = 5.0
"""A node that is linked for so long and has said nothing of its server is of an older release."""
MAX_DIALERS = 2 * MAX_NODE


class Missing(NamedTuple):
    """A link that there should be.

    Attributes:
        to: an address, or a process that has none.
        why: there is none.
        since_s: since when, by the clock of the node.
    """

    to: str
    why: str
    since_s: float


class Expected:
    """What a mesh expects, and what of that is missing.

    Args:
        mesh: whose.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._missing: dict[str, Missing] = {}
        self._logged: set[str] = set()

    def missing(self) -> list[Missing]:
        """The links that are missing, the oldest first."""
        if self._mesh.has_begun:
            self._compare()
        return sorted(self._missing.values(), key=lambda one: one.since_s)

    def look(self) -> None:
        """Look for processes that were told of, and log what is missing for too long."""
        node = self._mesh.node
        if node.has_heard:
            node.has_heard = False
            self._look_for_siblings()
        if any(one.origin is not None for one in self._mesh.dialers):
            self._forget_siblings()
        self._compare()
        now_s = node.clock_s()
        for one in self._missing.values():
            if one.to not in self._logged and now_s - one.since_s >= MISSING_S:
                self._logged.add(one.to)
                log.warning("no link to %s for %.0f s: %s", one.to, now_s - one.since_s, one.why)
        for to in self._logged - self._missing.keys():
            log.info("the link to %s that was missing is not missing any more", to)
        self._logged &= self._missing.keys()

    # ---- what is missing

    def _compare(self) -> None:
        now_s = self._mesh.node.clock_s()
        found = dict(self._without_link())
        self._missing = {
            to: Missing(to, why, self._missing[to].since_s if to in self._missing else now_s)
            for to, why in found.items()
        }

    def _without_link(self) -> list[tuple[str, str]]:
        node = self._mesh.node
        found = [(one.address, one.why) for one in self._mesh.dialers if not one.up and not one.is_self]
        known = {node.id, *node.links, *(one.expects for one in self._mesh.dialers)}
        for link in sorted(node.links.values(), key=lambda one: one.number):
            for index, (node_id, _) in enumerate(link.siblings.places if link.siblings is not None else ()):
                if node_id != NOBODY and node_id not in known:
                    known.add(node_id)
                    found.append((f"process {index} of the server of node {link.number}", "nobody has made it"))
        return found

    # ---- looking for siblings

    def _look_for_siblings(self) -> None:
        node = self._mesh.node
        told: dict[Dialer, list[Link]] = {}
        by_id = {one.leads_to_id: one.origin or one for one in self._mesh.dialers if one.place is not None}
        for link in node.links.values():
            assert link.peer is not None
            origin = by_id.get(link.peer.id)
            if origin is not None and link.siblings is not None and not node.server.has(link):
                told.setdefault(origin, []).append(link)
        for origin, links in told.items():
            newest = max(links, key=lambda one: one.peer.epoch if one.peer is not None else 0)
            assert newest.siblings is not None
            server = newest.siblings.server
            self._expect(origin, [one for one in links if one.siblings is not None and one.siblings.server == server])

    def _expect(self, origin: Dialer, links: list[Link]) -> None:
        """Look for the processes of the server that was found at an address, and for no others."""
        assert origin.place is not None
        host, _, tls, any_name = origin.place
        wanted = {port: node_id for node_id, port in merged(links).values() if port}
        for one in [one for one in self._mesh.dialers if one.origin is origin and one.place is not None]:
            if one.place is not None and one.place[1] not in wanted:
                one.forget()
        by_address = {one.place[:2]: one for one in self._mesh.dialers if one.place is not None}
        for port, node_id in wanted.items():
            dialer = by_address.get((host, port))
            is_found = node_id == origin.leads_to_id  # at another port, where something passes connections on
            if dialer is None and not is_found and len(self._mesh.dialers) < MAX_DIALERS:
                dialer = self._mesh.dial(host, port, tls, any_name, origin)
            if dialer is not None:
                dialer.expects = node_id if node_id != NOBODY else b""

    def _forget_siblings(self) -> None:
        """Of an address that nobody looks at any more, or where an older release is now, there are none."""
        node = self._mesh.node
        silent = {
            id_
            for id_, link in node.links.items()
            if link.siblings is None and node.clock_s() - link.since_s > SILENT_S
        }
        for one in [one for one in self._mesh.dialers if one.origin is not None]:
            if one.origin not in self._mesh.dialers or one.origin.leads_to_id in silent:
                one.forget()
