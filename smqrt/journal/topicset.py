"""The topics of a file that has too many to list them: a Bloom filter of their names and of the levels above.

A filter says "certainly not" or "perhaps". With `site1/a/temp` it holds `site1/` and `site1/a/`, so that it answers for
`site1/#` too.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from smqrt.journal.filters import Filter, literal

MOST_BYTES = 8 << 10
"""Of a filter: enough for 6,500 topics with one wrong "perhaps" in a hundred; of 30,000 every other is one."""
_BITS_PER_NAME = 10
_HASHES = 4
_KEPT = 256


def made(topics: Iterable[str]) -> str:
    """Returns the filter of some topics, as text."""
    names = {name for topic in topics for name in (topic, *_above(topic))}
    bits = bytearray(min(MOST_BYTES, max(8, len(names) * _BITS_PER_NAME // 8)))
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


class Wanted(NamedTuple):
    """What to look for in filters; `of` makes one.

    Attributes:
        names: one of which must be in a filter.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, topics: Filter | None) -> Wanted | None:
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


@lru_cache(maxsize=_KEPT)
def _decoded(text: str) -> bytes:
    """Returns the bits; none when the text isn't a filter."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""
