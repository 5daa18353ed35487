"""Filters, sessions and retained messages of a hub's MQTT clients."""

from __future__ import annotations

import random
import sys
import tracemalloc

import pytest

from smqrt.broker.mqtt import filters as filters_module
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, mqtt_batch
from smqrt.broker.mqtt.records import record_of, restore
from smqrt.broker.mqtt.wills import Will
from smqrt.broker.outbox import Drop
from smqrt.settings.limits import MqttSettings
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.filter_tree import FilterTree
from tests.broker.memory_clients import heard, observe, settle, subscribe
from tests.broker.mqtt.hub import MqttHub, Receiver


def test_a_message_reaches_the_clients_whose_filters_match() -> None:
    hub = MqttHub()
    _, everything = hub.client("all", "#")
    _, kitchen = hub.client("kitchen", "house/kitchen/+")
    _, exact = hub.client("exact", "house/kitchen/temp")
    _, other = hub.client("other", "garden/#", "house/+")
    assert hub.publish(b"house/kitchen/temp", b"21", b"22")
    assert everything.take() == kitchen.take() == exact.take() == [b"21", b"22"]
    assert other.take() == []


def test_smq_and_mqtt_clients_share_a_topic() -> None:
    hub = MqttHub()
    smq_client = hub.crowd.client()
    number = subscribe(smq_client, b"house/temp")
    _, device = hub.client("device", "house/#", qos=1)
    hub.publish(b"house/temp", b"21")
    assert heard(smq_client)[-1].endswith(b"21")
    hub.broker.publish(b"22", number)
    assert device.take() == [b"21", b"22"]
    assert device.got == []


def test_messages_of_smq_clients_have_qos_1() -> None:
    hub = MqttHub()
    _, device = hub.client("device", "house/#", qos=2)
    hub.broker.publish(b"on", b"house/lamp")
    settle()
    assert device.got == [(b"house/lamp", b"on", 1, False, b"")]


@pytest.mark.parametrize("name", [b"", b"a/#", b"+/b", b"a\0b", b"\xff\xfe"])
def test_topics_that_mqtt_cannot_name_are_invisible(name: bytes) -> None:
    hub = MqttHub()
    _, device = hub.client("all", "#", "+", "+/#")
    hub.broker.publish(b"1", name) if name else None
    assert device.take() == []


def test_wildcards_do_not_match_topics_with_a_dollar() -> None:
    hub = MqttHub()
    _, wild = hub.client("wild", "#", "+/b")
    _, named = hub.client("named", "$x/#")
    hub.broker.publish(b"1", b"$x/b")
    assert (wild.take(), named.take()) == ([], [b"1"])


def test_overlapping_filters_deliver_once_with_the_highest_qos_and_all_identifiers() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device")
    hub.subscribe(device, "a/#", Options(0, identifier=1))
    hub.subscribe(device, "a/+", Options(2, identifier=200))
    hub.subscribe(device, "a/b", Options(1))
    hub.publish(b"a/b", b"x", qos=2)
    assert [one[2:4] for one in receiver.got] == [(2, False)]
    assert sorted(receiver.got[0][4].split(b"\x0b")[1:]) == [b"\x01", b"\xc8\x01"]


def test_no_local_leaves_out_own_messages_only() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device")
    hub.subscribe(device, "a", Options(0, no_local=True))
    hub.publish(b"a", b"own", publisher=receiver.etid)
    hub.publish(b"a", b"other")
    assert receiver.take() == [b"other"]


def test_the_retain_flag_is_kept_for_those_who_ask_for_it() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device", "a")
    keeper, kept = hub.client("keeper")
    hub.subscribe(keeper, "a", Options(1, retain_as_published=True))
    hub.publish(b"a", b"x", qos=1, retain=True)
    assert (receiver.got[0][3], kept.got[0][3]) == (False, True)


def test_a_shared_subscription_delivers_each_message_to_one_member() -> None:
    hub = MqttHub()
    members = [hub.client(f"m{at}", "$share/g/jobs/#")[1] for at in range(3)]
    _, alone = hub.client("alone", "$share/other/jobs/#")
    hub.publish(b"jobs/1", *[b"%d" % at for at in range(9)])
    shares = [one.take() for one in members]
    assert sorted(map(len, shares)) == [3, 3, 3]
    assert sorted(sum(shares, [])) == alone.take() == [b"%d" % at for at in range(9)]


