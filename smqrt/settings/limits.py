"""Settings of limits and topics, and the register of limits.

Programs without an smqrt server use the defaults. Code that enforces a limit calls `current_limits`, or registers a
function by `on_change`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time

from smqrt.settings.option_types import InvalidValueError, Rule, T, choice, number, option, switch, text, texts, whole

UNLIMITED = "unlimited"


def limited(rule: Rule[T]) -> Rule[T | None]:
    """Return a rule that also permits the word "unlimited", which becomes None."""

    def read_limited(value: object) -> T | None:
        if value is None or value == UNLIMITED:  # None is the result of an earlier check, which is checked again
            return None
        try:
            return rule.read(value)
        except InvalidValueError:
            raise InvalidValueError(f"{rule.requirement}, or {UNLIMITED!r}") from None

    schema = {"anyOf": [rule.schema, {"const": UNLIMITED}]}
    return Rule(f"{rule.requirement}, or {UNLIMITED!r}", read_limited, rule.kind, schema)


PAYLOAD_BYTES = 0xFFF0  # the length of a frame has 16 bits, and its header takes 15 bytes
SLOW_POLICIES = ("newest", "oldest", "latest", "disconnect", "wait")
ACL_MODES = ("subscribe", "deliver")
SYS_READERS = ("users", "all", "off")
PUBLISH_POLICIES = ("wait", "drop", "disconnect")


@dataclass(frozen=True)
class LimitSettings:
    """Limits of clients. Sizes are in bytes, times in seconds, rates per second."""

    connections_per_user: int | None = option(
        10_000, limited(whole(1)), "SMQ connections of one user; beyond, Connack 2.", live=True
    )
    connect_rate: float | None = option(
        5000.0,
        limited(number(0, above=True)),
        "New connections per second, averaged over ten seconds; beyond, 503. "
        "Addresses of this machine, such as that of a local proxy, are not counted.",
        live=True,
    )
    connect_rate_per_address: float | None = option(
        200.0,
        limited(number(0, above=True)),
        "New connections per second from one IP address, averaged over ten seconds; beyond, 503.",
        live=True,
    )
    handshakes_per_address: int | None = option(
        256, limited(whole(1)), "SMQ clients of one address in the handshake; beyond, 503.", live=True
    )
    handshake_s: float = option(
        4.0,
        number(0, above=True),
        "Time limit of the handshake, in seconds, for hubs without `readtmo`; then Connack 2.",
        live=True,
    )
    authenticate_s: float = option(
        30.0,
        number(0),
        "Additional time of the handshake for `authenticate`, which may call other services, in seconds; then Connack "
        "2.",
        live=True,
    )
    idle_s: float | None = option(
        None,
        limited(number(1)),
        "Seconds without data after which an SMQ client is pinged.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    idle_answer_s: float = option(
        10.0,
        number(0.5),
        "Time limit for data after the ping of an idle client (`idle_s`), in seconds; then the connection is closed.",
        live=True,
    )
    message_bytes: int = option(
        PAYLOAD_BYTES,
        whole(1, PAYLOAD_BYTES),
        "Bytes of a message's payload, or of a name; beyond, the connection is closed with `message too large`.",
        live=True,
    )
    publish_rate: float | None = option(
        None,
        limited(number(0, above=True)),
        "Messages per second that one client may publish; see `publish_policy`.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    publish_bytes_per_s: float | None = option(
        None,
        limited(number(0, above=True)),
        "Bytes per second that one client may publish, packet headers included; see `publish_policy`.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    publish_burst_s: float = option(
        1.0,
        number(0.01),
        "Size of a burst after a pause, in seconds at `publish_rate` and `publish_bytes_per_s`.",
        live=True,
    )
    publish_policy: str = option(
        "wait",
        choice(*PUBLISH_POLICIES),
        "Action when a client exceeds `publish_rate` or `publish_bytes_per_s`: `wait` (the server pauses reading from "
        "it; nothing is lost), `drop` (counted), or `disconnect`.",
        live=True,
    )
    names: int = option(
        250_000,
        whole(1),
        "Number of topics of a hub, and also of its sub-topics; `maxnames` of the hub overrides it.",
        live=True,
    )
    names_bytes: int = option(
        64 << 20, whole(1), "Bytes of the names of a hub's topics, and also of those of its sub-topics.", live=True
    )
    client_names: int = option(
        10_000, whole(1), "New names that one client may create; `clientnames` of its hub overrides it.", live=True
    )
    client_names_bytes: int = option(4 << 20, whole(1), "Bytes of the new names that one client may create.", live=True)
    subscriptions: int = option(
        10_000, whole(1), "Subscriptions of one client; `clientnames` of its hub overrides it.", live=True
    )
    observes: int = option(
        10_000, whole(1), "Topics that one client observes; `clientnames` of its hub overrides it.", live=True
    )
    queue_bytes: int = option(
        1 << 20, whole(1), "Bytes of the send queue of a client; `budget` of its hub overrides it.", live=True
    )
    total_queue_bytes: int = option(256 << 20, whole(1), "Bytes of the send queues of all clients.", live=True)
    slow: str = option(
        "newest",
        choice(*SLOW_POLICIES),
        "Policy for a full send queue of a client; `slow` of its hub overrides it. See "
        "[slow consumers](slow-consumers.md).",
        live=True,
    )
    slow_wait_s: float = option(
        10.0,
        number(0.1),
        "Time that publishers wait for one slow client with the policy `wait`, in seconds.",
        live=True,
    )
    stalled_s: float = option(
        10.0, number(0.1), "Seconds after which a slow client that reads nothing is disconnected.", live=True
    )
    head_bytes: int = option(16_384, whole(256), "Bytes of the head of an HTTP request; beyond, 431.", live=True)
    head_s: float = option(
        10.0, number(0.1), "Time limit of the head of an HTTP request, in seconds; then 408.", live=True
    )
    first_byte_s: float = option(
        5.0, number(0.1), "Time limit of the first byte of a connection, in seconds.", live=True
    )
    keep_alive_s: float = option(
        60.0, number(0.1), "Time limit between two HTTP requests of a connection, in seconds.", live=True
    )
    body_bytes: int = option(
        4 << 20, whole(1), "Bytes of a request body that is read as a whole; beyond, 413.", live=True
    )
    body_pause_s: float = option(
        10.0, number(0.1), "Time limit between two pieces of a request body, in seconds; then 408.", live=True
    )
    app_requests: int | None = option(
        1000,
        limited(whole(1)),
        "Concurrent requests of one application, to its pages and functions; others wait.",
        live=True,
    )
    app_requests_wait_s: float = option(
        10.0, number(0), "Time that a request waits because of `app_requests`, in seconds; then 503.", live=True
    )
    app_timers: int | None = option(
        10_000, limited(whole(1)), "Active timers of one application; beyond, `timer:set` raises.", live=True
    )
    lua_memory_mib: int | None = option(
        2048,
        limited(whole(16)),
        "Memory of Lua, of all applications together, in MiB. Beyond, the running code gets an error, and new "
        "requests to applications get 503.",
    )


@dataclass(frozen=True)
class TopicSettings:
    """Settings of the topics that a filter matches: `+` matches one level, `#` the rest."""

    slow: str = option(
        "",
        choice("", *SLOW_POLICIES),
        "Policy for a full send queue of a client; the policy of the hub when empty.",
        live=True,
    )
    last_value: bool = option(
        False,
        switch(),
        "Keep the newest message of each topic, one for each of its sub-topics, and send it to new subscribers first. "
        "See [last values](last-value.md).",
        live=True,
    )


@dataclass(frozen=True)
class MqttSettings:
    """Settings and limits of the MQTT clients of hubs (help: mqtt-hub)."""

    hub: str = option(
        "",
        text(),
        "Name of the hub that takes the MQTT clients, also without its option `mqtt`; `*`: the first one with this "
        "option, or the first one of the applications.",
    )
    persist: str = option(
        "",
        text(),
        "File that keeps names, sessions and retained messages of the server's own hub across restarts: the hub that "
        "`serve --mqtt` creates when no application has one.",
    )
    sync: str = option(
        "publish",
        choice("publish", "always", "interval"),
        "When the hub acknowledges a message with QoS 1 or 2 that it keeps in the file `persist`: `publish`, when the "
        "file has it, also after a crash of the server; `always`, when it is on the disk, also after a power failure; "
        "`interval`, at once: a crash loses up to `last_value.sync_s`.",
    )
    will_grace_s: int = option(
        30,
        whole(0, 86400),
        "Seconds after the start of a server that has crashed, after which the will of a client is published that was "
        "connected and has not come back.",
    )
    packet_bytes: int = option(
        1 << 20, whole(1024, 16 << 20), "Bytes of the largest packet; beyond, the client is disconnected (0x95)."
    )
    session_expiry_s: int = option(
        7 * 86400,
        whole(0, 0xFFFFFFFE),
        "Longest time for which the session of a client is kept without a connection, in seconds.",
    )
    max_keepalive_s: int = option(
        0,
        whole(0, 0xFFFF),
        "Longest keep-alive of a client, in seconds; also for clients without one. 0: clients choose.",
    )
    client_id: tuple[str, ...] = option(
        (),
        texts(),
        "Client ids that may connect: patterns with `*`, `?` and `[a-z]`, a list or a comma-separated string; others "
        "get 0x85. Without any, all may.",
        shown="none",
    )
    acl: str = option(
        "subscribe",
        choice(*ACL_MODES),
        "Use of the access control list for topic filters with wildcards: `subscribe` (a filter that matches a "
        "denied topic gets 0x87), or `deliver` (each filter is granted, and messages of denied topics are left out).",
    )
    sys: str = option(
        "users",
        choice(*SYS_READERS),
        "Clients that may subscribe to the `$SYS` topics: `users` (clients with a login; all clients of a hub without "
        "users), `all`, or `off`.",
    )
    sys_interval_s: int = option(
        10, whole(0, 3600), "Interval of the `$SYS` topics, in seconds, while a client subscribes to them; 0: none."
    )
    smq_qos: int = option(1, whole(0, 2), "QoS of messages that were not published by MQTT clients.")
    receive_maximum: int = option(
        20, whole(1, 32767), "Messages with QoS 1 and 2 in flight, in each direction of a connection."
    )
    aliases: int = option(10, whole(0, 0xFFFF), "Topic aliases of a client.")
    aliases_out: int = option(
        10, whole(0, 0xFFFF), "Topic aliases of the hub for a client that takes as many; 0: the hub sends none."
    )
    filters: int = option(1000, whole(1), "Topic filters of a client; beyond, SUBACK 0x97.")
    levels: int = option(128, whole(1), "Levels of a topic name or filter.")
    user_properties: int = option(64, whole(0, 1000), "User properties of a packet.")
    queued_messages: int = option(
        1000, whole(1), "Messages with QoS 1 and 2 that wait for one client; beyond, the oldest one is lost."
    )
    queued_bytes: int = option(1 << 20, whole(1), "Bytes of the messages that wait for one client.")
    total_queued_bytes: int = option(
        256 << 20,
        whole(1),
        "Bytes of the messages that wait for all clients of a hub, with those in flight to clients without a "
        "connection; beyond, as `queued_bytes`.",
    )
    sessions: int = option(100_000, whole(1), "Sessions of a hub that are kept without a connection.")
    retained: int = option(250_000, whole(1), "Retained messages of a hub; beyond, PUBACK 0x97.")
    retained_bytes: int = option(256 << 20, whole(1), "Bytes of the retained messages of a hub.")


@dataclass
class _Current:
    limits: LimitSettings = field(default_factory=LimitSettings)
    topics: Mapping[str, TopicSettings] = field(default_factory=dict)
    mqtt: MqttSettings = field(default_factory=MqttSettings)


_current = _Current()
_watchers: list[Callable[[LimitSettings], None]] = []


def current_limits() -> LimitSettings:
    """Return the current settings of limits of this process."""
    return _current.limits


def current_topics() -> Mapping[str, TopicSettings]:
    """Return the current settings of topics of this process, by topic filter."""
    return _current.topics


def current_mqtt() -> MqttSettings:
    """Return the current settings of MQTT clients of this process."""
    return _current.mqtt


def apply_mqtt(settings: MqttSettings) -> None:
    """Apply these settings to later hubs."""
    _current.mqtt = settings


def on_change(apply: Callable[[LimitSettings], None]) -> None:
    """Call `apply` after each change of the settings of limits."""
    _watchers.append(apply)


def apply_limits(limits: LimitSettings, topics: Mapping[str, TopicSettings]) -> None:
    """Apply these settings, also to connected clients."""
    _current.limits, _current.topics = limits, topics
    for apply in _watchers:
        apply(limits)


# ---- Register of limits
#
# The code that enforces a limit declares it as a `Limit` with a name, its setting and its rule. `snapshot` returns
# all of them, for metrics and the admin API.

log = logging.getLogger("smqrt")

LINE_EVERY_S = 1.0
"""The interval of log lines about one limit, so that a client can't fill the log."""


