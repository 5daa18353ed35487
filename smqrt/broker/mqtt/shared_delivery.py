"""Deliveries to shared subscriptions: each message goes to one client of a group, here or at another node (§4.8.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.filters import Group, delivery
from smqrt.broker.mqtt.messages import MqttBatch, Run
from smqrt.broker.outbox import Drop
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device
    from smqrt.broker.mqtt.devices import Devices


def any_device(device: Device) -> bool:
    """Return that a client may get the messages."""
    return True


def deliver_shared(
    devices: Devices, run: Run, groups: Iterable[Group], wanted: str | None, may_read: Callable[[Device], bool]
) -> Iterator[None]:
    """Deliver a batch to one client of each shared subscription, or of the one with the text `wanted`."""
    cluster = devices.broker.cluster
    for group in groups:
        if wanted is not None and group.text != wanted:
            yield
            continue
        if (
            wanted is None
            and cluster is not None
            and not group.is_connected
            and cluster.mqtt.send_to_group(group.text, run.name, run.batch)  # a client is connected to another node
        ):
            continue
        is_divided = may_read is any_device and group.is_connected and run.count > 1
        frames = run.frames if is_divided else []
        for device, some in group.divide(run.count) if is_divided else ():
            options = group.members.get(device) if device in group.connected else None
            # A member may have left meanwhile.
            chosen = delivery(device, [options]) if options else (yield from group.choose(may_read))
            if chosen is not None:
                chosen.device.deliver(run.part(frames, some), chosen, True)
            yield
        has_ids = isinstance(run.batch, MqttBatch) and run.batch.origin != 0
        for part in () if is_divided else run.singles() if run.count > 1 or has_ids else (run,):
            chosen = yield from group.choose(may_read)
            if chosen is not None:
                chosen.device.deliver(part, chosen, True)
            yield


def forward(devices: Devices, group: str, name: bytes, batch: bytes) -> None:
    """Send messages for a shared subscription on, whose clients have left while the messages were on the way."""
    if devices.broker.cluster is not None:
        devices.broker.cluster.mqtt.forward_to_group(group, name, batch)
    else:
        devices.broker.stats.drop(Drop.UNROUTED, smq.count_frames(batch))
