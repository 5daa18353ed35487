"""NATS client: publishes and subscribes over a connection that it makes again when it is lost."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from time import monotonic
from typing import Self

import gevent
from gevent import Timeout, get_hub
from gevent.event import AsyncResult, Event
from greenlet import getcurrent

from smqrt.cluster.nats.connection import NatsConnection, NatsOutbox, RefusedError, greet, refusal
from smqrt.cluster.nats.options import LAME_DUCK_S, NatsAddress, NatsOptions, ServerPool, parse_servers
from smqrt.errors import ClosedError, NatsError, NoAnswer, StreamError
from smqrt.loop.scheduling import Turn
from smqrt.settings.limits import LineLimit
from smqrt.settings.option_types import make
from smqrt.smq import data_path
from smqrt.transport.tls_contexts import ClientTls
from smqrt.wire import nats
from smqrt.wire.nats import LARGEST_PAYLOAD_BYTES, ServerInfo

log = logging.getLogger("smqrt.nats")

STEADY_S = 5.0
"""A connection of at least this duration resets the retry delay of its server."""
LASTED_S = 0.3
"""A connection of at least this duration is made again at once. After a shorter one, the retry delay grows."""
LEAVE_S = 2.0
"""The maximum time to send queued data to a server that will shut down."""
_STAYS_OPEN = ("permissions violation", "invalid subject")
"""The beginnings of -ERR texts, in lower case, after which the server keeps the connection."""

OnMessage = Callable[[bytes, bytes, bytes, bytes], object]
"""`f(subject, payload, reply, headers)`, called from the event loop: it must not block. `reply` and `headers` are empty
when the message has none; see `smqrt.wire.nats.parse_headers`."""


class NatsState(Enum):
    """The states of a client."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    CLOSED = "closed"


OnState = Callable[[NatsState, str], object]
"""`f(state, reason)`, called when the state changes, or when the reason for a missing connection changes. It must not
block, since it may be called from the event loop."""


@dataclass
class NatsCounters:
    """The counters of a client.

    Attributes:
        published, published_bytes: accepted messages, and bytes of their payload and headers.
        received, received_bytes: messages received, and bytes of their payload and headers.
        sent_bytes: bytes passed to the system, including protocol lines and lost messages.
        refused_full: messages refused because the queue for a slow server is full.
        refused_disconnected: messages refused because the queue for the next connection is full.
        refused_large: messages refused because they are larger than the server's limit.
        refused_closed: messages refused because the client is closed.
        lost: messages that were queued, or partly written, when a connection was lost.
        strays: messages for subscriptions that had ended.
        failed_callbacks: callbacks that raised.
        reconnects: connections after the first one.
        denied: "Permissions Violation" errors of the server.
        slow_consumer: connections that the server has closed because this client read too slowly.
    """

    published: int = 0
    published_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    refused_full: int = 0
    refused_disconnected: int = 0
    refused_large: int = 0
    refused_closed: int = 0
    lost: int = 0
    strays: int = 0
    failed_callbacks: int = 0
    reconnects: int = 0
    denied: int = 0
    slow_consumer: int = 0


class Subscription:
    """A subscription, returned by `NatsClient.subscribe`.

    Attributes:
        pattern: the subject, with its wildcards.
        queue: the name of the queue group; None for none.
        is_over: whether it has ended.
    """

    __slots__ = ("callback", "is_over", "pattern", "queue", "sid")

    def __init__(self, sid: int, pattern: str, queue: str | None, callback: OnMessage) -> None:
        self.sid, self.pattern, self.queue, self.callback = sid, pattern, queue, callback
        self.is_over = False

    @property
    def line(self) -> bytes:
        """The SUB line for it."""
        return nats.sub(self.pattern, self.sid, self.queue)


def connect(
    servers: str | Iterable[str],
    on_state: OnState | None = None,
    on_error: Callable[[str], object] | None = None,
    **options: object,
) -> NatsClient:
    """Return a client that connects in the background, and reconnects whenever the connection is lost.

    Args:
        servers: "nats://user:password@host:4222,tls://host", or a list of such addresses; `nats://token@host` has a
            token. The client learns further servers of the cluster.
        on_state: see `OnState`.
        on_error: called from the event loop with each -ERR that leaves the connection open ("Permissions Violation
            ..."); by default these are logged.
        options: see `NatsOptions`.

    Raises:
        ArgumentError: an address or an option is invalid, or a TLS file cannot be read.
    """
    return NatsClient(parse_servers(servers), make(NatsOptions, options), on_state, on_error)


