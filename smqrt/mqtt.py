"""MQTT client for Python (5 and 3.1.1): `MqttClient`.

It works with and without monkey patching by gevent.

    from smqrt.mqtt import MqttClient

    with MqttClient("mqtt://broker.example", onpub=lambda topic, payload, *_: print(topic, payload)) as mqtt:
        mqtt.subscribe("house/+/temperature", qos=1)
        mqtt.publish("house/attic/lamp", b"on", qos=1).wait()
"""

from __future__ import annotations

from types import ModuleType

from smqrt.clients.mqtt.client import MqttClient
from smqrt.clients.mqtt.connect import MqttCloseReason, MqttOptions, OnStatus, Will
from smqrt.clients.mqtt.delivery import Delivery
from smqrt.clients.mqtt.messages import Message, OnMessage
from smqrt.clients.mqtt.subscriptions import OnSuback
from smqrt.wire.mqtt.fields import OnPub, Props

__all__ = [
    "Delivery",
    "Message",
    "MqttClient",
    "MqttCloseReason",
    "MqttOptions",
    "OnMessage",
    "OnPub",
    "OnStatus",
    "OnSuback",
    "Props",
    "Will",
]


def __getattr__(name: str) -> ModuleType:
    if name == "sparkplug":  # loaded when first used: it imports protobuf
        from smqrt.clients.mqtt import sparkplug

        return sparkplug
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
