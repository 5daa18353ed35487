"""Connections of MQTT clients: over TCP, TLS and WebSockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from struct import Struct
from time import time
from typing import Any, TypeVar

from gevent import Timeout

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.client import ACKNOWLEDGEMENTS, MqttClient
from smqrt.broker.mqtt.messages import mqtt_batch
from smqrt.broker.outbox import BLOCKED, backlog
from smqrt.errors import CloseReason, MqttError, ProtocolError
from smqrt.loop.scheduling import Watcher
from smqrt.smq import data_path
from smqrt.smq.connection import (
    LARGE_BATCH_BYTES,
    RawConnection,
    chars,
    partitioned,
    view,
)
from smqrt.smq.connection_kinds import OverTls
from smqrt.smq.handshake import Admission, BootstrapRequest, DetachedConnection, Origin
from smqrt.transport.tls import ClientSocket
from smqrt.wire import websocket
from smqrt.wire.kernels import ROW_MESSAGES
from smqrt.wire.mqtt.packets import PacketSplitter
from smqrt.wire.smq import Type
from smqrt.wire.websocket import Frame

log = logging.getLogger("smqrt")
publishes = data_path.kernels.publishes
packet_numbers: Any = data_path.kernels.packet_numbers

T = TypeVar("T")
ACKNOWLEDGEMENT_BYTES = 4
"""The size of an acknowledgement without a reason."""
ROW_ACKNOWLEDGEMENTS = 100
_NUMBERS = [Struct(">" + "xxH" * count) for count in range(ROW_ACKNOWLEDGEMENTS + 1)]
"""Packet identifiers of so many acknowledgements."""
TAIL_BYTES = 64
"""The kernel is not called again for a smaller rest behind a row of messages, which has hardly any more of them."""
ROWS_PER_RECEIVE = 64
"""Further rows of one receive are handled packet by packet, with a look at the clock."""
MAX_CARRY_BYTES = 16384
"""A longer beginning of a packet is collected elsewhere: it would be copied at each receive."""
PACKETS_PER_CHECK = 16
"""Packets between two readings of the clock."""
FRAMES_PER_TURN = 500
"""WebSocket frames that are handled at once; a client may send frames of one byte."""
UNSUPPORTED_DATA = 1003
"""The WebSocket close code for a text frame (RFC 6455 §7.4.1, MQTT 5 §6.0.0-1)."""
MAX_TIMER_S = 30.0
CONNECT_BYTES = 256 << 10
"""The largest CONNECT packet: it comes before the login."""
_CONNECT = 0x10  # the first byte
_PUBLISH, _QOS = 0x30, 0x06


class MqttConnection(RawConnection):
    """An MQTT client on a raw socket.

    Attributes:
        heard_s: when the last bytes arrived, on the clock of `time.time`.
    """

    __slots__ = ("_is_resuming", "_limit_bytes", "_splitter", "deadline_s", "heard_s")
    takes_fragments = False
    protocol = "mqtt"
    session: MqttClient

    def __init__(self, sock: ClientSocket, watcher: Watcher, limit_bytes: int) -> None:
        super().__init__(sock, watcher)
        self._limit_bytes = limit_bytes
        self._splitter = PacketSplitter(min(limit_bytes, CONNECT_BYTES))
        self._splitter.only = _CONNECT
        self.heard_s = time()
        self.deadline_s = 0.0
        self._is_resuming = False

    # ---- migration, see `session_migration`

    @property
    def is_busy(self) -> bool:
        """Whether a packet of the client, which is not read, is unfinished, and will be for an unknown time."""
        if self.session.held:  # its acknowledgements wait for the disk
            return True
        return self.paused and not (self._is_resuming or self.session.can_finish)

    def finish_packets(self) -> None:
        """End the waiting for slow subscribers or the publish rate: the client migrates."""
        packet = self.session.finish()
        if packet is not None:
            self._splitter.put_back(*packet)

    def record(self) -> dict[str, Any]:
        """Return the received bytes that are not handled, and the limit of packets."""
        return {
            "limit": self._limit_bytes,
            "mqtt": self._splitter.rest + self.carry,
            "frames": b"",
            "ws": self.websocket,
        }

    def restore(self, record: dict[str, Any]) -> None:
        """Continue with received bytes, see `record`; the next packet is not CONNECT."""
        self._splitter.only, self._splitter.limit_bytes = 0, self._limit_bytes
        self._splitter.feed(record["mqtt"])

    def begin_again(self) -> None:
        """Check the keep-alive from now on, and send what waits in the session."""
        if self.session.keepalive_s:
            self.set_deadline(self.session.keepalive_s)
        if self.session.device is not None:
            self.session.device.pump()

    # ---- reading

    def on_readable(self) -> None:
        """Receive once, and handle the packets."""
        held, got = len(self.carry), self.receive()
        if got:
            self.heard_s = time()
            self.carry = b""
            self.feed(held + got)

    def feed(self, size: int) -> None:
        """Handle received bytes: rows of messages in a kernel, other packets one by one."""
        if backlog and size >= LARGE_BATCH_BYTES:  # queues wait to be flushed, and bulk messages would fill them
            self.carry = view[:size].tobytes()
            self.defer()
            return
        used = 0
        session = self.session
        if session.device is not None and not session.broker.traces and self._splitter.is_empty:
            used = self._guarded(self._handle_rows, size) or 0
        if used < size and not self.life.over:
            self._take(view[used:size].tobytes())

    def _handle_rows(self, size: int) -> int:
        """Handle the leading rows of similar packets; return how many bytes these are."""
        session, at, rows, last = self.session, 0, 0, -1
        while size - at >= ACKNOWLEDGEMENT_BYTES and rows < ROWS_PER_RECEIVE and not (self.paused or self.life.over):
            first = view[at]
            if first in ACKNOWLEDGEMENTS:
                end = self._acknowledgement_row(at, size)
            elif first == session.run_first and (first != last or size - at > TAIL_BYTES):
                end = self._publish_row(at, size)
            else:
                break
            if end == at:
                break
            at, rows, last = end, rows + 1, first
        return at

    def _acknowledgement_row(self, at: int, size: int) -> int:
        """Handle a row of acknowledgements without reasons; return where it ends."""
        session, first = self.session, view[at]
        count = min((size - at) // ACKNOWLEDGEMENT_BYTES, ROW_ACKNOWLEDGEMENTS)
        data, head = chars[at : at + ACKNOWLEDGEMENT_BYTES * count], bytes((first, 2))
        numbers: Sequence[int] = _NUMBERS[count].unpack(data)
        if data[::4] != head[:1] * count or data[1::4] != head[1:] * count or 0 in numbers:
            heads = (data[at : at + 2] == head for at in range(0, len(data), ACKNOWLEDGEMENT_BYTES))
            numbers = [number for number, _ in takewhile(all, zip(numbers, heads, strict=True))]
            if not numbers:
                return at
        session.counts.packets += len(numbers)
        if ACKNOWLEDGEMENTS[first](session, numbers):
            self.pause()
        return at + ACKNOWLEDGEMENT_BYTES * len(numbers)

    def _publish_row(self, at: int, size: int) -> int:
        """Publish a row of messages that are like the last one; return where it ends."""
        session = self.session
        name, first = session.run_name, session.run_first
        start = at + (4 if view[at + 1] < 128 else 5 if view[at + 2] < 128 else 6)  # behind the length of the topic
        topic = session.devices.topic_for(name) if chars[start : start + len(name)] == name else None
        if topic is None:
            return at
        count, end, written = publishes(at, size, len(name), int(session.version == 5), topic.id, session.etid)
        if not count:
            return at
        batch, numbers = mqtt_batch(partitioned[:written], first >> 1 & 3), b""
        if batch.qos:
            numbers = packet_numbers[: 2 * count]
            if batch.qos == 2 and not session.takes_numbers(numbers):
                return at
        else:
            batch.packets, batch.version = chars[at:end], session.codec
        session.counts.packets += count
        if session.publish_frames(topic, batch, count, numbers):
            self.pause()
        elif count == ROW_MESSAGES and batch.qos and end < size:  # publishers wait for slow subscribers
            self.carry = view[end:size].tobytes()
            self.defer()
            return size
        return end

    def _take(self, data: bytes) -> None:
        self._splitter.feed(data)
        if not self.paused:
            self._guarded(self._handle_packets)
            if not self.paused:  # so that the next receive begins with a whole packet
                self.carry = self._splitter.take_rest(MAX_CARRY_BYTES)

    def on_data_waiting(self) -> None:
        """Continue after a pause, or with bytes that were received before."""
        if self.life.over or self.paused:
            return
        data, self.carry = self.carry, b""
        if self._guarded(self.session.continue_packets):
            self.carry = data
            self.pause()
        elif self._splitter.is_empty and len(data) <= len(view):
            view[: len(data)] = data
            self.feed(len(data))
        else:
            self._take(data)

    def _guarded(self, step: Callable[..., T], *arguments: object) -> T | None:
        """Return the result of a function that handles packets; errors end the session."""
        session = self.session
        try:
            return step(*arguments)
        except MqttError as error:
            session.publish_collected()
            session.fail_mqtt(error)
        except ProtocolError as error:
            session.disconnect(error.reason, None, str(error))
        except (Exception, Timeout):  # gevent.Timeout is a BaseException, and a callback may have started one
            log.exception("error while an MQTT packet was handled; the connection is closed")
            self.lost(CloseReason.HOOK_FAILED)
        return None

    def _handle_packets(self) -> None:
        session, splitter = self.session, self._splitter
        until_s, count, is_late = 0.0, 0, False
        try:
            while not (self.life.over or is_late):
                packet = splitter.next()
                if packet is None:
                    break
                if splitter.only:
                    splitter.only, splitter.limit_bytes = 0, self._limit_bytes
                count += 1
                if session.packet(*packet):
                    self.pause()
                    return
                if not count % PACKETS_PER_CHECK:
                    until_s = until_s or data_path.defer_at_s()
                    is_late = time() >= until_s or session.is_row_full
        finally:
            session.counts.packets += count
        if session.publish_collected():
            self.pause()
        elif is_late and not self.life.over:
            self.defer()

    def resume(self) -> None:
        """See `Outbox.resume`."""
        session = self.session
        if session.is_subscribing:
            return
        if session.skips_resume:
            session.skips_resume = False
            return
        if not self._is_resuming:  # a second one would continue a client that waits for something else by then
            self._is_resuming = True
            super().resume()

    def resume_now(self) -> None:
        """See `RawConnection.resume_now`."""
        self._is_resuming = False
        if not self.paused or self.life.over:
            return
        meter = self.session.meter
        if meter is not None and meter.waits:
            return
        self.paused = False
        self.on_data_waiting()
        if not (self.paused or self.life.over or self in data_path.frozen_connections):
            self.watcher.start(self.on_readable)

    # ---- the keep-alive, see `Deadlines`

    def expired(self) -> None:
        """Check the keep-alive."""
        keepalive_s = self.session.keepalive_s
        if self.life.over or not keepalive_s:
            return
        silent_s = time() - self.heard_s
        if silent_s >= keepalive_s and not self.paused:
            if data_path.is_turn_used():  # many are silent since the same time
                data_path.deferred_reads.append(data_path.DeferredCall(self.expired))
            else:
                self.session.keepalive_expired()
        else:
            self.set_deadline(max(keepalive_s - silent_s, 0.1))

    def set_deadline(self, delay_s: float) -> None:
        """Check the keep-alive after `delay_s`, or earlier: the timer keeps a connection that has closed meanwhile."""
        self.session.broker.call_later(min(delay_s, MAX_TIMER_S), self.expired)

    # ---- writing

    def reply(self, packet: bytes) -> None:
        """Translate a control packet of SMQ: the broker has some that are not answers."""
        if packet[0] == Type.CONNACK and not self.life.over:
            self.session.connack()
            if self.session.keepalive_s:
                self.set_deadline(self.session.keepalive_s)

    def send_packet(self, data: bytes) -> None:
        """See `MqttOutbox`."""
        if not self.life.over:
            self.put(data)

    def send_packets(self, data: bytes, key: bytes) -> None:
        """See `MqttOutbox`."""
        if not self.life.over:
            self.put(data)

    @property
    def has_room(self) -> bool:
        """See `MqttOutbox`."""
        return self.life is not BLOCKED or self.queued_bytes < self.budget_bytes >> 1

    def _unblock(self) -> None:
        super()._unblock()
        if self.session.device is not None:
            self.session.device.pump()

    @staticmethod
    def frame_bytes(batch: bytes, at: int) -> int:
        """Return the size of the packet at `batch[at]`."""
        size, shift, end = 0, 0, at + 1
        while True:
            byte = batch[end]
            size |= (byte & 127) << shift
            end, shift = end + 1, shift + 7
            if byte < 128:
                return end - at + size

    @staticmethod
    def is_message(batch: bytes, at: int) -> bool:
        """Whether the packet at `batch[at]` may be dropped: PUBLISH with QoS 0."""
        return batch[at] & 0xF0 == _PUBLISH and not batch[at] & _QOS


class MqttWsConnection(MqttConnection):
    """An MQTT client on a WebSocket: packets may span frames, and share them (MQTT 5 §6)."""

    __slots__ = ("_close_sent", "_frames", "_last")
    websocket = True

    def __init__(self, sock: ClientSocket, watcher: Watcher, limit_bytes: int) -> None:
        super().__init__(sock, watcher, limit_bytes)
        self._frames = bytearray()
        self._last: Frame | ProtocolError | None = None
        self._close_sent = False

    @property
    def is_busy(self) -> bool:
        """See `MqttConnection.is_busy`; also while a close frame waits for the packets before it."""
        return self._last is not None or super().is_busy

    def record(self) -> dict[str, Any]:
        """See `MqttConnection.record`; here also the bytes of incomplete frames."""
        return {**super().record(), "mqtt": self._splitter.rest, "frames": bytes(self._frames) + self.carry}

    def restore(self, record: dict[str, Any]) -> None:
        """See `MqttConnection.restore`."""
        super().restore(record)
        self._frames += record["frames"]

    def feed(self, size: int) -> None:
        """See `MqttConnection.feed`."""
        self._take(view[:size].tobytes())

    def _take(self, data: bytes) -> None:
        self._frames += data
        has_more = self._last is None and self._unwrap()
        self._guarded(self._handle_packets)
        if self.paused or self.life.over:
            return
        if self._last is not None:
            self._end(self._last)
        elif has_more:
            self.defer()

    def _unwrap(self) -> bool:
        """Pass the payload of complete frames on, up to the one that ends the connection.

        Returns:
            Whether there may be more frames: a turn handles `FRAMES_PER_TURN`.
        """
        at, count = 0, 0
        while self._last is None and count < FRAMES_PER_TURN:
            try:
                frame, end = websocket.parse_client_frame(self._frames, self._splitter.limit_bytes, at)
            except ProtocolError as error:
                self._last = error
                break
            if frame is None:
                break
            at, count = end, count + 1
            if frame.opcode == websocket.PING:
                self.put(websocket.encode(websocket.PONG, frame.payload))
            elif frame.opcode in (websocket.CLOSE, websocket.TEXT):
                self._last = frame
            elif frame.opcode != websocket.PONG:
                self._splitter.feed(frame.payload)
        del self._frames[:at]
        return count == FRAMES_PER_TURN

    def _end(self, last: Frame | ProtocolError) -> None:
        """End the session after the packets that came before a close frame, a text frame, or an error."""
        if isinstance(last, ProtocolError):
            self.session.disconnect(last.reason, None, str(last))
        elif last.opcode == websocket.TEXT:
            self._close(UNSUPPORTED_DATA)
            self.session.disconnect(CloseReason.MQTT_PROTOCOL, None, "a text frame; MQTT needs binary ones")
        else:
            self._guarded(lambda: self._close(websocket.check_close(last.payload)))
            self.session.disconnect(CloseReason.WEBSOCKET_CLOSED)

    def _close(self, code: int) -> None:
        self._close_sent = True
        self.put(websocket.encode(websocket.CLOSE, websocket.close_payload(code)))

    def _flush_before_close(self, reason: CloseReason) -> None:
        if not self._close_sent:
            self._close(websocket.close_code(reason))
        super()._flush_before_close(reason)

    def send_packet(self, data: bytes) -> None:
        """See `MqttOutbox`."""
        if not self.life.over:
            self.put(websocket.encode(websocket.BINARY, data))

    def send_packets(self, data: bytes, key: bytes) -> None:
        """See `MqttOutbox`: a frame for each packet, so that whole frames can be dropped."""
        at, frames = 0, []
        while at < len(data):
            end = at + MqttConnection.frame_bytes(data, at)
            frames.append(websocket.encode(websocket.BINARY, data[at:end]))
            at = end
        if not self.life.over:
            self.put(b"".join(frames))

    @staticmethod
    def frame_bytes(batch: bytes, at: int) -> int:
        """Return the size of the WebSocket frame at `batch[at]`."""
        short = batch[at + 1]
        if short < 126:
            return short + 2
        if short == 126:
            return (batch[at + 2] << 8 | batch[at + 3]) + 4
        return int.from_bytes(batch[at + 2 : at + 10], "big") + 10

    @staticmethod
    def is_message(batch: bytes, at: int) -> bool:
        """See `MqttConnection.is_message`."""
        short = batch[at + 1]
        start = at + (2 if short < 126 else 4 if short == 126 else 10)
        return batch[at] == 0x82 and start < len(batch) and MqttConnection.is_message(batch, start)


class TlsMqttConnection(OverTls, MqttConnection):
    """An MQTT client over TLS."""

    __slots__ = ()


class TlsMqttWsConnection(OverTls, MqttWsConnection):
    """An MQTT client on a WebSocket over TLS."""

    __slots__ = ()


def mqtt_connection_class(secure: bool, on_websocket: bool) -> type[MqttConnection]:
    """Return the class of a connection; see `smqrt.smq.connection_kinds.connection_class`."""
    if secure:
        return TlsMqttWsConnection if on_websocket else TlsMqttConnection
    return MqttWsConnection if on_websocket else MqttConnection


class NoRequest:
    """The request of a client that has sent none, MQTT over a raw socket, for callbacks of the application.

    Args:
        peer: the client's address.
    """

    logins = None
    method, path, query = "MQTT", "", ""

    def __init__(self, peer: tuple[str, int]) -> None:
        self.peer = peer
        self.env: dict[str, object] = {}

    def get(self, name: str) -> str | None:
        """Return None: there are no header fields."""
        return None

    def fields(self) -> tuple[tuple[str, str], ...]:
        """Return the header fields: none."""
        return ()


# ---- The beginning of connections

SUB_PROTOCOLS = ("mqtt", "mqttv3.1")
"""The WebSocket sub-protocols of MQTT; clients of MQTT 3.1 use the second one."""


def sub_protocol(request: object) -> str | None:
    """Return the first sub-protocol of MQTT that a WebSocket request offers; None without one."""
    get = getattr(request, "get", None)
    offered = get("Sec-WebSocket-Protocol") if get is not None else None
    names = [name.strip() for name in (offered or "").split(",")]
    return next((name for name in names if name in SUB_PROTOCOLS), None)


def begin(
    broker: Broker, admission: Admission, detached: DetachedConnection, origin: Origin, address: str, reply: bytes = b""
) -> None:
    """Serve a connection whose next bytes are MQTT packets.

    Args:
        broker: the hub, which takes MQTT clients.
        admission: the conditions for new clients.
        detached: the connection.
        origin: the request that opened it.
        address: the client's address.
        reply: the HTTP response that is sent first; empty for a raw socket.
    """
    admission.keep_alive.apply(detached.transport)
    of_connection = mqtt_connection_class(detached.secure, bool(reply))
    connection: Any = of_connection(detached.transport, detached.watcher, broker.devices.limits.packet_bytes)
    connection.budget_bytes = admission.budget_bytes
    origin.address = address
    # Without these hooks the session does not reference the request, so that its memory is freed.
    is_needed = broker.hooks.authenticate or broker.hooks.onconnect
    session = MqttClient(broker, connection, broker.random_u32(), origin if is_needed else None)
    connection.session = session
    broker.devices.handshake_s = admission.readtmo_ms / 1000
    data_path.start_handshake(connection, admission.readtmo_ms / 1000, address)
    if reply:
        connection.greet(reply, b"")
    connection.start(session, detached.data)


def start_websocket(
    broker: Broker, admission: Admission, request: BootstrapRequest, key: str | None, origin: Origin | None
) -> None:
    """Serve the WebSocket of a request that offers a sub-protocol of MQTT; see `handshake.StartSession`."""
    protocol, address = sub_protocol(request), request.peer[0]
    if key is None or protocol is None:
        request.response.error(400, "MQTT needs a WebSocket here.")
        return
    lines = request.upgrade_lines() + b"Sec-WebSocket-Protocol: " + protocol.encode() + b"\r\n"
    begin(
        broker,
        admission,
        request.detach(),
        origin or Origin(request, None),
        address,
        websocket.switching_protocols(key, lines),
    )
