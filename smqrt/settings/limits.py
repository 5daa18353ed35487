"""The settings of limits (`[limits]`) and of topics by name (`[topics."a/#"]`), and those in force in this process.

A program that runs no server of ours has the defaults. Who enforces a limit asks `in_force`, or has `on_change` call it
when they are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from smqrt.settings.options import NotThisError, Rule, T, choice, number, option, switch, whole

UNLIMITED = "unlimited"


def limited(rule: Rule[T]) -> Rule[T | None]:
    """What `rule` takes, or the word "unlimited", which is None."""

    def read_limited(value: object) -> T | None:
        if value is None or value == UNLIMITED:
            return None
        try:
            return rule.read(value)
        except NotThisError:
            raise NotThisError(f"{rule.says}, or {UNLIMITED!r}") from None

    schema = {"anyOf": [rule.schema, {"const": UNLIMITED}]}
    return Rule(f"{rule.says}, or {UNLIMITED!r}", read_limited, rule.kind, schema)


PAYLOAD_BYTES = 0xFFF0
SLOW = ("newest", "oldest", "latest", "disconnect", "wait")
PUBLISH_POLICIES = ("wait", "drop", "disconnect")


@dataclass(frozen=True)
class LimitSettings:
    """What strangers may have. Sizes in bytes, times in seconds, rates in so many a second."""

    connections_per_user: int | None = option(
        10_000, limited(whole(1)), "SMQ connections of one user; beyond, Connack 2.", live=True
    )
    connect_rate: float | None = option(
        5000.0,
        limited(number(0, above=True)),
        "New connections a second, on the average of ten seconds; beyond, 503. Addresses of this machine are not "
        "counted, as they are those of everybody behind a proxy on it.",
        live=True,
    )
    connect_rate_per_address: float | None = option(
        200.0, limited(number(0, above=True)), "The same for each IP address.", live=True
    )
    handshakes_per_address: int | None = option(
        256, limited(whole(1)), "SMQ clients of one address that have not finished Connect; beyond, 503.", live=True
    )
    handshake_s: float = option(
        4.0, number(0, above=True), "Seconds for Connect, where a hub has no `readtmo`; then Connack 2.", live=True
    )
    authenticate_s: float = option(
        30.0, number(0), "Seconds beyond those for `authenticate`, which may ask others; then Connack 2.", live=True
    )
    idle_s: float | None = option(
        None,
        limited(number(1)),
        "Seconds of silence after which an SMQ client is pinged.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    idle_answer_s: float = option(
        10.0, number(0.5), "Seconds in which it has to send something then; else the connection is closed.", live=True
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
        "Messages a second that one client may publish; see `publish_policy`.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    publish_bytes_per_s: float | None = option(
        None,
        limited(number(0, above=True)),
        "Bytes a second that one client may publish, packets with their heads; see `publish_policy`.",
        live=True,
        shown=f"`{UNLIMITED}`",
    )
    publish_burst_s: float = option(
        1.0, number(0.01), "So many seconds' worth of it may come at once, after a pause.", live=True
    )
    publish_policy: str = option(
        "wait",
        choice(*PUBLISH_POLICIES),
        "What happens beyond: `wait` (the client is not read for a while; nothing is lost), `drop` (counted), or "
        "`disconnect`.",
        live=True,
    )
    names: int = option(250_000, whole(1), "Topics of a hub, and its sub-topics, unless `maxnames` says.", live=True)
    names_bytes: int = option(64 << 20, whole(1), "Bytes of all these names, for each of the two kinds.", live=True)
    client_names: int = option(
        10_000, whole(1), "Names that one client may bring in, unless `clientnames` of its hub says.", live=True
    )
    client_names_bytes: int = option(4 << 20, whole(1), "Bytes of these names.", live=True)
    subscriptions: int = option(
        10_000, whole(1), "Subscriptions of one client, unless `clientnames` of its hub says.", live=True
    )
    observes: int = option(
        10_000, whole(1), "Topics that one client observes, unless `clientnames` of its hub says.", live=True
    )
    queue_bytes: int = option(
        1 << 20, whole(1), "Bytes that may wait for a client that does not read, unless `budget` says.", live=True
    )
    total_queue_bytes: int = option(
        256 << 20, whole(1), "Bytes that may wait for all such clients together.", live=True
    )
    slow: str = option(
        "newest",
        choice(*SLOW),
        "What gives way when a client's queue is full, unless `slow` of its hub says; see "
        "[slow consumers](slow-consumers.md).",
        live=True,
    )
    slow_wait_s: float = option(
        10.0, number(0.1), "Seconds that publishers wait for one client, with the policy `wait`.", live=True
    )
    stalled_s: float = option(
        10.0, number(0.1), "Seconds after which a client that takes nothing is disconnected.", live=True
    )
    head_bytes: int = option(16_384, whole(256), "Bytes of the head of an HTTP request; beyond, 431.", live=True)
    head_s: float = option(10.0, number(0.1), "Seconds for that head; then 408.", live=True)
    first_byte_s: float = option(5.0, number(0.1), "Seconds for the first byte of a connection.", live=True)
    keep_alive_s: float = option(60.0, number(0.1), "Seconds between two requests of a connection.", live=True)
    body_bytes: int = option(4 << 20, whole(1), "Bytes of a body that is read as a whole; beyond, 413.", live=True)
    body_pause_s: float = option(10.0, number(0.1), "Seconds between two pieces of a body; then 408.", live=True)
    app_requests: int | None = option(
        1000,
        limited(whole(1)),
        "Requests of one application that run at once, its pages and functions; others wait.",
        live=True,
    )
    app_requests_wait_s: float = option(10.0, number(0), "Seconds that they wait; then 503.", live=True)
    app_timers: int | None = option(
        10_000, limited(whole(1)), "Active timers of one application; beyond, `timer:set` raises.", live=True
    )
    lua_memory_mib: int | None = option(
        2048,
        limited(whole(16)),
        "Memory of Lua, of all applications together, in MiB; beyond, what computes then gets an error, and new "
        "requests of applications 503.",
    )


@dataclass(frozen=True)
class TopicSettings:
    """What holds for the topics that a filter names: `+` stands for one level, `#` for the rest."""

    slow: str = option(
        "", choice("", *SLOW), "What gives way when a client's queue is full; that of the hub when empty.", live=True
    )
    last_value: bool = option(
        False,
        switch(),
        "Keep the newest message of each topic, one for each of its sub-topics, and give it to new subscribers first, "
        "see [last values](last-value.md).",
        live=True,
    )


@dataclass
class _InForce:
    limits: LimitSettings = field(default_factory=LimitSettings)
    topics: Mapping[str, TopicSettings] = field(default_factory=dict)


_now = _InForce()
_watchers: list[Callable[[LimitSettings], None]] = []


def in_force() -> LimitSettings:
    """Returns the settings of limits in force."""
    return _now.limits


def topics_in_force() -> Mapping[str, TopicSettings]:
    """Returns the settings of topics in force, by topic filter."""
    return _now.topics


def on_change(apply: Callable[[LimitSettings], None]) -> None:
    """Have `apply` called whenever other settings come into force."""
    _watchers.append(apply)


def apply_limits(limits: LimitSettings, topics: Mapping[str, TopicSettings]) -> None:
    """Let these settings hold, also for clients that are connected."""
    _now.limits, _now.topics = limits, topics
    for apply in _watchers:
        apply(limits)
