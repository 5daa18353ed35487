"""Wills: messages that the hub publishes for MQTT clients whose connection has ended without DISCONNECT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.messages import Message, mqtt_batch
from smqrt.broker.outbox import Drop, run_at_once
from smqrt.broker.routes import GuardedRoute, destination
from smqrt.broker.state import BrokerPeer
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.mqtt.device import Device
    from smqrt.broker.mqtt.devices import Devices

MAX_TIMER_S = 10.0
"""The longest timer for a will: it keeps the will, also after the client is back. A client may choose days."""


@dataclass(frozen=True, slots=True)
class Will:
    """The message that is published when a connection ends without DISCONNECT (MQTT 5 §3.1.2.5).

    Attributes:
        message: the message; its QoS and retain flag are those of the publication.
        delay_s: seconds until it is published.
        expiry_s: seconds from then until it expires.
        due_s: when it is published, on the clock of the broker; None while the client is connected.
    """

    message: Message
    delay_s: int
    expiry_s: float
    due_s: float | None = None


class Wills:
    """The wills of the sessions of a hub.

    Args:
        devices: the sessions.
    """

    __slots__ = ("_broker", "_devices")

    def __init__(self, devices: Devices) -> None:
        self._devices, self._broker = devices, devices.broker

    def leave(self, device: Device, will: Will, peer: BrokerPeer) -> None:
        """Publish the will of a client whose connection has ended, now or after its delay."""
        delay_s = min(will.delay_s, device.expiry_s)
        if delay_s:
            self.delay(device, will, self._broker.clock() + delay_s)
        else:
            self.publish(will, peer)

    def delay(self, device: Device, will: Will, due_s: float) -> None:
        """Publish a will at a time, unless the client is back.

        Args:
            device: the session.
            will: the will.
            due_s: the time, on the clock of the broker.
        """
        broker = self._broker
        will = device.will = replace(will, due_s=due_s)

        def publish_when_due() -> None:
            if device.will is not will:  # the client is back, or the session has ended
                return
            left_s = due_s - broker.clock()
            if left_s > 0:
                broker.call_later(min(left_s, MAX_TIMER_S), publish_when_due)
                return
            run_at_once(self._publish_delayed(device, will), broker.clock)  # many may be due at the same time

        broker.call_later(min(max(due_s - broker.clock(), 0), MAX_TIMER_S), publish_when_due)

    def _publish_delayed(self, device: Device, will: Will) -> Iterator[None]:
        if device.will is will:
            device.will = None
            self.publish(will, self._broker.server)
            self._devices.session_changed(device)
        yield

    def forget_all(self) -> None:
        """Publish no more wills: the sessions have moved to another process."""
        for device in self._devices.sessions.values():
            device.will = None

    def publish(self, will: Will, peer: BrokerPeer) -> None:
        """Publish a will; `onpublish` may swallow it, unless it answers later: then the will is retained before."""
        message, broker = will.message, self._broker
        expires_s = broker.clock() + will.expiry_s
        topic = self._devices.topic_for(message.name)
        drops: list[Drop] = []
        if topic is not None:
            frame = smq.publish_frame(topic.id, peer.etid, 0, message.payload)
            batch = mqtt_batch(frame, message.qos, message.retain, message.properties, expires_s)
            batch.drops = drops
            route = GuardedRoute if broker.hooks.onpublish is not None else destination
            route(broker, topic.id, peer.etid, peer).deliver(batch)
        if message.retain and Drop.SWALLOWED not in drops:
            retained = Message(message.name, message.payload, message.qos, True, message.properties, expires_s)
            self._devices.retain(retained)
