"""MQTT 3.1.1 and 5 without I/O: packets, sessions, and the two sides of a connection."""
