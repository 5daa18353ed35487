"""Deliveries to shared subscriptions: each message goes to one client of a group, here or at another node (§4.8.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.filters import Delivery, Group, delivery
from smqrt.broker.mqtt.messages import ArrivedBatch, MqttBatch, Run
from smqrt.broker.outbox import Drop
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device
    from smqrt.broker.mqtt.devices import Devices


def any_device(device: Device) -> bool:
    """Return that a client may get the messages."""
    return True


def deliver_shared(
    devices: Devices, run: Run, groups: Iterable[Group], may_read: Callable[[Device], bool]
) -> Iterator[None]:
    """Deliver a batch to one client of each of these shared subscriptions."""
    cluster, is_chosen = devices.broker.cluster, isinstance(run.batch, ArrivedBatch) and bool(run.batch.group)
    for group in groups:
        if (
            cluster is not None
            and not is_chosen
            and not group.is_connected
            and cluster.mqtt.send_to_group(group.text, run.name, run.batch)  # a client is connected to another node
        ):
            yield
            continue
        is_divided = may_read is any_device and group.is_connected and run.count > 1
        frames = run.frames if is_divided else []
        for device, some in group.divide(run.count) if is_divided else ():
            options = group.members.get(device) if device in group.connected else None
            # A member may have left meanwhile.
            chosen = delivery(device, [options]) if options else (yield from group.choose(may_read))
            _deliver(devices, run.part(frames, some), group, chosen)
            yield
        has_ids = isinstance(run.batch, MqttBatch) and run.batch.origin != 0
        for part in () if is_divided else run.singles() if run.count > 1 or has_ids else (run,):
            chosen = yield from group.choose(may_read)
            _deliver(devices, part, group, chosen)
            yield


def _deliver(devices: Devices, part: Run, group: Group, chosen: Delivery | None) -> None:
    if chosen is not None:
        chosen.device.deliver(part, chosen, True)
    elif not group.members:  # they have left since the delivery has begun
        if isinstance(part.batch, MqttBatch):
            part.batch.arrived, part.batch.is_delivered = None, True  # other parts may have been delivered
        forward(devices, group.text, part.name, part.batch)


def forward(devices: Devices, group: str, name: bytes, batch: bytes) -> None:
    """Send messages for a shared subscription on, whose clients have left while the messages were on the way."""
    if devices.broker.cluster is not None:
        devices.broker.cluster.mqtt.forward_to_group(group, name, batch)
    else:
        devices.broker.stats.drop(Drop.UNROUTED, smq.count_frames(batch))
