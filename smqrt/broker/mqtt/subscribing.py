"""Subscriptions of MQTT clients, and the messages to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import pack
from typing import Any

from smqrt.auth.identity import Action
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import FILTERS
from smqrt.broker.mqtt.filters import Options, split_shared
from smqrt.broker.mqtt.messages import Message, Run
from smqrt.broker.mqtt.publishing import PublishingClient
from smqrt.broker.mqtt.session import check_characters
from smqrt.broker.mqtt.system_topics import ROOT
from smqrt.broker.outbox import AT_ONCE_S, BLOCKED, Outbox, run_at_once, run_in_background
from smqrt.broker.state import BrokerState
from smqrt.wire.mqtt.fields import FIRST_FAILURE, PacketType, Reason, is_topic_filter, number_of
from smqrt.wire.mqtt.packets import (
    SubscribeAnswer,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    decode_acknowledgement,
    decode_subscribe,
    decode_unsubscribe,
    encode,
    encode_acknowledgement,
    encode_acknowledgements,
)

_PUBREL = 0x62  # the first byte
ALIAS_NAME_BYTES = 24
"""Shorter names get no alias: with its property of 3 bytes it saves too little."""
_NO_ALIASES: dict[bytes, int] = {}
"""Shared by clients without any; never written to."""
MAX_WILDCARDS = 2000
"""The wildcards `+` in all filters of a client. When as many match a topic, each search for them takes 3 ms."""

MAX_FILTER_CHARS = 256 << 10
"""The length of all filters of a client."""
MAX_SUBSCRIPTION_BYTES = 1 << 30
"""The memory of the subscriptions of all sessions of a hub, about two million."""


class SubscribingClient(PublishingClient):
    """An MQTT client that subscribes; see `ConnectedClient` for what its session needs.

    Args:
        broker, outbox, seed, origin: see `MqttSession`.

    Attributes:
        aliases_out: topic aliases of messages to the client, by topic.
        max_aliases_out: the number of these that it takes.
        is_bridge: whether it is another broker, see `ConnectPacket`.
        is_subscribing: whether SUBSCRIBE or UNSUBSCRIBE is being handled; the client is not read meanwhile.
        peer_limit_bytes: the largest packet that the client takes; 0 without a limit.
        window: messages that may be in flight to the client.
    """

    __slots__ = (
        "_is_paused",
        "aliases_out",
        "is_bridge",
        "is_subscribing",
        "max_aliases_out",
        "peer_limit_bytes",
        "window",
    )

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.is_subscribing = self._is_paused = self.is_bridge = False
        self.peer_limit_bytes = self.window = self.max_aliases_out = 0
        self.aliases_out: dict[bytes, int] = _NO_ALIASES

    # ---- SUBSCRIBE and UNSUBSCRIBE

    def on_subscribe(self, first: int, body: bytes) -> bool:
        """Handle SUBSCRIBE; return true when the client has to wait."""
        packet = decode_subscribe(first, body, self.codec)
        self.check_properties(packet.properties)
        check_characters(*(wanted.topic for wanted in packet.subscriptions))
        self.is_subscribing, self._is_paused = True, False
        self._decide_rest(packet, [])
        self._is_paused = self.is_subscribing
        return self._is_paused

    def _decide_rest(self, packet: SubscribePacket, codes: list[int]) -> None:
        """Decide about the filters of a packet one after the other; hooks may answer later. Then subscribe."""
        until_s = self.broker.clock() + AT_ONCE_S
        while len(codes) < len(packet.subscriptions):
            before = len(codes)
            if before and self.broker.clock() >= until_s:
                run_in_background(self._decide_later(packet, codes))
                return
            is_late = False

            def answer(code: int) -> None:
                codes.append(code)
                if is_late:  # noqa: B023  # of this round: a later one begins after the answer
                    self._decide_rest(packet, codes)

            self._decide(packet.subscriptions[before], answer)
            is_late = True
            if len(codes) == before:
                return
        run_at_once(self._subscribe_all(packet, codes), self.broker.clock)

    def _decide_later(self, packet: SubscribePacket, codes: list[int]) -> Iterator[None]:
        yield
        if not self.closed:
            self._decide_rest(packet, codes)

    def _subscribe_all(self, packet: SubscribePacket, codes: list[int]) -> Iterator[None]:
        """Subscribe to the permitted filters of a packet, then send SUBACK and the retained messages."""
        identifier = number_of(packet.properties, "subscriptionidentifier", 0)
        retained: list[tuple[str, Options]] = []
        yield from self.devices.deliver_published()
        for at, (wanted, code) in enumerate(zip(packet.subscriptions, codes, strict=True)):
            yield
            if self.closed or self.device is None:
                return
            if code >= FIRST_FAILURE:
                continue
            device = self.device
            is_new = wanted.topic not in device.subscriptions
            if is_new and self._is_full(device, wanted.topic):
                address = self.devices.take_overs.address_of(self) or "?"
                FILTERS.refused(f"the MQTT client {ascii(self.client_id[:64])} of {address}")
                codes[at] = Reason.QUOTA_EXCEEDED
                continue
            options = _options(wanted.options, code, identifier)
            if self.is_bridge:  # it could not say so in MQTT 3.1.1
                options = options._replace(no_local=not wanted.topic.startswith("$share/"), retain_as_published=True)
            self.devices.add_subscription(device, wanted.topic, options)
            is_sent = options.retain_handling == 0 or (options.retain_handling == 1 and is_new)
            if is_sent and not wanted.topic.startswith("$share/"):
                retained.append((wanted.topic, options))
        yield from self.devices.search.finish()
        self._answer_filters(PacketType.SUBACK, packet, codes)
        ledger = self.devices.ledger
        if ledger is not None and self.held and retained:  # SUBACK waits for the disk
            ledger.hold(run_at_once, self._feed(retained), self.broker.clock)
        else:
            yield from self._feed(retained)

    def _is_full(self, device: Device, text: str) -> bool:
        """Return whether a limit of filters is reached: of their number, wildcards or length."""
        devices = self.devices
        return (
            len(device.subscriptions) >= devices.limits.filters
            or device.wildcards + text.count("+") > MAX_WILDCARDS
            or sum(map(len, device.subscriptions), len(text)) > MAX_FILTER_CHARS
            or devices.subscription_bytes > MAX_SUBSCRIPTION_BYTES
        )

    def _feed(self, retained: list[tuple[str, Options]]) -> Iterator[None]:
        """Send the retained messages for new subscriptions."""
        for text, options in retained:
            if self.device is not None:
                if text.startswith(ROOT):
                    self.device.feed(self.devices.system.matching(text, options))
                self.device.feed(self.devices.retained.matching(text, options))
            yield

    def _answer_filters(self, kind: PacketType, packet: SubscribePacket | UnsubscribePacket, codes: list[int]) -> None:
        """Send SUBACK or UNSUBACK, and continue to read."""
        if self.closed or self.device is None:
            return
        self.counts.answers += 1
        answer = SubscribeAnswer(kind, packet.packet_identifier, bytes(codes))
        self.send_when_saved(encode(answer, self.codec), self.device.rows is not None)
        self.is_subscribing = False
        if self._is_paused:  # otherwise a later packet may wait when the connection resumes
            self.outbox.resume()

    def _decide(self, wanted: Subscription, answer: Callable[[int], object]) -> None:
        """Call `answer` with the granted QoS, or with the reason of a refusal."""
        text, features = wanted.topic, self.devices.features
        if not features.shared and text.partition("/")[0] == "$share":
            answer(Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED)
            return
        shared = split_shared(text)
        if shared is None or shared[1].count("/") >= self.devices.limits.levels or not is_topic_filter(shared[1]):
            answer(Reason.TOPIC_FILTER_INVALID)
            return
        topic_filter = shared[1]
        raw = topic_filter.encode()
        is_wild = "+" in topic_filter or "#" in topic_filter
        if is_wild and not features.wildcards:
            answer(Reason.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED)
            return
        if not self._may_subscribe(raw, is_wild):
            answer(Reason.NOT_AUTHORIZED)
            return
        kind = "topic filter" if is_wild else "topic"
        if self.devices.system.is_hidden(self, topic_filter):
            self.broker.log_denial(self, "subscribe to", kind, raw, "it has no user; see the setting mqtt.sys")
            answer(Reason.NOT_AUTHORIZED)
            return
        hooks = self.broker.hooks
        hook = hooks.permitfilter if is_wild else hooks.permittop
        if is_wild and hook is None and hooks.permittop is not None and self.identity is None:
            why = "it has no user, and the hub has permittop without permitfilter"
            self.broker.log_denial(self, "subscribe to", kind, raw, why)
            answer(Reason.NOT_AUTHORIZED)  # a hook that knows names only must not be bypassed
            return

        def decided(permitted: Any) -> None:
            if not permitted:
                self.broker.count_denial(self, "subscribe to", kind, raw)
            answer(min(wanted.options & 3, features.max_qos) if permitted else Reason.NOT_AUTHORIZED)

        arguments = (raw, self) if is_wild else (raw, True, self)
        self.ask(hook, arguments, decided)

    def _may_subscribe(self, raw: bytes, is_wild: bool) -> bool:
        """Return what the access control list decides about a filter; see the setting `mqtt.acl`."""
        identity, device = self.identity, self.device
        if identity is None:
            return True
        if not is_wild or self.devices.limits.acl != "deliver" or device is None:
            return identity.may_filter(raw, Action.READ)
        if not identity.allows_filter(raw, Action.READ):
            self.devices.check_messages_of(device)
        return True

    def on_unsubscribe(self, first: int, body: bytes) -> bool:
        """Handle UNSUBSCRIBE; return true when the client has to wait."""
        packet = decode_unsubscribe(first, body, self.codec)
        self.check_properties(packet.properties)
        check_characters(*packet.topics)
        self.is_subscribing, self._is_paused = True, False
        run_at_once(self._unsubscribe_all(packet), self.broker.clock)
        self._is_paused = self.is_subscribing
        return self._is_paused

    def _unsubscribe_all(self, packet: UnsubscribePacket) -> Iterator[None]:
        codes: list[int] = []
        yield from self.devices.deliver_published()
        for text in packet.topics:
            yield
            if self.closed or self.device is None:
                return
            if self.devices.unsubscribe(self.device, text):
                codes.append(Reason.SUCCESS)
                continue
            shared = split_shared(text)
            is_valid = shared is not None and is_topic_filter(shared[1])
            codes.append(Reason.NO_SUBSCRIPTION_FOUND if is_valid else Reason.TOPIC_FILTER_INVALID)
        self._answer_filters(PacketType.UNSUBACK, packet, codes)

    def recheck_filters(self) -> Iterator[None]:
        """See `Session.recheck_filters`."""
        device = self.device
        for text in list(device.subscriptions) if device is not None else ():
            yield
            shared = split_shared(text)
            if shared is None or device is not self.device or device is None or text not in device.subscriptions:
                continue
            if not self._may_subscribe(shared[1].encode(), "+" in text or "#" in text):
                self.devices.unsubscribe(device, text)
        if device is not None and device.is_checked:
            self.devices.check_messages_of(device)

    # ---- acknowledgements

    def on_puback(self, first: int, body: bytes) -> None:
        """Handle PUBACK and PUBCOMP; those of unknown messages are ignored."""
        packet = decode_acknowledgement(first, body, self.codec)
        self.check_properties(packet.properties)
        self.acknowledged(packet.packet_identifier, packet.type)

    def acknowledged(self, number: int, kind: int) -> None:
        """Handle PUBACK or PUBCOMP, see `Device.acknowledged`."""
        assert self.device is not None
        self.device.acknowledged(number, kind)

    def on_pubrec(self, first: int, body: bytes) -> None:
        """Handle PUBREC."""
        packet = decode_acknowledgement(first, body, self.codec)
        self.check_properties(packet.properties)
        if packet.code >= FIRST_FAILURE:
            self.acknowledged(packet.packet_identifier, packet.type)
        else:
            self.received(packet.packet_identifier)

    def received(self, number: int) -> None:
        """Handle PUBREC without a failure: send PUBREL."""
        device = self.device
        assert device is not None
        self.counts.answers += 1
        is_known, rows = device.received(number), device.rows
        if is_known and rows is not None and rows.must_wait(number):
            rows.ledger.hold_message(device, self, number)
            return
        code = Reason.SUCCESS if is_known else Reason.PACKET_IDENTIFIER_NOT_FOUND
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBREL, number, self.codec, code))

    # ---- sending, see `ConnectedClient`

    def send_run(self, run: Run, retain: bool, identifiers: bytes) -> None:
        """Send messages with QoS 0."""
        if self.aliases_out and (alias := self.aliases_out.get(run.name)) and run.is_single:
            self.mqtt_outbox.send_packets(run.aliased(alias, retain, identifiers), run.key)
            return
        data = run.packets(self.version, retain, identifiers)
        if not self.peer_limit_bytes or len(data) <= self.peer_limit_bytes:
            self.mqtt_outbox.send_packets(data, run.key)
            return
        for one in run.singles():
            data = one.packets(self.version, retain, identifiers)
            if len(data) <= self.peer_limit_bytes:  # [MQTT-3.1.2-25]
                self.mqtt_outbox.send_packets(data, run.key)

    def send_message(self, message: Message, number: int, is_dup: bool) -> bool:
        """Send a message; return false when the client does not take packets of this size."""
        alias = self.alias_of(message.name) if message.qos and self.max_aliases_out else 0
        data = message.packet(self.version, number, is_dup, self.broker.clock(), alias)
        if self.peer_limit_bytes and len(data) > self.peer_limit_bytes:
            return False
        if message.qos:
            self.mqtt_outbox.send_packet(data)
        else:
            self.mqtt_outbox.send_packets(data, b"")
        return True

    def send_encoded(self, packets: bytes) -> None:
        """Send PUBLISH packets with QoS 1 or 2."""
        self.mqtt_outbox.send_packet(packets)

    def send_unnumbered(self, packets: bytes) -> None:
        """Send retained messages with QoS 0, as PUBLISH packets."""
        self.mqtt_outbox.send_packets(packets, b"")

    def flush(self) -> None:
        """Pass what was sent to the socket now, not at the end of the turn."""
        outbox = self.outbox
        if outbox.queue and outbox.life is not BLOCKED:
            outbox.flush()

    def alias_of(self, name: bytes) -> int:
        """Return the topic alias for a message with QoS 1 or 2 that is sent now, see `Message.parts`.

        Only such messages introduce an alias: those with QoS 0 may be dropped, and the client would not know it.
        """
        if len(name) < ALIAS_NAME_BYTES:
            return 0
        number = self.aliases_out.get(name)
        if number is not None:
            return number << 1 | 1
        number = len(self.aliases_out) + 1
        if number > self.max_aliases_out:
            return 0
        if self.aliases_out is _NO_ALIASES:
            self.aliases_out = {}
        self.aliases_out[name] = number
        return number << 1

    def received_row(self, numbers: Sequence[int]) -> None:
        """Handle PUBREC packets without reasons."""
        device = self.device
        assert device is not None
        if device.rows is None and device.received_all(numbers):
            self.counts.answers += len(numbers)
            self.mqtt_outbox.send_packet(encode_acknowledgements(_PUBREL, pack(f">{len(numbers)}H", *numbers)))
            return
        for number in numbers:
            self.received(number)

    def send_release(self, number: int) -> None:
        """Send PUBREL."""
        self.counts.answers += 1
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBREL, number, self.codec))

    @property
    def has_room(self) -> bool:
        """Whether the connection takes more messages with QoS 1 and 2."""
        return bool(self.mqtt_outbox.has_room)


def _options(options: int, qos: int, identifier: int) -> Options:
    return Options(qos, bool(options & 4), bool(options & 8), options >> 4 & 3, identifier)
