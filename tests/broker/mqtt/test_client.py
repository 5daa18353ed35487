"""MQTT clients whose packets wait for hooks, whose rights change, and who send very much at once."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import pytest

from smqrt.broker.client_limits import recheck_clients
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt import devices
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import mqtt_batch
from smqrt.broker.outbox import Drop, flush_dirty
from smqrt.broker.state import Hooks
from smqrt.broker.topics import PublishLimits
from smqrt.errors import MqttError
from smqrt.wire.mqtt.packets import ConnectPacket, PublishPacket, SubscribePacket, Subscription, encode
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of
from tests.support.garbage import no_collections

MAX_STEP_S = 0.02
"""An upper bound for what takes at most 5 ms on a machine without other work."""


def connected(hub: DeviceHub, name: str = "a") -> MemoryDevice:
    device = hub.device()
    device.feed(data_of(f"C {name}", 5))
    assert device.take()[:4] == b"\x20\x0e\0\0"
    return device


def step(device: MemoryDevice, script: str) -> bool:
    """Feed packets as long as the client is read; return whether it waits."""
    device._splitter.feed(data_of(script, 5))
    while (packet := device._splitter.next()) is not None:
        device._splitter.only = 0
        if device.session.packet(*packet):
            return True
    return device.session.publish_collected()


class Question:
    """A hook whose answer comes later."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: list[Deferred[Any]] = []

    def __call__(self, *arguments: Any) -> Deferred[Any]:
        self.asked.append(arguments)
        self.answers.append(Deferred())
        return self.answers[-1]


def test_a_packet_waits_for_the_messages_before_it() -> None:
    """`onpublish` has not answered for a run of QoS 0 messages when another packet comes."""
    question = Question()
    hub = DeviceHub(Hooks(onpublish=question))
    listener, sender = connected(hub, "listener"), connected(hub)
    listener.feed(data_of("82: 00 01 P 't' 00", 5))
    listener.take()
    assert step(sender, "30: 't' P ~1")
    question.answers.pop().resolve(question.asked.pop()[0])
    assert not sender.session.continue_packets()
    assert step(sender, "30: 't' P ~2 / 30: 't' P ~3 / 32: 't' 00 01 P ~4"), "the packet behind the run waits"
    assert len(question.asked) == 1
    question.answers.pop().resolve(question.asked.pop()[0])
    assert sender.session.continue_packets(), "the packet that has waited waits for its own answer"
    question.answers.pop().resolve(question.asked.pop()[0])
    assert not sender.session.continue_packets()
    assert sender.take() == data_of("40: 00 01", 5)
    assert listener.take() == data_of("30: 't' P ~1 / 30: 't' P ~2 / 30: 't' P ~3 / 30: 't' P ~4", 5)


def test_a_swallowed_message() -> None:
    hub = DeviceHub(Hooks(onpublish=lambda batch, *rest: b""))
    listener, sender = connected(hub, "listener"), connected(hub)
    listener.feed(data_of("82: 00 01 P 't' 00", 5))
    listener.take()
    sender.feed(data_of("32: 't' 00 01 P ~4", 5))
    assert (sender.take(), listener.take()) == (data_of("40: 00 01 83", 5), b"")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("permitted", [True, False])
def test_a_hook_decides_about_the_topic_of_a_will(is_late: bool, permitted: bool) -> None:
    question = Question()
    hub = DeviceHub(Hooks(permittop=question if is_late else lambda *arguments: permitted))
    device = hub.device()
    waits = step(device, "10: M V 06 00 00 P 'a' P 'w' 'x'")
    assert waits is is_late
    if is_late:
        assert question.asked == [(b"w", False, device.session)]
        question.answers[0].resolve(permitted)
    assert device.take()[:4] == (b"\x20\x0e\0\0" if permitted else b"\x20\x03\0\x87")
    assert device.session.closed is not permitted


@pytest.mark.parametrize("is_late", [False, True])
def test_authenticate_and_then_a_hook_for_the_will(is_late: bool) -> None:
    """The client is not read between the two answers."""
    login, question = Question(), Question()
    hub = DeviceHub(Hooks(authenticate=login if is_late else lambda *arguments: (0, b""), permittop=question))
    device = hub.device()
    assert step(device, "10: M V 06 00 00 P 'a' P 'w' 'x'")
    if is_late:
        login.answers[0].resolve((0, b""))
        assert device.ear.resumes == 0
    question.answers[0].resolve(True)
    assert device.ear.resumes == 1
    assert device.take()[:4] == b"\x20\x0e\0\0"


