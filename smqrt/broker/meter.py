"""Limits of what one client publishes: the size of a message, and how much a second.

A hub without such limits has no meter, and its routes are what they are otherwise. With one, the outermost route of a
client is a `MeteredRoute`: it charges whole runs to token buckets, whatever the number of messages in them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smqrt.broker.outbox import Drop, Outbox, frame_ends
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import Bucket, Limit
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.session import Session
    from smqrt.broker.topics import Route

LEAST_WAIT_S = 0.01
"""A client that is slowed down is looked at again no sooner: its messages go on in portions."""
MOST_WAIT_S = 1.0
"""And no later: the limits may have changed."""
PUBLISH_RATE = Limit("publish_rate", "limits.publish_rate", "a client publishes as many messages a second as it may")
PUBLISH_BYTES = Limit(
    "publish_bytes", "limits.publish_bytes_per_s", "a client publishes as many bytes a second as it may"
)
MESSAGE_BYTES = Limit("message_bytes", "limits.message_bytes", "a message or a name is as long as it may be")


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """What each client of a hub may publish.

    Attributes:
        per_s, bytes_per_s: messages and bytes a second; None for any number.
        burst_s: so many seconds' worth may come at once.
        policy: what happens beyond: "wait", "drop" or "disconnect".
        message_bytes: of a payload.
    """

    per_s: float | None = None
    bytes_per_s: float | None = None
    burst_s: float = 1.0
    policy: str = "wait"
    message_bytes: int = smq.MAX_PAYLOAD_BYTES

    @property
    def is_any(self) -> bool:
        """Whether there is a limit at all beside the protocol's own."""
        return self.has_rate or self.message_bytes < smq.MAX_PAYLOAD_BYTES

    @property
    def has_rate(self) -> bool:
        """Whether there is a limit of a rate."""
        return self.per_s is not None or self.bytes_per_s is not None


class Meter:
    """What one client has published, and what of it waits.

    Attributes:
        waits: runs are kept here until their time comes, and the client is not read until then.
        told: how many messages the next run has, from who has counted them already; 0 when nobody has.
    """

    __slots__ = ("_bytes", "_clock", "_kept", "_limits", "_longest", "_messages", "_session", "told", "waits")

    def __init__(self, session: Session, limits: PublishLimits) -> None:
        self._clock = session.broker.clock
        now_s = self._clock()
        self._session, self._limits = session, limits
        self._longest = limits.message_bytes + smq.PUBLISH_HEADER_BYTES
        self._messages = self._bucket(limits.per_s, now_s)
        self._bytes = self._bucket(limits.bytes_per_s, now_s)
        self._kept: deque[bytes] = deque()
        self.waits = False
        self.told = 0

    def _bucket(self, per_s: float | None, now_s: float) -> Bucket | None:
        return None if per_s is None else Bucket(per_s, max(per_s * self._limits.burst_s, 1.0), now_s)

    def deliver(self, route: Route, run: bytes) -> bool | None:
        """Deliver what may pass of `run`; true when the client has to wait."""
        size = len(run)
        if size == run[0] << 8 | run[1]:
            messages, longest = 1, size
        else:
            messages, longest = self._measure(run)
        if longest > self._longest:
            return refuse_message(self._session, self._limits)
        limit = self._over(messages, size)
        return route.deliver(run) if limit is None else self._beyond(limit, route, run)

    def deliver_view(self, route: Route, view: memoryview) -> bool | None:
        """As `deliver`, of a run whose memory is reused after the call."""
        messages, longest = self._measure(view)
        if longest > self._longest:
            return refuse_message(self._session, self._limits)
        limit = self._over(messages, len(view))
        return route.deliver_view(view) if limit is None else self._beyond(limit, route, bytes(view))

    def _measure(self, run: bytes | memoryview) -> tuple[int, int]:
        """How many messages a run has, and how long the longest frame is; 0 for that when any length may pass."""
        told, self.told = self.told, 0
        if told and self._longest >= smq.MAX_FRAME_BYTES:
            return told, 0
        return self._session.broker.measure(run)

    def admits(self, frames: bytes) -> bool:
        """Charge what goes to many subscribers at once; false, and nothing is charged, when some of it may not pass."""
        messages, longest = self._session.broker.measure(frames)
        return longest <= self._longest and self._over(messages, len(frames)) is None

    def _over(self, messages: int, size: int) -> Limit | None:
        """Charge a whole run; gives the limit that forbids it, and charges nothing, when there are no tokens for it."""
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

    def _allowed(self, run: bytes) -> tuple[int, int]:
        """How many messages of `run` may pass now, and how many bytes they are; they are charged.

        A message that is larger than the bucket passes when the bucket is full, which owes the rest then.
        """
        now_s = self._clock()
        ends = frame_ends(run, Outbox.frame_bytes)
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

    def _beyond(self, limit: Limit, route: Route, run: bytes) -> bool | None:
        session = self._session
        if self._limits.policy == "disconnect":
            limit.refused(shown(session))
            session.disconnect(CloseReason.PUBLISH_RATE, CloseReason.PUBLISH_RATE.value.encode())
            return False
        if self._limits.policy == "drop":
            return self._dropped(limit, route, run)
        if not self.waits:
            limit.refused(shown(session), "it publishes as much as it may, and is not read for a while")
            self.waits = True
            self._later(run)
        self._kept.append(run)
        return True

    def _dropped(self, limit: Limit, route: Route, run: bytes) -> bool | None:
        count, size = self._allowed(run)
        dropped = len(frame_ends(run, Outbox.frame_bytes)) - count
        self._session.broker.stats.drop(Drop.OVER_RATE, dropped)
        limit.refused(f"messages of {shown(self._session)}", times=dropped)
        return route.deliver(run[:size]) if size else None

    def charge(self, size: int) -> None:
        """Count a control packet, which always passes, as a message of `size` bytes."""
        now_s = self._clock()
        for bucket, tokens in ((self._messages, 1), (self._bytes, size)):
            if bucket is not None:
                bucket.fill(now_s)
                bucket.tokens -= tokens

    # ---- waiting

    def _later(self, run: bytes) -> None:
        first = run[0] << 8 | run[1]
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
            run = self._kept.popleft()
            size = self._allowed(run)[1]
            if size < len(run):
                self._kept.appendleft(run[size:])
            if size:
                waits = self._session.route_kept(run[:size])
            if self._kept and size < len(run):
                self._later(run[size:])
                return True
        self.waits = False
        return bool(waits)

    def take_kept(self) -> bytes:
        """Take away the runs that wait for their time."""
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
        for run in kept:
            self._session.broker.stats.drop(Drop.OVER_RATE, self._session.broker.measure(run)[0])


def refuse_message(session: Session, limits: PublishLimits) -> bool:
    """End the connection of a client that sent a message or name which is too large; gives false."""
    MESSAGE_BYTES.refused(f"a message of {shown(session)}", f"it has more than {limits.message_bytes} bytes")
    reason = CloseReason.MESSAGE_TOO_LARGE
    session.disconnect(reason, reason.value.encode(), f"more than {limits.message_bytes} bytes")
    return False


def shown(peer: Session) -> str:
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

    def deliver(self, run: bytes) -> bool | None:
        """Deliver what may pass; true when the client has to wait."""
        return self._meter.deliver(self._route, run)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._meter.deliver_view(self._route, view)
