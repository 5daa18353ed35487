"""Pages of long lists, chosen without sorting the whole and without holding the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappush, heappushpop, nlargest
from typing import Any, Generic, NamedTuple, TypeVar

from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn

# ---- The arguments of an API request: names that are known, numbers that are ones.

Arguments = dict[str, str]


def known(given: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    """Returns what was given. Raises ArgumentError for a name that is none of `names`."""
    for name in given:
        if name not in names:
            raise ArgumentError(f"{name[:40]}: there is no such argument; there are {', '.join(names)}")
    return given


def known_arguments(arguments: Arguments, names: tuple[str, ...]) -> Arguments:
    """As `known`, of the arguments of a query."""
    known(dict(arguments), names)
    return arguments


def none(arguments: Arguments) -> None:
    """Raises ArgumentError when there are any."""
    if arguments:
        raise ArgumentError(f"{next(iter(arguments))[:40]}: this address takes no arguments")


def whole(what: str, value: str) -> int:
    """Returns the number that an argument says. Raises ArgumentError when it says none."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ArgumentError(f"{what}: {value[:40]!r} is no number")
    return int(value)


def limit_of(arguments: Arguments) -> int:
    """Returns how many items are asked for. Raises ArgumentError when that is no number."""
    return whole("limit", arguments["limit"]) if "limit" in arguments else LIMIT


LIMIT, MOST = 100, 1000
"""Items on a page: by default, and at most."""
_LOOKED_AT = 500
"""Items between two looks at the clock: 0.1 ms of work."""

T = TypeVar("T")
K = TypeVar("K", int, bytes, tuple[int, int])
"""A key, which tells one item from another, and their order."""


class Page(NamedTuple, Generic[T]):
    """Some items of a list.

    Attributes:
        items: in order.
        after: what to ask for the page behind it with; None when there is nothing behind it.
        total: of all pages together.
    """

    items: list[T]
    after: object | None
    total: int


class _Reversed:
    """A key that is less when it is more: the heap's top is the last item of the page."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def __lt__(self, other: _Reversed) -> bool:
        return bool(other.key < self.key)


def page(
    items: Iterable[T],
    key: Callable[[T], K],
    after: K | None = None,
    limit: int = LIMIT,
    wanted: Callable[[T], object] | None = None,
) -> Page[T]:
    """Returns the `limit` items with the least keys above `after`; others run meanwhile.

    Args:
        items: all of them; a list that nobody changes meanwhile.
        key: tells one from another, and their order.
        after: the key of the last item of the page before; None for the first page.
        limit: items on the page, 1 to 1000.
        wanted: leaves out what it answers no for.

    Raises:
        ArgumentError: the limit is out of range.
    """
    check_limit(limit)
    turn, total, rest = Turn(), 0, 0
    heap: list[tuple[_Reversed, int, T]] = []
    for number, item in enumerate(items):
        if not number % _LOOKED_AT:
            turn.yield_if_due()
        if wanted is not None and not wanted(item):
            continue
        total += 1
        found = key(item)
        if after is not None and not after < found:
            continue
        rest += 1
        entry = (_Reversed(found), number, item)
        if len(heap) < limit:
            heappush(heap, entry)
        else:
            heappushpop(heap, entry)
    chosen = sorted(heap, key=lambda entry: entry[0], reverse=True)
    last = chosen[-1][0].key if rest > len(chosen) else None
    return Page([item for _, _, item in chosen], last, total)


def largest(
    items: Iterable[T],
    size: Callable[[T], float],
    limit: int = LIMIT,
    wanted: Callable[[T], object] | None = None,
) -> Page[T]:
    """Returns the `limit` largest items, the largest first; there is no page behind them. Arguments as `page`."""
    check_limit(limit)
    turn, counted = Turn(), [0]

    def chosen() -> Iterable[T]:
        for number, item in enumerate(items):
            if not number % _LOOKED_AT:
                turn.yield_if_due()
            if wanted is None or wanted(item):
                counted[0] += 1
                yield item

    found = nlargest(limit, chosen(), key=size)
    return Page(found, None, counted[0])


def check_limit(limit: int) -> None:
    """Raises ArgumentError for a limit that is out of range."""
    if not 1 <= limit <= MOST:
        raise ArgumentError(f"limit: {limit} is out of range; use 1 to {MOST}")
