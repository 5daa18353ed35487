"""What waits to be sent: messages and subscriptions in the order in which the application handed them in, bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import gevent
from gevent.event import Event

from smqrt.errors import QueueFullError
from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.options import MqttOptions
from smqrt.mqtt.subscriptions import Request


class SendQueue:
    """The queue of one client, over all its connections.

    Args:
        options: `queuesize`, `queuebytes`, `queuefull`, and `timeout` for who waits.
        flying_bytes: tells how many bytes are sent and not acknowledged; they count as well.

    Attributes:
        items: what waits, the next one first.
        dropped: how many messages were given up for newer ones.
        refused: how many times there was no room.
    """

    def __init__(self, options: MqttOptions, flying_bytes: Callable[[], int]) -> None:
        self._options, self._flying_bytes = options, flying_bytes
        self.items: deque[Delivery | Request] = deque()
        self.dropped = self.refused = 0
        self._size_bytes = 0
        self._waiters, self._is_closed = 0, False
        self._room = Event()

    def __len__(self) -> int:
        return len(self.items)

    def make_room(self, size_bytes: int) -> None:
        """See to it that there is room for a message; may wait.

        Args:
            size_bytes: of the message; 0 for a subscription.

        Raises:
            QueueFullError: there is none, and the queue is not closed.
        """
        if self._has_room(size_bytes):
            return
        if self._options.queuefull == "drop":
            self._drop(size_bytes)
        elif self._options.queuefull == "wait" and gevent.getcurrent() is not gevent.get_hub():
            self._wait(size_bytes)
        if not self._has_room(size_bytes) and not self._is_closed:
            self.refused += 1
            raise QueueFullError(
                f"{len(self.items)} messages with {self._size_bytes} bytes wait for the broker, and "
                f"{self._flying_bytes()} bytes for its acknowledgement: no room within "
                f"queuesize={self._options.queuesize} and queuebytes={self._options.queuebytes}; "
                "publish more slowly, or choose larger ones"
            )

    def _has_room(self, size_bytes: int) -> bool:
        options, held_bytes = self._options, self._size_bytes + self._flying_bytes()
        return len(self.items) < options.queuesize and (not held_bytes or held_bytes + size_bytes <= options.queuebytes)

    def _drop(self, size_bytes: int) -> None:
        while not self._has_room(size_bytes):
            oldest = next((item for item in self.items if isinstance(item, Delivery)), None)
            if oldest is None:
                return
            self.items.remove(oldest)
            self._size_bytes -= oldest.size_bytes
            self.dropped += 1
            oldest.finish("dropped")

    def _wait(self, size_bytes: int) -> None:
        self._waiters += 1
        try:
            with gevent.Timeout(self._options.timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
                while not self._has_room(size_bytes) and not self._is_closed:
                    self._room.clear()
                    self._room.wait()
        finally:
            self._waiters -= 1

    def tell_waiters(self) -> None:
        """There may be room now."""
        if self._waiters:
            self._room.set()

    def close(self) -> None:
        """Nobody shall wait any more: nothing more is taken in."""
        self._is_closed = True
        self.tell_waiters()

    def put(self, item: Delivery | Request) -> None:
        """Add what there is room for."""
        self.items.append(item)
        if isinstance(item, Delivery):
            self._size_bytes += item.size_bytes

    def put_back(self, requests: list[Request]) -> None:
        """Put subscriptions before all that waits."""
        self.items.extendleft(reversed(requests))

    def take(self) -> Delivery | Request:
        """Take the next one."""
        item = self.items.popleft()
        if isinstance(item, Delivery):
            self._size_bytes -= item.size_bytes
        return item

    def give_up(self) -> int:
        """Fail all that waits with "closed"; returns how many messages and subscriptions that were."""
        lost = len(self.items)
        while self.items:
            item = self.take()
            if isinstance(item, Delivery):
                item.finish("closed")
        return lost
