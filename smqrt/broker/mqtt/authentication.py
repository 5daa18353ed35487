"""Enhanced authentication of MQTT 5 clients: AUTH packets (MQTT 5 §4.12).

A client names a method in CONNECT. The hook `mqttauth` gets its data, and asks for more, accepts or rejects the client.
The session stays WAITING while the client has to answer, so that the deadline of the handshake applies, and is
AUTHENTICATING while the hook has to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smqrt.auth.identity import Identity
from smqrt.broker.sessions import SessionState
from smqrt.broker.state import AuthStep
from smqrt.errors import CloseReason, MqttError
from smqrt.wire.mqtt.fields import Reason
from smqrt.wire.mqtt.packets import AuthPacket, decode_auth, encode

if TYPE_CHECKING:
    from smqrt.broker.mqtt.client import MqttClient

_FAILED = AuthStep(Reason.NOT_AUTHORIZED)


class Exchange:
    """The authentication of one client by a method: at CONNECT, and again while it is connected.

    Args:
        client: the client.
        method: the method that it has named in CONNECT; all packets have the same [MQTT-4.12.0-5].

    Attributes:
        method: see above.
        data: the data for the client that comes with success.
    """

    __slots__ = ("_client", "_ends_s", "_is_asked", "_is_timed", "data", "method")

    def __init__(self, client: MqttClient, method: str) -> None:
        self._client, self.method = client, method
        self.data = b""
        self._is_asked = False  # whether the client has to send AUTH
        self._ends_s = 0.0  # the deadline of the last exchange
        self._is_timed = False

    @property
    def properties(self) -> dict[str, object]:
        """The properties of CONNACK, and of AUTH after a successful exchange."""
        return self._with(self.data)

    def _with(self, data: bytes) -> dict[str, object]:
        found: dict[str, object] = {"authenticationmethod": self.method}
        return {**found, "authenticationdata": data} if data else found

    # ---- CONNECT

    def begin(self, properties: Mapping[str, object]) -> bool:
        """Ask the hook about the data of CONNECT; return true when the client has to wait for it."""
        return self._ask(properties)

    def on_answer(self, first: int, body: bytes) -> bool:
        """Handle a packet before CONNACK; return true when the client has to wait.

        Raises:
            MqttError: it is neither AUTH with the same method nor DISCONNECT.
        """
        if first == 0xE0:
            self._client.disconnect(CloseReason.CLIENT_DISCONNECT)
            return False
        if first != 0xF0:
            raise MqttError(Reason.PROTOCOL_ERROR, f"the packet {first:#x} instead of AUTH")
        return self._ask(self._checked(body, Reason.CONTINUE_AUTHENTICATION))

    # ---- re-authentication

    def on_auth(self, body: bytes) -> bool:
        """Handle AUTH of a connected client; return true when the client has to wait.

        Raises:
            MqttError: it does not begin a re-authentication, and does not continue one.
        """
        expected = Reason.CONTINUE_AUTHENTICATION if self._is_asked else Reason.REAUTHENTICATE
        properties = self._checked(body, expected)
        if not self._is_asked:
            self._start_deadline()
        return self._ask(properties)

    def _start_deadline(self) -> None:
        devices = self._client.devices
        self._ends_s = devices.broker.clock() + devices.handshake_s
        if not self._is_timed:  # one timer for all exchanges: a client may begin many in this time
            self._is_timed = True
            devices.broker.call_later(devices.handshake_s, self._check_deadline)

    def _check_deadline(self) -> None:
        client, broker = self._client, self._client.broker
        left_s = self._ends_s - broker.clock()
        self._is_timed = self._is_asked and left_s > 0 and not client.closed
        if self._is_timed:
            broker.call_later(left_s, self._check_deadline)
        elif self._is_asked and not client.closed:
            client.disconnect(CloseReason.LOGIN_ENDED, b"", "the re-authentication timed out")

    # ---- migration to another process

    def record(self) -> list[object]:
        """Return the record for `restored`."""
        return [self.method, self._is_asked]

    @classmethod
    def restored(cls, client: MqttClient, record: list[Any]) -> Exchange:
        """Return the exchange of a connected client that has migrated, see `record`."""
        found = cls(client, record[0])
        found._is_asked = record[1]
        if found._is_asked:
            found._start_deadline()
        return found

    # ---- both

    def _checked(self, body: bytes, code: Reason) -> Mapping[str, object]:
        packet = decode_auth(0xF0, body, 5)
        self._client.check_properties(packet.properties)
        if packet.properties.get("authenticationmethod") != self.method:
            raise MqttError(Reason.PROTOCOL_ERROR, "AUTH with another method than CONNECT")
        if packet.code != code:
            raise MqttError(Reason.PROTOCOL_ERROR, f"AUTH with the code {packet.code:#x} instead of {code:#x}")
        return packet.properties

    def _ask(self, properties: Mapping[str, object]) -> bool:
        client, data = self._client, properties.get("authenticationdata", b"")
        self._is_asked = False
        if client.state is SessionState.WAITING:
            client.state = SessionState.AUTHENTICATING
        return client.ask_then(client.broker.hooks.mqttauth, (self.method, data, client), self._decided)

    def _decided(self, answer: object) -> bool:
        client = self._client
        step = answer if isinstance(answer, AuthStep) else _FAILED
        if step.code == Reason.CONTINUE_AUTHENTICATION:
            self._is_asked = True
            if client.state is SessionState.AUTHENTICATING:
                client.state = SessionState.WAITING
            self._send(step.code, step.data)
            return False
        if client.state is SessionState.CONNECTED:
            self._end_reauthentication(step)
            return False
        if step.code != Reason.SUCCESS:
            client.refuse_mqtt(step.code, step.text)
            return False
        self.data = step.data
        if step.user is None:
            return client.log_in()
        identify = client.broker.hooks.identify
        client.identity = Identity(step.user, client_id=client.uid) if identify is None else identify(step.user, client)
        if client.identity is None:
            client.refuse_mqtt(Reason.NOT_AUTHORIZED, "the user is unknown to this server")
            return False
        return client.admit()

    def _end_reauthentication(self, step: AuthStep) -> None:
        client = self._client
        user = client.identity.user if client.identity is not None else None
        if step.code == Reason.SUCCESS and step.user in (None, user):
            self.data = step.data
            self._send(Reason.SUCCESS, step.data)
            return
        text = step.text or "the re-authentication failed"
        client.disconnect(CloseReason.LOGIN_ENDED, text.encode(), text)

    def _send(self, code: int, data: bytes) -> None:
        client = self._client
        packet = encode(AuthPacket(code, self._with(data)), 5)
        if client.is_too_large(packet):
            client.fail_mqtt(MqttError(Reason.PACKET_TOO_LARGE, "the maximum packet size is smaller than AUTH"))
            return
        client.counts.answers += 1
        client.mqtt_outbox.send_packet(packet)
