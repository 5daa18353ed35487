"""Filters that Spark hands down: which files and rows needn't be read at all.

Batch reads only, and only while `spark.sql.python.filterPushdown.enabled` is true: Spark gives none to streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from smqrt.pipeline.smq_source.options import epoch_us

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter as SparkFilter

LEAST, MOST = -(1 << 62), 1 << 62
"""Open ends of a range of microseconds or of seqs."""


@dataclass(frozen=True)
class Pushed:
    """What the filters of a query leave of the journal.

    Attributes:
        ts_us: first and last microsecond since 1970, both inclusive.
        seq: first seq and the one after the last.
        topics: the names, or None for all.
        nodes: the nodes, or None for all.
    """

    ts_us: tuple[int, int] = (LEAST, MOST)
    seq: tuple[int, int] = (LEAST, MOST)
    topics: frozenset[str] | None = None
    nodes: frozenset[str] | None = None

    @property
    def times(self) -> tuple[int, int] | None:
        """The range of microseconds, or None when it's open on both sides."""
        return None if self.ts_us == (LEAST, MOST) else self.ts_us


def bounds(kind: str, value: int) -> tuple[int, int] | None:
    """Returns the first and the last whole number that a comparison with `value` leaves."""
    return {
        "EqualTo": (value, value),
        "GreaterThan": (value + 1, MOST),
        "GreaterThanOrEqual": (value, MOST),
        "LessThan": (LEAST, value - 1),
        "LessThanOrEqual": (LEAST, value),
    }.get(kind)


def both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def chosen(names: frozenset[str] | None, kind: str, value: Any) -> frozenset[str] | None:
    """Returns which of the names an equality or a list leaves; None when the filter is neither."""
    if kind == "EqualTo" and isinstance(value, str):
        found = frozenset([value])
    elif kind == "In" and all(isinstance(one, str) for one in value):
        found = frozenset(value)
    else:
        return None
    return found if names is None else names & found


def narrowed(pushed: Pushed, wanted: SparkFilter) -> Pushed | None:
    """Returns what a filter leaves of `pushed`; None when it's a filter that only Spark can apply."""
    kind, value = type(wanted).__name__, getattr(wanted, "value", None)
    match getattr(wanted, "attribute", None):
        case ("ts",) if isinstance(value, datetime) and (range_ := bounds(kind, epoch_us(value))):
            return replace(pushed, ts_us=both(pushed.ts_us, range_))
        case ("seq",) if type(value) is int and (range_ := bounds(kind, value)):
            return replace(pushed, seq=both(pushed.seq, (range_[0], range_[1] + 1)))
        case ("topic",) if (names := chosen(pushed.topics, kind, value)) is not None:
            return replace(pushed, topics=names)
        case ("node",) if (names := chosen(pushed.nodes, kind, value)) is not None:
            return replace(pushed, nodes=names)
    return None


class Pushing:
    """A reader's `pushFilters`, which is not an error where pushdown is switched off.

    Spark refuses to read when a reader has a `pushFilters` of its own while the setting is off, so that nobody misses
    it. It tells so by the function behind the method: this answers with the inherited one, as the setting is Spark's
    default and a read without it is slower but right.
    """

    def __init__(self) -> None:
        from pyspark.sql.datasource import DataSourceReader

        self.pushed = Pushed()
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: Iterable[SparkFilter]) -> Iterator[SparkFilter]:
        for one in filters:
            if (narrower := narrowed(self.pushed, one)) is not None:
                self.pushed = narrower
            else:
                yield one
