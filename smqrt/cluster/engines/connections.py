"""Connections of links over sockets, with and without TLS.

The kernels split received data into batches. Each connection writes once per turn of the event loop.
"""

from __future__ import annotations

import logging
from time import time
from typing import TYPE_CHECKING, Any

from gevent import Timeout, get_hub

from smqrt.broker.outbox import Drop, QueuedMemory, backlog
from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.node import QUEUE_BYTES
from smqrt.errors import CloseReason, ProtocolError
from smqrt.smq import data_path
from smqrt.smq.connection import (
    BATCHES_PER_CHECK,
    LARGE_BATCH_BYTES,
    READ,
    RawConnection,
    chars,
    ends,
    frames,
    scan,
    view,
)
from smqrt.smq.connection_kinds import OverTls
from smqrt.transport.tls import TlsTransport, Transport, half_close
from smqrt.wire.cluster_packets import first_items
from smqrt.wire.connection_state import Life, transition
from smqrt.wire.smq import PUBLISH_HEADER_BYTES

log = logging.getLogger("smqrt")

MAX_UNAUTHENTICATED_BYTES = 8192
"""The maximum of received bytes before the other side has proved the password; a node sends fewer."""
_NEVER_S = float("inf")


class _DiscardingQueue(list[bytes]):
    """The queue of a closed connection. The link counts lost messages."""

    def append(self, batch: bytes) -> None:
        """Discard the batch."""


class LinkSession:
    """The session of a link, with the attributes that `RawConnection` uses."""

    meter = None
    partitions = None

    def __init__(self, link: Link) -> None:
        self.link = link

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """End the link: its connection is broken, or the other side does not read."""
        slow = reason is CloseReason.SLOW_CONSUMER
        why = "the other node has stopped reading" if slow else reason.value
        self.link.lose(why, Drop.LINK_SLOW if slow else Drop.LINK_LOST)

    def fail(self, error: ProtocolError) -> None:
        """End the link: the other side violated the protocol."""
        self.link.lose(str(error))


