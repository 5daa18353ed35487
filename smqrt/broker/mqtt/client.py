"""An MQTT client that is connected to a hub: its packets and their answers (MQTT 3.1, 3.1.1 and 5).

The connection passes the packets in order, and pauses while a hook of the application has not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from smqrt.auth.identity import TOKEN, Action
from smqrt.broker.mqtt.authentication import Exchange
from smqrt.broker.mqtt.client_ids import uid_of
from smqrt.broker.mqtt.device import NEVER_S
from smqrt.broker.mqtt.devices import is_valid_name
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.publishing import FRAME_PAYLOAD_BYTES
from smqrt.broker.mqtt.session import RESERVED, check_characters, check_message_properties, is_reserved
from smqrt.broker.mqtt.subscribing import SubscribingClient
from smqrt.broker.mqtt.trace import TracedOutbox, trace_decoded, trace_packet
from smqrt.broker.mqtt.wills import Will
from smqrt.broker.outbox import Outbox, run_at_once
from smqrt.broker.sessions import SessionState
from smqrt.broker.state import BrokerState
from smqrt.errors import CloseReason, MqttError
from smqrt.wire.mqtt.fields import PacketType, Reason, cut_properties, number_of
from smqrt.wire.mqtt.packets import (
    FLAGS,
    PINGRESP,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    WillMessage,
    check_flags,
    connect_version,
    decode_connect,
    decode_disconnect,
    decode_ping,
    encode,
)
from smqrt.wire.smq import ConnackCode

FOREIGN_ID = "does not match mqtt.client_id of this server"
KEEPALIVE_FACTOR = 1.5
"""A connection is closed after 1.5 times the keep-alive without a packet [MQTT-3.1.2-22]."""
MAX_MATCHED_CHARS = 1000
"""Longer client ids match no pattern of `mqtt.client_id`: the time of a comparison grows with the length."""
_REFUSALS = {
    ConnackCode.PROTOCOL_VERSION: Reason.UNSUPPORTED_PROTOCOL_VERSION,
    ConnackCode.SERVER_UNAVAILABLE: Reason.SERVER_UNAVAILABLE,
    ConnackCode.BAD_CREDENTIALS: Reason.BAD_USER_NAME_OR_PASSWORD,
    ConnackCode.ACCESS_DENIED: Reason.NOT_AUTHORIZED,
    ConnackCode.CERTIFICATE_REJECTED: Reason.NOT_AUTHORIZED,
}
_NOT_AUTHORIZED = 5
_RETURN_CODES = {
    Reason.UNSUPPORTED_PROTOCOL_VERSION: 1,
    Reason.CLIENT_IDENTIFIER_NOT_VALID: 2,
    Reason.SERVER_UNAVAILABLE: 3,
    Reason.SERVER_BUSY: 3,
    Reason.BAD_USER_NAME_OR_PASSWORD: 4,
    Reason.NOT_AUTHORIZED: _NOT_AUTHORIZED,
    Reason.TOPIC_NAME_INVALID: _NOT_AUTHORIZED,
    Reason.PACKET_TOO_LARGE: _NOT_AUTHORIZED,
}
"""Return codes of MQTT 3.1.1; without one, the connection is closed without CONNACK [MQTT-4.8.0-1]."""
_ENDS = {
    CloseReason.TAKEN_OVER: Reason.SESSION_TAKEN_OVER,
    CloseReason.SHUTDOWN: Reason.SERVER_SHUTTING_DOWN,
    CloseReason.RESTARTED: Reason.SERVER_SHUTTING_DOWN,
    CloseReason.IDLE: Reason.KEEP_ALIVE_TIMEOUT,
    CloseReason.LOGIN_ENDED: Reason.NOT_AUTHORIZED,
    CloseReason.SLOW_CONSUMER: Reason.QUOTA_EXCEEDED,
    CloseReason.PUBLISH_RATE: Reason.MESSAGE_RATE_TOO_HIGH,
    CloseReason.MESSAGE_TOO_LARGE: Reason.PACKET_TOO_LARGE,
    CloseReason.HOOK_FAILED: Reason.UNSPECIFIED_ERROR,
}
"""Reason codes of DISCONNECT for MQTT 5."""


class MqttClient(SubscribingClient):
    """An MQTT client at the hub.

    Args:
        broker, outbox, seed, origin: see `MqttSession`.

    Attributes:
        exchange: the authentication by a method of MQTT 5; None without one.
        is_unconfirmed: whether CONNACK waits until the session is saved. The client is not read meanwhile.
        has_asked: whether name and password were checked.
        is_new_id: whether the hub has chosen the client id.
        keepalive_s: seconds of the keep-alive, with its tolerance; 0 for none.
    """

    __slots__ = ("_connect_packet", "exchange", "has_asked", "is_new_id", "is_unconfirmed", "keepalive_s")

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.is_new_id = self.is_unconfirmed = self.has_asked = False
        self.keepalive_s = 0.0
        self._connect_packet: ConnectPacket | None = None
        self.exchange: Exchange | None = None

    @property
    def inbox(self) -> Outbox:
        """See `Session.inbox`."""
        return self.devices

    # ---- packets

    def packet(self, first: int, body: bytes) -> bool:
        """Handle a packet; return true when the client must not be read until the outbox's `resume`.

        Raises:
            MqttError: the client violated the protocol; see `fail_mqtt`.
        """
        if self.collect(first, body):
            return False
        if self.broker.traces and self.device is not None:  # with traces nothing is collected
            trace_packet(self, first, body)
        if len(body) == 2 and first in _SHORT_ANSWERS and body != b"\0\0" and self.device is not None:
            _SHORT_ANSWERS[first](self, body[0] << 8 | body[1])
            return False
        return self.postpone(first, body) or self._handle_mqtt(first, body)

    def _handle_mqtt(self, first: int, body: bytes) -> bool:
        if self.state is SessionState.CONNECTED:
            kind = first >> 4
            handler = _HANDLERS.get(kind)
            if handler is None:
                raise MqttError(Reason.PROTOCOL_ERROR, f"unexpected packet {first:#x}")
            if self.version == 3 and kind != PacketType.PUBLISH:  # 3.1 ignores unused flags, and has DUP in PUBREL
                first = kind << 4 | FLAGS.get(kind, 0)
            check_flags(first)
            return bool(handler(self, first, body))
        if self.state is SessionState.WAITING:
            return self._on_connect(first, body) if self.exchange is None else self.exchange.on_answer(first, body)
        return False

    def continue_packets(self) -> bool:
        """Continue after a pause; return true when the client has to wait again. Raises as `packet`."""
        postponed = self.resumed()
        return postponed is not None and not self.closed and self._handle_mqtt(*postponed)

    def fail_mqtt(self, error: MqttError) -> None:
        """End the session because the client violated the protocol."""
        self.broker.log(self, f"closed: {error}")
        if self.state is SessionState.WAITING and self.version:
            self.refuse_mqtt(error.code, str(error))
            return
        if self.state is SessionState.CONNECTED:
            self._send_disconnect(error.code, str(error))
        self.disconnect(CloseReason.MQTT_PROTOCOL, None, str(error))

    # ---- CONNECT

    def _on_connect(self, first: int, body: bytes) -> bool:
        if first != 0x10:
            raise MqttError(Reason.PROTOCOL_ERROR, "the first packet is not CONNECT")
        self.version = connect_version(body)
        packet = decode_connect(first, body, 0, takes_level_3=self.devices.features.level_3)
        self.version, self._connect_packet = packet.version, packet
        self.peer_limit_bytes = number_of(packet.properties, "maximumpacketsize", 0)
        self.is_new_id = not packet.client_identifier
        self.client_id = packet.client_identifier or self._new_id()
        self.uid = self.own_uid()
        if self.broker.traces:
            self.apply_traces()
            trace_decoded(self, PacketType.CONNECT, packet, False)
        self._check_connect(packet)
        if self.peer_limit_bytes and len(encode(self._connack(packet, False), 5)) > self.peer_limit_bytes:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the maximum packet size is smaller than CONNACK")
        self.state = SessionState.AUTHENTICATING
        if self.exchange is not None:
            self.state = SessionState.WAITING
            return self.exchange.begin(packet.properties)
        return self.log_in()

    def own_uid(self) -> bytes:
        """Return the uid for the client id, in the tables of the hub."""
        return uid_of(self.client_id)

    def log_in(self) -> bool:
        """Ask whether name and password are right, then accept the client; return true when it has to wait."""
        packet, hook = self._connect_packet, self.broker.hooks.authenticate
        assert packet is not None
        self.has_asked = True
        if hook is None:
            return self.admit()
        return self.ask_then(hook, (self._credentials(packet), self), self._authenticated)

    def _check_connect(self, packet: ConnectPacket) -> None:
        """Check what `decode_connect` does not check."""
        if not packet.client_identifier and (packet.version == 3 or packet.version == 4 and not packet.clean_start):
            raise MqttError(Reason.CLIENT_IDENTIFIER_NOT_VALID, "a session without a client identifier")
        if not self._is_permitted_id(packet.client_identifier):
            text = f"the client id {ascii(packet.client_identifier[:64])} {FOREIGN_ID}"
            raise MqttError(Reason.CLIENT_IDENTIFIER_NOT_VALID, text)
        self.check_properties(packet.properties)
        check_characters(packet.client_identifier, packet.username or "", packet.will.topic if packet.will else "")
        method = packet.properties.get("authenticationmethod")
        if method is not None:
            if self.broker.hooks.mqttauth is None:
                raise MqttError(Reason.BAD_AUTHENTICATION_METHOD, "this hub has no authentication methods")
            self.exchange = Exchange(self, str(method))
        will = packet.will
        if will is None:
            return
        if packet.version == 5:
            self.devices.features.check(will.qos, will.retain, 5, "the will")
        check_message_properties(will.properties)
        self.check_properties(will.properties, will.property_bytes)
        if not is_valid_name(will.topic.encode(), self.devices.limits.levels):
            raise MqttError(Reason.TOPIC_NAME_INVALID, "the topic of the will has too many levels")
        if len(will.payload) > FRAME_PAYLOAD_BYTES:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the payload of the will is too large")

    def _is_permitted_id(self, client_id: str) -> bool:
        patterns = self.devices.limits.client_id
        if not patterns:
            return True
        return len(client_id) <= MAX_MATCHED_CHARS and any(fnmatchcase(client_id, one) for one in patterns)

    def _new_id(self) -> str:
        while True:
            found = f"smqrt-{self.broker.random_u32():08x}{self.broker.random_u32():08x}"
            if found not in self.devices.sessions:
                return found

    @staticmethod
    def _credentials(packet: ConnectPacket) -> bytes:
        """Return the credentials in the form of an SMQ client: a token, or name and password."""
        password = packet.password or b""
        if TOKEN.match(password):
            return password
        return b"" if packet.username is None else packet.username.encode() + b":" + password

    def _authenticated(self, answer: Any) -> bool:
        code, text = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
        if code == ConnackCode.ACCEPTED:
            return self.admit()
        self.refuse(code, text, CloseReason.REFUSED, text.decode("utf-8", "backslashreplace"))
        return False

    def admit(self) -> bool:
        """Accept the client if it may publish its will; return true when a hook answers that later."""
        will = self._connect_packet.will if self._connect_packet is not None else None
        if will is None:
            return self._enter()
        name = will.topic.encode()
        if self.devices.features.own_topics and is_reserved(name):
            self.broker.log_denial(self, "publish its will to", "topic", name, RESERVED)
            self._refuse_will()
            return False
        if self.identity is not None and not self.identity.may(name, Action.WRITE):
            self._refuse_will()
            return False

        def decided(permitted: Any) -> bool:
            if permitted:
                return self._enter()
            self.broker.count_denial(self, "publish its will to", "topic", name)
            self._refuse_will()
            return False

        return self.ask_then(self.broker.hooks.permittop, (name, False, self), decided)

    def _refuse_will(self) -> None:
        self.refuse(ConnackCode.ACCESS_DENIED, b"", CloseReason.REFUSED, "the topic of the will is denied")

    def _accept_in_turn(self) -> bool:
        """Accept the client; return true when it waits because clients with its id replace each other too often."""
        old = self.broker.uids.get(self.uid)
        if not isinstance(old, MqttClient) or self._is_other_users_id:
            self.accept()
            return self.is_unconfirmed

        if self._waits_for_turn(old, self._accept_in_turn):
            return True
        self.accept()
        if self.state is SessionState.CONNECTED:
            self.devices.take_overs.record(self.client_id)
        return self.is_unconfirmed

    def _waits_for_turn(self, old: MqttClient | None, then: Callable[[], bool]) -> bool:
        """Return whether the client has to wait, see `TakeOvers.hold`; then it continues with `then`."""

        def resume() -> None:
            done = not self.closed and self.call_or_disconnect(lambda _: then(), None)
            if done and self.state is not SessionState.AUTHENTICATING and not self.is_unconfirmed:
                self.outbox.resume()

        return self.devices.take_overs.hold(self, old, resume)

    @property
    def _user(self) -> str | None:
        return self.identity.user if self.identity is not None else None

    @property
    def _is_other_users_id(self) -> bool:
        kept = self.devices.sessions.get(self.client_id)
        return kept is not None and kept.user != self._user

    def _enter(self) -> bool:
        """Accept the client, with its session from another node of the cluster; return true when that comes later."""
        cluster, packet = self.broker.cluster, self._connect_packet
        if cluster is None or self.is_new_id or packet is None:
            return self._accept_in_turn()
        old = self.broker.uids.get(self.uid)
        is_own = not self._is_other_users_id
        if is_own and self._waits_for_turn(old if isinstance(old, MqttClient) else None, self._enter):
            return True

        def taken(permitted: Any) -> bool:
            if permitted:
                return self._accept_in_turn()
            self._refuse_user()
            return False

        return self.ask_then(cluster.mqtt.take_session, (self.client_id, self._user, packet.clean_start), taken)

    def _refuse_user(self) -> None:
        self.refuse(ConnackCode.ACCESS_DENIED, b"", CloseReason.REFUSED, "another user's client has this id")

    def accept(self) -> None:
        """Accept the client; it takes over the session of its client id."""
        if self._is_other_users_id:
            self._refuse_user()
            return
        packet, ledger = self._connect_packet, self.devices.ledger
        if packet is not None and ledger is not None and ledger.is_full:
            kept = self.devices.sessions.get(self.client_id)
            if _wanted_expiry_s(packet) or (kept is not None and kept.rows is not None):
                self._refuse_unsaved()
                return
        super().accept()

    def _refuse_unsaved(self) -> None:
        self.refuse_mqtt(
            Reason.SERVER_UNAVAILABLE, "the session was not saved in time: the disk of the server is slow or fails"
        )

    def connack(self) -> None:
        """Send CONNACK, when the session is saved if it is kept, or if a kept one ends."""
        packet = self._connect_packet
        assert packet is not None
        self._connect_packet = None
        device, is_kept = self.devices.open(self.client_id, packet.clean_start)
        self.device, before_s = device, device.expiry_s
        device.user, device.identity = self._user, self.identity
        device.version = self.version
        device.expiry_s = min(_wanted_expiry_s(packet), self.devices.limits.session_expiry_s)
        device.will = will_of(packet.will, self.devices.features.max_qos) if packet.will is not None else None
        if self.broker.cluster is not None:
            self.broker.cluster.mqtt.session_connected(device)
        self.devices.session_changed(device)
        self.window, self.is_bridge = self.devices.limits.receive_maximum, packet.is_bridge
        if packet.version == 5:
            self.window = min(number_of(packet.properties, "receivemaximum", 0xFFFF), self.window)
            if not self.peer_limit_bytes:  # a packet that introduces an alias must not be left out
                aliases = number_of(packet.properties, "topicaliasmaximum", 0)
                self.max_aliases_out = min(aliases, self.devices.limits.aliases_out)
        self.keepalive_s = (self._server_keepalive_s(packet) or packet.keepalive_s) * KEEPALIVE_FACTOR
        answer = self._connack(packet, is_kept)
        data = encode(answer, self.version)
        if self.devices.features.own_topics and number_of(packet.properties, "requestresponseinformation", 0):
            information = {"responseinformation": f"$smq/{self.etid}"}
            longer = encode(answer._replace(properties={**answer.properties, **information}), self.version)
            data = data if self.is_too_large(longer) else longer
        ledger = self.devices.ledger
        is_changed = device.rows is not None and (device.expiry_s != before_s or device.will is not None)
        if ledger is not None and ledger.waits and (is_changed or not ledger.is_session_saved(device)):
            self.is_unconfirmed = True
            self.held += 1
            ledger.hold(self._confirm_saved, data, is_kept)
            ledger.wake()
        else:
            self._confirm(data, is_kept)

    def _confirm_saved(self, data: bytes, is_kept: bool) -> None:
        """Send CONNACK, which has waited for the disk, and continue to read."""
        self.held -= 1
        if self.closed:
            return
        self.is_unconfirmed = False
        if self.device is not self.devices.sessions.get(self.client_id):
            self.disconnect(CloseReason.SHUTDOWN, None, "the session was deleted")
            return
        self._confirm(data, is_kept)
        self.outbox.resume()

    def _confirm(self, data: bytes, is_kept: bool) -> None:
        """Send CONNACK, and what waits in the session."""
        device = self.device
        assert device is not None
        self.mqtt_outbox.send_packet(data)
        self.outbox.settled()
        self.counts.answers += 1
        self.devices.count_connected()
        if is_kept and self.identity is not None:  # rights may have changed since the last connection
            run_at_once(self.recheck_filters(), self.broker.clock)
            if self.devices.limits.acl == "deliver":
                self.devices.check_messages_of(device)
                device.drop_denied()
        device.resume(self)

    def end_handshake(self) -> None:
        """See `Session.end_handshake`; the time limit also applies to CONNACK that waits for the disk."""
        if not self.is_unconfirmed:
            super().end_handshake()

    def connect_timed_out(self) -> None:
        """See `Session.connect_timed_out`."""
        if self.is_unconfirmed:
            self._refuse_unsaved()
        else:
            super().connect_timed_out()

    def _connack(self, packet: ConnectPacket, is_kept: bool) -> ConnackPacket:
        """Return CONNACK without response information."""
        if packet.version < 5:
            return ConnackPacket(is_kept and packet.version > 3, 0)  # 3.1 has no "session present"
        limits, answer = self.devices.limits, dict[str, object]()
        if _wanted_expiry_s(packet) > limits.session_expiry_s:
            answer["sessionexpiryinterval"] = limits.session_expiry_s
        if self.devices.features.max_qos:
            answer["receivemaximum"] = limits.receive_maximum
        answer |= self.devices.features.missing
        answer["maximumpacketsize"] = limits.packet_bytes
        if self.is_new_id:
            answer["assignedclientidentifier"] = self.client_id
        if keepalive_s := self._server_keepalive_s(packet):
            answer["serverkeepalive"] = keepalive_s
        if limits.aliases:
            answer["topicaliasmaximum"] = limits.aliases
        if self.exchange is not None:
            answer |= self.exchange.properties
        return ConnackPacket(is_kept, 0, answer)

    def _server_keepalive_s(self, packet: ConnectPacket) -> int:
        """Return the keep-alive that replaces the one of the client, which is too long or none; 0 for no change."""
        limit_s = self.devices.limits.max_keepalive_s
        return limit_s if limit_s and not 0 < packet.keepalive_s <= limit_s else 0

    def is_too_large(self, data: bytes) -> bool:
        """Return whether the client does not take packets of this size."""
        return 0 < self.peer_limit_bytes < len(data)

    def refuse_mqtt(self, code: int, text: str = "", detail: str = "") -> None:
        """Send CONNACK with a reason, if the version of the client has one, and close.

        Args:
            code: the reason code.
            text: the reason string for the client.
            detail: the reason for the log; by default `text`.
        """
        self.broker.stats.refusals += 1
        if self.version == 5:
            self._send_reason(lambda properties: encode(ConnackPacket(False, code, properties), 5), text)
        elif code in _RETURN_CODES:
            self.mqtt_outbox.send_packet(encode(ConnackPacket(False, _RETURN_CODES[Reason(code)]), 4))
        self.disconnect(CloseReason.REFUSED, None, detail or text)

    def _send_reason(self, make: Callable[[dict[str, object]], bytes], text: str) -> None:
        """Send a packet with a reason string, or without it when it would be too large [MQTT-3.14.2-3]."""
        data = make({"reasonstring": text} if text else {})
        if self.is_too_large(data):
            data = make({})
        if not self.is_too_large(data):
            self.mqtt_outbox.send_packet(data)

    def refuse(self, code: int, text: bytes, reason: CloseReason, detail: str = "") -> None:
        """See `Session.refuse`."""
        if self.version:
            answer = _REFUSALS.get(ConnackCode(code), Reason.NOT_AUTHORIZED)
            self.refuse_mqtt(answer, text.decode("utf-8", "replace"), detail)
        else:
            self.broker.stats.refusals += 1
            self.disconnect(reason, None, detail)

    # ---- other packets

    def _on_auth(self, first: int, body: bytes) -> bool:
        if self.exchange is None:
            raise MqttError(Reason.PROTOCOL_ERROR, "AUTH of a client without an authentication method")
        return self.exchange.on_auth(body)

    def _on_second_connect(self, first: int, body: bytes) -> None:
        raise MqttError(Reason.PROTOCOL_ERROR, "a second CONNECT")

    def _on_pingreq(self, first: int, body: bytes) -> None:
        decode_ping(first, body, self.codec)
        self.counts.answers += 1
        self.mqtt_outbox.send_packet(PINGRESP)

    def _on_disconnect(self, first: int, body: bytes) -> None:
        packet = decode_disconnect(first, body, self.codec)
        self.check_properties(packet.properties)
        device = self.device
        assert device is not None
        expiry_s = number_of(packet.properties, "sessionexpiryinterval", device.expiry_s)
        if expiry_s and not device.expiry_s:
            raise MqttError(Reason.PROTOCOL_ERROR, "DISCONNECT sets a session expiry, but CONNECT did not")
        device.expiry_s = min(expiry_s, self.devices.limits.session_expiry_s)
        if packet.code == Reason.SUCCESS:
            device.will = None
        self.version = 4  # the server sends no DISCONNECT
        self.disconnect(CloseReason.CLIENT_DISCONNECT)

    # ---- traces

    def apply_traces(self) -> None:
        """Record the packets that are sent from now on, if a trace is about this client."""
        is_traced = any(trace.is_about(self) for trace in self.broker.traces)
        self.mqtt_outbox = TracedOutbox(self) if is_traced else self.outbox

    def forget_routes(self) -> None:
        """See `Session.forget_routes`; a trace may have begun or ended."""
        super().forget_routes()
        self.apply_traces()

    # ---- the end

    def keepalive_expired(self) -> None:
        """End the session of a client from which no packet has come within 1.5 times its keep-alive."""
        self.disconnect(CloseReason.IDLE, None, f"no packet within {self.keepalive_s:g} s")

    def _send_disconnect(self, code: int, text: str) -> None:
        """Send DISCONNECT, which the server of MQTT 5 sends once at most."""
        if self.version == 5:
            self._send_reason(lambda properties: encode(DisconnectPacket(code, properties), 5), text)
        self.version = 4

    def kick(self, text: str = "") -> None:
        """Disconnect the client by order of an operator; its will is published, and its session may be kept.

        Args:
            text: the reason string for MQTT 5.
        """
        if self.state is SessionState.CONNECTED and not self.is_unconfirmed:
            self._send_disconnect(Reason.ADMINISTRATIVE_ACTION, text)
        self.disconnect(CloseReason.SHUTDOWN, None, "by an operator")

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """See `Session.disconnect`; the session of the client may be kept, and its will is published."""
        device, state, is_unconfirmed = self.device, self.state, self.is_unconfirmed
        self.is_unconfirmed = False
        if state is SessionState.CONNECTED:
            code = _ENDS.get(reason, Reason.ADMINISTRATIVE_ACTION if text is not None else None)
            if code is not None and not is_unconfirmed:
                self._send_disconnect(code, text.decode("utf-8", "replace") if text else "")
            self.devices.system.closed(self)
        super().disconnect(reason, None, detail)
        onvanish = self.broker.hooks.onvanish
        if self.exchange is not None and onvanish and state in (SessionState.WAITING, SessionState.AUTHENTICATING):
            onvanish(self)  # `mqttauth` has got the client, and `onclose` does not
        is_own = device is not None and device.client is self
        if is_unconfirmed:
            is_own = device is self.devices.sessions.get(self.client_id)
        if state is SessionState.CONNECTED and device is not None and is_own:
            self.lost()
            self.device = None
            will, device.will = device.will, None
            if will is not None and reason is not CloseReason.RESTARTED and not is_unconfirmed:
                self.devices.wills.leave(device, will, self)
            self.devices.left(device)


def _wanted_expiry_s(packet: ConnectPacket) -> int:
    if packet.version < 5:
        return 0 if packet.clean_start else NEVER_S
    return number_of(packet.properties, "sessionexpiryinterval", 0)


def will_of(will: WillMessage, max_qos: int) -> Will:
    """Return the will for a session, with at most the QoS `max_qos`."""
    block = will.property_bytes
    properties = cut_properties(block, "willdelayinterval", "messageexpiryinterval") if block else b""
    expiry_s = will.properties.get("messageexpiryinterval")
    return Will(
        Message(will.topic.encode(), will.payload, min(will.qos, max_qos), will.retain, properties),
        number_of(will.properties, "willdelayinterval", 0),
        float(expiry_s) if isinstance(expiry_s, int) else NO_EXPIRY_S,
    )


ACKNOWLEDGEMENTS: dict[int, Callable[[Any, Sequence[int]], bool | None]] = {
    0x40: lambda client, numbers: client.device.acknowledged_row(numbers, PacketType.PUBACK),
    0x50: MqttClient.received_row,
    0x62: MqttClient.release_row,
    0x70: lambda client, numbers: client.device.acknowledged_row(numbers, PacketType.PUBCOMP),
}
"""Handlers of acknowledgements without reasons in a row, of an accepted client, by their first byte.

