"""The greenlet that keeps a client's connection: it connects, comes back when the connection is lost, and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Self

import gevent
from gevent.event import Event

from smqrt.clients.mqtt.connect import DEFAULT_DELAY_S, MqttCloseReason, OnStatus, delay_of, disconnected, refused
from smqrt.clients.mqtt.connection import LINGER_S, MqttConnection
from smqrt.clients.mqtt.options import MqttOptions
from smqrt.clients.mqtt.queue import MqttSubscriptions, SendQueue
from smqrt.errors import ArgumentError, DeliveryError, StreamError
from smqrt.loop.callback_queue import Callbacks
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.properties import PacketType, Props, encode_properties

log = logging.getLogger("smqrt.mqtt")

SHORT_DELAY_S = 0.1


class ReconnectingConnection:
    """The greenlet that makes the connections of one client, makes them again, and ends them.

    Args:
        connect: makes a stream.
        endpoint: the protocol.
        options: those of the client.
        properties: of CONNECT.
        onstatus: see `OnStatus`.
        callbacks: runs what the application gave.

    Attributes:
        end: why the last connection ended; None before.
        last_reason: of DISCONNECT when the client is closed with its application or the process (MQTT 5); 4 has the
            broker publish the will.
    """

    def __init__(
        self,
        connect: Callable[[], Stream],
        endpoint: MqttClientEndpoint,
        options: MqttOptions,
        properties: Props,
        onstatus: OnStatus | None,
        callbacks: Callbacks,
    ) -> None:
        encode_properties(properties, PacketType.CONNECT)  # raises now what would fail later
        endpoint.connect_packet(True, options.keepalive, properties)
        self._connect, self._endpoint, self._options, self._properties = connect, endpoint, options, properties
        self.onstatus, self._callbacks = onstatus, callbacks
        self.end: MqttCloseReason | None = None
        self.last_reason = 0
        self._subscriptions = MqttSubscriptions(options.resubscribe)
        self._queue = SendQueue(options, endpoint, self._subscriptions)
        self._connection: MqttConnection | None = None
        self._ended_callback: Callable[[], object] | None = None
        self._is_connecting = self._has_session = self._has_ended = self._is_closing = self._was_accepted = False
        self._stopping, self._retry_now, self._settled = Event(), Event(), Event()
        self._shutdown_reason: MqttCloseReason | None = None
        self._undelivered = 0
        self._greenlet = gevent.spawn(self._run)

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted and the connection stands."""
        return self._endpoint.is_open

    @property
    def closed(self) -> bool:
        """Whether the client has ended for good."""
        return self._has_ended

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until connected, or ended for good (`end` tells why). True when connected."""
        self._settled.wait(timeout)
        return self.connected

    # ---- the end

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was published is sent, acknowledged if it has to be, and every subscription answered.

        Args:
            timeout: seconds; None waits as long as the client lives.
        """
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
            while not self._queue.is_drained and not self.closed:
                self._queue.wait_progress()
        return self._queue.is_drained

    def disconnect(self, reason: int = 0) -> bool:
        """End for good, without waiting. What was handed in is delivered before, in the background and at most within
        the option `timeout`, if need be over a connection that is made for it; what can't be fails with "closed". When
        there is nothing, DISCONNECT goes out at once. `onstatus` is not called.

        Args:
            reason: for the broker (MQTT 5); 4 has it publish the will.

        Returns:
            Whether connected before.

        Raises:
            ArgumentError: the reason is none.
        """
        if not isinstance(reason, int) or not 0 <= reason <= 0xFF:
            raise ArgumentError(f"reason must be a reason code from 0 to 255, not {reason!r}")
        was_connected = self.connected
        if self._begin_to_close():
            if self._queue.is_drained:
                self._disconnect_now(reason)
            else:
                gevent.spawn(self._deliver_and_disconnect, reason, self._options.timeout)
        return was_connected

    def discard(self) -> int:
        """Forget what waits to be sent, messages and subscriptions; how many there were. They fail with "closed"."""
        return self._queue.give_up()

    def shutdown(self) -> None:
        """The process ends: as `disconnect`; `onstatus` is told ("sock", "sysshutdown") if there is a connection."""
        if self.connected and not self._is_closing:
            self._shutdown_reason = MqttCloseReason("sock", "sysshutdown", detail="the process ends")
        self.disconnect(self.last_reason)

    def close(self, timeout: float | None = 5.0) -> None:
        """End for good, and wait for it: what was handed in is delivered before, if need be over a connection that is
        made for it. DISCONNECT is sent. A second call does nothing but wait. A callback that calls it does not wait for
        the end, which comes behind all callbacks.

        Args:
            timeout: seconds for the delivery; then it is over. None waits as long as it takes.

        Raises:
            DeliveryError: something was not delivered, or nobody knows whether it was; it says why.
        """
        end_s = None if timeout is None else monotonic() + timeout
        if self._begin_to_close():
            self._deliver_and_disconnect(self.last_reason, timeout)
        if not self._callbacks.is_current:
            self._greenlet.join(None if end_s is None else max(end_s - monotonic(), 0.0))
            self._disconnect_now()
            self._greenlet.join(2 * LINGER_S)
        lost, self._undelivered = self._undelivered, 0
        if lost:
            why = self.end or "there was no time left"
            raise DeliveryError(f"close: {lost} messages or subscriptions were not delivered: {why}")

    def _begin_to_close(self) -> bool:
        """Take in nothing more, and hurry to send what is there; false when that is under way, or done."""
        if self._is_closing or self._has_ended:
            return False
        self._is_closing = True
        self._retry_now.set()
        self._queue.close()
        if self._connection is not None and self.connected:
            self._start_sending()  # onstatus may still think about it
            self._connection.write_now()
        else:
            self._endpoint.forget_unconfirmed()  # of a connection that broke: QoS 0 promises no more
        return True

    def _deliver_and_disconnect(self, reason: int, timeout_s: float | None) -> None:
        end_s = None if timeout_s is None else monotonic() + timeout_s
        if self.flush(timeout_s):
            self._confirm_delivery(None if end_s is None else end_s - monotonic())
        self._disconnect_now(reason)

    def _confirm_delivery(self, timeout_s: float | None) -> None:
        """QoS 0 is acknowledged by nobody; but a broker answers a ping after what it got before."""
        endpoint = self._endpoint
        if endpoint.unconfirmed and self.connected:
            endpoint.ping(monotonic())
        with gevent.Timeout(timeout_s, False):  # type: ignore[arg-type]
            while endpoint.unconfirmed and self.connected:
                self._queue.wait_progress()
        if endpoint.unconfirmed:
            self._undelivered += endpoint.unconfirmed
            self.end = self.end or MqttCloseReason("sock", "timeout", detail="the broker doesn't say that it got them")

    def _disconnect_now(self, reason: int = 0) -> None:
        """End now."""
        if self._stopping.is_set():
            return
        self._is_closing = True
        self._stopping.set()
        self._retry_now.set()
        self._queue.is_sending = False
        if self._connection is not None and self.connected:
            self._endpoint.disconnect(reason)
            self._connection.write_now()
            self._connection.abort_after(LINGER_S)
        elif self._connection is not None:
            self._connection.abort()
        elif self._is_connecting:
            self._greenlet.kill(_Stopped, block=False)

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until it has ended for good; whether it has."""
        self._greenlet.join(timeout)
        return self.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeliveryError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # what the block raised goes first

    def on_ended(self, fn: Callable[[], object]) -> None:
        """Have `fn()` called when the client has ended for good, after every other callback."""
        self._ended_callback = fn

    # ---- the greenlet behind it

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                end = self._one_connection()
                if end is None or self._stopping.is_set():
                    break
                self.end = end
                delay_s = self._delay_after(end)
                if delay_s is None:
                    break
                (self._stopping if self._is_closing else self._retry_now).wait(delay_s)
        finally:
            self._finish()

    def _one_connection(self) -> MqttCloseReason | None:
        opts = self._options
        try:
            stream = self._open()
        except StreamError as error:
            return MqttCloseReason("sock", error.word, detail=str(error))
        except _Stopped:
            return None
        self._connection = MqttConnection(self._endpoint, stream, self._callbacks, self._queue.pump)
        try:
            return self._connection.run(self._is_clean(), opts.keepalive, self._properties, opts.timeout)
        finally:
            self._lost()

    def _open(self) -> Stream:
        self._is_connecting, self._was_accepted = True, False
        try:
            return self._connect()
        finally:
            self._is_connecting = False

    def _is_clean(self) -> bool:
        opts = self._options
        if opts.cleanstart is not None:
            return opts.cleanstart
        return opts.version == 4 or not self._properties.get("sessionexpiryinterval") or not self._has_session

    def _lost(self) -> None:
        self._connection, self._queue.is_sending = None, False
        self._endpoint.abort()
        self._settled.clear()
        self._queue.put_back(self._subscriptions.lost())

    def _delay_after(self, end: MqttCloseReason) -> float | None:
        """Seconds until the next attempt, None to stay away."""
        log.info("%s", end)
        if self._is_closing:  # once more, if that connection was a good one; onstatus has no say any more
            return SHORT_DELAY_S if self._was_accepted else None
        default = DEFAULT_DELAY_S if end.can_reconnect else None
        if self.onstatus is None:
            return default
        decision: list[object] = []
        self._callbacks.ask(lambda: decision.append(self.onstatus(end.type, end.code, end.status)))  # type: ignore[misc]
        if not decision:
            return default  # it raised, and the log tells
        return None if end.code == "sysshutdown" else delay_of(decision[0], default)

    def _finish(self) -> None:
        if self._shutdown_reason is not None:
            self.end = self._shutdown_reason
            if self.onstatus is not None:
                self._callbacks.post(self.onstatus, self.end.type, self.end.code, self.end.status)
        self._has_ended = True
        self._stopping.set()
        in_flight = list(self._endpoint.session.in_flight.values())
        for item in in_flight:
            item.finish("closed")
        self._undelivered += self._queue.give_up() + len(in_flight)
        if self._undelivered and self._is_closing:
            why = self.end or "no time was left"
            log.warning("%s messages or subscriptions were not delivered: %s", self._undelivered, why)
        self._queue.close()
        self._settled.set()
        self._queue.tell_progress()
        if self._ended_callback is not None:
            self._callbacks.post(self._ended_callback)
        self._callbacks.finish()

    # ---- what the endpoint tells: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_wake(self) -> None:
        """Something is to be written."""
        if self._connection is not None:
            self._connection.wake()

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        """The broker answered CONNECT."""
        status = {"sessionpresent": is_session_present, "reasoncode": code, "properties": properties}
        connection = self._connection
        assert connection is not None
        if code:
            connection.end(refused(code, self._options.version, status))
            return
        connection.keep_alive()
        self._has_session = self._was_accepted = True
        has_identifiers = properties.get("subscriptionidentifieravailable", 1) != 0
        self._subscriptions.routes.uses_identifiers = has_identifiers and self._options.version == 5
        if not is_session_present:
            self._queue.put_back(self._subscriptions.session_lost(self._queue.items))
        self._queue.pump()
        self._settled.set()
        if self.onstatus is None or self._is_closing:
            self._start_sending()
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: MqttConnection, status: Mapping[str, object]) -> None:
        keep = True  # as without an onstatus, when it raises
        try:
            answer = True if self.onstatus is None else self.onstatus("mqtt", "connect", status)
            keep = answer is NotImplemented or bool(answer)
        finally:
            if connection is self._connection and not self._is_closing:
                if keep:
                    self._start_sending()
                else:
                    self._disconnect_now()

    def _start_sending(self) -> None:
        if not self._queue.is_sending:
            self._queue.is_sending = True
            self._queue.pump()

    def on_room(self) -> None:
        """More messages may be sent."""
        self._queue.pump()

    def on_disconnect(self, code: int, properties: Props) -> None:
        """The broker ended the connection."""
        if self._connection is not None:
            self._connection.end(disconnected(code, properties))


class _Stopped(gevent.GreenletExit):
    """Ends the making of a connection; a connect function of the application must not catch it as an error."""
