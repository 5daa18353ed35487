"""What MQTT clients can make a hub do in one step, and keep in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from smqrt.broker.mqtt import devices as devices_module
from smqrt.broker.mqtt import ledger as ledger_module
from smqrt.broker.mqtt import readers as readers_module
from smqrt.broker.mqtt import subscribing
from smqrt.broker.mqtt.device import MAX_LARGE_BYTES
from smqrt.broker.mqtt.filters import Delivery, FilterSet, Options
from smqrt.broker.mqtt.ledger import Ledger
from smqrt.broker.mqtt.messages import Message, mqtt_batch
from smqrt.broker.mqtt.readers import ReaderTable
from smqrt.broker.outbox import Drop
from smqrt.settings.limits import MqttSettings
from smqrt.wire import smq
from tests.broker.memory_clients import settle
from tests.broker.mqtt.hub import MqttHub
from tests.support.garbage import no_collections

STEP_S = 0.05


def longest_step_s(steps: Iterator[object]) -> float:
    """The CPU time of the longest step."""
    with no_collections():
        longest_s, began_s = 0.0, time.thread_time()
        for _ in steps:
            longest_s, began_s = max(longest_s, time.thread_time() - began_s), time.thread_time()
    return longest_s


def crowd(hub: MqttHub, count: int, text: str) -> FilterSet:
    """Return the subscribers of the topic t: sessions without a connection."""
    for at in range(count):
        device, _ = hub.devices.open(f"d{at}", clean=False)
        device.expiry_s = 60
        list(hub.devices.subscribe(device, text, Options(0)))
    found = hub.devices.filters.match(b"t")
    assert found is not None
    return found


def test_the_subscribers_of_a_topic_are_found_in_portions() -> None:
    found = crowd(MqttHub(), 20_000, "#")
    assert longest_step_s(found.deliveries()) < STEP_S / 2
    assert found.known_deliveries is not None
    assert len(found.known_deliveries) == 20_000


def test_subscribers_that_change_meanwhile_are_found_again() -> None:
    hub = MqttHub()
    found = crowd(hub, 1000, "#")
    steps = found.deliveries()
    next(steps)
    hub.devices.unsubscribe(hub.devices.sessions["d7"], "#")
    list(steps)
    assert found.known_deliveries is None
    assert found.subscribers == 999


def test_a_large_group_without_a_connection_is_searched_in_portions() -> None:
    hub = MqttHub()
    found = crowd(hub, 20_000, "$share/g/#")
    (group,) = found.groups
    asked = []
    assert longest_step_s(group.choose(lambda device: asked.append(device) is not None)) < STEP_S / 5  # type: ignore[func-returns-value]
    assert len(asked) == 20_000


def test_a_group_knows_its_connected_members() -> None:
    hub = MqttHub()
    found = crowd(hub, 3, "$share/g/#")
    (group,) = found.groups
    assert not group.is_connected
    device, _ = hub.client("one", "$share/g/#", qos=1)
    assert list(group.connected) == [device]
    hub.devices.left(device)
    assert not group.is_connected


def test_a_delivery_under_way_leaves_nothing_in_a_session_that_has_ended() -> None:
    hub = MqttHub()
    device, _ = hub.client("gone", "#", qos=1)
    hub.devices.left(device)
    hub.devices.end(device)
    settle()
    device.enqueue(Message(b"t", b"x", 1))
    assert not device.waiting
    assert hub.devices.waiting_bytes == 0


def test_feeds_of_a_client_that_does_not_read_list_no_names() -> None:
    hub = MqttHub()
    for at in range(10):
        hub.devices.retain(Message(b"t/%d" % at, b"x", 1))
    device, receiver = hub.client("slow", qos=1)
    receiver.has_room = False
    for at in range(50):
        device.feed(hub.devices.retained.matching(f"t/+/{at % 5}", Options(1)))
    assert len(device.feeds) == 5
    assert not any(feed.has_begun for feed in device.feeds)
    device.forget_feeds("t/+/3")
    assert len(device.feeds) == 4


def test_large_messages_in_flight_are_limited_by_their_bytes() -> None:
    hub = MqttHub()
    device, receiver = hub.client("slow", "t", qos=1)
    for _ in range(6):
        device.enqueue(Message(b"t", bytes(400_000), 1))
    assert len(device.in_flight) == 3
    assert device.large_bytes >= MAX_LARGE_BYTES
    device.acknowledged(1, 4)
    assert list(device.in_flight) == [2, 3, 4]
    device.enqueue(Message(b"t", b"small", 1))
    hub.devices.left(device)
    device.resume(receiver)
    for number in (2, 3, 4):
        device.acknowledged(number, 4)
    while device.in_flight:
        device.acknowledged(next(iter(device.in_flight)), 4)
    assert device.large_bytes == 0
    assert not device.waiting


def test_messages_in_flight_count_while_there_is_no_connection() -> None:
    hub = MqttHub(settings=MqttSettings(total_queued_bytes=10_000))
    device, receiver = hub.client("one", "t", qos=1)
    hub.publish(b"t", b"x" * 5000, qos=1)
    assert hub.devices.waiting_bytes == 0
    hub.devices.left(device)
    assert 5000 < hub.devices.waiting_bytes < 6000
    device.resume(receiver)
    assert hub.devices.waiting_bytes == 0
    hub.publish(b"t", b"x" * 6000, qos=1)
    hub.devices.left(device)  # above the limit of all sessions
    assert not device.in_flight
    assert device.dropped == 2
    assert hub.devices.waiting_bytes == 0


def test_filters_are_limited_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MqttHub()
    device, receiver = hub.client("one", "x" * 100, qos=1)
    monkeypatch.setattr(subscribing, "MAX_FILTER_CHARS", 150)
    assert not receiver_is_full(hub, device, "y" * 50)
    assert receiver_is_full(hub, device, "y" * 51)
    monkeypatch.setattr(subscribing, "MAX_SUBSCRIPTION_BYTES", 400)
    assert receiver_is_full(hub, device, "y")
    hub.devices.end(device)
    settle()
    assert hub.devices.subscription_bytes == 0


def receiver_is_full(hub: MqttHub, device: object, text: str) -> bool:
    client = subscribing.SubscribingClient.__new__(subscribing.SubscribingClient)
    client.broker = hub.broker
    return client._is_full(device, text)  # type: ignore[arg-type]


def test_readers_of_many_topics_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_module, "MAX_REMEMBERED", 100)
    hub, table = MqttHub(), ReaderTable()
    members = [hub.client(f"c{at}")[0] for at in range(10)]
    monkeypatch.setattr(type(members[0]), "may_read", lambda self, name: self is not members[0])
    source = [Delivery(one, 1, False, False, b"") for one in members]
    for at in range(50):
        list(table.of(b"t%d" % at, source))
    assert len(table._by_name) == 10
    for at in range(40, 50):
        table.forget(b"t%d" % at)
    assert table._size == 0


def test_a_publisher_looks_for_some_slow_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "MAX_PRESSED", 2)
    hub = MqttHub()
    looked: list[object] = []
    monkeypatch.setattr(FilterSet, "has", lambda self, device: looked.append(device) is not None)
    for at in range(5):
        device, _ = hub.client(f"c{at}", "t", qos=1)
        hub.devices.pressed(device)
    assert not hub.devices.must_wait(hub.broker.topic_table.named(b"t"), hub.broker.server)
    assert len(looked) == 2


def test_a_million_changes_are_taken_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "KEYS_PER_COPY", 10)
    hub = MqttHub()
    ledger = Ledger(hub.devices, True)
    for at in range(25):
        ledger.touch(b"%d" % at)
    group = ledger.begin_group()
    steps = ledger.fill(group, lambda device: {})
    ledger.touch(b"later")
    list(steps)
    assert len(group.retained) == 25
    assert list(ledger.dirty) == [b"later"]


def test_large_payloads_count_for_what_waits_for_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.broker.mqtt.delivery.MAX_UNSENT_BYTES", 1_000_000)
    hub = MqttHub()
    hub.client("device", "t")
    topic = hub.devices.topic_for(b"t")
    assert topic is not None
    hub.devices._is_delivering = True  # the loop has no time for deliveries
    for _ in range(10):
        batch = mqtt_batch(smq.publish_frame(topic.id, 7, 0, b""), 0)
        batch.large = bytes(400_000)
        hub.devices.put(batch)
    hub.devices.flush()
    assert len(hub.devices._unsent) == 3
    assert hub.broker.stats.drops[Drop.OVER_GLOBAL_BUDGET] == 7
    list(hub.devices._deliver_all())
    assert hub.devices._unsent_bytes == 0
