"""MQTT clients of hubs over all kinds of links."""

from __future__ import annotations

from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message, mqtt_batch
from smqrt.broker.mqtt.records import record_of, restore
from smqrt.broker.routes import destination
from smqrt.wire import smq
from tests.cluster.engines import Engine


def with_mqtt(broker: Broker) -> None:
    """Let a hub accept MQTT clients; nothing expires."""
    broker.call_later = lambda delay_s, function: None
    Devices(broker)


def test_filters_large_messages_and_retained_ones(engine: Engine) -> None:
    one, other = (engine.place(name, prepare=with_mqtt) for name in ("one", "other"))
    engine.joined(one, other)
    got: list[bytes] = []
    other.hub.subscribe_filter("a/+", lambda data, *_: got.append(data))
    engine.until(lambda: one.member.mqtt.wants(b"a/b"), "the filter")
    sent = [bytes((number,)) * size for number, size in enumerate((10, 65_000, 300_000, 20))]
    for payload in sent:
        topic = one.hub.devices.topic_for(b"a/b")
        assert topic is not None
        is_large = len(payload) > smq.MAX_PAYLOAD_BYTES
        batch = mqtt_batch(smq.publish_frame(topic.id, one.hub.server.etid, 0, b"" if is_large else payload), 1)
        if is_large:
            batch.large = payload
            large_messages.publish(one.hub.devices, topic, batch, one.hub.server)
        else:
            destination(one.hub, topic.id, one.hub.server.etid, one.hub.server).deliver(batch)
    engine.until(lambda: len(got) == len(sent), "the messages")
    assert got == sent
    one.hub.devices.retain(Message(b"kept", bytes(200_000), 1, True))
    engine.until(lambda: b"kept" in other.hub.devices.retained.by_name, "the retained message")
    late = engine.place("late", prepare=with_mqtt)
    engine.joined(one, other, late)
    engine.until(lambda: b"kept" in late.hub.devices.retained.by_name, "the retained message at a new node")
    assert late.hub.devices.retained.by_name[b"kept"].payload == bytes(200_000)


def test_messages_and_connects_wait_for_a_hub_that_migrates(engine: Engine) -> None:
    writer, old = (engine.place(name, prepare=with_mqtt) for name in ("one", "other"))
    engine.joined(writer, old)
    device, _ = old.hub.devices.open("d", False)
    device.expiry_s = 600
    for _ in old.hub.devices.subscribe(device, "a/+", Options(1)):
        pass
    old.hub.devices.left(device)
    engine.until(lambda: writer.member.mqtt.wants(b"a/b"), "the filter")
    topic = writer.hub.devices.topic_for(b"a/b")
    assert topic is not None
    new = engine.place("new", prepare=with_mqtt)
    new.member.migration.expect()
    engine.joined(writer, old, new)
    old.member.pause()
    engine.until(lambda: old.member.is_paused, "the others keep what is for the hub")
    batch = mqtt_batch(smq.publish_frame(topic.id, writer.hub.server.etid, 0, b"kept"), 2)
    destination(writer.hub, topic.id, writer.hub.server.etid, writer.hub.server).deliver(batch)
    record = record_of(old.hub.devices)
    old.member.suspend()
    engine.until(lambda: writer.member.migration.nodes, "the node is gone")
    taken = writer.member.sessions.take("d", None, False)
    assert isinstance(taken, Deferred)
    (move,) = writer.member.sessions._moves.values()
    assert len(move.waiting) == 2, "the old and the new process"
    engine.until(lambda: len(move.waiting) == 1, "the answer of the new process, which has no sessions yet")
    restore(new.hub.devices, record)
    assert not taken.done
    new.member.sessions.transit_s = 0.0
    new.member.succeed(old.member.number)
    new.member.resync()
    engine.until(lambda: taken.done, "the session")
    engine.settle()
    moved = writer.hub.devices.sessions["d"]
    assert [(message.payload, message.qos) for message in moved.waiting] == [(b"kept", 1)]
    engine.until(lambda: not new.hub.devices.sessions, "the end of the session")


def test_messages_of_a_cut_follow_once(engine: Engine) -> None:
    places = one, other, third = [engine.place(name, prepare=with_mqtt) for name in ("one", "other", "third")]
    engine.joined(*places)
    sessions = []
    for place in (other, third):
        device, _ = place.hub.devices.open("reader at " + place.hub.devices.arrivals.identity.hex(), False)
        device.expiry_s = 600
        for _ in place.hub.devices.subscribe(device, "a/+", Options(2)):
            pass
        place.hub.devices.left(device)
        sessions.append(device)
    engine.until(lambda: all(len(node.filters) for node in one.member.remotes), "the filters")

    def publish(first: int, last: int) -> None:
        for number in range(first, last):
            topic = one.hub.devices.topic_for(b"a/b")
            assert topic is not None
            frame = smq.publish_frame(topic.id, one.hub.server.etid, 0, b"%d" % number)
            batch = mqtt_batch(frame, 1 + number % 2)
            destination(one.hub, topic.id, one.hub.server.etid, one.hub.server).deliver(batch)

    publish(0, 20)
    engine.cut(one, other)
    publish(20, 40)
    engine.until(lambda: other.member.number not in [node.number for node in one.member.remotes], "it notices")
    publish(40, 60)
    engine.heal(one, other)
    engine.until(lambda: len(one.member.remotes) == 2, "the link")
    publish(60, 80)
    expected = [b"%d" % number for number in range(80)]
    engine.until(lambda: all(len(device.waiting) >= 80 for device in sessions), "the messages")
    engine.settle()
    assert [[one.payload for one in device.waiting] for device in sessions] == [expected] * 2
    engine.until(lambda: not one.member.streams.size_bytes, "their acknowledgement")
