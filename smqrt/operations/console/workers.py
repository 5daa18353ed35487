"""Hubs and topics of several workers as those of one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smqrt.operations.console.gauges import place_of


def over_workers(hubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hubs, with those of all workers that go on for the same one as one: its `ids` are theirs, its `peers` all. So
    are its `topics`; one that several workers have counts for each."""
    found: dict[str, dict[str, Any]] = {}
    for hub in sorted(hubs, key=lambda one: int(one["id"])):
        alone = {"made_at": place_of(hub), "id": hub["id"], "ids": [], "peers": 0, "topics": 0}
        one = found.setdefault(hub["key"], alone)
        one["ids"].append(hub["id"])
        one["peers"] += hub["peers"]
        one["topics"] += hub["topics"]
    return list(found.values())


def topics_over_workers(pages: Sequence[dict[str, Any]], most: int) -> dict[str, Any]:
    """Returns pages of the topics of one hub, a page of each worker, as one: those with most subscribers first. In the
    total, topics that are on no page count for each worker that has them.

    Args:
        pages: see `snapshots.topics`.
        most: topics.
    """
    found: dict[str, dict[str, Any]] = {}
    for topic in (one for page in pages for one in page["items"]):
        known = found.setdefault(topic["name"], {**topic, "subscribers": 0, "observers": 0})
        known["subscribers"] += topic["subscribers"]
        known["observers"] += topic["observers"]
    items = sorted(found.values(), key=lambda one: -int(one["subscribers"]))
    not_here = sum(page["total"] - len(page["items"]) for page in pages)
    return {"items": items[:most], "total": len(items) + not_here}