def test_members_of_a_shared_subscription_get_their_messages_in_order_and_in_turn() -> None:
    hub = MqttHub()
    members = [hub.client(f"m{at}", "$share/g/t", qos=1)[1] for at in range(3)]
    hub.publish(b"t", b"0", b"1", b"2", b"3", qos=1)
    hub.publish(b"t", b"4", b"5", qos=1)
    hub.publish(b"t", b"6", qos=1)
    hub.publish(b"t", b"7", b"8", b"9", b"10", qos=1)
    assert [one.take() for one in members] == [[b"0", b"3", b"6", b"9"], [b"1", b"4", b"7", b"10"], [b"2", b"5", b"8"]]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_member_that_leaves_during_a_delivery_gets_no_more_messages(is_kept: bool) -> None:
    hub = MqttHub()
    clients = [hub.client(f"m{at}", "$share/g/t", qos=1) for at in range(3)]
    topic = hub.broker.topic_table.named(b"t")
    frames = b"".join(smq.publish_frame(topic.id, 7, 0, b"%d" % at) for at in range(6))
    found = hub.devices.filters.match(b"t")
    assert found is not None
    steps = hub.devices.deliver_run(hub.devices.run(b"t", topic.key, mqtt_batch(frames, 1)), found)
    next(steps)
    leaving, _ = clients[1]
    if is_kept:
        hub.devices.left(leaving)
    else:
        hub.devices.unsubscribe(leaving, "$share/g/t")
    for _ in steps:
        pass
    assert [sorted(receiver.take()) for _, receiver in clients] == [[b"0", b"3"], [], [b"1", b"2", b"4", b"5"]]
    assert not leaving.waiting


def test_a_member_without_a_connection_gets_messages_only_while_no_member_is_connected() -> None:
    hub = MqttHub()
    sleeper, _ = hub.client("sleeper", "$share/g/t", qos=1)
    _, awake = hub.client("awake", "$share/g/t", qos=1)
    hub.devices.left(sleeper)
    hub.publish(b"t", b"1", b"2", qos=1)
    assert awake.take() == [b"1", b"2"]
    hub.devices.left(hub.devices.sessions["awake"])
    hub.publish(b"t", b"3", qos=1)
    assert sum(len(one.waiting) for one in hub.devices.sessions.values()) == 1


# ---- topics that come and go


def test_a_topic_appears_when_somebody_needs_it() -> None:
    hub = MqttHub()
    assert not hub.publish(b"nobody", b"x")
    assert b"nobody" not in hub.broker.topic_table.by_name
    hub.client("device", "nobody")
    assert hub.publish(b"nobody", b"x")


def test_unused_topics_go() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "#")
    for at in range(1000):
        hub.publish(b"once/%d" % at, b"x")
    assert len(hub.broker.topic_table.by_name) == 1000
    hub.devices.unsubscribe(device, "#")
    settle()
    hub.tick(1)
    assert not hub.broker.topic_table.by_name
    assert not hub.broker.topic_table.passing
    assert hub.broker.stats.subscriptions == 0


def test_the_oldest_topics_go_while_a_filter_matches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.broker.mqtt.devices.MAX_PASSING", 100)
    hub = MqttHub()
    _, receiver = hub.client("device", "#")
    for at in range(500):
        hub.publish(b"once/%d" % at, b"x")
    hub.tick(1)
    assert len(hub.broker.topic_table.by_name) == 100
    hub.publish(b"once/0", b"again")
    assert receiver.take()[-1] == b"again"


def test_topics_of_smq_clients_stay() -> None:
    hub = MqttHub()
    hub.client("device", "#")
    hub.publish(b"t", b"x")
    number = subscribe(hub.crowd.client(), b"t")
    hub.devices.end(hub.devices.sessions["device"])
    settle()
    hub.tick(1)
    assert hub.broker.topic_table.by_name[b"t"].id == number


