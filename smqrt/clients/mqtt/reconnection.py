"""When an MQTT client connects again, and to which address."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from smqrt.clients.backoff import Backoff
from smqrt.clients.mqtt.addresses import MqttConnector
from smqrt.clients.mqtt.connect import MqttCloseReason, MqttOptions, delay_of
from smqrt.transport.stream import Stream
from smqrt.wire.mqtt.fields import Reason

log = logging.getLogger("smqrt.mqtt")

MAX_REFERRALS = 3
"""How many Server References are followed in a row."""
TAKE_OVER_S = 10.0
"""Two take-overs within this time mean that another client uses the same client identifier."""
PAUSE_S = 60.0
"""Delay before the next attempt after two take-overs."""
_REFERRALS = (Reason.USE_ANOTHER_SERVER, Reason.SERVER_MOVED)


class Reconnection:
    """Delays between the attempts of one client.

    Args:
        options: `reconnectdelay`, `reconnectmax`, and the client identifier for a warning.
        connect: opens the connections. Only an `MqttConnector` has several addresses and follows Server References.
        clock: returns the time in seconds.
    """

    def __init__(
        self, options: MqttOptions, connect: Callable[[], Stream], clock: Callable[[], float] = monotonic
    ) -> None:
        self._clientidentifier, self._clock = options.clientidentifier, clock
        self._connector = connect if isinstance(connect, MqttConnector) else None
        self._backoff = Backoff(options.reconnectdelay, options.reconnectmax, jitter=1.0)
        self._accepted_at_s: float | None = None
        self._taken_over_at_s = -TAKE_OVER_S
        self._referrals = 0
        self._has_warned = False
        self._next_s = self._least_s = 0.0

    def accepted(self) -> None:
        """Record that the broker has accepted the connection."""
        self._accepted_at_s = self._clock()

    def delay_after(self, reason: MqttCloseReason) -> float | None:
        """Record the end of a connection or of an attempt.

        Returns:
            The seconds until the next attempt, None when another attempt can't succeed.
        """
        accepted_at_s, self._accepted_at_s = self._accepted_at_s, None
        # The connection must have lasted, so that a broker that ends each connection at once is not flooded.
        if accepted_at_s is not None and self._clock() - accepted_at_s > self._backoff.ceiling_s:
            self._backoff.reset()
        if self._follow(reason):
            self._next_s = self._least_s = 0.0
            return 0.0
        if self._connector is not None and accepted_at_s is None:
            self._connector.advance()
        self._next_s = self._backoff.next_s()
        self._least_s = self._pause_after(reason)
        self._next_s = max(self._next_s, self._least_s)
        return self._next_s if reason.can_reconnect else None

    def decided(self, returned: object, default_s: float | None) -> float | None:
        """Return the seconds until the next attempt after the decision of `onstatus`.

        Args:
            returned: the return value of `onstatus`.
            default_s: the result of `delay_after`.
        """
        delay_s = delay_of(returned, default_s, self._next_s)
        return None if delay_s is None else max(delay_s, self._least_s)

    def _follow(self, reason: MqttCloseReason) -> bool:
        """Connect to the servers of a Server Reference next; return False when the reason has none to follow."""
        code = reason.status.get("reasoncode")
        if code not in _REFERRALS or reason.code not in ("connect", "disconnect"):
            self._referrals = 0
            return False
        properties = reason.status.get("properties")
        reference = properties.get("serverreference") if isinstance(properties, dict) else None
        if self._connector is None or not isinstance(reference, str):
            return False
        if self._referrals == MAX_REFERRALS:
            log.warning(
                "MQTT client %s: %s servers in a row have referred to another one, the last one to %s; the client "
                "connects to its own addresses again",
                self._clientidentifier,
                MAX_REFERRALS + 1,
                reference,
            )
            self._referrals = 0
            return False
        if not self._connector.refer(reference, code == Reason.SERVER_MOVED):
            return False
        self._referrals += 1
        log.info("MQTT client %s: the broker refers to %s", self._clientidentifier, reference)
        return True

    def _pause_after(self, reason: MqttCloseReason) -> float:
        """Return the shortest delay after a reason: not 0 when another client takes over the session repeatedly."""
        if reason.code != "disconnect" or reason.status.get("reasoncode") != Reason.SESSION_TAKEN_OVER:
            return 0.0
        before_s, self._taken_over_at_s = self._taken_over_at_s, self._clock()
        if self._taken_over_at_s - before_s >= TAKE_OVER_S:
            return 0.0
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "MQTT client %s: another client has taken over the session twice within %.0f s; it probably has the "
                "same client identifier. The next attempt follows after %.0f s; give each client its own identifier",
                self._clientidentifier,
                TAKE_OVER_S,
                PAUSE_S,
            )
        return PAUSE_S
