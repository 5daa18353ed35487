"""Events of other nodes for a hub's application: `onnode(node, event, why)`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import run_in_background
from smqrt.settings.limit_register import LineLimit

if TYPE_CHECKING:
    from smqrt.cluster.remote_node import RemoteNode

log = logging.getLogger("smqrt")

MAX_WAITING = 1000
"""Events that wait for the application; what comes beyond is not told."""
MAX_LOST = 1024
"""Of so many nodes it is known that they were lost, to say so when they are back."""


class NodeEvents:
    """The events of one hub, one after the other: a hook that waits has the others wait.

    Attributes:
        is_off: whether the hub itself leaves the others: nobody is told of that.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self.is_off = broker, False
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._is_telling = False
        self._known: set[RemoteNode] = set()
        """Those of which it was told that they are there."""
        self._lost: dict[object, None] = {}
        self._complaints = LineLimit()

    def synced(self, node: RemoteNode) -> None:
        """A node has said all that it has."""
        if node in self._known:
            return
        self._known.add(node)
        was_lost = [one for one in (node.way.node_id, node.way.process, node.way.place) if one in self._lost]
        for one in was_lost:
            del self._lost[one]
        self._add(node.number, "back" if was_lost else "joined", "")

    def gone(self, node: RemoteNode, why: str) -> None:
        """A node is lost, or has left."""
        if node not in self._known:
            return
        self._known.discard(node)
        has_left = node.way.has_left
        if not has_left:
            self._lost.update((one, None) for one in (node.way.node_id, node.way.process, node.way.place) if one)
            while len(self._lost) > 3 * MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self._add(node.number, "left" if has_left else "lost", why)

    def _add(self, number: int, event: str, why: str) -> None:
        if self._broker.hooks.onnode is None or self.is_off:
            return
        if len(self._waiting) >= MAX_WAITING:
            if (others := self._complaints.others()) is not None:
                log.warning("onnode is not told that node %d %s: it has not returned for long%s", number, event, others)
            return
        self._waiting.append((number, event, why))
        if not self._is_telling:
            self._is_telling = True
            run_in_background(self._tell())

    def _tell(self) -> Iterator[None]:
        while self._waiting and not self._broker.closed:
            event, hook = self._waiting.popleft(), self._broker.hooks.onnode
            try:
                answer = hook(*event) if hook is not None else None
            except Exception:
                log.exception("error in onnode")
                answer = None
            if isinstance(answer, Deferred) and not answer.done:
                answer.then(lambda value, error: run_in_background(self._tell()))
                return
            yield
        self._is_telling = False
