"""paho-mqtt clients that wait for what they expect and remember what came."""

from __future__ import annotations

import threading
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from tests.support.waiting import wait_until

PATIENCE_S = 15


class PahoClient:
    """A connected client with a thread of its own.

    Attributes:
        messages: what came, as (topic, payload).
        raw: the same as paho's objects.
        connack, ended: the reason codes of CONNACK and of the end, None before.
        granted: the reason codes of each SUBACK.
    """

    def __init__(self, port: int, version: int = 5, name: str = "", **settings: Any) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.raw: list[paho.MQTTMessage] = []
        self.granted: list[list[int]] = []
        self.connack: int | None = None
        self.ended: int | None = None
        self.properties: Any = None
        self._changed = threading.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTProtocolVersion(version))
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        self.client.on_message = self._on_message
        self.client.on_subscribe = self._on_subscribe
        self._prepare(**settings)
        self.client.connect("127.0.0.1", port, settings.get("keepalive", 60))
        self.client.loop_start()
        wait_until(lambda: self.connack is not None, "CONNACK", PATIENCE_S)

    def _prepare(self, user: str = "", password: str = "", tls: Any = None, will: Any = None, **_other: Any) -> None:
        if user:
            self.client.username_pw_set(user, password)
        if tls:
            self.client.tls_set_context(tls)
        if will:
            self.client.will_set(*will)

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, properties: Any) -> None:
        self.connack, self.properties = reason.value, properties

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        self.ended = reason.value
        self.client.disconnect()

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        self.raw.append(message)
        self.messages.append((message.topic, message.payload))

    def _on_subscribe(self, _client: Any, _data: Any, _mid: int, reasons: Any, _properties: Any) -> None:
        self.granted.append([reason.value for reason in reasons])

    def subscribe(self, *filters: str, **settings: Any) -> list[int]:
        """Subscribe and wait for the reason codes."""
        count = len(self.granted)
        self.client.subscribe([(one, 0) for one in filters] if not settings else filters[0], **settings)
        return list(wait_until(lambda: self.granted[count:], "SUBACK")[0])

    def publish(self, topic: str, payload: bytes | str = b"", **settings: Any) -> None:
        """Publish with QoS 0, if not otherwise said."""
        self.client.publish(topic, payload, **settings)

    def expect(self, *messages: tuple[str, bytes]) -> None:
        """Wait until exactly these messages have come, in this order, and forget them."""
        wait_until(lambda: len(self.messages) >= len(messages), f"{len(messages)} messages")
        assert self.messages == list(messages)
        self.messages.clear()

    def leave(self) -> None:
        """Disconnect and end the thread."""
        self.client.disconnect()
        self.client.loop_stop()