class Subscriptions:
    """The subscriptions of one client, over all its connections.

    Args:
        counters: the counters of the client.
        lines: limits the log lines of failed callbacks.

    Attributes:
        late_lines: lines for changes while `resubscription` runs; None at other times.
    """

    def __init__(self, counters: NatsCounters, lines: LineLimit) -> None:
        self._counters, self._lines = counters, lines
        self._by_sid: dict[bytes, Subscription] = {}
        self._last_sid = 0
        self.late_lines: list[bytes] | None = None

    def add(self, subject: str, queue: str | None, callback: OnMessage) -> Subscription:
        """Add a subscription. Raises ArgumentError when the subject or the name of the group is invalid."""
        subscription = Subscription(self._last_sid + 1, subject, queue, callback)
        line = subscription.line
        self._last_sid += 1
        self._by_sid[b"%d" % subscription.sid] = subscription
        self.add_late(line)
        return subscription

    def remove(self, subscription: Subscription) -> bytes:
        """End a subscription.

        Returns:
            The UNSUB line for it; empty when it had ended before.
        """
        if self._by_sid.pop(b"%d" % subscription.sid, None) is None:
            return b""
        subscription.is_over = True
        line = nats.unsub(subscription.sid)
        self.add_late(line)
        return line

    def add_late(self, line: bytes) -> None:
        """Add a line for the connection that is being made, if there is one."""
        if self.late_lines is not None:
            self.late_lines.append(line)

    def all(self) -> list[Subscription]:
        """Return the subscriptions that have not ended."""
        return list(self._by_sid.values())

    def clear(self) -> None:
        """Remove all subscriptions."""
        self._by_sid.clear()

    def resubscription(self) -> list[bytes]:
        """Return the SUB lines of all subscriptions, for a new connection.

        Other greenlets may run during the call; the lines for their changes are at the end.
        """
        turn, lines = Turn(), []
        self.late_lines = []
        for subscription in self.all():
            if not subscription.is_over:
                lines.append(subscription.line)
                turn.yield_if_due()
        late, self.late_lines = self.late_lines, None
        return lines + late

    def discard_late(self) -> None:
        """Forget the lines for a connection that could not be made."""
        self.late_lines = None

    def deliver(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """Call the callback of a subscription with a message; see `NatsEvents.on_message`."""
        subscription = self._by_sid.get(sid)
        if subscription is None:
            self._counters.strays += 1
            return
        try:
            subscription.callback(subject, payload, reply, headers)
        except (Exception, Timeout):  # a Timeout that was never cancelled is not an Exception
            self._counters.failed_callbacks += 1
            if (suffix := self._lines.line_suffix()) is not None:
                log.exception("the callback for messages to %s failed%s", subscription.pattern, suffix)


class NatsClient:
    """A client of NATS core, made by `connect`. It may be used in the thread of its event loop only.

    Messages are delivered at most once: messages in transit are lost with a connection.

    Attributes:
        options: the options of `connect`.
        state: the state of the client.
        reason: the reason for this state, in one sentence.
        outbox: the send queue.
        subscriptions: the subscriptions that have not ended.
        deliver: called with received messages; see `NatsEvents.on_message`.
    """

    def __init__(
        self,
        servers: list[NatsAddress],
        options: NatsOptions,
        on_state: OnState | None = None,
        on_error: Callable[[str], object] | None = None,
    ) -> None:
        data_path.install()
        self.options, self._on_state, self._on_error = options, on_state, on_error
        self.state, self.reason = NatsState.CONNECTING, "not tried yet"
        if options.shuffle:
            random.shuffle(servers)
        self._pool = ServerPool(servers, options.reconnect_s, options.longest_reconnect_s, random.random)
        self._tls = options.tls or ClientTls.from_files(options.tls_ca, options.tls_cert, options.tls_key)
        self.outbox = NatsOutbox(options.reconnect_queue_bytes)
        self._counters = NatsCounters()
        self._lines = LineLimit()
        self.subscriptions = Subscriptions(self._counters, self._lines)
        self.deliver = self.subscriptions.deliver
        self._connection: NatsConnection | None = None
        self._is_closing = False
        self._over, self._ready = Event(), Event()
        """`_over` is set when the connection is lost, `_ready` when there is a connection or the client is closed."""
        self._greenlet = gevent.spawn(self._keep_connected)

    @property
    def max_payload_bytes(self) -> int:
        """The limit of the server for one message; `LARGEST_PAYLOAD_BYTES` while there is no connection."""
        return self._connection.info.max_payload_bytes if self._connection is not None else LARGEST_PAYLOAD_BYTES

    # ---- messages

    def publish(
        self, subject: str, payload: bytes, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> bool:
        """Send a message, in the order of calls; without a connection it is queued for the next one.

        Args:
            subject: the subject.
            payload: the content.
            reply: the subject for answers.
            headers: the headers.

        Returns:
            False when the message was refused: the queue is full, the message is too large for the server, or the
            client is closed. Refused messages are counted.

        Raises:
            ArgumentError: a subject or a header is invalid.
        """
        if headers:
            block = nats.headers_bytes(headers)
            return self._send(nats.hpub(subject, payload, block, reply), len(payload) + len(block))
        return self._send(nats.pub(subject, payload, reply), len(payload))

    def publish_pieces(self, subject: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """Send a message whose payload is in pieces; see `publish`."""
        return self._send(nats.pub_pieces(subject, pieces), sum(map(len, pieces)))

    def _send(self, entry: bytes, size_bytes: int) -> bool:
        outbox, counters, connection = self.outbox, self._counters, self._connection
        if connection is not None and size_bytes > connection.info.max_payload_bytes:
            counters.refused_large += 1
        elif self._is_closing:
            counters.refused_closed += 1
        elif outbox.queued_bytes + len(entry) <= outbox.limit_bytes:
            outbox.add(entry)
            counters.published += 1
            counters.published_bytes += size_bytes
            return True
        elif connection is None:
            counters.refused_disconnected += 1
        else:
            counters.refused_full += 1
        return False

    def subscribe(self, subject: str, callback: OnMessage, queue: str | None = None) -> Subscription:
        """Subscribe to a subject, also over later connections.

        Args:
            subject: `*` matches one word, `>` at the end matches one or more.
            callback: see `OnMessage`.
            queue: the name of a group of subscribers; one of the group gets each message.

        Raises:
            ArgumentError: the subject or the name of the group is invalid.
            ClosedError: the client is closed.
        """
        if self._is_closing:
            raise ClosedError("subscribe: the NATS client is closed")
        subscription = self.subscriptions.add(subject, queue, callback)
        if self._connection is not None:
            self.outbox.add(subscription.line)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; its callback is not called any more."""
        line = self.subscriptions.remove(subscription)
        if line and self._connection is not None:
            self.outbox.add(line)

    # ---- the connection

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    @property
    def server(self) -> NatsAddress | None:
        """The address of the connected server; None without a connection."""
        return None if self._connection is None else self._connection.address

    @property
    def info(self) -> ServerInfo | None:
        """The INFO of that server."""
        return None if self._connection is None else self._connection.info

    @property
    def servers(self) -> list[NatsAddress]:
        """The addresses of all known servers."""
        return self._pool.addresses

    @property
    def queued_bytes(self) -> int:
        """The size of the send queue."""
        return self.outbox.queued_bytes

    @property
    def counters(self) -> NatsCounters:
        """A copy of the counters."""
        found = replace(self._counters, sent_bytes=self.outbox.sent_bytes)
        if self._connection is not None:
            found.received += self._connection.messages
            found.received_bytes += self._connection.payload_bytes
        return found

    def wait_connected(self, timeout_s: float | None = None) -> bool:
        """Wait until there is a connection, or the client is closed; return whether there is one."""
        self._ready.wait(timeout_s)
        return self.connected

    def flush(self, timeout_s: float) -> bool:
        """Wait until the server has received all published messages and subscriptions.

        It answers a PING that follows them. Returns False when the answer is late or the connection is lost.
        """
        if self._connection is None:
            return False
        answer: AsyncResult[bool] = AsyncResult()
        self._connection.ping(answer.set)
        return bool(answer.wait(timeout_s))

    def rtt(self, timeout_s: float) -> float:
        """Return the round-trip time of a PING, in seconds.

        Raises:
            NoAnswer: there is no connection, or the answer is late.
        """
        began_s = monotonic()
        if not self.flush(timeout_s):
            raise NoAnswer(f"no answer of a NATS server within {timeout_s:g} s: {self.reason}")
        return monotonic() - began_s

    # ---- reconnecting

    def _keep_connected(self) -> None:
        while not self._is_closing:
            address, at_s = self._pool.next()
            gevent.sleep(max(at_s - monotonic(), 0.0))
            try:
                greeted = greet(address, self._tls, self.options)
                try:
                    lines = self.subscriptions.resubscription()
                except BaseException:
                    greeted.transport.close()
                    raise
                self._over.clear()
                self._counters.reconnects += self.state is NatsState.DISCONNECTED
                connection = NatsConnection(self, address, greeted, self.outbox, self.options, lines)
                self._connection = connection
                self._ready.set()
                self._set_state(NatsState.CONNECTED, f"connected to {address}")
                if connection.is_open:
                    self.informed(connection)
            except RefusedError as error:
                self._failed(address, error, self.options.refused_s)
            except (StreamError, NatsError) as error:
                self._failed(address, error)
            except Exception as error:
                log.exception("connecting to %s failed", address)
                self._failed(address, error)
            else:
                self._over.wait()

    def _failed(self, address: NatsAddress, error: Exception, at_least_s: float = 0.0) -> None:
        self.subscriptions.discard_late()
        self._pool.failed(address, monotonic(), at_least_s)
        state = self.state if self.state is NatsState.CONNECTING else NatsState.DISCONNECTED
        self._set_state(state, str(error) if str(address) in str(error) else f"{address}: {error}")

    def _set_state(self, state: NatsState, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        log.log(logging.INFO if state in (NatsState.CONNECTED, NatsState.CLOSED) else logging.WARNING, "%s", reason)
        if self._on_state is not None:
            self._call(self._on_state, state, reason)

    def _call(self, fn: Callable[..., object], *arguments: object) -> None:
        try:
            fn(*arguments)
        except (Exception, Timeout):
            self._counters.failed_callbacks += 1
            log.exception("a callback failed")

    # ---- called by the connection; see `Owner`

    def informed(self, connection: NatsConnection) -> None:
        """Process a new INFO: learn servers, and leave a server in lame duck mode."""
        if connection.info.connect_urls:
            self._pool.learn(connection.address, connection.info.connect_urls)

        def leave() -> None:
            gevent.sleep(random.random())  # so that clients do not all change to another server at the same time
            if connection.is_open:
                self.flush(LEAVE_S)
                connection.lose("the server is shutting down (lame duck mode)")

        if connection.info.is_lame_duck and len(self._pool) > 1:
            gevent.spawn(leave)

    def complained(self, connection: NatsConnection, text: str) -> None:
        """Process -ERR."""
        lower = text.lower()
        self._counters.slow_consumer += "slow consumer" in lower
        if not lower.startswith(_STAYS_OPEN):
            connection.lose(refusal(text) or f"the server closed the connection: {text}")
            return
        self._counters.denied += lower.startswith("permissions")
        if self._on_error is not None:
            self._call(self._on_error, text)
        elif (suffix := self._lines.line_suffix()) is not None:
            log.warning("%s reports: %s%s", connection.address, text, suffix)

    def lost(self, connection: NatsConnection, reason: str) -> None:
        """Schedule the next connection."""
        self._forget(connection)
        now_s = monotonic()
        lasted_s = now_s - connection.since_s
        if lasted_s >= STEADY_S:
            self._pool.forget_failures(connection.address)
        if lasted_s >= LASTED_S and not refusal(reason):
            self._pool.retry_at_once(connection.address, now_s)
        else:
            self._pool.failed(connection.address, now_s, self.options.refused_s if refusal(reason) else 0.0)
        if connection.info.is_lame_duck:
            self._pool.postpone(connection.address, now_s + LAME_DUCK_S)
        self._set_state(NatsState.DISCONNECTED, f"{connection.address}: {reason}")
        self._over.set()

    def _forget(self, connection: NatsConnection) -> None:
        self._connection = None
        self._ready.clear()
        self._counters.lost += connection.lost_messages
        self._counters.received += connection.messages
        self._counters.received_bytes += connection.payload_bytes

    # ---- the end

    def close(self, timeout_s: float = 5.0) -> bool:
        """Close the client for good.

        It accepts no more messages, delivers messages that the server has sent, and sends queued messages if there is a
        connection. In a callback, that happens in the background.

        Args:
            timeout_s: the maximum time.

        Returns:
            Whether the server has received all published messages; False in a callback.
        """
        if getcurrent() in (get_hub(), self._greenlet):
            gevent.spawn(self.close, timeout_s)
            return False
        if self._is_closing:
            return False
        self._is_closing = True
        # Before `flush`, so that the answer to its PING follows the last message.
        if self._connection is not None:
            for subscription in self.subscriptions.all():
                self.outbox.add(nats.unsub(subscription.sid))
        is_sent = self.flush(timeout_s) if self.connected else not self.outbox.queue
        self._greenlet.kill(block=False)
        if self._connection is not None:
            connection = self._connection
            connection.close()
            self._forget(connection)
        self._counters.lost += self.outbox.detach(0)
        self.subscriptions.clear()
        self._ready.set()
        self._set_state(NatsState.CLOSED, "closed")
        return is_sent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
