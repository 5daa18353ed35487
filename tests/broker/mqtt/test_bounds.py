"""What MQTT clients can make a hub do in one step, and keep in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations, islice

import pytest

from smqrt.broker.mqtt import devices as devices_module
from smqrt.broker.mqtt import filters as filters_module
from smqrt.broker.mqtt import ledger as ledger_module
from smqrt.broker.mqtt import readers as readers_module
from smqrt.broker.mqtt import subscribing
from smqrt.broker.mqtt.device import MAX_LARGE_BYTES
from smqrt.broker.mqtt.filters import Deliveries, Delivery, FilterSet, Options
from smqrt.broker.mqtt.ledger import Ledger
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, mqtt_batch
from smqrt.broker.mqtt.readers import ReaderTable
from smqrt.broker.mqtt.records import record_of, restore
from smqrt.broker.mqtt.wills import Will
from smqrt.broker.outbox import Drop, flush_dirty
from smqrt.settings.limits import MqttSettings
from smqrt.wire import smq
from tests.broker.memory_clients import settle
from tests.broker.mqtt.hub import MqttHub, Receiver
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
    source = Deliveries(Delivery(one, 1, False, False, b"") for one in members)
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


# ---- many filters that match one topic, and many topics

DEEP = b"/".join([b"a"] * 128)


def overlapping() -> Iterator[str]:
    """Return 20,543 filters that match `DEEP`."""
    for length in (128, 110, 90, 70):
        for pair in combinations(range(length), 2):
            levels = ["+" if at in pair else "a" for at in range(length)]
            yield "/".join(levels if length == 128 else [*levels, "#"])


def many_filters(hub: MqttHub, clients: int, each: int) -> list[Receiver]:
    """Subscribe clients to filters that match `DEEP`, without a look at the topics; return the clients."""
    texts, receivers = overlapping(), []
    for at in range(clients):
        device, receiver = hub.client(f"d{at}")
        receivers.append(receiver)
        for text in islice(texts, each):
            hub.devices.add_subscription(device, text, Options(0))
    return receivers


def test_a_topic_that_twenty_thousand_filters_match_appears_and_is_delivered_in_portions() -> None:
    hub = MqttHub()
    receivers = many_filters(hub, 20, 1000)
    hub.client("other", "b")
    with no_collections():
        began_s = time.thread_time()
        topic, other = hub.devices.topic_for(DEEP), hub.devices.topic_for(b"b")
        assert time.thread_time() - began_s < STEP_S / 2
    assert topic is not None
    assert other is not None
    frames = [smq.publish_frame(one.id, 7, 0, b"%d" % at) for at, one in enumerate((topic, other, topic))]
    for frame in frames:
        hub.devices.put(mqtt_batch(frame, 0))
    hub.devices._accept_queue()
    assert longest_step_s(hub.devices._deliver_all()) < STEP_S / 2
    for receiver in receivers:
        assert receiver.take() == [b"0", b"2"]


def test_a_search_for_filters_that_mostly_do_not_match_is_short() -> None:
    hub = MqttHub()
    device, receiver = hub.client("one")
    for text in islice(overlapping(), 8000):
        hub.devices.add_subscription(device, text[:-1] + "z", Options(0))
    with no_collections():
        began_s = time.thread_time()
        topic = hub.devices.topic_for(DEEP)  # the end of the search is not known yet
        assert time.thread_time() - began_s < STEP_S / 2
    hub.publish(DEEP, b"x")
    assert not receiver.take()
    assert topic is not None
    for text in list(device.subscriptions):
        hub.devices.unsubscribe(device, text)
    settle()
    assert topic not in hub.devices.by_topic


def test_filters_that_change_during_a_search() -> None:
    """The others still get the message, and the next one goes to those that are subscribed then."""
    hub = MqttHub()
    receivers = many_filters(hub, 2, 500)
    topic = hub.devices.topic_for(DEEP)
    assert topic is not None
    run = hub.devices.run(DEEP, topic.key, smq.publish_frame(topic.id, 7, 0, b"first"))
    steps = hub.devices.deliver_run(run, hub.devices.by_topic[topic])
    for _ in islice(steps, 5):
        pass
    gone, late = hub.devices.sessions["d1"], hub.client("late")
    for text in list(gone.subscriptions):
        hub.devices.unsubscribe(gone, text)
    hub.devices.add_subscription(late[0], "a/#", Options(0))
    for _ in steps:
        pass
    assert receivers[0].take() == [b"first"]
    assert receivers[1].take() == []
    late[1].take()
    hub.publish(DEEP, b"second")
    assert [one.take() for one in (*receivers, late[1])] == [[b"second"], [], [b"second"]]


def test_shared_subscriptions_among_many_filters_get_each_message_once() -> None:
    hub = MqttHub()
    many_filters(hub, 1, 100)
    members = [hub.client(f"m{at}", f"$share/g/{text}")[1] for at, text in enumerate(islice(overlapping(), 40))]
    hub.publish(DEEP, b"x", b"y")
    assert [sorted(one.take()) for one in members] == [[b"x", b"y"]] * 40


def test_deliveries_that_are_kept_do_not_grow_with_topics_times_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_module, "MAX_REMEMBERED", 500)
    hub = MqttHub()
    receivers = [hub.client(f"all{at}", "#")[1] for at in range(50)]
    own = hub.client("own", *[f"t/{at}" for at in range(100)])[1]
    for round_number in range(2):
        for at in range(100):
            hub.publish(b"t/%d" % at, b"%d" % round_number)
    kept = [len(one.known_deliveries or ()) for one in set(hub.devices.by_topic.values())]
    assert (len(kept), max(kept)) == (100, 51)
    assert sum(kept) <= 500
    assert [len(one.take()) for one in (*receivers, own)] == [200] * 51


def test_a_client_joins_a_filter_that_many_topics_have_in_one_short_step() -> None:
    hub = MqttHub()
    device, _ = hub.client("one", "#")
    for at in range(30_000):
        hub.devices.add_subscription(device, f"t/{at}", Options(0))
        hub.broker.topic_table.named(b"t/%d" % at)
    other, _ = hub.client("other")
    with no_collections():
        began_s = time.thread_time()
        hub.devices.add_subscription(other, "#", Options(0))
        hub.devices.unsubscribe(other, "#")
        assert time.thread_time() - began_s < STEP_S / 5


def test_new_filters_of_many_clients_share_a_pass_through_the_topics() -> None:
    hub = MqttHub()
    for at in range(100):
        hub.broker.topic_table.named(b"t/%d" % at)
    clients = [hub.client(f"d{at}") for at in range(50)]
    waiting = [hub.devices.subscribe(device, f"t/+/{at % 25}", Options(0)) for at, (device, _) in enumerate(clients)]
    for steps in waiting:
        next(steps)
    for steps in waiting:
        for _ in steps:
            pass
    assert hub.devices.search._ended <= 2
    device, receiver = clients[0]
    hub.subscribe(device, "t/+", Options(0))
    hub.publish(b"t/7", b"x")
    assert receiver.take() == [b"x"]


def test_the_second_subscriber_of_a_new_filter_waits_for_its_topics() -> None:
    hub = MqttHub()
    for at in range(100):
        hub.broker.topic_table.named(b"t/%d" % at)
    first, second = hub.client("first")[0], hub.client("second")[0]
    steps = hub.devices.subscribe(first, "t/+", Options(0))
    next(steps)
    for _ in hub.devices.subscribe(second, "t/+", Options(0)):
        pass
    assert len(hub.devices.by_topic) == 100
    assert list(steps) == []


def test_restored_sessions_share_a_pass_through_the_topics() -> None:
    old, new = MqttHub(), MqttHub()
    for at in range(100):
        device, _ = old.client(f"d{at}", f"t/{at}/+", qos=1)
        old.devices.left(device)
        new.broker.topic_table.named(b"t/%d/x" % at)
    restore(new.devices, record_of(old.devices))
    assert new.devices.search._ended == 1
    assert len(new.devices.by_topic) == 100


def test_sessions_with_many_filters_expire_in_short_steps() -> None:
    hub = MqttHub()
    for at in range(60):
        device, _ = hub.client(f"d{at}")
        for number in range(300):
            hub.devices.add_subscription(device, f"f/{at}/{number}/+", Options(0))
        hub.devices.left(device)
        device.ends_s = 0
    hub.broker.clock = time.thread_time
    assert longest_step_s(hub.devices._expire()) < STEP_S / 2
    assert not hub.devices.sessions
    settle()
    assert not hub.devices.filters.by_text


def test_wills_that_are_due_together_are_published_in_portions() -> None:
    hub = MqttHub()
    _, receiver = hub.client("reader", "gone")
    for at in range(3000):
        device, _ = hub.devices.open(f"d{at}", clean=False)
        device.expiry_s = 60
        hub.devices.wills.delay(device, Will(Message(b"gone", b"%d" % at, 0), 5, NO_EXPIRY_S), 5.0)
    due, hub.later = hub.later, []
    began_s = time.thread_time()
    hub.broker.clock = lambda: 5.0 + time.thread_time() - began_s
    with no_collections():
        for _, function in due:
            function()  # type: ignore[operator]
        assert time.thread_time() - began_s < STEP_S / 2
    while len(receiver.got) < 3000:
        flush_dirty(time.thread_time)
    assert [payload for _, payload, *_ in receiver.got] == [b"%d" % at for at in range(3000)]
