"""The way from a hub to another node, and where messages go that would have taken a lost one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.topics import Route
from smqrt.wire import smq
from smqrt.wire.cluster import rewritten


class Way(Outbox):
    """The outbox of another node; each engine has its own kind. It keeps the order of what is put.

    It is never full for a hub: an engine whose queue is over its limit loses the node.
    """

    __slots__ = ()

    @property
    def tells_stamps(self) -> bool:
        """Whether both nodes know `LinkType.VALUE_AT` and `LinkType.CLOCK`."""
        return True

    @property
    def is_behind(self) -> bool:
        """Whether what can wait should; see `wait`."""
        return False

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the node has worked off more; not when it is lost before."""

    def say(self, packets: Iterable[bytes]) -> None:
        """Send control packets."""
        for packet in packets:
            self.put(smq.frame(packet))

    def end(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        """The node is lost: what waits, and what comes from routes that do not know it yet, is counted."""
        waiting, self.queue = self.queue, Lost(reason, count)
        for run in waiting:
            self.queue.append(run)


class Lost(list[bytes]):
    """The queue of a lost node: it keeps nothing and counts the messages that come."""

    def __init__(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        self._reason, self._count = reason, count

    def append(self, run: bytes) -> None:
        """Count the messages of `run`."""
        if messages := count_messages(run):
            self._count(self._reason, messages)


def count_messages(frames: bytes) -> int:
    """How many Publish frames there are among whole frames."""
    start, end, count = 0, len(frames), 0
    while start < end:
        count += frames[start + 2] == smq.Type.PUBLISH
        start += frames[start] << 8 | frames[start + 1]
    return count


class ForwardedRoute:
    """A route to subscribers here, if there are any, and to other nodes.

    Args:
        route: to those here.
        puts: takes a run, one for each node.
    """

    __slots__ = ("_puts", "_route")

    def __init__(self, route: Route | None, puts: Iterable[Callable[[bytes], object]]) -> None:
        self._route, self._puts = route, tuple(puts)

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run here, then forward it."""
        waits = self._route.deliver(run) if self._route else None
        for put in self._puts:
            put(run)
        return waits

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`; the links keep what they send until it has arrived, so that one copy is made."""
        run = bytes(view)
        waits = self._route.deliver_view(view) if self._route else None
        for put in self._puts:
            put(run)
        return waits


class RenumberedRoute:
    """A route whose messages get another destination.

    Args:
        route: where they go.
        tid: their new destination.
    """

    __slots__ = ("_route", "_tid")

    def __init__(self, route: Route, tid: int) -> None:
        self._route, self._tid = route, tid

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run under its other number."""
        return self._route.deliver(rewritten(run, self._tid, int.from_bytes(run[7:11], "big")))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
