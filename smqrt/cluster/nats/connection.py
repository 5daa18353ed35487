"""Connection to a NATS server, its handshake and send queue.

The handshake blocks a greenlet. After it, the connection consists of callbacks of the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic, time
from typing import Any, NamedTuple, Protocol

import gevent
from gevent import get_hub

from smqrt import __version__
from smqrt.broker.outbox import BLOCKED, Outbox, backlog, dirty
from smqrt.cluster.nats.options import NatsAddress, NatsOptions, jwt_fields, nkey_fields
from smqrt.errors import ArgumentError, NatsError, StreamError
from smqrt.loop.scheduling import READ, WRITE
from smqrt.loop.threads import in_thread
from smqrt.smq import data_path
from smqrt.transport.stream import Stream
from smqrt.transport.tls import Transport
from smqrt.transport.tls_contexts import ClientTls, Trust
from smqrt.wire import nats
from smqrt.wire.connection_state import Life, transition
from smqrt.wire.nats import PONG, NatsDecoder, ServerInfo

# ---- Send queue
#
# It writes once per turn of the event loop, and is used for all connections of a client.

WRITE_BYTES = 256 << 10
"""The approximate number of bytes that are passed to the socket in one turn."""
LARGE_BYTES = 32 << 10
"""The maximum number of bytes that are joined for one write."""
_MESSAGE = b"PUB ", b"HPUB "
"""The beginnings of messages; other entries are lines for one connection."""


class NatsOutbox(Outbox):
    """Whole messages and lines, in order. BLOCKED while there is no connection, or its socket is full.

    Attributes:
        limit_bytes: the maximum size of the queue; its owner checks it.
        queued_bytes: the size of the queue.
        sent_bytes: bytes passed to the system, over all connections.
        progress_s: when the socket last accepted data, in monotonic seconds.
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
        self.life = transition(self.life, BLOCKED)
        self._on_broken: Callable[[OSError], object] = lambda error: None
        self._transport: Transport | None = None
        self._watcher: Any = None
        self._unsent: memoryview | None = None
        self.limit_bytes = limit_bytes
        self._torn_messages = self.sent_bytes = 0
        self._has_pong = False
        self.progress_s = 0.0

    def add(self, entry: bytes) -> None:
        """Queue a whole message or line."""
        queue = self.queue
        if not queue and self.life is not BLOCKED:
            dirty.append(self)
        queue.append(entry)
        self.queued_bytes += len(entry)

    def add_pong(self) -> None:
        """Answer a PING. While the socket is full, only one answer is queued, so that PINGs cannot fill the memory."""
        if self.life is not BLOCKED:
            self.add(PONG)
        elif not self._has_pong:
            self._has_pong = True
            self.add(PONG)

    # ---- the connection

    def attach(
        self, transport: Transport, lines: list[bytes], limit_bytes: int, on_broken: Callable[[OSError], object]
    ) -> None:
        """Send over a connection: `lines` first, then the queue.

        Args:
            transport: the connection.
            lines: whole lines.
            limit_bytes: see `NatsOutbox`; `lines` do not count.
            on_broken: called when a write fails.
        """
        self.queue[:0] = lines
        size_bytes = sum(map(len, lines))
        self.queued_bytes += size_bytes
        self.limit_bytes = limit_bytes + size_bytes
        self._transport, self._on_broken = transport, on_broken
        self._watcher = get_hub().loop.io(transport.fileno(), WRITE)
        self.life = transition(self.life, Life.OPEN)
        if self.queue:
            dirty.append(self)

    def detach(self, limit_bytes: int) -> int:
        """Keep whole messages for the next connection, `limit_bytes` at most.

        Returns:
            The number of lost messages: the newest ones above the limit, and those of a partial write. Some of the
            latter may have arrived.
        """
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
        lost, self._torn_messages = self._torn_messages, 0
        self._transport = self._watcher = self._unsent = None
        self._has_pong = False
        if self.life is not BLOCKED:
            self.life = transition(self.life, BLOCKED)
        self.queue[:] = [entry for entry in self.queue if entry.startswith(_MESSAGE)]
        self.queued_bytes = sum(map(len, self.queue))
        self.limit_bytes = limit_bytes
        while self.queued_bytes > limit_bytes:
            self.queued_bytes -= len(self.queue.pop())
            lost += 1
        return lost

    # ---- writing

    def flush(self) -> None:
        """Write until the socket is full, or about `WRITE_BYTES`."""
        until_bytes = self.sent_bytes + WRITE_BYTES
        while self.queue and self.sent_bytes < until_bytes:
            entries = self._portion()
            data = entries[0] if len(entries) == 1 else b"".join(entries)
            sent = self._send(data)
            if sent is None:
                return
            if sent:
                del self.queue[: len(entries)]
            if 0 < sent < len(data):
                self._unsent = memoryview(data)[sent:]
                self._torn_messages = sum(entry.startswith(_MESSAGE) for entry in entries)
            if sent < len(data) or self._has_ciphertext():
                self._block()
                return
        if self.queue:
            dirty.append(self)

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
        """Write; return the number of bytes that the socket accepted, or None when the connection is broken."""
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
        self.life = transition(self.life, BLOCKED)
        self.progress_s = monotonic()
        self._watcher.start(self._writable)

    def wants_write(self) -> None:
        """Wait until the socket is writable, if TLS has ciphertext to write."""
        if self.life is not BLOCKED and self._has_ciphertext():
            self._block()

    def _writable(self) -> None:
        self.progress_s = monotonic()
        if self._unsent is not None:
            sent = self._send(self._unsent)
            if sent is None:
                return
            self._unsent = self._unsent[sent:] or None
        if self._unsent is not None:
            return
        if self._has_ciphertext():
            try:
                self._transport.flush()  # type: ignore[union-attr]
            except BlockingIOError:
                return
            except OSError as error:
                self._on_broken(error)
                return
        self._torn_messages, self._has_pong = 0, False
        self._watcher.stop()
        self.life = transition(self.life, Life.OPEN)
        if self.queue:
            dirty.append(self)


