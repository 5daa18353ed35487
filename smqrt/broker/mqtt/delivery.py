"""The batches that wait for delivery to the MQTT clients of a hub."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from smqrt.broker.mqtt.messages import Mark, MqttBatch
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.state import BrokerState
from smqrt.wire import smq

DELIVERY_S = 0.004
"""Time for deliveries at once; the rest follows in the next turns."""
MAX_UNSENT_BYTES, BATCH_BYTES = 64 << 20, 200
"""Memory of the batches that wait for delivery, when publishers are faster; further ones are lost and counted."""


class DeliveryQueue(Outbox):
    """An outbox that passes its batches on in portions, in order.

    Args:
        broker: the hub.

    Attributes:
        broker: see above.
    """

    __slots__ = ("_is_delivering", "_steps", "_unsent", "_unsent_bytes", "broker")

    def __init__(self, broker: BrokerState) -> None:
        super().__init__()
        self.budget_bytes = 1 << 62  # each connection has a budget of its own
        self.broker = broker
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._steps: Iterator[None] = iter(())
        self._is_delivering = False

    def deliver_batch(self, batch: bytes) -> Iterator[None]:
        """Deliver a batch, in portions."""
        raise NotImplementedError

    def deliver_at_once(self, batch: bytes) -> bool:
        """Deliver a batch, if that is little work; return whether it is done."""
        raise NotImplementedError

    @property
    def is_delivering(self) -> bool:
        """Whether batches wait for delivery, or one is delivered in part."""
        return self._is_delivering or bool(self.queue or self._unsent)

    @property
    def is_behind(self) -> bool:
        """Whether batches of former turns wait for delivery."""
        return self._is_delivering

    def flush(self) -> None:
        """Pass the batches of this turn on: for `DELIVERY_S` now, then in the next turns."""
        was_delivering = self._is_delivering
        if not was_delivering and len(self.queue) == 1:
            (batch,), self.queue = self.queue, []
            if self.deliver_at_once(batch):
                return
            self.queue = [batch]
        self._accept_queue()
        if not was_delivering:
            clock, steps = self.broker.clock, self._steps
            until_s = clock() + DELIVERY_S
            while self._is_delivering and clock() < until_s:
                deque(islice(steps, 8), maxlen=0)
            if self._is_delivering:
                run_in_background(steps)

    def _accept_queue(self) -> None:
        batches, self.queue = self.queue, []
        for batch in batches:
            if batch and self._unsent_bytes > MAX_UNSENT_BYTES:  # marks are empty
                self.broker.stats.drop(Drop.OVER_GLOBAL_BUDGET, smq.count_frames(batch))
            else:
                self._unsent.append(batch)
                self._unsent_bytes += _memory_of(batch)
        if not self._is_delivering:
            self._is_delivering = True
            self._steps = self._deliver_all()

    def deliver_published(self) -> Iterator[None]:
        """Deliver what was published so far, in portions: subscriptions are about to change.

        Without this, UNSUBSCRIBE would overtake messages of the same turn.
        """
        if not self.queue and not self._is_delivering:
            return
        was_delivering = self._is_delivering
        self._accept_queue()
        mark = Mark()
        self._unsent.append(mark)
        self._unsent_bytes += BATCH_BYTES
        while not mark.is_reached and self._is_delivering:
            next(self._steps, None)
            yield
        if self._is_delivering and not was_delivering:  # batches of other clients have followed
            run_in_background(self._steps)

    def deliver_now(self) -> None:
        """Deliver all batches at once: the clients are frozen, and what they have sent must be in their sessions."""
        self.flush()
        if self._is_delivering:
            deque(self._steps, maxlen=0)

    def _deliver_all(self) -> Iterator[None]:
        try:
            while self._unsent:
                batch = self._unsent.popleft()
                self._unsent_bytes -= _memory_of(batch)
                if isinstance(batch, Mark):
                    batch.reached()
                    yield
                else:
                    yield from self.deliver_batch(batch)
        finally:  # also after an error: the next batch starts again
            self._is_delivering = False


def _memory_of(batch: bytes) -> int:
    """Return the memory of a batch, approximately; the frame of a large message does not have the payload."""
    size = len(batch) + BATCH_BYTES
    if isinstance(batch, MqttBatch):
        size += len(batch.properties)
        if batch.large is not None:
            size += len(batch.large)
    return size
