"""Routes to other nodes, backpressure between nodes, and remote clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from smqrt.broker.last_values import STAMP_STEP_US, clock
from smqrt.broker.outbox import Drop, Pressure, run_in_background
from smqrt.broker.state import BrokerClient, BrokerPeer
from smqrt.broker.topics import Route, Topic
from smqrt.cluster.leaving_nodes import AbsentNodes, HubMigration
from smqrt.cluster.mqtt_nodes import MqttNodes, Put
from smqrt.cluster.remote_node import (
    MAX_PRESSING,
    ClockedRoute,
    ForwardedRoute,
    NodeSendQueue,
    PacedRoute,
    Phantom,
    RemoteNode,
    RenumberedRoute,
)
from smqrt.cluster.state import ClusterState, ValueSync
from smqrt.errors import CloseReason
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Announced, Key, LinkType
from smqrt.wire.smq import TOPIC_BIT, node_of, server_of

# ---- Backpressure

TIMER_TOLERANCE_S = 0.1
"""A timer of the event loop may fire this long before its time by the clock."""
PRESSURE_GRACE_S = 1.0
"""Other nodes wait this much longer than the node of the slow client, which ends the waiting normally."""


class Backpressure:
    """The waiting publishers of one hub.

    Attributes:
        full: the full send queues, each with the publishers that wait for it.
        send_again: sends a node the newest values, since it may have missed some.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.send_again: Callable[[RemoteNode], Iterator[None]] = lambda node: iter(())
        self.full: dict[NodeSendQueue, list[BrokerPeer]] = {}
        self._given_up: set[NodeSendQueue] = set()
        """Full send queues for which publishers have waited for the maximum time."""

    # ---- full links

    def filled(self, node: RemoteNode) -> None:
        """Make publishers wait for a node with a full send queue, at most `Pressure.max_wait_s`."""
        queue = node.send_queue
        if queue in self.full or queue in self._given_up or node.gone:
            return
        waiting: list[BrokerPeer] = []
        self.full[queue], queue.holds = waiting, True
        queue.wait(lambda: self.caught_up(node))
        until_s = self._state.broker.clock() + Pressure.max_wait_s

        def give_up() -> None:
            if self.full.get(queue) is waiting and self._state.broker.clock() > until_s - TIMER_TOLERANCE_S:
                self._given_up.add(queue)
                queue.release()
                run_in_background(_resume(self.full.pop(queue)))

        self._state.broker.call_later(Pressure.max_wait_s, give_up)

    def caught_up(self, node: RemoteNode) -> None:
        """Resume the publishers that wait for a node, since it has caught up or was removed."""
        queue = node.send_queue
        self._given_up.discard(queue)
        waiting = self.full.pop(queue, [])
        queue.release()
        if queue in self.full:  # the held batches have filled it again
            self.full[queue] += waiting
        else:
            run_in_background(_resume(waiting))
        # Dropped messages may have been the newest values of their topics.
        if queue.missed and not node.gone:
            queue.missed = False
            run_in_background(paced(node, self.send_again(node)))

    # ---- slow clients here

    def pressed(self, key: bytes, presses: bool) -> None:
        """Announce that publishers of a topic have to wait for clients here, or no longer; see `ClusterHooks`."""
        number = self._pressure_key(key)
        if number is not None:
            self._send([number], LinkType.PRESSED if presses else LinkType.RELEASED, self._state.remotes)

    def announce(self, topics: list[bytes], node: RemoteNode) -> None:
        """Send a new node the topics whose publishers have to wait for clients here."""
        keys = [key for key in map(self._pressure_key, topics) if key is not None]
        self._send(keys, LinkType.PRESSED, [node])

    def _pressure_key(self, key: bytes) -> Key | None:
        topic = self._state.broker.topic_table.by_key.get(key)
        if topic is None:
            return None
        return (self._state.public_etid(topic.id), 0) if topic.name is None else self._state.key_of(topic)

    def _send(self, keys: list[Key], kind: LinkType, nodes: Iterable[RemoteNode]) -> None:
        for node in nodes:
            if node.send_queue.knows_backpressure:
                node.send_queue.send(wire.keys(kind, keys))

    # ---- slow clients of other nodes

    def pressed_by(self, node: RemoteNode, key: Key) -> None:
        """Make the publishers of a topic wait for clients of another node, as for a slow client of this hub."""
        number = self._local_number(key)
        if self._state.broker.slow is None or number is None or len(node.pressing) >= MAX_PRESSING:
            return
        node.pressing[key] = self._state.broker.clock()
        self._state.broker.slow.pressure.add_remote(node.send_queue, number)
        if key not in node.timed:
            node.timed.add(key)
            self._check_later(node, key, Pressure.max_wait_s + PRESSURE_GRACE_S)

    def _check_later(self, node: RemoteNode, key: Key, delay_s: float) -> None:
        self._state.broker.call_later(delay_s, lambda: self._release_if_due(node, key))

    def _local_number(self, key: Key) -> bytes | None:
        number = key[0].to_bytes(4, "big")
        topic = self._state.topic_of(key)
        if topic is not None:
            return topic.key
        table = self._state.broker.topic_table
        known = table.at(number) if key[0] < TOPIC_BIT else table.by_key.get(number)
        return number if known is None or known.name is None else None

    def _release_if_due(self, node: RemoteNode, key: Key) -> None:
        """Release a topic, or check again later if the node has renewed its request."""
        max_s = Pressure.max_wait_s + PRESSURE_GRACE_S
        pressed_s = self._state.broker.clock() - node.pressing.get(key, -max_s)
        node.timed.discard(key)
        if pressed_s > max_s - TIMER_TOLERANCE_S:
            self.released_by(node, key)
        elif pressed_s > 0:
            node.timed.add(key)
            self._check_later(node, key, max_s - pressed_s)

    def released_by(self, node: RemoteNode, key: Key) -> None:
        """Resume the publishers of a topic that waited for clients of another node."""
        number = self._local_number(key)
        if node.pressing.pop(key, None) is not None and self._state.broker.slow is not None and number is not None:
            self._state.broker.slow.pressure.remove_remote(node.send_queue, number)


