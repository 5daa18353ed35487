"""SMQ connections by transport, slow-consumer policies, and the check for idle clients.

The classes extend `RawConnection` by a WebSocket or TLS layer. Each layer may buffer data, in both directions.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from time import monotonic, time
from typing import Any

from gevent import get_hub

from smqrt.broker.outbox import BLOCKED, Backlog, QueuedMemory, run_in_background
from smqrt.broker.rare import Rare
from smqrt.broker.sessions import Session
from smqrt.errors import CloseReason, ProtocolError
from smqrt.settings.limits import Limit, LimitSettings
from smqrt.smq import data_path, forwarder
from smqrt.smq.connection import WRITE, RareSendState, RawConnection, chars, view
from smqrt.transport.tls import TlsTransport
from smqrt.wire import smq, websocket
from smqrt.wire.connection_state import Life
from smqrt.wire.websocket import Assembler, Frame

unmask = data_path.kernels.unmask


class RareWsState(RareSendState):
    """The attributes of a WebSocket that few clients use, see `WsConnection`."""

    __slots__ = ("assembler", "close_sent", "decoded")

    def __init__(self) -> None:
        super().__init__()
        self.assembler: Assembler | None = None
        self.close_sent = False
        self.decoded = b""


class WsConnection(RawConnection):
    """A client on a WebSocket (spec: smq §12.11).

    Its frames are converted into raw frames in the receive buffer, and then routed like raw frames.

    Attributes:
        assembler: collects a fragmented message.
        close_sent: whether the Close frame was sent.
        decoded: raw frames that were unmasked, but not routed because a hook paused the connection.
    """

    __slots__ = ()
    websocket = True
    takes_fragments = False
    no_rare: RareWsState = RareWsState()
    rare: RareWsState
    assembler = Rare[Assembler | None]()
    close_sent = Rare[bool]()
    decoded = Rare[bytes]()

    # ---- reading

    def feed(self, size: int) -> None:
        """Route the WebSocket frames in `chars[:size]`."""
        try:
            # The kernel unmasks the unfragmented messages at the front; Python handles the rest.
            assembler = self.rare.assembler
            written, used = (0, 0) if assembler and assembler.busy else unmask(size)
            rest = chars[used:size] if used < size else b""
            if written and not self._route_decoded(written):
                self.carry = rest
                return
            if not rest and view[2] == smq.Type.PUBLISH and written == view[0] << 8 | view[1]:
                self._count_single_message()
            elif self.joins_in < forwarder.JOIN_AFTER:
                self.joins_in = forwarder.JOIN_AFTER
            at = self._route_each_frame(rest) if rest else 0
            self.carry = rest[at:]
        except ProtocolError as error:
            self.session.fail(error)

    def _count_single_message(self) -> None:
        self.joins_in -= 1
        if not self.joins_in:
            self.join_forwarder()

    @property
    def is_plain(self) -> bool:
        """See `Outbox.is_plain`."""
        return type(self) is WsConnection and self.life is Life.OPEN and self.sock is self.transport

    def _route_each_frame(self, data: bytes) -> int:
        """Handle the frames of `data`; return the number of used bytes."""
        at, until_s = 0, data_path.defer_at_s()
        while not self.life.over:
            if time() >= until_s and at < len(data):
                self.defer()
                break
            frame, end = websocket.parse_client_frame(data, smq.MAX_PACKET_BYTES, at)
            if frame is None:
                break
            at = end
            message = self._handle_frame(frame)
            if message is None:
                continue
            if not message:
                raise ProtocolError(CloseReason.SHORT_PACKET)
            raw = smq.frame(message)
            view[: len(raw)] = raw
            if not self._route_decoded(len(raw)):
                break
        return at

    def _route_decoded(self, size: int) -> bool:
        """Route raw frames; return False when the connection is paused or closed."""
        used = self.route(size)
        if self.paused and used < size:
            self.decoded = chars[used:size]
        return not self.paused and not self.life.over

    def on_data_waiting(self) -> None:
        """Route the data that was decoded before a pause, then the received data."""
        decoded, self.decoded = self.rare.decoded, b""
        if decoded and not self.life.over:
            view[: len(decoded)] = decoded
            if not self._route_decoded(len(decoded)):
                return
        super().on_data_waiting()

    def _handle_frame(self, frame: Frame) -> bytes | None:
        """Handle a frame that the kernel did not unmask; return a message when one is complete."""
        if frame.opcode == websocket.PING:
            self.put(websocket.encode(websocket.PONG, frame.payload))
            return None
        if frame.opcode == websocket.CLOSE:
            self._send_close(websocket.check_close(frame.payload))
            self.session.disconnect(CloseReason.WEBSOCKET_CLOSED)
            return None
        if frame.opcode == websocket.PONG:
            return None
        if frame.fin and frame.opcode != websocket.CONTINUATION and not (self.assembler and self.assembler.busy):
            return websocket.checked(frame.opcode, frame.payload)
        if self.assembler is None:
            self.assembler = Assembler()
        return self.assembler.add(frame, smq.MAX_PACKET_BYTES)

    def _send_close(self, code: int) -> None:
        self.close_sent = True
        self.put(websocket.encode(websocket.CLOSE, websocket.close_payload(code)))

    # ---- writing

    def reply(self, packet: bytes) -> None:
        """Queue a control packet."""
        if not self.life.over:
            self.put(websocket.encode(websocket.BINARY, packet))

    @staticmethod
    def frame_bytes(batch: bytes, at: int) -> int:
        """Return the size of the WebSocket frame at `batch[at]`; frames of a server are not masked."""
        short = batch[at + 1]  # below 126 the payload's length, otherwise the mark of a 16-bit length (RFC 6455 §5.2)
        return short + 2 if short < 126 else (batch[at + 2] << 8 | batch[at + 3]) + 4

    @staticmethod
    def is_message(batch: bytes, at: int) -> bool:
        """Whether the WebSocket frame at `batch[at]` carries Publish: a final binary frame (0x82) with that type."""
        return batch[at] == 0x82 and batch[at + (2 if batch[at + 1] < 126 else 4)] == smq.Type.PUBLISH

    @staticmethod
    def topic_key(batch: bytes) -> bytes:
        """See `Outbox.topic_key`: the destination, behind the frame header and the packet type."""
        start = 3 if batch[1] < 126 else 5
        return batch[start : start + 4]

    @staticmethod
    def latest_key(batch: bytes) -> bytes:
        """See `Outbox.latest_key`: destination and sub-topic."""
        start = 3 if batch[1] < 126 else 5
        return batch[start : start + 4] + batch[start + 8 : start + 12]

    def _flush_before_close(self, reason: CloseReason) -> None:
        if not self.close_sent:
            self._send_close(websocket.close_code(reason))
        super()._flush_before_close(reason)


class OverTls(RawConnection):
    """Mixin for a connection whose `sock` is a `TlsTransport`."""

    __slots__ = ()
    sock: TlsTransport

    def greet(self, reply: bytes, hello: bytes) -> None:
        """Send the HTTP reply and Init in separate records: the Java client hangs when they share one."""
        if reply:
            self._send_at_once(reply)
        if not self.life.over:
            self._send_at_once(hello)

    def start(self, session: Session, data: bytes) -> None:
        """Begin to read, even data that was decrypted with the HTTP request: it does not make the socket readable."""
        super().start(session, data)
        if not self.life.over:
            get_hub().loop.run_callback(self._on_pending)

    def on_readable(self) -> None:
        """Receive, unless the turn is over: decryption takes milliseconds, even for records without a message."""
        if time() < data_path.defer_at_s():
            self._receive()
        else:
            self.defer()

    def _receive(self) -> None:
        """Receive; decrypted bytes that did not fit are read in the next turn, because no event reports them."""
        super().on_readable()
        if not self.life.over and not self.paused and self.sock.has_pending:
            get_hub().loop.run_callback(self._on_pending)

    def _on_pending(self) -> None:
        if (
            not self.life.over
            and not self.paused
            and self.sock.has_pending
            and self not in data_path.frozen_connections
        ):
            self.on_readable()

    def resume_now(self) -> None:
        """See `RawConnection.resume_now`. A deferred connection receives at once; else others would always be first."""
        super().resume_now()
        if not self.paused and not self.life.over and self not in data_path.frozen_connections:
            self._receive()

    def _advance(self, sent: int) -> None:
        super()._advance(sent)
        self._watch_ciphertext()

    def flush(self) -> None:
        """Send the queue; ciphertext that the socket did not accept waits until it is writable."""
        super().flush()
        self._watch_ciphertext()

    def put_view(self, view: memoryview) -> None:
        """See `RawConnection.put_view`."""
        super().put_view(view)
        self._watch_ciphertext()

    def _watch_ciphertext(self) -> None:
        if not self.life.over and self.life is not Life.BLOCKED and self.sock.wants_write:
            if self.writer is None:
                self.writer = get_hub().loop.io(self.watcher.fd, WRITE)
            self.writer.start(self.on_writable)
            data_path.mark_blocked(self)

    def on_writable(self) -> None:
        """Send more when the socket is writable again: ciphertext first, then the queue."""
        if self.sock.wants_write:
            data_path.mark_progress(self)  # the socket is writable, so it accepts some bytes
            try:
                self.sock.flush()
            except BlockingIOError:
                return
            except OSError:
                self.lost(CloseReason.WRITE_FAILED)
                return
        if self.life is Life.BLOCKED:
            super().on_writable()
        elif self.writer is not None:
            self.writer.stop()
            data_path.unblocked(self)


class TlsRawConnection(OverTls, RawConnection):
    """A client on a raw socket over TLS."""

    __slots__ = ()


class TlsWsConnection(OverTls, WsConnection):
    """A client on a WebSocket over TLS."""

    __slots__ = ()


# ---- Connections with slow-consumer policies
#
# They have a `Backlog` while the client does not read. `broker/outbox.py` implements the policies. Connections of hubs
# without policies use the classes of `connection.py` and those above.


class _Policed(RawConnection):
    """Mixin for a connection. It has no attributes, so that `police` can change the class of an open connection."""

    __slots__ = ()

    def held(self, batch: bytes) -> None:
        """See `Outbox.held`."""
        size = len(batch)
        self.queued_bytes += size
        QueuedMemory.total_bytes += size
        backlog = self.rare.backlog
        if backlog is not None and backlog.take(self, batch):
            self.overloaded()

    def _drop_over_budget(self) -> None:
        """Apply the policies to the queue when the socket blocks."""
        slow = self.session.broker.slow
        if slow is None:  # the policies were just removed
            super()._drop_over_budget()
            return
        self.backlog = backlog = Backlog(slow)
        # All entries are appended again, so that the backlog records their positions; not the partly sent one.
        first = 1 if self.torn else 0
        batches = self.queue[first:]
        del self.queue[first:]
        self.released(sum(map(len, batches)))
        is_over = False
        for batch in batches:
            self.queue.append(batch)
            self.released(-len(batch))
            is_over = backlog.take(self, batch) or is_over
        if is_over:
            self.overloaded()

    def backpressure_started(self) -> None:
        """See `Outbox.backpressure_started`."""
        data_path.start_backpressure(self)

    def backpressure_ended(self) -> None:
        """See `Outbox.backpressure_ended`."""
        data_path.end_backpressure(self)

    def expire_backpressure(self) -> None:
        """End the backpressure of this client; later messages that exceed its budget are dropped."""
        if self.backlog is not None:
            self.backlog.wait_expired = True
            self.backlog.policies.pressure.release(self)

    def on_writable(self) -> None:
        """See `RawConnection.on_writable`."""
        self._compact_queue()
        super().on_writable()

    def _advance(self, sent: int) -> None:
        backlog, entries = self.backlog, len(self.queue)
        super()._advance(sent)
        if backlog is not None and backlog is self.backlog:
            backlog.left(entries - len(self.queue))
            if self.queued_bytes <= self.budget_bytes >> 1:  # not at the budget: publishers would stop again at once
                backlog.policies.pressure.release(self)

    def _unblock(self) -> None:
        super()._unblock()
        backlog, self.backlog = self.backlog, None
        if backlog is not None:
            backlog.policies.pressure.release(self)

    def _drop_messages(self) -> None:
        self._compact_queue()
        super()._drop_messages()

    def _count_undelivered(self) -> None:
        self._compact_queue()
        super()._count_undelivered()

    def _compact_queue(self) -> None:
        if self.backlog is not None:
            self.backlog.compact(self)


class PolicedRawConnection(_Policed, RawConnection):
    """See `RawConnection`."""

    __slots__ = ()


class PolicedWsConnection(_Policed, WsConnection):
    """See `WsConnection`."""

    __slots__ = ()


class PolicedTlsRawConnection(_Policed, TlsRawConnection):
    """See `TlsRawConnection`."""

    __slots__ = ()


class PolicedTlsWsConnection(_Policed, TlsWsConnection):
    """See `TlsWsConnection`."""

    __slots__ = ()


_POLICED: dict[type[RawConnection], type[RawConnection]] = {
    RawConnection: PolicedRawConnection,
    WsConnection: PolicedWsConnection,
    TlsRawConnection: PolicedTlsRawConnection,
    TlsWsConnection: PolicedTlsWsConnection,
}
_PLAIN = {policed: plain for plain, policed in _POLICED.items()}


def connection_class(secure: bool, on_websocket: bool, policed: bool) -> type[RawConnection]:
    """Return the class of a connection.

    Args:
        secure: whether it uses TLS.
        on_websocket: whether it is a WebSocket.
        policed: whether the hub has slow-consumer policies.
    """
    plain: type[RawConnection]
    if secure:
        plain = TlsWsConnection if on_websocket else TlsRawConnection
    else:
        plain = WsConnection if on_websocket else RawConnection
    return _POLICED[plain] if policed else plain


def police(connection: RawConnection, policed: bool) -> None:
    """Apply the policies of the hub to an open connection, or remove them."""
    known = _POLICED if policed else _PLAIN
    other = known.get(type(connection))
    if isinstance(connection, _Policed):
        connection._compact_queue()
        if connection.backlog is not None:
            connection.backlog.policies.pressure.release(connection)
            connection.backlog = None
    if other is not None:
        connection.leave_forwarder()
        forwarder.withdraw(connection)
        connection.__class__ = other
        if connection.writer is not None and connection.writer.active:  # its callback is a method of the former class
            connection.writer.stop()
            connection.writer.start(connection.on_writable)
    if policed and connection.life is BLOCKED:
        connection._drop_over_budget()


# ---- Idle clients
#
# The kernel measures how long a client has been silent (`TCP_INFO`), so that receiving has no extra cost. Over
# WebSockets the ping is a WebSocket frame, which every client answers (RFC 6455); over raw sockets it is an SMQ packet.

IDLE = Limit("idle", "limits.idle_s", "a client that is silent for this long must answer a ping")
MIN_CHECK_S = 0.1
"""Minimum interval of checks, even for very short limits."""
_U32 = struct.Struct("I")
_LAST_DATA_RECEIVED_AT, _TCP_INFO_BYTES = 52, 104
"""The offset of `tcpi_last_data_recv`, in milliseconds, in `struct tcp_info` (linux/tcp.h; its start never changes)."""


def silent_s(connection: RawConnection) -> float:
    """Return the seconds since the client last sent data; 0 when that is unknown."""
    try:
        info = connection.transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return float(_U32.unpack_from(info, _LAST_DATA_RECEIVED_AT)[0]) / 1000
    except (OSError, struct.error):
        return 0.0  # a closed socket, or not a TCP socket


class IdleClients:
    """Checks the clients of all hubs periodically.

    Args:
        clients: returns all clients of this process.
    """

    def __init__(self, clients: Callable[[], Iterable[Session]]) -> None:
        self._clients = clients
        self._timer: Any = None
        self._pinged_s: dict[Session, float] = {}
        self._is_checking = False
        self._idle_s = self._answer_s = 0.0

    def apply(self, settings: LimitSettings) -> None:
        """Apply new limits."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None
        self._pinged_s.clear()
        if settings.idle_s is None:
            return
        self._idle_s, self._answer_s = settings.idle_s, settings.idle_answer_s
        # A quarter of the shorter time: a client is disconnected at most that much too late.
        check_s = max(MIN_CHECK_S, min(self._idle_s, self._answer_s) / 4)
        self._timer = get_hub().loop.timer(check_s, check_s, ref=False)
        self._timer.start(self._check_all)

    def _check_all(self) -> None:
        if not self._is_checking:
            self._is_checking = True
            run_in_background(self._steps(list(self._clients())))

    def _steps(self, clients: Iterable[Session]) -> Iterator[None]:
        try:
            for session in clients:
                connection = session.outbox
                if isinstance(connection, RawConnection) and not session.closed:
                    self._check(session, connection)
                yield
            for session in [one for one in self._pinged_s if one.closed]:
                del self._pinged_s[session]
        finally:
            self._is_checking = False

    def _check(self, session: Session, connection: RawConnection) -> None:
        if connection.protocol == "mqtt":  # its keep-alive applies, and it would not answer a ping
            return
        silence_s = silent_s(connection)
        # A blocked connection has another deadline, `DataPathLimits.stalled_s`. The answer of a paused one is not read.
        if silence_s < self._idle_s or connection.paused or connection.life is BLOCKED:
            self._pinged_s.pop(session, None)
            return
        now_s = monotonic()
        pinged_s = self._pinged_s.get(session)
        if pinged_s is None:
            self._pinged_s[session] = now_s
            if connection.websocket:
                connection.put(websocket.encode(websocket.PING, b""))
            else:
                connection.reply(smq.PING)
        elif now_s - pinged_s >= self._answer_s and silence_s >= now_s - pinged_s:
            del self._pinged_s[session]
            IDLE.refused(f"the client {ascii(session.uid[:64])[1:]}", f"it was silent for {silence_s:.0f} s")
            session.disconnect(CloseReason.IDLE, None, f"silent for {silence_s:.0f} s")
