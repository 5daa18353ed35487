"""The data path of a connected SMQ client, as callbacks of the event loop (help: data-path).

All connections share one receive buffer. Consecutive frames from one publisher to one destination are one batch: it
costs one dictionary lookup, and its bytes are forwarded unchanged. Queues are flushed once per turn of the loop.
`SocketOutbox` writes; `RawConnection` also reads, with the framing of raw sockets. `smq/connection_kinds.py` adds
WebSocket and TLS. No function here blocks.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from time import time
from typing import Any

from gevent import Timeout, get_hub
from gevent.hub import Waiter

from smqrt.broker.outbox import BLOCKED, EMPTY_QUEUE, Backlog, Drop, Outbox, QueuedMemory, backlog, frame_ends
from smqrt.broker.rare import Rare
from smqrt.broker.sessions import Session
from smqrt.errors import CloseReason, ProtocolError
from smqrt.loop.scheduling import Watcher, share
from smqrt.smq import data_path, forwarder
from smqrt.transport.tls import ClientSocket, Transport, half_close
from smqrt.wire.connection_state import Life, transition
from smqrt.wire.kernels import MAX_PARTITIONS
from smqrt.wire.smq import PUBLISH_HEADER_BYTES

log = logging.getLogger("smqrt")

READ, WRITE = 1, 2

LARGE_BATCH_BYTES = 4096
"""Batches of at least this size are sent from the receive buffer instead of being copied into queues."""
SMALL_READ_BYTES = 200
"""Up to this size a loop in Python is faster than calling the scan kernel."""
MIN_RECEIVE_BYTES, MAX_RECEIVE_BYTES = 16384, 262144
MANY_BATCHES = 16
"""With more batches in one receive, sorting them by subscriber is faster."""
BATCHES_PER_CHECK = 8
"""Batches between two readings of the clock. They take 5 ms with 10,000 subscribers, 24 ms with 1,000 slow ones."""
GATHERED_BATCHES = 64
"""Longer queues are joined; shorter ones with a large batch are sent by one gathering system call."""
BATCHES_PER_SEND = 256  # in one sendmsg; Linux accepts 1024 (IOV_MAX)

ABRUPT = frozenset((CloseReason.PEER_CLOSED, CloseReason.READ_FAILED, CloseReason.WRITE_FAILED))

_NEVER_S = float("inf")
_TORN_CONTROL, _TORN_MESSAGE = 1, 2  # values of `torn`

chars: Any = data_path.kernels.chars
view, ends, frames = data_path.kernels.view, data_path.kernels.ends, data_path.kernels.frames
scan = data_path.kernels.scan
partitioned: Any = data_path.kernels.partitioned
partition_ids, partition_ends = data_path.kernels.partition_ids, data_path.kernels.partition_ends


class RareSendState:
    """The attributes of a connection that few clients use, see `SocketOutbox`."""

    __slots__ = ("backlog", "torn", "writer")

    def __init__(self) -> None:
        self.backlog: Backlog | None = None
        self.torn = 0
        self.writer: Any = None


class SocketOutbox(Outbox):
    """The send queue of a client, and the closing of its connection.

    While the socket accepts everything, the queue is empty at the end of every turn. Otherwise `life` is BLOCKED, and
    the `writer` watcher sends more when the socket is writable.

    Args:
        sock: a socket, a `TlsTransport`, or a wrapper that limits how much one of these sends at once.
        watcher: the loop's READ watcher for it, stopped.

    Attributes:
        session: the client's session.
        sock, watcher: see above.
        writer: the WRITE watcher, created at its first use.
        handshake: wakes the greenlet that waits for the end of the handshake; None once the client is accepted or
            rejected.
        torn: whether the first entry of the queue is the rest of a partly sent frame: 0 for no, otherwise its kind.
        backlog: queue positions for the slow-consumer policies of the hub; None while the client reads.
    """

    __slots__ = ("handshake", "rare", "session", "sock", "watcher")
    session: Session
    no_rare: RareSendState = RareSendState()
    backlog = Rare[Backlog | None]()
    torn = Rare[int]()
    writer = Rare[Any]()

    def __init__(self, sock: ClientSocket, watcher: Watcher) -> None:
        super().__init__()
        self.queue = EMPTY_QUEUE
        self.sock = sock
        self.watcher: Any = watcher
        self.rare = self.no_rare
        self.handshake: Waiter[None] | None = Waiter()
        self.life = Life.OPENING

    @property
    def fd(self) -> int:
        """The descriptor of the socket."""
        fd: int = self.watcher.fd
        return fd

    @property
    def transport(self) -> Transport:
        """The socket or `TlsTransport`, without a wrapper that limits its sends."""
        sock: Any = self.sock
        transport: Transport = getattr(sock, "unlimited", sock)
        return transport

    def forwarded(self, data: bytes, sent: int) -> None:
        """Queue messages of which the forwarder could send only the first `sent` bytes."""
        if self.life.over:
            ends = frame_ends(data, self.frame_bytes)
            self.session.broker.stats.drop(Drop.CLOSED, len(ends) - bisect_right(ends, sent))
            return
        self.queue = [data, *self.queue]
        self._advance(sent)

    def send_failed(self) -> None:
        """Disconnect: the forwarder could not send."""
        self.lost(CloseReason.WRITE_FAILED)

    def reply(self, packet: bytes) -> None:
        """Queue a control packet."""
        if not self.life.over:
            self.put((len(packet) + 2).to_bytes(2, "big") + packet)

    def put_view(self, view: memoryview) -> None:
        """Send a large batch directly from the receive buffer, together with a queue in one gathering call."""
        if self.life is BLOCKED or self.life.over or len(self.queue) >= GATHERED_BATCHES:
            self.put(bytes(view))
            return
        queue = self.queue
        if queue is EMPTY_QUEUE:
            queue = self.queue = []
        queue.append(view)  # type: ignore[arg-type]
        try:
            sent = self.sock.send(view) if len(queue) == 1 else self.sock.sendmsg(queue)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.queue = EMPTY_QUEUE
            self.lost(CloseReason.WRITE_FAILED)
            return
        if sent == len(view) and len(queue) == 1:
            self.queue = EMPTY_QUEUE
        else:
            queue[-1] = bytes(view)
            self._advance(sent)

    def flush(self) -> None:
        """Send the queue with one system call."""
        queue = self.queue
        if len(queue) == 1:  # the usual case: no copy
            data: Any = queue[0]
        elif len(queue) < GATHERED_BATCHES and (
            len(queue[0]) >= LARGE_BATCH_BYTES or len(queue[-1]) >= LARGE_BATCH_BYTES
        ):
            self._gather(queue)
            return
        else:
            data = b"".join(queue)
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.queue = EMPTY_QUEUE
            self.lost(CloseReason.WRITE_FAILED)
            return
        if sent == len(data):
            self.queue = EMPTY_QUEUE
        else:
            self._advance(sent)

    def _gather(self, batches: list[bytes]) -> None:
        try:
            sent = self.sock.sendmsg(batches)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.queue = EMPTY_QUEUE
            self.lost(CloseReason.WRITE_FAILED)
            return
        self._advance(sent)

    def _advance(self, sent: int) -> None:
        """Remove `sent` bytes from the queue; the rest waits until the socket is writable."""
        queue, whole = self.queue, 0
        if self.life is BLOCKED:
            self.released(sent)
        for batch in queue:
            if sent < len(batch):
                break
            sent -= len(batch)
            whole += 1
        if whole and self.rare.torn:  # only the first entry may be the rest of a frame
            self.torn = 0
        del queue[:whole]
        if not queue:
            self.queue = EMPTY_QUEUE
        if sent:
            self._split_partly_sent(sent)
        if queue and self.life is not BLOCKED:
            self._block()
        elif not queue and self.life is BLOCKED:
            self._unblock()
        if whole or sent:
            data_path.mark_progress(self)

    def _split_partly_sent(self, sent: int) -> None:
        """Split the partly sent first batch into the rest of the partly sent frame, and the frames behind it."""
        batch, at = self.queue[0], 0
        if self.torn:
            self.queue[0] = batch[sent:]
            return
        while at <= sent:
            start, at = at, at + self.frame_bytes(batch, at)
        if start == sent:
            self.queue[0] = batch[sent:]
            return
        self.torn = _TORN_MESSAGE if self.is_message(batch, start) else _TORN_CONTROL
        self.queue[:1] = [batch[sent:at], batch[at:]] if at < len(batch) else [batch[sent:]]

    def _block(self) -> None:
        self.life = transition(self.life, BLOCKED)
        self.queued_bytes = sum(map(len, self.queue))
        QueuedMemory.total_bytes += self.queued_bytes
        if self.writer is None:
            self.writer = get_hub().loop.io(self.watcher.fd, WRITE)
        self.writer.start(self.on_writable)
        data_path.mark_blocked(self)
        if self.watcher.fd in forwarder.subscribers:
            forwarder.withdraw(self)
        self._drop_over_budget()

    def _drop_over_budget(self) -> None:
        """Drop messages of this turn that exceed the budget, the newest first."""
        first = 1 if self.torn else 0
        while len(self.queue) > first:
            over_all = QueuedMemory.total_bytes > QueuedMemory.limit_bytes
            before = self.queued_bytes
            if not over_all and before <= self.budget_bytes:
                break
            self.trim(self.queue[-1], Drop.OVER_GLOBAL_BUDGET if over_all else Drop.OVER_BUDGET)
            if self.queued_bytes == before:  # only control packets are left in this batch
                break

    def _unblock(self) -> None:
        self.life = transition(BLOCKED, Life.OPENING if self.handshake is not None else Life.OPEN)
        self.released(self.queued_bytes)
        if self.writer is not None:
            self.writer.stop()
        data_path.unblocked(self)

    def hold_back(self) -> None:
        """Send nothing until `send_again`."""
        forwarder.withdraw(self)
        if self.life is not BLOCKED:
            self.life = transition(self.life, BLOCKED)
            self.queued_bytes = sum(map(len, self.queue))
            QueuedMemory.total_bytes += self.queued_bytes
        if self.writer is not None:  # not created here: creating 500 would take most of the time of a migration
            self.writer.stop()
        data_path.unblocked(self)

    def send_again(self) -> None:
        """Undo `hold_back`."""
        if not self.queue:
            self._unblock()
            return
        if self.writer is None:
            self.writer = get_hub().loop.io(self.watcher.fd, WRITE)
        self.writer.start(self.on_writable)
        data_path.mark_blocked(self)
        if self.backlog is None:
            self._drop_over_budget()

    def on_writable(self) -> None:
        """Send more of the queue when the socket is writable again."""
        try:
            sent = self.sock.sendmsg(self.queue[:BATCHES_PER_SEND])
        except BlockingIOError:
            return
        except OSError:
            self.lost(CloseReason.WRITE_FAILED)
            return
        self._advance(sent)

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Report that messages for this client were dropped."""
        self.session.broker.overflowed(self.session, reason, messages)

    def overloaded(self) -> None:
        """Disconnect a client that does not read its control packets."""
        self.session.disconnect(CloseReason.SLOW_CONSUMER, CloseReason.SLOW_CONSUMER.value.encode())

    # ---- closing

    def settled(self) -> None:
        """End the handshake; the client was accepted or rejected."""
        handshake, self.handshake = self.handshake, None
        if handshake is not None:
            data_path.end_handshake(self)
            if self.life is Life.OPENING:
                self.life = transition(self.life, Life.OPEN)
            # By the loop: the greenlet must not run in the middle of the caller, which may use the receive buffer.
            get_hub().loop.run_callback(handshake.switch, None)

    def lost(self, reason: CloseReason) -> None:
        """Disconnect the session of a broken connection."""
        self.session.disconnect(reason)

    def finish(self, reason: CloseReason) -> None:
        """Send the bytes that the socket accepts at once, drop the rest, and close; gracefully unless it is broken."""
        if self.life.over:
            return
        self.settled()  # a greenlet may wait for the end of the handshake
        if self.is_forwarded:
            self.leave_forwarder()
        if self.watcher.fd in forwarder.subscribers:
            forwarder.withdraw(self)
        is_abrupt = reason in ABRUPT
        if not is_abrupt:
            self._flush_before_close(reason)
        self._count_undelivered()
        self.life = transition(self.life, Life.CLOSED if is_abrupt else Life.DRAINING)
        data_path.unblocked(self)
        self.watcher.stop()
        if self.rare.writer is not None:
            self.writer.stop()
            self.writer.close()
        if is_abrupt:
            self.watcher.close()
            self.sock.close()
        else:
            half_close(self, self.transport, self.watcher)

    def _flush_before_close(self, reason: CloseReason) -> None:
        """Send as much of the queue as the socket accepts at once."""
        if self.life is BLOCKED:
            self._drop_messages()
        sent = 1
        while self.queue and sent:
            try:
                sent = self.sock.sendmsg(self.queue[:BATCHES_PER_SEND])
            except OSError:
                return
            self._advance(sent)

    def _drop_messages(self) -> None:
        """Drop the messages of a blocked queue, so that the client may still get the control packets."""
        first = 1 if self.torn else 0
        begun, batches = self.queue[:first], self.queue[first:]
        dropped = self.messages(batches)
        kept = [batch for batch in batches if not self.is_message(batch, 0)]
        self.queue[:] = [*begun, *kept]
        self.released(self.queued_bytes - sum(map(len, self.queue)))
        if dropped:
            self.dropped += dropped
            self.session.broker.stats.drop(Drop.CLOSED, dropped)

    def _count_undelivered(self) -> None:
        if self.life is BLOCKED:
            self._unblock()
        batches, self.queue = self.queue, []
        if batches:
            lost = int(self.torn == _TORN_MESSAGE) + self.messages(batches[1 if self.torn else 0 :])
            self.session.broker.stats.drop(Drop.CLOSED, lost)


