"""One connection to a NATS server, as callbacks of the event loop: reading in shares of a turn, and asking whether the
server is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic, time
from typing import Any, Protocol

from gevent import get_hub

from smqrt.broker.outbox import BLOCKED, backlog
from smqrt.cluster.nats.handshake import Greeted
from smqrt.cluster.nats.options import NatsOptions
from smqrt.cluster.nats.outbox import NatsOutbox
from smqrt.cluster.nats.servers import NatsAddress
from smqrt.errors import NatsError
from smqrt.loop.readiness import READ
from smqrt.smq import data_path
from smqrt.wire import nats
from smqrt.wire.nats import ServerInfo

RECEIVE_BYTES = 256 << 10
_LONGEST_TICK_S = 1.0
_TICKS_PER_WAIT = 4

_buffer = bytearray(RECEIVE_BYTES)  # shared: what is received is copied out before anything else can receive
_view = memoryview(_buffer)


class Owner(Protocol):
    """Whose connection it is. It is called from the event loop and must not block."""

    def deliver(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """A message came."""

    def informed(self, connection: NatsConnection) -> None:
        """The server sent INFO again."""

    def complained(self, connection: NatsConnection, text: str) -> None:
        """The server sent -ERR."""

    def lost(self, connection: NatsConnection, reason: str) -> None:
        """The connection is over, and not because `close` was called."""


class NatsConnection:
    """A connection whose server has accepted.

    Args:
        greeted: the connection.
        outbox: sends over it from now on.
        lines: to be sent before what waits there.

    Attributes:
        info: what the server said last of itself.
        since_s: when it was made, in monotonic seconds.
        is_open: false when it is over.
        lost_messages: how many were lost with it of those that waited.
    """

    def __init__(
        self,
        owner: Owner,
        address: NatsAddress,
        greeted: Greeted,
        outbox: NatsOutbox,
        options: NatsOptions,
        lines: list[bytes],
    ) -> None:
        self.address, self.info = address, greeted.info
        self._owner, self._outbox, self._options = owner, outbox, options
        self._transport: Any = greeted.transport
        self._decoder = greeted.decoder
        self._decoder.events = self
        self.on_message = owner.deliver
        self.since_s = self._heard_s = monotonic()
        self._pinged_s = -inf
        self._pongs: deque[Callable[[bool], object]] = deque()
        self.is_open, self._is_paused, self.lost_messages = True, False, 0
        outbox.attach(greeted.transport, lines, options.queue_bytes, self._broken)
        loop: Any = get_hub().loop
        self._watcher = loop.io(self._transport.fileno(), READ)
        self._watcher.start(self._readable)
        tick_s = min(options.ping_s / _TICKS_PER_WAIT, options.pong_s / _TICKS_PER_WAIT, _LONGEST_TICK_S)
        self._ticker = loop.timer(tick_s, tick_s)
        self._ticker.start(self._tick)
        if self._has_pending():
            self._give_way()

    @property
    def messages(self) -> int:
        """How many came over it."""
        return self._decoder.messages

    @property
    def payload_bytes(self) -> int:
        """How many bytes of payload and headers."""
        return self._decoder.payload_bytes

    # ---- reading

    def _readable(self) -> None:
        try:
            got = self._transport.recv_into(_view, RECEIVE_BYTES)
        except BlockingIOError:
            self._outbox.wants_write()
            return
        except OSError as error:
            self.lose(f"reading failed: {error.strerror or error}")
            return
        if not got:
            self.lose("the server closed the connection")
            return
        self._heard_s = monotonic()
        try:
            self._decoder.feed(bytes(_view[:got]))
        except NatsError as error:
            self.lose(f"the server broke the protocol: {error}")
            return
        self._work_off()
        if self.is_open and not self._is_paused and self._has_pending():
            self._give_way()  # the socket does not become readable for what TLS has already

    def _work_off(self) -> None:
        """Deliver what has come, for a share of this turn; the rest in a later one."""
        until_s = data_path.share_ends_s()
        try:
            while self._decoder.decode() and self.is_open:
                if backlog or time() >= until_s:
                    self._give_way()
                    return
        except NatsError as error:
            self.lose(f"the server broke the protocol: {error}")

    def _has_pending(self) -> bool:
        return getattr(self._transport, "has_pending", False)

    def _give_way(self) -> None:
        self._is_paused = True
        self._watcher.stop()
        data_path.gave_way.append(self)

    def go_on(self) -> None:
        """Go on where it gave way."""
        if not self.is_open:
            return
        self._is_paused = False
        self._watcher.start(self._readable)
        self._work_off()
        if self.is_open and not self._is_paused and self._has_pending():
            self._readable()

    # ---- events

    def on_info(self, info: ServerInfo) -> None:
        """See `NatsEvents`."""
        self.info = info
        self._owner.informed(self)

    def on_ping(self) -> None:
        """See `NatsEvents`."""
        self._outbox.add_pong()

    def on_pong(self) -> None:
        """See `NatsEvents`."""
        if self._pongs:
            self._pongs.popleft()(True)

    def on_error(self, text: str) -> None:
        """See `NatsEvents`."""
        self._owner.complained(self, text)

    # ---- is it there?

    def ping(self, then: Callable[[bool], object]) -> None:
        """Send PING behind what waits; `then` is called with true for the answer, false when none comes any more."""
        self._pongs.append(then)
        self._outbox.add(nats.PING)

    def _tick(self) -> None:
        now_s, outbox, options = monotonic(), self._outbox, self._options
        if outbox.life is BLOCKED and now_s - outbox.progress_s >= options.pong_s:
            self.lose(f"the server took nothing for {options.pong_s:g} s")
        elif now_s - self._heard_s >= options.ping_s and not self._is_paused:  # else what it said waits for us
            self._ask(now_s)

    def _ask(self, now_s: float) -> None:
        if self._pinged_s < self._heard_s:
            self._pinged_s = now_s
            self.ping(_nothing)
        elif now_s - self._pinged_s >= self._options.pong_s:
            heard_s = self._heard_s
            self._readable()  # it may have answered while this process stood still
            if self._heard_s == heard_s:
                self.lose(f"the server did not answer for {self._options.pong_s:g} s")

    # ---- the end

    def _broken(self, error: OSError) -> None:
        self.lose(f"writing failed: {error.strerror or error}")

    def lose(self, reason: str) -> None:
        """It is broken, or given up: tell the owner."""
        if self.is_open:
            self.close()
            self._owner.lost(self, reason)

    def close(self) -> None:
        """End it."""
        if not self.is_open:
            return
        self.is_open = False
        self._ticker.stop()
        self._ticker.close()
        self._watcher.stop()
        self._watcher.close()
        self.lost_messages = self._outbox.detach(self._options.reconnect_queue_bytes)
        self._transport.close()
        pongs, self._pongs = self._pongs, deque()
        for then in pongs:
            then(False)


def _nothing(is_answered: bool) -> None:
    """What is to be done after an answer that was asked for to see whether there is one."""
