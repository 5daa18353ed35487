"""Reconnecting MQTT client: the MQTT part of `smqrt.clients.reconnect`.

It starts connections with CONNECT, asks `onstatus`, and delivers what is queued before DISCONNECT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic

import gevent

from smqrt.clients.mqtt.connect import DEFAULT_DELAY_S, MqttCloseReason, OnStatus, delay_of, disconnected, refused
from smqrt.clients.mqtt.connection import LINGER_S, MqttConnection
from smqrt.clients.mqtt.options import MqttOptions
from smqrt.clients.mqtt.queue import MqttSubscriptions, SendQueue
from smqrt.clients.reconnect import ReconnectingClient
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.callback_queue import Callbacks
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.properties import PacketType, Props, encode_properties

log = logging.getLogger("smqrt.mqtt")

SHORT_DELAY_S = 0.1  # a closing client whose connection broke connects again after this


class _Stopped(gevent.GreenletExit):
    """Ends a connection attempt; a connect function of the application must not catch it as an error."""


class ReconnectingMqttClient(ReconnectingClient[MqttCloseReason]):
    """A client of an MQTT broker, without the methods of `MqttClient`. Implements `ClientEvents`, all but messages.

    Args:
        connect: makes a stream.
        endpoint: the protocol state.
        options: the options of the client.
        properties: the properties of CONNECT.
        onstatus: see `OnStatus`.
        callbacks: runs the callbacks of the application.

    Attributes:
        last_reason: the reason code of DISCONNECT when the application or the process ends (MQTT 5). With 4 the broker
            publishes the will.
    """

    _items = ("message or subscription", "messages or subscriptions")

    def __init__(
        self,
        connect: Callable[[], Stream],
        endpoint: MqttClientEndpoint,
        options: MqttOptions,
        properties: Props,
        onstatus: OnStatus | None,
        callbacks: Callbacks,
    ) -> None:
        encode_properties(properties, PacketType.CONNECT)  # raises ArgumentError here, not in the greenlet
        endpoint.connect_packet(True, options.keepalive, properties)
        self._connect, self._endpoint, self._options, self._properties = connect, endpoint, options, properties
        self.onstatus = onstatus
        self.last_reason = 0
        self._subscriptions = MqttSubscriptions(options.resubscribe)
        self._queue = SendQueue(options, endpoint, self._subscriptions)
        self._connection: MqttConnection | None = None
        self._is_connecting = self._has_session = self._was_accepted = self._has_ended_by_itself = False
        self._shutdown_reason: MqttCloseReason | None = None
        super().__init__(callbacks, log)

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted the connection, and it is open."""
        return self._endpoint.is_open

    # ---- the end

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every message is sent, and acknowledged with QoS 1 and 2, and every subscription is answered.

        Args:
            timeout: seconds; None waits until the client has ended.

        Returns:
            Whether all of that is done.
        """
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
            while not self._queue.is_drained and not self.closed:
                self._queue.wait_progress()
        return self._queue.is_drained

    def disconnect(self, reason: int = 0) -> bool:
        """Close the client in the background. Returns at once; `onstatus` is not called.

        What is queued is delivered first, over a new connection when there is none, within the option `timeout`. What
        is not delivered by then fails with "closed". With an empty queue DISCONNECT is sent at once.

        Args:
            reason: the reason code for the broker (MQTT 5). With 4 the broker publishes the will.

        Returns:
            Whether the client was connected.

        Raises:
            ArgumentError: not a reason code.
        """
        if not isinstance(reason, int) or not 0 <= reason <= 0xFF:
            raise ArgumentError(f"reason must be a reason code from 0 to 255, not {reason!r}")
        was_connected = self.connected
        if self._stop_intake():
            if self._queue.is_drained:
                self._stop(reason)
            else:
                gevent.spawn(self._deliver, reason, self._options.timeout)
        return was_connected

    def discard(self) -> int:
        """Drop the queued messages and subscriptions, which fail with "closed", and return how many there were."""
        return self._queue.abandon()

    def shutdown(self) -> None:
        """Close the client because the process ends: a connected one calls `onstatus("sock", "sysshutdown", {})`."""
        if self.connected and not self._closing.is_set():
            self._shutdown_reason = MqttCloseReason("sock", "sysshutdown", detail="the process ends")
        self.disconnect(self.last_reason)

    def _begin_close(self, timeout_s: float | None) -> None:
        if self._stop_intake():
            self._deliver(self.last_reason, timeout_s)

    def _stop_intake(self) -> bool:
        """Take no more messages, and send the queued ones as soon as possible; false when that was done before."""
        if self.closing:
            return False
        self._closing.set()
        self._queue.close()
        if self._connection is not None and self.connected:
            self._start_sending()  # without waiting for the decision of onstatus
            self._connection.write_now()
        else:
            self._endpoint.forget_unconfirmed()  # QoS 0 promises nothing for a connection that broke
        return True

    def _deliver(self, reason: int, timeout_s: float | None) -> None:
        """Wait until everything is delivered, at most `timeout_s`, and stop."""
        endpoint = self._endpoint
        end_s = None if timeout_s is None else monotonic() + timeout_s
        if self.flush(timeout_s):
            # QoS 0 has no acknowledgement, but a broker answers a ping after everything that it received before
            if endpoint.unconfirmed and self.connected:
                endpoint.ping(monotonic())
            left_s = None if end_s is None else end_s - monotonic()
            with gevent.Timeout(left_s, False):  # type: ignore[arg-type]
                while endpoint.unconfirmed and self.connected:
                    self._queue.wait_progress()
            if endpoint.unconfirmed:
                self._undelivered += endpoint.unconfirmed
                self.end = self.end or MqttCloseReason("sock", "timeout", detail="no answer to a ping")
        self._stop(reason)

    def _stop(self, reason: int = 0) -> None:
        """Send DISCONNECT if connected, and end the connection, or the attempt to make one."""
        if self._stopping.is_set():
            return
        self._closing.set()
        self._stopping.set()
        self._queue.is_sending = False
        if self._connection is not None and self.connected:
            self._endpoint.disconnect(reason)
            self._connection.write_now()
            self._connection.abort_after(LINGER_S)
        elif self._connection is not None:
            self._connection.abort()
        elif self._is_connecting:
            self._greenlet.kill(_Stopped, block=False)

    def _abandon(self) -> int:
        self._has_ended_by_itself = not self._closing.is_set()
        if self._shutdown_reason is not None:
            self.end = self._shutdown_reason
            if self.onstatus is not None:
                self._callbacks.post(self.onstatus, self.end.type, self.end.code, self.end.status)
        in_flight = list(self._endpoint.session.in_flight.values())
        for item in in_flight:
            item.finish("closed")
        lost = self._queue.abandon() + len(in_flight)
        self._queue.close()
        self._queue.notify_progress()
        return lost

    # ---- connections

    @property
    def _needs_connection(self) -> bool:
        return not self._stopping.is_set()

    def _run_connection(self) -> MqttCloseReason | None:
        options, has_session = self._options, bool(self._properties.get("sessionexpiryinterval")) and self._has_session
        try:
            stream = self._open()
            connection = self._connection = MqttConnection(self._endpoint, stream, self._callbacks, self._queue.pump)
            is_clean = options.cleanstart
            if is_clean is None:  # MQTT 3.1.1 has no expiry: its sessions are kept only when the application asks
                is_clean = options.version == 4 or not has_session
            try:
                end = connection.run(is_clean, options.keepalive, self._properties, options.timeout)
            finally:
                self._connection, self._queue.is_sending = None, False
                self._endpoint.abort()
                self._settled.clear()
                self._queue.put_back(self._subscriptions.lost())
        except StreamError as error:
            end = MqttCloseReason("sock", error.word, detail=str(error))
        except _Stopped:
            return None
        if end is None or self._stopping.is_set():
            return None
        self.end = end
        return end

    def _open(self) -> Stream:
        self._is_connecting, self._was_accepted = True, False
        try:
            return self._connect()
        finally:
            self._is_connecting = False

    def _delay_after(self, reason: MqttCloseReason) -> float | None:
        log.info("%s", reason)
        if self._closing.is_set():  # one more attempt if the last one was accepted; onstatus does not decide any more
            return SHORT_DELAY_S if self._was_accepted else None
        default_s = DEFAULT_DELAY_S if reason.can_reconnect else None
        onstatus = self.onstatus
        if onstatus is None:
            return default_s
        answer = self._ask(lambda: (onstatus(reason.type, reason.code, reason.status),))  # a tuple: None is an answer
        if answer is None:
            return default_s  # it raised an exception, which is in the log
        return None if reason.code == "sysshutdown" else delay_of(answer[0], default_s)

    # ---- events of the endpoint: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_wake(self) -> None:
        """Write what the endpoint has queued."""
        if self._connection is not None:
            self._connection.wake()

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        """Handle the broker's answer to CONNECT."""
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
        if self.onstatus is None or self._closing.is_set():
            self._start_sending()
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: MqttConnection, status: Mapping[str, object]) -> None:
        """Ask onstatus whether to keep an accepted connection; sending waits for the answer."""
        is_kept = True  # as without onstatus, also when it raises an exception
        try:
            answer = True if self.onstatus is None else self.onstatus("mqtt", "connect", status)
            is_kept = answer is NotImplemented or bool(answer)
        finally:
            if connection is self._connection and not self._closing.is_set():
                if is_kept:
                    self._start_sending()
                else:
                    self._stop()

    def _start_sending(self) -> None:
        if not self._queue.is_sending:
            self._queue.is_sending = True
            self._queue.pump()

    def on_room(self) -> None:
        """Send what was waiting for room."""
        self._queue.pump()

    def on_disconnect(self, code: int, properties: Props) -> None:
        """End the connection: the broker sent DISCONNECT."""
        if self._connection is not None:
            self._connection.end(disconnected(code, properties))
