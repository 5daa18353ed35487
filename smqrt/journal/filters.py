"""Which topics: MQTT's filters. `+` stands for one level, `#` at the end for this level and all below."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from smqrt.errors import ArgumentError

_CACHED_NAMES = 8192


def literal(pattern: str) -> bool:
    """Says whether a filter has no wildcard, and so is the name of one topic."""
    return not {"+", "#"} & set(pattern.split("/"))


def check(pattern: object) -> str:
    """Returns a filter that is right.

    Raises:
        ArgumentError: it isn't.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ArgumentError(f"topics: {pattern!r} is no topic filter; it's a text such as 'site1/+/temp' or 'site1/#'")
    *above, last = pattern.split("/")
    if any("#" in level for level in above) or ("#" in last and last != "#"):
        raise ArgumentError(f"topics: {pattern!r} has a '#' inside; it's the whole last level, as in 'site1/#'")
    if any("+" in level and level != "+" for level in (*above, last)):
        raise ArgumentError(f"topics: {pattern!r} has a '+' beside a name; it's a whole level, as in 'site1/+/temp'")
    return pattern


def covers(pattern: str, other: str) -> bool:
    """Says whether a filter chooses every topic that another one chooses."""
    levels, others = pattern.split("/"), other.split("/")
    for at, level in enumerate(levels):
        if level == "#":
            return True
        if at == len(others) or others[at] == "#" or level not in ("+", others[at]):
            return False
    return len(levels) == len(others)


def _regex(pattern: str) -> str:
    """Returns a filter as a regular expression for the whole name; one that RE2 knows too."""
    if pattern == "#":
        return ".*"
    *above, last = pattern.split("/")
    levels = ["[^/]*" if level == "+" else _escape(level) for level in above]
    if last == "#":
        return "/".join(levels) + "(/.*)?"
    return "/".join([*levels, "[^/]*" if last == "+" else _escape(last)])


def _escape(text: str) -> str:
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", text)


class Filter:
    """Chooses topics by name.

    Args:
        topics: filters, one of which a name must match.
        exclude: filters, none of which it may match.

    Raises:
        ArgumentError: a filter is wrong.
    """

    def __init__(self, topics: Sequence[str] = ("#",), exclude: Sequence[str] = ()) -> None:
        if isinstance(topics, str) or isinstance(exclude, str):
            raise ArgumentError("topics: a list of filters is needed, such as ['site1/#']")
        self.topics = tuple(map(check, topics))
        self.exclude = tuple(map(check, exclude))
        self._fresh()

    def _fresh(self) -> None:
        self.matches: Callable[[str], bool] = lru_cache(_CACHED_NAMES)(self.chooses)
        """Says whether a topic's name is chosen; remembers the latest answers."""
        self._included = re.compile(self.regex(), re.DOTALL)
        self._excluded = re.compile(self.exclude_regex(), re.DOTALL) if self.exclude else None

    def chooses(self, name: str) -> bool:
        """As `matches`, for names of strangers, which may be long: nothing is remembered."""
        if not self._included.fullmatch(name):
            return False
        return self._excluded is None or not self._excluded.fullmatch(name)

    @property
    def everything(self) -> bool:
        """Every topic is chosen."""
        return "#" in self.topics and not self.exclude

    def literal(self) -> tuple[str, ...] | None:
        """Returns the names that can match when no filter has a wildcard, else None; `exclude` counts."""
        if not all(map(literal, self.topics)):
            return None
        return tuple(name for name in dict.fromkeys(self.topics) if self.matches(name))

    def regex(self) -> str:
        """Returns `topics` as a regular expression for the whole name; Arrow's RE2 knows it too."""
        return "|".join(f"(?:{_regex(one)})" for one in self.topics) or "[^\\s\\S]"

    def exclude_regex(self) -> str:
        """Returns `exclude` in the same way."""
        return "|".join(f"(?:{_regex(one)})" for one in self.exclude) or "[^\\s\\S]"

    def __reduce__(self) -> tuple[type[Filter], tuple[tuple[str, ...], tuple[str, ...]]]:
        return Filter, (self.topics, self.exclude)

    def __repr__(self) -> str:
        return f"Filter({list(self.topics)!r}, exclude={list(self.exclude)!r})"
