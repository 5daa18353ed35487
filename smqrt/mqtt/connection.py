"""One connection: carries bytes between a `Stream` and the `Engine`, with greenlets that share the loop's time."""

from __future__ import annotations

import fcntl
import logging
import sys
import termios
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import gevent
from gevent import get_hub
from gevent.event import Event

from smqrt.errors import StreamError
from smqrt.mqtt.ending import End
from smqrt.mqtt.protocol import Engine
from smqrt.net.callbacks import Callbacks
from smqrt.net.readiness import block
from smqrt.net.stream import Stream
from smqrt.net.turn import Turn

log = logging.getLogger("smqrt.mqtt")

_TICKS_PER_PING = 4
_LONGEST_TICK_S = 1.0
STUCK_S = 30.0
"""A broker that takes nothing for so long is left."""
UNHEARD_BYTES = 4 << 20
"""With so much received since the callbacks were through, the broker is not read until they are again."""
LINGER_S = 1.0


class Connection:
    """A connection to a broker.

    Args:
        engine: the protocol.
        stream: connected; closed at the end.
        callbacks: the application, whose pace the reading keeps.
        pump: called when more may be written.
    """

    def __init__(self, engine: Engine, stream: Stream, callbacks: Callbacks, pump: Callable[[], None]) -> None:
        self._engine, self._stream, self._callbacks, self._pump = engine, stream, callbacks, pump
        self._wake, self._written = Event(), Event()
        self._unheard_bytes = 0
        self._end: End | None = None
        self._is_over = False
        self._is_reading = True
        self._ticker: Any = None
        self._last_call: gevent.Greenlet[..., Any] | None = None

    def run(self, clean: bool, keepalive_s: int, properties: Mapping[str, Any], timeout_s: float) -> End | None:
        """Connect as `Engine.start` says, and read until the end.

        Args:
            timeout_s: the broker has to answer CONNECT by then.

        Returns:
            Why it ended, None when this side parted.
        """
        self._pipe = self._engine.start(clean, keepalive_s, properties)
        self._last_call_s = monotonic() + timeout_s
        writer = gevent.spawn(self._write)
        try:
            self._read()
        except StreamError as error:
            self.end(End("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("the reading of an MQTT connection failed")
            self.end(End("mqtt", "protocolerror"))
        finally:
            self._stop_ticking()
            writer.kill()
            self._say_the_rest()
            self._stream.close(linger=True)
            if self._last_call is not None:
                self._last_call.kill(block=False)
        return self._end

    def wake(self) -> None:
        """Something is to be written."""
        self._wake.set()

    def end(self, end: End | None) -> None:
        """The connection is over; the first reason counts."""
        if not self._is_over:
            self._is_over, self._end = True, end
            self._wake.set()

    def abort_after(self, seconds: float) -> None:
        """Close it at the latest then."""
        if self._last_call is None:
            self._last_call = gevent.spawn_later(seconds, self.abort)

    def abort(self) -> None:
        """Close it now, whatever still waits to be sent."""
        self._is_over = True
        self._stream.close()

    # ---- reading

    def _read(self) -> None:
        turn = Turn()
        while True:
            data = self._stream.read(timeout_s=self._patience_s())
            if self._is_over:
                if not data or self._end is not None:
                    return
                turn.breathe()  # DISCONNECT is sent: the broker closes when it has read it
                continue
            if not data:
                raise StreamError("socketreadfailed", "the broker closed the connection")
            self._pipe.packets.feed(data)
            self._digest(turn)
            self._keep_pace(len(data))

    def _patience_s(self) -> float | None:
        return None if self._engine.is_open or self._is_over else max(self._last_call_s - monotonic(), 0.0)

    def _digest(self, turn: Turn) -> None:
        engine = self._engine
        engine.idle = False
        while not engine.idle and not self._is_over:
            engine.loop_read()
            turn.breathe()

    def _keep_pace(self, size_bytes: int) -> None:
        """Read no more than the application takes, and the broker takes acknowledgements."""
        self._unheard_bytes += size_bytes
        self._is_reading = False
        if not self._callbacks.has_room:
            self._callbacks.wait_for_room()
        elif self._unheard_bytes > UNHEARD_BYTES:
            self._callbacks.ask(_nothing)
            self._unheard_bytes = 0
        while self._engine.is_congested and not self._is_over:
            self._written.clear()
            self._written.wait()
        self._is_reading = True

    # ---- writing

    def _write(self) -> None:
        try:
            self._carry()
        except StreamError as error:
            self.end(End("sock", error.word, detail=str(error)))
        except Exception:
            log.exception("the writing of an MQTT connection failed")
            self.end(End("sock", "socketwritefailed"))
        self._say_the_rest()
        if self._end is None:
            self.abort_after(LINGER_S)  # the broker has the word; the reading ends when it closes
        else:
            self._stream.close(linger=True)  # ends the reading, too
        self._written.set()

    def _carry(self) -> None:
        turn = Turn()
        while not self._pipe.closed:
            self._engine.loop_write()
            data = self._pipe.take()
            if data:
                self._send(data)
                turn.breathe()
            self._written.set()
            self._pump()
            if not self._engine.want_write():
                self._wake.wait()
                self._wake.clear()

    def _send(self, data: bytearray) -> None:
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
        while self._engine.want_write() and not self._pipe.closed:
            self._engine.loop_write()
            self._say_the_rest()

    def _say_the_rest(self) -> None:
        data = self._pipe.take() + self._pipe.farewell
        self._pipe.farewell = b""
        if data and not self._stream.closed:
            try:
                self._stream.push(data)
            except StreamError:
                pass  # nobody there to hear it

    # ---- keeping it alive

    def keep_alive(self) -> None:
        """The broker has accepted: from now on look at the clock."""
        if self._engine.ping_s:
            tick_s = min(self._engine.ping_s / _TICKS_PER_PING, _LONGEST_TICK_S)
            self._ticker = get_hub().loop.timer(tick_s, tick_s)
            self._ticker.start(self._tick)

    def _tick(self) -> None:
        self._engine.tick(self._is_reading)
        if self._is_over:
            self._stream.close()

    def _stop_ticking(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker.close()
            self._ticker = None


def _nothing() -> None:
    """The job that tells that all before it are done."""
