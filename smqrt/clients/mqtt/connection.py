"""One connection of an MQTT client, and the client's send queue.

The greenlet of the client reads, a second one writes, and a timer of the loop checks the keep-alive.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import termios
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

import gevent
from gevent import get_hub
from gevent.event import Event

from smqrt.clients.mqtt.connect import MqttCloseReason, MqttOptions, protocol_error
from smqrt.clients.mqtt.delivery import Delivery
from smqrt.clients.mqtt.store import ClientStore
from smqrt.clients.mqtt.subscriptions import MqttSubscriptions, SubscribeRequest
from smqrt.errors import MqttError, QueueFullError, StoreError, StreamError
from smqrt.loop.greenlets import Callbacks
from smqrt.loop.scheduling import Turn, block
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.endpoint import ConnectionState
from smqrt.wire.mqtt.fields import Props

# ---- Send queue

HEADER_BYTES = 10  # maximum size of PUBLISH without topic, properties and payload


class SendQueue:
    """Send queue of one client, across all its connections.

    Args:
        options: `queuesize`, `queuebytes`, `queuefull`, and `timeout` for publishers that wait. Unacknowledged messages
            count for `queuebytes` too.
        endpoint: sends the items.
        subscriptions: records the sent requests.

    Attributes:
        is_sending: whether messages may be sent: the application has accepted the connection.
        items: the queue, the next item first.
        dropped: number of messages that newer ones replaced.
        refused: number of items that the full queue rejected.
    """

    def __init__(self, options: MqttOptions, endpoint: MqttClientEndpoint, subscriptions: MqttSubscriptions) -> None:
        self._options, self._endpoint, self._subscriptions = options, endpoint, subscriptions
        self.items: deque[Delivery | SubscribeRequest] = deque()
        self.is_sending = False
        self.dropped = self.refused = 0
        self._size_bytes = 0
        self._waiters, self._is_closed = 0, False
        self._room, self._progress = Event(), Event()

    def __len__(self) -> int:
        return len(self.items)

    @property
    def _in_flight_bytes(self) -> int:
        return self._endpoint.session.in_flight_bytes

    def make_room(self, size_bytes: int) -> None:
        """Make room for a message by the policy `queuefull`; may wait.

        Args:
            size_bytes: of the message; 0 for a subscription.

        Raises:
            QueueFullError: no room, and the queue is not closed.
        """
        if self._has_room(size_bytes):
            return
        if self._options.queuefull == "drop":
            while not self._has_room(size_bytes):
                oldest = next((item for item in self.items if isinstance(item, Delivery)), None)
                if oldest is None:
                    break
                self.items.remove(oldest)
                self._size_bytes -= oldest.size_bytes
                self._endpoint.session.forget(oldest)
                self.dropped += 1
                oldest.finish("dropped")
        elif self._options.queuefull == "wait" and gevent.getcurrent() is not gevent.get_hub():  # the loop can't wait
            self._waiters += 1
            try:
                with gevent.Timeout(self._options.timeout, False):  # type: ignore[arg-type]  # False: no exception
                    while not self._has_room(size_bytes) and not self._is_closed:
                        self._room.clear()
                        self._room.wait()
            finally:
                self._waiters -= 1
        if not self._has_room(size_bytes) and not self._is_closed:
            self.refused += 1
            raise QueueFullError(
                f"{len(self.items)} messages with {self._size_bytes} bytes are queued, and {self._in_flight_bytes} "
                f"bytes are not acknowledged: no room within queuesize={self._options.queuesize} and "
                f"queuebytes={self._options.queuebytes}; publish more slowly, or raise these options"
            )

    def _has_room(self, size_bytes: int) -> bool:
        options, held_bytes = self._options, self._size_bytes + self._in_flight_bytes
        # An empty queue takes a message of any size.
        return len(self.items) < options.queuesize and (not held_bytes or held_bytes + size_bytes <= options.queuebytes)

    def wake_waiters(self) -> None:
        """Resume the waiting publishers, which check for room again."""
        if self._waiters:
            self._room.set()

    def close(self) -> None:
        """Reject further items, and resume the waiting publishers."""
        self._is_closed = True
        self.wake_waiters()

    def send_at_once(self, item: Delivery) -> bool:
        """Send a message if nothing is queued before it and the broker may receive it; return whether it was sent."""
        if self.items or not self.is_sending or not self._endpoint.can_send(item.qos):
            return False
        if item.qos and self._in_flight_bytes + item.size_bytes > self._options.queuebytes:
            return False
        self._endpoint.send(item)
        return True

    def put(self, item: Delivery | SubscribeRequest) -> None:
        """Append an item after `make_room`, and send as many items as possible."""
        self.items.append(item)
        if isinstance(item, Delivery):
            self._size_bytes += item.size_bytes
        self.pump()

    def pump(self) -> None:
        """Send as many items as possible."""
        endpoint, items = self._endpoint, self.items
        if self.is_sending:
            endpoint.send_again()
        while items:
            item = items[0]
            if isinstance(item, SubscribeRequest):
                if not endpoint.can_ask:
                    break
                self.take()
                if item.options is None:
                    number = endpoint.unsubscribe(item.topics, item.properties)
                else:
                    number = endpoint.subscribe(item.subscriptions, item.properties)
                self._subscriptions.sent(number, item)
                if not number:  # larger than the broker allows: not sent
                    endpoint.answer_too_large(len(item.topics))
            elif self.is_sending and endpoint.can_send(item.qos):
                self.take()
                endpoint.send(item)
            else:
                break
        self.wake_waiters()
        if not items:
            self._progress.set()

    @property
    def is_drained(self) -> bool:
        """Whether all messages are sent, acknowledged if QoS 1 or 2, and all subscriptions are acknowledged."""
        endpoint = self._endpoint
        return (
            self._subscriptions.is_answered
            and not (self.items or endpoint.session.in_flight)
            and not (endpoint.is_open and (endpoint.has_output or endpoint.has_unwritten))
        )

    def wait_progress(self) -> None:
        """Wait until `is_drained`, or another condition of the caller, may have changed."""
        self._progress.clear()
        self._progress.wait()

    def notify_progress(self) -> None:
        """Resume the callers of `wait_progress`."""
        self._progress.set()

    def put_back(self, requests: list[SubscribeRequest]) -> None:
        """Insert requests at the front of the queue, in their order."""
        self.items.extendleft(reversed(requests))

    def take(self) -> Delivery | SubscribeRequest:
        """Remove and return the next item."""
        item = self.items.popleft()
        if isinstance(item, Delivery):
            self._size_bytes -= item.size_bytes
        return item

    def abandon(self, forget: bool = False) -> int:
        """Fail the queued messages with "closed"; return the number of messages and subscriptions.

        Args:
            forget: remove them from the store too, if there is one.
        """
        lost = len(self.items)
        while self.items:
            item = self.take()
            if isinstance(item, Delivery):
                if forget:
                    self._endpoint.session.forget(item)
                item.finish("closed")
        return lost


log = logging.getLogger("smqrt.mqtt")

_TICKS_PER_PING = 4  # checks of the keep-alive in a ping interval
_MAX_TICK_S = 1.0
STUCK_S = 30.0
"""The connection is closed when the broker acknowledges no bytes for this time."""
MAX_UNDELIVERED_BYTES = 4 << 20
"""After this many received bytes, reading pauses until the queued callbacks have run."""
LINGER_S = 1.0
"""Time for the broker to close the connection after DISCONNECT."""


class MqttConnection:
    """A connection to a broker.

    Args:
        endpoint: the protocol state.
        stream: connected; closed at the end.
        callbacks: reading pauses while too many of them are queued.
        pump: called when the queue of the connection is empty.
        pause: called after received bytes were handled; blocks while the application is slow.
        store: its changes are on disk before anything is sent; None without.
    """

    def __init__(
        self,
        endpoint: MqttClientEndpoint,
        stream: Stream,
        callbacks: Callbacks,
        pump: Callable[[], None],
        pause: Callable[[], None],
        store: ClientStore | None = None,
    ) -> None:
        self._endpoint, self._stream, self._callbacks, self._pump = endpoint, stream, callbacks, pump
        self._pause, self._store = pause, store
        self._wake, self._written = Event(), Event()
        self._undelivered_bytes = 0
        self._close_reason: MqttCloseReason | None = None
        self._is_over = False
        self._is_reading = True
        stream.queue_limit_bytes = 0  # so that `push` returns false until the system has all bytes
        self._ticker: Any = None
        self._aborter: gevent.Greenlet[[], None] | None = None

    def run(self, is_clean: bool, keepalive_s: int, properties: Props, timeout_s: float) -> MqttCloseReason | None:
        """Send CONNECT, see `MqttClientEndpoint.connect`, and read until the connection ends.

        Args:
            timeout_s: the time limit for CONNACK.

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
        except StoreError as error:
            self.end(MqttCloseReason("sock", "storefailed", detail=str(error)))
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

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self._is_over

    def wake(self) -> None:
        """Write the packets that the endpoint has queued."""
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
        """Close the connection now, without sending queued data."""
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
                turn.yield_if_due()
                continue  # after DISCONNECT: discard data until the broker closes the connection
            if not data:
                raise StreamError("socketreadfailed", "the broker closed the connection")
            endpoint.feed(data, monotonic())
            try:
                while not self._is_over and endpoint.next():
                    turn.yield_if_due()
            except MqttError as error:
                endpoint.fail(error)
                self.end(protocol_error(error.code, error))
            # Pause while too many callbacks are queued, or while the broker does not read the acknowledgements.
            self._undelivered_bytes += len(data)
            self._is_reading = False
            if not self._callbacks.has_room:
                self._callbacks.wait_for_room()
            elif self._undelivered_bytes > MAX_UNDELIVERED_BYTES:
                self._callbacks.ask(lambda: None)  # returns after all earlier callbacks
                self._undelivered_bytes = 0
            self._pause()
            while endpoint.is_congested and not self._is_over:
                self._written.clear()
                self._written.wait()
            self._is_reading = True

    # ---- writing

    def _write(self) -> None:
        turn, endpoint = Turn(), self._endpoint
        try:
            while not self._is_over:
                if data := endpoint.take(monotonic()):
                    if self._store is not None:
                        self._store.commit()
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
        except StoreError as error:
            self.end(MqttCloseReason("sock", "storefailed", detail=str(error)))
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
        """Write; wait for a slow broker. Raise StreamError "timeout" when it acknowledges no bytes for `STUCK_S`."""
        stream = self._stream
        if stream.push(data):
            self._endpoint.written()
            return
        left_bytes = self._unacknowledged_bytes()
        while True:
            try:
                block(stream.writable(STUCK_S))
                self._endpoint.written()
                return
            except StreamError as error:
                if error.word != "timeout" or self._unacknowledged_bytes() >= left_bytes:
                    raise
                left_bytes = self._unacknowledged_bytes()

    def _unacknowledged_bytes(self) -> int:
        """Return the number of bytes that the broker's system has not acknowledged.

        Includes the send buffer of this system: a full buffer becomes writable only when a third of it is free.
        """
        in_system = fcntl.ioctl(self._stream.transport.fileno(), termios.TIOCOUTQ, bytes(4))
        return self._stream.queued_bytes + int.from_bytes(in_system, sys.byteorder)

    def write_now(self) -> None:
        """Write as much as possible without waiting: the process may end before another greenlet runs."""
        self._write_rest()
        if self._endpoint.state is ConnectionState.CLOSED:
            self.end(None)

    def _write_rest(self) -> None:
        if self._store is not None and self._store.is_dirty:
            return  # `_write` waits for the disk first
        data = self._endpoint.take(monotonic())
        if data and not self._stream.closed:
            try:
                if self._stream.push(data):
                    self._endpoint.written()
            except StreamError:
                pass  # the connection ends anyway

    # ---- keep-alive

    def keep_alive(self) -> None:
        """Start the checks of the keep-alive, after CONNACK."""
        if self._endpoint.ping_s:
            tick_s = min(self._endpoint.ping_s / _TICKS_PER_PING, _MAX_TICK_S)
            self._ticker = get_hub().loop.timer(tick_s, tick_s)
            self._ticker.start(self._tick)

    def _tick(self) -> None:
        try:
            self._endpoint.check_alive(monotonic(), self._is_reading)
        except MqttError as error:
            self._endpoint.abort()  # without DISCONNECT, which would wait for a broker that does not read
            self.end(protocol_error(error.code, error))
            self._stream.close()