def test_hooks_for_filters() -> None:
    """`permittop` decides about names, `permitfilter` about wildcards, which are refused without it."""
    for hook, code in ((None, "87"), (lambda wanted, session: wanted == b"a/+", "00")):
        hub = DeviceHub(Hooks(permittop=lambda name, issub, session: name == b"a", permitfilter=hook))
        device = connected(hub)
        device.feed(data_of("82: 00 01 P 'a' 00 'b' 00 'a/+' 00 '#' 00 '$share/g/a' 00", 5))
        assert device.take() == data_of(f"90: 00 01 P 00 87 {code} 87 00", 5)


class ReadRights:
    """An identity that may read some filters."""

    user, expires_s, shown = "ada", None, "ada"

    def __init__(self, *filters: bytes) -> None:
        self.filters = set(filters)

    def may(self, name: bytes, *actions: Any) -> bool:
        return True

    def may_filter(self, wanted: bytes, action: Any) -> bool:
        return wanted in self.filters


def test_withdrawn_rights_end_subscriptions() -> None:
    hub = DeviceHub()
    device, sender = connected(hub), connected(hub, "sender")
    rights: Any = ReadRights(b"a/#", b"b")
    device.session.identity = rights
    device.feed(data_of("82: 00 01 P 'a/#' 00 'b' 00 'c' 00 '$share/g/b' 00", 5))
    assert device.take() == data_of("90: 00 01 P 00 00 87 00", 5)
    rights.filters = {b"b"}
    for _ in recheck_clients([device.session], lambda identity: None):
        pass
    sender.feed(data_of("30: 'a/1' P ~x / 30: 'b' P ~y", 5))
    assert device.take() == data_of("30: 'b' P ~y / 30: 'b' P ~y", 5)
    assert list(hub.devices.filters.by_text) == ["b"]


def test_a_right_to_publish_is_asked_for_again() -> None:
    permitted = {b"t": False}
    hub = DeviceHub(Hooks(permittop=lambda name, issub, session: permitted.get(name, True)))
    device = connected(hub)
    device.feed(data_of("32: 't' 00 01 P ~x", 5))
    assert device.take() == data_of("40: 00 01 87", 5)
    permitted.clear()
    device.session.forget_routes()
    device.feed(data_of("32: 't' 00 02 P ~x", 5))
    assert device.take() == data_of("40: 00 02 10", 5)


def test_a_request_and_its_answer_under_the_response_information() -> None:
    hub = DeviceHub()
    worker, asker = connected(hub, "worker"), hub.device()
    asker.feed(data_of("10: M V 02 00 00 { 1901 } 'asker'", 5))
    topic = f"$smq/{asker.session.etid}"
    assert asker.take().endswith(data_of(f"1a '{topic}'", 5))
    asker.feed(data_of(f"82: 00 01 P '{topic}' 01", 5))
    worker.feed(data_of("82: 00 01 P 'work' 01 '#' 00 '$smq/+' 00", 5))
    assert (asker.take(), worker.take()) == (data_of("90: 00 01 P 01", 5), data_of("90: 00 01 P 01 00 00", 5))
    asker.feed(data_of(f"32: 'work' 00 02 {{ 08 '{topic}' 09 'id' }} ~hello", 5))
    assert asker.take() == data_of("40: 00 02", 5)
    assert worker.take() == data_of(f"32: 'work' 00 01 {{ 08 '{topic}' 09 'id' }} ~hello", 5)
    worker.feed(data_of(f"32: '{topic}' 00 02 {{ 09 'id' }} ~HELLO", 5))
    assert asker.take() == data_of(f"32: '{topic}' 00 01 {{ 09 'id' }} ~HELLO", 5)
    assert worker.take() == data_of(f"40: 00 02 / 30: '{topic}' {{ 09 'id' }} ~HELLO", 5), "to `$smq/+`, not to `#`"


# ---- packet identifiers of messages to several subscribers


def test_many_subscribers_share_packets_while_their_identifiers_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DELIVERIES_AT_ONCE", 1)
    hub = DeviceHub()
    first, second, sender = connected(hub, "first"), connected(hub, "second"), connected(hub, "sender")
    for device, filters in ((first, "'t' 01"), (second, "'t' 01 'u' 01")):
        device.feed(data_of(f"82: 00 01 P {filters}", 5))
        device.take()
    sender.feed(data_of("32: 'u' 00 01 P ~u", 5))
    assert second.take() == data_of("32: 'u' 00 01 P ~u", 5)
    sender.feed(data_of("32: 't' 00 01 P ~1 / 32: 't' 00 02 P ~22", 5))
    assert first.take() == data_of("32: 't' 00 01 P ~1 / 32: 't' 00 02 P ~22", 5)
    assert second.take() == data_of("32: 't' 00 02 P ~1 / 32: 't' 00 03 P ~22", 5), "1 is in flight"
    second.feed(data_of("40: 00 01 / 40: 00 02 / 40: 00 03", 5))
    sender.feed(data_of("32: 't' 00 03 P ~3", 5))
    shared = data_of("32: 't' 00 03 P ~3", 5)
    settle()
    assert first.ear.got == second.ear.got == [shared]
    assert first.ear.got[0] is second.ear.got[0]
    found = [[message.payload for message in one.session.device.in_flight.values()] for one in (first, second)]
    assert found == [[b"1", b"22", b"3"], [b"3"]]


