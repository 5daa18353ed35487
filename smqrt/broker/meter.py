"""Limits of what one client publishes: the size of a message, and how much a second.

A hub without such limits has no meter, and its routes are what they are otherwise. With one, the outermost route of a
client is a `MeteredRoute`: it charges whole batches to token buckets, whatever the number of messages in them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Protocol

from smqrt.broker.outbox import Drop, Outbox, frame_ends
from smqrt.broker.state import BrokerClient, BrokerPeer, BrokerState
from smqrt.broker.topics import PublishLimits, Route
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import Bucket, Limit
from smqrt.wire import smq

LEAST_WAIT_S = 0.01
"""A client that is slowed down is looked at again no sooner: its messages go on in portions."""
MOST_WAIT_S = 1.0
"""And no later: the limits may have changed."""
PUBLISH_RATE = Limit("publish_rate", "limits.publish_rate", "a client publishes as many messages a second as it may")
PUBLISH_BYTES = Limit("publish_bytes", "limits.publish_bytes", "a client publishes as many bytes a second as it may")
MESSAGE_BYTES = Limit("message_bytes", "limits.message_bytes", "a message or a name is as long as it may be")


class MeteredClient(BrokerClient, Protocol):
    """Session of a client whose publishing is limited.

    Attributes:
        broker: the broker that it is connected to.
    """

    broker: BrokerState

    def route_kept(self, batch: bytes) -> bool:
        """Route messages that a meter held back; return true when the client has to wait for a hook."""
        ...


class Meter:
    """What one client has published, and what of it waits.

    Attributes:
        waits: batches are kept here until their time comes, and the client is not read until then.
        batch_messages: how many messages the next batch has; 0 when they are not counted yet.
    """

    __slots__ = ("_bytes", "_clock", "_kept", "_limits", "_longest", "_messages", "_session", "batch_messages", "waits")

    def __init__(self, session: MeteredClient, limits: PublishLimits) -> None:
        self._clock = session.broker.clock
        now_s = self._clock()
        self._session, self._limits = session, limits
        self._longest = limits.message_bytes + smq.PUBLISH_HEADER_BYTES
        self._messages = self._bucket(limits.per_s, now_s)
        self._bytes = self._bucket(limits.bytes_per_s, now_s)
        self._kept: deque[bytes] = deque()
        self.waits = False
        self.batch_messages = 0

    def _bucket(self, per_s: float | None, now_s: float) -> Bucket | None:
        return None if per_s is None else Bucket(per_s, max(per_s * self._limits.burst_s, 1.0), now_s)

    def deliver(self, route: Route, batch: bytes) -> bool | None:
        """Deliver what may pass of `batch`; true when the client has to wait."""
        size = len(batch)
        if size == batch[0] << 8 | batch[1]:
            messages, longest = 1, size
        else:
            messages, longest = self._measure(batch)
        if longest > self._longest:
            return refuse_message(self._session, self._limits)
        limit = self._over(messages, size)
        return route.deliver(batch) if limit is None else self._beyond(limit, route, batch)

    def deliver_view(self, route: Route, view: memoryview) -> bool | None:
        """As `deliver`, of a batch whose memory is reused after the call."""
        messages, longest = self._measure(view)
        if longest > self._longest:
            return refuse_message(self._session, self._limits)
        limit = self._over(messages, len(view))
        return route.deliver_view(view) if limit is None else self._beyond(limit, route, bytes(view))

    def _measure(self, batch: bytes | memoryview) -> tuple[int, int]:
        """How many messages a batch has, and how long the longest frame is; 0 for that when any length may pass."""
        counted, self.batch_messages = self.batch_messages, 0
        if counted and self._longest >= smq.MAX_FRAME_BYTES:
            return counted, 0
        return self._session.broker.measure(batch)

    def admits(self, frames: bytes) -> bool:
        """Charge what goes to many subscribers at once; false, and nothing is charged, when some of it may not pass."""
        messages, longest = self._session.broker.measure(frames)
        return longest <= self._longest and self._over(messages, len(frames)) is None

    def _over(self, messages: int, size: int) -> Limit | None:
        """Charge a whole batch; gives the limit that forbids it, and charges nothing, when there are no tokens for it."""
        counted, sized = self._messages, self._bytes
        if self.waits:
            return PUBLISH_RATE
        now_s = self._clock()
        if counted is not None and counted.fill(now_s) < messages:
            return PUBLISH_RATE
        if sized is not None:
            if sized.fill(now_s) < size:
                return PUBLISH_BYTES
            sized.tokens -= size
        if counted is not None:
            counted.tokens -= messages
        return None

    def _allowed(self, batch: bytes) -> tuple[int, int]:
        """How many messages of `batch` may pass now, and how many bytes they are; they are charged.

        A message that is larger than the bucket passes when the bucket is full, which owes the rest then.
        """
        now_s = self._clock()
        ends = frame_ends(batch, Outbox.frame_bytes)
        count = len(ends)
        if self._messages is not None:
            count = min(count, int(self._messages.fill(now_s) + 1e-6))
        if self._bytes is not None:
            tokens = self._bytes.fill(now_s)
            fitting = bisect_right(ends, tokens)
            if not fitting and self._bytes.wait_s(ends[0]) < 1e-6:
                fitting = 1
            count = min(count, fitting)
        size = ends[count - 1] if count > 0 else 0
        if self._messages is not None:
            self._messages.tokens -= max(count, 0)
        if self._bytes is not None:
            self._bytes.tokens -= size
        return max(count, 0), size

    def _beyond(self, limit: Limit, route: Route, batch: bytes) -> bool | None:
        session = self._session
        if self._limits.policy == "disconnect":
            limit.refused(shown(session))
            session.disconnect(CloseReason.PUBLISH_RATE, CloseReason.PUBLISH_RATE.value.encode())
            return False
        if self._limits.policy == "drop":
            return self._dropped(limit, route, batch)
        if not self.waits:
            limit.refused(shown(session), "it publishes as much as it may, and is not read for a while")
            self.waits = True
            self._later(batch)
        self._kept.append(batch)
        return True

    def _dropped(self, limit: Limit, route: Route, batch: bytes) -> bool | None:
        count, size = self._allowed(batch)
        dropped = len(frame_ends(batch, Outbox.frame_bytes)) - count
        self._session.broker.stats.drop(Drop.OVER_RATE, dropped)
        limit.refused(f"messages of {shown(self._session)}", times=dropped)
        return route.deliver(batch[:size]) if size else None

    def charge(self, size: int) -> None:
        """Count a control packet, which always passes, as a message of `size` bytes."""
        now_s = self._clock()
        for bucket, tokens in ((self._messages, 1), (self._bytes, size)):
            if bucket is not None:
                bucket.fill(now_s)
                bucket.tokens -= tokens

    # ---- waiting

    def _later(self, batch: bytes) -> None:
        first = batch[0] << 8 | batch[1]
        wait_s = LEAST_WAIT_S
        if self._messages is not None:
            wait_s = max(wait_s, self._messages.wait_s(1))
        if self._bytes is not None:
            wait_s = max(wait_s, self._bytes.wait_s(first))
        self._session.broker.call_later(min(wait_s, MOST_WAIT_S), self._go_on)

    def _go_on(self) -> None:
        """Deliver as much as may pass by now; the client is read again when nothing is left."""
        try:
            waits = self._deliver_kept()
        except BaseException:
            self.waits = False
            self._kept.clear()
            self._session.disconnect(CloseReason.HOOK_FAILED)
            raise
        if not self.waits and not waits:
            self._session.outbox.resume()

    def _deliver_kept(self) -> bool:
        waits: bool | None = False
        while self._kept:
            batch = self._kept.popleft()
            size = self._allowed(batch)[1]
            if size < len(batch):
                self._kept.appendleft(batch[size:])
            if size:
                waits = self._session.route_kept(batch[:size])
            if self._kept and size < len(batch):
                self._later(batch[size:])
                return True
        self.waits = False
        return bool(waits)

    def take_kept(self) -> bytes:
        """Take away the batches that wait for their time."""
        kept, self.waits = b"".join(self._kept), False
        self._kept.clear()
        return kept

    # ---- changes, and the end

    def change(self, limits: PublishLimits) -> None:
        """Other limits, from now on and for what waits."""
        now_s = self._clock()
        self._limits = limits
        self._longest = limits.message_bytes + smq.PUBLISH_HEADER_BYTES
        self._messages = self._bucket(limits.per_s, now_s)
        self._bytes = self._bucket(limits.bytes_per_s, now_s)

    def end(self) -> None:
        """The client is gone, for a reason of the server: count what waits."""
        kept, self._kept = self._kept, deque()
        for batch in kept:
            self._session.broker.stats.drop(Drop.OVER_RATE, self._session.broker.measure(batch)[0])


def refuse_message(session: MeteredClient, limits: PublishLimits) -> bool:
    """End the connection of a client that sent a message or name which is too large; gives false."""
    MESSAGE_BYTES.refused(f"a message of {shown(session)}", f"it has more than {limits.message_bytes} bytes")
    reason = CloseReason.MESSAGE_TOO_LARGE
    session.disconnect(reason, reason.value.encode(), f"more than {limits.message_bytes} bytes")
    return False


def shown(peer: BrokerPeer) -> str:
    """How the log calls a client."""
    return f"the client {ascii(peer.uid[:64])[1:]}"


class MeteredRoute:
    """A route that charges what goes to the meter of the client."""

    __slots__ = ("_meter", "_route")

    def __init__(self, meter: Meter, route: Route) -> None:
        self._meter, self._route = meter, route

    @property
    def sole_raw(self) -> Outbox | None:
        """See `Topic.sole_raw`; the connection asks the meter then (`admits`)."""
        return getattr(self._route, "sole_raw", None)

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver what may pass; true when the client has to wait."""
        return self._meter.deliver(self._route, batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._meter.deliver_view(self._route, view)