# ---- Handshake: TCP, INFO, TLS, CONNECT, PONG

_AUTHENTICATION = ("authorization", "authentication", "credentials")
"""Words, in lower case, of -ERR texts about authentication."""
_REMEDY = {
    Trust.CERTCN: "it is not valid at this time",
    Trust.CERT: "it is for another name: give tls_hostname",
    Trust.CN: "it is from an unknown authority: give tls_ca",
    Trust.NONE: "it is from an unknown authority and for another name: give tls_ca",
}


class RefusedError(NatsError):
    """The server rejects this client, or is not trusted. Retries fail until the configuration changes."""


class Greeted(NamedTuple):
    """The result of the handshake.

    Attributes:
        transport: the connection.
        decoder: may have the first part of a message; the owner sets its events.
        info: the INFO of the server.
    """

    transport: Transport
    decoder: NatsDecoder
    info: ServerInfo


def refusal(text: str) -> str | None:
    """Return a sentence with a remedy for an -ERR about authentication; None for other errors."""
    if not any(word in text.lower() for word in _AUTHENTICATION):
        return None
    return (
        f"the server rejects this client ({text}); check the user and password in its address, or user, token, "
        "nkey_file or credentials_file"
    )


def greet(address: NatsAddress, tls: ClientTls, options: NatsOptions) -> Greeted:
    """Connect to a server. Blocks the greenlet for at most `connect_timeout_s`.

    Raises:
        StreamError: there is no connection.
        RefusedError: the server rejects this client or is not trusted, or a file with credentials is invalid.
        NatsError: the server uses another protocol.
    """
    end_s = monotonic() + options.connect_timeout_s
    stream = Stream.connect(address.host, address.port, options.connect_timeout_s)
    late = StreamError("timeout", f"{address} did not accept within {options.connect_timeout_s:g} s")
    try:
        with gevent.Timeout(max(end_s - monotonic(), 0.001), late):
            return _Greeter(stream, address, tls, options).greet()
    except BaseException:
        stream.close()
        raise


