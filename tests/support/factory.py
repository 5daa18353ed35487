"""Factories behind fixtures that give a function: all that a test makes ends with it."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any


class Factory:
    """Called, it makes a thing; what it has made is ended when the `with` statement ends, in the order of making.

    Args:
        make: a class, or a function.
        end: takes a thing; its method `close` by default.
    """

    def __init__(self, make: Callable[..., Any], end: Callable[[Any], object] = methodcaller("close")) -> None:
        self._make, self._end = make, end
        self._made: list[Any] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._made.append(self._make(*arguments, **keywords))
        return self._made[-1]

    def __enter__(self) -> Factory:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._made:
            self._end(one)
