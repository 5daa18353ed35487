"""Clients with one client id that replace each other: each connection closes the one before (MQTT 5 §3.1.4).

Two devices with the same id would do so without end. After some replacements, the next ones wait before CONNACK.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from smqrt.settings.limits import Limit
from smqrt.wire.mqtt.fields import Reason

if TYPE_CHECKING:
    from smqrt.broker.mqtt.client import MqttClient
    from smqrt.broker.sessions import Session

MAX_TAKE_OVERS, WINDOW_S = 5, 10.0
"""Replacements in this time; further clients wait."""
MAX_WAITING = 10
"""Clients that wait with one client id; beyond, the one that has waited longest is rejected."""
MAX_IDS = 10_000
"""Client ids that are remembered; beyond, the oldest is forgotten."""
WARNING_S = 60.0
"""The shortest time between two warnings about one client id."""
TAKE_OVERS = Limit("mqtt_take_overs", "", "clients with the same id replace each other")


class _Id:
    """What is remembered of a client id."""

    __slots__ = ("times_s", "waiting", "warned_s")

    def __init__(self) -> None:
        self.times_s: deque[float] = deque(maxlen=MAX_TAKE_OVERS)
        self.waiting: list[MqttClient] = []
        self.warned_s = -WARNING_S


class TakeOvers:
    """The replacements of a hub's clients.

    Args:
        clock: returns seconds.
        call_later: calls a function after some seconds.

    Attributes:
        address_of: returns the address of a client, for the log.
    """

    def __init__(self, clock: Callable[[], float], call_later: Callable[[float, Callable[[], object]], object]) -> None:
        self._clock, self._call_later = clock, call_later
        self.address_of: Callable[[Session], str] = lambda session: ""
        self._by_id: dict[str, _Id] = {}

    def record(self, client_id: str) -> None:
        """Remember that a client has replaced another one."""
        known = self._by_id.pop(client_id, None) or _Id()
        known.times_s.append(self._clock())
        self._by_id[client_id] = known  # as the newest
        if len(self._by_id) > MAX_IDS:
            del self._by_id[next(iter(self._by_id))]

    def hold(self, client: MqttClient, old: Session | None, resume: Callable[[], object]) -> bool:
        """Let a client wait if others with its id were replaced too often; return whether it has to.

        Args:
            client: the client.
            old: the connected client with the same id; None if it is connected to another node.
            resume: is called when it may continue, also if it has disconnected.
        """
        known, now_s = self._by_id.get(client.client_id), self._clock()
        if known is None or len(known.times_s) < MAX_TAKE_OVERS or now_s - known.times_s[0] >= WINDOW_S:
            return False
        known.waiting = [one for one in known.waiting if not one.closed and one is not client]
        known.waiting.append(client)
        if len(known.waiting) > MAX_WAITING:
            known.waiting.pop(0).refuse_mqtt(Reason.SERVER_BUSY, "too many clients with this id are connecting")
        self._warn(known, client, old, now_s)

        def end() -> None:
            if client in known.waiting:
                known.waiting.remove(client)
            resume()

        self._call_later(known.times_s[0] + WINDOW_S - now_s, end)
        return True

    def _warn(self, known: _Id, client: MqttClient, old: Session | None, now_s: float) -> None:
        if now_s - known.warned_s < WARNING_S:
            TAKE_OVERS.count += 1
            return
        known.warned_s = now_s
        other = "another node" if old is None else self.address_of(old) or "?"
        addresses = f"{self.address_of(client) or '?'} and {other}"
        TAKE_OVERS.refused(
            f"the MQTT client {ascii(client.client_id[:64])}",
            f"clients with this id at {addresses} have replaced each other {MAX_TAKE_OVERS} times in {WINDOW_S:g} s; "
            "the next ones wait. Give each client an id of its own",
        )
