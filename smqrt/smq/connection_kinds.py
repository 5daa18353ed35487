"""SMQ connections over WebSocket, over TLS, and over both.

They are `RawConnection`s with a layer between. Each layer may hold data back, in both directions.
"""

from __future__ import annotations

from time import time

from gevent import get_hub

from smqrt.broker.session import Session
from smqrt.errors import CloseReason, ProtocolError
from smqrt.loop.readiness import Watcher
from smqrt.smq import data_path
from smqrt.smq.connection import WRITE, RawConnection, chars, view
from smqrt.transport.tls import ClientSocket, TlsTransport
from smqrt.wire import smq, websocket
from smqrt.wire.connection_state import Life
from smqrt.wire.websocket import Assembler, Frame

unmask = data_path.kernels.unmask


class WsConnection(RawConnection):
    """A client on a WebSocket (spec: smq §12.11).

    Its frames are converted into raw frames in the receive buffer, and routed as those.

    Attributes:
        assembler: collects a fragmented message.
        close_sent: whether the Close frame was sent.
        decoded: raw frames that were unmasked but not routed when a hook paused the connection.
    """

    __slots__ = ("assembler", "close_sent", "decoded")
    websocket = True
    takes_fragments = False

    def __init__(self, sock: ClientSocket, watcher: Watcher) -> None:
        super().__init__(sock, watcher)
        self.assembler: Assembler | None = None
        self.decoded = b""
        self.close_sent = False

    # ---- reading

    def feed(self, size: int) -> None:
        """Route the WebSocket frames in `chars[:size]`."""
        try:
            # The kernel unmasks the plain messages at the front; from the first other frame on, Python takes over.
            written, used = (0, 0) if self.assembler and self.assembler.busy else unmask(size)
            rest = chars[used:size] if used < size else b""
            if written and not self._route_decoded(written):
                self.carry = rest
                return
            at = self._route_each_frame(rest) if rest else 0
            self.carry = rest[at:]
        except ProtocolError as error:
            self.session.fail(error)

    def _route_each_frame(self, data: bytes) -> int:
        """Handle the frames of `data`; return how many bytes were used."""
        at, until_s = 0, data_path.share_ends_s()
        while not self.life.over:
            if time() >= until_s and at < len(data):
                self.give_way()
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
        """Route what was decoded before a pause, then what was received."""
        decoded, self.decoded = self.decoded, b""
        if decoded and not self.life.over:
            view[: len(decoded)] = decoded
            if not self._route_decoded(len(decoded)):
                return
        super().on_data_waiting()

    def _handle_frame(self, frame: Frame) -> bytes | None:
        """Handle a frame that the kernel left; return a message when one is complete."""
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
    def frame_bytes(run: bytes, at: int) -> int:
        """The size of the WebSocket frame at `run[at]`; frames of a server are not masked."""
        short = run[at + 1]
        return short + 2 if short < 126 else (run[at + 2] << 8 | run[at + 3]) + 4

    @staticmethod
    def is_message(run: bytes, at: int) -> bool:
        """Whether the WebSocket frame at `run[at]` carries Publish: a final binary frame (0x82) with that type."""
        return run[at] == 0x82 and run[at + (2 if run[at + 1] < 126 else 4)] == smq.Type.PUBLISH

    @staticmethod
    def topic_key(run: bytes) -> bytes:
        """See `Outbox.topic_key`: the destination, behind the frame header and the packet type."""
        start = 3 if run[1] < 126 else 5
        return run[start : start + 4]

    @staticmethod
    def latest_key(run: bytes) -> bytes:
        """See `Outbox.latest_key`: destination and sub-topic."""
        start = 3 if run[1] < 126 else 5
        return run[start : start + 4] + run[start + 8 : start + 12]

    def _last_words(self, reason: CloseReason) -> None:
        if not self.close_sent:
            self._send_close(websocket.close_code(reason))
        super()._last_words(reason)


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
        """Begin to read; data that was decrypted with the HTTP request does not make the socket readable."""
        super().start(session, data)
        if not self.life.over:
            get_hub().loop.run_callback(self._on_pending)

    def on_readable(self) -> None:
        """Receive, unless the turn is over: records of TLS itself take milliseconds, too, without any message."""
        if time() < data_path.share_ends_s():
            self._receive()
        else:
            self.give_way()

    def _receive(self) -> None:
        """Receive; decrypted bytes that did not fit are read in the next turn, since no event reports them."""
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

    def go_on(self) -> None:
        """See `RawConnection.go_on`; a deferred connection receives at once, or others might be first each time."""
        super().go_on()
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
            data_path.mark_progress(self)  # the socket is writable, so it accepts some
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
