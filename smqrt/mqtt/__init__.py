"""MQTT 5 and 3.1.1 for Python: `MqttClient`.

from smqrt.mqtt import MqttClient

with MqttClient("mqtt://broker.example", onpub=lambda topic, payload, *_: print(topic, payload)) as mqtt:
    mqtt.subscribe("house/+/temperature", qos=1)
    mqtt.publish("house/attic/lamp", b"on", qos=1).wait()
"""

from smqrt.mqtt.client import MqttClient, OnPub
from smqrt.mqtt.decision import OnStatus
from smqrt.mqtt.delivery import Delivery
from smqrt.mqtt.ending import End
from smqrt.mqtt.options import MqttOptions, Will

__all__ = ["Delivery", "End", "MqttClient", "OnPub", "OnStatus", "MqttOptions", "Will"]
