"""One connection: carries bytes between a `Stream` and the `Engine`, with greenlets that share the loop's time."""

from __future__ import annotations

import logging
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
from smqrt.net.stream import Stream
from smqrt.net.turn import Turn

log = logging.getLogger("smqrt.mqtt")

_TICKS_PER_PING = 4
_LONGEST_TICK_S = 1.0


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
        self._wake = Event()
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
        finally:
            self._stop_ticking()
            writer.kill()
            self._close()
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
        self._last_call = gevent.spawn_later(seconds, self.abort)

    def abort(self) -> None:
        """Close it now, whatever still waits to be sent."""
        self._is_over = True
        self._stream.close()

    # ---- reading

    def _read(self) -> None:
        turn = Turn()
        while not self._is_over:
            data = self._stream.read(timeout_s=self._patience_s())
            if not data:
                raise StreamError("socketclosed", "the broker closed the connection")
            self._pipe.packets.feed(data)
            self._digest(turn)
            if not self._callbacks.has_room:
                self._wait_for_room()

    def _patience_s(self) -> float | None:
        return None if self._engine.is_open else max(self._last_call_s - monotonic(), 0.0)

    def _digest(self, turn: Turn) -> None:
        engine = self._engine
        engine.idle = False
        while not engine.idle and not self._is_over:
            engine.loop_read()
            turn.breathe()

    def _wait_for_room(self) -> None:
        self._is_reading = False
        self._callbacks.wait_for_room()
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
        self._close()  # ends the reading, too

    def _carry(self) -> None:
        turn = Turn()
        while not self._pipe.closed:
            self._engine.loop_write()
            data = self._pipe.take()
            if data:
                self._stream.write(data)
                turn.breathe()
            self._pump()
            if not self._engine.want_write():
                self._wake.wait()
                self._wake.clear()

    def _close(self) -> None:
        data = self._pipe.take() + self._pipe.farewell
        if data and not self._stream.closed:
            try:
                self._stream.try_write(data)
            except StreamError:
                pass  # nobody there to hear it
        self._stream.close(linger=True)

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
