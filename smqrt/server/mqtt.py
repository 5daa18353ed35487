"""Entry points of MQTT clients: the first byte of a connection, and WebSockets at `/mqtt`."""

from __future__ import annotations

from dataclasses import dataclass

from smqrt.http.message import Request
from smqrt.http.server import HttpConnection
from smqrt.http.tree import Directory
from smqrt.hub.smq import Smq, create
from smqrt.loop.scheduling import Watcher
from smqrt.settings.limits import MqttSettings
from smqrt.smq.gevent_broker import mqtt_broker
from smqrt.smq.handshake import too_many
from smqrt.smq.mqtt_connection import sub_protocol
from smqrt.transport.tls import Transport

PATHS = ("mqtt", "mqtt/")
LAST = -127  # the lowest priority: an application named "mqtt" takes precedence


@dataclass(slots=True)
class Taken:
    """A connection that was taken over from the HTTP server, see `smqrt.smq.handshake.DetachedConnection`."""

    transport: Transport
    watcher: Watcher
    data: bytes
    secure: bool


def open_own_hub(settings: MqttSettings) -> Smq | None:
    """Create a hub for the setting `mqtt.hub` if no application has created one; None if one has.

    Args:
        settings: the settings `mqtt`.
    """
    if not settings.hub or mqtt_broker() is not None:
        return None
    name = "mqtt" if settings.hub == "*" else settings.hub
    return create(name=name, mqtt=True, persist=settings.persist or None)


def take_mqtt(connection: HttpConnection) -> bool:
    """Serve a connection that does not begin as HTTP does; return false when no hub takes MQTT clients."""
    broker, peer = mqtt_broker(), connection.peer
    if broker is None:
        return False
    if broker.draining or too_many(broker, peer[0]):
        connection.close()
        return True
    secure = connection.secure
    broker.connect_mqtt(Taken(*connection.release(), secure), peer)
    return True


class MqttDirectory(Directory):
    """`/mqtt`: WebSockets of MQTT clients.

    It has no name: a directory with a name does not serve its path without a slash at the end, as MQTT clients send it.
    """

    def __init__(self) -> None:
        super().__init__("", LAST)

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        broker = mqtt_broker() if relpath in PATHS else None
        if broker is None:
            return False
        if sub_protocol(request) is None:
            request.response.error(400, "MQTT clients connect here, with a WebSocket of the sub-protocol mqtt.")
        else:
            broker.connect(request)
        return True
