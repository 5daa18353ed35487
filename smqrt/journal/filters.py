"""Topic filters as in MQTT, and Bloom filters of topics.

`+` matches one level, `#` at the end matches this level and all below. A compacted file with too many topics to list
has a Bloom filter of their names and of their parent levels. For `site1/a/temp` it also contains `site1/` and
`site1/a/`, so that it answers for `site1/#` too.
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
"""Largest size of a Bloom filter: one false positive in a hundred for 6,500 topics, every other one for 30,000."""
_BITS_PER_NAME = 10
_HASHES = 4
_KEPT_BLOOM_FILTERS = 256


def literal(pattern: str) -> bool:
    """Return whether a filter has no wildcard, so that it is the name of one topic."""
    return not {"+", "#"} & set(pattern.split("/"))


def check(pattern: object) -> str:
    """Return a topic filter after checking its syntax.

    Raises:
        ArgumentError: the filter is invalid.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ArgumentError(f"topics: {pattern!r} is not a topic filter such as 'site1/+/temp' or 'site1/#'")
    *above, last = pattern.split("/")
    if any("#" in level for level in above) or ("#" in last and last != "#"):
        raise ArgumentError(f"topics: {pattern!r} has a '#' inside; '#' must be the whole last level, as in 'site1/#'")
    if any("+" in level and level != "+" for level in (*above, last)):
        raise ArgumentError(
            f"topics: {pattern!r} has a '+' beside a name; '+' must be a whole level, as in 'site1/+/temp'"
        )
    return pattern


def covers(pattern: str, other: str) -> bool:
    """Return whether a filter matches every topic that another one matches."""
    levels, others = pattern.split("/"), other.split("/")
    for at, level in enumerate(levels):
        if level == "#":
            return True
        if at == len(others) or others[at] == "#" or level not in ("+", others[at]):
            return False
    return len(levels) == len(others)


def _regex(pattern: str) -> str:
    """Return a filter as a regular expression for the whole name, in the syntax that RE2 accepts too."""
    if pattern == "#":
        return ".*"
    *above, last = pattern.split("/")
    levels = ["[^/]*" if level == "+" else _escape(level) for level in above]
    if last == "#":
        return "/".join(levels) + "(/.*)?"  # as in MQTT, site1/# also matches site1
    return "/".join([*levels, "[^/]*" if last == "+" else _escape(last)])


def _escape(text: str) -> str:
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", text)


class Filter:
    """Selects topics by name.

    Args:
        topics: filters; a name must match one of them.
        exclude: filters; a name must match none of them.

    Raises:
        ArgumentError: a filter is invalid.
    """

    def __init__(self, topics: Sequence[str] = ("#",), exclude: Sequence[str] = ()) -> None:
        if isinstance(topics, str) or isinstance(exclude, str):
            raise ArgumentError("topics: a list of filters is needed, such as ['site1/#']")
        self.topics = tuple(map(check, topics))
        self.exclude = tuple(map(check, exclude))
        self.matches: Callable[[str], bool] = lru_cache(_CACHED_NAMES)(self.chooses)
        """Return whether a topic's name is selected; the latest answers are cached."""
        self._included = re.compile(self.regex(), re.DOTALL)
        self._excluded = re.compile(self.exclude_regex(), re.DOTALL) if self.exclude else None

    def chooses(self, name: str) -> bool:
        """Return as `matches`, without a cache: names from unauthenticated clients may be long."""
        if not self._included.fullmatch(name):
            return False
        return self._excluded is None or not self._excluded.fullmatch(name)

    @property
    def everything(self) -> bool:
        """Whether every topic is selected."""
        return "#" in self.topics and not self.exclude

    def literal(self) -> tuple[str, ...] | None:
        """Return the names that match when no filter has a wildcard, else None; `exclude` is applied."""
        if not all(map(literal, self.topics)):
            return None
        return tuple(name for name in dict.fromkeys(self.topics) if self.matches(name))

    def regex(self) -> str:
        """Return `topics` as a regular expression for the whole name, in the syntax that Arrow's RE2 accepts too."""
        return "|".join(f"(?:{_regex(one)})" for one in self.topics) or "[^\\s\\S]"  # which matches nothing

    def exclude_regex(self) -> str:
        """Return `exclude` as a regular expression, like `regex`."""
        return "|".join(f"(?:{_regex(one)})" for one in self.exclude) or "[^\\s\\S]"

    def __reduce__(self) -> tuple[type[Filter], tuple[tuple[str, ...], tuple[str, ...]]]:
        return Filter, (self.topics, self.exclude)

    def __repr__(self) -> str:
        return f"Filter({list(self.topics)!r}, exclude={list(self.exclude)!r})"


# ---- the topics of a file that has too many to list them


def bloom_filter(topics: Iterable[str]) -> str:
    """Return the Bloom filter of topics in base64."""
    names = set()
    for topic in topics:
        names.add(topic)
        names.update(topic[: found.end()] for found in re.finditer("/", topic))  # parent levels: site1/, site1/a/
    bits = bytearray(min(BLOOM_BYTES, max(8, len(names) * _BITS_PER_NAME // 8)))
    for name in names:
        for at in _bit_positions(name, len(bits) * 8):
            bits[at >> 3] |= 1 << (at & 7)
    return b64encode(bits).decode()


def _bit_positions(name: str, bits: int) -> Iterator[int]:
    digest = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    step = digest >> 32 | 1  # odd, so that all positions differ: sizes are multiples of 8
    return ((digest + turn * step) % bits for turn in range(_HASHES))


class WantedTopics(NamedTuple):
    """Names to look up in Bloom filters; `of` creates one.

    Attributes:
        names: a file whose filter contains none of them has no such topic.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, topics: Filter | None) -> WantedTopics | None:
        """Return the names to look up; None when a Bloom filter can't answer."""
        found: set[str] = set()
        for pattern in topics.topics if topics else ("#",):
            if not (names := _names_in_filter(pattern)):
                return None
            found.update(names)
        return cls(tuple(sorted(found)))

    def may_be_in(self, topic_filter: str) -> bool:
        """Return whether a file with this Bloom filter may have such a topic."""
        bits = _bloom_bits(topic_filter)
        if not bits:
            return True
        return any(
            all(bits[at >> 3] >> (at & 7) & 1 for at in _bit_positions(name, len(bits) * 8)) for name in self.names
        )


def _names_in_filter(pattern: str) -> tuple[str, ...]:
    if literal(pattern):
        return (pattern,)
    levels = pattern.split("/")  # only the levels before the first wildcard are known
    fixed = levels[: next(at for at, level in enumerate(levels) if level in ("+", "#"))]
    above = "/".join(fixed)
    if not fixed:
        return ()
    return (above + "/", above) if pattern == above + "/#" else (above + "/",)


@lru_cache(maxsize=_KEPT_BLOOM_FILTERS)
def _bloom_bits(text: str) -> bytes:
    """Return the bits; empty when the text isn't a Bloom filter."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""
