"""`Deferred`: settled once, whoever asks and however it ends."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.broker.deferred import Deferred


class Guarded(Deferred[int]):
    """Counts how often it is released."""

    __slots__ = ("released",)

    def __init__(self) -> None:
        super().__init__()
        self.released = 0

    def _release(self) -> None:
        self.released += 1
        assert self.done


def seen_by(deferred: Deferred[int]) -> list[tuple[Any, Any]]:
    seen: list[tuple[Any, Any]] = []
    deferred.then(lambda value, error: seen.append((value, error)))
    return seen


def test_a_value_reaches_all_in_their_order() -> None:
    deferred: Deferred[int] = Deferred()
    seen = seen_by(deferred)
    deferred.then(lambda value, error: seen.append(("second", error)))
    assert (deferred.done, seen) == (False, [])
    deferred.resolve(7)
    deferred.then(lambda value, error: seen.append(("late", error)))
    assert seen == [(7, None), ("second", None), ("late", None)]
    assert (deferred.done, deferred.failed, deferred.result()) == (True, False, 7)


def test_an_error() -> None:
    deferred: Deferred[int] = Deferred()
    seen, error = seen_by(deferred), ValueError("no")
    deferred.reject(error)
    assert (deferred.failed, seen) == (True, [(None, error)])
    with pytest.raises(ValueError, match="no"):
        deferred.result()


@pytest.mark.parametrize("first", range(3))
def test_the_first_end_counts(first: int) -> None:
    deferred = Guarded()
    seen = seen_by(deferred)
    ends = [lambda: deferred.resolve(1), lambda: deferred.reject(OSError()), deferred.cancel]
    ends.pop(first)()
    before = list(seen)
    for end in ends:
        end()
    assert (deferred.done, deferred.released, seen) == (True, 1, before)


def test_a_cancelled_deferred_calls_no_callback() -> None:
    deferred = Guarded()
    seen = seen_by(deferred)
    deferred.cancel()
    deferred.resolve(1)
    assert (seen, deferred.failed, deferred.released) == ([], False, 1)


def test_it_is_released_before_its_continuations() -> None:
    deferred = Guarded()
    order: list[int] = []
    deferred.then(lambda value, error: order.append(deferred.released))
    deferred.resolve(1)
    assert order == [1]


def test_a_continuation_that_fails_leaves_no_one_out() -> None:
    deferred: Deferred[int] = Deferred()

    def broken(value: Any, error: Any) -> None:
        raise KeyError(value)

    deferred.then(broken)
    seen = seen_by(deferred)
    with pytest.raises(KeyError):
        deferred.resolve(3)
    assert seen == [(3, None)]


def test_settled_from_within_a_continuation() -> None:
    first: Deferred[int] = Deferred()
    second: Deferred[int] = Deferred()
    first.then(lambda value, error: first.resolve(2))
    first.then(lambda value, error: second.resolve(value))
    first.resolve(1)
    assert (first.result(), second.result()) == (1, 1)
