"""Errors as Spark shows them: with the whole traceback of Python in front. Ours are sentences, so they need none."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from smqrt.errors import SmqrtError

P = ParamSpec("P")
T = TypeVar("T")


def told(method: Callable[P, T]) -> Callable[P, T]:
    """Makes a method raise errors of smqrt without where they came from."""

    @wraps(method)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return method(*args, **keywords)
        except SmqrtError as error:
            raise error.with_traceback(None) from None

    return call