The numbers are the packet identifiers, without 0. They return true when the client has to wait, and raise as
`MqttClient.packet`."""
_SHORT_ANSWERS: dict[int, Callable[[MqttClient, int], None]] = {
    0x40: lambda client, number: client.acknowledged(number, PacketType.PUBACK),
    0x50: lambda client, number: client.received(number),
    0x70: lambda client, number: client.acknowledged(number, PacketType.PUBCOMP),
}
"""Acknowledgements without reason and properties, by their first byte. They do not wait for collected messages, unlike
PUBREL, which may be for one of them."""
_HANDLERS: dict[int, Callable[[MqttClient, int, bytes], bool | None]] = {
    PacketType.CONNECT: MqttClient._on_second_connect,
    PacketType.PUBLISH: MqttClient.on_publish,
    PacketType.PUBACK: MqttClient.on_puback,
    PacketType.PUBREC: MqttClient.on_pubrec,
    PacketType.PUBREL: MqttClient.on_pubrel,
    PacketType.PUBCOMP: MqttClient.on_puback,
    PacketType.SUBSCRIBE: MqttClient.on_subscribe,
    PacketType.UNSUBSCRIBE: MqttClient.on_unsubscribe,
    PacketType.PINGREQ: MqttClient._on_pingreq,
    PacketType.DISCONNECT: MqttClient._on_disconnect,
    PacketType.AUTH: MqttClient._on_auth,
}
