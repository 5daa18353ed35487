"""Hubs and topics of several workers as those of one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smqrt.console.gauges import place_of


def over_workers(hubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hubs, with that of each worker that goes on for the same one as one: its `ids` are theirs, its `peers` all.
    A topic that several workers have counts once, as far as that is known."""
    found: dict[str, dict[str, Any]] = {}
    for hub in sorted(hubs, key=lambda one: int(one["id"])):
        alone = {"made_at": place_of(hub), "id": hub["id"], "ids": [], "peers": 0, "topics": 0}
        one = found.setdefault(hub["key"], alone)
        one["ids"].append(hub["id"])
        one["peers"] += hub["peers"]
        one["topics"] = max(one["topics"], hub["topics"])
    return list(found.values())


def topics_over_workers(pages: Sequence[dict[str, Any]], most: int) -> dict[str, Any]:
    """Returns pages of the topics of one hub, a page of each worker, as one: those with most subscribers first. How
    many there are in all is not known beyond what is on the pages; it is at least so many.

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
    return {"items": items[:most], "total": max([len(items), *(page["total"] for page in pages)])}