def test_packet_identifiers_of_few_subscribers_have_no_gaps() -> None:
    hub = DeviceHub()
    first, second, sender = connected(hub, "first"), connected(hub, "second"), connected(hub, "sender")
    for device, topic in ((first, "+"), (second, "t")):
        device.feed(data_of(f"82: 00 01 P '{topic}' 01", 5))
        device.take()
    sender.feed(data_of("32: 'u' 00 01 P ~u / 32: 't' 00 02 P ~t", 5))
    assert first.take() == data_of("32: 'u' 00 01 P ~u / 32: 't' 00 02 P ~t", 5)
    assert second.take() == data_of("32: 't' 00 01 P ~t", 5)


def test_packet_identifiers_begin_again() -> None:
    hub = DeviceHub()
    reader, sender = connected(hub, "reader"), connected(hub, "sender")
    reader.feed(data_of("82: 00 01 P 't' 01", 5))
    reader.take()
    reader.session.device.last_number = 65534
    for number, payloads in ((65535, "1"), (1, "2"), (2, "3")):
        sender.feed(data_of(f"32: 't' 00 01 P ~{payloads}", 5))
        assert reader.take() == data_of(f"32: 't' {number:04x} P ~{payloads}", 5)
    reader.session.device.last_number = 65534
    sender.feed(data_of("32: 't' 00 01 P ~4 / 32: 't' 00 02 P ~5", 5))
    assert reader.take() == data_of("32: 't' 00 03 P ~4 / 32: 't' 00 04 P ~5", 5), "the others are in flight"


# ---- what one turn brings


@pytest.mark.parametrize("first", ["30: 't/1' P", "32: 't/1' 00 07 P"])
def test_unsubscribe_does_not_overtake_messages_of_its_turn(first: str) -> None:
    """Those of the client itself, and those of others."""
    hub = DeviceHub()
    device, sender = connected(hub), connected(hub, "sender")
    device.feed(data_of("82: 00 01 P 't/+' 00", 5))
    assert device.take() == data_of("90: 00 01 P 00", 5)
    sender.feed(data_of(f"{first} ~1 / {first} ~2", 5))
    device.feed(data_of("30: 't/1' P ~3 / a2: 00 02 P 't/+' / 30: 't/1' P ~4", 5))
    assert device.take() == data_of("30: 't/1' P ~1 / 30: 't/1' P ~2 / 30: 't/1' P ~3 / b0: 00 02 P 00", 5)
    sender.feed(data_of("30: 't/1' P ~5", 5))
    assert device.take() == b""


def test_subscribe_does_not_get_messages_before_it() -> None:
    hub = DeviceHub()
    device, sender, other = connected(hub), connected(hub, "sender"), connected(hub, "other")
    other.feed(data_of("82: 00 01 P '#' 00", 5))
    other.take()
    sender.feed(data_of("31: 't' P ~kept / 30: 't' P ~live", 5))
    device.feed(data_of("82: 00 01 P 't' 00", 5))
    assert device.take() == data_of("90: 00 01 P 00 / 31: 't' P ~kept", 5)
    assert other.take() == data_of("30: 't' P ~kept / 30: 't' P ~live", 5)


def test_deliveries_continue_after_unsubscribe_has_waited() -> None:
    """More messages come while those before UNSUBSCRIBE are delivered in portions."""
    hub = DeviceHub()
    ticks = itertools.count()
    hub.broker.clock = lambda: next(ticks) * 0.001  # each look takes 1 ms: a portion is a few deliveries
    readers = [connected(hub, f"r{number}") for number in range(40)]
    for reader in readers:
        reader.feed(data_of("82: 00 01 P 't' 00", 5))
        assert reader.take()
    sender = connected(hub, "sender")
    sender.feed(data_of("30: 't' P ~1", 5))
    device = readers[-1]
    device._splitter.feed(data_of("a2: 00 02 P 't'", 5))
    assert device.session.packet(*device._splitter.next()), "the client waits for the rest"
    sender.feed(data_of("30: 't' P ~2", 5))
    for reader in readers[:-1]:
        assert reader.take() == data_of("30: 't' P ~1 / 30: 't' P ~2", 5)
    assert device.take() == data_of("30: 't' P ~1 / b0: 00 02 P 00", 5)


