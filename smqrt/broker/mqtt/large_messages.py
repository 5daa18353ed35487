"""Messages of MQTT clients that do not fit an SMQ packet."""

from __future__ import annotations

from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.outbox import Drop
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Topic


def publish(
    devices: Devices, topic: Topic, batch: MqttBatch, publisher: BrokerPeer, is_permitted: bool = False
) -> bool:
    """Publish a large message. SMQ clients miss it; with `onpublish`, which gets packets of SMQ, no client gets it.

    Args:
        devices: the MQTT clients of the hub.
        topic: the topic.
        batch: the message.
        publisher: its publisher.
        is_permitted: whether the application has permitted it, so that `onpublish` does not matter.

    Returns:
        Whether the publisher has to wait for the journal.
    """
    broker = devices.broker
    recorder = broker.recorder
    if broker.hooks.onpublish is not None and not is_permitted:
        broker.stats.drop(Drop.SWALLOWED, 1)
        batch.dropped(Drop.SWALLOWED)
        return False
    topic.settle()
    if recorder is None or not recorder.selects(topic):
        if recorder is not None:
            recorder.skipped(batch)
        _route(devices, topic, batch)
        return False
    is_reached = topic.raw or topic.ws
    (recorder.record_of(publisher) if is_reached else recorder.record_unrouted)(batch)
    if recorder.waits_for_disk:
        return recorder.send_later(lambda _: _route(devices, topic, batch), batch, publisher)
    _route(devices, topic, batch)
    return recorder.full and recorder.hold(publisher)


def _route(devices: Devices, topic: Topic, batch: MqttBatch) -> None:
    broker, cluster = devices.broker, devices.broker.cluster
    broker.topic_table.traffic.add(1, len(batch.large or b""), 0)
    is_reached = deliver(devices, topic, batch)
    if cluster is not None:
        sent, missed = cluster.mqtt.send_large(topic, batch)
        is_reached = is_reached or sent + missed > 0
        if missed:
            broker.stats.drop(Drop.TOO_LARGE, missed)
    if not is_reached:
        broker.stats.drop(Drop.UNROUTED, 1)
        batch.dropped(Drop.UNROUTED)


def deliver(devices: Devices, topic: Topic, batch: MqttBatch) -> bool:
    """Deliver a large message at this node; return whether it has subscribers."""
    server, missed = devices.broker.server, 0
    topic.settle()
    for outbox in topic.raw + topic.ws:
        if outbox is devices or outbox is server.outbox:
            outbox.put(batch)
        else:
            missed += 1
    if missed:
        devices.broker.stats.drop(Drop.TOO_LARGE, missed)
    return bool(missed or topic.raw)
