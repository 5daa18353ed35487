"""Topics of hubs for operators: of this process, and of all workers.

A topic of several workers is one topic: its counters are added, and it counts once. Workers derive ids from names, so a
topic has the same id in all of them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Any

from smqrt.broker.topics import Topic
from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn
from smqrt.operations.api_pages import LIMIT, MAX_LIMIT, Snapshot, largest, page, paged, whole
from smqrt.smq.gevent_broker import GeventBroker, all_brokers

_ID_BYTES = 4
_IDS_PER_TIME_CHECK = 5000
"""The number of topics between two checks of the time slice: 0.5 ms of work."""


def text(name: bytes) -> str:
    r"""Return a name as text, with `\xff` for bytes that are not UTF-8."""
    return name.decode("utf-8", "backslashreplace")


# ---- This process


def _messages_of(topic: Topic) -> int:
    topic.count()
    return topic.total


SIZES: dict[str, Callable[[Topic], float]] = {
    "subscribers": lambda topic: topic.subscribers,
    "messages": _messages_of,
}
"""The orders of topics."""


def topics(
    brokers: Iterable[GeventBroker],
    after: str | None = None,
    limit: int = LIMIT,
    search: str = "",
    sort: str = "",
    ids: str = "",
) -> Snapshot:
    """Return a page of the topics of a hub, ordered by id.

    Args:
        brokers: the hub of this process; empty when another worker has it.
        after: the `after` of the previous page.
        limit: items on the page, 1 to 1000.
        search: only topics whose name contains this text.
        sort: "subscribers" or "messages": the largest first, without a next page.
        ids: only topics with these ids, with commas between them; "all" adds the ids of all topics of all pages.

    Raises:
        ArgumentError: an argument is invalid.
    """
    if sort and sort not in SIZES:
        raise ArgumentError(f"sort: {sort[:40]!r} is not one of {', '.join(SIZES)}")
    named = [(one.number, topic) for one in brokers for topic in list(one.topic_table.by_name.values())]
    needle, chosen = search.lower(), frozenset[int]()
    if ids not in ("", "all"):
        chosen = frozenset(whole("ids", one) for one in ids.split(",", MAX_LIMIT))

    def wanted(entry: tuple[int, Topic]) -> bool:
        topic = entry[1]
        return (not chosen or topic.id in chosen) and (not needle or needle in text(topic.name or b"").lower())

    if sort:
        size = SIZES[sort]
        found = largest(named, lambda entry: size(entry[1]), limit, wanted)
    else:
        last = None if after is None else whole("after", after)
        found = page(named, lambda entry: entry[1].id, last, limit, wanted)
    result = paged(found, lambda entry: topic(*entry), str)
    if ids == "all":
        turn, packed = Turn(), bytearray()
        for first in range(0, len(named), _IDS_PER_TIME_CHECK):
            turn.yield_if_due()
            some = named[first : first + _IDS_PER_TIME_CHECK]
            packed += b"".join(entry[1].key for entry in some if wanted(entry))
        result["ids"] = b64encode(packed).decode()
    return result


def brokers_with_key(key: str) -> list[GeventBroker]:
    """Return the hub of this process with a key; hubs of several workers have the same."""
    return [one for one in all_brokers() if one.key == key]


def topic(hub: int, one: Topic) -> Snapshot:
    """Return a topic with its counters; `messages` were published by clients of this process."""
    one.count()
    return {
        "id": one.id,
        "hub": hub,
        "name": text(one.name or b""),
        "subscribers": one.subscribers,
        "observers": len(one.observers),
        "messages": one.total,
    }


# ---- All workers

_COUNTERS = ("subscribers", "observers", "messages")


def merged_topics(pages: Iterable[dict[str, Any]], limit: int = LIMIT, sort: str = "") -> dict[str, Any]:
    """Return one page of the topics of a hub. Yields to the event loop.

    Args:
        pages: a page of each worker with the ids of all its topics, see `topics`.
        limit: items on the page.
        sort: the order, see `topics`.
    """
    pages = list(pages)
    found: dict[str, dict[str, Any]] = {}
    for topic in (topic for one in pages for topic in one["items"]):
        known = found.setdefault(topic["name"], {**topic, **dict.fromkeys(_COUNTERS, 0)})
        for name in _COUNTERS:
            known[name] += topic[name]
    items = sorted(found.values(), key=lambda one: (-one[sort], one["id"]) if sort else one["id"])
    has_more = len(items) > limit or any(one["after"] is not None for one in pages)
    after = str(items[limit - 1]["id"]) if items[limit - 1 :] and has_more and not sort else None
    return {"items": items[:limit], "after": after, "total": count_ids(one.get("ids", "") for one in pages)}


def incomplete_ids(pages: Iterable[dict[str, Any]], limit: int, sort: str) -> str:
    """Return the ids of topics that a sorted page of some worker may lack, for the argument `ids`; usually empty."""
    pages = list(pages)
    if not sort or all(one["total"] <= len(one["items"]) for one in pages):
        return ""
    candidates = merged_topics(pages, min(limit * len(pages), MAX_LIMIT), sort)["items"]
    return ",".join(str(one["id"]) for one in candidates)


def count_ids(packed: Iterable[str]) -> int:
    """Return the number of different ids. Yields to the event loop.

    Args:
        packed: ids of 4 bytes, in Base64.
    """
    turn, different = Turn(), set[bytes]()
    for ids in map(b64decode, packed):
        for first in range(0, len(ids), _ID_BYTES * _IDS_PER_TIME_CHECK):
            turn.yield_if_due()
            last = min(first + _ID_BYTES * _IDS_PER_TIME_CHECK, len(ids))
            different.update(ids[at : at + _ID_BYTES] for at in range(first, last, _ID_BYTES))
    return len(different)
