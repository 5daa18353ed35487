"""Topics for operators: those of several workers are one, with the sums of their counters."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from smqrt.operations.all_workers import AllWorkers
from smqrt.operations.topics import count_ids, merged_topics, topics
from smqrt.smq.gevent_broker import GeventBroker
from tests.support.turns import short_turns


def test_pages_of_a_hub(smq: Any, broker: GeventBroker) -> None:
    ids = {name: smq.create(name) for name in ("lamp/1", "Lamp/2", "door")}
    by_id = sorted(ids, key=lambda name: ids[name])
    first: Any = topics([broker], limit=2)
    assert [one["name"] for one in first["items"]] == by_id[:2]
    second: Any = topics([broker], after=first["after"], limit=2)
    assert [one["name"] for one in second["items"]] == by_id[2:]
    found: Any = topics([broker], search="lamp", ids="all", limit=1)
    assert found["total"] == 2
    packed = b64decode(found["ids"])
    assert {int.from_bytes(packed[at : at + 4], "big") for at in (0, 4)} == {ids["lamp/1"], ids["Lamp/2"]}
    chosen: Any = topics([broker], ids=f"{ids['door']},{ids['lamp/1']}")
    assert {one["name"] for one in chosen["items"]} == {"door", "lamp/1"}
    assert topics([], ids="all") == {"items": [], "after": None, "total": 0, "ids": ""}
    for wrong in ({"ids": "x"}, {"sort": "name"}, {"after": "-1"}, {"limit": 1001}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            topics([broker], **wrong)  # type: ignore[arg-type]


def test_topics_with_the_same_name_are_merged() -> None:
    def page(after: str | None = None, **subscribers: int) -> dict[str, Any]:
        numbers = {"lamp": 7, "door": 8, "bell": 9}
        items = [
            {"name": name, "id": numbers[name], "subscribers": n, "observers": 1, "messages": 10 - n}
            for name, n in subscribers.items()
        ]
        ids = b"".join(one["id"].to_bytes(4, "big") for one in items)  # type: ignore[attr-defined]
        return {"items": items, "after": after, "total": len(items), "ids": b64encode(ids).decode()}

    pages = [page(lamp=1, door=2), page(lamp=4, bell=3)]
    found = merged_topics(pages, 2, "subscribers")
    assert [(one["name"], one["subscribers"], one["observers"], one["messages"]) for one in found["items"]] == [
        ("lamp", 5, 2, 15),
        ("bell", 3, 1, 7),
    ]
    assert (found["total"], found["after"]) == (3, None)
    assert [one["name"] for one in merged_topics(pages, 2, "messages")["items"]] == ["lamp", "door"]
    found = merged_topics(pages, 2)
    assert ([one["name"] for one in found["items"]], found["after"]) == (["lamp", "door"], "8")
    assert merged_topics(pages, 3)["after"] is None
    assert merged_topics([page(after="7", lamp=1)], 1)["after"] == "7"
    assert merged_topics([], 2) == {"items": [], "after": None, "total": 0}


class OtherWorker:
    """Worker 1, whose hub is in this process too."""

    others = (1,)

    def __init__(self, broker: GeventBroker) -> None:
        self._broker = broker
        self.asked: list[dict[str, str]] = []

    def ask_each(self, questions: dict[int, Any]) -> dict[int, Any]:
        answers = []
        for segments, given in questions[1]["asked"] if questions else ():
            assert list(segments) == ["topics"]
            self.asked.append(given)
            if "key" not in given:
                answers.append((400, {"error": "hub"}))
                continue
            arguments: Any = {**given, "limit": int(given["limit"])}
            del arguments["key"]
            answers.append((200, json.loads(json.dumps(topics([self._broker], **arguments)))))
        return {1: {"answers": answers, "cost_s": 0.0}} if questions else {}


def test_counters_of_all_workers_are_read_for_the_first_topics(smq: Any, broker: GeventBroker) -> None:
    """`both` is below the last row of the page of worker 1."""
    with hub.create() as other:
        for made, count, least in ((broker, 50, 1), (other.broker, 9, 10)):
            made.topic_table.named(b"both", 77).total = count
            for number in range(1000, 1110):
                made.topic_table.named(b"%d of %d" % (number, made.number), number * 10 + least).total = least
        worker = OtherWorker(other.broker)
        everything = AllWorkers(None, worker)  # type: ignore[arg-type]
        (status, found), _ = everything.topics({"key": broker.key, "sort": "messages", "limit": "1"})
        assert (status, [(one["name"], one["messages"]) for one in found["items"]]) == (200, [("both", 59)])
        assert (found["total"], found["after"], len(worker.asked)) == (221, None, 2)
        names: set[str] = set()
        after: str | None = "0"
        while after is not None:
            arguments = {"hub": str(broker.number), "limit": "50", "after": after}
            found = everything.get("topics", **arguments)
            assert not names & {one["name"] for one in found["items"]}
            names |= {one["name"] for one in found["items"]}
            after = found["after"]
        assert len(names) == 221
    for wrong in ({"limit": "x"}, {"limit": "1001"}, {"sort": "name"}, {"hub": "x"}, {"hub": "99"}, {}):
        with pytest.raises(ArgumentError):
            everything.get("topics", **{"hub": str(broker.number)} | wrong if wrong else {})


def test_many_ids_do_not_block_the_loop() -> None:
    """CPU time between two turns of the loop, while the topics of two workers with 200,000 are counted."""
    packed = [b64encode(b"".join(n.to_bytes(4, "big") for n in range(at, at + 200_000))).decode() for at in (0, 100)]
    with short_turns():
        assert count_ids(packed) == 200_100
