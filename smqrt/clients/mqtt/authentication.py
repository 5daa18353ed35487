"""Extended authentication of an MQTT 5 client: challenges, and authentication again (MQTT 5 §4.12)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gevent.event import AsyncResult

from smqrt.clients.mqtt.connect import MqttCloseReason, to_bytes
from smqrt.clients.mqtt.connection import MqttConnection
from smqrt.errors import MqttError
from smqrt.wire.mqtt.client import MqttClientEndpoint
from smqrt.wire.mqtt.fields import Props, Reason

log = logging.getLogger("smqrt.mqtt")

OnAuth = Callable[[bytes | None], bytes | str | None]
"""`f(data)` returns the data for the broker, or None for no data.

It is called with None for the first data of an authentication, with the data of each challenge, and with the data of a
success, if there are any; then its result is ignored. An exception ends the connection."""

FAILED = MqttCloseReason("mqtt", "autherror", detail="onauth raised an exception")


class Authentication:
    """The authentication of one client.

    Args:
        method: the authentication method.
        onauth: see `OnAuth`.
        endpoint: sends the packets.
    """

    def __init__(self, method: str, onauth: OnAuth, endpoint: MqttClientEndpoint) -> None:
        self._method, self._onauth, self._endpoint = method, onauth, endpoint
        self._again: AsyncResult[bool] | None = None

    def connect_properties(self) -> Props:
        """Return the properties for CONNECT. Raises the exception of `onauth`."""
        data = self._call(None)
        method = {"authenticationmethod": self._method}
        return method if data is None else method | {"authenticationdata": data}

    def _call(self, data: bytes | None) -> bytes | None:
        answer = self._onauth(data)
        if answer is NotImplemented:  # a callback in Lua failed, which is logged
            raise MqttError(Reason.NOT_AUTHORIZED, "onauth failed")
        return None if answer is None else to_bytes(answer)

    def respond(self, connection: MqttConnection, code: int, data: bytes | None) -> None:
        """Call `onauth`, and send its answer unless `code` is a success. Runs as a callback of the application.

        Args:
            connection: which is ended when `onauth` fails.
            code: of the received AUTH or CONNACK packet, or REAUTHENTICATE to begin.
            data: the received data.
        """
        if connection.is_over:
            return
        try:
            answer = self._call(data)
        except Exception as error:
            if not isinstance(error, MqttError):
                log.exception("the callback onauth of an MQTT client failed")
            self._endpoint.fail(MqttError(Reason.NOT_AUTHORIZED, "onauth failed"))
            connection.end(FAILED)
            return
        if code != Reason.SUCCESS and not connection.is_over:
            self._endpoint.authenticate(code, answer)

    # ---- authentication again

    def again(self) -> tuple[AsyncResult[bool], bool]:
        """Return the future result of an authentication on an open connection, and whether it has to be begun."""
        if self._again is not None:
            return self._again, False
        self._again = AsyncResult()
        return self._again, True

    def finish(self, is_successful: bool) -> None:
        """End an authentication: the broker has accepted it, or the connection has ended."""
        result, self._again = self._again, None
        if result is not None:
            result.set(is_successful)
