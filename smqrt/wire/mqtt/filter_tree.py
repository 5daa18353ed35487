"""Search tree of topic filters (MQTT 5 §4.7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Levels = dict[str, Any]
"""The next levels of several filters: a `Levels`, or a `(value, rest)` while only one filter goes on there."""
WORK_PER_STEP = 250
"""Comparisons in one step of a search, of one level or eight characters: about 50 µs."""
_END = "/"
"""The key of the filter that ends at a `Levels`; no level contains it."""


class FilterTree(Generic[Value]):
    """A value for each topic filter, which is not None.

    A hub may have a million filters, which mostly have a beginning in common with few others. So the levels that no
    other filter has stay together: a filter takes about 150 bytes.
    """

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: Levels = {}

    def set(self, topic_filter: str, value: Value) -> None:
        """Set the value of a filter."""
        node, rest = self._root, topic_filter
        while True:
            level, slash, after = rest.partition("/")
            known = node.get(level)
            ending = after if slash else None
            if known is None or (type(known) is tuple and known[1] == ending):
                node[level] = value, ending
                return
            if type(known) is tuple:
                node[level] = known = _split(*known)
            if ending is None:
                known[_END] = value, None
                return
            node, rest = known, ending

    def remove(self, topic_filter: str) -> None:
        """Remove a filter, if the tree has it."""
        path: list[tuple[Levels, str]] = []
        node, rest = self._root, topic_filter
        while True:
            level, slash, after = rest.partition("/")
            known, ending = node.get(level), after if slash else None
            path.append((node, level))
            if type(known) is dict and ending is not None:
                node, rest = known, ending
                continue
            if type(known) is dict:
                path.append((known, _END))
                known = known.get(_END)
            if known is None or known[1] != ending:
                return
            break
        node, level = path.pop()
        del node[level]
        while path and len(node) == 1:
            ((level, known),) = node.items()
            if type(known) is dict:
                return
            node, at = path.pop()
            value, rest = known
            node[at] = value, None if level == _END else level if rest is None else f"{level}/{rest}"

    def has_level(self, level: str) -> bool:
        """Return whether a filter has this first level."""
        return level in self._root

    def match(self, topic: str) -> Iterator[Value]:
        """Yield the values of the filters that match a topic name.

        A wildcard at the first level matches no name that begins with "$" [MQTT-4.7.2-1].
        """
        return (found for found in self.search(topic) if found is not None)

    def search(self, topic: str) -> Iterator[Value | None]:
        """Yield the values as `match`, and None after each portion of the work.

        Between two steps, filters may be added and removed. Those that the tree has all the time are found.
        """
        levels, work = topic.split("/"), 0
        nodes: list[Levels] = [self._root]
        for depth, level in enumerate(levels):
            keys = ("#", level, "+") if depth or not topic.startswith("$") else (level,)
            following: list[Levels] = []
            for node in nodes:
                work += 1
                for key in keys:
                    known = node.get(key)
                    if known is None:
                        continue
                    if type(known) is dict:
                        following.append(known)
                        continue
                    rest = known[1]
                    if rest is not None:
                        work += len(rest) >> 3
                    if key == "#" or _matches(rest, levels, depth + 1):
                        yield known[0]
                if work >= WORK_PER_STEP:
                    work = 0
                    yield None
            nodes = following
        for node in nodes:
            work += 1
            for key in (_END, "#"):  # "a/#" matches "a" as well
                known = node.get(key)
                if known is not None:
                    yield known[0]
            if work >= WORK_PER_STEP:
                work = 0
                yield None


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a filter matches a topic name, see `FilterTree.match`."""
    if topic.startswith("$") and topic_filter[:1] in ("+", "#"):
        return False
    return _matches(topic_filter, topic.split("/"), 0)


def _split(value: object, rest: str | None) -> Levels:
    """Return the levels that begin with those of one filter."""
    if rest is None:
        return {_END: (value, None)}
    level, slash, after = rest.partition("/")
    return {level: (value, after if slash else None)}


def _matches(rest: str | None, levels: list[str], at: int) -> bool:
    """Return whether the rest of a filter matches the levels of a topic from the index `at`."""
    for level in rest.split("/") if rest is not None else ():
        if level == "#":
            return True
        if at == len(levels) or level not in ("+", levels[at]):
            return False
        at += 1
    return at == len(levels)