class LinkConnection(RawConnection):
    """A connection to another node; the transport of a `Link`.

    Args:
        sock: a connected, non-blocking socket.

    Attributes:
        link: the link over it.
        received_bytes: bytes received, except those being processed.
    """

    __slots__ = ("link", "received_bytes")
    link: Link

    def __init__(self, sock: Transport) -> None:
        # Priority 1: links are read before clients. When a client of another worker has its answer, a request to this
        # worker may depend on it: by then, this worker must have processed the packets of the other one.
        super().__init__(sock, get_hub().loop.io(sock.fileno(), READ, priority=1))
        self.handshake = None
        self.life = Life.OPEN
        self.budget_bytes = QUEUE_BYTES
        self.received_bytes = 0

    @property
    def outbox(self) -> LinkConnection:
        """See `Transport` of links."""
        return self

    @property
    def processed_bytes(self) -> int:
        """See `Transport` of links."""
        return self.received_bytes - len(self.carry)

    @property
    def via(self) -> str:
        """See `Transport` of links."""
        try:
            address: Any = self.transport.getpeername()
        except OSError:
            return "closed"
        if isinstance(address, str | bytes):
            return "unix"
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self, link: Link, data: bytes = b"") -> None:
        """Begin to read; `data` was received already."""
        self.link = link
        self.received_bytes = len(data)
        session: Any = LinkSession(link)
        if link.state is not LinkState.CLOSED and not self.exceeds_unauthenticated_bytes(len(data)):
            self.start(session, data)

    def exceeds_unauthenticated_bytes(self, received_bytes: int) -> bool:
        """End the link if an unauthenticated peer has sent too much; return whether it ended."""
        if self.link.is_proven or received_bytes <= MAX_UNAUTHENTICATED_BYTES:
            return False
        self.link.lose(
            f"peer sent more than {MAX_UNAUTHENTICATED_BYTES >> 10} KiB before authenticating; it is not an smqrt node"
        )
        return True

    # ---- reading

    def on_readable(self) -> None:
        """See `RawConnection.on_readable`."""
        held = len(self.carry)
        got = self.receive()
        if not got:
            return
        self.carry = b""
        self.received_bytes -= held  # bytes that are being processed must not be acknowledged
        if self.exceeds_unauthenticated_bytes(self.received_bytes + held + got):
            return
        self.feed(held + got)
        self.received_bytes += held + got
        self.link.heard(self.link.node.clock_s())

    def on_data_waiting(self) -> None:
        """See `RawConnection.on_data_waiting`."""
        held = len(self.carry)
        self.received_bytes -= held  # bytes that are being processed must not be acknowledged
        super().on_data_waiting()
        self.received_bytes += held
        if not self.life.over:
            self.link.heard(self.link.node.clock_s())

    def _receive_more(self) -> None:
        held = len(self.carry)
        super()._receive_more()
        self.received_bytes += len(self.carry) - held

    def route(self, size: int) -> int:
        """Process the frames in `chars[:size]`; return the number of bytes processed."""
        try:
            return self._process_frames(size)
        except ProtocolError as error:
            self.link.lose(str(error))
        except (Exception, Timeout):
            log.exception("error while a message of another node was delivered; the link is closed")
            self.lost(CloseReason.HOOK_FAILED)
        return size

    def _process_frames(self, size: int) -> int:
        if backlog or (size >= LARGE_BATCH_BYTES and time() >= data_path.defer_at_s()):
            self.defer()
            return 0
        batches, used, bad = scan(size, 0)
        until_s = data_path.defer_at_s() if batches > BATCHES_PER_CHECK else _NEVER_S
        at = 0
        for first in range(0, batches, BATCHES_PER_CHECK):
            if batches > BATCHES_PER_CHECK and time() >= until_s:
                self.defer()
                return at
            last = min(first + BATCHES_PER_CHECK, batches)
            for end, count in zip(ends[first:last].tolist(), frames[first:last].tolist(), strict=True):
                if chars[at + 2] != b"\x08":  # u16 length, u8 type: no Publish
                    waits: bool | None = False
                    is_long = end - at >= LARGE_BATCH_BYTES
                    while at < end and not self.life.over:
                        at = self._control(at, end)
                        if is_long and time() >= data_path.defer_at_s():
                            self.defer()
                            return size if self.life.over else at
                else:
                    waits = self._deliver(at, end, count)
                if self.life.over:
                    return size
                if waits:
                    self.pause()
                    return end
                at = end
        if bad:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        return used

    def _control(self, at: int, end: int) -> int:
        """Process the control packet in `chars[at:end]`, or its first items; return where the rest begins.

        The rest becomes a frame: its length and type replace processed bytes. 64 KiB of clients take 20 ms or more.
        """
        packet = chars[at + 2 : end]
        part = first_items(packet, LARGE_BATCH_BYTES) if len(packet) > LARGE_BATCH_BYTES else len(packet)
        self.link.control(packet[:part])
        if part == len(packet):
            return end
        rest = at + 2 + part - 3
        view[rest : rest + 3] = (end - rest).to_bytes(2, "big") + packet[:1]
        return rest

    def _deliver(self, at: int, end: int, count: int) -> bool | None:
        remote = self.link.remote
        if remote is None:
            self.link.drop_unaddressed()
            return False
        if end - at < PUBLISH_HEADER_BYTES:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        destination = chars[at + 3 : at + 7]  # u16 length, u8 type, u32 tid
        route = remote.routes.get(destination) or remote.resolve(destination)
        if count > 1:
            remote.count_batch(destination, count - 1)
        if end - at < LARGE_BATCH_BYTES:
            return route.deliver(chars[at:end])
        return route.deliver_view(view[at:end])

    # ---- writing

    def held(self, batch: bytes) -> None:
        """Account for a queued batch. Above its limit a link ends; it does not drop messages."""
        self.queued_bytes += len(batch)
        QueuedMemory.total_bytes += len(batch)
        self._drop_over_budget()

    def _drop_over_budget(self) -> None:
        if self.queued_bytes > self.budget_bytes and not self.life.over:
            # Not at once: the caller may be in a loop over the batches of this turn, with more to put.
            get_hub().loop.run_callback(self._give_up)

    def _give_up(self) -> None:
        if not self.life.over and self.queued_bytes > self.budget_bytes:
            self.link.lose(
                f"the other node is too slow: {self.queued_bytes >> 20} MiB are queued for it; the link is made again",
                Drop.LINK_SLOW,
            )

    # ---- the end

    def close(self, in_order: bool) -> None:
        """See `Transport` of links."""
        if self.life.over:
            return
        sends = in_order and self.life is not Life.BLOCKED
        if sends:
            self._flush_before_close(CloseReason.SHUTDOWN)
        if self.life is Life.BLOCKED:
            self._unblock()
        self.queue = _DiscardingQueue()
        self.life = transition(self.life, Life.DRAINING if sends else Life.CLOSED)
        data_path.unblocked(self)
        self.watcher.stop()
        if self.writer is not None:
            self.writer.stop()
            self.writer.close()
        if sends:
            half_close(self, self.transport, self.watcher)
        else:
            self.watcher.close()
            self.sock.close()


if TYPE_CHECKING:
    _TlsLink = LinkConnection
else:

    class _TlsLink(OverTls, LinkConnection):
        """A connection to another node over TLS."""

        __slots__ = ()


def connection_of(sock: Transport) -> LinkConnection:
    """Return the connection of a link over `sock`."""
    return _TlsLink(sock) if type(sock) is TlsTransport else LinkConnection(sock)
