"""The way of one hub, or of an application's channel, over a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from smqrt.broker.outbox import Outbox, dirty
from smqrt.cluster.node_send_queue import Way
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.cluster.link import Channel, Link

HANDED_AT_ONCE_BYTES = 256 << 10
"""So much of one turn is handed to a link at once."""
KEPT = 2
"""So many times its queue is kept for a node beside that, of those who wait and of the server, which does not."""


class ChannelWay(Way):
    """The way of one hub, or of an application's channel, to another node.

    Attributes:
        link: over which it leads.
    """

    __slots__ = ("_channel", "_put_bytes", "link")

    def __init__(self, link: Link, channel: Channel) -> None:
        super().__init__()
        self.link, self._channel = link, channel
        self._put_bytes = 0

    def put(self, run: bytes) -> None:
        """See `Outbox`; a turn of many messages is handed over in parts, so that the link's limits hold within it."""
        queue = self.queue
        if not queue:
            dirty.append(self)
        elif self._is_over() and run[2] == smq.Type.PUBLISH:
            self.missed = True
            self.link.leave_out(self._channel, [run])
            return
        queue.append(run)
        self._put_bytes += len(run)
        if self._put_bytes > HANDED_AT_ONCE_BYTES and not (self.holds or self.keeps):
            self.flush()

    def _is_over(self) -> bool:
        return (self.holds or self.keeps) and self._put_bytes > KEPT * self.link.node.queue_bytes

    def flush(self) -> None:
        """Hand the queue to the link, until that is full."""
        if self.holds or self.keeps:
            return
        self._put_bytes = 0
        if not self.queue:  # that of a lost node stays
            return
        runs, self.queue = self.queue, []
        if not self.link.transmit(self._channel, runs):
            self.missed = True
        if self.link.is_full:
            self.on_full()

    def go_on(self) -> None:
        """See `Way`; what waits is handed over in parts, until the link is full again."""
        self.holds = False
        if self.keeps:
            return
        waiting, portion, size, at = self.queue, 0, 0, 0
        if not waiting:
            return
        self.queue = []
        while at < len(waiting) and not self.holds:
            portion, size = at, 0
            while at < len(waiting) and size < HANDED_AT_ONCE_BYTES:
                size += len(waiting[at])
                at += 1
            self._put_bytes -= size
            if not self.link.transmit(self._channel, waiting[portion:at]):
                self.missed = True
            if self.link.is_full:
                self.on_full()
        for run in waiting[at:]:
            self.queue.append(run)  # that of a lost node counts it

    @property
    def knows_pressure(self) -> bool:
        """See `Way`."""
        return self.link.knows_pressure

    @property
    def node_id(self) -> bytes:
        """See `Way`."""
        return self.link.peer.id if self.link.peer is not None else b""

    @property
    def process(self) -> tuple[bytes, int] | None:
        """See `Way`."""
        siblings = self.link.siblings
        return None if siblings is None else (siblings.server, siblings.own)

    @property
    def place(self) -> tuple[str, int] | None:
        """See `Way`."""
        return self.link.place

    @property
    def has_left(self) -> bool:
        """See `Way`: it is being stopped, or only its hub has ended."""
        return self.link.has_left

    @property
    def knows_succession(self) -> bool:
        """See `Way`."""
        return self.link.knows_succession

    @property
    def tells_stamps(self) -> bool:
        """See `Way`."""
        return self.link.knows_stamps

    @property
    def epoch(self) -> int:
        """See `Way`."""
        return self.link.peer.epoch if self.link.peer is not None else 0

    @property
    def carrier(self) -> Outbox:
        """See `Outbox`."""
        return self.link.transport.outbox

    def resume(self) -> None:
        """See `Outbox`."""
        self.link.transport.outbox.resume()

    @property
    def is_behind(self) -> bool:
        """See `Way`."""
        return self.link.is_behind

    def wait(self, then: Callable[[], object]) -> None:
        """See `Way`."""
        self.link.wait(then)