def test_names_published_once_leave_no_memory() -> None:
    hub = MqttHub()
    hub.publish(b"warm", b"x")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(20_000):
            hub.publish(b"once/%d" % at, b"x")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000


def test_memory_does_not_grow_with_topics_times_subscribers() -> None:
    hub = MqttHub()
    for at in range(5_000):
        hub.broker.topic_table.named(b"t/%d" % at)
    for at in range(20):
        hub.client(f"d{at}", "#")
    found = {id(one) for one in hub.devices.by_topic.values()}
    assert (len(hub.devices.by_topic), len(found)) == (5_000, 1)
    assert len(hub.devices.filters.by_text) == 1


@pytest.mark.parametrize("at_once", [16, 0])
def test_many_filters_find_what_a_simple_comparison_finds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters_module, "MAX_FILTERS_AT_ONCE", at_once)  # with 0, each set is a `WideSet`
    draw = random.Random(5)
    levels = ["a", "b", "", "c"]
    hub = MqttHub()
    filters: dict[str, str] = {}
    receivers = {}
    for at in range(150):
        text = "/".join(draw.choice([*levels, "+"]) for _ in range(draw.randint(1, 4)))
        text = draw.choice([text, text + "/#"])
        filters[f"d{at}"] = text
        receivers[f"d{at}"] = hub.client(f"d{at}", text)[1]
    names = {"/".join(draw.choice(levels) for _ in range(draw.randint(1, 4))) for _ in range(60)} - {""}
    for name in sorted(names):
        hub.publish(name.encode(), b"x")
        tree: FilterTree[str] = FilterTree()
        for client_id, text in filters.items():
            tree = FilterTree()
            tree.set(text, client_id)
            assert bool(receivers[client_id].take()) is bool(list(tree.match(name))), (name, text)


def test_observers_count_mqtt_subscribers() -> None:
    hub = MqttHub()
    watcher = hub.crowd.client()
    number = subscribe(watcher, b"t")
    observe(watcher, number)
    settle()
    heard(watcher)
    device, _ = hub.client("one", "t")
    hub.client("two", "#")
    settle()
    assert [one[-1] for one in heard(watcher)] == [2, 3]
    hub.devices.end(device)
    settle()
    assert heard(watcher)[-1][-1] == 2


# ---- QoS 1 and 2


def test_messages_wait_for_room_in_the_window() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device", "t", qos=1)
    receiver.window = 3
    hub.publish(b"t", *[b"%d" % at for at in range(7)], qos=1)
    assert receiver.take() == [b"0", b"1", b"2"]
    for number in list(receiver.numbers):
        device.acknowledged(number, PacketType.PUBACK)
    assert receiver.take() == [b"3", b"4", b"5"]
    device.acknowledged(12345, PacketType.PUBACK)
    assert receiver.take() == []


def test_messages_in_flight_come_again_in_order_and_released_ones_are_released_again() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device", "t", qos=2)
    hub.publish(b"t", b"0", b"1", b"2", qos=2)
    assert device.received(receiver.numbers[1])
    hub.devices.left(device)
    hub.publish(b"t", b"3", qos=2)
    again, second = hub.client("device", clean=False)
    assert again is device
    assert second.take() == [b"0", b"2", b"3"]
    assert (second.again, second.released) == ([receiver.numbers[0], receiver.numbers[2]], [receiver.numbers[1]])


def test_a_pubrel_that_is_sent_again_does_not_wait_for_the_receive_maximum() -> None:
    """MQTT 5 §4.9: a quota of zero holds back PUBLISH with QoS 1 and 2, and no other packet."""
    hub = MqttHub()
    device, receiver = hub.client("device", "t", qos=2)
    hub.publish(b"t", b"0", b"1", b"2", b"3", qos=2)
    first, second, third, fourth = receiver.numbers
    assert device.received(fourth)
    assert device.received(second)
    hub.devices.left(device)
    reconnected = Receiver(9, window=1)
    hub.devices.open("device", clean=False)
    device.resume(reconnected)
    assert (reconnected.again, reconnected.released) == ([first], [fourth, second])
    device.acknowledged(fourth, PacketType.PUBCOMP)
    device.acknowledged(second, PacketType.PUBCOMP)
    assert reconnected.again == [first]
    device.received(first)
    device.acknowledged(first, PacketType.PUBCOMP)
    assert (reconnected.again, reconnected.released) == ([first, third], [fourth, second])