def _resume(waiting: list[BrokerPeer]) -> Iterator[None]:
    for peer in waiting:
        peer.outbox.resume()
        yield


def paced(node: RemoteNode, steps: Iterator[None]) -> Iterator[None]:
    """Send a snapshot to a node at the pace at which the node processes it, so that it does not fill the queue."""
    for _ in steps:
        if node.gone:
            return
        if node.send_queue.queue:
            node.send_queue.flush()  # so that it counts in `is_behind`
        if node.send_queue.is_behind:
            node.send_queue.wait(lambda: run_in_background(paced(node, steps)))
            return
        yield


# ---- Remote clients

MAX_SORTED = 16
"""The maximum number of clients of one uid that are sorted by age. Nodes close all but the newest, so there are few."""


class RemoteClients:
    """The clients of all other nodes, for one hub.

    Attributes:
        phantoms: the clients, by ETID.
        foreign: the topic and the node of each client to which messages were sent, by ETID.
        holders: the newest client of each uid; `Phantom.older` leads to others, until their nodes close them.
        stamps: when the clients of this hub connected, by ETID.
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
        # Greater than the stamp of the former client, even if the clock of this node is behind.
        self.stamps[client.etid] = max(now_ms, holder.stamp + 1) if holder else now_ms
        self._state.send_all(wire.peers([self.announced(client)]))

    def left(self, client: BrokerClient) -> None:
        """See `ClusterHooks`."""
        self.stamps.pop(client.etid, None)
        public = self._state.public.pop(client.etid, client.etid)
        self._state.local.pop(public, None)
        self._state.send_all(wire.etids([public]))

    def announced(self, client: BrokerClient) -> Announced:
        """Return the announcement of a client for other nodes."""
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
        """Return the topic of an ETID that is not in the table of the hub.

        It is that of a client of another node, or of a client of this hub for which other nodes use another ETID.
        """
        table = self._state.broker.topic_table
        local = self._state.local.get(number)
        if local is not None:
            return table.here(local.to_bytes(4, "big"))
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
        # All nodes compare the same ages, so that all keep the same client.
        here = self._state.broker.uids.get(phantom.uid)
        if here is not None and phantom.age > (self._stamp(here.etid), self._state.number):
            here.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())

    def release(self, phantom: Phantom) -> None:
        """Remove a client of another node from the list of its uid."""
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
        """Close a client of this hub at the request of another node; 0 for all clients."""
        self._state.broker.end_clients(text, self._state.local.get(etid, etid) if etid else None)


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
        mqtt: MqttNodes,
    ) -> None:
        self._state, self._clients, self._lost = state, clients, lost
        self._migration, self._values, self._waits, self._mqtt = migration, values, waits, mqtt
        self._sent_us = 0

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """See `ClusterHooks`."""
        state = self._state
        public = state.public.get(ptid, ptid)
        if topic is not None and topic.name is None:
            foreign = self._clients.foreign.get(topic.id)
            if foreign is None:
                return RenumberedRoute(route, topic.id) if route is not None and topic.id != tid else route
            queue = foreign[1].send_queue
            topic.for_nodes().leads_away = True
            put = _rewriting(queue, tid, public) if public in state.local else queue.put
            return ForwardedRoute(None, [put], [queue], topic, state.broker.topic_table.traffic)
        # `unnamed` are nodes that want the messages, but do not know the topic; see `MqttNodes.put`.
        wanted = unnamed = 0
        to_groups: Put | None = None
        if topic is None:  # this hub does not have the name of the topic
            key, bits = None, state.interest.nodes_of_number(tid)
        else:
            key = state.key_of(topic)
            bits = state.interest.nodes(key)
            if len(self._mqtt.filters):
                unnamed = self._mqtt.filters.nodes(topic.name or b"") & ~bits
                bits |= unnamed
            wanted = bits
            to_groups = self._mqtt.group_put(topic)
            if state.broker.last_values is not None and state.broker.last_values.selects(topic):
                # To all nodes: each may keep last values of the topic, for which it needs the name.
                bits = state.bits
                for node in state.remotes:
                    self._values.name_topic(node, topic, key)
        wanting = list(self._nodes(bits)) if bits else []
        if topic is not None and topic.nodes.leads_away != (bool(wanting) and route is None):
            topic.count()
            topic.for_nodes().leads_away = not topic.nodes.leads_away
        missing, is_kept = 0, False
        if self._lost.nodes and topic is not None and state.broker.devices is not None:
            missing = self._mqtt.missing(topic, wanted)
            is_kept = self._mqtt.keeps(missing)
        elif self._lost.nodes:
            missing = self._lost.wanting(key, tid)
        if not wanting and to_groups is None and not is_kept and (route is None or not missing):
            return route
        puts: list[Put] = []
        for node in wanting:
            number = tid if key is None else node.numbers.get(key, key[0])
            is_same = (tid, ptid) == (number, public)
            put = node.send_queue.put if is_same else _rewriting(node.send_queue, number, public)
            if topic is not None and node.bit & unnamed:
                put = self._mqtt.put(node, topic, public, None)
            elif topic is not None and node.has_mqtt and state.broker.devices is not None:
                put = self._mqtt.put(node, topic, public, put)
            puts.append(put)
        if to_groups is not None:
            puts.append(to_groups)
        if is_kept and topic is not None:
            puts.append(self._mqtt.put_missed(missing, wanting, topic, public))
        elif missing:
            puts.append(self._lost.counts(missing))
        queues = [node.send_queue for node in wanting]
        forwarded = ForwardedRoute(route, puts, queues, topic, state.broker.topic_table.traffic)
        # Nodes that keep last values need the times of messages, to find the newest value.
        stamped = [node for node in wanting if key in node.valued and node.send_queue.knows_stamps]
        return ClockedRoute(forwarded, stamped, self._stamp_now) if stamped else forwarded

    def _nodes(self, bits: int) -> Iterator[RemoteNode]:
        found = self._state.nodes_with(bits, self._migration.nodes)
        return iter(dict.fromkeys(map(self._migration.present, found)))

    def _stamp_now(self) -> int:
        # In steps, so that most batches need no Clock packet.
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
        """Send a message to the servers of all other nodes; return the number of nodes."""
        public = self._state.public.get(ptid, ptid)
        for node in self._nodes(self._state.bits):
            node.send_queue.put(smq.publish_frame(server_of(node.number), public, stid, data))
        if self._lost.nodes:
            self._state.broker.stats.drop(Drop.LINK_LOST, len(self._lost.nodes))
        return len(self._state.remotes)

    def with_link_backpressure(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """See `ClusterHooks`."""
        if isinstance(found, ForwardedRoute | ClockedRoute):
            return PacedRoute(route, found.queues, peer, self._waits.full)
        return route


def _rewriting(queue: NodeSendQueue, tid: int, ptid: int) -> Callable[[bytes], object]:
    return lambda batch: queue.put(wire.rewritten(batch, tid, ptid))
