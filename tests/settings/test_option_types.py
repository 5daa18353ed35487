"""Options: what rules take, and what each mistake is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.settings import option_types
from smqrt.settings.option_types import Rule, option, parse_duration, parse_size


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of options."""

    keepalive: int = option(60, option_types.whole(0, 0xFFFF, "seconds"), "After this silence the other side is asked.")
    timeout_s: float = option(5, option_types.number(0, 86_400, "seconds", above=True), "To connect.", name="timeout")
    words: list[str] = option(list, option_types.instance("a list", list), "Any.", shown="none")
    derived: int = 3


def test_a_table_of_nothing_has_the_defaults() -> None:
    made = option_types.make(Table, {})
    assert made == Table(keepalive=60, timeout_s=5, words=[], derived=3)
    assert made.words is not option_types.make(Table, {}).words


def test_values_are_found_by_the_names_of_users() -> None:
    assert option_types.make(Table, {"timeout": 2, "keepalive": 7.0}) == Table(timeout_s=2.0, keepalive=7)
    assert list(option_types.options_of(Table)) == ["keepalive", "timeout", "words"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"keepalive": "often"}, "x.keepalive must be a whole number from 0 to 65535 (seconds), not 'often'."),
        ({"keepalive": 65536}, "x.keepalive must be a whole number from 0 to 65535 (seconds), not 65536."),
        ({"timeout": 0}, "x.timeout must be a number greater than 0, at most 86400 (seconds), not 0."),
        (
            {"keepaliv": 1},
            "x.keepaliv is not an option; did you mean keepalive? The options are: keepalive, timeout, words.",
        ),
        ({"derived": 1}, "x.derived is not an option. The options are: keepalive, timeout, words."),
        ({"words": ()}, "x.words must be a list, not ()."),
    ],
    ids=str,
)
def test_mistakes(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        option_types.make(Table, values, "x.")
    assert str(caught.value) == says


def test_the_manual_has_a_row_for_each_option() -> None:
    assert option_types.options_table(Table).splitlines()[2:] == [
        "| `keepalive` | `60` | After this silence the other side is asked. |",
        "| `timeout` | `5` | To connect. |",
        "| `words` | none | Any. |",
    ]


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (option_types.whole(1), [1, 2.0, 10**30], [0, 1.5, True, "1", None, NAN, INFINITE]),
        (option_types.whole(1, 5), [1, 5], [0, 6]),
        (option_types.number(0.5), [0.5, 7], [0.4, False, "1", NAN, INFINITE]),
        (option_types.number(0, above=True), [0.1], [0]),
        (option_types.switch(), [True, False, 1, 0], [2, "true", None]),
        (option_types.text(), ["", "a"], [b"a", 1]),
        (option_types.path(), ["a", b"a"], ["", 1, None]),
        (option_types.function(), [print], [1]),
        (option_types.choice("a", 4), ["a", 4], ["b", 5, True]),
        (option_types.optional(option_types.whole(1)), [None, 1], [0]),
        (option_types.duration(1, 3600), ["1s", 60, "1h"], ["1ms", "2h", "soon"]),
        (option_types.size(1024), ["1KiB", 2000], ["1B", -1, "much"]),
    ],
)
def test_rules(rule: Rule, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        rule.check("x", value)
    for value in bad:
        with pytest.raises(ArgumentError, match="^x must be "):
            rule.check("x", value)


def test_a_rule_with_a_sentence_of_its_own() -> None:
    def read(value: object) -> object:
        raise ArgumentError(f"{value} is taken")

    with pytest.raises(ArgumentError, match="^port: 80 is taken$"):
        Rule("a port", read).check("port", 80)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200 ms", 0.2),
        ("500 milliseconds", 0.5),  # as Spark writes it
        ("10m", 600),
        ("7d", 604800),
        ("1 hour", 3600),
        ("5 minutes", 300),
        ("1.5s", 1.5),
        ("2w", 1209600),
    ]
    + [(3, 3), ("90 Seconds", 90), ("50us", 5e-5), (0.5, 0.5)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-1s", "1 fortnight", None, True, -3, float("inf"), float("nan"), "1s2"]
)
def test_no_durations(text: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a duration; write a number and a unit, such as '200 ms'"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64 * 10**6), ("1 KiB", 1024), ("20GB", 20 * 10**9), ("1.5mib", 3 << 19), ("7", 7), (9, 9)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1B", "1XB", None, True, -1, 1.5])
def test_no_sizes(text: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a size; write a number and a unit"):
        parse_size(text)
