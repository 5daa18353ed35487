"""Backpressure in a cluster: publishers wait for full links, and for clients of other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from smqrt.broker.outbox import run_in_background
from smqrt.broker.slow import Pressure
from smqrt.broker.state import BrokerPeer
from smqrt.cluster.node_send_queue import NodeSendQueue
from smqrt.cluster.remote_node import MAX_PRESSING, RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.cluster.value_sync import ValueSync
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType
from smqrt.wire.smq import TOPIC_BIT

TIMER_TOLERANCE_S = 0.1
"""A timer of the event loop may fire before the clock shows its time."""
PRESSURE_GRACE_S = 1.0
"""The node of the slow client gives up first; the others wait this much longer."""


class Backpressure:
    """The publishers of one hub that wait.

    Attributes:
        full: the full send queues, each with the publishers that wait for it.
    """

    def __init__(self, state: ClusterState, values: ValueSync) -> None:
        self._state, self._values = state, values
        self.full: dict[NodeSendQueue, list[BrokerPeer]] = {}
        self._given_up: set[NodeSendQueue] = set()
        """Full send queues for which publishers have waited for the longest time allowed."""

    # ---- full links

    def filled(self, node: RemoteNode) -> None:
        """Have publishers wait for a node with a full send queue, `Pressure.lasts_s` at most."""
        queue = node.send_queue
        if queue in self.full or queue in self._given_up or node.gone:
            return
        waiting: list[BrokerPeer] = []
        self.full[queue], queue.holds = waiting, True
        queue.wait(lambda: self.caught_up(node))
        until_s = self._state.broker.clock() + Pressure.lasts_s
        self._state.broker.call_later(Pressure.lasts_s, lambda: self._give_up(queue, waiting, until_s))

    def _give_up(self, queue: NodeSendQueue, waiting: list[BrokerPeer], until_s: float) -> None:
        if self.full.get(queue) is waiting and self._state.broker.clock() > until_s - TIMER_TOLERANCE_S:
            self._given_up.add(queue)
            queue.release()
            run_in_background(_resume(self.full.pop(queue)))

    def caught_up(self, node: RemoteNode) -> None:
        """Resume the publishers that wait for a node which has processed enough, or is gone."""
        queue = node.send_queue
        self._given_up.discard(queue)
        waiting = self.full.pop(queue, [])
        queue.release()
        if queue in self.full:  # what was held back has filled it again
            self.full[queue] += waiting
        else:
            run_in_background(_resume(waiting))
        if queue.missed and not node.gone:
            queue.missed = False
            run_in_background(paced(node, self._values.snapshot(node)))

    # ---- slow clients here

    def pressed(self, key: bytes, presses: bool) -> None:
        """Announce that clients here slow down the publishers of a topic, or no longer do; see `ClusterHooks`."""
        number = self._pressure_key(key)
        if number is not None:
            self._send([number], LinkType.PRESSED if presses else LinkType.RELEASED, self._state.remotes)

    def announce(self, topics: list[bytes], node: RemoteNode) -> None:
        """Send a new node the topics whose publishers wait for clients here."""
        keys = [key for key in map(self._pressure_key, topics) if key is not None]
        self._send(keys, LinkType.PRESSED, [node])

    def _pressure_key(self, key: bytes) -> Key | None:
        topic = self._state.broker.topic_table.by_key.get(key)
        if topic is None:
            return None
        return (self._state.public_etid(topic.id), 0) if topic.name is None else self._state.key_of(topic)

    def _send(self, keys: list[Key], kind: LinkType, nodes: Iterable[RemoteNode]) -> None:
        for node in nodes:
            if node.send_queue.knows_pressure:
                node.send_queue.send(wire.keys(kind, keys))

    # ---- slow clients of other nodes

    def pressed_by(self, node: RemoteNode, key: Key) -> None:
        """Have the publishers of a topic wait for clients of another node, as long as for a client of this hub."""
        number = self._local_number(key)
        if self._state.broker.slow is None or number is None or len(node.pressing) >= MAX_PRESSING:
            return
        node.pressing[key] = self._state.broker.clock()
        self._state.broker.slow.pressure.press_elsewhere(node.send_queue, number)
        if key not in node.timed:
            node.timed.add(key)
            self._check_later(node, key, Pressure.lasts_s + PRESSURE_GRACE_S)

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
        """Release a topic, or check again later when the node has renewed its request meanwhile."""
        max_s = Pressure.lasts_s + PRESSURE_GRACE_S
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
            self._state.broker.slow.pressure.release_elsewhere(node.send_queue, number)


def _resume(waiting: list[BrokerPeer]) -> Iterator[None]:
    for peer in waiting:
        peer.outbox.resume()
        yield


def paced(node: RemoteNode, steps: Iterator[None]) -> Iterator[None]:
    """Send a node a snapshot at the pace at which it processes that: all at once may exceed its queue."""
    for _ in steps:
        if node.gone:
            return
        if node.send_queue.queue:
            node.send_queue.flush()  # so that it counts in `is_behind`
        if node.send_queue.is_behind:
            node.send_queue.wait(lambda: run_in_background(paced(node, steps)))
            return
        yield