def test_the_oldest_messages_are_lost_when_too_many_wait() -> None:
    hub = MqttHub(settings=MqttSettings(queued_messages=5))
    device, _ = hub.client("device", "t", qos=1)
    hub.devices.left(device)
    hub.publish(b"t", *[b"%d" % at for at in range(8)], qos=1)
    assert (len(device.waiting), device.dropped, hub.broker.stats.drops[Drop.OVER_BUDGET]) == (5, 3, 3)
    _, receiver = hub.client("device", clean=False)
    assert receiver.take() == [b"3", b"4", b"5", b"6", b"7"]
    assert device.waiting_bytes == 0


def test_messages_with_qos_0_do_not_wait() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "t", qos=2)
    hub.devices.left(device)
    hub.publish(b"t", b"x")
    assert not device.waiting


def test_expired_messages_are_left_out() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "t", qos=1)
    hub.devices.left(device)
    device.enqueue(Message(b"t", b"old", 1, expires_s=5))
    device.enqueue(Message(b"t", b"new", 1, expires_s=50))
    hub.now_s = 10
    _, receiver = hub.client("device", clean=False)
    assert receiver.take() == [b"new"]


# ---- sessions


def test_a_session_ends_after_its_expiry() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "t", qos=1)
    hub.devices.left(device)
    hub.tick(59)
    assert "device" in hub.devices.sessions
    hub.tick(2)
    assert "device" not in hub.devices.sessions
    assert not hub.devices.filters.by_text


def test_a_clean_start_ends_the_session() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "t", qos=1)
    hub.devices.left(device)
    hub.publish(b"t", b"x", qos=1)
    again, receiver = hub.client("device")
    assert again is not device
    assert receiver.take() == []
    assert not again.subscriptions


def test_the_number_of_sessions_without_a_connection_is_limited() -> None:
    hub = MqttHub(settings=MqttSettings(sessions=2))
    for at in range(4):
        hub.devices.left(hub.client(f"d{at}")[0])
    assert list(hub.devices.sessions) == ["d0", "d1"]


def test_records_restore_sessions_and_retained_messages() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device", "t", "$share/g/u/#", qos=2)
    hub.publish(b"t", b"0", b"1", qos=2)
    device.received(receiver.numbers[0])
    device.expect_releases((77,))
    hub.devices.left(device)
    hub.publish(b"t", b"2", qos=2, retain=True)
    other = MqttHub()
    restore(other.devices, record_of(hub.devices))
    assert record_of(other.devices) == record_of(hub.devices)
    assert other.retained("#") == [(b"t", b"2")]
    _, second = other.client("device", clean=False)
    assert second.take() == [b"1", b"2"]
    assert second.released == [receiver.numbers[0]]
    other.publish(b"u/1", b"shared", qos=1)
    assert second.take() == [b"shared"]


# ---- retained messages


def test_retained_messages_are_replaced_and_deleted() -> None:
    hub = MqttHub()
    hub.publish(b"a/b", b"1", retain=True)
    hub.publish(b"a/c", b"1", retain=True)
    hub.publish(b"a/b", b"2", retain=True)
    hub.publish(b"a/b", b"not retained")
    assert hub.retained("a/b") == [(b"a/b", b"2")]
    assert sorted(hub.retained("a/+")) == [(b"a/b", b"2"), (b"a/c", b"1")]
    hub.publish(b"a/b", b"", retain=True)
    assert hub.retained("#") == [(b"a/c", b"1")]
    hub.publish(b"a/c", b"", retain=True)
    assert hub.devices.retained.size_bytes == 0


def test_retained_messages_expire() -> None:
    hub = MqttHub()
    hub.devices.retained.set(Message(b"a", b"x", 0, True, expires_s=10))
    hub.now_s = 9
    assert hub.retained("a") == [(b"a", b"x")]
    hub.now_s = 10
    assert hub.retained("a") == []
    assert not hub.devices.retained.size_bytes


