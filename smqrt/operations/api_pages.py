"""Arguments of API requests, and pages of lists.

A page is `{"items", "after", "total"}` in JSON. These functions run in a greenlet and yield to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heappush, heappushpop, nlargest
from typing import Any, Generic, NamedTuple, TypeVar

from smqrt.errors import ArgumentError
from smqrt.loop.scheduling import Turn

Snapshot = dict[str, object]
"""An object for JSON."""

# ---- Arguments of API requests

Arguments = dict[str, str]
GivenArguments = TypeVar("GivenArguments", bound=Mapping[str, object])


def known(given: GivenArguments, names: tuple[str, ...]) -> GivenArguments:
    """Return `given`. Raises ArgumentError for a name that is not in `names`."""
    for name in given:
        if name not in names:
            raise ArgumentError(f"{name[:40]}: unknown argument; the arguments are {', '.join(names)}")
    return given


def no_arguments(arguments: Arguments) -> None:
    """Raise ArgumentError when there are arguments."""
    if arguments:
        raise ArgumentError(f"{next(iter(arguments))[:40]}: this address takes no arguments")


def whole(what: str, value: str) -> int:
    """Return the value of an argument as a number. Raises ArgumentError for a string that is not one."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise ArgumentError(f"{what}: {value[:40]!r} is not a number")
    return int(value)


def limit_of(arguments: Arguments) -> int:
    """Return the argument `limit`, or its default. Raises ArgumentError when it is not a number."""
    return whole("limit", arguments["limit"]) if "limit" in arguments else LIMIT


# ---- Page selection without sorting the whole list

LIMIT, MAX_LIMIT = 100, 1000
"""The number of items on a page: the default and the maximum."""
_ITEMS_PER_TIME_CHECK = 500
"""The number of items between two checks of the time slice: 0.1 ms of work."""

T = TypeVar("T")
K = TypeVar("K", int, bytes, tuple[int, int])
"""A key that identifies an item and orders the list."""


class Page(NamedTuple, Generic[T]):
    """Some items of a list.

    Attributes:
        items: the items in order.
        after: the key of the last item, to request the next page; None on the last page.
        total: number of items of all pages.
    """

    items: list[T]
    after: object | None
    total: int


class _Reversed:
    """A key in reverse order, so that the top of the heap is the last item of the page."""

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
    """Return the `limit` items with the smallest keys above `after`. Yields to the event loop.

    Args:
        items: all items, in a list that must not change meanwhile.
        key: returns the key of an item.
        after: the key of the last item of the previous page; None for the first page.
        limit: items on the page, 1 to 1000.
        wanted: returns whether an item is included; by default all items are.

    Raises:
        ArgumentError: the limit is out of range.
    """
    check_limit(limit)
    turn, total, rest = Turn(), 0, 0
    # The heap has at most `limit` entries: 100,000 clients are not sorted for a page of 100.
    heap: list[tuple[_Reversed, int, T]] = []
    for number, item in enumerate(items):
        if not number % _ITEMS_PER_TIME_CHECK:
            turn.yield_if_due()
        if wanted is not None and not wanted(item):
            continue
        total += 1
        item_key = key(item)
        if after is not None and not after < item_key:
            continue
        rest += 1
        entry = (_Reversed(item_key), number, item)
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
    """Return the `limit` largest items, the largest first, without a next page. See `page` for the arguments."""
    check_limit(limit)
    turn, total = Turn(), 0

    def matching() -> Iterable[T]:
        nonlocal total
        for number, item in enumerate(items):
            if not number % _ITEMS_PER_TIME_CHECK:
                turn.yield_if_due()
            if wanted is None or wanted(item):
                total += 1
                yield item

    found = nlargest(limit, matching(), key=size)
    return Page(found, None, total)


def check_limit(limit: int) -> None:
    """Raise ArgumentError for a limit that is out of range."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ArgumentError(f"limit: {limit} is out of range; use 1 to {MAX_LIMIT}")


def paged(found: Page[T], shown: Callable[[T], object], key: Callable[[Any], str]) -> Snapshot:
    """Return a page for JSON. Yields to the event loop.

    Args:
        found: the page.
        shown: returns an item for JSON.
        key: returns the key of an item as text, for `after`.
    """
    turn, items = Turn(), []
    for item in found.items:
        turn.yield_if_due()
        items.append(shown(item))
    return {"items": items, "after": None if found.after is None else key(found.after), "total": found.total}
