"""Reports of lost messages of sessions, and of those kept for other nodes: the hook `onmqttgap`."""

from __future__ import annotations

from collections.abc import Iterator

from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.connected_client import ConnectedClient
from smqrt.broker.mqtt.device import Device
from smqrt.broker.outbox import run_in_background
from smqrt.broker.state import BrokerState
from smqrt.settings.limits import LineLimit

INTERVAL_S = 1.0
"""The time from the first lost message to the report, which has all of them."""
MAX_WAITING = 10_000
"""Sessions and nodes with a report that waits, while the hook has not returned; further ones are not reported."""

_UNREPORTED = LineLimit()


class GapReports:
    """Calls `onmqttgap` for sessions and nodes that have lost messages, one by one, at most once a second for each.

    Args:
        broker: the hub.
        sessions: its sessions by client id.
    """

    __slots__ = ("_broker", "_counts", "_is_due", "_sessions")

    def __init__(self, broker: BrokerState, sessions: dict[str, Device]) -> None:
        self._broker, self._sessions = broker, sessions
        self._counts: dict[str | int, int] = {}
        """Lost messages by client id, or by node number."""
        self._is_due = False

    def lost(self, of: str | int, messages: int = 1) -> None:
        """Count lost messages, and report them soon; do nothing without the hook.

        Args:
            of: the client id of their session; or the number of the node for which they were kept, 0 for an unknown
                number.
            messages: how many.
        """
        if self._broker.hooks.onmqttgap is None:
            return
        if of not in self._counts and len(self._counts) >= MAX_WAITING:
            _UNREPORTED.warn("onmqttgap is too slow: lost messages of more than 10,000 sessions are not reported")
            return
        self._counts[of] = self._counts.get(of, 0) + messages
        self._report_later()

    def _report_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._broker.call_later(INTERVAL_S, self._report)

    def _report(self) -> None:
        counts, self._counts = self._counts, {}
        run_in_background(self._call(iter(counts.items())))

    def _call(self, counts: Iterator[tuple[str | int, int]]) -> Iterator[None]:
        """Call the hook for each session and node; continue after its answer when it is late."""
        for of, count in counts:
            hook = self._broker.hooks.onmqttgap
            if hook is None or self._broker.closed:
                break
            if isinstance(of, int):
                answer = hook(None, count, None, of)
            else:
                device = self._sessions.get(of)
                client: ConnectedClient | None = device.client if device is not None else None
                answer = hook(of, count, client, None)
            if isinstance(answer, Deferred) and not answer.done:
                answer.then(lambda value, error: run_in_background(self._call(counts)))
                return
            yield
        self._is_due = False
        if self._counts:
            self._report_later()
