"""One connection: carries bytes between a `Stream` and the endpoint, with greenlets that share the loop's time."""

from __future__ import annotations

import fcntl
import logging
import sys
import termios
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent
from gevent import get_hub
from gevent.event import Event

from smqrt.clients.mqtt.connect import MqttCloseReason, violated
from smqrt.errors import MqttError, StreamError
from smqrt.loop.callback_queue import Callbacks
from smqrt.loop.readiness import block
from smqrt.loop.scheduling import Turn
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState
from smqrt.wire.mqtt.properties import Props

log = logging.getLogger("smqrt.mqtt")

_TICKS_PER_PING = 4
_MAX_TICK_S = 1.0
STUCK_S = 30.0
"""A broker that takes nothing for so long is left."""
UNDELIVERED_BYTES = 4 << 20
"""With so much received since the callbacks were through, the broker is not read until they are again."""
LINGER_S = 1.0


class MqttConnection:
    """A connection to a broker.

    Args:
        endpoint: the protocol.
        stream: connected; closed at the end.
        callbacks: the application, whose pace the reading keeps.
        pump: called when more may be written.
    """

    def __init__(
        self, endpoint: MqttClientEndpoint, stream: Stream, callbacks: Callbacks, pump: Callable[[], None]
    ) -> None:
        self._endpoint, self._stream, self._callbacks, self._pump = endpoint, stream, callbacks, pump
        self._wake, self._written = Event(), Event()
        self._undelivered_bytes = 0
        self._close_reason: MqttCloseReason | None = None
        self._is_over = False
        self._is_reading = True
        self._ticker: Any = None
        self._aborter: gevent.Greenlet[[], None] | None = None

    def run(self, is_clean: bool, keepalive_s: int, properties: Props, timeout_s: float) -> MqttCloseReason | None:
        """Connect as `MqttClientEndpoint.connect` says, and read until the end.

        Args:
            timeout_s: the broker has to answer CONNECT by then.

        Returns:
            Why it ended, None when this side asked for it.
        """
        self._endpoint.connect(is_clean, keepalive_s, properties)
        self._accepted_by_s = monotonic() + timeout_s
        writer = gevent.spawn(self._write)
        try:
            self._read()
        except StreamError as error:
            self.end(MqttCloseReason("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("the reading of an MQTT connection failed")
            self.end(MqttCloseReason("mqtt", "protocolerror"))
        finally:
            self._stop_ticking()
            writer.kill()
            self._write_rest()
            self._stream.close(graceful=True)
            if self._aborter is not None:
                self._aborter.kill(block=False)
        return self._close_reason

    def wake(self) -> None:
        """Something is to be written."""
        self._wake.set()

    def end(self, reason: MqttCloseReason | None) -> None:
        """The connection is over; the first reason counts."""
        if not self._is_over:
            self._is_over, self._close_reason = True, reason
            self._wake.set()

    def abort_after(self, seconds: float) -> None:
        """Close it at the latest then."""
        if self._aborter is None:
            self._aborter = gevent.spawn_later(seconds, self.abort)

    def abort(self) -> None:
        """Close it now, whatever still waits to be sent."""
        self._is_over = True
        self._stream.close()

    # ---- reading

    def _read(self) -> None:
        turn = Turn()
        while True:
            data = self._stream.read(timeout_s=self._read_timeout_s())
            if self._is_over:
                if not data or self._close_reason is not None:
                    return
                turn.yield_if_due()  # DISCONNECT is sent: the broker closes when it has read it
                continue
            if not data:
                raise StreamError("socketreadfailed", "the broker closed the connection")
            self._endpoint.feed(data, monotonic())
            self._handle_packets(turn)
            self._wait_for_application(len(data))

    def _read_timeout_s(self) -> float | None:
        if self._endpoint.is_open or self._is_over:
            return None
        return max(self._accepted_by_s - monotonic(), 0.0)

    def _handle_packets(self, turn: Turn) -> None:
        endpoint = self._endpoint
        try:
            while not self._is_over and endpoint.next():
                turn.yield_if_due()
        except MqttError as error:
            self._endpoint.fail(error)
            self.end(violated(error.code, error))

    def _wait_for_application(self, size_bytes: int) -> None:
        """Read no more than the application takes, and the broker takes acknowledgements."""
        self._undelivered_bytes += size_bytes
        self._is_reading = False
        if not self._callbacks.has_room:
            self._callbacks.wait_for_room()
        elif self._undelivered_bytes > UNDELIVERED_BYTES:
            self._callbacks.ask(_nothing)
            self._undelivered_bytes = 0
        while self._endpoint.is_congested and not self._is_over:
            self._written.clear()
            self._written.wait()
        self._is_reading = True

    # ---- writing

    def _write(self) -> None:
        try:
            self._write_all()
        except StreamError as error:
            self.end(MqttCloseReason("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("the writing of an MQTT connection failed")
            self.end(MqttCloseReason("sock", "socketwritefailed"))
        self._write_rest()
        if self._close_reason is None:
            self.abort_after(LINGER_S)  # the broker has the word; the reading ends when it closes
        else:
            self._stream.close(graceful=True)  # ends the reading, too
        self._written.set()

    def _write_all(self) -> None:
        turn, endpoint = Turn(), self._endpoint
        while not self._is_over:
            if data := endpoint.take(monotonic()):
                self._send(data)
                turn.yield_if_due()
            if endpoint.state is ConnectionState.CLOSED:
                self.end(None)
                return
            self._written.set()
            self._pump()
            if not endpoint.has_output:
                self._wake.wait()
                self._wake.clear()

    def _send(self, data: bytes) -> None:
        """Write, with patience for who is slow but not for who takes nothing at all."""
        stream = self._stream
        if stream.push(data):
            return
        left_bytes = self._left_bytes()
        while True:
            try:
                block(stream.writable(STUCK_S))
                return
            except StreamError as error:
                if error.word != "timeout" or self._left_bytes() >= left_bytes:
                    raise
                left_bytes = self._left_bytes()

    def _left_bytes(self) -> int:
        """What the broker has not acknowledged: a full buffer of the system asks for more only when a third is free."""
        in_system = fcntl.ioctl(self._stream.transport.fileno(), termios.TIOCOUTQ, bytes(4))
        return self._stream.queued_bytes + int.from_bytes(in_system, sys.byteorder)

    def write_now(self) -> None:
        """Give what waits to be written to the system now, as far as it goes without waiting: the process may end
        before another greenlet has its turn."""
        self._write_rest()
        if self._endpoint.state is ConnectionState.CLOSED:
            self.end(None)

    def _write_rest(self) -> None:
        data = self._endpoint.take(monotonic())
        if data and not self._stream.closed:
            try:
                self._stream.push(data)
            except StreamError:
                pass  # nobody there to hear it

    # ---- keeping it alive

    def keep_alive(self) -> None:
        """The broker has accepted: from now on look at the clock."""
        if self._endpoint.ping_s:
            tick_s = min(self._endpoint.ping_s / _TICKS_PER_PING, _MAX_TICK_S)
            self._ticker = get_hub().loop.timer(tick_s, tick_s)
            self._ticker.start(self._tick)

    def _tick(self) -> None:
        try:
            self._endpoint.check_alive(monotonic(), self._is_reading)
        except MqttError as error:
            self._endpoint.abort()  # DISCONNECT would wait for who takes nothing
            self.end(violated(error.code, error))
            self._stream.close()

    def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker.close()
            self._ticker = None


def _nothing() -> None:
    """The job that tells that all before it are done."""
