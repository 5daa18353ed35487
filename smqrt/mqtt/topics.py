"""Topic names and topic filters (MQTT 5 §4.7)."""

from __future__ import annotations

from smqrt.errors import ArgumentError

_MAX_BYTES = 0xFFFF


def check_topic(topic: object) -> str:
    """A topic to publish to.

    Raises:
        ArgumentError: it is none.
    """
    name = _name(topic, "topic")
    if "+" in name or "#" in name:
        raise ArgumentError(f"topic {name!r} can't have wildcards: they are for subscriptions")
    return name


def check_filter(topic: object) -> str:
    """A topic to subscribe to, which may have wildcards.

    Raises:
        ArgumentError: it is none.
    """
    name = _name(topic, "topic")
    levels = name.split("/")
    if any(len(level) > 1 and ("+" in level or "#" in level) for level in levels) or "#" in levels[:-1]:
        raise ArgumentError(f"topic {name!r}: '+' stands for a whole level, '#' for all levels at the end")
    return name


def _name(topic: object, what: str) -> str:
    if isinstance(topic, bytes):
        topic = topic.decode("utf-8", "surrogateescape")
    if not isinstance(topic, str):
        raise ArgumentError(f"{what} must be a str, not {type(topic).__name__}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} {topic!r} must be UTF-8") from None
    if not 0 < size <= _MAX_BYTES or "\0" in topic:
        raise ArgumentError(f"{what} {topic[:50]!r} must have 1 to {_MAX_BYTES} bytes and no NUL")
    return topic


def unshared(topic: str) -> str:
    """The filter inside a shared subscription, `$share/group/filter`."""
    return topic.split("/", 2)[2] if topic.startswith("$share/") and topic.count("/") >= 2 else topic
