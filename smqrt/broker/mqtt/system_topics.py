"""`$SYS` topics: figures about a hub for MQTT clients, under the names that mosquitto uses.

The figures are computed while a client subscribes to a filter that begins with `$SYS`; only the counters are kept
always. They are not topics of the hub: SMQ clients, hooks and the journal do not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp
from typing import TYPE_CHECKING

from smqrt.broker.mqtt.filters import FilterTable, Options
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, mqtt_batch, packed_identifier
from smqrt.broker.mqtt.retained import RetainedFeed, RetainedMessages
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.mqtt.devices import Devices
    from smqrt.broker.mqtt.session import MqttSession

ROOT = "$SYS"
"""The first level of the names. Wildcards at the first level of a filter do not match it [MQTT-4.7.2-1]."""
SESSIONS_PER_STEP = 200
_LOST = (Drop.OVER_BUDGET, Drop.OVER_GLOBAL_BUDGET, Drop.REPLACED)
_MINUTES = (1, 5, 15)
_LOADS = {
    "messages/received": "messages/received",
    "messages/sent": "messages/sent",
    "publish/received": "publish/messages/received",
    "publish/sent": "publish/messages/sent",
    "publish/dropped": "publish/messages/dropped",
    "bytes/received": "bytes/received",
    "bytes/sent": "bytes/sent",
}
"""Names of averages, below `load`, with the names of their totals."""
_FIGURES = (
    "version", "uptime", "clients/connected", "clients/total", "clients/maximum", "clients/disconnected",
    "clients/expired", "messages/received", "messages/sent", "messages/stored", "publish/messages/received",
    "publish/messages/sent", "publish/messages/dropped", "publish/bytes/received", "publish/bytes/sent",
    "bytes/received", "bytes/sent", "subscriptions/count", "shared_subscriptions/count", "retained messages/count",
    "store/messages/count", "store/messages/bytes",
)  # fmt: skip
NAMES = tuple(
    f"{ROOT}/broker/{name}".encode()
    for name in (*_FIGURES, *(f"load/{load}/{minutes}min" for load in _LOADS for minutes in _MINUTES))
)


class Counts:
    """Counters of the MQTT clients of a hub, since it was created.

    Attributes:
        packets: received packets.
        answers: sent packets other than PUBLISH.
        published, published_bytes: received messages, and their payloads.
        delivered, delivered_bytes: copies of messages for MQTT clients, and their payloads.
        expired: sessions that have expired.
        max_connected: the largest number of connected clients.
        received_bytes, sent_bytes: traffic of the connections that are closed.
    """

    __slots__ = (
        "answers",
        "delivered",
        "delivered_bytes",
        "expired",
        "max_connected",
        "packets",
        "published",
        "published_bytes",
        "received_bytes",
        "sent_bytes",
    )

    def __init__(self) -> None:
        self.packets = self.answers = self.published = self.published_bytes = self.delivered = self.delivered_bytes = 0
        self.expired = self.max_connected = self.received_bytes = self.sent_bytes = 0


class SystemTopics:
    """The `$SYS` topics of one hub.

    Args:
        devices: its MQTT clients.

    Attributes:
        counts: the counters.
        version: the text of `$SYS/broker/version`.
        transferred: returns the bytes that a client has sent and received; None for unknown numbers.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self.counts = Counts()
        self.version = "smqrt"
        self.transferred: Callable[[MqttSession], tuple[int | None, int | None]] = lambda client: (None, None)
        self._began_s = devices.broker.clock()
        self._next_s = self._began_s + devices.limits.sys_interval_s
        self._values: dict[bytes, bytes] = {}
        self._computed_s = -NO_EXPIRY_S
        self._totals: dict[str, int] = {}  # at `_computed_s`
        self._averages: dict[str, list[float]] = {}
        self._is_publishing = False

    @property
    def is_on(self) -> bool:
        """Whether there are such topics."""
        limits = self._devices.limits
        return bool(limits.sys_interval_s) and limits.sys != "off"

    def is_hidden(self, client: MqttSession, topic_filter: str) -> bool:
        """Return whether a client may not subscribe to a filter, because it matches these topics.

        They are hidden from anonymous clients of a hub that has users. Without users, all clients may read all topics.
        """
        if not topic_filter.startswith(ROOT) or not self.is_on or self._devices.limits.sys == "all":
            return False
        identity = client.identity
        return identity is not None and not identity.user and any(True for _ in _matching(topic_filter))

    def closed(self, client: MqttSession) -> None:
        """Count the traffic of a client whose connection is about to be closed."""
        if self.is_on:
            received, sent = self.transferred(client)
            self.counts.received_bytes += received or 0
            self.counts.sent_bytes += sent or 0

    # ---- messages

    def matching(self, text: str, options: Options) -> SystemFeed:
        """Return the figures for a new subscription, as retained messages."""
        return SystemFeed(self._devices.retained, text, options, self._messages(text, options))

    def _messages(self, text: str, options: Options) -> Iterator[Message | None]:
        if not text.startswith(ROOT) or not self.is_on:
            return
        now_s = self._devices.broker.clock()
        if now_s - self._computed_s >= self._devices.limits.sys_interval_s:
            yield from self._compute(now_s)
        for name in _matching(text):
            identifiers = packed_identifier(options.identifier)
            yield Message(name, self._values[name], 0, True, b"", NO_EXPIRY_S, identifiers)

    def tick(self) -> None:
        """Publish the figures if it is time, and if a client subscribes to them; called every second."""
        interval_s, now_s = self._devices.limits.sys_interval_s, self._devices.broker.clock()
        if now_s < self._next_s or not self.is_on:
            return
        self._next_s = now_s + interval_s
        if self._devices.filters.has_level(ROOT) and not self._is_publishing:
            self._is_publishing = True
            run_in_background(self._publish(now_s))

    def _publish(self, now_s: float) -> Iterator[None]:
        """Send the figures that have changed to their subscribers."""
        devices, before = self._devices, self._values
        try:
            yield from self._compute(now_s)
            for name, value in self._values.items():
                found = devices.filters.match(name)
                if found is not None and before.get(name) != value:
                    frame = smq.publish_frame(0, devices.broker.server.etid, 0, value)
                    yield from devices.deliver_run(devices.run(name, b"", mqtt_batch(frame, 0, True)), found)
                yield
        finally:
            self._is_publishing = False

    # ---- the figures

    def _compute(self, now_s: float) -> Iterator[None]:
        """Compute the figures, in portions: there may be many sessions."""
        devices, counts, stats = self._devices, self.counts, self._devices.broker.stats
        received, sent = counts.received_bytes, counts.sent_bytes
        subscriptions = shared = waiting = 0
        for number, device in enumerate(list(devices.sessions.values()), 1):
            subscriptions += len(device.subscriptions)
            waiting += len(device.waiting) + len(device.in_flight)
            if device.client is not None:
                more = self.transferred(device.client)  # type: ignore[arg-type]
                received, sent = received + (more[0] or 0), sent + (more[1] or 0)
            if not number % SESSIONS_PER_STEP:
                yield
        for number, one in enumerate(list(devices.filters.by_text.values()), 1):
            shared += sum(len(group.members) for group in one.groups.values())
            if not number % SESSIONS_PER_STEP:
                yield
        retained, total = len(devices.retained.by_name), len(devices.sessions)
        totals = {
            "messages/received": counts.packets,
            "messages/sent": counts.delivered + counts.answers,
            "publish/messages/received": counts.published,
            "publish/messages/sent": counts.delivered,
            "publish/messages/dropped": sum(stats.drops[reason] for reason in _LOST),
            "bytes/received": received,
            "bytes/sent": sent,
        }
        figures = totals | {
            "version": self.version,
            "uptime": f"{now_s - self._began_s:.0f} seconds",
            "clients/connected": total - len(devices.offline),
            "clients/total": total,
            "clients/maximum": counts.max_connected,
            "clients/disconnected": len(devices.offline),
            "clients/expired": counts.expired,
            "messages/stored": waiting + retained,
            "publish/bytes/received": counts.published_bytes,
            "publish/bytes/sent": counts.delivered_bytes,
            "subscriptions/count": subscriptions,
            "shared_subscriptions/count": shared,
            "retained messages/count": retained,
            "store/messages/count": waiting + retained,
            "store/messages/bytes": devices.waiting_bytes + devices.retained.size_bytes,
            **self._loads(totals, now_s),
        }
        self._values = {name: str(figures[name.decode()[len(ROOT) + 8 :]]).encode() for name in NAMES}
        self._computed_s = now_s

    def _loads(self, totals: dict[str, int], now_s: float) -> dict[str, str]:
        """Return the moving averages per minute; they begin with the first computation after a pause."""
        passed_s, found = now_s - self._computed_s, dict[str, str]()
        is_new = passed_s > 3 * self._devices.limits.sys_interval_s
        for load, name in _LOADS.items():
            averages = [0.0] * len(_MINUTES) if is_new else self._averages[name]
            if not is_new and passed_s > 0:
                per_minute = (totals[name] - self._totals[name]) * 60 / passed_s
                decays = [exp(-passed_s / (60 * minutes)) for minutes in _MINUTES]
                averages = [
                    per_minute + decay * (average - per_minute) for decay, average in zip(decays, averages, strict=True)
                ]
            self._averages[name] = averages
            for minutes, average in zip(_MINUTES, averages, strict=True):
                found[f"load/{load}/{minutes}min"] = f"{average:.2f}"
        self._totals = totals
        return found


class SystemFeed(RetainedFeed):
    """The figures for a new subscription; None while they are computed.

    When the client migrates to another process meanwhile, it gets them at the next interval.
    """

    __slots__ = ("_messages",)

    def __init__(
        self, retained: RetainedMessages, text: str, options: Options, messages: Iterator[Message | None]
    ) -> None:
        super().__init__(retained, text, options, ())
        self._messages = messages

    def __next__(self) -> Message | None:
        return next(self._messages)


def _matching(topic_filter: str) -> Iterator[bytes]:
    """Return the names that a filter matches."""
    table = FilterTable()
    table.named(topic_filter)
    return (name for name in NAMES if table.match(name) is not None)
