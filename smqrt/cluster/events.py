"""Node events for a hub's application: `onnode(node, event, why)`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import run_in_background
from smqrt.cluster.remote_node import RemoteNode
from smqrt.settings.limit_register import LineLimit

log = logging.getLogger("smqrt")

MAX_WAITING = 1000
"""Events that wait for the application; further ones are dropped, with a log line."""
MAX_LOST = 1024
"""Lost nodes that are remembered, so that their return is the event `back`."""


class NodeEvents:
    """The events of one hub, in order: the next one waits while `onnode` is running.

    Attributes:
        is_off: whether this hub itself is leaving the cluster; then there are no events.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self.is_off = broker, False
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._is_running = False
        self._known: set[RemoteNode] = set()
        """Nodes whose arrival was an event."""
        self._lost: dict[object, None] = {}
        """Ids, processes and places of lost nodes, the oldest first."""
        self._complaints = LineLimit()

    def synced(self, node: RemoteNode) -> None:
        """Report `joined` or `back` for a node that has sent its snapshot."""
        if node in self._known:
            return
        self._known.add(node)
        was_lost = [one for one in _identities(node) if one in self._lost]
        for one in was_lost:
            del self._lost[one]
        self._add(node.number, "back" if was_lost else "joined", "")

    def gone(self, node: RemoteNode, why: str) -> None:
        """Report `left` or `lost`."""
        if node not in self._known:
            return
        self._known.discard(node)
        has_left = node.send_queue.has_left
        if not has_left:
            self._lost.update((one, None) for one in _identities(node) if one)
            while len(self._lost) > 3 * MAX_LOST:  # up to three identities a node
                del self._lost[next(iter(self._lost))]
        self._add(node.number, "left" if has_left else "lost", why)

    def _add(self, number: int, event: str, why: str) -> None:
        if self._broker.hooks.onnode is None or self.is_off:
            return
        if len(self._waiting) >= MAX_WAITING:
            if (suffix := self._complaints.others()) is not None:
                log.warning("onnode is too slow: dropped the event that node %d %s%s", number, event, suffix)
            return
        self._waiting.append((number, event, why))
        if not self._is_running:
            self._is_running = True
            run_in_background(self._run())

    def _run(self) -> Iterator[None]:
        while self._waiting and not self._broker.closed:
            event, hook = self._waiting.popleft(), self._broker.hooks.onnode
            try:
                answer = hook(*event) if hook is not None else None
            except Exception:
                log.exception("error in onnode")
                answer = None
            if isinstance(answer, Deferred) and not answer.done:
                answer.then(lambda value, error: run_in_background(self._run()))
                return
            yield
        self._is_running = False


def _identities(node: RemoteNode) -> tuple[object, object, object]:
    return node.send_queue.node_id, node.send_queue.process, node.send_queue.place
