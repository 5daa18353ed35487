"""A hub's part in a cluster: what it tells the other nodes, and where messages go that they want.

An engine (`smqrt.backplane`, or `memory` for tests) finds the other nodes. It calls `joined` with a way to each, hands
what arrives from there to the `RemoteNode` that it gets, and calls `left` when that is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from smqrt.broker.broker import Broker
from smqrt.broker.last_values import STAMP_STEP_US, TopicValues, clock
from smqrt.broker.outbox import Drop, ahead, run_in_background
from smqrt.broker.state import BrokerClient, BrokerPeer
from smqrt.broker.topics import Route, Topic
from smqrt.cluster.absent_nodes import Absent, AbsentNode
from smqrt.cluster.backpressure import Waits, paced
from smqrt.cluster.events import NodeEvents
from smqrt.cluster.interest import Counts, Interest
from smqrt.cluster.migration import Moving
from smqrt.cluster.node_send_queue import ForwardedRoute, NodeSendQueue, PacedRoute, RenumberedRoute
from smqrt.cluster.remote_node import ClockedRoute, Phantom, RemoteNode
from smqrt.errors import CloseReason
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Announced, Key, LinkType
from smqrt.wire.smq import NameNumbers, node_of, server_of

log = logging.getLogger("smqrt")

SAID_AT_ONCE, SAID_BYTES = 64, 1 << 14
"""So many topics, or clients, of a snapshot are looked at before the clock is; fewer when they are large."""
HELD_LOOKED_AT = 16
"""So many clients of one uid are put in the order of their age; there are as many as nodes, at most, and soon one."""


class ClusteredBroker:
    """A hub in a cluster.

    Args:
        broker: the hub.
        name: of the cluster.
        key: at most 64 bytes that all nodes share and nobody else knows.
        number: of this node, 1 to 1023.
        clock_ms: the time, in ms since 1970.

    Attributes:
        remotes: the other nodes.
        foreign: the topics of those ETIDs that are in use, with the node.
        interest: what the other nodes want.
        lost: the nodes that are lost and may come back.
        events: what the application is told of nodes.
        moving: hubs that move to another process, also this one.
        counts: what observers are told of the subscribers of all nodes.
        changed: called when a node has joined, has said all, or is gone.
        epoch: when this node started.
        leave: takes the hub out of the cluster; the engine's.
    """

    def __init__(self, broker: Broker, name: str, key: bytes, number: int, clock_ms: Callable[[], int]) -> None:
        self.broker, self.name = broker, name
        self.wire_name, self.count_lost = name.encode(), broker.stats.drop
        self.remotes: list[RemoteNode] = []
        self._phantoms: dict[int, Phantom] = {}
        self.foreign: dict[int, tuple[Topic, RemoteNode]] = {}
        self.interest = Interest()
        self.lost = Absent(self)
        self.events, self.moving = NodeEvents(broker), Moving(self)
        self.changed: Callable[[RemoteNode, str], object] = lambda node, what: None
        self.epoch = 0
        self.leave: Callable[[], object] = lambda: None
        self.suspend: Callable[[], object] = lambda: None
        self.resume: Callable[[], object] = lambda: None
        self._numbers = NameNumbers(key)
        self._clock_ms = clock_ms
        self._holders: dict[bytes, Phantom] = {}
        """The newest of a uid; `Phantom.older` are others, until they are told to go."""
        self._stamps: dict[int, int] = {}
        """Of clients that took over one of another node."""
        self._otherwise: dict[Key, Topic] = {}
        self._public: dict[int, int] = {}
        """What other nodes call clients that have an ETID of another node number, and the server."""
        self._local: dict[int, int] = {}
        self.former_numbers: set[int] = set()
        """Of nodes whose clients have come here with their ETIDs: nobody else may have these."""
        self.waits = Waits(self)
        self._bits = self._told_us = 0
        self.counts = Counts(self)
        self._take_names()
        self.renumber(number)
        broker.cluster = self

    def _take_names(self) -> None:
        topics, subtopics = self.broker.topic_table, self.broker.subtopic_table
        topics.numbers = subtopics.numbers = self._numbers
        topics.named_otherwise, topics.absent = self._named_otherwise, self.absent
        subtopics.on_new = self._new_subtopic
        for topic in topics.by_name.values():
            if topic.id != self._numbers.topic_number(topic.name or b""):
                self._named_otherwise(topic)

    @property
    def phantoms(self) -> Mapping[int, Phantom]:
        """The clients of the other nodes, by ETID."""
        return self._phantoms

    def peers_elsewhere(self) -> Iterator[Phantom]:
        """See `ClusterHooks`."""
        here = self.broker.uids
        others = [one for one in self._phantoms.values() if one.newer is None and not one.node.gone]
        return (one for one in others if one.uid not in here)

    @property
    def number(self) -> int:
        """This node's number."""
        return self.broker.topic_table.node

    @property
    def others(self) -> frozenset[int]:
        """See `ClusterHooks`."""
        return frozenset(one.number for one in self.remotes if one.synced)

    def renumber(self, number: int) -> None:
        """Have another node number, while no other node is there. Clients with an ETID of the old one are called by
        another one elsewhere, until they are gone.
        """
        assert not self.remotes
        self.broker.topic_table.node = number
        self._public = {self.broker.server.etid: server_of(number)}
        self._local = {server_of(number): self.broker.server.etid}
        for etid in self.broker.sessions:
            if node_of(etid) != number:
                self._name(etid)

    def _name(self, etid: int) -> None:
        self._public[etid] = public = self.broker.topic_table.draw()
        self._local[public] = etid

    def resync(self) -> None:
        """See `ClusterHooks`. They keep their ETIDs, which have the number of the node that they were at."""
        if self.moving.awaits:  # nobody has said whose they were
            self.moving.begin(0)
        for etid in self.broker.sessions:
            if not node_of(etid) and etid not in self._public:
                self._name(etid)
        self.former_numbers.update(map(node_of, self.broker.sessions))
        for topic in self.broker.topic_table.by_name.values():
            topic.forget_routes()
            if topic.observers:
                self.observed(topic)
        for node in self.remotes:
            run_in_background(paced(node, self.moving.framed(node, self._snapshot(node))))
            self.counts.tell(node.watched, [node])

    # ---- the hub moves to another process, or comes from one

    def pause(self) -> None:
        """See `ClusterHooks`."""
        self.moving.pause()

    @property
    def is_paused(self) -> bool:
        """See `ClusterHooks`."""
        return self.moving.is_paused

    def stay(self) -> None:
        """See `ClusterHooks`."""
        self.moving.stay()
        self.resume()

    def expect_clients(self) -> None:
        """Another process has the clients of this hub still."""
        self.moving.expect()

    @property
    def awaits_clients(self) -> bool:
        """See `ClusterHooks`."""
        return self.moving.awaits

    def succeed(self, number: int) -> None:
        """See `ClusterHooks`."""
        self.moving.begin(number)
        if number not in (0, self.number):
            self._local[server_of(number)] = self.broker.server.etid

    # ---- topics and ETIDs of this hub

    def _named_otherwise(self, topic: Topic) -> None:
        key = self._numbers.topic(topic.name or b"")
        self._otherwise[key] = topic
        self.tell(wire.keys_and_numbers(LinkType.NUMBERED, [(*key, topic.id)]))

    def absent(self, number: int) -> Topic | None:
        """The topic of an ETID that is not in the hub's table: of a client of another node, or of one of this node
        that others know by this number.
        """
        local = self._local.get(number)
        if local is not None:
            return self.broker.topic_table.by_key.get(local.to_bytes(4, "big"))
        phantom = self.phantom(number)
        if phantom is None:
            return None
        node = self.moving.present(phantom.node)
        topic = self.broker.topic_table.foreign(number, node.way)
        self.foreign[number] = topic, node
        return topic

    def phantom(self, etid: int) -> Phantom | None:
        """The client, or the server, of another node that has this ETID."""
        phantom = self._phantoms.get(etid)
        if phantom is None:
            number = node_of(etid)
            if number and etid == server_of(number):
                phantom = next((one.server for one in self.remotes if one.number == number), None)
        return None if phantom is None or phantom.node.gone else phantom

    def forget(self, key: Key) -> None:
        """Have publishers look for the way to a topic again."""
        topic = self.broker.topic_table.by_key.get(key[0].to_bytes(4, "big"))
        if topic is not None:
            topic.forget_routes()
        if self._otherwise and key in self._otherwise:
            self._otherwise[key].forget_routes()

    def _new_subtopic(self, number: int, name: bytes) -> None:
        self.tell(wire.names(LinkType.SUBTOPICS, [(number, name)]))

    def subtopic(self, name: bytes, number: int) -> int:
        """The number of another node's sub-topic here; its own when the hub has as many names as it may."""
        table = self.broker.subtopic_table
        here = table.by_name.get(name)
        if here is None and (refusal := self.broker.limits.of_all(table, name)):
            self.broker.refuse(None, refusal)
            return number
        return table.named(name, number) if here is None else here

    # ---- where messages go

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """See `ClusterHooks`."""
        public = self._public.get(ptid, ptid)
        if topic is not None and topic.name is None:
            return self._to_client(route, topic, tid, public)
        if topic is None:
            key, nodes = None, self.interest.nodes_of_number(tid)
        else:
            key = self._numbers.topic(topic.name or b"")
            nodes = self.interest.nodes(key)
            if self.broker.last_values is not None and self.broker.last_values.selects(topic):
                nodes = self._to_keepers(topic, key)
        wanting = list(self._nodes(nodes)) if nodes else []
        if topic is not None and topic.leads_away != (bool(wanting) and route is None):
            topic.count()
            topic.leads_away = not topic.leads_away
        missing = self.lost.wanting(key, tid) if self.lost.nodes else 0
        if not wanting and (route is None or not missing):
            return route
        puts = [self._put(one, tid, self._number_at(one, key, tid), ptid, public) for one in wanting]
        if missing:
            puts.append(self.lost.counts(missing))
        forwarded = self._over(route, topic, puts, [one.way for one in wanting])
        told = [one for one in wanting if key in one.valued and one.way.tells_stamps]
        return ClockedRoute(forwarded, told, self._stamp_now) if told else forwarded

    def missed(self, tid: int, messages: int) -> bool:
        """See `ClusterHooks`."""
        if not self.lost.nodes:
            return False
        if self.lost.has_client(tid):
            self.broker.stats.drop(Drop.LINK_LOST, messages)
            return True
        topic = self.broker.topic_table.get(tid)
        key = None if topic is None or topic.name is None else self.key_of(topic)
        return self.lost.missed(self.lost.wanting(key, tid), messages)

    def _stamp_now(self) -> int:
        now_us = clock.now()
        if now_us - self._told_us >= STAMP_STEP_US:
            self._told_us = now_us
        return self._told_us

    def _over(
        self, route: Route | None, topic: Topic | None, puts: list[Callable[[bytes], object]], ways: list[NodeSendQueue]
    ) -> ForwardedRoute:
        return ForwardedRoute(route, puts, ways, topic, self.broker.topic_table.traffic)

    def _to_client(self, route: Route | None, topic: Topic, tid: int, public: int) -> Route | None:
        foreign = self.foreign.get(topic.id)
        if foreign is not None:
            way = foreign[1].way
            topic.leads_away = True
            return self._over(None, topic, [_rewriting(way, tid, public) if public in self._local else way.put], [way])
        return RenumberedRoute(route, topic.id) if route is not None and topic.id != tid else route

    def _nodes(self, nodes: int) -> Iterator[RemoteNode]:
        found = (one for one in (*self.remotes, *self.moving.nodes) if one.bit & nodes)
        return iter(dict.fromkeys(map(self.moving.present, found)))

    def _number_at(self, node: RemoteNode, key: Key | None, tid: int) -> int:
        return tid if key is None else node.numbers.get(key, key[0])

    def _put(self, node: RemoteNode, tid: int, number: int, ptid: int, public: int) -> Callable[[bytes], object]:
        return node.way.put if (tid, ptid) == (number, public) else _rewriting(node.way, number, public)

    def to_servers(self, data: bytes, ptid: int, stid: int) -> int:
        """Send a message to the servers of all other nodes; gives how many there are."""
        public = self._public.get(ptid, ptid)
        for node in self._nodes(self._bits):
            node.way.put(smq.publish_frame(server_of(node.number), public, stid, data))
        if self.lost.nodes:
            self.broker.stats.drop(Drop.LINK_LOST, len(self.lost.nodes))
        return len(self.remotes)

    def paced(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """See `ClusterHooks`."""
        if isinstance(found, ForwardedRoute | ClockedRoute):
            return PacedRoute(route, found.ways, peer, self.waits.full)
        return route

    def pressed(self, key: bytes, presses: bool) -> None:
        """See `ClusterHooks`."""
        self.waits.pressed(key, presses)

    # ---- what one server of the cluster handles

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        """See `ClusterHooks`. The node of the publisher decides, alone, so that no message has two: it takes the node
        that has run for longest of those it can reach. For nodes without such a handler the others decide.
        """
        key = self.key_of(topic)
        if isinstance(origin, RemoteNode) and key in origin.once:
            return False
        nodes = [node for node in self.remotes if key in node.once and node is self.moving.present(node)]
        nodes = [node for node in nodes if not node.way.keeps]
        oldest = min(nodes, key=_seniority, default=None)
        if oldest is None or (self.epoch, self.number) <= _seniority(oldest):
            return True
        if origin is None:
            ptid = int.from_bytes(frame[7:11], "big")
            oldest.way.put(wire.rewritten(frame, oldest.once[key], self._public.get(ptid, ptid)))
        return False

    def handles_once(self, topic: Topic, number: int) -> None:
        """See `ClusterHooks`."""
        if not self.moving.awaits:
            self._tell_once([(*self.key_of(topic), number)], self.remotes)

    def _tell_once(self, topics: list[tuple[int, int, int]], nodes: Iterable[RemoteNode]) -> None:
        for node in nodes:
            if node.way.knows_pressure:
                node.way.say(wire.keys_and_numbers(LinkType.ONCE, topics))

    # ---- what the hub does

    def tell(self, packets: Iterable[bytes]) -> None:
        """Send control packets to all other nodes."""
        if self.remotes:
            for frame in [smq.frame(packet) for packet in packets]:
                for node in self.remotes:
                    node.way.put(frame)
            ahead.update(dict.fromkeys(node.way for node in self.remotes))

    def public(self, etid: int) -> int:
        """What other nodes call a client."""
        return self._public.get(etid, etid)

    def key_of(self, topic: Topic) -> Key:
        """How other nodes know a topic with a name."""
        return self._numbers.topic(topic.name or b"")

    def topic_of(self, key: Key) -> Topic | None:
        """The topic that other nodes know so, when it is there."""
        topic = self._otherwise.get(key) or self.broker.topic_table.by_key.get(key[0].to_bytes(4, "big"))
        return topic if topic is not None and topic.name is not None and self.key_of(topic) == key else None

    def subscribed(self, topic: Topic) -> None:
        """See `ClusterHooks`."""
        if not self.remotes or topic.name is None:
            return
        if topic.subscribers == 1 and not self.moving.awaits:
            self.tell(wire.keys(LinkType.INTEREST, [self.key_of(topic)]))
        self.counts.changed(topic)

    def unsubscribed(self, topic: Topic) -> None:
        """See `ClusterHooks`."""
        if not self.remotes or topic.name is None:
            return
        if not topic.subscribers:
            self.tell(wire.keys(LinkType.NO_INTEREST, [self.key_of(topic)]))
        self.counts.changed(topic)

    def entered(self, client: BrokerClient) -> None:
        """See `ClusterHooks`."""
        holder = self.holder(client.uid)
        now_ms = self._clock_ms()
        self._stamps[client.etid] = max(now_ms, holder.stamp + 1) if holder else now_ms
        self.tell(wire.peers([self._announced(client)]))

    def left(self, client: BrokerClient) -> None:
        """See `ClusterHooks`."""
        self._stamps.pop(client.etid, None)
        public = self._public.pop(client.etid, client.etid)
        self._local.pop(public, None)
        self.tell(wire.etids([public]))

    def _announced(self, client: BrokerClient) -> Announced:
        shown = "" if client.identity is None else client.identity.shown
        user = shown.encode("utf-8", "surrogateescape")
        etid = self._public.get(client.etid, client.etid)
        return Announced(etid, self._stamp(client.etid), client.uid, client.info, user)

    def _stamp(self, etid: int) -> int:
        return self._stamps.setdefault(etid, self._clock_ms())

    def holder(self, uid: bytes) -> Phantom | None:
        """See `ClusterHooks`."""
        phantom = self._holders.get(uid)
        while phantom is not None and phantom.node.gone:
            phantom = phantom.older
        return phantom

    # ---- nodes come and go

    def joined(self, number: int, way: NodeSendQueue) -> RemoteNode:
        """Another node can be reached, by `way`; what it sends goes to what this gives."""
        bit = ~self._bits & self._bits + 1  # the lowest that is free
        self._bits |= bit
        node = RemoteNode(self, number, bit, way)
        self.remotes.append(node)
        way.on_full = lambda: self.waits.filled(node)
        self.moving.greet(node)
        run_in_background(paced(node, self.moving.framed(node, self._snapshot(node))))
        self.forget_valued()
        self.changed(node, "joined")
        return node

    def _snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Tell a new node what is here. What changes meanwhile is told as it happens, and each thing is looked at in
        the moment in which it is told, so that nothing old follows something new.
        """
        broker = self.broker
        once = ((broker.topic_table.get(tid), inbox) for tid, inbox in list(broker.server.once.items()))
        if not self.moving.awaits:
            self._tell_once([(*self.key_of(topic), inbox.id) for topic, inbox in once if topic is not None], [node])
        for topics in _portions(broker.slow.pressure.here() if broker.slow is not None else []):
            self.waits.tell(topics, node)
            yield
        for names in _portions(list(broker.subtopic_table.by_id.items()), lambda one: len(one[1])):
            node.way.say(wire.names(LinkType.SUBTOPICS, names))
            yield
        for topics in _portions(list(self._otherwise.items())):
            node.way.say(wire.keys_and_numbers(LinkType.NUMBERED, ((*key, topic.id) for key, topic in topics)))
            yield
        for keys in _portions(list(self.counts.watching)):
            node.way.say(wire.keys(LinkType.WATCH, keys))
            yield
        for clients in _portions([*broker.staying.values(), *broker.sessions.values()], lambda one: len(one.info)):
            node.way.say(wire.peers(self._announced(one) for one in clients if not one.closed))
            yield
        for topics in _portions([] if self.moving.awaits else list(broker.topic_table.by_name.values())):
            node.way.say(wire.keys(LinkType.INTEREST, (self.key_of(topic) for topic in topics if topic.subscribers)))
            yield
        yield from self.last_values(node)
        node.way.say([bytes((LinkType.SYNCED,))])

    # ---- last values

    def last_values(self, node: RemoteNode) -> Iterator[None]:
        """Tell a node the last values that are here."""
        for values in list(self.broker.last_values or ()):
            self._send_values(node, values)
            yield

    def _send_values(self, node: RemoteNode, values: TopicValues) -> None:
        gone = values.gone_frames() if node.way.tells_stamps else []
        if not values.newest and not gone:
            return
        key = self.key_of(values.topic)
        self._name_topic(node, values.topic, key)
        number = node.numbers.get(key, key[0])
        for frame in [*(one for one, _ in values.newest.values()), *gone]:
            ptid = int.from_bytes(frame[7:11], "big")
            value = wire.rewritten(frame, number, self._public.get(ptid, ptid))
            if node.way.tells_stamps:
                stamp = values.stamp(frame[11:15]).to_bytes(8, "big")
                node.way.say([bytes((LinkType.VALUE_AT,)) + stamp + value[3:]])
            else:
                node.way.say([bytes((LinkType.VALUE,)) + value[3:]])

    def _to_keepers(self, topic: Topic, key: Key) -> int:
        """All nodes: each may keep the last values of the topic, and then has to know its name."""
        for node in self.remotes:
            self._name_topic(node, topic, key)
        return self._bits

    def _name_topic(self, node: RemoteNode, topic: Topic, key: Key) -> None:
        if key not in node.valued:
            node.valued.add(key)
            node.way.say(wire.names(LinkType.TOPICS, [(key[0], topic.name or b"")]))

    def keep_values_of(self, name: bytes) -> None:
        """Have a topic, when its last values are kept here: those of another node follow."""
        values, table = self.broker.last_values, self.broker.topic_table
        if values is None or name in table.by_name or not values.selects_name(name):
            return
        if refusal := self.broker.limits.of_all(table, name):
            self.broker.refuse(None, refusal)
        else:
            table.named(name)

    def restore_value(self, frame: bytes, stamp: int | None, since: int) -> None:
        """Have a last value of another node, unless there is a newer one here.

        An older version does not say when it was published. It has it since before this node started, at `since`, when
        the one here is from a file that an older version wrote: what was published while this node was away is newer.
        """
        values, topic = self.broker.last_values, self.broker.topic_table.by_key.get(frame[3:7])
        if values is None or topic is None or not values.selects(topic):
            return
        kept = values.of(topic)
        if stamp is not None:
            clock.heard(stamp)
            kept.take_told(frame, stamp)
        elif frame[11:15] not in kept.newest or (0 < since < self.epoch and not kept.stamp(frame[11:15])):
            kept.take_frame(frame, None)

    def synced(self, node: RemoteNode) -> None:
        """A node has said all that it had."""
        self.lost.back(node)
        self.events.synced(node)
        self.changed(node, "synced")

    def left_node(self, node: RemoteNode, why: str, reason: Drop = Drop.LINK_LOST) -> None:
        """A node is lost, or has left: its clients and its interest go, and what waits for it is counted; for a lost
        one also what it would get from now on.
        """
        if node.gone:
            return
        if node in self.remotes:
            self.remotes.remove(node)
        if self.moving.has_left(node):
            return
        node.gone = True
        node.way.end(reason, self.broker.stats.drop)
        if self.broker.slow is not None:
            self.broker.slow.pressure.forget(node.way)
        self.waits.caught_up(node)
        run_in_background(self._forget_node(node, None if node.way.has_left else self.lost.lost(node)))
        self.events.gone(node, why)
        self.changed(node, why)

    def _forget_node(self, node: RemoteNode, absent: AbsentNode | None) -> Iterator[None]:
        yield from node.forget_all(absent)
        self._bits &= ~node.bit

    def forget_moved(self, before: RemoteNode, node: RemoteNode) -> None:
        """`node` goes on for the one before, and has its clients."""
        before.gone = True
        if self.broker.slow is not None:
            self.broker.slow.pressure.forget(before.way)
        self.waits.caught_up(before)
        run_in_background(self._forget_node(before, None))
        self.changed(before, "another process goes on for it")

    def forget_valued(self) -> None:
        """Have publishers look for the ways to topics with last values again."""
        if self.broker.last_values is not None:
            for values in self.broker.last_values:
                values.topic.forget_routes()

    # ---- clients of other nodes

    def appeared(self, phantom: Phantom) -> None:
        """Another node has a client."""
        self._phantoms[phantom.etid] = phantom
        self._hold(phantom)
        here = self.broker.uids.get(phantom.uid)
        if here is not None and phantom.age > (self._stamp(here.etid), self.number):
            here.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())

    def _hold(self, phantom: Phantom) -> None:
        newer, older = None, self._holders.get(phantom.uid)
        for _ in range(HELD_LOOKED_AT):
            if older is None or older.age <= phantom.age:
                break
            newer, older = older, older.older
        phantom.newer, phantom.older = newer, older
        if older is not None:
            older.newer = phantom
        if newer is None:
            self._holders[phantom.uid] = phantom
        else:
            newer.older = phantom

    def release(self, phantom: Phantom) -> None:
        """A client of another node does not have its uid any more."""
        newer, older = phantom.newer, phantom.older
        if newer is not None:
            newer.older = older
        elif self._holders.get(phantom.uid) is not phantom:
            return
        elif older is not None:
            self._holders[phantom.uid] = older
        else:
            del self._holders[phantom.uid]
        if older is not None:
            older.newer = newer
        phantom.newer = phantom.older = None

    def vanished(self, phantom: Phantom) -> None:
        """A client of another node is gone."""
        if self._phantoms.get(phantom.etid) is phantom:
            del self._phantoms[phantom.etid]
        if phantom.node.pressing:
            self.waits.released_by(phantom.node, (phantom.etid, 0))
        if phantom.extra is not None and self.broker.hooks.onvanish:
            self.broker.hooks.onvanish(phantom)
        self.release(phantom)
        topic, node = self.foreign.get(phantom.etid, (None, None))
        if topic is None or node is not phantom.node:
            return
        if (moved := self._phantoms.get(phantom.etid)) is not None:
            topic.discard(node.way)
            topic.add(moved.node.way)
            self.foreign[phantom.etid] = topic, moved.node
        else:
            del self.foreign[phantom.etid]
            self.broker.gone(topic)

    def end_client(self, etid: int, text: bytes | None) -> bool:
        """See `ClusterHooks`."""
        phantom = self._phantoms.get(etid)
        if phantom is None or phantom.node.gone:
            return False
        phantom.node.way.say([wire.end(etid, text or b"")])
        return True

    def end_here(self, etid: int, text: bytes | None) -> None:
        """Another node ends a client of this one, or all (0)."""
        self.broker.end_clients(text, self._local.get(etid, etid) if etid else None)

    def end_all(self, text: bytes | None) -> None:
        """End the clients of all nodes."""
        self.tell([wire.end(0, text or b"")])
        self.broker.end_clients(text, None)

    def observed(self, topic: Topic) -> None:
        """See `ClusterHooks`."""
        self.counts.observed(topic)

    # ---- the end

    def detach(self) -> None:
        """The hub goes on alone, with its clients."""
        assert not self.remotes
        self.moving.clear()
        self.lost.clear()
        self.broker.cluster = None
        self.broker.topic_table.absent = lambda number: None
        for client in self.broker.sessions.values():
            client.forget_routes()


def _seniority(node: RemoteNode) -> tuple[int, int]:
    return node.way.epoch, node.number


def _rewriting(way: NodeSendQueue, tid: int, ptid: int) -> Callable[[bytes], object]:
    return lambda run: way.put(wire.rewritten(run, tid, ptid))


def _portions(items: list[Any], size_bytes: Callable[[Any], int] = lambda one: 0) -> Iterator[list[Any]]:
    portion: list[Any] = []
    size = 0
    for one in items:
        portion.append(one)
        size += size_bytes(one)
        if len(portion) >= SAID_AT_ONCE or size >= SAID_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion
