"""Send queue of a NATS client.

It writes once per turn of the event loop, and lasts longer than a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from gevent import get_hub

from smqrt.broker.outbox import BLOCKED, Outbox, dirty
from smqrt.loop.readiness import WRITE
from smqrt.transport.tls import Transport
from smqrt.wire.connection_state import Life, moved
from smqrt.wire.nats import PONG

WRITE_BYTES = 256 << 10
"""What is passed to the socket in one turn, about."""
LARGE_BYTES = 32 << 10
"""What is joined for one write, at most."""
_MESSAGE = b"PUB ", b"HPUB "


class NatsOutbox(Outbox):
    """Whole messages and lines, in order. BLOCKED while there is no connection, or its socket is full.

    Attributes:
        limit_bytes: the owner accepts no more messages above this size of the queue; the queue itself accepts all.
        queued_bytes: the size of the queue.
        sent_bytes: passed to the system, over all connections.
        progress_s: when the socket last took something, in monotonic seconds.
    """

    __slots__ = (
        "_has_pong",
        "_on_broken",
        "_torn_messages",
        "_transport",
        "_unsent",
        "_watcher",
        "limit_bytes",
        "progress_s",
        "sent_bytes",
    )

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.life = moved(self.life, BLOCKED)
        self._on_broken: Callable[[OSError], object] = lambda error: None
        self._transport: Transport | None = None
        self._watcher: Any = None
        self._unsent: memoryview | None = None
        self.limit_bytes = limit_bytes
        self._torn_messages = self.sent_bytes = 0
        self._has_pong = False
        self.progress_s = 0.0

    def add(self, entry: bytes) -> None:
        """Queue a whole message, or a line."""
        queue = self.queue
        if not queue and self.life is not BLOCKED:
            dirty.append(self)
        queue.append(entry)
        self.queued_bytes += len(entry)

    def add_pong(self) -> None:
        """Answer a PING. While the socket is full, only one answer is queued."""
        if self.life is not BLOCKED:
            self.add(PONG)
        elif not self._has_pong:
            self._has_pong = True
            self.add(PONG)

    # ---- the connection

    def attach(
        self, transport: Transport, lines: list[bytes], limit_bytes: int, on_broken: Callable[[OSError], object]
    ) -> None:
        """Send over a connection: `lines` first, then what is queued.

        Args:
            limit_bytes: see `NatsOutbox`; `lines` do not count.
            on_broken: called when a write fails.
        """
        self.queue[:0] = lines
        size_bytes = sum(map(len, lines))
        self.queued_bytes += size_bytes
        self.limit_bytes = limit_bytes + size_bytes
        self._transport, self._on_broken = transport, on_broken
        self._watcher = get_hub().loop.io(transport.fileno(), WRITE)
        self.life = moved(self.life, Life.OPEN)
        if self.queue:
            dirty.append(self)

    def detach(self, limit_bytes: int) -> int:
        """Keep whole messages for the next connection, `limit_bytes` at most.

        Returns:
            How many messages are lost: the newest ones above the limit, and those of a partial write, of which some may
            have arrived.
        """
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
        lost, self._torn_messages = self._torn_messages, 0
        self._transport = self._watcher = self._unsent = None
        self._has_pong = False
        if self.life is not BLOCKED:
            self.life = moved(self.life, BLOCKED)
        self.queue[:] = [entry for entry in self.queue if entry.startswith(_MESSAGE)]
        self.queued_bytes = sum(map(len, self.queue))
        self.limit_bytes = limit_bytes
        while self.queued_bytes > limit_bytes:
            self.queued_bytes -= len(self.queue.pop())
            lost += 1
        return lost

    # ---- writing

    def flush(self) -> None:
        """Write until the socket is full, or for a share of this turn."""
        until_bytes = self.sent_bytes + WRITE_BYTES
        while self.queue and self.sent_bytes < until_bytes:
            if not self._write(self._portion()):
                return
        if self.queue:
            dirty.append(self)

    def _write(self, entries: list[bytes]) -> bool:
        """Write entries; return whether the socket took them all."""
        data = entries[0] if len(entries) == 1 else b"".join(entries)
        sent = self._send(data)
        if sent is None:
            return False
        if sent:
            del self.queue[: len(entries)]
        if 0 < sent < len(data):
            self._unsent = memoryview(data)[sent:]
            self._torn_messages = sum(entry.startswith(_MESSAGE) for entry in entries)
        if sent < len(data) or self._has_ciphertext():
            self._block()
            return False
        return True

    def _portion(self) -> list[bytes]:
        """Return the entries of one write: small ones together, a large one alone, which saves a copy."""
        if self.queued_bytes <= LARGE_BYTES:
            return self.queue[:]
        size_bytes = count = 0
        for entry in self.queue:
            size_bytes += len(entry)
            if count and size_bytes > LARGE_BYTES:
                break
            count += 1
        return self.queue[:count]

    def _send(self, data: bytes | memoryview) -> int | None:
        """Write; return how much the socket took, or None when the connection is broken."""
        assert self._transport is not None
        try:
            sent = self._transport.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._on_broken(error)
            return None
        self.sent_bytes += sent
        self.queued_bytes -= sent
        return sent

    def _has_ciphertext(self) -> bool:
        return getattr(self._transport, "wants_write", False)

    def _block(self) -> None:
        self.life = moved(self.life, BLOCKED)
        self.progress_s = monotonic()
        self._watcher.start(self._writable)

    def wants_write(self) -> None:
        """Wait for the socket when TLS has data of its own to write."""
        if self.life is not BLOCKED and self._has_ciphertext():
            self._block()

    def _writable(self) -> None:
        self.progress_s = monotonic()
        if self._unsent is not None:
            sent = self._send(self._unsent)
            if sent is None:
                return
            self._unsent = self._unsent[sent:] or None
        if self._unsent is None and self._is_flushed():
            self._torn_messages, self._has_pong = 0, False
            self._watcher.stop()
            self.life = moved(self.life, Life.OPEN)
            if self.queue:
                dirty.append(self)

    def _is_flushed(self) -> bool:
        """Return whether TLS has written all; false also when the connection is broken."""
        if self._has_ciphertext():
            try:
                self._transport.flush()  # type: ignore[union-attr]
            except BlockingIOError:
                return False
            except OSError as error:
                self._on_broken(error)
                return False
        return True
