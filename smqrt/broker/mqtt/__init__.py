"""MQTT clients of a hub, without I/O: their filters, sessions and messages."""
