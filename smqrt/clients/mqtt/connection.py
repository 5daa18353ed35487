"""One connection of an MQTT client: a `Stream` around the endpoint.

The greenlet of the client reads, a second one writes, and a timer of the loop checks the keep-alive.
"""

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
"""A connection whose broker acknowledges no bytes for this time is closed."""
UNDELIVERED_BYTES = 4 << 20
"""After this many received bytes reading pauses until the callbacks have run."""
LINGER_S = 1.0
"""The broker closes the connection within this time after DISCONNECT."""


class MqttConnection:
    """A connection to a broker.

    Args:
        endpoint: the protocol state.
        stream: connected; closed at the end.
        callbacks: reading waits for them when they are behind.
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
        """Send CONNECT, see `MqttClientEndpoint.connect`, and read until the end.

        Args:
            timeout_s: the time limit for the answer to CONNECT.

        Returns:
            The close reason, None when this side closed the connection.
        """
        self._endpoint.connect(is_clean, keepalive_s, properties)
        self._accepted_by_s = monotonic() + timeout_s
        writer = gevent.spawn(self._write)
        try:
            self._read()
        except StreamError as error:
            self.end(MqttCloseReason("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("reading from an MQTT connection failed")
            self.end(MqttCloseReason("mqtt", "protocolerror"))
        finally:
            if self._ticker is not None:
                self._ticker.stop()
                self._ticker.close()
                self._ticker = None
            writer.kill()
            self._write_rest()
            self._stream.close(graceful=True)
            if self._aborter is not None:
                self._aborter.kill(block=False)
        return self._close_reason

    def wake(self) -> None:
        """Write what the endpoint has queued."""
        self._wake.set()

    def end(self, reason: MqttCloseReason | None) -> None:
        """End the connection; only the first reason counts."""
        if not self._is_over:
            self._is_over, self._close_reason = True, reason
            self._wake.set()

    def abort_after(self, seconds: float) -> None:
        """Close the connection after `seconds` at the latest."""
        if self._aborter is None:
            self._aborter = gevent.spawn_later(seconds, self.abort)

    def abort(self) -> None:
        """Close the connection now, without sending what is queued."""
        self._is_over = True
        self._stream.close()

    # ---- reading

    def _read(self) -> None:
        turn, endpoint = Turn(), self._endpoint
        while True:
            is_limited = not (endpoint.is_open or self._is_over)
            data = self._stream.read(timeout_s=max(self._accepted_by_s - monotonic(), 0.0) if is_limited else None)
            if self._is_over:
                if not data or self._close_reason is not None:
                    return
                turn.yield_if_due()  # DISCONNECT is sent: the broker closes when it has read it
                continue
            if not data:
                raise StreamError("socketreadfailed", "the broker closed the connection")
            endpoint.feed(data, monotonic())
            try:
                while not self._is_over and endpoint.next():
                    turn.yield_if_due()
            except MqttError as error:
                endpoint.fail(error)
                self.end(violated(error.code, error))
            self._wait_for_application(len(data))

    def _wait_for_application(self, size_bytes: int) -> None:
        """Wait while the callbacks are behind, or the broker does not read its acknowledgements."""
        self._undelivered_bytes += size_bytes
        self._is_reading = False
        if not self._callbacks.has_room:
            self._callbacks.wait_for_room()
        elif self._undelivered_bytes > UNDELIVERED_BYTES:
            self._callbacks.ask(lambda: None)  # returns after all callbacks before it
            self._undelivered_bytes = 0
        while self._endpoint.is_congested and not self._is_over:
            self._written.clear()
            self._written.wait()
        self._is_reading = True

    # ---- writing

    def _write(self) -> None:
        turn, endpoint = Turn(), self._endpoint
        try:
            while not self._is_over:
                if data := endpoint.take(monotonic()):
                    self._send(data)
                    turn.yield_if_due()
                if endpoint.state is ConnectionState.CLOSED:
                    self.end(None)
                    break
                self._written.set()
                self._pump()
                if not endpoint.has_output:
                    self._wake.wait()
                    self._wake.clear()
        except StreamError as error:
            self.end(MqttCloseReason("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("writing to an MQTT connection failed")
            self.end(MqttCloseReason("sock", "socketwritefailed"))
        self._write_rest()
        if self._close_reason is None:
            self.abort_after(LINGER_S)  # reading ends when the broker closes the connection
        else:
            self._stream.close(graceful=True)  # ends reading, too
        self._written.set()

    def _send(self, data: bytes) -> None:
        """Write; a slow broker is waited for, one that acknowledges nothing for `STUCK_S` is an error."""
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
        """Return how many bytes the broker has not acknowledged.

        The buffer of the system counts: a full one becomes writable only when a third is free.
        """
        in_system = fcntl.ioctl(self._stream.transport.fileno(), termios.TIOCOUTQ, bytes(4))
        return self._stream.queued_bytes + int.from_bytes(in_system, sys.byteorder)

    def write_now(self) -> None:
        """Write what the system accepts without waiting: the process may end before another greenlet runs."""
        self._write_rest()
        if self._endpoint.state is ConnectionState.CLOSED:
            self.end(None)

    def _write_rest(self) -> None:
        data = self._endpoint.take(monotonic())
        if data and not self._stream.closed:
            try:
                self._stream.push(data)
            except StreamError:
                pass  # the connection ends anyway

    # ---- keeping it alive

    def keep_alive(self) -> None:
        """Begin to check the keep-alive: the broker has accepted."""
        if self._endpoint.ping_s:
            tick_s = min(self._endpoint.ping_s / _TICKS_PER_PING, _MAX_TICK_S)
            self._ticker = get_hub().loop.timer(tick_s, tick_s)
            self._ticker.start(self._tick)

    def _tick(self) -> None:
        try:
            self._endpoint.check_alive(monotonic(), self._is_reading)
        except MqttError as error:
            self._endpoint.abort()  # DISCONNECT would wait for a broker that does not read
            self.end(violated(error.code, error))
            self._stream.close()
