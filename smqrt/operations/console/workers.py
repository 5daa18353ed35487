"""Hubs and topics of several workers merged into those of one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smqrt.operations.console.gauges import creation_line


def merged_hubs(hubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hubs, in which the hubs of all workers with the same key are one.

    `ids` are the ids of these, `peers` and `topics` are sums. A topic counts for each worker that has it.
    """
    found: dict[str, dict[str, Any]] = {}
    for hub in sorted(hubs, key=lambda one: int(one["id"])):
        new = {"made_at": creation_line(hub), "id": hub["id"], "ids": [], "peers": 0, "topics": 0}
        one = found.setdefault(hub["key"], new)
        one["ids"].append(hub["id"])
        one["peers"] += hub["peers"]
        one["topics"] += hub["topics"]
    return list(found.values())


def merged_topics(pages: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return one page of the topics of a hub, those with most subscribers first.

    In the total, a topic that is on no page counts for each worker that has it.

    Args:
        pages: a page of each worker, see `snapshots.topics`.
        limit: maximum number of topics.
    """
    found: dict[str, dict[str, Any]] = {}
    for topic in (one for page in pages for one in page["items"]):
        known = found.setdefault(topic["name"], {**topic, "subscribers": 0, "observers": 0})
        known["subscribers"] += topic["subscribers"]
        known["observers"] += topic["observers"]
    items = sorted(found.values(), key=lambda one: -int(one["subscribers"]))
    elsewhere = sum(page["total"] - len(page["items"]) for page in pages)
    return {"items": items[:limit], "total": len(items) + elsewhere}
