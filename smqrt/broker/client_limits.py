"""Permissions and publish limits of clients.

A permission is checked when a client subscribes, observes or creates, and when a route is resolved, never for each
message. A client without an identity has all permissions; most callers skip the check for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Protocol

from smqrt.auth.identity import SERVER, Action, Identity
from smqrt.broker.outbox import Drop, Outbox, frame_ends
from smqrt.broker.state import BrokerClient, BrokerPeer, BrokerState, describe_client
from smqrt.broker.topics import PublishLimits, Route, Topic
from smqrt.errors import CloseReason
from smqrt.settings.limits import Bucket, Limit
from smqrt.wire import smq
from smqrt.wire.smq import count_frames

EXPIRY_CHECKS_PER_STEP = 200
"""Clients whose login is checked for expiry before other work of the event loop runs."""


class Client(BrokerClient, Protocol):
    """Session of a client whose permissions are checked.

    Attributes:
        broker: the broker that it is connected to.
        topics: the topics that it subscribes to.
        observed: the topics that it observes.
    """

    broker: BrokerState

    @property
    def topics(self) -> Collection[Topic]: ...
    @property
    def observed(self) -> Collection[Topic] | None: ...

    def end_subscription(self, topic: Topic) -> None:
        """Unsubscribe the client and notify it."""

    def end_observation(self, topic: Topic) -> None:
        """Stop notifying the client of a topic's subscribers."""

    def recheck_filters(self) -> Iterator[None]:
        """End subscriptions to filters that are no longer permitted, in portions."""


def may_take_over(client: Client, old: BrokerPeer) -> bool:
    """Whether a client may replace the client with the same uid, and get its ETID.

    Another user must not: messages to that ETID are meant for the user of the old client.
    """
    return client.identity is None or old.identity is None or client.identity.user == old.identity.user


def may_subscribe(client: Client, name: bytes) -> bool:
    """Whether the client may subscribe to a topic; subscribing creates a new topic."""
    return _may(client, name, Action.READ) and _may_create_if_new(client, name)


def may_create(client: Client, name: bytes) -> bool:
    """Whether the client may get the id of a topic, which publishing and observing require."""
    return _may(client, name, Action.WRITE, Action.OBSERVE) and _may_create_if_new(client, name)