@pytest.mark.parametrize("settings", [MqttSettings(retained=2), MqttSettings(retained_bytes=4)])
def test_the_memory_of_retained_messages_is_limited(settings: MqttSettings) -> None:
    hub = MqttHub(settings=settings)
    kept = [hub.devices.retained.set(Message(b"%d" % at, b"x", 0, True)) for at in range(4)]
    assert kept == [True, True, False, False]
    assert hub.devices.retained.set(Message(b"1", b"y", 0, True))
    assert hub.devices.retained.set(Message(b"1", b"", 0, True))
    assert hub.devices.retained.set(Message(b"9", b"z", 0, True))


def test_smq_clients_get_the_retained_message_when_they_subscribe() -> None:
    hub = MqttHub()
    hub.publish(b"t", b"kept", retain=True)
    client = hub.crowd.client()
    subscribe(client, b"t")
    settle()
    assert heard(client)[-1].endswith(b"kept")


def test_retained_messages_are_sent_as_fast_as_the_client_reads() -> None:
    hub = MqttHub()
    for at in range(1000):
        hub.publish(b"t/%d" % at, b"x", retain=True)
    device, receiver = hub.client("device")
    receiver.has_room = False
    device.feed(hub.devices.retained.matching("#", Options(0)))
    assert receiver.take() == []
    receiver.has_room = True
    device.pump()
    assert len(receiver.take()) == 1000


def test_a_session_needs_little_memory() -> None:
    hub = MqttHub()
    device, _ = hub.client("device", "a", "b", "c", qos=1)
    assert sys.getsizeof(device) < 270


def test_the_messages_of_all_sessions_together_are_limited() -> None:
    hub = MqttHub(settings=MqttSettings(total_queued_bytes=20_000))
    devices = [hub.client(f"d{at}", "#", qos=1)[0] for at in range(10)]
    for device in devices:
        hub.devices.left(device)
    for at in range(50):
        hub.publish(b"t", b"%d" % at * 20, qos=1)
    assert 15_000 < hub.devices.waiting_bytes <= 20_000
    assert sum(len(device.waiting) + device.dropped for device in devices) == 500
    for device in devices:
        hub.devices.end(device)
    settle()
    assert hub.devices.waiting_bytes == 0


def test_a_will_that_is_not_needed_is_not_kept_for_its_delay() -> None:
    """Otherwise each reconnect of a client would leave a will behind, for days."""
    hub = MqttHub()
    _, reader = hub.client("reader", "gone")
    for at in range(20):
        device, _ = hub.client("device", clean=False)
        device.expiry_s = 3600
        hub.devices.wills.leave(device, Will(Message(b"gone", b"%d" % at, 0), 3000, NO_EXPIRY_S), hub.broker.server)
    assert max(delay_s for delay_s, _ in hub.later) <= 10
    hub.tick(10)
    assert len(hub.later) == 2  # the check of sessions, and the last will
    assert reader.take() == []
    hub.tick(3000)
    assert reader.take() == [b"19"]


def test_batches_that_wait_for_delivery_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.broker.mqtt.delivery.MAX_UNSENT_BYTES", 5_000)
    hub = MqttHub()
    _, receiver = hub.client("device", "t")
    for at in range(100):
        hub.broker.publish(b"%d" % at, b"t")
    got = len(receiver.take())
    assert 20 < got < 30
    assert got + hub.broker.stats.drops[Drop.OVER_GLOBAL_BUDGET] == 100
    assert hub.devices._unsent_bytes == 0


def test_the_time_of_publishers_to_wait_begins_each_time() -> None:
    hub = MqttHub(settings=MqttSettings(queued_messages=4))
    device, receiver = hub.client("slow", "t", qos=1)
    expirations = []
    for _ in range(2):
        receiver.has_room = False
        hub.publish(b"t", b"1", b"2", b"3", qos=1)
        assert device.is_pressed
        expirations.append(hub.later[-1][1])
        if len(expirations) == 1:
            receiver.has_room = True
            device.pump()
            assert not device.is_pressed
    first, second = expirations
    first()  # type: ignore[operator]
    assert not device.is_stuck
    second()  # type: ignore[operator]
    assert device.is_stuck
