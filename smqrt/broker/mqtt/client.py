"""An MQTT client that is connected to a hub: its packets and their answers (MQTT 3.1, 3.1.1 and 5).

The connection passes the packets in order, and pauses while a hook of the application has not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Protocol

from smqrt.auth.identity import TOKEN, Action
from smqrt.broker.mqtt.device import NEVER_S, Device, Will
from smqrt.broker.mqtt.devices import FILTERS, Devices, is_valid_name
from smqrt.broker.mqtt.filters import Options, split_shared
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, Run, mqtt_batch
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.sessions import Session, SessionState
from smqrt.broker.state import BrokerState
from smqrt.broker.topics import Topic
from smqrt.errors import CloseReason, MqttError
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import PacketType, Reason, cut_properties, is_topic_filter, number_of
from smqrt.wire.mqtt.packets import (
    PINGRESP,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    Subscription,
    WillMessage,
    check_flags,
    connect_version,
    decode_acknowledgement,
    decode_connect,
    decode_disconnect,
    decode_ping,
    decode_publish,
    decode_subscribe,
    decode_unsubscribe,
    encode,
    encode_acknowledgement,
)
from smqrt.wire.mqtt.server import KEEPALIVE_FACTOR, check_message_properties
from smqrt.wire.smq import ConnackCode

UID_PREFIX = b"mqtt:"
"""MQTT client ids have a name space of their own beside the uids of SMQ clients."""
MAX_UID_BYTES = 200
"""Longer uids are hashed: packets between nodes have one byte for the length."""
MAX_PERMITTED = 1024
"""Topic names whose permission is remembered."""
MAX_QOS = 2
SUBSCRIBED_AT_ONCE = 100
"""Topics that are compared with new filters at once; the others are compared in the background."""
FRAME_PAYLOAD_BYTES = smq.MAX_FRAME_BYTES - smq.PUBLISH_HEADER_BYTES
_NOBODY = (Drop.UNROUTED, Drop.DENIED, Drop.OVER_RATE, Drop.SWALLOWED)
_CODES = {
    Drop.UNROUTED: Reason.NO_MATCHING_SUBSCRIBERS,
    Drop.DENIED: Reason.NOT_AUTHORIZED,
    Drop.OVER_RATE: Reason.QUOTA_EXCEEDED,
    Drop.SWALLOWED: Reason.IMPLEMENTATION_SPECIFIC_ERROR,
}
"""Reason codes of PUBACK for messages that nobody gets."""
_REFUSALS = {
    ConnackCode.PROTOCOL_VERSION: Reason.UNSUPPORTED_PROTOCOL_VERSION,
    ConnackCode.SERVER_UNAVAILABLE: Reason.SERVER_UNAVAILABLE,
    ConnackCode.BAD_CREDENTIALS: Reason.BAD_USER_NAME_OR_PASSWORD,
    ConnackCode.ACCESS_DENIED: Reason.NOT_AUTHORIZED,
    ConnackCode.CERTIFICATE_REJECTED: Reason.NOT_AUTHORIZED,
}
_RETURN_CODES = {
    Reason.UNSUPPORTED_PROTOCOL_VERSION: 1,
    Reason.CLIENT_IDENTIFIER_NOT_VALID: 2,
    Reason.SERVER_UNAVAILABLE: 3,
    Reason.SERVER_BUSY: 3,
    Reason.BAD_USER_NAME_OR_PASSWORD: 4,
    Reason.BAD_AUTHENTICATION_METHOD: 4,
}
_OTHER_REFUSAL = 5  # "not authorized", the return code of 3.1.1 for reasons that it does not have
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


class MqttOutbox(Protocol):
    """The connection of an MQTT client."""

    def send_packet(self, data: bytes) -> None:
        """Queue one packet."""

    def send_packets(self, data: bytes, key: bytes) -> None:
        """Queue PUBLISH packets with QoS 0 of one topic."""

    @property
    def has_room(self) -> bool:
        """Whether the queue takes more messages with QoS 1 and 2."""


def uid_of(client_id: str) -> bytes:
    """Return the uid of an MQTT client in the tables of the hub."""
    raw = client_id.encode()
    if len(raw) > MAX_UID_BYTES:
        return UID_PREFIX + b"#" + blake2b(raw, digest_size=16).hexdigest().encode()
    return UID_PREFIX + raw


class MqttClient(Session):
    """An MQTT client at the hub.

    Args:
        broker: the hub.
        outbox: its connection.
        seed: random, for hooks that expect the one of SMQ.
        origin: the request that opened the connection, see `smqrt.smq.handshake.Origin`.

    Attributes:
        device: its session; None before it is accepted.
        version: 3, 4 or 5; 0 before CONNECT.
        is_subscribing: whether a SUBSCRIBE packet is being handled; the client is not read meanwhile.
        skips_resume: whether the next `resume` of the outbox is to be ignored.
        keepalive_s: seconds of the keep-alive, with its tolerance; 0 for none.
        window: messages that may be in flight to the client.
    """

    __slots__ = (
        "_aliases",
        "_answer",
        "_connect_packet",
        "_frames",
        "_peer_limit_bytes",
        "_permitted",
        "_run_name",
        "client_id",
        "device",
        "is_new_id",
        "is_subscribing",
        "keepalive_s",
        "mqtt_outbox",
        "skips_resume",
        "version",
        "window",
    )

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.mqtt_outbox: Any = outbox
        self.device: Device | None = None
        self.version = 0
        self.client_id = ""
        self.is_new_id = False
        self.keepalive_s = 0.0
        self.window = 0
        self._connect_packet: ConnectPacket | None = None
        self._peer_limit_bytes = 0
        self._aliases: dict[int, bytes] = {}
        self._permitted: dict[bytes, bool] = {}
        self._frames: list[bytes] = []  # PUBLISH packets with QoS 0 to one topic, as SMQ frames
        self._run_name = b""
        self._answer = b""  # to be sent when the hub has processed a message
        self.is_subscribing = self.skips_resume = False

    @property
    def devices(self) -> Devices:
        """The MQTT clients of the hub."""
        found: Devices = self.broker.devices
        return found

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
        if first == 0x30 and self._is_plain(body):
            return self._collect(body)
        if self._frames and self.publish_collected():
            # The packet comes again after `resume`.
            raise AssertionError("a packet must not be passed while the client waits")
        if self.state is SessionState.CONNECTED:
            kind = first >> 4
            handler = _HANDLERS.get(kind)
            if handler is None or (kind == PacketType.AUTH and self.version < 5):
                raise MqttError(Reason.PROTOCOL_ERROR, f"unexpected packet {first:#x}")
            check_flags(first)
            return bool(handler(self, first, body))
        if self.state is SessionState.WAITING:
            return self._on_connect(first, body)
        return False

    def fail_mqtt(self, error: MqttError) -> None:
        """End the session because the client violated the protocol."""
        self.broker.log(self, f"closed: {error}")
        if self.state is SessionState.WAITING and self.version:
            self._refuse(error.code, str(error))
            return
        if self.state is SessionState.CONNECTED and self.version == 5:
            self.mqtt_outbox.send_packet(encode(DisconnectPacket(error.code, {"reasonstring": str(error)}), 5))
            self.version = 4  # no second DISCONNECT
        self.disconnect(CloseReason.MQTT_PROTOCOL, None, str(error))

    def resumed(self) -> None:
        """Send the acknowledgement of a message that the hub has processed now."""
        answer, self._answer = self._answer, b""
        if answer and not self.closed:
            self.mqtt_outbox.send_packet(answer)

    # ---- CONNECT

    def _on_connect(self, first: int, body: bytes) -> bool:
        if first != 0x10:
            raise MqttError(Reason.PROTOCOL_ERROR, "the first packet is not CONNECT")
        self.version = connect_version(body)
        packet = decode_connect(first, body, 0, takes_level_3=True)
        self.version, self._connect_packet = packet.version, packet
        if not packet.client_identifier and packet.version < 5 and not packet.clean_start:
            raise MqttError(Reason.CLIENT_IDENTIFIER_NOT_VALID, "a session without a client identifier")
        if packet.will is not None:
            check_message_properties(packet.will.properties)
            if not is_valid_name(packet.will.topic.encode(), self.devices.limits.levels):
                raise MqttError(Reason.TOPIC_NAME_INVALID, "the topic of the will has too many levels")
        if "authenticationmethod" in packet.properties:
            raise MqttError(Reason.BAD_AUTHENTICATION_METHOD, "this hub has no authentication methods")
        self.is_new_id = not packet.client_identifier
        self.client_id = packet.client_identifier or self._new_id()
        self.uid = uid_of(self.client_id)
        self.state = SessionState.AUTHENTICATING
        hook = self.broker.hooks.authenticate
        if hook is None:
            self.accept()
            return False
        return self.ask(hook, (self._credentials(packet), self), self._authenticated)

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

    def _authenticated(self, answer: Any) -> None:
        code, text = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
        if code == ConnackCode.ACCEPTED:
            self.accept()
        else:
            self.refuse(code, text, CloseReason.REFUSED, text.decode("utf-8", "backslashreplace"))

    def accept(self) -> None:
        """Accept the client; it takes over the session of its client id."""
        kept = self.devices.sessions.get(self.client_id)
        user = self.identity.user if self.identity is not None else None
        if kept is not None and kept.user != user:
            self.refuse(ConnackCode.ACCESS_DENIED, b"", CloseReason.REFUSED, "another user's client has this id")
            return
        will = self._connect_packet.will if self._connect_packet is not None else None
        if will is not None and self.identity is not None and not self.identity.may(will.topic.encode(), Action.WRITE):
            self.refuse(ConnackCode.ACCESS_DENIED, b"", CloseReason.REFUSED, "the topic of the will is denied")
            return
        super().accept()

    def connack(self) -> None:
        """Send CONNACK, and what waits in the session."""
        packet = self._connect_packet
        assert packet is not None
        self._connect_packet = None
        limits, properties = self.devices.limits, packet.properties
        device, is_kept = self.devices.open(self.client_id, packet.clean_start)
        self.device = device
        device.user = self.identity.user if self.identity is not None else None
        device.version = self.version
        device.will = None
        wanted_s = NEVER_S if packet.version < 5 and not packet.clean_start else 0
        if packet.version == 5:
            wanted_s = number_of(properties, "sessionexpiryinterval", 0)
        device.expiry_s = min(wanted_s, limits.session_expiry_s)
        if packet.will is not None:
            device.will = _will(packet.will)
        self.window = min(number_of(properties, "receivemaximum", 0xFFFF), limits.receive_maximum)
        self._peer_limit_bytes = number_of(properties, "maximumpacketsize", 0)
        self.keepalive_s = packet.keepalive_s * KEEPALIVE_FACTOR
        answer: dict[str, object] = {}
        if packet.version == 5:
            if device.expiry_s != wanted_s:
                answer["sessionexpiryinterval"] = device.expiry_s
            answer["receivemaximum"] = limits.receive_maximum
            answer["maximumpacketsize"] = limits.packet_bytes
            if self.is_new_id:
                answer["assignedclientidentifier"] = self.client_id
            answer["topicaliasmaximum"] = limits.aliases
            if number_of(properties, "requestresponseinformation", 0):
                answer["responseinformation"] = f"$smq/{self.etid}"
        self.mqtt_outbox.send_packet(encode(ConnackPacket(is_kept, 0, answer), self.version))
        self.outbox.settled()
        device.resume(self)

    def _refuse(self, code: int, text: str = "") -> None:
        """Send CONNACK with a reason, and close."""
        self.broker.stats.refusals += 1
        properties = {"reasonstring": text} if text and self.version == 5 else {}
        sent = code if self.version == 5 else _RETURN_CODES.get(Reason(code), _OTHER_REFUSAL)
        self.mqtt_outbox.send_packet(encode(ConnackPacket(False, sent, properties), self.version))
        self.disconnect(CloseReason.REFUSED, None, text)

    def refuse(self, code: int, text: bytes, reason: CloseReason, detail: str = "") -> None:
        """See `Session.refuse`."""
        if self.version:
            self._refuse(_REFUSALS.get(ConnackCode(code), Reason.NOT_AUTHORIZED), text.decode("utf-8", "replace"))
        else:
            self.broker.stats.refusals += 1
            self.disconnect(reason, None, detail)

    # ---- PUBLISH

    def _is_plain(self, body: bytes) -> bool:
        """Return whether a PUBLISH with QoS 0 can be collected: to the topic of the last one, without properties."""
        name = self._run_name
        end = 2 + len(name)
        if not name or body[2:end] != name or body[0] << 8 | body[1] != len(name):
            return False
        return self.version < 5 or body[end : end + 1] == b"\0"

    def _collect(self, body: bytes) -> bool:
        start = 2 + len(self._run_name) + (self.version == 5)
        payload = body[start:]
        if len(payload) > FRAME_PAYLOAD_BYTES:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the payload is too large")
        self._frames.append(payload)
        return False

    def publish_collected(self) -> bool:
        """Publish the collected messages; return true when the client has to wait."""
        payloads, self._frames = self._frames, []
        topic = self._topic(self._run_name)
        if not payloads:
            return False
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, len(payloads))
            return False
        head = b"\x08" + topic.key + self.etid.to_bytes(4, "big") + bytes(4)
        frames = b"".join([(len(one) + smq.PUBLISH_HEADER_BYTES).to_bytes(2, "big") + head + one for one in payloads])
        if len(payloads) > 1:
            self.count_batch(topic.key, len(payloads) - 1)
        return self.publish(mqtt_batch(frames, 0))

    def _on_publish(self, first: int, body: bytes) -> bool:
        message = decode_publish(first, body, 5 if self.version == 5 else 4)
        name = self._name_of(message)
        qos, number = message.qos, message.packet_identifier
        device = self.device
        assert device is not None
        if message.properties:
            check_message_properties(message.properties)
        if not is_valid_name(name, self.devices.limits.levels) or name.startswith((b"$SYS", b"$share/")):
            raise MqttError(Reason.TOPIC_NAME_INVALID, f"clients can't publish to {ascii(name[:64])[1:]}")
        if qos == 2:
            if number in device.unreleased:  # it was delivered before
                self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBREC, number, self._codec))
                return False
            if len(device.unreleased) >= self.devices.limits.receive_maximum:
                raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
        permitted = self._permitted.get(name)
        if permitted is None:
            return self._ask_permission(name, first, body)
        if qos == 0 and first == 0x30 and not message.properties and permitted:
            self._run_name = name
        return self._publish(message, name, permitted)

    @property
    def _codec(self) -> int:
        return 5 if self.version == 5 else 4

    def _name_of(self, message: PublishPacket) -> bytes:
        alias = message.properties.get("topicalias")
        if alias is None:
            if not message.topic:
                reason = Reason.PROTOCOL_ERROR if self.version == 5 else Reason.TOPIC_NAME_INVALID
                raise MqttError(reason, "a message without a topic")
            return message.topic.encode()
        if not isinstance(alias, int) or not 0 < alias <= self.devices.limits.aliases:
            raise MqttError(Reason.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if message.topic:
            self._aliases[alias] = message.topic.encode()
        elif alias not in self._aliases:
            raise MqttError(Reason.PROTOCOL_ERROR, f"topic alias {alias} is unknown")
        return self._aliases[alias]

    def _ask_permission(self, name: bytes, first: int, body: bytes) -> bool:
        """Ask whether the client may publish to a topic, then publish."""
        if self.identity is not None and not self.identity.may(name, Action.WRITE):
            self._remember(name, False)
            return self._on_publish(first, body)

        is_late = waits = False

        def decided(permitted: Any) -> None:
            nonlocal waits
            if not permitted:
                self.broker.count_denial(self, "publish to", "topic", name)
            self._remember(name, bool(permitted))
            waits = self._on_publish(first, body)
            self.skips_resume = is_late and waits  # `ask` resumes after this function

        is_waiting = self.ask(self.broker.hooks.permittop, (name, False, self), decided)
        is_late = True
        return is_waiting or waits

    def _remember(self, name: bytes, permitted: bool) -> None:
        if len(self._permitted) >= MAX_PERMITTED:
            self._permitted.clear()
        self._permitted[name] = permitted

    def _publish(self, message: PublishPacket, name: bytes, permitted: bool) -> bool:
        drops = self.broker.stats.drops
        before = [drops[reason] for reason in _NOBODY]
        waits, code = False, Reason.SUCCESS
        if not permitted:
            self.broker.stats.drop(Drop.DENIED, 1)
        elif not self._route_message(message, name):
            waits = True
        if not waits:
            now = [drops[reason] for reason in _NOBODY]
            code = next((_CODES[_NOBODY[at]] for at in range(len(now)) if now[at] != before[at]), code)
        self._acknowledge(message, code, waits)
        return waits

    def _route_message(self, message: PublishPacket, name: bytes) -> bool:
        """Route a message; return false when the client has to wait for the hub."""
        properties, expires_s = b"", NO_EXPIRY_S
        if message.properties:
            properties = cut_properties(message.property_bytes, "topicalias", "messageexpiryinterval")
            expiry_s = message.properties.get("messageexpiryinterval")
            if isinstance(expiry_s, int):
                expires_s = self.broker.clock() + expiry_s
        topic = self._topic(name)
        if message.retain:
            self.devices.set_retained(Message(name, message.payload, message.qos, True, properties, expires_s))
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, 1)
            return True
        if len(message.payload) > FRAME_PAYLOAD_BYTES:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the payload is too large")
        frame = smq.publish_frame(topic.id, self.etid, 0, message.payload)
        return not self.publish(mqtt_batch(frame, message.qos, message.retain, properties, expires_s))

    def _topic(self, name: bytes) -> Topic | None:
        """Return the topic of a name; it is created if somebody wants it."""
        table = self.broker.topic_table
        topic = table.by_name.get(name)
        if topic is not None:
            return topic
        broker = self.broker
        is_wanted = (
            broker.hooks.onpublish is not None
            or broker.hooks.ondrop is not None
            or broker.recorder is not None
            or broker.cluster is not None
            or (broker.last_values is not None and broker.last_values.selects_name(name))
            or self.devices.wants(name)
        )
        if not is_wanted:
            return None
        reached = broker.limits.of_all(table, name)
        if reached:
            broker.refuse(self, reached)
            return None
        return table.named(name)

    def _acknowledge(self, message: PublishPacket, code: int, waits: bool) -> None:
        """Send PUBACK or PUBREC, or keep it until the hub has processed the message."""
        qos, number, device = message.qos, message.packet_identifier, self.device
        if not qos or device is None or self.closed:
            return
        if qos == 2 and code < Reason.UNSPECIFIED_ERROR:
            device.unreleased.add(number)
        kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
        if qos == 2 and self.version < 5:
            device.unreleased.add(number)
        answer = encode_acknowledgement(kind, number, self._codec, code)
        if waits:
            self._answer = answer
        else:
            self.mqtt_outbox.send_packet(answer)

    # ---- acknowledgements

    def _on_puback(self, first: int, body: bytes) -> None:
        packet = decode_acknowledgement(first, body, self._codec)
        assert self.device is not None
        self.device.acknowledged(packet.packet_identifier)

    def _on_pubrec(self, first: int, body: bytes) -> None:
        packet = decode_acknowledgement(first, body, self._codec)
        number, device = packet.packet_identifier, self.device
        assert device is not None
        if packet.code >= Reason.UNSPECIFIED_ERROR:
            device.acknowledged(number)
            return
        code = 0 if device.received(number) else Reason.PACKET_IDENTIFIER_NOT_FOUND
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBREL, number, self._codec, code))

    def _on_pubrel(self, first: int, body: bytes) -> None:
        number = decode_acknowledgement(first, body, self._codec).packet_identifier
        assert self.device is not None
        unreleased = self.device.unreleased
        code = 0 if number in unreleased else Reason.PACKET_IDENTIFIER_NOT_FOUND
        unreleased.discard(number)
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBCOMP, number, self._codec, code))

    # ---- SUBSCRIBE and UNSUBSCRIBE

    def _on_subscribe(self, first: int, body: bytes) -> bool:
        packet = decode_subscribe(first, body, self._codec)
        self.is_subscribing = True
        self._decide_rest(packet, [])
        return self.is_subscribing

    def _decide_rest(self, packet: SubscribePacket, codes: list[int]) -> None:
        """Decide about the filters of a packet one after the other; hooks may answer later. Then subscribe."""
        while len(codes) < len(packet.subscriptions):
            before = len(codes)
            is_late = False

            def answer(code: int) -> None:
                codes.append(code)
                if is_late:  # noqa: B023  # of this round: a later one begins after the answer
                    self._decide_rest(packet, codes)

            self._decide(packet.subscriptions[before], answer)
            is_late = True
            if len(codes) == before:
                return
        steps = self._subscribe_all(packet, codes)
        for done, _ in enumerate(steps, 1):
            if done == SUBSCRIBED_AT_ONCE:
                run_in_background(steps)
                return

    def _subscribe_all(self, packet: SubscribePacket, codes: list[int]) -> Iterator[None]:
        """Subscribe to the permitted filters of a packet, then send SUBACK and the retained messages."""
        identifier = number_of(packet.properties, "subscriptionidentifier", 0)
        retained: list[tuple[str, Options]] = []
        for wanted, code in zip(packet.subscriptions, codes, strict=True):
            if self.closed or self.device is None:
                return
            if code <= MAX_QOS:
                options = _options(wanted.options, code, identifier)
                is_new = wanted.topic not in self.device.subscriptions
                yield from self.devices.subscribe(self.device, wanted.topic, options)
                is_sent = options.retain_handling == 0 or (options.retain_handling == 1 and is_new)
                if is_sent and not wanted.topic.startswith("$share/"):
                    retained.append((wanted.topic, options))
        if self.closed or self.device is None:
            return
        answer = SubscribeAnswer(PacketType.SUBACK, packet.packet_identifier, bytes(codes))
        self.mqtt_outbox.send_packet(encode(answer, self._codec))
        for text, options in retained:
            self.device.feed(self.devices.retained_for(text, options))
        self.is_subscribing = False
        self.outbox.resume()

    def _decide(self, wanted: Subscription, answer: Callable[[int], object]) -> None:
        """Call `answer` with the granted QoS, or with the reason of a refusal."""
        text, device = wanted.topic, self.device
        assert device is not None
        limits = self.devices.limits
        shared = split_shared(text)
        if shared is None or not is_topic_filter(shared[1]) or text.count("/") >= limits.levels:
            answer(Reason.TOPIC_FILTER_INVALID)
            return
        topic_filter = shared[1]
        if text not in device.subscriptions and len(device.subscriptions) >= limits.filters:
            FILTERS.refused(f"the MQTT client {ascii(self.client_id[:64])}")
            answer(Reason.QUOTA_EXCEEDED)
            return
        raw = topic_filter.encode()
        if self.identity is not None and not self.identity.may_filter(raw, Action.READ):
            answer(Reason.NOT_AUTHORIZED)
            return
        hooks = self.broker.hooks
        is_wild = "+" in topic_filter or "#" in topic_filter
        hook = hooks.permitfilter if is_wild else hooks.permittop
        if is_wild and hook is None and hooks.permittop is not None and self.identity is None:
            answer(Reason.NOT_AUTHORIZED)  # a hook that knows names only must not be bypassed
            return

        def decided(permitted: Any) -> None:
            answer(wanted.options & 3 if permitted else Reason.NOT_AUTHORIZED)

        arguments = (raw, self) if is_wild else (raw, True, self)
        self.ask(hook, arguments, decided)

    def _on_unsubscribe(self, first: int, body: bytes) -> None:
        packet = decode_unsubscribe(first, body, self._codec)
        assert self.device is not None
        codes = bytearray()
        for text in packet.topics:
            is_known = self.devices.unsubscribe(self.device, text)
            codes.append(Reason.SUCCESS if is_known else Reason.NO_SUBSCRIPTION_FOUND)
        answer = SubscribeAnswer(PacketType.UNSUBACK, packet.packet_identifier, bytes(codes))
        self.mqtt_outbox.send_packet(encode(answer, self._codec))

    # ---- other packets

    def _on_second_connect(self, first: int, body: bytes) -> None:
        raise MqttError(Reason.PROTOCOL_ERROR, "a second CONNECT")

    def _on_pingreq(self, first: int, body: bytes) -> None:
        decode_ping(first, body, self._codec)
        self.mqtt_outbox.send_packet(PINGRESP)

    def _on_disconnect(self, first: int, body: bytes) -> None:
        packet = decode_disconnect(first, body, self._codec)
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

    # ---- sending, see `ConnectedClient`

    def send_run(self, run: Run, retain: bool, identifiers: bytes) -> None:
        """Send messages with QoS 0."""
        data = run.packets(self.version, retain, identifiers)
        if not self._peer_limit_bytes or len(data) <= self._peer_limit_bytes:
            self.mqtt_outbox.send_packets(data, run.key)
            return
        for one in run.singles():
            data = one.packets(self.version, retain, identifiers)
            if len(data) <= self._peer_limit_bytes:  # [MQTT-3.1.2-25]
                self.mqtt_outbox.send_packets(data, run.key)

    def send_message(self, message: Message, number: int, is_dup: bool) -> bool:
        """Send a message; return false when the client does not take packets of this size."""
        data = message.packet(self.version, number, is_dup, self.broker.clock())
        if self._peer_limit_bytes and len(data) > self._peer_limit_bytes:
            return False
        if message.qos:
            self.mqtt_outbox.send_packet(data)
        else:
            self.mqtt_outbox.send_packets(data, b"")
        return True

    def send_release(self, number: int) -> None:
        """Send PUBREL."""
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBREL, number, self._codec))

    @property
    def has_room(self) -> bool:
        """Whether the connection takes more messages with QoS 1 and 2."""
        return bool(self.mqtt_outbox.has_room)

    # ---- the end

    def keepalive_expired(self) -> None:
        """End the session of a client from which no packet has come within 1.5 times its keep-alive."""
        self.disconnect(CloseReason.IDLE, None, f"no packet within {self.keepalive_s:g} s")

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """See `Session.disconnect`; the session of the client may be kept, and its will is published."""
        device, state = self.device, self.state
        if state is SessionState.CONNECTED and self.version == 5:
            code = _ENDS.get(reason)
            if code is None and text is not None:
                code = Reason.ADMINISTRATIVE_ACTION
            if code is not None:
                properties = {"reasonstring": text.decode("utf-8", "replace")} if text else {}
                self.mqtt_outbox.send_packet(encode(DisconnectPacket(code, properties), 5))
            self.version = 4
        super().disconnect(reason, None, detail)
        if state is SessionState.CONNECTED and device is not None and device.client is self:
            self.device = None
            will, device.will = device.will, None
            if will is not None and reason is not CloseReason.RESTARTED:
                self.devices.leave_will(device, will, self)
            self.devices.left(device)


def _options(options: int, qos: int, identifier: int) -> Options:
    return Options(qos, bool(options & 4), bool(options & 8), options >> 4 & 3, identifier)


def _will(will: WillMessage) -> Will:
    block = will.property_bytes
    properties = cut_properties(block, "willdelayinterval", "messageexpiryinterval") if block else b""
    expiry_s = will.properties.get("messageexpiryinterval")
    return Will(
        Message(will.topic.encode(), will.payload, will.qos, will.retain, properties),
        number_of(will.properties, "willdelayinterval", 0),
        float(expiry_s) if isinstance(expiry_s, int) else NO_EXPIRY_S,
    )


_HANDLERS: dict[int, Callable[[MqttClient, int, bytes], bool | None]] = {
    PacketType.CONNECT: MqttClient._on_second_connect,
    PacketType.PUBLISH: MqttClient._on_publish,
    PacketType.PUBACK: MqttClient._on_puback,
    PacketType.PUBREC: MqttClient._on_pubrec,
    PacketType.PUBREL: MqttClient._on_pubrel,
    PacketType.PUBCOMP: MqttClient._on_puback,
    PacketType.SUBSCRIBE: MqttClient._on_subscribe,
    PacketType.UNSUBSCRIBE: MqttClient._on_unsubscribe,
    PacketType.PINGREQ: MqttClient._on_pingreq,
    PacketType.DISCONNECT: MqttClient._on_disconnect,
}
