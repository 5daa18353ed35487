"""Topic filters, as MQTT has them: `+` stands for one level, `#` at the end for this level and all below.

A compacted file that has too many topics to list them has a Bloom filter of their names and of the levels above, which
says "certainly not" or "perhaps": with `site1/a/temp` it holds `site1/` and `site1/a/`, so that it answers for
`site1/#` too.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from smqrt.errors import ArgumentError

_CACHED_NAMES = 8192
BLOOM_BYTES = 8 << 10
"""Of a filter: enough for 6,500 topics with one wrong "perhaps" in a hundred; of 30,000 every other is one."""
_BITS_PER_NAME = 10
_HASHES = 4
_KEPT_BLOOM_FILTERS = 256


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


# ---- the topics of a file that has too many to list them


def bloom_filter(topics: Iterable[str]) -> str:
    """Returns the filter of some topics, as text."""
    names = {name for topic in topics for name in (topic, *_above(topic))}
    bits = bytearray(min(BLOOM_BYTES, max(8, len(names) * _BITS_PER_NAME // 8)))
    for name in names:
        for at in _places(name, len(bits) * 8):
            bits[at >> 3] |= 1 << (at & 7)
    return b64encode(bits).decode()


def _above(topic: str) -> Iterator[str]:
    """Yields `site1/`, `site1/a/` of `site1/a/temp`."""
    at = topic.find("/")
    while at >= 0:
        yield topic[: at + 1]
        at = topic.find("/", at + 1)


def _places(name: str, bits: int) -> Iterator[int]:
    digest = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    step = digest >> 32 | 1
    return ((digest + turn * step) % bits for turn in range(_HASHES))


class WantedTopics(NamedTuple):
    """What to look for in filters; `of` makes one.

    Attributes:
        names: one of which must be in a filter.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, topics: Filter | None) -> WantedTopics | None:
        """Returns what to look for; None when a filter can't tell."""
        found: set[str] = set()
        for pattern in topics.topics if topics else ("#",):
            if not (names := _looked_for(pattern)):
                return None
            found.update(names)
        return cls(tuple(sorted(found)))

    def may_be_in(self, topic_filter: str) -> bool:
        """Says whether a file with this filter may have such a topic."""
        bits = _decoded(topic_filter)
        if not bits:
            return True
        return any(all(bits[at >> 3] >> (at & 7) & 1 for at in _places(name, len(bits) * 8)) for name in self.names)


def _looked_for(pattern: str) -> tuple[str, ...]:
    if literal(pattern):
        return (pattern,)
    levels = pattern.split("/")
    fixed = levels[: next(at for at, level in enumerate(levels) if level in ("+", "#"))]
    above = "/".join(fixed)
    if not fixed:
        return ()
    return (above + "/", above) if pattern == above + "/#" else (above + "/",)


@lru_cache(maxsize=_KEPT_BLOOM_FILTERS)
def _decoded(text: str) -> bytes:
    """Returns the bits; none when the text isn't a filter."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""
