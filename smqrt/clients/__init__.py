"""Clients: SMQ and MQTT."""
