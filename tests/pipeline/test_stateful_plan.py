"""Changes of a query's stateful operators, and warnings about state that only grows, from descriptions of operators."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.pipeline import stateful_plan
from smqrt.pipeline.stateful_plan import CUSTOM, DISTINCT, DISTINCT_WITHIN, GROUP, JOIN, LIMIT, Operator

COUNT = Operator(GROUP, ("k string",), ("count(1) bigint",), ("at",))


def described(*operators: Operator) -> list[dict[str, Any]]:
    return [one.description() for one in operators]


def changed(before: Operator, now: Operator) -> list[str]:
    return stateful_plan.changes(described(before), described(now))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (("a", "b"), []),
        (("a", "c"), ["b → c"]),
        (("c", "d"), ["a → c", "b → d"]),
        (("b", "a"), ["a, b → b, a"]),
        (("a",), ["a, b → a"]),
        ((), ["a, b → nothing"]),
    ],
)
def test_changed_keys_and_values_are_named(keys: tuple[str, ...], told: list[str]) -> None:
    assert changed(Operator(GROUP, ("a", "b")), Operator(GROUP, keys)) == told
    assert changed(Operator(GROUP, (), ("a", "b")), Operator(GROUP, (), keys)) == told


def test_other_kinds_of_operators_are_named_as_a_whole() -> None:
    several = described(COUNT, Operator(DISTINCT_WITHIN, ("j int",)), Operator(CUSTOM, ("k string",)))
    assert stateful_plan.changes(described(COUNT), several) == [
        "groupBy(k string) → groupBy(k string) and dropDuplicatesWithinWatermark(j int) and a state by key(k string)"
    ]
    assert stateful_plan.changes(described(COUNT), []) == ["groupBy(k string) → no state"]
    assert stateful_plan.changes([], []) == []


def test_a_watermark_may_be_added_and_removed_not_moved() -> None:
    without, other = Operator(GROUP, COUNT.keys, COUNT.values), Operator(GROUP, COUNT.keys, COUNT.values, ("b", "c"))
    assert changed(COUNT, without) == changed(without, COUNT) == []
    assert changed(COUNT, other) == ["watermark on at → on b, c"]


def test_a_rate_may_be_added_not_changed() -> None:
    first, other = (Operator(CUSTOM, ("k",), rate=rate) for rate in ("v > 5", "w > 5"))
    assert changed(Operator(CUSTOM, ("k",)), first) == changed(first, Operator(CUSTOM, ("k",))) == []
    assert changed(first, other) == ["rate of v > 5 → rate of w > 5"]
    [old] = described(first)
    del old["rate"]
    assert stateful_plan.changes([old], described(other)) == [], "older versions did not store it"


@pytest.mark.parametrize(
    ("operator", "remedy"),
    [
        (
            Operator(GROUP, ("k string",), unbounded=("k string",)),
            'groupBy by k string has no watermark; give the @source a watermark=, and group by F.window("ts", …).',
        ),
        (
            Operator(GROUP, ("k string",), (), ("rows.at",), ("k string",)),
            'groupBy by k string has no key with the watermark; group by F.window("at", …).',
        ),
        (
            Operator(GROUP, ("window(sent, 3 seconds)",), (), ("at",), ("window(sent, 3 seconds)",)),
            "groupBy by window(sent, 3 seconds) has no key with the watermark; set it on the time of the windows: "
            "event_time='sent' on the @source.",
        ),
        (
            Operator(GROUP, ("hour(at)",), (), ("at",), ("hour(at)",), {"h": "hour(at)"}),
            "groupBy has no key with the watermark, which at has and h (hour(at)) has lost; "
            'group by F.window("at", …) itself, and take window.start of the result.',
        ),
        (
            Operator(DISTINCT, ("k string",), (), ("at",), ("k string",)),
            "dropDuplicates by k string has no key with the watermark; write dropDuplicatesWithinWatermark, or add at.",
        ),
        (
            Operator(DISTINCT, (), (), ("at",), (), {"day": "day"}),
            "dropDuplicates has no key with the watermark, which at has and day has lost; "
            "write dropDuplicatesWithinWatermark, or add at itself.",
        ),
        (
            Operator(JOIN, (), ("Inner",), ("at",), ()),
            "the join of two streams without a key has no condition on times with a watermark; give each @source a "
            "watermark=, and the join a condition on both times.",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Operator) else "",
)
def test_state_that_only_grows_has_a_remedy(operator: Operator, remedy: str) -> None:
    assert stateful_plan.endless([COUNT, operator], "update") == f"its state grows without bound: {remedy}"


def test_state_that_is_needed_or_limited_is_no_warning() -> None:
    growing = Operator(GROUP, ("k string",), unbounded=("k string",))
    assert stateful_plan.endless([growing], "complete") == "", "it returns all groups each time"
    assert stateful_plan.endless([growing], "append") == "", "Spark rejects it"
    assert stateful_plan.endless([COUNT, Operator(LIMIT), Operator(CUSTOM, ("k",))], "update") == ""
    assert stateful_plan.endless([Operator(DISTINCT, ("k",), unbounded=("k",))], "append") != ""


def test_groups_without_the_watermark_are_never_final() -> None:
    assert stateful_plan.never_final([COUNT]) == ""
    assert stateful_plan.never_final([Operator(GROUP, ("k",), unbounded=("k",))]) == "", "Spark reports it"
    assert stateful_plan.never_final([Operator(DISTINCT, ("k",), (), ("at",), ("k",))]) == ""
    for keys, unbounded in ((("k",), ("k",)), ((), None)):
        told = stateful_plan.never_final([Operator(GROUP, keys, (), ("at",), unbounded)])
        assert told.startswith("mode='append' publishes only final rows, and no row becomes final: groupBy ")
