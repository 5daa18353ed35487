"""Routes of messages from this hub to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smqrt.broker.last_values import STAMP_STEP_US, clock
from smqrt.broker.outbox import Drop
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Route, Topic
from smqrt.cluster.absent_nodes import AbsentNodes
from smqrt.cluster.backpressure import Backpressure
from smqrt.cluster.migration import HubMigration
from smqrt.cluster.node_send_queue import ForwardedRoute, NodeSendQueue, PacedRoute, RenumberedRoute
from smqrt.cluster.remote_clients import RemoteClients
from smqrt.cluster.remote_node import ClockedRoute, RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.cluster.value_sync import ValueSync
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.smq import server_of


class ClusterRouting:
    """Finds the routes of one hub to other nodes."""

    def __init__(
        self,
        state: ClusterState,
        clients: RemoteClients,
        lost: AbsentNodes,
        migration: HubMigration,
        values: ValueSync,
        waits: Backpressure,
    ) -> None:
        self._state, self._clients, self._lost = state, clients, lost
        self._migration, self._values, self._waits = migration, values, waits
        self._sent_us = 0

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """See `ClusterHooks`."""
        state = self._state
        public = state.public.get(ptid, ptid)
        if topic is not None and topic.name is None:
            return self._to_client(route, topic, tid, public)
        if topic is None:
            key, bits = None, state.interest.nodes_of_number(tid)
        else:
            key = state.key_of(topic)
            bits = state.interest.nodes(key)
            if state.broker.last_values is not None and state.broker.last_values.selects(topic):
                # To all nodes: each may keep the last values of the topic, and needs its name for that.
                bits = state.bits
                for node in state.remotes:
                    self._values.name_topic(node, topic, key)
        wanting = list(self._nodes(bits)) if bits else []
        if topic is not None and topic.leads_away != (bool(wanting) and route is None):
            topic.count()
            topic.leads_away = not topic.leads_away
        missing = self._lost.wanting(key, tid) if self._lost.nodes else 0
        if not wanting and (route is None or not missing):
            return route
        puts: list[Callable[[bytes], object]] = []
        for node in wanting:
            number = tid if key is None else node.numbers.get(key, key[0])
            is_same = (tid, ptid) == (number, public)
            puts.append(node.send_queue.put if is_same else _rewriting(node.send_queue, number, public))
        if missing:
            puts.append(self._lost.counts(missing))
        forwarded = self._over(route, topic, puts, [node.send_queue for node in wanting])
        # Nodes that keep last values need the time of the messages, to compare values.
        stamped = [node for node in wanting if key in node.valued and node.send_queue.knows_stamps]
        return ClockedRoute(forwarded, stamped, self._stamp_now) if stamped else forwarded

    def _over(
        self, route: Route | None, topic: Topic | None, puts: list[Callable[[bytes], object]], to: list[NodeSendQueue]
    ) -> ForwardedRoute:
        return ForwardedRoute(route, puts, to, topic, self._state.broker.topic_table.traffic)

    def _to_client(self, route: Route | None, topic: Topic, tid: int, public: int) -> Route | None:
        foreign = self._clients.foreign.get(topic.id)
        if foreign is not None:
            queue = foreign[1].send_queue
            topic.leads_away = True
            put = _rewriting(queue, tid, public) if public in self._state.local else queue.put
            return self._over(None, topic, [put], [queue])
        return RenumberedRoute(route, topic.id) if route is not None and topic.id != tid else route

    def _nodes(self, bits: int) -> Iterator[RemoteNode]:
        found = self._state.nodes_with(bits, self._migration.nodes)
        return iter(dict.fromkeys(map(self._migration.present, found)))

    def _stamp_now(self) -> int:
        now_us = clock.now()
        if now_us - self._sent_us >= STAMP_STEP_US:
            self._sent_us = now_us
        return self._sent_us

    def missed(self, tid: int, messages: int) -> bool:
        """See `ClusterHooks`."""
        if not self._lost.nodes:
            return False
        if self._lost.has_client(tid):
            self._state.broker.stats.drop(Drop.LINK_LOST, messages)
            return True
        topic = self._state.broker.topic_table.get(tid)
        key = None if topic is None or topic.name is None else self._state.key_of(topic)
        return self._lost.missed(self._lost.wanting(key, tid), messages)

    def to_servers(self, data: bytes, ptid: int, stid: int) -> int:
        """Send a message to the servers of all other nodes; return how many nodes there are."""
        public = self._state.public.get(ptid, ptid)
        for node in self._nodes(self._state.bits):
            node.send_queue.put(smq.publish_frame(server_of(node.number), public, stid, data))
        if self._lost.nodes:
            self._state.broker.stats.drop(Drop.LINK_LOST, len(self._lost.nodes))
        return len(self._state.remotes)

    def paced(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """See `ClusterHooks`."""
        if isinstance(found, ForwardedRoute | ClockedRoute):
            return PacedRoute(route, found.queues, peer, self._waits.full)
        return route


def _rewriting(queue: NodeSendQueue, tid: int, ptid: int) -> Callable[[bytes], object]:
    return lambda run: queue.put(wire.rewritten(run, tid, ptid))