# ---- nothing takes long


def longest_s(hub: DeviceHub, device: MemoryDevice, script: str) -> float:
    """The longest time without other work of the loop, for packets and the turns after them, in CPU time."""
    device._splitter.feed(data_of(script, 5))
    packet = device._splitter.next()
    assert packet is not None
    device._splitter.only = 0
    with no_collections():
        begin = time.thread_time()
        try:
            device.session.packet(*packet)
        except MqttError as error:
            device.session.fail_mqtt(error)
        longest = time.thread_time() - begin
        more = True
        while more:
            begin = time.thread_time()
            more = flush_dirty(time.monotonic)
            longest = max(longest, time.thread_time() - begin)
    return longest


def wide(count: int, options: str) -> str:
    names = ("/".join(f"{(number * 7 + level) % 1000}" for level in range(128)) for number in range(count))
    return " ".join(f"'{name}' {options}" for name in names)


@pytest.mark.parametrize(
    "script",
    [
        f"82: 00 01 P {wide(1000, '00')}",
        f"a2: 00 01 P {wide(1000, '')}",
        "82: 00 01 P " + "'/'*65535 00 " * 15,
        "82: 00 01 P " + "000000*300000",
        "30: 't' { " + "2600016b000176*999" + " } ~x",
        "30: 't' { " + "2600000000*200000" + " } ~x",
        "30: '/'*65535 P ~x",
        "10: M V 02 00 00 { 2600000000*200000 } 'a'",
    ],
    ids=["filters", "unsubscribe", "long filters", "empty filters", "properties", "too many", "levels", "connect"],
)
def test_no_packet_holds_the_loop(script: str) -> None:
    times = []
    for _ in range(3):
        hub = DeviceHub()
        hub.broker.clock = time.monotonic
        device = hub.device() if script.startswith("10") else connected(hub)
        gc.disable()
        times.append(longest_s(hub, device, script))
        gc.enable()
        device.lost()
        settle()
    assert min(times) < MAX_STEP_S, times


def test_the_end_of_a_session_with_many_filters() -> None:
    hub = DeviceHub()
    device = connected(hub)
    device.feed(data_of(f"82: 00 01 P {wide(1000, '00')}", 5))
    device.take()
    hub.broker.clock = time.monotonic
    begin = time.thread_time()
    device.lost()
    assert time.thread_time() - begin < MAX_STEP_S
    settle()
    assert not hub.left()


def test_like_keeps_the_attributes_of_a_batch() -> None:
    batch = mqtt_batch(b"x", 2, True, b"p", 5.0).like(b"y")
    assert (bytes(batch), batch.qos, batch.retain, batch.properties, batch.expires_s) == (b"y", 2, True, b"p", 5.0)


@pytest.mark.parametrize("version", [4, 5])
def test_failures_that_an_old_version_has_no_answer_for_are_counted(version: int) -> None:
    hub = DeviceHub(Hooks(permittop=lambda name, is_sub, session: name != b"secret", onpublish=lambda batch, *_: b""))
    device = hub.device()
    device.feed(encode(ConnectPacket(version, "a"), version))
    device.take()
    for number, (topic, qos) in enumerate((("secret", 1), ("swallowed", 2), ("secret", 0)), 1):
        device.feed(encode(PublishPacket(topic, b"x", qos << 1, number if qos else 0), version))
    answers = device.take()
    if version == 5:
        assert (answers, hub.devices.hidden_failures) == (b"\x40\3\0\1\x87\x50\3\0\2\x83", 0)
    else:
        assert (answers, hub.devices.hidden_failures) == (b"\x40\2\0\1\x50\2\0\2", 2)


def test_messages_over_the_rate_of_an_old_version_are_counted() -> None:
    hub = DeviceHub()
    hub.broker.publish_limits = PublishLimits(1, policy="drop")
    device, listener = hub.device(), hub.device()
    for one, name in ((device, "a"), (listener, "b")):
        one.feed(encode(ConnectPacket(4, name), 4))
    listener.feed(encode(SubscribePacket(1, [Subscription("t")]), 4))
    for number in (1, 2, 3):
        device.feed(encode(PublishPacket("t", b"x", 2, number), 4))
    assert hub.devices.hidden_failures == hub.broker.stats.drops[Drop.OVER_RATE] == 2


def test_topics_that_mqtt_cannot_name_are_counted() -> None:
    hub = DeviceHub()
    for name in (b"a", b"a+b", b"\xff", b"a/#", b"a+b", b""):
        hub.broker.create(name)
    assert hub.devices.unnamed_topics == 4
    later = Devices(hub.broker)
    settle()
    assert later.unnamed_topics == 4
