"""MQTT 5 and 3.1.1 for Python: `MqttClient`.

from smqrt.mqtt import MqttClient

with MqttClient("mqtt://broker.example", onpub=lambda topic, payload, *_: print(topic, payload)) as mqtt:
    mqtt.subscribe("house/+/temperature", qos=1)
    mqtt.publish("house/attic/lamp", b"on", qos=1).wait()
"""

from smqrt.mqtt.client import MqttClient
from smqrt.mqtt.close_reason import MqttCloseReason, OnStatus
from smqrt.mqtt.options import MqttOptions, Will
from smqrt.mqtt.queue import Delivery, OnSuback
from smqrt.wire.mqtt.topics import OnPub

__all__ = ["Delivery", "MqttClient", "MqttCloseReason", "MqttOptions", "OnPub", "OnStatus", "OnSuback", "Will"]