def may_observe(client: Client, topic: Topic) -> bool:
    """Whether the client may observe a topic, or the ETID of a client that it may send to."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.OBSERVE)


def may_publish(client: Client, topic: Topic) -> bool:
    """Whether the client may publish to a topic, or send to another client."""
    if topic.name is None:
        return _may(client, _receiver(client.broker, topic), Action.ONETOONE)
    return _may(client, topic.name, Action.WRITE)


def _may_create_if_new(client: Client, name: bytes) -> bool:
    return name in client.broker.topic_table.by_name or _may(client, name, Action.CREATE)


def _may(client: Client, name: bytes, *actions: Action) -> bool:
    return client.identity is None or client.identity.may(name, *actions)


def _receiver(broker: BrokerState, topic: Topic) -> bytes:
    """Return the name of an ETID in the access control list: the user of its client, or the server."""
    if topic is broker.server.topic:
        return SERVER
    owner: BrokerPeer | None = broker.sessions.get(topic.id)
    if owner is None and broker.cluster is not None:  # a client of another node
        owner = broker.cluster.phantom(topic.id)
    identity = owner.identity if owner is not None else None
    return (identity.shown if identity is not None else "").encode("utf-8", "surrogateescape")


class DeniedRoute:
    """Route to a destination that is denied to the publisher: counts the messages."""

    __slots__ = ("_broker",)

    def __init__(self, broker: BrokerState) -> None:
        self._broker = broker

    def deliver(self, batch: bytes) -> None:
        """Count the messages as dropped."""
        self._broker.stats.drop(Drop.DENIED, count_frames(batch))
        if type(batch) is not bytes:  # an MQTT client gets an answer for each message
            batch.dropped(Drop.DENIED)  # type: ignore[attr-defined]

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


def recheck_clients(clients: Collection[Client], revalidate: Callable[[Identity], str | None]) -> Iterator[None]:
    """Re-check all clients after a change of rules or users, in portions.

    Subscriptions and observations that are no longer permitted end; clients whose login is invalid are disconnected.

    Args:
        clients: some may disconnect meanwhile.
        revalidate: updates the groups of an identity; returns the reason if its login is no longer valid, or None.
    """
    for client in clients:
        if client.identity is None or client.closed:
            yield
            continue
        fault = revalidate(client.identity)
        if fault is not None:
            client.disconnect(CloseReason.LOGIN_ENDED, fault.encode())
            yield
            continue
        client.forget_routes()  # first: cached routes let the client publish without a check
        for topic in list(client.topics):
            if not _may(client, topic.name or b"", Action.READ):
                client.end_subscription(topic)
            yield
        for topic in list(client.observed or ()):
            if not client.closed and not may_observe(client, topic):
                client.end_observation(topic)
            yield
        yield from client.recheck_filters()
        yield


def disconnect_expired(clients: Collection[Client], now_s: float) -> Iterator[None]:
    """Disconnect the clients whose login has expired, in portions.

    Args:
        clients: some may disconnect meanwhile.
        now_s: the time, in seconds since 1970.
    """
    for count, client in enumerate(clients, 1):
        identity = client.identity
        if identity is not None and identity.expires_s is not None and identity.expires_s <= now_s:
            client.disconnect(CloseReason.LOGIN_ENDED, b"the login has expired")
        if not count % EXPIRY_CHECKS_PER_STEP:  # a step for each client would take most of the time
            yield


# ---- Publish limits: message size, messages and bytes per second
#
# Without such limits a client has no meter, and its routes do not change. With limits, the outermost route of a
# client is a `MeteredRoute`. It charges a whole batch to token buckets at once, so the cost per message is small.

MIN_WAIT_S = 0.01
"""Shortest pause of a client over its rate: shorter ones would cost a timer for each message."""
MAX_WAIT_S = 1.0
"""Longest pause before the buckets are checked again: the limits may have been raised meanwhile."""
FILL_S = 0.01
"""Maximum time between two fills of a bucket: its burst can be larger by the tokens of this time."""
ROUNDING_TOLERANCE = 1e-6
"""Tokens are floats: 0.9999999 counts as 1."""
PUBLISH_RATE = Limit("publish_rate", "limits.publish_rate", "the client's limit of messages per second is reached")
PUBLISH_BYTES = Limit(
    "publish_bytes", "limits.publish_bytes_per_s", "the client's limit of bytes per second is reached"
)
MESSAGE_BYTES = Limit("message_bytes", "limits.message_bytes", "the message or name is longer than permitted")


class MeteredClient(BrokerClient, Protocol):
    """Session of a client whose publishing is limited.

    Attributes:
        broker: the broker that it is connected to.
    """

    broker: BrokerState

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """Close the connection; `detail` describes the reason to the operator."""

    def route_held(self, batch: bytes) -> bool:
        """Route messages that a meter held back; return true when the client has to wait for a hook."""


class Meter:
    """Token buckets of one client, and the batches that wait for tokens.

    Args:
        session: the client's session.
        limits: the client's limits.

    Attributes:
        waits: whether batches are held back; the connection is not read until they are delivered.
        batch_messages: number of messages in the next batch; 0 when they are not counted yet.
    """

    __slots__ = (
        "_bytes",
        "_clock",
        "_fill_at_s",
        "_held",
        "_limits",
        "_max_frame_bytes",
        "_limits_size",
        "_messages",
        "_session",
        "batch_messages",
        "waits",
    )

    def __init__(self, session: MeteredClient, limits: PublishLimits) -> None:
        self._clock = session.broker.clock
        self._session = session
        self.apply_limits(limits)
        self._held: deque[bytes] = deque()
        self.waits = False
        self.batch_messages = 0

    def apply_limits(self, limits: PublishLimits) -> None:
        """Apply `limits` to all later deliveries, including those of waiting batches."""

        def bucket(per_s: float | None) -> Bucket | None:
            return None if per_s is None else Bucket(per_s, max(per_s * limits.burst_s, 1.0), self._clock())

        self._limits = limits
        self._max_frame_bytes = limits.message_bytes + smq.PUBLISH_HEADER_BYTES
        self._limits_size = self._max_frame_bytes < smq.MAX_FRAME_BYTES
        self._fill_at_s = 0.0
        self._messages = bucket(limits.per_s)
        self._bytes = bucket(limits.bytes_per_s)

    def deliver(self, route: Route, batch: bytes) -> bool | None:
        """Deliver a batch, or the part that the policy permits; return true when the client has to wait."""
        size = len(batch)
        if size == batch[0] << 8 | batch[1]:  # one frame: its length is the whole batch
            messages, longest = 1, size
        elif self.batch_messages and not self._limits_size:  # any length is permitted
            messages, longest = self.batch_messages, 0
        else:
            messages, longest = self._session.broker.measure(batch)
        self.batch_messages = 0
        if longest > self._max_frame_bytes:
            return refuse_message(self._session, self._limits)
        limit = self._charge_batch(messages, size)
        return route.deliver(batch) if limit is None else self._apply_policy(limit, route, batch)

    def deliver_view(self, route: Route, view: memoryview) -> bool | None:
        """Deliver a batch whose memory is reused after the call, see `deliver`."""
        messages, self.batch_messages = self.batch_messages, 0
        if not messages or self._limits_size:
            messages, longest = self._session.broker.measure(view)
            if longest > self._max_frame_bytes:
                return refuse_message(self._session, self._limits)
        limit = self._charge_batch(messages, len(view))
        return route.deliver_view(view) if limit is None else self._apply_policy(limit, route, bytes(view))

    def admits(self, frames: bytes) -> bool:
        """Charge frames of several topics together; return false, and charge nothing, when a limit is exceeded."""
        messages, longest = self._session.broker.measure(frames)
        return longest <= self._max_frame_bytes and self._charge_batch(messages, len(frames)) is None

    def _charge_batch(self, messages: int, size: int) -> Limit | None:
        """Charge a whole batch; without enough tokens charge nothing and return the limit that is reached."""
        counted, sized = self._messages, self._bytes
        if self.waits:  # even with enough tokens, to keep the order: earlier batches are held back
            return PUBLISH_RATE
        now_s = self._clock()
        if now_s >= self._fill_at_s:
            self._fill_at_s = now_s + FILL_S
            self._fill(now_s)
        # Between two fills, a bucket is filled only if it has too few tokens: each call costs as much as a message.
        if counted is not None and counted.tokens < messages and counted.fill(now_s) < messages:
            return PUBLISH_RATE
        if sized is not None:
            if sized.tokens < size and sized.fill(now_s) < size:
                return PUBLISH_BYTES
            sized.tokens -= size
        if counted is not None:
            counted.tokens -= messages
        return None

    def _fill(self, now_s: float) -> None:
        for bucket in (self._messages, self._bytes):
            if bucket is not None:
                bucket.fill(now_s)

    def _charge_permitted(self, batch: bytes) -> tuple[int, int]:
        """Charge the leading messages of `batch` that the tokens permit; return their number and size.

        A message larger than the bucket is permitted when the bucket is full, which then goes below zero.
        """
        now_s = self._clock()
        ends = frame_ends(batch, Outbox.frame_bytes)
        count = len(ends)
        if self._messages is not None:
            count = min(count, int(self._messages.fill(now_s) + ROUNDING_TOLERANCE))
        if self._bytes is not None:
            tokens = self._bytes.fill(now_s)
            fitting = bisect_right(ends, tokens)
            # `wait_s` of a message larger than the bucket is 0 once the bucket is full.
            if not fitting and self._bytes.wait_s(ends[0]) < ROUNDING_TOLERANCE:
                fitting = 1
            count = min(count, fitting)
        size = ends[count - 1] if count > 0 else 0
        if self._messages is not None:
            self._messages.tokens -= max(count, 0)
        if self._bytes is not None:
            self._bytes.tokens -= size
        return max(count, 0), size

    def _apply_policy(self, limit: Limit, route: Route, batch: bytes) -> bool | None:
        session = self._session
        if self._limits.policy == "disconnect":
            limit.refused(describe_client(session))
            session.disconnect(CloseReason.PUBLISH_RATE, CloseReason.PUBLISH_RATE.value.encode())
            return False
        if self._limits.policy == "drop":
            count, size = self._charge_permitted(batch)
            dropped = len(frame_ends(batch, Outbox.frame_bytes)) - count
            session.broker.stats.drop(Drop.OVER_RATE, dropped)
            limit.refused(f"messages of {describe_client(session)}", times=dropped)
            return route.deliver(part_of(batch, 0, size)) if size else None
        if not self.waits:
            limit.refused(describe_client(session), f"{limit.rule}, reading from it pauses")
            self.waits = True
            self._deliver_later(batch)
        self._held.append(batch)
        return True

    def charge(self, size: int) -> None:
        """Charge a control packet of `size` bytes as a message. It always passes, so the buckets may go below zero."""
        now_s = self._clock()
        for bucket, tokens in ((self._messages, 1), (self._bytes, size)):
            if bucket is not None:
                bucket.fill(now_s)
                bucket.tokens -= tokens

    # ---- waiting

    def _deliver_later(self, batch: bytes) -> None:
        """Call `_continue` when there are tokens for the first message of `batch`."""
        first_frame_bytes = batch[0] << 8 | batch[1]
        wait_s = MIN_WAIT_S
        if self._messages is not None:
            wait_s = max(wait_s, self._messages.wait_s(1))
        if self._bytes is not None:
            wait_s = max(wait_s, self._bytes.wait_s(first_frame_bytes))
        self._session.broker.call_later(min(wait_s, MAX_WAIT_S), self._continue)

    def _continue(self) -> None:
        """Deliver the messages that the tokens permit; resume reading when none is left."""
        waits = False
        try:
            while self._held:
                batch = self._held.popleft()
                size = self._charge_permitted(batch)[1]
                if size < len(batch):  # before routing: if a hook disconnects the client, `end` counts the rest
                    self._held.appendleft(part_of(batch, size, len(batch)))
                if size:
                    waits = self._session.route_held(part_of(batch, 0, size))
                if self._held and size < len(batch):
                    self._deliver_later(batch[size:])
                    return
            self.waits = False
        except BaseException:  # without this, the client would wait forever
            self.waits = False
            self._held.clear()
            self._session.disconnect(CloseReason.HOOK_FAILED)
            raise
        if not waits:
            self._session.outbox.resume()

    def take_held(self) -> bytes:
        """Remove and return the frames that are held back: the session is migrated."""
        held, self.waits = b"".join(self._held), False
        self._held.clear()
        return held

    def route_held(self) -> None:
        """Route what is held back at once, without regard to the limits: the session is migrated."""
        while self._held:
            self._session.route_held(self._held.popleft())
        self.waits = False

    def end(self) -> None:
        """Count the batches that are held back as dropped: the session is closed."""
        held, self._held = self._held, deque()
        for batch in held:
            self._session.broker.stats.drop(Drop.OVER_RATE, self._session.broker.measure(batch)[0])


def part_of(batch: bytes, start: int, end: int) -> bytes:
    """Return a part of a batch; that of an MQTT client keeps its attributes."""
    part = batch[start:end]
    return part if type(batch) is bytes else batch.like(part)  # type: ignore[attr-defined]  # see `broker.mqtt.messages`


def refuse_message(session: MeteredClient, limits: PublishLimits) -> bool:
    """Disconnect a client that sent a message or a name over the size limit; return false."""
    MESSAGE_BYTES.refused(f"a message of {describe_client(session)}", f"it has more than {limits.message_bytes} bytes")
    reason = CloseReason.MESSAGE_TOO_LARGE
    session.disconnect(reason, reason.value.encode(), f"more than {limits.message_bytes} bytes")
    return False


class MeteredRoute:
    """Route that charges the client's meter before it delivers messages."""

    __slots__ = ("_route", "deliver", "deliver_view")

    def __init__(self, meter: Meter, route: Route) -> None:
        self._route = route
        # Not methods: that would be one more call in Python for each batch.
        self.deliver: Callable[[bytes], bool | None] = partial(meter.deliver, route)
        self.deliver_view: Callable[[memoryview], bool | None] = partial(meter.deliver_view, route)

    @property
    def sole_raw(self) -> Outbox | None:
        """The only subscriber, see `Topic.sole_raw`; the connection calls `Meter.admits` before it sends directly."""
        return getattr(self._route, "sole_raw", None)
