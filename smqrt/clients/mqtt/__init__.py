"""The MQTT client behind `smqrt.mqtt`, `smqrt.mqttc` and `smqrt.mqtt3c`."""