class RawConnection(SocketOutbox):
    """A client on a raw socket.

    Args:
        sock, watcher: see `SocketOutbox`.

    Attributes:
        carry: the partial frame of the last receive; during a pause, data that is not routed yet.
        joins_in: single messages in a row until the client tries to join the forwarder; 0 while it has joined.
        receive_bytes: the size of the next receive; it follows the amount of data.
        paused: whether the client is not read. This is independent of `life`, which is about sending.
    """

    __slots__ = ("carry", "joins_in", "paused", "receive_bytes")

    def __init__(self, sock: ClientSocket, watcher: Watcher) -> None:
        super().__init__(sock, watcher)
        self.carry = b""
        self.receive_bytes = MIN_RECEIVE_BYTES
        self.paused = False
        self.joins_in = forwarder.JOIN_AFTER

    def greet(self, reply: bytes, hello: bytes) -> None:
        """Send the HTTP reply and the Init frame at once: in the queue the reply would be parsed as frames."""
        self._send_at_once(reply + hello)

    def _send_at_once(self, data: bytes) -> None:
        try:
            is_sent = self.sock.send(data) == len(data)
        except OSError:
            is_sent = False
        if not is_sent:  # the send buffer of a new connection is empty, so the connection must be broken
            self.lost(CloseReason.WRITE_FAILED)

    def start(self, session: Session, data: bytes) -> None:
        """Begin to read; `data` was received with the HTTP request."""
        if self.life.over:
            return
        self.session = session
        self.watcher.start(type(self).on_readable, self)  # a bound method takes 64 bytes, the arguments 48: see `alone`
        if data:
            self.carry = data
            get_hub().loop.run_callback(self.on_data_waiting)  # in the loop: routing uses the shared buffer

    @property
    def alone(self) -> tuple[Outbox, ...]:
        """See `Outbox.alone`: the arguments of the watcher's callback, which saves 48 bytes for each client."""
        return self.watcher.args or (self,)

    def on_readable(self) -> None:
        """Receive once, behind the partial frame of the last receive, and route the frames.

        One whole message to a known destination is the most frequent case, and is delivered at once.
        """
        carry, size, held = self.carry, self.receive_bytes, 0
        try:
            if carry:
                held = len(carry)
                view[:held] = carry
                got = self.sock.recv_into(view[held:], size)
            else:
                got = self.sock.recv_into(view, size)
        except BlockingIOError:
            return
        except OSError:
            self.lost_soon(CloseReason.READ_FAILED)
            return
        if not got:
            self.lost_soon(CloseReason.PEER_CLOSED)
            return
        if got <= SMALL_READ_BYTES and not held and not self.websocket:
            data = chars[:got]
            # Bytes 2 to 10: packet type, destination and publisher, the key of a route.
            route = self.session.routes.get(data[2:11])
            if route is not None and data[0] << 8 | data[1] == got >= PUBLISH_HEADER_BYTES:
                if route.deliver(data):
                    self.pause()
                    return
                self.joins_in -= 1
                if not self.joins_in:
                    self.join_forwarder()
                return
            if got > 2 and data[0] << 8 | data[1] == got and data[2] != 8:  # not Publish
                self._handle_control(data)
                return
        if got == size:  # probably there is more
            if size < MAX_RECEIVE_BYTES:
                self.receive_bytes = size << 1
        elif size > MIN_RECEIVE_BYTES and got < size >> 2:  # a quarter, so that the size does not alternate
            self.receive_bytes = size >> 1
        self.carry = b""
        self.feed(held + got)

    def _handle_control(self, frame: bytes) -> None:
        """Handle a control packet that was received alone: a client that connects sends these."""
        turn = share()
        if turn.spent():  # many clients connect at the same time, and other events are due
            self.carry = frame
            self.pause()
            turn.later(self.resume_now)
            return
        if self.joins_in < forwarder.JOIN_AFTER:  # only single messages in a row count
            self.joins_in = forwarder.JOIN_AFTER
        try:
            if self.session.control(frame[2:]):
                self.pause()
        except (Exception, Timeout):  # gevent.Timeout is a BaseException, and a callback may have started one
            self._close_after_error()

    def _close_after_error(self) -> None:
        log.exception("error while routing; the connection is closed")
        self.lost(CloseReason.HOOK_FAILED)

    def lost_soon(self, reason: CloseReason) -> None:
        """Disconnect as `lost`; in a later turn when this one's time is used up: many may break at the same time."""
        if data_path.is_turn_used():
            self.pause()
            data_path.deferred_reads.append(data_path.DeferredCall(lambda: self.lost(reason)))
        else:
            self.lost(reason)

    def receive(self) -> int:
        """Receive once, behind `carry` in the buffer, as `on_readable` does; return the number of bytes, 0 for none."""
        size, held = self.receive_bytes, len(self.carry)
        try:
            view[:held] = self.carry
            got: int = self.sock.recv_into(view[held:] if held else view, size)
        except BlockingIOError:
            return 0
        except OSError:
            self.lost_soon(CloseReason.READ_FAILED)
            return 0
        if not got:
            self.lost_soon(CloseReason.PEER_CLOSED)
        elif got == size:
            self.receive_bytes = min(size << 1, MAX_RECEIVE_BYTES)
        elif size > MIN_RECEIVE_BYTES and got < size >> 2:
            self.receive_bytes = size >> 1
        return got

    def on_data_waiting(self) -> None:
        """Route bytes that were received before, with the HTTP request or before a pause."""
        data, self.carry = self.carry, b""
        if data and not self.life.over and not self.paused:
            view[: len(data)] = data
            self.feed(len(data))
        else:
            self.carry = data

    def feed(self, size: int) -> None:
        """Route `chars[:size]`, and keep a partial frame at its end for the next receive."""
        if self.joins_in < forwarder.JOIN_AFTER:  # only single messages in a row count
            self.joins_in = forwarder.JOIN_AFTER
        used = self.route(size)
        if used < size and not self.life.over:
            self.carry = chars[used:size]

    def route(self, size: int) -> int:
        """Route the raw frames in `chars[:size]`; return the number of used bytes (all, when the connection closed)."""
        try:
            return self._route_batches(size) if size > SMALL_READ_BYTES else self._route_frames(size)
        except ProtocolError as error:
            self.session.fail(error)
        except (Exception, Timeout):  # gevent.Timeout is a BaseException, and a callback may have started one
            self._close_after_error()
        return size

    def _route_batches(self, size: int) -> int:
        if backlog or (size >= LARGE_BATCH_BYTES and time() >= data_path.defer_at_s()):
            self.defer()  # queues wait to be flushed, and bulk messages would fill them; or the turn is over
            return 0
        session = self.session
        at = self._partition(size) if session.rare.partitions else 0
        waits: bool | None = False
        cached = session.routes.get
        batches, used, bad = scan(size, at)
        until_s = data_path.defer_at_s() if batches > BATCHES_PER_CHECK else _NEVER_S
        for first in range(0, batches, BATCHES_PER_CHECK):
            if batches > BATCHES_PER_CHECK and time() >= until_s:
                self.defer()
                return at
            last = min(first + BATCHES_PER_CHECK, batches)
            # `tolist` once is faster than an index for each batch.
            for end, count in zip(ends[first:last].tolist(), frames[first:last].tolist(), strict=True):
                route = cached(chars[at + 2 : at + 11])
                if route is None:
                    if chars[at + 2] != b"\x08":  # not Publish; `chars` returns bytes of length one
                        waits = session.control(chars[at + 2 : end])
                    else:
                        route = session.resolve(chars[at + 2 : at + 11])
                        cached = session.routes.get
                if route is not None:
                    if count > 1:
                        session.count_batch(chars[at + 3 : at + 7], count - 1)
                    short = end - at < LARGE_BATCH_BYTES
                    waits = route.deliver(chars[at:end]) if short else route.deliver_view(view[at:end])
                if waits:
                    self.pause()
                    return end
                if self.life.over:
                    return size
                at = end
        if bad:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        if batches > MANY_BATCHES:
            self._make_partitions()
        return used

    def _make_partitions(self) -> None:
        """Assign a partition to each sole raw subscriber of this client's destinations, once for the same routes."""
        session = self.session
        if session.partitions and session.partitions[0] == len(session.routes):
            return
        pairs = [(key[1:5], getattr(route, "sole_raw", None)) for key, route in session.routes.items()]
        slow = session.broker.slow
        found = [
            (key, outbox)
            for key, outbox in pairs
            if outbox is not None
            and (slow is None or slow.of(key) is slow.default)  # all topics of a partition have the same policy
        ][:MAX_PARTITIONS]
        partition_of: dict[Outbox, int] = {}
        numbers = array("I", [partition_of.setdefault(outbox, len(partition_of)) for _, outbox in found])
        table = data_path.kernels.partition_table(b"".join(key for key, _ in found), numbers.tobytes())
        publisher = int.from_bytes(session.etid.to_bytes(4, "big"), "little")
        session.partitions = len(session.routes), table, list(partition_of), publisher

    def _partition(self, size: int) -> int:
        """Sort short batches to sole subscribers by subscriber, in a kernel; return the number of delivered bytes."""
        _, table, outboxes, publisher = self.session.rare.partitions
        recorder = self.session.broker.recorder
        if recorder and recorder.full:  # `deliver` of the routes makes the publisher wait
            return 0
        count, used, messages = data_path.kernels.partition(size, table, publisher)
        meter = self.session.rare.meter
        if meter is not None and used and not meter.admits(chars[:used]):
            return 0  # route batch by batch, until one exceeds the rate
        self.session.broker.topic_table.traffic.add(messages, used, 1)  # `Topic.deliver` does not count these
        if recorder and used:
            recorder.record_large(view[:used])
        at = 0
        for partition, end in zip(partition_ids[:count].tolist(), partition_ends[:count].tolist(), strict=True):
            outboxes[partition].put(partitioned[at:end])
            at = end
        return int(used)

    def _route_frames(self, size: int) -> int:
        # A small receive: a loop over frames in Python. The offsets are those of `wire/smq.py`.
        session, at = self.session, 0
        waits: bool | None = False
        cached = session.routes.get
        data: bytes = chars[:size]
        while size - at >= 2:
            length = data[at] << 8 | data[at + 1]
            end = at + length
            if end > size:
                break
            route = cached(data[at + 2 : at + 11])
            if route is None or length < 15:
                if length < 3:
                    raise ProtocolError(CloseReason.SHORT_PACKET)
                if data[at + 2] == 8:
                    if length < 15:
                        raise ProtocolError(CloseReason.SHORT_PACKET)
                    route = session.resolve(data[at + 2 : at + 11])
                    cached = session.routes.get
                else:
                    route = None
                    waits = session.control(data[at + 2 : end])
            if route is not None:
                waits = route.deliver(data if length == size else data[at:end])
            if waits:
                self.pause()
                return end
            if self.life.over:
                return size
            at = end
        return at

    def pause(self) -> None:
        """Stop reading until `resume`, for example while a hook waits."""
        self.paused = True
        self.stop_reading()

    def stop_reading(self) -> None:
        """Stop reading."""
        if self.is_forwarded:
            self.leave_forwarder()
        self.watcher.stop()

    def defer(self) -> None:
        """Continue in the next turn, so that other events are not delayed by a large receive."""
        self.pause()
        data_path.deferred_reads.append(self)

    def resume(self) -> None:
        """Continue in a later callback of the loop: the shared buffer may be in use now."""
        get_hub().loop.run_callback(self.resume_now)

    def resume_now(self) -> None:
        """Continue where `pause` stopped."""
        if not self.paused or self.life.over:
            return
        meter = self.session.meter
        if meter is not None and meter.waits:
            return  # the meter resumes the connection when there are tokens
        self.paused = False
        if 0 < len(self.carry) < MIN_RECEIVE_BYTES and not self.websocket and self.handshake is None:
            self._receive_more()
        self.on_data_waiting()
        if not (self.paused or self.life.over or self.is_forwarded or self in data_path.frozen_connections):
            self.watcher.start(type(self).on_readable, self)

    def _receive_more(self) -> None:
        """Receive once more: with a thousand subscribers, one larger batch costs half as much as two small ones."""
        try:
            got = self.sock.recv_into(view, MIN_RECEIVE_BYTES)
        except OSError:
            return  # no data yet; or an error, which the next receive reports
        self.carry += bytes(view[:got])

    # ---- forwarding in LuaJIT

    @property
    def is_forwarded(self) -> bool:
        """See `Outbox.is_forwarded`."""
        return not self.joins_in

    @property
    def is_plain(self) -> bool:
        """See `Outbox.is_plain`."""
        return type(self) is RawConnection and self.life is Life.OPEN and self.sock is self.transport

    def join_forwarder(self) -> None:
        """Let the forwarder receive the client's messages, if it can forward them; call it when `joins_in` is 0."""
        if self.paused or self in data_path.frozen_connections:
            self.joins_in = forwarder.JOIN_AFTER
        elif forwarder.join(self):
            self.watcher.stop()
        else:
            self.joins_in = forwarder.RETRY_AFTER

    def leave_forwarder(self) -> None:
        """See `Outbox.leave_forwarder`; does nothing unless the client has joined."""
        if self.is_forwarded:
            forwarder.leave(self)
            self.joins_in = forwarder.JOIN_AFTER
            self.watcher.start(type(self).on_readable, self)

    def handed_over(self, data: bytes) -> None:
        """Route data that the forwarder has received but can't forward."""
        self.leave_forwarder()
        self.carry += data
        self.on_data_waiting()

    def receive_failed(self) -> None:
        """Disconnect: the forwarder could not receive."""
        self.lost(CloseReason.READ_FAILED)
