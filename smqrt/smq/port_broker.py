"""MQTT broker of an application, with ports of its own and QoS 0 (help: mqtt-broker).

Its clients are those of a hub with fewer features: it has the sessions of `smqrt.broker.mqtt` and the connections of
`smqrt.smq.mqtt_connection`. It is not a hub: operators, clusters and hot restarts do not see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from gevent import get_hub

from smqrt.auth.service import IdentityService
from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.features import Features
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.outbox import Drop
from smqrt.broker.sessions import Session, SessionState
from smqrt.broker.state import BrokerPeer, Hooks
from smqrt.errors import CloseReason, MqttError
from smqrt.loop.scheduling import READ
from smqrt.settings.limits import MqttSettings
from smqrt.smq import data_path, handshake
from smqrt.smq.gevent_broker import call_later, follow_logins, random_u32
from smqrt.smq.handshake import HubAuthentication, Origin
from smqrt.smq.mqtt_connection import NoRequest, mqtt_connection_class
from smqrt.transport.tls import Transport
from smqrt.wire import smq
from smqrt.wire.connection_state import Life
from smqrt.wire.kernels import mqtt_packets
from smqrt.wire.mqtt.fields import Reason

CONNECT_S = 10.0
"""Time from the connection to a complete CONNECT."""
CLOSE_S = 5.0
"""Time in which a client gets its queued messages while the broker shuts down."""
_CHECK_S = 0.05
MAX_USER_PROPERTIES = 1000
_LOST = (Drop.OVER_BUDGET, Drop.OVER_GLOBAL_BUDGET)
_WORDS = {
    CloseReason.PEER_CLOSED: "socketclosed",
    CloseReason.READ_FAILED: "socketreadfailed",
    CloseReason.WRITE_FAILED: "socketwritefailed",
    CloseReason.SLOW_CONSUMER: "timeout",
}
"""Errors of a connection that closed without DISCONNECT, by the reason."""


class PortOptions(NamedTuple):
    """Options of a broker.

    Attributes:
        packet_bytes: the largest packet of a client.
        max_clients: the largest number of connections.
        wildcards: whether topic filters may have wildcards.
        identities: the users and rules that apply to the clients; None for none.
    """

    packet_bytes: int
    max_clients: int
    wildcards: bool = True
    identities: IdentityService | None = None


Login = Callable[["PortClient", str | None, bytes | None], bool | Deferred[Any] | None]
Permission = Callable[["PortClient", bytes, bool, bytes], bool | Deferred[Any]]


class PortEvents(Protocol):
    """Calls of a broker into its application.

    Attributes:
        authenticate: `(client, user name, password)` returns whether the client is accepted, perhaps later; None when
            that failed. The attribute is None if all clients are accepted.
        permit: `(client, topic, retain flag, payload)` returns whether a message is delivered, perhaps later. The
            attribute is None if all messages are.
    """

    authenticate: Login | None
    permit: Permission | None

    def permit_all(self, client: PortClient, topic: bytes, retain: bool, batch: bytes) -> bytes | Deferred[Any]:
        """Return the permitted messages of a batch of Publish frames, perhaps later; see `permit`."""

    def report(self, client: PortClient | None, kind: str, status: int | str, text: str = "") -> None:
        """Report a rejected client (`kind` is "mqtt", with a reason code) or a lost connection ("sock", a word)."""

    def left(self, client: PortClient) -> None:
        """Note that a connection was closed."""


class PortBroker(Broker):
    """A broker without its listening sockets.

    Args:
        options: the options.
        events: the application.

    Attributes:
        identities: see `PortOptions`.
        connections: the clients with a connection, accepted or not.
        rejected: the number of connections beyond `max_clients`.
    """

    devices: Devices

    def __init__(self, options: PortOptions, events: PortEvents) -> None:
        data_path.install()
        hooks = Hooks(onpublish=self._permit_batch if events.permit is not None else None)
        self.identities = options.identities
        if self.identities is not None:
            HubAuthentication(self.identities, hooks)
        super().__init__(hooks, random_u32=random_u32, clock=time.monotonic, encode=data_path.encode)
        self.call_later, self.limit_chunks = call_later, handshake.limit_chunks
        self.measure = data_path.kernels.measure
        self.options, self.events = options, events
        self.connections: set[PortClient] = set()
        self.rejected = 0
        settings = MqttSettings(
            packet_bytes=options.packet_bytes,
            session_expiry_s=0,
            aliases=0,
            aliases_out=0,
            user_properties=MAX_USER_PROPERTIES,
            sys="off",
            sys_interval_s=0,
            smq_qos=0,
        )
        features = Features(0, False, options.wildcards, shared=False, level_3=False, own_topics=False)
        devices = Devices(self, settings, features)
        devices.pack = partial(mqtt_packets, data_path.kernels.packed)
        if self.identities is not None:
            follow_logins(self)

    @property
    def dropped(self) -> int:
        """The number of messages that were dropped because a client is a slow consumer."""
        return sum(self.stats.drops[reason] for reason in _LOST)

    def clients(self) -> Iterator[Session]:
        """Return the connected clients."""
        return (one for one in self.sessions.values() if isinstance(one, Session))

    # ---- connections

    def serve(self, transport: Transport, data: bytes, address: tuple[str, int], is_secure: bool) -> None:
        """Serve a connection.

        Args:
            transport: the socket; for TLS after its handshake.
            data: the bytes that were received already.
            address: address and port of the client.
            is_secure: whether it uses TLS.
        """
        if self.closed or self.draining:
            transport.close()
            return
        if len(self.connections) >= self.options.max_clients:
            self.rejected += 1
            text = f"limit reached: maxClients ({self.options.max_clients}); the connection is closed"
            self.events.report(None, "mqtt", Reason.QUOTA_EXCEEDED, text)
            transport.close()
            return
        watcher: Any = get_hub().loop.io(transport.fileno(), READ)
        connection: Any = mqtt_connection_class(is_secure, False)(transport, watcher, self.options.packet_bytes)
        client = PortClient(self, connection, address, is_secure)
        self.connections.add(client)
        connection.session = client
        data_path.start_handshake(connection, CONNECT_S, address[0])
        connection.start(client, data)

    def stop(self) -> None:
        """Accept no more clients. Send the queued messages and DISCONNECT, then close; slow clients get `CLOSE_S`."""
        self.draining = True
        until_s = self.clock() + CLOSE_S

        def end() -> None:
            data_path.flush()
            is_late = self.clock() >= until_s
            for client in [*self.connections, *self.clients()]:
                if is_late or client.outbox.life is not Life.BLOCKED:
                    client.disconnect(CloseReason.SHUTDOWN, b"the broker is shutting down")
            if self.connections:
                call_later(_CHECK_S, end)
            else:
                super(PortBroker, self).close()

        get_hub().loop.run_callback(end)  # not here: the caller may be a callback that a flush has called

    def close(self) -> None:
        """Close all connections at once."""
        self.draining = True
        for client in list(self.connections):
            client.disconnect(CloseReason.PEER_CLOSED)
        super().close()

    # ---- the application decides about messages

    def _permit_batch(self, batch: bytes, tid: int, ptid: int, peer: BrokerPeer) -> bytes | Deferred[bytes]:
        """See `Hooks.onpublish`. Messages of clients without a connection need no permission."""
        topic = self.topic_table.by_key.get(batch[smq.TID])
        if not isinstance(peer, PortClient) or topic is None or topic.name is None:
            return batch
        return self.events.permit_all(peer, topic.name, getattr(batch, "retain", False), batch)


class PortClient(MqttClient):
    """A client with a connection.

    Args:
        broker: its broker.
        outbox: its connection.
        address: address and port of the client.
        is_secure: whether the connection uses TLS.

    Attributes:
        username: the user name of CONNECT; None without one.
    """

    __slots__ = ("address", "is_secure", "username")
    broker: PortBroker

    def __init__(self, broker: PortBroker, outbox: Any, address: tuple[str, int], is_secure: bool) -> None:
        origin = Origin(NoRequest(address), None, address[0]) if broker.identities is not None else None
        super().__init__(broker, outbox, random_u32(), origin)
        self.address, self.is_secure = address, is_secure
        self.username: str | None = None

    def own_uid(self) -> bytes:
        """See `MqttClient.own_uid`; this broker has no other clients than those of MQTT."""
        return self.client_id.encode()

    def _waits_for_turn(self, old: MqttClient | None, then: Callable[[], bool]) -> bool:
        return False  # a client that reconnects replaces its old connection at once, also the sixth time

    def log_in(self) -> bool:
        """See `MqttClient.log_in`."""
        packet, hook = self._connect_packet, self.broker.events.authenticate
        assert packet is not None
        self.username = packet.username
        if hook is None:
            return super().log_in()

        def decided(is_accepted: Any) -> bool:
            if is_accepted:
                return self.admit()
            if is_accepted is None:
                self.refuse_mqtt(Reason.SERVER_UNAVAILABLE, "the authentication of the broker failed")
            elif self.username:
                self.refuse_mqtt(Reason.BAD_USER_NAME_OR_PASSWORD, "user name or password is wrong")
            else:
                self.refuse_mqtt(Reason.NOT_AUTHORIZED, "the client must send user name and password")
            return False

        return self.ask_then(hook, (self, packet.username, packet.password), decided)

    def route_held(self, batch: bytes) -> bool:
        """See `PublishingClient.route_held`; the application decides about large messages, too."""
        permit, topic = self.broker.events.permit, self.broker.topic_table.by_key.get(batch[smq.TID])
        if permit is None or topic is None or not isinstance(batch, MqttBatch) or batch.large is None:
            return super().route_held(batch)

        def decided(is_permitted: Any) -> bool:
            if is_permitted:
                return large_messages.publish(self.devices, topic, batch, self, True)
            self.broker.stats.drop(Drop.SWALLOWED, 1)
            return False

        return self.ask_then(permit, (self, topic.name, batch.retain, batch.large), decided)

    # ---- errors

    def _report(self, code: int, text: str) -> None:
        self.broker.events.report(self, "mqtt", code, text)

    def fail_mqtt(self, error: MqttError) -> None:
        """See `MqttClient.fail_mqtt`."""
        if not self.closed and not (self.state is SessionState.WAITING and self.version):  # else `refuse_mqtt` does
            self._report(error.code, str(error))
        super().fail_mqtt(error)

    def refuse_mqtt(self, code: int, text: str = "", detail: str = "") -> None:
        """See `MqttClient.refuse_mqtt`."""
        self._report(code, text)
        super().refuse_mqtt(code, text, detail)

    def connect_timed_out(self) -> None:
        """See `Session.connect_timed_out`."""
        if self.state is SessionState.WAITING and not self.version:
            self._report(Reason.KEEP_ALIVE_TIMEOUT, f"no CONNECT within {CONNECT_S:g} s")
        super().connect_timed_out()

    def keepalive_expired(self) -> None:
        """See `MqttClient.keepalive_expired`."""
        self._report(Reason.KEEP_ALIVE_TIMEOUT, "no packet was received within the keep-alive time")
        super().keepalive_expired()

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """See `Session.disconnect`."""
        if self.closed:
            return
        if word := _WORDS.get(reason):
            self.broker.events.report(self, "sock", word)
        elif reason is CloseReason.HOOK_FAILED:
            self._report(Reason.UNSPECIFIED_ERROR, "the broker failed to handle the packet")
        super().disconnect(reason, text, detail)
        self.broker.connections.discard(self)
        self.broker.events.left(self)