class LineLimit:
    """Permits one log line in `LINE_EVERY_S`, and counts the suppressed ones."""

    __slots__ = ("_next_line_s", "_suppressed")

    def __init__(self) -> None:
        self._next_line_s, self._suppressed = 0.0, 0

    def line_suffix(self) -> str | None:
        """Return None to suppress a line, else its suffix with the number of lines suppressed before it."""
        now_s = monotonic()
        if now_s < self._next_line_s:
            self._suppressed += 1
            return None
        suffix = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._next_line_s, self._suppressed = now_s + LINE_EVERY_S, 0
        return suffix

    def warn(self, sentence: str) -> None:
        """Log a warning, unless there was one in the last second."""
        if (suffix := self.line_suffix()) is not None:
            log.warning("%s%s", sentence, suffix)


@dataclass(frozen=True)
class LimitState:
    """The current state of a limit.

    Attributes:
        name: the name of the limit, in words with underscores.
        rule: the rule, as it is logged.
        setting: the setting that changes it; empty for none.
        count: the number of refusals since the process started.
        last: the last refused object; empty before the first refusal.
        last_s: the Unix time of the last refusal, in seconds; 0 before the first one.
    """

    name: str
    rule: str
    setting: str
    count: int
    last: str
    last_s: float


class Limit:
    """A limit of this process. The constructor adds it to the register.

    Args:
        name: the name of the limit, in words with underscores, for metrics and `refused()` of hubs.
        setting: the setting that changes it, such as `limits.publish_rate`; empty for none.
        rule: the rule as a clause for the log.

    Attributes:
        count: the number of refusals.
    """

    __slots__ = ("_last", "_last_s", "count", "lines", "name", "rule", "setting")

    def __init__(self, name: str, setting: str, rule: str) -> None:
        assert name not in _register, f"duplicate limit {name}"
        self.name, self.setting, self.rule = name, setting, rule
        self.count = 0
        self.lines = LineLimit()
        self._last, self._last_s = "", 0.0
        _register[name] = self

    def __repr__(self) -> str:
        return f"Limit({self.name})"

    def sentence(self, what: str, rule: str = "") -> str:
        """Return the log line for a refused `what`. `rule` replaces the rule of the limit, to add figures."""
        setting = f"; see the setting {self.setting}" if self.setting else ""
        return f"refused: {what}: {rule or self.rule}{setting}"

    def refused(self, what: str, rule: str = "", *, times: int = 1) -> None:
        """Count a refusal and log it, at most once a second for each limit.

        Args:
            what: the refused object: "a connection of 192.0.2.1". It must contain no secrets: the log and the API show
                it.
            rule: the rule with its figures; the rule of the limit by default.
            times: the number of refusals.
        """
        self.count += times
        self._last, self._last_s = what, time()
        if (suffix := self.lines.line_suffix()) is not None:
            log.warning("%s%s", self.sentence(what, rule), suffix)

    def state(self) -> LimitState:
        """Return the current state of the limit."""
        return LimitState(self.name, self.rule, self.setting, self.count, self._last, self._last_s)


_register: dict[str, Limit] = {}


def registered() -> list[Limit]:
    """Return all limits of the process, sorted by name."""
    return [_register[name] for name in sorted(_register)]


def snapshot() -> list[LimitState]:
    """Return the state of all limits of the process, sorted by name."""
    return [limit.state() for limit in registered()]


class Bucket:
    """A token bucket. Callers may take more tokens than it has; its level is then negative.

    Args:
        per_s: tokens added per second.
        burst: its capacity.
        now_s: the current time, in seconds.
    """

    __slots__ = ("_at_s", "_burst", "_per_s", "tokens")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst, self._at_s = per_s, burst, now_s
        self.tokens = burst

    def fill(self, now_s: float) -> float:
        """Add the tokens of the time since the last call, and return the level."""
        self.tokens = min(self._burst, self.tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self.tokens

    def wait_s(self, tokens: float) -> float:
        """Return the seconds until it has this many tokens, or is full."""
        return max(0.0, (min(tokens, self._burst) - self.tokens) / self._per_s)
