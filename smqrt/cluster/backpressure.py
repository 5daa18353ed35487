"""Publishers of a hub that wait: for links, and for clients of other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.outbox import run_in_background
from smqrt.broker.slow import Pressure
from smqrt.broker.state import BrokerPeer
from smqrt.cluster.node_send_queue import NodeSendQueue
from smqrt.cluster.remote_node import MAX_PRESSING, RemoteNode
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType
from smqrt.wire.smq import TOPIC_BIT

if TYPE_CHECKING:
    from smqrt.cluster.clustered_broker import ClusteredBroker

TIMERS_DIFFER_S = 0.1
"""From clocks."""
PRESSURE_GRACE_S = 1.0
"""The node where a client is gives up first."""


class Waits:
    """Who waits at one hub.

    Attributes:
        full: ways to nodes that do not keep up, with those who wait for them.
    """

    def __init__(self, member: ClusteredBroker) -> None:
        self._member = member
        self.full: dict[NodeSendQueue, list[BrokerPeer]] = {}
        self._given_up: set[NodeSendQueue] = set()
        """Full ways for which publishers have waited for long enough."""

    def filled(self, node: RemoteNode) -> None:
        """So much is on its way to a node that publishers have to wait, until it has worked off some or it takes too
        long: no node holds them for ever.
        """
        way = node.way
        if way in self.full or way in self._given_up or node.gone:
            return
        waiting: list[BrokerPeer] = []
        self.full[way], way.holds = waiting, True
        way.wait(lambda: self.caught_up(node))
        until_s = self._member.broker.clock() + Pressure.lasts_s
        self._member.broker.call_later(Pressure.lasts_s, lambda: self._gives_up(way, waiting, until_s))

    def _gives_up(self, way: NodeSendQueue, waiting: list[BrokerPeer], until_s: float) -> None:
        if self.full.get(way) is waiting and self._member.broker.clock() > until_s - TIMERS_DIFFER_S:
            self._given_up.add(way)
            way.go_on()
            run_in_background(_resume(self.full.pop(way)))

    def caught_up(self, node: RemoteNode) -> None:
        """It has worked off some, or is gone."""
        way = node.way
        self._given_up.discard(way)
        waiting = self.full.pop(way, [])
        way.go_on()
        if way in self.full:  # again, by what has waited
            self.full[way] += waiting
        else:
            run_in_background(_resume(waiting))
        if way.missed and not node.gone:
            way.missed = False
            run_in_background(paced(node, self._member.last_values(node)))

    def pressed(self, key: bytes, presses: bool) -> None:
        """See `ClusterMember.pressed`."""
        number = self._pressure_key(key)
        if number is not None:
            self._tell_pressure([number], LinkType.PRESSED if presses else LinkType.RELEASED, self._member.remotes)

    def tell(self, topics: list[bytes], node: RemoteNode) -> None:
        """Tell a new node of which topics clients here have too much."""
        keys = [key for key in map(self._pressure_key, topics) if key is not None]
        self._tell_pressure(keys, LinkType.PRESSED, [node])

    def _pressure_key(self, key: bytes) -> Key | None:
        topic = self._member.broker.topic_table.by_key.get(key)
        if topic is None:
            return None
        return (self._member.public(topic.id), 0) if topic.name is None else self._member.key_of(topic)

    def _tell_pressure(self, keys: list[Key], kind: LinkType, nodes: Iterable[RemoteNode]) -> None:
        for node in nodes:
            if node.way.knows_pressure:
                node.way.say(wire.keys(kind, keys))

    def pressed_by(self, node: RemoteNode, key: Key) -> None:
        """Clients of another node have too much of a topic: its publishers wait until they are released, or for as long
        as for a client of this hub.
        """
        number = self._local_number(key)
        if self._member.broker.slow is None or number is None or len(node.pressing) >= MAX_PRESSING:
            return
        node.pressing[key] = self._member.broker.clock()
        self._member.broker.slow.pressure.press_elsewhere(node.way, number)
        if key not in node.timed:
            node.timed.add(key)
            self._look_later(node, key, Pressure.lasts_s + PRESSURE_GRACE_S)

    def _look_later(self, node: RemoteNode, key: Key, delay_s: float) -> None:
        self._member.broker.call_later(delay_s, lambda: self._presses_too_long(node, key))

    def _local_number(self, key: Key) -> bytes | None:
        number = key[0].to_bytes(4, "big")
        topic = self._member.topic_of(key)
        if topic is not None:
            return topic.key
        table = self._member.broker.topic_table
        known = table.at(number) if key[0] < TOPIC_BIT else table.by_key.get(number)
        return number if known is None or known.name is None else None

    def _presses_too_long(self, node: RemoteNode, key: Key) -> None:
        """Release a topic, unless the node has pressed anew meanwhile: that is looked at again."""
        most_s = Pressure.lasts_s + PRESSURE_GRACE_S
        pressed_s = self._member.broker.clock() - node.pressing.get(key, -most_s)
        node.timed.discard(key)
        if pressed_s > most_s - TIMERS_DIFFER_S:
            self.released_by(node, key)
        elif pressed_s > 0:
            node.timed.add(key)
            self._look_later(node, key, most_s - pressed_s)

    def released_by(self, node: RemoteNode, key: Key) -> None:
        """They have not any more."""
        number = self._local_number(key)
        if node.pressing.pop(key, None) is not None and self._member.broker.slow is not None and number is not None:
            self._member.broker.slow.pressure.release_elsewhere(node.way, number)


def _resume(waiting: list[BrokerPeer]) -> Iterator[None]:
    for peer in waiting:
        peer.outbox.resume()
        yield


def paced(node: RemoteNode, steps: Iterator[None]) -> Iterator[None]:
    """Tell a node all there is as it works that off: at once it would be more than may wait for it."""
    for _ in steps:
        if node.gone:
            return
        if node.way.queue:
            node.way.flush()  # so that it counts
        if node.way.is_behind:
            node.way.wait(lambda: run_in_background(paced(node, steps)))
            return
        yield
