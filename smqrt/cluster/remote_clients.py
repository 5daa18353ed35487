"""Clients of other nodes, and the clients of this hub as other nodes see them."""

from __future__ import annotations

from collections.abc import Iterator

from smqrt.broker.state import BrokerClient
from smqrt.broker.topics import Topic
from smqrt.cluster.backpressure import Backpressure
from smqrt.cluster.migration import HubMigration
from smqrt.cluster.remote_node import Phantom, RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Announced
from smqrt.wire.smq import node_of, server_of

MAX_SORTED = 16
"""Clients of one uid that are sorted by age. At most one for each node exists, and soon only the newest."""


class RemoteClients:
    """The clients of all other nodes, as one hub sees them.

    Attributes:
        phantoms: the clients, by ETID.
        foreign: by ETID, the topics of those that messages were sent to, with the node.
        holders: by uid, its newest client; `Phantom.older` are others, until their nodes close them.
        stamps: by ETID, when the clients of this hub connected.
    """

    def __init__(self, state: ClusterState, migration: HubMigration, waits: Backpressure) -> None:
        self._state, self._migration, self._waits = state, migration, waits
        self.phantoms: dict[int, Phantom] = {}
        self.foreign: dict[int, tuple[Topic, RemoteNode]] = {}
        self.holders: dict[bytes, Phantom] = {}
        self.stamps: dict[int, int] = {}

    # ---- clients of this hub

    def entered(self, client: BrokerClient) -> None:
        """See `ClusterHooks`."""
        holder = self.holder(client.uid)
        now_ms = self._state.clock_ms()
        # Newer than the client that it takes over from, even if this node's clock is behind.
        self.stamps[client.etid] = max(now_ms, holder.stamp + 1) if holder else now_ms
        self._state.send_all(wire.peers([self.announced(client)]))

    def left(self, client: BrokerClient) -> None:
        """See `ClusterHooks`."""
        self.stamps.pop(client.etid, None)
        public = self._state.public.pop(client.etid, client.etid)
        self._state.local.pop(public, None)
        self._state.send_all(wire.etids([public]))

    def announced(self, client: BrokerClient) -> Announced:
        """Return what other nodes are sent of a client."""
        shown = "" if client.identity is None else client.identity.shown
        user = shown.encode("utf-8", "surrogateescape")
        etid = self._state.public.get(client.etid, client.etid)
        return Announced(etid, self._stamp(client.etid), client.uid, client.info, user)

    def _stamp(self, etid: int) -> int:
        return self.stamps.setdefault(etid, self._state.clock_ms())

    # ---- queries

    def peers_elsewhere(self) -> Iterator[Phantom]:
        """See `ClusterHooks`."""
        here = self._state.broker.uids
        newest = [one for one in self.phantoms.values() if one.newer is None and not one.node.gone]
        return (one for one in newest if one.uid not in here)

    def holder(self, uid: bytes) -> Phantom | None:
        """See `ClusterHooks`."""
        phantom = self.holders.get(uid)
        while phantom is not None and phantom.node.gone:
            phantom = phantom.older
        return phantom

    def phantom(self, etid: int) -> Phantom | None:
        """Return the client, or the server, of another node that has this ETID; see `ClusterHooks`."""
        phantom = self.phantoms.get(etid)
        if phantom is None:
            number = node_of(etid)
            if number and etid == server_of(number):
                phantom = next((one.server for one in self._state.remotes if one.number == number), None)
        return None if phantom is None or phantom.node.gone else phantom

    def topic_at(self, number: int) -> Topic | None:
        """Return the topic of an ETID that the hub's table does not have.

        It belongs to a client of another node, or to one of this hub for which other nodes use this number.
        """
        table = self._state.broker.topic_table
        local = self._state.local.get(number)
        if local is not None:
            return table.by_key.get(local.to_bytes(4, "big"))
        phantom = self.phantom(number)
        if phantom is None:
            return None
        node = self._migration.present(phantom.node)
        topic = table.foreign(number, node.send_queue)
        self.foreign[number] = topic, node
        return topic

    # ---- changes

    def appeared(self, phantom: Phantom) -> None:
        """Add a client of another node; close an older client here that has the same uid."""
        self.phantoms[phantom.etid] = phantom
        newer, older = None, self.holders.get(phantom.uid)
        for _ in range(MAX_SORTED):
            if older is None or older.age <= phantom.age:
                break
            newer, older = older, older.older
        phantom.newer, phantom.older = newer, older
        if older is not None:
            older.newer = phantom
        if newer is None:
            self.holders[phantom.uid] = phantom
        else:
            newer.older = phantom
        # All nodes compare the same ages, so they agree which client stays.
        here = self._state.broker.uids.get(phantom.uid)
        if here is not None and phantom.age > (self._stamp(here.etid), self._state.number):
            here.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())

    def release(self, phantom: Phantom) -> None:
        """Take a client of another node out of the list of its uid."""
        newer, older = phantom.newer, phantom.older
        if newer is not None:
            newer.older = older
        elif self.holders.get(phantom.uid) is not phantom:
            return
        elif older is not None:
            self.holders[phantom.uid] = older
        else:
            del self.holders[phantom.uid]
        if older is not None:
            older.newer = newer
        phantom.newer = phantom.older = None

    def vanished(self, phantom: Phantom) -> None:
        """Remove a client of another node."""
        broker = self._state.broker
        if self.phantoms.get(phantom.etid) is phantom:
            del self.phantoms[phantom.etid]
        if phantom.node.pressing:
            self._waits.released_by(phantom.node, (phantom.etid, 0))
        if phantom.extra is not None and broker.hooks.onvanish:
            broker.hooks.onvanish(phantom)
        self.release(phantom)
        topic, node = self.foreign.get(phantom.etid, (None, None))
        if topic is None or node is not phantom.node:
            return
        if (moved := self.phantoms.get(phantom.etid)) is not None:
            topic.discard(node.send_queue)
            topic.add(moved.node.send_queue)
            self.foreign[phantom.etid] = topic, moved.node
        else:
            del self.foreign[phantom.etid]
            broker.gone(topic)

    # ---- closing clients

    def end_client(self, etid: int, text: bytes | None) -> bool:
        """See `ClusterHooks`."""
        phantom = self.phantoms.get(etid)
        if phantom is None or phantom.node.gone:
            return False
        phantom.node.send_queue.send([wire.end(etid, text or b"")])
        return True

    def end_here(self, etid: int, text: bytes | None) -> None:
        """Close a client of this hub for another node, or all clients (0)."""
        self._state.broker.end_clients(text, self._state.local.get(etid, etid) if etid else None)
