"""Filters of topics: MQTT's rules, the same in Python and in Arrow."""

from __future__ import annotations

import pickle
import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.errors import ArgumentError
from smqrt.journal import tables
from smqrt.journal.planning import Filter

LEVEL = st.sampled_from(["a", "b", "", "a.c", "größe", "$x", "a|b", "(", "\n", "\\"])
NAME = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)
PATTERN = st.builds(
    lambda levels, end: "/".join([*levels, *end]),
    st.lists(LEVEL | st.just("+"), min_size=1, max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool)


def by_the_book(pattern: str, name: str) -> bool:
    """MQTT 5 §4.7, level by level."""
    wanted, levels = pattern.split("/"), name.split("/")
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at >= len(levels) or level not in ("+", levels[at]):
            return False
    return len(levels) == len(wanted)


@given(st.lists(PATTERN | st.just("#"), max_size=3), st.lists(PATTERN, max_size=2), st.lists(NAME, max_size=8))
def test_as_in_the_book(topics: list[str], exclude: list[str], names: list[str]) -> None:
    chosen = Filter(topics, exclude)
    wanted = [
        any(by_the_book(one, name) for one in topics) and not any(by_the_book(one, name) for one in exclude)
        for name in names
    ]
    assert [chosen.matches(name) for name in names] == wanted
    column = pa.array([*names, None], pa.string())
    assert tables.mask(column, chosen).to_pylist() == [*wanted, False]
    assert tables.mask(column.dictionary_encode(), chosen).to_pylist() == [*wanted, False]
    in_pieces = pa.chunked_array([column.dictionary_encode(), column.slice(0, 1).dictionary_encode()])
    assert tables.mask(in_pieces, chosen).to_pylist() == [*wanted, False, *[*wanted, False][:1]]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("+", "a", True),
        ("+", "a/b", False),
        ("+/+", "/a", True),
        ("/+", "/", True),
        ("a/+", "a", False),
        ("a.b", "axb", False),
        ("#", "", True),
    ],
)
def test_examples(pattern: str, name: str, matches: bool) -> None:
    assert Filter([pattern]).matches(name) is matches


def test_names_without_wildcards() -> None:
    assert Filter(["b", "a", "b"]).literal() == ("b", "a")
    assert Filter(["a", "b"], ["b/#"]).literal() == ("a",)
    assert Filter(["a", "b/+"]).literal() is None
    assert Filter([]).literal() == ()
    assert Filter().everything
    assert not Filter(["#"], ["a"]).everything
    assert not Filter(["a/#"]).everything


def test_a_filter_travels() -> None:
    there = pickle.loads(pickle.dumps(Filter(["a/+"], ["a/b"])))
    assert (there.topics, there.exclude) == (("a/+",), ("a/b",))
    assert [there.matches(name) for name in ("a/a", "a/b")] == [True, False]
    assert repr(there) == "Filter(['a/+'], exclude=['a/b'])"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a/#/b", "has a '#' inside; '#' must be the whole last level, as in 'site1/#'"),
        ("a#", "has a '#' inside"),
        ("a+/b", "has a '+' beside a name; '+' must be a whole level"),
        ("", "is not a topic filter"),
        (5, "5 is not a topic filter"),
    ],
)
def test_mistakes(pattern: str, says: str) -> None:
    for topics, exclude in (([pattern], []), (["#"], [pattern])):
        with pytest.raises(ArgumentError, match=re.escape(says)):
            Filter(topics, exclude)


def test_one_text_is_no_list() -> None:
    with pytest.raises(ArgumentError, match="a list of filters is needed"):
        Filter("site1/#")
