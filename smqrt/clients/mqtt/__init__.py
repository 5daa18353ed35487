"""MQTT client of `smqrt.mqtt`, `smqrt.mqttc` and `smqrt.mqtt3c`."""