class _Greeter:
    """The handshake, which receives the events of the decoder until it is complete."""

    def __init__(self, stream: Stream, address: NatsAddress, tls: ClientTls, options: NatsOptions) -> None:
        self._stream, self._address, self._tls, self._options = stream, address, tls, options
        self._decoder = NatsDecoder(self)
        self._info: ServerInfo | None = None
        self._is_accepted = False
        self._error = ""

    def greet(self) -> Greeted:
        if self._options.tls_first:
            self._secure()
        while self._info is None:
            self._read()
        if self._stream.tls is None:
            wanted = self._address.secure or self._options.wants_tls
            if wanted and not (self._info.tls_required or self._info.tls_available):
                raise RefusedError(f"{self._address} does not support TLS, which is required; nothing is sent to it")
            if wanted or self._info.tls_required:
                self._secure()
        fields: dict[str, object] = {
            "verbose": False,
            "pedantic": False,
            "tls_required": self._stream.tls is not None,
            "name": self._options.name,
            "lang": "python",
            "version": __version__,
            "protocol": 1,
            "echo": self._options.echo,
            "headers": self._info.headers,
            "no_responders": self._info.headers,
        }
        # The answer to the PING shows that CONNECT was accepted: servers answer CONNECT only with an -ERR.
        self._stream.write(nats.connect(fields | self._credentials(self._info.nonce)) + nats.PING)
        while not self._is_accepted:
            self._read()
        transport, _ = self._stream.release()
        return Greeted(transport, self._decoder, self._info)

    def _read(self) -> None:
        data = self._stream.read()
        if not data:
            raise StreamError("socketclosed", f"{self._address} closed the connection {self._error}".strip())
        self._decoder.feed(data)
        while self._decoder.decode():
            pass

    def _secure(self) -> None:
        host, other = self._address.host, self._options.tls_hostname or self._address.tls_hostname
        self._stream.starttls(self._tls.context(), other or host, timeout_s=self._options.connect_timeout_s)
        assert self._stream.tls is not None
        chain = self._stream.tls.peer_chain()
        trusts = [self._tls.store.judge(chain, name) for name in dict.fromkeys((other or host, host))]
        if Trust.TRUSTED not in trusts:
            raise RefusedError(f"the certificate of {self._address} is not trusted: {_REMEDY[trusts[0]]}")

    def _credentials(self, nonce: str) -> dict[str, object]:
        options, address = self._options, self._address
        if address.user is not None:
            if address.password is None:
                return {"auth_token": address.user}
            return {"user": address.user, "pass": address.password}
        if options.user is not None:
            return {"user": options.user, "pass": options.password or ""}
        if options.token is not None:
            return {"auth_token": options.token}
        read, path = (nkey_fields, options.nkey_file) if options.nkey_file else (jwt_fields, options.credentials_file)
        if path is None or not nonce:  # the server does not request a signature
            return {}
        try:
            return in_thread(read, path, nonce)
        except ArgumentError as error:
            raise RefusedError(str(error)) from None

    # ---- events

    def on_message(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        raise NatsError("the server sent a message before a subscription")

    def on_info(self, info: ServerInfo) -> None:
        self._info = info

    def on_ping(self) -> None:
        self._stream.push_or_forget(nats.PONG)

    def on_pong(self) -> None:
        self._is_accepted = True

    def on_error(self, text: str) -> None:
        if (sentence := refusal(text)) is not None:
            raise RefusedError(f"{self._address}: {sentence}")
        self._error = f"({text})"


RECEIVE_BYTES = 256 << 10
_MAX_TICK_S = 1.0
_TICKS_PER_WAIT = 4

_buffer = bytearray(RECEIVE_BYTES)  # shared by all connections: each copies received data at once
_view = memoryview(_buffer)


class Owner(Protocol):
    """The client of a connection. Its methods are called from the event loop and must not block."""

    def deliver(self, sid: bytes, subject: bytes, reply: bytes, payload: bytes, headers: bytes) -> None:
        """Process a message."""

    def informed(self, connection: NatsConnection) -> None:
        """Process a new INFO of the server."""

    def complained(self, connection: NatsConnection, text: str) -> None:
        """Process an -ERR of the server."""

    def lost(self, connection: NatsConnection, reason: str) -> None:
        """Handle the end of the connection, unless `close` was called."""


class NatsConnection:
    """A connection after the handshake.

    Args:
        owner: the client.
        address: the server.
        greeted: the result of the handshake.
        outbox: the send queue, which the connection uses from now on.
        options: the options of the client.
        lines: lines to send before the queue of `outbox`.

    Attributes:
        info: the newest INFO of the server.
        since_s: when it was made, in monotonic seconds.
        is_open: whether it has not ended.
        lost_messages: the number of queued messages that were lost with it.
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
        outbox.attach(greeted.transport, lines, options.queue_bytes, self._write_failed)
        loop: Any = get_hub().loop
        self._watcher = loop.io(self._transport.fileno(), READ)
        self._watcher.start(self._readable)
        # Several ticks in each time limit, so that the delay of a ping is a fraction of the limit.
        tick_s = min(options.ping_s / _TICKS_PER_WAIT, options.pong_s / _TICKS_PER_WAIT, _MAX_TICK_S)
        self._ticker = loop.timer(tick_s, tick_s)
        self._ticker.start(self._tick)
        if self._has_pending():
            self._defer()

    @property
    def messages(self) -> int:
        """The number of received messages."""
        return self._decoder.messages

    @property
    def payload_bytes(self) -> int:
        """The number of received bytes of payload and headers."""
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
            self.lose(f"the server violated the protocol: {error}")
            return
        self._deliver_messages()
        if self.is_open and not self._is_paused and self._has_pending():
            self._defer()  # TLS has received it already, so the socket does not become readable

    def _deliver_messages(self) -> None:
        """Deliver messages until the share of this turn is used up; the rest follows in a later turn."""
        until_s = data_path.defer_at_s()
        try:
            while self._decoder.decode() and self.is_open:
                if backlog or time() >= until_s:
                    self._defer()
                    return
        except NatsError as error:
            self.lose(f"the server violated the protocol: {error}")

    def _has_pending(self) -> bool:
        return getattr(self._transport, "has_pending", False)

    def _defer(self) -> None:
        self._is_paused = True
        self._watcher.stop()
        data_path.deferred_reads.append(self)

    def resume_now(self) -> None:
        """Continue reading; called by the event loop after `_defer`."""
        if not self.is_open:
            return
        self._is_paused = False
        self._watcher.start(self._readable)
        self._deliver_messages()
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

    # ---- pings

    def ping(self, then: Callable[[bool], object]) -> None:
        """Send PING after the queue; call `then` with true for the answer, or false if the connection ends first."""
        self._pongs.append(then)
        self._outbox.add(nats.PING)

    def _tick(self) -> None:
        now_s, outbox, options = monotonic(), self._outbox, self._options
        if outbox.life is BLOCKED and now_s - outbox.progress_s >= options.pong_s:
            self.lose(f"the server read nothing for {options.pong_s:g} s")
        elif now_s - self._heard_s < options.ping_s or self._is_paused:  # when paused, received data is not read yet
            return
        elif self._pinged_s < self._heard_s:  # no ping since the last data
            self._pinged_s = now_s
            self.ping(lambda is_answered: None)
        elif now_s - self._pinged_s >= options.pong_s:
            heard_s = self._heard_s
            self._readable()  # the answer may have arrived while this process was suspended
            if self._heard_s == heard_s:
                self.lose(f"the server did not answer for {options.pong_s:g} s")

    # ---- the end

    def _write_failed(self, error: OSError) -> None:
        self.lose(f"writing failed: {error.strerror or error}")

    def lose(self, reason: str) -> None:
        """End the connection, and call `lost` of the owner."""
        if self.is_open:
            self.close()
            self._owner.lost(self, reason)

    def close(self) -> None:
        """End the connection."""
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
