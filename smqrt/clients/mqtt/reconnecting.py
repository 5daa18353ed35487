"""Connections of an MQTT client, one after the other, and the delivery of its messages before it closes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic

import gevent

from smqrt.clients.mqtt.authentication import FAILED, Authentication
from smqrt.clients.mqtt.connect import (
    MqttCloseReason,
    MqttOptions,
    OnStatus,
    disconnected,
    refused,
)
from smqrt.clients.mqtt.connection import LINGER_S, MqttConnection, SendQueue
from smqrt.clients.mqtt.reconnection import Reconnection
from smqrt.clients.mqtt.store import ClientStore
from smqrt.clients.mqtt.subscriptions import (
    MqttSubscriptions,
)
from smqrt.clients.reconnect import ReconnectingClient
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop.greenlets import Callbacks
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.fields import (
    PacketType,
    Props,
    encode_properties,
)

log = logging.getLogger("smqrt.mqtt")

SHORT_DELAY_S = 0.1  # after a connection loss, a closing client reconnects after this time


class _Stopped(gevent.GreenletExit):
    """Ends a connection attempt. A GreenletExit, so that a connect function does not catch it as an error."""


class ReconnectingMqttClient(ReconnectingClient[MqttCloseReason]):
    """Base class of `MqttClient`: connections and reconnection, without the methods for applications.

    It implements `ClientEvents`, except messages and acknowledgements of subscriptions.

    Args:
        connect: opens a stream.
        endpoint: the protocol state.
        options: the options of the client.
        properties: the properties of CONNECT.
        onstatus: see `OnStatus`.
        callbacks: runs the callbacks of the application.
        authentication: of MQTT 5; None without.
        store: keeps the session on disk; None without.

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
        authentication: Authentication | None = None,
        store: ClientStore | None = None,
    ) -> None:
        encode_properties(properties, PacketType.CONNECT)  # raises ArgumentError here, not in the greenlet
        endpoint.connect_packet(True, options.keepalive, properties)
        self._connect, self._endpoint, self._options, self._properties = connect, endpoint, options, properties
        self._reconnection = Reconnection(options, connect)
        self.onstatus = onstatus
        self.last_reason = 0
        self._subscriptions = MqttSubscriptions(options.resubscribe)
        self._queue = SendQueue(options, endpoint, self._subscriptions)
        self._connection: MqttConnection | None = None
        self._is_connecting = self._was_accepted = False  # the current attempt
        self._has_session = self._has_ended_by_itself = False
        self._shutdown_reason: MqttCloseReason | None = None
        self._authentication, self._store = authentication, store
        super().__init__(callbacks, log)

    @property
    def connected(self) -> bool:
        """Whether the connection is open and accepted by the broker."""
        return self._endpoint.is_open

    @property
    def timeout_s(self) -> float:
        """The option `timeout`, in seconds."""
        return self._options.timeout

    # ---- closing

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all messages are sent, acknowledged if QoS 1 or 2, and all subscriptions are acknowledged.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            Whether everything is sent and acknowledged.
        """
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: end the block without an exception
            while not self._queue.is_drained and not self.closed:
                self._queue.wait_progress()
        return self._queue.is_drained

    def disconnect(self, reason: int = 0) -> bool:
        """Close the client in the background. Returns at once; `onstatus` is not called.

        Queued messages are delivered first, over a new connection if necessary, within the option `timeout`.
        Undelivered messages then fail with "closed". With an empty queue DISCONNECT is sent at once.

        Args:
            reason: the reason code for the broker (MQTT 5). With 4 the broker publishes the will.

        Returns:
            Whether the client was connected.

        Raises:
            ArgumentError: an invalid reason code.
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
        """Drop the queued messages and subscriptions, which fail with "closed", and return their number."""
        return self._queue.abandon(forget=True)

    def shutdown(self) -> None:
        """Close the client at the end of the process; a connected one calls `onstatus("sock", "sysshutdown", {})`."""
        if self.connected and not self._closing.is_set():
            self._shutdown_reason = MqttCloseReason("sock", "sysshutdown", detail="the process ends")
        self.disconnect(self.last_reason)

    def _begin_close(self, timeout_s: float | None) -> None:
        if self._stop_intake():
            self._deliver(self.last_reason, timeout_s)

    def _stop_intake(self) -> bool:
        """Reject further messages, and send the queued ones as soon as possible; return False on a second call."""
        if self.closing:
            return False
        self._closing.set()
        self._queue.close()
        if self._connection is not None and self.connected:
            self._start_sending()  # without waiting for the decision of onstatus
            self._connection.write_now()
        else:
            self._endpoint.forget_unconfirmed()  # QoS 0 messages are not resent after a connection loss
        return True

    def _deliver(self, reason: int, timeout_s: float | None) -> None:
        """Wait until all messages are delivered, at most `timeout_s`, and stop."""
        endpoint = self._endpoint
        end_s = None if timeout_s is None else monotonic() + timeout_s
        if self.flush(timeout_s):
            # QoS 0 has no acknowledgement, but brokers respond to a ping after all packets received before it.
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
        """Send DISCONNECT if connected, and end the connection or the connection attempt."""
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
        if self._store is not None:  # if the greenlet was killed before it began
            gevent.spawn(self._store.close)
        return lost

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            if self._store is not None:
                self._store.close()

    # ---- connections

    @property
    def _needs_connection(self) -> bool:
        return not self._stopping.is_set()

    def _run_connection(self) -> MqttCloseReason | None:
        options, has_session = self._options, bool(self._properties.get("sessionexpiryinterval")) and self._has_session
        self._is_connecting, self._was_accepted = True, False
        properties = self._properties
        if (authentication := self._authentication) is not None:
            more = self._decision(authentication.connect_properties, until=self._stopping)
            if more is None:
                self._is_connecting = False
                self.end = None if self._stopping.is_set() else FAILED
                return self.end
            properties = {**properties, **more}
        try:
            try:
                stream = self._connect()
            finally:
                self._is_connecting = False
            connection = self._connection = MqttConnection(
                self._endpoint, stream, self._callbacks, self._queue.pump, self._pause, self._store
            )
            is_clean = options.cleanstart
            if self._store is not None:
                is_clean = False
            elif is_clean is None:  # MQTT 3.1.1 has no expiry: sessions are kept only with cleanstart=False
                is_clean = options.level < 5 or not has_session
            try:
                end = connection.run(is_clean, options.keepalive, properties, options.timeout)
            finally:
                self._connection, self._queue.is_sending = None, False
                self._endpoint.abort()
                self._settled.clear()
                if authentication is not None:
                    authentication.finish(False)
                self._queue.put_back(self._subscriptions.lost())
        except StreamError as error:
            end = MqttCloseReason("sock", error.word, detail=str(error))
        except _Stopped:
            return None
        if end is None or self._stopping.is_set():
            return None
        self.end = end
        return end

    def _delay_after(self, reason: MqttCloseReason) -> float | None:
        log.info("%s", reason)
        if self._closing.is_set():  # one more attempt if the last one was accepted; onstatus no longer decides
            return SHORT_DELAY_S if self._was_accepted else None
        default_s = self._reconnection.delay_after(reason)
        onstatus = self.onstatus
        if onstatus is None:
            if default_s is None:
                log.error("MQTT client %s has ended: %s", self._options.clientidentifier, reason)
            return default_s
        # A tuple, because None is a decision of onstatus, and also the result of a callback that failed.
        decision = self._decision(lambda: (onstatus(reason.type, reason.code, reason.status),))
        if decision is None:
            return default_s  # onstatus raised an exception, which is in the log
        return None if reason.code == "sysshutdown" else self._reconnection.decided(decision[0], default_s)

    def _pause(self) -> None:
        """Block while the application is slow; implemented by `MqttClient`."""

    # ---- events of the endpoint: see `smqrt.wire.mqtt.client.ClientEvents`

    def on_wake(self) -> None:
        """Write the packets that the endpoint has queued."""
        if self._connection is not None:
            self._connection.wake()

    def on_connack(self, code: int, is_session_present: bool, properties: Props) -> None:
        """Process CONNACK."""
        status = {"sessionpresent": is_session_present, "reasoncode": code, "properties": properties}
        connection = self._connection
        assert connection is not None
        if code:
            connection.end(refused(code, self._options.level, status))
            return
        connection.keep_alive()
        self._reconnection.accepted()
        self._has_session = self._was_accepted = True
        has_identifiers = properties.get("subscriptionidentifieravailable", 1) != 0
        self._subscriptions.routes.uses_identifiers = has_identifiers and self._options.level == 5
        if not is_session_present:
            self._queue.put_back(self._subscriptions.session_lost(self._queue.items))
        self._queue.pump()
        self._settled.set()
        data = properties.get("authenticationdata")
        if self._authentication is not None and data is not None:  # before any message is sent
            self._callbacks.post(self._authentication.respond, connection, 0, data)
        if self._closing.is_set() or self.onstatus is None and (self._authentication is None or data is None):
            self._start_sending()
        else:
            self._callbacks.post(self._decide, connection, status)

    def _decide(self, connection: MqttConnection, status: Mapping[str, object]) -> None:
        """Call onstatus, which decides whether to keep an accepted connection; sending starts afterwards."""
        is_kept = True  # without onstatus, and when it raises an exception
        try:
            decision = True if self.onstatus is None else self.onstatus("mqtt", "connect", status)
            is_kept = decision is NotImplemented or bool(decision)
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

    def on_auth(self, code: int, properties: Props) -> None:
        """Answer AUTH of the broker."""
        authentication, connection = self._authentication, self._connection
        assert authentication is not None
        data = properties.get("authenticationdata")
        if code or data is not None:
            self._callbacks.post(authentication.respond, connection, code, data)
        if not code:
            self._callbacks.post(authentication.finish, True)

    def on_room(self) -> None:
        """Send queued messages: the broker has acknowledged some."""
        self._queue.pump()

    def on_disconnect(self, code: int, properties: Props) -> None:
        """End the connection: the broker sent DISCONNECT."""
        if self._connection is not None:
            self._connection.end(disconnected(code, properties))
